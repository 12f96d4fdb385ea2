"""OpenEnv (openenv-core) servers, over their websocket: `openenv:http://127.0.0.1:8000` for one
that runs, `openenv:server.py:app` or `openenv:package.server:app` for one that is started here and
shared by all episodes.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from reinforge.core.env import Action, Observation, Step
from reinforge.core.errors import InputError
from reinforge.core.row import Row
from reinforge.envs.adapters.common import first, library, number, numbers, said

START_SECONDS = 120.0
FIXED = ("done", "reward", "metadata")  # of every observation and action
# app -> its address, its process, and whose child that is
_SERVERS: dict[str, tuple[str, subprocess.Popen[bytes], int]] = {}
_LOCK = threading.Lock()


class OpenEnvEnv:
    """`action`: the field of an action that takes the model's text, or `json`: the text is the
    whole action. `observation`: the field that the model reads, or `json`: all. Both are found out
    where the server's schema leaves no choice. `reset`: arguments of reset; a row's column `reset`
    adds to them. `seconds`: for an answer of the server.
    """

    def __init__(
        self,
        id: str,
        *,
        action: str | None = None,
        observation: str | None = None,
        reset: dict[str, Any] | None = None,
        seconds: float = 60.0,
    ):
        self.url = self.prepare(id)
        self.action = action
        self.observation = observation
        self.arguments = reset or {}
        self.seconds = seconds
        self.client: Any = None

    @staticmethod
    def prepare(id: str, **_: Any) -> str:
        """The address of the server; starts it where it is ours."""
        library("openenv.core.generic_client", "openenv-core")
        if id.startswith(("http://", "https://", "ws://", "wss://")):
            return id
        with _LOCK:
            known = _SERVERS.get(id)
            if known is None or (known[2] == os.getpid() and known[1].poll() is not None):
                _SERVERS[id] = (*_start(id), os.getpid())
            return _SERVERS[id][0]

    async def reset(self, row: Row, seed: int) -> Observation:
        generic = library("openenv.core.generic_client", "openenv-core")
        if self.action is None or self.observation is None:
            schema = _schema(self.url)
            self.action = self.action or _only(schema["action"], "action")
            self.observation = self.observation or _only(schema["observation"], "observation")
        self.client = generic.GenericEnvClient(base_url=self.url, message_timeout_s=self.seconds)
        given = {"seed": seed % 2**31, **self.arguments, **(row.columns.get("reset") or {})}
        result = await self.client.reset(**given)
        return first(row, self._shown(result.observation))

    async def step(self, action: Action) -> Step:
        payload: dict[str, Any] = {str(self.action): action.text}
        if self.action == "json":
            try:
                payload = json.loads(action.text)
                assert isinstance(payload, dict)
            except (ValueError, AssertionError):
                return Step(Observation([said("Write one JSON object.")]), metrics={"invalid": 1.0})
        result = await self.client.step(payload)
        reward = None if result.reward is None else number(result.reward, "the server's reward")
        metrics = numbers(result.observation.get("metadata"))
        if result.done:
            return Step(None, reward, done=True, metrics=metrics)
        return Step(Observation([said(self._shown(result.observation))]), reward, metrics=metrics)

    async def close(self) -> None:
        if self.client is not None:
            await self.client.close()

    def _shown(self, observation: dict[str, Any]) -> str:
        if self.observation != "json":
            return str(observation[str(self.observation)])
        return json.dumps(
            {k: v for k, v in observation.items() if k not in FIXED}, ensure_ascii=False
        )


def _start(app: str) -> tuple[str, subprocess.Popen[bytes]]:
    """Runs `file.py:app` or `module:app` under uvicorn, with this interpreter."""
    source, _, name = app.rpartition(":")
    where = []
    if source.endswith(".py"):
        path = Path(source).expanduser().resolve()
        if not path.is_file():
            raise InputError(
                f"no such file: {path}",
                where="env.name",
                fix="Paths are relative to where you run the command.",
            )
        source = path.stem
        where = ["--app-dir", str(path.parent)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "uvicorn",
        f"{source}:{name}",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--log-level",
        "warning",
        *where,
    ]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    atexit.register(process.kill)
    url = f"http://127.0.0.1:{port}"
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=1.0):
                return url, process
        except OSError:
            time.sleep(0.1)
    process.kill()
    raise InputError(
        f"the server {app} did not start.",
        where="env.name",
        fix="What it wrote to standard error says why.",
    )


def _schema(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(
        url.replace("ws", "http", 1) + "/schema" if url.startswith("ws") else url + "/schema",
        timeout=10.0,
    ) as response:
        return dict(json.load(response))


def _only(schema: dict[str, Any], what: str) -> str:
    """The one text field; all as JSON where there is none or more than one to show, but an action
    has to be told.
    """
    fields = [
        name
        for name, f in schema.get("properties", {}).items()
        if name not in FIXED and f.get("type") == "string"
    ]
    if len(fields) == 1:
        return fields[0]
    if what == "observation":
        return "json"
    raise InputError(
        f"an action of the server has the text fields {', '.join(fields) or 'none'}.",
        where="env.options.action",
        fix="Name the one that takes the model's text, or json.",
    )
