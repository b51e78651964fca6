"""The command-line scripts and their arguments."""
