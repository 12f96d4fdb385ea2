"""Partial rollouts: a step ends when enough groups are generated, and those that are not go on in
the next step from their tokens so far.

More prompts are under way than a step trains. When `prompts` groups have all their tokens, the
others are cut: their tokens stay (engines/resumable.py), and the next step resubmits them first,
with its own weights. A group that was begun `staleness` steps ago is waited for, so nothing is
older than that when it is trained. Nothing is thrown away and nothing is trained twice.

Whether a group is generated, not whether it is scored, decides: without environments that is a
function of the step, like everything that the engine does. Which groups were taken is journalled
all the same.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from reinforge.core.backend import State
from reinforge.core.env import RolloutContext
from reinforge.core.sample import Group
from reinforge.engines.resumable import (
    ResumableRequests,
    requests_from_json,
    requests_to_json,
)
from reinforge.rollout.generation_done import run_rollout
from reinforge.rollout.rows.sampler import RowChoice
from reinforge.rollout.source import GroupSource, RolloutBatch
from reinforge.rollout.staleness import StalenessPolicy


@dataclass(frozen=True, slots=True)
class UnfinishedGroup:
    """A group that a step did not wait for. `PartialSource` keeps it, and submits it again in the
    next step.
    """

    choice: RowChoice
    made: int  # the step it was begun in
    version: int  # the weights it was begun with


class PartialSource(GroupSource):
    """A `GroupSource` whose rollouts generate with the engines of `requests`, so that what is cut
    goes on later.

    A part of the run: a checkpoint holds what is under way.
    """

    def __init__(self, *given: Any, requests: ResumableRequests, staleness: int, **named: Any):
        super().__init__(*given, **named)
        assert staleness > 0 and not self.dynamic and self.replay is None
        self.requests = requests
        self.staleness = StalenessPolicy(staleness)
        self.unfinished: list[UnfinishedGroup] = []

    async def gather(
        self, step: int, version: int, generated: Callable[[], None] = lambda: None
    ) -> RolloutBatch:
        before = (list(self.unfinished), self.requests.copied())
        try:
            return await self._gather(step, version, generated)
        except BaseException:
            # a step that was cut is done again from its start
            self.unfinished, self.requests.kept = before
            raise

    async def _gather(self, step: int, version: int, generated: Callable[[], None]) -> RolloutBatch:
        first = self.cursor.taken
        wanted = math.ceil(self.prompts * self.over_provision - 1e-9)
        fresh = self.row_sampler.take(max(0, wanted - len(self.unfinished)), step)
        walked = self.cursor.taken - first
        entries = [*self.unfinished, *(UnfinishedGroup(choice, step, version) for choice in fresh)]
        names = [f"{e.choice.position}:{self.rows[e.choice.row].id}" for e in entries]
        due = {i for i, e in enumerate(entries) if self.staleness.due(step, e.made)}
        recorded = self.journal.find_choice(names)
        tasks, taken = await self._first_generated(
            entries,
            names,
            due if recorded is None else {names.index(n) for n in recorded},
            recorded is not None,
        )
        if recorded is None:
            self.journal.write_choice(names, [names[i] for i in taken])
        self.unfinished = [e for i, e in enumerate(entries) if i not in taken]
        generated()
        try:
            groups = list(await asyncio.gather(*(tasks[i] for i in taken)))
        finally:
            for i in taken:
                tasks[i].cancel()
        self.requests.forget(names[i] for i in taken)
        ages = [step - entries[i].made for i in taken]
        result = RolloutBatch(groups, oldest=min(entries[i].version for i in taken))
        result.report = {
            "rollout/carried": float(len(self.unfinished)),
            "rollout/carried_tokens": float(self.requests.tokens()),
            "rollout/staleness": sum(ages) / len(ages),
            "rollout/staleness/max": float(max(ages)),
        }
        if self.row_sampler.policies:
            result.report |= {
                "sampling/skipped": 1 - len(fresh) / max(1, walked),
                **self.row_sampler.report(step),
            }
        return result

    async def _first_generated(
        self,
        entries: Sequence[UnfinishedGroup],
        names: Sequence[str],
        due: set[int],
        only_due: bool,
    ) -> tuple[list[asyncio.Task[Group]], list[int]]:
        """Runs all until enough are generated, and cuts the others.

        All tasks, and the places of those that are taken.
        """
        order: list[int] = []  # in which groups got their last token
        needed = 0 if only_due else min(self.prompts, len(entries))
        tasks: list[asyncio.Task[Group]] = []
        taken: list[int] = []
        enough = asyncio.Event()

        def generation_done(place: int) -> None:
            if taken:
                return
            order.append(place)
            if due <= set(order) and len(order) >= needed:
                others = [i for i in order if i not in due]
                taken.extend(sorted([*due, *others[: max(0, needed - len(due))]]))
                # here and now: the engine's next round must not depend on who wakes up first
                for i, task in enumerate(tasks):
                    if i not in taken:
                        task.cancel()
                enough.set()

        for i, (entry, name) in enumerate(zip(entries, names, strict=True)):
            context = RolloutContext(
                name, partial(generation_done, i), self.requests.engine_of(name)
            )
            work = run_rollout(self.rollout, self.rows[entry.choice.row], context)
            tasks.append(asyncio.ensure_future(work))
        waits = asyncio.ensure_future(enough.wait())
        try:
            while not taken:
                done, _ = await asyncio.wait(
                    [waits, *(t for t in tasks if not t.done())],
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in done:
                    if not task.cancelled():
                        task.result()  # raises what went wrong
            await asyncio.gather(
                *(task for i, task in enumerate(tasks) if i not in taken), return_exceptions=True
            )
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        finally:
            waits.cancel()
        return tasks, taken

    # ---- a Part ----

    def state(self) -> State:
        carried = [[e.choice.position, e.choice.row, e.made, e.version] for e in self.unfinished]
        return State({}, {"carried": carried, "kept": requests_to_json(self.requests.kept)})

    def load(self, state: State) -> None:
        self.unfinished = [
            UnfinishedGroup(RowChoice(position, row), made, version)
            for position, row, made, version in state.meta["carried"]
        ]
        self.requests.kept = requests_from_json(state.meta["kept"])
