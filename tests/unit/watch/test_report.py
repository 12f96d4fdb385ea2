"""report.html: self-contained, holds the run's numbers, and no text from a model becomes markup or
script.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from helpers.needs import missing
from helpers.paths import ROOT
from helpers.tiny_runs import EVAL, launch
from reinforge.config.schema import Config
from reinforge.core.sample import Group, Row, Sample
from reinforge.watch.recorder import Recorder
from reinforge.watch.report import curves, phases, sections, write_report

sys.path.append(str(ROOT / "tools"))
from chromium import Chromium, find

EVIL = (
    "</script><script>alert(1)</script><img src=x onerror=alert(2)> @@DATA@@ & \" ' <!-- \u2028"
    " \ud800"
)


class Page(HTMLParser):
    """Collects elements and text, and the cells of the samples table."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict]] = []
        self.scripts: list[tuple[dict, str]] = []
        self.text = ""
        self._script: dict | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append((tag, dict(attrs)))
        self._script = dict(attrs) if tag == "script" else None

    def handle_endtag(self, tag: str) -> None:
        self._script = None if tag == "script" else self._script

    def handle_data(self, data: str) -> None:
        if self._script is not None:
            self.scripts.append((self._script, data))
        else:
            self.text += data


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run <b>"
    recorder = Recorder(
        path,
        {
            "model": {"path": EVIL},
            "algorithm": {"name": "grpo"},
            "train": {"steps": 4, "learning_rate": 1e-5},
        },
    )
    for step in range(1, 5):
        values = {
            "reward/mean": step / 8,
            "train/loss": math.nan if step == 3 else 1.0 / step,
            "time/generate": 2.0,
            "time/train": 1.0,
            "time/step": 3.0,
            "share/train": 0.3,
        }
        recorder.log(step, values | {f"reward/{EVIL}": 0.5})
    recorder.log(
        4, {"eval/accuracy": 0.75, "eval/accuracy_low": 0.625, "eval/accuracy_high": 0.875}
    )
    sample = Sample.from_tokens(
        "u", [1, 2], [False, True], reward=0.5, rewards={EVIL: 0.5, "none": None}
    )
    recorder.samples(4, [Group(Row("r", [{"role": EVIL, "content": EVIL}]), [sample], [EVIL])], 4)
    recorder.event("sink_failed", error=EVIL)
    recorder.event("finished")
    recorder.close()
    (path / "summary.json").write_text(json.dumps({"verdict": EVIL, "digest": "abc123"}))
    return path


def embedded(page: Page) -> dict:
    return json.loads(
        next(text for attrs, text in page.scripts if attrs.get("type") == "application/json")
    )


def test_model_text_stays_text(run: Path) -> None:
    target = write_report(run)
    assert target == run / "report.html"
    page = Page(target.read_text(encoding="utf-8"))
    assert [tag for tag, _ in page.tags].count("script") == 2 and "img" not in [
        tag for tag, _ in page.tags
    ]
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    shown = EVIL.replace("\ud800", "\\ud800")
    # config, prompt role and content, completion, components, event, summary
    assert page.text.count(shown) >= 6
    assert f"reward/{EVIL}" in embedded(page)["series"], (
        "the embedded JSON gives the same text back"
    )


def test_page_is_self_contained_and_runs_only_our_script(run: Path) -> None:
    text = write_report(run).read_text(encoding="utf-8")
    page = Page(text)
    assert not any(
        tag in ("link", "iframe", "img", "base") or "src" in attrs or "href" in attrs
        for tag, attrs in page.tags
    )
    assert "url(" not in text and "@import" not in text
    # a name, never fetched
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}
    policy = next(
        attrs["content"]
        for tag, attrs in page.tags
        if attrs.get("http-equiv") == "Content-Security-Policy"
    )
    script = next(data for attrs, data in page.scripts if "type" not in attrs)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert "default-src 'none'" in policy and f"script-src 'sha256-{digest}'" in policy
    assert "prefers-color-scheme: dark" in text


