"""`reinforge data show`: what it prints at a terminal, and that it is what a run trains."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import LlamaConfig

from reinforge.cli import show
from reinforge.cli.data_page import histogram
from reinforge.cli.main import main
from reinforge.config.data import DataConfig
from reinforge.config.model import ModelConfig
from reinforge.models.tiny import tiny_tokenizer
from reinforge.offline.data_view import view_data

CHAT = (
    "{% for m in messages %}{{ m.role }}\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)


@pytest.fixture
def chatty(tmp_path: Path) -> str:
    """A directory with a chat tokenizer and the configuration of a model of 64 tokens."""
    path = tmp_path / "chatty"
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(path)
    LlamaConfig(
        vocab_size=300, max_position_embeddings=64, architectures=["LlamaForCausalLM"]
    ).save_pretrained(path)
    return str(path)


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def screen(monkeypatch: pytest.MonkeyPatch, width: int = 80, *, color: bool = False) -> io.StringIO:
    out = io.StringIO()
    console = Console(
        file=out,
        force_terminal=True,
        color_system="truecolor" if color else None,
        width=width,
        highlight=False,
    )
    monkeypatch.setattr(show, "console", lambda: console)
    return out


ALPACA = [
    {"instruction": "Add.", "input": "1 2", "output": "3"},
    {"instruction": "Greet.", "input": "", "output": "Hello."},
]


def test_the_page_of_an_alpaca_file(
    chatty: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "alpaca.jsonl", ALPACA)
    out = screen(monkeypatch)
    assert main(["data", "show", "alpaca.jsonl", "--model", chatty, "--rows", "1"]) == 0
    page = [line.rstrip() for line in out.getvalue().splitlines()]
    assert page[:14] == [
        "data      alpaca.jsonl",
        "format    alpaca (instruction, input, output)",
        "          prompt = instruction + input, completion = output",
        "serves    SFT, RL",
        "shown     answers, as sft trains them; trained is what stands between ⟦ and ⟧",
        "rendered  the chat template of the model",
        "rows      2",
        "",
        "columns",
        "  instruction  text  100%  Add.",
        "  input        text   50%  1 2",
        "  output       text  100%  3",
        "",
        "row 1: alpaca.jsonl:1",
    ]
    assert "  │ ⟦3<|eos|>⟧" in page and "  │ 1 2<|eos|>" in page
    assert page[-1] == "nothing is dropped or cut; a text may have 64 tokens"


@pytest.mark.parametrize("width", [80, 120])
def test_what_is_left_out_is_named_and_nothing_is_wider_than_the_terminal(
    chatty: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [*ALPACA, {"instruction": "Count.", "output": "1 2 3 " * 400}, {"instruction": ""}]
    write(tmp_path / "a.jsonl", rows)
    out = screen(monkeypatch, width)
    assert main(["data", "show", "a.jsonl", "--model", chatty]) == 0
    page = out.getvalue()
    assert max(map(len, page.splitlines())) <= width
    assert "1 row cannot be used: refused" in page
    assert "a.jsonl:4: instruction is empty, and so is its input" in page
    assert "1 row has more than 64 tokens: dropped (data.length: drop)" in page
    assert "a.jsonl:3: " in page and "more characters" in page
    again = screen(monkeypatch, width)
    settings = ["data.length=truncate", "data.bad_rows=drop", "data.max_length=5000"]
    assert main(["data", "show", "a.jsonl", *settings, "--model", chatty, "--full"]) == 0
    page = again.getvalue()
    assert "1 row cannot be used: dropped (data.bad_rows: drop)" in page
    assert "more characters" not in page and "more than" not in page


@pytest.fixture
def plain(chatty: str) -> str:
    """The same without a chat template."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    for file in Path(chatty).glob("*chat_template*"):
        file.unlink()
    tokenizer.save_pretrained(chatty)
    return chatty


