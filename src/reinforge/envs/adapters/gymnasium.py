"""Gymnasium environments that can be played in text: `gymnasium:FrozenLake-v1`, or any that your
module registers.

What is shown: an observation that is text, or the environment's `ansi` rendering (what it colours
is in brackets), or the observation written out. What is read: for a Text space the whole turn, for
a Discrete space the last number or, with `actions`, the last of these words.
"""

from __future__ import annotations

import re
from typing import Any

from reinforge.core.env import Action, Observation, Step
from reinforge.core.errors import InputError
from reinforge.core.row import Row
from reinforge.envs.adapters.common import first, library, number, numbers, said

# what a rendering marks with a colour
MARKED = re.compile(r"\x1b\[[0-9;]+m(.*?)\x1b\[0m", re.DOTALL)
INTEGER = re.compile(r"-?\d+")


class GymEnv:
    """`actions`: words for the actions 0, 1, ...

    `intro`: said before the first observation. `invalid`: reward of a turn that names no action;
    the environment does not move then. `register`: a module whose import registers the environment.
    `make`: keyword arguments.
    """

    def __init__(
        self,
        id: str,
        *,
        actions: list[str] | None = None,
        intro: str = "",
        invalid: float | None = None,
        register: str | None = None,
        make: dict[str, Any] | None = None,
    ):
        self.id = id
        self.actions = actions
        self.intro = intro
        self.invalid = invalid
        self.register = register
        self.options = make or {}
        self.env: Any = None
        self.unread = 0  # turns that named no action
        self.prepare(id, register=register)

    @staticmethod
    def prepare(id: str, register: str | None = None, **_: Any) -> None:
        library("gymnasium", "gymnasium")
        if register is not None:
            library(register, register.split(".")[0])

    def reset(self, row: Row, seed: int) -> Observation:
        gymnasium = library("gymnasium", "gymnasium")
        modes = gymnasium.spec(self.id).kwargs.get("render_modes") or _modes(gymnasium, self.id)
        text_mode = (
            {} if "render_mode" in self.options or "ansi" not in modes else {"render_mode": "ansi"}
        )
        self.env = gymnasium.make(self.id, **text_mode, **self.options)
        space = self.env.action_space
        if type(space).__name__ not in ("Text", "Discrete"):
            raise InputError(
                f"{self.id} has the action space {space}, which is not said in words.",
                where="env.name",
                fix="Text and Discrete spaces can be played; wrap others.",
            )
        if (
            self.actions is not None
            and type(space).__name__ == "Discrete"
            and len(self.actions) != int(space.n)
        ):
            raise InputError(
                f"{self.id} has {space.n} actions, not {len(self.actions)}.",
                where="env.options.actions",
                fix="Name them all, in order.",
            )
        found, _ = self.env.reset(seed=seed % 2**32)
        return first(row, "\n\n".join(t for t in (self.intro, self._shown(found)) if t))

    def step(self, action: Action) -> Step:
        chosen = self._chosen(action.text)
        if chosen is None:
            self.unread += 1
            options = ", ".join(self.actions) if self.actions else "a number"
            return Step(
                Observation([said(f"Choose one: {options}.")]),
                self.invalid,
                metrics={"invalid": float(self.unread)},
            )
        found, reward, terminated, truncated, info = self.env.step(chosen)
        worth = number(reward, "the environment's reward")
        done = bool(terminated or truncated)
        metrics = {"invalid": float(self.unread), **numbers(info)}
        observation = None if done else Observation([said(self._shown(found))])
        return Step(
            observation,
            worth,
            done=done,
            truncated=bool(truncated and not terminated),
            metrics=metrics,
        )

    def close(self) -> None:
        if self.env is not None:
            self.env.close()

    # ---- inside ----

    def _chosen(self, text: str) -> Any:
        space = self.env.action_space
        if type(space).__name__ == "Text":
            return text
        if self.actions is not None:
            words = [(text.lower().rfind(word.lower()), i) for i, word in enumerate(self.actions)]
            place, index = max(words)
            return None if place < 0 else int(space.start) + index
        found = INTEGER.findall(text)
        chosen = int(found[-1][:18]) if found else None
        return chosen if chosen is not None and space.contains(chosen) else None

    def _shown(self, found: Any) -> str:
        if isinstance(found, str):
            return found
        if self.env.render_mode == "ansi":
            return MARKED.sub(r"[\1]", str(self.env.render())).strip()
        return str(found.tolist() if hasattr(found, "tolist") else found)


def _modes(gymnasium: Any, id: str) -> list[str]:
    entry = gymnasium.spec(id).entry_point
    made = gymnasium.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
    return list(getattr(made, "metadata", {}).get("render_modes", []))
