"""From a request to its pieces: rendering, limits, and the engine. Knows nothing of HTTP."""

from __future__ import annotations

import asyncio
import copy
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from reinforge.config.data import DataConfig
from reinforge.core.engine import Sampling
from reinforge.core.errors import InputError
from reinforge.core.sample import Row
from reinforge.core.seeds import seed_of
from reinforge.core.token_text import token_text
from reinforge.data.chat import Renderer, check_prefix
from reinforge.engines.native import NativeEngine
from reinforge.serve.engine_thread import AnswerPiece, EngineThread
from reinforge.serve.replies import PreparedRequest, ReplyFormatter, Top
from reinforge.serve.requests import (
    ApiError,
    ApiRequest,
    ChatRequest,
    CompletionRequest,
    plain_messages,
)

A = TypeVar("A")
R = TypeVar("R")


class ModelService:
    """One model, ready to answer.

    `max_new_tokens` is what a request gets that names no limit, `max_completions` what one may ask
    for, prompts x n. How much there is of a request is looked at before anything is done with it.
    """

    any_name = False

    def __init__(
        self,
        engine: NativeEngine,
        *,
        name: str,
        max_new_tokens: int = 512,
        max_completions: int = 512,
    ):
        tokenizer = engine.model.tokenizer
        self.name = name
        self.max_new_tokens = max_new_tokens
        self.max_completions = max_completions
        self.engine = EngineThread(engine)
        # a tokenizer must not be used by two threads at once: the engine has its own, rendering and
        # decoding get one each
        self.renderer = Renderer(copy.deepcopy(tokenizer), DataConfig(source="serve"))
        self.tokenizer = copy.deepcopy(tokenizer)
        self.template = check_prefix(self.renderer.tokenizer)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="render")
        # who waits for a form to be compiled does not hold up those who want none
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="compile")
        room = engine.pool.total * engine.pool.block_size
        # tokens of one sequence, prompt and completion
        self.context = min(engine.context or room, room)
        self.vocabulary = int(engine.model.head.weight.shape[0])
        # more than this are more tokens than there is room for
        self.letters = self.context * max(map(len, self.tokenizer.get_vocab()))

    def close(self) -> None:
        self.engine.close()
        self._worker.shutdown(wait=False)
        self._compiler.shutdown(wait=False)

    async def chat(
        self, request: ChatRequest
    ) -> tuple[ReplyFormatter, AsyncGenerator[AnswerPiece, None]]:
        tools = request.used_tools
        if not self.renderer.chat:
            raise ApiError(
                400, f"{self.name} has no chat template: use /v1/completions", param="messages"
            )
        if tools and not self.template.get("tools"):
            raise ApiError(
                400, f"the chat template of {self.name} has no place for tools", param="tools"
            )
        self._count(1, request.n or 1)
        if len(request.messages) > self.context or len(tools or ()) > self.context:
            what = (
                f"{len(request.messages)} messages and {len(tools or ())} tools: this server holds"
                f" {self.context} tokens in all"
            )
            raise ApiError(400, what, param="messages", code="context_length_exceeded")
        try:
            prompt = await self._apart(self._rendered, request)
        except (TypeError, RecursionError) as error:
            # templates are foreign code: some add None to text
            raise ApiError(
                400, f"the chat template cannot render these messages: {error}", param="messages"
            ) from None
        if tools and request.constraint is not None:
            raise ApiError(
                400,
                "tools: not with an answer of a given form, which no call of a tool would have",
                param="tools",
            )
        await self._compile(request)
        wanted = self._wanted(
            "chat",
            request,
            [prompt],
            logprobs=bool(request.logprobs),
            top=request.top_logprobs or 0,
            tools=bool(tools),
        )
        return self._start(wanted, request, request.max_completion_tokens or request.max_tokens)

    async def complete(
        self, request: CompletionRequest
    ) -> tuple[ReplyFormatter, AsyncGenerator[AnswerPiece, None]]:
        given = request.prompts
        self._count(len(given), request.n or 1)
        # one by one: between two of them others have their turn
        prompts = [await self._apart(self._ids, prompt) for prompt in given]
        await self._compile(request)
        wanted = self._wanted(
            "text",
            request,
            prompts,
            logprobs=request.logprobs is not None,
            top=request.logprobs or 0,
        )
        if request.echo:
            if request.stream:
                raise ApiError(400, "echo: not with stream", param="echo")
            wanted.echo = [await self._echo(ids, request) for ids in prompts]
        if request.max_tokens == 0 and not request.echo:
            raise ApiError(400, "max_tokens: 0 only with echo", param="max_tokens")
        return self._start(wanted, request, request.max_tokens)

    async def _apart(self, work: Callable[[A], R], given: A) -> R:
        """Rendering and tokenising, in the thread that the tokenizer belongs to: HTTP goes on
        meanwhile.
        """
        return await asyncio.get_running_loop().run_in_executor(self._worker, work, given)

    async def _compile(self, request: ApiRequest) -> None:
        """The form of the answer, before the engine is asked: a large one takes its time, and a
        wrong one is the client's to mend.
        """
        constraint = request.constraint
        if constraint is None:
            return
        if request.ignore_eos:
            raise ApiError(400, "ignore_eos: an answer of a given form ends", param="ignore_eos")
        try:
            await asyncio.get_running_loop().run_in_executor(
                self._compiler, self.engine.engine.grammars.compile, constraint, request.form
            )
        except InputError as error:
            raise ApiError.of(error) from None

    def _rendered(self, request: ChatRequest) -> list[int]:
        tools = request.used_tools
        messages = plain_messages(request.messages)
        self._check_letters(
            sum(len(str(message.get("content") or "")) for message in messages), "messages"
        )
        return self.renderer.prompt(Row("request", messages, {"tools": tools} if tools else {}))

    def _count(self, prompts: int, n: int) -> None:
        if not 1 <= prompts * n <= self.max_completions:
            what = (
                f"{prompts} prompts x n {n}: at least 1 and at most {self.max_completions}"
                " completions per request"
            )
            raise ApiError(400, what, param="prompt" if prompts != 1 else "n")

    def _check_letters(self, letters: int, param: str) -> None:
        """Text that cannot fit is refused before a template is run on it and before it is
        tokenised.
        """
        if letters > self.letters:
            what = (
                f"{letters} characters: this server holds {self.context} tokens, which are at most"
                f" {self.letters}"
            )
            raise ApiError(400, what, param=param, code="context_length_exceeded")

    def _ids(self, prompt: str | list[int]) -> list[int]:
        """Token ids are taken as they are.

        Text is encoded as its author rendered it: special tokens in it are special.
        """
        if isinstance(prompt, str):
            self._check_letters(len(prompt), "prompt")
            tokenizer = self.renderer.tokenizer
            ids = list(
                tokenizer(
                    prompt, add_special_tokens=False, split_special_tokens=False, verbose=False
                )["input_ids"]
            )
            prompt = self.renderer.bos + ids if ids[:1] != self.renderer.bos else ids
        if not prompt:
            raise ApiError(400, "prompt: empty, there is nothing to continue", param="prompt")
        self._room(prompt)
        if not all(0 <= t < self.vocabulary for t in prompt):
            raise ApiError(
                400, f"prompt: token ids go from 0 to {self.vocabulary - 1}", param="prompt"
            )
        return prompt

    async def _echo(
        self, ids: list[int], request: CompletionRequest
    ) -> tuple[str, list[float], list[Top]]:
        self._room(ids)
        text = self.decode(ids)
        if request.logprobs is None:
            return text, [], []
        temperature = 1.0 if request.temperature is None else request.temperature
        return text, *await self.engine.call(
            self.engine.engine.likeliest(ids, 1, k=request.logprobs, temperature=temperature)
        )

    def _wanted(
        self, kind: str, request: ApiRequest, prompts: list[list[int]], **more: Any
    ) -> PreparedRequest:
        stops = self.engine.engine.stop_tokens | frozenset(request.stop_token_ids)
        return PreparedRequest(
            kind,
            self.name,
            prompts,
            request.n or 1,
            token_ids=request.return_token_ids,
            stops=request.stops,
            usage=request.stream_options is not None and request.stream_options.include_usage,
            hidden=frozenset() if request.ignore_eos else stops,
            **more,
        )

    def _room(self, ids: list[int]) -> int:
        room = self.context - len(ids)
        if room < 1:
            raise ApiError(
                400,
                f"the prompt has {len(ids)} tokens, and this server holds {self.context} with the"
                " answer",
                code="context_length_exceeded",
            )
        return room

    def _start(
        self, wanted: PreparedRequest, request: ApiRequest, asked: int | None
    ) -> tuple[ReplyFormatter, AsyncGenerator[AnswerPiece, None]]:
        room = min(self._room(ids) for ids in wanted.prompts)
        if asked is not None and asked > room:
            longest = max(map(len, wanted.prompts))
            raise ApiError(
                400,
                f"{asked} new tokens after a prompt of {longest}: this server holds {self.context}"
                " tokens in all",
                param="max_tokens",
                code="context_length_exceeded",
            )
        replies = ReplyFormatter(wanted, self.decode, self.spell)
        if asked == 0:
            return replies, _nothing()
        sampling = Sampling(
            min(self.max_new_tokens, room) if asked is None else asked,
            1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=request.top_k,
            min_p=request.min_p,
            stop_tokens=tuple(request.stop_token_ids),
            stop_strings=request.stops,
            ignore_eos=request.ignore_eos,
            constraint=request.constraint,
        )
        # with a seed every prompt is drawn from the same stream: a prompt alone gets what it gets
        # among others
        keys = [
            seed_of(request.seed, "serve") if request.seed is not None else secrets.randbits(63)
            for _ in wanted.prompts
        ]
        return replies, self.engine.stream(
            wanted.prompts, sampling, keys=keys, n=wanted.n, top=wanted.top
        )

    def decode(self, tokens: Sequence[int]) -> str:
        return token_text(self.tokenizer, tokens, special=False)

    def spell(self, tokens: Sequence[int]) -> str:
        return token_text(self.tokenizer, tokens)


async def _nothing() -> AsyncGenerator[AnswerPiece, None]:
    pieces: list[AnswerPiece] = []
    for piece in pieces:
        yield piece
