"""Which of several engines gets a request: the one that has computed its beginning already.

The next turn of an episode begins with the whole turn before, and the samples of a group begin with
the same prompt. The engine that has these tokens in its cache reads only what is new; any other
reads all of them again.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b

KEPT = 1 << 16  # sequences whose place is remembered
# A request leaves its place when that has more completions under way than the idlest one, by this
# many and by half: what is read anew then costs less than waiting.
SPARE = 32
RATIO = 1.5


class PrefixRouter:
    """Remembers where sequences are. Engines over several replicas have one: they ask it for a
    place, tell it what was computed there, and let it forget with every update of the weights,
    which empties the caches.

    Only whole sequences count, a prompt or a prompt with its answer: a system prompt that all
    requests begin with does not send them all to one place.

    >>> router = PrefixRouter()
    >>> router.place([1, 2], {0: 3, 1: 0})  # nobody knows it: the idlest
    1
    >>> router.add([1, 2], 1)
    >>> router.place([1, 2, 3], {0: 0, 1: 1})  # goes on from what 1 has
    1
    >>> router.place([1, 5], {0: 0, 1: 1})
    0
    """

    def __init__(self, kept: int = KEPT):
        self.kept = kept  # 0: nothing is remembered, and the idlest gets everything
        self._places: OrderedDict[bytes, tuple[int, int]] = OrderedDict()  # place, length
        self._lengths: Counter[int] = Counter()

    def place(self, tokens: Sequence[int], loads: Mapping[int, int]) -> int:
        """Where a request goes. `loads`: the places that can take it, and how
        many completions each has under way.
        """
        idlest = min(loads, key=lambda at: (loads[at], at))
        known = self._known(tokens, loads)
        if known is None:
            return idlest
        most = max(loads[idlest] + SPARE, RATIO * loads[idlest])
        return known if loads[known] <= most else idlest

    def _known(self, tokens: Sequence[int], loads: Mapping[int, int]) -> int | None:
        """Where the longest sequence is that these tokens go on from."""
        raw = array("q", tokens).tobytes()
        found = None
        done = 0
        seen = blake2b(digest_size=16)
        for length in sorted(at for at in self._lengths if at <= len(tokens)):
            seen.update(raw[8 * done : 8 * length])
            done = length
            at = self._places.get(seen.copy().digest())
            if at is not None and at[0] in loads:
                found = at[0]
        return found

    def add(self, tokens: Sequence[int], place: int) -> None:
        """`place` has computed these tokens, or is about to."""
        if not self.kept:
            return
        mark = blake2b(array("q", tokens).tobytes(), digest_size=16).digest()
        if mark not in self._places:
            self._lengths[len(tokens)] += 1
        self._places[mark] = (place, len(tokens))
        self._places.move_to_end(mark)
        while len(self._places) > self.kept:
            self._drop(next(iter(self._places)))

    def forget(self, place: int | None = None) -> None:
        """What this place had is gone; None: what all had."""
        for mark in [m for m, (at, _) in self._places.items() if place in (None, at)]:
            self._drop(mark)

    def _drop(self, mark: bytes) -> None:
        _, length = self._places.pop(mark)
        self._lengths[length] -= 1
        if not self._lengths[length]:
            del self._lengths[length]
