"""What an agent asked and what the model answered, as a tree of exact ids.

A call whose prompt continues an earlier answer hangs below it: its prompt is the ids so far, and
only what is new was tokenised. Any other call is a root. Every leaf becomes a training row. What
the model sampled is trained once: in rows that share an earlier answer, the first has it trained,
and for the others it is context.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from reinforge.core import routes
from reinforge.core.engine import Completion
from reinforge.core.env import Message
from reinforge.core.sample import Stop
from reinforge.data.dialogue import DialogueTokens
from reinforge.rollout.track import TokenTrack


@dataclass(eq=False)
class Turn:
    """One answer of the model in the conversation of an agent: what it continued, and what was
    sampled. A `Recording` keeps it.
    """

    parent: Turn | None
    # ids between the parent's end and the answer; without a parent the whole prompt
    given: list[int]
    completion: Completion
    dialogue: DialogueTokens | None = None  # as it was when the model was asked
    messages: list[Message] = field(default_factory=list)  # as the agent has them, this answer last
    tools: list[dict[str, Any]] | None = None
    answer: Message = field(default_factory=dict)  # the answer as the chat template has it
    # text completions: the prompt and the answer; None where the answer cannot be continued
    text: str | None = None
    ids: list[int] = field(init=False)  # everything up to the end of the answer

    def __post_init__(self) -> None:
        self.ids = [
            *(self.parent.ids if self.parent is not None else []),
            *self.given,
            *self.completion.tokens,
        ]

    @property
    def chain(self) -> list[Turn]:
        return [*(self.parent.chain if self.parent is not None else []), self]


class Recording:
    """The turns of one episode of an agent, in the order in which they were complete.
    `AgentSession` fills it; afterwards it becomes the samples that are trained.
    """

    def __init__(self) -> None:
        self.turns: list[Turn] = []

    def continued(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None
    ) -> Turn | None:
        """The turn whose conversation these messages continue with something new: the longest, and
        of equals one that was not continued before.
        """
        seen = [_spoken(m) for m in messages]
        found = [
            t
            for t in self.turns
            if t.messages
            and len(t.messages) < len(seen)
            and t.tools == tools
            and [_spoken(m) for m in t.messages] == seen[: len(t.messages)]
        ]
        return self._best(found, [len(t.messages) for t in found])

    def prefix(self, ids: Sequence[int]) -> Turn | None:
        """The longest turn whose ids these ids continue."""
        found = [
            t for t in self.turns if len(t.ids) < len(ids) and t.ids == list(ids[: len(t.ids)])
        ]
        return self._best(found, [len(t.ids) for t in found])

    def text_prefix(self, text: str) -> Turn | None:
        """The turn whose prompt and answer this text continues."""
        found = [
            t
            for t in self.turns
            if t.text is not None and len(t.text) < len(text) and text.startswith(t.text)
        ]
        return self._best(found, [len(t.text or "") for t in found])

    def _best(self, found: Sequence[Turn], lengths: Sequence[int]) -> Turn | None:
        parents = {id(t.parent) for t in self.turns}
        ranked = sorted(
            zip(lengths, found, strict=True),
            key=lambda item: (-item[0], id(item[1]) in parents, item[1].ids),
        )
        return ranked[0][1] if ranked else None

    def tracks(self) -> list[TokenTrack]:
        """A row for each leaf.

        Their order is a function of the ids: calls that ran at the same time may be complete in any
        order.
        """
        parents = {id(t.parent) for t in self.turns}
        leaves = sorted((t for t in self.turns if id(t) not in parents), key=lambda t: t.ids)
        trained: set[int] = set()
        rows = []
        for leaf in leaves:
            track = TokenTrack()
            for turn in leaf.chain:
                track.give(turn.given)
                if id(turn) in trained:
                    track.give(turn.completion.tokens)
                else:
                    track.take(turn.completion)
                    trained.add(id(turn))
            rows.append(track)
        return rows

    def record(self) -> list[dict[str, Any]]:
        """As JSON. Floats come back as they were."""
        places = {id(t): i for i, t in enumerate(self.turns)}
        return [
            {
                "parent": None if t.parent is None else places[id(t.parent)],
                "given": t.given,
                "tokens": t.completion.tokens,
                "logprobs": t.completion.logprobs,
                "versions": t.completion.versions,
                "stop": str(t.completion.stop),
                "routes": routes.to_json(t.completion.routes),
            }
            for t in self.turns
        ]

    @classmethod
    def restored(cls, record: Sequence[dict[str, Any]]) -> Recording:
        out = cls()
        for r in record:
            parent = None if r["parent"] is None else out.turns[r["parent"]]
            out.turns.append(
                Turn(
                    parent,
                    r["given"],
                    Completion(
                        r["tokens"],
                        r["logprobs"],
                        r["versions"],
                        Stop(r["stop"]),
                        routes.from_json(r.get("routes")),
                    ),
                )
            )
        return out


def _spoken(message: Message) -> tuple[str, ...]:
    """What a message says, for comparison.

    Agents strip answers and leave empty fields out; what the model said is still the same.
    """
    role = str(message.get("role"))
    content = message.get("content") or ""
    calls = [
        (c["function"]["name"], _canonical(c["function"].get("arguments")))
        for c in message.get("tool_calls") or []
    ]
    said = content.strip() if role == "assistant" and isinstance(content, str) else content
    return (
        role,
        said if isinstance(said, str) else _canonical(said),
        _canonical(calls),
        str(message.get("name") or ""),
    )


def _canonical(value: Any) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return value
    return json.dumps(value, sort_keys=True, default=str)
