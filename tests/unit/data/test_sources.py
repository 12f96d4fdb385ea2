from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reinforge.config.data import DataConfig
from reinforge.core.errors import InputError
from reinforge.core.sample import Row
from reinforge.data import arithmetic
from reinforge.data.readers import FILES, read
from reinforge.data.sources import (
    fingerprint,
    load_rows,
    overlap,
    prompt_text,
    rows_from,
    train_and_eval_rows,
)

GOOD = [
    {"prompt": "1+1=", "answer": "2", "level": 1},
    {"prompt": "2+2=", "answer": "4", "level": 2},
]


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def cfg(source: str, **more: Any) -> DataConfig:
    return DataConfig(source=source, **more)


def plain(rows: list[Row]) -> list[tuple[Any, dict[str, Any]]]:
    return [(row.prompt, dict(row.columns)) for row in rows]


# files


def test_every_file_format_gives_the_same_rows(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    expected = [("1+1=", {"answer": "2", "level": 1}), ("2+2=", {"answer": "4", "level": 2})]
    (tmp_path / "a.json").write_text(json.dumps(GOOD))
    (tmp_path / "a.csv").write_text('prompt,answer,level\n1+1=,2,1\n"2+2=",4,2\n')
    parquet.write_table(pa.Table.from_pylist(GOOD), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_bytes(
        b"\xef\xbb\xbf" + json.dumps(GOOD[0]).encode() + b"\r\n\n" + json.dumps(GOOD[1]).encode()
    )
    for suffix in ("json", "jsonl", "parquet"):
        assert plain(load_rows(cfg(str(tmp_path / f"a.{suffix}")))) == expected
    assert plain(load_rows(cfg(str(tmp_path / "a.csv")))) == [
        (p, {**c, "level": str(c["level"])}) for p, c in expected
    ]
    assert plain(load_rows(cfg(str(tmp_path / "a.csv"), where={"level": 2}))) == [
        ("2+2=", {"answer": "4", "level": "2"})
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "x": NaN}', "NaN is not JSON"),
        ('{"prompt": "a", "x": -Infinity}', "-Infinity is not JSON"),
        ('{"prompt": "a", "x": 1e999}', "1e999 does not fit a float"),
        ('{"prompt": "a", "x": ["\\ud800"]}', "half of a surrogate pair"),
        ('{"prompt": "a"', "is not valid JSON"),
        ('{"prompt": "a", "prompt": "b"}', "two equal keys: prompt, prompt"),
        ('{"x": ' + "[" * 100_000 + "]" * 100_000 + "}", "is not valid JSON"),
        ('{"x": ' + "9" * 5000 + "}", "is not valid JSON"),
        ('["a"]', "is list, not an object"),
        ('{"prompt": null}', "prompt is missing"),
        ('{"prompt": ""}', "prompt is empty"),
        ('{"prompt": 3}', "prompt is int, not text"),
        ('{"prompt": [{"role": "alien", "content": "a"}]}', r"prompt\[0\] has the role 'alien'"),
        (
            '{"prompt": [{"role": "user", "content": [1]}]}',
            r"prompt\[0\].content is list, not text",
        ),
        ('{"prompt": [{"role": "user"}]}', r"prompt\[0\].content is missing"),
        ('{"prompt": []}', "prompt is not a list of messages"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "answers nothing"),
        (
            '{"solution": "a", "level": 1}',
            r"has no prompt: its columns are solution, level, .*data.columns",
        ),
    ],
)
def test_bad_rows_are_refused_with_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(GOOD[0]) + "\n\n" + line + "\n")
    with pytest.raises(InputError, match=f"^{re.escape(str(path))}:3: .*{message}"):
        load_rows(cfg(str(path)))


def test_a_file_of_another_kind_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reinforge.data.readers.MOST_BROKEN", 3)
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(["{"] * 3 + ["7"] * 5))
    with pytest.raises(InputError, match="at least 3 lines cannot be read") as caught:
        load_rows(cfg(str(path)))
    assert "not an object" not in str(caught.value)


