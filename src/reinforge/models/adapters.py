"""LoRA and its kin through peft. Nothing is merged or copied.

The policy that a run starts from is its reference. With a new adapter, which begins as nothing,
that is the module with its adapter off; with one that was trained before (adapter.path) or that
took a part of the weights (PiSSA), it is the module with the adapter as it was at the beginning.

lora: W + s B A with s = alpha / rank (2106.09685). rslora: s = alpha / sqrt(rank) (2312.03732).
dora: direction and length of each output are trained apart (2402.09353). qlora: lora on a base in 4
bits, NF4 with double quantisation (2305.14314); the base is quantised as it is loaded. PiSSA: B A
begins as the largest singular values and vectors of W, and the base keeps W - s B A (2404.02948).
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from reinforge.config.adapter import AdapterConfig
from reinforge.config.saved_adapter import read_adapter
from reinforge.core.errors import InputError
from reinforge.models.adapter_dropout import add_dropout
from reinforge.models.expert_adapters import unwrapped
from reinforge.models.experts import computes, experts_forward
from reinforge.models.lora_linear import LeanLora, join_adapters

LOG = logging.getLogger("reinforge")
# what peft warns of where weights of a saved adapter are not there, or have no place
MISSING = re.compile(r"Found missing adapter keys|target_parameters=.* no parameter was matched")
# and where it takes a pattern of parameters for one of layers, which is no loss
PATTERNS = re.compile("The following (rank|alpha)_pattern keys")
_NEW = "_begins_as_its_base"  # on a wrapped module: its adapter adds nothing before the first step


# linear layers that these architectures do not call: they read the weight, or a kernel does
_READ: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("falcon_h1", "mamba2", "nemotron_h"), (".out_proj",)),
    **dict.fromkeys(("falcon_mamba", "mamba"), (".dt_proj", ".out_proj")),
    "jamba": (".dt_proj",),
    "longcat_flash": (".classifier",),
}


def add_adapter(module: Any, cfg: AdapterConfig, *, seed: int, head: str | None = None) -> Any:
    """Wraps the module.

    Adapter weights are float32 (they are small and learn at small rates) and initialised by `seed`.
    `head` names a layer (of a reward model) that has no adapter and is trained whole.
    """
    from peft import LoraConfig, get_peft_model

    _refuse_tied(module, cfg.modules_to_save)
    if cfg.path:
        read_adapter(cfg.path)
        wrapped = _loaded(module, cfg.path)
    else:
        modules, stacked = _by_kind(module, cfg)
        left_out = _left_out(module, cfg, head)
        unfit, names = _unfit(module, cfg.targets), _names_to_use(module)  # peft will change it
        meant = _all_weights(module, left_out) if cfg.targets == "all-linear" else []
        lora = LoraConfig(
            r=cfg.rank,
            lora_alpha=cfg.alpha or 2 * cfg.rank,
            lora_dropout=0.0,
            bias="none",
            task_type=None if head else "CAUSAL_LM",
            use_dora=cfg.kind == "dora",
            use_rslora=cfg.kind == "rslora",
            exclude_modules=left_out or None,
            modules_to_save=list(cfg.modules_to_save) or None,
            init_lora_weights="pissa" if cfg.init == "pissa" else True,
            target_modules=cfg.targets if isinstance(cfg.targets, str) else modules,
            target_parameters=stacked or None,
        )
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            torch.manual_seed(seed)
            # peft names ranks of parameters by patterns, and then looks for layers of these names
            warnings.filterwarnings("ignore", message=PATTERNS.pattern)
            try:
                wrapped = get_peft_model(module, lora)
            except ValueError as error:
                if "ParamWrapper" in str(error):
                    raise InputError(
                        f"{cfg.kind} is for linear layers, and the experts of this model lie"
                        " stacked.",
                        where="adapter.kind",
                        fix="Leave it out, or name layers in adapter.targets ([q_proj, v_proj]).",
                    ) from error
                raise InputError(unfit, where="adapter.targets", fix=names) from error
            except TypeError as error:
                if not cfg.modules_to_save:
                    raise
                raise InputError(
                    f"{', '.join(cfg.modules_to_save)} cannot be trained whole: peft cannot for"
                    " experts, and for what has an adapter by adapter.targets.",
                    where="adapter.modules_to_save",
                    fix="Leave it out; adapter.targets can name routers (gate) and experts.",
                ) from error
            except AttributeError as error:
                if cfg.init != "pissa":
                    raise
                raise InputError(
                    "PiSSA begins with the weights of layers; the experts here lie stacked.",
                    where="adapter.init",
                    fix="Leave it out, or name layers in adapter.targets (q_proj, v_proj).",
                ) from error
        if cfg.targets == "all-linear":
            _leave_routers(wrapped)
            _tell_missing(wrapped, meant)
    _refuse_none(wrapped, cfg.modules_to_save)
    if head:
        getattr(wrapped.get_base_model(), head).requires_grad_(True)
    add_dropout(wrapped, cfg.dropout)
    make_lean(wrapped)
    setattr(wrapped, _NEW, not cfg.path and cfg.init == "default")
    return wrapped


def _loaded(module: Any, path: str) -> Any:
    """The module with a saved adapter, all of whose weights are there and find their place."""
    from peft import PeftModel

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            wrapped = PeftModel.from_pretrained(module, path, is_trainable=True)
        except (RuntimeError, ValueError, KeyError) as error:
            lines = [line.strip() for line in str(error).splitlines()]
            first = next((line for line in lines[1:] if line), lines[0] if lines else "")
            raise InputError(
                f"the adapter in {path} is not one of this model: {first.rstrip('.')}.",
                where="adapter.path",
                fix="Give an adapter that was trained on this base model.",
            ) from error
    for one in told:
        text = str(one.message)
        if MISSING.match(text):
            names = re.findall(r"base_model[\w.]*", text)
            saved = read_adapter(path)
            wanted = ", ".join(saved.get("target_parameters") or [])
            base = saved.get("base_model_name_or_path")
            raise InputError(
                f"the adapter in {path} lacks {len(names)} weights that it has in this model, e.g."
                f" {names[0]}."
                if names
                else f"the adapter in {path} is for weights of experts or routers ({wanted}) that"
                f" this model does not have{f'; it was made for {base}' if base else ''}.",
                where="adapter.path",
                fix="Give the adapter of this base model, with all of its weights.",
            )
    for one in told:
        if not PATTERNS.match(str(one.message)):
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    return wrapped


def _by_kind(module: Any, cfg: AdapterConfig) -> tuple[list[str], list[str]]:
    """The names of layers, and those of parameters in which the weights of experts lie stacked, or
    that are a router's.

    peft finds all linear layers, but stacked experts of a few architectures only, so they are named
    here: those that `models.experts` computes, because peft would write out all weights of all
    experts in every forward. It has no DoRA and PiSSA for them.
    """
    if isinstance(cfg.targets, str):
        by_layer = cfg.kind == "dora" or cfg.init == "pissa"
        return [], [] if by_layer else list(_stacked(module, "has_gate"))
    stacked = {name for name, p in module.named_parameters() if p.ndim == 3}
    # a saved adapter names the weight of a router (gate.weight), not its module
    weights = {name for name, p in module.named_parameters() if p.ndim == 2}
    of_experts = [
        target
        for target in cfg.targets
        if any(
            name == target or name.endswith(f".{target}")
            for name in (stacked | weights if target.endswith(".weight") else stacked)
        )
    ]
    return [target for target in cfg.targets if target not in of_experts], of_experts


def _stacked(module: Any, having: str = "forward") -> Iterator[str]:
    """The parameters of the text half that are matrices of experts, one upon the other; of experts
    that have an attribute.
    """
    inside = {id(part) for part in _text_half(module).modules()}
    for name, part in module.named_modules():
        if "Experts" in type(part).__name__ and hasattr(part, having) and id(part) in inside:
            for own, p in part.named_parameters(recurse=False):
                if p.ndim == 3:
                    yield f"{name}.{own}"


def _text_half(module: Any) -> Any:
    """Of a multimodal model, which has towers beside it; else all of it."""
    several = module.config.get_text_config() is not module.config
    return module.get_decoder() if several else module


def _all_weights(module: Any, left_out: Sequence[str]) -> list[str]:
    """What "all linear layers" means: by name the layers, and the parameters of stacked experts."""
    head = module.get_output_embeddings()
    layers = [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear) and part is not head and name not in left_out
    ]
    return [*layers, *_stacked(module)]


def _tell_missing(wrapped: Any, meant: Iterable[str]) -> None:
    """Says what has no adapter though it was meant to."""
    from peft.tuners.lora import LoraLayer

    found = set()
    for name, part in wrapped.get_base_model().named_modules():
        if isinstance(part, LoraLayer):
            own = getattr(part, "parameter_name", "")
            found.add(f"{name.replace('.base_layer', '')}.{own}".removesuffix("."))
    missing = sorted({re.sub(r"\.\d+\.", ".*.", name) for name in meant if name not in found})
    if missing:
        LOG.warning(
            f"adapter.targets: all-linear leaves out {', '.join(missing)};"
            " docs/adapters.md (Experts) says why, and what can be named instead"
        )


def _names_to_use(module: Any) -> str:
    """The fix where peft knows no such layer. `module` is the plain model."""
    names = {n.rpartition(".")[2] for n, p in module.named_modules() if isinstance(p, nn.Linear)}
    stacked = {n.rpartition(".")[2] for n, p in module.named_parameters() if p.ndim == 3}
    routers = {
        n.rpartition(".")[2] if n.endswith(".gate") else f"{n.rpartition('.')[2]}.weight"
        for n, p in module.named_modules()
        if "router" in type(p).__name__.lower() and "weight" in p._parameters
    }
    found = f"Use all-linear, or linear layers of the model ({', '.join(sorted(names))})"
    for what, more in (("weights of its experts", stacked), ("its routers", routers - names)):
        found += f", or {what} ({', '.join(sorted(more))})" if more else ""
    return f"{found}."


def _unfit(module: Any, targets: str | Sequence[str]) -> str:
    """What is wrong where peft can adapt none of the targets, or not one of them."""
    if isinstance(targets, str):
        return f"this model has no layers for {targets}."
    linear = [n for n, p in module.named_modules() if isinstance(p, nn.Linear)]
    known = [*linear, *(n for n, _ in module.named_parameters())]
    unknown = [t for t in targets if not any(f".{n}".endswith(f".{t}") for n in known)]
    whole = [
        t for t in unknown if any(f".{n}".endswith(f".{t}") for n, _ in module.named_modules())
    ]
    if whole:
        return f"{', '.join(whole)} cannot have an adapter: no linear layer, and no weight."
    return f"there is nothing in this model for {', '.join(unknown or targets)}."


def _leave_routers(wrapped: Any) -> None:
    """peft counts the routers of some mixtures among all linear layers; they stay as they are."""
    from peft.tuners.lora import ParamWrapper

    for name, part in list(wrapped.named_modules()):
        if type(part) is ParamWrapper and part.get_param().ndim == 2:
            parent, _, last = name.rpartition(".")
            setattr(wrapped.get_submodule(parent), last, part.base_layer)
            cfg = wrapped.peft_config[wrapped.active_adapter]
            cfg.target_parameters.discard(f"{last}.{part.parameter_name}")


def _left_out(module: Any, cfg: AdapterConfig, head: str | None) -> list[str]:
    """What "all linear layers" does not mean: the head of a reward model; layers that are linear by
    kind and compute something else, or whose weight is read without calling them; routers, which
    choose experts; the towers of a multimodal model, whose text half is trained.
    """
    found = [head] if head else []
    if cfg.targets != "all-linear":
        return found
    inside = {id(part) for part in _text_half(module).modules()}
    read = _READ.get(module.config.get_text_config().model_type, ())
    return found + [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear)
        and (
            (type(part).forward is not nn.Linear.forward and not hasattr(part, "quant_state"))
            or id(part) not in inside
            or name.endswith(read)
            or any(word.startswith("router") for word in name.split("."))
        )
    ]


def whole_modules(module: Any) -> dict[str, Any]:
    """By name the modules that are trained whole beside the adapter (modules_to_save), each with
    its original.
    """
    from peft.utils.other import ModulesToSaveWrapper

    return {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, ModulesToSaveWrapper)
    }


def in_use(whole: Any) -> nn.Module:
    """The module that one of the `whole_modules` computes with now."""
    if whole.disable_adapters or not whole.active_adapters:
        return whole.original_module  # type: ignore[no-any-return]
    return whole.modules_to_save[whole.active_adapters[0]]  # type: ignore[no-any-return]


def _refuse_tied(module: Any, names: Sequence[str]) -> None:
    """Where head and embedding are one weight, a copy of one of them would part them."""
    if not names or not module.config.get_text_config().tie_word_embeddings:
        return
    ends = {id(module.get_input_embeddings()), id(module.get_output_embeddings())}
    tied = [
        name
        for name, part in module.named_modules()
        if id(part) in ends and any(name.endswith(wanted) for wanted in names)
    ]
    if tied:
        raise InputError(
            f"{tied[0]} has its weight in common with the other end of the model.",
            where="adapter.modules_to_save",
            fix="Leave it out, or train without an adapter.",
        )


def _refuse_none(wrapped: Any, names: Sequence[str]) -> None:
    found = whole_modules(wrapped)
    for wanted in names:
        if not any(name.endswith(wanted) for name in found):
            raise InputError(
                f"{wanted!r} is the name of no module of this model.",
                where="adapter.modules_to_save",
                fix="Give the end of a module's name, e.g. lm_head or embed_tokens.",
            )


@contextmanager
def as_it_begins(module: Any, cfg: AdapterConfig) -> Iterator[dict[str, str]]:
    """Within it, `module.save_pretrained(folder, **given)` writes an adapter of the model as it was
    loaded, also where the adapter took a part of its weights (PiSSA): then one of twice the rank,
    the trained product less the first one. The module has its new adapter, and no trained weights
    yet.
    """
    if cfg.init != "pissa":
        yield {}
        return
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        # the first adapter lies beside the trained one for as long as the difference is taken
        warnings.filterwarnings("ignore", message="PiSSA changes the base weights")
        first = Path(folder) / "first"
        module.save_pretrained(first)
        yield {"path_initial_model_for_weight_conversion": str(first)}


def quantization(dtype: torch.dtype) -> Any:
    """How transformers is to load a base in NF4.

    The 4-bit weights are computed with in the model's own precision `dtype`.
    """
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        raise InputError(
            "QLoRA needs bitsandbytes, which is not installed.",
            where="adapter.kind",
            fix="pip install 'reinforge[qlora]'",
        ) from None
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def keep_unpacked(module: Any) -> None:
    """On some CPUs bitsandbytes repacks a layer for inference, in place and in bfloat16, at its
    first forward in evaluation mode; what was repacked passes no gradient on. Our modules are
    always in evaluation mode, so it must not.
    """
    for layer in module.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False


def store_plainly(module: Any, device: torch.device) -> None:
    """Makes the 4-bit weights of a module plain tensors of bytes, which can be cut over ranks and
    gathered again; what is needed to read them goes to `device` and stays whole there (an eighth of
    a bit for each weight). bitsandbytes puts the two together in every forward.
    """
    for layer in module.modules():
        # peft's own layers of that name have no weight
        if type(layer).__name__ == "Linear4bit" and "weight" in layer._parameters:
            layer.quant_state = layer.weight.quant_state
            layer.quant_state.to(device)
            layer.weight = torch.nn.Parameter(layer.weight.data, requires_grad=False)


@torch.no_grad()
def merged(module: Any) -> Any:
    """The plain model with the adapter in its weights.

    A quantised base becomes what it stood for: the 4-bit weights written out, then the adapter
    added. Rounding the sum to 4 bits again would lose much of what was learned.
    """
    from peft.tuners.lora import LoraLayer

    for name, layer in list(module.named_modules()):
        base = layer.base_layer if isinstance(layer, LoraLayer) else layer
        if type(base).__name__ != "Linear4bit" or name.endswith(".base_layer"):
            continue
        weight = _written_out(base)
        if isinstance(layer, LoraLayer) and not layer.merged:
            weight += sum(
                layer.get_delta_weight(adapter).to(weight.dtype)
                for adapter in layer.active_adapters
            )
        plain = torch.nn.Linear(
            base.in_features,
            base.out_features,
            bias=base.bias is not None,
            device=weight.device,
            dtype=base.compute_dtype,
        )
        plain.weight.copy_(weight)
        if base.bias is not None:
            plain.bias.copy_(base.bias)
        parent, _, last = name.rpartition(".")
        setattr(module.get_submodule(parent), last, plain)
    return module.merge_and_unload()


def _written_out(layer: Any) -> Tensor:
    """[out, in] float32."""
    from bitsandbytes.functional import dequantize_4bit

    weight: Tensor = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return weight.float()


def make_lean(module: Any) -> None:
    """Plain LoRA layers compute in the precision of their input: peft casts the input to the
    adapter's float32 first, which moves more memory than the base layer does. The weights stay
    float32, and so do their gradients. Experts get the two matrices of an adapter, where peft adds
    their product to the weights.
    """
    from peft.tuners.lora import Linear, ParamWrapper

    for layer in module.modules():
        if type(layer) is ParamWrapper:
            layer.forward = _LeanExperts(layer, layer.forward).forward
        elif (
            type(layer) is Linear
            and not any(layer.use_dora.values())
            and not any(layer.lora_bias.values())
        ):
            layer.forward = LeanLora(layer, layer.forward).forward
    join_adapters(module)


class _LeanExperts:
    """Experts with what is added to their weights as it is stored, and peft's own way whenever
    there is anything else about them.
    """

    def __init__(self, layer: Any, usual: Any):
        self.layer = layer
        self.usual = usual

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found = unwrapped(self.layer)
        if found is None or kwargs or not hasattr(found[0], "has_gate") or not computes(found[0]):
            return self.usual(x, *args, **kwargs)
        experts, adapters = found
        chosen, weights = args
        return experts_forward(experts, x, chosen, weights, adapters)


@contextmanager
def adapter_off(module: Any) -> Iterator[None]:
    """Inside, the module is the base model."""
    with module.disable_adapter():
        yield


def is_adapted(module: Any) -> bool:
    return hasattr(module, "disable_adapter") and hasattr(module, "peft_config")


def begins_as_base(module: Any) -> bool:
    """Whether the module with its adapter off is the policy that the run starts from: the adapter
    is new. One that was trained before, here or elsewhere, is a part of that policy, and so is one
    that took a part of the weights (PiSSA).
    """
    return is_adapted(module) and getattr(module, _NEW, False)
