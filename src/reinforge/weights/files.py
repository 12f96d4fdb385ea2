"""Weights through files: a folder of buckets and a manifest.

On a RAM disk (/dev/shm) this is shared memory, elsewhere it is a disk that both sides see. The
reader is `engines/served/vllm_plugin.py`, which maps the files and copies nothing.

A folder is whole or absent: the manifest comes last, by a rename, and holds the sum of every file.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BUCKET = 512 << 20  # bytes
ALIGN = 64
RAM = Path("/dev/shm")
PREFIX = "reinforge-weights-"
OWNER = "owner"  # a file that the process holds whose folder it is
Pairs = Iterable[tuple[str, Tensor]]


class FileChannel:
    """One set of weights in a folder below `root`, or in memory, where servers read it.
    `WeightTransfer` makes one for every update. It stays until `close`, or until this process ends.
    """

    kind = "files"

    def __init__(self, root: Path | None = None, *, bucket: int = BUCKET):
        self.bucket = bucket
        self._version = 0
        root = root or (RAM if RAM.is_dir() else Path(tempfile.gettempdir()))
        root.mkdir(parents=True, exist_ok=True)
        sweep(root)
        self.folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=root))
        self._gone = weakref.finalize(self, _remove, self.folder, _hold(self.folder))

    def publish(self, pairs: Pairs, version: int) -> None:
        write(self.folder, pairs, self.bucket)
        self._version = version

    def message(self) -> dict[str, Any]:
        """What a worker stages."""
        return {"kind": "files", "folder": str(self.folder.resolve()), "version": self._version}

    def close(self) -> None:
        self._gone()


def sweep(root: Path) -> None:
    """Removes what processes of this host left behind that were killed: in memory it would stay
    until the host starts again.
    """
    for folder in root.glob(f"{PREFIX}*"):
        pid = folder.name.removeprefix(PREFIX).split("-")[0]
        if (
            pid.isdigit()
            and not Path("/proc", pid).exists()
            and Path("/proc/self").exists()
            and not _held(folder)
        ):
            shutil.rmtree(folder, ignore_errors=True)


def _hold(folder: Path) -> int:
    """A lock that ends with this process.

    Containers may share the memory and not see each other's processes.
    """
    held = os.open(folder / OWNER, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(held, fcntl.LOCK_EX)
    return held


def _held(folder: Path) -> bool:
    """Whether somebody holds it, or has only just made it."""
    try:
        asked = os.open(folder / OWNER, os.O_RDWR)
    except FileNotFoundError:
        return folder.exists() and time.time() - folder.stat().st_mtime < 60
    except OSError:  # another user's
        return True
    try:
        fcntl.flock(asked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(asked)


def _remove(folder: Path, held: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(held)


def write(folder: Path, pairs: Pairs, bucket: int = BUCKET) -> None:
    """Buckets of about `bucket` bytes, each tensor whole and aligned, then the manifest."""
    buckets: list[dict[str, Any]] = []
    waiting: list[tuple[str, Tensor]] = []
    held = 0
    for name, tensor in pairs:
        waiting.append((name, tensor))
        held += tensor.numel() * tensor.element_size()
        if held >= bucket:
            buckets.append(_write_bucket(folder, f"{len(buckets)}.bin", waiting))
            waiting = []
            held = 0
    if waiting or not buckets:
        buckets.append(_write_bucket(folder, f"{len(buckets)}.bin", waiting))
    part = folder / "manifest.part"
    part.write_text(json.dumps({"buckets": buckets}))
    part.rename(folder / "manifest.json")


@torch.no_grad()
def _write_bucket(folder: Path, file: str, pairs: list[tuple[str, Tensor]]) -> dict[str, Any]:
    places: list[tuple[str, str, list[int], int, int]] = []
    end = 0
    for name, tensor in pairs:
        size = tensor.numel() * tensor.element_size()
        places.append(
            (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end, size)
        )
        end += -(-size // ALIGN) * ALIGN
    total = max(end, ALIGN)
    with (folder / file).open("wb") as out:
        out.truncate(total)
    flat = torch.from_file(str(folder / file), shared=True, size=total, dtype=torch.uint8)
    for (_, tensor), (_, _, _, start, size) in zip(pairs, places, strict=True):
        flat[start : start + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return {
        "file": file,
        "bytes": total,
        "sum": int(flat.view(torch.int64).sum()),
        "tensors": places,
    }


class AdapterChannel(FileChannel):
    """What an adapter adds to weights that the reader has in another folder: `NAME/a` and `NAME/b`
    for each weight that it changes. `WeightTransfer` makes it where only the adapter has to travel.
    """

    kind = "adapter"

    def __init__(self, base: FileChannel, root: Path | None = None):
        super().__init__(root)
        self.base = base

    def message(self) -> dict[str, Any]:
        return {**super().message(), "base": str(self.base.folder.resolve())}


class SafetensorsChannel(FileChannel):
    """The same as a model directory in Hugging Face format, for engines that load one: `config` is
    where the other files are.
    """

    kind = "safetensors"

    def __init__(self, root: Path | None, config: Path):
        super().__init__(root)
        self.config = config

    def publish(self, pairs: Pairs, version: int) -> None:
        from safetensors.torch import save_file

        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in pairs},
            str(self.folder / "model.safetensors"),
            {"format": "pt"},
        )
        for file in [
            *self.config.glob("*.json"),
            *self.config.glob("*.model"),
            *self.config.glob("*.jinja"),
        ]:
            if "safetensors" not in file.name and file.name != "config.json":
                shutil.copyfile(file, self.folder / file.name)
        # last: who finds it finds everything
        shutil.copyfile(self.config / "config.json", self.folder / "config.json")
        self._version = version

    def message(self) -> dict[str, Any]:
        return {**super().message(), "kind": "safetensors"}
