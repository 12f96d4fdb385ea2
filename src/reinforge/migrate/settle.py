"""A draft loses what our rules refuse, each with the rule's own words, until it is a
configuration.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from reinforge.config.rules.check import problems
from reinforge.config.sections import Sections
from reinforge.migrate.draft import Draft

MAX_ROUNDS = 40
# sections that may go as a whole; of others single keys only
WHOLE = {"engine", "critic", "rewards", "teacher", "adapter", "agent", "ptx"}


def settle(draft: Draft) -> None:
    for _ in range(MAX_ROUNDS):
        refused = _refused(draft.tree)
        if not any(_leave_out(draft, key, why) for key, why in refused):
            return  # a configuration, or one that needs what only its owner knows


def _refused(tree: dict[str, Any]) -> list[tuple[str, str]]:
    """(our key, why) of what is refused: values first, then what does not go together."""
    try:
        sections = Sections.model_validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        return [(_key(item["loc"]), item["msg"]) for item in error.errors()]
    return [(problem.key, f"{problem.why}; {problem.fix}") for problem in problems(sections)][:1]


def _key(place: tuple[str | int, ...]) -> str:
    """The dotted key up to the first item of a list, or a kind of value that pydantic tried."""
    names = []
    for part in place:
        if isinstance(part, int) or not part.isidentifier():
            break
        names.append(part)
    return ".".join(names)


def _leave_out(draft: Draft, key: str, why: str) -> bool:
    if "." not in key and key not in WHOLE:
        return False
    while not draft.drop(key):
        if key.count(".") < 2:
            return False
        key = key.rpartition(".")[0]
    for note in list(draft.made_of(key)):
        draft.tell(note.theirs, "missing", says=f"{key}: {why}")
    draft.defaults.pop(key, None)
    return True
