"""What a model's config.json alone tells about whether it can be trained here, so that `plan` can
say it without weights.

This is not the list of what works: `models.proof` shows that on the module itself. These are the
architectures of which it is known what the proof would find, with words for people.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reinforge.core.state_facts import ATTENDING, RECURRENT, STATEFUL

# of layers that a pack and a paged cache know
KINDS = STATEFUL | ATTENDING | {"mlp", "moe"}

OWN = (
    "its layers have an attention of their own making, which sees neither packs nor the paged cache"
)
STATE = (
    "its layers keep state in their own way (a convolution or a recurrence), which packs and the"
    " engine do not know"
)
DRAFTS = (
    "layers of this model keep state beside keys and values, and a state cannot go back behind"
    " drafts that were wrong."
)
PREFIXES = (
    "layers of this model keep state beside keys and values, which is not known in the middle of a"
    " prompt: every prompt is computed from its beginning"
)
SPARSE = "its attention picks tokens by an index of its own, which a pack does not have"

KNOWN: dict[str, str] = {
    **dict.fromkeys(
        (
            "bloom",
            "codegen",
            "cpmant",
            "falcon",
            "gpt_neo",
            "gpt_neox_japanese",
            "gptj",
            "mpt",
            "openai-gpt",
            "reformer",
            "xglm",
            "xlm",
            "xlnet",
        ),
        OWN,
    ),
    **dict.fromkeys(("minimax", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2"), STATE),
    **dict.fromkeys(("axk2", "deepseek_v4", "hy_v4", "qwen4_exp", "qwen4_exp_text"), SPARSE),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), SPARSE),
    "diffllama": "it attends twice in each layer, which the paged cache does not know",
    "doge": (
        "it changes the mask of its attention by what it reads, which the native attention does not"
        " know"
    ),
}

# what transformers lists as causal language models and is no decoder of text
NO_DECODERS: dict[str, str] = {
    **dict.fromkeys(
        (
            "bert",
            "bert-generation",
            "big_bird",
            "camembert",
            "data2vec-text",
            "electra",
            "ernie",
            "megatron-bert",
            "rembert",
            "roberta",
            "roberta-prelayernorm",
            "roc_bert",
            "roformer",
            "xlm-roberta",
            "xlm-roberta-xl",
            "xmod",
        ),
        "it is an encoder, which reads texts and does not write them",
    ),
    **dict.fromkeys(
        (
            "bart",
            "bigbird_pegasus",
            "blenderbot",
            "blenderbot-small",
            "marian",
            "mbart",
            "mvp",
            "pegasus",
            "plbart",
            "prophetnet",
            "trocr",
            "whisper",
        ),
        "it has an encoder, and its decoder attends to what that one read",
    ),
    **dict.fromkeys(
        ("moshi", "musicgen", "musicgen_melody"), "it writes the codes of sounds, not text"
    ),
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"),
        "it drafts tokens for another model, whose cache it reads",
    ),
    "blt": "it reads patches of bytes, which a second model cuts",
}
KNOWN |= NO_DECODERS
KNOWN |= {
    "gemma4_unified": "its forward needs what images and sounds bring, also where there are none",
    "hrm_text": "it goes through its layers several times, and the paged cache holds one round",
    **dict.fromkeys(("inkling_text", "zaya"), STATE),
    **dict.fromkeys(("minimax_m3_vl", "minimax_m3_vl_text"), SPARSE),
    "modernbert-decoder": "it has further layers between its trunk and its head",
}
FIX = "Use a model whose layers all have standard attention."


def refusal(config: Mapping[str, Any]) -> str | None:
    """Why a model with this config.json cannot be trained; None: nothing is known against it."""
    text = _text(config)
    for name in (config.get("model_type"), text.get("model_type")):
        if name in KNOWN:
            return KNOWN[name]
    return STATE if _kinds(text) - KINDS else None


def keeps_state(config: Mapping[str, Any]) -> bool:
    """Whether layers of such a model keep state beside keys and values, as far as its config.json
    tells.
    """
    text = _text(config)
    return text.get("model_type") in RECURRENT or bool(_kinds(text) & STATEFUL)


def has_experts(config: Mapping[str, Any]) -> bool:
    """Whether a config.json names experts at all; of a dense model it names none."""
    return any(
        has_experts(value)
        if isinstance(value, Mapping)
        else bool(value) and ("expert" in str(key) or "moe" in str(key))
        for key, value in config.items()
    )


def balance_of(config: Mapping[str, Any], asked: float | None) -> float:
    """The coefficient of the routers' balancing loss: `asked`, or else what the model's own
    configuration says.
    """
    if asked is not None:
        return asked
    text = _text(config)
    said = text.get("router_aux_loss_coef") if text.get("output_router_logits") else None
    return float(said or 0.0)


def has_equal_latent_heads(config: Mapping[str, Any]) -> bool:
    """Whether it has latent attention whose keys are as wide as its values."""
    text = _text(config)
    keys = (text.get("qk_nope_head_dim") or 0) + (text.get("qk_rope_head_dim") or 0)
    return bool(keys) and keys == text.get("v_head_dim")


def _kinds(text: Mapping[str, Any]) -> set[str]:
    """Of layers, as a configuration lists them."""
    return {
        kind
        for key in ("layer_types", "layers_block_type")
        for kind in text.get(key) or []
        if isinstance(kind, str)
    }


def refusal_in_words(config: Mapping[str, Any], why: str) -> str:
    """The sentence that `plan` and a run refuse a model with."""
    return f"{name_of(config)} cannot be trained here: {why}."


def name_of(config: Mapping[str, Any]) -> str:
    """Of a model's class, or else of its architecture, for messages."""
    return str(next(iter(config.get("architectures") or []), config.get("model_type")))


def scores(config: Mapping[str, Any]) -> str | None:
    """The class of a checkpoint that gives scores and no tokens (a reward model); None:
    it is none.
    """
    names = [name for name in config.get("architectures") or [] if isinstance(name, str)]
    return next(
        (
            name
            for name in names
            if name.endswith(("ForSequenceClassification", "ForTokenClassification"))
        ),
        None,
    )


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part for text of a multimodal configuration."""
    part = config.get("text_config")
    return part if isinstance(part, Mapping) else config
