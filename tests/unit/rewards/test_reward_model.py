"""Rewards from a reward model, and rewards that count relative to what was seen before."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.tiny_runs import DATA, digest, lines
from helpers.toy_scalars import make_classifier
from helpers.toys import SilentView, make_samples, run
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.run import train_config as run_config
from reinforge.config.model import ModelConfig
from reinforge.config.rewards import RewardConfig
from reinforge.config.schema import Config
from reinforge.core.backend import State
from reinforge.core.errors import InputError
from reinforge.core.sample import Row
from reinforge.models.load import load_scalar
from reinforge.plan.preflight import preflight
from reinforge.rewards.build import build_rewards
from reinforge.rewards.model import model_reward
from reinforge.rewards.normalization import RewardNormalization
from reinforge.rewards.rule import NormalizationRule, RunningMoments

CHAT = (
    "{% for m in messages %}{{ '<|bos|>' + m['role'] + ': ' + m['content'] + '<|eos|>' }}{%"
    " endfor %}"
)
TEXTS = ["4", "five", "", "a long answer, with <|eos|> in it"]


@pytest.fixture(scope="session")
def judge(tiny_dir: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A reward model with random weights, written by transformers alone, with the tokenizer of the
    tiny model.
    """
    from transformers import AutoTokenizer

    path = tmp_path_factory.mktemp("judge") / "model"
    make_classifier(vocab_size=300).save_pretrained(path)
    AutoTokenizer.from_pretrained(tiny_dir).save_pretrained(path)
    return str(path)


def plain_scores(path: str, rows: list[list[int]]) -> list[float]:
    """By transformers alone, in one padded batch."""
    from transformers import AutoModelForSequenceClassification

    module = AutoModelForSequenceClassification.from_pretrained(path)
    longest = max(map(len, rows))
    mask = torch.arange(longest)[None] < torch.tensor([len(row) for row in rows])[:, None]
    with torch.no_grad():
        return (
            module(
                torch.tensor([row + [0] * (longest - len(row)) for row in rows]),
                attention_mask=mask.long(),
            )
            .logits[:, 0]
            .tolist()
        )


def test_text_is_prompt_completion_and_end(judge: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(judge)
    reward = model_reward({"path": judge, "dtype": "float32"}, "rewards.0.options").load("cpu")
    found = reward(["2+2="] * 4, TEXTS)
    rows = [
        tokenizer("2+2=" + t, split_special_tokens=True)["input_ids"] + [tokenizer.eos_token_id]
        for t in TEXTS
    ]
    # what a completion spells is text, never a control token
    assert [reward.ids("2+2=", t) for t in TEXTS] == rows
    assert (
        found == pytest.approx(plain_scores(judge, rows), abs=1e-5)
        and statistics.stdev(found) > 0.5
    )
    assert reward(["2+2="] * 4, TEXTS) == found
    tight = model_reward(
        {"path": judge, "batch_tokens": 8, "dtype": "float32"}, "rewards.0.options"
    ).load("cpu")
    assert tight(["2+2="] * 4, TEXTS) == pytest.approx(found, abs=1e-5)


def test_chat_is_the_reward_models_own_template(judge: str, tmp_path: Path) -> None:
    model = load_scalar(ModelConfig(path=judge, device="cpu"))
    model.tokenizer.chat_template = CHAT
    model.save(tmp_path / "chat")
    reward = model_reward(
        {"path": str(tmp_path / "chat"), "dtype": "float32"}, "rewards.0.options"
    ).load("cpu")
    question = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2="}]
    rows = [
        model.tokenizer.apply_chat_template(
            [*question, {"role": "assistant", "content": t}], return_dict=False
        )
        for t in TEXTS[:3]
    ]
    assert [reward.ids(question, t) for t in TEXTS[:3]] == rows
    assert reward([question] * 3, TEXTS[:3]) == pytest.approx(plain_scores(judge, rows), abs=1e-5)
    assert reward.ids("2+2=", "4") == model.tokenizer.apply_chat_template(
        [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}],
        return_dict=False,
    )
    text = model_reward(
        {"path": str(tmp_path / "chat"), "template": "text"}, "rewards.0.options"
    ).load("cpu")
    assert text.ids("2+2=", "4") == [
        *model.tokenizer("2+2=4")["input_ids"],
        model.tokenizer.eos_token_id,
    ]
    with pytest.raises(InputError, match="chat messages, but data.chat is never"):
        text([question], ["4"])
    literal = reward.ids("2+2=", "<|eos|>")
    assert literal.count(model.tokenizer.eos_token_id) == 2  # one per turn: the template's own


