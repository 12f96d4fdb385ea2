"""What other libraries may not write onto the screen, and what we say in their place."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.paths import SRC
from helpers.toys import SilentView
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.run import train_config
from reinforge.config.schema import Config
from reinforge.core.sample import Row
from reinforge.data.units import one_sided
from reinforge.plan.preflight import PlanReport

pytestmark = pytest.mark.timeout(180)


def test_other_libraries_write_nothing_onto_the_screen(tmp_path: Path) -> None:
    """When weights are written and when they are read: no bars of transformers, in a process that
    asked for none to be hidden (those of downloads stay), and no DeepSpeed, which prints a warning
    when it is imported, for a run that does not use it.
    """
    metadata = tmp_path / "site" / "deepspeed-0.19.8.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.19.8\n")
    (tmp_path / "site" / "deepspeed").mkdir()
    (tmp_path / "site" / "deepspeed" / "__init__.py").write_text(
        "print('[WARNING] Setting accelerator to CPU')\nclass DeepSpeedEngine: ...\n"
    )
    code = """
import sys
from reinforge.models.tiny import make_tiny_model
from reinforge.config.model import ModelConfig
from reinforge.models.load import load_model
from huggingface_hub.utils import are_progress_bars_disabled
model = make_tiny_model(sys.argv[1], width=32, layers=2, heads=4, kv_heads=2, context=128)
load_model(ModelConfig(path=str(model)))
print(are_progress_bars_disabled())
"""
    outside = {
        key: value for key, value in os.environ.items() if key != "HF_HUB_DISABLE_PROGRESS_BARS"
    }
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "m")],
        env={**outside, "PYTHONPATH": f"{SRC}:{tmp_path / 'site'}"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert (
        done.returncode == 0
        and done.stdout == "False\n"
        and "it/s" not in done.stderr
        and "%|" not in done.stderr
    ), done.stderr


@pytest.mark.parametrize("label", [True, False])
def test_labels_that_all_say_the_same_are_told_when_training_and_planning(
    make: Callable[..., Config], label: bool
) -> None:
    rows = [{"prompt": f"{i}=", "completion": str(i), "label": label} for i in range(8)]
    view = SilentView()
    train_config(make("run", "kto", "train.steps=1", rewards=[]), CallerObjects(data=rows), view)
    words = f"all 8 answers are labelled {'good' if label else 'bad'}"
    assert any(words in text and text.startswith("warning: ") for text in view.messages)
    both = [{**row, "label": i % 2 == 0} for i, row in enumerate(rows)]
    quiet = SilentView()
    train_config(make("both", "kto", "train.steps=1", rewards=[]), CallerObjects(data=both), quiet)
    assert not any("are labelled" in text for text in quiet.messages)

    from reinforge.plan.data_checks import _check_labels

    for data, expected in ((rows, 1), (both, 0)):
        report = PlanReport()
        _check_labels(
            make("plan", "kto", rewards=[]),
            [Row(str(i), row["prompt"], dict(row)) for i, row in enumerate(data)],
            report,
        )
        assert len(report.warnings) == expected and all(words in text for text in report.warnings)


def test_a_pair_has_a_good_and_a_bad_answer() -> None:
    assert (
        one_sided([Row("a", "p", {"chosen": "x", "rejected": "y"})]) is None
        and one_sided([]) is None
    )
