"""What depends on the clock or on the outside world is written down before it is used.

A judge or a user's function may answer differently when asked again, and which of many rollouts is
done first may change. A step that was cut and is done again reads the answers here, so it trains on
the same groups with the same rewards. Scores are bound to the exact tokens that were scored, a
choice to the groups it was made among, an environment's answers to the actions they follow.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

Scores = dict[str, list[float | None]]


class Journal:
    """What happened in rollouts since the last checkpoint and cannot be asked again: scores of
    rewards that are not pure, which groups were done first, what environments said. Rollouts write
    it before they use it; a step that is done again after a crash reads it. A checkpoint clears it:
    what it held goes to the end of journal-past.jsonl beside it, for steps that are replayed.

    Append-only JSONL of (group, tokens hash, scores), of (submitted groups, those that were done
    first), and of episodes. Without a path it remembers nothing.
    """

    def __init__(self, path: Path | None):
        self.path = path
        self._entries: dict[str, dict[str, Scores]] = {}  # by group and tokens
        self._faults: dict[tuple[str, str], dict[str, int]] = {}
        self._choices: dict[tuple[str, ...], list[str]] = {}
        self._episodes: dict[str, dict[str, Any]] = {}
        # the file ends in the middle of a line, which the next entry must not continue
        self._torn = False
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
                elif "episode" in entry:
                    self._episodes[entry["episode"]] = entry["record"]
                else:
                    own = self._entries.setdefault(entry["group"], {})
                    own[entry["tokens"]] = entry["scores"]
                    self._faults[entry["group"], entry["tokens"]] = entry.get("faults", {})

    def knows(self, group: str) -> bool:
        """Whether there are scores of answers of a group, whatever those were."""
        return group in self._entries

    def find(self, group: str, tokens: str) -> Scores | None:
        return self._entries.get(group, {}).get(tokens)

    def faults(self, group: str, tokens: str) -> dict[str, int]:
        """Which of the scores were missing, and why: timeouts and crashes happened only once."""
        return dict(self._faults.get((group, tokens), {}))

    def write(
        self, group: str, tokens: str, scores: Scores, faults: Mapping[str, int] | None = None
    ) -> None:
        if self.path is None or not scores:
            return
        self._entries.setdefault(group, {})[tokens] = scores
        self._faults[group, tokens] = dict(faults or {})
        self._append(
            self.path,
            {
                "group": group,
                "tokens": tokens,
                "scores": scores,
                **({"faults": faults} if faults else {}),
            },
        )

    def find_choice(self, submitted: Sequence[str]) -> list[str] | None:
        """Which of these groups a step took before it was cut."""
        return self._choices.get(tuple(submitted))

    def write_choice(self, submitted: Sequence[str], first: Sequence[str]) -> None:
        if self.path is None:
            return
        self._choices[tuple(submitted)] = list(first)
        self._append(self.path, {"submitted": list(submitted), "first": list(first)})

    def find_episode(self, uid: str) -> dict[str, Any] | None:
        """What an environment answered in an episode, or how the episode failed."""
        return self._episodes.get(uid)

    def write_episode(self, uid: str, record: dict[str, Any]) -> None:
        if self.path is None:
            return
        self._episodes[uid] = record
        self._append(self.path, {"episode": uid, "record": record})

    def _append(self, path: Path, entry: dict[str, Any]) -> None:
        with path.open("a") as file:
            file.write("\n" * self._torn + json.dumps(entry) + "\n")
        self._torn = False

    def clear(self) -> None:
        """A checkpoint on disk covers everything so far."""
        self.seal()()

    def seal(self) -> Callable[[], None]:
        """A checkpoint that is being written covers everything so far; what comes back is to be
        called once it is on disk. Until then a crash needs all of it.
        """
        self._entries.clear()
        self._faults.clear()
        self._choices.clear()
        self._episodes.clear()
        path = self.path
        return partial(self._retire, path.stat().st_size if path and path.exists() else 0)

    def _retire(self, size: int) -> None:
        """The first `size` bytes go to the past."""
        if self.path is None or not self.path.exists():
            return
        content = self.path.read_bytes()
        with past_of(self.path).open("ab") as past:
            past.write(b"\n" + content[:size])
        if content[size:]:
            rest = self.path.with_name(f".{self.path.name}")
            rest.write_bytes(content[size:])
            rest.replace(self.path)
        else:
            self.path.unlink()
            self._torn = False


def past_of(journal: Path) -> Path:
    """Where the entries are that checkpoints have cleared. A crash in between leaves some twice,
    which does no harm: an entry is found by what it is of.
    """
    return journal.with_name(f"{journal.stem}-past.jsonl")
