"""Engines that are servers: what they are told, where they find the model, and the trainer's own
log-probs that theirs are compared with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reinforge.build.shared_gpus import SharedGpus
from reinforge.config.schema import Config
from reinforge.config.server_devices import ServerPlacement
from reinforge.core.batch import Batch
from reinforge.core.files import readable_as_usual
from reinforge.core.sample import Sample
from reinforge.core.seeds import seed_of
from reinforge.engines.served.dialect import ServerSetup
from reinforge.models.adapters import is_adapted
from reinforge.models.causal import CausalModel
from reinforge.models.load import pick_device, without_quantization
from reinforge.models.named_weights import named_weights
from reinforge.models.routing import routed_layers
from reinforge.models.save import attend_as_transformers, writing
from reinforge.weights.probe import Scorer


def setup_of(
    cfg: Config,
    model: CausalModel,
    stops: Iterable[int],
    *,
    context: int,
    longest: int,
    saved: str | None,
    gpus: SharedGpus | None = None,
) -> ServerSetup:
    """What the servers are told. Plain values: they may be started by another process.

    `gpus`: of those who train. None: nobody does where the servers are.
    """
    folder = Path(cfg.run.dir)
    placed = ServerPlacement(tuple(cfg.engine.devices)) if gpus is None else gpus.placement(cfg)
    device = pick_device(cfg.model.device).type if not cfg.engine.devices else "cuda"
    return ServerSetup(
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
        colocated=placed.colocated,
        devices=placed.devices,
        gpu="" if gpus is None else gpus.own.name,
        routed=routed_layers(model) if cfg.train.router_replay != "off" else None,
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
    plain: Any = model.causal
    if is_adapted(model.module) or hasattr(plain.config, "quantization_config"):
        plain = without_quantization(_without_adapter(model), model.dtype)
    used = plain.config._attn_implementation
    attend_as_transformers(plain)
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
