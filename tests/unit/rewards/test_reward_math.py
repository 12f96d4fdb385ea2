"""The reward `math`: what is equal, what is not, and what a hostile answer gets.

Every case has a verdict.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from helpers.attack_lists.restatements import ASKED, HONEST, RESTATED
from helpers.toys import run
from reinforge.config.rewards import RewardConfig
from reinforge.core.errors import InputError
from reinforge.core.sample import Row
from reinforge.rewards.build import build_rewards
from reinforge.rewards.function import FunctionReward
from reinforge.rewards.literal import literal, spaced, unnamed
from reinforge.rewards.math import (
    TAIL,
    MathReward,
    boxed,
    decided,
    final_answer,
    gold_answer,
    too_large,
)
from reinforge.rewards.outcome import RewardOutcome

pytest.importorskip("math_verify")
QUESTION = "What is 2+2?"


@pytest.fixture(scope="module")
def reward() -> FunctionReward:
    return build_rewards([RewardConfig(name="math", timeout=20, workers=2)])[0]


def judged(reward: FunctionReward, text: str, gold: Any, prompt: str = QUESTION) -> RewardOutcome:
    return run(reward.outcome([Row("r", prompt, {"answer": gold})], [text]))


EQUAL = [
    (r"\boxed{42}", "42"),
    ("The answer is 42.", "42"),
    ("so 7 + 35 = 42", 42),
    ("#### 42", "#### 42"),
    (r"$42$", r"so \boxed{42}"),
    (r"\boxed{1} no, \boxed{42}", "42"),
    (r"\boxed{\frac{1}{2}}", "0.5"),
    (r"\boxed{0.5}", r"\frac12"),
    (r"\boxed{1,000}", "1000"),
    (r"\boxed{1{,}000}", "1000"),
    (r"\boxed{50\%}", "0.5"),
    (r"\boxed{2\sqrt{3}}", r"\sqrt{12}"),
    (r"\boxed{x^2+2x+1}", "(x+1)^2"),
    (r"\boxed{\{1,2\}}", r"\{2,1\}"),
    (r"\boxed{(1,2)}", "(1, 2)"),
    (r"\boxed{x=3}", "3"),
    (r"\boxed{\text{Evelyn}}", "Evelyn"),
    (r"\boxed{3 \times 10^5}", "300000"),
    (r"\boxed{2^{10}}", "2^{10}"),
    (r"\boxed{5 \text{ apples}}", "5"),
    (r"\boxed{90^\circ}", "90"),
    (r"\(\frac{\sqrt{3}}{2}\)", r"\frac{\sqrt 3}{2}"),
    (r"\boxed{-\frac{3}{4}}", "-0.75"),
    (r"\boxed{[0,1)}", "[0,1)"),
]


@pytest.mark.parametrize(("text", "gold"), EQUAL)
def test_equal(reward: FunctionReward, text: str, gold: Any) -> None:
    assert judged(reward, text, gold) == RewardOutcome([1.0])


@pytest.mark.parametrize(("answer", "gold"), HONEST)
def test_an_honest_answer_counts(reward: FunctionReward, answer: str, gold: str) -> None:
    assert judged(reward, rf"\boxed{{{answer}}}", gold, ASKED) == RewardOutcome([1.0])


@pytest.mark.parametrize(("answer", "gold"), RESTATED)
def test_a_restated_question_is_no_answer(reward: FunctionReward, answer: str, gold: str) -> None:
    """Equal in value to the gold answer, and still a computation: a rule decides, so it is 0 and
    never unscored.
    """
    texts = [rf"\boxed{{{answer}}}", rf"So ${answer}$"]
    rows = [Row("r", ASKED, {"answer": gold})] * len(texts)
    assert run(reward.outcome(rows, texts)) == RewardOutcome([0.0, 0.0])


def test_every_literal_is_written_so_that_it_is_read_again() -> None:
    """What is handed to math-verify is the number itself, without the unit."""
    for answer, _ in HONEST:
        if (found := literal(answer)) is not None:
            again = literal(found.text)
            assert again is not None and (again.value, again.percent, again.word) == (
                found.value,
                found.percent,
                found.word,
            )


@pytest.mark.parametrize(
    "part", ["a", "a ", "a=", r"\a", "a1", "f(a)", "a+", r"\text{", "_", "(a,"]
)
def test_a_name_that_is_none_is_read_in_one_pass(part: str) -> None:
    """Read twice at every letter, these would never end."""
    for text in (part * 20_000 + "; = 5", "(a" + part * 20_000 + " = 5"):
        assert unnamed(text, joined=True) == spaced(text)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"A = \{x \in B\}", r"\{x \in B\}"),
        ("S = (x = 1, y = 2)", "(x = 1, y = 2)"),
        (r"f(x) = [y \approx 3]", r"[y \approx 3]"),
    ],
)
def test_a_relation_inside_brackets_belongs_to_the_answer(text: str, answer: str) -> None:
    assert unnamed(text) == answer


ZERO = [
    # the list of hostile input
    ("__import__('os').system('touch pwned')", "5"),
    (r"\boxed{__import__('os').system('touch pwned')}", "5"),
    ("5^{5^{5^{5^5}}}", "3"),
    (r"\boxed{5^{5^{5^{5^5}}}}", "5"),
    (r"\boxed{5^5^5^5^5}", "5"),
    ("factorial(10**9)", "5"),
    (r"\boxed{factorial(10**9)}", "5"),
    (r"\boxed{1000000000!}", "5"),
    ("{" * 10_000 + "5" + "}" * 10_000, "5"),
    (r"\boxed{" + "{" * 10_000 + "5" + "}" * 10_000 + "}", "5"),
    ("7" * 100_000, "7"),
    (r"\boxed{" + "7" * 100_000 + "}", "7"),
    (r"\boxed{5}" * 1000, "5"),
    (QUESTION, "4"),
    (rf"\boxed{{{QUESTION}}}", "4"),
    ("５", "5"),
    (r"\boxed{５}", "5"),
    ("1/0", "5"),
    (r"\boxed{1/0}", "5"),
    ("", "5"),
    ("   \n", "5"),
    ("a" * 10_000_000, "5"),
    ("5 " * 5_000_000, "5"),
    # our own
    (r"\boxed{2+2}", "4"),
    (r"\boxed{(2+2)+0}", "4"),
    (r"\boxed{\int_0^1 x dx}", "0.5"),
    (r"\boxed{\sum_{k=1}^{3} k}", "6"),
    (r"\boxed{1,2,3,4,5,6,7,8,9,10}", "7"),
    (r"\boxed{3 or 4}", "4"),
    (r"\boxed{5", "5"),
    (r"\boxed{}", "5"),
    (r"\boxed{5} \boxed{6}", "5"),
    (r"\boxed{-5}", "5"),
    (r"\boxed{(1,2)}", "(2,1)"),
    (r"\boxed{y}", "x"),
    (r"\boxed{((10^{999})^{999})^{999}}", "5"),
    (r"\boxed{Paris}", r"\text{Evelyn}"),
    (r"\boxed{x}", "5"),
    ("٥", "5"),
    (r"\boxed{\infty}", "5"),
    (r"\boxed{nan}", "5"),
    ("It is 5. No, 6", "5"),
    (r"\boxed{5}{6}" + r"\boxed{7}", "5"),
    ("\ud800", "5"),
    (r"\boxed{5\$\$\boxed{6}}", "5"),
]


@pytest.mark.parametrize(
    ("text", "gold"), ZERO, ids=lambda v: str(v)[:40].encode("ascii", "replace").decode()
)
def test_zero_within_the_bound(
    reward: FunctionReward, text: str, gold: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = time.monotonic()
    assert judged(reward, text, gold) == RewardOutcome([0.0])
    assert time.monotonic() - start < 20
    assert not Path("pwned").exists()


@pytest.mark.parametrize(
    "gold", [None, "", "1/0", "7" * 1000, "5^{5^{5^5}}", "__import__('os')", r"\boxed{}"]
)
def test_a_gold_answer_that_cannot_be_read_scores_nobody(reward: FunctionReward, gold: Any) -> None:
    assert (
        judged(reward, r"\boxed{1/0}", gold) == judged(reward, "5", gold) == RewardOutcome([None])
    )


def test_what_no_rule_stops_is_stopped_by_the_clock() -> None:
    """An expression within all caps that sympy does not finish: unscored, counted, and its
    neighbours are scored.
    """
    [quick] = build_rewards([RewardConfig(name="math", timeout=1.5, workers=2)])
    slow = r"\boxed{((((10^{99})^{99})^{99})^{99})^{99}}"
    assert not too_large(slow[7:-1])
    texts = [slow, r"\boxed{\sqrt{2}}", r"$\frac{2}{\sqrt{2}}$", r"\boxed{\sqrt{3}}"]
    row = Row("r", "?", {"answer": r"\sqrt{2}"})
    run(quick.score([row], [r"\boxed{\sqrt{5}}"]))  # the library is there
    outcome = run(quick.outcome([row] * 4, texts))
    assert outcome.scores == [None, 1.0, 1.0, 0.0] and outcome.timeouts + outcome.crashes == 1


def test_equal_answers_are_compared_once(reward: FunctionReward) -> None:
    assert reward.pool is None
    pool = reward.function.pool  # type: ignore[attr-defined]
    asked: list[Any] = []
    original = pool.call

    async def watched(*args: Any) -> RewardOutcome:
        asked.append(args)
        return await original(*args)

    pool.call = watched
    try:
        texts = [r"\boxed{2\sqrt{7}}"] * 5 + [r"\boxed{7}"] * 5
        assert (
            run(reward.score([Row("r", "?", {"answer": r"\sqrt{28}"})] * 10, texts))
            == [1.0] * 5 + [0.0] * 5
        )
        assert len(asked) == 2
    finally:
        del pool.call


def test_a_comparison_that_ran_out_of_time_is_made_again() -> None:
    """The clock says nothing about the answer: the same two answers are compared again the next
    time.
    """

    class Slow:
        said = [
            RewardOutcome([None], timeouts=1),
            RewardOutcome([None], crashes=1),
            RewardOutcome([1.0]),
        ]

        async def call(self, *_: Any) -> RewardOutcome:
            return self.said.pop(0)

    slow = MathReward(Slow())  # type: ignore[arg-type]
    ask = lambda: run(slow(["?"], [r"\boxed{2\sqrt{2}}"], [r"\sqrt{8}"]))  # noqa: E731
    assert [ask().scores for _ in range(4)] == [[None], [None], [1.0], [1.0]]


def test_a_box_before_the_tail_is_still_the_answer_that_was_given() -> None:
    """What stands after the last box is no answer, however far the box is: it is out of sight, and
    the score 0.
    """
    far = r"\boxed{5}" + " word" * (TAIL // 5) + " so 6"
    assert (
        final_answer(far) is None
        and decided(far, "6", "?") == 0.0
        and decided(far, "5", "?") == 0.0
    )


def test_finding_the_answer() -> None:
    assert (
        boxed(r"\boxed{a}\boxed{\frac{1}{2}}") == r"\frac{1}{2}"
        and boxed(r"\boxed{a") is None
        and boxed("a") is None
        and boxed(r"\fbox{3}") is None
    )
    assert (
        final_answer("Final answer: $x$ is good") == "x"
        and final_answer("no idea") is None
        and final_answer("3 then 4/5") == "4/5"
    )
    assert (
        final_answer("the answer is 7 of course") == "7"
        and final_answer("x = 3", boxed_only=True) is None
        and final_answer("The answer is Paris.") == "Paris"
    )
    assert (
        gold_answer("He has 3.\n#### 1,200") == "1,200"
        and gold_answer(12) == "12"
        and gold_answer("$5$") == "5"
        and gold_answer(" ") is None
    )
    assert decided("12.50", "12.5", "") == 1.0 and decided("1/3", "0.33", "") == (
        r"\frac{1}{3}",
        "0.33",
    )
    assert final_answer("so it is 1.25e3.") == "1.25e3"


@pytest.mark.parametrize(
    ("answer", "large"),
    [
        ("e^{x^2}", False),
        ("x^{2^{2^2}}", True),
        ("2^{1000}", False),
        ("2^{1001}", True),
        ("2^2^2^2", True),
        ("x^2+y^2+z^2", False),
        ("120!", False),
        ("999!", True),
        ("3!!!!", True),
        ("1" * 100, False),
        ("1" * 101, True),
        ("(" * 12 + ")" * 12, False),
        ("(" * 13 + ")" * 13, True),
        ("x" * 400, False),
        ("x" * 401, True),
        ("a__b", True),
        ("１", True),
        ("(x^2+1)^{10}(x+2)^{9}", False),
        ("((10^9)^{900})^{900}", True),
        ("5**5**5**5", True),
    ],
)
def test_caps(answer: str, large: bool) -> None:
    assert too_large(answer) is large


def test_options() -> None:
    with pytest.raises(InputError, match=r"rewards\.0\.options.*no option strict"):
        build_rewards([RewardConfig(name="math", options={"strict": True})])
    [only] = build_rewards(
        [RewardConfig(name="math", options={"boxed_only": True}, timeout=20, workers=2)]
    )
    assert run(only.score([Row("r", "?", {"answer": "5"})] * 2, ["5", r"\boxed{5}"])) == [0.0, 1.0]
