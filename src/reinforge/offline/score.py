"""Completions that somebody has, scored by rewards, without a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from reinforge.core.aio import run_sync, together
from reinforge.core.errors import InputError
from reinforge.data.sources import rows_from
from reinforge.models.load import pick_device
from reinforge.rewards.build import GivenRewards, build_rewards, describe_rewards
from reinforge.rewards.function import check_columns
from reinforge.rollout.scoring import RewardScorer

COMPLETION = "completion"


def score_rows(
    rewards: GivenRewards, data: Iterable[Any], completions: Sequence[str] | None
) -> list[dict[str, float | None]]:
    """See `reinforge.score`."""
    rows = rows_from(data, name="data")
    found: Sequence[Any] = [row.columns.get(COMPLETION) for row in rows]
    texts: list[str] = list(found if completions is None else completions)
    if len(texts) != len(rows) or not all(isinstance(text, str) for text in texts):
        raise InputError(
            f"{len(rows)} rows, and not one completion for each.",
            where="completions",
            fix=f"Give a list of texts, or rows with the column `{COMPLETION}`.",
        )
    described, functions = describe_rewards(rewards)
    built = build_rewards(described, functions, str(pick_device("auto")))
    check_columns(built, rows)
    scorer = RewardScorer(built)

    async def asked() -> list[list[float | None]]:
        return await together([reward.score(rows, texts) for reward in built])

    scored = []
    for values in zip(*run_sync(asked()), strict=True):
        components = dict(zip([reward.name for reward in built], values, strict=True))
        counted, total = scorer.total(components, 0)
        scored.append({**counted, "reward": total})
    return scored
