"""Distillation: divergences between the next-token distributions of a student and a teacher, per
token.

A divergence is `fn(student, teacher, *, temperature, ...) -> [R]` from logits [R, V] of a chunk of
rows; whole batches go through `models.divergence`, which never holds [M, V]. p is the teacher's
softmax, q the student's, both at the temperature. The gradient with respect to logits falls with
the temperature T; multiply the loss by T^2 (`DistillationLoss` does) to keep its size.

| name       | divergence                                     | paper      |
|------------|------------------------------------------------|------------|
| forward_kl | KL(p, q)                                       | 1503.02531 |
| reverse_kl | KL(q, p)                                       | 2306.08543 |
| jsd        | b KL(p, m) + (1 - b) KL(q, m), m = b p + (1-b) q | 2306.13649 |
| skew_kl    | KL(p, a p + (1 - a) q)                         | 2402.03898 |
| skew_rkl   | KL(q, (1 - a) p + a q)                         | 2402.03898 |
| topk_kl    | KL over the teacher's k best tokens and the rest as one; jsd too, with a `k` | |
| uld        | sum of |p_(i) - q_(i)|, each sorted; vocabularies may differ | 2402.12030 |

Legend: R rows of a chunk, V vocabulary, M trained tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from reinforge.algorithms.parts.reduce import Reduce, token_mean
from reinforge.algorithms.settings import look_up, settings_of
from reinforge.core.backend import (
    TEACHER_IDS,
    TEACHER_LOGPROBS,
    Loss,
    TrainedTokens,
    by_domain,
)
from reinforge.core.batch import Totals
from reinforge.core.metrics import LossMetrics
from reinforge.core.trace import traced


def _log_softmax(student: Tensor, teacher: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(log q, log p)."""
    assert student.shape == teacher.shape and student.ndim == 2, (
        "teacher and student must share a vocabulary; uld is for those that do not"
    )
    return (student / temperature).log_softmax(-1), (teacher / temperature).log_softmax(-1)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """[R] sum_v e^p (p - q) from log-probs; tokens of probability 0 under p give 0."""
    weight = p.exp()
    return (weight * torch.where(weight > 0, p - q, torch.zeros_like(p))).sum(-1)


def _mix(a: Tensor, b: Tensor, share: float) -> Tensor:
    """log(share e^a + (1 - share) e^b)."""
    return torch.logaddexp(a + math.log(share), b + math.log1p(-share))


def forward_kl(student: Tensor, teacher: Tensor, *, temperature: float = 1.0) -> Tensor:
    """KL(p, q): the student must cover what the teacher does."""
    q, p = _log_softmax(student, teacher, temperature)
    return _kl(p, q)


def reverse_kl(student: Tensor, teacher: Tensor, *, temperature: float = 1.0) -> Tensor:
    """KL(q, p): the student must do nothing that the teacher does not.

    MiniLLM's single-step term.
    """
    q, p = _log_softmax(student, teacher, temperature)
    return _kl(q, p)


