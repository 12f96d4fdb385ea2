"""Corrections for the gap between the policy that sampled (behaviour) and the trainer's view of the
same weights.

A correction is `fn(trainer, behaviour, sequence) -> (weights [M], metrics {name: [M]})` with w from
rho = exp(trainer - behaviour), where `trainer` is the old log-probs (without an old pass: the
current ones, detached). Weights carry no gradient. Token corrections use each token's rho, sequence
corrections R = the product of rho over its row. Published as TIS
(fengyao.notion.site/off-policy-rl), MIS and the sequence variants (richardli.xyz/rl-collapse) and
IcePop (2510.18855).

Legend: M trained tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from reinforge.algorithms.parts.ratios import safe_ratio, sequence_log_ratio
from reinforge.core.metrics import Extreme, LossMetrics, Metric, StepMetrics, tensor_of

Correction = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]

QUANTILES = (0.01, 0.05, 0.5, 0.95, 0.99)


def none(
    trainer: Tensor, behaviour: Tensor, sequence: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """w = 1."""
    return torch.ones_like(trainer), {}


def tis(
    trainer: Tensor,
    behaviour: Tensor,
    sequence: Tensor | None = None,
    *,
    cap: float = 2.0,
    floor: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Truncated importance sampling per token: w = min(rho, cap), and not below floor (TRL:
    token_truncate).
    """
    return _truncate(safe_ratio(trainer, behaviour), cap, floor)


