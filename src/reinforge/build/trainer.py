"""The only place where names in a config become objects.

Everything below it receives what it needs and knows no config keys but its own section's.
"""

from __future__ import annotations

from pathlib import Path

from reinforge.build.attempt import Attempt
from reinforge.build.critic import make_critic
from reinforge.build.envs import response_tokens, training_rollout
from reinforge.build.online import joined
from reinforge.build.predict import predict_run
from reinforge.build.sampling import make_buffer, make_source, resumable_requests
from reinforge.build.supervised import build_supervised
from reinforge.build.teacher import make_teachers
from reinforge.build.workshop import Given as Given
from reinforge.build.workshop import Workshop as Workshop
from reinforge.build.workshop import averaged, open_shop, total_steps
from reinforge.build.workshop import load_data as load_data
from reinforge.config.schema import Config
from reinforge.core.sample import Group
from reinforge.loops.checkpointer import Checkpointer
from reinforge.loops.evaluator import Evaluator
from reinforge.loops.rl import RLTrainer
from reinforge.loops.run import Run
from reinforge.loops.supervised import SupervisedTrainer
from reinforge.loops.trace import Tracer
from reinforge.loops.view import ViewLike
from reinforge.rewards.running import Running
from reinforge.rollout.journal import Journal


def build_rl(cfg: Config, view: ViewLike, given: Given, attempt: Attempt) -> RLTrainer:
    shop = open_shop(cfg, given, view)
    cfg = shop.cfg
    new_tokens = cfg.rollout.max_new_tokens
    prompts = shop.prompts(shop.train_rows, new_tokens)
    rows = [row for row, _ in prompts]
    encoded = {row.id: ids for row, ids in prompts}
    steps = total_steps(cfg, len(rows))
    per_step = cfg.algorithm.epochs * cfg.algorithm.minibatches
    warmup = cfg.critic.warmup if cfg.critic else 0
    # first: what is left then is for the policy
    shop.algorithm, critic = make_critic(cfg, shop.algorithm, shop.policy, steps * per_step)
    backend = shop.backend(
        max(1, steps - warmup) * per_step,
        cfg.rollout.temperature,
        paired=critic is not None,
        teachers=make_teachers(shop),
    )
    cursor = shop.cursor(rows, rows)
    played: list[Group] = []
    # before the engine is made: its prompts count for the size of the cache
    evaluate = shop.heldout(played.extend)
    journal = Journal(Path(cfg.run.dir) / "journal.jsonl")
    rollout = training_rollout(shop, encoded, journal)
    running = rollout.scorer.running = Running.of(shop.rewards)
    everybody, engine = joined(shop, rows, rollout, backend)
    requests = resumable_requests(cfg, shop.engine)
    lengths = [len(encoded[row.id]) for row in rows]
    source, parts = make_source(
        cfg, shop.algorithm, rows, cursor, everybody, journal, shop.best, lengths, requests
    )
    buffer, begun = make_buffer(cfg, source, steps)
    parts |= begun
    if running.rules:
        parts["rewards"] = running
    if critic is not None:
        parts["critic"] = critic
    run = Run(
        cfg,
        cursor=cursor,
        total_steps=steps,
        view=view,
        evaluator=Evaluator(
            cfg,
            averaged(evaluate, backend, shop.engine, None if buffer.drain else buffer.settle),
            played,
        ),
        checkpointer=Checkpointer(
            cfg,
            backend,
            {"algorithm": shop.algorithm, **backend.parts(), **parts},
            settle=buffer.settle,
            on_saved=journal.clear,
            memory=attempt.memory,
        ),
        prediction=predict_run(
            cfg, backend, [len(ids) for ids in encoded.values()], shop.algorithm.needs
        ),
        uncontained=shop.uncontained,
        passing=attempt.passing,
        began=attempt.began,
    )
    return RLTrainer(
        run=run,
        source=source,
        buffer=buffer,
        backend=backend,
        engine=engine,
        algorithm=shop.algorithm,
        max_new_tokens=response_tokens(cfg, shop.context),
        reward_weights=shop.weights,
        epochs=cfg.algorithm.epochs,
        minibatches=cfg.algorithm.minibatches,
        critic=critic,
        running=running,
        skip_idle=cfg.train.skip_idle,
        tracer=Tracer(
            shop.algorithm,
            shop.weights,
            every=cfg.run.log.samples_every,
            samples=cfg.run.log.samples,
            groups=cfg.run.log.groups,
            tokens=cfg.run.log.tokens,
        ),
    )


def build(
    cfg: Config, view: ViewLike, given: Given | None = None, attempt: Attempt | None = None
) -> RLTrainer | SupervisedTrainer:
    """The trainer that the config describes."""
    make = build_rl if cfg.algorithm.rl else build_supervised
    return make(cfg, view, given or Given(), attempt or Attempt())
