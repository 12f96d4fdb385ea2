"""The section `engine`: a server that generates (rollout.engine vllm or sglang).

The native engine needs none of it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from reinforge.config.base import Count, Fraction, NonNegative, Positive, Section

if TYPE_CHECKING:
    from reinforge.config.schema import Config


class EngineConfig(Section):
    python: str | None = Field(
        None,
        description=(
            "The Python that has vLLM or SGLang. Default: this one. An environment of its own is"
            " usual: their pins rarely match."
        ),
    )
    address: list[str] = Field(
        [],
        description=(
            "Servers that run already, e.g. [http://127.0.0.1:8000]; then none is started. See"
            " docs/engines.md."
        ),
    )
    key_env: str | None = Field(
        None, description="The environment variable with the API key of `address`."
    )
    replicas: Count = Field(
        1,
        description=(
            "Servers to start. Requests go to the one with least to do; one that dies is started"
            " again."
        ),
    )
    devices: list[str] = Field(
        [],
        description=(
            "CUDA_VISIBLE_DEVICES of each replica, e.g. ['1', '2,3']. Default: the trainer's own"
            " (colocated)."
        ),
    )
    channel: Literal["auto", "ipc", "memory", "disk"] = Field(
        "auto",
        description=(
            "How weights get there. ipc: handles, on the same GPU. memory: files in RAM, on the"
            " same host. disk: files in the run directory. auto: ipc where it can be, else memory."
        ),
    )
    memory: Fraction = Field(
        0.4, description="Share of the GPU's memory that a replica may take for weights and cache."
    )
    sleep: Literal["auto", "never", "cache", "all"] = Field(
        "auto",
        description=(
            "What a colocated engine gives back while training. cache: the KV cache (weights wait"
            " in host memory). all: weights too, they are sent again. auto: cache on the trainer's"
            " GPU, never elsewhere."
        ),
    )
    seeded: bool = Field(
        True,
        description=(
            "Draws are a function of the run's seed. false: of arrival order, which vLLM samples"
            " faster for large batches on a GPU."
        ),
    )
    args: dict[str, str | int | float | bool] = Field(
        {},
        description=(
            "More options of the server, e.g. {tensor-parallel-size: 2, enforce-eager: true}."
        ),
    )
    env: dict[str, str] = Field(
        {},
        description="More environment variables of the server, e.g. {PYTHONPATH: /path/to/site}.",
    )
    start_seconds: Positive = Field(
        600.0, description="A server that is not ready after this long is an error."
    )
    health_seconds: Positive = Field(
        60.0,
        description=(
            "An answer that takes longer makes us ask for one token; a server that does not give it"
            " is replaced."
        ),
    )
    tolerance: NonNegative | None = Field(
        None,
        description=(
            "After every update: mean difference of log-probs from the trainer's that stops the"
            " run. Default: 0.002 in float32, 0.15 in bfloat16."
        ),
    )

    @model_validator(mode="after")
    def _consistent(self) -> EngineConfig:
        if self.address and (
            self.replicas > 1 or self.devices or self.python or self.args or self.env
        ):
            raise ValueError(
                "address: servers that run already have their own python, args, env, devices and"
                " number; leave those out"
            )
        if self.devices and len(self.devices) != self.replicas:
            raise ValueError(
                f"devices: {len(self.devices)} are given for {self.replicas} replicas; give one for"
                " each"
            )
        return self


def check_engine(cfg: Config) -> None:
    """What the section asks of the others."""
    kind = cfg.rollout.engine
    engine = cfg.engine
    if kind == "native":
        if engine != EngineConfig():
            raise ValueError(
                "engine: the native engine has no server; remove the section, or set rollout.engine"
                " to vllm or sglang"
            )
        return
    if cfg.model.exact:
        raise ValueError(
            f"model.exact: {kind} computes log-probs in its own way; set rollout.engine=native, or"
            " leave it out"
        )
    if kind == "sglang" and engine.channel == "ipc":
        raise ValueError("engine.channel: sglang reads weights from files here; use memory or disk")
    if engine.address and engine.channel == "ipc":
        raise ValueError(
            "engine.channel: handles of GPU memory are for servers that we start; use memory or"
            " disk"
        )


def missing(cfg: Config) -> Iterator[tuple[str, str, str]]:
    """(where, what, fix) of what a server needs and this machine does not have."""
    kind = cfg.rollout.engine
    engine = cfg.engine
    if kind == "native":
        return
    if engine.key_env is not None and not os.environ.get(engine.key_env):
        yield (
            "engine.key_env",
            f"the environment variable {engine.key_env} is not set.",
            "Set it to the key of the server.",
        )
    if engine.address:
        return
    if engine.python is None and find_spec(kind) is None:
        yield (
            "engine.python",
            f"this Python has no {kind}.",
            f"Name one that has it, e.g. engine.python=.venv-{kind}/bin/python.",
        )
    if engine.python is not None and shutil.which(engine.python) is None:
        yield (
            "engine.python",
            f"no such program: {engine.python}",
            f"Give the path of a Python that has {kind}.",
        )
