"""What a client may ask for, as the OpenAI API names it, and a few extensions.

What cannot be done is refused, never ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from reinforge.core.constraint import Constraint
from reinforge.core.errors import InputError

MOST_TOP = 20  # likeliest tokens per place
COOLEST = 1e-3  # a lower temperature than this is 0
# the API key of the request that is being answered
CALLER: ContextVar[str] = ContextVar("CALLER", default="")


# what vLLM called the parts of `structured_outputs` in earlier days
RENAMED = {
    f"guided_{name}": f': use "structured_outputs": {{"{name}": ...}}'
    for name in ("regex", "json", "grammar", "choice")
}
# of a chat alone
RENAMED["response_format"] = ' here: use "structured_outputs": {"json": ...}'


class ApiError(Exception):
    """An answer with an OpenAI error object. `status` is the HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    @classmethod
    def of(cls, error: InputError) -> ApiError:
        return cls(400, str(error), param=error.where)


class _ContentPart(BaseModel):
    model_config = ConfigDict(extra="forbid")


class StreamOptions(_ContentPart):
    include_usage: bool = False
    include_obfuscation: Any = None


class StructuredOutputs(_ContentPart):
    """vLLM's `structured_outputs`: one of them says what the answer must match."""

    regex: str | None = None
    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    grammar: str | None = None
    choice: Annotated[list[str], Field(min_length=1, fail_fast=True)] | None = None

    def constraint(self) -> Constraint:
        given: list[Constraint] = []
        if self.regex is not None:
            given.append(Constraint("regex", self.regex))
        if self.json_ is not None:
            text = self.json_ if isinstance(self.json_, str) else json.dumps(self.json_)
            given.append(Constraint("json_schema", text))
        if self.json_object:
            given.append(Constraint("json_object"))
        if self.grammar is not None:
            given.append(Constraint("grammar", self.grammar))
        if self.choice is not None:
            given.append(Constraint("regex", "|".join(map(re.escape, self.choice))))
        if len(given) != 1:
            raise ApiError(
                400,
                f"structured_outputs: {len(given)} forms; give one of regex, json, json_object,"
                " grammar and choice",
                param="structured_outputs",
            )
        return given[0]


class ApiRequest(_ContentPart):
    """What chat and text completions have in common."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    temperature: Annotated[FiniteFloat, Field(ge=0, le=100)] | None = None
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: (
        Annotated[str, Field(max_length=1000)]
        | Annotated[list[Annotated[str, Field(max_length=1000)]], Field(max_length=16)]
        | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # extensions
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 0
    min_p: Annotated[FiniteFloat, Field(ge=0, le=1)] = 0.0
    stop_token_ids: Annotated[
        list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=64)
    ] = []
    ignore_eos: bool = False
    return_token_ids: bool = False
    structured_outputs: StructuredOutputs | None = None
    # without effect on the answer
    user: Any = None
    store: Any = None
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    # refused unless they ask for nothing
    frequency_penalty: Any = None
    presence_penalty: Any = None
    logit_bias: Any = None

    def neutral(self) -> dict[str, tuple[Any, ...]]:
        """Fields we cannot act on, and the values that ask for nothing."""
        return {
            "frequency_penalty": (None, 0),
            "presence_penalty": (None, 0),
            "logit_bias": (None, {}),
        }

    @property
    def form(self) -> str:
        """The parameter that says what the answer must match, where one does."""
        return "structured_outputs"

    @property
    def constraint(self) -> Constraint | None:
        """What the answer must match; None: anything."""
        return None if self.structured_outputs is None else self.structured_outputs.constraint()

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(
            s for s in ([self.stop] if isinstance(self.stop, str) else self.stop or []) if s
        )


# the first that is none decides: there may be millions
Ids = Annotated[list[int], Field(fail_fast=True)]


class CompletionRequest(ApiRequest):
    prompt: Annotated[
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | Ids
        | Annotated[list[Ids], Field(fail_fast=True)],
        Field(union_mode="left_to_right"),
    ]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    echo: bool = False
    # vLLM's: of every token of the prompt, and of so many of the likeliest in its place
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    best_of: Any = None
    suffix: Any = None

    def neutral(self) -> dict[str, tuple[Any, ...]]:
        return {**super().neutral(), "best_of": (None, self.n or 1), "suffix": (None, "")}

    @property
    def prompts(self) -> list[str | list[int]]:
        given = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            return [given]  # type: ignore[list-item]
        return list(given)  # type: ignore[arg-type]


class JsonSchemaFormat(_ContentPart):
    schema_: Any = Field(None, alias="schema")
    # without effect on the answer, which always fits the schema
    name: Any = None
    description: Any = None
    strict: Any = None


class ResponseFormat(_ContentPart):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def constraint(self) -> Constraint | None:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ApiError(
                400,
                "response_format: json_schema goes with type: json_schema, and only with it",
                param="response_format",
            )
        if self.type == "text":
            return None
        if self.json_schema is None:
            return Constraint("json_object")
        return Constraint("json_schema", json.dumps(self.json_schema.schema_))


class ChatRequest(ApiRequest):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto"] | Any = None
    parallel_tool_calls: Any = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Any = None

    def neutral(self) -> dict[str, tuple[Any, ...]]:
        return {
            **super().neutral(),
            "tool_choice": (None, "none", "auto"),
            "parallel_tool_calls": (None, True),
            "reasoning_effort": (None,),
        }

    @property
    def form(self) -> str:
        return super().form if self.response_format is None else "response_format"

    @property
    def constraint(self) -> Constraint | None:
        """In either API's words, and not in both."""
        extra = super().constraint
        own = None if self.response_format is None else self.response_format.constraint()
        if extra is not None and own is not None:
            raise ApiError(
                400,
                "response_format and structured_outputs: an answer has one form",
                param="structured_outputs",
            )
        return own or extra

    @property
    def used_tools(self) -> list[dict[str, Any]] | None:
        return None if self.tool_choice == "none" else self.tools or None


