"""Devices, array layouts, the hardware table, and what a program may ask of its devices."""
