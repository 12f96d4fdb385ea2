"""What a configuration needs and this machine does not have: packages, programs, directories.

`reinforge plan` reports it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec

from reinforge.config import megatron
from reinforge.config.engine import SERVERS, gpus_of
from reinforge.config.rules.table import Problem
from reinforge.config.sections import Sections
from reinforge.core.cpus import gpus_here


def missing(config: Sections) -> Iterator[Problem]:
    yield from _engine(config)
    yield from _teachers(config)
    yield from _deepspeed(config)
    is_qlora = config.adapter is not None and config.adapter.kind == "qlora"
    if is_qlora and find_spec("bitsandbytes") is None:
        yield Problem(
            "adapter.kind",
            "QLoRA needs bitsandbytes, which is not installed.",
            "pip install 'reinforge[qlora]'",
        )
    if config.cluster.kind == "ray" and find_spec("ray") is None:
        yield Problem(
            "cluster.kind",
            "Ray is not installed.",
            "pip install 'reinforge[ray]', or set cluster.kind=local.",
        )
    if config.train.backend == "megatron" and not megatron.installed():
        yield Problem(
            "train.backend",
            "megatron-core is not installed.",
            "pip install 'reinforge[megatron]'",
        )


def _engine(config: Sections) -> Iterator[Problem]:
    kind = config.rollout.engine
    engine = config.engine
    if kind == "native":
        return
    if engine.key_env is not None and not os.environ.get(engine.key_env):
        yield Problem(
            "engine.key_env",
            f"the environment variable {engine.key_env} is not set.",
            "Set it to the key of the server.",
        )
    if engine.address:
        return
    yield from _devices(config)
    package = SERVERS[kind].package
    if engine.python is None and find_spec(package) is None:
        yield Problem(
            "engine.python",
            f"this Python has no {package}.",
            f"Name one that has it, e.g. engine.python=.venv-{kind}/bin/python.",
        )
    if engine.python is not None and shutil.which(engine.python) is None:
        yield Problem(
            "engine.python",
            f"no such program: {engine.python}",
            f"Give the path of a Python that has {package}.",
        )


def _devices(config: Sections) -> Iterator[Problem]:
    """GPUs by number, where the machine tells how many it has. Under Ray servers are elsewhere."""
    count = gpus_here()
    named = {gpu for devices in config.engine.devices for gpu in gpus_of(devices)}
    absent = sorted(int(gpu) for gpu in named if gpu.isdigit() and int(gpu) >= count)
    if absent and count and config.cluster.kind != "ray":
        yield Problem(
            "engine.devices",
            f"there is no GPU {absent[0]}: this machine has {count}, from 0.",
            "Name GPUs that are there, or leave it out to share the trainer's.",
        )


def _teachers(config: Sections) -> Iterator[Problem]:
    teachers = [] if config.teacher is None else config.teacher.teachers()
    for key, one in teachers:
        name = None if one.server is None else one.server.api_key_env
        if name is not None and not os.environ.get(name):
            yield Problem(
                f"{key}.server.api_key_env",
                f"the environment variable {name} is not set.",
                "Set it to the key of the server.",
            )


def _deepspeed(config: Sections) -> Iterator[Problem]:
    if config.train.backend != "deepspeed":
        return
    if find_spec("deepspeed") is None:
        yield Problem(
            "train.backend", "DeepSpeed is not installed.", "pip install 'reinforge[deepspeed]'"
        )
    path = config.train.deepspeed.nvme_path
    if path is not None and not os.path.isdir(path):
        yield Problem(
            "train.deepspeed.nvme_path",
            f"there is no directory {path}.",
            "Make it on a fast local disk, on every machine of the run.",
        )
