"""A model directory as one GGUF file, for llama.cpp and what is built on it.

`reinforge export --gguf` calls it. Which tensor has which name, and how a file is laid out, the
`gguf` package of llama.cpp knows; here is what it has to be told: the numbers of the model, its
tokenizer, and which rows of queries and keys llama.cpp wants in another order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reinforge.core.errors import InputError

WHERE = "--gguf"
PRECISIONS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
# model_type in transformers -> architecture in llama.cpp
ARCHITECTURES = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
OTHERS = (
    "Export without --gguf and use llama.cpp's own convert_hf_to_gguf.py on the directory, which"
    " knows more models."
)


def write_gguf(folder: Path, precision: str) -> Path:
    """Writes `folder`/model-F16.gguf (or F32, BF16) from the model and tokenizer in `folder`."""
    gguf = gguf_package()
    config = json.loads((folder / "config.json").read_text())
    name = ARCHITECTURES.get(config["model_type"])
    if name is None:
        raise InputError(
            f"models of the type {config['model_type']} are not written as GGUF here.",
            where=WHERE,
            fix=f"These are: {', '.join(ARCHITECTURES)}. {OTHERS}",
        )
    path = folder / f"model-{precision.upper()}.gguf"
    arch = gguf.MODEL_ARCH[name]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    names = gguf.get_tensor_name_map(arch, _layers(config))
    try:
        _add_numbers(writer, config, gguf, precision)
        _add_tokenizer(writer, folder, config["vocab_size"])
        for target, array, kind in _arrays(folder, config, names, precision):
            raw = gguf.GGMLQuantizationType[kind]
            writer.add_tensor_info(target, array.shape, array.dtype, array.nbytes, raw_dtype=raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        # one after the other: a large model need not fit the memory twice
        for _, array, _ in _arrays(folder, config, names, precision):
            writer.write_tensor_data(array)
    except BaseException:
        writer.close()
        path.unlink(missing_ok=True)
        raise
    writer.close()
    return path


def gguf_package() -> Any:
    try:
        import gguf
    except ImportError:
        raise InputError(
            "GGUF files are written with the package gguf, which is not installed.",
            where=WHERE,
            fix="pip install 'reinforge[gguf]'",
        ) from None
    return gguf


# ---- the numbers of the model ----


def _layers(config: dict[str, Any]) -> int:
    return int(config["num_hidden_layers"])


def _head_size(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _add_numbers(writer: Any, config: dict[str, Any], gguf: Any, precision: str) -> None:
    _refuse_windows(config)
    size = _head_size(config)
    writer.add_name(str(config.get("_name_or_path") or "model"))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(_layers(config))
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config.get("num_key_value_heads") or config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_vocab_size(config["vocab_size"])
    kinds = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16"}
    writer.add_file_type(int(gguf.LlamaFileType[kinds[precision]]))
    rope = _rope(config)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """How positions turn queries and keys: the section of today's files, or that of older ones."""
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    found.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    found.setdefault("rope_type", found.get("type", "default"))
    if found["rope_type"] not in ("default", "linear", "llama3"):
        raise InputError(
            f"positions of the kind {found['rope_type']!r} are not written as GGUF here.",
            where=WHERE,
            fix=OTHERS,
        )
    return found


def _refuse_windows(config: dict[str, Any]) -> None:
    """llama.cpp lets every layer of these architectures see everything."""
    window = config.get("sliding_window")
    kinds = set(config.get("layer_types") or [])
    slides = "sliding_attention" in kinds or (not kinds and config.get("use_sliding_window", True))
    if window and slides and window < config["max_position_embeddings"]:
        raise InputError(
            f"the layers of this model see the last {window} tokens only, which llama.cpp does not"
            " do for its architecture.",
            where=WHERE,
            fix=OTHERS,
        )


def _rope_factors(config: dict[str, Any]) -> Tensor | None:
    """By what llama3's kind of scaling divides each frequency."""
    rope = _rope(config)
    if rope["rope_type"] != "llama3":
        return None
    size = _head_size(config)
    frequencies = float(rope["rope_theta"]) ** -(torch.arange(0, size, 2).double() / size)
    lengths = 2 * math.pi / frequencies
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    before = float(rope["original_max_position_embeddings"])
    factor = float(rope["factor"])
    between = (before / lengths - low) / (high - low)
    share = between.clamp(0, 1)
    return (1 / ((1 - share) / factor + share)).float()


# ---- the tokenizer ----

GPT2 = "gpt-2"
# patterns by which text is cut before byte pairs are joined, and llama.cpp's name of each
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    _WORDS.replace("DIGITS", r"\p{N}"): "qwen2",
    _WORDS.replace("DIGITS", r"\p{N}{1,3}"): "llama-bpe",
}
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # kinds of tokens


