"""The parts that policy gradients are made of: pure functions, and the data that they take."""
