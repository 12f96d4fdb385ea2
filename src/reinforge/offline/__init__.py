"""Floor 7: what is done with a trained model: evaluation, generation to a file, labels, export."""
