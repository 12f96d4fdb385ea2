"""Floor 1: models.

Loading, adapters, attention, and the ONE forward that yields hidden states and log-probs.
"""
