"""Any Python function as a reward: `def reward(prompts, completions, answer, **columns) ->
list[float | None]`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from reinforge.core.aio import SerialThread, together
from reinforge.core.errors import InputError
from reinforge.core.row import Row
from reinforge.rewards.adapt import ALWAYS, IDS
from reinforge.rewards.outcome import RewardOutcome, checked
from reinforge.rewards.pool import RewardPool
from reinforge.rewards.rule import NormalizationRule

Tokens = Sequence[Sequence[int]]
TIMED_OUT = object()
_NO_TURNS: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None


@dataclass
class FunctionReward:
    """Calls `function` with one list per column it asks for: in a killable process of `pool`, or
    else here. Here a plain function that is not ours runs in a thread of its own, so that a slow
    one overlaps generation; an async function is awaited.
    """

    name: str
    function: Callable[..., Any]
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    pure: bool = False  # ours: fast and repeatable, called in place and never journalled
    gate: str | None = None  # the reward that must pass, or this one counts 0
    gate_at: float | None = None  # ... with at least this; None: above 0
    rule: NormalizationRule = field(
        default_factory=NormalizationRule
    )  # how it counts: centred, scaled, clipped
    pool: RewardPool | None = None
    # ask for one completion at a time: one that hangs does not take the others of its group with it
    each: bool = False
    # seconds for a call that is not in a pool, which has its own; None: for ever
    timeout: float | None = None
    notes: list[str] = field(default_factory=list)  # what the user should know about how it runs
    # it runs here because no other process can find it, and whoever wrote it could change that
    unfindable: bool = False
    # (end in the text, reward) of every step
    steps: Callable[[Sequence[Any], Sequence[str]], list[list[tuple[int, float]]]] | None = None

    def __post_init__(self) -> None:
        self._lane = SerialThread(f"reward-{self.name}")
        self._turns = _NO_TURNS
        parameters: Mapping[str, inspect.Parameter] = {}
        try:
            parameters = inspect.signature(self.function).parameters
        except (TypeError, ValueError):  # a builtin that does not say
            pass
        self._takes_all = not parameters or any(
            p.kind is p.VAR_KEYWORD for p in parameters.values()
        )
        self._takes = set(parameters)
        self._required = {
            n
            for n, p in parameters.items()
            if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        }

    async def score(self, rows: Sequence[Row], completions: Sequence[str]) -> list[float | None]:
        """One score per completion, each finite or None.

        Raises InputError when the function is not usable on these rows.
        """
        return (await self.outcome(rows, completions)).scores

    async def outcome(
        self, rows: Sequence[Row], completions: Sequence[str], tokens: Tokens | None = None
    ) -> RewardOutcome:
        """The scores, and how many of them are missing because of the clock or a crash.

        `tokens`: of the completions, for a function that asks for `completion_ids`.
        """
        if self.each and len(rows) > 1:
            ids = [None] * len(rows) if tokens is None else [[t] for t in tokens]
            return RewardOutcome.joined(
                await together(
                    [self._one([r], [c], t) for r, c, t in zip(rows, completions, ids, strict=True)]
                )
            )
        return await self._one(rows, completions, tokens)

    async def _one(
        self, rows: Sequence[Row], completions: Sequence[str], tokens: Tokens | None
    ) -> RewardOutcome:
        given = self._given(rows, completions, tokens)
        count = len(completions)
        if self.pool is not None:
            return await self.pool.call(self.name, given, count)
        result = self.function(**given) if self.pure else await self._called(given)
        if result is TIMED_OUT:
            return RewardOutcome([None] * count, timeouts=count)
        return (
            result
            if isinstance(result, RewardOutcome)
            else RewardOutcome(checked(self.name, result, count))
        )

    async def _called(self, given: dict[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(
            getattr(self.function, "__call__", None)  # noqa: B004
        ):
            return await _within(self.timeout, self.function(**given))
        async with self._turn():  # the clock starts when the thread is free
            result = await _within(self.timeout, self._lane.run(lambda: self.function(**given)))
            # a thread cannot be stopped: it is left behind, and the next call gets another
            if result is TIMED_OUT:
                self._lane = SerialThread(f"reward-{self.name}")
        return await _within(self.timeout, result) if inspect.isawaitable(result) else result

    def _turn(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._turns is None or self._turns[0] is not loop:
            self._turns = (loop, asyncio.Semaphore(1))
        return self._turns[1]

    @property
    def reads_ids(self) -> bool:
        """Whether the function is given the tokens of completions."""
        return IDS in self._takes

    @property
    def columns(self) -> set[str]:
        """The columns that every row must have, or the function cannot be called."""
        own = self._required - {*ALWAYS, IDS} - self.options.keys()
        return own | set(getattr(self.function, "needs", ()))

    @property
    def reads_nothing(self) -> bool:
        """Whether the function asks for nothing of what was said, as one that is meant to be called
        in another way.
        """
        return not self._takes_all and self._takes.isdisjoint({*ALWAYS, IDS})

    def _given(
        self, rows: Sequence[Row], completions: Sequence[str], tokens: Tokens | None
    ) -> dict[str, Any]:
        available: dict[str, Any] = {
            "prompts": [r.prompt for r in rows],
            "completions": list(completions),
        }
        if self.reads_ids and tokens is not None:
            available[IDS] = [list(map(int, t)) for t in tokens]
        for column in {name: None for r in rows for name in r.columns}:
            available.setdefault(column, [r.columns.get(column) for r in rows])
        missing = self._required - available.keys() - self.options.keys()
        if missing:
            raise lacks(self, missing, available)
        return {k: v for k, v in available.items() if self._takes_all or k in self._takes} | dict(
            self.options
        )


def lacks(
    reward: FunctionReward, missing: Iterable[str], columns: Collection[str], row: str = ""
) -> InputError:
    """A reward needs columns that are not there: in one `row` (where it is), or in all."""
    which = row or "the rows"
    have = "does not have" if row else "do not have"
    there = f"columns: {', '.join(sorted(columns))}" if columns else "there are no columns"
    return InputError(
        f"reward {reward.name} needs {', '.join(sorted(missing))}, which {which} {have} ({there}).",
        where="rewards",
        fix=_how_called(columns) if reward.reads_nothing else _how_mapped(bool(row)),
    )


def _how_called(columns: Iterable[str]) -> str:
    may = dict.fromkeys((*reversed(ALWAYS), IDS, *sorted(columns)))
    return (
        "A reward is called as f(completions, **columns) and returns one number per completion. It"
        f" may take: {', '.join(may)}."
    )


def _how_mapped(one: bool) -> str:
    """`one`: it is missing in one row."""
    return (
        f"{'Mend the row, or map' if one else 'Map'} a column with data.columns, or give it as"
        " rewards.options;"
        f" {' and '.join(ALWAYS)} are always there."
    )


def check_columns(
    rewards: Sequence[FunctionReward],
    *parts: Sequence[Row],
    added: Iterable[str] = (),
    some: bool = False,
) -> None:
    """Raises InputError if a reward needs a column that a row of any part does not have: before
    anything large is loaded. `added`: columns that come with the rollout. `some`: rows without are
    left unscored, so it is enough if any row has it.
    """
    added = set(added)
    for reward in rewards:
        needed = reward.columns - added
        first: Row | None = None
        lacking = 0
        for row in chain.from_iterable(parts):
            if not needed <= row.columns.keys():
                first = row if first is None else first
                lacking += 1
        everywhere = lacking == sum(map(len, parts))
        if first is not None and (not some or everywhere):
            raise lacks(
                reward,
                needed - first.columns.keys(),
                first.columns,
                "" if everywhere else first.where,
            )


async def _within(seconds: float | None, work: Awaitable[Any]) -> Any:
    """Its result, or TIMED_OUT.

    A TimeoutError of its own passes through: that is an error, not our clock.
    """
    try:
        async with asyncio.timeout(seconds) as limit:
            return await work
    except TimeoutError:
        if not limit.expired():
            raise
        return TIMED_OUT
