"""The cost model of `plan --cluster` against step times that others have published.

One set of constants, nothing fitted to a row.

    python benchmarks/published_steps.py          # the tables of docs/scale.md

NeMo-RL: from the models' shapes and the hardware alone. Splits between engines and trainers are
those of its recipes. veRL: its 32-GPU rows are taken as the measured run (`plan --cluster --from`),
the others are predicted from them.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from reinforge.backends.roofline import StepWork
from reinforge.cluster.scaling import (
    ClusterLayout,
    CompletionLengths,
    GpuCluster,
    PhaseRatios,
    machine,
    simulate,
    train_seconds,
)
from reinforge.core.model_facts import ModelFacts

# v0.4 for the dense models
NEMO = "https://docs.nvidia.com/nemo/rl/0.6.0/about/performance-summary.html"
VERL = "https://verl.readthedocs.io/en/latest/advance/fully_async.html"
LLAMA_8B = ModelFacts(32, 4096, 14336, 32, 8, 128, 128256, False, checkpointing=True, compiled=True)
QWEN_32B = ModelFacts(64, 5120, 25600, 64, 8, 128, 151936, False, checkpointing=True, compiled=True)
QWEN_30B = ModelFacts(
    48,
    2048,
    768,
    32,
    4,
    128,
    151936,
    False,
    checkpointing=True,
    compiled=True,
    experts=128,
    active=8,
)
QWEN_235B = ModelFacts(
    94,
    4096,
    1536,
    64,
    4,
    128,
    151936,
    False,
    checkpointing=True,
    compiled=True,
    experts=128,
    active=8,
)
QWEN_7B = ModelFacts(28, 3584, 18944, 28, 4, 128, 152064, False, checkpointing=True, compiled=True)
# tokens; published tokens/s x time x GPUs / samples - completion length gives 100 to 130
PROMPT = 110

# model, version, facts, GPUs, engines (0: colocated), staleness, samples, mean length, cap, tensor
# parallel of the engine, published seconds
NEMO_ROWS = [
    ("Llama-3.1-8B", "0.4", LLAMA_8B, 16, 0, 0, 2048, 1060, 4096, 1, 97.7),
    ("Llama-3.1-8B", "0.4", LLAMA_8B, 16, 8, 1, 2048, 1129, 4096, 1, 74.6),
    ("Qwen3-32B", "0.4", QWEN_32B, 32, 0, 0, 2048, 3206, 4096, 4, 393.0),
    ("Qwen3-32B", "0.4", QWEN_32B, 64, 32, 1, 2048, 3207, 4096, 4, 215.0),
    ("Qwen3-30B-A3B", "0.6", QWEN_30B, 32, 0, 0, 2048, 3203, 4096, 2, 192.0),
    ("Qwen3-30B-A3B", "0.6", QWEN_30B, 32, 16, 1, 2048, 3201, 4096, 2, 152.0),
    ("Qwen3-30B-A3B", "0.6", QWEN_30B, 192, 64, 8, 2048, 3206, 4096, 2, 34.5),
    ("Qwen3-235B-A22B", "0.6", QWEN_235B, 128, 0, 0, 512, 5698, 8192, 16, 395.0),
    ("Qwen3-235B-A22B", "0.6", QWEN_235B, 256, 0, 0, 512, 5713, 8192, 16, 312.0),
    ("Qwen3-235B-A22B", "0.6", QWEN_235B, 256, 128, 1, 512, 5721, 8192, 8, 231.0),
]
# GPUs, engines, staleness, published step, generation, log-probs + update
VERL_ROWS = [
    (32, 0, 0, 790.10, 357.41, 107.71 + 313.81),
    (64, 0, 0, 365.28, 150.72, 70.26 + 133.41),
    (128, 0, 0, 356.30, 177.85, 53.92 + 113.81),
    (32, 16, 1, 294.77, None, 269.80),
    (64, 32, 1, 189.26, None, 156.98),
    (128, 64, 1, 150.63, None, 113.16),
]


def nemo() -> list[tuple[str, int, str, float, float]]:
    """(model, GPUs, layout, predicted, published).

    Group of 32, reference and old log-probs (its recipes have a KL term).
    """
    found = []
    for name, _, facts, gpus, engines, stale, samples, mean, cap, tensor, published in NEMO_ROWS:
        work = StepWork(samples, PROMPT, mean, group=32, passes=2, max_batch=1024)
        step = simulate(
            facts,
            GpuCluster(machine("H100"), gpus),
            work,
            CompletionLengths(mean, cap),
            ClusterLayout(engines, stale, tensor),
            updates=samples // 512,
        )
        found.append((name, gpus, step.layout.name, step.seconds, published))
    return found


def verl(within: bool) -> list[tuple[str, int, str, float, float]]:
    """8,192 samples of at most 28k tokens, 512 to an optimizer batch.

    Their mean is not published: it is the one at which the model's training takes as long as the
    measured update; its log-prob pass is skipped in the asynchronous mode. `within`: asynchronous
    rows from the asynchronous 16 + 16 GPUs.
    """
    h20 = machine("H20")
    cap = 28 * 1024
    first = VERL_ROWS[0]
    work = StepWork(8192, PROMPT, 0, group=16, passes=1, max_batch=1024)
    low = 100.0
    high = float(cap)
    for _ in range(20):
        mean = (low + high) / 2
        took = train_seconds(
            QWEN_7B,
            GpuCluster(h20, 32),
            replace(work, new_tokens=mean),
            CompletionLengths(mean, cap),
            32,
            16384,
            16,
        )
        low, high = (mean, high) if took < first[5] else (low, mean)
    lengths = CompletionLengths(round(mean), cap)
    base = simulate(QWEN_7B, GpuCluster(h20, 32), work, lengths, ClusterLayout(), updates=16)
    ratios = PhaseRatios(
        first[4] / base.generate,
        first[5] / base.train,
        max(0.0, first[3] - first[4] - first[5] - base.sync),
    )
    anchor = next(row for row in VERL_ROWS if row[2])
    alone = simulate(
        QWEN_7B,
        GpuCluster(h20, anchor[0]),
        replace(work, passes=0),
        lengths,
        ClusterLayout(anchor[1], 1, partial=True),
        updates=16,
    )
    found = []
    for row in VERL_ROWS[1:]:
        gpus, engines, stale, published, _, _ = row
        if within and row == anchor:
            continue
        measured = replace(ratios, train=anchor[5] / alone.train) if within and stale else ratios
        step = simulate(
            QWEN_7B,
            GpuCluster(h20, gpus),
            replace(work, passes=0 if stale else 1),
            lengths,
            ClusterLayout(engines, stale, partial=bool(stale)),
            ratios=measured,
            updates=16,
        )
        found.append(("Qwen2.5-Math-7B", gpus, step.layout.name, step.seconds, published))
    return found


def table(rows: list[tuple[str, int, str, float, float]]) -> str:
    lines = [
        "| model | GPUs | layout | predicted s | published s | error |",
        "|---|--:|---|--:|--:|--:|",
    ]
    lines += [
        f"| {m} | {n} | {layout} | {a:.0f} | {b:.0f} | {a / b - 1:+.0%} |"
        for m, n, layout, a, b in rows
    ]
    errors = [abs(a / b - 1) for *_, a, b in rows]
    return "\n".join([*lines, f"\nmedian |error| {median(errors):.0%}, worst {max(errors):.0%}"])


if __name__ == "__main__":
    print(
        f"NeMo-RL ({NEMO})\n\n{table(nemo())}\n\nveRL ({VERL}), each mode from its own row of 32"
        f" GPUs\n\n{table(verl(within=True))}"
    )
    print(f"\nveRL, all from the synchronous row of 32 GPUs\n\n{table(verl(within=False))}")
