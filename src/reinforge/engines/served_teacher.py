"""A teacher behind an OpenAI-compatible server: it scores the student's tokens as they are.

Token ids are sent, never text. There are two ways to have them scored: `prompt_logprobs`, which
vLLM and our own server understand and which has the likeliest tokens in place of each, by id; and
`echo` with `logprobs` of the older API, which has the log-prob of the token itself. Which one a
server understands is found out before the first step, and so is whether its tokens are the
student's.

Legend: M trained tokens, k tokens per place.
"""

from __future__ import annotations

import math
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from reinforge.config.teacher import TeacherServerConfig
from reinforge.core.aio import run_apart, together
from reinforge.core.batch import Batch
from reinforge.core.errors import InputError, RequestError
from reinforge.core.token_text import token_text
from reinforge.core.turns import TURNS
from reinforge.engines.openai import OpenAIClient, OpenAIServer, ServerRefuses, ServerSilent

T = TypeVar("T")
PROBED = 1024  # tokens of the vocabulary that are compared with the student's
PROBE = 256  # of them in one request
SAME_TOKENS = "Serve a teacher with the student's tokenizer."
RESUME = (
    "Start it, or correct the address, and run the same command again: the run goes on from its"
    " newest checkpoint."
)


@dataclass(frozen=True, slots=True)
class ScoringWay:
    """How a server is asked. Some generate nothing where nothing is asked for; others must."""

    kind: Literal["prompt_logprobs", "echo"]
    max_tokens: int

    def request(self, prompt: Sequence[int] | str, k: int) -> dict[str, Any]:
        wanted = {"echo": True, "logprobs": 1} if self.kind == "echo" else {"prompt_logprobs": k}
        return {"prompt": prompt, "max_tokens": self.max_tokens, "temperature": 1.0, **wanted}


WAYS = (ScoringWay("prompt_logprobs", 0), ScoringWay("prompt_logprobs", 1), ScoringWay("echo", 1))


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """What a server says of one token: its log-prob, its text, and the likeliest in its place."""

    logprob: float
    text: str | None
    best: list[tuple[int, float]]


