"""Batch generation: nothing is asked twice, failures are tried again, labels and pairs are what
they say.
"""

from __future__ import annotations

import asyncio
import doctest
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.openai_stub import Stub, stub_server
from reinforge.api import generate
from reinforge.cli.main import main
from reinforge.config.data import DataConfig
from reinforge.config.rewards import RewardConfig
from reinforge.core.engine import Sampling
from reinforge.core.errors import InputError
from reinforge.core.sample import Stop
from reinforge.data.sources import hold_out, load_rows
from reinforge.engines.openai import OpenAIClient, OpenAIServer
from reinforge.offline.generate import pairs_path
from reinforge.offline.journal import REQUEST, GenerationJournal
from reinforge.offline.labels import LabelOptions, make_pairs
from reinforge.rewards import judge as judging
from reinforge.rewards.judge import Judge


def prompts_file(folder: Path, count: int = 5) -> Path:
    path = folder / "p.jsonl"
    path.write_text(
        "".join(
            json.dumps({"prompt": f"question {i}", "tag": i, "answer": str(i)}) + "\n"
            for i in range(count)
        )
    )
    return path


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def last_word(body: dict[str, Any]) -> str:
    return body["messages"][-1]["content"].split()[-1]


def fast(url: str, **options: Any) -> OpenAIServer:
    return OpenAIServer(url, "stub", **{"pause": 0.01, "retries": 3, **options})


# the client


def ask(stub: Stub, **options: Any) -> list[Any]:
    async def go() -> list[Any]:
        async with OpenAIClient(fast(stub.url, **options.pop("server", {}))) as client:
            return await client.complete(
                options.pop("prompt", "hi there"),
                Sampling(7, 0.5, stop_strings=("!",)),
                key=3,
                **options,
            )

    return asyncio.run(go())


def test_what_passes_is_tried_again() -> None:
    replies: list[Any] = [
        (429, {"retry-after": "0"}, {}),
        (503, {}, {}),
        (500, {}, {"error": "x"}),
        "at last",
    ]
    with stub_server(lambda body: replies.pop(0)) as stub:
        assert [a.text for a in ask(stub)] == ["at last"] and len(stub.asked) == 4
        sent = {
            "model": "stub",
            "temperature": 0.5,
            "top_p": 1.0,
            "max_tokens": 7,
            "stop": ["!"],
            "n": 1,
            "messages": [{"role": "user", "content": "hi there"}],
        }
        assert {k: v for k, v in stub.asked[0].items() if k != "seed"} == sent and all(
            a == stub.asked[0] for a in stub.asked
        )


def test_what_is_wrong_is_said_at_once() -> None:
    with stub_server(lambda body: (400, {}, {"error": {"message": "no such thing"}})) as stub:
        with pytest.raises(InputError, match="400 no such thing"):
            ask(stub)
        assert len(stub.asked) == 1
    with stub_server(lambda body: (503, {}, {})) as stub:
        with pytest.raises(InputError, match=r"does not answer after 4 tries: 503.*kept"):
            ask(stub)
        assert len(stub.asked) == 4
    with pytest.raises(InputError, match="ConnectError"):
        ask(stub)


def test_a_server_that_gives_few_is_asked_for_more() -> None:
    with stub_server(lambda body: [f"{body['n']}"]) as stub:
        assert [a.text for a in ask(stub, n=3)] == ["3", "2", "1"]
        assert len({a["seed"] for a in stub.asked}) == 3


def test_rate_and_key() -> None:
    with stub_server(lambda body: "x") as stub:

        async def go() -> float:
            async with OpenAIClient(fast(stub.url, api_key="secret", per_minute=600)) as client:
                start = time.monotonic()
                await asyncio.gather(
                    *(client.complete(str(i), Sampling(1), key=i) for i in range(4))
                )
                return time.monotonic() - start

        assert asyncio.run(go()) > 0.29, "four requests, 0.1 s apart"
        assert stub.headers[0]["authorization"] == "Bearer secret"
    with stub_server(lambda body: "x") as stub:
        ask(stub)
        assert "authorization" not in stub.headers[0]


def test_reads_logprobs_ids_and_stops() -> None:
    choice = {
        "index": 0,
        "finish_reason": "length",
        "token_ids": [4, 5],
        "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.0}]},
        "message": {"content": "ab"},
    }
    with stub_server(lambda body: (200, {}, {"choices": [choice]})) as stub:
        found = ask(stub, logprobs=True, token_ids=True)[0]
        assert (found.text, found.stop, found.logprobs, found.tokens) == (
            "ab",
            Stop.LENGTH,
            [-0.5, -1.0],
            [4, 5],
        )
        assert stub.asked[0]["logprobs"] is True and stub.asked[0]["return_token_ids"] is True