def test_what_is_wrong_is_told(judge: str, tiny_dir: str) -> None:
    def build(**options: Any) -> Any:
        return build_rewards([RewardConfig(name="model", options=options)], device="cpu")

    with pytest.raises(InputError, match=r"rewards.0.options: which reward model\?"):
        build()
    with pytest.raises(InputError, match="no option pth.*path, revision"):
        build(pth=judge)
    with pytest.raises(InputError, match="'cht' is no template.*chat"):
        build(path=judge, template="cht")
    with pytest.raises(
        InputError, match=r"rewards.0.options.path: .*has no head that gives a score"
    ):
        build(path=tiny_dir)
    with pytest.raises(InputError, match="no chat template"):
        build(path=judge, template="chat")
    with pytest.raises(InputError, match=r"has 203 tokens, more than the 128"):
        run(build(path=judge)[0].score([Row("r", "p")], ["x" * 201]))
    with pytest.raises(InputError, match="Did you mean model"):
        build_rewards([RewardConfig(name="modle")])
    # a check loads nothing
    assert (
        build_rewards([RewardConfig(name="model", options={"path": judge})])[0].function.model
        is None
    )


def test_plan_checks_the_path(make: Callable[..., Config], judge: str, tmp_path: Path) -> None:
    ok = preflight(make("run", "grpo", rewards=[{"name": "model", "options": {"path": judge}}]))
    assert not any("rewards" in e for e in ok.errors)
    bad = preflight(
        make(
            "run", "grpo", rewards=[{"name": "model", "options": {"path": str(tmp_path / "none")}}]
        )
    )
    assert any("rewards.0.options.path" in e and "no such" in e for e in bad.errors)
    none = preflight(make("run", "grpo", rewards=[{"name": "model"}]))
    assert any("rewards.0.options" in e for e in none.errors)
    critic = preflight(make("run", "ppo", critic={"path": str(tmp_path / "none")}))
    assert any("critic.path" in e and "no such" in e for e in critic.errors)


# runs


def test_the_four_models_of_rlhf_in_one_run(make: Callable[..., Config], judge: str) -> None:
    """Policy, critic, reference and reward model: rewards are the reward model's, nothing is
    journalled, the same seed gives the same bits.
    """
    sections: dict[str, Any] = {
        "critic": {"path": judge},
        "rewards": [
            {"name": "model", "options": {"path": judge}, "center": "running", "clip": [-2, 2]}
        ],
    }
    done = []
    for name in ("a", "b"):
        cfg = make(
            name,
            "ppo",
            "algorithm.kl.coefficient=0.05",
            "run.log.samples_every=1",
            "run.log.samples=16",
            **sections,
        )
        run_config(cfg, CallerObjects(data=DATA), SilentView())
        done.append((digest(cfg), lines(cfg)))
    assert done[0][0] == done[1][0]
    first = done[0][1][0]
    assert "critic/loss" in first and "policy/kl" in first and abs(first["critic/value"]) > 0.01
    shown = [s for s in lines(cfg, "samples.jsonl") if s["step"] == 1]
    reward = model_reward({"path": judge}, "rewards.0.options").load("cpu")
    want = plain_scores(judge, [reward.ids(s["prompt"], s["completion"]) for s in shown])
    assert len(shown) == 16 and [s["components"]["model"] for s in shown] == pytest.approx(
        want, abs=1e-5
    )
    assert [s["reward"] for s in shown] == pytest.approx(
        [min(max(w, -2.0), 2.0) for w in want], abs=1e-5
    )  # clipped; nothing to centre by yet
    assert first["reward/model"] == pytest.approx(statistics.fmean(want), abs=1e-5)
    assert not (Path(cfg.run.dir) / "journal.jsonl").exists()


