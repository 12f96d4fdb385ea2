"""`plan --cluster`: the cost model by hand, its limits, a run as the measure, and published step
times.
"""

from __future__ import annotations

import json
import math
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import yaml

from helpers.paths import ROOT
from reinforge.backends import roofline
from reinforge.backends.memory_model import kv_token_bytes, weight_bytes
from reinforge.backends.roofline import StepWork, forward_flops
from reinforge.cluster import scaling
from reinforge.cluster.scaling import (
    ClusterLayout,
    CompletionLengths,
    GpuCluster,
    PhaseRatios,
    ReplicaTimes,
    best,
    layouts,
    machine,
    simulate,
)
from reinforge.config.load import load_config
from reinforge.core.errors import InputError
from reinforge.core.model_facts import ModelFacts
from reinforge.plan.simulate import gpu_counts, measured_of, plan_cluster, spread

SMALL = ModelFacts(32, 4096, 14336, 32, 8, 128, 128256, False, compiled=True)
WORK = StepWork(2048, 128, 1000, group=16)
H100 = machine("H100")


def test_lengths() -> None:
    found = CompletionLengths(1000, 4096, 0.6)
    assert (
        sum(found.of(2000)) / 2000 == pytest.approx(1000, rel=1e-3) and found.longest(2000) == 4096
    )
    # log-normal: symmetric in ln
    assert found.of(3)[1] == pytest.approx(math.sqrt(found.of(3)[0] * found.of(3)[2]))
    even = CompletionLengths(1000, 4096, 1e-6)
    assert even.of(8) == pytest.approx([1000] * 8, rel=1e-4)
    fitted = spread(1000, 3000, 4096, 512)
    assert fitted.longest(512) == pytest.approx(3000, rel=1e-3) and sum(
        fitted.of(512)
    ) / 512 == pytest.approx(1000, rel=1e-3)


def test_equal_lengths_by_hand() -> None:
    """Everybody ends together: one prefill, then 1000 steps of all rows; nothing is
    left of a tail.
    """
    engine = ReplicaTimes(SMALL, GpuCluster(H100, 16), 1)
    lengths = CompletionLengths(1000, 1000, 1e-9)
    rows = 128
    found = scaling.generate_seconds(engine, WORK, lengths, replicas=16)
    step = 1e-4 * 32 + max(
        (weight_bytes(SMALL) + rows * kv_token_bytes(SMALL) * 128) / (3.35e12 * 0.72),
        forward_flops(SMALL, rows, 256) / (989e12 * 0.45),
    )
    prefill = forward_flops(SMALL, 128 / 16 * 128, 128) / (989e12 * 0.45)
    assert found == pytest.approx(prefill + 1000 * step, rel=1e-6)


def test_the_tail_is_paid_for() -> None:
    """As many tokens, spread out: on-policy generation takes about as long as its longest sequence,
    steady generation does not care.
    """
    engine = ReplicaTimes(SMALL, GpuCluster(H100, 64), 1)
    even = CompletionLengths(1000, 8192, 1e-6)
    wide = CompletionLengths(1000, 8192, 0.8)
    took = [scaling.generate_seconds(engine, WORK, lengths, 64) for lengths in (even, wide)]
    steady = [scaling.steady_seconds(engine, WORK, lengths, 64, 1) for lengths in (even, wide)]
    assert (
        took[1] / took[0] == pytest.approx(wide.longest(2048) / 1000, rel=0.15)
        and took[1] > 5 * took[0]
    )
    assert steady[0] == steady[1] and steady[0] < took[0]


def test_places_wait_for_memory() -> None:
    """A cache for few sequences makes the others wait: twice the work per place, about twice the
    time.
    """
    whole, half = (
        ReplicaTimes(SMALL, GpuCluster(machine("H100", gib), 1), 1) for gib in (80.0, 40.0)
    )
    asked = [engine.rows(20_000, 512) for engine in (whole, half)]
    assert asked == [
        int((0.9 * gib * 2**30 - weight_bytes(SMALL)) / (kv_token_bytes(SMALL) * 20_000))
        for gib in (80, 40)
    ]
    assert scaling.generate_seconds(
        half, replace(WORK, prompt_tokens=19_000), CompletionLengths(1000, 1000, 1e-6), 16
    ) > scaling.generate_seconds(
        whole, replace(WORK, prompt_tokens=19_000), CompletionLengths(1000, 1000, 1e-6), 16
    )