def jsd(
    student: Tensor,
    teacher: Tensor,
    *,
    beta: float = 0.5,
    k: int | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """beta KL(p, m) + (1 - beta) KL(q, m), m = beta p + (1 - beta) q (GKD, 2306.13649 eq. 1).

    At the ends this is 0; as everywhere, beta 0 means forward_kl and 1 reverse_kl, which are its
    limits divided by beta and 1 - beta. `k`: over k + 1 outcomes, as `topk_kl`.
    """
    q, p = _log_softmax(student, teacher, temperature)
    if k is None:
        return _jsd(q, p, beta)
    best = p.topk(min(k, p.shape[-1]), -1)
    return support_jsd(q.gather(-1, best.indices), best.values, beta=beta)


def _jsd(q: Tensor, p: Tensor, beta: float) -> Tensor:
    """[R] from log-probs."""
    if beta in (0, 1):
        return _kl(p, q) if beta == 0 else _kl(q, p)
    m = _mix(p, q, beta)
    return beta * _kl(p, m) + (1 - beta) * _kl(q, m)


def skew_kl(
    student: Tensor, teacher: Tensor, *, alpha: float = 0.1, temperature: float = 1.0
) -> Tensor:
    """KL(p, alpha p + (1 - alpha) q): bounded by -log alpha (DistiLLM, 2402.03898)."""
    q, p = _log_softmax(student, teacher, temperature)
    return _kl(p, _mix(p, q, alpha) if alpha else q)


def skew_rkl(
    student: Tensor, teacher: Tensor, *, alpha: float = 0.1, temperature: float = 1.0
) -> Tensor:
    """KL(q, (1 - alpha) p + alpha q) (DistiLLM, 2402.03898)."""
    q, p = _log_softmax(student, teacher, temperature)
    return _kl(q, _mix(q, p, alpha) if alpha else p)


def topk_kl(
    student: Tensor,
    teacher: Tensor,
    *,
    k: int = 32,
    reverse: bool = False,
    temperature: float = 1.0,
) -> Tensor:
    """KL over k + 1 outcomes: the teacher's k likeliest tokens, and everything else as one.

    A lower bound of the full KL.
    """
    q, p = _log_softmax(student, teacher, temperature)
    best = p.topk(min(k, p.shape[-1]), -1)
    return support_kl(q.gather(-1, best.indices), best.values, reverse=reverse)


def support_kl(student: Tensor, teacher: Tensor, *, reverse: bool = False) -> Tensor:
    """[R] the same from log-probs [R, k] of both on any common support, such as what a teacher
    behind an API returns.
    """
    assert student.shape == teacher.shape
    q = _with_rest(student)
    p = _with_rest(teacher)
    return _kl(q, p) if reverse else _kl(p, q)


def support_jsd(student: Tensor, teacher: Tensor, *, beta: float = 0.5) -> Tensor:
    """[R] `jsd` from log-probs [R, k] of both on a common support."""
    assert student.shape == teacher.shape
    return _jsd(_with_rest(student), _with_rest(teacher), beta)


# the divergences that need no more of a teacher than its k best tokens
SUPPORTED: dict[Callable[..., Tensor], Callable[..., Tensor]] = {
    topk_kl: support_kl,
    jsd: support_jsd,
}


def given_best(
    student: Tensor,
    given: Tensor,
    *,
    compare: Callable[[Tensor, Tensor], Tensor] = support_kl,
    temperature: float = 1.0,
) -> Tensor:
    """[R] a divergence on the support of the teacher's k best tokens, where those and their
    log-probs at the temperature are given: `given` [R, 2k] holds the ids, then the log-probs.
    """
    ids, p = given.chunk(2, -1)
    q = (student / temperature).log_softmax(-1).gather(-1, ids.long())
    return compare(q, p.to(q.dtype))


def _with_rest(logprobs: Tensor) -> Tensor:
    """[R, k+1]: the log-probability of all other tokens appended.

    It is at least e^-16: float32 cannot tell less from 0.
    """
    inside = logprobs.logsumexp(-1, keepdim=True).clamp(max=-1e-7)
    return torch.cat((logprobs, torch.log(-torch.expm1(inside))), -1)


def uld(student: Tensor, teacher: Tensor, *, temperature: float = 1.0) -> Tensor:
    """[R] sum_i |p_(i) - q_(i)|, probabilities sorted from large to small and padded with 0
    (2402.12030).

    For tokenizers that differ: which token is which does not matter. The caller aligns rows, by
    position or by text.
    """
    assert student.ndim == teacher.ndim == 2 and len(student) == len(teacher)
    q, p = (
        (x / temperature).softmax(-1).sort(-1, descending=True).values for x in (student, teacher)
    )
    width = max(q.shape[-1], p.shape[-1])
    q, p = (torch.nn.functional.pad(x, (0, width - x.shape[-1])) for x in (q, p))
    return (q - p).abs().sum(-1)


DIVERGENCES: dict[str, Callable[..., Tensor]] = {
    f.__name__: f for f in (forward_kl, reverse_kl, jsd, skew_kl, skew_rkl, topk_kl, uld)
}


class DistillationLoss(Loss):
    """weight · T^2 · divergence + (1 - weight) · NLL of the text, per token (1503.02531), by
    default averaged over all trained tokens.

    A backend with a teacher gives `TrainedTokens.divergence`, computed by `divergence` (a function
    of logits) in chunks, or by `given` from the teacher's best tokens, where those were computed
    beforehand (`k` of them).
    """

    def __init__(
        self,
        name: str = "forward_kl",
        *,
        weight: float = 1.0,
        temperature: float = 1.0,
        reduce: Reduce = token_mean,
        **settings: Any,
    ):
        function = look_up(DIVERGENCES, name, "algorithm.name")
        # no function of its own: a loss is sent to the ranks that train with it
        self.divergence = partial(function, temperature=temperature, **settings)
        self.weight = weight
        self.scale = 1.0 if function is uld else temperature**2
        self.reduce = reduce
        self.temperature = temperature
        # how many of the teacher's best tokens it compares on; None: on all tokens
        self.k: int | None = settings.get("k", settings_of(function).get("k"))
        self.by_rank = function is uld
        if self.k is not None:
            rest = {name: value for name, value in settings.items() if name != "k"}
            self.given = partial(
                given_best,
                compare=partial(SUPPORTED[function], **rest),
                temperature=temperature,
            )

    def ask_best(self) -> None:
        """The teacher tells its best tokens and no more: they are asked for before every step."""
        assert self.k is not None, "this divergence is over all tokens"
        self.needs = self.needs | {TEACHER_IDS, TEACHER_LOGPROBS}

    def __call__(self, tokens: TrainedTokens, totals: Totals) -> tuple[Tensor, LossMetrics]:
        assert tokens.divergence is not None, "the backend has no teacher"
        parts = self.weight * self.scale * tokens.divergence
        if self.weight != 1:
            parts = parts - (1 - self.weight) * tokens.logprobs
        weights = self.reduce(tokens, totals)
        weighted = weights * parts
        loss = weighted.sum()
        watched = {"divergence": tokens.divergence, "nll": -tokens.logprobs}
        metrics: LossMetrics = {"distillation/loss": loss.detach()}
        for name, value in watched.items():
            metrics[f"distillation/{name}"] = value.detach().sum() / max(totals.tokens, 1)
        told = "distillation/divergence"
        metrics |= by_domain(told, tokens.divergence, tokens, totals, self.domains)
        shown = {
            "logprob": tokens.logprobs,
            "weight": weights,
            "divergence": tokens.divergence,
            "loss": weighted,
        }
        return loss, metrics | traced(tokens, totals, shown)


def opd_reward(student: Tensor, teacher: Tensor, *, clip: float | None = None) -> Tensor:
    """[M] log p - log q at the tokens the student sampled, no gradient: a per-token reward whose
    expectation is -KL(q, p).
    """
    assert student.shape == teacher.shape
    reward = (teacher - student).detach()
    return reward if clip is None else reward.clamp(-clip, clip)


def minillm_returns(
    student: Tensor, teacher: Tensor, sequence: Tensor, *, normalise: bool = True
) -> Tensor:
    """[M] R_{t+1} = sum over later tokens t' > t of its sequence of log p - log q; normalised:
    divided by their number (2306.08543).

    Tokens of a sequence lie together, in order. 0 at the last one.
    """
    assert student.shape == teacher.shape == sequence.shape
    if not len(sequence):
        return torch.zeros_like(student)
    reward = (teacher - student).detach().double()
    until = reward.cumsum(0)
    counts = torch.bincount(sequence)
    end = counts.cumsum(0)[sequence] - 1
    returns = until[end] - until
    later = end - torch.arange(len(sequence), device=sequence.device)
    return (returns / later.clamp(min=1) if normalise else returns).to(student.dtype)
