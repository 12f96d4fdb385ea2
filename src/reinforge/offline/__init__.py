"""Floor 7: what is done with a trained model: generation to a file, labels, export."""
