"""What an algorithm is to a training loop, and everything that can be set about one.

`build.py` builds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from reinforge.algorithms.catalogue import ADVANTAGES
from reinforge.algorithms.losses.policy import Selected, positive_weights
from reinforge.algorithms.parts.advantages import Advantage
from reinforge.algorithms.parts.corrections import Correction
from reinforge.algorithms.parts.kl import KL
from reinforge.algorithms.parts.reduce import Reduce
from reinforge.algorithms.parts.rollouts import Rollouts, Scale
from reinforge.algorithms.parts.surrogates import Surrogate
from reinforge.algorithms.parts.terms import LossTerms
from reinforge.core.backend import Loss, State
from reinforge.core.batch import Batch
from reinforge.core.metrics import Metrics
from reinforge.core.sample import Group, Sample


@dataclass(frozen=True)
class AlgorithmOptions:
    """Everything that can be set about an algorithm.

    A row replaces some defaults, the user the rest.
    """

    advantage: str | Advantage = "group_relative"
    surrogate: str | Surrogate = "ppo_clip"
    correction: str | Correction = "none"
    selection: str | Callable[..., Tensor] | None = None
    reduce: str | Reduce = "token_mean"
    # of whichever part takes them by name
    settings: Mapping[str, Any] = field(default_factory=dict)
    scale: Scale = "group"
    std: Literal["sample", "population"] = "sample"
    eps: float = 1e-4
    advantage_clip: float | None = None
    weights: Mapping[str, float] = field(default_factory=dict)  # of reward components
    clip_low: float | None = None  # None: the surrogate's own
    clip_high: float | None = None
    clip_dual: float | None = None
    clip_delta: float | None = None
    cap: float | None = None  # of the correction; None: its own
    floor: float | None = None
    selected: Selected | None = None  # None: the selection's own
    penalty: float = 1.0
    kl_coefficient: float = 0.0
    kl_estimator: str | KL | None = None  # None: k3 in the loss, k1 in the reward
    kl_placement: Literal["loss", "reward"] = "loss"
    kl_importance: bool = True
    kl_clamp: float | None = None
    kl_target: float | None = None
    kl_horizon: int = 10_000
    entropy: float = 0.0
    entropy_target: float | None = None
    entropy_rate: float = 1e-3
    entropy_max: float = 0.1
    nll: float = 0.0
    old: Literal["auto", "engine", "recompute"] = "auto"
    overlong: Literal["keep", "mask"] = "keep"
    # None: a fifth of max_new_tokens in a row with `shaped`, otherwise 0
    overlong_buffer: int | None = None
    dynamic_sampling: bool = False
    max_new_tokens: int = 0  # the limit of a response
    updates: int = 1  # optimizer steps per rollout batch
    beta: float | None = None  # of a preference loss; None: its own
    label_smoothing: float | None = None
    # several preference losses with weights
    losses: Mapping[str, float] = field(default_factory=dict)
    attributes: Sequence[str] = ()  # of a reward model with a head for each; none: one score
    # how the reference moves, where the row says so
    reference: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Algorithm:
    """What a training loop needs of an algorithm.

    It never asks for the name. As a part of a run it keeps what adapts.
    """

    name: str
    family: str
    paper: str
    loss: Loss
    options: AlgorithmOptions
    # Rollouts -> {stream: [M]}; None: the loss needs no advantages
    advantage: Callable[[Rollouts], Any] | None = None
    selection: Callable[[Rollouts], Tensor] | None = None
    kl_in_reward: KL | None = None
    terms: LossTerms = field(default_factory=LossTerms)
    # streams that must be there before `advantages`: old, reference, values, entropy; and
    # "baseline"
    needs: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()  # what a user should know about these settings
    # what is trained of a group's answers, unit after unit; None: all of them
    pick: Callable[[Group], list[Sample]] | None = None
    # half of the answers are sampled from pi^(1-c) reference^c with this c; None: there is no
    # opponent
    opponent: float | None = None
    # the data's answer is wanted beside the sampled ones, which are all the opponent's (self-play)
    given: bool = False
    # share of the answers that are sampled, the others being the data's; None: all are
    share: float | None = None

    @property
    def dynamic_sampling(self) -> bool:
        """Replace groups whose rewards are all equal."""
        return self.options.dynamic_sampling

    @property
    def compared(self) -> list[str]:
        """Reward components that the advantage compares each by itself; none where it compares
        totals. A function of a user's says that it does in an attribute `components`.
        """
        part = self.options.advantage
        if isinstance(part, str):
            apart = part in ADVANTAGES and "weights" in ADVANTAGES[part].reads
        else:
            apart = bool(getattr(part, "components", False))
        if not apart:
            return []
        return [name for name, weight in self.options.weights.items() if weight]

    @property
    def overlong(self) -> Literal["keep", "mask"]:
        """mask: truncated samples are not trained."""
        return self.options.overlong

    @property
    def overlong_buffer(self) -> int:
        """For `overlong_penalty`; 0 = none."""
        return self.options.overlong_buffer or 0

    @property
    def idle(self) -> bool:
        """Whether rows whose advantages are all 0 have no gradient."""
        return self.loss.idle

    def advantages(self, batches: Sequence[Batch]) -> Metrics:
        """Fills the streams that come from the whole optimizer batch (float32): advantages (0 for
        unscored rows), returns of a critic, selected, positive.
        """
        if self.advantage is None or not batches:
            return {}
        rollouts = Rollouts.of(batches)
        metrics = {"batch/samples": float((rollouts.lengths > 0).sum())}
        if self.kl_in_reward is not None:
            streams = rollouts.streams
            kl = self.kl_in_reward(
                streams["old"] if "old" in streams else streams["behaviour"], streams["reference"]
            )
            rollouts = rollouts.with_token_rewards(-self.terms.kl * kl)
            metrics |= {"policy/kl": float(kl.double().mean())} if len(kl) else {}
        found = self.advantage(rollouts)
        if self.selection is not None:
            found["selected"] = self.selection(
                replace(rollouts, streams={**rollouts.streams, **found})
            )
        if rollouts.token_rewards is not None:
            found["token_rewards"] = rollouts.token_rewards
        if self.terms.nll > 0:
            found["positive"] = positive_weights(rollouts.rewards, rollouts.sequence)
        for name, values in found.items():
            for batch, part in zip(
                batches, values.float().split([b.n_trained for b in batches]), strict=True
            ):
                batch.streams[name] = part.to(batch.targets.device)
        return metrics

    def adapt(self, metrics: Mapping[str, float]) -> Metrics:
        """Moves the coefficients that adapt, after a step; returns what they were in it."""
        return self.terms.adapt(metrics)

    def state(self) -> State:
        return State(meta=self.terms.values())

    def load(self, state: State) -> None:
        self.terms.restore(state.meta)