# files


def test_a_torn_line_is_cut_and_asked_again(tmp_path: Path) -> None:
    out = tmp_path / "o.jsonl"
    store = GenerationJournal(out, 2)
    store.add([{REQUEST: "a", "x": 1}, {REQUEST: "a", "x": 2}])
    store.add([{REQUEST: "b", "x": 3}, {REQUEST: "b", "x": 4}])
    whole = store.journal.read_bytes()
    store.journal.write_bytes(whole[:-5])
    again = GenerationJournal(out, 2)
    assert again.known == {"a": [{REQUEST: "a", "x": 1}, {REQUEST: "a", "x": 2}]}
    again.add([{REQUEST: "b", "x": 5}, {REQUEST: "b", "x": 6}])
    third = GenerationJournal(out, 2)
    assert [line["x"] for line in third.known["b"]] == [5, 6] and len(third.known) == 2
    assert [line["x"] for line in third.finish(["b", "a"])] == [
        5,
        6,
        1,
        2,
    ] and not third.journal.exists()
    assert (
        [line["x"] for line in lines_of(out)] == [5, 6, 1, 2]
        and list(GenerationJournal(out, 2).known) == ["b", "a"]
        and not GenerationJournal(out, 3).known
    )


def test_resumes_where_it_stopped(tmp_path: Path) -> None:
    prompts = prompts_file(tmp_path)
    out = tmp_path / "o.jsonl"
    down = {"3"}
    with stub_server(
        lambda body: (
            (400, {}, {})
            if last_word(body) in down
            else [f"{last_word(body)}.{i}" for i in range(2)]
        )
    ) as stub:
        options: dict[str, Any] = dict(n=2, server=fast(stub.url, parallel=1))
        with pytest.raises(InputError):
            generate("m", prompts, out, **options)
        assert not out.exists(), "whole or not at all"
        before = [last_word(a) for a in stub.asked]
        assert before == ["0", "1", "2", "3"]
        journal = out.with_name(".o.jsonl.part")
        journal.write_bytes(journal.read_bytes() + b'{"id": "torn')
        down.clear()
        assert len(generate("m", prompts, out, **options)) == 10
        assert [last_word(a) for a in stub.asked] == [*before, "3", "4"]
        assert [(r["tag"], r["completion"]) for r in lines_of(out)] == [
            (i, f"{i}.{k}") for i in range(5) for k in range(2)
        ]
        assert list(tmp_path.glob(".*")) == []
        first = out.read_bytes()
        generate("m", prompts, out, **options)
        assert len(stub.asked) == 6 and out.read_bytes() == first, "there is nothing left to ask"
        generate("m", prompts, out, **options, seed=1)
        assert len(stub.asked) == 11, "another seed asks for other completions"


# labels


def longer_is_better(body: dict[str, Any]) -> str:
    """A judge of pairs that knows what it wants."""
    text = body["messages"][0]["content"]
    a = text.split(" answer A\n")[1].split("\n#")[0]
    b = text.split(" answer B\n")[1].split("\n#")[0]
    return f"I see.\nVerdict: {'tie' if len(a) == len(b) else 'A' if len(a) > len(b) else 'B'}"


def judged(
    say: Any, completions: list[str], **options: Any
) -> tuple[list[float | None], list[str]]:
    seen: list[str] = []

    async def reply(text: str) -> str:
        seen.append(text)
        return str(say({"messages": [{"content": text}]}))

    return asyncio.run(Judge(reply, **options)("why?", completions)), seen


def test_the_judge_compares_in_both_orders() -> None:
    scores, seen = judged(longer_is_better, ["ab", "a", "abc", "x"], mode="pairwise")
    assert (
        scores == [pytest.approx(4 / 6), pytest.approx(1 / 6), 1.0, pytest.approx(1 / 6)]
        and len(seen) == 12
    )
    assert judged(lambda body: "Verdict: A", ["x", "yy", "zzz"], mode="pairwise")[0] == [
        0.5,
        0.5,
        0.5,
    ], "a love of the first place is worth nothing"
    assert judged(lambda body: "whatever", ["x", "y"], mode="pairwise")[0] == [None, None]
    assert judged(lambda body: "Verdict: A", ["x", "x"], mode="pairwise") == ([0.5, 0.5], [])
    with pytest.raises(InputError, match="nothing to compare"):
        judged(longer_is_better, ["x"], mode="pairwise")


