"""What depends on the clock or on the outside world is written down before it is used.

A judge or a user's function may answer differently when asked again, and which of many rollouts is done first may change. A step
that was cut and is done again reads the answers here, so it trains on the same groups with the same rewards. Scores are bound to
the exact tokens that were scored, a choice to the groups it was made among.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Scores = dict[str, list[float | None]]


def tokens_hash(completions: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(json.dumps([list(c) for c in completions]).encode()).hexdigest()[:32]


class Journal:
    """Append-only JSONL of (group, tokens hash, scores) and of (submitted groups, those that were done first). Without a path it
    remembers nothing."""

    def __init__(self, path: Path | None):
        self.path = path
        self._entries: dict[tuple[str, str], Scores] = {}
        self._choices: dict[tuple[str, ...], list[str]] = {}
        self._torn = False  # the file ends in the middle of a line, which the next entry must not continue
        if path is not None and path.exists():
            text = path.read_text()
            self._torn = not text.endswith("\n")
            for line in text.splitlines():
                try:
                    entry = json.loads(line)
                except json.JSONDecodeError:  # the line that a crash cut
                    continue
                if "submitted" in entry:
                    self._choices[tuple(entry["submitted"])] = entry["first"]
                else:
                    self._entries[entry["group"], entry["tokens"]] = entry["scores"]

    def find(self, group: str, tokens: str) -> Scores | None:
        return self._entries.get((group, tokens))

    def write(self, group: str, tokens: str, scores: Scores) -> None:
        if self.path is None or not scores:
            return
        self._entries[group, tokens] = scores
        self._append(self.path, {"group": group, "tokens": tokens, "scores": scores})

    def find_choice(self, submitted: Sequence[str]) -> list[str] | None:
        """Which of these groups a step took before it was cut."""
        return self._choices.get(tuple(submitted))

    def write_choice(self, submitted: Sequence[str], first: Sequence[str]) -> None:
        if self.path is None:
            return
        self._choices[tuple(submitted)] = list(first)
        self._append(self.path, {"submitted": list(submitted), "first": list(first)})

    def _append(self, path: Path, entry: dict[str, Any]) -> None:
        with path.open("a") as file:
            file.write("\n" * self._torn + json.dumps(entry) + "\n")
        self._torn = False

    def clear(self) -> None:
        """A checkpoint covers everything so far."""
        self._entries.clear()
        self._choices.clear()
        self._torn = False
        if self.path is not None:
            self.path.unlink(missing_ok=True)
