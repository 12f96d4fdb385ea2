"""How fast the web app is on a large run: 10,000 steps and 100,000 samples, made up, over HTTP.

    python benchmarks/ui.py [--steps 10000] [--samples 100000] [--out FILE]

Starts `reinforge ui` as a process and asks as the page does. A first view is that of an app that
has just been started and has read nothing yet; the others follow in the same process. The page of
samples asks for the run too, at the same time. Prints milliseconds, the one first view and the
median of five for the rest, and the processor's milliseconds that the app took for it: on a busy
machine they say more.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = [
    "reward/mean",
    "reward/std",
    "reward/unscored",
    "reward/exact_number",
    "response/length",
    "response/max_length",
    "response/truncated",
    "response/repeated",
    "groups/zero_variance",
    "groups/trained",
    "groups/rounds",
    "policy/loss",
    "policy/entropy",
    "policy/ratio",
    "policy/kl",
    "policy/ratio/max",
    "policy/clip_low",
    "policy/clip_high",
    "policy/clip_fraction",
    "mismatch/mean",
    "mismatch/max",
    "mismatch/ratio",
    "mismatch/ess",
    "mismatch/outside_2x",
    "train/loss",
    "train/grad_norm",
    "train/learning_rate",
    "train/skipped",
    "train/empty",
    "tokens/sampled",
    "tokens/trained",
    "tokens/processed",
    "tokens/dropped",
    "tokens_per_second",
    "batch/samples",
    "batch/signal",
    "efficiency/train_mfu",
    "efficiency/idle_trainer",
    "efficiency/idle_engine",
    "memory/peak_gib",
    "epoch",
    "time/step",
    "time/generate",
    "time/train",
    "time/prepare",
    "time/annotate",
    "time/reward_wait",
    "time/other",
    "share/generate",
    "share/train",
    "share/prepare",
    "share/annotate",
    "share/reward_wait",
    "share/other",
]
WORDS = [
    "the",
    "answer",
    "is",
    "so",
    "we",
    "add",
    "seven",
    "and",
    "then",
    "nine",
    "which",
    "makes",
    "a",
    "number",
    "of",
    "some",
    "size",
]
RUN = "large"


def make_run(root: Path, steps: int, samples: int) -> None:
    """A run directory with logs like those of a run of GRPO."""
    draw = random.Random(0)
    run = root / RUN
    run.mkdir()
    config = {"algorithm": {"name": "grpo"}, "model": {"path": "m"}, "train": {"steps": steps}}
    (run / "config.json").write_text(json.dumps(config))
    events = [{"time": 0.0, "kind": "started", "steps": steps}]
    events.append({"time": steps, "kind": "finished", "step": steps})
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            values = {name: draw.random() for name in NAMES} | {"train/skipped": 0.0}
            file.write(json.dumps({"step": step, "time": float(step), **values}) + "\n")
            if step % 100 == 0:
                told = {"eval/accuracy": 0.5, "eval/accuracy_low": 0.4, "eval/accuracy_high": 0.6}
                file.write(json.dumps({"step": step, "time": float(step), **told}) + "\n")
    with (run / "samples.jsonl").open("w") as file:
        for i in range(samples):
            file.write(json.dumps(sample(draw, i, 1 + i * steps // samples)) + "\n")


def sample(draw: random.Random, i: int, step: int) -> dict[str, Any]:
    group = f"{i // 8}:row-{i // 8 % 5000}"
    return {
        "step": step,
        "row": f"row-{i // 8 % 5000}",
        "uid": f"{group}#{i % 8}",
        "prompt": " ".join(draw.choices(WORDS, k=15)),
        "completion": " ".join(draw.choices(WORDS, k=60)),
        "reward": float(draw.random() < 0.5),
        "components": {"exact_number": draw.random(), "format": 1.0},
        "stop": draw.choice(["eos", "eos", "eos", "length"]),
        "length": draw.randrange(400),
        "training": {
            "group": group,
            "sampled": 60,
            "no_signal": None,
            "advantage": draw.random(),
            "loss": draw.random(),
            "ratio": {"mean": 1.0, "min": 0.9, "max": 1.1},
        },
    }


@contextmanager
def app(root: Path) -> Iterator[tuple[int, int]]:
    """Port and process of an app that has just been started."""
    command = [sys.executable, "-m", "reinforge", "ui", str(root), "--no-open", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        address = process.stdout.readline().split(": ")[1].split()[0]
        port = int(address.rstrip("/").rpartition(":")[2])
        ask(port, process.pid, ["/api/info"])  # imports are done
        yield port, process.pid
    finally:
        process.terminate()
        process.wait()


def processor(pid: int) -> float:
    """Milliseconds of the processor that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK")


def ask(port: int, pid: int, paths: Sequence[str]) -> tuple[float, float]:
    """Milliseconds until all of them are answered, one after the other; of the clock, and of the
    processor.
    """
    spent = processor(pid)
    begin = time.perf_counter()
    for path in paths:
        get(port, path)
    return (time.perf_counter() - begin) * 1000, processor(pid) - spent


def ask_at_once(port: int, pid: int, paths: Sequence[str]) -> tuple[float, float]:
    """The same where none waits for another."""
    spent = processor(pid)
    begin = time.perf_counter()
    with ThreadPoolExecutor(len(paths)) as pool:
        list(pool.map(lambda path: get(port, path), paths))
    return (time.perf_counter() - begin) * 1000, processor(pid) - spent


def get(port: int, path: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("GET", path)
    reply = connection.getresponse()
    body = reply.read()
    assert reply.status == 200, body
    connection.close()


def measure(root: Path) -> dict[str, tuple[float, float]]:
    page = [f"/api/{what}?run={RUN}" for what in ("run", "phases")]
    page.append(f"/api/curves?run={RUN}&points=400")
    samples = f"/api/samples?run={RUN}"
    found: dict[str, tuple[float, float]] = {}
    of_step = f"{samples}&step=500"
    for name, ask_for, paths in (
        ("first view of the list", ask, ["/api/runs"]),
        ("first view of the run", ask, page),
        ("first view of the samples", ask, [samples]),
        ("the same with the run's head", ask_at_once, [page[0], samples]),
        ("the same, filtered by a step", ask, [of_step]),
    ):
        with app(root) as (port, pid):
            found[name] = ask_for(port, pid, paths)
    again = {
        "the list again": ["/api/runs"],
        "the run again": page,
        "samples": [samples],
        "samples of a step": [of_step],
        "samples by reward and length": [f"{samples}&reward_min=1&length_max=100&order=-length"],
        "samples by component": [f"{samples}&component=exact_number%3E0.9&stop=length"],
        "samples with a text": [f"{samples}&text=seven%20and%20then"],
        "samples with a rare text": [f"{samples}&text=nowhere%20to%20be%20found"],
        "one sample": [f"/api/sample?run={RUN}&line=54321"],
        "one prompt over training": [f"/api/prompt?run={RUN}&prompt=row-7"],
    }
    with app(root) as (port, pid):
        ask(port, pid, [*page, of_step])
        for name, paths in again.items():
            clock, spent = zip(*(ask(port, pid, paths) for _ in range(5)), strict=True)
            found[name] = statistics.median(clock), statistics.median(spent)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_run(Path(folder), options.steps, options.samples)
        found = measure(Path(folder))
    for name, (clock, spent) in found.items():
        print(f"{name:32}{clock:8.0f} ms{spent:8.0f} ms of the processor")
    if options.out:
        options.out.write_text(json.dumps({**vars(options), "out": None, "ms": found}, indent=1))


if __name__ == "__main__":
    main()
