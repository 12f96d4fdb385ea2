"""What a notebook shows of a run: one output, drawn anew, in which text of models is only text."""

from __future__ import annotations

import base64
import re
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from reinforge.build.result import RunResult
from reinforge.core.html import sample_table
from reinforge.core.sample import Group, Row, Sample, Stop
from reinforge.loops.open_step import PreparedStep, RunStep
from reinforge.rollout.source import RolloutBatch
from reinforge.watch.curves import POINTS, curve_image, thinned
from reinforge.watch.default_view import default_view
from reinforge.watch.doctor.trouble import Trouble
from reinforge.watch.notebook import NotebookOutput, in_notebook
from reinforge.watch.notebook_view import NotebookView, shortened
from reinforge.watch.recorder import Recorder
from reinforge.watch.view import View

HOSTILE = '</td><script>alert(1)</script><img src=x onerror="alert(2)">\u202e\x1b[2J'


def group(name: str, texts: list[str], rewards: list[float | None], prompt: str = "2+2=") -> Group:
    samples = [
        Sample.from_tokens(f"{name}/{i}", [5, 6, 7], [False, True, True], reward=r, stop=Stop.EOS)
        for i, r in enumerate(rewards)
    ]
    return Group(Row(name, prompt), samples, texts)


class SeenOutput(NotebookOutput):
    """Keeps what was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.pages: list[str] = []
        self.texts: list[str] = []

    def show(self, html: str, text: str) -> None:
        self.pages.append(html)
        self.texts.append(text)


class Tags(HTMLParser):
    """The elements of a page, with their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def pictures(page: str) -> dict[str, ElementTree.Element]:
    """The SVG of every curve in a page, by its title."""
    found = {}
    for code in re.findall(r"data:image/svg\+xml;base64,([\w+/=]+)", page):
        svg = ElementTree.fromstring(base64.b64decode(code))
        title = svg.find("{*}text")
        assert title is not None and title.text is not None
        found[title.text] = svg
    return found


def line_of(svg: ElementTree.Element) -> list[tuple[float, float]]:
    line = svg.find("{*}polyline")
    assert line is not None
    return [(float(x), float(y)) for x, y in (p.split(",") for p in line.attrib["points"].split())]


def test_progress_numbers_curves_and_the_newest_samples() -> None:
    now = [0.0]
    seen = SeenOutput()
    view = NotebookView(seen, every=0.0, clock=lambda: now[0])
    view.doing("loading the model")
    assert seen.texts == ["loading the model"]
    view.start(4, "first")
    view.update(0, {"eval/accuracy": 0.25})
    for step, reward in ((1, 0.2), (2, 0.6)):
        now[0] += 10
        view.update(step, {"reward/mean": reward, "eval/accuracy": 0.25})
        view.table([group("a", [f"answer {step}"], [reward])])
    page = Tags(seen.pages[-1])
    assert "first step 2 of 4, 0:00:20, 0:00:20 left" in page.text
    assert "samples of step 2" in page.text and "answer 2" in page.text
    assert "answer 1" not in page.text
    assert seen.texts[-1].splitlines()[1] == "reward 0.600  eval 25.0%"
    curves = pictures(seen.pages[-1])
    assert list(curves) == ["eval/accuracy", "reward/mean"]
    # an evaluation is a point of its step only, whatever the later steps repeat
    assert len(line_of(curves["eval/accuracy"])) == 1
    (x1, y1), (x2, y2) = line_of(curves["reward/mean"])
    assert x1 < x2 and y1 > y2  # up is better, and y goes down in a picture


def test_an_evaluation_that_found_the_same_again_is_a_point_too() -> None:
    seen = SeenOutput()
    view = NotebookView(seen, every=0.0)
    view.start(2, "run")
    for step in (0, 1, 1, 2, 2):  # a step is told a second time when it was evaluated
        view.update(step, {"eval/accuracy": 0.5, "train/loss": 1.0})
    assert len(line_of(pictures(seen.pages[-1])["eval/accuracy"])) == 3


def test_it_is_drawn_now_and_then_and_at_the_end() -> None:
    """However short the steps are. The last state is what the notebook's file keeps."""
    now = [0.0]
    seen = SeenOutput()
    view = NotebookView(seen, every=60.0, clock=lambda: now[0])
    view.start(1000, "fast")
    for step in range(1, 1001):
        now[0] += 0.125  # 125 s in all
        view.update(step, {"train/loss": 1.0 / step})
    assert len(seen.pages) == 3
    view.stop()
    view.message("report  runs/fast/report.html")
    assert len(seen.pages) == 5
    assert "step 1000 of 1000, 0:02:05" in seen.texts[-1] and "left" not in seen.texts[-1]
    assert seen.texts[-1].endswith("report  runs/fast/report.html")
    assert all(t.finished.is_set() for t in threading.enumerate() if isinstance(t, threading.Timer))


def test_what_came_between_two_drawings_is_shown_without_a_further_event() -> None:
    """A long phase that begins right after a step must not hide behind what was before."""
    seen = SeenOutput()
    drawn = threading.Event()
    view = NotebookView(seen, every=0.05)
    view.start(3, "run")
    plain = seen.show
    seen.show = lambda html, text: (plain(html, text), drawn.set())[0]  # type: ignore[method-assign]
    view.doing("step 1: generating")
    assert drawn.wait(30)
    assert "step 1: generating" in seen.texts[-1]
    view.stop()


