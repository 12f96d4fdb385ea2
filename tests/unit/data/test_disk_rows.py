"""Rows on disk: the same rows, the same run, and memory that does not grow with the file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.source_tree import ROOT
from helpers.tiny_runs import digest, lines
from helpers.toys import SilentView
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.inputs import encode_train_prompts, read_inputs
from reinforge.build.local import LocalFactories
from reinforge.build.run import train_config
from reinforge.config.data import DataConfig
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.core.row import Row
from reinforge.data import sources
from reinforge.data.disk_rows import DiskRows, select
from reinforge.data.sources import fingerprint, load_rows, train_and_eval_rows

ROWS = [Row(f"r{i}", f"question {i}", {"answer": i}, f"a.jsonl:{i}") for i in range(10)]


def test_it_is_a_list() -> None:
    rows = DiskRows(iter(ROWS))
    assert list(rows) == ROWS and len(rows) == 10 and rows[3] == ROWS[3] and rows[-1] == ROWS[-1]
    assert rows[3].place == "a.jsonl:3"
    assert list(rows[2:9:3]) == ROWS[2:9:3]
    part = select(select(rows, [7, 1, 5]), [2, 0])
    assert isinstance(part, DiskRows) and list(part) == [ROWS[5], ROWS[7]]
    assert select(ROWS, [7, 1]) == [ROWS[7], ROWS[1]]
    assert fingerprint(rows) == fingerprint(ROWS)
    with pytest.raises(IndexError):
        rows[10]
    assert list(DiskRows([])) == []


def write(path: Path, n: int = 40) -> str:
    lines = [
        json.dumps({"prompt": f"{i % 17}+{i}=", "completion": str(i % 17 + i)}) for i in range(n)
    ]
    path.write_text("\n".join(lines))
    return str(path)


def test_the_same_rows_are_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "a.jsonl")
    found = {}
    for where in ("never", "always"):
        cfg = DataConfig(source=source, on_disk=where, eval={"size": 5})  # type: ignore[arg-type]
        found[where] = tuple(map(list, train_and_eval_rows(cfg)))
        assert isinstance(load_rows(cfg), DiskRows) == (where == "always")
    assert found["never"] == found["always"] and len(found["never"][1]) == 5
    assert isinstance(load_rows(DataConfig(source=source)), list)
    monkeypatch.setattr(sources, "LARGE", 100)
    assert isinstance(load_rows(DataConfig(source=source)), DiskRows)


@pytest.mark.parametrize("algorithm", ["sft", "kto"])
def test_a_run_is_the_same_and_goes_on_exactly(
    make: Callable[..., Config], tmp_path: Path, algorithm: str
) -> None:
    rows = [
        {"prompt": f"{i}+{i}=", "chosen": f"{2 * i}", "rejected": f"{2 * i + 1}"}
        if algorithm == "kto"
        else {"prompt": f"{i}+{i}=", "completion": f"{2 * i}" if i != 7 else "1" * 300}
        for i in range(20)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(name: str, on_disk: str, steps: int) -> tuple[str, list[float]]:
        settings = [
            f"data.source={path}",
            f"data.on_disk={on_disk}",
            f"train.steps={steps}",
            "train.prompts_per_step=6",
        ]
        cfg = make(name, algorithm, *settings, rewards=[])
        train_config(cfg)
        return digest(cfg), [line["train/grad_norm"] for line in lines(cfg)]

    never = run("never", "never", 5)
    assert len(never[1]) == 5
    assert run("always", "always", 5)[1] == never[1]
    first = run("resumed", "always", 2)
    again = run("resumed", "always", 5)
    assert first[1] == never[1][:2] and again[1] == never[1]
    assert again[0] == run("whole", "always", 5)[0]


@pytest.mark.parametrize(
    "settings",
    [
        ["data.length=truncate", "data.max_length=6"],
        ["sampling.replay={}", "algorithm.dynamic_sampling=true"],
    ],
    ids=["cut", "replayed"],
)
def test_rl_is_the_same_with_prompts_on_disk(
    make: Callable[..., Config], tmp_path: Path, settings: list[str]
) -> None:
    """Prompts are tokenised again for every group: the same draws, and the same weights."""
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{'9' * (i % 5)}+{i}="} for i in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(name: str, on_disk: str, steps: int = 4) -> str:
        cfg = make(
            name,
            "grpo",
            f"data.source={path}",
            f"data.on_disk={on_disk}",
            f"train.steps={steps}",
            "data.eval.size=4",
            *settings,
        )
        train_config(cfg, view=SilentView())
        return digest(cfg)

    never = run("never", "never")
    assert run("always", "always") == never
    run("resumed", "always", 2)
    assert run("resumed", "always") == never


def test_prompts_on_disk_are_not_kept(make: Callable[..., Config], tmp_path: Path) -> None:
    """What a run of RL holds of its rows are their lengths and their places."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}+1="}) + "\n" for i in range(30)))
    cfg = make("run", "grpo", f"data.source={path}", "data.on_disk=always")
    view = SilentView()
    inputs = read_inputs(cfg, CallerObjects(), view, LocalFactories().make_rewards)
    prompts = encode_train_prompts(inputs, view)
    assert isinstance(prompts.rows, DiskRows) and list(prompts.lengths) == [4] * 10 + [5] * 20
    asked = prompts.ids_of(prompts.rows[3])
    assert asked == inputs.renderer.prompt(prompts.rows[3]) and len(asked) == 4
    assert prompts.ids_of(prompts.rows[3]) is not asked


def test_what_is_kept_of_all_rows_is_refused(make: Callable[..., Config], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n' * 4)
    settings = ["data.on_disk=always", "train.precompute_reference=true", f"data.source={path}"]
    with pytest.raises(InputError, match=r"train\.precompute_reference: .*data\.on_disk: never"):
        train_config(make("run", "dpo", *settings, rewards=[]))


MEASURE = """
import sys
from helpers.tiny_runs import make_config
from helpers.toys import SilentView
from pathlib import Path
from reinforge.build.run import train_config

def peak():
    # MB at most since the last time, by a mark of the kernel
    (line,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    open("/proc/self/clear_refs", "w").write("5")
    return int(line.split()[1]) // 1024

model, folder, source, on_disk = sys.argv[1:]
settings = [f"data.source={source}", f"data.on_disk={on_disk}", "train.prompts_per_step=4"]
few = ["data.limit=8"]
peaks = []
for name, more in (("first", few), ("few", few), ("all", ["data.eval.size=4"])):
    cfg = make_config(model, Path(folder), name, "sft", *settings, *more, rewards=[])
    peak()
    train_config(cfg, None, SilentView())
    peaks.append(peak())
print(peaks[2] - peaks[1])
"""


@pytest.mark.long
def test_training_does_not_take_memory_with_the_file(tiny_dir: str, tmp_path: Path) -> None:
    """A file of 64 MB, beside a run on a few of its rows: on disk it costs a few MB more. (The
    first run of a process imports what the others find there, which takes more than the file.)
    """
    path = tmp_path / "pages.jsonl"
    with path.open("w") as file:
        for i in range(1000):
            page = chr(97 + i % 26) * (1 << 16)
            file.write(json.dumps({"prompt": f"{i}=", "completion": f"{i}", "page": page}) + "\n")
    grown = {}
    for on_disk in ("never", "always"):
        command = [sys.executable, "-c", MEASURE, tiny_dir, str(tmp_path / on_disk), str(path)]
        done = subprocess.run(
            [*command, on_disk],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        )
        grown[on_disk] = int(done.stdout.splitlines()[-1])
    assert grown["never"] > 55 and grown["always"] < 20, grown
