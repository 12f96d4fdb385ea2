"""Floor 5: evaluation on held-out rows, with confidence intervals."""
