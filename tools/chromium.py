"""A headless Chromium on one page, driven through its debugging pipe: for tests of what a browser
shows, and for pictures of it.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 120.0  # for one answer; a busy machine is slow
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
# Chromium reads commands from descriptor 3 and answers on 4; numbers from 10 on are in nobody's way
# until then.
START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4);"
    " os.execv(sys.argv[3], sys.argv[3:])"
)


def find() -> str | None:
    """The path of a Chromium, or None where none is installed."""
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


class Chromium:
    """`with Chromium() as page: page.open(file); page.evaluate("document.title")`.

    `errors` are those of the page's console.
    """

    def __init__(self, width: int = 1280, height: int = 900, *, dark: bool = False):
        self.width = width
        self.height = height
        self.dark = dark
        self.errors: list[str] = []
        self._number = 0
        self._buffer = b""

    def __enter__(self) -> Chromium:
        program = find()
        assert program is not None, "chromium is not installed"
        self._home = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        commands = os.pipe()
        answers = os.pipe()
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (commands[0], answers[1])]
        line = [
            sys.executable,
            "-c",
            START,
            *map(str, theirs),
            program,
            *FLAGS,
            f"--user-data-dir={self._home.name}",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            line, pass_fds=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for end in (*theirs, commands[0], answers[1]):
            os.close(end)
        self._commands = commands[1]
        self._answers = answers[0]
        self._session: str | None = None
        target = next(
            t for t in self._ask("Target.getTargets")["targetInfos"] if t["type"] == "page"
        )
        self._session = self._ask(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Accessibility"):
            self._ask(f"{domain}.enable")
        self._resize(self.height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if self.dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for end in (self._commands, self._answers):
            os.close(end)  # it ends when nobody talks to it any more
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._home.cleanup()

    def open(self, page: Path | str) -> None:
        """Loads a file or an address and waits for its load event."""
        self._loaded = False
        address = page if isinstance(page, str) else page.resolve().as_uri()
        self._ask("Page.navigate", url=address)
        while not self._loaded:
            self._hear(self._receive())

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; what it throws is an AssertionError
        here.
        """
        found = self._ask(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def resize(self, width: int, height: int = 900) -> None:
        """The window's size in pixels; 390 is a phone's width."""
        self.width = width
        self._resize(height)

    def named(self) -> list[tuple[str, str]]:
        """(role, name) of everything on the page, as a screen reader is told them."""
        nodes = self._ask("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", "").strip())
            for node in nodes
            if not node.get("ignored")
        ]

    def wait_for(self, expression: str, seconds: float = 30.0) -> Any:
        """The value of an expression, once it is true. The errors of the page are said if it never
        is.
        """
        until = time.monotonic() + seconds
        while not (found := self.evaluate(expression)):
            assert time.monotonic() < until, f"never true: {expression}; {self.errors}"
            time.sleep(0.05)
        return found

    def press(self, key: str) -> None:
        """One key, as a keyboard sends it."""
        for kind in ("keyDown", "keyUp"):
            self._ask("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def picture(self, height: int | None = None) -> bytes:
        """A PNG of the page from its top, `height` pixels high, or all of it."""
        self._resize(height or int(self.evaluate("document.documentElement.scrollHeight")))
        # the page draws anew after a change of its size
        self.evaluate("new Promise(done => setTimeout(done, 300))")
        return base64.b64decode(self._ask("Page.captureScreenshot", format="png")["data"])

    def _resize(self, height: int) -> None:
        self._ask(
            "Emulation.setDeviceMetricsOverride",
            width=self.width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            self._hear(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def _receive(self) -> dict[str, Any]:
        until = time.monotonic() + SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, until - time.monotonic()))
            more = os.read(self._answers, 1 << 16) if ready else b""
            assert more, "chromium did not answer" if not ready else "chromium ended"
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found

    def _hear(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Page.loadEventFired":
            self._loaded = True
        if event.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        if event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
