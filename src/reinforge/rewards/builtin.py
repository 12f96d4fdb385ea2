"""The built-in rewards that are plain functions, by name."""

from __future__ import annotations

from collections.abc import Callable

from reinforge.rewards import form, verifiable

FUNCTIONS: dict[str, Callable[..., list[float | None]]] = {
    **verifiable.FUNCTIONS,
    "tags": form.tags,
    "tag_count": form.tag_count,
    "cosine_length": form.cosine_length,
    "repetition": form.repetition,
    "language": form.language,
}
