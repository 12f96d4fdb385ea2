"""Makes pg_trl.json and pg_verl.json: what TRL and veRL compute for the policy gradient on fixed
numbers. Neither needs reinforge.

    # in an environment with trl==1.16.0
    python pg_reference.py --trl pg_trl.json
    # in one with verl==0.9.1 (and omegaconf, tensordict, codetiming)
    python pg_reference.py --verl pg_verl.json

No network, no GPU. The numbers are: three groups of four rows of 1 to 8 trained tokens (M = 53),
one group with equal rewards, log-ratios mostly inside of a clip and some far outside, two rows cut
off by the limit; and ragged, interleaved groups of 5, 3, 3 and 1. They are flat here, [M] or [S],
and padded for the peers with values that must not count. A case is run in float32 and in float64
where the peer can.

Legend: M trained tokens, S rows.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from torch import Tensor

LENGTHS = [5, 3, 8, 1, 2, 7, 4, 6, 8, 3, 5, 1]
MAX_LENGTH = 8
TRUNCATED = [2, 8]
GROUP = [0] * 4 + [1] * 4 + [2] * 4
REWARDS = [1.0, 0.0, 0.0, 1.0, 0.3, -2.0, 0.7, 5.0, 0.1, 0.1, 0.1, 0.1]
UNSCORED: list[float | None] = [1.0, None, 0.0, 1.0, None, None, 0.5, None, 0.1, 0.2, None, 0.4]
COMPONENTS: dict[str, list[float | None]] = {
    "first": [1.0, 0.0, 0.0, 1.0, 0.3, -2.0, 0.7, 5.0, 0.1, 0.1, 0.1, 0.1],
    "second": [10.0, 20.0, None, 5.0, 0.0, 0.0, 1.0, 0.0, 7.0, 7.0, 8.0, 9.0],
}
WEIGHTS = {"first": 1.0, "second": 0.5}
RAGGED = [0, 1, 0, 2, 1, 0, 0, 1, 2, 0, 3, 2]
RAGGED_REWARDS = [1.0, 0.5, 0.0, 0.1, -1.0, 0.0, 1.0, 2.0, 0.1, 0.25, 0.7, 0.1]
BASELINE = [0.5] * 4 + [0.2] * 4 + [-1.0] * 4
ADVANTAGES = [1.1, -0.7, 0.0, -1.3, 0.4, -2.1, 0.9, 0.6, -0.5, 1.6, -0.3, 0.8]
SHIFT = [
    0.0,
    0.25,
    0.0,
    -0.2,
    -0.25,
    0.05,
    0.2,
    0.0,
    0.12,
    0.0,
    0.05,
    0.0,
]  # of the log-ratios of a row: so that whole rows are clipped too
# what an adaptive coefficient sees, step by step
CONTROLLER = [0.30, 0.10, 0.25, 0.05, 0.50, 0.18, 0.90, 0.01]


def inputs() -> dict[str, list[float]]:
    """[M] each, rounded to 6 decimals."""
    generator = torch.Generator().manual_seed(20)
    size = sum(LENGTHS)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(size, generator=generator, dtype=torch.float64)

    def drift(scale: float, far: float) -> Tensor:
        """Most tokens within the clip, every fifth far outside of it on one side or the other."""
        outside = torch.rand(size, generator=generator) < 0.2
        return noise(scale) + torch.where(outside, far * noise(1.0).sign(), 0.0)

    logprobs = -noise(1.0).abs() - 0.01
    shift = torch.tensor(SHIFT, dtype=torch.float64).repeat_interleave(torch.tensor(LENGTHS))
    old = (logprobs - shift - drift(0.1, 0.6)).clamp(max=-0.001)
    behaviour = (old - drift(0.1, 0.8)).clamp(max=-0.001)
    values = noise(1.0)
    found = {
        "logprobs": logprobs,
        "old": old,
        "behaviour": behaviour,
        "reference": (logprobs + noise(0.5)).clamp(max=-0.001),
        "entropy": noise(1.0).abs() + 0.05,
        "values": values,
        "old_values": values + noise(0.3),
        "returns": values + noise(1.0),
        "token_rewards": noise(0.1),
    }
    return {name: [round(x, 6) for x in value.tolist()] for name, value in found.items()}


INPUTS = inputs()


def mask_of(lengths: list[int] = LENGTHS) -> Tensor:
    return torch.arange(MAX_LENGTH) < torch.tensor(lengths)[:, None]


def padded(name: str, dtype: torch.dtype, fill: float = -3.0) -> Tensor:
    """[S, MAX_LENGTH] of an input; `fill` must not count."""
    mask = mask_of()
    return torch.full(mask.shape, fill, dtype=dtype).masked_scatter(
        mask, torch.tensor(INPUTS[name], dtype=dtype)
    )


def numbers(value: Any) -> Any:
    """JSON of a tensor: all digits of a float64, nine of a float32."""
    if not isinstance(value, Tensor):
        return value
    digits = 9 if value.dtype == torch.float32 else 17
    rounded = [float(f"{x:.{digits}g}") for x in value.detach().reshape(-1).tolist()]
    return rounded if value.ndim else rounded[0]


def flat(value: Tensor, nothing_outside: bool = True) -> Tensor:
    """[M] of [S, MAX_LENGTH]. Gradients of padding are 0."""
    mask = mask_of()
    assert not nothing_outside or not value[~mask].any()
    return value[mask]


class Cases:
    """The outputs of a peer: {method: {"call": its own name for it, "outputs": {dtype: {name:
    numbers}}}}.
    """

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def add(self, method: str, call: str, dtype: torch.dtype, **outputs: Any) -> None:
        case = self.found.setdefault(method, {"call": call, "outputs": {}})
        name = str(dtype).removeprefix("torch.")
        assert case["call"] == call and name not in case["outputs"], method
        case["outputs"][name] = {key: numbers(value) for key, value in outputs.items()}


def write(path: str, peer: str, version: str, cases: Cases) -> None:
    given = {
        "lengths": LENGTHS,
        "max_length": MAX_LENGTH,
        "truncated": TRUNCATED,
        "group": GROUP,
        "rewards": REWARDS,
        "unscored": UNSCORED,
        "components": COMPONENTS,
        "weights": WEIGHTS,
        "ragged": RAGGED,
        "ragged_rewards": RAGGED_REWARDS,
        "baseline": BASELINE,
        "advantages": ADVANTAGES,
        "controller": CONTROLLER,
        **INPUTS,
    }
    lines = [
        f'"peer": {json.dumps(peer)}',
        f'"version": {json.dumps(version)}',
        f'"inputs": {json.dumps(given)}',
    ]
    body = ",\n".join(
        f"{json.dumps(method)}: {json.dumps(case)}" for method, case in cases.found.items()
    )
    with open(path, "w") as file:
        file.write("{" + ",\n".join(lines) + ',\n"cases": {\n' + body + "\n}}\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl", metavar="FILE")
    parser.add_argument("--verl", metavar="FILE")
    chosen = parser.parse_args()
    if chosen.trl:
        import pg_reference_trl

        write(chosen.trl, "TRL", *pg_reference_trl.run())
    if chosen.verl:
        import pg_reference_verl

        write(chosen.verl, "veRL", *pg_reference_verl.run())


if __name__ == "__main__":
    main()
