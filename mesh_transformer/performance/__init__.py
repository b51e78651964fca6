"""Benchmarks of the devices that are present, and plans for devices that need not be present."""
