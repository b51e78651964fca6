"""Benchmarks on the available devices, and memory and speed estimates for other devices."""
