"""The reward `process`: verdicts are those of plain transformers, stand at the tokens that end
steps, and a policy trains with them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from helpers.offline_runs import small_model
from helpers.tiny_runs import digest, lines
from helpers.toys import SilentView
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.run import train_config
from reinforge.config.load import config_from_dict
from reinforge.config.model import ModelConfig
from reinforge.config.rewards import RewardConfig
from reinforge.core.engine import Completion, Sampling
from reinforge.core.env import RolloutContext
from reinforge.core.errors import InputError
from reinforge.core.sample import Row, Stop
from reinforge.models.load import load_model
from reinforge.models.scalar import ScalarModel
from reinforge.rewards.build import build_rewards
from reinforge.rewards.process_reward import lines_of, process_reward
from reinforge.rollout.players.single_turn import SingleTurn

TEXTS = ["1+1=2\n2+2=4\n", "one line", "a\n\nbc\nd", ""]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A policy, and a process reward model on another trunk of its shape."""
    folder = tmp_path_factory.mktemp("models")
    policy = small_model(folder)
    judge = ScalarModel.from_causal(load_model(ModelConfig(path=policy, device="cpu"), None))
    torch.manual_seed(3)
    assert judge.value_head is not None
    torch.nn.init.normal_(judge.value_head.weight, std=2.0)
    judge.save(folder / "judge")
    return policy, str(folder / "judge")


def test_verdicts_are_those_of_transformers(models: tuple[str, str]) -> None:
    """Read at the newline of each line, one line after the other, as sigma(score) of an ordinary
    checkpoint.
    """
    reward = process_reward({"path": models[1]}, "rewards.0.options").load("cpu")
    found = reward.verdicts(["go: "] * 4, TEXTS)
    plain = AutoModelForSequenceClassification.from_pretrained(models[1])
    tokenizer = AutoTokenizer.from_pretrained(models[1])
    assert reward.renderer is not None
    for text, verdicts in zip(TEXTS, found, strict=True):
        ids = reward.renderer.prompt(Row("r", "go: "))
        assert [end for end, _ in verdicts] == [end for end, _ in lines_of(text)]
        for (_, line), (_, verdict) in zip(lines_of(text), verdicts, strict=True):
            ids = ids + tokenizer.encode(line + "\n", add_special_tokens=False)
            with torch.no_grad():
                want = torch.sigmoid(
                    plain.score(plain.model(torch.tensor([ids])).last_hidden_state)[0, -1, 0]
                )
            assert verdict == pytest.approx(float(want), abs=1e-5)
    assert len({round(v, 6) for verdicts in found for _, v in verdicts}) > 3
    values = [v for _, v in found[0]]
    assert reward(["go: "] * 4, TEXTS) == [
        pytest.approx(min(values)),
        found[1][0][1],
        pytest.approx(min(v for _, v in found[2])),
        0.0,
    ]
    assert [v for _, v in reward.steps(["go: "] * 4, TEXTS)[0]] == [
        pytest.approx(v / 2) for v in values
    ]


class Typist:
    """An engine that writes given texts, a character per token."""

    async def generate(
        self, tokens: list[int], params: Sampling, *, key: int, n: int = 1
    ) -> list[Completion]:
        return [
            Completion(
                [ord(c) for c in text] + [0],
                [0.0] * (len(text) + 1),
                [0] * (len(text) + 1),
                Stop.EOS,
            )
            for text in TEXTS[:n]
        ]


def test_rewards_stand_at_the_ends_of_steps(models: tuple[str, str]) -> None:
    rewards = build_rewards(
        [RewardConfig(name="process", weight=2.0, options={"path": models[1], "spread": "sum"})],
        device="cpu",
    )

    def decode(tokens: Any) -> str:
        return "".join(chr(t) for t in tokens if t)

    def group(purpose: str) -> Any:
        rollout = SingleTurn(
            Typist(),
            lambda row: [1, 2, 3],
            decode,
            rewards,
            Sampling(20),
            n=4,
            seed=0,
            purpose=purpose,
        )  # type: ignore[arg-type]
        return asyncio.run(rollout(Row("r", "go: "), RolloutContext("g")))

    scorer: Any = rewards[0].function
    verdicts = scorer.verdicts(["go: "] * 4, TEXTS)
    for sample, text, steps in zip(group("sample").samples, TEXTS, verdicts, strict=True):
        want = torch.zeros(len(sample.tokens))
        for end, verdict in steps:
            want[3 + end - 1] += 2 * verdict  # the character that is the newline, or the last one
        torch.testing.assert_close(sample.token_rewards, want)
        assert sample.reward == 0.0 and sample.rewards["process"] == pytest.approx(
            min([v for _, v in steps], default=0.0)
        ), text
    # where it is measured, one number
    for sample, steps in zip(group("eval").samples, verdicts, strict=True):
        assert sample.token_rewards is None and sample.reward == pytest.approx(
            2 * min([v for _, v in steps], default=0.0)
        )


@pytest.mark.parametrize("name", ["grpo", "reinforce_pp"])
def test_a_policy_trains_with_it_and_resumes_exactly(
    models: tuple[str, str], tmp_path: Path, name: str
) -> None:
    def run(folder: str, steps: int) -> Any:
        cfg = config_from_dict(
            {
                "model": {"path": models[0], "device": "cpu"},
                "algorithm": {"name": name, "group_size": 4},
                "data": {"source": "python"},
                "rewards": [{"name": "process", "options": {"path": models[1]}}],
                "rollout": {"max_new_tokens": 8, "kv_gib": 0.002},
                "train": {"steps": steps, "prompts_per_step": 4, "learning_rate": 1e-2},
                "run": {"dir": str(tmp_path / folder), "checkpoint": {"every": 0}},
            }
        )
        train_config(cfg, CallerObjects(data=[{"prompt": f"{i}:"} for i in range(8)]), SilentView())
        return cfg

    whole = run("whole", 6)
    run("cut", 2)
    assert digest(whole) == digest(run("cut", 6))
    seen = lines(whole)
    assert all(line["train/grad_norm"] > 0 for line in seen if "train/grad_norm" in line)


def test_settings_that_are_refused() -> None:
    for options, said in (
        ({}, "which process"),
        ({"path": "x", "spread": "most"}, "no spread"),
        ({"path": "x", "kind": 1}, "no option kind"),
    ):
        with pytest.raises(InputError, match=said):
            build_rewards([RewardConfig(name="process", options=options)])
    with pytest.raises(InputError, match="taken as they are"):
        build_rewards([RewardConfig(name="process", options={"path": "x"}, clip=(-1.0, 1.0))])
