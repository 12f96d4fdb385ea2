"""`serve` and `generate` as processes: started, asked, killed and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from helpers import cli_runs
from helpers.openai_stub import stub_server

pytestmark = pytest.mark.timeout(240)


def start(folder: Path, *args: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "reinforge", *map(str, args)]
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **cli_runs.ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_generate_goes_on_after_a_kill(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(
        "".join(json.dumps({"prompt": f"row {i}", "tag": i}) + "\n" for i in range(8))
    )
    stuck = threading.Event()
    go = threading.Event()

    def say(body: dict[str, Any]) -> list[str]:
        row = int(body["messages"][-1]["content"].split()[-1])
        if row >= 5:
            stuck.set()
            go.wait(60)
        return [f"{row} a", f"{row} b"]

    def rows(stub: Any) -> list[int]:
        return [int(body["messages"][-1]["content"].split()[-1]) for body in stub.asked]

    with stub_server(say) as stub:
        line = [
            "generate",
            "m",
            "--prompts",
            "p.jsonl",
            "--out",
            "o.jsonl",
            "-n",
            2,
            "--server",
            stub.url,
            "--parallel",
            1,
        ]
        first = start(tmp_path, *line)
        assert stuck.wait(60), first.communicate()
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert not (tmp_path / "o.jsonl").exists() and rows(stub) == [0, 1, 2, 3, 4, 5]
        with (tmp_path / ".o.jsonl.part").open("ab") as journal:
            journal.write(b'[{"id": "half a li')
        go.set()
        second = start(tmp_path, *line)
        said, _ = second.communicate(timeout=120)
        assert second.returncode == 0 and said.splitlines()[-1] == "16 rows in o.jsonl", said
        assert rows(stub) == [0, 1, 2, 3, 4, 5, 5, 6, 7], (
            "only what was not answered is asked again"
        )
    found = [(r["tag"], r["completion"]) for r in cli_runs.lines(tmp_path / "o.jsonl")]
    assert (
        found == [(i, f"{i} {x}") for i in range(8) for x in "ab"]
        and not (tmp_path / ".o.jsonl.part").exists()
    )


def test_serve_answers_and_ends(tiny: Path, tmp_path: Path) -> None:
    server = start(tmp_path, "serve", tiny, "--port", 0, "--kv-gib", 0.01)
    try:
        assert server.stdout is not None
        said = ""
        while "/v1" not in said:
            said = server.stdout.readline()
            assert said or server.poll() is None, "it ended before it served"
        url = said.split(": ")[1].split()[0]
        body = {"prompt": "1+1=", "max_tokens": 4, "temperature": 0, "return_token_ids": True}
        with urllib.request.urlopen(
            urllib.request.Request(f"{url}/completions", json.dumps(body).encode()), timeout=60
        ) as reply:
            served = json.load(reply)["choices"][0]
    finally:
        server.send_signal(signal.SIGINT)
        rest, _ = server.communicate(timeout=60)
    # 0: uvicorn had seen the signal before it was passed on
    assert server.returncode in (0, 130) and "Traceback" not in rest, rest
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "1+1="}) + "\n")
    code, said = cli_runs.forked(
        "generate",
        tiny,
        "--prompts",
        "p.jsonl",
        "--out",
        "o.jsonl",
        "-t",
        0,
        "--max-new-tokens",
        4,
        cwd=tmp_path,
    )
    assert code == 0, said
    native = cli_runs.lines(tmp_path / "o.jsonl")[0]
    assert (native["tokens"], native["completion"]) == (served["token_ids"], served["text"])


def test_serve_refuses_early(tmp_path: Path) -> None:
    """Before the model is looked at."""
    for args, told in ((["--host", "0.0.0.0"], "no API key"), (["--port", "99999"], "port")):
        code, said = cli_runs.forked("serve", "./no-such-model", *args, cwd=tmp_path)
        assert code == 2 and told in said, said
