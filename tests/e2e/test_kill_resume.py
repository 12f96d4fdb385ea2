"""kill -9 at any moment, then the same command again: weights, optimizer, metrics and samples come
out as if nothing had happened.

`benchmarks/kill_resume.py` does the same many more times.
"""

from __future__ import annotations

import random
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from helpers import cli_runs
from helpers.cli_runs import Whole, whole
from helpers.toy_architectures import save_architecture, write_tokenizer
from reinforge.checkpoint import store
from reinforge.rollout.journal import Journal


def killed_at(run: Whole, folder: Path, seconds: float, *, forked: bool = True) -> None:
    """Starts the run and kills it so long after its start-up; a run that ended before is started
    again, and killed earlier.
    """
    while True:
        process = cli_runs.start(run.command(), folder, forked=forked)
        process.until(lambda: (folder / "run" / "events.jsonl").exists())
        time.sleep(seconds)
        if process.kill() == -signal.SIGKILL:
            return
        shutil.rmtree(folder / "run")
        seconds *= 0.7


def crash(run: Whole, folder: Path, point: str, *overrides: str) -> None:
    process = cli_runs.start(
        run.command(*overrides), folder, env={"REINFORGE_CRASH_AT": point}, forked=True
    )
    assert process.wait() == -signal.SIGKILL, process.output()


def finish(run: Whole, folder: Path, *overrides: str, forked: bool = True) -> str:
    process = cli_runs.start(run.command(*overrides), folder, forked=forked)
    assert process.wait() == 0, process.output()
    return process.output()


# ---- kills ----


@pytest.mark.parametrize(
    ("trial", "forked"),
    [
        pytest.param(0, False, marks=pytest.mark.long),
        (1, True),
        pytest.param(2, True, marks=pytest.mark.long),
    ],
)
def test_grpo_killed_at_random(grpo: Whole, tmp_path: Path, trial: int, forked: bool) -> None:
    killed_at(grpo, tmp_path, random.Random(trial).uniform(0.1, 0.9) * grpo.seconds, forked=forked)
    finish(grpo, tmp_path, forked=forked)
    assert grpo.differences(tmp_path / "run") == []


@pytest.mark.parametrize("trial", [0, pytest.param(1, marks=pytest.mark.long)])
def test_sft_killed_at_random(sft: Whole, tmp_path: Path, trial: int) -> None:
    killed_at(sft, tmp_path, random.Random(trial).uniform(0.1, 0.9) * sft.seconds)
    finish(sft, tmp_path)
    assert sft.differences(tmp_path / "run") == []


POINTS = [
    "save:before-rename@2",
    "step:end@6",
    # the test of one run that is killed at all of them passes these too
    *(
        pytest.param(point, marks=pytest.mark.long)
        for point in ("save:after-tensors@2", "save:after-rename@2", "prune:middle@1", "step:end@1")
    ),
]


@pytest.mark.parametrize("point", POINTS)
def test_grpo_killed_at_a_named_point(grpo: Whole, tmp_path: Path, point: str) -> None:
    crash(grpo, tmp_path, point)
    finish(grpo, tmp_path)
    assert grpo.differences(tmp_path / "run") == []


@pytest.mark.parametrize(
    "point", ["save:before-rename@3", pytest.param("step:end@7", marks=pytest.mark.long)]
)
def test_sft_killed_at_a_named_point(sft: Whole, tmp_path: Path, point: str) -> None:
    crash(sft, tmp_path, point)
    finish(sft, tmp_path)
    assert sft.differences(tmp_path / "run") == []


@pytest.mark.parametrize(
    "point",
    [
        "save:after-tensors@2",
        *(
            pytest.param(point, marks=pytest.mark.long)
            for point in ("save:before-rename@2", "save:after-rename@2", "prune:middle@1")
        ),
    ],
)
def test_killed_while_a_thread_writes(grpo: Whole, tmp_path: Path, point: str) -> None:
    """The checkpoint before is intact, and so is what rollouts wrote down since."""
    background = "run.checkpoint.background=true"
    crash(grpo, tmp_path, point, background)
    finish(grpo, tmp_path, background)
    assert grpo.differences(tmp_path / "run") == []


def test_killed_again_and_again(grpo: Whole, tmp_path: Path) -> None:
    for point in (
        "step:end@3",
        "save:after-rename@1",
        "save:after-tensors@1",
        "step:end@4",
        "prune:middle@1",
    ):
        crash(grpo, tmp_path, point)
    finish(grpo, tmp_path)
    assert grpo.differences(tmp_path / "run") == []


