"""Measuring a model on the held-out rows of a config or a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from reinforge.build.caller_objects import CallerObjects
from reinforge.build.evaluation import Evaluate, build_heldout
from reinforge.build.inputs import read_inputs
from reinforge.build.local import LocalFactories
from reinforge.build.saved_model import config_of, load_weights
from reinforge.build.supervised import build_supervised_heldout
from reinforge.core.aio import run_sync
from reinforge.core.errors import InputError
from reinforge.models.packed import PackedModel
from reinforge.watch.default_view import default_view


def evaluate_saved(
    config_or_run: Path, overrides: Sequence[str], checkpoint: str
) -> dict[str, float]:
    """The metrics of a config's model, or of a checkpoint of a run. See `reinforge.evaluate`."""
    config, run_dir = config_of(config_or_run, overrides)
    view = default_view()
    factories = LocalFactories()
    inputs = read_inputs(config, CallerObjects(), view, factories.make_rewards)

    def load(model: PackedModel) -> None:
        if run_dir is not None:
            load_weights(model, run_dir, checkpoint)

    heldout: Evaluate | None
    if config.algorithm.rl:
        heldout = build_heldout(inputs, factories, view, load=load)
    else:
        heldout = build_supervised_heldout(inputs, factories, view, load=load)
    if heldout is None:
        raise InputError(
            "there is nothing to evaluate: no held-out rows, or no reward to score them.",
            where="data.eval",
            fix="Set data.eval.size or data.eval.source, and rewards.",
        )

    async def measure() -> dict[str, float]:
        return await heldout()

    return run_sync(measure())
