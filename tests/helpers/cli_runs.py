"""Runs of the real command line on a tiny model: how to start, kill and compare them.
benchmarks/kill_resume.py uses it too.

A run is started in one of two ways, and both are a process of its own that a signal can kill at any
moment:
- `start(...)`: `python -m reinforge ...`, as a user does. Importing torch and transformers takes
  most of its life.
- `start(..., forked=True)`: a fork of a server that has imported them and nothing else, and has
  started no thread; the fork calls the same `main(argv)`. Everything after the imports is the same,
  the start-up is not paid again.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from helpers.paths import SRC

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(SRC), os.environ.get("PYTHONPATH")])),
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
    "COLUMNS": "200",
    "NO_COLOR": "1",
}
PRELOAD = [
    "reinforge.build.trainer",
    "reinforge.api",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
]
TIMEOUT = 120.0
# metrics that two equal runs do not share, besides time/, share/ and memory/
CLOCK = ("time", "tokens_per_second")

PARTS = '''"""A user's functions.

The reward is not known to be repeatable, so its answers are journalled. PAUSE_AT=reward:5 makes the
fifth call of the reward write the file `paused` and wait for PAUSE seconds, or until there is a
file `go`, so that a test knows where a signal arrives.
"""

import os
import time
from collections import Counter
from pathlib import Path

calls = Counter()


def pause(name):
    calls[name] += 1
    if os.environ.get("PAUSE_AT") == f"{name}:{calls[name]}":
        Path("paused").touch()
        until = time.monotonic() + float(os.environ["PAUSE"])
        while time.monotonic() < until and not Path("go").exists():
            time.sleep(0.02)


def digits(completions, **columns):
    pause("reward")
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def surrogate(logprobs, old, advantages, sequence):
    pause("surrogate")
    return -(logprobs - old).exp() * advantages, {}
'''


# ---- what is run ----


def make_model(folder: Path, *, layers: int = 2, width: int = 48) -> Path:
    from reinforge.models.tiny import make_tiny_model

    return make_tiny_model(folder / "tiny", width=width, layers=layers, heads=4)


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """
    >>> merged({"run": {"dir": "a", "seed": 0}}, {"run": {"seed": 1}})
    {'run': {'dir': 'a', 'seed': 1}}
    """
    out = dict(base)
    for key, value in changes.items():
        out[key] = (
            merged(out[key], value)
            if isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
            else value
        )
    return out


def write_config(folder: Path, model: Path, name: str = "grpo", **changes: Any) -> Path:
    """A run of a few seconds: short sums, two rewards (one a user's), a checkpoint every 2 steps,
    an evaluation every 3.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "parts.py").write_text(PARTS)
    config: dict[str, Any] = {
        "model": {"path": str(model)},
        "algorithm": {"name": name, "group_size": 4},
        "data": {
            "source": "arithmetic:chain",
            "options": {"size": 60, "max_value": 9, "terms": 2},
            "eval": {"size": 4},
        },
        "rewards": [
            {"name": "exact_number"},
            {"name": f"{folder / 'parts.py'}:digits", "weight": 0.5},
        ],
        "rollout": {"max_new_tokens": 16, "kv_gib": 0.002},
        "train": {
            "steps": 14,
            "prompts_per_step": 4,
            "learning_rate": 3e-3,
            "schedule": {"kind": "cosine", "warmup": 2},
        },
        "eval": {"every": 3},
        "run": {
            "dir": "run",
            "checkpoint": {"every": 2},
            "log": {"samples_every": 1, "samples": 8},
        },
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(merged(config, changes)))
    return path


# ---- how it is run ----


@dataclass
class Started:
    """One process of a run."""

    process: Any  # subprocess.Popen or multiprocessing.Process
    log: Path
    began: float

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    @property
    def alive(self) -> bool:
        return (
            self.process.poll() is None
            if isinstance(self.process, subprocess.Popen)
            else self.process.is_alive()
        )

    def wait(self, timeout: float = TIMEOUT) -> int:
        """The exit code, negative for a signal.

        Kills the process and fails when it does not end in time.
        """
        if isinstance(self.process, subprocess.Popen):
            try:
                return self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
        else:
            self.process.join(timeout)
            if self.process.exitcode is not None:
                return int(self.process.exitcode)
            self.kill()
        raise AssertionError(f"did not end within {timeout:g} s:\n{self.output()}")

    def send(self, kind: signal.Signals) -> None:
        if self.alive:
            os.kill(self.pid, kind)

    def kill(self) -> int:
        self.send(signal.SIGKILL)
        return self.wait()

    def until(self, condition: Callable[[], bool], timeout: float = TIMEOUT) -> bool:
        """Waits until the condition holds; False if the process ended before that."""
        while not condition():
            if not self.alive:
                return condition()
            if time.monotonic() - self.began > timeout:
                self.kill()
                raise AssertionError(
                    f"the awaited did not happen within {timeout:g} s:\n{self.output()}"
                )
            time.sleep(0.002)
        return True

    def output(self) -> str:
        return self.log.read_text(errors="replace")


