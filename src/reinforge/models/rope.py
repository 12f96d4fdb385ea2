"""Rotary embeddings whose frequencies follow the length of a sequence (dynamic NTK, LongRoPE: Phi-3
and its kin).

transformers chooses the frequencies by the longest position of a forward. In a pack that is a
neighbour's; in a cache the keys of early tokens were made with others than those of late ones. Up
to the length that the model was first trained on the frequencies are constant, so that is how far
such a model goes here: `reach` is the limit, `hold_still` keeps the frequencies of short sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from reinforge.core.errors import InputError


def context(config: Any) -> int | None:
    """The longest sequence that a model with this configuration computes here; None: it
    names none.
    """
    named = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    limits = [int(limit) for limit in (named, reach(config)) if limit]
    return min(limits, default=None)


def reach(config: Any) -> int | None:
    """The most tokens that a sequence may have before its rotary frequencies change; None: they
    never do.
    """
    limits = [
        _limit(config, part)
        for part in _parts(config)
        if moves(part.get("rope_type", part.get("type")))
    ]
    return min(limits, default=None)


def note(config: Any) -> str | None:
    """For people: that a model goes less far here than its configuration says, and why; None: it
    does not.
    """
    limit = reach(config)
    if limit is None or limit >= int(config.max_position_embeddings):
        return None
    return (
        f"sequences may have {limit} tokens, not the {config.max_position_embeddings} that the"
        f" model names: past {limit} its rotary embedding depends on the length of each sequence,"
        " which packs and caches do not know"
    )


def check(config: Any, max_length: int | None) -> None:
    """Refuses rows that may be longer than the model reaches."""
    limit = reach(config)
    if limit is not None and max_length is not None and max_length > limit:
        raise InputError(
            f"{max_length} tokens are more than the {limit} up to which this model's rotary"
            " embedding is the same for every sequence.",
            where="data.max_length",
            fix=f"Set it to {limit} or less; data.length says what becomes of longer rows.",
        )


def moves(kind: Any) -> bool:
    """Whether frequencies of this type follow the length of a sequence."""
    return isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")


def _parts(config: Any) -> Iterator[dict[str, Any]]:
    """The rotary settings of a configuration: one, or one for each type of layer."""
    found = getattr(config, "rope_parameters", None) or {}
    nested = [part for part in found.values() if isinstance(part, dict)]
    yield from nested or [found]


def _limit(config: Any, part: dict[str, Any]) -> int:
    longest = int(config.max_position_embeddings)
    if part.get("rope_type") != "longrope":
        return longest
    return int(
        part.get("original_max_position_embeddings")
        or getattr(config, "original_max_position_embeddings", None)
        or longest
    )


def hold_still(trunk: Any) -> None:
    """Rotary modules keep the frequencies of short sequences.

    (It also saves asking a GPU for the longest position in every forward.)
    """
    for part in trunk.modules():
        kind = getattr(part, "rope_type", None)
        kinds = kind if isinstance(kind, dict) else {"": kind}
        if not any(moves(each) for each in kinds.values()):
            continue
        still = {name: "default" if moves(each) else each for name, each in kinds.items()}
        part.rope_type = still if isinstance(kind, dict) else still[""]
        buffers = dict(part.named_buffers(recurse=False))
        for name, original in buffers.items():
            if name.endswith("original_inv_freq"):  # a long sequence may have come before
                buffers[name.replace("original_", "")].data = original.detach().clone()
