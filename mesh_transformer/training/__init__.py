"""The optimizer, the train step, the training loop and its metrics."""
