"""Divergences by hand, the chunked forward and backward against plain autograd, MiniLLM on a
tabular model, DFT and NEFTune.
"""

from __future__ import annotations

import math
import pickle
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.loss_rows import LENGTHS, rows, tokens_of
from reinforge.algorithms.losses import distillation
from reinforge.algorithms.losses.distillation import (
    DIVERGENCES,
    DistillationLoss,
    minillm_returns,
    opd_reward,
    support_kl,
)
from reinforge.algorithms.losses.supervised import DFTLoss, dft
from reinforge.core.batch import Batch, Totals, pack
from reinforge.models import head
from reinforge.models.divergence import LogitHead, chunked_divergence, log_collision
from reinforge.models.head import LogitRule
from reinforge.models.neftune import neftune

STUDENT = [1.0, 0.2, -0.5, 0.3]
TEACHER = [-0.3, 1.5, 0.1, 0.0]
T = 1.7


def softmax(x: list[float]) -> list[float]:
    total = sum(math.exp(v / T) for v in x)
    return [math.exp(v / T) / total for v in x]


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def mix(p: list[float], q: list[float], share: float) -> list[float]:
    return [share * a + (1 - share) * b for a, b in zip(p, q, strict=True)]


Q = softmax(STUDENT)
P = softmax(TEACHER)
TOP = [1, 2]  # the teacher's two best
REST_P, REST_Q = ([x[i] for i in TOP] + [x[0] + x[3]] for x in (P, Q))
GOLDEN: dict[str, tuple[str, dict[str, Any], float]] = {
    "forward": ("forward_kl", {}, kl(P, Q)),
    "reverse": ("reverse_kl", {}, kl(Q, P)),
    "jsd": ("jsd", {"beta": 0.3}, 0.3 * kl(P, mix(P, Q, 0.3)) + 0.7 * kl(Q, mix(P, Q, 0.3))),
    "jsd0": ("jsd", {"beta": 0.0}, kl(P, Q)),
    "jsd1": ("jsd", {"beta": 1.0}, kl(Q, P)),
    "skew": ("skew_kl", {"alpha": 0.2}, kl(P, mix(P, Q, 0.2))),
    "skew reverse": ("skew_rkl", {"alpha": 0.2}, kl(Q, mix(P, Q, 0.8))),
    "top-2": ("topk_kl", {"k": 2}, kl(REST_P, REST_Q)),
    "top-2 reverse": ("topk_kl", {"k": 2, "reverse": True}, kl(REST_Q, REST_P)),
    "jsd of the top 2": (
        "jsd",
        {"beta": 0.3, "k": 2},
        0.3 * kl(REST_P, mix(REST_P, REST_Q, 0.3)) + 0.7 * kl(REST_Q, mix(REST_P, REST_Q, 0.3)),
    ),
    "uld": ("uld", {}, sum(abs(a - b) for a, b in zip(sorted(P), sorted(Q), strict=True))),
}


def f64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("case", GOLDEN)
def test_golden(case: str) -> None:
    name, settings, want = GOLDEN[case]
    function = partial(DIVERGENCES[name], temperature=T, **settings)
    assert function(f64([STUDENT]), f64([TEACHER])).tolist() == pytest.approx([want], abs=1e-12)
    assert torch.autograd.gradcheck(
        lambda x: function(x, f64([TEACHER])), (f64([STUDENT]).requires_grad_(),)
    )
    same = f64([TEACHER]).requires_grad_()
    value = function(same, f64([TEACHER]))
    value.sum().backward()
    assert value.item() == pytest.approx(0, abs=1e-12)
    assert same.grad is not None and (name == "uld" or same.grad.abs().max() < 1e-12)  # the minimum


