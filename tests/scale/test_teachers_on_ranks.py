"""A teacher's likeliest tokens of all rows, asked before the first step on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from helpers.tiny_runs import lines
from helpers.toys import SilentView
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.run import train_config
from reinforge.config.schema import Config
from reinforge.models.tiny import make_tiny_model

TEXTS = [{"prompt": f"{i}+{i}=", "completion": str(2 * i)} for i in range(16)]


@pytest.mark.long
@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
def test_all_ranks_ask_the_teacher_and_the_run_is_that_of_one_process(
    make: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory, backend: str
) -> None:
    if backend == "deepspeed":
        pytest.importorskip("deepspeed")
    size = {"width": 48, "layers": 2, "heads": 4, "kv_heads": 2, "context": 128}
    teacher = make_tiny_model(tmp_path_factory.mktemp("teacher") / "model", seed=7, **size)

    def losses(name: str, *overrides: str) -> list[Any]:
        sections = {"rewards": [], "teacher": {"path": str(teacher), "precompute": True}}
        options = "algorithm.options={k: 8, temperature: 2.0}"
        cfg = make(name, "topk", options, *overrides, **sections)
        train_config(cfg, CallerObjects(data=TEXTS), SilentView())
        return [line["distillation/loss"] for line in lines(cfg)]

    one = losses("one")
    two = losses("two", f"train.backend={backend}", "train.ranks=2")
    # sums of log-probs near 5, which float32 knows to 5e-7
    assert two == pytest.approx(one, abs=1e-7)
    assert one[0] - one[-1] > 1e-5
