"""`cluster.kind: ray` becomes actors: the same factories as in one process, whose objects are
elsewhere.

The controller has rows, rewards, the loop and the log. Inside an actor `LocalFactories` make the
model, the backend and the engine from the same inputs and in the same way as in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

from reinforge.backends.distributed.ranks import current as current_ranks
from reinforge.backends.teachers import LocalTeacher, TeacherModel, Teachers
from reinforge.build.engines import server_setup
from reinforge.build.frozen import (
    inside_frozen,
    make_reference,
    make_teacher,
    teachers_apart,
)
from reinforge.build.inputs import ModelInputs
from reinforge.build.local import LocalFactories
from reinforge.build.ranks import ON_RANKS, open_ranks
from reinforge.build.served import trainer_score
from reinforge.cluster.actor import MODEL, SCORE
from reinforge.cluster.backend import RemoteBackend
from reinforge.cluster.engine import RemoteEngine
from reinforge.cluster.frozen import FrozenModels, RemoteFrozenModel, RemoteTeacher
from reinforge.cluster.placement import teacher_role
from reinforge.cluster.ray_cluster import RayCluster
from reinforge.cluster.reward import RemoteReward
from reinforge.cluster.worker_group import WorkerGroup
from reinforge.config.algorithm import ReferenceConfig
from reinforge.config.cluster import ClusterConfig
from reinforge.config.schema import Config
from reinforge.config.teacher import OneTeacherConfig
from reinforge.config.train import TrainConfig
from reinforge.core.backend import Backend
from reinforge.core.engine import Engine
from reinforge.engines.served.dialect import ServerSetup
from reinforge.engines.served.make import make_served
from reinforge.models.causal import CausalModel
from reinforge.models.load import load_config
from reinforge.models.packed import PackedModel
from reinforge.rewards.build import build_rewards
from reinforge.rewards.function import FunctionReward
from reinforge.rewards.model import ModelReward
from reinforge.weights.probe import Scorer

# the objects of an actor, by name. All but the last two are also roles of the cluster
POLICY = "policy"  # the backend that trains the policy
CRITIC = "critic"  # the backend that trains the critic
ENGINE = "engine"
REFERENCE = "reference"  # only a role: one that has actors of its own
RANKS = "ranks"
SETUP = "setup"  # of the servers that an actor starts


# ---- in the controller ----


class RemotePolicy:
    """What the controller knows of a policy that is in an actor: its shape, and whether it has a
    value head. `RayFactories.make_policy` gives it to the builders in place of the model.
    """

    module = None
    value_head: bool | None = None

    def __init__(self, cfg: Config):
        self.config = load_config(cfg.model).get_text_config()
        self.device = cfg.model.device

    def add_value_head(self) -> None:
        """The actor adds it before it makes the backend."""
        self.value_head = True


class RayFactories:
    """Factories whose models, engines and backends are in the actors of a cluster. Made by
    `build/ray_run.py`, once for every attempt at a run.
    """

    def __init__(self, cluster: RayCluster):
        self.cluster = cluster

    def trainers(self, cfg: Config) -> tuple[int, str]:
        places = self.cluster.plan.places[POLICY]
        return len(places), "cuda" if any(place.gpus for place in places) else "cpu"

    def make_rewards(
        self, cfg: Config, functions: Mapping[str, Callable[..., Any]], device: str
    ) -> list[FunctionReward]:
        places = iter(range(len(cfg.rewards)))

        def in_an_actor(reward: ModelReward) -> RemoteReward:
            return RemoteReward(self.cluster, next(places), replace(reward), device)

        return build_rewards(cfg.rewards, functions, device, in_an_actor)

    def make_policy(self, inputs: ModelInputs) -> PackedModel:
        self.cluster.workers(POLICY).make(MODEL, load_in_actor, inside_actor(inputs))
        return cast(PackedModel, RemotePolicy(inputs.cfg))

    def make_critic_backend(
        self, inputs: ModelInputs, policy: CausalModel, train: TrainConfig, updates: int
    ) -> Backend:
        """Beside the policy, or with actors and ranks of its own."""
        inside = inside_actor(inputs)
        if self._apart(CRITIC):
            workers = self.cluster.workers(CRITIC)
            workers.make(RANKS, open_ranks_in_actor, inside.cfg)
        else:
            workers = self.cluster.workers(POLICY)
        return RemoteBackend(
            workers,
            CRITIC,
            make_critic_in_actor,
            inside,
            train,
            updates,
            shares=False,
            writes=written_by_actors(inputs.cfg),
        )

    def make_backend(
        self,
        inputs: ModelInputs,
        policy: PackedModel,
        *,
        steps: int,
        temperature: float,
        reference: ReferenceConfig | None,
        paired: bool = False,
        teachers: Teachers | None = None,
    ) -> Backend:
        frozen = FrozenModels(temperature=temperature)
        if reference is not None and self._apart(REFERENCE):
            frozen.reference = self._reference(inputs, temperature)
        if teachers is not None and self._apart(teacher_role(0)):
            self._move_teachers(inputs, teachers, temperature)
            frozen.teachers = teachers
        settings = {
            "steps": steps,
            "temperature": temperature,
            "reference": reference if frozen.reference is None else None,
            "paired": paired and not self._apart(CRITIC),
            "teachers": teachers if frozen.teachers is None else None,
        }
        return RemoteBackend(
            self.cluster.workers(POLICY),
            POLICY,
            make_backend_in_actor,
            inside_actor(inputs),
            policy.value_head is not None,
            settings,
            shares=_colocated(inputs.cfg),
            writes=written_by_actors(inputs.cfg),
            frozen=frozen,
        )

    def _apart(self, role: str) -> bool:
        """Whether the role has actors of its own."""
        return role in self.cluster.plan.places

    def _reference(self, inputs: ModelInputs, temperature: float) -> RemoteFrozenModel:
        inside = inside_frozen(inside_actor(inputs), inputs.cfg.cluster.reference)
        found = RemoteFrozenModel(
            self.cluster, REFERENCE, make_reference_in_actor, inside, temperature
        )
        found.load()
        return found

    def _move_teachers(self, inputs: ModelInputs, teachers: Teachers, temperature: float) -> None:
        """Puts those that are no servers into actors; they are loaded when they are first asked."""
        inside = inside_frozen(inside_actor(inputs), inputs.cfg.cluster.teacher)
        best_of = (teachers.k, teachers.temperature)
        apart = enumerate(teachers_apart(inputs.cfg))

        def moved(member: TeacherModel) -> TeacherModel:
            if not isinstance(member, LocalTeacher):
                return member
            number, one = next(apart)
            model = RemoteFrozenModel(
                self.cluster,
                teacher_role(number),
                make_teacher_in_actor,
                inside,
                one,
                temperature,
                best_of,
            )
            return RemoteTeacher(model, temperature, best_of)

        teachers.place(moved)

    def make_engine(self, inputs: ModelInputs, policy: PackedModel) -> Engine:
        if _colocated(inputs.cfg):
            return RemoteEngine(
                self.cluster,
                [partial(self.cluster.workers, POLICY)],
                ENGINE,
                make_engine_in_actor,
                inside_actor(inputs),
                shares=True,
            )
        if inputs.cfg.rollout.engine != "native":
            return self._make_served(inputs)
        replicas = range(inputs.cfg.cluster.engines)
        return RemoteEngine(
            self.cluster,
            [partial(self._engine_workers, inputs, i) for i in replicas],
            ENGINE,
            make_engine_in_actor,
            inside_engine(inputs),
            shares=False,
            reroutes=not _depends_on_the_batch(inputs.cfg, self.cluster),
        )

    def _make_served(self, inputs: ModelInputs) -> Engine:
        """Actors that start servers and load nothing: what those are told is known where the model
        is, and so is what proves their weights.
        """
        trainer = self.cluster.workers(POLICY)
        setup: ServerSetup = trainer.apply(MODEL, setup_in_actor, inside_actor(inputs))
        trainer.make(SCORE, make_score_in_actor)
        replicas = range(inputs.cfg.cluster.engines)
        return RemoteEngine(
            self.cluster,
            [partial(self._served_workers, setup, i) for i in replicas],
            ENGINE,
            make_served_in_actor,
            shares=False,
            reroutes=True,  # by a server no run comes out to the bit
            served=setup,
        )

    def _served_workers(self, setup: ServerSetup, replica: int) -> WorkerGroup:
        workers = self.cluster.workers(ENGINE, replica)
        workers.make(SETUP, keep_in_actor, replace(setup, name=workers.role))
        return workers

    def _engine_workers(self, inputs: ModelInputs, replica: int) -> WorkerGroup:
        workers = self.cluster.workers(ENGINE, replica)
        workers.make(MODEL, load_in_actor, inside_engine(inputs))
        return workers


def _colocated(cfg: Config) -> bool:
    return cfg.cluster.layout == "colocated"


def _depends_on_the_batch(cfg: Config, cluster: RayCluster) -> bool:
    """Whether a run comes out to the bit only if the same requests are computed together: what a
    lost engine held must then wait for the new one. On a GPU, and where the clock says what a step
    cuts, no run does.
    """
    if cfg.rollout.partial:
        return False
    on_gpu = any(place.gpus for place in cluster.plan.places.get(ENGINE, ()))
    return not cfg.model.exact and not on_gpu


def written_by_actors(cfg: Config) -> bool:
    """Whether checkpoints are written where the states are: by ranks, unless they are told not to.
    The state of one process travels to the controller, which writes it.
    """
    return cfg.train.backend in ON_RANKS and cfg.run.checkpoint.sharded is not False


def inside_actor(inputs: ModelInputs) -> ModelInputs:
    """The inputs as they are inside an actor."""
    run = inputs.cfg.run
    checkpoint = run.checkpoint.model_copy(update={"sharded": written_by_actors(inputs.cfg)})
    run = run.model_copy(update={"checkpoint": checkpoint})
    # who trains must know whether servers will be beside it
    cluster = ClusterConfig().model_copy(update={"layout": inputs.cfg.cluster.layout})
    return replace(inputs, cfg=inputs.cfg.model_copy(update={"cluster": cluster, "run": run}))


def inside_engine(inputs: ModelInputs) -> ModelInputs:
    """The inputs inside an actor that only generates: a whole copy of the model, in one process."""
    inside = inside_actor(inputs)
    train = inside.cfg.train.model_copy(
        update={"backend": "local", "ranks": None, "sequence_parallel": 1, "tensor_parallel": 1}
    )
    return replace(inside, cfg=inside.cfg.model_copy(update={"train": train}), trains=False)


# ---- in an actor ----


class ActorRanks:
    """The ranks that a config trains with, open for as long as the actor lives; none where one
    process trains.
    """

    def __init__(self, cfg: Config):
        self._opened = open_ranks(cfg)
        self._opened.__enter__()
        self._ranks = current_ranks()

    def close(self) -> None:
        """The actor's orderly end."""
        self._opened.__exit__(None, None, None)
        if self._ranks is not None:
            self._ranks.close()


