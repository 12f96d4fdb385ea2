"""Rewards that ask a server: `judge`, a language model behind the OpenAI API, and `http`, any
server that returns scores.

What a server says may change, so it is journalled like a user's function; a judge's replies are
also kept on disk if `cache` names a file. A request that takes too long leaves its completions
unscored; one that is refused, or fails after all tries, is an error. The clock of a request starts
when it is its turn: waiting for a slot or for the rate is no timeout.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from reinforge.core.engine import Sampling
from reinforge.core.errors import InputError
from reinforge.core.seeds import seed_of
from reinforge.engines.openai import OpenAIClient, OpenAIServer
from reinforge.rewards.judge import HIGHEST, Judge, Mode
from reinforge.rewards.outcome import LARGEST, RewardOutcome

KEY = "REINFORGE_API_KEY"


class RewardTimeout(Exception):
    """A request took longer than it may."""


@dataclass
class RewardClient:
    """One server, its limits, and a client for every event loop that asks."""

    server: OpenAIServer
    timeout: float
    where: str
    per_minute: float | None = None
    _clients: dict[int, tuple[asyncio.AbstractEventLoop, OpenAIClient, asyncio.Semaphore]] = field(
        default_factory=dict
    )
    _next: float = 0.0

    async def __call__(self, request: Callable[[OpenAIClient], Awaitable[Any]]) -> Any:
        loop = asyncio.get_running_loop()
        if id(loop) not in self._clients or self._clients[id(loop)][0] is not loop:
            self._clients = {k: v for k, v in self._clients.items() if not v[0].is_closed()}
            self._clients[id(loop)] = (
                loop,
                OpenAIClient(self.server, where=self.where),
                asyncio.Semaphore(self.server.parallel),
            )
            self._next = 0.0
        _, client, room = self._clients[id(loop)]
        async with room:
            if self.per_minute:
                at = max(loop.time(), self._next)
                self._next = at + 60 / self.per_minute
                await asyncio.sleep(at - loop.time())
            try:
                async with asyncio.timeout(self.timeout) as limit:
                    return await request(client)
            except TimeoutError as error:
                if not limit.expired():
                    raise
                raise RewardTimeout from error


class JudgeReplyCache:
    """A judge's replies on disk, one JSON line each, by what was asked.

    Without a path nothing is kept.
    """

    def __init__(self, path: Path | None):
        self.path = path
        self.known: dict[str, str] = {}
        if path is not None and path.exists():
            for line in path.read_text().split("\n"):
                try:
                    entry = json.loads(line)
                except json.JSONDecodeError:  # cut by a crash
                    continue
                self.known[entry["key"]] = entry["reply"]

    def add(self, key: str, reply: str) -> None:
        if self.path is not None:
            self.known[key] = reply
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write("\n" + json.dumps({"key": key, "reply": reply}) + "\n")


@dataclass
class JudgeReward:
    """`(prompts, completions)` -> scores from 0 to 1.

    All completions of a call answer the same prompt.
    """

    asker: RewardClient
    mode: Mode
    template: str | None
    replies: JudgeReplyCache
    sampling: Sampling
    tries: int = 2  # for a reply in another form than the judge was told to use

    async def __call__(self, prompts: Sequence[Any], completions: Sequence[str]) -> RewardOutcome:
        if self.mode == "pairwise":
            return await self._judged(prompts[0], completions)
        parts = await asyncio.gather(
            *(self._judged(p, [c]) for p, c in zip(prompts, completions, strict=True))
        )
        return RewardOutcome.joined(parts)

    async def _judged(self, prompt: Any, completions: Sequence[str]) -> RewardOutcome:
        scores: list[float | None] = [None] * len(completions)
        for attempt in range(self.tries):
            judge = Judge(partial(self._ask, attempt), mode=self.mode, template=self.template)
            try:
                scores = await judge(prompt, completions)
            except RewardTimeout:
                return RewardOutcome([None] * len(completions), timeouts=len(completions))
            if None not in scores:
                break
        top = HIGHEST if self.mode == "score" else 1.0
        # an answer may have confused the judge
        unread = frozenset(i for i, score in enumerate(scores) if score is None)
        return RewardOutcome([None if s is None else s / top for s in scores], lost=unread)

    async def _ask(self, attempt: int, text: str) -> str:
        server = self.asker.server
        asked = json.dumps(
            [
                server.url,
                server.model,
                self.sampling.max_new_tokens,
                self.sampling.temperature,
                attempt,
                text,
            ]
        )
        key = hashlib.sha256(asked.encode()).hexdigest()
        if key not in self.replies.known:
            answers = await self.asker(
                lambda client: client.complete(
                    text, self.sampling, key=seed_of("judge", attempt, text)
                )
            )
            self.replies.add(key, answers[0].text)
            return answers[0].text
        return self.replies.known[key]


@dataclass
class HttpReward:
    """POSTs {prompts, completions, columns} and expects {"scores": [number or null, ...]}, as
    `reinforge serve --reward` gives.
    """

    asker: RewardClient
    columns: Sequence[str] = ()

    @property
    def needs(self) -> Sequence[str]:
        """Columns that rows must have."""
        return self.columns

    async def __call__(
        self, prompts: Sequence[Any], completions: Sequence[str], **columns: Any
    ) -> RewardOutcome:
        missing = [name for name in self.columns if name not in columns]
        if missing:
            raise InputError(
                f"the rows have no column {', '.join(missing)}.",
                where=f"{self.asker.where}.columns",
                fix="Map it with data.columns.",
            )
        body: dict[str, Any] = {"prompts": list(prompts), "completions": list(completions)}
        if self.columns:
            body["columns"] = {name: columns[name] for name in self.columns}
        try:
            reply = await self.asker(lambda client: client.post(self.asker.server.url, body))
        except RewardTimeout:
            return RewardOutcome([None] * len(completions), timeouts=len(completions))
        scores = reply.get("scores")
        if (
            not isinstance(scores, list)
            or len(scores) != len(completions)
            or not all(s is None or _is_number(s) for s in scores)
        ):
            raise InputError(
                f"{self.asker.server.url} answered {str(reply)[:200]} for {len(completions)}"
                " completions.",
                where=self.asker.where,
                fix=(
                    'It must answer {"scores": [...]} with one finite number or null per'
                    " completion, none beyond 1e16."
                ),
            )
        return RewardOutcome([None if s is None else float(s) for s in scores])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


COMMON = ("url", "api_key_env", "parallel", "rate", "retries")
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "judge": (*COMMON, "model", "mode", "prompt", "temperature", "max_tokens", "cache"),
    "http": (*COMMON, "columns"),
}


def remote_reward(
    name: Literal["judge", "http"], options: Mapping[str, Any], timeout: float, where: str
) -> JudgeReward | HttpReward:
    """The reward that `rewards.N.options` describes. Nothing is asked yet."""
    unknown = [key for key in options if key not in OPTIONS[name]]
    if unknown:
        raise InputError(
            f"{name} has no option {', '.join(unknown)}.",
            where=where,
            fix=f"It has: {', '.join(OPTIONS[name])}.",
        )
    url = options.get("url")
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise InputError(
            "which server?",
            where=f"{where}.url",
            fix="Write e.g. options: {url: http://127.0.0.1:8000/v1}.",
        )
    server = OpenAIServer(
        url,
        options.get("model"),
        os.environ.get(str(options.get("api_key_env", KEY))) or None,
        int(options.get("parallel", 16)),
        retries=int(options.get("retries", 4)),
        timeout=timeout,
    )
    rate = options.get("rate")
    asker = RewardClient(server, timeout, where, None if rate is None else float(rate))
    if name == "http":
        return HttpReward(asker, tuple(options.get("columns", ())))
    mode = options.get("mode", "score")
    if mode not in ("score", "pairwise"):
        raise InputError(
            f"{mode!r} is no way to judge.",
            where=f"{where}.mode",
            fix="There are: score, pairwise.",
        )
    template = options.get("prompt")
    if isinstance(template, str) and "{" not in template:
        path = Path(template).expanduser()
        if not path.is_file():
            raise InputError(
                f"no such file: {path}.",
                where=f"{where}.prompt",
                fix="Give the judge's prompt, or a file that holds it.",
            )
        template = path.read_text()
    Judge(_nobody, mode=mode, template=template)  # a prompt without its places is refused here
    replies = JudgeReplyCache(Path(options["cache"]).expanduser() if options.get("cache") else None)
    return JudgeReward(
        asker,
        mode,
        template,
        replies,
        Sampling(int(options.get("max_tokens", 1024)), float(options.get("temperature", 0.0))),
    )


async def _nobody(text: str) -> str:
    return text
