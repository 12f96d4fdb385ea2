"""Floor 5: the training loops.

Calling this package (`reinforge.train("config.yaml")`) runs a configuration.
"""

from reinforge import _make_callable

_make_callable(__name__)
