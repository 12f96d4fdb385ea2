"""Somebody who knows no flags starts a GRPO run on rows of their own from the form, and sees it
learn: the walk-through of docs/ui.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from helpers.needs import missing
from helpers.paths import ROOT
from helpers.web_app import web_app

sys.path.append(str(ROOT / "tools"))
from chromium import Chromium, find

SECONDS = 240


def fill(page: Chromium, key: str, value: object) -> None:
    """Types into the field of a setting, and leaves it."""
    place = f"document.getElementById({json.dumps(f'set-{key}')})"
    page.wait_for(f"{place} !== null")
    page.evaluate(
        f"(() => {{ const it = {place}; it.focus(); it.value = {json.dumps(str(value))};"
        " it.dispatchEvent(new Event('input', { bubbles: true })); })()"
    )
    page.wait_for(f"{place}.value === {json.dumps(str(value))}")
    page.evaluate(f"{place}.dispatchEvent(new Event('change', {{ bubbles: true }}))")


def click(page: Chromium, text: str) -> None:
    wanted = f"[...document.querySelectorAll('button')].find(b => b.textContent === '{text}')"
    page.wait_for(f"{wanted} && !{wanted}.disabled", SECONDS)
    page.evaluate(f"{wanted}.click()")


@pytest.mark.timeout(600)
def test_a_run_from_the_form_finishes_and_shows_its_curves(tiny_dir: str, tmp_path: Path) -> None:
    """One process that imports torch."""
    if find() is None:
        missing("browser", "chromium is not installed")
    root = tmp_path / "runs"
    root.mkdir()
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": f"{i}+1=", "answer": i + 1}) + "\n" for i in range(8))
    )
    with web_app(root) as app, Chromium() as page:
        page.open(f"http://127.0.0.1:{app.port}/#/launch")
        fill(page, "model.path", tiny_dir)
        fill(page, "data.source", rows)
        fill(page, "algorithm.name", "grpo")
        fill(page, "train.steps", "no number")
        page.wait_for("document.querySelector('.setting.wrong [role=alert]') !== null", SECONDS)
        fill(page, "train.steps", 3)
        fill(page, "train.prompts_per_step", 2)
        fill(page, "rollout.max_new_tokens", 4)
        click(page, "Add")
        fill(page, "rewards.0.name", "exact_number")
        page.wait_for("document.querySelector('.plan .fine') !== null", SECONDS)
        page.evaluate(
            "(() => { const it = document.querySelector('.plan input'); it.value = 'mine';"
            " it.dispatchEvent(new Event('input', { bubbles: true })); })()"
        )
        click(page, "Start the run")
        page.wait_for("document.querySelector('.badge.finished') !== null", SECONDS)
        page.wait_for("document.querySelectorAll('.chart svg .smooth').length > 3", SECONDS)
        curves = app.get("curves", run="mine", names="reward/mean")["questions"][0]["curves"]
        assert [point[0] for point in curves[0]["points"]] == [1, 2, 3]
        assert (root / "mine" / "checkpoints" / "step-00000003").is_dir()
        assert [error for error in page.errors if "404" not in error] == []