def mis(
    trainer: Tensor,
    behaviour: Tensor,
    sequence: Tensor | None = None,
    *,
    cap: float = 2.0,
    floor: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Masked importance sampling per token: w = rho if floor <= rho <= cap, else the token is
    dropped (w = 0; TRL: token_mask).
    """
    return _mask(safe_ratio(trainer, behaviour), cap, floor)


def icepop(
    trainer: Tensor,
    behaviour: Tensor,
    sequence: Tensor | None = None,
    *,
    cap: float = 5.0,
    floor: float = 0.5,
) -> tuple[Tensor, dict[str, Tensor]]:
    """IcePop (2510.18855): as `mis`, two-sided, with the paper's range: w = rho if 0.5 <= rho <= 5,
    else 0.
    """
    return _mask(safe_ratio(trainer, behaviour), cap, floor)


def seq_tis(
    trainer: Tensor,
    behaviour: Tensor,
    sequence: Tensor,
    *,
    cap: float = 2.0,
    floor: float = 0.0,
    geometric: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """w = min(R, cap), not below floor, for all tokens of the row (TRL: sequence_truncate).

    R = product of rho.

    `geometric`: R = exp(mean log rho) instead, which does not drift to 0 or infinity with length,
    but is biased.
    """
    return _truncate(
        sequence_log_ratio(trainer, behaviour, sequence, mean=geometric).exp(), cap, floor
    )


def seq_mask(
    trainer: Tensor,
    behaviour: Tensor,
    sequence: Tensor,
    *,
    cap: float = 2.0,
    floor: float = 0.0,
    geometric: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """w = R for all tokens of the row if floor <= R <= cap, else the row is dropped (TRL:
    sequence_mask). R as in `seq_tis`.
    """
    return _mask(sequence_log_ratio(trainer, behaviour, sequence, mean=geometric).exp(), cap, floor)


CORRECTIONS: dict[str, Callable[..., tuple[Tensor, dict[str, Tensor]]]] = {
    f.__name__: f for f in (none, tis, mis, icepop, seq_tis, seq_mask)
}


def _truncate(ratio: Tensor, cap: float, floor: float) -> tuple[Tensor, dict[str, Tensor]]:
    ratio = ratio.detach()
    return _with_moments(ratio.clamp(floor, cap), "truncated", (ratio > cap) | (ratio < floor))


def _mask(ratio: Tensor, cap: float, floor: float) -> tuple[Tensor, dict[str, Tensor]]:
    ratio = ratio.detach()
    outside = (ratio > cap) | (ratio < floor)
    return _with_moments(torch.where(outside, 0.0, ratio), "dropped", outside)


def _with_moments(weights: Tensor, name: str, touched: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The weights, the share of tokens touched, and the moments from which `finish` makes their
    effective sample size.
    """
    return weights, {
        name: touched.to(weights.dtype),
        "weight": weights,
        "weight_squared": weights.square(),
    }


def mismatch(trainer: Tensor, behaviour: Tensor, n_tokens: int) -> LossMetrics:
    """Statistics of rho for one micro-batch, as shares of `n_tokens` (the whole batch's), so that
    they add up.

    mean and max of |trainer - behaviour|, mean, mean square, min and max of rho, share of tokens
    with rho outside [1/2, 2]. Empty for M = 0.
    """
    if not len(trainer):
        return {}
    delta = (trainer - behaviour).abs()
    ratio = safe_ratio(trainer, behaviour)
    return {
        "mismatch/mean": delta.sum() / n_tokens,
        "mismatch/max": Extreme.largest(delta.max()),
        "mismatch/ratio": ratio.sum() / n_tokens,
        "mismatch/ratio_squared": ratio.square().sum() / n_tokens,
        "mismatch/ratio/min": Extreme.smallest(ratio.min()),
        "mismatch/ratio/max": Extreme.largest(ratio.max()),
        "mismatch/outside_2x": ((ratio > 2.0) | (ratio < 0.5)).to(ratio.dtype).sum() / n_tokens,
    }


# moments that the effective sample size of a mean is computed from: the means, and their names
MOMENTS = {"mismatch/ratio": "mismatch/ess", "mismatch/weight": "mismatch/weight_ess"}
SQUARES = {f"{mean}_squared" for mean in MOMENTS}


def finish(metrics: Mapping[str, Metric]) -> StepMetrics:
    """Metrics summed over a whole batch, with moments turned into effective sample sizes (as a
    share):

    ess = (sum rho)^2 / (n sum rho^2); 1 without mismatch, towards 0 when few tokens carry all the
    weight. `mismatch/ess` is of rho as it is, `mismatch/weight_ess` of the weights that the
    correction made of it.
    """
    done = {name: metric for name, metric in metrics.items() if name not in SQUARES}
    return done | {name: Metric(share) for name, share in _sample_sizes(metrics).items()}


def _sample_sizes(metrics: Mapping[str, float]) -> dict[str, float]:
    found = {}
    for mean, name in MOMENTS.items():
        square = metrics.get(f"{mean}_squared", 0.0)
        if square > 0:
            found[name] = metrics[mean] ** 2 / square
    return found


def statistics(
    trainer: Tensor,
    behaviour: Tensor,
    sequence: Tensor | None = None,
    correction: Correction | None = None,
) -> dict[str, float]:
    """All of it for whole vectors of an optimizer batch, with quantiles (which do not add up over
    micro-batches). Empty for M = 0.

    With `sequence` also the sequence ratios R (each row once), with `correction` its weights and
    the share it touched.
    """
    if not len(trainer):
        return {}
    trainer = trainer.detach().double().cpu()
    behaviour = behaviour.detach().double().cpu()
    found = {
        name: float(tensor_of(part))
        for name, part in mismatch(trainer, behaviour, len(trainer)).items()
    }
    found |= _quantiles("mismatch/ratio", safe_ratio(trainer, behaviour))
    if sequence is not None:
        sequence = sequence.cpu()
        order = sequence.argsort(stable=True)
        first = order[torch.cat([torch.ones(1, dtype=torch.bool), sequence[order].diff() != 0])]
        ratio = sequence_log_ratio(trainer, behaviour, sequence).exp()[first]
        found |= {"mismatch/sequence_ess": float(ratio.mean() ** 2 / ratio.square().mean())}
        found |= _quantiles("mismatch/sequence_ratio", ratio)
    if correction is not None:
        assert sequence is not None, "the weights of a correction may depend on the sequence"
        weights, metrics = correction(trainer, behaviour, sequence)
        found |= {f"mismatch/{name}": float(value.mean()) for name, value in metrics.items()}
        found |= _quantiles("mismatch/weight", weights)
    sizes = _sample_sizes(found)
    return {name: value for name, value in found.items() if name not in SQUARES} | sizes


def _quantiles(name: str, values: Tensor) -> dict[str, float]:
    """Linear interpolation between order statistics; `torch.quantile` refuses more than 16 million
    values.
    """
    ordered = values.sort().values
    place = torch.tensor(QUANTILES, dtype=torch.float64) * (len(values) - 1)
    below = place.floor().long()
    above = place.ceil().long()
    found = torch.lerp(ordered[below], ordered[above], place - below)
    return {
        f"{name}/p{round(100 * q):02d}": float(v) for q, v in zip(QUANTILES, found, strict=True)
    }
