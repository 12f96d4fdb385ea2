"""Which settings go together: the compatibility tables and the rules beside them.

`table.py` says what a table is made of. `backends.py`, `engines.py`, `asynchrony.py` and
`algorithms.py` are the tables; `check.py` holds a configuration against all of them, `page.py`
makes the docs page from them, and `machine.py` looks for what must be installed. `generators.py`
says which ranks generate.
"""