def _add_tokenizer(writer: Any, folder: Path, vocabulary: int) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    file = json.loads(tokenizer.backend_tokenizer.to_str())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_way_of_cutting(file))
    tokens, kinds = _tokens(tokenizer, file, vocabulary)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    merges = file["model"]["merges"]
    if not merges:
        raise InputError(
            "the tokenizer joins no bytes at all, and llama.cpp reads none without merges.",
            where=WHERE,
            fix="Take a tokenizer that was trained on some text.",
        )
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    ids = {kind: getattr(tokenizer, f"{kind}_token_id", None) for kind in ("bos", "pad", "unk")}
    for kind, number in {**ids, "eos": end_token(tokenizer, folder)}.items():
        if number is not None:
            getattr(writer, f"add_{kind}_token_id")(number)
    bare = tokenizer.encode("x", add_special_tokens=False)
    whole = tokenizer.encode("x")
    writer.add_add_bos_token(len(whole) > len(bare) and whole[0] == tokenizer.bos_token_id)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def end_token(tokenizer: Any, folder: Path) -> int | None:
    """The token that ends an answer: the end of turn, where the generation config names several."""
    path = folder / "generation_config.json"
    ends = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
    if isinstance(ends, list):
        own = [end for end in ends if end != tokenizer.eos_token_id]
        return int(own[0] if tokenizer.chat_template and own else ends[0])
    found = tokenizer.eos_token_id if ends is None else ends
    return None if found is None else int(found)


def _way_of_cutting(file: dict[str, Any]) -> str:
    """llama.cpp's name for how this tokenizer cuts text into words."""
    first = file.get("pre_tokenizer") or {}
    steps = first["pretokenizers"] if first.get("type") == "Sequence" else [first]
    kinds = [step.get("type") for step in steps]
    bytes_last = kinds[-1:] == ["ByteLevel"] and file["model"]["type"] == "BPE"
    regular = bytes_last and steps[-1].get("use_regex", True)
    if kinds == ["ByteLevel"] and regular:
        return GPT2
    if kinds == ["Digits", "ByteLevel"] and regular and steps[0].get("individual_digits"):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and bytes_last and not regular:
        pattern = steps[0]["pattern"].get("Regex", "")
        if pattern in PATTERNS and steps[0].get("behavior") == "Isolated":
            return PATTERNS[pattern]
    raise InputError(
        f"a tokenizer that cuts text by {kinds or 'nothing'} is not written as GGUF here: llama.cpp"
        " has to know how.",
        where=WHERE,
        fix=f"Known are those of GPT-2, SmolLM2, Llama 3 and Qwen. {OTHERS}",
    )


def _tokens(tokenizer: Any, file: dict[str, Any], vocabulary: int) -> tuple[list[str], list[int]]:
    """Every token by its id, up to the size of the embedding, and what kind it is."""
    by_id = {number: text for text, number in tokenizer.get_vocab().items()}
    added = {token["id"]: token for token in file["added_tokens"]}
    if max(by_id) >= vocabulary:
        raise InputError(
            f"the tokenizer has a token {max(by_id)} ({by_id[max(by_id)]!r}), and the model embeds"
            f" tokens up to {vocabulary - 1}.",
            where=WHERE,
            fix="Give the model the tokenizer that it was trained with.",
        )
    tokens = [by_id.get(number, f"[unused{number}]") for number in range(vocabulary)]
    kinds = []
    for number in range(vocabulary):
        if number in added:
            kinds.append(CONTROL if added[number]["special"] else USER_DEFINED)
        else:
            kinds.append(NORMAL if number in by_id else UNUSED)
    return tokens, kinds


# ---- tensors ----


def _arrays(
    folder: Path, config: dict[str, Any], names: Any, precision: str
) -> Iterator[tuple[str, Any, str]]:
    """llama.cpp's name, numbers and kind of every tensor. Norms and biases stay in float32."""
    factors = _rope_factors(config)
    if factors is not None:
        yield "rope_freqs.weight", factors.numpy(), "F32"
    for name, tensor in _weights(folder):
        if config.get("tie_word_embeddings") and name == "lm_head.weight":
            continue
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise InputError(
                f"llama.cpp has no name for the tensor {name}.", where=WHERE, fix=OTHERS
            )
        if ARCHITECTURES[config["model_type"]] == "LLAMA" and name.endswith(_TURNED):
            heads = "num_key_value_heads" if ".k_proj." in name else "num_attention_heads"
            tensor = interleaved(tensor, int(config.get(heads) or config["num_attention_heads"]))
        kind = precision if tensor.ndim > 1 else "f32"
        yield target, _array(name, tensor, kind), kind.upper()


def _array(name: str, tensor: Tensor, kind: str) -> Any:
    made = tensor.to(PRECISIONS[kind]).contiguous()
    if kind == "bf16":  # numpy has no such numbers
        return made.view(torch.uint8).numpy()
    if not bool(made.isfinite().all()) and bool(tensor.isfinite().all()):
        raise InputError(
            f"{name} has numbers up to {float(tensor.abs().max()):.3g}, which are too large for"
            f" {kind.upper()}.",
            where=WHERE,
            fix="Give --gguf bf16 or f32.",
        )
    return made.numpy()


_TURNED = tuple(f".{part}_proj.{kind}" for part in "qk" for kind in ("weight", "bias"))


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys in the order in which llama.cpp turns them for the Llama family:
    pairs are neighbours, where transformers has them half a head apart.
    """
    half = rows.shape[0] // heads // 2
    return rows.view(heads, 2, half, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (no dictionary)
                yield name, file.get_tensor(name)
