"""Built-in rewards of content and form, by the numbers they must give."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

from helpers.toys import run
from reinforge.config.rewards import RewardConfig
from reinforge.core.errors import InputError
from reinforge.core.sample import Row
from reinforge.rewards.build import build_rewards
from reinforge.rewards.format_rewards import cosine_length, language, repetition, tag_count, tags
from reinforge.rewards.outcome import RewardOutcome
from reinforge.rewards.verifiable import choice, chosen, last_value, number


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("3/4", "0.75"),
        ("so 50%", "0.5"),
        (r"50\%", "0.5"),
        ("1.5e3", "1500"),
        ("2e-3.", "0.002"),
        ("−7", "-7"),
        ("1,234.5", "1234.5"),
        ("1/0", None),
        ("9" * 41, None),
        ("v2", None),
        ("", None),
        ("５", None),
        ("nan", None),
        ("3 of 4", "4"),
    ],
)
def test_last_value(text: str, want: str | None) -> None:
    assert last_value(text) == (None if want is None else Fraction(want))


def test_number_is_exact_beyond_28_digits() -> None:
    third = "0." + "3" * 28
    long = "1234567890123456789012345678901234567"
    assert number([third, "1/3", "2/6"], ["1/3"] * 3) == [0.0, 1.0, 1.0]
    assert number([f"{long}8%", f"{long}9%"], [f"{long}9%"] * 2) == [0.0, 1.0]
    assert number([third], ["1/3"], tolerance=1e-27) == [1.0]


def test_number_with_tolerances() -> None:
    assert number(["3/4", "75%", "0.7501", "0.76", "1/0", ""], ["0.75"] * 6, relative=1e-3) == [
        1.0,
        1.0,
        1.0,
        0.0,
        0.0,
        0.0,
    ]
    assert number(["100.4", "100.6"], [100, 100], tolerance=0.5) == [1.0, 0.0] and number(
        ["1"], ["none"]
    ) == [None]
    assert number(["0.1"], [0.1]) == [1.0] and number(["1e999"], ["5"], relative=1.0) == [0.0]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("B", "B"),
        ("(b)", "B"),
        ("The answer is (C).", "C"),
        (r"\boxed{D}", "D"),
        (r"\boxed{\text{A}}", "A"),
        ("Let me think.\nB) Paris", "B"),
        ("**Answer: D**", "D"),
        ("A. Answer: B", "B"),
        ("A B C D", None),
        ("A, B, C or D", None),
        ("A\nB\nC\nD", None),
        ("Answer: A, B, C, D", None),
        ("the answer is because", None),
        ("", None),
        ("a cat", None),
        ("I like it", None),
    ],
)
def test_chosen_letter(text: str, want: str | None) -> None:
    assert chosen(text) == want


def test_choice() -> None:
    assert choice(["B", "A", "B", "B"], ["B", "B", "(b)", 1]) == [1.0, 0.0, 1.0, 1.0]
    assert choice(["B", "A", "A"], ["Rome", "Rome", "Oslo"], choices=[["Paris", "Rome"]] * 3) == [
        1.0,
        0.0,
        None,
    ]
    assert choice(["B"], [None]) == [None] and choice(["A"], [True]) == [None]


def test_tags() -> None:
    texts = [
        "<think>a</think>\n<answer>b</answer>\n",
        "<think></think><answer>b</answer>",
        "x<think>a</think><answer>b</answer>",
        "<answer>b</answer><think>a</think>",
        "<think>a</think><answer>b</answer><answer>c</answer>",
        "<think>a<answer>b</answer></think>",
        "",
    ]
    assert tags(texts) == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert tag_count([texts[0], "<think>a", "<think>" * 2 + "</think>", ""]) == [
        1.0,
        0.25,
        0.25,
        0.0,
    ]
    assert tags(["<a>1</a>"], tags=["a"]) == [1.0]


def test_cosine_length() -> None:
    """r(n) = r_L + (r_0 - r_L)(1 + cos(πn/L))/2, by hand at n = 0+, L/2 and L."""
    half = " " * 49 + "5"
    full = " " * 99 + "5"
    got = cosine_length(
        ["5", half, full, "6", "x" * 50, "x" * 500],
        ["5"] * 6,
        max_length=100,
        right=(2.0, 1.0),
        wrong=(-10.0, 0.0),
        exceed=-7.0,
    )
    near = (1 + math.cos(math.pi / 100)) / 2
    assert got == pytest.approx([1 + near, 1.5, -7.0, -10 * near, -5.0, -7.0], abs=1e-12)
    assert cosine_length(["5"], ["no number"], max_length=100) == [None]
    with pytest.raises(InputError, match="right from wrong"):
        cosine_length(["5"], ["5"], max_length=10, correct="magic")  # type: ignore[arg-type]


def test_repetition() -> None:
    assert repetition(["a b a b a b", "a b c d", "", "a A a a"], n=2) == pytest.approx(
        [0.6, 0.0, 0.0, 2 / 3]
    )
    assert repetition(["abab"], n=1, unit="characters") == [0.5]
    assert repetition(["word " * 1_000_000]) == pytest.approx([1 - 1 / (4000 - 3)])


def test_language() -> None:
    prompts = ["Wie geht es dir?", "你好吗", "これは何ですか", "Как дела?", "123"]
    texts = ["gut 你好", "我很好 ok", "日本語です", "Хорошо", "x"]
    assert language(prompts, texts) == [0.6, 0.6, 1.0, 1.0, None]
    assert language(["x"] * 4, ["42", "", "$x^2$ да", "`print` 你"], language="en") == [
        1.0,
        0.0,
        0.0,
        0.0,
    ]
    assert language(["你好"] * 2, ["日本語です", "你好"], language="zh") == [
        pytest.approx(0.6),
        1.0,
    ]
    with pytest.raises(InputError, match="no language"):
        language(["x"], ["x"], language="klingon")


def test_by_name_with_options() -> None:
    rewards = build_rewards(
        [
            RewardConfig(name="repetition", weight=-0.5, options={"n": 1}),
            RewardConfig(name="tags", options={"tags": ["a"]}),
        ]
    )
    assert [(r.pure, r.pool) for r in rewards] == [(True, None)] * 2
    assert [run(r.score([Row("r", "p")], ["<a>b</a> <a>b</a>"])) for r in rewards] == [[0.5], [0.0]]
    with pytest.raises(InputError, match="no option size"):
        build_rewards([RewardConfig(name="repetition", options={"size": 1})])


def test_reasoning_gym_answers_are_scored_apart() -> None:
    """Its scorers `eval` some answers: each is scored in a process that is thrown away, and code is
    a wrong answer.
    """
    pytest.importorskip("reasoning_gym")
    import reasoning_gym

    entry = reasoning_gym.create_dataset("spiral_matrix", size=1, seed=0)[0]
    [reward] = build_rewards([RewardConfig(name="reasoning_gym", timeout=3, workers=1)])
    assert reward.pool is not None and reward.pool.spec.fresh and reward.each and not reward.pure
    texts = [entry["answer"], "__import__('os')._exit(0)", "[9**9**9**9]", entry["answer"]]
    outcome = run(reward.outcome([Row("r", "p", {"entry": entry})] * 4, texts), timeout=100)
    assert outcome == RewardOutcome([1.0, 0.0, None, 1.0], timeouts=1)
