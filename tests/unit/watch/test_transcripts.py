"""The table of transcripts in a run's report: every turn, tool call and result of a few episodes,
before and after training, as text.
"""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from helpers.toys import SilentView
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.run import train_config
from reinforge.config.load import config_from_dict
from reinforge.core.sample import Group, Row, Sample
from reinforge.models.tiny import make_tiny_model
from reinforge.watch.recorder import Recorder
from reinforge.watch.report import write_report
from reinforge.watch.transcripts import (
    EPISODES,
    MESSAGES,
    WIDTH,
    chosen,
    transcript_table,
    turns_of,
)

EVIL = "</td></table><script>alert(1)</script><img src=x onerror=alert(2)> & \" ' \ud800 @@DATA@@"
CALL = {
    "type": "function",
    "id": "1",
    "function": {"name": "calculator", "arguments": {"expression": "12*34"}},
}
TALK = [
    {"role": "user", "content": "12*34="},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "calculator", "content": "408"},
    {"role": "assistant", "content": "It is 408."},
]


class Table(HTMLParser):
    """Cells of the table of transcripts, row by row, and all tags of the page."""

    def __init__(self, page: str):
        super().__init__(convert_charrefs=True)
        self.rows: list[list[str]] = []
        self.tags: list[str] = []
        self._inside = self._cell = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "table":
            self._inside = dict(attrs).get("id") == "transcripts"
        if self._inside and tag == "tr":
            self.rows.append([])
        self._cell = self._cell or (self._inside and tag in ("td", "th"))
        if self._inside and tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._cell = self._cell and tag not in ("td", "th")
        self._inside = self._inside and tag != "table"

    def handle_data(self, data: str) -> None:
        if self._cell:
            self.rows[-1][-1] += data


def group(row: str, messages: list[dict[str, Any]], reward: float | None) -> Group:
    sample = Sample.from_tokens(f"{row}#0", [1, 2], [False, True], reward=reward)
    return Group(Row(row, "12*34="), [sample], ["text"], transcripts={f"{row}#0": messages})


def test_the_report_has_every_turn_before_and_after(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, {})
    guessed = [TALK[0], {"role": "assistant", "content": "409"}]
    recorder.samples(0, [group("r0", guessed, 0.0)], 4, evaluation=True)
    recorder.samples(1, [group("t0", TALK, 0.5)], 4)
    recorder.samples(5, [group("r0", TALK[:2], None)], 4, evaluation=True)
    recorder.samples(9, [group("r0", TALK, 1.0)], 4, evaluation=True)
    recorder.close()
    page = Table(write_report(tmp_path).read_text(encoding="utf-8"))
    assert page.rows[0] == ["episode", "turn", "role", "text", "tool calls", "reward", "stop"]
    assert page.rows[1:] == [
        ["before trainingrow r0", "", "user", "12*34=", "", "", ""],
        ["1", "assistant", "409", "", "0", "eos"],
        ["after step 9row r0", "", "user", "12*34=", "", "", ""],
        ["1", "assistant", "", 'calculator {"expression": "12*34"}', "", ""],
        ["", "tool (calculator)", "408", "", "", ""],
        ["2", "assistant", "It is 408.", "", "1", "eos"],
    ]
    assert [
        s["step"] for s in map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines())
    ] == [0, 1, 5, 9]


def test_without_evaluations_the_first_and_the_last_step_are_shown() -> None:
    samples = [
        {"step": s, "row": f"r{i}", "reward": None, "stop": "length", "turns": turns_of(TALK)}
        for s in (1, 11, 21)
        for i in range(9)
    ]
    assert [(when, len(found)) for when, found in chosen(samples)] == [
        ("step 1", EPISODES),
        ("step 21", EPISODES),
    ]
    assert (
        "unscored" in transcript_table(samples)
        and transcript_table(samples).count("<tbody>") == 2 * EPISODES
    )
    assert [when for when, _ in chosen(samples[:9])] == ["step 1"], "one step is shown once"
    assert transcript_table([{"step": 1, "completion": "x"}]) == "" and transcript_table([]) == ""


