"""Device mesh, array layouts, collectives, and a table of accelerators."""
