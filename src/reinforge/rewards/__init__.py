"""Floor 2: rewards.

A reward scores completions; several are combined by weight. None means "could not be scored".
"""
