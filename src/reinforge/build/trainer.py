"""A config becomes a trainer: the only place where the names in a config become objects.

Everything below it receives what it needs and knows no config keys but its own section's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

from reinforge.build.algorithm import reference_of
from reinforge.build.attempt import Attempt
from reinforge.build.benchmarks import prompts_of, read_benchmarks
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.compile_choice import with_choice
from reinforge.build.critic import make_critic
from reinforge.build.data import make_cursor, total_steps
from reinforge.build.evaluation import Evaluate, make_heldout, with_average, with_benchmarks
from reinforge.build.factories import Factories
from reinforge.build.inputs import (
    ModelInputs,
    encode_eval_prompts,
    encode_train_prompts,
    model_inputs,
    read_inputs,
    report_few_rows,
)
from reinforge.build.limits import response_tokens
from reinforge.build.local import LocalFactories
from reinforge.build.opponent import add_demonstrations, add_opponent
from reinforge.build.predict import predict_run
from reinforge.build.ptx import make_ptx, read_ptx
from reinforge.build.rollouts import training_rollout
from reinforge.build.source import make_buffer, make_source, resumable_requests
from reinforge.build.supervised import build_supervised
from reinforge.build.teachers import make_teachers
from reinforge.config.rules import generators
from reinforge.config.schema import Config
from reinforge.core.sample import Group
from reinforge.data.domains import Domains
from reinforge.loops.checkpointer import Checkpointer
from reinforge.loops.evaluator import Evaluator
from reinforge.loops.expert_load import ExpertLoad
from reinforge.loops.given_callbacks import Callbacks
from reinforge.loops.rl import RLTrainer
from reinforge.loops.run import Run
from reinforge.loops.supervised import SupervisedTrainer
from reinforge.loops.trace import Tracer
from reinforge.loops.view import ViewLike
from reinforge.models.causal import CausalModel
from reinforge.models.load import pick_device
from reinforge.rewards.normalization import RewardNormalization
from reinforge.rollout.journal import Journal
from reinforge.rollout.kept import KeptRollouts
from reinforge.rollout.players.domains import DomainRollout


def build(
    cfg: Config,
    view: ViewLike,
    given: CallerObjects | None = None,
    attempt: Attempt | None = None,
    factories: Factories | None = None,
) -> RLTrainer | SupervisedTrainer:
    """The trainer that the config describes. Without `factories` everything is in this process."""
    given = given or CallerObjects()
    if factories is None:
        assert cfg.cluster.kind == "local", "a run on Ray has factories of its own"
        factories = LocalFactories(given.model)
    if cfg.cluster.kind == "local":
        pick_device(cfg.model.device)  # one that is not there is told before rows are read
    make = build_rl if cfg.algorithm.rl else build_supervised
    return make(cfg, view, given, attempt or Attempt(), factories)


def build_rl(
    cfg: Config, view: ViewLike, given: CallerObjects, attempt: Attempt, factories: Factories
) -> RLTrainer:
    """The trainer of a run that learns from what its model generates."""
    inputs = read_inputs(cfg, given, view, factories.make_rewards)
    cfg = inputs.cfg
    report_few_rows(inputs.cfg, len(inputs.train_rows), view)
    domains = Domains.of(cfg.teacher)
    prompts = encode_train_prompts(inputs, view, None if domains is None else domains.index)
    eval_prompts = encode_eval_prompts(inputs, view)
    benchmarks = read_benchmarks(inputs, view)
    text = read_ptx(inputs, view)
    rows = prompts.rows
    steps = total_steps(cfg, len(rows))
    inputs, chosen = with_choice(
        inputs,
        given,
        view,
        lengths=prompts.lengths,
        steps=steps,
        memory=attempt.memory,
    )
    models = model_inputs(inputs, prompts, eval_prompts, prompts_of(benchmarks))
    models = _with_generators(models, factories, view)
    per_step = cfg.algorithm.epochs * cfg.algorithm.minibatches
    warmup = cfg.critic.warmup if cfg.critic else 0

    view.doing(f"loading the model {cfg.model.path}")
    policy = cast(CausalModel, factories.make_policy(models))
    # the critic first: what is left then is for the policy
    critic = make_critic(inputs, models, policy, factories, steps * per_step)
    view.doing(f"preparing to train ({cfg.train.backend})")
    backend = factories.make_backend(
        models,
        policy,
        steps=max(1, steps - warmup) * per_step,
        temperature=cfg.rollout.temperature,
        reference=reference_of(cfg, inputs.algorithm),
        paired=critic is not None,
        teachers=make_teachers(inputs, policy, longest=models.longest),
    )
    view.doing(f"starting the engine ({cfg.rollout.engine})")
    engine = factories.make_engine(replace(models, budget=backend.budget), policy)

    journal = Journal(Path(cfg.run.dir) / "journal.jsonl")
    rollout = training_rollout(inputs, prompts, engine, journal, view.message)
    running = rollout.scorer.running = RewardNormalization.of(inputs.rewards)
    group_rollout = add_demonstrations(inputs, rows, rollout)
    if domains is not None:
        group_rollout = DomainRollout(group_rollout, domains)
    group_rollout, updated_engine = add_opponent(
        inputs, models, rows, group_rollout, engine, policy, backend
    )
    cursor = make_cursor(cfg, rows)
    source, parts = make_source(
        cfg,
        inputs.algorithm,
        rows,
        cursor=cursor,
        rollout=group_rollout,
        journal=journal,
        best=inputs.best,
        lengths=prompts.lengths,
        requests=resumable_requests(cfg, engine),
        sampler=given.sampler,
    )
    buffer, buffer_parts = make_buffer(cfg, source, steps, rollout.scorer)
    parts |= buffer_parts
    if running.rules:
        parts["rewards"] = running
    if critic is not None:
        parts["critic"] = critic
    ptx = make_ptx(inputs, text, backend)
    if ptx is not None:
        parts["ptx"] = ptx
    experts = ExpertLoad()
    parts["experts"] = experts

    played: list[Group] = []
    evaluate: Evaluate | None = None
    if eval_prompts is not None:
        evaluate = make_heldout(inputs, eval_prompts, engine, view.message, played.extend)
    evaluate = with_benchmarks(evaluate, benchmarks, engine)
    # an evaluation with other weights waits for rollouts that an engine is busy with
    settle = buffer.settle if buffer.due == "whenever" else None
    run = Run(
        cfg,
        cursor=cursor,
        total_steps=steps,
        view=view,
        evaluator=Evaluator(cfg, with_average(evaluate, backend, engine, settle), played),
        checkpointer=Checkpointer(
            cfg,
            backend,
            {"algorithm": inputs.algorithm, **backend.parts(), **chosen, **parts},
            settle=buffer.settle,
            on_saving=journal.seal,
            memory=attempt.memory,
        ),
        prediction=predict_run(cfg, backend, prompts.lengths, inputs.algorithm.needs),
        uncontained=inputs.uncontained,
        reward_files=inputs.reward_files,
        passing=attempt.passing,
        began=attempt.began,
        callbacks=Callbacks(given.callbacks),
    )
    return RLTrainer(
        run=run,
        source=source,
        buffer=buffer,
        backend=backend,
        engine=updated_engine,
        algorithm=inputs.algorithm,
        max_new_tokens=response_tokens(cfg, inputs.context),
        reward_weights=inputs.weights,
        epochs=cfg.algorithm.epochs,
        minibatches=cfg.algorithm.minibatches,
        critic=critic,
        running=running,
        ptx=ptx,
        experts=experts,
        skip_idle=cfg.train.skip_idle,
        kept=KeptRollouts(Path(cfg.run.dir)) if cfg.run.keep_rollouts else None,
        tracer=Tracer(
            inputs.algorithm,
            inputs.weights,
            samples=cfg.run.log.samples,
            groups=cfg.run.log.groups,
            tokens=cfg.run.log.tokens,
        ),
    )


def _with_generators(models: ModelInputs, factories: Factories, view: ViewLike) -> ModelInputs:
    """With the choice of who generates, which is told."""
    trainers = factories.trainers(models.cfg)
    if (said := generators.told(models.cfg, *trainers)) is not None:
        view.message(f"rollouts: {said}")
    return replace(models, all_ranks=generators.on_all_ranks(models.cfg, *trainers))
