"""The only place where names in a config become objects. Everything below it receives what it needs and knows no config keys
but its own section's."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from reinforge.algorithms.shaping import overlong_penalty
from reinforge.app.algorithm import algorithm_of
from reinforge.app.critic import make_critic
from reinforge.app.predict import predict_run
from reinforge.app.sampling import make_source, replayable
from reinforge.backends.local import LocalBackend
from reinforge.config.schema import Config, DataConfig
from reinforge.core.engine import Sampling
from reinforge.core.errors import InputError
from reinforge.core.sample import Group, Row, Sample
from reinforge.core.seeds import seed_of
from reinforge.data.chat import Renderer, apply_length
from reinforge.data.cursor import Cursor
from reinforge.data.sources import PYTHON, fingerprint, hold_out, load_rows, overlap, rows_from
from reinforge.engines.native import NativeEngine
from reinforge.evals.heldout import HeldOut, heldout_loss
from reinforge.models.causal import CausalModel
from reinforge.models.load import context_length, load_model, stop_tokens
from reinforge.rewards.build import GivenRewards, build_rewards, describe_rewards
from reinforge.rewards.function import FunctionReward
from reinforge.rewards.running import Running
from reinforge.rollout.journal import Journal
from reinforge.rollout.single import SingleTurn
from reinforge.train.rl import RLTrainer
from reinforge.train.session import Session, ViewLike
from reinforge.train.supervised import SupervisedTrainer

Evaluate = Callable[[], Awaitable[dict[str, float]]]


@dataclass
class Given:
    """What a Python caller passes as objects instead of names. None = take it from the config."""

    data: Iterable[Any] | None = None
    eval_data: Iterable[Any] | None = None
    rewards: GivenRewards | None = None  # in place of the config's
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # behind names that the config's rewards have
    model: CausalModel | None = None

    def described(self, cfg: Config) -> tuple[Config, Mapping[str, Callable[..., Any]]]:
        """The config with what was given in place of its own, so that the run's record tells the truth; and the reward functions."""
        rewards, functions = (cfg.rewards, self.functions) if self.rewards is None else describe_rewards(self.rewards, cfg.rewards)
        evaluation = cfg.data.eval.model_copy(update={} if self.eval_data is None else {"source": PYTHON})
        data = cfg.data.model_copy(update={"eval": evaluation, **({} if self.data is None else {"source": PYTHON})})
        return cfg.model_copy(update={"data": data, "rewards": rewards}), functions


