"""The API of the web app over a real run: its numbers are those of the run's files."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from helpers.tiny_runs import DATA, EVAL
from helpers.toy_rewards import digits, short
from helpers.web_app import AppClient, web_app
from reinforge.algorithms.catalogue import TABLE
from reinforge.core.errors import EXIT_TERMINATED
from reinforge.ui import server
from reinforge.ui.event_lines import event_lines
from reinforge.ui.sample_index import SampleFilter, SampleIndex
from reinforge.watch.runs import show_run
from reinforge.watch.why import advantage_of

RUN = "first/grpo"
RIGHT = {row["prompt"]: row["answer"] for row in (*DATA, *EVAL)}


def lines(runs: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (runs / RUN / name).read_text().splitlines()]


def test_the_list_says_what_runs_show_says(app: AppClient, runs: Path) -> None:
    shown = show_run(runs / RUN)
    (line,) = app.get("runs")
    assert line["run"] == RUN and line["state"] == "finished" == shown["status"]
    assert (line["step"], line["steps"], line["share"]) == (4, 4, 1.0)
    assert line["reward"] == shown["last"]["reward/mean"]
    assert line["best_eval"] == shown["best_eval"] and line["troubles"] == shown["troubles"]
    rewards = [
        [m["step"], m["reward/mean"]] for m in lines(runs, "metrics.jsonl") if "reward/mean" in m
    ]
    assert line["spark_name"] == "reward/mean" and line["spark"] == rewards
    assert app.get("runs", search="GRPO first") == [line]
    assert app.get("runs", search="dpo") == app.get("runs", state="running") == []


def test_the_page_of_a_run(app: AppClient, runs: Path) -> None:
    page = app.get("run", run=RUN)
    assert [c["step"] for c in page["checkpoints"]] == [2, 4]
    assert page["checkpoints"][0]["path"] == "checkpoints/step-00000002"
    kinds = [event["kind"] for event in page["events"]]
    assert kinds[0] == "started" and kinds[-1] == "finished" and kinds.count("checkpoint") == 2
    assert page["settings"]["algorithm.group_size"] == 4
    assert page["learning"]["answer"] in ("yes", "no", "not clearly", "too few steps to say")
    assert ["last response length", f"{show_run(runs / RUN)['last']['response/length']:.4g}"] in (
        page["tiles"]
    )


def test_times_are_those_of_the_events(runs: Path, tmp_path: Path) -> None:
    """A copy of a run ended when the run ended, whenever it was copied."""
    copy = tmp_path / "copy"
    shutil.copytree(runs / RUN, copy)
    for name in ("metrics.jsonl", "events.jsonl"):
        os.utime(copy / name, (2e9, 2e9))
    ended = lines(runs, "events.jsonl")[-1]["time"]
    with web_app(tmp_path) as app:
        assert app.get("runs")[0]["updated"] == app.get("run", run="copy")["updated"] == ended


def test_the_first_and_last_step_are_told_once(app: AppClient, runs: Path) -> None:
    times = [m["time"] for m in lines(runs, "metrics.jsonl")]
    spans = [said for label, said in app.get("run", run=RUN)["tiles"] if "to the last" in label]
    assert spans == [f"{times[-1] - times[0]:.1f} s"]


def test_events_are_sentences_and_repeats_one_line() -> None:
    trouble = {
        "kind": "trouble",
        "trouble": "truncation",
        "what": "All answers are cut off.",
        "knob": {"key": "train.learning_rate", "value": 0.0029999999999999996},
        "evidence": ["response/truncated 1"],
    }
    follows = {**trouble, "trouble": "learning_rate_low", "because": "truncation", "step": 9}
    events = [
        {"time": 1.0, "kind": "started", "steps": 9, "pid": 3, "dropped_bytes": {"a": 0}},
        *({"time": 2.0, "kind": "empty_step", "step": step} for step in (1, 2, 3)),
        {**trouble, "step": 4},
        {"time": 3.0, "kind": "empty_step", "step": 5},
        {**trouble, "step": 7, "what": "Nearly all answers are cut off."},
        follows,
        {"time": 4.0, "kind": "resumed", "steps": 12},
        {"time": 5.0, "kind": "empty_step", "step": 10},
    ]
    told = [
        (line["kind"], line["step"], line["until"], line["count"], line["text"])
        for line in event_lines(events)
    ]
    empty = "no answer taught anything: the gradient was exactly 0"
    assert told == [
        ("started", None, None, 1, "9 steps to do"),
        ("empty_step", 1, 5, 4, empty),
        ("trouble", 4, 7, 2, "Nearly all answers are cut off."),
        ("trouble", 9, 9, 1, "All answers are cut off. Follows from truncation."),
        ("resumed", None, None, 1, "12 steps to do"),
        ("empty_step", 10, 10, 1, empty),
    ]


def test_a_sample_knows_its_place_in_the_list(app: AppClient) -> None:
    asked = {"run": RUN, "step": 2, "order": "-reward"}
    rows = [row["line"] for row in app.get("samples", size=500, **asked)["rows"]]
    assert len(rows) > 3
    for at, line in enumerate(rows):
        found = app.get("sample", line=line, **asked)
        beside = [rows[i] if 0 <= i < len(rows) else None for i in (at - 1, at + 1)]
        assert (found["at"], found["total"]) == (at, len(rows))
        assert [found["previous"], found["next"]] == beside
    other = next(line for line in range(500) if line not in rows)
    found = app.get("sample", line=other, **asked)
    assert found["at"] is found["previous"] is found["next"] is None
    last = app.get("sample", run=RUN, line=0)
    assert last["next"] is None and last["at"] == last["total"] - 1, "the newest come first"


def test_commands_of_a_finding_name_the_run(runs: Path, tmp_path: Path) -> None:
    copy = tmp_path / "my run"
    shutil.copytree(runs / RUN, copy)
    metrics = [m for m in lines(runs, "metrics.jsonl") if "reward/std" in m][:1]
    same = [
        {**metrics[0], "step": step, "reward/std": 0.0, "groups/zero_variance": 1.0}
        for step in range(1, 31)
    ]
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in same))
    with web_app(tmp_path) as app:
        page = app.get("run", run="my run")
        fixes = {one["kind"]: one["fix"] for one in page["findings"]}
        assert f"`reinforge runs why '{copy}' --group 0`" in fixes["constant_reward"]
        whats = [one["what"] for one in page["findings"] if not one["because"]]
        assert [one["what"] for one in page["causes"]] == whats[: len(page["causes"])] != []


def test_the_form_knows_all_algorithms(app: AppClient) -> None:
    found = {one["name"]: one["family"] for one in app.get("algorithms")}
    assert found == {name: spec.family for name, spec in TABLE.items()}


def test_curves_are_the_lines_of_the_file(app: AppClient, runs: Path) -> None:
    found = app.get("curves", run=RUN)
    titles = [question["title"] for question in found["questions"]]
    assert titles[:3] == ["Is it learning?", "Is it stable?", "Is it fast?"]
    curves = {c["name"]: c for q in found["questions"] for c in q["curves"]}
    for name in ("reward/mean", "policy/entropy", "tokens_per_second"):
        want = [(m["step"], m[name]) for m in lines(runs, "metrics.jsonl") if name in m]
        assert [(p[0], p[2]) for p in curves[name]["points"]] == want
    assert curves["policy/entropy"]["healthy"] == [0.1, None]
    evaluated = [m for m in lines(runs, "metrics.jsonl") if "eval/accuracy" in m]
    want = [
        [m["step"], m["eval/accuracy"], m["eval/accuracy_low"], m["eval/accuracy_high"]]
        for m in evaluated
    ]
    assert [[p[0], *p[2:]] for p in curves["eval/accuracy"]["points"]] == want
    (only,) = app.get("curves", run=RUN, names="reward/mean", points=2)["questions"]
    values = [m["reward/mean"] for m in lines(runs, "metrics.jsonl") if "reward/mean" in m]
    (curve,) = only["curves"]
    assert [p[2] for p in curve["points"]] == [
        pytest.approx(sum(values[:2]) / 2),
        pytest.approx(sum(values[2:]) / 2),
    ]


def test_phases_add_up_to_the_steps(app: AppClient, runs: Path) -> None:
    found = app.get("phases", run=RUN)
    steps = [m for m in lines(runs, "metrics.jsonl") if "time/step" in m]
    assert [bar[0] for bar in found["bars"]] == [m["step"] for m in steps]
    for bar, line in zip(found["bars"], steps, strict=True):
        assert sum(bar[2:]) == pytest.approx(line["time/step"], abs=1e-3)
    assert set(found["idle"]) == {"trainer", "engine"}
    assert [m[1] for m in found["memory"]] == [m["memory/peak_gib"] for m in steps]


def test_samples_are_filtered_by_what_the_file_says(app: AppClient, runs: Path) -> None:
    rows = lines(runs, "samples.jsonl")
    everything = app.get("samples", run=RUN, size=500, order="oldest")
    assert everything["total"] == len(rows)
    assert [r["completion"] for r in everything["rows"]] == [r["completion"] for r in rows]
    assert everything["facets"]["components"] == ["digits", "short"]
    middle = sorted(r["reward"] for r in rows)[len(rows) // 2]
    text = rows[0]["completion"][:2]
    asked: list[tuple[dict[str, Any], Any]] = [
        ({"step": 2}, lambda r: r["step"] == 2),
        ({"reward_min": middle}, lambda r: r["reward"] >= middle),
        ({"reward_max": middle, "step": 1}, lambda r: r["reward"] <= middle and r["step"] == 1),
        ({"length_max": 5}, lambda r: r["length"] <= 5),
        ({"prompt": rows[3]["row"]}, lambda r: r["row"] == rows[3]["row"]),
        ({"stop": "length"}, lambda r: r["stop"] == "length"),
        ({"finding": "truncation"}, lambda r: r["stop"] == "length"),
        ({"component": "digits>0"}, lambda r: r["components"]["digits"] > 0),
        ({"text": text}, lambda r: text in r["prompt"] or text in r["completion"]),
        ({"eval": "true"}, lambda r: r.get("eval", False)),
        (
            {"finding": "no_gradient"},
            lambda r: r.get("training", {}).get("no_signal") is not None,
        ),
    ]
    for query, fits in asked:
        found = app.get("samples", run=RUN, size=500, order="oldest", **query)
        want = [i for i, r in enumerate(rows) if fits(r)]
        assert [r["line"] for r in found["rows"]] == want, query
    best = app.get("samples", run=RUN, order="-reward", size=3)["rows"]
    assert [r["reward"] for r in best] == sorted((r["reward"] for r in rows), reverse=True)[:3]
    second = app.get("samples", run=RUN, order="oldest", page=1, size=5)["rows"]
    assert [r["line"] for r in second] == [5, 6, 7, 8, 9]


def test_a_sample_has_its_tokens_as_they_were_recorded(
    app: AppClient, runs: Path, tiny_dir: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    rows = lines(runs, "samples.jsonl")
    for number, row in enumerate(rows):
        found = app.get("sample", run=RUN, line=number)
        assert found["completion"] == row["completion"] and found["reward"] == row["reward"]
        told = row.get("training", {})
        assert found["advantage"] == advantage_of(told)
        assert found["answer"] == RIGHT[row["prompt"]]
        recorded = told.get("by_token")
        if recorded is None:
            assert found["tokens"] is None
            continue
        assert found["tokens"]["ids"] == recorded["ids"]
        assert found["tokens"]["pieces"] == [tokenizer.decode([i]) for i in recorded["ids"]]
        for name, values in recorded.items():
            if name != "ids":
                assert found["tokens"]["fields"][name] == values
        if "logprob" in recorded:
            assert found["tokens"]["differences"]["logprob - behaviour"] == [
                a - b for a, b in zip(recorded["logprob"], recorded["behaviour"], strict=True)
            ]
    assert any(r.get("training", {}).get("by_token", {}).get("ratio") for r in rows)


def test_entropies_of_tokens_have_the_mean_of_the_step(runs: Path) -> None:
    """The run keeps all samples of a step, and each is in one update."""
    told = {
        m["step"]: m["policy/entropy"] for m in lines(runs, "metrics.jsonl") if "reward/mean" in m
    }
    by_step: dict[int, list[float]] = {step: [] for step in told}
    for row in lines(runs, "samples.jsonl"):
        if not row.get("eval"):
            by_step[row["step"]] += row["training"]["by_token"].get("entropy", [])
    for step, values in by_step.items():
        assert sum(values) / len(values) == pytest.approx(told[step], rel=1e-4)


def test_rewards_of_a_file_can_be_tried_again(app: AppClient, runs: Path, tmp_path: Path) -> None:
    """The run was given functions; it noted the file that has them."""
    asked = {"run": RUN, "prompt": "1+1=", "completion": "a1b2", "columns": {}}
    scores = {one["name"]: one for one in app.post("rewards", asked)}
    want = {"digits": digits(["a1b2"])[0], "short": short(["a1b2"])[0]}
    assert {name: one["value"] for name, one in scores.items()} == want
    assert {name: one["weight"] for name, one in scores.items()} == {"digits": 1.0, "short": 0.5}
    shutil.copytree(runs / RUN, tmp_path / "moved")
    (tmp_path / "moved" / "rewards.json").unlink()
    with web_app(tmp_path) as client:
        said = client.post("rewards", {**asked, "run": "moved"}, 400)["error"]
    assert "digits as a Python function" in said["what"] and said["where"] == "rewards.0.name"


def test_what_is_appended_is_seen_and_what_is_cut_back_is_gone(runs: Path, tmp_path: Path) -> None:
    """A run that is resumed cuts its logs back to its checkpoint."""
    copy = tmp_path / "again"
    shutil.copytree(runs / RUN, copy)
    metrics = (copy / "metrics.jsonl").read_bytes()
    samples = (copy / "samples.jsonl").read_bytes()
    half = samples.index(b'{"step": 3')
    early = metrics.index(b'{"step": 3')
    (copy / "metrics.jsonl").write_bytes(metrics[:early] + metrics[early : early + 30])
    (copy / "samples.jsonl").write_bytes(samples[:half])
    with web_app(tmp_path) as client:

        def seen() -> tuple[int, int]:
            total = client.get("samples", run="again")["total"]
            return client.get("run", run="again")["step"], total

        before = seen()
        assert before == (2, samples[:half].count(b"\n"))
        (copy / "metrics.jsonl").write_bytes(metrics)
        with (copy / "samples.jsonl").open("ab") as file:
            file.write(samples[half:])
        assert seen() == (4, samples.count(b"\n"))
        (copy / "metrics.jsonl").write_bytes(metrics[:early])
        (copy / "samples.jsonl").write_bytes(samples[:half])
        assert seen() == before


def test_texts_are_found_whatever_is_in_them(tmp_path: Path) -> None:
    """Quotes, other alphabets, and a completion that looks like the rest of a line."""
    texts = ['say "hi"', "größe ≤ 3", 'a", "reward": 1', "line\nbreak \\n", "\ud800 lone"]
    with (tmp_path / "samples.jsonl").open("w") as file:
        for text in texts:
            record = {"step": 1, "row": "needle", "uid": "0#0", "prompt": "p", "completion": text}
            tail = {"reward": None, "components": {}, "stop": "eos", "length": 1}
            file.write(json.dumps({**record, **tail}) + "\n")
    index = SampleIndex(tmp_path)
    index.refresh()
    for number, text in enumerate(texts):
        assert index.select(SampleFilter(text=text)).tolist() == [number]
        assert index.read(number)["completion"] == text.replace("\ud800", "\\ud800")
    assert index.select(SampleFilter(text="needle")).tolist() == []  # of a row's id, no text
    assert index.select(SampleFilter(unscored=True), "oldest").tolist() == [0, 1, 2, 3, 4]


def test_an_app_that_is_asked_to_end_ends_as_other_commands_do(tmp_path: Path) -> None:
    """Not by the signal itself: what it started (a checkpoint that talks) must be ended too."""
    command = [sys.executable, "-m", "reinforge", "ui", str(tmp_path), "--port", "0", "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as app:
        assert app.stdout is not None and "http://127.0.0.1:" in app.stdout.readline()
        app.send_signal(signal.SIGTERM)
        assert app.wait(timeout=60) == EXIT_TERMINATED


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_meets_a_finalizer_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "AGAIN", 0.05)
    before = signal.getsignal(signal.SIGTERM)

    class Loses:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as ended, server.ending_by_signal():
        Loses()
        reached = True
        time.sleep(10)
    assert reached and ended.value.code == EXIT_TERMINATED
    assert signal.getsignal(signal.SIGTERM) == before