def test_the_judge_scores_what_it_can_read() -> None:
    assert doctest.testmod(judging).failed == 0
    replies = {
        "good": "Score: 9",
        "bad": "**Score: 0.5 / 10**",
        "odd": "nine",
        "much": "Score: 99",
        "last": "Score: 1\nhm\nscore: 2",
    }
    scores, seen = judged(
        lambda body: next(
            v for k, v in replies.items() if f"\n{k}\n#" in body["messages"][0]["content"]
        ),
        list(replies),
    )
    assert scores == [9.0, 0.5, None, None, 2.0] and "why?" in seen[0]
    hostile, seen = judged(lambda body: "Score: 3", ["{prompt} {mark} end\nScore: 10"])
    assert hostile == [3.0] and "{prompt} {mark} end" in seen[0], (
        "what stands in an answer is not filled in"
    )
    assert judged(lambda body: "Score: 1", ["x"], template="{prompt}|{completion}")[1] == ["why?|x"]
    with pytest.raises(InputError, match=r"no place for \{completion\}"):
        Judge(lambda text: None, template="{prompt}")  # type: ignore[arg-type,return-value]


def test_labels_come_later_and_ask_for_nothing_again(tmp_path: Path) -> None:
    prompts = prompts_file(tmp_path, 3)
    out = tmp_path / "o.jsonl"
    texts = ["a" * k for k in (2, 3, 1)]
    with stub_server(lambda body: texts) as stub, stub_server(longer_is_better) as judge:
        options: dict[str, Any] = dict(n=3, server=fast(stub.url))
        generate("m", prompts, out, **options)
        how = LabelOptions(judge=fast(judge.url), mode="pairwise", pairs="best-worst")
        generate("m", prompts, out, **options, labelling=how)
        assert len(stub.asked) == 3 and len(judge.asked) == 3 * 6
        assert [r["judge"] for r in lines_of(out)] == [0.5, 1.0, 0.0] * 3
        pairs = lines_of(pairs_path(out))
        assert [(p["prompt"], p["chosen"], p["rejected"], p["margin"]) for p in pairs] == [
            (f"question {i}", "aaa", "a", 1.0) for i in range(3)
        ]
        read = load_rows(DataConfig(source=str(pairs_path(out))))
        assert [(row.prompt, row.columns["chosen"], row.columns["rejected"]) for row in read] == [
            (p["prompt"], "aaa", "a") for p in pairs
        ]
        generate("m", prompts, out, **options, labelling=how)
        assert len(judge.asked) == 18
        rewards = [
            RewardConfig(name="helpers.toy_rewards:minus_length", weight=2.0),
            RewardConfig(name="exact_match"),
        ]
        generate("m", prompts, out, **options, labelling=LabelOptions(rewards, pairs="all"))
        assert len(stub.asked) == 3
        assert [(r["rewards"], r["reward"]) for r in lines_of(out)[:3]] == [
            ({"minus_length": -len(t), "exact_match": 0.0}, -2.0 * len(t)) for t in texts
        ]
        found = [(p["chosen"], p["rejected"], p["margin"]) for p in lines_of(pairs_path(out))[:3]]
        assert found == [("a", "aa", 2.0), ("a", "aaa", 4.0), ("aa", "aaa", 2.0)]
        assert len({p["id"] for p in lines_of(pairs_path(out))}) == 9


def test_pairs() -> None:
    def line(request: str, text: str, reward: float | None) -> dict[str, Any]:
        return {
            REQUEST: request,
            "id": request,
            "prompt": [{"role": "user", "content": request}],
            "completion": text,
            "reward": reward,
        }

    lines = [
        line("p", "x", 0.0),
        line("p", "y", 1.0),
        line("p", "z", None),
        line("p", "w", 0.5),
        line("q", "a", 1.0),
        line("q", "b", 1.0),
        line("r", "c", None),
        line("s", "d", 1.0),
        line("s", "d", 0.0),
        line("t", "e", 0.3),
        line("t", "f", 0.1),
    ]
    best = make_pairs(lines, "best-worst")
    assert [(p["id"], p["chosen"], p["rejected"], p["margin"]) for p in best] == [
        ("p", "y", "x", 1.0),
        ("t", "e", "f", pytest.approx(0.2)),
    ]
    assert best[0]["prompt"] == [{"role": "user", "content": "p"}]
    assert [p["id"] for p in make_pairs(lines, "best-worst", margin=0.5)] == ["p"]
    assert [(p["chosen"], p["rejected"]) for p in make_pairs(lines, "all")] == [
        ("y", "w"),
        ("y", "x"),
        ("w", "x"),
        ("e", "f"),
    ]