@pytest.mark.parametrize(
    "exact", [False, pytest.param(True, marks=pytest.mark.long)], ids=["ordinary", "exact"]
)
def test_drafts_from_earlier_answers_do_not_show(tiny: Path, tmp_path: Path, exact: bool) -> None:
    """8 prompts, 4 a step: every second step is a new epoch. The resumed run does not know the
    answers of the epochs before, from which the run that was never cut may draw drafts.
    """
    changes = {
        "data": {"options": {"size": 12}},
        "rollout": {"temperature": 0.05, "speculation": {"when": "always"}},
        "train": {"steps": 6},
    }
    config = cli_runs.write_config(tmp_path, tiny, **changes)
    settings = config.read_text()
    config.write_text(settings.replace("model:\n", f"model:\n  exact: {str(exact).lower()}\n"))
    run = whole(tmp_path, config, 6)
    metrics = cli_runs.lines(tmp_path / "whole" / "metrics.jsonl")
    key = "efficiency/accepted_length"
    lengths = [line[key] for line in metrics if key in line]
    assert len(lengths) == 6 and max(lengths) > 1
    crash(run, tmp_path, "step:end@5")
    finish(run, tmp_path)
    assert run.differences(tmp_path / "run") == []


def test_a_hybrid_with_experts(tmp_path: Path) -> None:
    """Layers that keep state: the states of an engine are computed again, never saved. The experts
    of sampled tokens travel with the samples.
    """
    model = save_architecture("qwen3_5_moe", tmp_path / "model", write_tokenizer)
    train = {"steps": 4, "router_replay": "on"}
    config = cli_runs.write_config(tmp_path, model, train=train, rollout={"staleness": 1})
    run = whole(tmp_path, config, 4)
    metrics = cli_runs.lines(tmp_path / "whole" / "metrics.jsonl")
    told = [line for line in metrics if "experts/entropy" in line]
    assert [line["step"] for line in told] == [1, 2, 3, 4]
    assert told[0]["experts/disagreement"] == 0 < told[-1]["experts/disagreement"]
    assert all(0 < line["experts/drift"] < 1 for line in told[1:])
    crash(run, tmp_path, "step:end@3")
    finish(run, tmp_path)
    assert run.differences(tmp_path / "run") == []


def test_lora_with_a_reference(tiny: Path, tmp_path: Path) -> None:
    """The adapter alone is in the checkpoint; the KL pulls towards the base model, which must be
    the same after the kill.
    """
    changes = {
        "adapter": {"kind": "lora", "rank": 4},
        "algorithm": {"kl": {"coefficient": 0.1}, "epochs": 2, "minibatches": 2},
        "train": {"steps": 5},
    }
    run = whole(tmp_path, cli_runs.write_config(tmp_path, tiny, **changes), 5)
    crash(run, tmp_path, "step:end@4")
    finish(run, tmp_path)
    assert run.differences(tmp_path / "run") == []
    assert not any(
        "embed_tokens" in name
        for name in store.load(tmp_path / "run" / "checkpoints" / "step-00000005")[0].tensors
    )


def test_the_micro_batch_size_is_part_of_the_state(tiny: Path, tmp_path: Path) -> None:
    """`auto` is computed from free memory, which is another after a restart: the resumed run takes
    what it had. Here `auto` was 48, says the record.
    """
    config = cli_runs.write_config(tmp_path, tiny, train={"steps": 6, "tokens_per_microbatch": 48})
    run = whole(tmp_path, config, 6)
    crash(run, tmp_path, "step:end@5")
    record = tmp_path / "run" / "config.json"
    record.write_text(
        record.read_text().replace('"tokens_per_microbatch": 48', '"tokens_per_microbatch": "auto"')
    )
    finish(run, tmp_path, "train.tokens_per_microbatch=auto")
    assert run.differences(tmp_path / "run") == []


