"""Who makes the models of a run: the interface that `build/local.py` (this process and its ranks)
and `build/ray.py` (actors) implement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from reinforge.backends.teachers import Teachers
from reinforge.build.inputs import ModelInputs
from reinforge.config.algorithm import ReferenceConfig
from reinforge.config.schema import Config
from reinforge.config.train import TrainConfig
from reinforge.core.backend import Backend
from reinforge.core.engine import Engine
from reinforge.models.causal import CausalModel
from reinforge.models.packed import PackedModel
from reinforge.rewards.function import FunctionReward


class Factories(Protocol):
    """Makes what computes. A function's arguments are all that it depends on; `build_rl` and
    `build_supervised` call each once, in an order of their own.
    """

    def trainers(self, cfg: Config) -> tuple[int, str]:
        """How many ranks train, and on which kind of device."""
        ...

    def make_rewards(
        self, cfg: Config, functions: Mapping[str, Callable[..., Any]], device: str
    ) -> list[FunctionReward]:
        """The rewards of the config; reward models are loaded onto the device."""
        ...

    def make_policy(self, inputs: ModelInputs) -> PackedModel:
        """The model that is trained: a causal LM, or what is to become a reward model."""
        ...

    def make_critic_backend(
        self, inputs: ModelInputs, policy: CausalModel, train: TrainConfig, updates: int
    ) -> Backend:
        """The backend of a critic with a model of its own, for so many optimizer steps."""
        ...

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
        """What trains the policy. `paired`: a critic is on the same device."""
        ...

    def make_engine(self, inputs: ModelInputs, policy: PackedModel) -> Engine:
        """What generates with the policy's weights."""
        ...