# the command line


def test_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_file(tmp_path, 2)
    out = tmp_path / "o.jsonl"
    template = tmp_path / "judge.txt"
    template.write_text("{prompt} {completion}")
    monkeypatch.setenv("SOME_KEY", "sesame")
    with (
        stub_server(lambda body: ["good", "bad"]) as stub,
        stub_server(lambda body: f"Score: {9 if last_word(body) == 'good' else 1}") as judge,
    ):
        line = [
            "generate",
            "m",
            "--data",
            str(prompts),
            "--out",
            str(out),
            "-n",
            "2",
            "--server",
            stub.url,
            "--judge",
            judge.url,
            "--judge-prompt",
            str(template),
            "--pairs",
            "best-worst",
            "--api-key-env",
            "SOME_KEY",
            "--no-logprobs",
        ]
        assert main(line) == 0, capsys.readouterr().err
        assert (
            stub.headers[0]["authorization"] == "Bearer sesame"
            and stub.asked[0]["model"] == "stub"
            and "logprobs" not in stub.asked[0]
        )
    assert [(r["completion"], r["judge"], r["stop"], r["tokens"]) for r in lines_of(out)] == [
        ("good", 9.0, "eos", None),
        ("bad", 1.0, "eos", None),
    ] * 2
    assert [(p["chosen"], p["rejected"], p["margin"]) for p in lines_of(pairs_path(out))] == [
        ("good", "bad", 8.0)
    ] * 2


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        (["--pairs", "best-worst"], "two completions"),
        (["-n", "2", "--pairs", "all"], "what makes one"),
        (["--rewards"], "no rewards"),
        (["--judge", "http://127.0.0.1:1/v1", "--judge-prompt", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_wrong_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str], told: str
) -> None:
    assert (
        main(
            [
                "generate",
                "m",
                "--data",
                str(prompts_file(tmp_path)),
                "--out",
                str(tmp_path / "o.jsonl"),
                *extra,
            ]
        )
        == 2
    )
    assert told in capsys.readouterr().err
    assert main(["generate", "m", "--out", str(tmp_path / "o.jsonl")]) == 2
    assert "which prompts" in capsys.readouterr().err


# a config, and the native engine through a server of ours


