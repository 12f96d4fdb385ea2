"""Text out of tokens: however they come, joined it is the whole text, cut before a stop string."""

from __future__ import annotations

import doctest
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reinforge.envs.calls import stream
from reinforge.envs.calls.hermes import Hermes
from reinforge.envs.calls.stream import CallStream, held_back, read_calls
from reinforge.models.tiny import tiny_tokenizer
from reinforge.serve.text import TokenDecoder, VisibleText

TOKENIZER = tiny_tokenizer()


def decode(tokens: Sequence[int]) -> str:
    return str(
        TOKENIZER.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=40))
def test_any_bytes_decode_as_a_whole(tokens: list[int]) -> None:
    """Single bytes, in any order, mostly no characters at all."""
    decoding = TokenDecoder(decode)
    assert "".join([*(decoding.push(t) for t in tokens), decoding.close()]) == decode(tokens)


@settings(max_examples=200, deadline=None)
@given(
    st.text("abé日🙂", max_size=30),
    st.lists(st.text("abé日🙂", min_size=1, max_size=3), max_size=3),
)
def test_stop_strings(text: str, stops: list[str]) -> None:
    ids = TOKENIZER(text, add_special_tokens=False).input_ids
    out = VisibleText(decode, stops)
    pieces = [out.push(t) for t in ids]
    # the first to be complete ends it
    cuts = sorted((text.index(s) + len(s), text.index(s)) for s in stops if s in text)
    expected = text[: cuts[0][1]] if cuts else text
    assert (
        "".join([*pieces, out.close()]) == expected
        and out.stopped == bool(cuts)
        and out.length == len(expected)
    )


def test_whole_characters_leave_at_once() -> None:
    out = VisibleText(decode, ["END"])
    assert [out.push(t) for t in TOKENIZER("aé🙂 END", add_special_tokens=False).input_ids] == [
        "a",
        "",
        "é",
        "",
        "",
        "",
        "🙂",
        " ",
        "",
        "",
        "",
    ]
    assert held_back("xEN", ["END", "ENTER"]) == 2 and held_back("END", ["END"]) == 0


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                "<tool",
                " ",
                "\n",
                "a",
                '{"name": "f", "arguments": {}}',
            ]
        ),
        max_size=8,
    )
)
def test_tool_text_loses_nothing(parts: list[str]) -> None:
    """Content and calls together are all that was said, whatever the pieces."""
    text = "".join(parts)
    whole = CallStream(Hermes())
    single = CallStream(Hermes())
    first = whole.push(text)
    ends = whole.close()
    pieces = "".join(single.push(ch) for ch in text)
    assert (pieces, *single.close()) == (first, *ends)
    if not ends[1]:
        assert first + ends[0] == text
    else:
        assert text.startswith(first) and read_calls(text[len(first) :], Hermes()) == ends[1]


def test_calls() -> None:
    assert doctest.testmod(stream).failed == 0
    nested = read_calls(
        '<tool_call>{"name": "f", "arguments": {"x": {"y": [1, "</tool_call>"]}}}</tool_call>',
        Hermes(),
    )
    assert nested is not None and nested[0].arguments == {"x": {"y": [1, "</tool_call>"]}}
    assert read_calls("<tool_call>" + "[" * 100_000, Hermes()) is None
    assert read_calls("", Hermes()) == []


def test_the_engine_sees_stop_strings_of_many_bytes() -> None:
    """A token may be one byte: as many tokens as the string has characters are not enough to look
    at.
    """
    from reinforge.core.engine import Sampling
    from reinforge.engines.native import NativeEngine

    class Stub:
        model = type("Model", (), {"tokenizer": TOKENIZER})

    ids = TOKENIZER("it is 日本語です", add_special_tokens=False).input_ids
    assert NativeEngine._hit_string(Stub(), ids, Sampling(1, stop_strings=("日本語です",)))  # type: ignore[arg-type]
    assert not NativeEngine._hit_string(Stub(), ids, Sampling(1, stop_strings=("日本語でも",)))  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_loopback(host: str) -> None:
    from reinforge.serve.options import ServeOptions, is_loopback, key_of

    assert is_loopback(host) and key_of(ServeOptions(host=host)) is None


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.evil.example"]
)
def test_the_network_needs_a_key(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from reinforge.core.errors import InputError
    from reinforge.serve.options import KEY, ServeOptions, key_of

    with pytest.raises(InputError, match="no API key"):
        key_of(ServeOptions(host=host))
    assert key_of(ServeOptions(host=host, api_key="a")) == "a"
    monkeypatch.setenv(KEY, "b")
    assert key_of(ServeOptions(host=host)) == "b"
