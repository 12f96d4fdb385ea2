"""An environment as an episode sees it: it may block, hang, raise, or have answered before a crash.

What does not repeat is journalled when the episode ends: that it failed (a deadline depends on the
clock), and for an environment that is not pure, all it answered. A step that is done again finds it
by the sample's uid. Answers are bound to the actions they follow; where those differ, the
environment is asked after all.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

from reinforge.core.env import Action, Env, MakeEnv, Observation, Step
from reinforge.core.sample import Row
from reinforge.core.seeds import tokens_hash
from reinforge.core.threads import in_thread


class EpisodeFailure(Exception):
    """The episode cannot be scored. `kind`: timeout, error, length (no room) or sandbox. What runs
    the environment raises it; players note it in the episode, which stays unscored.
    """

    def __init__(self, kind: str, why: str):
        super().__init__(why)
        self.kind = kind
        self.why = why


async def call(function: Callable[..., Any], *given: Any) -> Any:
    """An async function is awaited; any other runs in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*given)
    result = await in_thread(function, *given)
    return await result if inspect.isawaitable(result) else result


class EpisodeEnvironment:
    """One episode's environment.

    `reset` and `step` raise `EpisodeFailure` where the environment raised or its deadline passed.
    """

    def __init__(
        self,
        make: MakeEnv,
        row: Row,
        seed: int,
        *,
        turn_seconds: float | None,
        record: dict[str, Any] | None = None,
    ):
        self.make = make
        self.row = row
        self.seed = seed
        self.turn_seconds = turn_seconds
        self.env: Env | None = None
        self.past = record  # what the journal has; None as soon as it does not fit
        self.actions: list[Action] = []
        self.steps: list[dict[str, Any]] = []  # answers, for the journal
        self.pure = False

    async def reset(self) -> Observation:
        self._recall("reset")
        if self.past is not None and self.past["steps"]:
            found = _observation(self.past["steps"][0]["observation"])
            assert found is not None
        else:
            found = await self._guarded(self._live)
        self.steps.append({"observation": _plain(found)})
        return found

    async def step(self, action: Action) -> Step:
        self.actions.append(action)
        self._recall("step")
        known = (
            self.past["steps"][len(self.actions) : len(self.actions) + 1]
            if self.past is not None
            else []
        )
        if known and known[0]["after"] == self.bound():
            entry = known[0]
            step = Step(
                _observation(entry["observation"]),
                entry["reward"],
                entry["done"],
                entry["truncated"],
                entry["metrics"],
            )
        else:
            self.past = None if known else self.past
            step = await self._guarded(self._step)
        self.steps.append(
            {
                "after": self.bound(),
                "observation": _plain(step.observation),
                "reward": step.reward,
                "done": step.done,
                "truncated": step.truncated,
                "metrics": dict(step.metrics),
            }
        )
        return step

    def before_turn(self) -> None:
        """An episode that failed while a turn was generated fails there again."""
        self._recall("generate")

    def bound(self) -> str:
        """Names everything that was done so far."""
        return tokens_hash([a.tokens for a in self.actions])

    def record(self, failed: EpisodeFailure | None, phase: str) -> dict[str, Any] | None:
        """What must be journalled; None: everything repeats."""
        past = (
            None
            if failed is None
            else {"phase": phase, "after": self.bound(), "kind": failed.kind, "why": failed.why}
        )
        return (
            None
            if self.pure and past is None
            else {"steps": [] if self.pure else self.steps, "failed": past}
        )

    async def close(self) -> None:
        env = self.env
        self.env = None
        if env is not None:
            await call(env.close)

    # ---- inside ----

    def _recall(self, phase: str) -> None:
        failed = self.past["failed"] if self.past is not None else None
        if failed is not None and failed["phase"] == phase and failed["after"] == self.bound():
            raise EpisodeFailure(failed["kind"], failed["why"])

    async def _live(self) -> Observation:
        self.env = self.make(self.row)
        self.pure = bool(getattr(self.env, "pure", False))
        found = await call(self.env.reset, self.row, self.seed)
        if not isinstance(found, Observation):
            raise TypeError(f"reset returned a {type(found).__name__}, not an Observation")
        return found

    async def _step(self) -> Step:
        # its answers so far came from the journal: bring it to where the episode is
        if self.env is None:
            await self._live()
            for action in self.actions[:-1]:
                await call(self.env.step, action)  # type: ignore[attr-defined]
        assert self.env is not None
        step = await call(self.env.step, self.actions[-1])
        if not isinstance(step, Step) or (step.observation is None and not step.done):
            raise TypeError(
                f"step returned a {type(step).__name__}, not a Step with an observation or done"
            )
        return step

    async def _guarded(self, work: Callable[[], Any]) -> Any:
        try:
            async with asyncio.timeout(self.turn_seconds) as limit:
                return await work()
        except Exception as error:
            if limit.expired():
                raise EpisodeFailure(
                    "timeout",
                    f"turn {len(self.actions)}: the environment took more than"
                    f" {self.turn_seconds:g} s",
                ) from None
            raise EpisodeFailure(
                getattr(error, "kind", "error"),
                f"turn {len(self.actions)}: {type(error).__name__}: {error}",
            ) from error


def deadline(seconds: float | None) -> float | None:
    return None if seconds is None else time.monotonic() + seconds


def _plain(observation: Observation | None) -> dict[str, Any] | None:
    return (
        None
        if observation is None
        else {
            "messages": observation.messages,
            "tools": observation.tools,
            "tokens": observation.tokens,
        }
    )


def _observation(plain: dict[str, Any] | None) -> Observation | None:
    return (
        None
        if plain is None
        else Observation(plain["messages"], plain["tools"], plain.get("tokens"))
    )
