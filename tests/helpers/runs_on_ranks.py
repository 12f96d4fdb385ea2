"""Runs on several ranks as a user starts them, whatever trains there: by one command that starts
the others, by torchrun, and from Python. What dies is named, and the run goes on exactly.

A test module makes a subclass of `RunsOnRanks` and one of `CommandsOnRanks` for its backend.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from helpers import cli_runs
from helpers.tiny_runs import EVAL, launch, lines, tensors
from helpers.toys import SilentView, relative
from reinforge.backends.distributed.ranks import Ranks
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.run import train_config
from reinforge.checkpoint import store

STEPS = 4
# keys that mean nothing in one process
ONLY_THERE = ("train.deepspeed.", "train.tensor_parallel=")
PAIRS = [
    {"prompt": f"{i}+{i}=", "chosen": str(2 * i), "rejected": f"{i} and {i}"} for i in range(16)
]
WATCHED = (
    "train/loss",
    "train/grad_norm",
    "reward/mean",
    "eval/loss",
    "policy/kl",
    "tokens/trained",
    "critic/loss",
)
Compared = tuple[str, tuple[str, ...], dict[str, Any]]  # algorithm, overrides, sections


class OnRanks:
    """Two ranks of one backend."""

    backend: ClassVar[str]
    keys: ClassVar[tuple[str, ...]] = ()  # beside the backend and the ranks

    @property
    def there(self) -> tuple[str, ...]:
        return (f"train.backend={self.backend}", "train.ranks=2", *self.keys)


class RunsOnRanks(OnRanks):
    """From Python: the same run on two ranks, in one process, and partly here and partly there."""

    compared: ClassVar[tuple[Compared, ...]]  # runs that are held against one process

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "compared_run" in metafunc.fixturenames:
            names = ["-".join([run[0], *run[1], *run[2]]) for run in self.compared]
            metafunc.parametrize("compared_run", self.compared, ids=names)

    @pytest.fixture(scope="class")
    def ranks(self) -> Iterator[Ranks]:
        """The ranks, which runs find open."""
        with Ranks.open(2, "cpu") as opened:
            yield opened

    def test_a_run_is_that_of_one_process(
        self, ranks: Ranks, make: Any, compared_run: Compared
    ) -> None:
        compare(make, self.there, compared_run)


class CommandsOnRanks(OnRanks):
    """By `reinforge train` and by torchrun: the same run, also after one rank died."""

    library: ClassVar[bool] = True  # whether the backend is a library beside torch

    @pytest.fixture(scope="class")
    def config(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """GRPO: 4 steps, a checkpoint every 2, no evaluation.

        Its surrogate, which every rank computes once a step, can pause.
        """
        folder = tmp_path_factory.mktemp("ranks")
        return cli_runs.write_config(
            folder,
            cli_runs.make_model(tmp_path_factory.mktemp("model")),
            algorithm={"surrogate": f"{folder / 'parts.py'}:surrogate"},
            train={"steps": STEPS},
            data={"eval": {"size": 0}},
            eval={"every": 0},
        )

    @pytest.fixture(scope="class")
    def whole(self, config: Path, tmp_path_factory: pytest.TempPathFactory) -> cli_runs.Evidence:
        """Two ranks, without interruption. A library keeps its words to itself."""
        folder = tmp_path_factory.mktemp("whole")
        process = self.start(config, folder)
        assert process.wait() == 0, process.output()
        said = process.output().lower()
        for ours in (f"train.backend={self.backend}", f"preparing to train ({self.backend})"):
            said = said.replace(ours, "")
        assert not self.library or self.backend not in said
        return cli_runs.evidence(folder / "run")

    def start(self, config: Path, folder: Path, **env: str) -> cli_runs.Started:
        command = ["train", str(config), "run.dir=run", *self.there]
        return cli_runs.start(command, folder, env=env, forked=True)

    def paused(self, config: Path, folder: Path, call: int) -> tuple[cli_runs.Started, int]:
        """The run in the middle of a pass, and the process of rank 1."""
        process = self.start(config, folder, PAUSE_AT=f"surrogate:{call}", PAUSE="60")
        assert process.until(lambda: (folder / "paused").exists()), process.output()
        return process, served_by(process.pid)

    @pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
    def test_a_dead_rank_is_named_and_the_run_goes_on_exactly(
        self, config: Path, whole: cli_runs.Evidence, tmp_path: Path
    ) -> None:
        process, served = self.paused(config, tmp_path, 3)
        os.kill(served, signal.SIGKILL)
        (tmp_path / "go").touch()
        began = time.monotonic()
        assert process.wait() == 3, process.output()
        assert time.monotonic() - began < 30
        last = process.output().splitlines()[-1]
        assert last.startswith(f"error: rank 1 (pid {served}) was ended by SIGKILL.")
        assert "Traceback" not in process.output()
        assert gone(served) and store.step_of(store.latest(tmp_path / "run") or Path()) == 2
        again = self.start(config, tmp_path)
        assert again.wait() == 0, again.output()
        assert cli_runs.differences(tmp_path / "run", whole, STEPS) == []

    def test_torchrun_and_one_process(
        self, config: Path, whole: cli_runs.Evidence, tmp_path: Path
    ) -> None:
        """torchrun gives the very same run as our own launcher; in one process it goes on within
        rounding.
        """
        torchrun = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        keys = ["run.dir=run", "train.steps=2", f"train.backend={self.backend}", *self.keys]
        done = subprocess.run(
            [sys.executable, "-m", *torchrun, "-m", "reinforge", "train", str(config), *keys],
            cwd=tmp_path,
            timeout=cli_runs.TIMEOUT,
            env={**os.environ, **cli_runs.ENVIRONMENT},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        code, said = cli_runs.forked("train", config, "run.dir=run", cwd=tmp_path)
        assert code == 0 and f"train.backend was '{self.backend}' and is now 'local'" in said
        found = cli_runs.evidence(tmp_path / "run")
        assert found.metrics[:2] == whole.metrics[:2]
        for ours, theirs in zip(found.metrics, whole.metrics, strict=True):
            shared = [k for k in theirs if not k.startswith(("mismatch/", "ratio/"))]
            assert {k: ours[k] for k in shared} == pytest.approx(
                {k: theirs[k] for k in shared}, rel=2e-2, abs=1e-4
            )


def compare(make: Any, there: tuple[str, ...], compared_run: Compared) -> None:
    """Rollouts, rewards and steps with the keys `there`; then half of it there and the rest in one
    process, and the other way round.
    """
    algorithm, more, sections = compared_run
    alone = tuple(key for key in more if not key.startswith(ONLY_THERE))
    there = (*there, *more)
    one = make("one", algorithm, *alone, **sections)
    two = make("two", algorithm, *there, **sections)
    for cfg in (one, two):
        run(cfg)
    want = watched(one)
    found = watched(two)
    assert len(want) >= 3 and abs(first_loss(found) - first_loss(want)) < 1e-6
    for ours, theirs in zip(found, want, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)
    assert tensors(two).keys() == tensors(one).keys()
    assert apart(two, one) < 1e-4
    if sections:  # other models, the same checkpoints
        return
    for before, after in ((alone, there), (there, alone)):
        name = f"half-{len(before)}"
        run(make(name, algorithm, *before, "train.steps=1"))
        end = make(name, algorithm, *after)
        run(end)
        assert apart(end, one) < 1e-4


def run(cfg: Any) -> None:
    if cfg.algorithm.name == "dpo":
        train_config(cfg, CallerObjects(data=PAIRS), SilentView())
    else:
        launch(cfg, eval_data=EVAL if cfg.algorithm.name == "sft" else None)


def watched(cfg: Any) -> list[dict[str, float]]:
    return [{k: v for k, v in line.items() if k in WATCHED} for line in lines(cfg)]


def first_loss(found: list[dict[str, float]]) -> float:
    return next(line["train/loss"] for line in found if "train/loss" in line)


def apart(found: Any, wanted: Any) -> float:
    """How far the weights of two runs are from each other."""
    a = tensors(found)
    b = tensors(wanted)
    trained = [k for k in b if "model/" in k]
    return relative({k: a[k] for k in trained}, {k: b[k] for k in trained})


def served_by(pid: int) -> int:
    """The process of rank 1 of a run."""
    found = [
        int(p)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for p in (task / "children").read_text().split()
    ]
    (one,) = [p for p in found if "distributed.ranks" in Path(f"/proc/{p}/cmdline").read_text()]
    return one


def gone(pid: int, seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.05)
    return False
