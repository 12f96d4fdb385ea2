"""Agent programs, and how they are run: an async function, a function, or a command.

They know an address, a key and a row.

Each runs by itself: a function in a daemon thread (an async one with an event loop of its own
there), a command in a process group. Whoever stops waiting leaves a thread behind, whose key is
worth nothing any more, and kills a process group.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from reinforge.core.errors import InputError
from reinforge.core.threads import in_thread
from reinforge.envs.agent_client import make_client

MOST_OUTPUT = 1 << 16  # bytes of a command's stdout and stderr that are kept: the last ones


@dataclass(frozen=True, slots=True)
class EndpointAddress:
    """Where one episode of an agent finds the model. The endpoint makes it, the program gets it."""

    base_url: str
    api_key: str  # of one sample; worth nothing once its episode is over


@dataclass(frozen=True, slots=True)
class AgentOutcome:
    """What an agent program returned: a reward, or nothing, and metrics."""

    reward: float | None = None  # None: that is for the config's rewards
    metrics: Mapping[str, float] = field(default_factory=dict)


class AgentProgram(Protocol):
    """A program that plays an episode by asking the model over HTTP. `AgentPlayer` runs it once per
    episode.
    """

    async def run(self, address: EndpointAddress, row: dict[str, Any]) -> AgentOutcome:
        """Raises whatever went wrong with the program."""
        ...


@dataclass(frozen=True)
class FunctionAgent:
    """`async def agent(client, row)` or `def agent(client, row)` -> reward, None, or a dict with
    `reward` and metrics. `client` is openai's (ours where that is not installed), set up for this
    sample.
    """

    function: Callable[[Any, dict[str, Any]], Any]

    async def run(self, address: EndpointAddress, row: dict[str, Any]) -> AgentOutcome:
        return outcome_of(
            await (
                self._in_own_loop(address, row)
                if self.asynchronous
                else in_thread(self._call, address, row)
            )
        )

    @property
    def asynchronous(self) -> bool:
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(
            type(self.function).__call__
        )

    def _call(self, address: EndpointAddress, row: dict[str, Any]) -> Any:
        client = make_client(address.base_url, address.api_key, asynchronous=False)
        try:
            return self.function(client, row)
        finally:
            client.close()

    async def _in_own_loop(self, address: EndpointAddress, row: dict[str, Any]) -> Any:
        running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

        async def main() -> Any:
            task = asyncio.current_task()
            assert task is not None
            running.append((asyncio.get_running_loop(), task))
            client = make_client(address.base_url, address.api_key, asynchronous=True)
            try:
                return await self.function(client, row)
            finally:
                await client.close()

        try:
            return await in_thread(lambda: asyncio.run(main()))
        except asyncio.CancelledError:
            for loop, task in running:
                with contextlib.suppress(RuntimeError):  # it ended by itself in this moment
                    loop.call_soon_threadsafe(task.cancel)
            raise


@dataclass(frozen=True)
class CommandAgent:
    """A program of its own.

    It finds OPENAI_BASE_URL and OPENAI_API_KEY in its environment, and the row as JSON on stdin
    and, where the command has `{row}`, in the file of that name. Its reward is the last line of
    stdout that is an object with `reward`, or else the last line if that is a number. An exit code
    other than 0 means that it failed.
    """

    command: Sequence[str]

    async def run(self, address: EndpointAddress, row: dict[str, Any]) -> AgentOutcome:
        text = json.dumps(row, default=str)
        with contextlib.ExitStack() as stack:
            command = [
                sys.executable if i == 0 and part == "python" else part
                for i, part in enumerate(self.command)
            ]
            if any("{row}" in part for part in command):
                folder = Path(
                    stack.enter_context(tempfile.TemporaryDirectory(prefix="reinforge-agent-"))
                )
                (folder / "row.json").write_text(text)
                command = [part.replace("{row}", str(folder / "row.json")) for part in command]
            return _printed(await self._output(command, environment(address), text.encode()))

    async def _output(self, command: Sequence[str], env: dict[str, str], data: bytes) -> str:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, env=env
        )
        assert (
            process.stdin is not None and process.stdout is not None and process.stderr is not None
        )
        tails = [
            asyncio.ensure_future(_tail(stream)) for stream in (process.stdout, process.stderr)
        ]
        feeding = asyncio.ensure_future(_feed(process.stdin, data))
        try:
            code = await process.wait()
        finally:
            _kill(process.pid)  # also after a normal end: whatever it started goes with it
            feeding.cancel()
            # who left the group may keep its pipes open for ever
            await asyncio.wait(tails, timeout=1.0)
            for tail in tails:
                tail.cancel()
        out, err = ("" if tail.cancelled() or not tail.done() else tail.result() for tail in tails)
        if code != 0:
            last = next((line for line in reversed(err.splitlines()) if line.strip()), "no message")
            raise RuntimeError(
                f"{command[0]}"
                f" {f'was killed by signal {-code}' if code < 0 else f'ended with code {code}'}:"
                f" {last[:500]}"
            )
        return out


def environment(address: EndpointAddress) -> dict[str, str]:
    """Ours, with the address. Proxies are not asked for loopback."""
    skip = ",".join(
        part
        for part in (os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), "127.0.0.1")
        if part
    )
    return {
        **os.environ,
        "OPENAI_BASE_URL": address.base_url,
        "OPENAI_API_KEY": address.api_key,
        "NO_PROXY": skip,
        "no_proxy": skip,
    }


async def _tail(stream: asyncio.StreamReader) -> str:
    kept = b""
    while chunk := await stream.read(1 << 16):
        kept = (kept + chunk)[-MOST_OUTPUT:]
    return kept.decode(errors="replace")


async def _feed(stdin: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # a program may not care for its row
        stdin.write(data)
        await stdin.drain()
    stdin.close()


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _printed(output: str) -> AgentOutcome:
    lines = [line for line in output.splitlines() if line.strip()]
    values = [_json(line) for line in lines]
    named = next((v for v in reversed(values) if isinstance(v, dict) and "reward" in v), None)
    last = values[-1] if values and isinstance(values[-1], int | float) else None
    return outcome_of(named if named is not None else last)


def _json(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def outcome_of(value: Any) -> AgentOutcome:
    """What an agent returned, as a reward and metrics.

    >>> outcome_of(True), outcome_of({"reward": 0.5, "tries": 3})
    (Outcome(reward=1.0, metrics={}), Outcome(reward=0.5, metrics={'tries': 3.0}))
    """
    reward, rest = (
        (value.get("reward"), {k: v for k, v in value.items() if k != "reward"})
        if isinstance(value, Mapping)
        else (value, {})
    )
    for name, number in {"reward": reward, **rest}.items():
        if not (number is None and name == "reward") and not (
            isinstance(number, int | float) and math.isfinite(number)
        ):
            raise TypeError(f"the agent returned {number!r} as {name}, which is no finite number")
    return AgentOutcome(
        None if reward is None else float(reward), {str(k): float(v) for k, v in rest.items()}
    )


def as_program(agent: AgentProgram | Callable[..., Any] | Sequence[str]) -> AgentProgram:
    """Whatever Python gives as an agent: a function (client, row), a command as a list, or a
    program.
    """
    if isinstance(getattr(agent, "run", None), Callable):  # type: ignore[arg-type]
        return agent  # type: ignore[return-value]
    if callable(agent):
        return FunctionAgent(agent)
    if (
        isinstance(agent, Sequence)
        and not isinstance(agent, str)
        and agent
        and all(isinstance(part, str) for part in agent)
    ):
        return CommandAgent(list(agent))
    raise InputError(
        f"{agent!r} is no agent.",
        where="agent",
        fix="Give a function (client, row), or a command as a list of words.",
    )
