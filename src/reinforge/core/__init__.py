"""Floor 0: the nouns (Sample, Group, Batch) and the contracts (Engine, Backend, Env).

Nothing here knows an algorithm.
"""
