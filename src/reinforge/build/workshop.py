"""What the runs of all families have in common, built once from a config: rows, algorithm, model,
renderer, engine, backend.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from reinforge.backends.local import LocalBackend
from reinforge.backends.teachers import Teachers
from reinforge.build.agents import AGENT
from reinforge.build.algorithm import algorithm_of
from reinforge.build.engines import make_engine, room_for_engine
from reinforge.build.envs import env_weights, episode_tokens, eval_rollout
from reinforge.build.sampling import replayable
from reinforge.build.sharded import (
    AnyBackend,
    compiles,
    hosted,
    in_pieces,
    load_policy,
    on_all_ranks,
    on_ranks,
    onto_device,
    ranks_of,
)
from reinforge.config.adapter import AdapterConfig
from reinforge.config.algorithm import ReferenceConfig
from reinforge.config.data import DataConfig
from reinforge.config.schema import Config
from reinforge.core.engine import Engine
from reinforge.core.errors import InputError
from reinforge.core.sample import Group, Row
from reinforge.core.seeds import seed_of
from reinforge.data.chat import Renderer, apply_length
from reinforge.data.cursor import Cursor
from reinforge.data.mixture import MixtureCursor
from reinforge.data.sources import (
    MIXTURE,
    PYTHON,
    fingerprint,
    hold_out,
    load_rows,
    overlap,
    rows_from,
)
from reinforge.evals.heldout import HeldOut
from reinforge.loops.view import ViewLike
from reinforge.models import rope
from reinforge.models.causal import CausalModel
from reinforge.models.load import context_length, stop_tokens
from reinforge.models.packed import PackedModel
from reinforge.rewards.build import GivenRewards, build_rewards, describe_rewards
from reinforge.rewards.function import FunctionReward, check_columns

Evaluate = Callable[[], Awaitable[dict[str, float]]]


@dataclass
class Given:
    """What a Python caller passes as objects instead of names. None = take it from the config."""

    data: Iterable[Any] | None = None
    eval_data: Iterable[Any] | None = None
    rewards: GivenRewards | None = None  # in place of the config's
    # behind names that the config's rewards have
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    model: CausalModel | None = None

    def described(self, cfg: Config) -> tuple[Config, Mapping[str, Callable[..., Any]]]:
        """The config with what was given in place of its own, so that the run's record tells the
        truth; and the reward functions.
        """
        rewards, functions = (
            (cfg.rewards, self.functions)
            if self.rewards is None
            else describe_rewards(self.rewards, cfg.rewards)
        )
        evaluation = cfg.data.eval.model_copy(
            update={} if self.eval_data is None else {"source": PYTHON}
        )
        data = cfg.data.model_copy(
            update={"eval": evaluation, **({} if self.data is None else {"source": PYTHON})}
        )
        return cfg.model_copy(update={"data": data, "rewards": rewards}), functions


def load_data(cfg: DataConfig, given: Given) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows, each from the config or from Python objects, never sharing a
    prompt.
    """
    for key, source, objects in (
        ("data.source", cfg.source, given.data),
        ("data.eval.source", cfg.eval.source, given.eval_data),
    ):
        if source == PYTHON and objects is None:
            raise InputError(
                "these rows were given as Python objects, which are not kept.",
                where=key,
                fix=(
                    f"Pass them to reinforge.train again, or write them to a file and set {key}"
                    " to it."
                ),
            )
        if source not in (None, PYTHON) and objects is not None and key == "data.eval.source":
            raise InputError(
                f"eval_data is given, and {key} is {source} too.",
                where=key,
                fix="Give one of them.",
            )
    mapping: dict[str, Any] = {
        "columns": cfg.columns,
        "system": cfg.system,
        "template": cfg.template,
    }
    rows = (
        load_rows(cfg)
        if given.data is None
        else rows_from(
            given.data, **mapping, fixed=cfg.fixed, where=cfg.where, limit=cfg.limit, name="data"
        )
    )
    if given.eval_data is None:
        train, held_out = hold_out(
            cfg if given.data is None else cfg.model_copy(update={"source": PYTHON}), rows
        )
    else:
        size = cfg.eval.size
        train = rows
        held_out = rows_from(
            given.eval_data,
            **mapping,
            fixed={**cfg.fixed, **cfg.eval.fixed},
            where=cfg.eval.where,
            limit=size or None,
            name="eval_data",
        )
        if len(held_out) < size:
            raise InputError(
                f"asks for {size} rows, but eval_data has {len(held_out)}.",
                where="data.eval.size",
                fix="Ask for fewer, or 0 for all.",
            )
    shared = overlap(train, held_out)
    if shared:
        raise InputError(
            f"{len(shared)} evaluation rows are also training rows, e.g. {shared[0][1].id}:"
            f" {str(shared[0][1].prompt)[:80]!r}.",
            where="data.eval",
            fix="Hold them out with data.eval.size, or filter with data.where and data.eval.where.",
        )
    return train, held_out


