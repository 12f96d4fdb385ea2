"""What an environment is, and what a rollout is.

Environments, agents and foreign libraries all become a `Rollout`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from reinforge.core.row import Row, Stop

if TYPE_CHECKING:
    from reinforge.core.engine import Engine
    from reinforge.core.sample import Group

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call that was read from the model's text."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment says: new messages for the model. `Env.reset` and `Env.step` return it,
    the player tokenises it.
    """

    messages: list[Message]  # new messages only: what was said before is never tokenised again
    # JSON schemas for the chat template; those of the first observation count
    tools: list[dict[str, Any]] | None = None
    # instead of messages, from environments that speak tokens: the whole context
    tokens: list[int] | None = None


@dataclass(frozen=True, slots=True)
class Action:
    """One turn of the model, as an environment gets it. The player makes it of what was sampled and
    passes it to `Env.step`.
    """

    text: str  # without control tokens
    tokens: list[int]  # as sampled, the stop token included
    content: str = ""  # the text without its tool calls
    calls: Sequence[Call] = ()  # tool calls in the text that could be read
    errors: Sequence[str] = ()  # what is wrong with those that could not
    turn: int = 0  # 0, 1, ...
    last: bool = False  # whatever the environment says, there will be no further turn
    stop: Stop = Stop.EOS  # LENGTH: the turn was cut
    seed: int = 0  # for chance in the environment: a function of (run seed, purpose, sample, turn)
    # on the monotonic clock: by then the step must be done, or the episode has failed
    deadline: float | None = None
    thinking: str = ""  # where the model has a channel for it; elsewhere it is part of the text


@dataclass(frozen=True, slots=True)
class Step:
    """What came of an action: what the environment says next, a reward, whether the episode is
    over. `Env.step` returns it.
    """

    observation: Observation | None  # None only where `done`
    reward: float | None = None  # of this turn; with `done` it is the final reward
    done: bool = False
    truncated: bool = False  # done because of a limit, not by itself
    metrics: Mapping[str, float] = field(
        default_factory=dict
    )  # means over episodes are logged as env/<name>; the newest value of a name counts


class Env(Protocol):
    """One episode.

    A plain `def` is run in a thread, an `async def` in the event loop, which it must not block.

    `seed` is the same for all episodes of a prompt: what it decides (the task) is shared by the
    group. An environment with `pure = True` is a function of the row, the seed and the actions;
    what any other answers is journalled, so that a step that is done again does not ask again. To
    say that an episode cannot be scored, raise.
    """

    async def reset(self, row: Row, seed: int) -> Observation: ...

    async def step(self, action: Action) -> Step: ...

    async def close(self) -> None: ...


MakeEnv = Callable[[Row], Env]  # a fresh environment for one episode of this row


def _nobody_waits() -> None:
    """Nobody has to know when a group has all its tokens."""


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """What a rollout is told beside its row.

    A group source makes one for each group that it submits, an evaluation one for each row. The
    rollout hands it on to what generates for it.
    """

    group: str  # the name of the group: its draws depend on it, and no two groups of a run share it
    # to be called when the group has all its tokens and only its scores are missing: from then on
    # the GPU can do something else. A rollout that never calls it counts as generating to its end
    generated: Callable[[], None] = _nobody_waits
    # generate with this one instead of the rollout's own: it remembers what it sampled for a group
    # that was cut
    engine: Engine | None = None


# a row becomes a group of samples
Rollout = Callable[[Row, RolloutContext], Awaitable["Group"]]
