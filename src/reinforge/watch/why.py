"""How rewards became advantages became loss, in one step of a run: what `reinforge runs why` shows.

Reads groups.jsonl, which training writes with the numbers that it used (loops/trace.py), and checks
them with plain arithmetic: an advantage that does not follow from its rewards is said.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reinforge.core.errors import InputError
from reinforge.watch.logs import read_json, read_lines
from reinforge.watch.runs import is_run

FILE = "groups.jsonl"
WHEN = "every run.log.samples_every steps, and the last"  # a step is recorded
# advantages that the rewards of a step decide, so that they can be checked
FORMULAS = ("group_relative", "leave_one_out", "batch_baseline", "greedy_baseline")
CLOSE = 1e-4  # relative, and absolute below 1: numbers are recorded with seven digits
Record = Mapping[str, Any]

NO_SIGNAL = {
    "unscored": "no reward could be computed",
    "error": "the rollout failed",
    "overlong": "cut off by the token limit and masked",
    "equal": "all rewards of the group are equal",
    "zero": "its advantage is 0",
    "not_picked": "not picked for training",
    "empty": "no token of it was sampled",
    "dropped": "replaced by dynamic sampling",
    "stale": "sampled too long ago",
}


@dataclass(frozen=True)
class GroupStatistics:
    """Of the scored episodes of a group, as the algorithm's settings say."""

    n: int
    mean: float
    std: float
    ddof: int


def read_step(run_dir: Path, step: int | None = None) -> dict[str, Any]:
    """The record of one step, the last one unless told; or an error that says which steps there
    are.
    """
    run_dir = Path(run_dir)
    if not is_run(run_dir):
        raise InputError(
            "this is not a run directory (no metrics.jsonl and config.json).",
            where=str(run_dir),
            fix="`reinforge runs list` shows the runs.",
        )
    records = {int(line["step"]): line for line in read_lines(run_dir / FILE)}
    there = list(records)
    if there:
        found = records.get(there[-1] if step is None else step)
        if found is not None:
            return {**found, "steps_recorded": ranges(there)}
        raise InputError(
            f"step {step} was not recorded.",
            where=str(run_dir / FILE),
            fix=f"There are: {ranges(there)} ({WHEN}).",
        )
    log = read_json(run_dir / "config.json").get("run", {}).get("log", {})
    if log.get("samples_every") == 0 or log.get("groups") == 0:
        fix = "Set run.log.samples_every and run.log.groups above 0; a resumed run may change them."
    else:
        fix = "Runs that sample answers record groups, from their first step on."
    raise InputError("no groups were recorded.", where=str(run_dir / FILE), fix=fix)


def ranges(steps: Sequence[int]) -> str:
    """
    >>> ranges([1, 11, 21, 31, 41]), ranges([1, 2, 5]), ranges([7])
    ('1, 11, ..., 41', '1, 2, 5', '7')
    >>> ranges([1, 11, 21, 31, 35])
    '1, 11, ..., 31, 35'
    """
    *others, last = steps
    if len(others) > 2 and len({b - a for a, b in itertools.pairwise(others)}) == 1:
        even = last - others[-1] == others[1] - others[0]
        return f"{others[0]}, {others[1]}, ..., {'' if even else f'{others[-1]}, '}{last}"
    return ", ".join(map(str, steps))


# ---- numbers ----


def totals_of(group: Record) -> dict[str, float]:
    """What the advantage compares, by episode: the reward, and the rewards of single tokens."""
    found: dict[str, float] = {}
    for sample in group["samples"]:
        if isinstance(sample.get("reward"), int | float):
            found.setdefault(sample["episode"], sample["reward"])
            found[sample["episode"]] += sample.get("token_reward", 0.0)
    return found


def statistics(record: Record, group: Record) -> GroupStatistics:
    values = list(totals_of(group).values())
    ddof = 0 if _settings(record).get("std") == "population" else 1
    if not values:
        return GroupStatistics(0, math.nan, math.nan, ddof)
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return GroupStatistics(len(values), mean, math.sqrt(squares / max(1, len(values) - ddof)), ddof)


def _settings(record: Record) -> Mapping[str, Any]:
    found: Mapping[str, Any] = record["algorithm"].get("settings", {})
    return found


def expected(record: Record, group: Record) -> dict[str, float] | None:
    """The advantage of every episode by the formula, from the recorded rewards; None where they do
    not decide it.
    """
    if "advantages" in record.get("changed", []):
        return None
    settings = _settings(record)
    totals = totals_of(group)
    part = record["algorithm"]["parts"].get("advantage")
    whiten = settings.get("whiten")
    if part == "group_relative":
        found = _group_relative(record, group, totals)
    elif part == "leave_one_out" and not whiten:
        found = _leave_one_out(record, group, totals)
    elif part == "batch_baseline":
        found = _batch_baseline(record, totals)
    elif part == "greedy_baseline":
        found = _greedy_baseline(group, totals)
    else:
        return None
    bound = settings.get("advantage_clip")
    if bound is None:
        return found
    return {name: min(max(value, -bound), bound) for name, value in found.items()}