def test_limits() -> None:
    s = f64([STUDENT])
    t = f64([TEACHER])
    assert torch.equal(distillation.skew_kl(s, t, alpha=0.0), distillation.forward_kl(s, t))
    assert torch.equal(distillation.skew_rkl(s, t, alpha=0.0), distillation.reverse_kl(s, t))
    for beta, limit in ((1e-6, distillation.forward_kl), (1 - 1e-6, distillation.reverse_kl)):
        torch.testing.assert_close(
            distillation.jsd(s, t, beta=beta) / min(beta, 1 - beta), limit(s, t), rtol=1e-4, atol=0
        )
    assert float(
        distillation.skew_kl(f64([[-200.0, 0.0]]), f64([[200.0, 0.0]]), alpha=0.1)
    ) == pytest.approx(-math.log(0.1))
    full = distillation.forward_kl(s, t)
    bounds = [float(distillation.topk_kl(s, t, k=k)) for k in (1, 2, 3)]
    # three of four tokens and a rest of one
    assert bounds == sorted(bounds) and bounds[-1] == pytest.approx(float(full))


def test_impossible_tokens_give_no_nan() -> None:
    for name in ("forward_kl", "skew_kl", "topk_kl"):
        student = torch.tensor([[0.1, 0.2, 0.3]], requires_grad=True)
        value = DIVERGENCES[name](student, torch.tensor([[0.5, -math.inf, 1.0]]))
        value.sum().backward()
        assert (
            value.isfinite().all() and student.grad is not None and student.grad.isfinite().all()
        ), name


def test_uld_takes_two_vocabularies() -> None:
    value = distillation.uld(f64([[0.0, 0.0]]), f64([[0.0, 0.0, -1e9, 0.0]]))
    assert float(value) == pytest.approx(2 * (0.5 - 1 / 3) + 1 / 3)


def test_support_kl_of_what_an_api_returns() -> None:
    q = f64([[0.2, 0.1]]).log()
    p = f64([[0.6, 0.3]]).log()
    assert float(support_kl(q, p)) == pytest.approx(kl([0.6, 0.3, 0.1], [0.2, 0.1, 0.7]))


@pytest.mark.parametrize("case", GOLDEN)
def test_a_loss_computes_the_same_on_another_rank_and_from_given_tokens(case: str) -> None:
    """After it was sent there, and, where the best tokens are enough, with them alone."""
    name, settings, want = GOLDEN[case]
    loss = pickle.loads(pickle.dumps(DistillationLoss(name, temperature=T, **settings)))
    student = f64([STUDENT])
    assert float(loss.divergence(student, f64([TEACHER]))) == pytest.approx(want, abs=1e-12)
    assert (loss.k is None) == (loss.given is None) == ("k" not in settings)
    if loss.given is not None:
        best = (f64([TEACHER]) / T).log_softmax(-1).topk(2)
        given = torch.cat((best.indices.double(), best.values), -1)
        assert float(loss.given(student, given)) == pytest.approx(want, abs=1e-12)


# ---- chunks

RULES = {
    "plain": (LogitRule(), LogitRule()),
    "ruled": (LogitRule(scale=0.6, softcap=3.0), LogitRule(softcap=5.0)),
}


@pytest.mark.parametrize(
    ("case", "rule", "rows_at_once", "bias"),
    list(product(GOLDEN, RULES, (1, 4, 100), (False, True))),
)
def test_chunked_equals_plain_autograd(
    case: str, rule: str, rows_at_once: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "chunk_rows", lambda rows, vocabulary, device: 8 * rows_at_once)
    name, settings, _ = GOLDEN[case]
    function = partial(DIVERGENCES[name], temperature=T, **settings)
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    h = draw(11, 6)
    w = draw(17, 6)
    b = draw(17)
    th = draw(11, 4)
    tw = draw(17, 4)
    tb = draw(17)
    up = draw(11)
    own, other = RULES[rule]
    ours, plain = ([x.clone().requires_grad_() for x in (h, w, b)] for _ in range(2))
    found = chunked_divergence(
        ours[0],
        LogitHead(ours[1], ours[2] if bias else None, own),
        th,
        LogitHead(tw, tb if bias else None, other),
        function,
    )
    x = own.apply(plain[0] @ plain[1].t() + (plain[2] if bias else 0))
    want = function(x, other.apply(th @ tw.t() + (tb if bias else 0)))
    torch.testing.assert_close(found, want, atol=1e-12, rtol=1e-12)
    (found * up).sum().backward()
    (want * up).sum().backward()
    for mine, theirs in zip(ours[: 2 + bias], plain, strict=False):
        assert mine.grad is not None and float(mine.grad.abs().max()) > 1e-3
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-12, rtol=1e-10)


