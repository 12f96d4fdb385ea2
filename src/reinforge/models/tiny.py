"""A small model made from nothing: a real architecture and a real byte-level tokenizer, for demos,
checks and tests.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from reinforge.core.errors import InputError
from reinforge.core.files import readable_as_usual
from reinforge.models.save import writing

SPECIAL = ("<|pad|>", "<|bos|>", "<|eos|>")
CHAT = (  # a template of few tokens that has a place for everything
    "{% if tools %}T:{% for t in tools %} {{ t.function.name }}{% endfor %}\n{% endif %}{% for m in"
    " messages %}{% if m.role == 'assistant' %}A:{{ m.content }}{% for c in m.tool_calls or []"
    " %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{{ eos_token }}\n{% else %}{{"
    " 'R:' if m.role == 'tool' else 'Q:' }}{{ m.content }}\n{% endif %}{% endfor %}{% if"
    " add_generation_prompt %}A:{% endif %}"
)


def tiny_tokenizer(text: list[str] | None = None, vocabulary: int = 300):  # type: ignore[no-untyped-def]
    """Byte-level BPE over `text` (or bytes alone), digits apart, so that any text can
    be written.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text or [], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    )


def _llama(sizes: dict[str, Any]) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**sizes)


def _qwen3_5(sizes: dict[str, Any]) -> Any:
    """Three of four layers are gated delta nets, as in the published ones, and the last attends."""
    from transformers import Qwen3_5TextConfig

    layers = sizes["num_hidden_layers"]
    head = sizes["hidden_size"] // sizes["num_attention_heads"]
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers - 1)]
    return Qwen3_5TextConfig(
        **sizes,
        head_dim=head,
        linear_num_key_heads=sizes["num_key_value_heads"],
        linear_num_value_heads=sizes["num_attention_heads"],
        linear_key_head_dim=head,
        linear_value_head_dim=head,
        layer_types=[*kinds, "full_attention"],
    )


def _gpt_oss(sizes: dict[str, Any]) -> Any:
    """Four experts of which two see a token, sinks, and a window in every second layer."""
    from transformers import GptOssConfig

    return GptOssConfig(
        **sizes,
        head_dim=sizes["hidden_size"] // sizes["num_attention_heads"],
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )


def _qwen3_moe(sizes: dict[str, Any]) -> Any:
    """Four experts of which two see a token, in every layer."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        **sizes,
        head_dim=sizes["hidden_size"] // sizes["num_attention_heads"],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=sizes["intermediate_size"] // 2,
        norm_topk_prob=True,
    )


# sizes that all architectures have in common become a configuration
ARCHITECTURES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "llama": _llama,
    "qwen3_5": _qwen3_5,
    "gpt_oss": _gpt_oss,
    "qwen3_moe": _qwen3_moe,
}


def check_architecture(name: str) -> None:
    """Refuses one of which there is no tiny model."""
    if name not in ARCHITECTURES:
        raise InputError(
            f"there is no tiny {name!r}.",
            where="architecture",
            fix=f"Choose one of {', '.join(ARCHITECTURES)}.",
        )


def make_tiny_model(
    path: str | Path,
    *,
    seed: int = 0,
    width: int = 192,
    layers: int = 4,
    heads: int = 6,
    kv_heads: int = 2,
    context: int = 256,
    text: list[str] | None = None,
    vocabulary: int = 300,
    spread: float = 0.02,
    chat: bool = False,
    architecture: str = "llama",
) -> Path:
    """Writes a randomly initialised causal LM in Hugging Face format, as a Llama of about
    width²·layers·12 parameters. `chat`: with a template. `architecture`: one of ARCHITECTURES.
    """
    check_architecture(architecture)
    import torch
    from transformers import AutoModelForCausalLM

    path = Path(path)
    if path.exists() and any(path.iterdir()) and not (path / "config.json").exists():
        raise InputError(
            f"{path} holds something else.", where="tiny model", fix="Choose an empty directory."
        )
    tokenizer = tiny_tokenizer(text, vocabulary)
    if chat:
        tokenizer.chat_template = CHAT
    config = ARCHITECTURES[architecture](
        dict(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=width * 8 // 3 // 32 * 32,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=context,
            tie_word_embeddings=True,
            initializer_range=spread,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    with writing():
        model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    readable_as_usual(*Path(path).glob("*.safetensors"))
    return path
