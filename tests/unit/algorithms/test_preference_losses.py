"""Preference losses against the papers' formulas worked in plain Python floats, and `PairLoss` over
packs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.loss_rows import LENGTHS, assert_cut_does_not_matter, rows, run, slope
from helpers.toys import make_model, train_config
from reinforge.algorithms.catalogue import TABLE
from reinforge.algorithms.losses import preference_terms as losses
from reinforge.algorithms.losses.nash import geometric_mixture, nash_md
from reinforge.algorithms.losses.preference import PREFERENCE, PairLoss
from reinforge.backends.local import LocalBackend
from reinforge.core.backend import Loss, PreparingLoss
from reinforge.core.batch import Totals, pack
from reinforge.core.errors import InputError
from reinforge.core.sample import Sample

# the last pair is past the bend of a hinge: beta (a - b) is 1.275
P_W = [-3.0, -10.5, -4.25]
P_L = [-4.0, -6.0, -7.5]
R_W = [-3.5, -9.0, -8.0]
R_L = [-3.75, -7.5, -7.0]
NLL = [0.7, 2.1, 1.3]
GAP = [1.5, -0.25, 3.0]
B = 0.3


def s(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def ls(x: float) -> float:
    return math.log(s(x))


def bernoulli(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def odds(logp: float) -> float:
    return math.exp(logp) / (1 - math.exp(logp))


# name: (settings, formula of a = logp_w - ref_w, b, policy w, policy l, nll, gap), with beta = B
GOLDEN: dict[str, tuple[dict[str, Any], Callable[..., float]]] = {
    "sigmoid": ({}, lambda a, b, *_: -ls(B * (a - b))),
    "cdpo": (
        {"label_smoothing": 0.2},
        lambda a, b, *_: -0.8 * ls(B * (a - b)) - 0.2 * ls(B * (b - a)),
    ),
    "sigmoid_norm": ({}, lambda a, b, *_: -ls(B * (a - b))),
    "hinge": ({}, lambda a, b, *_: max(0.0, 1 - B * (a - b))),
    "ipo": ({}, lambda a, b, *_: (a - b - 1 / (2 * B)) ** 2),
    "robust": (
        {"label_smoothing": 0.2},
        lambda a, b, *_: (-0.8 * ls(B * (a - b)) + 0.2 * ls(B * (b - a))) / 0.6,
    ),
    "exo_pair": ({"label_smoothing": 0.05}, lambda a, b, *_: bernoulli(s(B * (a - b)), 0.95)),
    "nca_pair": ({}, lambda a, b, *_: -ls(B * a) - 0.5 * ls(-B * a) - 0.5 * ls(-B * b)),
    "bco_pair": ({"delta": 0.4}, lambda a, b, *_: -ls(B * a - 0.4) - ls(-(B * b - 0.4))),
    "sppo_hard": ({}, lambda a, b, *_: (a - 1 / (2 * B)) ** 2 + (b + 1 / (2 * B)) ** 2),
    "apo_zero": ({}, lambda a, b, *_: 1 - s(B * a) + s(B * b)),
    "apo_down": ({}, lambda a, b, *_: s(B * a) + 1 - s(B * (a - b))),
    "discopop": (
        {"tau": 0.5},
        lambda a, b, *_: (
            (1 - s(B * (a - b) / 0.5)) * -ls(B * (a - b))
            + s(B * (a - b) / 0.5) * math.exp(-B * (a - b))
        ),
    ),
    "rpo_sq": ({"scale": 2.0}, lambda a, b, w, l, n, g: (B * (a - b) - 2 * g) ** 2),
    "rpo_bwd_kl": ({"scale": 2.0}, lambda a, b, w, l, n, g: bernoulli(s(2 * g), s(B * (a - b)))),
    "rpo_fwd_kl": ({"scale": 2.0}, lambda a, b, w, l, n, g: bernoulli(s(B * (a - b)), s(2 * g))),
    "rpo": ({"nll_weight": 0.5}, lambda a, b, w, l, n, g: -ls(B * (a - b)) + 0.5 * n),
    "sft": ({}, lambda a, b, w, l, n, g: n),
    "cpo": ({"nll_weight": 0.5}, lambda a, b, w, l, n, g: -ls(B * (w - l)) + 0.5 * n),
    "simpo": ({"gamma": 0.6}, lambda a, b, w, l, n, g: -ls(B * (w - l) - 0.6)),
    "alphapo": (
        {"gamma": 0.6, "alpha": 0.25},
        lambda a, b, w, l, n, g: (
            -ls(B * ((1 - math.exp(w) ** -0.25) - (1 - math.exp(l) ** -0.25)) / 0.25 - 0.6)
        ),
    ),
    "orpo": ({}, lambda a, b, w, l, n, g: n - B * ls(math.log(odds(w) / odds(l)))),
    "online_dpo": ({}, lambda a, b, *_: -ls(B * (a - b))),
    "xpo": ({"alpha": 0.2}, lambda a, b, w, l, n, g: -ls(B * (a - b)) + 0.2 * l),
    "spin": ({}, lambda a, b, *_: -ls(B * (a - b))),
}
RANKED = {"aot", "aot_unpaired"}
OF_LOGPROBS = [name for name in PREFERENCE if name != "sft"]  # that one is its nll


def f64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def call(
    name: str, numbers: tuple[Tensor, ...], **settings: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    row = PREFERENCE[name]
    extra = {
        "nll": {"nll": f64(NLL)},
        "gap": {"gap": f64(GAP)},
        "explore": {"explore": numbers[1]},
        None: {},
    }[row.takes]
    return row.function(*numbers, **extra, **{**row.defaults, **settings})


def test_every_loss_is_checked_against_numbers() -> None:
    """Here, or as the loss of an algorithm: every algorithm has a twin in plain Python, with its
    gradient (tests/parity/loss_twins.py).
    """
    of_algorithms = {spec.parts["loss"] for spec in TABLE.values() if spec.family == "preference"}
    assert PREFERENCE.keys() <= GOLDEN.keys() | RANKED | of_algorithms
    assert GOLDEN.keys() | RANKED <= PREFERENCE.keys()


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name: str) -> None:
    settings, formula = GOLDEN[name]
    loss, metrics = call(name, (f64(P_W), f64(P_L), f64(R_W), f64(R_L)), beta=B, **settings)
    want = [
        formula(w - rw, l - rl, w, l, n, g)
        for w, l, rw, rl, n, g in zip(P_W, P_L, R_W, R_L, NLL, GAP, strict=True)
    ]
    torch.testing.assert_close(loss, f64(want), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(metrics["margin"], metrics["chosen"] - metrics["rejected"])
    assert torch.equal(metrics["accuracy"], (metrics["chosen"] > metrics["rejected"]).double())
    if PREFERENCE[name].needs_reference:
        torch.testing.assert_close(metrics["chosen"], B * (f64(P_W) - f64(R_W)))
        assert metrics["accuracy"].tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("name", OF_LOGPROBS)
def test_gradient_is_the_slope(name: str) -> None:
    settings = GOLDEN.get(name, ({}, None))[0]
    for i in range(2):
        numbers = [f64(P_W), f64(P_L), f64(R_W), f64(R_L)]
        numbers[i].requires_grad_()
        call(name, tuple(numbers), beta=B, **settings)[0].sum().backward()

        def again(x: Tensor, i: int = i, numbers: list[Tensor] = numbers) -> Tensor:
            return call(
                name,
                tuple(x if j == i else n.detach() for j, n in enumerate(numbers)),
                beta=B,
                **settings,
            )[0]

        grad = (
            numbers[i].grad if numbers[i].grad is not None else torch.zeros(3, dtype=torch.float64)
        )
        torch.testing.assert_close(grad, slope(again, numbers[i].detach()), atol=1e-7, rtol=1e-6)
        assert all(
            not m.requires_grad for m in call(name, tuple(numbers), beta=B, **settings)[1].values()
        )


STEP_0 = {
    **dict.fromkeys(
        ("sigmoid", "cdpo", "robust", "sigmoid_norm", "aot", "aot_unpaired", "online_dpo", "spin"),
        math.log(2),
    ),
    "hinge": 1.0,
    "ipo": 1 / (4 * B**2),
    "sppo_hard": 1 / (2 * B**2),
    "nca_pair": 2 * math.log(2),
    "bco_pair": 2 * math.log(2),
    "apo_zero": 1.0,
    "apo_down": 1.0,
    "discopop": 0.5 * math.log(2) + 0.5,
    "exo_pair": bernoulli(0.5, 0.999),
}


@pytest.mark.parametrize("name", STEP_0)
def test_where_policy_is_reference(name: str) -> None:
    w = f64(P_W)
    l = f64(P_L)
    loss, metrics = call(name, (w, l, w, l), beta=B)
    torch.testing.assert_close(loss, torch.full_like(loss, STEP_0[name]), atol=1e-12, rtol=1e-12)
    assert metrics["margin"].abs().max() == 0 and metrics["accuracy"].max() == 0


def test_label_smoothing_limits() -> None:
    given = (f64(P_W), f64(P_L), f64(R_W), f64(R_L))
    flipped = (given[1], given[0], given[3], given[2])
    plain = losses.sigmoid(*given, beta=B)[0]
    torch.testing.assert_close(
        losses.sigmoid(*given, beta=B, label_smoothing=1.0)[0], losses.sigmoid(*flipped, beta=B)[0]
    )
    torch.testing.assert_close(losses.robust(*given, beta=B, label_smoothing=0.0)[0], plain)
    # unbiased: labels flipped with probability e give the clean loss on average
    e = 0.3
    mixed = (1 - e) * losses.robust(*given, beta=B, label_smoothing=e)[0] + e * losses.robust(
        *flipped, beta=B, label_smoothing=e
    )[0]
    torch.testing.assert_close(mixed, plain)
    with pytest.raises(InputError, match="robust"):
        losses.robust(*given, label_smoothing=0.5)
    with pytest.raises(InputError, match="exo_pair"):
        losses.exo_pair(*given, label_smoothing=0.0)


def test_ranked_losses_sort_the_whole_batch() -> None:
    given = (f64(P_W), f64(P_L), f64(R_W), f64(R_L))
    policy = sorted(w - l for w, l in zip(P_W, P_L, strict=True))
    reference = sorted(w - l for w, l in zip(R_W, R_L, strict=True))
    want = [-ls(B * (x - y)) for x, y in zip(policy, reference, strict=True)]
    torch.testing.assert_close(losses.aot(*given, beta=B)[0], f64(want))
    good, bad = (
        sorted(p - r for p, r in zip(*side, strict=True)) for side in ((P_W, R_W), (P_L, R_L))
    )
    want = [-0.9 * ls(B * (x - y)) - 0.1 * ls(B * (y - x)) for x, y in zip(good, bad, strict=True)]
    torch.testing.assert_close(
        losses.aot_unpaired(*given, beta=B, label_smoothing=0.1)[0], f64(want)
    )


# f'(t) up to a constant, t = pi / ref (2309.16240 table 1)
DERIVATIVES: dict[str, Callable[[float], float]] = {
    "reverse_kl": lambda t: math.log(t) + 1,
    "forward_kl": lambda t: -1 / t,
    "js": lambda t: math.log(2 * t / (1 + t)),
    "alpha": lambda t: -(t ** (0.3 - 1)) / (1 - 0.3),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_f_divergences(name: str) -> None:
    settings = {"alpha": 0.3} if name == "alpha" else {}
    bend = lambda x: losses.DIVERGENCES[name](x, **settings)  # noqa: E731
    loss, _ = losses.sigmoid(f64(P_W), f64(P_L), f64(R_W), f64(R_L), beta=B, divergence=bend)
    f = DERIVATIVES[name]
    want = [
        -ls(B * (f(math.exp(w - rw)) - f(math.exp(l - rl))))
        for w, l, rw, rl in zip(P_W, P_L, R_W, R_L, strict=True)
    ]
    torch.testing.assert_close(loss, f64(want), atol=1e-12, rtol=1e-12)
    assert float(bend(f64([0.0]))) == pytest.approx(0, abs=1e-15)


def test_alpha_divergence_joins_both_kls() -> None:
    x = f64([-2.0, 0.3, 1.7])
    torch.testing.assert_close(losses.alpha_divergence(x, alpha=1.0), losses.reverse_kl(x))
    torch.testing.assert_close(losses.alpha_divergence(x, alpha=0.0), losses.forward_kl(x))
    assert losses.alpha_divergence(torch.tensor([-1e4]), alpha=0.5).isfinite()


@pytest.mark.parametrize("name", OF_LOGPROBS)
def test_far_log_ratios_stay_finite(name: str) -> None:
    w = torch.tensor([-400.0, -1.0, -1e-9], requires_grad=True)
    l = torch.tensor([-1.0, -400.0, 0.0], requires_grad=True)
    loss, _ = call(name, (w, l, torch.full((3,), -90.0), torch.full((3,), -90.0)))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert all(x.grad is None or x.grad.isfinite().all() for x in (w, l))


# ---- over packs


@pytest.mark.parametrize("name", PREFERENCE)
def test_pair_loss_is_the_mean_over_pairs(name: str) -> None:
    """From tokens to the same number that the function gives for sums (or means) over rows."""
    samples = rows(score=[1, 0, 2, 5, 0, 0, 3, 1], by_reference=[1, 0, 0, 1, 1, 0, 0, 1])
    value, gradients, metrics = run(PairLoss(name, beta=B), samples, 10**6)
    row = PREFERENCE[name]
    policy, reference = (
        [float(x.streams[k][x.trained].double().sum()) for x in samples]
        for k in ("policy", "reference")
    )
    leaf = f64(policy).requires_grad_()
    scale = f64([1 / n if row.averaged else 1.0 for n in LENGTHS])
    p = leaf * scale
    r = f64(reference) * scale * float(row.needs_reference)
    extra: dict[str, Any] = {}
    if row.takes == "nll":
        chosen = LENGTHS[::2]
        total = sum(LENGTHS[::2])
        extra["nll"] = -leaf[::2] * f64(
            [1 / n if row.nll == "sequence" else 4 / total for n in chosen]
        )
    if row.takes == "explore":
        extra["explore"] = leaf[[0, 3, 4, 7]]
    if row.takes == "gap":
        extra["gap"] = f64([1.0, -3.0, 0.0, 2.0])
    loss, watched = row.function(
        p[::2], p[1::2], r[::2], r[1::2], **{**row.defaults, "beta": B}, **extra
    )
    loss.mean().backward()
    # partners are kept in float32
    assert value == pytest.approx(loss.mean().item(), abs=1e-9 if not row.ranked else 1e-7)
    assert leaf.grad is not None
    for i, sample in enumerate(samples):
        torch.testing.assert_close(
            gradients[sample.uid], leaf.grad[i].expand(LENGTHS[i]), atol=1e-7, rtol=1e-5
        )
    assert metrics["rewards/accuracy"] == pytest.approx(float(watched["accuracy"].mean()))
    assert metrics["rewards/margin"] == pytest.approx(float(watched["margin"].mean()), abs=1e-6)


@pytest.mark.parametrize(
    "settings",
    [{"names": name} for name in PREFERENCE]
    + [
        {"names": {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0}},
        {"names": "sigmoid", "ld_alpha": 0.3},
        {"names": "ipo", "wpo": True},
        {"names": "sigmoid", "divergence": "js"},
        {"names": "aot_unpaired", "ld_alpha": 0.5},
    ],
    ids=lambda x: str(x),
)
def test_cutting_the_batch_changes_nothing(settings: dict[str, Any]) -> None:
    samples = rows(
        score=[1, 0, 2, 5, 0, 0, 3, 1],
        by_reference=[1, 0, 0, 1, 1, 0, 0, 1],
        collision=[-1.0, -0.5, -0.7, -2, -0.1, -0.3, -1, -1],
    )
    assert_cut_does_not_matter(lambda: PairLoss(**settings), samples)


def test_mixture_is_the_weighted_sum() -> None:
    samples = rows()
    parts = {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0}
    value, _, metrics = run(PairLoss(parts, beta=B), samples, 12)
    alone = {name: run(PairLoss(name, beta=B), samples, 12)[0] for name in parts}
    assert value == pytest.approx(sum(parts[name] * alone[name] for name in parts), abs=1e-12)
    assert metrics["preference/bco_pair"] == pytest.approx(alone["bco_pair"], abs=1e-12)


def test_ld_dpo_counts_the_tail_by_alpha() -> None:
    samples = rows([2, 5])
    w, l = (x.streams["policy"][2:].double() - x.streams["reference"][2:].double() for x in samples)
    for alpha in (0.0, 0.4, 1.0):
        delta = float(w.sum()) - float(l[:2].sum()) - alpha * float(l[2:].sum())
        assert run(PairLoss("sigmoid", beta=B, ld_alpha=alpha), samples, 99)[0] == pytest.approx(
            -ls(B * delta), abs=1e-6
        )
    _, gradients, _ = run(PairLoss("sigmoid", beta=B, ld_alpha=0.4), samples, 99)
    assert (gradients["r1"][2:] / gradients["r1"][0]).tolist() == pytest.approx([0.4] * 3)


def test_wpo_weighs_by_likelihood() -> None:
    samples = rows([2, 3], collision=[-0.5, -1.0])
    plain, plain_gradient, _ = run(PairLoss("sigmoid", beta=B), samples, 99)
    value, gradient, _ = run(PairLoss("sigmoid", beta=B, wpo=True), samples, 99)
    w, l = (x.streams["policy"][2:].double().mean() for x in samples)
    weight = math.exp(float(w) + 0.5 + float(l) + 1.0)
    assert value == pytest.approx(weight * plain, abs=1e-9)
    # the weight has none of its own
    torch.testing.assert_close(gradient["r0"], weight * plain_gradient["r0"])
    with pytest.raises(InputError, match="aot"):
        PairLoss("aot", wpo=True)


def test_needs_and_settings() -> None:
    assert PairLoss("simpo").needs == frozenset() and PairLoss("sigmoid").needs == {"reference"}
    assert PairLoss("aot").needs == {"reference", "old"} and PairLoss(
        {"simpo": 1.0, "hinge": 1.0}, wpo=True
    ).needs == {
        "reference",
        "collision",
    }
    with pytest.raises(InputError, match="gamma"):
        PairLoss("sigmoid", gamma=1.0)
    with pytest.raises(InputError, match="sigmod") as error:
        PairLoss("sigmod")
    assert "sigmoid" in str(error.value)


def test_an_answer_without_tokens_is_counted() -> None:
    """Its log-prob is 0, and the batch still has two pairs."""
    samples = rows([2, 3, 4, 0])
    value, gradients, _ = run(PairLoss("sigmoid", beta=B), samples, 1)
    rest = run(PairLoss("sigmoid", beta=B), samples[:2], 99)[0]
    delta = float((samples[2].streams["policy"] - samples[2].streams["reference"])[2:].sum())
    assert (
        value == pytest.approx((rest - ls(B * delta)) / 2, abs=1e-6) and len(gradients["r3"]) == 0
    )


@pytest.mark.parametrize(
    "name", ["rpo_sq", "rpo_bwd_kl", "rpo_fwd_kl", "aot", "aot_unpaired", "xpo"]
)
def test_an_answer_without_tokens_does_not_lose_its_number(name: str) -> None:
    """A score or a partner rides on the trained tokens of an answer.

    Where there is none, 0 would be another score: an error.
    """
    samples = rows([3, 0, 4, 2], score=[0.9, 0.8, 0.6, 0.1], by_reference=[0, 1, 0, 1])
    with pytest.raises(
        InputError,
        match=(
            r"no trained token, so its (score|partner_aot|partner_aot_unpaired|by_reference) is"
            r" lost"
        ),
    ):
        run(PairLoss(name), samples, 1000)
    run(
        PairLoss(name),
        rows([3, 1, 4, 2], score=[0.9, 0.8, 0.6, 0.1], by_reference=[0, 1, 0, 1]),
        1000,
    )


def test_through_a_backend_before_the_first_step() -> None:
    """A real model with a frozen copy: policy is reference, so the losses are known; both sides of
    a pair get opposite gradients.
    """
    samples = [
        Sample.from_tokens(
            f"{i}{side}", [5, 9, 7 + i, *answer], [False] * 3 + [True] * len(answer), group=str(i)
        )
        for i in range(3)
        for side, answer in (("w", [11, 12, 13 + i]), ("l", [20, 21 + i]))
    ]
    for name, want in (
        ("sigmoid", math.log(2)),
        ("hinge", 1.0),
        ("ipo", 25.0),
        ("aot_unpaired", math.log(2)),
    ):
        backend = LocalBackend(
            make_model(), train_config(learning_rate=1e-3), total_steps=10, reference=True
        )
        loss = PairLoss(name)
        assert isinstance(loss, Loss) and isinstance(loss, PreparingLoss)
        # pairs may share their prompt
        batches = pack(samples, 12, unit=loss.unit, share=name == "hinge")
        backend.annotate(batches, loss.needs)
        loss.prepare(batches)
        metrics = backend.forward_backward(batches, loss, Totals.of(batches))
        assert metrics["preference/loss"] == pytest.approx(want, rel=1e-5)
        assert metrics["rewards/margin"] == pytest.approx(0, abs=1e-5)
        assert float(backend.step().grad_norm) > 1e-3
        # it learns
        assert backend.forward_backward(batches, loss, Totals.of(batches))["preference/loss"] < want


# ---- online


def test_nash_md() -> None:
    policy = f64([-3.0, -5.0]).requires_grad_()
    loss, metrics = nash_md(policy, f64([-4.0, -4.5]), f64([0.9, 0.2]), beta=0.1)
    loss.sum().backward()
    assert policy.grad is not None and policy.grad.tolist() == pytest.approx(
        [-(0.4 - 0.1 * 1.0), -(-0.3 + 0.1 * 0.5)]
    )
    assert metrics["kl"].tolist() == [1.0, -0.5]


def test_nash_md_expected_gradient() -> None:
    """Over all answers of a tabular policy it is the gradient of -P(pi beats the other) + beta
    KL(pi, mu).
    """
    logits = f64([0.3, -0.8, 1.1]).requires_grad_()
    mu = f64([0.1, 0.5, -0.4]).log_softmax(0)
    wins = f64([0.9, 0.2, 0.6])
    beta = 0.3
    logp = logits.log_softmax(0)
    (logp.detach().exp() * nash_md(logp, mu, wins, beta=beta)[0]).sum().backward()
    found = logits.grad.clone() if logits.grad is not None else None
    logits.grad = None
    q = logits.softmax(0)
    (-(q * wins).sum() + beta * (q * (q.log() - mu)).sum()).backward()
    torch.testing.assert_close(found, logits.grad)


def test_geometric_mixture() -> None:
    a = f64([[1.0, 0.0, -1.0]])
    b = f64([[0.0, 2.0, 0.5]])
    p = a.softmax(-1) ** 0.75 * b.softmax(-1) ** 0.25
    torch.testing.assert_close(geometric_mixture(a, b, coefficient=0.25).exp(), p / p.sum())
