"""Models and tokenizers from a directory, a hub id or a GGUF file.

Loading runs no code from a checkpoint: every call into transformers says so, because it would
otherwise ask on standard input. Only `model.trust_remote_code` allows it, and only for that model
and its tokenizer. A checkpoint cannot choose its attention either, which transformers may fetch
from a hub.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from reinforge.config import architectures
from reinforge.config.adapter import AdapterConfig
from reinforge.config.chat_templates import CHAT_TEMPLATES, fitting
from reinforge.config.model import ELSEWHERE, ModelConfig
from reinforge.config.saved_adapter import check_base
from reinforge.core.errors import InputError, said_by
from reinforge.core.hub import unavailable
from reinforge.core.hub_trouble import hub_trouble
from reinforge.models import rope
from reinforge.models.adapters import (
    add_adapter,
    is_adapted,
    keep_unpacked,
    make_lean,
    quantization,
)
from reinforge.models.attention import MaskExtents, set_mask_extents
from reinforge.models.causal import CausalModel
from reinforge.models.checkpointing import checkpoint_layers
from reinforge.models.exact import checkpoint_contexts
from reinforge.models.exact_proof import prove
from reinforge.models.proof import refusing
from reinforge.models.save import no_foreign_bars
from reinforge.models.scalar import HEAD, ScalarModel

SENSES = ("vision", "audio")  # of multimodal models


def _source(cfg: ModelConfig, where: str = "model.path") -> tuple[str, dict[str, Any]]:
    """What to hand to `from_pretrained`: (name or directory, keyword arguments)."""
    path = Path(cfg.path).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise InputError(
                f"no such file: {path}", where=where, fix="Give the path of an existing .gguf file."
            )
        return str(path.parent), {"gguf_file": path.name}
    if (
        (path / "adapter_config.json").is_file()
        and not (path / "config.json").is_file()
        and where != "model.tokenizer"
    ):
        raise InputError(
            f"{path} is a peft adapter, not a model.",
            where=where,
            fix="Put its base model here, and this path under adapter.path.",
        )
    if (path / "checkpoints").is_dir() and (path / "metrics.jsonl").is_file():
        raise InputError(
            f"{path} is the directory of a run, not a model.",
            where=where,
            fix=(
                f"Write its model with `reinforge export {path} DIRECTORY`, and give that"
                " directory."
            ),
        )
    if path.exists():
        return str(path), {}
    if (
        cfg.path.startswith((".", "/", "~"))
        or cfg.path.count("/") > 1
        or ("/" in cfg.path and path.parent.is_dir())
    ):
        raise InputError(
            f"no such directory: {path}",
            where=where,
            fix="Give a local directory, a .gguf file or a hub id such as org/name.",
        )
    if (why := unavailable(cfg.path)) is not None:
        raise InputError(
            f"{why}.", where=where, fix="Check the path, the spelling and the network."
        )
    return cfg.path, {"revision": cfg.revision} if cfg.revision else {}


def _fetch(what: str, cfg: ModelConfig, load: Any, where: str = "model.path") -> Any:
    """What `load(trust_remote_code=...)` gives; what it raises names the model and the key."""
    from safetensors import SafetensorError

    try:
        return load(trust_remote_code=cfg.trust_remote_code)
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        if "trust_remote_code" in str(error):
            trust = (
                "If you have read it and trust it, set model.trust_remote_code to true; otherwise"
                " use another model."
            )
            raise InputError(
                f"the {what} of {cfg.path!r} is Python code in its own directory, and that is not"
                " run.",
                where=where,
                fix=trust if where.startswith("model.") else "Use a model that transformers knows.",
            ) from error
        if (trouble := hub_trouble(error, cfg.path)) is not None:
            raise InputError(trouble[0], where=where, fix=trouble[1]) from error
        raise InputError(
            f"cannot load the {what} of {cfg.path!r}: {said_by(error)}",
            where=where,
            fix="Check the path; for a hub id check the spelling, the network and your login.",
        ) from error


def load_tokenizer(cfg: ModelConfig, where: str = "model.path") -> Any:
    from transformers import AutoTokenizer

    own = cfg.tokenizer is not None
    source, kwargs = _source(
        cfg.model_copy(update={"path": cfg.tokenizer}) if own else cfg,
        "model.tokenizer" if own else where,
    )
    if "gguf_file" not in kwargs:
        _refuse_none(Path(source), "model.tokenizer" if own else where)
    tokenizer = _fetch(
        "tokenizer", cfg, partial(AutoTokenizer.from_pretrained, source, **kwargs), where
    )
    if cfg.chat_template:
        tokenizer.chat_template = chat_template_of(cfg.chat_template, tokenizer)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


# of which every tokenizer has one at least; code of its own may bring anything
_OF_TOKENIZERS = ("*token*", "*vocab*", "*.model", "merges*", "tekken*", "*.py")


def _refuse_none(folder: Path, where: str) -> None:
    """Of a directory without a tokenizer transformers may make one that knows no words."""
    if folder.is_dir() and not any(list(folder.glob(files)) for files in _OF_TOKENIZERS):
        raise InputError(
            f"there is no tokenizer in {folder}.",
            where=where,
            fix=(
                "Copy its files there (tokenizer.json, tokenizer_config.json), or set"
                " model.tokenizer to a directory or hub id that has them."
            ),
        )


def chat_template_of(name: str, tokenizer: Any) -> str:
    """The text of a chat template that has a name or is a file."""
    where = "model.chat_template"
    named = CHAT_TEMPLATES.get(name)
    if named is None:
        try:
            return Path(name).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"{name} is neither the name of a chat template nor a file that can be read:"
                f" {error}.",
                where=where,
                fix=f"There are: {', '.join(CHAT_TEMPLATES)}.",
            ) from error
    vocabulary = tokenizer.get_vocab()
    missing = [token for token in named.tokens if token not in vocabulary]
    if missing or tokenizer.eos_token is None:
        lacks = f"{', '.join(missing)}, with which {name} writes turns" if missing else "EOS"
        raise InputError(
            f"the tokenizer does not have {lacks}.",
            where=where,
            fix=f"Those that it can write: {', '.join(fitting(vocabulary))}.",
        )
    return named.source


def load_config(cfg: ModelConfig, where: str = "model.path") -> Any:
    from transformers import AutoConfig

    source, kwargs = _source(cfg, where)
    config = _fetch(
        "configuration", cfg, partial(AutoConfig.from_pretrained, source, **kwargs), where
    )
    # a config.json may name an attention of a hub, which transformers would fetch and run
    config._attn_implementation = "eager"
    return config


def context_length(cfg: ModelConfig) -> int:
    """The longest sequence the model was made for, read from its configuration without loading
    weights.
    """
    return rope.context(load_config(cfg).get_text_config()) or 1 << 20


def check_architecture(
    shape: Any,
    path: str,
    where: str = "model.path",
    *,
    scores: bool = False,
    in_memory: bool = False,
) -> None:
    """Refuses, before weights are read, what is known of a model's configuration: an architecture
    that cannot be trained or loaded, and a reward model where a policy is wanted. `scores`: a
    reward model is wanted. `in_memory`: there is nothing to load.
    """
    facts = shape.to_dict()
    if reason := architectures.refusal(facts):
        raise InputError(
            architectures.refusal_in_words(facts, reason), where=where, fix=architectures.FIX
        )
    if not scores and not in_memory and (reason := _no_text_model(shape)):
        raise InputError(
            architectures.refusal_in_words(facts, reason),
            where=where,
            fix="Use a checkpoint of its text model, or another architecture.",
        )
    if not scores and (kind := architectures.scores(facts)):
        raise InputError(
            f"{path} is a {kind}: it gives scores, and cannot write text.",
            where=where,
            fix="Give a causal LM here; a reward model goes under rewards.",
        )


def no_text_model(model_type: str) -> str | None:
    """Why transformers has nothing that writes text for an architecture; None: it has, or does not
    know the architecture.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    if model_type not in CONFIG_MAPPING_NAMES:
        return None
    kind = CONFIG_MAPPING[model_type]
    return _writes_no_text(kind, [s for s in SENSES if f"{s}_config" in kind.sub_configs])


