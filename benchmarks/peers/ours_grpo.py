"""reinforge's side of cpu_vs_trl.py, with the library's defaults. argv: model prompts cap steps
prompts_per_step group.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import reinforge
from reinforge.watch.runs import read_lines

model, prompts, cap, steps, per_step, group = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:7])


def reward(completions: list[str], **_: object) -> list[float]:
    return [float(len(c) % 7) for c in completions]


with tempfile.TemporaryDirectory() as folder:
    result = reinforge.train(
        model=model,
        data=[json.loads(line) for line in Path(prompts).read_text().splitlines()],
        rewards=[reward],
        algorithm="grpo",
        dir=folder,
        steps=steps,
        learning_rate=1e-6,
        max_new_tokens=cap,
        group_size=group,
        prompts_per_step=per_step,
        overrides=["run.checkpoint.every=0", "run.log.samples_every=0", "model.device=cpu"],
    )
    lines = [line for line in read_lines(result.run_dir / "metrics.jsonl") if "time/step" in line]
lengths = [line["response/length"] for line in lines]
phases = {k: lines[-1][k] for k in lines[-1] if k.startswith("time/")}
print(
    json.dumps(
        {
            "steps": [line["time/step"] for line in lines],
            "length": sum(lengths) / len(lengths),
            "phases": phases,
        }
    )
)
