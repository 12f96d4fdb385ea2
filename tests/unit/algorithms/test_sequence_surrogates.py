"""Sequence surrogates against plain Python, sequence by sequence, under the reducer that their
docstring names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reinforge.algorithms.parts.ratios import per_sequence
from reinforge.algorithms.parts.sequence import gmpo, gspo, gspo_token, sequence_clip, vespo
from reinforge.algorithms.parts.surrogates import (
    SURROGATES,
    cispo,
    dppo_kl,
    dppo_tv,
    ppo_clip,
    reinforce,
    sapo,
)

# logprobs, old, advantages of each sequence
Rows = list[tuple[list[float], list[float], list[float]]]


def random_rows(
    lengths: list[int], seed: int = 0, spread: float = 0.3, by_token: bool = False
) -> Rows:
    generator = torch.Generator().manual_seed(seed)

    def noise(n: int) -> Tensor:
        return torch.randn(n, generator=generator, dtype=torch.float64)

    rows = []
    for n in lengths:
        logprobs = -noise(n).abs() - 0.2
        old = (logprobs + spread * noise(n)).clamp(max=-0.01)
        rows.append(
            (
                logprobs.tolist(),
                old.tolist(),
                (noise(n) if by_token else noise(1).expand(n)).tolist(),
            )
        )
    return rows


def flat(rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    columns = [
        torch.tensor([x for row in rows for x in row[i]], dtype=torch.float64) for i in range(3)
    ]
    sequence = torch.tensor([i for i, row in enumerate(rows) for _ in row[0]], dtype=torch.int64)
    return columns[0], columns[1], columns[2], sequence


def weights(rows: Rows, reduce: str) -> Tensor:
    n = sum(bool(row[0]) for row in rows)
    tokens = sum(len(row[0]) for row in rows)
    of = {
        "token_mean": lambda length: 1 / tokens,
        "sequence_mean": lambda length: 1 / (length * n),
        "sequence_sum": lambda length: 1 / n,
    }
    return torch.tensor(
        [of[reduce](len(row[0])) for row in rows for _ in row[0]], dtype=torch.float64
    )


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


# Objectives of one sequence, as the papers write them: x are log-probs with gradient, f the same
# ones frozen (sg), o old, a advantages.


def gspo_reference(
    x: list[float], f: list[float], o: list[float], a: list[float], low: float, high: float
) -> float:
    s = math.exp(sum(p - q for p, q in zip(x, o, strict=True)) / len(x))
    return -min(s * a[0], clip(s, 1 - low, 1 + high) * a[0])


def gspo_token_reference(
    x: list[float], f: list[float], o: list[float], a: list[float], low: float, high: float
) -> float:
    s = math.exp(sum(p - q for p, q in zip(f, o, strict=True)) / len(x))
    total = 0.0
    for t in range(len(x)):
        s_t = s * math.exp(x[t]) / math.exp(f[t])
        total -= min(s_t * a[t], clip(s_t, 1 - low, 1 + high) * a[t]) / len(x)
    return total


def sequence_clip_reference(
    x: list[float], f: list[float], o: list[float], a: list[float], low: float, high: float
) -> float:
    ratio = 1.0
    for p, q in zip(x, o, strict=True):
        ratio *= math.exp(p) / math.exp(q)
    return -min(ratio * a[0], clip(ratio, 1 - low, 1 + high) * a[0])


def gmpo_reference(
    x: list[float], f: list[float], o: list[float], a: list[float], low: float, high: float
) -> float:
    """The paper's form: (prod_t |min(rho^sgn A, clip(rho)^sgn A)|^sgn)^(1/L) A, with sgn the sign
    of A.
    """
    sign = 1.0 if a[0] > 0 else -1.0
    product = 1.0
    for p, q in zip(x, o, strict=True):
        rho = math.exp(p - q)
        product *= (sign * min(sign * rho, sign * clip(rho, math.exp(-low), math.exp(high)))) ** (
            1 / len(x)
        )
    return -product * a[0]


def vespo_reference(
    x: list[float], f: list[float], o: list[float], a: list[float], pos: tuple, neg: tuple
) -> float:
    w = math.prod(math.exp(p - q) for p, q in zip(f, o, strict=True))
    k, decay = pos if a[0] >= 0 else neg
    return -(w**k) * math.exp(decay * (1 - w)) * a[0] * sum(x)


def per_token(term: Callable[[float, float, float, float], float]) -> Callable[..., float]:
    return lambda x, f, o, a: sum(term(*token) for token in zip(x, f, o, a, strict=True))


def dppo_term(x: float, f: float, o: float, a: float) -> float:
    pi = math.exp(f)
    mu = math.exp(o)
    masked = abs(pi - mu) > 0.05 and ((a > 0 and pi > mu) or (a < 0 and pi < mu))
    return 0.0 if masked else -math.exp(x - o) * a


def dppo_kl_term(x: float, f: float, o: float, a: float) -> float:
    pi = math.exp(f)
    mu = math.exp(o)
    kl = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
    return (
        0.0 if kl > 0.01 and ((a > 0 and pi > mu) or (a < 0 and pi < mu)) else -math.exp(x - o) * a
    )


def sapo_term(x: float, f: float, o: float, a: float) -> float:
    tau = 2.0 if a > 0 else 3.0
    return -4 / tau / (1 + math.exp(-tau * (math.exp(x - o) - 1))) * a


# surrogate, reducer, objective of a sequence (or sum over its tokens)
CASES: dict[str, tuple[Callable, str, Callable[..., float]]] = {
    "gspo": (
        partial(gspo, low=0.03, high=0.04),
        "sequence_mean",
        partial(gspo_reference, low=0.03, high=0.04),
    ),
    "gspo_token": (
        partial(gspo_token, low=0.03, high=0.04),
        "sequence_mean",
        partial(gspo_token_reference, low=0.03, high=0.04),
    ),
    "luspo": (
        partial(gspo, low=0.03, high=0.04),
        "sequence_sum",
        lambda x, f, o, a: len(x) * gspo_reference(x, f, o, a, 0.03, 0.04),
    ),
    "sequence_clip": (
        partial(sequence_clip, low=0.3, high=0.4),
        "sequence_sum",
        partial(sequence_clip_reference, low=0.3, high=0.4),
    ),
    "gmpo": (
        partial(gmpo, low=0.2, high=0.3),
        "sequence_mean",
        partial(gmpo_reference, low=0.2, high=0.3),
    ),
    "vespo": (vespo, "sequence_sum", partial(vespo_reference, pos=(2.0, 3.0), neg=(3.0, 2.0))),
    "vespo_other": (
        partial(vespo, k_positive=1.0, lambda_positive=1.5, k_negative=0.5, lambda_negative=2.5),
        "sequence_sum",
        partial(vespo_reference, pos=(1.0, 1.5), neg=(0.5, 2.5)),
    ),
    "ppo_clip": (
        ppo_clip,
        "token_mean",
        per_token(
            lambda x, f, o, a: -min(math.exp(x - o) * a, clip(math.exp(x - o), 0.8, 1.2) * a)
        ),
    ),
    "cispo": (
        partial(cispo, cap=1.2),
        "token_mean",
        per_token(lambda x, f, o, a: -min(math.exp(f - o), 1.2) * a * x),
    ),
    "sapo": (partial(sapo, tau_positive=2.0, tau_negative=3.0), "token_mean", per_token(sapo_term)),
    "dppo_tv": (partial(dppo_tv, threshold=0.05), "token_mean", per_token(dppo_term)),
    "dppo_kl": (partial(dppo_kl, threshold=0.01), "token_mean", per_token(dppo_kl_term)),
    "reinforce": (reinforce, "token_mean", per_token(lambda x, f, o, a: -a * x)),
}

# an advantage of each token makes sense
BY_TOKEN = {"gspo_token", "ppo_clip", "cispo", "sapo", "dppo_tv", "dppo_kl", "reinforce"}


def objective(name: str, rows: Rows, live: list[list[float]]) -> float:
    _, reduce, reference = CASES[name]
    n = len(rows)
    tokens = sum(len(row[0]) for row in rows)
    return sum(reference(x, *row) for x, row in zip(live, rows, strict=True)) / (
        tokens if reduce == "token_mean" else n
    )


@pytest.mark.parametrize("name", list(CASES))
def test_value_and_gradient_against_plain_python(name: str) -> None:
    """Finite differences of the objective with the stopped parts frozen, at ratios on all sides of
    the clips.
    """
    function, reduce, _ = CASES[name]
    rows = random_rows([5, 1, 8, 3, 12, 2, 7, 4], by_token=name in BY_TOKEN)
    x, old, advantages, sequence = flat(rows)
    x.requires_grad_()
    loss, metrics = function(x, old, advantages, sequence)
    total = (weights(rows, reduce) * loss).sum()
    live = [list(row[0]) for row in rows]
    assert total.item() == pytest.approx(objective(name, rows, live), rel=1e-11)

    (gradient,) = torch.autograd.grad(total, x)
    expected = []
    step = 1e-6
    for row in live:
        for t in range(len(row)):
            before = row[t]
            row[t] = before + step
            up = objective(name, rows, live)
            row[t] = before - step
            expected.append((up - objective(name, rows, live)) / (2 * step))
            row[t] = before
    assert gradient.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)
    if "clip_fraction" in metrics:
        assert 0.05 < metrics["clip_fraction"].mean() < 0.95, (
            "the rows should be on both sides of the clip"
        )


def test_golden_numbers() -> None:
    """Two sequences, l = (0.2, -0.1, 0.2) with A = 2 and l = (0.3,) with A = -1, by hand."""
    old = torch.tensor([-1.0, -2.0, -0.5, -1.5], dtype=torch.float64)
    logprobs = old + torch.tensor([0.2, -0.1, 0.2, 0.3], dtype=torch.float64)
    advantages = torch.tensor([2.0, 2.0, 2.0, -1.0], dtype=torch.float64)
    sequence = torch.tensor([0, 0, 0, 1])

    def run(function, **kw) -> list[float]:
        return function(logprobs, old, advantages, sequence, **kw)[0].tolist()

    e = math.exp
    assert run(gspo, low=0.2, high=0.2) == pytest.approx([-2 * e(0.1)] * 3 + [e(0.3)])
    # the paper's range: clipped above; A < 0 is not
    assert run(gspo) == pytest.approx([-2 * 1.0004] * 3 + [e(0.3)])
    assert run(gspo_token) == pytest.approx([-2 * 1.0004] * 3 + [e(0.3)])
    assert run(sequence_clip) == pytest.approx([-2 * 1.2 / 3] * 3 + [e(0.3)])
    assert run(gmpo, low=0.15, high=0.15) == pytest.approx(
        [-2 * e((0.15 - 0.1 + 0.15) / 3)] * 3 + [e(0.3)]
    )
    phi = [e(0.6) * e(3 * (1 - e(0.3))), e(0.9) * e(2 * (1 - e(0.3)))]
    assert run(vespo) == pytest.approx(
        [-2 * phi[0] * p for p in (-0.8, -2.1, -0.3)] + [phi[1] * -1.2]
    )


def both(
    first: Callable, second: Callable, rows: Rows
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    results = []
    for function in (first, second):
        x, old, advantages, sequence = flat(rows)
        x.requires_grad_()
        loss, _ = function(x, old, advantages, sequence)
        results.append(
            (
                loss.detach(),
                torch.autograd.grad((weights(rows, "sequence_mean") * loss).sum(), x)[0],
            )
        )
    return results[0], results[1]


def test_of_one_token_sequences_are_ppo_clip() -> None:
    rows = random_rows([1] * 40)
    for function in (gspo, gspo_token, sequence_clip):
        ours, ppo = both(
            partial(function, low=0.2, high=0.28), partial(ppo_clip, low=0.2, high=0.28), rows
        )
        torch.testing.assert_close(ours, ppo, rtol=1e-12, atol=1e-12)


def test_gspo_token_has_the_value_of_gspo_and_a_gradient_of_its_own() -> None:
    """With one advantage per sequence the gradients agree too; with one per token only gspo_token
    tells tokens apart.
    """
    tight = {"low": 0.03, "high": 0.04}
    one, token = both(
        partial(gspo, **tight), partial(gspo_token, **tight), random_rows([5, 9, 2, 6, 7, 3])
    )
    torch.testing.assert_close(one, token, rtol=1e-12, atol=1e-12)
    one, token = both(
        partial(gspo, low=9, high=9),
        partial(gspo_token, low=9, high=9),
        rows := random_rows([5], by_token=True),
    )
    torch.testing.assert_close(one[0], token[0], rtol=1e-12, atol=1e-12)
    x, old, advantages, _ = flat(rows)
    s = (x - old).mean().exp()
    torch.testing.assert_close(token[1], -s * advantages / 5)
    torch.testing.assert_close(one[1], (-s * advantages.mean() / 5).expand(5))


def test_gspo_token_is_exact_in_float32() -> None:
    """sg(s) pi / sg(pi) must be sg(s) to the last bit, or log-probs of -1000 would eat a clip range
    of 3e-4.
    """
    old = torch.tensor([-1234.567, -0.1, -77.7])
    sequence = torch.zeros(3, dtype=torch.int64)
    loss, metrics = gspo_token(old.clone().requires_grad_(), old, torch.ones(3), sequence)
    assert loss.tolist() == [-1.0] * 3 and metrics["clip_fraction"].sum() == 0


def test_vespo_fades_out_on_both_sides() -> None:
    """phi(1) = 1; at w = e^+-3 a positive sequence has next to no weight left, and at w = 2 (k = 2,
    lambda = 3) 4 e^-3.
    """
    old = torch.full((4,), -5.0)
    sequence = torch.arange(4)
    ones = torch.ones(4)
    _, metrics = vespo(old + torch.tensor([0.0, math.log(2), 3.0, -3.0]), old, ones, sequence)
    assert metrics["weight"].tolist() == pytest.approx(
        [1.0, 4 * math.exp(-3), 0.0, math.exp(-6 + 3 - 3 * math.exp(-3))], abs=1e-6
    )


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(list(SURROGATES)))
def test_neither_the_order_of_sequences_nor_the_cut_matters(data: st.DataObject, name: str) -> None:
    """Rows permuted, renumbered with gaps (sequences without tokens) and cut into micro-batches:
    the same for each token. In float64, and to rounding: torch's functions may give a number
    another last bit in another place.
    """
    lengths = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=6).filter(any))
    order = data.draw(st.permutations(range(len(lengths))))
    size = data.draw(st.integers(1, len(lengths)))
    rows = random_rows(lengths, seed=data.draw(st.integers(0, 99)))
    function = SURROGATES[name]

    def run(picked: list[int], numbers: list[int]) -> dict[int, tuple[list[float], list[float]]]:
        x, old, advantages, sequence = flat([rows[i] for i in picked])
        x = x.requires_grad_()
        loss, _ = function(x, old, advantages, torch.tensor(numbers)[sequence])
        (gradient,) = torch.autograd.grad(loss.sum(), x)
        return {
            i: (loss[sequence == s].tolist(), gradient[sequence == s].tolist())
            for s, i in enumerate(picked)
        }

    whole = run(list(range(len(rows))), list(range(len(rows))))
    parts: dict[int, tuple[list[float], list[float]]] = {}
    for start in range(0, len(order), size):
        picked = list(order[start : start + size])
        parts |= run(picked, [7 * i + 3 for i in range(len(picked))][::-1])
    assert parts.keys() == whole.keys()
    for i, (loss, gradient) in whole.items():
        assert parts[i][0] == pytest.approx(loss, rel=1e-11, abs=1e-13)
        assert parts[i][1] == pytest.approx(gradient, rel=1e-11, abs=1e-13)


def test_tokens_of_a_sequence_need_not_be_neighbours() -> None:
    values = torch.tensor([1.0, 10.0, 2.0, 20.0, 5.0])
    sequence = torch.tensor([4, 1, 4, 1, 9])
    assert per_sequence(values, sequence).tolist() == [3.0, 30.0, 3.0, 30.0, 5.0]
    assert per_sequence(values, sequence, mean=True).tolist() == [1.5, 15.0, 1.5, 15.0, 5.0]


def test_long_sequences_do_not_lose_digits() -> None:
    """100,000 log-ratios of 1e-4 in float32: the mean is exact enough for a clip at 3e-4."""
    n = 100_000
    old = torch.full((n,), -1.0)
    _, metrics = gspo(old + 1e-4, old, torch.ones(n), torch.zeros(n, dtype=torch.int64))
    assert metrics["ratio"][0].item() == pytest.approx(
        math.exp(float(torch.tensor(-0.9999) + 1)), rel=2e-7
    )
