"""The server through OpenAI's own client: what it says is what the engine sampled, streamed or not,
alone or in company.
"""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from helpers.chat_server import make_chat_model, served_model, until
from reinforge.build.served import trainer_score
from reinforge.core.engine import Sampling
from reinforge.core.sample import Row
from reinforge.core.seeds import seed_of
from reinforge.serve.http import ConnectionLimits
from reinforge.serve.requests import CompletionRequest
from reinforge.serve.service import ModelService

ASK = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is 1+1?"}]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_chat_model(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture(scope="module")
def server(chat_model: str) -> Iterator[tuple[str, ModelService]]:
    with served_model(chat_model) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: tuple[str, ModelService]) -> Any:
    return openai.OpenAI(base_url=server[0], api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def service(server: tuple[str, ModelService]) -> ModelService:
    return server[1]


def engine_says(
    service: ModelService, prompt: list[int], sampling: Sampling, seed: int, n: int = 1
) -> list[Any]:
    """What the engine alone says to the same request."""
    return service.engine.submit(
        service.engine.engine.generate(prompt, sampling, key=seed_of(seed, "serve"), n=n)
    ).result(60)


def raw(
    url: str, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    connection.request(
        method, path, body, {name.replace("_", "-"): value for name, value in headers.items()}
    )
    reply = connection.getresponse()
    return reply.status, json.loads(reply.read() or b"null")


def test_chat_is_what_the_engine_sampled(client: Any, service: ModelService) -> None:
    done = client.chat.completions.create(
        model="tiny",
        messages=ASK,
        seed=5,
        n=3,
        temperature=0.8,
        max_tokens=12,
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    prompt = service.renderer.prompt(Row("x", ASK))
    expected = engine_says(service, prompt, Sampling(12, 0.8), 5, n=3)
    assert done.prompt_token_ids == prompt and service.tokenizer.decode(prompt).endswith(
        "1+1?<|eos|><|bos|>assistant: "
    )
    for choice, completion in zip(done.choices, expected, strict=True):
        assert choice.token_ids == completion.tokens and choice.message.content == service.decode(
            completion.tokens
        )
        assert [e.logprob for e in choice.logprobs.content] == pytest.approx(
            completion.logprobs, abs=1e-5
        )
        assert choice.finish_reason == ("length" if completion.stop == "length" else "stop")
    assert len({c.message.content for c in done.choices}) == 3
    made = sum(len(c.tokens) for c in expected)
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (
        len(prompt),
        made,
        len(prompt) + made,
    )


def test_a_stream_is_the_whole_in_pieces(client: Any) -> None:
    ask: dict[str, Any] = dict(
        model="tiny",
        messages=ASK,
        seed=1,
        n=2,
        max_tokens=40,
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    whole = client.chat.completions.create(**ask)
    chunks = list(
        client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    )
    assert (
        chunks[-1].usage == whole.usage
        and chunks[-1].choices == []
        and all(c.usage is None for c in chunks[:-1])
    )
    for choice in whole.choices:
        mine = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == choice.index]
        assert mine[0].delta.role == "assistant" and mine[-1].finish_reason == choice.finish_reason
        assert (
            "".join(c.delta.content or "" for c in mine) == choice.message.content
            and len(mine) > 10
        )
        assert [t for c in mine for t in c.token_ids] == choice.token_ids
        streamed = [e for c in mine if c.logprobs for e in c.logprobs.content]
        assert [e.token for e in streamed] == [e.token for e in choice.logprobs.content]
        assert [e.logprob for e in streamed] == pytest.approx(
            [e.logprob for e in choice.logprobs.content], abs=1e-5
        )


def test_text_completions(client: Any, service: ModelService) -> None:
    prompts = ["2+2=", "the cat sat on the mat and 17 times more"]
    ask: dict[str, Any] = dict(model="tiny", max_tokens=6, seed=3, logprobs=0)
    both = client.completions.create(prompt=prompts, n=2, **ask)
    assert [c.index for c in both.choices] == [0, 1, 2, 3]
    for i, prompt in enumerate(prompts):
        ids = service.tokenizer(prompt, add_special_tokens=False).input_ids
        expected = engine_says(service, ids, Sampling(6), 3, n=2)
        by_ids = client.completions.create(
            prompt=ids, n=2, **ask, extra_body={"return_token_ids": True}
        )
        streamed = list(client.completions.create(prompt=prompt, stream=True, **ask))
        assert "".join(c.choices[0].text for c in streamed) == both.choices[2 * i].text
        for found, same, wanted in zip(
            both.choices[2 * i : 2 * i + 2], by_ids.choices, expected, strict=True
        ):
            assert found.text == same.text == service.decode(wanted.tokens)
            assert same.token_ids == wanted.tokens and same.prompt_token_ids == ids
            assert found.logprobs.token_logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
            assert found.logprobs.top_logprobs is None and found.logprobs.tokens == [
                service.spell([t]) for t in wanted.tokens
            ]


def test_top_logprobs_are_the_models(client: Any, service: ModelService, chat_model: str) -> None:
    """Against a forward of transformers' own over the same tokens, after temperature."""
    import torch
    from transformers import AutoModelForCausalLM

    done = client.chat.completions.create(
        model="tiny",
        messages=ASK,
        seed=2,
        temperature=0.7,
        max_tokens=5,
        logprobs=True,
        top_logprobs=4,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    model = AutoModelForCausalLM.from_pretrained(chat_model, attn_implementation="eager")
    ids = done.prompt_token_ids + done.choices[0].token_ids
    with torch.no_grad():
        logp = (model(torch.tensor([ids])).logits[0].double() / 0.7).log_softmax(-1)
    for place, entry in enumerate(
        done.choices[0].logprobs.content, start=len(done.prompt_token_ids)
    ):
        values, best = logp[place - 1].topk(4)
        assert [e.logprob for e in entry.top_logprobs] == pytest.approx(values.tolist(), abs=1e-4)
        assert [e.token for e in entry.top_logprobs] == [service.spell([int(i)]) for i in best]
    streamed = list(
        client.chat.completions.create(
            model="tiny",
            messages=ASK,
            seed=2,
            temperature=0.7,
            max_tokens=5,
            logprobs=True,
            top_logprobs=4,
            stream=True,
            extra_body={"ignore_eos": True},
        )
    )
    entries = [e for c in streamed if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [[t.token for t in e.top_logprobs] for e in entries] == [
        [t.token for t in e.top_logprobs] for e in done.choices[0].logprobs.content
    ]


def test_prompt_logprobs_are_by_id(
    chat_model: str, client: Any, server: tuple[str, ModelService], service: ModelService
) -> None:
    """As vLLM gives them: the token itself and the k likeliest, at temperature 1 whatever the
    answer's. Up to a limit.
    """
    ids = service.tokenizer("the cat sat", add_special_tokens=False).input_ids
    scored = trainer_score(service.engine.engine.model)(ids).tolist()
    asked: dict[str, Any] = {"model": "tiny", "prompt": [ids, ids[:4]], "max_tokens": 0}
    found = client.completions.create(
        **asked, temperature=0.3, extra_body={"prompt_logprobs": 40}
    ).choices
    assert [c.text for c in found] == ["", ""] and [len(c.prompt_logprobs) for c in found] == [
        len(ids),
        4,
    ]
    first = found[0].prompt_logprobs
    assert first[0] is None and len(service.tokenizer) > 40
    assert [p[str(i)]["logprob"] for i, p in zip(ids[1:], first[1:], strict=True)] == (
        pytest.approx(scored[1:], abs=1e-5)
    )
    for i, place in zip(ids[1:], first[1:], strict=True):
        best = [p["logprob"] for p in place.values() if p["rank"] is not None]
        assert len(best) == 40 and best == sorted(best, reverse=True)
        assert len(place) == 40 + (place[str(i)]["rank"] is None)
        assert place[str(i)]["decoded_token"] == service.spell([i])
        assert place[str(i)]["logprob"] <= best[0]
    asked["max_tokens"] = 2
    only = client.completions.create(**asked, seed=1, extra_body={"prompt_logprobs": 0})
    assert [list(p) for p in only.choices[0].prompt_logprobs[1:]] == [[str(i)] for i in ids[1:]]
    plain = client.completions.create(**asked, seed=1)
    assert [c.text for c in only.choices] == [c.text for c in plain.choices]
    with served_model(chat_model, max_logprobs=3) as (url, _):
        body = {**asked, "prompt_logprobs": 4}
        status, reply = raw(url, "POST", "/v1/completions", json.dumps(body).encode())
        assert (
            status == 400 and "at most 3 here (serve --max-logprobs)" in reply["error"]["message"]
        )
    streamed = {**asked, "prompt_logprobs": 4, "stream": True}
    status, reply = raw(server[0], "POST", "/v1/completions", json.dumps(streamed).encode())
    assert status == 400 and reply["error"]["message"] == "prompt_logprobs: not with stream"


def test_echo_scores_the_prompt(client: Any, service: ModelService) -> None:
    """What evaluation harnesses ask for: log-probs of given text, nothing generated."""
    text = "the cat sat"
    ids = service.tokenizer(text, add_special_tokens=False).input_ids
    scored = trainer_score(service.engine.engine.model)(ids).tolist()
    only = client.completions.create(
        model="tiny", prompt=text, echo=True, max_tokens=0, logprobs=1
    ).choices[0]
    assert (
        only.text == text
        and only.logprobs.token_logprobs[0] is None
        and only.logprobs.top_logprobs[0] is None
    )
    assert only.logprobs.token_logprobs[1:] == pytest.approx(scored[1:], abs=1e-5)
    assert only.logprobs.text_offset == list(range(len(text))) and only.finish_reason == "length"
    more = client.completions.create(
        model="tiny", prompt=text, echo=True, max_tokens=4, logprobs=1, seed=0, temperature=0
    ).choices[0]
    alone = client.completions.create(
        model="tiny", prompt=text, max_tokens=4, logprobs=1, seed=0, temperature=0
    ).choices[0]
    assert more.text == text + alone.text and more.logprobs.tokens == [
        *text,
        *alone.logprobs.tokens,
    ]
    assert more.logprobs.token_logprobs[1:] == pytest.approx(
        [*scored[1:], *alone.logprobs.token_logprobs], abs=1e-5
    )
    assert all(
        max(top.values()) >= p - 1e-6
        for top, p in zip(alone.logprobs.top_logprobs, alone.logprobs.token_logprobs, strict=True)
    )


def test_stop_strings_end_the_text_before_them(client: Any) -> None:
    ask: dict[str, Any] = dict(
        model="tiny", prompt="tell me", seed=7, max_tokens=60, extra_body={"ignore_eos": True}
    )
    free = client.completions.create(**ask).choices[0]
    stop = free.text[20:23]
    assert "\ufffd" not in stop and free.finish_reason == "length"
    cut = free.text[: free.text.index(stop)]
    for given in (stop, ["never said", stop]):
        done = client.completions.create(**ask, stop=given)
        assert (done.choices[0].text, done.choices[0].finish_reason) == (
            cut,
            "stop",
        ) and done.usage.completion_tokens < 60
        pieces = [c.choices[0] for c in client.completions.create(**ask, stop=given, stream=True)]
        assert "".join(p.text for p in pieces) == cut and pieces[-1].finish_reason == "stop"


def test_company_changes_nothing(client: Any) -> None:
    """Eight at once, streamed and not, short and long: each gets what it gets alone."""

    def ask(i: int) -> str:
        messages = [{"role": "user", "content": f"question {i} " * (i + 1)}]
        common: dict[str, Any] = dict(
            model="tiny", messages=messages, seed=i, max_tokens=10 + 5 * i, temperature=0.9
        )
        if i % 2:
            return "".join(
                c.choices[0].delta.content or ""
                for c in client.chat.completions.create(**common, stream=True)
            )
        return client.chat.completions.create(**common).choices[0].message.content

    alone = [ask(i) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, range(8)))
    assert together == alone and len(set(alone)) == 8


def test_leaving_frees_the_cache(client: Any, service: ModelService) -> None:
    pool = service.engine.engine.pool

    def idle() -> bool:
        return pool.free == pool.total

    until(idle)
    stream = client.chat.completions.create(
        model="tiny",
        messages=ASK,
        seed=1,
        max_tokens=400,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for _ in range(4):
        next(stream)
    assert not idle()
    before = service.engine.engine.stats.generated_tokens
    stream.close()
    until(idle)
    assert service.engine.engine.stats.generated_tokens < before + 380, (
        "it was cancelled, not finished"
    )
    impatient = client.with_options(timeout=0.25)
    with pytest.raises(openai.APITimeoutError):
        impatient.completions.create(
            model="tiny",
            prompt="x" * 50,
            seed=1,
            n=32,
            max_tokens=400,
            extra_body={"ignore_eos": True},
        )
    until(idle)
    assert (
        client.completions.create(
            model="tiny", prompt="still there", max_tokens=2
        ).usage.completion_tokens
        <= 2
    )


WRONG = [
    (dict(max_tokens=10**9), 400, "context_length_exceeded", "max_tokens"),
    (dict(messages=[{"role": "user", "content": "x" * 600}]), 400, "context_length_exceeded", None),
    (dict(model="gpt-9"), 404, "model_not_found", "model"),
    (dict(extra_body={"temprature": 1}), 400, None, "temprature"),
    (dict(temperature=-1), 400, None, "temperature"),
    (dict(temperature=1e-9), 400, None, "temperature"),
    (dict(n=0), 400, None, "n"),
    (dict(n=1000), 400, None, "n"),
    (dict(frequency_penalty=0.5), 400, "unsupported_parameter", "frequency_penalty"),
    (dict(logit_bias={"5": 1}), 400, "unsupported_parameter", "logit_bias"),
    (dict(response_format={"type": "xml"}), 400, None, "response_format"),
    (
        dict(tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="required"),
        400,
        "unsupported_parameter",
        "tool_choice",
    ),
    (dict(top_logprobs=3), 400, None, "top_logprobs"),
    (dict(logprobs=True, top_logprobs=21), 400, None, "top_logprobs"),
    (dict(messages=[]), 400, None, "messages"),
    (dict(messages=[{"role": "wizard", "content": "hi"}]), 400, None, "row request"),
    (
        dict(
            messages=[
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            ]
        ),
        400,
        None,
        "messages",
    ),
    (dict(stop=["x"] * 17), 400, None, "stop"),
]


@pytest.mark.parametrize(
    ("changes", "status", "code", "param"), WRONG, ids=[str(w[0])[:40] for w in WRONG]
)
def test_errors_are_openai_errors(
    client: Any, changes: dict[str, Any], status: int, code: str | None, param: str | None
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.APIStatusError) as caught:
            client.chat.completions.create(
                **{"model": "tiny", "messages": ASK, "stream": stream, **changes}
            )
        assert (caught.value.status_code, caught.value.code) == (status, code)
        assert caught.value.body["type"] == "invalid_request_error" and caught.value.body["message"]
        assert (caught.value.param or "").split(".")[0] == (param or "")


def test_wrong_completions(client: Any) -> None:
    for changes in (
        dict(prompt=[]),
        dict(prompt=""),
        dict(prompt=[[]]),
        dict(prompt=[-1]),
        dict(prompt=[10**6]),
        dict(prompt=["a"] * 600),
        dict(max_tokens=0),
        dict(echo=True, stream=True),
        dict(suffix="x"),
        dict(best_of=3),
        dict(prompt=[1, "a"]),
    ):
        with pytest.raises(openai.BadRequestError):
            client.completions.create(**{"model": "tiny", "prompt": "a", **changes})


def test_the_longest_prompt_of_a_request_decides_what_room_there_is(
    client: Any, service: ModelService
) -> None:
    """Two prompts share one limit: what fits after the short one only is refused, and without a
    limit both get what fits both.
    """
    prompts = [[5, 6, 7], [5] * (service.context - 4)]
    with pytest.raises(
        openai.BadRequestError, match="5 new tokens after a prompt of 508"
    ) as caught:
        client.completions.create(model="tiny", prompt=prompts, max_tokens=5)
    assert caught.value.code == "context_length_exceeded"
    done = client.completions.create(
        model="tiny", prompt=prompts, extra_body={"ignore_eos": True, "return_token_ids": True}
    )
    assert [len(choice.token_ids) for choice in done.choices] == [4, 4]


# what a request costs before it is refused


@pytest.fixture
def tokenised(service: ModelService, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that reached the tokenizer."""
    seen: list[str] = []
    encode = service.renderer.tokenizer
    render = service.renderer.prompt

    def listening(text: str, **more: Any) -> Any:
        seen.append(text)
        return encode(text, **more)

    def rendering(row: Row) -> list[int]:
        seen.append(str(row.prompt))
        return render(row)

    monkeypatch.setattr(service.renderer, "tokenizer", listening)
    monkeypatch.setattr(service.renderer, "prompt", rendering)
    return seen


def test_prompts_are_counted_before_they_are_tokenised(
    server: tuple[str, ModelService], tokenised: list[str]
) -> None:
    for prompts, n in ((["a"] * 300_000, 1), ([[5]] * 300_000, 1), (["a"] * 200, 3)):
        body = json.dumps({"prompt": prompts, "n": n, "max_tokens": 1}).encode()
        status, reply = raw(server[0], "POST", "/v1/completions", body)
        assert status == 400 and "at most 512 completions per request" in reply["error"]["message"]
        assert reply["error"]["param"] == "prompt"
    assert tokenised == []


def test_a_wrong_item_among_a_million_is_found_without_a_list_of_errors(
    server: tuple[str, ModelService],
) -> None:
    """Each kind of prompt that it might be gives up at the first item that is none."""
    for prompt in ([*["a"] * 300_000, 5], [*[5] * 300_000, "a"], [[5] * 300_000, "a"]):
        status, reply = raw(
            server[0], "POST", "/v1/completions", json.dumps({"prompt": prompt}).encode()
        )
        assert status == 400 and reply["error"]["param"].startswith("prompt")


def test_text_that_cannot_fit_is_not_tokenised(
    server: tuple[str, ModelService], service: ModelService, tokenised: list[str]
) -> None:
    long = "x" * (service.letters + 1)
    parts = [{"role": "user", "content": [{"type": "text", "text": long}]}]
    crowd = [{"role": "user", "content": ""}] * (service.context + 1)
    for path, body in (
        ("completions", {"prompt": ["a", long]}),
        ("chat/completions", {"messages": [{"role": "user", "content": long}]}),
        ("chat/completions", {"messages": parts}),
        ("chat/completions", {"messages": crowd}),
        ("completions", {"prompt": [5] * 200_000}),
    ):
        status, reply = raw(server[0], "POST", f"/v1/{path}", json.dumps(body).encode())
        assert status == 400 and reply["error"]["code"] == "context_length_exceeded"
    assert tokenised in (["a"], [])  # the prompt before the long one


def test_a_request_of_many_prompts_lets_others_in_between(
    service: ModelService, tokenised: list[str]
) -> None:
    async def go() -> None:
        many = asyncio.ensure_future(
            service.complete(
                CompletionRequest(prompt=[f"many {i}" for i in range(50)], max_tokens=1)
            )
        )
        await asyncio.sleep(0)
        one = asyncio.ensure_future(service.complete(CompletionRequest(prompt="one", max_tokens=1)))
        for _, pieces in await asyncio.gather(many, one):
            await pieces.aclose()

    asyncio.run(go())
    assert tokenised.index("one") < 10 and len(tokenised) == 51


def test_how_many_completions_a_request_may_ask_for_is_an_option(chat_model: str) -> None:
    with served_model(chat_model, max_completions=3) as (url, _):
        client = openai.OpenAI(base_url=url, api_key="x", max_retries=0, timeout=60)
        assert (
            len(client.completions.create(model="tiny", prompt="y", n=3, max_tokens=1).choices) == 3
        )
        for wrong in (dict(prompt="y", n=4), dict(prompt=["y", "z"], n=2)):
            with pytest.raises(openai.BadRequestError, match="at most 3 completions"):
                client.completions.create(model="tiny", max_tokens=1, **wrong)
        with pytest.raises(openai.BadRequestError, match="at most 3 completions"):
            client.chat.completions.create(model="tiny", messages=ASK, n=4, max_tokens=1)


def test_what_is_no_request(server: tuple[str, ModelService]) -> None:
    url = server[0]
    chat = "/v1/chat/completions"
    assert raw(url, "GET", "/health") == (200, {"status": "ok"})
    assert raw(url, "GET", "/v1/models")[1]["data"][0] == {
        "id": "tiny",
        "object": "model",
        "created": 0,
        "owned_by": "reinforge",
        "max_model_len": 512,
    }
    assert raw(url, "GET", "/v1/models/other")[1]["error"]["code"] == "model_not_found"
    hostile = [
        b'{"messages": [{"role": "user", "content": "hi"}], "stop": "\\ud800"}',
        b'{"messages": [{"role": "user", "content": "\\udfff"}]}',
        b'{"messages": [{"role": "user", "content": "hi"}], "top_k": 1e30}',
        (
            b'{"messages": [{"role": "user", "content": "hi"}], "stop_token_ids":'
            b" [99999999999999999999]}"
        ),
        b'{"messages": [{"role": "user", "content": 5}]}',
        b'{"messages": [{"role": "assistant", "tool_calls": [5]}]}',
    ]
    for body in (*hostile, b"", b"[]", b"{", b'{"messages": NaN}', b"[" * 100_000, b"\xff"):
        status, reply = raw(url, "POST", chat, body)
        assert status == 400 and reply["error"]["type"] == "invalid_request_error"
    assert (
        raw(url, "GET", chat)[0] == 405
        and raw(url, "GET", "/v1/nothing")[0] == 404
        and raw(url, "GET", "/v1/nothing")[1]["error"]["message"]
    )


def test_pages_of_other_sites_are_refused(server: tuple[str, ModelService]) -> None:
    url = server[0]
    host = urlsplit(url).netloc
    for headers in (
        {"Host": "evil.example"},
        {"Host": "[::1"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
    ):
        for method in ("GET", "POST", "DELETE", "OPTIONS"):
            status, reply = raw(url, method, "/v1/models", **headers)
            assert status == 403 and reply["error"]["type"] == "permission_error"
    assert raw(url, "GET", "/v1/models", Origin=f"http://{host}")[0] == 200


def test_key_size_and_crowd(chat_model: str) -> None:
    with served_model(
        chat_model, limits=ConnectionLimits(requests=1, body=1000), api_key="secret"
    ) as (
        url,
        service,
    ):
        assert raw(url, "GET", "/health")[0] == 200
        status, reply = raw(url, "GET", "/v1/models")
        assert status == 401 and reply["error"]["code"] == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=url, api_key="wrong", max_retries=0).models.list()
        client = openai.OpenAI(base_url=url, api_key="secret", max_retries=0, timeout=60)
        assert client.models.list().data[0].id == "tiny"
        with pytest.raises(openai.APIStatusError, match="more than 1000 bytes") as caught:
            client.completions.create(model="tiny", prompt="x" * 2000)
        assert caught.value.status_code == 413
        stream = client.completions.create(
            model="tiny", prompt="x", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="tiny", prompt="y")
        stream.close()
        until(lambda: service.engine.engine.pool.free == service.engine.engine.pool.total)
        assert client.completions.create(model="tiny", prompt="y", max_tokens=1).choices


def test_a_failing_engine_is_an_error_not_silence(chat_model: str) -> None:
    with served_model(chat_model) as (url, service):
        client = openai.OpenAI(base_url=url, api_key="x", max_retries=0, timeout=60)
        model = service.engine.engine.model
        hidden = model.hidden
        model.hidden = None
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model="tiny", prompt="y")
        assert caught.value.body["type"] == "server_error"
        with pytest.raises(openai.APIError, match="the server failed"):
            list(client.completions.create(model="tiny", prompt="y", stream=True))
        model.hidden = hidden
        assert client.completions.create(model="tiny", prompt="y", max_tokens=1).choices


# tools


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "a + b",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def says(service: ModelService, monkeypatch: pytest.MonkeyPatch, text: str) -> list[list[int]]:
    """The engine says `text`, token by token, to whatever it is asked; returns the prompts it will
    see.
    """
    from reinforge.core.engine import Completion, NewTokens
    from reinforge.core.sample import Stop

    seen: list[list[int]] = []

    async def generate(
        tokens: list[int], params: Sampling, *, key: int, n: int = 1, on_tokens: Any = None
    ) -> list[Completion]:
        seen.append(tokens)
        ids = [
            *service.tokenizer(text, add_special_tokens=False).input_ids,
            service.tokenizer.eos_token_id,
        ]
        done = Completion(ids, [-0.5] * len(ids), [0] * len(ids), Stop.EOS)
        for i, token in enumerate(ids):
            on_tokens(0, NewTokens([token], [-0.5], [0], done if i + 1 == len(ids) else None))
        return [done]

    monkeypatch.setattr(service.engine.engine, "generate", generate)
    return seen


def test_tools_round_trip(
    client: Any, service: ModelService, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = (
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "</tool_call> é"}}\n</tool_call>'
    )
    seen = says(service, monkeypatch, f"Let me see.\n{call}\n{call.replace('1', '2')}")
    done = client.chat.completions.create(
        model="tiny", messages=ASK, tools=[ADD], max_tokens=200
    ).choices[0]
    assert (
        '"name": "add"' in service.tokenizer.decode(seen[0]) and done.finish_reason == "tool_calls"
    )
    assert done.message.content == "Let me see." and [
        c.function.name for c in done.message.tool_calls
    ] == ["add", "add"]
    assert [json.loads(c.function.arguments) for c in done.message.tool_calls] == [
        {"a": i, "b": "</tool_call> é"} for i in (1, 2)
    ]
    chunks = [
        c.choices[0]
        for c in client.chat.completions.create(
            model="tiny", messages=ASK, tools=[ADD], max_tokens=200, stream=True
        )
    ]
    assert (
        "".join(c.delta.content or "" for c in chunks) == "Let me see."
        and chunks[-1].finish_reason == "tool_calls"
    )
    streamed = [t for c in chunks for t in c.delta.tool_calls or []]
    assert [(t.index, t.function.name, t.function.arguments) for t in streamed] == [
        (i, "add", c.function.arguments) for i, c in enumerate(done.message.tool_calls)
    ]
    answers = [
        {"role": "tool", "tool_call_id": c.id, "content": "3"} for c in done.message.tool_calls
    ]
    history = [*ASK, done.message.model_dump(exclude_none=True), *answers]
    seen = says(service, monkeypatch, "3")
    after = client.chat.completions.create(
        model="tiny", messages=history, tools=[ADD], max_tokens=20
    ).choices[0]
    assert (
        after.message.content == "3"
        and not after.message.tool_calls
        and after.finish_reason == "stop"
    )
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": ' in service.tokenizer.decode(
        seen[0]
    ), "an object, not JSON in JSON"


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "add", "arguments": {"a": 1}',
        "<tool_call>not json</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        'x <tool_call>{"name": "add", "arguments": "1"}</tool_call>',
        '<tool_call>{"name": "add"}</tool_call> and more',
        "1 < 2 <tool",
        " \n ",
    ],
)
def test_what_is_no_call_is_text(
    client: Any, service: ModelService, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    says(service, monkeypatch, text)
    ask: dict[str, Any] = dict(model="tiny", messages=ASK, tools=[ADD], max_tokens=100)
    done = client.chat.completions.create(**ask).choices[0]
    assert (done.message.content, done.message.tool_calls, done.finish_reason) == (
        text,
        None,
        "stop",
    )
    assert (
        "".join(
            c.choices[0].delta.content or ""
            for c in client.chat.completions.create(**ask, stream=True)
        )
        == text
    )


def test_tools_are_only_called_where_there_are_some(
    client: Any, service: ModelService, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    seen = says(service, monkeypatch, text)
    for extra in ({}, {"tools": [ADD], "tool_choice": "none"}):
        done = client.chat.completions.create(
            model="tiny", messages=ASK, max_tokens=100, **extra
        ).choices[0]
        assert done.message.content == text and "Tools" not in service.tokenizer.decode(seen[-1])
