"""Anchors: what a run remembers of every step, so that the step can be found and done again.

A line of anchors.jsonl holds the step's cursor and counters, and digests of what it trained on and
what came out. A few kB a step, whatever the size of the model: `reinforge runs replay` goes forward
from the nearest weights kept and compares with them, `reinforge runs compare` finds the first step
at which two runs part.
"""

from __future__ import annotations

import hashlib
import itertools
import platform
import struct
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reinforge import version
from reinforge.backends.local import LocalBackend
from reinforge.core.backend import Backend
from reinforge.core.report import StepReport
from reinforge.core.sample import Sample

# values of each tensor that a digest of weights looks at, evenly spaced: all of a small one
SPACED = 16384
OF_NUMPY = {torch.int64, torch.int32, torch.bool, torch.float32}
SHORT = 8  # hexadecimal digits of the digest of one sample


def samples_digests(samples: Iterable[Sample]) -> dict[str, list[str]]:
    """By group, of every sample: its tokens, the log-probs it was sampled with, its rewards."""
    found: dict[str, list[str]] = {}
    for sample in samples:
        names = sorted(sample.rewards)
        parts = (
            _hash([sample.tokens, sample.trained]),
            _hash([sample.logprobs, sample.versions]),
            _hash(
                [
                    sample.reward,
                    sample.baseline,
                    sample.token_rewards,
                    *(value for name in names for value in (name, sample.rewards[name])),
                    str(sample.stop),
                ]
            ),
        )
        told = " ".join(part[:SHORT] for part in parts)
        found.setdefault(sample.group, []).append(told)
    return found


def update_digest(reports: Sequence[StepReport]) -> str:
    """Of the gradient norms and learning rates of a step's optimizer steps, bit for bit."""
    return _hash([x for r in reports for x in (r.grad_norm, r.learning_rate)])


@torch.no_grad()
def weights_digest(backend: Backend) -> str | None:
    """Of what is trained: up to `SPACED` values of every parameter, bit for bit. None where this
    process does not hold the weights.
    """
    if not isinstance(backend, LocalBackend):
        return None  # to ask ranks or actors for them would gather them
    named = sorted(backend.model.module.named_parameters())
    trained = [(name, p) for name, p in named if p.requires_grad] or named
    flat = [p.detach().reshape(-1) for _, p in trained]
    spaced = to_host([x[:: max(1, len(x) // SPACED)] for x in flat])
    return _hash(itertools.chain(*zip((name for name, _ in trained), spaced, strict=True)))


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """These in host memory: where they are of one kind on a GPU, by one copy instead of hundreds
    that are waited for.
    """
    kinds = {(x.dtype, x.device) for x in tensors}
    if len(kinds) != 1 or not tensors[0].is_cuda:
        return list(tensors)
    return list(torch.cat(list(tensors)).cpu().split([len(x) for x in tensors]))


def machine(backend: Backend) -> dict[str, Any]:
    """What the bits of a run depend on beside its configuration and the versions of packages."""
    return {
        "device": str(backend.device.type),
        "devices": backend.devices,
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "code": code_digest(),
    }


@cache
def code_digest() -> str:
    """Of the source of this package: a version number stays the same while somebody works on it."""
    root = Path(version.__file__).parent
    total = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        total.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:16]


def _hash(values: Iterable[Tensor | float | str | None]) -> str:
    total = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            total.update(f"{value.dtype}{value.numel()}".encode())
            total.update(_bytes(value))
        elif isinstance(value, str) or value is None:
            total.update(f"\0{value}".encode())
        else:
            total.update(struct.pack("<d", value))
    return total.hexdigest()[:32]


def _bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor of any kind: those that numpy has a kind for as they are, which is
    quicker.
    """
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return (flat if flat.dtype in OF_NUMPY else flat.view(torch.uint8)).numpy().data
