"""The newest metrics of a run for Prometheus: a page in its text format, which a server of its own
thread offers while the run goes.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from reinforge.watch.sample_table import SampleTable
from reinforge.watch.sinks import TrackerRun

UNNAMEABLE = re.compile(r"[^a-zA-Z0-9_]")
CONTENT = "text/plain; version=0.0.4; charset=utf-8"


def exposition(metrics: Mapping[str, float], step: int, run: str) -> str:
    r"""Every metric as a gauge. Names that become equal count once, the first.

    >>> print(exposition({"reward/mean": 0.25, "eval/pass@4": 1.0}, 7, "first"), end="")
    # TYPE reinforge_step gauge
    reinforge_step{run="first"} 7.0
    # TYPE reinforge_reward_mean gauge
    reinforge_reward_mean{run="first"} 0.25
    # TYPE reinforge_eval_pass_4 gauge
    reinforge_eval_pass_4{run="first"} 1.0
    """
    named: dict[str, float] = {"reinforge_step": float(step)}
    for key, value in metrics.items():
        named.setdefault(f"reinforge_{UNNAMEABLE.sub('_', key)}", value)
    label = run.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return "".join(
        f'# TYPE {name} gauge\n{name}{{run="{label}"}} {value!r}\n' for name, value in named.items()
    )


class Prometheus:
    """A `Sink`: answers GET /metrics at run.log.prometheus with the newest value of every metric.
    Tables and files have no place there.
    """

    name = "prometheus"

    def __init__(self, target: TrackerRun):
        self.target = target
        self.step = 0
        self.metrics: dict[str, float] = {}

    def open(self) -> None:
        host, _, port = self.target.address.rpartition(":")
        sink = self

        class Page(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.split("?")[0] != "/metrics":
                    self.send_error(404)
                    return
                body = sink.page().encode()
                self.send_response(200)
                self.send_header("Content-Type", CONTENT)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """The terminal belongs to the view."""

        try:
            self.server = ThreadingHTTPServer((host, int(port)), Page)
        except OSError as error:
            raise OSError(f"run.log.prometheus={self.target.address}: {error}") from error
        self.server.daemon_threads = True
        threading.Thread(
            target=self.server.serve_forever, name="prometheus-page", daemon=True
        ).start()

    def page(self) -> str:
        return exposition(self.metrics, self.step, self.target.run_dir.name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.step = step
        self.metrics = {**self.metrics, **metrics}  # a new one: the page may be read meanwhile

    def table(self, table: SampleTable) -> None: ...
    def keep(self, name: str, paths: Sequence[Path]) -> None: ...
    def finish(self, summary: Mapping[str, Any]) -> None: ...

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
