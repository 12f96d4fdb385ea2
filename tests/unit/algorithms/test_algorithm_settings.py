"""How the parts of an algorithm get their settings, and functions of a user's in place of names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from reinforge.algorithms.algorithm import Algorithm
from reinforge.algorithms.build import build
from reinforge.algorithms.losses.policy import PolicyLoss
from reinforge.algorithms.settings import settings_of
from reinforge.backends.microbatch import combine
from reinforge.build.algorithm import algorithm_of
from reinforge.config.algorithm import AlgorithmConfig
from reinforge.config.schema import Config
from reinforge.core.backend import TrainedTokens
from reinforge.core.batch import Batch, Totals
from reinforge.core.errors import InputError
from reinforge.core.sample import Sample
from reinforge.plan.checks import run_checks


def samples_of(*rewards: float, length: int = 2) -> list[Sample]:
    return [
        Sample.from_tokens(
            f"s{i}", [1] * (length + 1), [False] + [True] * length, group="g", reward=r
        )
        for i, r in enumerate(rewards)
    ]


def loss_of(
    algorithm: Algorithm, logprobs: list[float], old: list[float], batch: Batch
) -> tuple[float, dict[str, float], list[float]]:
    leaf = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    lengths = batch.trained_lengths()
    streams = {k: v.double() for k, v in batch.streams.items()} | {
        "old": torch.tensor(old, dtype=torch.float64)
    }
    loss, metrics = algorithm.loss(
        TrainedTokens(leaf, None, batch.sequence, lengths, lengths[batch.sequence], streams),
        Totals.of([batch], 8),
    )
    loss.backward()
    assert leaf.grad is not None
    return loss.item(), dict(combine([metrics])), leaf.grad.tolist()


# settings


def test_clips_reach_the_surrogate_and_follow_it() -> None:
    assert settings_of(
        build("grpo", clip_low=0.1, clip_delta=4.0, clip_dual=3.0).loss.surrogate
    ) == {
        "low": 0.1,
        "high": 0.2,
        "dual": 3.0,
        "delta": 4.0,
    }  # type: ignore[attr-defined]
    assert settings_of(build("gspo", clip_high=0.01).loss.surrogate) == {"low": 3e-4, "high": 0.01}  # type: ignore[attr-defined]
    other = build("gspo", surrogate="ppo_clip")  # the row's range is of its own surrogate
    assert (other.options.clip_low, other.options.clip_high) == (0.2, 0.2)
    assert build("cispo", settings={"cap": 3.0}).loss.surrogate.keywords == {"cap": 3.0}  # type: ignore[attr-defined]


def test_options_go_to_whichever_part_takes_them() -> None:
    algorithm = build(
        "sapo",
        correction="seq_tis",
        settings={"tau_negative": 2.0, "geometric": True, "clamp": 5.0},
        cap=3.0,
        selection="top_entropy",
    )
    loss = algorithm.loss
    assert isinstance(loss, PolicyLoss)
    assert settings_of(loss.surrogate)["tau_negative"] == 2.0 and settings_of(loss.correction) == {
        "cap": 3.0,
        "floor": 0.0,
        "geometric": True,
    }
    assert (
        settings_of(loss.kl) == {"clamp": 5.0}
        and loss.selected == "keep"
        and algorithm.needs == {"entropy"}
    )
    both = build("cispo", correction="tis", settings={"cap": 4.0}).loss
    assert settings_of(both.surrogate)["cap"] == settings_of(both.correction)["cap"] == 4.0  # type: ignore[attr-defined]
    own = build("cispo", correction="tis", settings={"cap": 4.0}, cap=1.5).loss
    assert settings_of(own.surrogate)["cap"] == 4.0 and settings_of(own.correction)["cap"] == 1.5  # type: ignore[attr-defined]


def test_a_selections_first_setting_by_its_own_name() -> None:
    assert (
        settings_of(
            build("grpo", selection="top_entropy", settings={"top_entropy": 0.4}).selection
        )["share"]
        == 0.4
    )  # type: ignore[arg-type]
    assert (
        settings_of(build("grpo", selection="top_entropy", settings={"share": 0.4}).selection)[
            "share"
        ]
        == 0.4
    )  # type: ignore[arg-type]
    assert (
        settings_of(
            build("dapo", selection="off_policy_mask", settings={"off_policy_mask": 0.1}).selection
        )["drift"]
        == 0.1
    )  # type: ignore[arg-type]
    assert build("dapo", selection="off_policy_mask").needs == {"old"}


@pytest.mark.parametrize(
    ("name", "use"), [("clip_cov", "drop"), ("kl_cov", "penalise"), ("grpo", "keep")]
)
def test_what_selected_tokens_are_for(name: str, use: str) -> None:
    assert build(name).loss.selected == use  # type: ignore[attr-defined]
    assert build(name, selection="top_entropy", selected="drop").loss.selected == "drop"  # type: ignore[attr-defined]


def test_the_clip_of_advantages_comes_last() -> None:
    batch = Batch.pack(samples_of(0.0, 1.0, 8.0))
    build("dr_grpo", advantage_clip=2.5).advantages([batch])
    assert batch.streams["advantages"].tolist() == [-2.5, -2.5, -2.0, -2.0, 2.5, 2.5]


def test_only_entropy_chosen_tokens_train() -> None:
    """Two groups' worth of tokens, entropies 0.1 to 0.6, a third kept: the two highest have a
    gradient.
    """
    samples = [
        s.with_(streams={"entropy": torch.tensor([0.0, *e])})
        for s, e in zip(
            samples_of(0.0, 1.0, 2.0), ([0.1, 0.6], [0.2, 0.5], [0.3, 0.4]), strict=True
        )
    ]
    batch = Batch.pack(samples)
    algorithm = build(
        "dr_grpo", selection="top_entropy", settings={"top_entropy": 1 / 3}, reduce="token_mean"
    )
    algorithm.advantages([batch])
    assert batch.streams["selected"].tolist() == [0, 1, 0, 1, 0, 0]
    _, metrics, gradient = loss_of(algorithm, [-1.0] * 6, [-1.0] * 6, batch)
    # the second has A = 0
    assert gradient == pytest.approx([0, 1 / 6, 0, 0, 0, 0]) and metrics[
        "policy/selected"
    ] == pytest.approx(1 / 3)


def test_vapo_counts_the_likelihood_of_what_was_right() -> None:
    """Rewards 1 and 0 with two tokens each and values 0: N / N+ = 2 at the tokens of the first."""
    samples = [s.with_(streams={"values": torch.zeros(3)}) for s in samples_of(1.0, 0.0)]
    batch = Batch.pack(samples)
    build("vapo").advantages([batch])
    assert batch.streams["positive"].tolist() == [2, 2, 0, 0] and batch.streams[
        "returns"
    ].tolist() == [1, 1, 0, 0]


def test_needs_and_old() -> None:
    assert build("grpo").needs == build("grpo").loss.needs == frozenset()
    assert build("grpo", updates=2).needs == build("grpo", old="recompute").needs == {"old"}
    assert (
        build("grpo", updates=2, old="engine").needs == frozenset()
        and build("grpo", old="engine").loss.engine_old
    )  # type: ignore[attr-defined]
    assert build("grpo", kl_coefficient=0.1).loss.needs == {"reference"}
    assert (
        build("reinforce_pp").loss.needs == frozenset()
        and build("reinforce_pp", kl_coefficient=0.0).needs == frozenset()
    )
    assert (
        build("grpo", entropy=0.1).loss.entropy_gradient and not build("grpo").loss.entropy_gradient
    )
    assert build("grpo", entropy_target=0.3).loss.entropy_gradient


def test_options_change_what_is_computed() -> None:
    batch = Batch.pack(samples_of(0.0, 1.0))
    build("dr_grpo").advantages([batch])
    logprobs = [-1.0, -2.0, -1.5, -0.5]
    old = [-1.3, -2.0, -1.9, -0.4]
    tight = loss_of(build("dr_grpo", clip_low=0.01, clip_high=0.01), logprobs, old, batch)[0]
    wide = loss_of(build("dr_grpo", clip_low=0.99, clip_high=9.0), logprobs, old, batch)[0]
    expected = (
        0.5 * (2.718281828459045**0.3 + 1)
        - 0.5 * (2.718281828459045**0.4 + 2.718281828459045**-0.1)
    ) / 16
    assert wide == pytest.approx(expected) and tight != pytest.approx(wide)


# functions of a user's


SOURCE = """
import torch

