"""Training data from a teacher: what is kept, what is left out and why, and what the files say."""

from __future__ import annotations

import doctest
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from helpers.openai_stub import stub_server
from reinforge import InputError, make_data
from reinforge.cli import make as command
from reinforge.cli.main import main
from reinforge.config.data import DataConfig
from reinforge.data.sources import load_rows
from reinforge.offline import question_answers
from reinforge.offline.made_rows import DropCounts, Selection, question_rows


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def said(body: dict[str, Any]) -> str:
    return str(body["messages"][-1]["content"])


def finished(body: dict[str, Any], texts: list[str], cut: int = -1) -> Any:
    """A reply of these texts; one may have been cut."""
    choices = [
        {
            "index": i,
            "message": {"content": text},
            "finish_reason": "length" if i == cut else "stop",
        }
        for i, text in enumerate(texts)
    ]
    return 200, {}, {"choices": choices}


QUESTIONS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(4)]


def test_good_answers_are_kept_and_the_others_counted(tmp_path: Path) -> None:
    def say(body: dict[str, Any]) -> Any:
        right = str(2 * int(said(body)[0]))
        return finished(body, [right, "wrong", f" {right} ", "", f"{right}0", f"{right} "], cut=4)

    out = tmp_path / "made.jsonl"
    repeated = [*QUESTIONS, {"prompt": " 3+3= ", "answer": "6"}]
    with stub_server(say) as stub:
        options: dict[str, Any] = dict(teacher=stub.url, n=6, rewards="exact_match")
        heard: list[tuple[str, int, int]] = []
        made = make_data(
            "answers",
            repeated,
            out,
            at_least=1.0,
            progress=lambda *far: heard.append(far),
            **options,
        )
        assert len(stub.asked) == 4
        assert heard == [("prompts", done, 4) for done in (1, 2, 3, 4)]
        assert [row["messages"] for row in made.rows] == [
            [
                {"role": "user", "content": q["prompt"]},
                {"role": "assistant", "content": q["answer"]},
            ]
            for q in QUESTIONS
        ]
        assert made.dropped == {
            "repeated prompt": 1,
            "low score": 4,
            "repeated answer": 8,
            "empty": 4,
            "cut": 4,
        }
        assert lines_of(out) == made.rows and len(lines_of(made.raw)) == 24
        other = make_data("answers", repeated, out, best=2, keep_cut=True, **options)
        assert len(stub.asked) == 4, "another choice among the same answers asks for nothing"
        plain = make_data(
            "answers", [{"prompt": "1+1=", "reward": 7}], tmp_path / "plain.jsonl", teacher=stub.url
        )
    assert [list(row) for row in plain.rows] == [["id", "messages"]], "nobody scored it"
    kept = [[m["content"] for m in row["messages"]][1] for row in other.rows]
    assert kept == [t for q in QUESTIONS for t in (q["answer"], "wrong")]
    assert other.dropped["not best"] == 4, "the one that was cut came after them"
    rows = load_rows(DataConfig(source=str(out)))
    assert rows[0].prompt == [{"role": "user", "content": "0+0="}]
    assert len({row.id for row in rows}) == 8


def test_the_manifest_says_where_a_file_comes_from(tmp_path: Path) -> None:
    source = tmp_path / "q.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    out = tmp_path / "made.jsonl"
    with stub_server(lambda body: "4") as stub:
        address = stub.url.replace("http://", "http://me:secret@")
        made = make_data(
            "answers",
            source,
            out,
            teacher=address,
            rewards=("exact_match", 2.0),
            at_least=2.0,
            temperature=0.5,
            seed=3,
            api_key="sk-secret",
            overrides=["data.limit=3"],
        )
    told = json.loads((tmp_path / "made.manifest.json").read_text())
    assert told == made.manifest
    assert told["source"]["source"] == str(source) and told["source"]["limit"] == 3
    assert told["source"]["rows"] == 3
    assert told["teacher"]["model"] == "stub"
    assert told["sampling"] == {
        "n": 1,
        "temperature": 0.5,
        "top_p": 1.0,
        "max_new_tokens": 1024,
    }
    assert told["seed"] == 3 and told["rewards"] == [{"name": "exact_match", "weight": 2.0}]
    assert (told["rows"], told["completions"], told["dropped"]) == (1, 3, {"low score": 2})
    assert told["sha256"] == hashlib.sha256(out.read_bytes()).hexdigest()
    assert "secret" not in (tmp_path / "made.manifest.json").read_text()


