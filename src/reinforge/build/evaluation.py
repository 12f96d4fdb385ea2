"""What judges a model on held-out rows by generating, inside a run and outside of one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

from reinforge.build.benchmarks import RunBenchmarks, prompts_of, read_benchmarks
from reinforge.build.factories import Factories
from reinforge.build.inputs import EncodedPrompts, RunInputs, encode_eval_prompts, model_inputs
from reinforge.build.rollouts import eval_rollout
from reinforge.core.backend import Backend
from reinforge.core.engine import Engine
from reinforge.core.sample import Group
from reinforge.evals.heldout import HeldOutEvaluation
from reinforge.loops.view import ViewLike
from reinforge.models.packed import PackedModel

Evaluate = Callable[[], Coroutine[Any, Any, dict[str, float]]]
OnGroups = Callable[[list[Group]], None]


def make_heldout(
    inputs: RunInputs,
    prompts: EncodedPrompts,
    engine: Engine,
    tell: Callable[[str], None],
    on_groups: OnGroups | None = None,
) -> HeldOutEvaluation:
    """Generates for the held-out prompts and scores the answers."""
    rollout = eval_rollout(inputs, prompts, engine, tell)
    return HeldOutEvaluation(rollout, prompts.rows, inputs.cfg.eval.samples, inputs.best, on_groups)


def with_benchmarks(
    evaluate: Evaluate | None, benchmarks: RunBenchmarks | None, engine: Engine
) -> Evaluate | None:
    """The evaluation, and the benchmarks after it."""
    if benchmarks is None:
        return evaluate
    ask = benchmarks.evaluation(engine)

    async def both() -> dict[str, float]:
        found = {} if evaluate is None else await evaluate()
        return found | await ask()

    return both


def build_heldout(
    inputs: RunInputs,
    factories: Factories,
    view: ViewLike,
    *,
    load: Callable[[PackedModel], None] | None = None,
    on_groups: OnGroups | None = None,
) -> Evaluate | None:
    """The generation part of an evaluation outside of a run; None where there are no held-out rows,
    or nothing to score answers with, and no benchmarks. `load` puts a checkpoint's weights into the
    model.
    """
    prompts = encode_eval_prompts(inputs, view)
    benchmarks = read_benchmarks(inputs, view)
    if prompts is None and benchmarks is None:
        return None
    models = replace(model_inputs(inputs, prompts, prompts_of(benchmarks)), trains=False)
    view.doing(f"loading the model {inputs.cfg.model.path}")
    policy = factories.make_policy(models)
    if load is not None:
        load(policy)
    view.doing(f"starting the engine ({inputs.cfg.rollout.engine})")
    engine = factories.make_engine(models, policy)
    heldout = (
        None if prompts is None else make_heldout(inputs, prompts, engine, view.message, on_groups)
    )
    return with_benchmarks(heldout, benchmarks, engine)


def with_average(
    evaluate: Evaluate | None,
    backend: Backend,
    engine: Engine | None,
    settle: Callable[[], Awaitable[None]] | None = None,
) -> Evaluate | None:
    """The evaluation with the average of the weights in place, where the run keeps one (train.ema).

    `engine`: where it generates; `settle` waits for rollouts that it has under way: they would go
    on with the average, under the version of the policy.
    """
    if evaluate is None or backend.ema is None:
        return evaluate
    ema = backend.ema

    async def run() -> dict[str, float]:
        if settle is not None:
            await settle()
        try:
            with ema.swapped():
                if engine is not None:
                    await engine.update(backend.weights(), backend.steps)
                return await evaluate()
        finally:
            if engine is not None:
                await engine.update(backend.weights(), backend.steps)

    return run
