"""The files inside one checkpoint directory: tensor shards, JSON, and the manifest that proves
them.

    model.safetensors, optimizer-00001.safetensors, optimizer-00002.safetensors, ...
                     tensors by the part of their name before "/"
    state.json       plain values and the aliases of shared tensors
    MANIFEST.json    SHA-256 and size of every other file; written last

safetensors and JSON only: reading a checkpoint never runs code.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from reinforge.core.files import readable_as_usual

FORMAT = "reinforge-checkpoint-1"
MANIFEST = "MANIFEST.json"
STATE = "state.json"
SHARD_BYTES = 2 << 30
PICKLES = {".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt", ".npy", ".npz", ".joblib"}
STEP = re.compile(r"step-(\d{8,})")  # what the directory of a checkpoint is called
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.(safetensors|json)")
_PREFIX = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class DamagedFile(Exception):
    """A file of a checkpoint is not what was written. `file` is the one to name to the user."""

    def __init__(self, file: Path, what: str):
        self.file = file
        self.what = what
        super().__init__(f"{file}: {what}")


def fsync_path(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, value: Any) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def check_plain(value: Any, where: str) -> None:
    """JSON would silently turn the key 1 into "1" and come back as something else: refuse what does
    not survive it.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(
                    f"{where}: the key {key!r} is a {type(key).__name__}; a checkpoint holds text"
                    " keys only"
                )
            check_plain(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            check_plain(item, f"{where}[{i}]")
    elif not (value is None or type(value) in (bool, int, float, str)):
        raise TypeError(
            f"{where}: a {type(value).__name__} cannot be stored as JSON; put tensors into"
            " State.tensors"
        )


def find_aliases(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Names that are the very same memory as an earlier name (tied weights): {name: the name that
    is stored}.
    """
    first: dict[tuple[Any, ...], str] = {}
    aliases: dict[str, str] = {}
    for name in sorted(tensors):
        t = tensors[name]
        if not t.numel():
            continue
        key = (
            t.device,
            t.untyped_storage().data_ptr(),
            t.storage_offset(),
            tuple(t.shape),
            t.stride(),
            t.dtype,
        )
        if key in first:
            aliases[name] = first[key]
        else:
            first[key] = name
    return aliases


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], tag: str = "") -> dict[str, str]:
    """Shards by prefix and size, `tag` in their names.

    Only one shard at a time is copied to the host. Returns which file holds which.
    """
    by_prefix: dict[str, list[list[str]]] = {}
    room: dict[str, int] = {}
    for name in sorted(tensors):
        prefix = name.partition("/")[0] if "/" in name else "tensors"
        if not _PREFIX.fullmatch(prefix):
            raise ValueError(f"the tensor name {name!r} does not begin with a plain word and '/'")
        size = tensors[name].numel() * tensors[name].element_size()
        if prefix not in by_prefix or size > room[prefix]:
            by_prefix.setdefault(prefix, []).append([])
            room[prefix] = SHARD_BYTES
        by_prefix[prefix][-1].append(name)
        room[prefix] -= size
    homes = {}
    for prefix, shards in by_prefix.items():
        for i, names in enumerate(shards, start=1):
            file = folder / (
                f"{prefix}{tag}.safetensors"
                if len(shards) == 1
                else f"{prefix}{tag}-{i:05d}.safetensors"
            )
            save_file(_apart({name: tensors[name] for name in names}), file)
            readable_as_usual(file)
            fsync_path(file)
            homes.update(dict.fromkeys(names, file.name))
    return homes


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Host copies, each contiguous and alone in its storage: views of one buffer are written in
    full, once per name.
    """
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        t = tensor.detach().cpu().contiguous()
        storage = t.untyped_storage()
        if storage.nbytes() != t.numel() * t.element_size() or storage.data_ptr() in seen:
            t = t.clone()
        seen.add(t.untyped_storage().data_ptr())
        result[name] = t
    return result


def described(file: Path) -> dict[str, Any]:
    """What a manifest says of a file."""
    return {"sha256": sha256_of(file), "size": file.stat().st_size}


def write_manifest(
    folder: Path, step: int, known: Mapping[str, dict[str, Any]] | None = None
) -> None:
    """`known`: files that those who wrote them have described."""
    told = dict(known or {})
    files = [file for file in sorted(folder.iterdir()) if file.name not in told]
    with ThreadPoolExecutor(4) as pool:
        told.update(zip((f.name for f in files), pool.map(described, files), strict=True))
    listed = dict(sorted(told.items()))
    write_json(folder / MANIFEST, {"format": FORMAT, "step": step, "files": listed})
    fsync_path(folder)


def has_marker(folder: Path) -> bool:
    """Whether this directory is one of ours, even if it is damaged: the only kind that may be
    deleted.
    """
    manifest = folder / MANIFEST
    if (
        folder.is_symlink()
        or not folder.is_dir()
        or manifest.is_symlink()
        or not manifest.is_file()
    ):
        return False
    with manifest.open("rb") as file:
        return FORMAT.encode() in file.read(100)


def read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise DamagedFile(path, "the file is missing.")
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise DamagedFile(path, f"not valid JSON ({error}).") from error
    if not isinstance(value, dict):
        raise DamagedFile(path, "not a JSON object.")
    return value


def check_files(folder: Path, verify: bool) -> list[Path]:
    """Every file that the manifest names, present and of its size; with `verify` also of its hash.

    Raises `DamagedFile`.
    """
    for stray in sorted(folder.iterdir()) if folder.is_dir() else ():
        if stray.suffix.lower() in PICKLES:
            raise DamagedFile(
                stray,
                "this kind of file can run code when it is read; a checkpoint holds safetensors and"
                " JSON only.",
            )
    manifest = read_json(folder / MANIFEST)
    files = manifest.get("files")
    if manifest.get("format") != FORMAT or not isinstance(files, dict) or STATE not in files:
        raise DamagedFile(folder / MANIFEST, f"not a manifest of the format {FORMAT}.")
    named = STEP.fullmatch(folder.name)
    if named and manifest.get("step") != int(named[1]):
        raise DamagedFile(
            folder / MANIFEST,
            f"it is the checkpoint of step {manifest.get('step')}: the directory was renamed.",
        )
    for name, entry in files.items():
        file = folder / name
        if (
            not _NAME.fullmatch(name)
            or file.is_symlink()
            or not file.resolve().is_relative_to(folder.resolve())
        ):
            raise DamagedFile(
                folder / MANIFEST,
                f"it names {name!r}, which is not a safetensors or JSON file inside the"
                " checkpoint.",
            )
        if not file.is_file():
            raise DamagedFile(file, "the file is missing.")
        if not isinstance(entry, dict) or file.stat().st_size != entry.get("size"):
            expected = entry.get("size") if isinstance(entry, dict) else None
            raise DamagedFile(
                file,
                f"the file has {file.stat().st_size} bytes where {expected} were written (truncated"
                " or changed).",
            )
    paths = [folder / name for name in files]
    if verify:
        with ThreadPoolExecutor(4) as pool:
            for path, found in zip(paths, pool.map(sha256_of, paths), strict=True):
                if found != files[path.name].get("sha256"):
                    raise DamagedFile(
                        path,
                        "its SHA-256 is not the one that was written: the content has changed.",
                    )
    return paths


def read_state(folder: Path) -> dict[str, Any]:
    value = read_json(folder / STATE)
    for key in ("meta", "extra", "aliases"):
        if not isinstance(value.get(key), dict):
            raise DamagedFile(folder / STATE, f"{key} is missing.")
    return value
