"""The loss of a critic, and how it is added to a policy's where both share a trunk.

Legend: M trained tokens of the micro-batch, N of the whole optimizer batch; v the value before a
token, R its target (return).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from reinforge.core.backend import Loss, TrainedTokens
from reinforge.core.batch import Totals
from reinforge.core.errors import InputError
from reinforge.core.metrics import LossMetrics, Metric, StepMetrics

MOMENTS = "critic/moments/"  # sums / N that `finish` turns into the explained variance


class ValueLoss(Loss):
    """L = sum_t 1/2 max((v - R)^2, (clip(v, v_old - eps, v_old + eps) - R)^2) / N (PPO as
    implemented, 2403.17031 detail 13).

    `clip` is eps, in units of reward; None: the plain squared error. v_old is the stream `values`,
    R the stream `returns`.
    """

    reads = frozenset({"values"})

    def __init__(self, clip: float | None = 0.2):
        self.clip = clip
        self.needs: frozenset[str] = frozenset({"values"})

    def __call__(self, tokens: TrainedTokens, totals: Totals) -> tuple[Tensor, LossMetrics]:
        if "returns" not in tokens.streams:
            raise InputError(
                "the advantage gave the critic no returns to learn.",
                where="algorithm.advantage",
                fix=(
                    "Return {'advantages': ..., 'returns': ...}, both with one value per trained"
                    " token."
                ),
            )
        values = tokens.values
        old = tokens.streams["values"]
        returns = tokens.streams["returns"]
        assert (
            values is not None and values.shape == old.shape == returns.shape and values.ndim == 1
        )
        error = (values - returns).square()
        clipped = torch.zeros_like(error, dtype=torch.bool)
        if self.clip is not None:
            bounded = (old + (values - old).clamp(-self.clip, self.clip) - returns).square()
            clipped = bounded > error
            error = torch.maximum(error, bounded)
        loss = 0.5 * error.sum() / max(totals.tokens, 1)
        return loss, {
            "critic/loss": loss.detach(),
            "critic/clip_fraction": clipped.double().sum() / max(totals.tokens, 1),
            **moments(values.detach(), returns, totals.tokens),
        }


def moments(values: Tensor, returns: Tensor, n_tokens: int) -> dict[str, Tensor]:
    """What the explained variance needs of one micro-batch, in float64 and as shares of the whole
    batch, so that it adds up.
    """
    v = values.double()
    r = returns.double()
    n = max(n_tokens, 1)
    return {
        "critic/value": v.sum() / n,
        "critic/return": r.sum() / n,
        f"{MOMENTS}return_squared": r.square().sum() / n,
        f"{MOMENTS}error_squared": (r - v).square().sum() / n,
    }


def finish(metrics: Mapping[str, Metric]) -> StepMetrics:
    """Metrics summed over a whole batch, with the moments turned into

        explained_variance = 1 - Var(R - v) / Var(R)

    1 = perfect, 0 = no better than a constant, negative = worse. There is none where all returns
    are equal. Metrics without these moments are left as they are.
    """
    done = {name: value for name, value in metrics.items() if not name.startswith(MOMENTS)}
    if f"{MOMENTS}return_squared" not in metrics:
        return done
    spread = metrics[f"{MOMENTS}return_squared"] - metrics["critic/return"] ** 2
    left = (
        metrics[f"{MOMENTS}error_squared"]
        - (metrics["critic/return"] - metrics["critic/value"]) ** 2
    )
    if spread > 1e-12 * max(metrics[f"{MOMENTS}return_squared"], 1e-300):  # below it is rounding
        done["critic/explained_variance"] = Metric(1 - max(left, 0.0) / spread)
    return done


class PolicyAndValueLoss(Loss):
    """L = L_policy + coefficient * L_value, for a value head on the policy's own trunk: one forward
    gives both.
    """

    def __init__(self, policy: Loss, value: ValueLoss, coefficient: float):
        self.policy = policy
        self.value = value
        self.coefficient = coefficient
        self.unit = policy.unit
        self.entropy = policy.entropy
        self.entropy_gradient = policy.entropy_gradient
        self.needs = policy.needs | value.needs
        self.reads = policy.reads | value.reads

    def __call__(self, tokens: TrainedTokens, totals: Totals) -> tuple[Tensor, LossMetrics]:
        policy, metrics = self.policy(tokens, totals)
        value, more = self.value(tokens, totals)
        return policy + self.coefficient * value, {**metrics, **more}