def _no_text_model(shape: Any) -> str | None:
    """The same of a model's configuration; None also where the checkpoint brings code of its
    own.
    """
    if getattr(shape, "auto_map", None):
        return None
    return _writes_no_text(type(shape), [s for s in SENSES if hasattr(shape, f"{s}_config")])


def _writes_no_text(kind: type, senses: list[str]) -> str | None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    if not senses:
        return "transformers lists no causal language model for it"
    return (
        f"it has a tower for {' and '.join(senses)}, and transformers does not load the text half"
        " of such a checkpoint alone"
    )


def _check_architecture(
    cfg: ModelConfig, where: str = "model.path", *, scores: bool = False
) -> None:
    check_architecture(load_config(cfg, where), cfg.path, where, scores=scores)


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "there is no GPU that torch can use.",
            where="model.device",
            fix="Set model.device=cpu or auto.",
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"there is no GPU {device.index}: torch sees {torch.cuda.device_count()}, from 0.",
            where="model.device",
            fix="Set model.device=auto, or the number of one that is there.",
        )
    return device


def check_place(module: Any) -> None:
    """Refuses a module that lies where nothing of ours runs (mps, xpu, hpu, ...)."""
    if module.device.type not in ("cpu", "cuda"):
        raise InputError(
            f"the model lies on {module.device}: {ELSEWHERE}.",
            where="model.device",
            fix='Move it: model.to("cpu").',
        )


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def check_index(folder: Path, where: str = "model.path") -> None:
    """Refuses a model whose index of shards names files outside of its directory, which
    transformers would open.
    """
    for index in sorted(folder.glob("*.index.json")) if folder.is_dir() else ():
        try:
            named = set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"not an index of shards: {error!r}.", where=str(index), fix="Copy the model again."
            ) from error
        outside = sorted(
            str(name)
            for name in named
            if Path(str(name)).is_absolute() or ".." in Path(str(name)).parts
        )
        if outside:
            raise InputError(
                f"{index} names {outside[0]!r}, which lies outside of the model's directory.",
                where=where,
                fix=(
                    "A model's files lie beside its index: copy them there, and correct the index"
                    " if you trust it."
                ),
            )


