"""Every random draw comes from a hash of what it is for, so nothing depends on scheduling or on
what a crash loses.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence


def seed_of(*parts: object) -> int:
    """A 63-bit seed from (run seed, step, sample uid, purpose, ...).

    >>> seed_of(0, "shuffle", 1) == seed_of(0, "shuffle", 1)
    True
    >>> seed_of(0, "ab", "c") == seed_of(0, "a", "bc")
    False
    """
    text = "\x1f".join(f"{type(p).__name__}:{p}" for p in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def tokens_hash(completions: Sequence[Sequence[int] | memoryview]) -> str:
    """A name for these exact ids: what was answered to them is answered to no others."""
    return hashlib.sha256(json.dumps([list(c) for c in completions]).encode()).hexdigest()[:32]


def answers_hash(completions: Sequence[Sequence[int] | memoryview]) -> str:
    """Another name for these exact ids, in half the time: a GPU waits for it while long answers are
    scored. Ids in memory, 64 bits each, are not even looked at one by one.
    """
    total = hashlib.blake2b(digest_size=16)
    for ids in completions:
        total.update(len(ids).to_bytes(8, "little"))
        total.update(ids if isinstance(ids, memoryview) else array("q", ids))
    return total.hexdigest()
