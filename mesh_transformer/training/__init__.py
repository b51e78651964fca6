"""The optimizer, the training step, the training loop and its metrics."""
