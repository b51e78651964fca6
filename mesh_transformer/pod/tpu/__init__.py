"""TPU VMs: creating them, connecting to their hosts, installing there, and deleting them."""
