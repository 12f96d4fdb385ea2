"""Several rewards as one: a component may be worth something only where another one passes (format
before correctness)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from reinforge.core.errors import InputError
from reinforge.rewards.function import FunctionReward
from reinforge.rewards.outcome import within

Components = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class RewardGate:
    """What must pass before a component counts. `gates_of` reads it from the rewards, `gated`
    applies it.
    """

    on: str  # the component that must pass
    at: float | None = None  # at least this; None: above 0

    def passes(self, value: float) -> bool:
        return value > 0 if self.at is None else value >= self.at


def gates_of(rewards: Sequence[FunctionReward]) -> dict[str, RewardGate]:
    """The gates of the rewards that have one. Each must name another reward, and no chain of them
    may come back to its start."""
    names = [r.name for r in rewards]
    gates = {
        r.name: RewardGate(r.gate.rpartition(":")[2], r.gate_at)
        for r in rewards
        if r.gate is not None
    }
    for i, name in enumerate(names):
        where = f"rewards.{i}.gate"
        seen = [name]
        while seen[-1] in gates:
            on = gates[seen[-1]].on
            if on not in names:
                raise InputError(
                    f"{name} waits for {on}, and there is no such reward.",
                    where=where,
                    fix=f"There are: {', '.join(names)}.",
                )
            if on in seen:
                raise InputError(
                    f"{' waits for '.join([*seen, on])}: none of them could ever pass.",
                    where=where,
                    fix="Remove one of the gates.",
                )
            seen.append(on)
    return gates


def gated(components: Mapping[str, float | None], gates: Mapping[str, RewardGate]) -> Components:
    """The components as they count: 0 where the gate does not pass. None (not applicable, or not
    scored) stays None, and a gate that is None holds nothing back. A gate that is held back itself
    does not pass, unless 0 is enough for it.

    >>> gated({"correct": 1.0, "format": 0.0}, {"correct": Gate("format")})
    {'correct': 0.0, 'format': 0.0}
    """

    def counts(name: str) -> float | None:
        value = components[name]
        if value is None or name not in gates:
            return value
        gate = gates[name]
        found = counts(gate.on)
        return 0.0 if found is not None and not gate.passes(found) else value

    return {name: counts(name) for name in components}


def combined(
    components: Mapping[str, float | None],
    gates: Mapping[str, RewardGate],
    weights: Mapping[str, float],
    running: Callable[[Components], Components] | None = None,
) -> tuple[Components, float | None]:
    """The components as they count, and the total: Σ weight·score over those that have something to
    say, None if none has.

    A component that is NaN is lost: its reward hung or died (`RewardOutcome.marked`). It counts in
    no sum, and 0 is not what it would have been: a completion that makes a penalty or a gate hang
    would get away with it, and one whose reward died by accident would be punished. So the sample
    has no total. A lost reward that counts nothing (weight 0, no gate) takes nothing with it.

    >>> combined({"right": 1.0, "form": math.nan}, {}, {"right": 1.0, "form": -0.5})
    ({'right': 1.0, 'form': None}, None)
    """
    lost = {name for name, value in components.items() if value is not None and math.isnan(value)}
    counted = gated(
        {name: None if name in lost else value for name, value in components.items()}, gates
    )
    for name in _behind(lost, gates):
        counted[name] = None
    if any(weights[name] for name in lost) or any(gate.on in lost for gate in gates.values()):
        return counted, None
    reward = total(counted if running is None else running(counted), weights)
    if reward is not None:
        within(reward, "the rewards of a sample add up to")
    return counted, reward


def _behind(lost: set[str], gates: Mapping[str, RewardGate]) -> set[str]:
    """The components that wait for a lost one, directly or through others."""
    found: set[str] = set()
    while more := {name for name, gate in gates.items() if gate.on in lost | found} - found:
        found |= more
    return found


def total(components: Mapping[str, float | None], weights: Mapping[str, float]) -> float | None:
    """Σ weight·score over the components that could be scored; None when none could."""
    scored = {name: value for name, value in components.items() if value is not None}
    return sum(weights[name] * value for name, value in scored.items()) if scored else None
