"""TPU VMs: creating, reaching, installing on and deleting them."""
