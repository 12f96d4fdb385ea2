"""Talking to checkpoints: a process `reinforge serve` for each, started when it is asked for, ended
when nobody has asked for a while.
"""

from __future__ import annotations

import atexit
import http.client
import json
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reinforge.core.errors import InputError
from reinforge.serve.options import KEY
from reinforge.ui.errors import NoSuchRun
from reinforge.ui.work import environment
from reinforge.watch.runs import checkpoints

IDLE_SECONDS = 300.0
START_SECONDS = 300.0
ANSWER_SECONDS = 600.0
MOST = 2  # at once: two sides of a page
TOP = 5  # likeliest tokens in place of each


@dataclass
class CheckpointServer:
    """One process. `ChatServers` starts and ends it."""

    process: subprocess.Popen[bytes]
    log: Path
    key: str
    port: int = 0
    used: float = field(default_factory=time.monotonic)

    def wait(self) -> None:
        """Until it listens."""
        end = time.monotonic() + START_SECONDS
        while not self.port:
            text = self.log.read_text(errors="replace")
            if "http://127.0.0.1:" in text:
                self.port = int(text.partition("http://127.0.0.1:")[2].partition("/")[0])
            elif self.process.poll() is not None or time.monotonic() > end:
                self.end()
                told = text.strip().splitlines()
                raise InputError(
                    f"the checkpoint could not be served: {told[-1] if told else 'no word'}.",
                    where="sides",
                )
            else:
                time.sleep(0.1)

    def ask(self, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        self.used = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_SECONDS)
        headers = {"authorization": f"Bearer {self.key}", "content-type": "application/json"}
        try:
            connection.request("POST", path, json.dumps(body).encode(), headers)
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())
        finally:
            connection.close()
            self.used = time.monotonic()

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class ChatServers:
    """The servers of the app, by checkpoint."""

    def __init__(self, idle_seconds: float = IDLE_SECONDS):
        self.idle_seconds = idle_seconds
        self._servers: dict[tuple[str, int], CheckpointServer] = {}
        self._lock = threading.Lock()
        self._watching = False
        self._folder = tempfile.TemporaryDirectory(prefix="reinforge-ui-")
        atexit.register(self.close)

    def answer(self, run_dir: Path, step: int | None, asked: Mapping[str, Any]) -> dict[str, Any]:
        """What a checkpoint says to the messages; the newest one unless told."""
        there = [c["step"] for c in checkpoints(run_dir)]
        wanted = step if step is not None else max(there, default=None)
        if wanted is None or wanted not in there:
            raise NoSuchRun(
                f"there is no checkpoint of step {wanted}." if there else "there is no checkpoint.",
                where="sides",
                fix=f"There are: {', '.join(map(str, there))}." if there else None,
            )
        server = self._server(run_dir, wanted)
        server.wait()
        begin = time.monotonic()
        return {**_said(server, asked), "step": wanted, "seconds": time.monotonic() - begin}

    def _server(self, run_dir: Path, step: int) -> CheckpointServer:
        key = (str(run_dir), step)
        with self._lock:
            found = self._servers.get(key)
            if found is not None and found.process.poll() is None:
                found.used = time.monotonic()
                return found
            while len(self._servers) >= MOST:
                oldest = min(self._servers, key=lambda k: self._servers[k].used)
                self._servers.pop(oldest).end()
            found = self._servers[key] = self._start(run_dir, step)
            if not self._watching:
                self._watching = True
                threading.Thread(target=self._watch, daemon=True).start()
            return found

    def _start(self, run_dir: Path, step: int) -> CheckpointServer:
        secret = secrets.token_urlsafe()
        log = Path(self._folder.name) / f"{secrets.token_hex(8)}.log"
        command = ["serve", str(run_dir), "--checkpoint", str(step), "--port", "0"]
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "reinforge", *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**environment(), KEY: secret},
            )
        return CheckpointServer(process, log, secret)

    def _watch(self) -> None:
        """Ends those that nobody has asked for a while."""
        while True:
            time.sleep(min(5.0, self.idle_seconds))
            now = time.monotonic()
            with self._lock:
                idle = [k for k, s in self._servers.items() if now - s.used > self.idle_seconds]
                ended = [self._servers.pop(key) for key in idle]
            for server in ended:
                server.end()

    def close(self) -> None:
        with self._lock:
            servers = list(self._servers.values())
            self._servers.clear()
        for server in servers:
            server.end()


def _said(server: CheckpointServer, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Of a model without a chat template the last message is continued as it stands."""
    logprobs = {"logprobs": True, "top_logprobs": TOP} if asked["logprobs"] else {}
    common = {name: asked[name] for name in ("temperature", "max_tokens")}
    chat = {"messages": asked["messages"], **common, **logprobs}
    status, found = server.ask("/v1/chat/completions", chat)
    if status == 200:
        choice = found["choices"][0]
        entries = (choice.get("logprobs") or {}).get("content") or []
        return {
            "text": choice["message"].get("content") or "",
            "tokens": [
                {
                    "piece": entry["token"],
                    "logprob": entry["logprob"],
                    "top": [[t["token"], t["logprob"]] for t in entry.get("top_logprobs", [])],
                }
                for entry in entries
            ],
        }
    plain = {"prompt": _last(asked["messages"]), **common}
    again, text = server.ask(
        "/v1/completions", {**plain, **({"logprobs": TOP} if asked["logprobs"] else {})}
    )
    if again != 200:
        raise InputError(str(found["error"]["message"]), where="messages")
    choice = text["choices"][0]
    told = choice.get("logprobs") or {}
    tops = told.get("top_logprobs") or []
    return {
        "text": choice["text"],
        "tokens": [
            {
                "piece": piece,
                "logprob": value,
                "top": [list(pair) for pair in (tops[i] or {}).items()] if i < len(tops) else [],
            }
            for i, (piece, value) in enumerate(
                zip(told.get("tokens") or [], told.get("token_logprobs") or [], strict=True)
            )
        ],
    }


def _last(messages: Sequence[Mapping[str, Any]]) -> str:
    return str(messages[-1]["content"])
