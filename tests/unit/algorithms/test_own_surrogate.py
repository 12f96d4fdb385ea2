"""A surrogate of the user's own: its mistakes are told as theirs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.tiny_runs import launch, lines
from reinforge.config.schema import Config
from reinforge.core.errors import InputError

GOOD = "    ratio = (logprobs - old).exp()\n    return -ratio * advantages, {'ratio': ratio}"
BAD = {
    "raises": (
        "    x = 1\n    return undefined, {}",
        r"algorithm\.surrogate: .*raised NameError.*\(parts\.py:4\)",
    ),
    "a scalar": (
        "    return -(logprobs * advantages).mean(), {}",
        r"losses of shape \(\) for \d+ tokens.*one loss per token",
    ),
    "no metrics": ("    return -logprobs * advantages", r"returned a Tensor.*\(losses, metrics\)"),
}


def written(folder: Path, body: str) -> str:
    file = folder / "parts.py"
    file.write_text(
        f"import torch\n\ndef mine(logprobs, old, advantages, sequence):\n{body}\n".replace(
            "\n\ndef", "\ndef"
        )
    )
    return f"algorithm.surrogate={file}:mine"


@pytest.mark.parametrize("name", BAD)
def test_mistakes_name_the_key_and_the_line(
    make: Callable[..., Config], tmp_path: Path, name: str
) -> None:
    body, said = BAD[name]
    with pytest.raises(InputError) as error:
        launch(make("run", "grpo", written(tmp_path, body), "train.steps=1"))
    assert re.search(said, str(error.value), re.S), error.value


def test_one_that_is_right_trains(make: Callable[..., Config], tmp_path: Path) -> None:
    cfg = make("run", "grpo", written(tmp_path, GOOD), "train.steps=1")
    launch(cfg)
    assert lines(cfg)[0]["train/grad_norm"] > 1e-3
