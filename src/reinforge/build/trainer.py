"""The only place where names in a config become objects.

Everything below it receives what it needs and knows no config keys but its own section's.
"""

from __future__ import annotations

from pathlib import Path

from reinforge.build.critic import make_critic
from reinforge.build.envs import response_tokens, training_rollout
from reinforge.build.online import joined
from reinforge.build.predict import predict_run
from reinforge.build.sampling import carrying, make_ahead, make_source
from reinforge.build.supervised import build_supervised
from reinforge.build.teacher import make_teachers
from reinforge.build.workshop import Given as Given
from reinforge.build.workshop import Workshop as Workshop
from reinforge.build.workshop import averaged, open_shop, total_steps
from reinforge.build.workshop import load_data as load_data
from reinforge.config.schema import Config
from reinforge.core.sample import Group
from reinforge.loops.rl import RLTrainer
from reinforge.loops.session import Session, ViewLike
from reinforge.loops.supervised import SupervisedTrainer
from reinforge.rewards.running import Running
from reinforge.rollout.journal import Journal


def build_rl(cfg: Config, view: ViewLike, given: Given) -> RLTrainer:
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
    carry = carrying(cfg, shop.engine, rollout)
    lengths = [len(encoded[row.id]) for row in rows]
    source, parts = make_source(
        cfg, shop.algorithm, rows, cursor, everybody, journal, shop.best, lengths, carry
    )
    ahead, begun = make_ahead(cfg, source, steps)
    parts |= (
        begun
        | ({"rewards": running} if running.rules else {})
        | ({"critic": critic} if critic is not None else {})
    )
    session = Session(
        cfg,
        backend,
        cursor,
        steps,
        view,
        averaged(evaluate, backend, shop.engine, None if ahead.drain else ahead.settle),
        journal.clear,
        {"algorithm": shop.algorithm, **backend.parts(), **parts},
        played,
    )
    session.uncontained = shop.uncontained
    session.prediction = predict_run(
        cfg, backend, [len(ids) for ids in encoded.values()], shop.algorithm.needs
    )
    return RLTrainer(
        session,
        source,
        backend,
        engine,
        shop.algorithm,
        response_tokens(cfg, shop.context),
        shop.weights,
        cfg.algorithm.epochs,
        cfg.algorithm.minibatches,
        critic,
        running,
        cfg.train.skip_idle,
        ahead,
    )


def build(cfg: Config, view: ViewLike, given: Given | None = None) -> RLTrainer | SupervisedTrainer:
    """The trainer that the config describes."""
    make = build_rl if cfg.algorithm.rl else build_supervised
    return make(cfg, view, given or Given())
