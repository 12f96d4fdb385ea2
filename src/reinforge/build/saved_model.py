"""Models out of run directories, for eval, chat, generate and export."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from reinforge.build.policy import load_policy
from reinforge.checkpoint import store
from reinforge.checkpoint.tensors import within
from reinforge.config.adapter import AdapterConfig
from reinforge.config.load import config_from_dict, load_config
from reinforge.config.model import ModelConfig
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.models.causal import VALUE_HEAD, CausalModel
from reinforge.models.load import load_model, load_tokenizer
from reinforge.models.packed import PackedModel
from reinforge.models.router_bias import BIASES
from reinforge.models.save import attend_as_transformers


def is_run(path: Path) -> bool:
    return (path / "config.json").is_file() and (path / "checkpoints").is_dir()


def config_of(path: Path, overrides: Sequence[str] = ()) -> tuple[Config, Path | None]:
    """The config of a file, or of a run directory (and then that directory)."""
    if is_run(path):
        return (
            config_from_dict(
                json.loads((path / "config.json").read_text()),
                where=str(path / "config.json"),
                overrides=overrides,
            ),
            path,
        )
    if path.is_dir():
        stages = sorted(str(child) for child in path.iterdir() if is_run(child))
        fix = (
            f"Its runs are: {', '.join(stages)}."
            if stages
            else "Give a run directory, or a .yaml file whose model.path is this directory."
        )
        raise InputError("this is a directory, but not a run's.", where=str(path), fix=fix)
    return load_config(path, overrides), None


def checkpoint_of(run_dir: Path, which: str) -> Path:
    """`latest`, `best`, or a step number."""
    there = {store.step_of(p): p for p in store.steps(run_dir)}
    if not there:
        raise InputError(
            f"{run_dir} has no checkpoint yet.",
            where="checkpoint",
            fix="Let it train to its first checkpoint.",
        )
    if which == "latest":
        return there[max(there)]
    if which == "best":
        extra = store.load(there[max(there)])[1]
        step = extra["best"].get("checkpoint", {}).get("step")
        if step not in there:
            raise InputError(
                "this run kept no best checkpoint.",
                where="checkpoint",
                fix="Set run.checkpoint.best, or take `latest`.",
            )
        return there[step]
    if not which.isdigit() or int(which) not in there:
        raise InputError(
            f"there is no checkpoint {which!r}.",
            where="checkpoint",
            fix=f"There are: latest, best, {', '.join(map(str, sorted(there)))}.",
        )
    return there[int(which)]


@torch.no_grad()
def load_weights(model: PackedModel, run_dir: Path, which: str = "latest") -> None:
    """Puts a checkpoint's weights into the model that the run's config describes: their average
    where the run kept one (train.ema).
    """
    state, _ = store.load(checkpoint_of(run_dir, which))
    own = dict(model.module.named_parameters())
    weights = within(state.tensors, "model/")
    average = within(state.tensors, "part/ema/")
    for name in weights:
        if name != f"{VALUE_HEAD}.weight":  # that of a shared critic, which no longer matters
            own[name].copy_(average[name] if name in average else weights[name])
    others = own | dict(model.module.named_buffers())
    for name, bias in within(state.tensors, BIASES).items():
        others[name].copy_(bias)


def open_model(
    source: str, *, adapter: str | None = None, checkpoint: str = "latest"
) -> tuple[CausalModel, Config | None]:
    """A model from a run directory (its newest checkpoint), a directory, a hub id or a
    GGUF file.
    """
    described, on_top, config = parts_of(source, adapter)
    model = load_model(described, on_top)
    if config is not None:
        load_weights(model, Path(source), checkpoint)
    return model, config


def parts_of(
    source: str, adapter: str | None = None
) -> tuple[ModelConfig, AdapterConfig | None, Config | None]:
    """What `open_model` loads: the model, the adapter on it, and of a run its configuration."""
    if is_run(Path(source)):
        config, _ = config_of(Path(source))
        return config.model, config.adapter, config
    base, own = base_of(source) if adapter is None else (source, None)
    tokenizer = own if own is not None and (Path(own) / "tokenizer_config.json").is_file() else None
    on_top = adapter or own
    return (
        ModelConfig(path=base, tokenizer=tokenizer),
        AdapterConfig(path=on_top) if on_top else None,
        None,
    )


def open_module(run_dir: Path, module: Any = None) -> tuple[Any, Any]:
    """The module and the tokenizer of a run, as transformers has them. `module`: the caller's own,
    which the run has trained; else its newest checkpoint is loaded.
    """
    config, _ = config_of(run_dir)
    if module is not None:
        return module, load_tokenizer(config.model)
    plain = config.model.model_copy(update={"exact": False, "compile": False})
    policy = config.model_copy(update={"model": plain})
    model = load_policy(policy, scores=config.algorithm.family == "reward")
    load_weights(model, run_dir)
    attend_as_transformers(model.plain)
    return model.module, model.tokenizer


def base_of(source: str) -> tuple[str, str | None]:
    """The base model that a directory with a peft adapter names, and that directory; any other
    source as it is.
    """
    path = Path(source).expanduser()
    if not (path / "adapter_config.json").is_file() or (path / "config.json").is_file():
        return source, None
    base = json.loads((path / "adapter_config.json").read_text()).get("base_model_name_or_path")
    if not base:
        raise InputError(
            f"{source} is an adapter that does not name its base model.",
            where="model",
            fix="Give the base model, and this as --adapter.",
        )
    return str(base), source
