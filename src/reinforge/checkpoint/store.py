"""Save, load, prune and compare checkpoints: run_dir/checkpoints/step-00000010.

A save writes `.tmp-...`, hashes and fsyncs everything, and renames: a directory called `step-N` was
complete when it appeared. A kill at any moment leaves the old checkpoint or the new one; `clean`
removes what else it leaves. Everything that writes here (save, prune, clean) belongs to the owner
of the run's lock.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Set
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from reinforge.checkpoint import files
from reinforge.checkpoint.crash_points import crash_point
from reinforge.checkpoint.tensors import CheckpointTensors
from reinforge.core.backend import State
from reinforge.core.errors import InputError

_LEFTOVER = re.compile(r"\.(tmp|trash)-step-\d{8,}-\d+")
_REPLACED = re.compile(r"\.replaced-(step-\d{8,})-\d+")


def save(run_dir: Path, step: int, state: State, extra: dict[str, Any]) -> Path:
    """Writes a checkpoint or changes nothing.

    What depends on the clock (timings, log offsets) goes under extra["clock"].
    """
    files.check_plain(state.meta, "state.meta")
    files.check_plain(extra, "extra")
    root = Path(run_dir) / "checkpoints"
    target = root / f"step-{step:08d}"
    temporary = _hidden(target, "tmp")
    try:
        if not root.is_dir():
            root.mkdir(parents=True)
            # or a power cut loses the directory with everything in it
            files.fsync_path(root.parent)
        temporary.mkdir()
        _write(temporary, step, state, extra)
        crash_point("save:before-rename")
        _put(temporary, target)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if not isinstance(error, OSError | SafetensorError):
            raise
        size = sum(t.numel() * t.element_size() for t in state.tensors.values())
        previous = latest(run_dir)
        raise InputError(
            f"the checkpoint of step {step} ({size / 1e9:.2f} GB) could not be written: {error}.",
            where=str(target),
            fix=(f"The checkpoint {previous.name} is intact. " if previous else "")
            + "Free disk space or make the directory writable, then start again to resume.",
        ) from error
    crash_point("save:after-rename")
    return target


def _write(folder: Path, step: int, state: State, extra: dict[str, Any]) -> None:
    known: dict[str, Any] = {}
    for prefix, pieces in state.shards.items():
        known |= pieces.write(folder.resolve(), prefix)
    aliases = files.find_aliases(state.tensors)
    files.write_tensors(
        folder, {name: t for name, t in state.tensors.items() if name not in aliases}
    )
    crash_point("save:after-tensors")
    files.write_json(
        folder / files.STATE, {"step": step, "meta": state.meta, "extra": extra, "aliases": aliases}
    )
    files.write_manifest(folder, step, known)


def _put(temporary: Path, target: Path) -> None:
    """Renames into place.

    A checkpoint of the same step (a step done again) steps aside first, and `clean` would bring it
    back.
    """
    replaced = _hidden(target, "replaced") if target.exists() else None
    if replaced:
        os.rename(target, replaced)
        crash_point("save:replacing")
    try:
        os.rename(temporary, target)
    except OSError:
        if replaced:
            os.rename(replaced, target)
        raise
    files.fsync_path(target.parent)
    if replaced and files.has_marker(replaced):
        shutil.rmtree(replaced)


def _hidden(target: Path, kind: str) -> Path:
    return target.parent / f".{kind}-{target.name}-{time.time_ns()}"


def steps(run_dir: Path) -> list[Path]:
    """Every directory called step-N, newest first, damaged ones too."""
    root = Path(run_dir) / "checkpoints"
    found = (
        [p for p in root.iterdir() if files.STEP.fullmatch(p.name) and p.is_dir()]
        if root.is_dir()
        else []
    )
    return sorted(found, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    match = files.STEP.fullmatch(Path(path).name)
    if not match:
        raise InputError(
            "not the name of a checkpoint.",
            where=str(path),
            fix="Checkpoints are called step-00000010 and the like.",
        )
    return int(match[1])


def latest(run_dir: Path) -> Path | None:
    """The newest checkpoint that has its manifest; its content is proved by `load`."""
    return next((p for p in steps(run_dir) if files.has_marker(p)), None)


def intact(path: Path) -> bool:
    """Whether every file is there with its hash."""
    try:
        files.check_files(path, verify=True)
        files.read_state(path)
    except files.DamagedFile:
        return False
    return True


def load(path: Path, verify: bool = True) -> tuple[State, dict[str, Any]]:
    """The state on the CPU and the extra values.

    Anything that is not as written is an InputError that names the file. What several ranks wrote
    in pieces stays on disk, and is read tensor by tensor when it is asked for
    (`CheckpointTensors`).
    """
    path = Path(path)
    if not path.is_dir():
        raise InputError("there is no such checkpoint.", where=str(path), fix=_advice(path))
    try:
        paths = files.check_files(path, verify)
        stored = files.read_state(path)
        there = CheckpointTensors(paths, stored["aliases"])
        tensors = there if there.sharded else _in_memory(there)
    except files.DamagedFile as damage:
        raise InputError(damage.what, where=str(damage.file), fix=_advice(path)) from damage
    return State(tensors=tensors, meta=stored["meta"]), stored["extra"]


def _in_memory(there: CheckpointTensors) -> dict[str, torch.Tensor]:
    """All of it; two names of one tensor are one tensor again."""
    read: dict[str, torch.Tensor] = {}
    return {
        name: (
            read.setdefault(stored, there[name])
            if (stored := there.stored_as(name)) not in read
            else read[stored]
        )
        for name in there
    }


def _advice(path: Path) -> str:
    older = [
        p
        for p in steps(path.parent.parent)
        if files.STEP.fullmatch(path.name) and step_of(p) < step_of(path)
    ]
    good = next((p for p in older if intact(p)), None)
    if good:
        return (
            f"The earlier checkpoint {good} is intact: move {path.name} away to continue from it."
        )
    return "There is no earlier intact checkpoint: start a new run in another directory."


def clean(run_dir: Path) -> list[Path]:
    """Removes what interrupted saves and prunes left behind, and brings back a checkpoint that was
    being replaced.
    """
    root = Path(run_dir) / "checkpoints"
    removed = []
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if path.is_symlink() or not path.is_dir():
            continue
        replaced = _REPLACED.fullmatch(path.name)
        if replaced and not (root / replaced[1]).exists():
            os.rename(path, root / replaced[1])
        elif _LEFTOVER.fullmatch(path.name) or (replaced and files.has_marker(path)):
            shutil.rmtree(path)
            removed.append(path)
    return removed


def prune(run_dir: Path, keep: int, protect: Set[Path] = frozenset()) -> list[Path]:
    """Deletes all but the newest `keep` undamaged checkpoints and the protected ones.

    Never a directory without our manifest.
    """
    assert keep >= 1, "prune must leave a checkpoint"
    protected = {Path(p).resolve() for p in protect}
    ours = [p for p in steps(run_dir) if files.has_marker(p)]
    kept = [p for p in ours if _looks_complete(p)][:keep]
    removed = []
    for path in ours:
        if len(kept) < keep or step_of(path) >= step_of(kept[-1]) or path.resolve() in protected:
            continue
        trash = _hidden(path, "trash")
        os.rename(path, trash)
        (trash / files.MANIFEST).unlink()
        crash_point("prune:middle")
        shutil.rmtree(trash)
        removed.append(path)
    return removed


def _looks_complete(path: Path) -> bool:
    try:
        files.check_files(path, verify=False)
    except files.DamagedFile:
        return False
    return True


def digest(path: Path) -> str:
    """SHA-256 of what training depends on: every tensor by name, dtype, shape and bytes, then the
    plain values.

    Independent of shards, aliases and file order, and of extra["clock"]: two runs that trained
    alike have one digest.
    """
    path = Path(path)
    total = _hashed_tensors(path)
    stored = files.read_state(path)
    extra = {key: value for key, value in stored["extra"].items() if key != "clock"}
    plain = {"step": stored["step"], "meta": stored["meta"], "extra": extra}
    total.update(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode())
    return total.hexdigest()


def tensors_digest(path: Path) -> str:
    """SHA-256 of every tensor alone: weights, optimizer, and those of the parts."""
    return _hashed_tensors(Path(path)).hexdigest()


def _hashed_tensors(path: Path) -> hashlib._Hash:
    total = hashlib.sha256()
    try:
        paths = files.check_files(path, verify=False)
        stored = files.read_state(path)
        for name, tensor in CheckpointTensors(paths, stored["aliases"]).items():
            total.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
            total.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    except files.DamagedFile as damage:
        raise InputError(damage.what, where=str(damage.file), fix=_advice(path)) from damage
    return total


def digest_run(run_dir: Path) -> str:
    """The digest of the newest checkpoint."""
    newest = latest(run_dir)
    if newest is None:
        raise InputError(
            "the run has no checkpoint.",
            where=str(run_dir),
            fix="Train at least until the first checkpoint is saved.",
        )
    return digest(newest)
