"""From a teacher's completions to rows that can be trained on, and what was left out on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from reinforge.core.row import Row
from reinforge.core.sample import Stop
from reinforge.data.sources import normalised, prompt_text
from reinforge.offline.journal import LABELS, REQUEST, Line
from reinforge.offline.labels import PairRule, make_pairs, value_of
from reinforge.offline.question_answers import BadReply, read_pairs

TrainingRow = dict[str, Any]
SCORES: tuple[str, ...] = ("reward", "judge")


@dataclass
class DropCounts:
    """What was left out, by reason, with the first example of each. Whoever leaves something out
    counts it here; the manifest and the summary tell it.
    """

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, example: str) -> None:
        self.counts[reason] += 1
        self.examples.setdefault(reason, example)


@dataclass(frozen=True)
class Selection:
    """Which answers are kept, of those that have text."""

    at_least: float | None = None  # the lowest score
    best: int | None = None  # how many of a prompt
    keep_cut: bool = False  # also those that ran into the token limit


def distinct_rows(rows: Sequence[Row], drops: DropCounts) -> list[Row]:
    """The rows without those that ask what an earlier one asks."""
    seen: set[str] = set()
    left = []
    for row in rows:
        key = _key(prompt_text(row), str(row.columns.get("tools")))
        if key in seen:
            drops.add("repeated prompt", row.where)
            continue
        seen.add(key)
        left.append(row)
    return left


def answer_rows(
    lines: Sequence[Line], rule: Selection, drops: DropCounts, *, chat: bool
) -> list[TrainingRow]:
    """Rows of SFT: conversations that end with an answer, or prompts of text and completions."""
    made: list[TrainingRow] = []
    for group in _groups(lines):
        left: list[tuple[int, Line]] = []
        seen: set[str] = set()
        for i, line in enumerate(group):
            key = _key(line["completion"])
            reason = _unusable(line, rule) or _rejected(line, rule)
            if reason is None and key in seen:
                reason = "repeated answer"
            if reason is not None:
                drops.add(reason, _example(line))
                continue
            seen.add(key)
            left.append((i, line))
        for i, line in _best(left, rule, drops):
            name = line["id"] if len(group) == 1 else f"{line['id']}-{i}"
            scores = {name: line[name] for name in SCORES if name in line and LABELS in line}
            row = _conversation(line["prompt"], line["completion"], chat=chat)
            tools = {"tools": line["tools"]} if line.get("tools") else {}
            made.append({"id": name, **row, **tools, **scores})
    return made


def question_rows(
    lines: Sequence[Line], most: int, rule: Selection, drops: DropCounts, *, chat: bool
) -> list[TrainingRow]:
    """Rows of SFT from replies with questions and answers, `most` of each reply."""
    made: list[TrainingRow] = []
    seen: set[str] = set()
    for line in lines:
        if (reason := _unusable(line, rule)) is not None:
            drops.add(reason, _example(line))
            continue
        try:
            pairs = read_pairs(line["completion"])
        except BadReply as error:
            drops.add(str(error), _example(line))
            continue
        for i, pair in enumerate(pairs):
            if isinstance(pair, BadReply):
                drops.add(str(pair), _example(line))
            elif i >= most:
                drops.add("too many", f"{line['document']}: {pair[0]}")
            elif _key(pair[0]) in seen:
                drops.add("repeated question", f"{line['document']}: {pair[0]}")
            elif not all(map(_is_text, pair)):
                drops.add("no text", _example(line))
            else:
                seen.add(_key(pair[0]))
                row = _conversation(*pair, chat=chat)
                origin = {name: line[name] for name in ("document", "start")}
                made.append({"id": f"{line['id']}-{i}", **row, **origin})
    return made


def pair_rows(
    lines: Sequence[Line], which: PairRule, margin: float, rule: Selection, drops: DropCounts
) -> list[TrainingRow]:
    """Rows of preference losses: `prompt`, `chosen`, `rejected`, `margin`."""
    made: list[TrainingRow] = []
    for group in _groups(lines):
        left = []
        for line in group:
            reason = _unusable(line, rule)
            if reason is None and value_of(line) is None:
                reason = "unscored"
            if reason is None:
                left.append(line)
            else:
                drops.add(reason, _example(line))
        pairs = make_pairs(left, which, margin)
        seen: set[str] = set()
        for pair in pairs:
            key = _key(pair["chosen"], pair["rejected"])
            if key in seen:
                drops.add("repeated pair", _example(group[0]))
            else:
                seen.add(key)
                made.append(pair)
        if not pairs:
            drops.add("no pair", _example(group[0]))
    return made


def _groups(lines: Sequence[Line]) -> Iterator[list[Line]]:
    """The lines of each prompt."""
    return (list(group) for _, group in groupby(lines, lambda line: line[REQUEST]))


def _unusable(line: Line, rule: Selection) -> str | None:
    """Why nobody should train on this answer, whatever it is worth."""
    if line["stop"] == Stop.ERROR:
        return "refused"
    if not line["completion"].strip():
        return "empty"
    if not _is_text(line["completion"]):
        return "no text"
    if line["stop"] == Stop.LENGTH and not rule.keep_cut:
        return "cut"
    return None


def _rejected(line: Line, rule: Selection) -> str | None:
    """Why an answer is not worth enough."""
    if rule.at_least is None and rule.best is None:
        return None
    value = value_of(line)
    if value is None:
        return "unscored"
    return "low score" if rule.at_least is not None and value < rule.at_least else None


def _best(
    found: list[tuple[int, Line]], rule: Selection, drops: DropCounts
) -> list[tuple[int, Line]]:
    """The best of a prompt, in their order; of equals the first."""
    if rule.best is None:
        return found
    ranked = sorted(found, key=lambda one: -(value_of(one[1]) or 0.0))
    for _, line in ranked[rule.best :]:
        drops.add("not best", _example(line))
    return sorted(ranked[: rule.best], key=lambda one: one[0])


def _conversation(prompt: str | list[TrainingRow], answer: str, *, chat: bool) -> TrainingRow:
    if not chat:
        return {"prompt": prompt, "completion": answer}
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return {"messages": [*asked, {"role": "assistant", "content": answer}]}


def _key(*texts: str) -> str:
    """Two texts with the same key are duplicates."""
    return "\x1f".join(normalised(text).casefold() for text in texts)


def _is_text(text: str) -> bool:
    """Half of a surrogate pair is no text, and no file can hold it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _example(line: Line) -> str:
    where = line.get("document") or f"row {line['id']}"
    said = normalised(line["completion"].encode("utf-8", "replace").decode())
    return f"{where}: {said!r}"