class ScoreRequest(_ContentPart):
    """Prompts and completions, or whole conversations whose last turn is the one to score."""

    model: str | None = None
    prompts: Annotated[list[str | list[dict[str, Any]]], Field(fail_fast=True)] | None = None
    completions: Annotated[list[str], Field(fail_fast=True)] | None = None
    messages: Annotated[list[list[dict[str, Any]]], Field(fail_fast=True)] | None = None
    # of the heads of an attribute model in its score
    weights: dict[str, float] | None = None


R = TypeVar("R", bound=BaseModel)


def parsed(kind: type[R], body: bytes) -> R:
    """The request in a body, or an error that names the field."""
    try:
        value = json.loads(body, parse_constant=_no_constant)
        if b"\\u" in body:
            # half of a surrogate pair, which only an escape can write, is no text
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise ApiError(400, f"the body is a JSON {type(value).__name__}, not an object")
    try:
        request = kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = ".".join(
            str(part)
            for part in first["loc"]
            if not str(part).startswith(("constrained-", "list[", "function-"))
        )
        what = (
            f"is not a parameter of this server{RENAMED.get(param, '')}"
            if first["type"] == "extra_forbidden"
            else first["msg"]
        )
        raise ApiError(400, f"{param}: {what}", param=param) from None
    if isinstance(request, ApiRequest):
        for name, fine in request.neutral().items():
            if getattr(request, name) not in fine:
                raise ApiError(
                    400,
                    f"{name}: this server cannot do that; leave it out",
                    param=name,
                    code="unsupported_parameter",
                )
        if request.temperature and request.temperature < COOLEST:
            raise ApiError(
                400, f"temperature: use 0 (greedy) or at least {COOLEST}", param="temperature"
            )
        if request.stream_options is not None and not request.stream:
            raise ApiError(400, "stream_options: only with stream: true", param="stream_options")
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs: only with logprobs: true", param="top_logprobs")
    return request


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def plain_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: content parts joined to text, arguments of earlier
    tool calls as objects.
    """
    return [_plain_message(i, m) for i, m in enumerate(messages)]


def _plain_message(i: int, message: dict[str, Any]) -> dict[str, Any]:
    out = {k: v for k, v in message.items() if v is not None or k == "content"}
    content = out.get("content")
    if isinstance(content, list):
        texts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
            for part in content
        ]
        if not all(isinstance(t, str) for t in texts):
            raise ApiError(
                400, f"messages.{i}.content: this server reads text parts only", param="messages"
            )
        out["content"] = "".join(map(str, texts))
    if out.get("tool_calls"):
        out["tool_calls"] = [_plain_call(i, call) for call in out["tool_calls"]]
    return out


def _plain_call(i: int, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(
            400, f"messages.{i}.tool_calls: not a list of function calls", param="messages"
        )
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            pass  # what a model wrote need not be JSON; the template prints it as it is
    return {**call, "function": {**function, "arguments": arguments}}