def test_page_holds_the_numbers(run: Path) -> None:
    page = Page(write_report(run).read_text(encoding="utf-8"))
    data = embedded(page)
    assert [(p[0], p[2]) for p in data["series"]["reward/mean"]] == [
        (1, 0.125),
        (2, 0.25),
        (3, 0.375),
        (4, 0.5),
    ]
    assert [p[2] for p in data["series"]["train/loss"]] == [1.0, 0.5, None, 0.25]
    assert [[p[0], *p[2:]] for p in data["series"]["eval/accuracy"]] == [[4, 0.75, 0.625, 0.875]]
    assert data["phases"] == {
        "names": ["generate", "train"],
        "bars": [[s, s, 2.0, 1.0] for s in (1, 2, 3, 4)],
    }
    assert "eval/accuracy_low" not in data["series"] and "share/train" not in data["series"]
    assert data["first"] == ["eval/accuracy", "reward/mean", "train/loss"] and [
        title for title, _ in data["sections"]
    ] == ["Reward"]
    for text in (
        "75.0%",
        "62.5% to 87.5%",
        "train.learning_rate",
        "1e-05",
        "transformers",
        "abc123",
        "finished",
        "run <b>",
    ):
        assert text in page.text, text


def test_an_empty_run_still_gets_a_page(tmp_path: Path) -> None:
    Recorder(tmp_path, {}).close()
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert embedded(page) == {
        "series": {},
        "first": [],
        "sections": [],
        "says": {},
        "phases": {"names": [], "bars": []},
    }
    assert "recorded no samples" in page.text


def test_long_runs_are_averaged_over_bins() -> None:
    lines: list[dict[str, Any]] = [
        {"step": i, "time": float(i), "x": float(i % 4)} for i in range(4000)
    ]
    lines[3] |= {"x": None, "nonfinite": ["x"]}
    kept = curves(lines)["x"]
    assert (
        len(kept) == 1000
        and kept[0][2] == pytest.approx((0 + 1 + 2) / 3)
        and kept[1][0] == 7.0
        and kept[1][2] == 1.5
    )
    bars = phases([{"step": i, "time/a": float(i)} for i in range(120)])["bars"]
    assert len(bars) == 60 and bars[1] == [2, 3, 2.5]
    assert curves(
        [{"step": 1, "time": 5.0, "x": 1.0}, {"step": 2, "time": 65.0, "x": 2.0, "flag": True}]
    ) == {"x": [[1.0, 0.0, 1.0], [2.0, 1.0, 2.0]]}
    mixture = ["experts/disagreement_left", "experts/load_max", "train/router_aux_loss"]
    named = ("reward/exact", "reward/a/mean", "odd", "train/skipped", *mixture)
    assert sections(dict.fromkeys(named, 0)) == [
        ("Reward", ["reward/a/mean", "reward/exact"]),
        ("Training", ["train/skipped"]),
        ("Experts", mixture),
        ("Other", ["odd"]),
    ]


# What a browser makes of it.


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    if find() is None:
        missing("browser", "chromium is not installed")
    with Chromium() as page:
        yield page


COUNTS = """(() => {
  const count = wanted => document.querySelectorAll(wanted).length;
  return {
    cards: count("#curves .chart"), svgs: count("#curves .chart > svg"),
    curves: count("#curves path.smooth[d^=M]"),
    whiskers: count("#curves .whisker"), nans: count("#curves .nan"), bars: count("#phases rect"),
    beyond: [...document.querySelectorAll("#curves .whisker")].filter(bar => {
      const at = (line, end) => Number(line.getAttribute(end));
      const rules = [...bar.closest("svg").querySelectorAll(".rule")].map(rule => at(rule, "y1"));
      const ends = [at(bar, "y1"), at(bar, "y2")];
      return Math.min(...ends) < Math.min(...rules) || Math.max(...ends) > Math.max(...rules);
    }).length,
    says: [...document.querySelectorAll("#curves .says")].map(text => text.textContent),
    legend: [...document.querySelectorAll("#legend span")].map(item => item.textContent),
    odd: [...document.querySelectorAll("svg *")]
      .flatMap(n => n.getAttributeNames().map(a => n.getAttribute(a)))
      .filter(v => /NaN|Infinity/.test(v)),
  };
})()"""