def scored_columns(
    cfg: Config, rewards: Sequence[FunctionReward], train: Sequence[Row], held_out: Sequence[Row]
) -> None:
    """Raises InputError if a reward needs a column that a row which it will score does not have."""
    # without rollouts only an evaluation scores
    rows = [*(train if cfg.algorithm.rl else ()), *held_out]
    added = ("transcript",) if cfg.env is not None or cfg.agent is not None else ()
    check_columns(rewards, rows, added=added, some=cfg.rollout.on_reward_error == "unscored")


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
        self.view.doing(
            f"reading data ({self.cfg.data.source})"
            if not self.cfg.data.mixture
            else "reading data"
        )
        self.train_rows, self.eval_rows = load_data(self.cfg.data, self.given)
        self.cfg, functions = self.given.described(self.cfg)
        cfg = self.cfg
        device = cfg.model.device if self.given.model is None else str(self.given.model.device)
        # before anything is loaded
        scored_columns(cfg, build_rewards(cfg.rewards, functions), self.train_rows, self.eval_rows)
        self.rewards: list[FunctionReward] = self._rewards(functions, device)
        self.weights = {
            **env_weights(cfg.env),
            **({AGENT: cfg.agent.weight} if cfg.agent is not None else {}),
            **{r.name: r.weight for r in self.rewards},
        }
        self.algorithm = algorithm_of(replayable(cfg), cfg.rollout.max_new_tokens, self.weights)
        self.ranks = ranks_of(cfg)
        if self.ranks is not None and self.given.model is not None:
            raise InputError(
                "the other ranks cannot load a model that was given as an object.",
                where="train.backend",
                fix="Give its path.",
            )
        self.view.doing(f"loading the model {self.cfg.model.path}")
        self.model: PackedModel = self.given.model or self._load()
        self.renderer = Renderer(self.model.tokenizer, cfg.data)
        self.context = (
            context_length(cfg.model) if self.given.model is None else self.model.context or 1 << 20
        )
        self._check_reach()
        # the longest sequence that generation may reach, known once prompts are encoded
        self.longest = 0
        # the largest total reward of scores in [0, 1]
        self.best = sum(max(0.0, w) for w in self.weights.values())
        for note in (
            *self.algorithm.notes,
            *(note for reward in self.rewards for note in reward.notes),
        ):
            self.view.message(note)

    def _check_reach(self) -> None:
        """A model whose rotary embedding follows the length of a sequence goes as far as it does
        not.
        """
        rope.check(self.model.config, self.cfg.data.max_length)
        if note := rope.note(self.model.config):
            self.view.message(f"model: {note}")

    def _rewards(
        self, functions: Mapping[str, Callable[..., Any]], device: str
    ) -> list[FunctionReward]:
        return build_rewards(self.cfg.rewards, functions, device)

    def _load(self) -> PackedModel:
        """A causal LM, or the model that is to become a reward model."""
        return load_policy(
            self.cfg.model if self.ranks is None else hosted(self.cfg.model),
            *self._loading(),
            False,
        )

    def _loading(self) -> tuple[AdapterConfig | None, int, bool]:
        return (
            self.cfg.adapter,
            seed_of(self.cfg.run.seed, "adapter") % 2**31,
            self.algorithm.family == "reward",
        )

    @property
    def uncontained(self) -> list[str]:
        """Rewards that run what the model writes without containment."""
        return [r.name for r in self.rewards if getattr(r.function, "unsafe", False)]

    @property
    def policy(self) -> CausalModel:
        assert isinstance(self.model, CausalModel), (
            f"a {type(self.model).__name__} generates nothing"
        )
        return self.model

    @cached_property
    def engine(self) -> Engine:
        """Made on first use, after the prompts are encoded: then it knows how large its cache must
        be.
        """
        if self.ranks is not None and self.cfg.rollout.engine == "native":
            onto_device(self.policy, self.cfg.model)
        self.view.doing(f"starting the engine ({self.cfg.rollout.engine})")
        stops = {*stop_tokens(self.policy), *self.renderer.stop_tokens}
        saved = None if self.given.model is not None else self.cfg.model.path
        engine = make_engine(
            self.cfg, self.policy, stops, context=self.context, longest=self.longest, saved=saved
        )
        if not self.cfg.rollout.all_ranks or self.ranks is None:
            return engine
        return on_all_ranks(
            self.ranks,
            engine,
            self.cfg,
            self._loading(),
            frozenset(stops),
            self.context,
            self.longest,
        )

    def backend(
        self,
        steps: int,
        temperature: float,
        *,
        paired: bool = False,
        teachers: Teachers | None = None,
        compare: bool = True,
    ) -> AnyBackend:
        """`compare`: with the reference, where the algorithm has one."""
        self.view.doing(f"preparing to train ({self.cfg.train.backend})")
        wanted = compare and "reference" in self.algorithm.needs | self.algorithm.loss.needs
        settings: dict[str, Any] = {
            "total_steps": steps,
            "temperature": temperature,
            "reference": self.reference() if wanted else False,
            "paired": paired,
            "seed": self.cfg.run.seed,
            "teachers": teachers,
        }
        if self.ranks is None:
            with room_for_engine(self.cfg):
                return LocalBackend(self.model, self.cfg.train, **settings)
        make = partial(
            load_policy, hosted(self.cfg.model), *self._loading(), self.model.value_head is not None
        )
        kind = on_ranks(self.cfg.train.backend)
        return kind(
            self.ranks,
            make,
            self.cfg.train,
            full=self.model,
            compiled=compiles(self.cfg.model),
            sharded=in_pieces(self.cfg),
            **settings,
        )

    def reference(self) -> ReferenceConfig:
        """As the config says, or where that says nothing, as the algorithm does (tr_dpo)."""
        asked = self.cfg.algorithm.kl.reference
        return (
            ReferenceConfig(**self.algorithm.options.reference)
            if asked == ReferenceConfig()
            else asked
        )

    def cursor(self, rows: Sequence[Any], ids: Sequence[Row]) -> Cursor:
        seed = self.cfg.run.seed
        data = self.cfg.data
        mark = fingerprint(ids)
        if not data.mixture:
            return Cursor(len(rows), seed, data.shuffle, fingerprint=mark)
        places: dict[str, list[int]] = {item.name or item.source: [] for item in data.mixture}
        for i, row in enumerate(ids):
            places[row.columns[MIXTURE]].append(i)
        weights = {item.name or item.source: item.weight for item in data.mixture}
        sized = {
            name: float(len(places[name])) if weight is None else weight
            for name, weight in weights.items()
        }
        return MixtureCursor(places, sized, seed, data.shuffle, fingerprint=mark)

    def prompts(self, rows: Sequence[Row], max_new_tokens: int) -> list[tuple[Row, list[int]]]:
        """Rows with their prompt ids, after the length policy."""
        self.view.doing(f"tokenising {len(rows)} prompts")
        if max_new_tokens >= self.context:
            raise InputError(
                f"max_new_tokens {max_new_tokens} leaves no room for a prompt in the model's"
                f" context of {self.context}.",
                where="rollout.max_new_tokens",
                fix="Lower it.",
            )
        limit = self.cfg.data.max_length or self.context - max_new_tokens
        kept, counts = apply_length(
            self.cfg.data, [(row, self.renderer.prompt(row)) for row in rows], limit
        )
        self.report(counts, limit)
        self.longest = max(self.longest, *(len(ids) + max_new_tokens for _, ids in kept))
        if self.cfg.env is not None or self.cfg.agent is not None:
            self.longest = episode_tokens(self.cfg, self.context)
        if self.longest > self.context:
            raise InputError(
                f"a prompt with {max_new_tokens} new tokens has {self.longest}, and the model's"
                f" context is {self.context}.",
                where="data.max_length",
                fix=(
                    f"Set it to {self.context - max_new_tokens} or less, or lower"
                    " rollout.max_new_tokens."
                ),
            )
        return kept

    def report(self, counts: dict[str, int], limit: int) -> None:
        for name, count in counts.items():
            if count and name != "rows":
                self.view.message(f"data: {count} rows {name} (longer than {limit} tokens)")

    def heldout(self, on_groups: Callable[[list[Group]], None] | None = None) -> HeldOut | None:
        """The generation part of evaluation, if there are held-out rows and something to score them
        with.
        """
        if not self.eval_rows or not self.weights:
            return None
        cfg = self.cfg
        new_tokens = cfg.eval.max_new_tokens or cfg.rollout.max_new_tokens
        prompts = {row.id: ids for row, ids in self.prompts(self.eval_rows, new_tokens)}
        rows = [row for row in self.eval_rows if row.id in prompts]
        rollout = eval_rollout(self, prompts, new_tokens)
        return HeldOut(rollout, rows, cfg.eval.samples, self.best, on_groups)


def open_shop(cfg: Config, given: Given, view: ViewLike) -> Workshop:
    """The workshop of a run: here, or with its models in actors of Ray."""
    if cfg.cluster.kind == "local":
        return Workshop(cfg, given, view)
    from reinforge.build.remote import RemoteWorkshop

    return RemoteWorkshop(cfg, given, view)


def averaged(
    evaluate: Evaluate | None,
    backend: AnyBackend,
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