def run_command(args: Sequence[str], cwd: str, env: Mapping[str, str], log: str) -> None:
    """What a fork does: the command line's `main` in the given directory, its output in a file."""
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.chdir(cwd)
    os.environ.update(env)
    from reinforge.cli.main import main

    sys.argv = ["reinforge", *args]
    sys.exit(main(list(args)))


def start(
    args: Sequence[str], cwd: Path, *, env: Mapping[str, str] | None = None, forked: bool = False
) -> Started:
    """Starts `reinforge ARGS` in `cwd` and returns at once. Output goes to a new file in `cwd`."""
    log = cwd / f"out-{time.time_ns()}.txt"
    log.touch()
    began = time.monotonic()
    if forked:
        process: Any = server().Process(
            target=run_command, args=(list(args), str(cwd), dict(env or {}), str(log))
        )
        with environment():
            process.start()
    else:
        with log.open("ab") as out:
            command = [sys.executable, "-m", "reinforge", *args]
            process = subprocess.Popen(
                command,
                cwd=cwd,
                env={**os.environ, **ENVIRONMENT, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
    return Started(process, log, began)


def server() -> Any:
    """The fork server's context.

    Its process starts with the first fork, and imports what a run needs.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


@contextmanager
def environment() -> Iterator[None]:
    """The fork server takes the environment of whoever starts it."""
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def cli(
    *args: object, cwd: Path, text: str | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`reinforge ARGS` to its end, as a user runs it; `text` is typed in."""
    return subprocess.run(
        [sys.executable, "-m", "reinforge", *map(str, args)],
        cwd=cwd,
        env={**os.environ, **ENVIRONMENT, **(env or {})},
        input=text,
        stdin=subprocess.DEVNULL if text is None else None,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )


def forked(*args: object, cwd: Path, env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """`reinforge ARGS` to its end in a fork: exit code and output."""
    process = start([str(a) for a in args], cwd, env=env, forked=True)
    return process.wait(), process.output()


# ---- what came out ----


def lines(path: Path) -> list[dict[str, Any]]:
    """Every line must be whole: a log of a finished run has no torn ones."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@dataclass
class Evidence:
    """What two runs must share to have trained alike: the digest of the last checkpoint, every
    metric of every step, every sample, what every recorded step did with its groups.
    """

    digest: str
    metrics: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    groups: list[dict[str, Any]]


def evidence(run_dir: Path) -> Evidence:
    from reinforge.checkpoint.store import digest_run

    metrics = [
        {
            k: v
            for k, v in line.items()
            if k not in CLOCK and not k.startswith(("time/", "share/", "memory/", "efficiency/"))
        }
        for line in lines(run_dir / "metrics.jsonl")
    ]
    return Evidence(
        digest_run(run_dir),
        metrics,
        samples=lines(run_dir / "samples.jsonl"),
        groups=lines(run_dir / "groups.jsonl"),
    )


def trained_steps(run_dir: Path) -> list[int]:
    return [line["step"] for line in lines(run_dir / "metrics.jsonl") if "time/step" in line]


def evaluated_steps(run_dir: Path) -> list[int]:
    return [
        line["step"]
        for line in lines(run_dir / "metrics.jsonl")
        if any(key.startswith("eval/") for key in line)
    ]


def differences(run_dir: Path, expected: Evidence, steps: int) -> list[str]:
    """In words, what is not as in the uninterrupted run.

    Empty: they are equal, and each step is in the log exactly once.
    """
    found = evidence(run_dir)
    out = []
    if found.digest != expected.digest:
        out.append(f"digest {found.digest[:12]} instead of {expected.digest[:12]}")
    if trained_steps(run_dir) != list(range(1, steps + 1)):
        out.append(f"steps in metrics.jsonl: {trained_steps(run_dir)}")
    for name in ("metrics", "samples", "groups"):
        ours = getattr(found, name)
        theirs = getattr(expected, name)
        if ours != theirs:
            at = next(
                (i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b),
                min(len(ours), len(theirs)),
            )
            out.append(
                f"{name} differ from line {at + 1} on ({len(ours)} lines, {len(theirs)} expected)"
            )
    leftovers = [p.name for p in (run_dir / "checkpoints").iterdir() if p.name.startswith(".")]
    return out + ([f"left behind: {leftovers}"] if leftovers else [])


@dataclass
class Whole:
    """A configuration, and what came out of running it without interruption."""

    config: Path
    steps: int
    evidence: Evidence
    seconds: float  # of training, after the start-up

    def command(self, *overrides: str) -> list[str]:
        return ["train", str(self.config), "run.dir=run", *overrides]

    def differences(self, run_dir: Path) -> list[str]:
        return differences(run_dir, self.evidence, self.steps)


def whole(folder: Path, config: Path, steps: int) -> Whole:
    """Runs the configuration to its end."""
    process = start(["train", str(config), "run.dir=whole"], folder, forked=True)
    assert process.wait() == 0, process.output()
    events = lines(folder / "whole" / "events.jsonl")
    assert (events[0]["kind"], events[-1]["kind"]) == ("started", "finished")
    return Whole(config, steps, evidence(folder / "whole"), events[-1]["time"] - events[0]["time"])
