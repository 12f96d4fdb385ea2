"""DeepSpeed itself (0.19): imported without its words, on the process group that is open, and its
engine started around a module. The only file that imports it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from reinforge.backends.distributed.ranks import RankMember
from reinforge.config.deepspeed import DeepSpeedConfig
from reinforge.core.errors import InputError
from reinforge.models.causal import CausalModel
from reinforge.models.packed import PackedModel

_world: Any = None  # the process group that DeepSpeed's own groups were made for


class ZeroModule(nn.Module):
    """Runs a piece of work inside a module: ZeRO-3 gathers weights where modules are called, and
    our forward calls trunk and head.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, work: Callable[[], Any]) -> Any:
        return work()


def start_engine(
    member: RankMember,
    model: PackedModel,
    cfg: DeepSpeedConfig,
    optimizer: torch.optim.Optimizer | None,
) -> Any:
    """The engine around a model that is whole, in host memory.

    In stage 3 weights go to the device one by one, and are cut there.
    """
    its = _connected(member)
    for key in ("offload_optimizer", "offload_parameters"):
        if getattr(cfg, key) == "nvme" and not its.ops.__compatible_ops__["async_io"]:
            raise InputError(
                "DeepSpeed compiles its disk access on first use, and libaio or a compiler is"
                " missing.",
                where=f"train.deepspeed.{key}",
                fix="Install g++, ninja and libaio-dev (Debian's name), or use cpu.",
            )
    settings = configuration(cfg, model, member.device.type)
    root = ZeroModule(model.module)
    if cfg.stage == 3:
        place = None if cfg.offload_parameters == "none" else cfg.offload_parameters
        pinned = settings["zero_optimization"].get("offload_param", {}).get("pin_memory", False)
        its.zero.Init(
            module=root,
            dtype=model.dtype,
            config_dict_or_path=settings,
            remote_device=place,
            pin_memory=pinned,
        )
        for part in root.modules():
            for name, buffer in part._buffers.items():
                part._buffers[name] = None if buffer is None else buffer.to(member.device)
        # read by our chunked log-probs, not called
        for p in model.head.parameters() if isinstance(model, CausalModel) else ():
            its.zero.register_external_parameter(root, p)
        for p in () if model.value_head is None else model.value_head.parameters():
            its.zero.register_external_parameter(root, p)
    engine, *_ = its.initialize(
        model=root, optimizer=optimizer, config=settings, dist_init_required=False
    )
    return engine


def configuration(cfg: DeepSpeedConfig, model: PackedModel, kind: str) -> dict[str, Any]:
    """DeepSpeed's own.

    Vectors (norms, biases) stay whole: gathering them one by one costs more than they weigh.
    """
    vectors = max((p.numel() for p in model.module.parameters() if p.ndim <= 1), default=0)
    zero: dict[str, Any] = {
        "stage": cfg.stage,
        "overlap_comm": cfg.overlap,
        "stage3_param_persistence_threshold": vectors,
        "memory_efficient_linear": False,
    }
    gathers = "stage3_prefetch_bucket_size" if cfg.stage == 3 else "allgather_bucket_size"
    for key, size in (("reduce_bucket_size", cfg.reduce_bucket), (gathers, cfg.gather_bucket)):
        if size is not None:
            zero[key] = size
    for key, place in (
        ("offload_optimizer", cfg.offload_optimizer),
        ("offload_param", cfg.offload_parameters),
    ):
        if place != "none":
            zero[key] = {
                "device": place,
                "pin_memory": kind == "cuda",
                **({"nvme_path": cfg.nvme_path} if place == "nvme" else {}),
            }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0,
        "steps_per_print": 1 << 30,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "bf16": {"enabled": model.dtype == torch.bfloat16, "check_grad_overflow": True},
        "zero_optimization": zero,
    }


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Nothing reaches the terminal: DeepSpeed tries a linker while it is imported."""
    sys.stdout.flush(), sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    with open(os.devnull, "wb") as nowhere:
        for place in (1, 2):
            os.dup2(nowhere.fileno(), place)
        try:
            yield
        finally:
            for place, old in zip((1, 2), kept, strict=True):
                os.dup2(old, place)
                os.close(old)


@cache
def library(kind: str = "") -> Any:
    if kind:
        os.environ.setdefault("DS_ACCELERATOR", kind)
    if find_spec("deepspeed") is None:
        raise InputError(
            "DeepSpeed is not installed.",
            where="train.backend",
            fix="pip install 'reinforge[deepspeed]'",
        )
    with _silent():
        import deepspeed
        import deepspeed.comm
        import deepspeed.utils
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module="torch.distributed.c10d_logger"
    )
    if deepspeed.accelerator.get_accelerator().device_name() == "cpu":
        # it would be compiled here; gloo is fast enough between processes. To look at that list
        # DeepSpeed tries compilers, for every kernel that a GPU could have
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _connected(member: RankMember) -> Any:
    """DeepSpeed on the process group that is open: it keeps groups of its own, which an earlier run
    may have left.
    """
    global _world
    # DeepSpeed asks; torchrun or `Ranks` set it in all ranks but 0
    os.environ.setdefault("LOCAL_RANK", str(member.device.index or 0))
    its = library(member.device.type)
    if _world is not dist.group.WORLD:
        if _world is not None:
            its.utils.groups._release_process_group_references()
            offload = its.runtime.zero.parameter_offload
            offload.FWD_MODULE_STACK.clear()
            offload.DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = (
                0  # numbers of modules, which new ranks count from 0
            )
            its.zero.Init.param_id = 0
        its.comm.comm.cdb = None
        its.init_distributed(auto_mpi_discovery=False, dist_init_required=False, verbose=False)
        _world = dist.group.WORLD
    return its
