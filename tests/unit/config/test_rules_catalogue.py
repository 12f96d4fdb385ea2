"""What an algorithm's row brings along is found by its properties: a row under another name is
refused as its twin is.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from reinforge.algorithms.catalogue import TABLE
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.plan.preflight import preflight

PARTIAL = ("rollout.staleness=1", "rollout.partial=true", "sampling.over_provision=2.0")


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same algorithms under names that nobody knows."""
    monkeypatch.setitem(TABLE, "dapo_twin", TABLE["dapo"])  # type: ignore[arg-type]
    monkeypatch.setitem(TABLE, "rloo_twin", TABLE["rloo"])  # type: ignore[arg-type]


@pytest.mark.usefixtures("twins")
@pytest.mark.parametrize("name", ["dapo", "dapo_twin"])
def test_dynamic_sampling_is_never_dropped_in_silence(
    make: Callable[..., Config], name: str
) -> None:
    with pytest.raises(InputError, match=rf"rollout\.partial: {name} has dynamic sampling"):
        make("x", name, *PARTIAL)
    make("x", name, *PARTIAL, "algorithm.dynamic_sampling=false")
    with pytest.raises(InputError, match=r"rollout\.partial: grpo has dynamic sampling"):
        make("x", "grpo", *PARTIAL, "algorithm.dynamic_sampling=true")
    make("x", "grpo", *PARTIAL)


@pytest.mark.usefixtures("twins")
@pytest.mark.parametrize("name", ["rloo", "rloo_twin"])
def test_a_surrogate_without_a_ratio_is_known_by_its_row(
    make: Callable[..., Config], name: str
) -> None:
    assert any(
        "the surrogate reinforce has no ratio" in told
        for told in preflight(make("x", name, "rollout.staleness=1")).warnings
    )


@pytest.mark.parametrize("backend", ["deepspeed", "megatron"])
def test_a_reference_that_moves_by_itself_is_refused_where_it_cannot(
    make: Callable[..., Config], backend: str
) -> None:
    """tr_dpo and spin say in their rows that it moves; a config that says `frozen`-like defaults
    does not change that.
    """
    ranks = (f"train.backend={backend}", "train.ranks=2")
    for name in ("tr_dpo", "spin"):
        with pytest.raises(InputError, match=r"algorithm\.kl\.reference: .*follows the weights"):
            make("x", name, *ranks, rewards=[])
    make("x", "dpo", *ranks, rewards=[])


def test_what_moves_cannot_be_precomputed(make: Callable[..., Config]) -> None:
    with pytest.raises(
        InputError, match=r"train\.precompute_reference: tr_dpo has no frozen reference"
    ):
        make("x", "tr_dpo", "train.precompute_reference=true", rewards=[])