class ServedTeacher:
    """A `TeacherModel` behind a server. `build/teachers.py` makes and checks it; backends ask it,
    each in its own process. The API key stays in the environment.
    """

    def __init__(self, cfg: TeacherServerConfig, where: str, vocabulary: int):
        """`vocabulary`: how many tokens the student has."""
        self.cfg = cfg
        self.vocabulary = vocabulary
        self.where = f"{where}.server"
        self.model = cfg.model
        self.way: ScoringWay | None = None

    def check(self, tokenizer: Any, k: int, texts: Sequence[str], longest: int = 0) -> None:
        """Refuses a server that does not answer, cannot tell k tokens, is made for shorter texts
        than the `longest` of the run, or has other tokens than the student: some of all tokens are
        compared, and how `texts` are split. Finds out how it wants to be asked.
        """
        room = run_apart(self._asked(self._room))
        if room is not None and longest > room:
            raise InputError(
                f"{self.cfg.url} holds {room} tokens, and the run has texts of up to {longest}.",
                where=self.where,
                fix="Serve it with a longer context, or lower rollout.max_new_tokens.",
            )
        added = set(tokenizer.get_added_vocab().values())
        every = sorted(set(tokenizer.get_vocab().values()) - added)
        ids = every[:: math.ceil(len(every) / PROBED)]
        size = PROBE if room is None else min(PROBE, room)
        # the first token of a text has no log-prob
        parts = [[ids[0], *ids[at : at + size - 1]] for at in range(0, len(ids), size - 1)]
        scored = run_apart(self._asked(lambda client: self._score(client, parts, k)))
        self._compare(tokenizer, ids, [token.text for part in scored for token in part])
        for text in texts:
            ours = tokenizer(text, add_special_tokens=False)["input_ids"][: size - 1]
            short = token_text(tokenizer, ours)
            if tokenizer(short, add_special_tokens=False)["input_ids"] == ours and len(ours) > 1:
                self._compare_split(tokenizer, short, ours)

    def logprobs(self, batch: Batch, temperature: float) -> Tensor:
        """[M] of the trained tokens."""
        scored = self._scored(batch, 0, temperature)
        return torch.tensor([token.logprob for token in scored], device=batch.targets.device)

    def best(self, batch: Batch, k: int, temperature: float) -> tuple[Tensor, Tensor]:
        """([M, k] int32 ids, [M, k] float32 log-probs) of the likeliest tokens."""
        pairs = [token.best for token in self._scored(batch, k, temperature)]
        device = batch.targets.device
        ids = torch.tensor([[i for i, _ in best] for best in pairs], dtype=torch.int32)
        logprobs = torch.tensor([[p for _, p in best] for best in pairs])
        return ids.reshape(len(pairs), k).to(device), logprobs.reshape(len(pairs), k).to(device)

    def _scored(self, batch: Batch, k: int, temperature: float) -> list[ScoredToken]:
        """Of every trained token of the batch, sample by sample."""
        assert temperature == 1, "the rules of the config refuse it"
        trained = [s.trained.nonzero()[:, 0].tolist() for s in batch.samples]
        # what comes after the last of them tells nothing about it
        texts = [
            s.tokens[: places[-1] + 1].tolist()
            for s, places in zip(batch.samples, trained, strict=True)
            if places
        ]
        with TURNS.resting():
            found = run_apart(self._asked(lambda client: self._score(client, texts, k)))
        return [
            scored[place - 1]
            for scored, places in zip(found, filter(None, trained), strict=True)
            for place in places
        ]

    # ---- HTTP ----

    async def _asked(self, ask: Callable[[OpenAIClient], Awaitable[T]]) -> T:
        cfg = self.cfg
        key = os.environ.get(cfg.api_key_env) if cfg.api_key_env is not None else None
        server = OpenAIServer(
            cfg.url,
            self.model,
            key or None,
            cfg.parallel,
            retries=cfg.retries,
            timeout=cfg.timeout,
        )
        try:
            async with OpenAIClient(server, where=self.where) as client:
                self.model = await client.model()
                return await ask(client)
        except ServerSilent as error:
            raise InputError(error.what, where=self.where, fix=RESUME) from None
        except (RequestError, ServerRefuses) as error:
            fix = (
                "Check url, model and api_key_env, that the model has the student's tokens, and"
                " that the server tells as many log-probs (--max-logprobs) as the run asks for."
            )
            raise InputError(error.what, where=self.where, fix=fix) from None

    async def _room(self, client: OpenAIClient) -> int | None:
        """Tokens of the longest text that can be scored; None: it does not say."""
        listed = (await client.get("models")).get("data", [])
        length = next((m.get("max_model_len") for m in listed if m.get("id") == self.model), None)
        return length - 1 if isinstance(length, int) else None

    async def _score(
        self, client: OpenAIClient, texts: Sequence[Sequence[int]], k: int
    ) -> list[list[ScoredToken]]:
        """Of every token after the first."""
        if self.way is None and texts:
            self.way = await self._find_way(client, texts[0], k)
        return await together(self._one(client, self.way, text, k) for text in texts if self.way)

    async def _find_way(self, client: OpenAIClient, ids: Sequence[int], k: int) -> ScoringWay:
        refused: list[InputError] = []
        for way in WAYS:
            if way.kind == "echo" and k:
                continue  # it tells tokens by their texts, which may be the same for several
            try:
                await self._one(client, way, ids, k)
                return way
            except ServerSilent:
                raise
            except InputError as error:
                refused.append(error)
        raise refused[1]

    async def _one(
        self, client: OpenAIClient, way: ScoringWay, ids: Sequence[int], k: int
    ) -> list[ScoredToken]:
        reply = await client.post("completions", {"model": self.model, **way.request(ids, k)})
        try:
            choice = reply["choices"][0]
            if way.kind == "echo":
                told = choice["logprobs"]
                pairs = list(zip(told["tokens"], told["token_logprobs"], strict=True))[1 : len(ids)]
                scored = [ScoredToken(float(value), text, []) for text, value in pairs]
            else:
                places = zip(ids[1:], choice["prompt_logprobs"][1:], strict=True)
                scored = [_scored_token(place, token, k) for token, place in places]
        except (KeyError, IndexError, TypeError, ValueError):
            raise self._unscored() from None
        if len(scored) != len(ids) - 1:
            raise self._unscored()
        largest = max((i for token in scored for i, _ in token.best), default=0)
        if largest >= self.vocabulary:
            raise InputError(
                f"{self.cfg.url} has other tokens: {largest} is one, and the student has"
                f" {self.vocabulary}.",
                where=self.where,
                fix=SAME_TOKENS,
            )
        return scored

    def _unscored(self) -> InputError:
        return InputError(
            f"{self.cfg.url} does not tell the log-probs of a prompt's tokens.",
            where=self.where,
            fix="Use a server that does, e.g. vLLM or reinforge serve.",
        )

    async def _split(self, client: OpenAIClient, text: str) -> list[str]:
        """The tokens of a text after the first, as the server splits it: ids, or for `echo` their
        texts.
        """
        assert self.way is not None
        reply = await client.post("completions", {"model": self.model, **self.way.request(text, 0)})
        try:
            choice = reply["choices"][0]
            if self.way.kind == "echo":
                texts: list[str] = choice["logprobs"]["tokens"]
                return texts[1 : reply["usage"]["prompt_tokens"]]
            return [next(iter(place)) for place in choice["prompt_logprobs"][1:]]
        except (KeyError, IndexError, TypeError, StopIteration):
            raise self._unscored() from None

    def _compare_split(self, tokenizer: Any, text: str, ids: Sequence[int]) -> None:
        """A server may put a token before a text: its first or the text's own is not told."""
        theirs = run_apart(self._asked(lambda client: self._split(client, text)))
        ours = [str(i) for i in ids]
        if self.way is not None and self.way.kind == "echo":
            ours = [_spelled(tokenizer, i) for i in ids]
        if theirs not in (ours, ours[1:]):
            raise InputError(
                f"{self.cfg.url} has other tokens: it splits {text[:60]!r} into {theirs[:12]}, and"
                f" the student into {ours[:12]}.",
                where=self.where,
                fix=SAME_TOKENS,
            )

    def _compare(self, tokenizer: Any, ids: Sequence[int], texts: Sequence[str | None]) -> None:
        compared = 0
        for token, theirs in zip(ids, texts, strict=True):
            ours = _spelled(tokenizer, token)
            if theirs is None or "\ufffd" in ours + theirs or not ours.strip():
                continue  # part of a letter, or a space, which servers write in different ways
            compared += 1
            if ours.strip() != theirs.strip():
                raise InputError(
                    f"{self.cfg.url} has other tokens: {token} is {theirs!r} there and {ours!r} for"
                    " the student.",
                    where=self.where,
                    fix=SAME_TOKENS,
                )
        if not compared:
            raise InputError(
                f"{self.cfg.url} does not tell the texts of tokens, so that nobody can say whether"
                " they are the student's.",
                where=self.where,
                fix="Use a server that does, e.g. vLLM or reinforge serve.",
            )


def _spelled(tokenizer: Any, token: int) -> str:
    return token_text(tokenizer, [token])


def _scored_token(place: dict[str, dict[str, Any]], token: int, k: int) -> ScoredToken:
    """Of a place of `prompt_logprobs`: the token itself and the likeliest, by id."""
    own = place[str(token)]
    likeliest = sorted(((p["logprob"], int(i)) for i, p in place.items()), key=lambda x: -x[0])
    if len(likeliest) < k:
        raise ValueError(f"{len(likeliest)} of {k} tokens")
    return ScoredToken(
        float(own["logprob"]), own.get("decoded_token"), [(i, float(p)) for p, i in likeliest[:k]]
    )
