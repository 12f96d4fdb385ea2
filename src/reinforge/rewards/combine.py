"""Several rewards as one: a component may be worth something only where another one passes (format before correctness)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reinforge.core.errors import InputError
from reinforge.rewards.function import FunctionReward

Components = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Gate:
    on: str  # the component that must pass
    at: float | None = None  # at least this; None: above 0

    def passes(self, value: float) -> bool:
        return value > 0 if self.at is None else value >= self.at


def gates_of(rewards: Sequence[FunctionReward]) -> dict[str, Gate]:
    """The gates of the rewards that have one. Each must name another reward, and no chain of them may come back to its start."""
    names = [r.name for r in rewards]
    gates = {r.name: Gate(r.gate.rpartition(":")[2], r.gate_at) for r in rewards if r.gate is not None}
    for i, name in enumerate(names):
        where, seen = f"rewards.{i}.gate", [name]
        while seen[-1] in gates:
            on = gates[seen[-1]].on
            if on not in names:
                raise InputError(f"{name} waits for {on}, and there is no such reward.", where=where, fix=f"There are: {', '.join(names)}.")
            if on in seen:
                raise InputError(
                    f"{' waits for '.join([*seen, on])}: none of them could ever pass.", where=where, fix="Remove one of the gates."
                )
            seen.append(on)
    return gates


def gated(components: Mapping[str, float | None], gates: Mapping[str, Gate]) -> Components:
    """The components as they count: 0 where the gate does not pass. None (not applicable, or not scored) stays None, and a gate
    that is None holds nothing back. A gate that is held back itself does not pass, unless 0 is enough for it.

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
