"""What several keys of a library make together here: which algorithm, how large a batch.

What a key alone means stands in its table.
"""
