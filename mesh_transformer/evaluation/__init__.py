"""Evaluation: losses on validation sets, and scores on lm-eval tasks."""
