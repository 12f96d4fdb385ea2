"""What frozen models say about every row, computed once before the first step and kept in the run's
directory: log-probs of a reference, or a teacher's likeliest tokens. The model that said it need
not stay in memory, and a resume reads the same bits.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from reinforge.checkpoint.files import fsync_path
from reinforge.core.batch import Batch, pack
from reinforge.core.files import readable_as_usual
from reinforge.core.sample import Sample

Streams = dict[str, Tensor]  # of all trained tokens of the samples, [M] or [M, k] each


def with_streams(
    units: Sequence[Sequence[Sample]],
    path: Path,
    model: str,
    budget: int,
    ask: Callable[[Batch], Streams],
    *,
    share: bool = False,
) -> list[list[Sample]]:
    """The units with the streams that `ask` gives for a pack.

    They are read from `path` where an earlier start of the run left them for the same rows and
    `model`. `share`: the prompt of a pair is computed once.
    """
    samples = [sample for unit in units for sample in unit]
    want = fingerprint(samples, model)
    found = _read(path, want)
    if found is None:
        found = _compute(samples, budget, ask, share)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(found, path.with_suffix(".part"), metadata={"fingerprint": want})
        readable_as_usual(path.with_suffix(".part"))
        fsync_path(path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)
    pieces = {
        name: iter(values.split([s.n_trained for s in samples])) for name, values in found.items()
    }
    return [
        [_with(sample, {name: next(piece) for name, piece in pieces.items()}) for sample in unit]
        for unit in units
    ]


def fingerprint(samples: Sequence[Sample], model: str) -> str:
    """Of the tokens, which of them are trained, and the model's name."""
    digest = hashlib.blake2b(model.encode(), digest_size=16)
    for s in samples:
        digest.update(
            s.uid.encode() + b"\x1f" + s.tokens.numpy().tobytes() + s.trained.numpy().tobytes()
        )
    return digest.hexdigest()


def _read(path: Path, want: str) -> Streams | None:
    if not path.exists():
        return None
    with safe_open(path, "pt") as file:
        if file.metadata().get("fingerprint") != want:
            return None
        names = file.keys()
        return {name: file.get_tensor(name) for name in names}


def _compute(
    samples: Sequence[Sample], budget: int, ask: Callable[[Batch], Streams], share: bool
) -> Streams:
    """In the order of the samples, whatever the packs.

    What they bring along is not asked for, and need not be the same for all.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for batch in pack([sample.with_(streams={}) for sample in samples], budget, share=share):
        for name, values in ask(batch).items():
            parts = values.cpu().split(batch.trained_lengths().tolist())
            found.setdefault(name, {}).update(
                zip((s.uid for s in batch.samples), parts, strict=True)
            )
    return {name: torch.cat([parts[s.uid] for s in samples]) for name, parts in found.items()}


def _with(sample: Sample, given: Streams) -> Sample:
    streams = dict(sample.streams)
    for name, values in given.items():
        streams[name] = values.new_zeros((len(sample.tokens), *values.shape[1:]))
        streams[name][sample.trained] = values
    return sample.with_(streams=streams)
