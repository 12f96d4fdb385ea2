"""Toy configurations of every decoder of transformers: `names` are all of them.

Most are transformers' own defaults made small (`models/toy_shapes.py`). Written out are those that
were once silently wrong, those that cannot be right here, and variants of one architecture that
take another path through it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from reinforge.config.architectures import NO_DECODERS
from reinforge.models.toy_shapes import shrunken

ORIGINAL = 16  # tokens up to which the rotary embeddings of `longrope` stay as they are
NAMED = 32  # and those of `dynamic`
WINDOW = 5

_BASE = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=259,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_GPT = dict(
    n_embd=32,
    n_layer=2,
    n_head=4,
    rotary_dim=4,
    vocab_size=259,
    n_positions=128,
    bos_token_id=1,
    eos_token_id=2,
)
_LATENT = dict(
    num_key_value_heads=4,
    kv_lora_rank=16,
    q_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    n_shared_experts=1,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
)
_INDEX = dict(index_topk=8, index_n_heads=2, index_head_dim=16)
_GATED = dict(
    head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)

Make = tuple[str, dict[str, Any]]  # a configuration class of transformers and its arguments

RIGHT: dict[str, Make] = {
    "longrope": (
        "Phi3Config",
        {
            **_BASE,
            "original_max_position_embeddings": ORIGINAL,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 4,
                "long_factor": [4.0] * 4,
                "original_max_position_embeddings": ORIGINAL,
            },
        },
    ),
    "dynamic": (
        "LlamaConfig",
        {
            **_BASE,
            "max_position_embeddings": NAMED,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        },
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            **_BASE,
            **_EXPERTS,
            "shared_expert_intermediate_size": 16,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 1,
        },
    ),
    "phimoe": (
        "PhimoeConfig",
        {**_BASE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    ),
    "qwen3_moe": ("Qwen3MoeConfig", {**_BASE, **_EXPERTS, "head_dim": 8}),
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            **_BASE,
            "head_dim": 8,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 259,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
    # every fourth layer has no rotary embedding
    "smollm3": ("SmolLM3Config", {**_BASE, "num_hidden_layers": 4}),
    "gpt_neox": ("GPTNeoXConfig", {k: v for k, v in _BASE.items() if k != "num_key_value_heads"}),
    # layers that do not hand on what they are given
    "stablelm": ("StableLmConfig", _BASE),
    "nemotron": ("NemotronConfig", {**_BASE, "head_dim": 8}),
    # keys and values of different sizes
    "deepseek_v2": ("DeepseekV2Config", {**_BASE, **_LATENT, "topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3Config", {**_BASE, **_LATENT}),
    # sinks
    "gpt_oss": (
        "GptOssConfig",
        {
            **_BASE,
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
        },
    ),
    "granite_swa": (
        "GraniteSWAConfig",
        {**_BASE, "sliding_window": WINDOW, "attention_multiplier": 0.35},
    ),
    # chunks in three of four layers; the fourth has no rotary embedding and scales its queries
    "llama4": (
        "Llama4TextConfig",
        {
            **_BASE,
            "num_hidden_layers": 4,
            "head_dim": 8,
            "intermediate_size_mlp": 64,
            "num_local_experts": 2,
            "attention_chunk_size": 8,
            "floor_scale": 4,
            "attn_scale": 0.5,
        },
    ),
    # sinks and values of another size
    "mimo_v2": (
        "MiMoV2FlashConfig",
        {
            **_BASE,
            "head_dim": 16,
            "v_head_dim": 8,
            "sliding_window": WINDOW,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
                for kind in ("full_attention", "sliding_attention")
            },
        },
    ),
}

# layers that keep state beside keys and values
_MAMBA2 = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=2)
STATEFUL: dict[str, Make] = {
    "lfm2": (
        "Lfm2Config",
        {**_BASE, "layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {
            **_BASE,
            **_EXPERTS,
            "layer_types": ["conv", "full_attention"],
            "num_dense_layers": 1,
        },
    ),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        {**_BASE, **_GATED, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        {
            **_BASE,
            **_GATED,
            **_EXPERTS,
            "shared_expert_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **_BASE,
            **_GATED,
            **_EXPERTS,
            "shared_expert_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "olmo_hybrid": (
        "OlmoHybridConfig",
        {**_BASE, **_GATED, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        {
            **_BASE,
            **_LATENT,
            "q_lora_rank": None,
            "v_head_dim": 16,
            "num_local_experts": 4,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
        },
    ),
    "mamba2": (
        "Mamba2Config",
        dict(
            hidden_size=32,
            num_hidden_layers=2,
            vocab_size=259,
            num_heads=4,
            head_dim=16,
            state_size=8,
            n_groups=2,
            chunk_size=8,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        ),
    ),
    "bamba": ("BambaConfig", {**_BASE, **_MAMBA2, "mamba_expand": 2, "attn_layer_indices": [1]}),
    "granite_hybrid": (
        "GraniteMoeHybridConfig",
        {
            **_BASE,
            **_MAMBA2,
            "mamba_expand": 2,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 16,
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        {**_BASE, **_MAMBA2, "mamba_d_ssm": 64, "head_dim": 8},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            **_BASE,
            "head_dim": 8,
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "attention", "moe"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 2,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "mamba": (
        "MambaConfig",
        dict(
            hidden_size=32,
            num_hidden_layers=2,
            vocab_size=259,
            state_size=8,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        ),
    ),
    "falcon_mamba": (
        "FalconMambaConfig",
        dict(
            hidden_size=32,
            num_hidden_layers=2,
            vocab_size=259,
            state_size=8,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        ),
    ),
    "jamba": (
        "JambaConfig",
        {
            **_BASE,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
    ),
}

REFUSED: dict[str, Make] = {
    "gptj": ("GPTJConfig", _GPT),
    "codegen": ("CodeGenConfig", {**_GPT, "n_ctx": 128}),
    "gpt_neo": (
        "GPTNeoConfig",
        dict(
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            window_size=8,
            vocab_size=259,
            max_position_embeddings=128,
            bos_token_id=1,
            eos_token_id=2,
        ),
    ),
    "deepseek_v32": ("DeepseekV32Config", {**_BASE, **_LATENT, **_INDEX}),
    "glm_moe_dsa": ("GlmMoeDsaConfig", {**_BASE, **_LATENT, **_INDEX}),
    "diffllama": ("DiffLlamaConfig", _BASE),
    "doge": ("DogeConfig", {**_BASE, "keep_window_size": 8}),
    "bloom": (
        "BloomConfig",
        dict(
            hidden_size=32,
            n_layer=2,
            n_head=4,
            vocab_size=259,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        ),
    ),
    "falcon": ("FalconConfig", {**_BASE, "alibi": False}),
    "rwkv": (
        "RwkvConfig",
        dict(hidden_size=32, num_hidden_layers=2, vocab_size=259, context_length=128),
    ),
}

ALL = RIGHT | STATEFUL | REFUSED

_ROPE = {"rope_theta": 10000.0, "factor": 4.0}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}

# the name of an architecture, and what is changed of its toy
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied": ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
    "llama, linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", **_ROPE}}),
    "llama, yarn": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 32, **_ROPE}},
    ),
    "llama, llama3 rope": (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", **_LLAMA3, **_ROPE}},
    ),
    "qwen2, window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3, window": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "phi3, window": ("phi3", {"sliding_window": WINDOW}),
    "starcoder2, window": ("starcoder2", {"sliding_window": WINDOW}),
    "gemma2, no softcap": ("gemma2", {"attn_logit_softcapping": None}),
    "deepseek_v2, no query rank": ("deepseek_v2", {"q_lora_rank": None}),
    "deepseek_v3, equal heads": ("deepseek_v3", {"v_head_dim": 16}),
    "falcon, alibi": ("falcon", {"alibi": True}),
    "falcon, new decoder": ("falcon", {"alibi": False, "new_decoder_architecture": True}),
    "gpt_bigcode, many heads": ("gpt_bigcode", {"multi_query": False}),
    "opt, norm after": ("opt", {"do_layer_norm_before": False}),
}

VISION = "it reads images; its text half is a model of its own, or cannot be saved alone"

# of MODEL_FOR_CAUSAL_LM_MAPPING_NAMES: what is no decoder of text, with the reason
EXCLUDED: dict[str, str] = {
    **NO_DECODERS,
    **dict.fromkeys(
        ("emu3", "fuyu", "gemma3n", "git", "got_ocr2", "mllama", "phi4_multimodal"), VISION
    ),
}


def names() -> list[str]:
    """Every toy that can be made: those written out here, and every decoder that transformers
    lists.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    listed = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in EXCLUDED]
    return sorted({*listed, *ALL, *VARIANTS})


