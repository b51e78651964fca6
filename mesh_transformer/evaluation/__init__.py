"""Losses on record sets, and lm-eval tasks."""
