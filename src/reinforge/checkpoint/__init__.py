"""Floor 1: checkpoints that are atomic, hashed and complete (`store`), and the one owner of a run
directory (`lock`).
"""
