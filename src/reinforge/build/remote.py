"""`cluster.kind: ray` becomes actors.

The controller has rows, rewards, the loop and the log; models are where their actors are.

Inside an actor the same workshop is open, without rows and rewards: whatever `Workshop` can make
there (a backend, an engine), it makes from the same config and in the same way as in one process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, cast

from reinforge.backends.distributed.ranks import current as current_ranks
from reinforge.backends.distributed.ranks import launched
from reinforge.backends.teachers import Teachers
from reinforge.build.algorithm import algorithm_of
from reinforge.build.attempt import Attempt
from reinforge.build.critic import critic_backend
from reinforge.build.sampling import replayable
from reinforge.build.sharded import open_ranks, ranks_of
from reinforge.build.workshop import Given, Workshop
from reinforge.checkpoint.in_memory import Memory
from reinforge.cluster.backend import RemoteBackend
from reinforge.cluster.crew import Crew, Lost
from reinforge.cluster.engine import RemoteEngine
from reinforge.cluster.group import Cluster, current
from reinforge.cluster.reward import RemoteReward
from reinforge.config.cluster import ClusterConfig
from reinforge.config.schema import Config
from reinforge.config.train import TrainConfig
from reinforge.core.engine import Engine
from reinforge.core.errors import InputError, StoppedByPolicy
from reinforge.data.chat import Renderer
from reinforge.loops.run import Run
from reinforge.loops.view import NoView, ViewLike
from reinforge.models.load import context_length, load_config, load_tokenizer
from reinforge.models.packed import PackedModel
from reinforge.rewards.build import build_rewards
from reinforge.rewards.function import FunctionReward
from reinforge.rewards.model import ModelReward

SHOP = "shop"
POLICY = "policy"
CRITIC = "critic"
ENGINE = "engine"
REWARD = "reward"


# ---- the controller's side ----


class Sketch:
    """What the controller knows of a model that is elsewhere."""

    module = None
    value_head: bool | None = None

    def __init__(self, cfg: Config):
        self.tokenizer = load_tokenizer(cfg.model)
        self.config = load_config(cfg.model).get_text_config()
        self.device = cfg.model.device

    def add_value_head(self) -> None:
        self.value_head = True


class RemoteWorkshop(Workshop):
    """A workshop whose models, engines and backends are in actors."""

    def __post_init__(self) -> None:
        if self.given.model is not None:
            raise InputError(
                "an actor cannot load a model that was given as an object.",
                where="cluster.kind",
                fix="Give its path.",
            )
        cluster = current()
        assert cluster is not None, "no cluster is open"
        self.cluster = cluster
        cluster.begin()
        super().__post_init__()

    def _rewards(
        self, functions: Mapping[str, Callable[..., Any]], device: str
    ) -> list[FunctionReward]:
        places = iter(range(len(self.cfg.rewards)))

        def there(reward: ModelReward) -> RemoteReward:
            return RemoteReward(self.cluster, next(places), replace(reward), device)

        return build_rewards(self.cfg.rewards, functions, device, there)

    def _load(self) -> PackedModel:
        self._open(self.cluster.crew(POLICY))
        return cast(PackedModel, Sketch(self.cfg))

    def _open(self, crew: Crew) -> Crew:
        crew.make(SHOP, open_station, inner(self.cfg), self.weights)
        return crew

    @property
    def policy(self) -> Any:
        return self.model

    @property
    def colocated(self) -> bool:
        return self.cfg.cluster.layout == "colocated"

    @cached_property
    def engine(self) -> Any:
        crews = (
            [partial(self.cluster.crew, POLICY)]
            if self.colocated
            else [partial(self._engine_crew, i) for i in range(self.cfg.cluster.engines)]
        )
        return RemoteEngine(
            self.cluster, crews, ENGINE, station_engine, self.longest, shares=self.colocated
        )

    def _engine_crew(self, i: int) -> Crew:
        crew = self.cluster.crew(ENGINE, i)
        one = self.cfg.train.model_copy(
            update={"backend": "local", "ranks": None, "sequence_parallel": 1, "tensor_parallel": 1}
        )
        # a whole copy of the model, in one process
        crew.make(SHOP, open_station, inner(self.cfg, train=one), self.weights)
        return crew

    def backend(
        self,
        steps: int,
        temperature: float,
        *,
        paired: bool = False,
        teachers: Teachers | None = None,
        compare: bool = True,
    ) -> Any:
        settings = {"paired": paired, "teachers": teachers, "compare": compare}
        head = self.model.value_head is not None
        return RemoteBackend(
            self.cluster.crew(POLICY),
            POLICY,
            station_backend,
            head,
            steps,
            temperature,
            settings,
            shares=self.colocated,
        )


def remote_critic(cfg: Config, train: TrainConfig, updates: int) -> Any:
    """Beside the policy, or in a split layout with ranks of its own."""
    cluster = current()
    assert cluster is not None, "no cluster is open"
    crew = cluster.crew(POLICY if cfg.cluster.layout == "colocated" else CRITIC)
    if crew.role == CRITIC:
        crew.make(SHOP, open_only, inner(cfg))
    return RemoteBackend(crew, CRITIC, station_critic, inner(cfg), train, updates, shares=False)


def inner(cfg: Config, **changes: Any) -> Config:
    """The config as it is inside an actor.

    States travel whole, to the controller, who writes the checkpoint.
    """
    checkpoint = cfg.run.checkpoint.model_copy(update={"sharded": False})
    run = cfg.run.model_copy(update={"checkpoint": checkpoint})
    return cfg.model_copy(update={"cluster": ClusterConfig(), "run": run, **changes})


# ---- the actor's side ----


class Station(Workshop):
    """The part of a workshop that computes: model, backend, engine."""

    def __init__(self, cfg: Config, weights: Mapping[str, float]):
        self.cfg = cfg
        self.given = Given()
        self.view = NoView()
        self.train_rows = []
        self.eval_rows = []
        self.rewards = []
        self.weights = dict(weights)
        self.algorithm = algorithm_of(replayable(cfg), cfg.rollout.max_new_tokens, self.weights)
        self.ranks = ranks_of(cfg)
        self.model = self._load()
        self.renderer = Renderer(self.model.tokenizer, cfg.data)
        self.context = context_length(cfg.model)
        self.longest = 0
        self.best = 0.0


def open_only(objects: dict[str, Any], cfg: Config) -> AbstractContextManager[Any]:
    """The ranks that the config trains with, for as long as the actor lives."""
    opened = open_ranks(cfg)
    opened.__enter__()
    if (ranks := current_ranks()) is not None:
        objects["ranks"] = ranks
    return opened


def open_station(objects: dict[str, Any], cfg: Config, weights: Mapping[str, float]) -> Station:
    open_only(objects, cfg)
    return Station(cfg, weights)


def station_backend(
    objects: dict[str, Any], head: bool, steps: int, temperature: float, settings: dict[str, Any]
) -> Any:
    shop: Station = objects[SHOP]
    if head:
        shop.policy.add_value_head()
    return shop.backend(steps, temperature, **settings)


def station_engine(objects: dict[str, Any], longest: int) -> Engine:
    shop: Station = objects[SHOP]
    shop.longest = longest
    return shop.engine


def station_critic(objects: dict[str, Any], cfg: Config, train: TrainConfig, updates: int) -> Any:
    assert cfg.critic is not None
    return critic_backend(cfg, cfg.critic, train, updates)


# ---- a run that survives its actors ----


class RayAttempt(Attempt):
    """One attempt at a run whose models are in actors; when those are lost, `on_ray` makes the
    next one. It writes what happened in the cluster into the log of the run.
    """

    def __init__(self, cluster: Cluster, memory: Memory | None, lost_at: float | None):
        """`lost_at`: when the actors of the attempt before were lost."""
        super().__init__(memory=memory, passing=(Lost,))
        self.cluster = cluster
        self.lost_at = lost_at

    def opened(self, run: Run) -> None:
        """The log is open: what happened is written, unless it is there."""
        there = {
            json.loads(line).get("fault")
            for line in (run.dir / "events.jsonl").read_text().splitlines()
        }
        self.cluster.tell = lambda event: run.recorder.event(**event)
        for event in self.cluster.events:
            if event["fault"] not in there:
                run.recorder.event(**event)
        if self.lost_at is not None:
            self.cluster.note(
                "actor_restored",
                role=POLICY,
                seconds=time.monotonic() - self.lost_at,
                step=run.step,
            )


def on_ray(
    config: Config,
    given: Given,
    view: ViewLike,
    execute: Callable[[Config, Given, ViewLike, Attempt], Run],
) -> Run:
    """The run, begun again from its newest checkpoint or snapshot when the trainer's actors are
    lost: a step that was cut is done again on the same draws, so the run comes out as if nothing
    had happened.
    """
    if launched():
        raise InputError(
            "Ray starts the ranks itself.",
            where="cluster.kind",
            fix="Start it without torchrun, or set cluster.kind=local.",
        )
    given = replace(given, data=_listed(given.data), eval_data=_listed(given.eval_data))
    models = sum(reward.name == "model" for reward in config.rewards)
    own_critic = config.critic is not None and not config.critic.shared
    memory = Memory(config.cluster.snapshot) if config.cluster.snapshot else None
    with Cluster.open(
        config.cluster,
        config.model.device,
        ranks=1 if config.train.backend == "local" else config.train.ranks,
        critic=own_critic,
        rewards=models,
    ) as cluster:
        cluster.modules = (__name__, "transformers.modeling_utils")
        failures = 0
        reached = -1
        lost_at = None
        while True:
            attempt = RayAttempt(cluster, memory, lost_at)
            try:
                return execute(config, given, view, attempt)
            except Lost as lost:
                lost_at = time.monotonic()
                run = attempt.run
                cluster.tell = None
                cluster.note(
                    "actor_lost", role=lost.role, how=lost.how, step=run.step if run else 0
                )
                if run is not None and run.terminating:
                    raise run.terminated() from lost
                if run is not None and run.step > reached:
                    failures = 0
                    reached = run.step
                failures += 1
                if failures > config.cluster.restarts:
                    raise StoppedByPolicy(
                        f"{lost}. It is gone for the {_nth(failures)} time at step"
                        f" {max(0, reached)} (cluster.restarts: {config.cluster.restarts}). The"
                        " newest checkpoint is intact: the same command continues from it."
                    ) from lost
                view.message(f"lost {lost}; its actors are made again")
                cluster.reset()
            config = config.model_copy(
                update={"run": config.run.model_copy(update={"resume": "auto"})}
            )


def _listed(rows: Any) -> list[Any] | None:
    return None if rows is None else list(rows)


def _nth(n: int) -> str:
    return {1: "1st", 2: "2nd", 3: "3rd"}.get(n, f"{n}th")
