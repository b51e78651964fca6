"""Text generation: sampling, decoding with a KV cache, and batches of independent rows."""
