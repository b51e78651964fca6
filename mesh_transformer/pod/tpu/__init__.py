"""Create TPU VMs, connect to their hosts, install the package on the hosts, and delete the VMs."""
