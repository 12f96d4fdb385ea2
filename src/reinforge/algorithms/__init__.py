"""Floor 0: algorithms as pure functions on tensors.

An algorithm is (advantage, surrogate, correction, reduce) and a row of `table.py`.

Nothing is imported here, so that `reinforge.algorithms.catalogue` can be read without torch.
"""
