"""Training and serving one model on many hosts with Ray, with restarts after host failures."""
