"""Unpaired preference losses by hand, their batch-wide constants, and that cutting the batch
changes nothing.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.loss_rows import LENGTHS, assert_cut_does_not_matter, rows, run, slope
from reinforge.algorithms.losses.rows import with_stream
from reinforge.algorithms.losses.unpaired import (
    UNPAIRED,
    UnpairedLoss,
    apo_zero_unpaired,
    bco,
    kto,
    kto_baseline,
    mismatched,
)
from reinforge.core.backend import PreparingLoss, State
from reinforge.core.batch import Batch, pack
from reinforge.core.errors import InputError
from reinforge.core.sample import Sample

POLICY = [-3.0, -5.0, -2.0, -9.0]
REFERENCE = [-4.0, -4.5, -2.5, -6.0]
GOOD = [1, 0, 0, 1]
LABELS = [1, 0, 0, 1, 1, 1, 0, 1]
B = 0.3


def s(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def f64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def golden(name: str, constant: float) -> list[float]:
    out = []
    for p, r, good in zip(POLICY, REFERENCE, GOOD, strict=True):
        weight = 1.5 if good else 0.5
        if name == "bco":
            x = B * (p - r) - constant
            out.append(-weight * math.log(s(x if good else -x)))
        else:
            x = B * (p - r - constant)
            out.append(weight * (1 - s(x if good else -x)))
    return out


@pytest.mark.parametrize(
    ("name", "constant"), [("kto", 0.8), ("bco", 0.25), ("apo_zero_unpaired", 0.0)]
)
def test_golden_and_slope(name: str, constant: float) -> None:
    row = UNPAIRED[name]
    given = {row.constant: constant} if row.constant else {}

    def loss_of(policy: Tensor) -> Tensor:
        return row.function(
            policy,
            f64(REFERENCE),
            f64(GOOD),
            beta=B,
            desirable_weight=1.5,
            undesirable_weight=0.5,
            **given,
        )[0]

    policy = f64(POLICY).requires_grad_()
    loss = loss_of(policy)
    torch.testing.assert_close(loss, f64(golden(name, constant)), atol=1e-12, rtol=1e-12)
    loss.sum().backward()
    assert policy.grad is not None
    torch.testing.assert_close(policy.grad, slope(loss_of, f64(POLICY)), atol=1e-8, rtol=1e-6)
    assert (policy.grad < 0).tolist() == [bool(g) for g in GOOD]  # good answers up, bad ones down


def test_where_policy_is_reference() -> None:
    x = f64(POLICY)
    good = f64(GOOD)
    assert kto(x, x, good, baseline=0.0)[0].tolist() == [0.5] * 4
    assert apo_zero_unpaired(x, x, good)[0].tolist() == [0.5] * 4
    assert bco(x, x, good)[0].tolist() == pytest.approx([math.log(2)] * 4)


def test_baseline_is_a_constant_that_is_never_negative() -> None:
    policy = f64([1.0, 2.0]).requires_grad_()
    value = kto_baseline(policy, f64([0.0, 0.5]))
    assert float(value) == 1.25 and not value.requires_grad
    assert float(kto_baseline(f64([-1.0]), f64([3.0]))) == 0


# ---- over packs


def annotated(samples: list[Sample], shift: float = 0.3) -> list[Batch]:
    """Mismatched rows as a backend would annotate them."""
    batches = pack(mismatched(samples), 14)
    for batch in batches:
        batch.streams["old"] = -torch.linspace(0.1, 2, batch.n_trained)
        batch.streams["reference"] = batch.streams["old"] - shift
    return batches


@pytest.mark.parametrize("name", UNPAIRED)
def test_cutting_the_batch_changes_nothing(name: str) -> None:
    samples = rows(label=LABELS)
    assert_cut_does_not_matter(
        lambda: UnpairedLoss(name, beta=B), samples, companions=annotated(samples)
    )


def test_kto_over_packs() -> None:
    samples = rows(label=LABELS)
    companions = annotated(samples)
    value, gradients, metrics = run(
        UnpairedLoss("kto", beta=B, undesirable_weight=2.0), samples, 12, companions=companions
    )
    z = 0.3 * sum(LENGTHS) / len(LENGTHS)  # every row is 0.3 nats per token from the reference
    ratio = [
        float((x.streams["policy"] - x.streams["reference"])[2:].double().sum()) for x in samples
    ]
    want = [
        1 - s(B * (a - z)) if good else 2 * (1 - s(B * (z - a)))
        for a, good in zip(ratio, LABELS, strict=True)
    ]
    assert metrics["preference/baseline"] == pytest.approx(z, abs=1e-5)
    assert value == pytest.approx(sum(want) / 8, abs=1e-5)
    assert metrics["rewards/chosen"] == pytest.approx(
        B * sum(a for a, g in zip(ratio, LABELS, strict=True) if g) / 5, abs=1e-5
    )
    assert metrics["rewards/rejected"] == pytest.approx(
        B * sum(a for a, g in zip(ratio, LABELS, strict=True) if not g) / 3, abs=1e-5
    )
    slope_0 = -B * s(B * (ratio[0] - z)) * (1 - s(B * (ratio[0] - z))) / 8
    # nothing through the baseline
    assert gradients["r0"].tolist() == pytest.approx([slope_0] * 3, abs=1e-6)


def test_bco_delta_runs_over_batches_and_survives_a_resume() -> None:
    first = rows(label=LABELS)
    second = rows(label=LABELS, seed=1)
    loss = UnpairedLoss("bco", beta=B)
    assert loss.needs == {"reference", "old"}
    means = [
        B
        * sum(float((x.streams["old"] - x.streams["reference"])[2:].double().sum()) for x in part)
        / 8
        for part in (first, second)
    ]
    assert run(loss, first, 12)[2]["preference/delta"] == pytest.approx(means[0], abs=1e-6)
    saved = json.loads(json.dumps(loss.state().meta))
    value = run(loss, second, 12)[0]
    assert loss.mean == pytest.approx(sum(means) / 2, abs=1e-6)
    resumed = UnpairedLoss("bco", beta=B)
    resumed.load(State(meta=saved))
    assert run(resumed, second, 12)[0] == value


@pytest.mark.parametrize("name", UNPAIRED)
def test_an_answer_without_tokens_does_not_lose_its_label(name: str) -> None:
    """Without a trained token there is no label to read, and a good answer would count as a bad
    one: an error.
    """
    samples = rows([3, 0, 2], label=[0, 1, 1])
    with pytest.raises(
        InputError, match="row 2 of a micro-batch has no trained token, so its label is lost"
    ):
        run(UnpairedLoss(name), samples, 1000, companions=annotated(samples))


def test_mismatched_rows() -> None:
    samples = [
        Sample.from_tokens("a", [1, 2, 3, 4], [False, False, True, True], group="x"),
        Sample.from_tokens("b", [1, 2, 5], [False, False, True], group="x"),
        Sample.from_tokens("c", [7, 8, 9, 6], [False, True, False, True], group="y"),
    ]
    found = mismatched(samples)
    # never an answer to the same prompt
    assert [x.tokens.tolist() for x in found] == [[1, 2, 8, 9, 6], [1, 2, 8, 9, 6], [7, 3, 4]]
    assert [x.trained.tolist() for x in found] == [[False, False, True, False, True]] * 2 + [
        [False, True, True]
    ]
    assert len({x.uid for x in found} | {x.uid for x in samples}) == 6
    assert [len(x.tokens) for x in mismatched(samples, limit=4)] == [4, 4, 3]
    assert (
        isinstance(UnpairedLoss("kto"), PreparingLoss)
        and UnpairedLoss("bco").companions(samples) == []
    )


def test_errors() -> None:
    with pytest.raises(InputError, match="baseline"):
        UnpairedLoss("kto", baseline=1.0)
    samples = rows(label=LABELS)
    with pytest.raises(ValueError, match="companions"):
        UnpairedLoss("kto").prepare(pack(samples, 99))


def test_with_stream() -> None:
    sample = with_stream(rows([2])[0], "label", 1.0)
    assert sample.streams["label"].tolist() == [1.0] * 4 and "reference" in sample.streams
