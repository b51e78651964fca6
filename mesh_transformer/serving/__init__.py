"""The server: continuous batching, the HTTP interface over it, and a web page."""
