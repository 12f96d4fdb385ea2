"""The models of a run in this process, and on the ranks that it has open."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from reinforge.backends.local import LocalBackend
from reinforge.backends.teachers import Teachers
from reinforge.build.critic_model import critic_section, load_critic
from reinforge.build.engines import answer_form, engine_of
from reinforge.build.inputs import ModelInputs
from reinforge.build.policy import (
    compiles,
    host_memory,
    load_for_rank,
    load_policy,
    proved_by_first,
)
from reinforge.build.ranks import backend_on_ranks, ranks_of, sharded_checkpoints
from reinforge.build.shared_gpus import room_for_copies, room_for_servers
from reinforge.config.algorithm import ReferenceConfig
from reinforge.config.schema import Config
from reinforge.config.train import TrainConfig
from reinforge.core.backend import Backend
from reinforge.core.engine import Engine
from reinforge.core.errors import InputError
from reinforge.models.attention import mask_extents
from reinforge.models.causal import CausalModel
from reinforge.models.freezing import freeze
from reinforge.models.load import load_scalar, pick_device
from reinforge.models.packed import PackedModel
from reinforge.rewards.build import build_rewards
from reinforge.rewards.function import FunctionReward


@dataclass(frozen=True)
class LocalFactories:
    """The factories of a run in one process or on ranks, and of every actor of a cluster.

    `model`: the policy, where a Python caller gave it as an object.
    """

    model: CausalModel | None = None

    def trainers(self, cfg: Config) -> tuple[int, str]:
        ranks = ranks_of(cfg)
        device = pick_device(cfg.model.device).type
        return (1, device) if ranks is None else (ranks.size, ranks.kind)

    def make_rewards(
        self, cfg: Config, functions: Mapping[str, Callable[..., Any]], device: str
    ) -> list[FunctionReward]:
        return build_rewards(cfg.rewards, functions, device)

    def make_policy(self, inputs: ModelInputs) -> PackedModel:
        on_ranks = ranks_of(inputs.cfg) is not None
        if self.model is None:
            return load_policy(inputs.cfg, scores=inputs.scores, in_host_memory=on_ranks)
        if on_ranks:
            raise InputError(
                "the other ranks cannot load a model that was given as an object.",
                where="train.backend",
                fix="Give its path.",
            )
        freeze(self.model.module, inputs.cfg.train)
        return self.model

    def make_critic_backend(
        self, inputs: ModelInputs, policy: CausalModel | None, train: TrainConfig, updates: int
    ) -> Backend:
        """`policy` may be in another process (None): then the critic is loaded from its
        checkpoint.
        """
        cfg = inputs.cfg
        section, where = critic_section(cfg)
        ranks = ranks_of(cfg)
        if ranks is not None:
            return backend_on_ranks(train.backend)(
                ranks,
                partial(
                    proved_by_first,
                    partial(load_scalar, host_memory(section), where=where, fresh=True),
                ),
                train,
                compiled=compiles(cfg.model),
                sharded=sharded_checkpoints(cfg),
                total_steps=updates,
                paired=True,
            )
        if policy is not None:
            model = load_critic(cfg, policy)
        else:
            model = load_scalar(section, where=where, fresh=True)
        overlap = cfg.rollout.overlap
        return LocalBackend(model, train, total_steps=updates, paired=True, overlap=overlap)

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
        cfg = inputs.cfg
        settings: dict[str, Any] = {
            "total_steps": steps,
            "temperature": temperature,
            "reference": reference or False,
            "paired": paired,
            "seed": cfg.run.seed,
            "teachers": teachers,
        }
        ranks = ranks_of(cfg)
        if ranks is None:
            if isinstance(policy, CausalModel):
                policy.form = answer_form(inputs, policy)
            with room_for_servers(cfg):
                return LocalBackend(policy, cfg.train, overlap=cfg.rollout.overlap, **settings)
        value_head = policy.value_head is not None
        with room_for_servers(cfg), room_for_copies(cfg, ranks, policy.module):
            return backend_on_ranks(cfg.train.backend)(
                ranks,
                partial(
                    load_for_rank,
                    cfg,
                    scores=inputs.scores,
                    value_head=value_head,
                    proved=mask_extents(policy.trunk),
                ),
                cfg.train,
                full=policy,
                compiled=compiles(cfg.model),
                sharded=sharded_checkpoints(cfg),
                **settings,
            )

    def make_engine(self, inputs: ModelInputs, policy: PackedModel) -> Engine:
        assert isinstance(policy, CausalModel), f"a {type(policy).__name__} generates nothing"
        saved = inputs.cfg.model.path if self.model is None else None
        return engine_of(inputs, policy, saved=saved, ranks=ranks_of(inputs.cfg))