def _signal(totals: Mapping[str, float]) -> bool:
    return len(set(totals.values())) > 1


def _group_relative(record: Record, group: Record, totals: Mapping[str, float]) -> dict[str, float]:
    settings = _settings(record)
    stats = statistics(record, group)
    if not _signal(totals):
        return dict.fromkeys(totals, 0.0)
    spread = {"group": stats.std, "batch": record["batch"].get("std", math.nan)}
    scale = settings.get("scale")
    divisor = spread[scale] + settings.get("eps", 0.0) if scale in spread else 1.0
    return {name: (value - stats.mean) / divisor for name, value in totals.items()}


def _leave_one_out(record: Record, group: Record, totals: Mapping[str, float]) -> dict[str, float]:
    stats = statistics(record, group)
    if not _signal(totals):
        return dict.fromkeys(totals, 0.0)
    return {name: (value - stats.mean) * stats.n / (stats.n - 1) for name, value in totals.items()}


def _batch_baseline(record: Record, totals: Mapping[str, float]) -> dict[str, float]:
    batch = record["batch"]
    settings = _settings(record)
    if not batch.get("std"):
        return dict.fromkeys(totals, 0.0)
    divisor = batch["std"] + settings.get("eps", 0.0) if settings.get("scale") == "batch" else 1.0
    return {name: (value - batch["mean"]) / divisor for name, value in totals.items()}


def _greedy_baseline(group: Record, totals: Mapping[str, float]) -> dict[str, float]:
    baseline = {s["episode"]: s.get("baseline") for s in group["samples"]}
    return {
        name: value - baseline[name] for name, value in totals.items() if baseline[name] is not None
    }


def advantage_of(sample: Record) -> float | None:
    """One number; the mean where tokens differ; None where there is none."""
    found = sample.get("advantage")
    if isinstance(found, Mapping):
        found = found.get("mean")
    return found if isinstance(found, int | float) else None


def _differs(one: float, other: float) -> bool:
    return not abs(one - other) <= CLOSE * max(1.0, abs(other))


def wrong_advantages(record: Record, group: Record) -> list[dict[str, Any]]:
    """Samples whose recorded advantage is not what the formula gives."""
    want = expected(record, group)
    if want is None or group["status"] not in ("trained", "replayed"):
        return []
    found = []
    for i, sample in enumerate(group["samples"]):
        recorded = advantage_of(sample)
        formula = want.get(sample["episode"])
        if recorded is not None and formula is not None and _differs(recorded, formula):
            found.append({"sample": i, "recorded": recorded, "expected": formula})
    return found


def fitting_formula(record: Record, group: Record) -> str:
    """Another formula, or another setting, that does give the recorded advantages: a hint at what
    was computed instead. Nothing where none does, or where too few samples tell.
    """
    recorded = {s["episode"]: a for s in group["samples"] if (a := advantage_of(s)) is not None}
    if len(set(recorded.values())) < 2:
        return ""
    scales = ("group", "batch", "none")
    for part, scale, std in itertools.product(FORMULAS, scales, ("sample", "population")):
        settings = {**_settings(record), "scale": scale, "std": std}
        algorithm = {"parts": {"advantage": part}, "settings": settings}
        want = expected({**record, "algorithm": algorithm}, group)
        if want and not any(_differs(a, want.get(name, math.nan)) for name, a in recorded.items()):
            return f"{part} with scale {scale}, std {std}"
    return ""


def implied_baseline(record: Record, group: Record) -> str:
    """What was taken for the group's mean and spread, where advantages are (r - b) / d.

    Two samples with different rewards decide b and d, and the others must agree.
    """
    totals = totals_of(group)
    recorded = {s["episode"]: a for s in group["samples"] if (a := advantage_of(s)) is not None}
    points = sorted({(totals[name], a) for name, a in recorded.items() if name in totals})
    if len(points) < 2 or points[0][0] == points[-1][0] or points[0][1] == points[-1][1]:
        return ""
    (low, low_advantage), (high, high_advantage) = points[0], points[-1]
    divisor = (high - low) / (high_advantage - low_advantage)
    baseline = low - low_advantage * divisor
    if any(_differs(a, (reward - baseline) / divisor) for reward, a in points):
        return ""
    stats = statistics(record, group)
    said = (
        f"these advantages are (r - {baseline:.4g}) / {divisor:.4g}; the rewards have mean"
        f" {stats.mean:.4g} and std {stats.std:.4g}"
    )
    by_tokens = mean_by_tokens(group)
    if by_tokens is not None and not _differs(baseline, by_tokens):
        said += f". {by_tokens:.4g} is their mean weighted by tokens"
    return said