def make_config(name: str, **changes: Any) -> Any:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if name in ALL:
        kind, arguments = ALL[name]
        return getattr(transformers, kind)(**{**arguments, **changes})
    base, own = VARIANTS.get(name, (name, {}))
    return shrunken(CONFIG_MAPPING[base], **{**own, **changes})


def make_architecture(
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    spread: float = 4.0,
    **changes: Any,
) -> Any:
    """A causal LM with transformers' own attention and weights wide enough that every token of the
    context matters.
    """
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = AutoModelForCausalLM.from_config(
            make_config(name, **changes), attn_implementation="eager"
        )
    with torch.no_grad():
        for part, p in module.named_parameters():
            if p.ndim > 1:
                p.mul_(spread)
            elif part.endswith("sinks"):  # each head its own, of the size of scores
                p.copy_(torch.linspace(-1.0, 2.0, len(p)))
    return module.eval().to(dtype)


def write_tokenizer(folder: Path) -> None:
    from reinforge.models.tiny import tiny_tokenizer

    tiny_tokenizer(None, 300).save_pretrained(folder)


def save_architecture(
    name: str, folder: Path, tokenizer: Callable[[Path], Any], **changes: Any
) -> Path:
    """A model directory; `tokenizer` writes one there."""
    make_architecture(name, **changes).save_pretrained(folder)
    tokenizer(folder)
    return folder
