"""Losses on record sets, and scores on lm-eval tasks."""
