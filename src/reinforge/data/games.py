"""Rows for environments that bring their own task: row i says which game it is, and the environment
does the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from pydantic import Field, ValidationError

from reinforge.config.base import Count, Section
from reinforge.core.errors import InputError

PROMPTS = {
    "guess_number": (
        "Game {game}. I think of a number from {low} to {high}. Guess it: answer with a number"
        " only."
    )
}


class GameOptions(Section):
    """Options of `games:<name>`."""

    size: Count = Field(1000, description="Games.")
    seed: int = Field(0, description="The number of the first game.")
    prompt: str | None = Field(
        None,
        description=(
            "Text of every prompt. {game} is the game's number and must be in it; the environment"
            " fills in the rest."
        ),
    )


def parse(name: str, options: dict[str, Any]) -> GameOptions:
    if name not in PROMPTS and "prompt" not in options:
        raise InputError(
            f"there is no game {name!r}",
            where=f"games:{name}",
            fix=f"There are: {', '.join(PROMPTS)}; or give options.prompt.",
        )
    try:
        parsed = GameOptions.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(
            first["msg"],
            where=f"games:{name} options.{'.'.join(map(str, first['loc'][:1]))}",
            fix=f"Its options are: {', '.join(GameOptions.model_fields)}.",
        ) from None
    if parsed.prompt is not None and "{game}" not in parsed.prompt:
        raise InputError(
            "every game would have the same prompt",
            where=f"games:{name} options.prompt",
            fix="Put {game} into it.",
        )
    return parsed


def generate(name: str, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Games without end; the caller takes `options.size` of them."""
    parsed = parse(name, options)
    text = parsed.prompt or PROMPTS[name]
    return (
        {"prompt": text.replace("{game}", str(parsed.seed + i)), "game": parsed.seed + i}
        for i in count()
    )
