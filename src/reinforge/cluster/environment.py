"""Which variables of the controller's environment every actor gets.

An actor is started by Ray on another machine and inherits from Ray there, not from the shell in
which the run was started.
"""

from __future__ import annotations

from collections.abc import Mapping

PREFIXES = (
    "HF_",
    "NCCL_",
    "GLOO_",
    "UCX_",
    "FI_",  # libfabric, which NCCL uses on some clouds
    "VLLM_",
    "SGLANG_",
    "PYTORCH_",
    "TORCH_",
    "TORCHINDUCTOR_",
    "TRITON_",
    "OMP_",
    "KMP_",
    "MKL_",
)
NAMES = ("CUDA_DEVICE_ORDER", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING")
ALWAYS = {"TOKENIZERS_PARALLELISM": "false"}


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """Those that an actor gets. Which GPUs it sees, and which rank it is, is said by others.

    >>> forwarded({"NCCL_DEBUG": "INFO", "RANK": "3", "CUDA_VISIBLE_DEVICES": "0"})
    {'NCCL_DEBUG': 'INFO', 'TOKENIZERS_PARALLELISM': 'false'}
    """
    found = {
        name: value
        for name, value in environment.items()
        if name.startswith(PREFIXES) or name in NAMES
    }
    return {**found, **ALWAYS}
