"""Benchmarks on the devices present, and memory and speed estimates for other devices."""