def test_lines_that_are_no_json_are_told_together(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    good = json.dumps(GOOD[0])
    path.write_text("\n".join([good, "{", "[1]", good, "", "{", "7"]))
    with pytest.raises(InputError) as caught:
        load_rows(cfg(str(path)))
    first, *named, fix = str(caught.value).splitlines()
    assert first == f"{path}: 4 lines cannot be read:" and fix == "Repair or remove it."
    assert named[0].startswith(f"  - {path}:2: is not valid JSON: Expecting property name")
    assert named[0].endswith(f"(also {path}:6)")
    assert named[1:] == [
        f"  - {path}:3: is list, not an object",
        f"  - {path}:7: is int, not an object",
    ]
    seen = []
    with pytest.raises(InputError):
        seen.extend(where for where, _ in FILES[".jsonl"](path))
    for where, _ in islice(FILES[".jsonl"](path), 1):
        seen.append(where)
    assert seen == [f"{path}:1"] * 2  # what comes before the first is there at once, and no more


def test_bad_files(tmp_path: Path) -> None:
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    (tmp_path / "short.csv").write_text("prompt,answer\n1+1=,2\n2+2=\n")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "no.parquet").write_text("PAR")
    (tmp_path / "one.json").write_text("{}")
    for source, message in [
        ("latin.jsonl", r"latin.jsonl:1: is not UTF-8"),
        ("short.csv", r"short.csv:3: the row does not have the 2 cells"),
        ("empty.jsonl", "there are no rows"),
        ("no.parquet", "not a readable parquet"),
        ("one.json", "holds dict, not a list"),
        ("absent.jsonl", "there is no such file"),
        (".", "cannot read a directory"),
    ]:
        with pytest.raises(InputError, match=message):
            load_rows(cfg(str(tmp_path / source)))
    for source, message in [
        ("reasoning_gim:chain_sum", "Did you mean reasoning_gym"),
        ("a b/c", "Check the path"),
    ]:
        with pytest.raises(InputError, match=message):
            load_rows(cfg(source))
    with pytest.raises(InputError, match="no row is left after data.where {'level': 9}"):
        load_rows(cfg(write(tmp_path / "a.jsonl", GOOD), where={"level": 9}))


def test_a_small_parquet_file_that_unpacks_into_gigabytes_is_refused(tmp_path: Path) -> None:
    """600 bytes hold one text of two million letters two hundred times.

    What repeats itself as data do is read.
    """
    import pyarrow
    from pyarrow import parquet

    bomb = tmp_path / "bomb.parquet"
    honest = tmp_path / "honest.parquet"
    parquet.write_table(
        pyarrow.table({"prompt": ["a" * (2 << 20)] * 200}), bomb, compression="zstd"
    )
    parquet.write_table(
        pyarrow.table({"prompt": ["the same question"] * 20_000, "answer": ["7"] * 20_000}),
        honest,
        compression="zstd",
    )
    assert bomb.stat().st_size < 2000
    seen = 0
    with pytest.raises(
        InputError, match=r"bomb\.parquet.*bytes have become.*more than 1000 times.*jsonl"
    ):
        for _ in read(str(bomb)):
            seen += 1
    assert 0 < seen < 150, "the rest of it was never unpacked"
    assert len(list(read(str(honest)))) == 20_000


