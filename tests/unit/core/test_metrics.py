"""How the metrics of micro-batches, of ranks and of optimizer steps become one."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from helpers.toys import make_model, make_samples, train_config
from reinforge.algorithms.build import build
from reinforge.backends.distributed import wire
from reinforge.backends.local import LocalBackend
from reinforge.backends.microbatch import combine
from reinforge.core.batch import Totals, pack
from reinforge.core.metrics import Extreme, LossMetrics, Metric, Reduction, StepMetrics, average
from reinforge.core.report import OutOfMemory, StepReport
from reinforge.core.trace import take_traced

LENGTHS = (15, 4, 9, 8, 14, 10, 6, 12)


def part(share: float, highest: float, lowest: float) -> LossMetrics:
    return {
        "a": torch.tensor(share),
        "highest": Extreme.largest(torch.tensor(highest)),
        "lowest": Extreme.smallest(torch.tensor(lowest)),
    }


def test_shares_add_up_and_extremes_stay_extreme() -> None:
    found = combine([part(1.0, 3.0, -1.0), {**part(2.5, 1.0, 0.0), "late": torch.tensor(4.0)}])
    assert found == {"a": 3.5, "highest": 3.0, "late": 4.0, "lowest": -1.0}
    assert [metric.reduction for metric in found.values()] == ["mean", "max", "mean", "min"]
    assert combine([]) == {}


def test_a_name_does_not_say_how_a_metric_is_combined() -> None:
    odd = {"x/max": torch.tensor(1.0), "plain": Extreme.largest(torch.tensor(2.0))}
    assert combine([odd, odd]) == {"x/max": 2.0, "plain": 2.0}


def test_two_ranks_of_two_micro_batches_are_one_rank_of_four() -> None:
    parts = [
        part(0.25, 3.0, -1.0),
        part(0.5, 7.0, 0.5),
        part(0.125, 2.0, -4.0),
        part(2.0, 0.0, 1.0),
    ]
    ranks = [combine(parts[:2]), combine(parts[2:])]
    assert combine(ranks) == combine(parts) == {"a": 2.875, "highest": 7.0, "lowest": -4.0}
    assert [m.reduction for m in combine(ranks).values()] == ["mean", "max", "min"]


def test_of_single_samples_every_element_is_a_metric() -> None:
    def told(values: list[float]) -> LossMetrics:
        tensor = torch.tensor(values)
        return {
            "trace/tokens": tensor,
            "trace/ratio/max": Extreme.largest(tensor),
            "trace/ratio/min": Extreme.smallest(tensor),
        }

    found = combine([combine([told([1.0, 2.0])]), combine([told([3.0, 0.5])])])
    assert take_traced(found) == {
        1: {"tokens": 4.0, "ratio/max": 3.0, "ratio/min": 1.0},
        2: {"tokens": 2.5, "ratio/max": 2.0, "ratio/min": 0.5},
    }
    assert found == {}


def measured(budget: int) -> tuple[int, StepMetrics]:
    """Micro-batches of one pass of a real model, and what the loss measured in it."""
    loss = build("grpo").loss
    backend = LocalBackend(make_model(), train_config(tokens_per_microbatch=budget), total_steps=10)
    samples = make_samples(LENGTHS)
    totals = Totals.of(pack(samples, 4096), 32)
    batches = pack(samples, budget)
    return len(batches), backend.forward_backward(batches, loss, totals)


def test_the_metrics_of_a_loss_do_not_depend_on_how_the_batch_is_cut() -> None:
    alone, whole = measured(4096)
    several, cut = measured(30)
    assert alone == 1 and several >= 3
    assert cut == pytest.approx(whole, rel=1e-4, abs=1e-6)
    kinds = {name: metric.reduction for name, metric in whole.items()}
    assert kinds == {name: metric.reduction for name, metric in cut.items()}
    assert {name for name, kind in kinds.items() if kind is not Reduction.MEAN} == {
        "policy/ratio/max",
        "mismatch/max",
        "mismatch/ratio/max",
        "mismatch/ratio/min",
    }


def test_optimizer_steps_are_averaged_where_they_have_the_metric() -> None:
    first = {
        "a": Metric(1.0),
        "highest": Metric(5.0, Reduction.MAX),
        "lowest": Metric(5.0, Reduction.MIN),
    }
    second = {
        "a": Metric(2.0),
        "highest": Metric(3.0, Reduction.MAX),
        "lowest": Metric(3.0, Reduction.MIN),
        "late": Metric(7.0),
    }
    found = average([first, second])
    assert found == {"a": 1.5, "highest": 5.0, "lowest": 3.0, "late": 7.0}
    assert {type(value) for value in found.values()} == {float}  # as they are logged
    assert average([]) == {}


def test_a_bad_optimizer_step_of_the_policy_is_counted_once_and_a_critics_as_a_share() -> None:
    reports = [StepReport(0.0, 1e-3), StepReport(math.nan, 1e-3), StepReport(2.0, 2e-3)]
    policy = average([report.metrics() for report in reports])
    assert (policy["train/skipped"], policy["train/empty"]) == (1.0, 1.0)
    assert math.isnan(policy["train/grad_norm"])
    assert policy["train/learning_rate"] == pytest.approx(4e-3 / 3)
    critic = average([report.metrics("critic") for report in reports])
    assert (critic["critic/skipped"], critic["critic/empty"]) == pytest.approx((1 / 3, 1 / 3))


def test_memory_that_ran_out_in_some_optimizer_steps() -> None:
    reports = [
        StepReport(1.0, 1e-3, OutOfMemory(times=1, old_budget=64, new_budget=32)),
        StepReport(1.0, 1e-3),
        StepReport(1.0, 1e-3, OutOfMemory(times=2, old_budget=32, new_budget=8)),
    ]
    for role in ("train", "critic"):
        found = average([report.metrics(role) for report in reports])
        assert found[f"{role}/oom"] == 2.0
        assert (found[f"{role}/oom_budget/max"], found[f"{role}/oom_budget/min"]) == (64.0, 8.0)


def test_a_metric_keeps_its_kind_when_it_is_copied_and_sent() -> None:
    metric = Metric(2.5, Reduction.MAX)
    for other in (copy.copy(metric), copy.deepcopy(metric), wire.unpack(wire.pack(metric))):
        assert other == 2.5 and other.reduction is Reduction.MAX
