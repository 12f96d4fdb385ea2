"""Floor 5: the training loops, and what a run is beside its steps."""