def _load_module(
    cfg: ModelConfig, kind: Any, where: str = "model.path", *, quantize: bool = False
) -> Any:
    """The transformers model of an Auto class, on its device, with every weight from the
    checkpoint. Weights in MXFP4 (gpt-oss) become plain numbers, which can be trained. `quantize`:
    to NF4 (QLoRA).
    """
    from transformers import Mxfp4Config

    device = pick_device(cfg.device)
    dtype = pick_dtype(cfg.dtype, device)
    no_foreign_bars()
    source, kwargs = _source(cfg, where)
    check_index(Path(source), where)
    mxfp4 = False
    if "gguf_file" not in kwargs:
        kwargs["config"] = load_config(cfg, where)
        mxfp4 = _quantized_as(kwargs["config"]) == "mxfp4"
    if mxfp4:
        kwargs["quantization_config"] = Mxfp4Config(dequantize=True)
    if quantize:
        if "gguf_file" in kwargs or mxfp4:
            raise InputError(
                f"{'an MXFP4 checkpoint' if mxfp4 else 'a GGUF file'} is quantised in its own way.",
                where="adapter.kind",
                fix="Use lora, or the original model.",
            )
        kwargs |= {"quantization_config": quantization(dtype), "device_map": {"": device}}
    load = partial(kind.from_pretrained, source, dtype=dtype, output_loading_info=True, **kwargs)
    try:
        module, info = _fetch("model", cfg, load, where)
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise InputError(
            f"the weights of {cfg.path} have other sizes than its config.json says.",
            where=where,
            fix="Give the configuration that was saved with these weights.",
        ) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise InputError(
            f"{cfg.path} lacks {len(missing)} weights of {type(module).__name__}, e.g."
            f" {missing[0]}; they would be random.",
            where=where,
            fix=(
                "Give a complete model (not a base model without its head, an adapter, or a part of"
                " a sharded model)."
            ),
        )
    if "gguf_file" in kwargs:
        module = without_quantization(module, dtype)
    if mxfp4:
        module = _plain_numbers(module, dtype)
    if quantize:
        keep_unpacked(module)
        return module.eval()
    return module.to(device).eval()


def _quantized_as(config: Any) -> str | None:
    """The method by which a checkpoint says that its weights are quantised."""
    named = getattr(config, "quantization_config", None)
    found = named.get("quant_method") if isinstance(named, dict) else None
    return None if found is None else str(found)


def _plain_numbers(module: Any, dtype: torch.dtype) -> Any:
    """A model that was dequantised from MXFP4, as if it had never been packed: transformers leaves
    those weights in bfloat16, and would pack their names again when it saves them.
    """
    module._weight_conversions = [
        conversion
        for conversion in module._weight_conversions
        if not any(name.endswith("_blocks") for name in conversion.source_patterns)
    ]
    return module.to(dtype)


def load_model(
    cfg: ModelConfig,
    adapter: AdapterConfig | None = None,
    *,
    seed: int = 0,
    proved: MaskExtents | None = None,
) -> CausalModel:
    """The model ready to train and to generate, checked against transformers' own forward.

    `seed` initialises the adapter. `proved`: see `_prove`.
    """
    from transformers import AutoModelForCausalLM

    _check_architecture(cfg)
    if adapter is not None and adapter.path is not None:
        check_base(adapter.path, load_config(cfg))
    tokenizer = load_tokenizer(cfg)
    module = _load_module(
        cfg, AutoModelForCausalLM, quantize=adapter is not None and adapter.kind == "qlora"
    )
    return _made_ready(module, tokenizer, cfg, adapter, seed, proved)