def test_what_models_and_tools_wrote_stays_text(tmp_path: Path) -> None:
    call = {"function": {"name": EVIL, "arguments": {EVIL: EVIL}}}
    talk = [
        {"role": EVIL, "content": EVIL},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "name": EVIL, "content": [{"text": EVIL}]},
    ]
    recorder = Recorder(tmp_path, {})
    recorder.samples(0, [group(EVIL, talk, 1.0)], 4, evaluation=True)
    recorder.close()
    page = Table(write_report(tmp_path).read_text(encoding="utf-8"))
    assert page.tags.count("script") == 2 and "img" not in page.tags
    cells = [cell for row in page.rows for cell in row]
    assert (
        sum("<script>alert(1)</script><img src=x onerror=alert(2)>" in cell for cell in cells) == 6
    ), "row, role, text, call, tool, result"
    assert not any("\ud800" in cell for cell in cells)


def test_long_conversations_and_long_messages_are_cut_and_say_so() -> None:
    found = turns_of([{"role": "user", "content": str(i)} for i in range(MESSAGES + 7)])
    assert len(found) == MESSAGES + 1 and found[MESSAGES // 2] == {
        "role": "",
        "text": "(7 messages are not shown)",
    }
    assert found[0]["text"] == "0" and found[-1]["text"] == str(MESSAGES + 6)
    page = transcript_table(
        [
            {
                "step": 0,
                "eval": True,
                "reward": 1.0,
                "turns": turns_of([{"role": "user", "content": "x" * (WIDTH + 5)}]),
            }
        ]
    )
    assert "x" * WIDTH + " … (5 more characters)" in page and "x" * (WIDTH + 1) not in page
    assert turns_of([{"role": "assistant", "content": "a", "thinking": "hm"}]) == [
        {"role": "assistant", "text": "(hm) a"}
    ]


@pytest.mark.timeout(120)
def test_a_run_with_an_environment_records_its_conversations(tmp_path: Path) -> None:
    model = make_tiny_model(
        tmp_path / "model", width=32, layers=1, heads=4, kv_heads=4, context=128, chat=True
    )
    rows = [{"prompt": f"{a}: {{low}} to {{high}}", "answer": str(a * 3)} for a in range(12)]
    cfg = config_from_dict(
        {
            "model": {"path": str(model), "device": "cpu"},
            "algorithm": {"name": "grpo", "group_size": 2},
            "data": {"source": "python"},
            "env": {"name": "guess_number", "max_turns": 2, "max_tokens": 120},
            "rollout": {"max_new_tokens": 4},
            "train": {"steps": 2, "prompts_per_step": 2, "learning_rate": 1e-4},
            "eval": {"at_start": True},
            "run": {
                "dir": str(tmp_path / "run"),
                "checkpoint": {"every": 0},
                "log": {"samples_every": 1, "samples": 2},
            },
        },
        where="test",
    )
    train_config(cfg, CallerObjects(data=rows[:8], eval_data=rows[8:]), SilentView())
    samples = [
        json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    ]
    assert [(s["step"], s.get("eval", False)) for s in samples] == [(0, True)] * 2 + [
        (1, False)
    ] * 2 + [(2, False)] * 2 + [(2, True)] * 2
    assert all(
        [t["role"] for t in s["turns"]] == ["user", "assistant", "user", "assistant"]
        for s in samples
    )
    # the prompt is what was asked: the game has filled its numbers in
    assert all(s["prompt"] == s["turns"][0]["text"] and "{" not in s["prompt"] for s in samples)
    page = Table(write_report(tmp_path / "run").read_text(encoding="utf-8"))
    assert [r[0] for r in page.rows if len(r) == 7][1:] == [
        f"{when}row {s['row']}" for when in ("before training", "after step 2") for s in samples[:2]
    ]
