"""What a Python caller hands over as objects instead of naming it in the config."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reinforge.config.schema import Config
from reinforge.data.sources import PYTHON
from reinforge.rewards.build import GivenRewards, describe_rewards

if TYPE_CHECKING:
    from reinforge.models.causal import CausalModel


@dataclass
class CallerObjects:
    """The objects of a Python caller, made by `reinforge.train` and by tests.

    None: take it from the config.
    """

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
        rewards = cfg.rewards
        functions = self.functions
        if self.rewards is not None:
            rewards, functions = describe_rewards(self.rewards, cfg.rewards)
        data = cfg.data
        if self.eval_data is not None:
            evaluation = data.eval.model_copy(update={"source": PYTHON})
            data = data.model_copy(update={"eval": evaluation})
        if self.data is not None:
            data = data.model_copy(update={"source": PYTHON})
        return cfg.model_copy(update={"data": data, "rewards": rewards}), functions