def test_text_of_models_marks_up_nothing() -> None:
    seen = SeenOutput()
    view = NotebookView(seen, every=0.0)
    view.start(3, HOSTILE)
    view.doing(HOSTILE)
    view.update(1, {"reward/mean": 0.5})
    view.table([group("a", [HOSTILE + "\nsecond line"], [1.0], prompt=HOSTILE)])
    view.message(HOSTILE)
    view.troubles([Trouble("no_gradient", HOSTILE, "Do something.")])
    page = Tags(seen.pages[-1])
    assert {tag for tag, _ in page.found} <= {
        *("div", "b", "span", "img", "table", "tr", "th", "td", "pre")
    }
    assert all(not name.startswith("on") for _, names in page.found for name in names)
    assert all(str(a["src"]).startswith("data:image/svg") for tag, a in page.found if tag == "img")
    assert page.text.count("<script>alert(1)</script>") == 6  # read, and not run
    assert "\u202e" not in page.text and "\x1b" not in page.text and "\\u202e" in page.text
    assert "\nsecond line" in page.text


def test_troubles_stay_for_as_long_as_they_hold() -> None:
    seen = SeenOutput()
    view = NotebookView(seen, every=0.0)
    view.start(3, "run")
    view.troubles([Trouble("no_gradient", "Steps taught nothing.", "Take easier prompts.")])
    assert "! Steps taught nothing. Take easier prompts." in seen.texts[-1]
    view.troubles([])
    assert "taught nothing" not in seen.pages[-1]


def test_of_many_messages_the_first_and_the_last_are_kept() -> None:
    seen = SeenOutput()
    view = NotebookView(seen, every=0.0)
    for number in range(1000):
        view.message(f"line {number}")
    lines = seen.texts[-1].splitlines()
    assert lines[:20] == [f"line {i}" for i in range(20)] and lines[20] == "..."
    assert lines[21:] == [f"line {i}" for i in range(961, 1000)]
    assert shortened(["a"]) == ["a"]


# curves


def test_a_long_curve_is_short_and_keeps_its_end() -> None:
    long = [(float(i), float(i % 2)) for i in range(1, 2000)]
    short = thinned(long)
    assert len(short) <= POINTS + 1 and short[-1] == long[-1]
    assert all(abs(value - 0.5) < 0.06 for _, value in short[:-1])
    assert thinned(long[:5]) == long[:5]


def test_a_curve_says_what_it_is_to_those_who_cannot_see_it() -> None:
    image = curve_image("reward/mean", [(1, 0.25), (2, float("nan")), (3, 0.5)])
    assert 'alt="reward/mean: 0.25 at step 1, 0.5 at step 3"' in image
    assert curve_image("train/loss", [(1, float("nan"))]) == ""
    flat = line_of(pictures(curve_image("train/loss", [(1, 0.0), (2, 0.0)]))["train/loss"])
    assert flat[0][1] == flat[1][1]


# what a notebook shows of objects


def test_a_group_and_a_step_are_tables() -> None:
    found = group("a", ["4", HOSTILE], [1.0, None])
    page = found._repr_html_()
    assert page == sample_table(found.lines()) and "<script" not in page
    cells = re.findall(r"<td[^>]*>(.*?)</td>", page)
    assert cells[:5] == ["2+2=", "4", "1", "eos", "2"] and cells[7] == "unscored"
    step = RunStep(
        3,
        9,
        prepare=lambda step: PreparedStep([]),
        announce=lambda step: None,
        rollouts=RolloutBatch([found] * 6),
    )
    assert step._repr_html_().count("2+2=") == 8  # of four groups
    assert "step 3 of 9" in step._repr_html_()


def test_a_result_shows_its_curves(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, {})
    for step, loss in ((1, 2.0), (2, float("nan")), (3, 1.0)):
        recorder.log(step, {"train/loss": loss})
    recorder.close()
    page = RunResult(tmp_path, {"train/loss": 1.0}, 3)._repr_html_()
    assert list(pictures(page)) == ["train/loss"]
    assert len(line_of(pictures(page)["train/loss"])) == 2
    assert "3 steps, train/loss 1" in page


# IPython


class Kernel:
    """An IPython whose shell has a kernel, and what was displayed in it."""

    def __init__(self, kernel: Any) -> None:
        self.shown: list[tuple[str, dict[str, str]]] = []
        self.package = ModuleType("IPython")
        self.package.get_ipython = lambda: SimpleNamespace(kernel=kernel)  # type: ignore[attr-defined]
        self.display = ModuleType("IPython.display")
        self.display.display = self._display  # type: ignore[attr-defined]

    def _display(self, data: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert raw and display_id
        self.shown.append(("display", data))
        return SimpleNamespace(update=lambda data, raw: self.shown.append(("update", data)))


def test_a_run_in_a_kernel_has_one_output(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", kernel.package)
    monkeypatch.setitem(sys.modules, "IPython.display", kernel.display)
    view = default_view()
    assert isinstance(view, NotebookView)
    view.every = 0.0
    view.start(2, "run")
    view.update(1, {"train/loss": 1.0})
    view.stop()
    assert [what for what, _ in kernel.shown] == ["display", "update", "update"]
    assert set(kernel.shown[0][1]) == {"text/html", "text/plain"}


def test_a_script_and_a_shell_are_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", Kernel(kernel=None).package)
    assert not in_notebook() and isinstance(default_view(), View)
    monkeypatch.delitem(sys.modules, "IPython")
    assert not in_notebook() and isinstance(default_view(), View)
