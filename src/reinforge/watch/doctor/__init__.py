"""What speaks against a run, and why: rules over its history, and one ranked first cause."""
