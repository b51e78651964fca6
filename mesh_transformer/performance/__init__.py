"""Plans without devices, and benchmarks with them."""
