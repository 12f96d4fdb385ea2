"""Qwen3.5 without images for vLLM 0.26, which has it with them only: its own text model, and what
its own class with images says of the state.
"""

from vllm.model_executor.models.interfaces import IsHybrid
from vllm.model_executor.models.qwen3_5 import (
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
)


def whole(name):
    return classmethod(getattr(Qwen3_5ForConditionalGeneration, name).__func__)


class TextHybrid(Qwen3_5ForCausalLM, IsHybrid):
    get_mamba_state_dtype_from_config = whole("get_mamba_state_dtype_from_config")
    get_mamba_state_shape_from_config = whole("get_mamba_state_shape_from_config")
    get_mamba_state_copy_func = whole("get_mamba_state_copy_func")
