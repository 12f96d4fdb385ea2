"""Where an engine's requests are handed in and its answers picked up, on the engine's side.

Requests that come together start together: what the engine batches is then a function of what was
asked, as it is in one process. Answers are picked up as they are complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from reinforge.core.engine import Engine, NewTokens
from reinforge.core.errors import ReinforgeError

TELL_EVERY = 0.05  # seconds, where tokens are told as they come


@dataclass(frozen=True, slots=True)
class MailboxRequest:
    """One call of the engine in an actor. `RemoteEngine` numbers and submits it."""

    number: int
    method: str  # of the engine: generate
    args: tuple[Any, ...]
    named: dict[str, Any]
    tells: bool = False  # somebody wants to hear of its tokens as they come


@dataclass(frozen=True, slots=True)
class MailboxReply:
    """What the engine returned or raised for the request of this number; None where it was
    cancelled. `RemoteEngine` takes it and tells whoever waits.
    """

    number: int
    value: Any
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class ServersNotice:
    """That an engine over servers has none left, or has one again. `RemoteEngine` takes it with the
    replies, and sends requests elsewhere meanwhile.
    """

    serving: bool


@dataclass(frozen=True, slots=True)
class MailboxNews:
    """New tokens of sample `place` of the request of this number. `RemoteEngine` takes it and tells
    whoever hears them.
    """

    number: int
    place: int
    new: NewTokens


Found = MailboxReply | MailboxNews | ServersNotice  # what a mailbox has for its reader


class Mailbox:
    """The requests of one engine in an actor. `RemoteEngine` has one made in each of its actors,
    submits requests to it and takes the replies.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self._running: dict[int, asyncio.Task[Any]] = {}
        self._ready: list[Found] = []
        self._announced = False  # that there are news: soon somebody hears of it
        self._cancelled: set[int] = set()  # before they came
        self._newest = -1
        self._any = asyncio.Event()
        self._reader = 0  # who takes the replies
        self._waiting = 0  # how many wait for some

    def submit(self, requests: Sequence[MailboxRequest], reader: int = 0) -> None:
        """In this order. Returns at once."""
        self._replies_to(reader)
        for request in requests:
            if request.number in self._cancelled:  # calls may overtake each other
                self._cancelled.discard(request.number)
                self._end_cancelled(request)
                continue
            task = asyncio.get_running_loop().create_task(self._work(request))
            self._running[request.number] = task
            self._newest = max(self._newest, request.number)

    async def _work(self, request: MailboxRequest) -> None:
        hears = {"on_tokens": partial(self._tell, request.number)} if request.tells else {}
        try:
            found = MailboxReply(
                request.number,
                await getattr(self.engine, request.method)(*request.args, **request.named, **hears),
            )
        except asyncio.CancelledError:
            self._end_cancelled(request)
            raise
        except Exception as error:
            # what can travel
            reported = (
                error
                if isinstance(error, ReinforgeError)
                else RuntimeError(f"{type(error).__name__}: {error}")
            )
            found = MailboxReply(request.number, None, reported)
        finally:
            self._running.pop(request.number, None)
        self._put(found)

    def note_servers(self, serving: bool) -> None:
        """The engine tells of its servers; whoever takes replies hears the newest."""
        self._ready = [found for found in self._ready if not isinstance(found, ServersNotice)]
        self._put(ServersNotice(serving))

    def _end_cancelled(self, request: MailboxRequest) -> None:
        """Who hears of its tokens waits until no more can come."""
        if request.tells:
            self._put(MailboxReply(request.number, None))

    def _put(self, found: Found) -> None:
        self._ready.append(found)
        self._any.set()

    def _tell(self, number: int, place: int, new: NewTokens) -> None:
        """Several times a second, not with every token: each time costs a call."""
        self._ready.append(MailboxNews(number, place, new))
        if not self._announced:
            self._announced = True
            asyncio.get_running_loop().call_later(TELL_EVERY, self._any.set)

    def _replies_to(self, reader: int) -> None:
        """A reader of a higher number takes over. The one before may be gone with its event loop
        while its call still waits here: that call ends with nothing, so that no reply is lost.
        """
        if reader > self._reader:
            self._reader = reader
            if self._waiting:
                self._any.set()

    async def take(self, seconds: float, reader: int = 0) -> list[Found]:
        """What is complete and was not taken; waits for at least one, for so long at most."""
        self._replies_to(reader)
        self._waiting += 1
        try:
            await asyncio.wait_for(self._any.wait(), seconds)
        except TimeoutError:
            return []
        finally:
            self._waiting -= 1
        if reader < self._reader:
            return []
        self._any.clear()
        self._announced = False
        found = self._ready
        self._ready = []
        return found

    def close(self) -> None:
        """Whoever asked is gone."""
        for task in list(self._running.values()):
            task.cancel()

    def cancel(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if (task := self._running.get(number)) is not None:
                task.cancel()
            elif number > self._newest:
                self._cancelled.add(number)
