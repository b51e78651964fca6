"""Tokens after a prompt: sampling, decoding and running batches."""
