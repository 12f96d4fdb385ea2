"""What the answers of a step have in common."""

from __future__ import annotations

import pytest
import torch

from reinforge.core.row import Row
from reinforge.core.sample import Group, Sample, Stop
from reinforge.rollout.answers import answer_metrics


def group(prompt: str, *answers: tuple[str, int, float | None], cut: int = 0) -> Group:
    """Answers are (text, tokens, reward); the first `cut` of them met the limit."""
    samples = [
        Sample(
            uid=f"{prompt}{i}",
            group=prompt,
            episode=f"{prompt}{i}",
            tokens=torch.zeros(length + 1, dtype=torch.long),
            trained=torch.arange(length + 1) > 0,
            logprobs=torch.zeros(length + 1),
            versions=torch.zeros(length + 1, dtype=torch.int32),
            reward=reward,
            stop=Stop.LENGTH if i < cut else Stop.EOS,
        )
        for i, (_, length, reward) in enumerate(answers)
    ]
    row = Row(id=prompt, prompt=prompt)
    return Group(row, samples, [text for text, _, _ in answers])


def test_one_text_for_every_prompt_is_counted_over_all_of_them() -> None:
    groups = [group(p, ("7", 1, 1.0), (p, 1, 0.0)) for p in "abcd"]
    assert answer_metrics(groups)["response/repeated"] == 0.5
    # of few prompts it says nothing: a task may have three answers
    assert "response/repeated" not in answer_metrics(groups[:3])


def test_the_reward_of_answers_that_were_cut() -> None:
    found = answer_metrics([group("a", ("x", 2, 0.25), ("y", 2, 1.0), cut=1)])
    assert found["response/truncated_reward"] == 0.25
    assert "response/truncated_reward" not in answer_metrics([group("a", ("x", 2, 0.25))])


def test_length_is_compared_between_answers_to_one_prompt() -> None:
    """A prompt that needs long answers and is easy says nothing about length."""
    paid = [group("a", ("x", 1, 0.0), ("xx", 2, 1.0)), group("b", ("x", 7, 0.0), ("xx", 9, 2.0))]
    # lengths -0.5 0.5 -1 1, rewards -0.5 0.5 -1 1 around their means
    assert answer_metrics(paid)["response/length_correlation"] == pytest.approx(1.0)
    easy = [group("a", ("x", 1, 0.0), ("xx", 2, 0.0)), group("b", ("x", 9, 1.0), ("y", 9, 0.0))]
    assert answer_metrics(easy)["response/length_correlation"] == pytest.approx(0.0)
    same = [group("a", ("x", 1, 0.5), ("xx", 2, 0.5)), group("b", ("x", 9, None))]
    assert "response/length_correlation" not in answer_metrics(same)
