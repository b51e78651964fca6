"""The optimizer, the training step, the training loop and the metrics of a run."""