def mean_by_tokens(group: Record) -> float | None:
    """The mean reward of a group in which an answer counts as often as it has tokens."""
    scored = [s for s in group["samples"] if isinstance(s.get("reward"), int | float)]
    tokens = math.fsum(s.get("tokens", 0) for s in scored)
    if not tokens:
        return None
    return math.fsum(s["reward"] * s.get("tokens", 0) for s in scored) / tokens


def wrong_rewards(record: Record, group: Record) -> list[int]:
    """Samples whose total is not the weighted sum of their components. Components that are
    normalised by what earlier steps scored do not add up, and are left to the words.
    """
    if "rewards" in record.get("changed", []):
        return []
    weights = {"overlong": 1.0, **record["weights"]}
    found = []
    for i, sample in enumerate(group["samples"]):
        reward = sample.get("reward")
        parts = {
            name: value
            for name, value in sample["components"].items()
            if isinstance(value, int | float)
        }
        if isinstance(reward, int | float) and parts and parts.keys() <= weights.keys():
            total = math.fsum(weights[name] * value for name, value in parts.items())
            if _differs(reward, total):
                found.append(i)
    return found


# ---- words ----


def findings(record: Record, group: Record) -> list[str]:
    """What stands out in a group, the gravest first."""
    samples = group["samples"]
    found = []
    name = record["algorithm"]["name"]
    if changed := record.get("changed"):
        found.append(f"the program that ran this step has set its {' and '.join(changed)}")
    if wrong := wrong_advantages(record, group):
        first = wrong[0]
        found.append(
            f"recorded advantage differs from {name}'s formula on these rewards in {len(wrong)} of"
            f" {len(samples)} samples: sample {first['sample']} has {first['recorded']:.4g}, the"
            f" formula gives {first['expected']:.4g}"
        )
        if fits := fitting_formula(record, group):
            found.append(f"the recorded advantages are those of {fits}")
        elif implied := implied_baseline(record, group):
            found.append(implied)
    if odd := wrong_rewards(record, group):
        found.append(
            f"the reward of {_samples(odd)} is not the weighted sum of its components: it is"
            " normalised by earlier steps, or wrong"
        )
    found += _idle(record, group)
    masked = Counter(s["no_signal"] for s in samples if s.get("no_signal"))
    for kind in ("overlong", "unscored", "error"):
        if 0 < masked[kind] < len(samples) or (masked[kind] and kind == "overlong"):
            found.append(f"{masked[kind]} of {len(samples)} samples: {NO_SIGNAL[kind]}")
    cut = sum(s["stop"] == "length" for s in samples)
    if cut and not masked["overlong"]:
        found.append(f"{cut} of {len(samples)} samples were cut off by the token limit, and count")
    found += _from_training(record, samples)
    return found


def where_from(record: Record, number: str) -> str | None:
    """The functions to look at when a number is wrong, as the run wrote them down."""
    functions = record.get("computed_by", {}).get(number)
    return "; ".join(functions) if functions else None


def _samples(places: Sequence[int]) -> str:
    return f"sample{'s' if len(places) > 1 else ''} {', '.join(map(str, places))}"


def _idle(record: Record, group: Record) -> list[str]:
    """Why the whole group taught nothing."""
    samples = group["samples"]
    kinds = {s.get("no_signal") for s in samples}
    if group["status"] == "dropped":
        return ["dynamic sampling dropped this group: its rewards do not differ"]
    if group["status"] == "stale":
        return ["this group was not trained: it was sampled too long ago"]
    if not record.get("policy_trained", True):
        return ["only the critic was trained in this step"]
    if kinds == {"equal"} or (kinds and kinds <= {"equal", "unscored", "overlong", "error"}):
        scored = totals_of(group)
        if not scored:
            return ["none of its samples could be scored: this group teaches nothing"]
        if not _signal(scored):
            how_many = "the only reward" if len(scored) == 1 else f"all {len(scored)} rewards"
            verb = "has nothing to be compared with" if len(scored) == 1 else "are equal"
            return [f"{how_many} {verb}: this group teaches nothing"]
    return []


def _from_training(record: Record, samples: Sequence[Record]) -> list[str]:
    found = []
    clipped = [i for i, s in enumerate(samples) if s.get("clipped")]
    if clipped:
        found.append(f"{_samples(clipped)}: tokens were clipped in the first update")
    old = [i for i, s in enumerate(samples) if len(set(s.get("versions", []))) > 1]
    if old:
        found.append(f"{_samples(old)} were sampled by more than one version of the weights")
    if record.get("skipped"):
        found.append("the gradient of this step was not finite: the weights stayed as they were")
    return found


