"""One agent's session with the model: requests in, answers out, and everything that was sampled on
record.

A conversation that goes on keeps its ids; only new messages are tokenised (data/dialogue.py).
"""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from reinforge.core.engine import Completion, Engine, Sampling
from reinforge.core.env import Action, Call, Message, Observation
from reinforge.core.sample import Row, Stop
from reinforge.core.seeds import seed_of, tokens_hash
from reinforge.data.chat import Renderer
from reinforge.data.dialogue import DialogueTokens
from reinforge.envs.calls.reader import AnswerReader, ModelAnswer
from reinforge.envs.calls.tool_template import ToolTemplate
from reinforge.rollout.dialogue.episode import EpisodeLimits
from reinforge.rollout.dialogue.lockstep import Lockstep
from reinforge.rollout.dialogue.recording import Recording, Turn


class RequestRefused(Exception):
    """The request cannot be answered, and asking again will not help.

    The agent hears it as status 400.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """The part of an agent's request that concerns sampling. The endpoint reads it from the
    request; `AgentSession` holds it against the limits of the run.
    """

    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    stop_strings: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()


@dataclass
class AgentModel:
    """What answers, and within which limits.

    Draws depend on (seed, purpose, sample uid, prompt ids, how often that prompt came before) and
    nothing else: calls that an agent makes at the same time get the same answers in whatever order
    they arrive.
    """

    engine: Engine
    renderer: Renderer
    tool_template: ToolTemplate  # how tool calls are written
    limits: EpisodeLimits  # max_turns: answers of the model in one episode
    seed: int
    purpose: str = "sample"
    temperature: str = "override"  # or refuse: what becomes of a request with another temperature
    lockstep: Lockstep | None = None


class AgentSession:
    """One agent's connection to the model: one per episode.

    It answers until the episode is over.
    """

    def __init__(self, model: AgentModel, row: Row, uid: str, sampling: Sampling):
        self.model = model
        self.uid = uid
        self.sampling = sampling
        self.where = f"row {row.id}"
        self.reader = AnswerReader(model.renderer, model.tool_template)
        self.recording = Recording()
        # calls, malformed tool calls, overridden temperatures
        self.counts: Counter[str] = Counter()
        self.last: ModelAnswer | None = None
        self.cut = False  # our limit ended the newest answer
        self.full = False  # a request was refused because there was no room for an answer
        self.broken: Exception | None = None  # the engine failed: not the agent's doing
        self._running: set[asyncio.Task[Any]] = set()
        self._open = True
        self._streams: dict[str, set[int]] = {}  # of random numbers: those in use, by prompt
        self._promised = 0  # answers that were given or are on their way

    async def chat(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        request: SamplingRequest,
    ) -> tuple[list[int], list[ModelAnswer]]:
        """Prompt ids and answers.

        `messages` have text as content, and arguments of tool calls as objects.
        """
        return await self._held(self._chat(messages, tools, request))

    async def complete(
        self, prompt: str | list[int], request: SamplingRequest
    ) -> tuple[list[int], list[ModelAnswer]]:
        return await self._held(self._complete(prompt, request))

    async def close(self) -> None:
        """What is still being generated is dropped; the engine has nothing of this episode left."""
        self._open = False
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _held(self, work: Any) -> Any:
        """Runs a request as a task that `close` can reach."""
        if not self._open:
            work.close()
            raise RequestRefused("this episode is over", code="episode_over")
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await task
        except asyncio.CancelledError:
            task.cancel()
            raise

    # ---- conversations ----

    async def _chat(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        request: SamplingRequest,
    ) -> tuple[list[int], list[ModelAnswer]]:
        tool_template = self.model.tool_template
        parent = self.recording.continued(messages, tools)
        if parent is not None:
            assert parent.dialogue is not None
            dialogue = copy.copy(parent.dialogue)
            new = tool_template.reply_messages(named(messages)[len(parent.messages) :])
            added = dialogue.go_on(
                parent.completion.tokens, parent.answer, [self._written(m) for m in new]
            )
            parent = None if added.fresh else parent
            given = added.ids
        else:
            dialogue = DialogueTokens(self.model.renderer, self.where)
            first = tool_template.first_observation(
                Observation([self._written(m) for m in named(messages)], tools)
            )
            given = dialogue.begin(first.messages, first.tools)
        prompt = [*(parent.ids if parent is not None else []), *given]
        answers = []
        for completion in await self._generate(prompt, request):
            answer = self._read(completion, request, bool(tools))
            answers.append(answer)
            action = Action(
                answer.text,
                list(completion.tokens),
                answer.content,
                calls=answer.calls,
                errors=answer.errors,
                thinking=answer.thinking,
            )
            message = tool_template.assistant_message(answer.text, action)
            self._keep(
                Turn(
                    parent,
                    given,
                    completion,
                    dialogue,
                    [*messages, as_message(answer)],
                    tools,
                    message,
                ),
                answer,
            )
        return prompt, answers

    async def _complete(
        self, prompt: str | list[int], request: SamplingRequest
    ) -> tuple[list[int], list[ModelAnswer]]:
        """Text that continues an earlier answer keeps its ids; the rest is encoded as its author
        wrote it.
        """
        renderer = self.model.renderer
        if isinstance(prompt, str):
            parent = self.recording.text_prefix(prompt)
            rest = prompt[len(parent.text or "") :] if parent is not None else prompt
            given = list(
                renderer.tokenizer(
                    rest, add_special_tokens=False, split_special_tokens=False, verbose=False
                )["input_ids"]
            )
            given = renderer.bos + given if parent is None and given[:1] != renderer.bos else given
        else:
            parent = self.recording.prefix(prompt)
            given = prompt[len(parent.ids) :] if parent is not None else prompt
        ids = [*(parent.ids if parent is not None else []), *given]
        if not ids:
            raise RequestRefused("prompt: empty, there is nothing to continue", param="prompt")
        answers = []
        for completion in await self._generate(ids, request):
            answer = ModelAnswer(completion, text := self._visible(completion, request), text)
            answers.append(answer)
            open_end = (
                isinstance(prompt, str)
                and completion.tokens[-1] not in renderer.template.special_ids
            )
            self._keep(
                Turn(
                    parent,
                    given,
                    completion,
                    text=f"{prompt}{renderer.decode(completion.tokens)}" if open_end else None,
                ),
                answer,
            )
        return ids, answers

    def _keep(self, turn: Turn, answer: ModelAnswer) -> None:
        self.recording.turns.append(turn)
        self.last = answer
        self.counts["calls"] += len(answer.calls)
        self.counts["malformed"] += len(answer.errors)

    def _written(self, message: Message) -> Message:
        """Tool calls of the agent's own making, for a template without a place for them, or that
        wants arguments as text.
        """
        tool_template = self.model.tool_template
        if not message.get("tool_calls") or tool_template.format is None:
            return message
        calls = [
            Call(
                c["function"]["name"], c["function"].get("arguments") or {}, str(c.get("id") or "")
            )
            for c in message["tool_calls"]
        ]
        if tool_template.native:
            return tool_template.assistant_message(
                "", Action("", [], str(message.get("content") or ""), calls=calls)
            )
        return {
            "role": "assistant",
            "content": f"{message.get('content') or ''}{tool_template.format.render(calls)}",
        }

    # ---- answers ----

    def _read(self, completion: Completion, request: SamplingRequest, tools: bool) -> ModelAnswer:
        """Calls count where there are tools and all of them could be read."""

        def call_id(k: int) -> str:
            name = tokens_hash([completion.tokens])
            return f"{seed_of(self.uid, name, k) % 16**9:09x}"

        stops = (*request.stop_strings, *self.sampling.stop_strings)
        answer = self.reader.read(completion, call_id=call_id, stop_strings=stops)
        if tools and answer.calls and not answer.errors:
            return answer
        errors = answer.errors if tools else ()
        return replace(answer, content=answer.text, calls=(), errors=errors)

    def _visible(self, completion: Completion, request: SamplingRequest) -> str:
        stops = (*request.stop_strings, *self.sampling.stop_strings)
        return self.reader.visible_text(completion, stops)

    async def _generate(self, prompt: list[int], request: SamplingRequest) -> list[Completion]:
        model = self.model
        room = model.limits.max_tokens - len(prompt)
        self.full = room < 1
        if self.full:
            raise RequestRefused(
                f"the conversation has {len(prompt)} tokens and leaves no room for an answer below"
                f" {model.limits.max_tokens}",
                code="context_length_exceeded",
            )
        most = model.limits.max_turns
        if most is not None and self._promised + request.n > most:
            raise RequestRefused(
                f"an episode has at most {most} answers of the model (agent.max_calls)",
                code="too_many_calls",
            )
        if request.temperature is not None and request.temperature != self.sampling.temperature:
            if model.temperature == "refuse":
                raise RequestRefused(
                    f"temperature: {self.sampling.temperature:g} is what is trained; ask for that,"
                    " or leave it out",
                    param="temperature",
                )
            self.counts["overridden"] += request.n
        limit = min(self.sampling.max_new_tokens, room)
        wanted = limit if request.max_tokens is None else min(request.max_tokens, limit)
        params = replace(
            self.sampling,
            max_new_tokens=wanted,
            stop_strings=(*self.sampling.stop_strings, *request.stop_strings),
            stop_tokens=(*self.sampling.stop_tokens, *request.stop_tokens),
        )
        name = tokens_hash([prompt])
        used = self._streams.setdefault(name, set())
        stream = next(k for k in range(len(used) + 1) if k not in used)
        used.add(stream)
        self._promised += request.n
        try:
            async with (
                nullcontext() if model.lockstep is None else model.lockstep.turn(self.uid, prompt)
            ):
                key = seed_of(model.seed, model.purpose, self.uid, name, stream)
                completions = await model.engine.generate(prompt, params, key=key, n=request.n)
        except asyncio.CancelledError:
            used.discard(stream)  # nobody saw what was drawn
            self._promised -= request.n
            raise
        except Exception as error:
            self.broken = error
            raise
        self.cut = wanted == limit and completions[-1].stop is Stop.LENGTH
        return completions


def named(messages: Sequence[Message]) -> list[Message]:
    """Answers of tools with the name of the tool, which templates want and the API leaves out."""
    names = {
        c.get("id"): c["function"]["name"] for m in messages for c in m.get("tool_calls") or []
    }
    return [
        (
            {**m, "name": names[m["tool_call_id"]]}
            if m.get("role") == "tool" and "name" not in m and m.get("tool_call_id") in names
            else m
        )
        for m in messages
    ]


def as_message(answer: ModelAnswer) -> Message:
    calls = [
        {
            "id": c.id,
            "type": "function",
            "function": {"name": c.name, "arguments": dict(c.arguments)},
        }
        for c in answer.calls
    ]
    return {
        "role": "assistant",
        "content": answer.content,
        **({"tool_calls": calls} if calls else {}),
    }
