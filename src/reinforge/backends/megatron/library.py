"""megatron-core itself (0.16): imported without its words, its groups of ranks, its settings for a
model, and one of its layers. The only file that imports it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from reinforge.config.megatron import installed
from reinforge.core.errors import InputError
from reinforge.models.causal import CausalModel

_world: Any = None  # the process group that Megatron's own groups were made for

USED = {
    "megatron.core": ("parallel_state",),
    "megatron.core.fusions.fused_bias_dropout": ("get_bias_dropout_add",),
    "megatron.core.tensor_parallel.layers": ("ColumnParallelLinear", "RowParallelLinear"),
    "megatron.core.transformer": ("TransformerConfig",),
    "megatron.core.transformer.attention": ("SelfAttention", "SelfAttentionSubmodules"),
    "megatron.core.transformer.enums": ("AttnMaskType",),
    "megatron.core.transformer.identity_op": ("IdentityOp",),
    "megatron.core.transformer.mlp": ("MLP", "MLPSubmodules"),
    "megatron.core.transformer.spec_utils": ("ModuleSpec", "build_module"),
    "megatron.core.transformer.torch_norm": ("WrappedTorchNorm",),
    "megatron.core.transformer.transformer_layer": (
        "TransformerLayer",
        "TransformerLayerSubmodules",
    ),
}


@cache
def library() -> SimpleNamespace:
    """What is used of it.

    It says much while it is imported, about packages that it can do without.
    """
    if not installed():
        raise InputError(
            "megatron-core is not installed.",
            where="train.backend",
            fix="pip install 'reinforge[megatron]'",
        )
    # advice about other packages, and about environment variables, which docs/distributed.md gives
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    return SimpleNamespace(
        **{
            name: getattr(import_module(module), name)
            for module, names in USED.items()
            for name in names
        }
    )


def connect(tensor: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's tensor group, and the ranks that have the same shard of every matrix as this one.

    Run by all ranks at once: Megatron's groups are global, and made again for ranks that were
    opened anew, or are to be cut otherwise.
    """
    global _world
    state = library().parallel_state
    if _world != (dist.group.WORLD, tensor):
        if state.model_parallel_is_initialized():
            state.destroy_model_parallel()
        state.initialize_model_parallel(tensor_model_parallel_size=tensor)
        _world = (dist.group.WORLD, tensor)
    return state.get_tensor_model_parallel_group(), state.get_data_parallel_group()


def configuration(hosted: CausalModel, tensor: int) -> Any:
    config = hosted.config
    attention = cast(Any, hosted.layers[0].self_attn)
    heads = config.num_attention_heads
    return library().TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=heads,
        num_query_groups=getattr(config, "num_key_value_heads", None) or heads,
        kv_channels=int(attention.head_dim),
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=attention.q_proj.bias is not None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tensor,
        params_dtype=hosted.dtype,
        bf16=hosted.dtype == torch.bfloat16,
        pipeline_dtype=hosted.dtype,
        use_cpu_initialization=True,
        perform_initialization=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )


def build_layer(
    settings: Any, i: int, attend: Callable[..., nn.Module], *, normed: bool
) -> nn.Module:
    """One of Megatron's layers; `normed`: queries and keys are, head by head."""
    its = library()
    head_norm = its.WrappedTorchNorm if normed else its.IdentityOp
    attention = its.SelfAttentionSubmodules(
        linear_qkv=its.ColumnParallelLinear,
        core_attention=attend,
        linear_proj=its.RowParallelLinear,
        q_layernorm=head_norm,
        k_layernorm=head_norm,
    )
    spec = its.ModuleSpec(
        module=its.TransformerLayer,
        submodules=its.TransformerLayerSubmodules(
            input_layernorm=its.WrappedTorchNorm,
            self_attention=its.ModuleSpec(
                module=its.SelfAttention,
                params={"attn_mask_type": its.AttnMaskType.causal},
                submodules=attention,
            ),
            self_attn_bda=its.get_bias_dropout_add,
            pre_mlp_layernorm=its.WrappedTorchNorm,
            mlp=its.ModuleSpec(
                module=its.MLP,
                submodules=its.MLPSubmodules(
                    linear_fc1=its.ColumnParallelLinear, linear_fc2=its.RowParallelLinear
                ),
            ),
            mlp_bda=its.get_bias_dropout_add,
        ),
    )
    layer: nn.Module = its.build_module(spec, config=settings, layer_number=i + 1)
    return layer.to(settings.params_dtype)
