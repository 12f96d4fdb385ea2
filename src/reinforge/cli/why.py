"""`reinforge runs why`: prints what `watch/why.py` found, as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reinforge.cli.show import print_mapping, print_table, print_text
from reinforge.core.visible import visible
from reinforge.watch import why

ANSWER = 40  # characters of an answer in the table


def print_overview(record: Mapping[str, Any]) -> None:
    """One line per group: wrong ones first, then those that move the policy most."""
    print_text(why.headline(record))
    print_text(_formulas(record))
    print()
    entries = why.overview(record)
    print_table([_group_line(entry) for entry in entries], empty="no group recorded")
    said = [f"group {entry['group']}: {text}" for entry in entries for text in entry["findings"]]
    if said:
        print()
        print_text("\n".join(said))
    print()
    print_mapping(
        {
            "check": why.verdict(record) or None,
            "advantage from": why.where_from(record, "advantage"),
            "pull": "how much of the loss the group's samples are, whatever their sign",
            "recorded": f"step {record['steps_recorded']} ({why.WHEN})",
            "next": f"--step {record['step']} --group N shows one group",
        }
    )


def _group_line(entry: Mapping[str, Any]) -> dict[str, Any]:
    advantages = entry["advantages"]
    check = "wrong" if entry["wrong"] else "right"
    return {
        "group": entry["group"],
        "name": visible(str(entry["name"]), 20),
        "samples": entry["samples"],
        "mean": _number(entry["mean"]),
        "std": _number(entry["std"]),
        "advantages": None if advantages is None else _range(*advantages),
        "pull": _number(entry["pull"]),
        "check": check if entry["checked"] else None,
    }


def print_group(record: Mapping[str, Any], group: Mapping[str, Any]) -> None:
    """From rewards to advantages to loss."""
    told = why.explain_group(record, group)
    print_mapping(
        {
            "step": record["step"],
            "group": f"{group['group']} ({group['status']})",
            "prompt": visible(str(group["prompt"])),
        }
    )
    print()
    print_table([_reward_line(i, s) for i, s in enumerate(group["samples"])])
    print()
    print_mapping(
        {
            "reward": _weights(record),
            "group": _statistics(told),
            **_formula_lines(record),
            "divided by": why.counts(record, group) or None,
            "check": _check(told),
            **{f"{number} from": why.where_from(record, number) for number in told["computed_by"]},
        }
    )
    print()
    formula = told["expected"] if told["wrong"] else {}
    print_table([_training_line(i, s, formula) for i, s in enumerate(group["samples"])])
    if told["findings"]:
        print()
        print_text("\n".join(f"- {text}" for text in told["findings"]))


def _statistics(told: Mapping[str, Any]) -> str:
    divisor = "n - 1" if told["ddof"] else "n"
    said = (
        f"mean {_number(told['mean'])}, std {_number(told['std'])}, computed here from the"
        f" {told['n']} rewards above (divided by {divisor})"
    )
    return said if told["eps"] is None else f"{said}, eps {told['eps']:g}"


def _check(told: Mapping[str, Any]) -> str | None:
    if "advantage" not in told["algorithm"]["parts"]:
        return None
    if told["wrong"]:
        return "the recorded advantages do NOT follow from these rewards"
    if told["checked"] and told["status"] in ("trained", "replayed"):
        return "the recorded advantages follow from these rewards"
    return "these rewards alone do not decide the advantages: not checked"


def _weights(record: Mapping[str, Any]) -> str | None:
    parts = [f"{weight:g} {name}" for name, weight in record["weights"].items()]
    return " + ".join(parts) or None


def _formula_lines(record: Mapping[str, Any]) -> dict[str, str]:
    parts = record["algorithm"]["parts"]
    equations = record["algorithm"]["equations"]
    return {
        kind: f"{name}: {equations[kind]}" if kind in equations else name
        for kind, name in parts.items()
    }


def _formulas(record: Mapping[str, Any]) -> str:
    parts = ", ".join(f"{kind} {name}" for kind, name in record["algorithm"]["parts"].items())
    return f"{record['algorithm']['name']}: {parts}"


def _reward_line(place: int, sample: Mapping[str, Any]) -> dict[str, Any]:
    line: dict[str, Any] = {"sample": place}
    line |= {name: _number(value) for name, value in sample["components"].items()}
    line["reward"] = "unscored" if sample["reward"] is None else _number(sample["reward"])
    if "token_reward" in sample:
        line["of tokens"] = _number(sample["token_reward"])
    line["tokens"] = sample.get("tokens", 0)
    line["stop"] = sample["stop"]
    line["answer"] = visible(str(sample["text"]), ANSWER)
    return line


def _training_line(
    place: int, sample: Mapping[str, Any], formula: Mapping[str, float]
) -> dict[str, Any]:
    """`formula`: what the advantages should be, by episode, where they are wrong."""
    line: dict[str, Any] = {"sample": place}
    if "pair" in sample:
        line["side"] = sample["pair"]["side"]
    if "implicit_reward" in sample:
        line["implicit reward"] = _number(sample["implicit_reward"])
    for name in ("values", "returns"):
        if name in sample:
            line[name] = _spread(sample[name])
    if "advantage" in sample:
        line["advantage"] = _spread(sample["advantage"])
    if formula:
        line["by the formula"] = _number(formula.get(sample["episode"]))
    if "ratio" in sample:
        line["ratio"] = _spread(sample["ratio"])
    if "clipped" in sample:
        line["clipped"] = f"{sample['clipped']:.0%}"
    if "kl" in sample:
        line["kl"] = _number(sample["kl"])
    if "denominator" in sample:
        line["divided by"] = _number(sample["denominator"])
    line["loss"] = _number(sample.get("loss"))
    if reason := sample.get("no_signal"):
        line["no signal"] = why.NO_SIGNAL.get(reason, reason)
    return line


def print_sample(record: Mapping[str, Any], sample: Mapping[str, Any]) -> None:
    """One sample with all that is recorded of it, token by token where that was asked for."""
    shown = {
        name: visible(value) if isinstance(value, str) else value
        for name, value in sample.items()
        if name != "by_token"
    }
    print_mapping({"step": record["step"], **shown})
    if tokens := sample.get("by_token"):
        print()
        columns: Sequence[str] = list(tokens)
        rows = zip(*tokens.values(), strict=True)
        print_table([dict(zip(columns, row, strict=True)) for row in rows])


def _number(value: Any) -> str | None:
    """
    >>> _number(0.5), _number(1e-7), _number(None), _number("nan")
    ('0.5', '1e-07', None, 'nan')
    """
    if isinstance(value, int | float):
        return f"{value:.4g}"
    return None if value is None else str(value)


def _range(low: float, high: float) -> str:
    return str(_number(low)) if low == high else f"{_number(low)} to {_number(high)}"


def _spread(value: Any) -> str | None:
    """One number, or from where to where tokens go.

    >>> _spread(1.0), _spread({"mean": 2, "min": 1.0, "max": 3.0}), _spread({"min": 1, "max": 1})
    ('1', '1 to 3', '1')
    """
    if isinstance(value, Mapping):
        return _range(value["min"], value["max"])
    return _number(value)
