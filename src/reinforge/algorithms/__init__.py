"""Floor 0: algorithms as pure functions on tensors.

`catalogue.py` says what every algorithm is. A policy gradient is made of `parts/` (advantage,
surrogate, correction, reduce), the others are one of the `losses/`; `build.py` puts a row of the
catalogue together, and `Algorithm` is what a training loop gets.

Nothing is imported here, so that `reinforge.algorithms.catalogue` can be read without torch.
"""
