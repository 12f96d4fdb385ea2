"""Every rule on the history of a real run that has its illness, and on runs that have none."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.histories import doctor_of, histories
from reinforge.config.doctor import DoctorConfig
from reinforge.watch.doctor.doctor import Doctor, ranked
from reinforge.watch.doctor.history import RunHistory
from reinforge.watch.doctor.learning import is_learning
from reinforge.watch.doctor.rules.rollouts import mismatch
from reinforge.watch.doctor.table import RULES
from reinforge.watch.doctor.trouble import Trouble

HEALTHY = [name for name, record in histories().items() if record["rule"] == "healthy"]
ILL = [name for name in histories() if name not in HEALTHY]
NOTES = {"solved"}  # no illness


def test_every_rule_has_a_run_a_key_and_a_place() -> None:
    kinds = [rule.kind for rule in RULES]
    assert {histories()[name]["rule"] for name in ILL} == set(kinds) - NOTES
    assert set(DoctorConfig.model_fields) == {*kinds, "tracker"}
    # what is explained stands below what explains it
    for place, rule in enumerate(RULES):
        assert rule.explains <= set(kinds[place + 1 :]), rule.kind


@pytest.mark.parametrize("name", ILL)
def test_a_run_with_an_illness_is_told_its_name_first(name: str) -> None:
    record = histories()[name]
    found = doctor_of(record).troubles(ended=True)
    first = found[0]
    assert first.kind == record["rule"]
    assert first.what and first.fix and first.because is None
    if first.knob is not None:
        assert first.knob.key in str(first.knob) and first.knob.value != first.knob.was


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_hears_nothing_at_any_step(name: str) -> None:
    record = histories()[name]
    for until in record["steps"]:
        alarms = [t.kind for t in doctor_of(record, until).troubles() if t.action != "note"]
        assert alarms == [], until
    assert [t.kind for t in doctor_of(record).troubles(ended=True) if t.action != "note"] == []


@pytest.mark.parametrize("name", histories())
def test_a_rule_without_its_data_says_nothing(name: str) -> None:
    """Whatever a run does not measure is left out, one metric after the other."""
    record = histories()[name]
    for missing in record["columns"]:
        columns = {n: c for n, c in record["columns"].items() if n != missing}
        doctor_of({**record, "columns": columns, "config": {}}).troubles(ended=True)
    bare = doctor_of({**record, "columns": {"train/skipped": 0.0}, "scores": {}})
    assert bare.troubles(ended=True) == []


def test_answers_that_are_cut_and_get_as_much_as_others_are_not_ill() -> None:
    """The history of a run with half of its answers cut, which get the mean, and then nothing."""
    record = histories()["healthy-grpo-0"]
    mean = record["columns"]["reward/mean"]
    cut = {**record["columns"], "response/truncated": 0.5, "response/truncated_reward": mean}
    assert doctor_of({**record, "columns": cut}).troubles(ended=True) == []
    cut["response/truncated_reward"] = 0.0
    [trouble] = doctor_of({**record, "columns": cut}).troubles(ended=True)
    assert trouble.kind == "truncation" and trouble.knob is not None
    assert (trouble.knob.key, trouble.knob.value) == ("rollout.max_new_tokens", 16)
    # answers that grew into the limit: that is what is wrong, and told by other rules
    cut["response/truncated"] = [0.0, *[0.5] * (len(mean) - 1)]
    assert doctor_of({**record, "columns": cut}).troubles(ended=True) == []


def test_no_run_at_all_has_no_trouble() -> None:
    assert Doctor().troubles(ended=True) == [] and Doctor().troubles() == []


def test_causes_stand_before_what_they_explain_and_notes_last() -> None:
    def trouble(kind: str, action: str = "warn") -> Trouble:
        return Trouble(kind, "", "", action=action)

    found = ranked(
        [
            trouble("collapse"),
            trouble("entropy_collapse"),
            trouble("slow_phase", "note"),
            trouble("learning_rate_high"),
            trouble("memory_growth"),
        ]
    )
    assert [(t.kind, t.because) for t in found] == [
        ("learning_rate_high", None),
        ("memory_growth", None),
        ("entropy_collapse", "learning_rate_high"),
        ("collapse", "learning_rate_high"),
        ("slow_phase", None),
    ]


def answer(name: str) -> tuple[str, list[str]]:
    verdict = is_learning(doctor_of(histories()[name]).history)
    return verdict.answer, list(verdict.reasons)


def said(name: str, words: str) -> bool:
    return any(words in reason for reason in answer(name)[1])


def test_a_loss_of_zero_is_explained() -> None:
    """Of a policy gradient it says nothing; what there is to say is said."""
    learns: dict[str, Any] = {name: answer(name)[0] for name in HEALTHY}
    assert learns["healthy-sft-0"] == "yes"
    assert said("healthy-grpo-0", "says nothing") and said("healthy-grpo-0", "a gradient in")
    assert not said("healthy-sft-0", "says nothing")
    assert is_learning(RunHistory()).answer == "too early to say"
    assert is_learning(RunHistory(), ended=True).answer == "too few steps to say"
    flat = RunHistory()
    flat.observe((n, {"train/skipped": 0.0, "train/loss": 1.0 + n % 2}) for n in range(40))
    assert is_learning(flat).answer == "not yet"
    assert is_learning(flat, ended=True).answer == "not clearly"
    constant = next(name for name in ILL if histories()[name]["rule"] == "constant_reward")
    assert answer(constant)[0] == "no" and said(constant, "a gradient in 0 of")


def test_what_is_not_finite_by_a_loss_of_the_routers_is_not_cured_by_the_learning_rate() -> None:
    doctor = Doctor({"train.learning_rate": 1e-3, "train.router_aux_loss": 1e30})
    for step in (1, 2, 3):
        doctor.observe(step, {"train/skipped": 1.0, "train/router_aux_loss": 2.0})
    found = doctor.troubles(ended=True)[0]
    assert found.kind == "nonfinite"
    assert found.fix.startswith("train.router_aux_loss=1e+30 makes a loss of 2e+30. Lower ")
    assert str(found.knob) == "train.router_aux_loss=0.001 (it is 1e+30)"
    usual = Doctor({"train.learning_rate": 1e-3, "train.router_aux_loss": 1e-3})
    usual.observe(1, {"train/skipped": 1.0, "train/router_aux_loss": 2.0})
    knob = usual.troubles(ended=True)[0].knob
    assert knob is not None and knob.key == "train.learning_rate"


@pytest.mark.parametrize(
    ("weight", "knob", "says"),
    [
        (None, "train.router_aux_loss=0.01 (it is 0)", "Balance the router's load"),
        (0.002, "train.router_aux_loss=0.02 (it is 0.002)", "Balance the router's load"),
        (0.05, "train.router_aux_loss=0.1 (it is 0.05)", "Balance the router's load"),
        (0.1, None, "train.router_aux_loss=0.1 is large: the balancing loss outweighs the task"),
        (1e3, None, "train.router_aux_loss=1000 is large: the balancing loss outweighs the task"),
    ],
)
def test_a_balancing_loss_is_raised_up_to_what_makes_sense(
    weight: float | None, knob: str | None, says: str
) -> None:
    doctor = Doctor({"train.router_aux_loss": weight})
    for step in range(1, 21):
        doctor.observe(step, {"train/skipped": 0.0, "experts/dead": 0.5})
    [found] = doctor.troubles(ended=True)
    assert found.kind == "dead_experts" and found.fix.startswith(says)
    assert (found.knob and str(found.knob)) == knob


def standing_still(scores: tuple[float, float], spread: float | None) -> Doctor:
    """Of 60 steps whose reward, entropy and length only swing, and an evaluation at either end."""
    doctor = Doctor({"train.learning_rate": 1e-6})

    def evaluate(step: int, value: float) -> None:
        bounds = {} if spread is None else {"low": value - spread, "high": value + spread}
        told = {f"eval/accuracy_{end}": bound for end, bound in bounds.items()}
        doctor.observe(step, {"eval/accuracy": value, **told})

    evaluate(0, scores[0])
    for step in range(1, 61):
        swing = {name: 1.0 + step % 2 for name in ("policy/entropy", "response/length")}
        line = {"train/skipped": 0.0, "train/grad_norm": 0.5, "reward/unscored": 0.0}
        doctor.observe(step, {**line, **swing, "reward/mean": 0.25 + 0.1 * (step % 2)})
    evaluate(60, scores[1])
    return doctor


@pytest.mark.parametrize(
    ("scores", "spread", "learns", "training"),
    [
        ((0.2, 0.6), 0.1, "yes", ": hardly moves, but evaluation does, and counts more"),
        ((0.5, 0.55), 0.1, "not clearly", ": no more than chance"),
        ((0.5, 0.51), None, "not clearly", ": no more than chance"),
        ((0.6, 0.2), 0.1, "no", ": no more than chance"),
    ],
)
def test_an_answer_and_what_stands_beside_it_do_not_contradict_each_other(
    scores: tuple[float, float], spread: float | None, learns: str, training: str
) -> None:
    """Who learns hears neither of no more than chance nor that nothing moves."""
    doctor = standing_still(scores, spread)
    verdict = is_learning(doctor.history, ended=True)
    assert verdict.answer == learns
    evaluated, trained = verdict.reasons[:2]
    assert trained.startswith("reward/mean ") and trained.endswith(training)
    assert evaluated.endswith(": without an interval this may be chance") == (spread is None)
    nothing_moves = "learning_rate_low" in [t.kind for t in doctor.troubles(ended=True)]
    assert nothing_moves == (learns == "not clearly")


@pytest.mark.parametrize(("ess", "ill"), [(0.998, False), (0.99, True), (None, True)])
def test_a_difference_that_leaves_all_samples_their_weight_is_no_illness(
    ess: float | None, ill: bool
) -> None:
    """A hybrid in bfloat16 has 0.034 nats between engine and trainer."""
    history = RunHistory({})
    line = {"train/skipped": 0.0, "mismatch/mean": 0.034, "mismatch/outside_2x": 0.0}
    if ess is not None:
        line["mismatch/ess"] = ess
    history.observe((step, line) for step in range(1, 31))
    found = mismatch(history)
    assert (found is not None) == ill and (found is None or found.kind == "mismatch")