def load_data(cfg: DataConfig, given: Given) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows, each from the config or from Python objects, never sharing a prompt."""
    for key, source, objects in (("data.source", cfg.source, given.data), ("data.eval.source", cfg.eval.source, given.eval_data)):
        if source == PYTHON and objects is None:
            raise InputError("these rows were given as Python objects, which are not kept.", where=key,
                             fix=f"Pass them to reinforge.train again, or write them to a file and set {key} to it.")  # fmt: skip
        if source not in (None, PYTHON) and objects is not None and key == "data.eval.source":
            raise InputError(f"eval_data is given, and {key} is {source} too.", where=key, fix="Give one of them.")
    mapping: dict[str, Any] = {"columns": cfg.columns, "system": cfg.system, "template": cfg.template}
    rows = load_rows(cfg) if given.data is None else rows_from(given.data, **mapping, where=cfg.where, limit=cfg.limit, name="data")
    if given.eval_data is None:
        train, held_out = hold_out(cfg if given.data is None else cfg.model_copy(update={"source": PYTHON}), rows)
    else:
        size = cfg.eval.size
        train, held_out = rows, rows_from(given.eval_data, **mapping, where=cfg.eval.where, limit=size or None, name="eval_data")
        if len(held_out) < size:
            raise InputError(
                f"asks for {size} rows, but eval_data has {len(held_out)}.", where="data.eval.size", fix="Ask for fewer, or 0 for all."
            )
    shared = overlap(train, held_out)
    if shared:
        raise InputError(f"{len(shared)} evaluation rows are also training rows, e.g. {shared[0][1].id}: {str(shared[0][1].prompt)[:80]!r}.",
                         where="data.eval", fix="Hold them out with data.eval.size, or filter with data.where and data.eval.where.")  # fmt: skip
    return train, held_out


def total_steps(cfg: Config, rows: int) -> int:
    if cfg.train.steps is not None:
        return cfg.train.steps
    assert cfg.train.epochs is not None
    return max(1, math.ceil(cfg.train.epochs * rows / cfg.train.prompts_per_step))


@dataclass
class Workshop:
    """What SFT and RL runs have in common, built once from a config."""

    cfg: Config
    given: Given
    view: ViewLike

    def __post_init__(self) -> None:
        self.train_rows, self.eval_rows = load_data(self.cfg.data, self.given)
        self.cfg, functions = self.given.described(self.cfg)
        cfg = self.cfg
        device = cfg.model.device if self.given.model is None else str(self.given.model.device)
        self.rewards: list[FunctionReward] = build_rewards(cfg.rewards, functions, device)
        self.weights = {r.name: r.weight for r in self.rewards}
        self.algorithm = algorithm_of(replayable(cfg), cfg.rollout.max_new_tokens, self.weights)
        self.model = self.given.model or load_model(cfg.model, cfg.adapter, seed=seed_of(cfg.run.seed, "adapter") % 2**31)
        self.renderer = Renderer(self.model.tokenizer, cfg.data)
        self.context = (
            context_length(cfg.model) if self.given.model is None else int(getattr(self.model.config, "max_position_embeddings", 1 << 20))
        )
        self.longest = 0  # the longest sequence that generation may reach, known once prompts are encoded
        self.best = sum(max(0.0, w) for w in self.weights.values())  # the largest total reward of scores in [0, 1]
        for note in self.algorithm.notes:
            self.view.message(note)

    @cached_property
    def engine(self) -> NativeEngine:
        """Made on first use, after the prompts are encoded: then it knows how large its cache must be."""
        stops = {*stop_tokens(self.model), *self.renderer.stop_tokens}
        cfg = self.cfg.rollout
        return NativeEngine(
            self.model, stop_tokens=stops, max_batch=cfg.max_batch, kv_gib=cfg.kv_gib, context=self.context, longest=self.longest,
            prefix_cache=cfg.prefix_cache
        )

    def backend(self, steps: int, temperature: float, *, paired: bool = False) -> LocalBackend:
        reference = self.cfg.algorithm.kl.reference if "reference" in self.algorithm.needs | self.algorithm.loss.needs else False
        return LocalBackend(self.model, self.cfg.train, total_steps=steps, temperature=temperature, reference=reference, paired=paired)

    def cursor(self, rows: Sequence[Any], ids: Sequence[Row]) -> Cursor:
        return Cursor(len(rows), self.cfg.run.seed, self.cfg.data.shuffle, fingerprint=fingerprint(ids))

    def prompts(self, rows: Sequence[Row], max_new_tokens: int) -> list[tuple[Row, list[int]]]:
        """Rows with their prompt ids, after the length policy."""
        if max_new_tokens >= self.context:
            raise InputError(f"max_new_tokens {max_new_tokens} leaves no room for a prompt in the model's context of {self.context}.",
                             where="rollout.max_new_tokens", fix="Lower it.")  # fmt: skip
        limit = self.cfg.data.max_length or self.context - max_new_tokens
        kept, counts = apply_length(self.cfg.data, [(row, self.renderer.prompt(row)) for row in rows], limit)
        self._report(counts, limit)
        self.longest = max(self.longest, *(len(ids) + max_new_tokens for _, ids in kept))
        return kept

    def samples(self, rows: Sequence[Row]) -> list[Sample]:
        limit = self.cfg.data.max_length or self.context
        kept, counts = apply_length(self.cfg.data, [self.renderer.training_row(row) for row in rows], limit)
        self._report(counts, limit)
        return kept

    def _report(self, counts: dict[str, int], limit: int) -> None:
        for name, count in counts.items():
            if count and name != "rows":
                self.view.message(f"data: {count} rows {name} (longer than {limit} tokens)")

    def heldout(self, on_groups: Callable[[list[Group]], None] | None = None) -> HeldOut | None:
        """The generation part of evaluation, if there are held-out rows and something to score them with."""
        if not self.eval_rows or not self.rewards:
            return None
        cfg = self.cfg
        new_tokens = cfg.eval.max_new_tokens or cfg.rollout.max_new_tokens
        prompts = {row.id: ids for row, ids in self.prompts(self.eval_rows, new_tokens)}
        rows = [row for row in self.eval_rows if row.id in prompts]
        sampling = Sampling(new_tokens, cfg.eval.temperature, top_p=cfg.eval.top_p, stop_strings=tuple(cfg.rollout.stop))
        rollout = SingleTurn(self.engine, lambda row: prompts[row.id], self.renderer.decode, self.rewards, sampling, n=cfg.eval.samples,
                             seed=cfg.run.seed, purpose="eval", on_error=cfg.rollout.on_reward_error)  # fmt: skip
        return HeldOut(rollout, rows, cfg.eval.samples, self.best, on_groups)


def averaged(evaluate: Evaluate | None, backend: LocalBackend, engine: NativeEngine) -> Evaluate | None:
    """The evaluation with the average of the weights in place, where the run keeps one (train.ema)."""
    if evaluate is None or backend.ema is None:
        return evaluate
    ema = backend.ema

    async def run() -> dict[str, float]:
        try:
            with ema.swapped():
                await engine.update(backend.weights(), backend.steps)
                return await evaluate()
        finally:
            await engine.update(backend.weights(), backend.steps)

    return run


def build_rl(cfg: Config, view: ViewLike, given: Given) -> RLTrainer:
    shop = Workshop(cfg, given, view)
    cfg = shop.cfg
    new_tokens = cfg.rollout.max_new_tokens
    prompts = shop.prompts(shop.train_rows, new_tokens)
    rows, encoded = [row for row, _ in prompts], {row.id: ids for row, ids in prompts}
    steps = total_steps(cfg, len(rows))
    per_step, warmup = cfg.algorithm.epochs * cfg.algorithm.minibatches, cfg.critic.warmup if cfg.critic else 0
    shop.algorithm, critic = make_critic(cfg, shop.algorithm, shop.model, steps * per_step)  # first: what is left then is for the policy
    backend = shop.backend(max(1, steps - warmup) * per_step, cfg.rollout.temperature, paired=critic is not None)
    cursor = shop.cursor(rows, rows)
    evaluate = shop.heldout()  # before the engine is made: its prompts count for the size of the cache
    journal = Journal(Path(cfg.run.dir) / "journal.jsonl")
    buffer = shop.algorithm.overlong_buffer
    rollout = SingleTurn(
        shop.engine, lambda row: encoded[row.id], shop.renderer.decode, shop.rewards,
        Sampling(new_tokens, cfg.rollout.temperature, stop_strings=tuple(cfg.rollout.stop)), n=cfg.algorithm.group_size, seed=cfg.run.seed,
        journal=journal, shape=partial(overlong_penalty, max_new_tokens=new_tokens, buffer=buffer) if buffer else None, on_error=cfg.rollout.on_reward_error,
        greedy_baseline="baseline" in shop.algorithm.needs,
    )  # fmt: skip
    running = rollout.running = Running.of(shop.rewards)
    source, parts = make_source(cfg, shop.algorithm, rows, cursor, rollout, journal, shop.best)
    parts |= ({"rewards": running} if running.rules else {}) | ({"critic": critic} if critic is not None else {})
    session = Session(cfg, backend, cursor, steps, view, averaged(evaluate, backend, shop.engine), journal.clear,
                      {"algorithm": shop.algorithm, **backend.parts(), **parts})  # fmt: skip
    session.prediction = predict_run(cfg, backend, [len(ids) for ids in encoded.values()], shop.algorithm.needs)
    return RLTrainer(session, source, backend, shop.engine, shop.algorithm, new_tokens, shop.weights,
                     cfg.algorithm.epochs, cfg.algorithm.minibatches, critic, running, cfg.train.skip_idle)  # fmt: skip


def build_supervised(cfg: Config, view: ViewLike, given: Given) -> SupervisedTrainer:
    shop = Workshop(cfg, given, view)
    cfg = shop.cfg
    samples = shop.samples(shop.train_rows)
    steps = total_steps(cfg, len(samples))
    backend = shop.backend(steps, 1.0)
    names = {s.uid for s in samples}
    cursor = shop.cursor(samples, [row for row in shop.train_rows if row.id in names])
    held_out, generation = shop.samples(shop.eval_rows) if shop.eval_rows else [], shop.heldout()

    async def evaluate() -> dict[str, float]:
        await shop.engine.update(backend.weights(), backend.steps)
        return heldout_loss(backend, held_out, backend.budget) | (await generation() if generation is not None else {})

    session = Session(cfg, backend, cursor, steps, view, averaged(evaluate if held_out else None, backend, shop.engine), parts=backend.parts())
    session.prediction = predict_run(cfg, backend, [len(s.tokens) for s in samples], shop.algorithm.loss.needs)
    return SupervisedTrainer(session, cursor, backend, shop.algorithm.loss, samples.__getitem__, cfg.train.prompts_per_step)


def build(cfg: Config, view: ViewLike, given: Given | None = None) -> RLTrainer | SupervisedTrainer:
    """The trainer that the config describes."""
    make = build_supervised if cfg.algorithm.name == "sft" else build_rl
    return make(cfg, view, given or Given())
