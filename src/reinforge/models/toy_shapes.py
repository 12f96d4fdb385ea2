"""A toy configuration of any architecture of transformers: its default one with every size made
small, by the name of the size. For dry runs of `plan --deep`, and for tests.
"""

from __future__ import annotations

import dataclasses
from typing import Any

WINDOW = 5
VOCABULARY = 259

# what a size becomes where a configuration has one of this name
SMALL: dict[str, int] = {
    **dict.fromkeys(
        (
            "hidden_size",
            "d_model",
            "n_embd",
            "emb_dim",
            "embedding_dim",
            "word_embed_proj_dim",
            "lru_width",
            "attention_hidden_size",
            "dim_model_base",
            "ple_embed_dim",
        ),
        32,
    ),
    **dict.fromkeys(
        (
            "intermediate_size",
            "ffn_dim",
            "n_inner",
            "dff",
            "dim_ff",
            "decoder_ffn_dim",
            "intermediate_size_mlp",
            "dense_intermediate_size",
            "ffn_hidden_size",
            "shared_intermediate_size",
            "feed_forward_size",
            "mamba_intermediate",
            "d_inner",
        ),
        64,
    ),
    **dict.fromkeys(
        (
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "expert_ffn_hidden_size",
            "ffn_intermediate_size",
            "router_hidden_size",
        ),
        16,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "attention_heads",
            "decoder_attention_heads",
            "swa_num_attention_heads",
            "linear_num_value_heads",
            "linear_num_heads",
            "mamba_num_heads",
            "index_n_heads",
            "num_index_heads",
        ),
        4,
    ),
    **dict.fromkeys(
        (
            "num_key_value_heads",
            "num_kv_heads",
            "swa_num_key_value_heads",
            "linear_num_key_heads",
            "num_query_groups",
            "num_global_key_value_heads",
        ),
        2,
    ),
    **dict.fromkeys(
        (
            "head_dim",
            "kv_channels",
            "swa_head_dim",
            "global_head_dim",
            "linear_head_dim",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "mamba_head_dim",
            "mamba_d_head",
            "dim_head",
            "d_head",
            "swa_v_head_dim",
        ),
        8,
    ),
    "index_head_dim": 16,
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank", "hc_lowrank"), 16),
    **dict.fromkeys(
        (
            "num_experts",
            "num_local_experts",
            "n_routed_experts",
            "moe_num_experts",
            "zero_expert_num",
        ),
        4,
    ),
    **dict.fromkeys(
        (
            "num_experts_per_tok",
            "num_experts_per_token",
            "moe_topk",
            "moe_k",
            "moe_top_k",
            "num_activated_experts",
            "top_k_experts",
        ),
        2,
    ),
    **dict.fromkeys(
        ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "n_group"), 1
    ),
    **dict.fromkeys(("topk_group", "num_expert_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 2
    ),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), 8),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size", "attention_chunk_size"), 8),
    **dict.fromkeys(("mamba_expand", "expand"), 2),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), 1),
    **dict.fromkeys(
        ("sliding_window", "window_size", "local_attention", "attention_window_size"), WINDOW
    ),
    "sliding_window_size": WINDOW,
    "index_topk": 8,
    "index_block_size": 4,
    "index_topk_blocks": 2,
    "floor_scale": 8,
    "rotary_dim": 4,
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_seq_len"),
        128,
    ),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "altup_num_inputs": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# what a default leaves open and a toy must have all the same
ALWAYS = ("pad_token_id", "bos_token_id", "eos_token_id")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")


_COMPRESS = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}

# what the rules above do not know
OWN: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16, "attn_layer_indices": [1]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "deepseek_v4": {"compress_rates": _COMPRESS, "o_groups": 2, "num_key_value_heads": 1},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 64, "moe_num_experts": 4},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "intermediate_size": [64] * 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "layer_types": ["mamba", "attention"],
    },
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"block_multiple_of": 8, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"head_dim": 16, "num_heads": 4},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "zamba": {
        "num_hidden_layers": 4,
        "attention_hidden_size": 64,
        "layers_block_type": ["mamba", "hybrid"] * 2,
    },
    "zaya": {"num_experts_per_tok": 1},
}


def shrunken(kind: type[Any], **changes: Any) -> Any:
    """A small configuration of this class, and of those that it holds. Where layers are of several
    kinds, they stay so.
    """
    default = kind()
    names = {field.name for field in dataclasses.fields(kind)}
    small: dict[str, Any] = {
        name: size
        for name, size in SMALL.items()
        if name in names and (name in ALWAYS or _is_size(_value(default, name)))
    }
    if "kv_lora_rank" in names and "num_key_value_heads" in small:
        small["num_key_value_heads"] = small["num_attention_heads"]  # latent attention has one each
    deep = next((_value(default, name) for name in LAYERS if name in names), None)
    kinds = {
        name: list(dict.fromkeys(value))
        for name in names
        if isinstance(value := _value(default, name), list)
        and len(value) == deep
        and all(isinstance(each, str) for each in value)
    }
    layers = max([2, *map(len, kinds.values())])
    small |= {name: layers for name in LAYERS if name in small}
    small |= {name: (found * layers)[:layers] for name, found in kinds.items()}
    high = {
        name: 3
        for name in names
        if name.endswith(("_token_id", "_token_index"))
        and name not in small
        and isinstance(value := _value(default, name), int)
        and value >= VOCABULARY
    }
    parts = {
        name: shrunken(type(part)).to_dict()
        for name in getattr(kind, "sub_configs", {})
        if dataclasses.is_dataclass(part := _value(default, name))
    }
    own = OWN.get(kind.model_type, {})
    return kind(**{**small, **high, **parts, **own, **changes})


def _value(config: Any, name: str) -> Any:
    """None where it has none, or one for each layer."""
    return vars(config).get(config.attribute_map.get(name, name))


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
