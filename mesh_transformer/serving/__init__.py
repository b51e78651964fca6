"""Serving: continuous batching, an HTTP server with a web page, and an interactive prompt."""
