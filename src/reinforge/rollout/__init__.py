"""Floor 4: rollouts. Turns rows into groups of samples."""