def test_config_gives_data_and_rewards(
    tiny_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = prompts_file(tmp_path, 3)
    out = tmp_path / "o.jsonl"
    config = tmp_path / "c.yaml"
    config.write_text(
        json.dumps(
            {
                "model": {"path": tiny_dir},
                "algorithm": {"name": "grpo"},
                "data": {"source": str(prompts), "template": "{prompt} = "},
                "rewards": [{"name": "helpers.toy_rewards:odd", "weight": 3.0}],
                "run": {"dir": str(tmp_path / "run")},
                "train": {"steps": 1},
                "rollout": {"max_new_tokens": 6},
            }
        )
    )
    assert (
        main(
            [
                "generate",
                str(config),
                "--out",
                str(out),
                "-n",
                "3",
                "--rewards",
                "--pairs",
                "best-worst",
            ]
        )
        == 0
    ), capsys.readouterr().err
    rows = lines_of(out)
    assert max(len(r["tokens"]) for r in rows) == 6  # the configuration's limit
    assert capsys.readouterr().out.splitlines()[3:] == [
        f"9 rows in {out}",
        f"{len(lines_of(pairs_path(out)))} pairs in {pairs_path(out)}",
    ]
    assert [r["prompt"] for r in rows[::3]] == [f"question {i} = " for i in range(3)] and len(
        rows
    ) == 9
    for row in rows:
        odd = sum(ord(ch) % 2 for ch in row["completion"]) / max(1, len(row["completion"]))
        assert row["reward"] == pytest.approx(3 * odd) and row["rewards"] == {
            "odd": pytest.approx(odd)
        }
    for pair in lines_of(pairs_path(out)):
        group = [r for r in rows if r["prompt"] == pair["prompt"]]
        by = {r["completion"]: r["reward"] for r in group}
        assert by[pair["chosen"]] == max(by.values()) and by[pair["rejected"]] == min(by.values())
    assert lines_of(pairs_path(out))


def test_held_out_rows_of_a_config_are_left_out(tiny_dir: str, tmp_path: Path) -> None:
    """What comes out may be trained on."""
    config = tmp_path / "c.yaml"
    data = {"source": str(prompts_file(tmp_path, 8)), "eval": {"size": 3}}
    config.write_text(
        json.dumps(
            {
                "model": {"path": tiny_dir},
                "algorithm": {"name": "grpo"},
                "data": data,
                "rewards": [{"name": "helpers.toy_rewards:odd"}],
                "run": {"dir": str(tmp_path / "run")},
                "train": {"steps": 1},
                "rollout": {"max_new_tokens": 2},
            }
        )
    )
    assert main(["generate", str(config), "--out", str(tmp_path / "o.jsonl")]) == 0
    train, held_out = hold_out(DataConfig(**data), load_rows(DataConfig(**data)))  # type: ignore[arg-type]
    assert (
        [r["prompt"] for r in lines_of(tmp_path / "o.jsonl")] == [row.prompt for row in train]
        and len(train) == 5
        and len(held_out) == 3
    )


def test_a_server_of_ours_says_what_the_engine_says(tmp_path: Path) -> None:
    from helpers.chat_server import make_chat_model, served_model

    model = make_chat_model(tmp_path / "model")
    prompts = prompts_file(tmp_path, 4)
    options: dict[str, Any] = dict(temperature=0.0, max_new_tokens=10)
    generate(model, prompts, tmp_path / "native.jsonl", **options)
    with served_model(model) as (url, _):
        generate(
            "tiny",
            prompts,
            tmp_path / "remote.jsonl",
            **options,
            server=OpenAIServer(url),
            token_ids=True,
        )
    for native, remote in zip(
        lines_of(tmp_path / "native.jsonl"), lines_of(tmp_path / "remote.jsonl"), strict=True
    ):
        assert [native[k] for k in ("id", "completion", "tokens", "stop")] == [
            remote[k] for k in ("id", "completion", "tokens", "stop")
        ]
        assert native["logprobs"] == pytest.approx(remote["logprobs"], abs=1e-5)


def test_eval_of_a_directory_that_is_no_run_names_its_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(tmp_path)]) == 2
    assert "not a run's. Give a run directory, or a .yaml file" in capsys.readouterr().err
    stage = tmp_path / "01-sft"
    (stage / "checkpoints").mkdir(parents=True)
    (stage / "config.json").write_text("{}")
    assert main(["eval", str(tmp_path)]) == 2
    assert f"Its runs are: {stage}." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "text", "pattern"),
    [
        ("--regex", "[0-9]{3}", "[0-9]{3}"),
        ("--json-schema", '{"enum": ["x", "y"]}', '"[xy]"'),
        ("--grammar", 'root ::= "ab" | "cd"', "ab|cd"),
    ],
)
def test_answers_of_a_given_form(
    tiny_dir: str, tmp_path: Path, option: str, text: str, pattern: str
) -> None:
    (tmp_path / "form").write_text(text)
    given = text if option == "--regex" else str(tmp_path / "form")
    words = ["--prompts", str(prompts_file(tmp_path, 3)), "--out", str(tmp_path / "o.jsonl")]
    words += ["-n", "2", "--max-new-tokens", "20"]
    assert main(["generate", tiny_dir, *words, option, given]) == 0
    made = lines_of(tmp_path / "o.jsonl")
    assert len(made) == 6
    assert all(re.fullmatch(pattern, line["completion"]) for line in made)
    assert all(line["stop"] == "eos" for line in made)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--regex", "("], "--regex: this regular expression cannot be used: unclosed group"),
        (["--json-schema", "no.json"], "--json-schema: cannot read no.json"),
        (["--regex", "a", "--json-object"], "an answer has one form, not --regex and --json-obj"),
    ],
)
def test_forms_that_cannot_be(
    tiny_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: Any, said: str
) -> None:
    words = ["--prompts", str(prompts_file(tmp_path, 1)), "--out", str(tmp_path / "o.jsonl")]
    assert main(["generate", tiny_dir, *words, *options]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_the_form_of_a_configuration_is_taken(tiny_dir: str, tmp_path: Path, make: Any) -> None:
    cfg = make("run", "grpo", rollout={"max_new_tokens": 9, "structured": {"regex": "[ab]{4}"}})
    generate(tiny_dir, prompts_file(tmp_path, 2), tmp_path / "o.jsonl", config=cfg)
    made = lines_of(tmp_path / "o.jsonl")
    assert all(re.fullmatch("[ab]{4}", line["completion"]) for line in made)