def test_chunked_in_half_precision_and_empty() -> None:
    generator = torch.Generator().manual_seed(0)
    h, w, t = (torch.randn(*shape, generator=generator) for shape in ((5, 8), (33, 8), (5, 8)))
    low = [x.bfloat16().requires_grad_() for x in (h, w)]
    found = chunked_divergence(
        low[0], LogitHead(low[1]), t.bfloat16(), LogitHead(w.bfloat16()), distillation.forward_kl
    )
    assert found.dtype == torch.float32
    want = distillation.forward_kl(
        (low[0] @ low[1].t()).float(), (t.bfloat16() @ w.bfloat16().t()).float()
    )
    torch.testing.assert_close(found, want.detach(), atol=1e-6, rtol=1e-5)
    found.sum().backward()
    assert (
        low[1].grad is not None
        and low[1].grad.dtype == torch.bfloat16
        and low[1].grad.float().norm() > 0
    )
    weight = w.clone().requires_grad_()
    chunked_divergence(
        h[:0], LogitHead(weight), t[:0], LogitHead(w), distillation.jsd
    ).sum().backward()
    assert weight.grad is not None and float(weight.grad.abs().max()) == 0


def test_log_collision(monkeypatch: pytest.MonkeyPatch) -> None:
    h = torch.randn(7, 4, dtype=torch.float64)
    w = torch.randn(9, 4, dtype=torch.float64)
    want = ((h @ w.t() / 0.7).softmax(-1) ** 2).sum(-1).log()
    for n in (2, 50):
        monkeypatch.setattr(head, "chunk_rows", lambda rows, vocabulary, device, n=n: n)
        torch.testing.assert_close(log_collision(h, LogitHead(w), temperature=0.7), want)


# ---- losses


def cut(loss: Any, budget: int, field: str | None) -> tuple[float, list[float]]:
    """Value and gradient over packs; `field` is another leaf besides the log-probs."""
    batches = pack(rows(), budget)
    totals = Totals.of(batches)
    value = 0.0
    gradients = {}
    for batch in batches:
        leaf = batch.streams["policy"].double().requires_grad_()
        tokens = tokens_of(batch, leaf)
        if field:
            tokens = tokens_of(batch, leaf, field)
        part, _ = loss(tokens, totals)
        part.backward()
        value += part.item()
        assert leaf.grad is not None
        gradients |= dict(
            zip(
                (s.uid for s in batch.samples),
                leaf.grad.split(batch.trained_lengths().tolist()),
                strict=True,
            )
        )
    return value, torch.cat([gradients[f"r{i}"] for i in range(len(LENGTHS))]).tolist()


@pytest.mark.parametrize("budget", [1, 12, 10**6])
def test_distillation_loss(budget: int) -> None:
    """Leaf x is both log-prob and divergence: loss = mean(0.3 T^2 x - 0.7 x)."""
    loss = DistillationLoss("jsd", beta=0.3, weight=0.3, temperature=2.0)
    values = torch.cat([s.streams["policy"][2:] for s in rows()]).double()
    value, gradient = cut(loss, budget, "divergence")
    assert value == pytest.approx(float((0.3 * 4 - 0.7) * values.mean()), abs=1e-9)
    assert gradient == pytest.approx([(0.3 * 4 - 0.7) / sum(LENGTHS)] * sum(LENGTHS))
    s = f64([STUDENT])
    t = f64([TEACHER])
    torch.testing.assert_close(
        loss.divergence(s, t), distillation.jsd(s, t, beta=0.3, temperature=2.0)
    )


@pytest.mark.parametrize("budget", [1, 12, 10**6])
def test_dft(budget: int) -> None:
    values = torch.cat([s.streams["policy"][2:] for s in rows()]).double()
    value, gradient = cut(DFTLoss(), budget, None)
    assert value == pytest.approx(float((-values.exp() * values).mean()), abs=1e-9)
    # the probability has no gradient
    torch.testing.assert_close(f64(gradient), -values.exp() / len(values))
    assert dft(f64([math.log(0.25)])).tolist() == pytest.approx([-0.25 * math.log(0.25)])


