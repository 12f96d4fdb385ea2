"""Conversations of several turns as a table: who said what, which tools were called and what they
answered, before and after training.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reinforge.core.html import escape

EPISODES = 4  # of each time
MESSAGES = 64  # of an episode that are kept
WIDTH = 600  # characters of a message in the table
KEPT = 8000  # ... in the log

Turn = dict[str, Any]  # role, text, calls: [[name, arguments], ...], name: of the tool that answers


def turns_of(messages: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """A conversation as it is logged.

    Of a long one the beginning and the end are kept, and what is missing is said.
    """
    lost = len(messages) - MESSAGES
    if lost > 0:
        half = MESSAGES // 2
        return [
            *map(_turn, messages[:half]),
            {"role": "", "text": f"({lost} messages are not shown)"},
            *map(_turn, messages[-half:]),
        ]
    return list(map(_turn, messages))


def _turn(message: Mapping[str, Any]) -> Turn:
    content = message.get("content")
    text = (
        ""
        if content is None
        else (
            content
            if isinstance(content, str)
            else json.dumps(content, ensure_ascii=False, default=str)
        )
    )
    thought = message.get("thinking")
    calls = [
        [str(c["function"].get("name")), _arguments(c["function"].get("arguments"))]
        for c in message.get("tool_calls") or []
        if isinstance(c, Mapping) and isinstance(c.get("function"), Mapping)
    ]
    found = {
        "role": str(message.get("role") or "?"),
        "text": cut(f"{f'({thought}) ' if thought else ''}{text}", KEPT),
    }
    return {
        **found,
        **({"name": str(message["name"])} if message.get("name") else {}),
        **({"calls": [[n, cut(a, KEPT)] for n, a in calls]} if calls else {}),
    }


def _arguments(value: Any) -> str:
    return (
        value
        if isinstance(value, str)
        else json.dumps(value or {}, ensure_ascii=False, default=str)
    )


def cut(text: str, width: int) -> str:
    """
    >>> cut("abcdef", 6), cut("abcdef", 4)
    ('abcdef', 'abcd … (2 more characters)')
    """
    return text if len(text) <= width else f"{text[:width]} … ({len(text) - width} more characters)"


def chosen(samples: Iterable[Mapping[str, Any]]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """The episodes to show: those of the first and of the last evaluation, or where none was
    recorded, of the first and the last step.
    """
    told = [s for s in samples if s.get("turns")]
    shown = [s for s in told if s.get("eval")] or told
    steps = list(dict.fromkeys(s.get("step") for s in shown))
    names = {
        step: f"after step {step}" if shown[0].get("eval") else f"step {step}" for step in steps
    }
    if shown and shown[0].get("eval") and steps[0] == 0:
        names[0] = "before training"
    return [
        (names[step], [s for s in shown if s.get("step") == step][:EPISODES])
        for step in dict.fromkeys((*steps[:1], *steps[-1:]))
    ]


def transcript_table(samples: Iterable[Mapping[str, Any]]) -> str:
    """HTML; nothing where no conversation was recorded.

    All that models, tools and data wrote is escaped.
    """
    parts = [(when, episode) for when, episodes in chosen(samples) for episode in episodes]
    if not parts:
        return ""
    head = (
        "<thead><tr><th>episode</th><th>turn</th><th>role</th><th>text</th><th>tool"
        " calls</th><th>reward</th><th>stop</th></tr></thead>"
    )
    body = "".join(_episode(when, episode) for when, episode in parts)
    return f"<h2>Transcripts</h2><div class=panel><table id=transcripts>{head}{body}</table></div>"


def _episode(when: str, episode: Mapping[str, Any]) -> str:
    turns = episode["turns"]
    rows = []
    number = 0
    for i, turn in enumerate(turns):
        own = turn.get("role") == "assistant"
        number += own
        first = (
            f'<td class=key rowspan="{len(turns)}">{escape(when)}<br>row'
            f" {escape(episode.get('row'))}</td>"
            if i == 0
            else ""
        )
        calls = "\n".join(f"{name} {arguments}" for name, arguments in turn.get("calls") or [])
        role = f"{turn.get('role')} ({turn['name']})" if turn.get("name") else turn.get("role")
        last = i == len(turns) - 1
        reward = episode.get("reward")
        scored = f"{reward:.4g}" if isinstance(reward, int | float) else "unscored"
        rows.append(
            f"<tr>{first}<td class=number>{number if own else ''}</td><td>{escape(role)}</td>"
            f"<td class=text><div>{escape(cut(str(turn.get('text') or ''), WIDTH))}</div></td>"
            f"<td class=text><div>{escape(cut(calls, WIDTH))}</div></td>"
            f"<td class=number>{scored if last else ''}</td>"
            f"<td>{escape(episode.get('stop')) if last else ''}</td></tr>"
        )
    return f"<tbody>{''.join(rows)}</tbody>"
