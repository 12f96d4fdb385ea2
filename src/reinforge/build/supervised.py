"""Runs on given rows: SFT, preferences, reward models, distillation from text. A family is what a
row becomes and how held-out rows are judged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

from reinforge.algorithms.losses.attributes import AttributeLoss
from reinforge.algorithms.losses.reward_model import RewardLoss
from reinforge.algorithms.losses.unpaired import UnpairedLoss
from reinforge.build.algorithm import reference_of
from reinforge.build.attempt import Attempt
from reinforge.build.benchmarks import RunBenchmarks, prompts_of, read_benchmarks
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.compile_choice import with_choice
from reinforge.build.data import make_cursor, total_steps
from reinforge.build.evaluation import Evaluate, make_heldout, with_average, with_benchmarks
from reinforge.build.factories import Factories
from reinforge.build.inputs import (
    EncodedPrompts,
    ModelInputs,
    RunInputs,
    encode_eval_prompts,
    model_inputs,
    read_inputs,
    report_few_rows,
)
from reinforge.build.precompute import precompute_reference, precompute_teacher
from reinforge.build.predict import needs_of, predict_run
from reinforge.build.ptx import make_ptx, read_ptx
from reinforge.build.source import row_weightings
from reinforge.build.teachers import make_teachers
from reinforge.build.unit_rows import make_units
from reinforge.build.units import units_of
from reinforge.config.schema import Config
from reinforge.core.backend import Backend, Stateful
from reinforge.core.engine import Engine
from reinforge.core.errors import InputError
from reinforge.data import units as kinds
from reinforge.data.chat import UNUSUAL
from reinforge.data.disk_rows import DiskRows
from reinforge.data.units import Unit
from reinforge.evals.heldout import heldout_loss
from reinforge.evals.rows import heldout_attributes, heldout_rows, heldout_scores
from reinforge.loops.checkpointer import Checkpointer
from reinforge.loops.evaluator import Evaluator
from reinforge.loops.expert_load import ExpertLoad
from reinforge.loops.given_callbacks import Callbacks
from reinforge.loops.run import Run
from reinforge.loops.supervised import SupervisedTrainer
from reinforge.loops.view import ViewLike
from reinforge.models.adapters import is_adapted
from reinforge.models.packed import PackedModel
from reinforge.rollout.rows.sampler import RowSampler


def build_supervised(
    cfg: Config, view: ViewLike, given: CallerObjects, attempt: Attempt, factories: Factories
) -> SupervisedTrainer:
    """The trainer of a run that learns from given texts."""
    inputs = read_inputs(cfg, given, view, factories.make_rewards)
    cfg = inputs.cfg
    loss = inputs.algorithm.loss
    train = make_units(inputs, inputs.train_rows, view)
    report_few_rows(cfg, len(train.units) if cfg.data.blocks else len(inputs.train_rows), view)
    if glued := inputs.renderer.counts["glued"]:
        view.message(f"data: {glued} of {len(inputs.train_rows)} rows: {UNUSUAL['glued']}")
    held_out = make_units(inputs, inputs.eval_rows, view)
    if units_of(inputs.algorithm) is kinds.judged and (what := kinds.one_sided(inputs.train_rows)):
        view.message(f"warning: data: {what} {kinds.BOTH_LABELS}")
    eval_prompts = encode_eval_prompts(inputs, view) if inputs.rewards else None
    benchmarks = read_benchmarks(inputs, view)
    text = read_ptx(inputs, view)
    steps = total_steps(cfg, len(train.units))
    inputs, chosen = with_choice(
        inputs,
        given,
        view,
        lengths=train.tokens,
        steps=steps,
        memory=attempt.memory,
    )
    models = model_inputs(inputs, eval_prompts, prompts_of(benchmarks))

    view.doing(f"loading the model {cfg.model.path}")
    policy = factories.make_policy(models)
    view.doing(f"preparing to train ({cfg.train.backend})")
    backend = make_backend(inputs, models, policy, factories, steps, view)
    cursor = make_cursor(cfg, train.rows)
    precomputes = cfg.teacher is not None and cfg.teacher.precompute
    if isinstance(train.rows, DiskRows) and (cfg.train.precompute_reference or precomputes):
        raise InputError(
            "what is computed of all rows beforehand is kept in memory, and the rows are on disk.",
            where="train.precompute_reference" if not precomputes else "teacher.precompute",
            fix="Switch it off, or set data.on_disk: never.",
        )
    units = (train.units, held_out.units)
    if cfg.train.precompute_reference:
        view.doing("computing the reference's log-probs of all rows")
        units = precompute_reference(inputs, backend, units)
    if precomputes:
        units = precompute_teacher(inputs, policy, backend, units)
    train_units, eval_units = units

    evaluate = make_evaluate(
        inputs, models, policy, factories, backend, eval_units, eval_prompts, benchmarks, view
    )
    # it has a running mean
    parts: dict[str, Stateful] = {"loss": loss} if isinstance(loss, UnpairedLoss) else {}
    ptx = make_ptx(inputs, text, backend)
    if ptx is not None:
        parts["ptx"] = ptx
    experts = ExpertLoad()
    parts["experts"] = experts
    run = Run(
        cfg,
        cursor=cursor,
        total_steps=steps,
        view=view,
        evaluator=Evaluator(cfg, evaluate),
        checkpointer=Checkpointer(
            cfg, backend, {**backend.parts(), **chosen, **parts}, memory=attempt.memory
        ),
        prediction=predict_run(cfg, backend, train.tokens, needs_of(cfg)),
        uncontained=inputs.uncontained,
        passing=attempt.passing,
        began=attempt.began,
        callbacks=Callbacks(given.callbacks),
    )
    weightings = row_weightings(cfg, train.rows, None, train.longest, given.sampler)
    row_sampler = RowSampler(cursor, cfg.run.seed, weightings)
    return SupervisedTrainer(
        run=run,
        row_sampler=row_sampler,
        backend=backend,
        loss=loss,
        row=train_units.__getitem__,
        rows_per_step=cfg.train.prompts_per_step,
        ptx=ptx,
        experts=experts,
    )


def build_supervised_heldout(
    inputs: RunInputs,
    factories: Factories,
    view: ViewLike,
    load: Callable[[PackedModel], None] | None = None,
) -> Evaluate | None:
    """The evaluation of a run's model outside the run.

    The reference is what the model is before `load` puts a checkpoint's weights in.
    """
    train = inputs.cfg.train.model_copy(update={"ema": None, "precompute_reference": False})
    inputs = replace(inputs, cfg=inputs.cfg.model_copy(update={"train": train}))
    held_out = make_units(inputs, inputs.eval_rows, view)
    eval_prompts = encode_eval_prompts(inputs, view) if inputs.rewards else None
    benchmarks = read_benchmarks(inputs, view)
    models = model_inputs(inputs, eval_prompts, prompts_of(benchmarks))
    view.doing(f"loading the model {inputs.cfg.model.path}")
    policy = factories.make_policy(models)
    backend = make_backend(inputs, models, policy, factories, 1, view)
    if load is not None:
        load(policy)
    return make_evaluate(
        inputs, models, policy, factories, backend, held_out.units, eval_prompts, benchmarks, view
    )


def make_backend(
    inputs: RunInputs,
    models: ModelInputs,
    policy: PackedModel,
    factories: Factories,
    steps: int,
    view: ViewLike,
) -> Backend:
    """With a reference where one is needed at training time."""
    cfg = inputs.cfg
    needed = "reference" in inputs.algorithm.needs
    reference = reference_of(cfg, inputs.algorithm)
    if (
        needed
        and cfg.train.precompute_reference
        and cfg.adapter is None
        and not is_adapted(policy.module)
    ):
        # the policy itself is asked, before it is trained
        return factories.make_backend(models, policy, steps=steps, temperature=1.0, reference=None)
    if needed and reference is not None and reference.kind != "frozen" and reference.every > steps:
        view.message(
            f"algorithm.kl.reference: it moves every {reference.every} steps, and the run has"
            f" {steps}: it will never move"
        )
    teachers = make_teachers(inputs, policy, chain(inputs.train_rows, inputs.eval_rows))
    return factories.make_backend(
        models, policy, steps=steps, temperature=1.0, reference=reference, teachers=teachers
    )


def make_evaluate(
    inputs: RunInputs,
    models: ModelInputs,
    policy: PackedModel,
    factories: Factories,
    backend: Backend,
    units: Sequence[Unit],
    prompts: EncodedPrompts | None,
    benchmarks: RunBenchmarks | None,
    view: ViewLike,
) -> Evaluate | None:
    """Held-out rows by the loss, and by generation where there are rewards to score it with; and
    benchmarks.
    """
    if not units and benchmarks is None:
        return None
    algorithm = inputs.algorithm
    engine: Engine | None = None
    generation: Evaluate | None = None
    if prompts is not None or benchmarks is not None:
        view.doing(f"starting the engine ({inputs.cfg.rollout.engine})")
        engine = factories.make_engine(models, policy)
        if prompts is not None:
            generation = make_heldout(inputs, prompts, engine, view.message)
        generation = with_benchmarks(generation, benchmarks, engine)

    async def evaluate() -> dict[str, float]:
        found: dict[str, float] = {}
        if not units:
            pass
        elif algorithm.family == "supervised":
            samples = [sample for unit in units for sample in unit]
            found = heldout_loss(backend, samples, backend.budget)
        else:
            found = heldout_rows(backend, algorithm.loss, units)
        if units and isinstance(algorithm.loss, RewardLoss) and algorithm.loss.unit == 2:
            found |= heldout_scores(backend, units)
        if isinstance(algorithm.loss, AttributeLoss):
            found |= heldout_attributes(backend, algorithm.loss.targets, units)
        if engine is not None and generation is not None:
            await engine.update(backend.weights(), backend.steps)
            if prompts is not None and "eval/accuracy" in found:  # that of answers that are given
                found["eval/pair_accuracy"] = found.pop("eval/accuracy")
            found |= await generation()
            await engine.sleep()
        return found

    return with_average(evaluate, backend, engine)
