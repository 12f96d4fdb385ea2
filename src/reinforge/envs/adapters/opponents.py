"""Who plays the other seats of a game.

random   one of the moves in square brackets that the newest board shows
first    the first of them: always the same
http://...    an OpenAI-compatible server, e.g. an earlier checkpoint under `reinforge serve`:
              self-play against a frozen self
file.py:function    (what it saw since its last move, a random.Random) -> its move
"""

from __future__ import annotations

import json
import random
import re
import urllib.request
from collections.abc import Callable
from typing import Any

from reinforge.core.errors import InputError
from reinforge.rewards.load import load_function

Opponent = Callable[[str, random.Random], str]  # one for each episode: it may remember
MOVE = re.compile(r"\[[^\[\]\n]{1,20}\]")
SECONDS = 120.0  # for the answer of a server


def opponent_of(name: str, where: str = "env.options.opponent") -> Opponent:
    if name in ("random", "first"):
        return lambda seen, rng: (
            moves_in(seen)[0] if name == "first" else rng.choice(moves_in(seen))
        )
    if name.startswith(("http://", "https://")):
        return ServerOpponent(name)
    if ":" in name:
        return load_function(name, where)
    raise InputError(
        f"there is no opponent {name!r}.",
        where=where,
        fix="There are: random, first, the URL of a server, file.py:function.",
    )


def moves_in(seen: str) -> list[str]:
    """The moves that the end of a text offers: those of the last line that has any."""
    for line in reversed(seen.splitlines()):
        if found := MOVE.findall(line):
            return [str(move) for move in found]
    raise ValueError(
        "the game shows no moves in square brackets: this opponent cannot play it; name a function"
        " instead"
    )


class ServerOpponent:
    """A chat with a model elsewhere."""

    def __init__(self, url: str):
        self.url = url.rstrip("/") + "/chat/completions"
        self.messages: list[dict[str, Any]] = []

    def __call__(self, seen: str, rng: random.Random) -> str:
        self.messages.append({"role": "user", "content": seen})
        body = {"model": "opponent", "messages": self.messages, "seed": rng.randrange(2**31)}
        request = urllib.request.Request(
            self.url, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=SECONDS) as response:
            answer = json.load(response)["choices"][0]["message"]
        self.messages.append({"role": "assistant", "content": answer["content"] or ""})
        return str(answer["content"] or "")