def test_training_by_hand() -> None:
    lengths = CompletionLengths(1000, 1000, 1e-9)
    work = replace(WORK, passes=1)
    one = roofline.train_seconds(SMALL, H100, work)
    assert scaling.train_seconds(
        SMALL, GpuCluster(H100, 8), work, lengths, 8, 16384
    ) == pytest.approx(one / 8)
    # small micro-batches between nodes: the network is the limit
    moved = SMALL.parameters() * 2 * 4 / (0.8 * 50e9)
    rounds = math.ceil(2048 * 1128 / 64 / 512)
    assert scaling.train_seconds(
        SMALL, GpuCluster(H100, 64), work, lengths, 64, 512
    ) == pytest.approx(rounds * moved)
    long = CompletionLengths(
        1000, 30_000, 0.8
    )  # 2048 rows on 1024 GPUs: one of them has the longest
    found = scaling.train_seconds(SMALL, GpuCluster(H100, 1024), work, long, 1024, 10**9)
    assert found == pytest.approx(one / 1024 * (128 + long.longest(2048)) * 1024 / work.tokens)
    assert (
        scaling.train_seconds(SMALL, GpuCluster(H100, 1024), work, long, 1024, 10**9, updates=4)
        > 2 * found
    )


def test_layouts_add_up() -> None:
    cluster = GpuCluster(H100, 64)
    lengths = CompletionLengths(1000, 4096)
    together = simulate(SMALL, cluster, WORK, lengths, ClusterLayout())
    assert together.seconds == pytest.approx(
        together.generate + together.train + together.sync + 1.0
    )
    assert together.tokens_per_gpu == pytest.approx(2048 * 1128 / together.seconds / 64)
    apart = simulate(SMALL, cluster, WORK, lengths, ClusterLayout(32))
    assert apart.seconds > together.seconds  # half of the GPUs wait all the time
    for s in (1, 2, 4):
        found = simulate(SMALL, cluster, WORK, lengths, ClusterLayout(32, s))
        assert found.seconds == pytest.approx(max(found.generate, found.train) + found.sync + 1.0)
        steady = scaling.steady_seconds(ReplicaTimes(SMALL, cluster, 1), WORK, lengths, 32, s)
        assert found.generate == pytest.approx(max(steady, apart.generate / s))
        assert simulate(
            SMALL, cluster, WORK, lengths, ClusterLayout(32, s, partial=True)
        ).generate == pytest.approx(steady)
        assert found.train == apart.train
    doubled = simulate(
        SMALL, cluster, WORK, lengths, ClusterLayout(), ratios=PhaseRatios(2.0, 3.0, 0.0)
    )
    assert doubled.seconds == pytest.approx(
        2 * together.generate + 3 * together.train + together.sync
    )
    steps = [simulate(SMALL, cluster, WORK, lengths, layout) for layout in layouts(cluster, 1)]
    picked = best(steps)
    assert picked.seconds <= 1.03 * min(s.seconds for s in steps) and len(steps) == 1 + 7 * 4


def test_replicas_hold_the_model() -> None:
    big = ModelFacts(80, 8192, 28672, 64, 8, 128, 128256, False)
    assert scaling.replica(SMALL, H100) == 1 and scaling.replica(big, H100) == 4
    assert {layout.engines % 4 for layout in layouts(GpuCluster(H100, 64), 4)} == {0}


# ---- the command ----


@pytest.fixture
def config(tmp_path: Path) -> Path:
    shape = {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(shape))
    raw = {
        "model": {"path": str(tmp_path / "model")},
        "algorithm": {"name": "grpo", "group_size": 16},
        "data": {"source": "arithmetic:chain"},
        "rewards": [{"name": "exact_number"}],
        "rollout": {"max_new_tokens": 2048},
        "train": {"steps": 1, "prompts_per_step": 64},
        "run": {"dir": "r"},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(raw))
    return tmp_path / "c.yaml"


def test_a_run_is_the_measure(config: Path, tmp_path: Path) -> None:
    """On the run's own devices the plan gives back what the run took; elsewhere the ratios stay."""
    run = tmp_path / "run"
    run.mkdir()
    lines: list[dict[str, Any]] = [
        {
            "step": 1,
            "time/generate": 500.0,
            "time/train": 500.0,
            "response/length": 1.0,
            "response/max_length": 1.0,
        }
    ]
    lines += [
        {
            "step": i,
            "time/generate": 60.0,
            "time/train": 70.0,
            "time/annotate": 10.0,
            "time/prepare": 1.0,
            "time/other": 2.0,
            "response/length": 600.0,
            "response/max_length": 1800.0,
        }
        for i in (2, 3, 4)
    ]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    prediction = {
        "machine": {"name": "NVIDIA H100 80GB HBM3", "kind": "cuda"},
        "rates": {"devices": 8},
        "assumed": {"prompt_tokens": 200},
    }
    (run / "prediction.json").write_text(json.dumps(prediction))
    seen = measured_of(run)
    assert (seen.devices, seen.generate, seen.train, seen.fixed, seen.length) == (
        8,
        60.0,
        80.0,
        3.0,
        600.0,
    )
    plan = plan_cluster(load_config(config), [8, 64], run=run)
    step = plan.steps[8][0]
    assert step.layout.name == "colocated" and (step.generate, step.train) == pytest.approx(
        (60.0, 80.0)
    )
    assert step.seconds == pytest.approx(143 + step.sync)
    assert 10.0 <= plan.steps[64][0].train < 80 and 60.0 / 8 < plan.steps[64][0].generate < 60
    (run / "config.json").write_text(json.dumps({"rollout": {"staleness": 1}}))
    with pytest.raises(InputError, match="generated while it trained"):
        measured_of(run)
    (run / "config.json").unlink()
    prediction["rates"]["engines"] = 4  # type: ignore[index]
    (run / "prediction.json").write_text(json.dumps(prediction))
    steps = {
        step.layout.name: step
        for step in plan_cluster(load_config(config), [12], run=run).steps[12]
        if step.layout.engines in (0, 4)
    }
    assert steps["split"].layout.engines == 4 and (
        steps["split"].generate,
        steps["split"].train,
    ) == pytest.approx((60.0, 80.0))
    prediction["machine"]["kind"] = "cpu"  # type: ignore[index]
    (run / "prediction.json").write_text(json.dumps(prediction))
    with pytest.raises(InputError, match="was not measured on a GPU"):
        measured_of(run)