def advantage(rollouts, options, *, factor=1.0):
    return factor * rollouts.rewards[rollouts.sequence]

advantage.needs = frozenset({"old"})

def surrogate(logprobs, old, advantages, sequence, *, power=1):
    return -advantages * logprobs * power, {"seen": advantages}

def correction(trainer, behaviour, sequence):
    return torch.full_like(trainer, 0.5), {}

def reduce(tokens, totals):
    return torch.full_like(tokens.logprobs.detach(), 1.0)

def kl(logprobs, reference):
    return (logprobs - reference) ** 4

def first(rollouts, *, how_many=1):
    return (torch.arange(len(rollouts.sequence)) < how_many).float()
"""


def test_every_part_may_be_a_function_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    parts = {key: f"{file}:{key}" for key in ("advantage", "surrogate", "reduce")}
    cfg = AlgorithmConfig.model_validate(
        {
            "name": "grpo",
            **parts,
            "selection": f"{file}:first",
            "correction": {"name": f"{file}:correction"},
            "options": {"factor": 2.0, "power": 3, "how_many": 3},
            "kl": {"estimator": f"{file}:kl", "coefficient": 0.1},
        }
    )
    algorithm = algorithm_of(cfg, 8)
    assert algorithm.needs == {"old", "reference"}
    batch = Batch.pack(
        [s.with_(streams={"reference": torch.zeros(3)}) for s in samples_of(1.0, 2.0)]
    )
    algorithm.advantages([batch])
    assert batch.streams["advantages"].tolist() == [2, 2, 4, 4] and batch.streams[
        "selected"
    ].tolist() == [1, 1, 1, 0]
    loss, metrics, _ = loss_of(algorithm, [-1.0] * 4, [-1.0] * 4, batch)
    assert (
        loss == pytest.approx(0.5 * 3 * (2 + 2 + 4) + 4 * 0.1 * 0.5 * 1.0)
        and metrics["policy/seen"] == 3.0
    )


def test_users_own_functions_in_python() -> None:
    def advantage(rollouts: Any, options: Any) -> torch.Tensor:
        return rollouts.rewards[rollouts.sequence] * options.eps

    def surrogate(logprobs: Any, old: Any, advantages: Any, sequence: Any) -> Any:
        return -3 * advantages * logprobs, {}

    algorithm = build(
        "grpo", advantage=advantage, surrogate=surrogate, eps=0.5, reduce="sequence_sum"
    )
    batch = Batch.pack(samples_of(4.0))
    algorithm.advantages([batch])
    assert (
        batch.streams["advantages"].tolist() == [2.0, 2.0]
        and batch.streams["advantages"].dtype == torch.float32
    )
    assert loss_of(algorithm, [-1.0, -2.0], [-1.0, -2.0], batch)[0] == pytest.approx(18.0)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (
            lambda r: r.rewards,
            r"returned shape \(2,\), not a tensor of one value per trained token, \(4,\)",
        ),
        (lambda r: 1.0, "returned a float"),
        (lambda r: r.rewards[r.sequence] / 0, "not finite"),
        (lambda r: {"advantages": r.rewards[r.sequence], "returns": 0}, "returned a int"),
    ],
)
def test_what_an_advantage_returns_is_checked(returned: Callable[[Any], Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        build("grpo", advantage=lambda rollouts, options: returned(rollouts)).advantages(
            [Batch.pack(samples_of(1.0, 2.0))]
        )


def test_plan_names_what_no_part_takes(tmp_path: Path) -> None:
    """Before a model is loaded: a setting that nothing reads is an error, a biased choice a
    warning.
    """
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{i}+{i}=", "answer": "{2 * i}"}}\n' for i in range(4)))
    raw = {
        "model": {"path": "nowhere"},
        "data": {"source": str(rows)},
        "rewards": [{"name": "exact_number"}],
        "train": {"steps": 1},
        "run": {"dir": "r"},
    }
    wrong = run_checks(
        Config.model_validate(
            {**raw, "algorithm": {"name": "ppo", "options": {"gama": 1.0}}, "critic": {}}
        )
    )
    assert any("algorithm.options.gama" in e and "Did you mean gamma?" in e for e in wrong.errors)
    biased = run_checks(
        Config.model_validate(
            {**raw, "algorithm": {"name": "grpo", "kl": {"coefficient": 0.1, "estimator": "k1"}}}
        )
    )
    assert any("zero expected gradient" in w for w in biased.warnings)
