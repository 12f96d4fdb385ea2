"""What a cause of a mismatch means, in words: the sentence, the evidence, the setting to turn."""

from __future__ import annotations

from dataclasses import dataclass, field

from reinforge.build.mismatch_causes import MismatchCause, changed_parameters
from reinforge.build.mismatch_paths import PathComparison
from reinforge.build.readings import (
    FP8,
    LogprobReader,
    LogprobReading,
    first_other_choice,
    part_of,
)
from reinforge.config.schema import Config
from reinforge.core import routes
from reinforge.models.routing import differs


@dataclass(frozen=True)
class CauseWords:
    """A cause as people and `--json` are told it."""

    name: str
    what: str
    turn: str  # the setting to turn, or what to look at
    left: float  # nats per token that it leaves unexplained
    explained: float  # share of the difference
    evidence: list[str] = field(default_factory=list)


def words_of(cause: MismatchCause, reader: LogprobReader, config: Config) -> CauseWords:
    return WORDS[cause.name](cause, reader, config)


def words_of_path(paths: PathComparison, before: float, config: Config) -> CauseWords:
    """What only the engine's own path explains."""
    left = paths.told
    explained = 1 - left / before
    if config.rollout.cache_precision == FP8:
        return CauseWords(
            "dtype",
            "Keys and values in the engine's cache are in FP8, the trainer has none.",
            "rollout.cache_precision=model",
            left,
            explained,
        )
    first = paths.first
    where = f" from {first.operation} on" if first is not None else ", a little in every operation"
    return CauseWords(
        "numerics",
        f"The engine computes other numbers than the trainer{where}, of the same tokens.",
        "model.exact=true makes both the same in every bit",
        left,
        explained,
    )


def guess_of(cause: MismatchCause) -> str:
    """What was tried, in a few words."""
    reading = cause.reading
    match cause.name:
        case "dtype":
            return f"computed in {reading.precision}"
        case "temperature":
            return f"temperature {reading.temperature:.3g}"
        case "filter":
            return f"after {_filter_of(reading)}"
        case "template":
            return f"prompt {reading.prompt}"
        case "stale weights":
            return f"weights of version {reading.version}" + (
                f" in {reading.part}" if reading.part else ""
            )
    return "the experts of the engine" if reading.routed else "the trainer's own experts"


def _filter_of(reading: LogprobReading) -> str:
    if reading.top_p < 1:
        return f"top_p {reading.top_p:g}"
    return f"top_k {reading.top_k}" if reading.top_k else f"min_p {reading.min_p:g}"


def _told(
    cause: MismatchCause, what: str, turn: str, evidence: list[str] | None = None
) -> CauseWords:
    return CauseWords(cause.name, what, turn, cause.left, cause.explained, list(evidence or []))


def _dtype(cause: MismatchCause, reader: LogprobReader, config: Config) -> CauseWords:
    theirs = cause.reading.precision
    ours = reader.trainers.precision
    if theirs == FP8:
        what = f"The engine multiplies in FP8, the trainer computes in {ours}."
        turn = "rollout.precision=model, or train.precision=fp8"
    else:
        what = f"The engine computes in {theirs}, the trainer in {ours}."
        turn = f"model.dtype={theirs}, or {ours} in the engine"
        if config.rollout.engine != "native":
            turn += f" (engine.args: {{dtype: {ours}}})"
    return _told(cause, what, turn)


def _temperature(cause: MismatchCause, reader: LogprobReader, config: Config) -> CauseWords:
    theirs = f"{cause.reading.temperature:.3g}"
    ours = f"{config.rollout.temperature:.3g}"
    return _told(
        cause,
        f"The engine's log-probs are those of temperature {theirs}, the trainer's of {ours}"
        " (rollout.temperature).",
        f"rollout.temperature={theirs}, or log-probs after temperature in the engine"
        " (vLLM: logprobs-mode processed_logprobs)"
        if config.rollout.engine != "native"
        else f"rollout.temperature={theirs}, or see who changes the temperature of requests",
    )


