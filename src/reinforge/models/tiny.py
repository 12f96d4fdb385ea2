"""A small model made from nothing: a real architecture (Llama) and a real byte-level tokenizer, for
demos, checks and tests.
"""

from __future__ import annotations

from pathlib import Path

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
) -> Path:
    """Writes a randomly initialised causal LM of about width²·layers·12 parameters in Hugging Face
    format. `chat`: with a template.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    path = Path(path)
    if path.exists() and any(path.iterdir()) and not (path / "config.json").exists():
        raise InputError(
            f"{path} holds something else.", where="tiny model", fix="Choose an empty directory."
        )
    tokenizer = tiny_tokenizer(text, vocabulary)
    if chat:
        tokenizer.chat_template = CHAT
    config = LlamaConfig(
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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    with writing():
        model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    readable_as_usual(*Path(path).glob("*.safetensors"))
    return path
