"""Lists of attacks, for the tests and for `benchmarks/attacks.py`: plain data, imported without
pytest.

A list is a module here with what is tried and what must come of it. `benchmarks/attacks.py` says
how each is run.
"""