def test_where_no_row_can_be_used_the_hint_is_that_of_a_run(
    plain: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    talk = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
    write(tmp_path / "s.jsonl", [{"conversations": [*talk, *talk[: 2 * i]]} for i in range(7)])
    out = screen(monkeypatch, 300)
    assert main(["data", "show", "s.jsonl", "--model", plain]) == 2
    page = out.getvalue()
    assert "7 rows cannot be used: refused" in page
    assert page.count("no chat template") == 2, "how it is rendered, and why not"
    assert "s.jsonl:1: its prompt is chat messages" in page
    assert "(also s.jsonl:2, s.jsonl:3, s.jsonl:4, s.jsonl:5 and 2 more)" in page
    assert page.count("set model.chat_template (llama2") == 1 and "bad_rows" not in page
    # as soon as one row can be used it is no error
    write(tmp_path / "m.jsonl", [{"conversations": talk}, *ALPACA])
    out = screen(monkeypatch, 300)
    assert main(["data", "show", "m.jsonl", "--model", plain]) == 0
    page = out.getvalue()
    assert "set model.chat_template (llama2" in page
    assert "Or leave such rows out: data.bad_rows=drop." in page


def test_prompt_and_answer_that_are_glued_are_told(
    plain: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", ALPACA)
    out = screen(monkeypatch, 300)
    assert main(["data", "show", path, "--model", plain]) == 0
    note = "as plain text nothing stands between prompt and answer; model.chat_template=alpaca"
    assert out.getvalue().count(f"2 rows: {note}") == 1
    out = screen(monkeypatch, 300)
    told = ["model.chat_template=alpaca", "data.max_length=500"]
    assert main(["data", "show", path, *told, "--model", plain]) == 0
    assert "### Response:" in out.getvalue()
    assert note not in out.getvalue()
    pair = {"prompt": "2+2?", "chosen": "four", "rejected": "five"}
    path = write(tmp_path / "p.jsonl", [pair, {**pair, "prompt": "2+2="}])
    out = screen(monkeypatch, 300)
    assert main(["data", "show", path, "--model", plain]) == 0
    assert f"1 row: {note}" in out.getvalue()


def test_trained_text_has_a_colour_too(
    chatty: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = screen(monkeypatch, color=True)
    path = write(tmp_path / "a.jsonl", ALPACA)
    assert main(["data", "show", path, "--model", chatty, "--rows", "1"]) == 0
    (line,) = (line for line in out.getvalue().splitlines() if "⟦3" in line)
    assert "\x1b[1;32m⟦3<|eos|>⟧" in line


def test_pairs_show_the_prompt_once_and_prompts_their_answer(
    chatty: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = screen(monkeypatch)
    path = write(tmp_path / "p.jsonl", [{"prompt": "2+2?", "chosen": "four", "rejected": "five"}])
    assert main(["data", "show", path, "--model", chatty]) == 0
    page = out.getvalue()
    assert "pairs of answers, as dpo compares them" in page
    assert "  │ (the same prompt) ⟦five<|eos|>⟧" in page and page.count("2+2?<|eos|>") == 1
    out = screen(monkeypatch)
    path = write(tmp_path / "q.jsonl", [{"question": "2+2?", "answer": "#### 4"}])
    assert main(["data", "show", path, "--model", chatty]) == 0
    page = out.getvalue()
    assert "a prompt, which the model answers" in page and "  answer: #### 4" in page
    assert "⟦" not in page


def test_without_a_model_the_roles_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = screen(monkeypatch)
    talk = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
    path = write(tmp_path / "s.jsonl", [{"conversations": talk}])
    assert main(["data", "show", path]) == 0
    page = out.getvalue()
    assert "  │ user: 2+2?" in page and "  │ assistant: ⟦4⟧" in page
    assert "not at all: --model M says how, and counts tokens" in page
    assert "lengths" not in page


def test_a_configuration_shows_its_data_as_its_algorithm_trains_them(
    chatty: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "p.jsonl", [{"prompt": "2+2?", "chosen": "four", "rejected": "five"}])
    config = tmp_path / "kto.yaml"
    config.write_text(
        f"model: {{path: {chatty}}}\nalgorithm: {{name: kto}}\ndata: {{source: {path}}}\n"
        "rewards: []\ntrain: {steps: 1}\nrun: {dir: runs/x}\n"
    )
    out = screen(monkeypatch)
    assert main(["data", "show", str(config)]) == 0
    assert "shown     rows of kto; trained" in out.getvalue()
    assert main(["data", "show", path, "--algorithm", "sft", "--model", chatty]) == 2
    assert "has no answer to train on" in " ".join(out.getvalue().split())


def test_counts_are_those_of_the_run(chatty: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ALPACA * 3)
    view = view_data(DataConfig(source=path), ModelConfig(path=chatty), rows=1, most=4)
    assert (view.rows, view.whole, len(view.lengths)) == (4, False, 4)
    first = view.shown[0].texts[0]
    assert first.tokens == view.lengths[0] and first.trained == 2
    assert "".join(piece.text for piece in first.pieces).endswith("3<|eos|>\n")
    assert [piece.text for piece in first.pieces if piece.trained] == ["3<|eos|>"]


def test_a_giant_does_not_hide_the_rest() -> None:
    lines = list(histogram([*range(100), 10**6], 80))
    assert len(lines) == 8 and lines[0].split()[0] == "0-11" and lines[0].endswith(" 12")
    assert lines[-1].split()[0] == "84-1,000,000" and lines[-1].endswith(" 17")


def test_helpsteer_is_recognised(tmp_path: Path, capsys: Any) -> None:
    """Its attributes are told, a conversation is one, and the answer is what is trained."""
    grades = dict.fromkeys(("helpfulness", "correctness", "coherence", "complexity"), 3)
    rows = [
        {"prompt": "c#", "response": "A language.", **grades, "verbosity": 1},
        {
            "prompt": "2+2?\n<extra_id_1>Assistant\n4\n<extra_id_1>User\n3+3?",
            "response": "6",
            **grades,
            "verbosity": 0,
        },
    ]
    file = write(tmp_path / "train.jsonl", rows)
    assert main(["data", "show", file]) == 0
    page = capsys.readouterr().out
    assert "helpsteer (prompt, response, helpfulness, correctness" in page
    assert "a grade for each attribute" in page and "attribute models" in page
    assert "⟦A language.⟧" in page and "⟦6⟧" in page and "assistant: 4" in page
