"""Many hosts as one network, by Ray."""
