"""`rollout.engine` becomes an engine: the trainer's own module, or servers that get its weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from reinforge.config.schema import Config
from reinforge.core.batch import Batch
from reinforge.core.engine import Engine
from reinforge.core.files import readable_as_usual
from reinforge.core.sample import Sample
from reinforge.core.seeds import seed_of
from reinforge.engines.native import NativeEngine
from reinforge.models.adapters import is_adapted
from reinforge.models.causal import CausalModel
from reinforge.models.load import pick_device
from reinforge.weights.probe import Scorer

if TYPE_CHECKING:
    from reinforge.engines.served.replica import Setup


def make_engine(
    cfg: Config,
    model: CausalModel,
    stops: Iterable[int],
    *,
    context: int,
    longest: int,
    saved: str | None,
) -> Engine:
    """The engine of a run, made once its prompts are known.

    What is started here ends with the process, or with the engine. `saved`: where the model was
    loaded from, if it was.
    """
    rollout = cfg.rollout
    if rollout.engine == "native":
        return NativeEngine(
            model,
            stop_tokens=stops,
            max_batch=rollout.max_batch,
            kv_gib=rollout.kv_gib,
            context=context,
            longest=longest,
            prefix_cache=rollout.prefix_cache,
        )
    from reinforge.engines.served.make import make_served

    return make_served(
        setup_of(cfg, model, stops, context=context, longest=longest, saved=saved),
        trainer_score(model),
    )


@contextmanager
def room_for_engine(cfg: Config) -> Iterator[None]:
    """Inside, the share of the GPU that a colocated server will hold all the time is taken: whoever
    looks at what is free finds the rest.
    """
    held = None
    if (
        cfg.rollout.engine != "native"
        and cfg.engine.sleep == "never"
        and not cfg.engine.devices
        and not cfg.engine.address
    ):
        device = pick_device(cfg.model.device)
        if device.type == "cuda":
            free, whole = torch.cuda.mem_get_info(device)
            held = torch.empty(
                min(int(free * 0.9), int(whole * cfg.engine.memory)),
                dtype=torch.uint8,
                device=device,
            )
    try:
        yield
    finally:
        if held is not None:
            del held
            torch.cuda.empty_cache()


def setup_of(
    cfg: Config,
    model: CausalModel,
    stops: Iterable[int],
    *,
    context: int,
    longest: int,
    saved: str | None,
) -> Setup:
    """What the servers are told. Plain values: they may be started by another process."""
    from reinforge.engines.served.replica import Setup

    folder = Path(cfg.run.dir)
    device = pick_device(cfg.model.device).type if not cfg.engine.devices else "cuda"
    return Setup(
        kind=cfg.rollout.engine,
        cfg=cfg.engine,
        model=served_model(model, folder, saved if cfg.model.tokenizer is None else None),
        folder=folder,
        dtype=str(model.dtype).removeprefix("torch."),
        device=device,
        context=context,
        vocabulary=int(model.head.weight.shape[0]),
        stop_tokens=tuple(sorted(set(stops))),
        longest=longest,
        max_batch=cfg.rollout.max_batch,
        kv_gib=cfg.rollout.kv_gib,
        seed=seed_of(cfg.run.seed, "engine"),
        colocated=not cfg.engine.devices and not cfg.engine.address,
    )


def served_model(model: CausalModel, folder: Path, saved: str | None) -> str:
    """Where a server finds the model: its own directory or hub id, or a copy of ours where it is
    neither (a GGUF file, an object).
    """
    path = Path(saved or "").expanduser()
    if saved is not None and path.suffix != ".gguf":
        if not path.exists():
            return saved
        if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
            return str(path.resolve())
    place = folder / "engine-model"
    if not (place / "config.json").exists():
        save_model(model, place)
    return str(place.resolve())


def save_model(model: CausalModel, place: Path) -> None:
    """The base model in Hugging Face format; an adapter's part comes with the first update."""
    from reinforge.models.load import without_quantization, writing

    plain: Any = model.causal
    if is_adapted(model.module) or hasattr(plain.config, "quantization_config"):
        plain = without_quantization(_without_adapter(model), model.dtype)
    used = plain.config._attn_implementation
    plain.set_attn_implementation("sdpa")
    try:
        with writing():
            plain.save_pretrained(place)
    finally:
        plain.set_attn_implementation(used)
    if hasattr(model.tokenizer, "save_pretrained"):
        model.tokenizer.save_pretrained(place)
    readable_as_usual(*place.glob("*.safetensors"))


def _without_adapter(model: CausalModel) -> Any:
    """A fresh model with the merged weights: what a server would be sent anyway."""
    from reinforge.models.named import named_weights

    fresh = type(model.causal)._from_config(model.causal.config, dtype=model.dtype)
    fresh.load_state_dict(dict(named_weights(model.module)), strict=False)
    fresh.tie_weights()
    fresh.generation_config = model.causal.generation_config
    return fresh


def trainer_score(model: CausalModel) -> Scorer:
    """The trainer's own log-probs at temperature 1: what every engine must find too."""

    @torch.no_grad()
    def score(tokens: Sequence[int]) -> Tensor:
        batch = Batch.pack([Sample.from_tokens("probe", list(tokens), [True] * len(tokens))]).to(
            model.device
        )
        out = torch.zeros(len(tokens))
        out[1:] = model.logprobs(batch, temperature=1.0)[0].float().cpu()
        return out

    return score