def drawn(browser: Chromium, report: Path) -> dict:
    """What the page's own script drew, of a page without an error in its console."""
    browser.errors.clear()
    browser.open(report)
    found = browser.evaluate(COUNTS)
    assert browser.errors == [] and found.pop("odd") == []
    return found


def test_a_browser_draws_every_curve_and_every_bar(browser: Chromium, run: Path) -> None:
    found = drawn(browser, write_report(run))
    assert (
        found["cards"] == found["svgs"] == found["curves"] == 4
        and found["whiskers"] == 1
        and found["nans"] == 1
    )
    assert found["beyond"] == 0 and any("95% interval" in text for text in found["says"])
    assert found["bars"] == 8 and found["legend"] == ["generate 67%", "train 33%"]


def test_a_browser_draws_the_report_of_a_real_run(
    browser: Chromium, make: Callable[..., Config]
) -> None:
    cfg = make("run", "grpo", "train.steps=2", "eval.every=1")
    report = launch(cfg, eval_data=EVAL).report
    assert report is not None
    data = embedded(Page(report.read_text(encoding="utf-8")))
    found = drawn(browser, report)
    finite = [
        name for name, points in data["series"].items() if any(p[2] is not None for p in points)
    ]
    assert found["curves"] == len(finite) > 20 and found["cards"] == found["svgs"] == len(
        data["series"]
    )
    assert (
        found["bars"] == 2 * len(data["phases"]["names"])
        and len(found["legend"]) == len(data["phases"]["names"]) >= 4
    )


def test_a_browser_survives_a_metric_that_was_never_finite(
    browser: Chromium, tmp_path: Path
) -> None:
    recorder = Recorder(tmp_path / "r", {})
    recorder.log(1, {"train/loss": math.nan})
    recorder.close()
    found = drawn(browser, write_report(tmp_path / "r"))
    assert (
        found["cards"] == 1 and found["nans"] == 1 and found["curves"] == 0 and found["bars"] == 0
    )


def test_a_browser_refuses_a_script_that_is_not_ours(browser: Chromium, run: Path) -> None:
    """The policy's hash is that of the script in the page: another one does not run."""
    report = write_report(run)
    page = report.read_text(encoding="utf-8")
    report.write_text(
        page.replace("</body>", "<script>document.title = 'theirs'</script></body>"),
        encoding="utf-8",
    )
    browser.errors.clear()
    browser.open(report)
    assert browser.evaluate(
        "document.title"
    ) == "run <b>" and "Content Security Policy" in " ".join(browser.errors)


def test_controls_smooth_choose_an_axis_and_samples(browser: Chromium, run: Path) -> None:
    browser.open(write_report(run))
    shapes = (
        "[...document.querySelectorAll('#curves .smooth')].map(line =>"
        " line.getAttribute('d')).join()"
    )

    def turned(name: str, value: str, event: str) -> str:
        browser.evaluate(
            f"(() => {{ const it = document.getElementById('{name}'); it.value = '{value}';"
            f" it.dispatchEvent(new Event('{event}')); }})()"
        )
        return browser.evaluate(shapes)

    plain = browser.evaluate(shapes)
    smoothed = turned("smoothing", "0.9", "input")
    assert (
        smoothed != plain
        and browser.evaluate("document.getElementById('amount').textContent") == "0.90"
    )
    assert turned("axis", "1", "change") != smoothed
    assert (
        browser.evaluate(
            "[...document.querySelectorAll('#samples tbody tr')].filter(row => !row.hidden).length"
        )
        == 1
    )
    browser.evaluate(
        "(() => { const s = document.getElementById('step'); s.append(new Option('9')); s.value ="
        " '9'; s.onchange({ target: s }); })()"
    )
    assert (
        browser.evaluate(
            "[...document.querySelectorAll('#samples tbody tr')].filter(row => !row.hidden).length"
        )
        == 0
    )
