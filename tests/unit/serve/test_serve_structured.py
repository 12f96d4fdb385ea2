"""Answers of a given form over HTTP: through OpenAI's own client, in its words and in vLLM's."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from helpers.chat_server import make_chat_model, served_model
from reinforge.cli.main import main
from reinforge.core.constraint import Constraint
from reinforge.core.errors import InputError
from reinforge.serve.requests import ApiError, ChatRequest, CompletionRequest, parsed

ASK = [{"role": "user", "content": "who?"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "bob"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
DATE = "(19|20)[0-9]{2}"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = make_chat_model(tmp_path_factory.mktemp("chat") / "model")
    with served_model(model, max_new_tokens=120) as (address, _):
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> Any:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)


def test_a_json_schema(client: Any) -> None:
    done = client.chat.completions.create(
        model="tiny",
        messages=ASK,
        n=4,
        seed=3,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": SCHEMA, "strict": True},
        },
    )
    for choice in done.choices:
        assert choice.finish_reason == "stop"
        found = json.loads(choice.message.content)
        assert found.keys() == {"name", "age"} and found["name"] in ("ada", "bob")
        assert isinstance(found["age"], int) and found["age"] <= 99


def test_a_json_object(client: Any) -> None:
    done = client.chat.completions.create(
        model="tiny",
        messages=ASK,
        n=16,
        seed=1,
        max_tokens=100,
        response_format={"type": "json_object"},
    )
    whole = [c.message.content for c in done.choices if c.finish_reason == "stop"]
    assert all(c.message.content.startswith("{") for c in done.choices)
    assert whole and all(isinstance(json.loads(text), dict) for text in whole)


def test_text_is_no_constraint(client: Any) -> None:
    same = [
        client.chat.completions.create(model="tiny", messages=ASK, seed=4, max_tokens=9, **more)
        for more in ({}, {"response_format": {"type": "text"}})
    ]
    assert same[0].choices[0].message.content == same[1].choices[0].message.content


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": DATE}, DATE),
        ({"choice": ["yes", "no (really)", "a|b"]}, r"yes|no \(really\)|a\|b"),
        ({"grammar": 'start: "x"~2..5 "!"'}, "x{2,5}!"),
        ({"json": {"type": "boolean"}}, "true|false"),
        ({"json": '{"enum": [1, 2]}'}, "1|2"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_structured_outputs(client: Any, form: dict[str, Any], pattern: str, stream: bool) -> None:
    done = client.completions.create(
        model="tiny",
        prompt="tell me",
        seed=5,
        max_tokens=40,
        stream=stream,
        extra_body={"structured_outputs": form},
    )
    text = "".join(p.choices[0].text for p in done) if stream else done.choices[0].text
    assert re.fullmatch(pattern, text)


def test_log_probs_and_the_likeliest_are_of_what_was_allowed(client: Any) -> None:
    done = client.chat.completions.create(
        model="tiny",
        messages=ASK,
        seed=6,
        logprobs=True,
        top_logprobs=5,
        extra_body={"structured_outputs": {"regex": "[ab]c"}},
    )
    first, second, *_ = done.choices[0].logprobs.content
    assert {t.token for t in first.top_logprobs} == {"a", "b"}
    assert sum(math.exp(t.logprob) for t in first.top_logprobs) == pytest.approx(1, abs=1e-5)
    assert [(t.token, t.logprob) for t in second.top_logprobs] == [("c", 0.0)]
    assert second.logprob == 0.0


@pytest.mark.parametrize(
    ("body", "said", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "goes with", "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "response_format: this JSON schema cannot be used: Invalid type: x",
            "response_format",
        ),
        (
            {"structured_outputs": {"regex": "("}},
            "structured_outputs: this regular expression cannot be used: unclosed group",
            "structured_outputs",
        ),
        ({"structured_outputs": {}}, "0 forms", "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "2 forms", "structured_outputs"),
        (
            {
                "structured_outputs": {"regex": "a"},
                "response_format": {"type": "json_object"},
            },
            "an answer has one form",
            "structured_outputs",
        ),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ends", "ignore_eos"),
        (
            {
                "structured_outputs": {"regex": "a"},
                "tools": [{"type": "function", "function": {"name": "f"}}],
            },
            "which no call of a tool would have",
            "tools",
        ),
        (
            {"guided_regex": "a"},
            'guided_regex: is not a parameter of this server: use "structured_outputs": {"regex"',
            "guided_regex",
        ),
    ],
)
def test_refusals(client: Any, body: dict[str, Any], said: str, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="tiny", messages=ASK, extra_body=body)
    assert said in error.value.body["message"]
    assert error.value.body["param"] == param


def test_requests_become_constraints() -> None:
    def of(kind: type[Any], **more: Any) -> Constraint | None:
        return parsed(kind, json.dumps(more).encode()).constraint  # type: ignore[no-any-return]

    assert of(CompletionRequest, prompt="x") is None
    assert of(ChatRequest, messages=ASK, response_format={"type": "text"}) is None
    assert of(CompletionRequest, prompt="x", structured_outputs={"json_object": True}) == (
        Constraint("json_object")
    )
    assert of(CompletionRequest, prompt="x", structured_outputs={"json": {"a": 1}}) == (
        Constraint("json_schema", '{"a": 1}')
    )
    with pytest.raises(ApiError, match='not a parameter of this server here: use "structured_out'):
        of(CompletionRequest, prompt="x", response_format={"type": "json_object"})


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(
    ("option", "text", "pattern"),
    [
        ("--regex", DATE, DATE),
        ("--grammar", 'start: "x"~2..5', "x{2,5}"),
        ("--json-schema", '{"enum": ["a", "b"]}', '"[ab]"'),
    ],
)
def test_generate_asks_a_server_for_the_same(
    url: str, tmp_path: Path, raw: bool, option: str, text: str, pattern: str
) -> None:
    """`reinforge generate --server` speaks the words that our own server understands."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    (tmp_path / "form").write_text(text)
    given = text if option == "--regex" else str(tmp_path / "form")
    words = [option, given, "--server", url, *(["--raw"] if raw else [])]
    place = ["--prompts", str(tmp_path / "p.jsonl"), "--out", str(tmp_path / "o.jsonl")]
    assert main(["generate", "tiny", *place, *words, "--max-new-tokens", "20"]) == 0
    made = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert len(made) == 2 and all(re.fullmatch(pattern, m["completion"]) for m in made)


def test_an_object_of_a_server(url: str) -> None:
    import asyncio

    from reinforge.core.engine import Sampling
    from reinforge.engines.openai import OpenAIClient, OpenAIServer

    async def ask(raw: bool, kind: Any) -> list[Any]:
        async with OpenAIClient(OpenAIServer(url)) as client:
            params = Sampling(60, constraint=Constraint(kind, "("))
            return await client.complete("hi", params, key=1, n=2, raw=raw)

    for raw in (False, True):
        assert all(a.text.startswith("{") for a in asyncio.run(ask(raw, "json_object")))
    with pytest.raises(InputError, match="unclosed group"):
        asyncio.run(ask(True, "regex"))
