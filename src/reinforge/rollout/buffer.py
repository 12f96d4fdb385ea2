"""Rollouts that are ahead of training: asynchronous RL with bounded staleness.

Synchronous training is the bound 0, on the same path.

Step k trains groups that were sampled with the weights of step k - s or newer. The schedule is a
function of the steps, not of the clock: what step k + s trains is begun right after update k, and
in the process of the trainer it is generated to its last token before update k + 1 changes the
weights; scores may come later. So a run that was killed comes out the same, and what is hidden is
the time of rewards: they are computed while other steps generate and train.

    s = 1:   generate 0 | generate 1 | train 0 | generate 2 | train 1 | ...
    rewards:            | of 0 ......          | of 2 ...........
                                     | of 1 ............

An engine with weights of its own also generates while a step trains (`due`). In the process of the
trainer one batch is still generated after the other, and by the same weights:

    s = 1:   generate 0 | generate 1 | generate 2 | ...
                        | train 0    | train 1    | ...
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from reinforge.core.backend import State
from reinforge.core.sample import Group
from reinforge.rollout.group_state import groups_from_state, groups_to_state
from reinforge.rollout.source import GroupSource, RolloutBatch
from reinforge.rollout.staleness import StalenessPolicy, split_stale

KINDS = ("groups", "discarded")
# when what was begun must be generated: before the step trains, before its update, or some time
Due = Literal["training", "update", "whenever"]


@dataclass(eq=False)
class BufferEntry:
    """The rollout batch of step `step`, begun in step `made` with the weights of `version`.
    `RolloutBuffer` keeps one for each step that is begun and not trained.
    """

    step: int
    made: int
    version: int
    before: int  # rows that the cursor had given out
    rollout_batch: RolloutBatch | None = None  # None: not complete
    task: asyncio.Task[RolloutBatch] | None = field(default=None, repr=False)
    all_tokens: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    @property
    def generating(self) -> bool:
        """Whether tokens are still to come."""
        return self.task is not None and not (self.task.done() or self.all_tokens.is_set())

    async def until_generated(self) -> None:
        """Waits for the last token, or for what went wrong before it."""
        if self.task is None:
            return
        waits = asyncio.ensure_future(self.all_tokens.wait())
        try:
            await asyncio.wait({waits, self.task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waits.cancel()
        self.check()

    def check(self) -> None:
        """Raises what went wrong."""
        if self.task is not None and self.task.done():
            self.task.result()


class RolloutBuffer:
    """The rollouts of the next steps: begun ahead of training as far as staleness allows, handed
    over in order. The builders make it around a group source; the loop calls `advance`, then
    `take`, once per step.

    A part of the run: a checkpoint holds every batch that was generated and not trained, so
    `settle` comes before it.
    """

    def __init__(
        self,
        source: GroupSource,
        staleness: int = 0,
        last: int | None = None,
        *,
        due: Due = "training",
    ):
        """`last`: how many steps there are.

        `due`: when what was begun must be generated. "training": when `advance` returns, as always
        with bound 0; "update": when `until_generated` does; "whenever": an engine elsewhere goes on
        through updates.
        """
        self.source = source
        self.staleness = StalenessPolicy(staleness)
        self.last = last
        self.due: Due = due if staleness else "training"
        self.in_flight: deque[BufferEntry] = deque()
        self._stale: list[Group] = []

    async def advance(self, step: int, version: int) -> None:
        """Begins what this step may begin."""
        self._drop_stale(step)
        ahead = step + len(self.in_flight)
        while ahead <= step + self.staleness.bound and (
            ahead == step or self.last is None or ahead < self.last
        ):
            await self._begin(ahead, step, version)
            ahead += 1

    async def until_generated(self) -> None:
        """Waits until everything that was begun has its last token."""
        for entry in self.in_flight:
            await entry.until_generated()

    async def cut_unfinished(self) -> None:
        """The run is asked to end before the update of a step: what is being generated for a later
        one is begun again, by the same weights.
        """
        if self.due == "update" and self.in_flight and self.in_flight[-1].generating:
            await self._cut(self.in_flight[-1])

    async def take(self, step: int) -> RolloutBatch:
        """The rollouts of this step, complete. Whoever trains them commits them to the source.

        One that is cut here is begun again (bound 0), or stays.
        """
        entry = self.in_flight[0]
        assert entry.step == step, (entry.step, step)
        if entry.rollout_batch is None:
            assert entry.task is not None
            try:
                entry.rollout_batch = await asyncio.shield(entry.task)
            except asyncio.CancelledError:
                if self.staleness.bound == 0:
                    await self._cut(entry)
                raise
        self.in_flight.popleft()
        return self._fresh(entry)

    async def settle(self) -> None:
        """Waits until everything that was begun is complete."""
        for entry in self.in_flight:
            if entry.rollout_batch is None:
                assert entry.task is not None
                entry.rollout_batch = await asyncio.shield(entry.task)

    async def close(self) -> None:
        """What is still under way is dropped, and so is what went wrong meanwhile."""
        tasks = [entry.task for entry in self.in_flight if entry.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _begin(self, number: int, step: int, version: int) -> None:
        if self.due == "update":  # one after the other
            await self.until_generated()
        entry = BufferEntry(number, step, version, self.source.cursor.taken)
        gathered = self.source.gather(number, version, entry.all_tokens.set)
        entry.task = asyncio.ensure_future(gathered)
        self.in_flight.append(entry)
        try:
            if self.due == "training":
                await entry.until_generated()
            else:
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            await self._cut(entry)
            raise
        entry.check()

    async def _cut(self, entry: BufferEntry) -> None:
        """The newest one was not generated to its end, or may wait for scores for ever: as if it
        had not begun.
        """
        assert entry.task is not None and self.in_flight[-1] is entry
        entry.task.cancel()
        await asyncio.gather(entry.task, return_exceptions=True)
        self.in_flight.pop()
        self.source.cursor.load({**self.source.cursor.state(), "taken": entry.before})

    # ---- the bound ----

    def _drop_stale(self, step: int) -> None:
        """A run that goes on with a smaller bound has batches that are too old; it begins those
        steps again with other rows.
        """
        if not all(self.staleness.allows(entry.step, entry.made) for entry in self.in_flight):
            self._stale += [
                g
                for entry in self.in_flight
                if entry.rollout_batch is not None
                for g in (*entry.rollout_batch.groups, *entry.rollout_batch.discarded)
            ]
            self.in_flight.clear()

    def _fresh(self, entry: BufferEntry) -> RolloutBatch:
        """Without groups of older weights than those it was begun with: an engine that missed an
        update.
        """
        rollout_batch = entry.rollout_batch
        assert rollout_batch is not None
        oldest = entry.version if rollout_batch.oldest is None else rollout_batch.oldest
        rollout_batch.groups, late = split_stale(rollout_batch.groups, oldest)
        if late or self._stale:
            rollout_batch.stale = [*self._stale, *late]
            self._stale = []
        if self.staleness.bound:
            rollout_batch.report["rollout/staleness"] = float(entry.step - entry.made)
        return rollout_batch

    # ---- a Part ----

    def state(self) -> State:
        entries = [entry for entry in self.in_flight if entry.rollout_batch is not None]
        assert len(entries) == len(self.in_flight), (
            "a checkpoint in the middle of a batch: settle first"
        )
        tensors = {}
        described = []
        for i, entry in enumerate(entries):
            rollout_batch = entry.rollout_batch
            assert rollout_batch is not None and not rollout_batch.used
            entry_meta = {
                "step": entry.step,
                "made": entry.made,
                "version": entry.version,
                "before": entry.before,
                "rounds": rollout_batch.rounds,
                "cancelled": rollout_batch.cancelled,
                "report": rollout_batch.report,
            }
            for kind in KINDS:
                saved = groups_to_state(getattr(rollout_batch, kind))
                tensors.update(
                    {f"{i}/{kind}/{name}": tensor for name, tensor in saved.tensors.items()}
                )
                entry_meta[kind] = saved.meta
            described.append(entry_meta)
        return State(tensors, {"begun": described})

    def load(self, state: State) -> None:
        rows = {row.id: row for row in self.source.rows}
        self.in_flight.clear()
        for i, entry_meta in enumerate(state.meta["begun"]):
            kinds = {}
            for kind in KINDS:
                prefix = f"{i}/{kind}/"
                tensors = {
                    name.removeprefix(prefix): t
                    for name, t in state.tensors.items()
                    if name.startswith(prefix)
                }
                kinds[kind] = groups_from_state(
                    State(tensors, entry_meta[kind]), rows, "rollout buffer"
                )
            rollout_batch = RolloutBatch(
                kinds["groups"],
                kinds["discarded"],
                rounds=entry_meta["rounds"],
                cancelled=entry_meta["cancelled"],
                report=dict(entry_meta["report"]),
            )
            self.in_flight.append(
                BufferEntry(
                    entry_meta["step"],
                    entry_meta["made"],
                    entry_meta["version"],
                    entry_meta["before"],
                    rollout_batch,
                )
            )
