"""What `tokens/processed` counts, and what its page says that it counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from helpers.tiny_runs import DATA, lines
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.run import train_config
from reinforge.config.schema import Config
from reinforge.loops.view import NoView

PAGE = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"


def first_prompt_only(completions: list[str], prompts: list[str]) -> list[float]:
    """Only the answers to one prompt differ in reward: those of the others teach nothing."""
    taught = prompts[0] == DATA[0]["prompt"]
    return [float(i) if taught else 0.0 for i in range(len(completions))]


def test_rows_without_a_gradient_are_not_counted_and_the_page_says_so(
    make: Callable[..., Config],
) -> None:
    processed = {}
    for skip in (True, False):
        name = f"skip-{skip}"
        cfg = make(name, "grpo", "train.steps=1", f"train.skip_idle={str(skip).lower()}")
        cfg = cfg.model_copy(update={"data": cfg.data.model_copy(update={"shuffle": False})})
        train_config(cfg, CallerObjects(data=DATA, rewards=[first_prompt_only]), NoView())
        processed[skip] = lines(cfg)[0]["tokens/processed"]
    assert 0 < processed[True] < processed[False]
    (row,) = [line for line in PAGE.read_text().splitlines() if "`tokens/processed` |" in line]
    assert "`train.skip_idle`" in row and "not counted" in row


def test_every_pass_counts_once_however_few_groups_there_are(make: Callable[..., Config]) -> None:
    """Of four minibatches two have a group: those that have none compute nothing."""
    processed = {}
    for minibatches, epochs in ((1, 1), (4, 1), (4, 2)):
        cfg = make(
            f"{minibatches}-{epochs}",
            "grpo",
            "train.steps=1",
            "train.prompts_per_step=2",
            "train.skip_idle=false",
            f"algorithm.minibatches={minibatches}",
            f"algorithm.epochs={epochs}",
        )
        train_config(cfg, CallerObjects(data=DATA, rewards=[first_prompt_only]), NoView())
        processed[minibatches, epochs] = lines(cfg)[0]["tokens/processed"]
    assert len(set(processed.values())) == 1, processed
