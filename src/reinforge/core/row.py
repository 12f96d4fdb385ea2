"""What goes into an episode, and how one ends.

No torch here: environments that run in another interpreter import this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Stop(StrEnum):
    """Why a completion ended. Truncation is decided by this, never by looking at the last token."""

    EOS = "eos"  # a stop token or stop string
    LENGTH = "length"  # the token limit: truncated
    ENVIRONMENT = "environment"  # the environment ended the episode
    ERROR = "error"  # cancelled or failed: never trained


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a data set: a prompt and its columns. `data/` makes it, rollouts play it, rewards
    get its columns. `id` is stable across epochs, shuffles and resumes.
    """

    id: str
    prompt: str | list[dict[str, Any]]  # text, or chat messages
    # everything else: answer, tools, metadata
    columns: Mapping[str, Any] = field(default_factory=dict)
    # where it was read, e.g. rows.jsonl:3
    place: str = field(default="", compare=False, repr=False)

    @property
    def where(self) -> str:
        """For errors: its id, and the line of the file that somebody has to look at."""
        return f"row {self.id} ({self.place})" if self.place else f"row {self.id}"


def prompt_text(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """A prompt to read: of messages each with its role."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{m.get('role', '?')}: {m.get('content', '')}" for m in prompt)
