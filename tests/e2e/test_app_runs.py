"""A run that the web app starts, stops, continues and branches: real processes of a tiny model."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.needs import missing
from helpers.paths import ROOT
from helpers.web_app import AppClient, web_app
from reinforge.core.errors import EXIT_TERMINATED

sys.path.append(str(ROOT / "tools"))
from chromium import Chromium, find

SECONDS = 240


def wait(true: Callable[[], Any]) -> Any:
    """What it says as soon as it says something."""
    end = time.monotonic() + SECONDS
    while not (found := true()):
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.1)
    return found


def state_of(client: AppClient, name: str) -> dict[str, Any]:
    """The page of a run, or nothing before it has begun."""
    status, page, _ = client.ask("GET", f"/api/run?run={name}")
    return page if status == 200 else {}


@pytest.mark.timeout(900)
def test_a_run_is_started_stopped_continued_and_branched(tiny_dir: str, tmp_path: Path) -> None:
    """Four processes that import torch, one after the other: that is what it takes."""
    if find() is None:
        missing("browser", "chromium is not installed")
    root = tmp_path / "runs"
    root.mkdir()
    rows = tmp_path / "rows.jsonl"
    told = [json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) for i in range(8)]
    rows.write_text("\n".join(told))
    config = {
        "model": {"path": tiny_dir, "device": "cpu"},
        "algorithm": {"name": "grpo", "group_size": 2},
        "data": {"source": str(rows)},
        "rewards": [{"name": "exact_number"}],
        "rollout": {"max_new_tokens": 4, "kv_gib": 0.01},
        "train": {"steps": 100_000, "prompts_per_step": 2},
        "run": {"dir": "ignored", "checkpoint": {"every": 0}},
    }
    text = yaml.safe_dump(config)
    with web_app(root) as client:
        assert client.post("plan", {"yaml": text})["ok"]
        assert (
            "no name" in client.post("launch", {"yaml": text, "name": ".a"}, 400)["error"]["what"]
        )
        client.post("launch", {"yaml": text, "name": "../a"}, 400)
        client.post("launch", {"yaml": "train: 3", "name": "a"}, 400)
        assert client.post("launch", {"yaml": text, "name": "a"}) == {"run": "a"}
        client.post("launch", {"yaml": text, "name": "a"}, 400)
        wait(lambda: state_of(client, "a").get("step", 0) >= 2 or not alive(client, "a"))
        page = state_of(client, "a")
        assert page.get("state") == "running" and page["launched"], client.get("log", run="a")
        client.post("resume", {"run": "a"}, 400)
    # another app over the same folder: the run did not end with the first one
    with web_app(root) as client:
        with Chromium() as browser:
            browser.open(f"http://127.0.0.1:{client.port}/#/run?run=a")
            for text in ("Stop", "Stop it now"):
                wanted = (
                    "[...document.querySelectorAll('button')].find(b => b.textContent ==="
                    f" '{text}')"
                )
                browser.wait_for(f"{wanted} !== undefined")
                browser.evaluate(f"{wanted}.click()")
            browser.wait_for("document.querySelector('.badge.terminated') !== null", SECONDS)
            shown = browser.wait_for(
                "[...document.querySelectorAll('.keys th')].map(th => th.textContent)"
                ".find(text => text.startsWith('step '))"
            )
        page = wait(lambda: (p := state_of(client, "a"))["state"] == "terminated" and p)
        (saved,) = page["checkpoints"]
        assert saved["step"] == page["step"] >= 2 and shown == f"step {saved['step']}"
        assert (root / "a" / "checkpoints" / f"step-{saved['step']:08d}").is_dir()
        assert "not running" in client.post("stop", {"run": "a"}, 400)["error"]["what"]
        client.post("resume", {"run": "a"})
        wait(lambda: state_of(client, "a")["step"] > saved["step"])
        client.post("stop", {"run": "a"})
        wait(lambda: not alive(client, "a"))
        assert client.get("log", run="a")["code"] == EXIT_TERMINATED
        step = state_of(client, "a")["checkpoints"][-1]["step"]
        asked = {"run": "a", "step": step, "name": "b", "overrides": ["--help"]}
        client.post("branch", asked, 400)
        client.post("branch", {**asked, "overrides": [f"train.steps={step + 2}"]})
        wait(lambda: not alive(client, "b"))
        branch = state_of(client, "b")
        assert branch["state"] == "finished", client.get("log", run="b")["text"]
        assert branch["step"] == step + 2 and branch["lineage"] == [f"{root / 'a'} step {step}"]


def alive(client: AppClient, name: str) -> bool:
    return bool(client.get("log", run=name)["alive"])
