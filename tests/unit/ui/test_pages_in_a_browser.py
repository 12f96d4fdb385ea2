"""The pages of the web app in Chromium, over a real run: they open, show what the files hold, and
can be used without a mouse, on a phone, in the dark.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from helpers.needs import missing
from helpers.paths import ROOT
from helpers.web_app import AppClient, web_app

sys.path.append(str(ROOT / "tools"))
from chromium import Chromium, find

RUN = "first/grpo"
EVIL = "<script>window.stolen = 1</script><img src=x onerror='window.stolen = 2'>"
PAGES = {
    "runs": ("#/", ".runs .run .spark"),
    "run": (f"#/run?run={RUN}", ".question .chart svg .smooth"),
    "settings": (f"#/run?run={RUN}&view=settings", ".keys tr"),
    "samples": (f"#/samples?run={RUN}", ".samples tbody tr"),
    "sample": (f"#/sample?run={RUN}&line=3", ".members .member"),
    "launch": ("#/launch?recipe=chain_sum", ".plan .fine"),
    "branch": (f"#/run?run={RUN}&view=branch&step=2", "form.try"),
    "compare": (f"#/compare?run={RUN}", "main .empty"),
    "chat": (f"#/chat?run={RUN}", "form textarea"),
    "data": (f"#/data?run={RUN}", "main .empty"),
    "rewards": (f"#/data?run={RUN}&view=rewards", ".try textarea"),
    "nothing": ("#/nowhere", ".empty"),
}
AXE = ROOT / "ui" / "node_modules" / "axe-core" / "axe.min.js"
# what axe finds broken: the rule, and the elements
BROKEN = """axe.run(document, { resultTypes: ["violations"] }).then(found =>
  found.violations.map(one => `${one.id}: ${one.nodes.map(node => node.target).join(", ")}`))"""
# what must say what it is
CONTROLS = {"button", "link", "textbox", "searchbox", "combobox", "spinbutton", "slider"}
CONTROLS |= {"checkbox", "image", "img", "progressbar", "option"}
# texts whose contrast with what is behind them is below 4.5 (WCAG AA), beside what is switched off
FAINT = """(() => {
  const parts = text => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const over = (top, below) => {
    const share = top[3] ?? 1;
    return [0, 1, 2].map(i => top[i] * share + below[i] * (1 - share));
  };
  const behind = element => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if (color.startsWith("rgb")) layers.push(parts(color));
      if (color.startsWith("rgb(")) break;
    }
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const home = walker.currentNode.parentElement;
    const text = walker.currentNode.textContent.trim();
    if (!text || !home.checkVisibility() || home.closest("script, noscript, option")) continue;
    if (home.closest(":disabled, [aria-disabled=true], svg, .pieces")) continue;
    const back = behind(home);
    const front = over(parts(getComputedStyle(home).color), back);
    const [a, b] = [light(front), light(back)].sort((x, y) => y - x);
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < 4.5) found.push(`${text}: ${contrast.toFixed(2)}`);
  }
  return found;
})()"""


@pytest.fixture(scope="module", params=["light", "dark"])
def browser(request: pytest.FixtureRequest) -> Iterator[Chromium]:
    if find() is None:
        missing("browser", "chromium is not installed")
    with Chromium(dark=request.param == "dark") as page:
        yield page


@pytest.fixture(scope="module")
def light() -> Iterator[Chromium]:
    if find() is None:
        missing("browser", "chromium is not installed")
    with Chromium() as page:
        yield page


def show(page: Chromium, app: AppClient, where: str, wanted: str) -> None:
    """Opens a page anew and waits for an element of it."""
    page.errors.clear()
    page.open("about:blank")
    page.open(f"http://127.0.0.1:{app.port}/{where}")
    page.wait_for(f"document.querySelector({json.dumps(wanted)}) !== null")
    page.wait_for("document.querySelector('.loading') === null")


def texts(page: Chromium, wanted: str) -> list[str]:
    return page.evaluate(
        f"[...document.querySelectorAll({json.dumps(wanted)})].map(one => one.textContent)"
    )


@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_and_can_be_read(browser: Chromium, app: AppClient, name: str) -> None:
    for width in (1280, 390):
        browser.resize(width)
        show(browser, app, *PAGES[name])
        assert browser.errors == []
        assert browser.evaluate("document.documentElement.scrollWidth") <= width, (
            "nothing stands out sideways"
        )
        assert browser.evaluate(FAINT) == []
        assert [role for role, said in browser.named() if role in CONTROLS and not said] == []
        assert browser.evaluate("document.querySelectorAll('h1').length") == 1


@pytest.mark.long
@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_nothing_wrong(browser: Chromium, app: AppClient, name: str) -> None:
    if not AXE.is_file():
        missing("axe", "`npm ci` in ui/ installs it")
    for width in (1280, 390):
        browser.resize(width)
        show(browser, app, *PAGES[name])
        browser.evaluate(f"{AXE.read_text(encoding='utf-8')}; undefined")
        assert browser.evaluate(BROKEN) == [], width


def test_the_token_view_shows_the_numbers_of_the_file(
    light: Chromium, app: AppClient, runs: Path
) -> None:
    line = json.loads((runs / RUN / "samples.jsonl").read_text().splitlines()[3])
    recorded = line["training"]["by_token"]
    show(light, app, f"#/sample?run={RUN}&line=3", ".piece")
    light.evaluate("document.querySelector('.tokens details').open = true")
    head = texts(light, ".numbers th")
    rows = light.evaluate(
        "[...document.querySelectorAll('.numbers tbody tr')].map(row => [...row.cells].map(c =>"
        " c.textContent))"
    )
    assert [int(row[2]) for row in rows] == recorded["ids"]
    for name, values in recorded.items():
        if name != "ids":
            column = head.index(name)
            assert [float(row[column]) for row in rows] == values, name
    assert {"advantages", "behaviour", "logprob", "ratio", "entropy"} <= set(head)
    assert texts(light, ".right .said") == [line["answer"]]


def test_arrow_keys_go_from_token_to_token(light: Chromium, app: AppClient, runs: Path) -> None:
    line = json.loads((runs / RUN / "samples.jsonl").read_text().splitlines()[3])
    ids = line["training"]["by_token"]["ids"]
    show(light, app, f"#/sample?run={RUN}&line=3", ".piece")
    light.evaluate("document.querySelector('.piece').focus()")
    told = "document.querySelectorAll('.token-numbers dd')[1].textContent"
    assert light.evaluate(told) == str(ids[0])
    light.press("ArrowRight")
    light.wait_for(f"{told} === '{ids[1]}'")
    assert light.evaluate("document.activeElement.dataset.at") == "1"


def test_what_a_model_wrote_stays_text(light: Chromium, runs: Path, tmp_path: Path) -> None:
    copy = tmp_path / "runs" / "evil"
    shutil.copytree(runs / RUN, copy)
    lines = (copy / "samples.jsonl").read_text().splitlines()
    sample = json.loads(lines[3]) | {"prompt": EVIL, "completion": EVIL, "stop": EVIL}
    sample["turns"] = [{"role": EVIL, "text": EVIL, "name": EVIL, "calls": [[EVIL, EVIL]]}]
    (copy / "samples.jsonl").write_text("\n".join([*lines, json.dumps(sample)]) + "\n")
    with (copy / "events.jsonl").open("a") as events:
        events.write(json.dumps({"time": 1.0, "kind": EVIL, "error": EVIL}) + "\n")
    with web_app(tmp_path / "runs") as app:
        for where, wanted in (
            ("#/samples?run=evil", ".samples tbody tr"),
            (f"#/sample?run=evil&line={len(lines)}", ".turn"),
            ("#/run?run=evil", ".events tr"),
        ):
            show(light, app, where, wanted)
            assert EVIL in light.evaluate("document.body.textContent")
            assert light.evaluate("document.querySelectorAll('img, #app script').length") == 0
            assert light.evaluate("window.stolen") is None and light.errors == []


def test_filters_are_in_the_address(light: Chromium, app: AppClient, runs: Path) -> None:
    lines = [json.loads(s) for s in (runs / RUN / "samples.jsonl").read_text().splitlines()]
    wanted = sum(line["step"] == 2 and not line.get("eval") for line in lines)
    show(light, app, f"#/samples?run={RUN}&step=2&eval=false", ".samples tbody tr")
    assert len(texts(light, ".samples tbody tr")) == wanted
    light.evaluate(
        "[...document.querySelectorAll('button')].find(b => b.textContent === 'Clear"
        " filters').click()"
    )
    count = f"{len(lines)} samples"
    light.wait_for(f"document.querySelector('.pages')?.textContent.startsWith('{count}')")
    assert light.evaluate("location.hash") == f"#/samples?run={RUN.replace('/', '%2F')}"


def test_next_ends_with_the_list(light: Chromium, app: AppClient) -> None:
    rows = app.get("samples", run=RUN, step=2, eval="false")["rows"]
    show(light, app, f"#/samples?run={RUN}&step=2&eval=false", ".samples tbody tr")
    light.evaluate("document.querySelector('.samples td.open a').click()")
    for at, row in enumerate(rows):
        light.wait_for(
            "document.querySelector('.pages .number')?.textContent ==="
            f" '{at + 1} of {len(rows)} samples that fit'"
        )
        assert light.evaluate("new URLSearchParams(location.hash.split('?')[1]).get('line')") == (
            str(row["line"])
        )
        ends = texts(light, ".pages button:disabled")
        assert ends == ["Previous"] * (at == 0) + ["Next"] * (at == len(rows) - 1)
        light.evaluate(
            "[...document.querySelectorAll('.pages a')]"
            ".find(a => a.textContent === 'Next')?.click()"
        )
    assert light.errors == []


def test_a_corner_shows_the_last_value_itself(light: Chromium, app: AppClient, runs: Path) -> None:
    lines = [json.loads(s) for s in (runs / RUN / "metrics.jsonl").read_text().splitlines()]
    last = [line["reward/mean"] for line in lines if "reward/mean" in line][-1]
    show(light, app, f"#/run?run={RUN}", ".question .chart svg .smooth")
    shown = light.wait_for(
        "[...document.querySelectorAll('.chart')].find(one =>"
        " one.querySelector('[title=\"reward/mean\"]'))?.querySelector('output').textContent"
    )
    assert float(shown) == pytest.approx(last, rel=1e-3)


def test_what_was_changed_comes_before_all_settings(light: Chromium, app: AppClient) -> None:
    show(light, app, f"#/run?run={RUN}&view=settings", "details.section")
    light.wait_for("document.querySelectorAll('main > .panel .keys tr').length < 40")
    first = texts(light, "main > .panel .keys th")
    assert {"algorithm.group_size", "train.learning_rate", "rewards.1.weight"} <= set(first)
    assert "train.precision" not in first and "rewards.0.weight" not in first
    assert light.evaluate("document.querySelectorAll('details.section[open]').length") == 0


def test_a_run_can_be_started_over_with_one_setting_changed(
    light: Chromium, app: AppClient
) -> None:
    change = "rollout.temperature%3D0.5"
    show(light, app, f"#/launch?from={RUN}&set={change}&name=again", ".plan .finding")
    value = "document.getElementById('set-{}').value"
    assert light.evaluate(value.format("rollout.temperature")) == "0.5"
    assert light.evaluate(value.format("algorithm.name")) == "grpo"
    assert light.evaluate(value.format("train.learning_rate")) == "0.01"
    assert light.evaluate("document.querySelector('.plan input').value") == "again"
    light.evaluate(
        "[...document.querySelectorAll('button')].find(b => b.textContent === 'YAML').click()"
    )
    light.wait_for("document.querySelector('textarea.yaml') !== null")
    told = yaml.safe_load(light.evaluate("document.querySelector('textarea.yaml').value"))
    assert told["rollout"] == {"temperature": 0.5, "max_new_tokens": 6, "kv_gib": 0.01}
    assert "dir" not in told.get("run", {}) and "engine" not in told


def test_a_branch_without_steps_left_is_not_started(light: Chromium, app: AppClient) -> None:
    start = "document.querySelector('form.try button[type=submit]').disabled"
    show(light, app, f"#/run?run={RUN}&view=branch&step=4", "form.try .bad")
    assert light.evaluate(start) is True
    light.evaluate("document.querySelector('form.try .bad button').click()")
    light.wait_for("document.querySelector('form.try').textContent.includes('It does 4 steps')")
    assert light.evaluate("document.querySelector('form.try textarea').value") == "train.steps=8"
    assert light.evaluate(start) is False


def test_a_run_that_is_not_there_leads_to_the_list(light: Chromium, app: AppClient) -> None:
    show(light, app, "#/samples?run=none", ".failure")
    assert light.evaluate("document.querySelector('.failure a').getAttribute('href')") == "#/"


def test_runs_lie_over_each_other(light: Chromium, runs: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(runs / RUN, tmp_path / name)
    with web_app(tmp_path) as app:
        show(light, app, "#/compare?run=a&run=b", ".chart svg .tint1 .smooth")
        assert light.errors == [] and light.evaluate(FAINT) == []
        first = "document.querySelector('.chart')"
        assert light.evaluate(f"{first}.querySelectorAll('svg .spread, svg .raw').length") == 2
        assert texts(light, ".chosen-runs a") == ["a", "b"]


def test_a_server_that_is_gone_is_said(light: Chromium, runs: Path) -> None:
    with web_app(runs) as app:
        show(light, app, "#/", ".runs .run")
    light.evaluate("location.hash = '#/run?run=first/grpo'")
    light.wait_for("document.querySelector('.failure') !== null")
    assert "Is reinforge ui still running?" in texts(light, ".failure")[0]


def test_a_group_shows_the_numbers_of_the_file(light: Chromium, app: AppClient) -> None:
    sample = app.get("sample", run=RUN, line=3)
    told = app.get("group", run=RUN, step=sample["step"], group=sample["group"])["group"]["samples"]
    show(light, app, f"#/sample?run={RUN}&line=3", ".members .member")
    shown = light.evaluate(
        "[...document.querySelectorAll('.member')].map(one =>"
        " [one.querySelectorAll('dd')[2].textContent, one.querySelector('rect').classList.value])"
    )
    for one, (loss, way) in zip(told, shown, strict=True):
        assert float(loss) == pytest.approx(one["loss"], rel=1e-3)
        assert way == ("up" if one["advantage"] >= 0 else "down")


def test_pages_of_samples_are_turned(light: Chromium, app: AppClient) -> None:
    show(light, app, f"#/samples?run={RUN}", ".samples tbody tr")
    light.evaluate(
        "[...document.querySelectorAll('.pages button')]"
        ".find(b => b.textContent === 'Next').click()"
    )
    light.wait_for("document.querySelector('.pages')?.textContent.includes('page 2 of 2')")
    wanted = len(app.get("samples", run=RUN, page=1)["rows"])
    light.wait_for(f"document.querySelectorAll('.samples tbody tr').length === {wanted}")