def _filter(cause: MismatchCause, reader: LogprobReader, config: Config) -> CauseWords:
    return _told(
        cause,
        f"The engine's log-probs are those after {_filter_of(cause.reading)}: what the filter"
        " dropped is not counted.",
        "sample without filters in training (top_p 1, top_k off, min_p 0), or report log-probs"
        " before them",
    )


def _template(cause: MismatchCause, reader: LogprobReader, config: Config) -> CauseWords:
    name = cause.reading.prompt
    others = reader.prompts[name]
    evidence = []
    for sample, ids in zip(reader.samples, others, strict=True):
        if ids is not None:
            own = sample.tokens[: int(sample.trained.nonzero()[0])].tolist()
            at = next(
                (i for i, (a, b) in enumerate(zip(own, ids, strict=False)) if a != b),
                min(len(own), len(ids)),
            )
            evidence.append(
                f"prompt of {sample.uid}: {len(own)} tokens, the engine's {len(ids)}; the first"
                f" that differs is number {at}: {own[at : at + 3]} and {ids[at : at + 3]}"
            )
            break
    return _told(
        cause,
        f"The engine saw another prompt: {name}.",
        "give the engine token ids, or the same template and special tokens (model.chat_template,"
        " data.chat)",
        evidence,
    )


def _stale(cause: MismatchCause, reader: LogprobReader, config: Config) -> CauseWords:
    version = cause.reading.version
    assert version is not None
    claimed = int(reader.claimed.max())
    part = cause.reading.part
    changed = [
        name
        for name in changed_parameters(reader.weights[claimed], reader.weights[version])
        if not part or part_of(name) == part
    ]
    behind = claimed - version
    updates = f"{behind} update{'' if behind == 1 else 's'} behind" if behind > 0 else "ahead"
    begun = " (those that the run began with)" if version == 0 else ""
    whose = f"{part} in the engine is" if part else "The engine's weights are"
    evidence = []
    if changed:
        first = changed[0]
        gap = (reader.weights[claimed][first] - reader.weights[version][first]).abs().max()
        evidence.append(
            f"first parameter that differs: {first} (by up to {float(gap):.3g}; {len(changed)}"
            f" parameters differ)"
        )
    return _told(
        cause,
        f"{whose} {updates}: version {version}{begun}, and the samples say {claimed}.",
        "see that the engine gets the weights of every update"
        + (f": {part} is left out" if part else "")
        + " (engine.tolerance stops a run where they do not arrive)",
        evidence,
    )


def _routing(cause: MismatchCause, reader: LogprobReader, config: Config) -> CauseWords:
    evidence = []
    other = total = 0
    first = None
    for sample, ours in zip(reader.samples, reader.chosen(reader.trainers), strict=True):
        if routes.NAME not in sample.extras:
            continue
        theirs = routes.wide(sample.extras[routes.NAME])
        known = (theirs != routes.OPEN).all(-1)
        other += int((differs(ours, theirs) & known).sum())
        total += int(known.sum())
        place = first_other_choice(ours, theirs)
        if place is not None and first is None:
            token, block = place
            first = (
                f"first in {sample.uid}, token {token}, block {block}: engine"
                f" {sorted(theirs[token, block].tolist())}, trainer"
                f" {sorted(ours[token, block].tolist())}"
            )
    if total:
        evidence.append(f"{other} of {total} choices are of other experts ({other / total:.1%})")
    if first is not None:
        evidence.append(first)
    return _told(
        cause,
        "Tokens went to other experts in the engine than in the trainer.",
        "train.router_replay=on",
        evidence,
    )


WORDS = {
    "dtype": _dtype,
    "temperature": _temperature,
    "filter": _filter,
    "template": _template,
    "stale weights": _stale,
    "routing": _routing,
}
