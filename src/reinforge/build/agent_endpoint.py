"""An OpenAI endpoint that the model in training answers, for agents that are programs.

It listens on loopback, on a port that is free, in a thread of its own. A request is known
by its API key: there is one for every sample, drawn anew, and it is worth nothing once the episode
is over. The engine, the tokenizer and the record of an episode belong to the event loop of the
training; requests go there and back.
"""

from __future__ import annotations

import asyncio
import copy
import secrets
import socket
import threading
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any

from reinforge.core.errors import InputError
from reinforge.core.token_text import token_text
from reinforge.envs.calls.reader import ModelAnswer
from reinforge.envs.programs import EndpointAddress
from reinforge.rollout.dialogue.agent_session import (
    AgentSession,
    RequestRefused,
    SamplingRequest,
)
from reinforge.serve.engine_thread import AnswerPiece
from reinforge.serve.replies import Choice, PreparedRequest, ReplyFormatter
from reinforge.serve.requests import (
    CALLER,
    ApiError,
    ApiRequest,
    ChatRequest,
    CompletionRequest,
    plain_messages,
)
from reinforge.serve.text import Decode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BODY = 32 << 20  # bytes of one request
AT_ONCE = 1 << 16  # requests; how many agents there are is limited elsewhere


class CompleteChoice(Choice):
    """An answer that is complete when it is told: its text and calls are as the record of the
    episode has them.
    """

    def __init__(self, decode: Decode, wanted: PreparedRequest, answer: ModelAnswer):
        super().__init__(decode, wanted)
        self.answer = answer

    def take(self, piece: AnswerPiece) -> str:
        super().take(piece)
        self.content = self.answer.content
        self.calls = list(self.answer.calls)
        self.finish = "tool_calls" if self.calls else self.finish
        return self.content


