"""Runs on given rows: SFT, preferences, reward models, distillation from text. A family is what a
row becomes and how held-out rows are judged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reinforge.algorithms.losses.reward_model import RewardLoss
from reinforge.algorithms.losses.unpaired import MISMATCHED, UnpairedLoss
from reinforge.build.attempt import Attempt
from reinforge.build.predict import needs_of, predict_run
from reinforge.build.sampling import policies
from reinforge.build.sharded import AnyBackend
from reinforge.build.teacher import keep_best, make_teachers
from reinforge.build.units import units_of
from reinforge.build.workshop import Evaluate, Given, Workshop, averaged, open_shop, total_steps
from reinforge.config.schema import Config
from reinforge.core.backend import Part
from reinforge.core.batch import Batch
from reinforge.core.errors import InputError
from reinforge.core.sample import Row
from reinforge.data import units as kinds
from reinforge.data.units import Unit
from reinforge.evals.heldout import heldout_loss
from reinforge.evals.rows import heldout_rows, heldout_scores
from reinforge.loops.checkpointer import Checkpointer
from reinforge.loops.evaluator import Evaluator
from reinforge.loops.precompute import Streams, with_streams
from reinforge.loops.run import Run
from reinforge.loops.supervised import SupervisedTrainer
from reinforge.loops.view import ViewLike
from reinforge.models.adapters import is_adapted
from reinforge.rollout.rows.sampler import RowSampler


@dataclass
class Prepared:
    """The units of a run: `rows` are those of the data that are left, one per unit."""

    units: list[Unit]
    rows: list[Row]


def make_units(shop: Workshop, rows: Sequence[Row]) -> Prepared:
    """The units of all rows, after the length policy."""
    shop.view.doing(f"tokenising {len(rows)} rows")
    make = units_of(shop.algorithm)
    limit = shop.cfg.data.max_length or shop.context
    made = [(row, unit) for row in rows for unit in make(shop.renderer, row)]
    kept, counts = kinds.fit(shop.cfg.data, [unit for _, unit in made], limit)
    shop.report(counts, limit)
    by_uid = {unit[0].uid: row for row, unit in made}
    return Prepared(kept, [by_uid[unit[0].uid] for unit in kept])


def make_backend(shop: Workshop, steps: int) -> AnyBackend:
    """With a reference where one is needed at training time."""
    cfg = shop.cfg
    reference = "reference" in shop.algorithm.needs
    if (
        reference
        and cfg.train.precompute_reference
        and cfg.adapter is None
        and not is_adapted(shop.model.module)
    ):
        return shop.backend(steps, 1.0, compare=False)
    if reference and (moves := shop.reference()).kind != "frozen" and moves.every > steps:
        shop.view.message(
            f"algorithm.kl.reference: it moves every {moves.every} steps, and the run has {steps}:"
            " it will never move"
        )
    return shop.backend(
        steps, 1.0, teachers=make_teachers(shop, [*shop.train_rows, *shop.eval_rows])
    )


def make_evaluate(shop: Workshop, backend: AnyBackend, units: Sequence[Unit]) -> Evaluate | None:
    """Held-out rows by the loss, and by generation where there are rewards to score it with."""
    if not units:
        return None
    algorithm = shop.algorithm
    generation = shop.heldout() if shop.rewards else None

    async def evaluate() -> dict[str, float]:
        if algorithm.family == "supervised":
            found = heldout_loss(
                backend, [sample for unit in units for sample in unit], backend.budget
            )
        else:
            found = heldout_rows(backend, algorithm.loss, units)
        if isinstance(algorithm.loss, RewardLoss) and algorithm.loss.unit == 2:
            found |= heldout_scores(backend, units)
        if generation is not None:
            await shop.engine.update(backend.weights(), backend.steps)
            if "eval/accuracy" in found:  # that of answers that are given
                found["eval/pair_accuracy"] = found.pop("eval/accuracy")
            found |= await generation()
        return found

    return averaged(evaluate, backend, shop.engine if generation is not None else None)


def heldout_of(shop: Workshop, load: Callable[[], None]) -> Evaluate | None:
    """The evaluation of a run's model outside the run.

    The reference is what the model is before `load` puts a checkpoint's weights in.
    """
    shop.cfg = shop.cfg.model_copy(
        update={
            "train": shop.cfg.train.model_copy(update={"ema": None, "precompute_reference": False})
        }
    )
    backend = make_backend(shop, 1)
    load()
    return make_evaluate(
        shop, backend, make_units(shop, shop.eval_rows).units if shop.eval_rows else []
    )


def build_supervised(
    cfg: Config, view: ViewLike, given: Given, attempt: Attempt
) -> SupervisedTrainer:
    shop = open_shop(cfg, given, view)
    cfg = shop.cfg
    loss = shop.algorithm.loss
    if units_of(shop.algorithm) is kinds.judged and (what := kinds.one_sided(shop.train_rows)):
        view.message(f"warning: data: {what} {kinds.BOTH_LABELS}")
    train = make_units(shop, shop.train_rows)
    held_out = make_units(shop, shop.eval_rows) if shop.eval_rows else Prepared([], [])
    steps = total_steps(cfg, len(train.units))
    backend = make_backend(shop, steps)
    cursor = shop.cursor(train.units, train.rows)
    units = [train.units, held_out.units]
    if cfg.train.precompute_reference:
        units = keep_reference(shop, backend, units)
    if cfg.teacher is not None and cfg.teacher.precompute:
        units = halves(keep_best(shop, backend, [*units[0], *units[1]]), len(units[0]))
    evaluate = make_evaluate(shop, backend, units[1])
    # it has a running mean
    parts: dict[str, Part] = {"loss": loss} if isinstance(loss, UnpairedLoss) else {}
    run = Run(
        cfg,
        cursor=cursor,
        total_steps=steps,
        view=view,
        evaluator=Evaluator(cfg, evaluate),
        checkpointer=Checkpointer(
            cfg, backend, {**backend.parts(), **parts}, memory=attempt.memory
        ),
        prediction=predict_run(
            cfg, backend, [sum(len(s.tokens) for s in unit) for unit in train.units], needs_of(cfg)
        ),
        uncontained=shop.uncontained,
        passing=attempt.passing,
        began=attempt.began,
    )
    chooser = RowSampler(
        cursor,
        cfg.run.seed,
        policies(cfg, train.rows, None, [max(len(s.tokens) for s in unit) for unit in train.units]),
    )
    return SupervisedTrainer(
        run=run,
        chooser=chooser,
        backend=backend,
        loss=loss,
        row=units[0].__getitem__,
        rows_per_step=cfg.train.prompts_per_step,
    )


def halves(units: list[Unit], n: int) -> list[list[Unit]]:
    return [units[:n], units[n:]]


def keep_reference(
    shop: Workshop, backend: AnyBackend, parts: Sequence[Sequence[Unit]]
) -> list[list[Unit]]:
    """The units (to train on, held out) with the reference's log-probs.

    The weights are still those of the model that was loaded, also in a run that is to be continued:
    its checkpoint is read later. KTO's mismatched answers are chosen here, once for the whole run.
    """
    shop.view.doing("computing the reference's log-probs of all rows")
    loss: Any = shop.algorithm.loss
    if "reference" not in shop.algorithm.needs:
        raise InputError(
            f"{shop.algorithm.name} has no reference.",
            where="train.precompute_reference",
            fix="Remove it.",
        )
    stream = "reference" if backend.reference is not None else "old"
    adapter = shop.cfg.adapter.path if shop.cfg.adapter is not None else None
    name = f"{shop.cfg.model.path}@{shop.cfg.model.revision}" + (
        f" with {adapter}" if adapter else ""
    )

    def ask(batch: Batch) -> Streams:
        backend.annotate([batch], frozenset({stream}))
        return {"reference": batch.streams[stream]}

    units = [unit for part in parts for unit in part]
    others = (
        [[s] for part in parts for s in loss.companions([s for unit in part for s in unit])]
        if isinstance(loss, UnpairedLoss)
        else []
    )
    found = with_streams(
        [*units, *others],
        Path(shop.cfg.run.dir) / "reference.safetensors",
        name,
        backend.budget,
        ask,
        share=backend.share,
    )
    if others:
        loss.fixed = {
            sample.uid.removesuffix(MISMATCHED): sample for (sample,) in found[len(units) :]
        }
    return halves(found[: len(units)], len(parts[0]))
