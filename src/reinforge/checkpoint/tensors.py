"""The tensors of a checkpoint, read one at a time when they are asked for: whole ones, and those
that several ranks wrote in pieces.

    model-r00000.safetensors  optimizer-r00000.safetensors  pieces-r00000.json
    model-r00001.safetensors  optimizer-r00001.safetensors  pieces-r00001.json

The first line is what rank 0 holds, and where it lies in the whole.
A `pieces-*.json` is {name: {"shape": of the whole, "box": [[begin, end] of each dimension], "file":
which holds it}}.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from reinforge.checkpoint import files

INDEX = "pieces"
Box = tuple[tuple[int, int], ...]  # [begin, end) of each dimension


class ShardSpan(NamedTuple):
    """Which part of a tensor lies in which file of a checkpoint that ranks wrote."""

    file: Path
    box: Box


class CheckpointTensors(Mapping[str, Tensor]):
    """By name, in order.

    Asking for a tensor reads it, and nothing is kept. It can be sent to another process: it holds
    names only.
    """

    def __init__(self, paths: Sequence[Path], aliases: Mapping[str, str]):
        self._handles: dict[Path, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._parts: dict[str, list[ShardSpan]] = {}
        pieced = [
            path for path in paths if path.suffix == ".json" and path.name.startswith(f"{INDEX}-")
        ]
        known = {path.name: path for path in paths if path.suffix == ".safetensors"}
        for index in pieced:
            self._read_index(index, known)
        for path in known.values():
            for name in self._open(path).keys():  # noqa: SIM118 (not a dict)
                if name not in self._parts:
                    shape = tuple(self._open(path).get_slice(name).get_shape())
                    self._shapes[name], self._parts[name] = (
                        shape,
                        [ShardSpan(path, tuple((0, n) for n in shape))],
                    )
        self.sharded = bool(pieced)
        self._check()
        for name, stored in aliases.items():
            if stored not in self._parts:
                where = (paths[0].parent if paths else Path()) / files.STATE
                raise files.DamagedFile(
                    where, f"the tensor {name!r} is an alias of {stored!r}, which no file holds."
                )
        # as asked for: as in the files
        self._names = {name: aliases.get(name, name) for name in sorted([*self._parts, *aliases])}

    def _read_index(self, index: Path, known: Mapping[str, Path]) -> None:
        for name, entry in files.read_json(index).items():
            try:
                shape = tuple(int(n) for n in entry["shape"])
                file = known[entry["file"]]
                box = tuple((int(a), int(b)) for a, b in entry["box"])
            except (KeyError, TypeError, ValueError) as error:
                raise files.DamagedFile(
                    index, f"what it says of {name!r} is not a piece of a tensor."
                ) from error
            inside = len(box) == len(shape) and all(
                0 <= a < b <= n for (a, b), n in zip(box, shape, strict=True)
            )
            if not inside or self._shapes.setdefault(name, shape) != shape:
                raise files.DamagedFile(
                    index, f"the piece of {name!r} does not lie in the tensor of which it is one."
                )
            self._parts.setdefault(name, []).append(ShardSpan(file, box))

    def _check(self) -> None:
        """Every element is in exactly one piece (pieces of one tensor do not overlap, so counting
        is enough).
        """
        for name, parts in self._parts.items():
            if sum(_volume(part.box) for part in parts) != math.prod(self._shapes[name]) or len(
                {part.box for part in parts}
            ) != len(parts):
                raise files.DamagedFile(
                    parts[0].file, f"the pieces of {name!r} do not make up the whole tensor."
                )

    def _open(self, path: Path) -> Any:
        if path not in self._handles:
            try:
                self._handles[path] = safe_open(path, framework="pt").__enter__()
            except SafetensorError as error:
                raise files.DamagedFile(
                    path, f"not a readable safetensors file ({error})."
                ) from error
        return self._handles[path]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_handles": {}}

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> Tensor:
        return self.part(name, tuple((0, n) for n in self.shape(name)))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[self._names[name]]

    def stored_as(self, name: str) -> str:
        """The name in the files: that of another one where two names are one tensor."""
        return self._names[name]

    def part(self, name: str, box: Box) -> Tensor:
        """What lies in `box`, of as many pieces as it takes; an empty box is an empty tensor."""
        stored = self._names[name]
        found: Tensor | None = None
        for file, there in self._parts[stored]:
            if there == box:
                whole: Tensor = self._open(file).get_tensor(stored)
                return whole
            both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, there, strict=True)]
            if found is not None and any(a >= b for a, b in both):
                continue
            inner = tuple(
                slice(a - c, max(a, b) - c) for (a, b), (c, _) in zip(both, there, strict=True)
            )
            if any(a >= b for a, b in both):
                inner = tuple(slice(0, 0) for _ in box)  # nothing of it, but its type
            piece = self._open(file).get_slice(stored)[inner]
            if both == list(box):
                return piece if piece.is_contiguous() else piece.contiguous()
            if found is None:
                found = torch.empty([b - a for a, b in box], dtype=piece.dtype)
            if piece.numel():
                found[
                    tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(both, box, strict=True))
                ] = piece
        assert found is not None
        return found

    def within(self, prefix: str) -> CheckpointTensors:
        """Those whose names begin with `prefix`, without it."""
        part = object.__new__(CheckpointTensors)
        vars(part).update(vars(self))
        part._names = {
            name.removeprefix(prefix): stored
            for name, stored in self._names.items()
            if name.startswith(prefix)
        }
        return part


def within(tensors: Mapping[str, Tensor], prefix: str) -> Mapping[str, Tensor]:
    """Those whose names begin with `prefix`, without it. What is on disk stays there."""
    if isinstance(tensors, CheckpointTensors):
        return tensors.within(prefix)
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def write_pieces(
    folder: Path,
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, Sequence[int]],
    boxes: Mapping[str, Box],
    tag: str,
) -> dict[str, dict[str, Any]]:
    """Writes one rank's pieces and their index, synced, into the directory of a checkpoint in the
    making. `tag` tells ranks apart. Returns what the manifest says of the files.
    """
    homes = files.write_tensors(folder, tensors, tag)
    index = folder / f"{INDEX}{tag}.json"
    files.write_json(
        index,
        {
            name: {"shape": list(shapes[name]), "box": boxes[name], "file": homes[name]}
            for name in tensors
        },
    )
    return {name: files.described(folder / name) for name in sorted({*homes.values(), index.name})}


def write_whole(
    folder: Path, tensors: Mapping[str, Tensor], prefix: str
) -> dict[str, dict[str, Any]]:
    """Writes whole tensors beside what other processes write, `prefix` before every name."""
    named = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in named.items()}
    boxes = {name: tuple((0, n) for n in shape) for name, shape in shapes.items()}
    return write_pieces(folder, named, shapes, boxes, file_tag(prefix, 0))


def file_tag(prefix: str, rank: int) -> str:
    """What tells apart the files that a rank writes of a part of a run."""
    stem = prefix.strip("/").replace("/", ".")
    return f"-{stem}-r{rank:05d}" if stem else f"-r{rank:05d}"


def _volume(box: Box) -> int:
    return math.prod(b - a for a, b in box)
