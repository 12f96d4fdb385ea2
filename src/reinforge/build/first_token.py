"""The first token in which a sample of two runs differs: from rollouts that they kept, or from the
step done again in both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from reinforge.build.replay import go, plan_replay, scratch_directory, with_kept_rollouts
from reinforge.core.errors import InputError
from reinforge.core.sample import Sample
from reinforge.core.token_text import token_text
from reinforge.loops.parting import DivergencePoint
from reinforge.models.load import load_tokenizer
from reinforge.rollout.kept import KeptRollouts

CONTEXT = 12  # tokens before the first one that differs


@dataclass(frozen=True)
class TokenDifference:
    """Where a sample of two runs differs. `first_token` makes it."""

    position: int  # among the sampled tokens, from 0
    tokens: tuple[str, str]  # of the two runs; nothing where an answer has ended
    logprobs: tuple[float | None, float | None]
    context: str  # what stands before


def first_token(
    first: Path,
    second: Path,
    parting: DivergencePoint,
    *,
    replayed: bool = False,
    progress: Callable[[int], None] = lambda step: None,
) -> TokenDifference | None:
    """None: the sample is the same token by token and log-prob by log-prob, or nobody kept it and
    it is not to be `replayed`.
    """
    ours, theirs = (_sample(run, parting, replayed, progress) for run in (first, second))
    if ours is None or theirs is None:
        return None
    position = 0
    while (one := _at(ours, position)) == (other := _at(theirs, position)):
        if one is None:
            return None
        position += 1
    plan = plan_replay(first, parting.step, given=True)
    tokenizer = load_tokenizer(plan.stretches[-1].config.model)
    known = ours if one is not None else theirs
    place = int(known.trained.nonzero()[position])
    return TokenDifference(
        position=position,
        tokens=(
            "" if one is None else token_text(tokenizer, [one[0]]),
            "" if other is None else token_text(tokenizer, [other[0]]),
        ),
        logprobs=(None if one is None else one[1], None if other is None else other[1]),
        context=token_text(tokenizer, known.tokens[max(0, place - CONTEXT) : place].tolist()),
    )


def _at(sample: Sample, position: int) -> tuple[int, float] | None:
    """Token and log-prob of a sampled place; None after the last."""
    places = sample.trained.nonzero()
    if position >= len(places):
        return None
    place = int(places[position])
    return int(sample.tokens[place]), float(sample.logprobs[place])


def _sample(
    run: Path, parting: DivergencePoint, replayed: bool, progress: Callable[[int], None]
) -> Sample | None:
    kept = KeptRollouts(run).samples(parting.step)
    if kept is None and replayed:
        with scratch_directory() as folder:
            go(plan_replay(run, parting.step), folder, step=progress, change=with_kept_rollouts)
            kept = KeptRollouts(folder).samples(parting.step)
    if kept is None or parting.what.sample is None:
        return None
    own = kept.get(parting.what.group, [])
    if parting.what.sample >= len(own):
        raise InputError(
            f"{run} has {len(own)} samples in group {parting.what.group}.",
            where=str(run),
            fix="Its rollouts are not those of its anchors: remove the folder rollouts.",
        )
    return own[parting.what.sample]
