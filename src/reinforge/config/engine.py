"""The names of engines, what each kind of server can do, and the section `engine`: servers that
generate. The native engine needs none of it.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from reinforge.config.base import Count, Fraction, NonNegative, Positive, Section

# what `rollout.engine` may be: the trainer's own module, or a kind of server
EngineName = Literal["native", "vllm", "sglang"]


@dataclass(frozen=True)
class ServerFacts:
    """What is known of a kind of server without speaking to it. The tables of config/rules make
    its column of them, and engines/served/make.py its `Dialect`.

    A dialect is never asked for what its server cannot do: the tables refuse it in a configuration,
    `ServedEngine` in a request, and `ServerSetup.sleep_level` is 0.
    """

    dialect: str  # the class that speaks to it: module:class
    package: str  # what the Python that starts it must have
    ipc: bool = False  # takes weights as handles of GPU memory; otherwise from files
    filters: bool = True  # samples with top_p, top_k and min_p
    stop_strings: bool = True  # ends a completion at a string; at a token all of them do
    structured: bool = True  # keeps answers to a regular expression, a JSON schema or a grammar
    transfers: bool = False  # has an API of its own for weight transfers
    sleeps: bool = True  # gives GPU memory back while the trainer needs it
    keeps: bool = False  # can go on with completions under new weights
    routes: bool = False  # tells which experts of a mixture its tokens went to
    key: bool = True  # answers only who has its key; otherwise everybody on its host
    cpu_head_size: int = 1  # the smallest attention head that it computes on a CPU
    # architectures that the server itself generated with; none: only a stub of it answered
    run_with: tuple[str, ...] = ()


SERVERS: dict[str, ServerFacts] = {
    "vllm": ServerFacts(
        "reinforge.engines.served.vllm:Vllm",
        package="vllm",
        ipc=True,
        transfers=True,
        keeps=True,
        routes=True,
        cpu_head_size=32,
        run_with=("glm4_moe", "granitemoe", "llama", "mixtral", "olmoe", "qwen2", "qwen3_moe"),
    ),
    "sglang": ServerFacts(
        "reinforge.engines.served.sglang:Sglang", package="sglang", run_with=("llama",)
    ),
}


# options of servers that multiply their workers, in the words of vLLM and of SGLang
PARALLEL = (
    ("tensor-parallel-size", "tp-size", "tp"),
    ("pipeline-parallel-size", "pp-size", "pp"),
    ("data-parallel-size", "dp-size", "dp"),
)


def is_remote(address: str) -> bool:
    """Whether the server at this address is, or may be, on another host.

    >>> [is_remote(a) for a in ("http://127.0.0.1:8000", "http://localhost:1", "http://10.0.0.7:1")]
    [False, False, True]
    """
    host = urlsplit(address if "//" in address else f"//{address}").hostname or ""
    if host in ("localhost", socket.gethostname()):
        return False
    try:
        return not ip_address(host).is_loopback
    except ValueError:
        return True


class EngineConfig(Section):
    python: str | None = Field(
        None,
        description=(
            "The Python that has the server's package. Default: this one. An environment of its"
            " own is usual: the pins of servers rarely match the trainer's."
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
            "CUDA_VISIBLE_DEVICES of each replica, e.g. ['1', '2,3']. Default: those of all trainer"
            " ranks on this machine, shared out evenly. On a trainer's GPU servers sleep while it"
            " trains."
        ),
    )
    channel: Literal["auto", "ipc", "memory", "disk", "api"] = Field(
        "auto",
        description=(
            "How weights get there. ipc: handles, on the same GPU. memory: files in RAM, on the"
            " same host. disk: files in the run directory, which both must see. auto: ipc where it"
            " can be, disk for an address on another host, else memory. api: by the server's"
            " own transfer API, handles on the same GPU, else a process group (NCCL, on CPUs gloo)."
        ),
    )
    memory: Fraction = Field(
        0.4, description="Share of the GPU's memory that a replica may take for weights and cache."
    )
    sleep: Literal["auto", "never", "cache", "all"] = Field(
        "auto",
        description=(
            "What servers on trainers' GPUs give back while training. cache: the KV cache (weights"
            " wait in host memory). all: weights too, they are sent again. auto: cache where one is"
            " on a trainer's GPU, else never."
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
    running: Literal["interrupt", "keep"] = Field(
        "interrupt",
        description=(
            "What happens to completions under way when weights change. interrupt: their rest is"
            " asked for anew, and all of them read again under the new weights. keep: they go on"
            " with the cache of the old ones."
        ),
    )
    tolerance: NonNegative | None = Field(
        None,
        description=(
            "After every update: mean difference of log-probs from the trainer's that stops the"
            " run. Default: 0.002 in float32, 0.25 in bfloat16."
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
        far = [address for address in self.address if is_remote(address)]
        if far and self.channel == "memory":
            raise ValueError(
                f"channel: {far[0]} is on another host, which does not see this one's memory; use"
                " disk, with a run directory that both see"
            )
        if self.devices and len(self.devices) != self.replicas:
            raise ValueError(
                f"devices: {len(self.devices)} are given for {self.replicas} replicas; give one for"
                " each"
            )
        workers = workers_of(self)
        for own in self.devices:
            if len(gpus_of(own)) < workers:
                raise ValueError(
                    f"devices: {own!r} are {len(gpus_of(own))} GPUs for a replica of {workers}"
                    " workers; name one for each"
                )
        return self


def gpus_of(devices: str) -> list[str]:
    """
    >>> gpus_of("2, 3")
    ['2', '3']
    """
    return [name.strip() for name in devices.split(",") if name.strip()]


def workers_of(engine: EngineConfig) -> int:
    """Processes of one server, each of which has a GPU.

    >>> workers_of(EngineConfig(args={"tensor_parallel_size": 4, "pipeline-parallel-size": 2}))
    8
    """
    args = {name.strip("-").replace("_", "-"): value for name, value in engine.args.items()}
    found = 1
    for names in PARALLEL:
        found *= int(next((args[name] for name in names if name in args), 1))
    return found
