"""Floor 1: where rows come from, how they become tokens, and which comes next.

Importing this imports no torch.
"""