class AgentEndpoint:
    """Answers the requests of all agents of a run.

    Opens with the first agent, closes with the event loop that it was opened in.
    """

    any_name = True  # agents ask for whatever model they were written for

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context: int, *, name: str = "policy"):
        self.name = name
        self.context = context
        self._tokenizer = copy.deepcopy(tokenizer)  # must not be used by two threads at once
        self._sessions: dict[str, AgentSession] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._port = 0
        self._watch: asyncio.Task[None] | None = None

    # ---- in the loop of the engine ----

    def open(self, session: AgentSession) -> EndpointAddress:
        if self._loop is not asyncio.get_running_loop():
            self._start()
        key = secrets.token_urlsafe(32)
        self._sessions[key] = session
        return EndpointAddress(f"http://127.0.0.1:{self._port}/v1", key)

    def close(self, address: EndpointAddress) -> None:
        self._sessions.pop(address.api_key, None)

    def _start(self) -> None:
        try:
            from reinforge.serve.http import ConnectionLimits, make_app, server_of
        except ModuleNotFoundError as error:
            raise InputError(
                f"agents need {error.name}, which is not installed.",
                where="agent",
                fix="pip install 'reinforge[serve]'",
            ) from error
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        limits = ConnectionLimits(requests=AT_ONCE, body=BODY, connections=AT_ONCE)
        app = make_app(
            self, None, limits=limits, api_key=lambda key: key in self._sessions, local=True
        )
        server = server_of(app, limits)

        def serve() -> None:
            with listener:
                server.run(sockets=[listener])

        async def until_the_end() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                server.should_exit = True

        threading.Thread(target=serve, name="agent endpoint", daemon=True).start()
        self._loop = asyncio.get_running_loop()
        self._port = listener.getsockname()[1]
        self._sessions = {}
        self._watch = self._loop.create_task(until_the_end())

    # ---- in the loop of the server ----

    async def chat(
        self, request: ChatRequest
    ) -> tuple[ReplyFormatter, AsyncGenerator[AnswerPiece, None]]:
        session = self._line()
        sampling_request = self._sampling_request(
            request, request.max_completion_tokens or request.max_tokens
        )
        if request.top_logprobs:
            raise ApiError(
                400, "top_logprobs: not in training; logprobs alone are there", param="top_logprobs"
            )
        prompt, answers = await self._in_engine_loop(
            session.chat(plain_messages(request.messages), request.used_tools, sampling_request)
        )
        return self._replies("chat", request, prompt, answers, bool(request.logprobs))

    async def complete(
        self, request: CompletionRequest
    ) -> tuple[ReplyFormatter, AsyncGenerator[AnswerPiece, None]]:
        session = self._line()
        sampling_request = self._sampling_request(request, request.max_tokens)
        scored = request.echo or request.logprobs or request.prompt_logprobs is not None
        if scored or request.max_tokens == 0:
            raise ApiError(
                400, "echo, max_tokens: 0 and the likeliest tokens: not in training", param="echo"
            )
        if len(request.prompts) != 1:
            raise ApiError(
                400,
                f"{len(request.prompts)} prompts: in training a request has one",
                param="prompt",
            )
        prompt, answers = await self._in_engine_loop(
            session.complete(request.prompts[0], sampling_request)
        )
        return self._replies("text", request, prompt, answers, request.logprobs is not None)

    def _line(self) -> AgentSession:
        session = self._sessions.get(CALLER.get())
        if session is None:
            raise ApiError(
                401,
                "the episode that this API key belongs to is over",
                kind="authentication_error",
                code="invalid_api_key",
            )
        return session

    def _sampling_request(self, request: ApiRequest, max_tokens: int | None) -> SamplingRequest:
        """What the request wants of the sampling.

        What would change the distribution that is trained is refused.
        """
        if request.constraint is not None:
            raise ApiError(
                400,
                f"{request.form}: training computes log-probs without it; leave it out",
                param=request.form,
                code="unsupported_parameter",
            )
        for name, fine in (
            ("top_p", (None, 1)),
            ("top_k", (0,)),
            ("min_p", (0,)),
            ("ignore_eos", (False,)),
        ):
            if getattr(request, name) not in fine:
                raise ApiError(
                    400,
                    f"{name}: it changes the distribution that is sampled from, and would bias"
                    " training; leave it out",
                    param=name,
                    code="unsupported_parameter",
                )
        return SamplingRequest(
            request.n or 1,
            max_tokens,
            request.temperature,
            request.stops,
            tuple(request.stop_token_ids),
        )

    async def _in_engine_loop(self, work: Any) -> Any:
        """Runs the work where the engine is."""
        assert self._loop is not None
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return await asyncio.wrap_future(future)
        except RequestRefused as refused:
            raise ApiError(400, str(refused), param=refused.param, code=refused.code) from None
        except (TypeError, RecursionError) as error:
            # templates are foreign code: some add None to text
            raise ApiError(
                400, f"the chat template cannot render these messages: {error}", param="messages"
            ) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # the client is gone
            raise ApiError(
                401, "the episode is over", kind="authentication_error", code="episode_over"
            ) from None

    def _replies(
        self,
        kind: str,
        request: ApiRequest,
        prompt: list[int],
        answers: Sequence[ModelAnswer],
        logprobs: bool,
    ) -> tuple[ReplyFormatter, Any]:
        wanted = PreparedRequest(
            kind,
            request.model or self.name,
            [prompt],
            len(answers),
            logprobs=logprobs,
            token_ids=request.return_token_ids,
            stops=request.stops,
            usage=request.stream_options is not None and request.stream_options.include_usage,
        )
        replies = ReplyFormatter(wanted, self._decode, self._spell)
        replies.choices = [CompleteChoice(self._decode, wanted, s) for s in answers]
        return replies, _pieces_of(answers)

    def _decode(self, tokens: Sequence[int]) -> str:
        return token_text(self._tokenizer, tokens, special=False)

    def _spell(self, tokens: Sequence[int]) -> str:
        return token_text(self._tokenizer, tokens)


async def _pieces_of(answers: Sequence[ModelAnswer]) -> AsyncGenerator[AnswerPiece, None]:
    """An answer is told when it is complete and on record; a streamed one comes in one piece."""
    for i, s in enumerate(answers):
        yield AnswerPiece(i, s.completion.tokens, s.completion.logprobs, s.completion.stop)