def model_of(
    module: Any, cfg: ModelConfig, adapter: AdapterConfig | None = None, *, seed: int = 0
) -> CausalModel:
    """A transformers or peft module that is in memory as a model of ours, on the device of `cfg`
    and with its tokenizer.
    """
    check_architecture(module.config, type(module).__name__, "model", in_memory=True)
    check_place(module)
    if cfg.device != "auto" or module.device.type == "cpu":
        module.to(pick_device(cfg.device))
    if is_adapted(module):
        make_lean(module)
    return _made_ready(module, load_tokenizer(cfg), cfg, adapter, seed)


def _made_ready(
    module: Any,
    tokenizer: Any,
    cfg: ModelConfig,
    adapter: AdapterConfig | None,
    seed: int,
    proved: MaskExtents | None = None,
) -> CausalModel:
    """The model of a module, proved, with a new adapter if one is asked for."""
    with refusing(module):
        _prove(CausalModel(module, tokenizer), proved)
    if adapter is not None:
        module = add_adapter(module, adapter, seed=seed)
    model = CausalModel(module, tokenizer, exact=cfg.exact)
    if cfg.exact:
        prove(model)
    if cfg.compile is True and model.device.type == "cuda":
        model.compile_layers()
    if cfg.gradient_checkpointing:
        again = {"context_fn": checkpoint_contexts} if cfg.exact else {}
        checkpoint_layers(module, cfg.gradient_checkpointing, **again)
        if is_adapted(module):
            module.enable_input_require_grads()
    return model


def _prove(model: CausalModel | ScalarModel, proved: MaskExtents | None) -> None:
    """Compares the model with transformers' own forward. `proved`: another process has done it with
    the same checkpoint, and this is what the proof found beside: what the layers' masks say.
    """
    if proved is None:
        model.verify()
    else:
        set_mask_extents(model.trunk, proved)


def load_scalar(
    cfg: ModelConfig,
    adapter: AdapterConfig | None = None,
    *,
    where: str = "model.path",
    fresh: bool = False,
    seed: int = 0,
    attributes: Sequence[str] | None = (),
    proved: MaskExtents | None = None,
) -> ScalarModel:
    """A critic or reward model, checked against transformers' own forward: a sequence classifier
    with one label, or, with `fresh`, also a causal LM, which gets a head that starts at 0. With an
    adapter the head is trained whole. `attributes`: see `ScalarModel`; `proved`: see `_prove`.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    _check_architecture(cfg, where, scores=True)
    names = load_config(cfg, where).architectures or []
    classifier = any(name.endswith("ForSequenceClassification") for name in names)
    if not classifier and not fresh:
        raise InputError(
            f"{cfg.path} is a {', '.join(names) or 'model of unknown kind'}: it has no head that"
            " gives a score.",
            where=where,
            fix="Give a reward model: a sequence-classification checkpoint with one label.",
        )
    tokenizer = load_tokenizer(cfg, where)
    module = _load_module(
        cfg, AutoModelForSequenceClassification if classifier else AutoModelForCausalLM, where
    )
    with refusing(module, where):
        model = (ScalarModel if classifier else ScalarModel.on_trunk)(
            module, tokenizer, where=where, attributes=attributes
        )
        _prove(model, proved)
    if adapter is not None:
        model = ScalarModel(
            add_adapter(model.module, adapter, seed=seed, head=HEAD),
            tokenizer,
            where=where,
            attributes=attributes,
        )
    if cfg.compile is True and model.device.type == "cuda":
        model.compile_layers()
    if cfg.gradient_checkpointing and adapter is not None:
        model.plain.enable_input_require_grads()
    if cfg.gradient_checkpointing:
        checkpoint_layers(model.module, cfg.gradient_checkpointing)
    return model


def without_quantization(module: Any, dtype: torch.dtype) -> Any:
    """What is dequantised (a GGUF file, a merged QLoRA) but still says that it is quantised cannot
    be saved: make a plain one.
    """
    config = type(module.config).from_dict(
        {k: v for k, v in module.config.to_dict().items() if k != "quantization_config"}
    )
    plain = type(module)._from_config(config, dtype=dtype)
    plain.load_state_dict(module.state_dict())
    plain.generation_config = module.generation_config
    return plain


def stop_tokens(model: CausalModel) -> tuple[int, ...]:
    """Ids that end a completion: the tokenizer's eos and whatever the generation config adds."""
    found: list[int] = []
    generation = getattr(model.causal, "generation_config", None)
    for value in (
        getattr(model.tokenizer, "eos_token_id", None),
        getattr(generation, "eos_token_id", None),
        getattr(model.config, "eos_token_id", None),
    ):
        found.extend(
            value if isinstance(value, (list, tuple)) else [] if value is None else [value]
        )
    return tuple(sorted({int(t) for t in found if 0 <= int(t) < model.head.weight.shape[0]}))