def test_the_command_needs_no_torch(config: Path) -> None:
    code = (
        "import sys; from reinforge.cli.main import main; from reinforge.plan import plan;"
        " plan.worker_report = lambda *a, **k: {'summary': {'prompt_tokens': {'median': 9}}};"
        f" code = main(['plan', {str(config)!r},"
        " '--cluster', '--gpus', '8..64', '--json']); assert 'torch' not in sys.modules;"
        " sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["assumed"]["prompt tokens"] == "9, median of the rows"
    assert list(found["clusters"]) == ["8", "16", "32", "64"]
    seconds = [found["clusters"][n]["best"]["seconds"] for n in found["clusters"]]
    assert seconds == sorted(seconds, reverse=True)


def test_what_was_assumed_is_told(config: Path) -> None:
    loaded = load_config(config)
    for given, length, said in (
        ({}, "1024 on average, at most 2048", "256, a guess"),
        ({"prompt": 9.0, "length": 700.0}, "700 on average, at most 2048", "9, median of the rows"),
    ):
        assumed = plan_cluster(loaded, [8], **given).assumed
        assert assumed["prompt tokens"] == said
        assert assumed["completion tokens"].startswith(length)
        assert ("`plan` alone counts 2048" in assumed["completion tokens"]) is (not given)
        assert "the network" in assumed["in each step"]


def test_of_equal_layouts_the_colocated_one_is_taken() -> None:
    """As they are for a tiny model, whose step is what hands weights over and scores."""
    tiny = ModelFacts(2, 64, 128, 4, 2, 16, 128, True)
    cluster = GpuCluster(H100, 64)
    work = StepWork(256, 6, 3, group=8)
    steps = [
        simulate(tiny, cluster, work, CompletionLengths(3, 6), layout)
        for layout in layouts(cluster, 1)
    ]
    fastest = min(steps, key=lambda step: step.seconds)
    assert fastest.layout.engines > 0 and best(steps).layout.name == "colocated"


@pytest.mark.parametrize(
    ("changes", "told"),
    [({"gpu": "Abacus"}, "no GPU 'Abacus'"), ({"run": Path("nowhere")}, "no run directory")],
)
def test_refusals(config: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        plan_cluster(load_config(config), [8], **changes)
    with pytest.raises(InputError, match="generates nothing"):
        plan_cluster(load_config(config, ["algorithm.name=sft", "rewards=[]"]), [8])


def test_published_step_times() -> None:
    """docs/scale.md quotes these: the constants are from one GPU, none is fitted to a row."""
    made = runpy.run_path(str(ROOT / "benchmarks" / "published_steps.py"))
    nemo = made["nemo"]()
    verl = made["verl"](within=True)
    assert (
        median(abs(a / b - 1) for *_, a, b in nemo) < 0.15
        and max(abs(a / b - 1) for *_, a, b in nemo) < 0.5
    )
    assert median(abs(a / b - 1) for *_, a, b in verl) < 0.3
    page = (ROOT / "docs" / "scale.md").read_text()
    for rows in (nemo, verl, made["verl"](within=False)):
        assert all(
            line in page for line in made["table"](rows).splitlines() if line.startswith("| ")
        ), "run benchmarks/published_steps.py"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("8,abc", "'abc' is not a number"),
        ("8,16x", "'16x' is not a number"),
        ("8,0,16", "'0' is not a number"),
        ("", "'' is not a number"),
        ("0..8", "'0' is not a number"),
        ("64..8", r"the span 64\.\.8 ends before it begins"),
    ],
)
def test_what_is_no_number_of_gpus_is_named(text: str, error: str) -> None:
    with pytest.raises(InputError, match=f"--gpus: {error}.*8,24,64 or 8"):
        gpu_counts(text)
    assert gpu_counts("8, 24") == [8, 24] and gpu_counts("5..21") == [5, 10, 20]