def test_a_parquet_file_is_unpacked_in_batches_that_fit_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small rows by the hundreds, large ones few at a time; every row once and in its place."""
    import pyarrow
    from pyarrow import parquet

    sizes: list[int] = []
    real = parquet.ParquetFile.iter_batches

    def counted(self: Any, batch_size: int, **more: Any) -> Iterator[Any]:
        for batch in real(self, batch_size=batch_size, **more):
            sizes.append(batch.num_rows)
            yield batch

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", counted)
    for rows, words, group, most in [
        (5000, 1, 5000, 256),
        (5000, 1, 7, 256),
        (5, 1, 5, 5),
        (40, 200_000, 40, 16),
        (0, 1, 1, 0),
    ]:
        table = pyarrow.table(
            {"prompt": pyarrow.array([f"{i} " * words for i in range(rows)], pyarrow.string())}
        )
        parquet.write_table(table, tmp_path / "a.parquet", row_group_size=group)
        sizes.clear()
        found = list(read(str(tmp_path / "a.parquet")))
        assert [row["prompt"].split()[0] for _, row in found] == [str(i) for i in range(rows)]
        assert [place.rpartition(" ")[2] for place, _ in found] == [str(i) for i in range(rows)]
        assert max(sizes, default=0) == most
        if group == 5000:
            assert len(sizes) <= 22

    late = ["a"] * 1000 + ["b" * 20_000] * 2000
    monkeypatch.setattr("reinforge.data.readers.UNPACKED", 1 << 20)
    parquet.write_table(
        pyarrow.table({"prompt": late}), tmp_path / "late.parquet", compression="zstd"
    )
    sizes.clear()
    with pytest.raises(InputError, match="more than 1000 times"):
        list(read(str(tmp_path / "late.parquet")))
    assert sum(sizes) <= 1000 + 16 + 2 * 256, (
        "small rows first do not let the large ones in by the thousand"
    )


def test_unreachable_hub_is_one_short_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def down(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("Couldn't reach 'org/name' on the Hub\nlong story")

    monkeypatch.setattr(datasets, "load_dataset", down)
    with pytest.raises(
        InputError,
        match=(
            r"^data.source org/name: cannot load split 'train' .*: Couldn't reach 'org/name' on the"
            r" Hub\. Check the id"
        ),
    ):
        load_rows(cfg("org/name"))


def test_hub_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[Any] = []

    def load(source: str, **kwargs: Any) -> datasets.Dataset:
        asked.append((source, kwargs))
        return datasets.Dataset.from_list(GOOD)

    monkeypatch.setattr(datasets, "load_dataset", load)
    rows = load_rows(cfg("org/name", split="test", options={"name": "main"}, limit=1))
    assert plain(rows) == [("1+1=", {"answer": "2", "level": 1})]
    assert asked == [("org/name", {"split": "test", "name": "main"})]


# columns, prompts, ids


def test_columns_where_template_system_limit(tmp_path: Path) -> None:
    raw = [{"q": f"{i}+1", "solution": i + 1, "level": i % 2} for i in range(6)]
    source = write(tmp_path / "a.jsonl", raw)
    mapped = load_rows(
        cfg(source, columns={"prompt": "q", "answer": "solution"}, where={"level": 1}, limit=2)
    )
    assert plain(mapped) == [("1+1", {"answer": 2, "level": 1}), ("3+1", {"answer": 4, "level": 1})]
    filled = load_rows(
        cfg(
            source,
            template="Q: {q}\n{{A}} {level}:",
            columns={"answer": "solution"},
            system="Add.",
            limit=1,
        )
    )
    assert filled[0].prompt == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "Q: 0+1\n{A} 0:"},
    ]
    assert filled[0].columns == {"q": "0+1", "answer": 1, "level": 0}
    with pytest.raises(
        InputError,
        match=(
            r"a.jsonl:1: has no column 'solutoin', only q, solution, level \(also .*\n"
            r"(.*\n)*Did you mean solution\?.*data.columns"
        ),
    ):
        load_rows(cfg(source, columns={"answer": "solutoin"}))
    for template, message in [
        ("{}", "is not a {column} place"),
        ("{q.__class__}", "has no column 'q.__class__'"),
        ("{", "data.template"),
        ("{q!r}", "is not"),
    ]:
        with pytest.raises(InputError, match=message):
            load_rows(cfg(source, template=template))


def test_where_a_prompt_comes_from() -> None:
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    whole = [*chat, {"role": "assistant", "content": "d"}]
    assert plain(rows_from([{"prompt": "p", "question": "q"}])) == [("p", {"question": "q"})]
    assert plain(rows_from([{"question": "q", "messages": chat}])) == [("q", {"messages": chat})]
    assert plain(rows_from([{"messages": whole, "text": "t"}])) == [
        (chat, {"messages": whole, "text": "t"})
    ]
    assert plain(rows_from([{"messages": chat}])) == [(chat, {"messages": chat})]
    assert plain(rows_from([{"text": "t"}])) == [("t", {"text": "t"})]
    assert plain(rows_from(["s", "t"])) == [("s", {}), ("t", {})]
    system = {"role": "system", "content": "S"}
    assert plain(rows_from([{"messages": whole}], system="S")) == [
        ([system, *chat], {"messages": [system, *whole]})
    ]
    with pytest.raises(InputError, match="rows row 0: begins with a system message of its own"):
        rows_from([{"prompt": [system, *chat]}], system="S")
    with pytest.raises(InputError, match="no place for data.system"):
        rows_from([{"text": "t"}], system="S")
    with pytest.raises(InputError, match="mine row 1: is int"):
        rows_from(["a", 3], name="mine")


def test_ids_are_stable_and_unique() -> None:
    rows = rows_from([*GOOD, GOOD[0], GOOD[0]])
    assert len({row.id for row in rows}) == 4 and rows[2].id == rows[0].id.replace("-0", "-1")
    # another order, the same ids
    again = {row.id: row.prompt for row in rows_from([GOOD[0], *GOOD, GOOD[0]])}
    assert again == {row.id: row.prompt for row in rows}
    assert rows[0].id == "c88731a47f3f03a0-0"  # pinned: a checkpoint refers to it
    named = rows_from([{"id": 7, "prompt": "a"}, {"id": "8", "prompt": "a"}])
    assert [row.id for row in named] == ["7", "8"] and named[0].columns == {}
    with pytest.raises(InputError, match="rows row 1: has the id '7' that rows row 0 has too"):
        rows_from([{"id": 7, "prompt": "a"}, {"uid": 7, "prompt": "b"}])
    moved = rows_from(
        [{"id": 7, "prompt": "a"}, {"id": 7, "prompt": "b"}], columns={"problem": "id"}
    )
    assert [row.columns["problem"] for row in moved] == [7, 7] and len(
        {row.id for row in moved}
    ) == 2
    assert fingerprint(rows) != fingerprint(rows[::-1]) and fingerprint(rows) == fingerprint(
        list(rows)
    )


def test_importing_and_complaining_needs_no_torch() -> None:
    code = (
        "import sys, reinforge.data.sources, reinforge.data.cursor; assert not {'torch',"
        " 'transformers', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# evaluation rows


def test_split_keeps_equal_prompts_on_one_side(tmp_path: Path) -> None:
    raw = [{"prompt": f"{i % 30} + 1", "answer": i} for i in range(50)] + [
        {"prompt": "0  +\n1", "answer": -1}
    ]
    source = write(tmp_path / "a.jsonl", raw)
    train, held = train_and_eval_rows(cfg(source, eval={"size": 11}))
    assert len(held) == 11 and len(train) == 40 and overlap(train, held) == []
    assert {row.id for row in train} | {row.id for row in held} == {
        row.id for row in load_rows(cfg(source))
    }
    write(tmp_path / "a.jsonl", raw[::-1])
    assert {row.id for row in train_and_eval_rows(cfg(source, eval={"size": 11}))[1]} == {
        row.id for row in held
    }
    assert train_and_eval_rows(cfg(source))[1] == []
    chosen = train_and_eval_rows(cfg(source, eval={"size": 1, "where": {"answer": 25}}))[1]
    assert [row.columns["answer"] for row in chosen] == [25]
    with pytest.raises(InputError, match="cannot hold out 51 of 51"):
        train_and_eval_rows(cfg(source, eval={"size": 51}))
    pairs = write(tmp_path / "b.jsonl", [{"prompt": str(i // 2), "n": i} for i in range(8)])
    with pytest.raises(InputError, match="exactly 3 rows.*Ask for 2"):
        train_and_eval_rows(cfg(pairs, eval={"size": 3}))


def test_eval_source_of_its_own(tmp_path: Path) -> None:
    train_file = write(tmp_path / "a.jsonl", GOOD)
    eval_file = write(
        tmp_path / "b.jsonl",
        [
            {"prompt": "2+2= ", "answer": "4", "kind": "x"},
            {"prompt": "3+3=", "answer": "6", "kind": "y"},
        ],
    )
    train, held = train_and_eval_rows(
        cfg(train_file, where={"level": 2}, eval={"source": eval_file})
    )
    assert len(train) == 1 and len(held) == 2
    assert [(a.prompt, b.prompt) for a, b in overlap(train, held)] == [("2+2=", "2+2= ")]
    assert (
        len(
            train_and_eval_rows(
                cfg(train_file, eval={"source": eval_file, "where": {"kind": "y"}})
            )[1]
        )
        == 1
    )
    with pytest.raises(InputError, match="asks for 3 rows, but .* has 2"):
        train_and_eval_rows(cfg(train_file, eval={"source": eval_file, "size": 3}))


def test_reasoning_gym_rows_can_be_scored_by_their_task() -> None:
    import reasoning_gym

    rows = load_rows(cfg("reasoning_gym:chain_sum", options={"seed": 5, "size": 7, "max_terms": 3}))
    assert len(rows) == 7 and plain(rows) == plain(
        load_rows(cfg("reasoning_gym:chain_sum", options={"seed": 5, "size": 7, "max_terms": 3}))
    )
    task = reasoning_gym.create_dataset("chain_sum", seed=5, size=7, max_terms=3)
    assert [row.prompt for row in rows] == [task[i]["question"] for i in range(7)]
    assert set(rows[0].columns) == {"answer", "metadata", "entry"}
    assert all(
        task.score_answer(row.columns["answer"], row.columns["entry"]) == 1.0 for row in rows
    )
    assert task.score_answer("x", rows[0].columns["entry"]) < 0.1
    with pytest.raises(
        InputError, match=r"reasoning_gym:chain_sun: there is no such task\. Did you mean chain_sum"
    ):
        load_rows(cfg("reasoning_gym:chain_sun"))
    with pytest.raises(InputError, match=r"has no option 'max_trems'\. Did you mean max_terms"):
        load_rows(cfg("reasoning_gym:chain_sum", options={"max_trems": 3}))
    with pytest.raises(InputError, match="refuses its options"):
        load_rows(cfg("reasoning_gym:chain_sum", options={"min_terms": 9, "max_terms": 3}))


@pytest.mark.parametrize(
    "evaluation",
    [
        {"size": 20},
        {"size": 20, "options": {"seed": 90}},  # item i is seed + i: 10 of these are training items
        {"size": 20, "source": "reasoning_gym:chain_sum", "options": {"seed": 1}},
        {"source": "reasoning_gym:chain_sum", "options": {"seed": 95, "size": 20}},
    ],
)
def test_reasoning_gym_seeds_that_are_too_close_do_not_leak(evaluation: dict[str, Any]) -> None:
    train, held = train_and_eval_rows(
        cfg("reasoning_gym:chain_sum", options={"seed": 0, "size": 100}, eval=evaluation)
    )
    assert len(train) == 100 and len(held) == 20 and overlap(train, held) == []
    assert len({prompt_text(row) for row in held}) == 20
    assert not {row.id for row in train} & {row.id for row in held}


def test_too_few_problems_for_an_evaluation_is_an_error() -> None:
    tiny = {"terms": 2, "max_value": 2, "operators": "+", "size": 200, "split": "all"}
    with pytest.raises(InputError, match=r"only 0 of 5 evaluation problems"):
        train_and_eval_rows(cfg("arithmetic:chain", options=tiny, eval={"size": 5}))


@pytest.mark.parametrize(
    ("split", "fix"), [("train", "Ask for at most 1. "), ("all", "Make the task larger, ")]
)
def test_size_0_of_a_generated_task_is_told_apart_from_a_task_that_is_too_small(
    split: str, fix: str
) -> None:
    """Nobody asked for 200 problems: 0 stands for all that the source makes."""
    tiny = {"terms": 2, "max_value": 3, "operators": "+", "size": 200, "split": split}
    zero = {"source": "arithmetic:chain", "size": 0}
    with pytest.raises(InputError) as caught:
        train_and_eval_rows(cfg("arithmetic:chain", options=tiny, eval=zero))
    error = caught.value
    assert error.where == "data.eval.size"
    assert error.what.startswith(
        "0 is no size for a generated task: it stands for the 200 problems"
    )
    assert error.fix is not None and error.fix.startswith(fix)
    assert "too few" not in str(error)


# arithmetic


def test_chain_is_deterministic_and_right() -> None:
    options = {"terms": (2, 5), "digits": 3, "operators": "+-*", "scratch": True, "seed": 3}
    rows = list(islice(arithmetic.generate("chain", options), 200))
    assert rows == list(islice(arithmetic.generate("chain", {**options, "size": 5}), 200))
    for row in rows:
        expression = row["prompt"].removesuffix("=")
        assert re.fullmatch(r"\d{1,3}([-+*]\d{1,3}){1,4}", expression)
        assert row["answer"] == str(eval(expression))
        steps, _, final = row["completion"].partition("\n")
        assert final == f"#### {row['answer']}" and steps.endswith(f"={row['answer']}")
        assert all(
            eval(left) == int(right)
            for left, right in (step.split("=") for step in steps.split(","))
        )
        assert steps.count(",") == len(re.findall(r"[-+*]", expression)) - 1
    assert arithmetic.solve([12, 7, 3], ["+", "-"]) == (16, ["12+7=19", "19-3=16"])
    assert arithmetic.solve([2, 3, 4], ["-", "*"]) == (-10, ["3*4=12", "2-12=-10"])
    plain_rows = list(islice(arithmetic.generate("chain", {"seed": 3}), 50))
    assert all(row["completion"] == row["answer"] for row in plain_rows)
    # pinned: runs must be repeatable
    assert plain_rows[0] == {"prompt": "31+98=", "answer": "129", "completion": "129"}


@given(a=st.integers(0, 2**32), b=st.integers(0, 2**32))
def test_chain_splits_are_disjoint_for_any_seeds(a: int, b: int) -> None:
    small = {"terms": 2, "max_value": 9, "operators": "+"}
    train = {r["prompt"] for r in islice(arithmetic.generate("chain", {**small, "seed": a}), 40)}
    held = {
        r["prompt"]
        for r in islice(arithmetic.generate("chain", {**small, "seed": b, "split": "eval"}), 10)
    }
    assert train.isdisjoint(held) and held


def test_chain_in_a_config() -> None:
    train, held = train_and_eval_rows(
        cfg(
            "arithmetic:chain", options={"size": 300, "terms": [2, 3]}, limit=250, eval={"size": 40}
        )
    )
    assert len(train) == 250 and len(held) == 40 and overlap(train, held) == []
    assert {arithmetic.split_of(str(row.prompt)) for row in train} == {"train"}
    assert {arithmetic.split_of(str(row.prompt)) for row in held} == {"eval"}
    everything = [r["prompt"] for r in islice(arithmetic.generate("chain", {"split": "all"}), 2000)]
    assert 0.08 < sum(arithmetic.split_of(p) == "eval" for p in everything) / 2000 < 0.12
    for source, options, message in [
        ("arithmetic:chian", {}, "Did you mean arithmetic:chain"),
        ("arithmetic:chain", {"tems": 3}, r"options.tems: .* Its options are: terms,"),
        ("arithmetic:chain", {"terms": [4, 2]}, "the minimum is above the maximum"),
        ("arithmetic:chain", {"operators": "/"}, "options.operators"),
        ("arithmetic:chain", {"digits": 2, "max_value": 7}, "not both"),
    ]:
        with pytest.raises(InputError, match=message):
            load_rows(cfg(source, options=options))


def test_generated_evaluation_rows_are_all_different() -> None:
    """A small task draws the same problem again and again: each is asked once, and where there are
    too few it is said.
    """
    small = {"terms": 2, "max_value": 9, "operators": "+", "size": 30}
    problems = {
        r["prompt"] for r in islice(arithmetic.generate("chain", {**small, "split": "eval"}), 500)
    }
    drawn = [
        r["prompt"]
        for r in islice(arithmetic.generate("chain", {**small, "split": "eval"}), len(problems))
    ]
    assert len(set(drawn)) < len(drawn), "problems come more than once"
    _, held = train_and_eval_rows(
        cfg("arithmetic:chain", options=small, eval={"size": len(problems)})
    )
    assert {row.prompt for row in held} == problems and len(held) == len(problems)
    with pytest.raises(InputError, match=f"only {len(problems)} of {len(problems) + 1}"):
        train_and_eval_rows(
            cfg("arithmetic:chain", options=small, eval={"size": len(problems) + 1})
        )


def test_sloppy_demonstrations_forget_the_last_number_and_the_answer_does_not() -> None:
    options = {"terms": 3, "max_value": 9, "operators": "+", "size": 1000, "sloppy": 0.6}
    forgot = 0
    for row in islice(arithmetic.generate("chain", options), 1000):
        numbers = [int(n) for n in row["prompt"].rstrip("=").split("+")]
        assert row["answer"] == str(sum(numbers)) and row["completion"] in (
            str(sum(numbers)),
            str(sum(numbers[:-1])),
        )
        forgot += row["completion"] != row["answer"]
    # one last number in ten is 0: forgetting it does no harm
    assert 0.6 * 0.9 * 1000 - 60 < forgot < 0.6 * 0.9 * 1000 + 60
    assert all(
        row["completion"] == row["answer"]
        for row in islice(arithmetic.generate("chain", {**options, "sloppy": 0.0}), 200)
    )


def test_a_share_of_the_demonstrations_works_it_out() -> None:
    rows = list(
        islice(
            arithmetic.generate(
                "chain",
                {"terms": 3, "max_value": 9, "operators": "+", "scratch": 0.25, "size": 1000},
            ),
            1000,
        )
    )
    shown = [row for row in rows if "=" in row["completion"]]
    assert 180 < len(shown) < 320 and all(
        row["completion"].endswith(f"\n#### {row['answer']}") for row in shown
    )
    assert next(arithmetic.generate("chain", {"terms": 2, "sloppy": 1.0, "scratch": True}))[
        "completion"
    ].startswith("\n#### ")