def test_opd_reward() -> None:
    student = f64([-1.0, -3.0]).requires_grad_()
    reward = opd_reward(student, f64([-1.5, -0.5]))
    assert reward.tolist() == [-0.5, 2.5] and not reward.requires_grad
    assert opd_reward(student, f64([-1.5, -0.5]), clip=1.0).tolist() == [-0.5, 1.0]


def test_minillm_returns() -> None:
    student = torch.zeros(5)
    teacher = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    sequence = torch.tensor([0, 0, 0, 2, 2])
    assert minillm_returns(student, teacher, sequence, normalise=False).tolist() == [6, 4, 0, 16, 0]
    assert minillm_returns(student, teacher, sequence).tolist() == [3, 4, 0, 16, 0]


def test_minillm_decomposition_is_exact() -> None:
    """Two steps over three tokens: single-step reverse KLs plus the long term have the gradient of
    KL(q, p) over sequences.
    """
    generator = torch.Generator().manual_seed(1)
    q1, q2, p1, p2 = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((3,), (3, 3), (3,), (3, 3))
    )
    q1.requires_grad_(), q2.requires_grad_()

    def logs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return q1.log_softmax(-1), q2.log_softmax(-1), p1.log_softmax(-1), p2.log_softmax(-1)

    a, b, c, d = logs()
    joint_q = a[:, None] + b
    joint_p = c[:, None] + d
    (joint_q.exp() * (joint_q - joint_p)).sum().backward()
    assert q1.grad is not None and q2.grad is not None
    want = q1.grad.clone(), q2.grad.clone()
    q1.grad = q2.grad = None
    a, b, c, d = logs()
    total = distillation.reverse_kl(q1[None], p1[None]).sum()
    total = total + (a.detach().exp() * distillation.reverse_kl(q2, p2)).sum()
    for i, j in product(range(3), range(3)):
        student = torch.stack((a[i], b[i, j]))
        teacher = torch.stack((c[i], d[i, j]))
        returns = minillm_returns(
            student, teacher, torch.zeros(2, dtype=torch.int64), normalise=False
        )
        long = -(returns.detach() * student).sum()
        total = total + (a[i] + b[i, j]).detach().exp() * long
    total.backward()
    torch.testing.assert_close(q1.grad, want[0])
    torch.testing.assert_close(q2.grad, want[1])


# ---- noise on embeddings


def test_neftune() -> None:
    embedding = nn.Embedding(8, 4)
    samples = rows([3, 1])
    batch = Batch.pack(samples)

    def noise(batch: Batch, **settings: Any) -> Tensor:
        with (
            torch.no_grad(),
            neftune(embedding, batch, **{"alpha": 5.0, "seed": (0, 7)} | settings),
        ):
            noisy = embedding(batch.tokens[None])
        return (noisy - embedding(batch.tokens[None]))[0].detach()

    found = noise(batch)
    bounds = [5 / math.sqrt(n * 4) for n in batch.lengths]
    for part, bound in zip(found.split(batch.lengths), bounds, strict=True):
        assert 0.5 * bound < float(part.abs().max()) <= bound + 1e-6  # L is the row's own length
    alone = [noise(Batch.pack([s])) for s in samples]
    # packing does not matter
    torch.testing.assert_close(found, torch.cat(alone), atol=1e-6, rtol=0)
    assert not torch.allclose(found, noise(batch, seed=(0, 8)))
    torch.testing.assert_close(noise(batch, alpha=10.0), 2 * found, atol=1e-6, rtol=0)
    assert torch.equal(embedding(batch.tokens), embedding.weight[batch.tokens])  # gone afterwards
    with pytest.raises(RuntimeError), neftune(embedding, batch, alpha=1.0, seed=(0,)):
        raise RuntimeError
    assert not embedding._forward_hooks


def test_every_divergence_has_a_golden_number() -> None:
    assert {name for name, _, _ in GOLDEN.values()} == DIVERGENCES.keys()
