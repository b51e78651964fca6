"""Training and serving one network on many hosts with Ray, with restarts after host failures."""
