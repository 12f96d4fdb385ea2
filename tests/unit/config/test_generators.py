"""Who generates where several ranks train: what `rollout.all_ranks: auto` means."""

from __future__ import annotations

from typing import Any

import pytest

from reinforge.config.load import config_from_dict
from reinforge.config.rules.generators import on_all_ranks, told
from reinforge.config.schema import Config
from reinforge.core.errors import InputError

RAY = {"cluster": {"kind": "ray"}}


def config(*overrides: str, **sections: Any) -> Config:
    raw: dict[str, Any] = {
        "model": {"path": "somewhere"},
        "algorithm": {"name": "grpo"},
        "data": {"source": "rows.jsonl"},
        "rewards": [{"name": "exact_number"}],
        "train": {"steps": 1, "backend": "fsdp"},
        "run": {"dir": "run"},
    }
    return config_from_dict({**raw, **sections}, overrides=overrides)


@pytest.mark.parametrize("sections", [{}, RAY], ids=["torchrun", "ray"])
def test_on_gpus_every_rank_generates(sections: dict[str, Any]) -> None:
    cfg = config(**sections)
    assert on_all_ranks(cfg, 8, "cuda") and not on_all_ranks(cfg, 1, "cuda")
    assert told(cfg, 8, "cuda") == (
        "each of the 8 ranks generates a share (rollout.all_ranks: auto)"
    )
    assert told(cfg, 1, "cuda") is None
    assert "where ranks have GPUs, and rank 0 elsewhere" in (told(cfg, None, None) or "")


@pytest.mark.parametrize(
    ("overrides", "device", "why"),
    [
        ((), "cpu", "ranks on CPUs share the cores"),
        (("env={name: calculator}",), "cuda", "a turn would wait"),
        (("sampling.over_provision=1.5",), "cuda", "answers of all ranks come together"),
        (("rollout.kept=other",), "cuda", "the rollouts of another run"),
    ],
)
def test_rank_0_generates_where_it_does_not_pay(
    overrides: tuple[str, ...], device: str, why: str
) -> None:
    cfg = config(*overrides)
    assert not on_all_ranks(cfg, 8, device)
    assert (told(cfg, 8, device) or "").startswith(f"rank 0 generates, because {why}")


def test_what_is_asked_for_is_done() -> None:
    every = config("rollout.all_ranks=true")
    first = config("rollout.all_ranks=false")
    assert on_all_ranks(every, 2, "cpu") and not on_all_ranks(first, 2, "cuda")
    assert told(every, 2, "cpu") == "each of the 2 ranks generates a share"
    assert told(first, 2, "cuda") == "rank 0 generates"


@pytest.mark.parametrize(
    "overrides",
    [
        ("train.backend=local",),
        ("rollout.engine=vllm",),
        ("cluster={kind: ray, layout: split}",),
        ("algorithm.name=sft", "rewards=[]"),
    ],
)
def test_nothing_to_choose(overrides: tuple[str, ...]) -> None:
    cfg = config(*overrides)
    assert not on_all_ranks(cfg, 8, "cuda") and told(cfg, 8, "cuda") is None


def test_ranks_do_not_generate_beside_engines_of_their_own() -> None:
    with pytest.raises(InputError, match="split layout engines have actors of their own"):
        config("rollout.all_ranks=true", "cluster={kind: ray, layout: split}")
