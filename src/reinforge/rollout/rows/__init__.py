"""What chooses the rows of a step: the sampler, what it knows of them, and the replay buffer."""