def test_dynamic_sampling_best_and_early_stop(tiny: Path, tmp_path: Path) -> None:
    """Refills move the cursor by another amount each step; the best evaluation so far decides what
    is kept and when the run ends.
    """
    changes = {
        "rewards": [{"name": "exact_number"}],
        "algorithm": {"overlong_buffer": 0, "group_size": 8, "max_refills": 12},
        "train": {"steps": 12, "prompts_per_step": 2, "learning_rate": 0.03},
        "data": {"options": {"max_value": 2, "terms": [2, 4]}, "eval": {"size": 8}},
        "eval": {
            "every": 1,
            "temperature": 1.0,
            "samples": 2,
            "early_stop": {"metric": "eval/reward", "patience": 4},
        },
        "run": {"checkpoint": {"best": "eval/reward", "keep": 1}},
    }
    run = whole(tmp_path, cli_runs.write_config(tmp_path, tiny, "dapo", **changes), 12)
    run.steps = cli_runs.trained_steps(tmp_path / "whole")[-1]
    rounds = [line["groups/rounds"] for line in run.evidence.metrics if "groups/rounds" in line]
    assert run.steps < 12 and len(set(rounds)) > 1, "otherwise this shows nothing"
    crash(run, tmp_path, f"step:end@{run.steps - 1}")
    assert "did not improve in 4 evaluations" in finish(run, tmp_path)
    assert run.differences(tmp_path / "run") == []
    assert [p.name for p in store.steps(tmp_path / "run")] == [
        p.name for p in store.steps(tmp_path / "whole")
    ]


# ---- what the outside world said ----

RANDOM = """
import json, os

def noise(prompts, completions, **columns):
    values = [int.from_bytes(os.urandom(2), "big") / 65536 for _ in completions]
    with open("asked.jsonl", "a") as file:
        file.write(json.dumps([prompts[0], completions]) + "\\n")
    return values
"""


def test_a_reward_is_not_asked_twice(tiny: Path, tmp_path: Path) -> None:
    """A reward that answers differently each time: the step that is done again trains on the
    answers of the first time.
    """
    (tmp_path / "noise.py").write_text(RANDOM)
    config = cli_runs.write_config(
        tmp_path,
        tiny,
        rewards=[{"name": f"{tmp_path / 'noise.py'}:noise"}],
        train={"steps": 6},
        data={"eval": {"size": 0}},
        eval={"every": 0},
    )
    run = Whole(config, 6, cli_runs.Evidence("", [], [], []), 0.0)
    crash(run, tmp_path, "step:end@4")  # steps 3 and 4 are done again
    before = cli_runs.lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in before] == [1, 2, 3]
    with (tmp_path / "run" / "journal.jsonl").open("a") as file:
        file.write('{"group": "cut')  # as a machine that went down may leave it
    crash(run, tmp_path, "step:end@3")  # step 5
    finish(run, tmp_path)
    after = cli_runs.lines(tmp_path / "run" / "metrics.jsonl")
    for name in ("reward/mean", "reward/std", "train/grad_norm"):
        assert [line[name] for line in after[:3]] == [line[name] for line in before], name
    asked = [str(line) for line in cli_runs.lines(tmp_path / "asked.jsonl")]
    assert len(asked) == 6 * 4 and len(set(asked)) == len(asked)


def test_an_entry_after_a_torn_line_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path).write("a", "1", {"r": [1.0]})
    with path.open("a") as file:
        file.write('{"group": "b", "tok')
    Journal(path).write("c", "3", {"r": [None]})
    again = Journal(path)
    assert (
        again.find("a", "1") == {"r": [1.0]}
        and again.find("c", "3") == {"r": [None]}
        and again.find("b", "2") is None
    )


# ---- run directories ----


def test_a_finished_run_does_nothing(sft: Whole, tmp_path: Path) -> None:
    finish(sft, tmp_path)
    before = {
        p: p.stat().st_mtime_ns
        for p in (tmp_path / "run").rglob("*")
        if p.suffix == ".safetensors"
        or p.name in ("metrics.jsonl", "samples.jsonl", "groups.jsonl")
    }
    assert len(before) >= 5
    said = finish(sft, tmp_path)
    assert "this run is finished (step 40)" in said
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert sft.differences(tmp_path / "run") == []


def test_resume_never_and_must(sft: Whole, tmp_path: Path) -> None:
    refused = cli_runs.start(sft.command("run.resume=must"), tmp_path, forked=True)
    assert refused.wait() == 2 and "nothing to continue" in refused.output()
    assert not (tmp_path / "run").exists()
    crash(sft, tmp_path, "step:end@5")
    refused = cli_runs.start(sft.command("run.resume=never"), tmp_path, forked=True)
    assert refused.wait() == 2 and "already holds a run" in refused.output()
    assert "resumed at step 4" in finish(sft, tmp_path, "run.resume=must")
    assert sft.differences(tmp_path / "run") == []


