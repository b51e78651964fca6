"""Access to files in local folders and in buckets, and locks on model folders."""
