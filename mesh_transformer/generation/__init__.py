"""Text generation: sampling, cached decoding and running batches."""