def test_one_owner(grpo: Whole, tmp_path: Path) -> None:
    """A second process in a live run's directory is refused and names the first; the first one does
    not notice.
    """
    first = cli_runs.start(
        grpo.command(), tmp_path, env={"PAUSE_AT": "reward:12", "PAUSE": "60"}, forked=True
    )
    assert first.until(lambda: (tmp_path / "paused").exists())
    second = cli_runs.start(grpo.command(), tmp_path, forked=True)
    assert second.wait() == 2
    assert (
        f"another run owns this directory: pid {first.pid} on " in second.output()
        and "Traceback" not in second.output()
    )
    (tmp_path / "go").touch()
    assert first.wait() == 0
    assert grpo.differences(tmp_path / "run") == []


@pytest.mark.parametrize("file", ["model.safetensors", "state.json", "MANIFEST.json"])
def test_a_damaged_checkpoint_is_named_and_never_used(
    sft: Whole, tmp_path: Path, file: str
) -> None:
    crash(sft, tmp_path, "step:end@9")
    damaged = tmp_path / "run" / "checkpoints" / "step-00000008" / file
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data) if file != "MANIFEST.json" else damaged.unlink()
    process = cli_runs.start(sft.command(), tmp_path, forked=True)
    assert process.wait() == 2
    last = process.output().splitlines()[-1]
    assert (
        last.startswith("error: ")
        and str(Path("run") / "checkpoints" / "step-00000008" / file) in last
    )
    assert (
        f"{Path('run') / 'checkpoints' / 'step-00000006'} is intact: move step-00000008 away"
        in last
    )
    shutil.move(damaged.parent, tmp_path / "aside")
    assert "resumed at step 6" in finish(sft, tmp_path)
    assert sft.differences(tmp_path / "run") == []


def test_a_checkpoint_of_something_else_is_refused(sft: Whole, tmp_path: Path) -> None:
    crash(sft, tmp_path, "step:end@5")
    for override, said in (
        ("data.options.seed=5", "data.options.seed was "),
        ("run.seed=1", "run.seed was 0 and is 1"),
        ("train.learning_rate=0.25", "and is 0.25. Use another run.dir"),
    ):
        process = cli_runs.start(sft.command(override), tmp_path, forked=True)
        assert process.wait() == 2 and said in process.output(), process.output()
    finish(sft, tmp_path)
    assert sft.differences(tmp_path / "run") == []


def run_with_limit(args: list[str], cwd: str, env: dict[str, str], log: str, limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    cli_runs.run_command(args, cwd, env, log)


def test_a_full_disk(sft: Whole, tmp_path: Path) -> None:
    """No file may grow past a limit that logs stay below and weights do not: writing fails as on a
    full disk. One paragraph; nothing half-written stays; with room again the same command gives the
    same run.
    """
    crash(sft, tmp_path, "step:end@3")
    kept = store.digest_run(tmp_path / "run")
    log = tmp_path / "limited.txt"
    with cli_runs.environment():
        process = cli_runs.server().Process(
            target=run_with_limit, args=(sft.command(), str(tmp_path), {}, str(log), 100_000)
        )
        process.start()
    process.join(cli_runs.TIMEOUT)
    last = log.read_text().splitlines()[-1]
    assert process.exitcode == 2, log.read_text()
    assert (
        "could not be written" in last
        and "step-00000002 is intact" in last
        and "Traceback" not in log.read_text()
    )
    assert store.digest_run(tmp_path / "run") == kept
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]
    finish(sft, tmp_path)
    assert sft.differences(tmp_path / "run") == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_fork_server_has_no_threads(grpo: Whole) -> None:
    """Forking a process with threads copies their locks in whatever state they are: the shortcut of
    these tests must not. The thread of an allocator (pyarrow's, on x86_64) is none of them:
    jemalloc takes its locks before a fork and gives them back after it.
    """
    from multiprocessing import forkserver

    pid = forkserver._forkserver._forkserver_pid
    assert pid is not None
    names = [(task / "comm").read_text().strip() for task in Path(f"/proc/{pid}/task").iterdir()]
    assert len([name for name in names if name != "jemalloc_bg_thd"]) == 1, names
