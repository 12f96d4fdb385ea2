"""report.html: self-contained, holds the run's numbers, and no text from a model becomes markup or script."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from reinforge.core.sample import Group, Row, Sample
from reinforge.watch.recorder import Recorder
from reinforge.watch.report import curves, phases, sections, thin, write_report

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)> @@DATA@@ & \" ' <!-- \u2028 \ud800"


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
    recorder = Recorder(path, {"model": {"path": EVIL}, "algorithm": {"name": "grpo"}, "train": {"steps": 4, "learning_rate": 1e-5}})
    for step in range(1, 5):
        values = {
            "reward/mean": step / 8,
            "train/loss": math.nan if step == 3 else 1.0 / step,
            "time/generate": 2.0,
            "time/train": 1.0,
            "share/train": 0.3,
        }
        recorder.log(step, values | {f"reward/{EVIL}": 0.5})
    recorder.log(4, {"eval/accuracy": 0.75, "eval/accuracy_low": 0.625, "eval/accuracy_high": 0.875})
    sample = Sample.from_tokens("u", [1, 2], [False, True], reward=0.5, rewards={EVIL: 0.5, "none": None})
    recorder.samples(4, [Group(Row("r", [{"role": EVIL, "content": EVIL}]), [sample], [EVIL])], 4)
    recorder.event("sink_failed", error=EVIL)
    recorder.event("finished")
    recorder.close()
    (path / "summary.json").write_text(json.dumps({"verdict": EVIL, "digest": "abc123"}))
    return path


def embedded(page: Page) -> dict:
    return json.loads(next(text for attrs, text in page.scripts if attrs.get("type") == "application/json"))


def test_model_text_stays_text(run: Path) -> None:
    target = write_report(run)
    assert target == run / "report.html"
    page = Page(target.read_text(encoding="utf-8"))
    assert [tag for tag, _ in page.tags].count("script") == 2 and "img" not in [tag for tag, _ in page.tags]
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    shown = EVIL.replace("\ud800", "\\ud800")
    assert page.text.count(shown) >= 6  # config, prompt role and content, completion, components, event, summary
    assert f"reward/{EVIL}" in embedded(page)["series"], "the embedded JSON gives the same text back"


def test_page_is_self_contained_and_runs_only_our_script(run: Path) -> None:
    text = write_report(run).read_text(encoding="utf-8")
    page = Page(text)
    assert not any(tag in ("link", "iframe", "img", "base") or "src" in attrs or "href" in attrs for tag, attrs in page.tags)
    assert "url(" not in text and "@import" not in text
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}  # a name, never fetched
    policy = next(attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    script = next(data for attrs, data in page.scripts if "type" not in attrs)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert "default-src 'none'" in policy and f"script-src 'sha256-{digest}'" in policy
    assert "prefers-color-scheme: dark" in text


def test_page_holds_the_numbers(run: Path) -> None:
    page = Page(write_report(run).read_text(encoding="utf-8"))
    data = embedded(page)
    assert [(p[0], p[2]) for p in data["series"]["reward/mean"]] == [(1, 0.125), (2, 0.25), (3, 0.375), (4, 0.5)]
    assert [p[2] for p in data["series"]["train/loss"]] == [1.0, 0.5, None, 0.25]
    assert [[p[0], *p[2:]] for p in data["series"]["eval/accuracy"]] == [[4, 0.75, 0.625, 0.875]]
    assert data["phases"] == {"names": ["generate", "train"], "bars": [[s, s, 2.0, 1.0] for s in (1, 2, 3, 4)]}
    assert "eval/accuracy_low" not in data["series"] and "share/train" not in data["series"]
    assert [title for title, _ in data["sections"]] == ["Reward", "Evaluation", "Training"]
    for text in ("75.0%", "62.5% to 87.5%", "train.learning_rate", "1e-05", "transformers", "abc123", "finished", "run <b>"):
        assert text in page.text, text


def test_an_empty_run_still_gets_a_page(tmp_path: Path) -> None:
    Recorder(tmp_path, {}).close()
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert embedded(page) == {"series": {}, "sections": [], "phases": {"names": [], "bars": []}}
    assert "recorded no samples" in page.text


def test_long_runs_are_averaged_over_bins() -> None:
    points = [[float(i), i / 60, None if i == 3 else float(i % 4)] for i in range(4000)]
    kept = thin(points)
    assert len(kept) == 1000 and kept[0][2] == pytest.approx((0 + 1 + 2) / 3) and kept[1][0] == 7.0 and kept[1][2] == 1.5
    bars = phases([{"step": i, "time/a": float(i)} for i in range(120)])["bars"]
    assert len(bars) == 60 and bars[1] == [2, 3, 2.5]
    assert curves([{"step": 1, "time": 5.0, "x": 1.0}, {"step": 2, "time": 65.0, "x": 2.0, "flag": True}]) == {
        "x": [[1.0, 0.0, 1.0], [2.0, 1.0, 2.0]]
    }
    assert sections({"reward/exact": 0, "reward/mean": 0, "odd": 0}) == [("Reward", ["reward/mean", "reward/exact"]), ("Other", ["odd"])]


# A document of a few lines, enough to run the page's script outside a browser and count what it draws.
DOCUMENT = r"""
const fs = require("fs");
const page = fs.readFileSync(process.argv[2], "utf8");
const json = page.match(/<script type="application\/json" id="data">([^]*?)<\/script>/)[1];
const script = page.match(/<script>([^]*?)<\/script>/)[1];
const all = [];
class Node {
  constructor(name) { this.name = name; this.attributes = {}; this.children = []; this.clientWidth = 400; this.dataset = {}; this.textContent = ""; all.push(this); }
  setAttribute(k, v) { if (String(v).includes("NaN") || String(v).includes("Infinity")) throw new Error(`${this.name} ${k}=${v}`); this.attributes[k] = v; }
  append(...c) { for (const x of c) { if (x instanceof Node) x.parent = this; this.children.push(x); } }
  remove() { this.parent.children = this.parent.children.filter(c => c !== this); }
  replaceChildren(...c) { this.children = []; this.append(...c); }
  find(name) { for (const c of this.children) if (c instanceof Node) { if (c.name === name) return c; const f = c.find(name); if (f) return f; } return null; }
  querySelector(s) { return this.find(s.split(" ").at(-1)); }
  getBoundingClientRect() { return { left: 0, width: 400 }; }
  count(test) { return (test(this) ? 1 : 0) + this.children.reduce((n, c) => n + (c instanceof Node ? c.count(test) : 0), 0); }
}
const ids = {};
global.window = {};
global.document = {
  getElementById: id => (ids[id] ??= Object.assign(new Node("div"), id === "data" ? { textContent: json } : {})),
  createElement: n => new Node(n), createElementNS: (_, n) => new Node(n), querySelectorAll: () => [],
};
new Function(script + "\nglobalThis.probe = { smooth, ticks };")();
const kind = c => n => n.attributes.class === c;
const curves = ids.curves;
const svg = curves.find("svg");
svg.onmousemove({ clientX: 399 });
ids.smoothing.oninput({ target: { value: "0.9" } });
ids.axis.onchange({ target: { value: "1" } });
console.log(JSON.stringify({
  cards: curves.count(kind("chart")), svgs: curves.count(n => n.name === "svg"), whiskers: curves.count(kind("whisker")), nans: curves.count(kind("nan")),
  bars: ids.phases.count(n => n.name === "rect"), legend: (ids.legend?.children ?? []).map(c => c.children[1]), hover: svg.parent ? "ok" : "lost",
  smooth: probe.smooth([1, null, 3], 0.5), ticks: probe.ticks(0, 1, 4).marks, flat: probe.ticks(2, 2, 4).marks.length > 1,
}));
"""


def run_page(path: Path, tmp_path: Path) -> dict:
    (tmp_path / "document.js").write_text(DOCUMENT)
    done = subprocess.run(["node", str(tmp_path / "document.js"), str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the page's script")
def test_the_script_draws_every_curve(run: Path, tmp_path: Path) -> None:
    drawn = run_page(write_report(run), tmp_path)
    assert drawn["cards"] == drawn["svgs"] == 4 and drawn["whiskers"] == 1 and drawn["nans"] == 1
    assert drawn["bars"] == 8 and drawn["legend"] == ["generate 67%", "train 33%"]
    assert drawn["smooth"] == [1, None, pytest.approx((0.5 * 0.5 + 3 * 0.5) / 0.75)]
    assert drawn["ticks"] == [0, 0.25, 0.5, 0.75, 1] and drawn["flat"]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the page's script")
def test_the_script_survives_a_metric_that_was_never_finite(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r", {})
    recorder.log(1, {"train/loss": math.nan})
    recorder.close()
    drawn = run_page(write_report(tmp_path / "r"), tmp_path)
    assert drawn["cards"] == 1 and drawn["nans"] == 1 and drawn["bars"] == 0
