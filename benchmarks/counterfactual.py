"""One step of a run with other settings, on the same answers: how alike is what it would have
learned?

    python benchmarks/counterfactual.py [--out benchmarks/results/counterfactual.json]
                                        [--plot docs/plots/counterfactual.svg]

GRPO on short sums with the small model of `reinforge tiny`, 20 steps. Step 15 is done again with
each of the changes below; the cosine is between the original update of the weights and the changed
one. docs/replay.md goes through one of them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

import plots  # noqa: E402

from reinforge.build.counterfactual import counterfactual  # noqa: E402
from reinforge.build.replay import plan_replay  # noqa: E402
from reinforge.build.run import train_config  # noqa: E402
from reinforge.cli.counterfactual import print_counterfactual  # noqa: E402
from reinforge.cli.main import main as main_command  # noqa: E402
from reinforge.config.load import load_config  # noqa: E402
from reinforge.loops.view import NoView  # noqa: E402

STEPS = 20
STEP = 15
TOLD = "algorithm.name=dr_grpo"  # whose page is printed
CHANGES = (
    ("algorithm.clip.high=0.1",),
    ("train.learning_rate=6e-4",),
    ("algorithm.name=rloo",),
    (TOLD,),
    ("algorithm.kl.coefficient=0.1",),
    ("algorithm.minibatches=4",),
    ("algorithm.epochs=4",),
    ("rewards.0.weight=-1",),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/counterfactual.json")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs/plots/counterfactual.svg")
    asked = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "tiny"
        main_command(["tiny", str(model)])
        settings = [f"model.path={model}", f"run.dir={folder / 'run'}", f"train.steps={STEPS}"]
        config = load_config(ROOT / "recipes/algorithms/grpo.yaml", settings)
        train_config(config, view=NoView())
        plan = plan_replay(folder / "run", STEP)
        for changes in CHANGES:
            result = counterfactual(plan, changes)
            found[" ".join(changes)] = {
                "cosine": result.cosine,
                "equal": result.equal,
                "update_lengths": result.norms,
                "grad_norms": [m["train/grad_norm"] for m in result.metrics],
                "largest_change_of_an_advantage": result.samples[0].advantages,
            }
            print(f"{' '.join(changes)}: cosine {result.cosine}, lengths {result.norms}")
            if changes == (TOLD,):
                print_counterfactual(result)
    asked.out.write_text(json.dumps({"step": STEP, "steps": STEPS, "changes": found}, indent=1))
    plots.bars(
        {name: (one["cosine"], one["cosine"], one["cosine"]) for name, one in found.items()},
        f"Step {STEP} of a GRPO run with one setting changed, on the same answers",
        "cosine between the original update of the weights and the changed one",
        asked.plot,
    )


if __name__ == "__main__":
    main()