def test_pairs_by_a_reward_from_python_and_by_a_judge(tmp_path: Path) -> None:
    def length(completions: list[str], **columns: Any) -> list[float | None]:
        return [None if c == "?" else float(len(c)) for c in completions]

    def say(body: dict[str, Any]) -> list[str]:
        return ["?", "?", "?"] if said(body)[0] == "0" else ["aa", "aaaa", "a"]

    with stub_server(say) as stub, stub_server(lambda body: "Score: 5") as judge:
        options: dict[str, Any] = dict(teacher=stub.url, n=3)
        out = tmp_path / "made.jsonl"
        made = make_data("pairs", QUESTIONS, out, rewards=length, **options)
        assert [(p["prompt"], p["chosen"], p["rejected"], p["margin"]) for p in made.rows] == [
            (q["prompt"], "aaaa", "a", 3.0) for q in QUESTIONS[1:]
        ]
        assert made.dropped == {"unscored": 3, "no pair": 1}
        both = make_data("pairs", QUESTIONS, out, rewards=length, pairs="all", margin=1, **options)
        assert [(p["chosen"], p["rejected"]) for p in both.rows[:2]] == [
            ("aaaa", "aa"),
            ("aaaa", "a"),
        ]
        with pytest.raises(InputError, match="nothing is left of 12 completions .*no pair 4"):
            make_data("pairs", QUESTIONS, out, judge=judge.url, **options)
        assert len(judge.asked) == 12 and len(stub.asked) == 4
    assert lines_of(out) == both.rows, "what was there stays"


def test_a_threshold_that_no_answer_reaches(tmp_path: Path) -> None:
    def length(completions: list[str], **columns: Any) -> list[float]:
        return [len(c) / 4 for c in completions]

    out = tmp_path / "made.jsonl"
    with stub_server(lambda body: ["a", "aaa"]) as stub:
        options: dict[str, Any] = dict(teacher=stub.url, n=2, rewards=length)
        with pytest.raises(InputError, match=r"best score was 0\.75: lower --at-least \(0\.8\)\. "):
            make_data("answers", QUESTIONS, out, at_least=0.8, **options)
        assert not out.exists() and len(lines_of(tmp_path / "made.raw.jsonl")) == 8
        made = make_data("answers", QUESTIONS, out, at_least=0.75, **options)
        assert len(made.rows) == 4 and len(stub.asked) == 4, "nobody is asked again"


