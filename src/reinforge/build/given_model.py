"""A model or tokenizer that a Python caller gave as an object becomes a part of a run.

It is written into the run's directory, where the config names it: so the run can be continued,
evaluated and exported without the object. The object itself is what is trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from reinforge.build.caller_objects import INITIAL, TOKENIZER, CallerObjects
from reinforge.build.ranks import ON_RANKS
from reinforge.checkpoint import store
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.core.seeds import seed_of
from reinforge.loops.view import ViewLike
from reinforge.models.adapters import is_adapted
from reinforge.models.freezing import freeze
from reinforge.models.lent import (
    check_given,
    lent,
    restore_initial,
    save_initial,
    take_adapter_out,
)
from reinforge.models.load import model_of


def save_given_tokenizer(cfg: Config, given: CallerObjects) -> None:
    """Writes the caller's tokenizer where the config says that it is."""
    if given.tokenizer is not None:
        given.tokenizer.save_pretrained(Path(cfg.run.dir) / TOKENIZER)


@contextmanager
def with_given_model(cfg: Config, given: CallerObjects, view: ViewLike) -> Iterator[CallerObjects]:
    """The caller's objects with the model made of the module that is among them; afterwards the
    module is the caller's again, with the weights that the run has come to.
    """
    module = given.module
    if module is None:
        yield given
        return
    _check_place(cfg)
    check_given(module)
    _begin_as_before(cfg, module, view)
    with lent(module):
        adapter = None if is_adapted(module) else cfg.adapter
        seed = seed_of(cfg.run.seed, "adapter") % 2**31
        view.doing("checking the model that was given")
        model = model_of(module, cfg.model, adapter, seed=seed)
        freeze(model.module, cfg.train)
        try:
            yield replace(given, model=model)
        finally:
            if adapter is not None:
                take_adapter_out(model.module)
            if adapter is not None and adapter.init != "default":
                restore_initial(module, Path(cfg.run.dir) / INITIAL)  # it had taken a part of them


def _check_place(cfg: Config) -> None:
    """One process has the object, and trains it."""
    if cfg.cluster.kind != "local" or cfg.train.backend in ON_RANKS:
        key = "train.backend" if cfg.train.backend in ON_RANKS else "cluster.kind"
        raise InputError(
            "other processes cannot have a model that was given as an object.",
            where=key,
            fix="Save it and give its path, or train in one process.",
        )
    if cfg.rollout.overlap:
        raise InputError(
            "a model that was given as an object cannot be loaded a second time, for a copy.",
            where="rollout.overlap",
            fix="Save it and give its path, or leave rollout.overlap out.",
        )
    if cfg.algorithm.family == "reward":
        raise InputError(
            "a reward model is made from a model's files.",
            where="model",
            fix="Save the model and its tokenizer, and give the path.",
        )


def _begin_as_before(cfg: Config, module: Any, view: ViewLike) -> None:
    """A new run writes down what it begins with; one that is continued begins with that again."""
    folder = Path(cfg.run.dir) / INITIAL
    if store.steps(Path(cfg.run.dir)) and folder.is_dir():
        view.message(f"the model begins with the weights that this run began with ({folder})")
        restore_initial(module, folder)
    else:
        view.doing("writing down the model that the run begins with")
        save_initial(module, folder)
