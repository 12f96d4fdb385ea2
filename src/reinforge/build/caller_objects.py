"""What a Python caller hands over as objects instead of naming it in the config."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reinforge.config.adapter import AdapterConfig
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.core.row import Row
from reinforge.data.sources import PYTHON
from reinforge.rewards.build import GivenRewards, describe_rewards

if TYPE_CHECKING:
    from reinforge.loops.callbacks import GivenCallbacks
    from reinforge.models.causal import CausalModel

# folders of a run, for what it was given as objects
INITIAL = "initial"
TOKENIZER = "tokenizer"


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
    module: Any = None  # a transformers or peft model
    tokenizer: Any = None
    model: CausalModel | None = None  # ... as one of ours: `with_given_model` makes it
    # parts of the algorithm, environments and tools, by the names that the config has for them
    parts: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    sampler: Callable[[Row, int], float] | None = None
    callbacks: GivenCallbacks = ()

    def named(self, cfg: Config) -> Config:
        """The config with the names of objects that the run writes into its directory."""
        folder = Path(cfg.run.dir)
        model: dict[str, Any] = {}
        changed: dict[str, Any] = {}
        if self.tokenizer is not None:
            model["tokenizer"] = str(folder / TOKENIZER)
        if self.module is not None:
            model["path"] = str(folder / INITIAL)
            model["dtype"] = _dtype(self.module)
            if hasattr(self.module, "peft_config"):
                changed["adapter"] = AdapterConfig(path=str(folder / INITIAL / "adapter"))
        changed["model"] = cfg.model.model_copy(update=model)
        return cfg.model_copy(update=changed)

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


def _dtype(module: Any) -> str:
    name = str(module.dtype).removeprefix("torch.")
    if name not in ("float32", "bfloat16"):
        raise InputError(
            f"the model is in {name}.",
            where="model",
            fix="Give it in float32 or bfloat16: model.to(torch.bfloat16).",
        )
    return name
