"""Groups as tensors and JSON, for a checkpoint.

Nothing about a group is left out but its row, which is found again by its id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from reinforge.core.backend import State
from reinforge.core.errors import InputError
from reinforge.core.sample import Group, Row, Sample, Stop

ALIGNED = ("tokens", "trained", "logprobs", "versions")  # [T] in every sample; saved end to end
NAMED = ("streams", "extras")  # tensors by name
# of a group, plain values
TOLD = tuple(f.name for f in fields(Group) if f.name not in ("row", "samples", "given"))
PLAIN = tuple(f.name for f in fields(Sample) if f.name not in (*ALIGNED, *NAMED, "token_rewards"))


def groups_to_state(
    groups: Sequence[Group], more: Sequence[Mapping[str, Any]] | None = None
) -> State:
    """`more`: what else is to be remembered of each group."""
    samples = [s for g in groups for s in (*g.samples, *([] if g.given is None else [g.given]))]
    tensors = {name: torch.cat([getattr(s, name) for s in samples]) for name in ALIGNED if samples}
    for i, sample in enumerate(samples):
        if sample.token_rewards is not None:
            tensors[f"token_rewards/{i}"] = sample.token_rewards
        tensors.update(
            {f"{kind}/{i}/{name}": t for kind in NAMED for name, t in getattr(sample, kind).items()}
        )
    plain = [
        {"length": len(s.tokens), **{name: getattr(s, name) for name in PLAIN}, "stop": str(s.stop)}
        for s in samples
    ]
    described = [
        {
            "row": g.row.id,
            "samples": len(g.samples),
            "given": g.given is not None,
            **{name: getattr(g, name) for name in TOLD},
            **(more[i] if more is not None else {}),
        }
        for i, g in enumerate(groups)
    ]
    return State(tensors, {"groups": described, "samples": plain})


def groups_from_state(state: State, rows: Mapping[str, Row], what: str) -> list[Group]:
    """`what` holds them, for the error where a row is gone."""
    lengths = [p["length"] for p in state.meta["samples"]]
    pieces = {name: state.tensors[name].split(lengths) if lengths else () for name in ALIGNED}
    samples = [
        _sample(
            plain,
            {name: pieces[name][i].clone() for name in ALIGNED},
            {kind: _named(state.tensors, kind, i) for kind in NAMED},
            state.tensors.get(f"token_rewards/{i}"),
        )
        for i, plain in enumerate(state.meta["samples"])
    ]
    groups = []
    at = 0
    for g in state.meta["groups"]:
        if g["row"] not in rows:
            raise InputError(
                f"the checkpoint's {what} holds row {g['row']}, which the data no longer has.",
                where="data",
                fix="Restore the data set, or start a new run in another run.dir.",
            )
        own = samples[at : at + g["samples"]]
        at += len(own)
        given = None
        if g.get("given"):
            given = samples[at]
            at = at + 1
        groups.append(
            Group(
                row=rows[g["row"]],
                samples=own,
                given=given,
                **{name: g[name] for name in TOLD if name in g},
            )
        )
    return groups


def _named(tensors: Mapping[str, Tensor], kind: str, i: int) -> dict[str, Tensor]:
    prefix = f"{kind}/{i}/"
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _sample(
    plain: dict[str, Any],
    aligned: dict[str, Tensor],
    named: dict[str, dict[str, Tensor]],
    token_rewards: Tensor | None,
) -> Sample:
    values = {name: plain[name] for name in PLAIN if name in plain}
    return Sample(
        **{
            **values,
            **aligned,
            **named,
            "stop": Stop(plain["stop"]),
            "token_rewards": token_rewards,
        }
    )
