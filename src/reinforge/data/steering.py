"""Attributes of an answer, written into its prompt (SteerLM, 2310.05344): the model is trained on
what answers were graded, and later asked for the grades that are wanted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from reinforge.core.errors import InputError
from reinforge.data.preference import grade

if TYPE_CHECKING:
    from reinforge.config.data import AttributesConfig

PLACE = "attributes"  # what a template calls them


def written(rules: AttributesConfig, record: Mapping[str, Any], where: str) -> str:
    """`helpfulness:4,verbosity:2`: whole numbers between the ends of the scale. What a row was not
    given is left out.
    """
    said = []
    for name in rules.names:
        value = grade(record, name, where)
        if value is not None:
            said.append(f"{name}:{quantised(value, rules.lowest, rules.highest)}")
    if not said:
        asked = f"{rules.names[0]}={rules.highest}"
        raise InputError(
            f"has none of the attributes {', '.join(rules.names)}, only"
            f" {', '.join(map(str, record)) or 'no column at all'}",
            where=where,
            fix=(
                "Grade the answers with `reinforge score`, or say what is asked for: data.fixed, or"
                f" `reinforge generate --fixed {asked}`."
            ),
        )
    return ",".join(said)


def quantised(value: float, lowest: int, highest: int) -> int:
    """The nearest whole number of the scale; halves go up.

    >>> [quantised(x, 0, 4) for x in (-0.3, 1.49, 1.5, 2.5, 4.8)]
    [0, 1, 2, 3, 4]
    """
    return min(max(math.floor(value + 0.5), lowest), highest)


def steered(
    prompt: str | list[dict[str, Any]], line: str, turn: str, where: str
) -> str | list[dict[str, Any]]:
    """The prompt, or the whole conversation, with the attributes of its last answer."""
    if isinstance(prompt, str) and turn == "user":
        return f"{prompt}\n{line}"
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if turn == "system" and messages[0]["role"] != "system":
        return [{"role": "system", "content": line}, *messages]
    places = [i for i, message in enumerate(messages) if message["role"] == turn]
    if not places:
        raise InputError(
            f"has no turn of the {turn}, where its attributes would stand",
            where=where,
            fix="Set data.attributes.turn to system.",
        )
    last = messages[places[-1]]
    messages[places[-1]] = {**last, "content": f"{last['content']}\n{line}"}
    return messages