# what a reward counts


def test_moments_are_exact_however_they_are_cut() -> None:
    values = [1e6 + x for x in (0.5, 1.25, -3.0, 2.0, 7.75, 0.0, 0.25)]
    for cuts in ([7], [1, 6], [3, 0, 4], [1] * 7):
        seen = RunningMoments()
        start = 0
        for n in cuts:
            seen.add(values[start : start + n])
            start += n
        assert (seen.n, seen.mean) == (7, pytest.approx(statistics.fmean(values), abs=1e-9))
        assert seen.std == pytest.approx(statistics.stdev(values), rel=1e-9)
    assert RunningMoments().std == 0 and RunningMoments(1, 5.0, 0.0).std == 0


def test_rules_by_hand() -> None:
    seen = RunningMoments()
    seen.add([1.0, 3.0])  # mean 2, std sqrt(2)
    assert NormalizationRule().apply(5.0, seen) == 5.0
    assert NormalizationRule(center=True).apply(5.0, seen) == 3.0
    assert NormalizationRule(scale=True).apply(5.0, seen) == pytest.approx(5 / 2**0.5)
    assert NormalizationRule(center=True, scale=True, clip=(-2.0, 2.0)).apply(5.0, seen) == 2.0
    assert NormalizationRule(center=True, scale=True, clip=(-2.0, 2.0)).apply(-5.0, seen) == -2.0
    assert (
        NormalizationRule(center=True, scale=True).apply(5.0, RunningMoments()) == 5.0
    )  # nothing seen yet
    assert (
        NormalizationRule(scale=True).apply(5.0, RunningMoments(2, 4.0, 0.0)) == 5.0
    )  # a constant so far


def test_running_statistics_move_once_per_step_and_survive_a_resume() -> None:
    running = RewardNormalization(
        {"a": NormalizationRule(center=True, scale=True), "b": NormalizationRule(clip=(0.0, 1.0))}
    )
    assert running({"a": 4.0, "b": 9.0, "c": 7.0, "d": None}) == {
        "a": 4.0,
        "b": 1.0,
        "c": 7.0,
        "d": None,
    }
    samples = [s.with_(rewards={"a": float(i), "b": 3.0}) for i, s in enumerate(make_samples())]
    running.observe([*samples, samples[0].with_(rewards={"a": None})])
    assert running({"a": 4.0})["a"] == pytest.approx((4 - 1.5) / statistics.stdev([0, 1, 2, 3]))
    other = RewardNormalization(running.rules)
    other.load(State({}, json.loads(json.dumps(running.state().meta))))  # as a checkpoint keeps it
    other.observe(samples)
    running.observe(samples)
    assert (
        other.seen == running.seen
        and list(running.seen) == ["a"]
        and other({"a": 1.23}) == running({"a": 1.23})
    )


def test_a_run_centres_by_what_came_before(make: Callable[..., Config]) -> None:
    """The first step counts as scored; the second less the mean of the first; the component's
    metric stays the score.
    """
    cfg = make(
        "run",
        "grpo",
        "train.steps=3",
        rewards=[{"name": "helpers.toy_rewards:odd", "center": "running"}],
    )
    run_config(cfg, CallerObjects(data=DATA), SilentView())
    one, two, three = lines(cfg)
    assert one["reward/mean"] == pytest.approx(one["reward/odd"])
    assert two["reward/mean"] == pytest.approx(two["reward/odd"] - one["reward/odd"], abs=1e-9)
    assert three["reward/mean"] == pytest.approx(
        three["reward/odd"] - (one["reward/odd"] + two["reward/odd"]) / 2, abs=1e-9
    )


def test_a_clip_without_room_is_refused(make: Callable[..., Config]) -> None:
    with pytest.raises(InputError, match="leaves nothing between"):
        make("run", "grpo", rewards=[{"name": "helpers.toy_rewards:odd", "clip": [1, 1]}])
