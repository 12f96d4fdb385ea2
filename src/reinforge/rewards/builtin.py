"""The built-in rewards that are plain functions, by name."""

from __future__ import annotations

from collections.abc import Callable

from reinforge.rewards import format_rewards, verifiable

FUNCTIONS: dict[str, Callable[..., list[float | None]]] = {
    **verifiable.FUNCTIONS,
    "tags": format_rewards.tags,
    "tag_count": format_rewards.tag_count,
    "cosine_length": format_rewards.cosine_length,
    "repetition": format_rewards.repetition,
    "language": format_rewards.language,
}
