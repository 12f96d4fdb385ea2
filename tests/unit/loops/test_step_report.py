"""What an optimizer step did, and what the optimizer steps of one training step come to."""

from __future__ import annotations

import math
import pickle

import pytest

from helpers.toys import train_config
from reinforge.backends.distributed import wire
from reinforge.cluster import transport
from reinforge.core.errors import StoppedByPolicy
from reinforge.core.report import OutOfMemory, StepReport
from reinforge.loops.step import TrainingStep
from reinforge.loops.troubles import NONFINITE, UNSCORED, BadSteps

FINE = StepReport(grad_norm=0.5, learning_rate=1e-3)
EMPTY = StepReport(grad_norm=0.0, learning_rate=1e-3)
BAD = StepReport(grad_norm=math.nan, learning_rate=1e-3)


def short(times: int, old: int, new: int) -> StepReport:
    return StepReport(0.5, 1e-3, OutOfMemory(times=times, old_budget=old, new_budget=new))


@pytest.mark.parametrize(
    ("norm", "skipped", "empty"),
    [(0.5, False, False), (0.0, False, True), (math.inf, True, False), (math.nan, True, False)],
)
def test_the_norm_says_whether_the_weights_moved(norm: float, skipped: bool, empty: bool) -> None:
    report = StepReport(grad_norm=norm, learning_rate=1e-3)
    assert (report.skipped, report.empty) == (skipped, empty)
    metrics = report.metrics()
    assert list(metrics) == [
        "train/grad_norm",
        "train/learning_rate",
        "train/skipped",
        "train/empty",
    ]
    assert (metrics["train/skipped"], metrics["train/empty"]) == (float(skipped), float(empty))


def test_a_critics_metrics_have_names_of_their_own() -> None:
    assert short(2, 4096, 1024).metrics("critic") == {
        "critic/grad_norm": 0.5,
        "critic/learning_rate": 1e-3,
        "critic/skipped": 0.0,
        "critic/empty": 0.0,
        "critic/oom": 2.0,
        "critic/oom_budget/max": 4096.0,
        "critic/oom_budget/min": 1024.0,
    }


def test_a_report_travels_between_ranks_and_actors_as_it_is() -> None:
    report = short(1, 64, 32)
    assert wire.unpack(wire.pack(report)) == report
    assert transport.unpack(transport.pack(report)) == report
    assert pickle.loads(pickle.dumps(report)) == report


def test_one_bad_optimizer_step_of_several_makes_a_bad_step() -> None:
    assert TrainingStep({}, policy=[FINE, BAD]).skipped
    assert TrainingStep({}, policy=[FINE], critic=[BAD]).skipped
    assert not TrainingStep({}, policy=[FINE], critic=[FINE]).skipped


def test_a_step_is_empty_where_the_policy_had_nothing_to_learn() -> None:
    assert TrainingStep({}, policy=[FINE, EMPTY]).empty
    assert TrainingStep({}).empty  # no group had signal
    assert not TrainingStep({}, policy=[FINE], critic=[EMPTY]).empty
    assert not TrainingStep({}, critic=[FINE]).empty  # the policy waits for its critic


def test_norms_are_averaged_over_the_policys_optimizer_steps() -> None:
    more = StepReport(grad_norm=1.5, learning_rate=1e-3)
    assert TrainingStep({}, policy=[FINE, more], critic=[BAD]).grad_norm == 1.0
    assert TrainingStep({}, critic=[BAD]).grad_norm is None


def test_memory_is_told_by_role() -> None:
    step = TrainingStep(
        {}, policy=[short(1, 64, 32), FINE, short(2, 32, 8)], critic=[short(1, 16, 8)]
    )
    assert step.out_of_memory() == {
        "train": OutOfMemory(times=2, old_budget=64, new_budget=8),
        "critic": OutOfMemory(times=1, old_budget=16, new_budget=8),
    }
    assert TrainingStep({}, policy=[FINE]).out_of_memory() == {}


def test_an_empty_step_between_two_bad_ones_does_not_end_the_row() -> None:
    bad_steps = BadSteps()
    for step in ([BAD], [EMPTY], [BAD]):
        bad_steps.observe(TrainingStep({}, policy=step))
    assert (bad_steps.count, bad_steps.kind) == (2, NONFINITE)
    bad_steps.observe(TrainingStep({}, policy=[FINE]))
    assert bad_steps.count == 0
    bad_steps.observe(TrainingStep({}, policy=[EMPTY], unscored=True))
    bad_steps.observe(TrainingStep({}, policy=[EMPTY]))
    assert (bad_steps.count, bad_steps.kind) == (0, "")
    assert UNSCORED != NONFINITE


@pytest.mark.parametrize(
    ("key", "coefficient", "value", "named"),
    [
        ("router_aux_loss", 1e30, 2.0, True),
        ("router_z_loss", 1e5, 30.0, True),
        ("router_aux_loss", 0.01, 2.0, False),
        ("router_aux_loss", 1e30, math.nan, False),  # the model is broken
        ("router_aux_loss", None, 2.0, False),  # of the model's own config, which we do not read
    ],
)
def test_a_loss_of_the_routers_that_is_huge_is_named_and_not_the_learning_rate(
    key: str, coefficient: float | None, value: float, named: bool
) -> None:
    train = train_config(**{key: coefficient})
    step = TrainingStep({f"train/{key}": value}, policy=[BAD])
    with pytest.raises(StoppedByPolicy) as caught:
        BadSteps(count=3).check(step, train)
    told = str(caught.value)
    assert told.startswith("3 steps in a row had a non-finite loss or gradient")
    assert ("Lower train.learning_rate, or" in told) == (not named)
    if named:
        assert coefficient is not None
        assert f"train.{key}={coefficient:g} makes a loss of {coefficient * value:g}." in told
        assert told.endswith(f" Lower train.{key}; 0.001 is usual.")