def test_a_reward_that_was_edited_is_asked_again(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    source = "def mine(completions, **columns):\n    return [{} for c in completions]\n"
    file.write_text(source.format("float(c == '0')"))
    with stub_server(lambda body: ["0", "1"]) as stub:
        options: dict[str, Any] = dict(teacher=stub.url, n=2, rewards=f"{file}:mine", at_least=1)
        out = tmp_path / "made.jsonl"
        first = make_data("answers", QUESTIONS[:1], out, **options)
        file.write_text(source.format("float(c == '1')"))
        second = make_data("answers", QUESTIONS[:1], out, **options)
        assert len(stub.asked) == 1
    assert [made.rows[0]["messages"][1]["content"] for made in (first, second)] == ["0", "1"]


# questions


def test_what_counts_of_a_reply() -> None:
    assert doctest.testmod(question_answers).failed == 0
    good = {"question": "Who?", "answer": "Ann."}
    replies = [
        json.dumps({"pairs": [good, {"question": "  ", "answer": "x"}, "?", good]}),
        json.dumps({"pairs": []}),
        '{"pairs": [{"question": "When?", "ans',
        "I cannot.",
        json.dumps({"question": "When?", "answer": "\ud800"}),
        json.dumps({"question": " who?", "answer": "Bob."}),
        json.dumps([{"question": f"Q{i}?", "answer": "A."} for i in range(6)]),
    ]
    lines = [
        {"id": f"{i}", "document": "d", "start": i, "completion": reply, "stop": "eos"}
        for i, reply in enumerate(replies)
    ]
    drops = DropCounts()
    rows = question_rows(lines, 4, Selection(), drops, chat=True)
    asked = [row["messages"][0]["content"] for row in rows]
    assert asked == ["Who?", "Q0?", "Q1?", "Q2?", "Q3?"]
    assert rows[0]["messages"][1]["content"] == "Ann."
    assert (rows[1]["document"], rows[1]["start"]) == ("d", 6)
    assert drops.counts == {
        "no question": 1,
        "no pairs": 2,
        "repeated question": 2,
        "no JSON": 2,
        "no text": 1,
        "too many": 2,
    }
    assert set(drops.counts) <= set(command.REASONS)
    plain = question_rows(lines[:1], 4, Selection(), DropCounts(), chat=False)
    assert (plain[0]["prompt"], plain[0]["completion"]) == ("Who?", "Ann.")


def test_questions_from_documents(tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "a.md").write_text("Ann wrote it. " * 6 + "\n\n" + "Bob read it. " * 6)
    (folder / "b.txt").write_text("Ignore this {n}.")

    def say(body: dict[str, Any]) -> str:
        text = said(body)
        name = next(word for word in ("Ann", "Bob", "Ignore") if word in text)
        return json.dumps({"pairs": [{"question": f"Who is {name}?", "answer": f"{name}."}]})

    with stub_server(say) as stub:
        options: dict[str, Any] = dict(teacher=stub.url, chunk=100, overlap=10, questions=2)
        made = make_data("questions", folder, tmp_path / "made.parquet", **options)
        prompts = [said(body) for body in stub.asked]
        assert all("Write up to 2 questions" in text for text in prompts)
        assert any("\nIgnore this {n}.\n#" in text for text in prompts), "no place of ours"
        schema = stub.asked[0]["response_format"]["json_schema"]["schema"]
        assert schema["properties"]["pairs"]["maxItems"] == 2
        template = "About: {text}"
        out = tmp_path / "other.jsonl"
        make_data("questions", ["Bob."], out, template=template, structured=False, **options)
        assert said(stub.asked[-1]) == "About: Bob." and "response_format" not in stub.asked[-1]
    assert [row["messages"][1]["content"] for row in made.rows] == ["Ann.", "Bob.", "Ignore."]
    found = load_rows(DataConfig(source=str(tmp_path / "made.parquet")))
    assert [row.columns["document"] for row in found] == [
        str(folder / name) for name in ("a.md", "a.md", "b.txt")
    ]
    assert found[1].columns["messages"][1] == {"role": "assistant", "content": "Bob."}


# what the teacher cannot answer


def test_one_request_that_is_refused_is_left_out(tmp_path: Path) -> None:
    def say(body: dict[str, Any]) -> Any:
        return (400, {}, {"error": "too long"}) if "long" in said(body) else "fine"

    with stub_server(say) as stub:
        rows = [*QUESTIONS, {"prompt": "a long one"}]
        made = make_data("answers", rows, tmp_path / "made.jsonl", teacher=stub.url)
        assert len(made.rows) == 4 and made.dropped == {"refused": 1}
        assert "400 too long" in made.examples["refused"]
        make_data("answers", rows, tmp_path / "made.jsonl", teacher=stub.url)
        assert len(stub.asked) == 6, "it is asked again, in case the server can now"
        wrong = [{"prompt": f"long {i}"} for i in range(50)]
        with pytest.raises(InputError, match="400 too long"):
            make_data("answers", wrong, tmp_path / "no.jsonl", teacher=stub.url, parallel=1)
        assert len(stub.asked) < 20, "where all are refused, the request is wrong and not the row"


# the command line


def test_the_command_tells_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "q.jsonl"
    source.write_text("".join(json.dumps({"query": q["prompt"]}) + "\n" for q in QUESTIONS))
    (tmp_path / "judge.txt").write_text("{prompt} {completion}")
    out = tmp_path / "made.jsonl"
    with (
        stub_server(lambda body: ["good", "bad", "x" * 500]) as stub,
        stub_server(lambda body: f"Score: {9 if 'good' in said(body) else 1}") as judge,
    ):
        line = ["data", "make", "answers", str(source), "data.columns.prompt=query", "-n", "3"]
        line += ["--teacher", stub.url, "--out", str(out), "--judge", judge.url, "--at-least", "5"]
        line += ["--judge-prompt", str(tmp_path / "judge.txt")]
        assert main(line) == 0, capsys.readouterr().err
    told = capsys.readouterr().out
    assert f"4 rows in {out}, from 12 answers to 4 prompts" in told
    assert "8 scored below --at-least, e.g. row" in told and "'bad'" in told
    assert [row["judge"] for row in lines_of(out)] == [9.0] * 4


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["answers", "--best", "1"], "--best: there is no score to choose by"),
        (["answers", "--reward", "exact_mach", "--best", "1"], "Did you mean exact_match"),
        (["answers", "--reward", "exact_match"], "answer"),
        (["pairs", "-n", "1", "--reward", "starts_with"], "-n: a pair needs two answers"),
        (["pairs"], "what makes one answer better"),
        (["questions", "--overlap", "9", "--chunk", "10"], "more than half of a chunk"),
        (["questions", "--template", "t.txt"], "has no place for {text}"),
        (["questions", "--template", "nowhere.txt"], "--template: cannot read nowhere.txt"),
        (["answers", "--out", "made.csv"], "made.csv is neither .jsonl nor .parquet"),
        (["answers", "--out", "q.jsonl"], "q.jsonl is the source"),
        (["answers", "--out", "theirs.jsonl"], "theirs.jsonl exists, and nothing says"),
        (["answers", "--out", "old.jsonl"], "old.manifest.json is that of old.parquet"),
    ],
)
def test_wrong_commands(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("q.jsonl").write_text('{"prompt": "hi", "text": "hi"}\n')
    Path("t.txt").write_text("Ask {n}.")
    Path("theirs.jsonl").write_text("{}\n")
    Path("old.manifest.json").write_text('{"file": "old.parquet"}')
    kind, *options = words
    if "--out" not in options:
        options += ["--out", "made.jsonl"]
    line = ["data", "make", kind, "q.jsonl", "--teacher", "http://127.0.0.1:1/v1", *options]
    assert main(line) == 2
    assert told in " ".join(capsys.readouterr().err.split())
