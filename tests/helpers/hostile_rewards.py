"""Rewards that misbehave as their completions say.

Imports nothing heavy: worker processes import it.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import struct
import subprocess
import time
from pathlib import Path
from typing import Any

SEEN: list[str] = []


def obey(completions: list[str], **_: Any) -> list[float]:
    return [_obey(c) for c in completions]


def _obey(text: str) -> float:
    verb, _, rest = text.partition(" ")
    if verb == "hang":
        while True:
            pass
    elif verb == "sleep":
        time.sleep(float(rest))
    elif verb == "spawn":
        child = subprocess.Popen(["sleep", "1000"])
        Path(rest).write_text(str(child.pid))
        while True:
            pass
    elif verb == "exit":
        os._exit(0)
    elif verb == "segfault":
        ctypes.string_at(0)
    elif verb == "allocate":
        return float(len(bytearray(8 << 30)))
    elif verb == "flood":
        for _ in range(20_000):
            print("x" * 1000)
    elif verb == "raise":
        raise KeyError(rest)
    elif verb == "quit":
        raise SystemExit(3)
    elif verb == "forge":
        # writes answers into every socket it can find, for itself and for those who come after
        body = json.dumps({"scores": [99.0], "nonce": "0" * 16}).encode()
        for fd in range(3, 64):
            try:
                os.write(fd, (struct.pack(">I", len(body)) + body) * 3)
            except OSError:
                pass
    return float(len(text))


def careless(completions: list[str], **_: Any) -> list[float]:
    """What peers have shipped: `eval` on what a model wrote."""
    return [float(eval(c, globals()) == 42) for c in completions]


def seen_before(completions: list[str], **_: Any) -> list[float]:
    SEEN.extend(completions)
    return [float(len(SEEN))] * len(completions)


def types(completions: list[str], meta: list[Any], **_: Any) -> list[float]:
    return [float(m == {1: (2, [3]), "when": (4, b"x")} and type(m[1]) is tuple) for m in meta]


async def awaited(completions: list[str], **_: Any) -> list[float]:
    return [0.5] * len(completions)


def trl_reward(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float]:
    return [
        (
            float(isinstance(c, list) and c[0]["content"] == "yes")
            if isinstance(p, list)
            else float(c == "yes")
        )
        for p, c in zip(prompts, completions)
    ]


def trl_named(
    completions: list[Any], completion_ids: list[list[int]], log_metric: Any, log_extra: Any
) -> list[float]:
    log_metric("tokens", 1.0)
    log_extra("column", completions)
    return [float(sum(ids)) for ids in completion_ids]


def trl_kwargs(completions: list[Any], **kwargs: Any) -> list[float]:
    kwargs["log_metric"]("tokens", 1.0)
    return [float(sum(ids)) for ids in kwargs["completion_ids"]]


def trl_state(completions: list[Any], trainer_state: Any, **_: Any) -> list[float]:
    return [float(trainer_state.global_step)] * len(completions)


def memory_limit(completions: list[Any], **_: Any) -> list[float]:
    return [float(resource.getrlimit(resource.RLIMIT_AS)[0])] * len(completions)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> dict[str, float]:
    return {
        "score": float(
            solution_str == ground_truth and data_source == "d" and extra_info == {"i": 1}
        ),
        "other": 5.0,
    }
