"""Losses of reward models: from scores of answers, or of steps, to one number each; and the loss as
a backend calls it.

Legend: M trained tokens of the micro-batch, S answers, P pairs (row 2i chosen, row 2i+1 rejected).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid, softplus

from reinforge.algorithms.losses.rows import constant, last, sides
from reinforge.algorithms.settings import look_up
from reinforge.core.backend import Loss, TrainedTokens
from reinforge.core.batch import Totals
from reinforge.core.metrics import Extreme, LossMetrics


def bradley_terry(chosen: Tensor, rejected: Tensor) -> Tensor:
    """[P] -log sigma(r_w - r_l)."""
    return -logsigmoid(chosen - rejected)


def margin(chosen: Tensor, rejected: Tensor, gap: Tensor) -> Tensor:
    """[P] -log sigma(r_w - r_l - m): clearly better answers must win by more (Llama 2, 2307.09288
    eq. 2).
    """
    return -logsigmoid(chosen - rejected - gap)


def scaled(chosen: Tensor, rejected: Tensor, gap: Tensor) -> Tensor:
    """[P] -m log sigma(r_w - r_l): clearly better answers count more (2410.01257)."""
    return -gap * logsigmoid(chosen - rejected)


def logexp(chosen: Tensor, rejected: Tensor) -> Tensor:
    """[P] log(1 + exp(r_l - r_w)) (2204.05862): the same function as `bradley_terry`, written as
    others name it.
    """
    return softplus(rejected - chosen)


def regression(scores: Tensor, target: Tensor) -> Tensor:
    """[S] (r - target)^2 (2310.05344, 2410.01257)."""
    return (scores - target) ** 2


def centred(chosen: Tensor, rejected: Tensor, *, coefficient: float = 0.01) -> Tensor:
    """[P] coefficient (r_w + r_l)^2: scores of comparisons are only known up to a constant; this
    makes it 0 (2312.09244).
    """
    return coefficient * (chosen + rejected) ** 2


def process(scores: Tensor, label: Tensor) -> Tensor:
    """[M] cross-entropy of "this step is right" with probability sigma(r) (2211.14275); labels 0, 1
    or a probability between.

    With two classes of logits u (wrong) and v (right) the score is v - u.
    """
    return binary_cross_entropy_with_logits(scores, label, reduction="none")


@dataclass(frozen=True)
class RewardRow:
    """A loss of a reward model: its function, and what one number of it is about. A row of
    `REWARD`; `RewardLoss` calls it.
    """

    function: Callable[..., Tensor]
    per: Literal["pair", "answer", "step"]
    stream: str | None = None  # what it compares with: gap, target or label


REWARD: dict[str, RewardRow] = {
    "bradley_terry": RewardRow(bradley_terry, "pair"),
    "margin": RewardRow(margin, "pair", "gap"),
    "scaled": RewardRow(scaled, "pair", "gap"),
    "logexp": RewardRow(logexp, "pair"),
    "regression": RewardRow(regression, "answer", "target"),
    "process": RewardRow(process, "step", "label"),
}


class RewardLoss(Loss):
    """A loss over `TrainedTokens.values`.

    The score of an answer is the value at its last trained token.

    Values must be read *at* the token (the hidden state that has seen it, rows `Batch.targets`),
    not before it as a critic's are: `reads` says so. What is compared with comes as streams that
    are constant over a row: `gap` (on the chosen row), `target`. A process reward model trains the
    last token of every step and nothing else; the stream `label` holds each step's verdict there.
    `centre` adds `centred` for pairs.
    """

    reads = frozenset({"values_after"})

    def __init__(self, name: str = "bradley_terry", *, centre: float = 0.0):
        self.row: RewardRow = look_up(REWARD, name, "algorithm.name")
        self.centre = centre
        self.unit = 2 if self.row.per == "pair" else 1

    def __call__(self, tokens: TrainedTokens, totals: Totals) -> tuple[Tensor, LossMetrics]:
        assert tokens.values is not None and totals.samples > 0
        values = tokens.values
        stream = tokens.streams[self.row.stream].to(values.dtype) if self.row.stream else None
        if self.row.per == "step":
            assert stream is not None
            loss = self.row.function(values, stream).sum() / max(totals.tokens, 1)
            right = ((values.detach() > 0) == (stream > 0.5)).to(values.dtype)
            return loss, {
                "reward/loss": loss.detach(),
                "reward/accuracy": right.sum() / max(totals.tokens, 1),
            }
        scores = constant({"score": values}, "score", tokens.lengths)  # at the last token
        given = None if stream is None else last(stream, tokens.lengths)
        watched: LossMetrics = {
            "reward/mean": scores.detach().sum() / totals.samples,
            "reward/max": Extreme.largest(scores.detach().max()),
            "reward/min": Extreme.smallest(scores.detach().min()),
        }
        if self.row.per == "answer":
            loss = self.row.function(scores, given).sum() / totals.samples
            return loss, {"reward/loss": loss.detach(), **watched}

        chosen, rejected = sides(scores)
        pairs = totals.samples / 2
        parts = self.row.function(chosen, rejected, *(() if given is None else (sides(given)[0],)))
        if self.centre:
            parts = parts + centred(chosen, rejected, coefficient=self.centre)
        loss = parts.sum() / pairs
        won = (chosen > rejected).to(values.dtype).detach()
        return loss, {
            "reward/loss": loss.detach(),
            "reward/accuracy": won.sum() / pairs,
            "reward/margin": (chosen - rejected).detach().sum() / pairs,
            **watched,
        }
