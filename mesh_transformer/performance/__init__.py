"""Benchmarks on devices that are present, and plans for devices that need not be."""
