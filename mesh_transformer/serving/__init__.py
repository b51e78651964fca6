"""Serving: continuous batching, the HTTP interface, its web page, and an interactive prompt."""
