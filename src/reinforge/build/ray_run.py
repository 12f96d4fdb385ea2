"""A run on Ray that survives its actors: begun again from its newest checkpoint or snapshot when
those that train are lost.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any, TypeVar

from reinforge.build.attempt import Attempt
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.factories import Factories
from reinforge.build.frozen import reference_apart, teachers_apart
from reinforge.build.ray import POLICY, RayFactories
from reinforge.checkpoint.memory_snapshot import MemorySnapshot
from reinforge.cluster.errors import ActorLost
from reinforge.cluster.ray_cluster import RayCluster
from reinforge.config.schema import Config
from reinforge.core.errors import InputError, StoppedByPolicy
from reinforge.core.torchrun import launched
from reinforge.loops.run import Run
from reinforge.loops.view import ViewLike

T = TypeVar("T")


class RayAttempt(Attempt):
    """One attempt at a run whose models are in actors; when those are lost, `run_on_ray` makes the
    next one. It writes what happened in the cluster into the log of the run.
    """

    def __init__(self, cluster: RayCluster, memory: MemorySnapshot | None, lost_at: float | None):
        """`lost_at`: when the actors of the attempt before were lost."""
        super().__init__(memory=memory, passing=(ActorLost,))
        self.cluster = cluster
        self.lost_at = lost_at

    def run_opened(self, run: Run) -> None:
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


def run_on_ray(
    config: Config,
    given: CallerObjects,
    view: ViewLike,
    execute: Callable[
        [Config, CallerObjects, ViewLike, Attempt, Factories], Generator[T, None, None]
    ],
) -> Generator[T, None, None]:
    """The run, attempted as often as `cluster.restarts` allows: a step that was cut is done again
    on the same draws, so the run comes out as if nothing had happened.
    """
    _check(given)
    given = replace(given, data=_listed(given.data), eval_data=_listed(given.eval_data))
    models = sum(reward.name == "model" for reward in config.rewards)
    own_critic = config.critic is not None and not config.critic.shared
    memory = MemorySnapshot(config.cluster.snapshot) if config.cluster.snapshot else None
    with RayCluster.open(
        config.cluster,
        config.model.device,
        ranks=1 if config.train.backend == "local" else config.train.ranks,
        critic=own_critic,
        rewards=models,
        reference=reference_apart(config),
        teachers=len(teachers_apart(config)),
        modules=(RayFactories.__module__, "transformers.modeling_utils"),
    ) as cluster:
        failures = 0
        reached = -1
        lost_at = None
        while True:
            attempt = RayAttempt(cluster, memory, lost_at)
            try:
                cluster.begin()
                yield from execute(config, given, view, attempt, RayFactories(cluster))
                return
            except ActorLost as lost:
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


def _check(given: CallerObjects) -> None:
    if launched():
        raise InputError(
            "Ray starts the ranks itself.",
            where="cluster.kind",
            fix="Start it without torchrun, or set cluster.kind=local.",
        )
    if given.model is not None or given.module is not None:
        raise InputError(
            "an actor cannot load a model that was given as an object.",
            where="cluster.kind",
            fix="Give its path.",
        )


def _listed(rows: Any) -> list[Any] | None:
    return None if rows is None else list(rows)


def _nth(n: int) -> str:
    return {1: "1st", 2: "2nd", 3: "3rd"}.get(n, f"{n}th")
