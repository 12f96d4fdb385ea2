"""`rollout.overlap` on a GPU: graphs are captured and replayed while another thread trains, and the
run is the one that it would be without. Skips without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers.tiny_runs import DATA, LORA, digest, launch, lines
from reinforge.config.schema import Config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("section", [{}, LORA], ids=["all weights", "an adapter"])
@pytest.mark.parametrize("deterministic", ["true", "auto"])
def test_the_run_is_the_one_without_it(
    make: Callable[..., Config], section: dict[str, Any], deterministic: str
) -> None:
    """Answers of unequal lengths, so that batches shrink and graphs of new sizes are captured."""
    found = {}
    for overlap in ("true", "false"):
        cfg = make(
            f"overlap-{overlap}",
            "grpo",
            "train.steps=6",
            "train.prompts_per_step=16",
            f"train.deterministic={deterministic}",
            "model.device=cuda",
            "rollout.kv_gib=0.25",
            "rollout.max_new_tokens=64",
            "rollout.staleness=1",
            f"rollout.overlap={overlap}",
            **section,
        )
        launch(cfg, data=DATA * 4)
        found[overlap] = digest(cfg), [line.get("train/loss") for line in lines(cfg)]
    assert found["true"] == found["false"]