# ---- what is shown ----


def pull(group: Record) -> float:
    """How much a group moves the policy: the sizes of its samples' parts of the loss."""
    parts = [s["loss"] for s in group["samples"] if isinstance(s.get("loss"), int | float)]
    return math.fsum(map(abs, parts))


def overview(record: Record) -> list[dict[str, Any]]:
    """One entry per recorded group: those with something wrong first, then the largest pull."""
    found = []
    for place, group in enumerate(record["groups"]):
        stats = statistics(record, group)
        advantages = [a for s in group["samples"] if (a := advantage_of(s)) is not None]
        said = findings(record, group)
        found.append(
            {
                "group": place,
                "name": group["group"],
                "row": group["row"],
                "status": group["status"],
                "samples": len(group["samples"]),
                "mean": stats.mean,
                "std": stats.std,
                "advantages": [min(advantages), max(advantages)] if advantages else None,
                "pull": pull(group),
                "wrong": bool(wrong_advantages(record, group)),
                "checked": is_checked(record, group),
                "findings": said,
            }
        )
    return sorted(found, key=lambda entry: (not entry["wrong"], -entry["pull"], -entry["std"]))


def is_checked(record: Record, group: Record) -> bool:
    """Whether the rewards decide the advantages of a group, so that they were compared."""
    return expected(record, group) is not None and group["status"] in ("trained", "replayed")


def verdict(record: Record) -> str:
    """How many of the recorded groups have advantages that follow from their rewards."""
    checked = [i for i, group in enumerate(record["groups"]) if is_checked(record, group)]
    wrong = [i for i in checked if wrong_advantages(record, record["groups"][i])]
    if not checked:
        return ""
    if not wrong:
        return f"advantages follow from the rewards in all {len(checked)} groups that were checked"
    return (
        f"advantages do NOT follow from the rewards in {len(wrong)} of {len(checked)} groups that"
        f" were checked: {', '.join(map(str, wrong))}"
    )


def find_group(record: Record, wanted: str) -> dict[str, Any]:
    """By its number in the overview, its name, or the id of its row."""
    groups = record["groups"]
    for group in groups:
        if wanted in (group["group"], group["row"]):
            return group
    if wanted.isdigit() and int(wanted) < len(groups):
        return groups[int(wanted)]
    names = ", ".join(f"{i} ({group['group']})" for i, group in enumerate(groups))
    raise InputError(
        f"step {record['step']} has no group {wanted!r}.",
        where="--group",
        fix=f"There are: {names}.",
    )


def find_sample(group: Record, wanted: str) -> dict[str, Any]:
    """By its number in the group, or its uid."""
    samples = group["samples"]
    for sample in samples:
        if wanted == sample["uid"]:
            return sample
    if wanted.isdigit() and int(wanted) < len(samples):
        return samples[int(wanted)]
    raise InputError(
        f"group {group['group']} has no sample {wanted!r}.",
        where="--sample",
        fix=f"There are: 0 to {len(samples) - 1}.",
    )


def explain_group(record: Record, group: Record) -> dict[str, Any]:
    """Everything that is recorded of one group, with its statistics, the check and the words."""
    stats = statistics(record, group)
    want = expected(record, group)
    return {
        "step": record["step"],
        "algorithm": record["algorithm"],
        "computed_by": record.get("computed_by", {}),
        "weights": record["weights"],
        "minibatches": record["minibatches"],
        **group,
        "n": stats.n,
        "mean": stats.mean,
        "std": stats.std,
        "ddof": stats.ddof,
        "eps": _settings(record).get("eps"),
        "checked": is_checked(record, group),
        "expected": want,
        "wrong": wrong_advantages(record, group),
        "findings": findings(record, group),
    }


def headline(record: Record) -> str:
    """How many groups the step had, and what became of those that taught nothing."""
    shown = len(record["groups"])
    whole = record["groups_of_step"]
    said = f"step {record['step']}: {whole} group{'s' if whole != 1 else ''}"
    if shown < whole:
        said += f", {shown} of them recorded (run.log.groups)"
    for kind, count in record["idle_groups"].items():
        said += f"; {count} of the {whole} without signal: {NO_SIGNAL.get(kind, kind)}"
    return said


def counts(record: Record, group: Record) -> str:
    """The counts behind the denominators, of the optimizer batch that the group was in."""
    places = [s["minibatch"] for s in group["samples"] if "minibatch" in s]
    if not places or places[0] >= len(record["minibatches"]):
        return ""
    of = record["minibatches"][places[0]]
    return (
        f"N = {of['tokens']} tokens, n = {of['sequences']} sequences, limit ="
        f" {of['max_length']} tokens, {of['rows']} rows"
    )
