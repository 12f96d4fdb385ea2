"""Reward functions written for other libraries, called as they expect.

No torch here: workers import this.

trl    f(prompts, completions, completion_ids, **columns): where a prompt is a chat, its completion
       is one too, [{"role": "assistant", "content": ...}]. TRL also passes log_extra and
       log_metric, which drop what they are given here, and trainer_state and environments, which
       nothing stands for here: a function that requires one of them is refused
verl   compute_score(data_source, solution_str, ground_truth, extra_info): one completion at a time;
       a dict's `score` counts
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

from reinforge.core.errors import InputError

Kind = Literal["trl", "verl"]
VERL = ("data_source", "solution_str", "ground_truth")
# of verl's rows; `answer` where ground_truth is missing
COLUMNS = ("data_source", "ground_truth", "extra_info", "reward_model", "answer")
ALWAYS = ("prompts", "completions")
IDS = "completion_ids"
LOGS = ("log_extra", "log_metric")  # of TRL: functions that a reward may call
TRAINER = ("trainer_state", "environments")  # of TRL's trainer, which is not here


def kind_of(function: Callable[..., Any]) -> Kind | None:
    """verl's signature tells; trl's cannot be told from ours, and is what `kind: trl` is for."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    return "verl" if all(name in parameters for name in VERL) else None


def adapt(function: Callable[..., Any], kind: str | None) -> Callable[..., Any]:
    """The same reward with our signature: one list per column, completions as text."""
    if kind == "trl":
        return _trl(function)
    if kind == "verl":
        return _verl(function)
    return function


def _trl(function: Callable[..., Any]) -> Callable[..., Any]:
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    needed = [
        name
        for name in TRAINER
        if name in parameters and parameters[name].default is inspect.Parameter.empty
    ]
    if needed:
        raise InputError(
            f"asks for {' and '.join(needed)} of TRL's trainer, which is not here.",
            where=f"rewards ({getattr(function, '__name__', 'kind: trl')})",
            fix="Give the parameter a default, and do without it.",
        )

    def reward(prompts: Sequence[Any], completions: Sequence[str], **columns: Any) -> Any:
        said = [
            c if isinstance(p, str) else [{"role": "assistant", "content": c}]
            for p, c in zip(prompts, completions, strict=True)
        ]
        given = {
            "prompts": prompts,
            "completions": said,
            **dict.fromkeys(LOGS, _dropped),
            **columns,
        }
        return function(**{k: v for k, v in given.items() if takes_all or k in parameters})

    more = [p for p in parameters.values() if p.name not in (*ALWAYS, *LOGS, *TRAINER)]
    if takes_all and IDS not in parameters:  # TRL always passes them
        more = [_keyword(IDS, None), *more]
    return _asking(reward, more)


def _dropped(*_: Any, **__: Any) -> None:
    """TRL's log_extra and log_metric: what a reward returns is logged, and nothing else."""


def _verl(function: Callable[..., Any]) -> Callable[..., Any]:
    own = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in own.values())

    def reward(
        prompts: Sequence[Any], completions: Sequence[str], **columns: Any
    ) -> list[float | None]:
        scores: list[float | None] = []
        for i, text in enumerate(completions):
            row = {
                name: (
                    values[i]
                    if isinstance(values, list) and len(values) == len(completions)
                    else values
                )
                for name, values in columns.items()
            }
            given = {
                "data_source": row.pop("data_source", None),
                "solution_str": text,
                "ground_truth": _truth(row),
                "extra_info": row.pop("extra_info", None),
                **row,
            }
            result = function(**{k: v for k, v in given.items() if takes_all or k in own})
            scores.append(result["score"] if isinstance(result, dict) else result)
        return scores

    optional = [_keyword(name, None) for name in (*COLUMNS, *own) if name not in VERL[1:2]]
    return _asking(reward, list({p.name: p for p in optional}.values()))


def _keyword(name: str, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)


def _asking(reward: Callable[..., Any], more: Sequence[inspect.Parameter]) -> Callable[..., Any]:
    """Says by its signature which columns it wants, beside prompts and completions."""
    named = [p.replace(kind=p.KEYWORD_ONLY) for p in more if p.kind is not p.VAR_KEYWORD]
    rest = [p for p in more if p.kind is p.VAR_KEYWORD]
    reward.__signature__ = inspect.Signature([*(_keyword(name) for name in ALWAYS), *named, *rest])  # type: ignore[attr-defined]
    return reward


def _truth(row: dict[str, Any]) -> Any:
    """verl keeps it in reward_model.ground_truth; a column of that name, or `answer`, will do."""
    holder = row.pop("reward_model", None)
    if isinstance(holder, dict) and "ground_truth" in holder:
        return holder["ground_truth"]
    return row.pop("ground_truth") if "ground_truth" in row else row.get("answer")
