"""Constraints as masks over a vocabulary: what is allowed, when an answer may end, and what is said
about a constraint that cannot be compiled.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np
import pytest

from reinforge.core.constraint import Constraint
from reinforge.core.errors import InputError
from reinforge.models.constraint_library import check
from reinforge.models.grammars import KEPT, Grammars, Matcher
from reinforge.models.tiny import tiny_tokenizer

EOS = 2


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer(["hello hello hello"] * 5, vocabulary=264)


@pytest.fixture(scope="module")
def grammars(tokenizer: Any) -> Grammars:
    return Grammars(tokenizer, 270, [EOS])


def free(matcher: Matcher) -> set[int]:
    bits = np.unpackbits(matcher.allowed.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_what_may_come_next(tokenizer: Any, grammars: Grammars) -> None:
    assert grammars.words == 9
    matcher = grammars.matcher(Constraint("regex", "[0-9]{2}(ab)?"))
    digits = {ids(tokenizer, d)[0] for d in "0123456789"}
    assert free(matcher) == digits
    for digit in ids(tokenizer, "4"):
        matcher.take(digit)
    assert free(matcher) == digits and not matcher.may_end
    matcher.take(ids(tokenizer, "2")[0])
    a, b = ids(tokenizer, "a")[0], ids(tokenizer, "b")[0]
    assert free(matcher) == {a, EOS} and matcher.may_end and not matcher.complete
    matcher.take(a)
    assert free(matcher) == {b} and not matcher.may_end
    matcher.take(b)
    assert free(matcher) == {EOS} and matcher.complete


def test_a_token_of_several_letters_is_one_of_the_ways(tokenizer: Any, grammars: Grammars) -> None:
    """Tokens that spell a beginning of what may come are allowed, the long ones too; where only one
    text can come, it is spelled as the tokenizer spells it.
    """
    spelled = {t for t in range(3, 264) if re.match("[a-z]+$", tokenizer.decode([t]))}
    assert ids(tokenizer, "hello")[0] in spelled
    assert free(grammars.matcher(Constraint("regex", "[a-z]+"))) == spelled
    assert free(grammars.matcher(Constraint("regex", "hello"))) == set(ids(tokenizer, "hello"))


def test_more_stop_tokens_end_where_the_answer_may_end(grammars: Grammars, tokenizer: Any) -> None:
    matcher = grammars.matcher(Constraint("regex", "1+"), stops=[7])
    assert free(matcher) == set(ids(tokenizer, "1"))
    matcher.take(ids(tokenizer, "1")[0])
    assert free(matcher) == {*ids(tokenizer, "1"), EOS, 7}


def test_masks_of_a_given_answer_are_those_of_sampling(grammars: Grammars, tokenizer: Any) -> None:
    schema = Constraint("json_schema", '{"type": "object", "additionalProperties": false}')
    answer = [*ids(tokenizer, "{ }"), EOS]
    masks = grammars.masks(schema, answer)
    matcher = grammars.matcher(schema)
    for token, mask in zip(answer, masks, strict=True):
        assert np.array_equal(mask, matcher.allowed)
        assert token in free(matcher)
        if token != EOS:
            matcher.take(token)
    begun = grammars.matcher(schema, begun=answer[:2])
    assert np.array_equal(begun.allowed, masks[2])


def test_a_matcher_moves_alone(grammars: Grammars, tokenizer: Any) -> None:
    """Each has its own state, though the grammar is compiled once."""
    constraint = Constraint("regex", "ab|ba")
    first, second = grammars.matcher(constraint), grammars.matcher(constraint)
    first.take(ids(tokenizer, "a")[0])
    assert free(first) == set(ids(tokenizer, "b"))
    assert free(second) == {ids(tokenizer, "a")[0], ids(tokenizer, "b")[0]}
    third = first.copy()
    third.take(ids(tokenizer, "b")[0])
    assert third.complete and free(third) == {EOS}
    assert not first.complete and free(first) == set(ids(tokenizer, "b"))
    assert grammars.compile(constraint) is grammars.compile(Constraint("regex", "ab|ba"))


def test_the_newest_grammars_are_kept(tokenizer: Any) -> None:
    grammars = Grammars(tokenizer, 264, [EOS])
    for i in range(KEPT + 5):
        grammars.compile(Constraint("regex", str(i)))
    assert len(grammars._compiled) == KEPT


@pytest.mark.parametrize(
    ("constraint", "said"),
    [
        (Constraint("regex", "([0-9"), "regular expression cannot be used: unclosed"),
        (Constraint("regex", "(?=a)b"), "look-around"),
        (Constraint("regex", " "), "the regular expression is empty"),
        (Constraint("json_schema", "nope"), "the JSON schema is not JSON"),
        (Constraint("json_schema", "[1]"), "a JSON schema is an object"),
        (Constraint("json_schema", '{"type": "objekt"}'), "Invalid type: objekt"),
        (Constraint("json_schema", '{"anyOf": []}'), "anyOf is empty"),
        (Constraint("grammar", "start: WORD"), 'unknown name: "WORD"'),
        (Constraint("grammar", "bla"), "this grammar cannot be used"),
    ],
)
def test_what_cannot_be_compiled_is_said_with_its_key(
    grammars: Grammars, constraint: Constraint, said: str
) -> None:
    for refused in (check, grammars.compile):
        with pytest.raises(InputError) as error:
            refused(constraint, "rollout.structured.x")
        assert error.value.where == "rollout.structured.x"
        assert said in str(error.value)
        assert "\n" not in str(error.value)


def test_long_chains_do_not_end_the_process(grammars: Grammars, tokenizer: Any) -> None:
    """llguidance calls itself for every link, and 3,000 of them are too many for the stack of a
    usual thread.
    """
    links = "\n".join(f"a{i:x}: a{i + 1:x}" for i in range(8000))
    chain = Constraint("grammar", f'start: a0\n{links}\na{8000:x}: "b"')
    check(chain, "x")
    assert free(grammars.matcher(chain)) == set(ids(tokenizer, "b"))
    with pytest.raises(InputError, match="131072 is the most"):
        check(Constraint("regex", "a" * 131073), "x")


@pytest.mark.parametrize(
    "text", ['start: "yes" | "no"', 'root ::= "yes" | "no"'], ids=["lark", "gbnf"]
)
def test_two_notations_of_grammars(grammars: Grammars, tokenizer: Any, text: str) -> None:
    matcher = grammars.matcher(Constraint("grammar", text))
    assert free(matcher) == {ids(tokenizer, "y")[0], ids(tokenizer, "n")[0]}


def test_a_token_that_does_not_fit_is_an_error(grammars: Grammars) -> None:
    with pytest.raises(InputError, match="does not go on with the answer"):
        grammars.matcher(Constraint("regex", "a"), begun=[5])


def test_without_the_package_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Any
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for refused in (check, Grammars(tokenizer, 264, [EOS]).compile):
        with pytest.raises(InputError, match=r"pip install 'reinforge\[structured\]'"):
            refused(Constraint("regex", "a"), "--regex")


@pytest.mark.parametrize(
    ("tokenizer_of", "stops", "said"),
    [(lambda t: object(), [EOS], "fast tokenizer"), (lambda t: t, [], "has none")],
)
def test_models_that_cannot(tokenizer: Any, tokenizer_of: Any, stops: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        Grammars(tokenizer_of(tokenizer), 264, stops).compile(Constraint("regex", "a"))