def open_ranks_in_actor(objects: dict[str, Any], cfg: Config) -> ActorRanks:
    return ActorRanks(cfg)


def load_in_actor(objects: dict[str, Any], inputs: ModelInputs) -> PackedModel:
    objects[RANKS] = ActorRanks(inputs.cfg)
    return LocalFactories().make_policy(inputs)


def make_backend_in_actor(
    objects: dict[str, Any], inputs: ModelInputs, value_head: bool, settings: dict[str, Any]
) -> Backend:
    policy = objects[MODEL]
    if value_head:
        policy.add_value_head()
    return LocalFactories().make_backend(inputs, policy, **settings)


def make_engine_in_actor(objects: dict[str, Any], inputs: ModelInputs) -> Engine:
    return LocalFactories().make_engine(inputs, objects[MODEL])


def setup_in_actor(model: CausalModel, inputs: ModelInputs) -> ServerSetup:
    """What servers of other actors are told of the trainer's model. Nothing else is on their
    devices, so they never sleep.
    """
    return server_setup(inputs, model, inputs.cfg.model.path)


def make_score_in_actor(objects: dict[str, Any]) -> Scorer:
    return trainer_score(objects[MODEL])


def keep_in_actor(objects: dict[str, Any], value: ServerSetup) -> ServerSetup:
    return value


def make_served_in_actor(objects: dict[str, Any]) -> Engine:
    return make_served(objects[SETUP])


def make_reference_in_actor(
    objects: dict[str, Any], inputs: ModelInputs, temperature: float
) -> Backend:
    objects[RANKS] = ActorRanks(inputs.cfg)
    return make_reference(inputs, temperature)


def make_teacher_in_actor(
    objects: dict[str, Any],
    inputs: ModelInputs,
    one: OneTeacherConfig,
    temperature: float,
    best_of: tuple[int, float],
) -> Backend:
    objects[RANKS] = ActorRanks(inputs.cfg)
    return make_teacher(inputs, one, temperature, best_of)


def make_critic_in_actor(
    objects: dict[str, Any], inputs: ModelInputs, train: TrainConfig, updates: int
) -> Backend:
    return LocalFactories().make_critic_backend(inputs, None, train, updates)
