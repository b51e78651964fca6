"""One network over many hosts, through Ray: training, serving and restarts."""
