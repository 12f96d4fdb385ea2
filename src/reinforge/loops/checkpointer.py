"""Checkpoints of a run: when one is due, what is in it, and how a run continues from it.

A checkpoint holds the backend's state, the state of each part by name (a critic, a replay buffer,
what adapts) and `extra`: plain values of the run, from its step to the offsets of its logs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from reinforge.checkpoint import store
from reinforge.checkpoint.background import CheckpointWrite, StagingCopies, plain_copy
from reinforge.checkpoint.memory_snapshot import MemorySnapshot
from reinforge.checkpoint.tensors import within
from reinforge.config.schema import Config
from reinforge.core.backend import Backend, State, Stateful
from reinforge.core.errors import InputError
from reinforge.loops.config_changes import Changes, check_changes, less_room
from reinforge.watch.recorder import note


class RestoredRun(NamedTuple):
    """What a run continues from; the backend and the parts have their states already.
    `Checkpointer.restore` returns it to the run.
    """

    extra: dict[str, Any]
    # of the configuration since the run was recorded; None: there is no record to compare with
    changes: Changes | None


class Checkpointer:
    """Saves the state of a run at a boundary, and puts it back.

    build/ makes it; the run asks it at every boundary. `settle` makes the state complete before it
    is saved (rollouts that are under way). `on_saving` is called when a save begins, and what it
    returns once the checkpoint is on disk. `memory` keeps boundaries beside those on disk, for a
    run that outlives the processes that train.
    """

    def __init__(
        self,
        cfg: Config,
        backend: Backend,
        parts: Mapping[str, Stateful] | None = None,
        *,
        settle: Callable[[], Awaitable[None]] | None = None,
        on_saving: Callable[[], Callable[[], None]] | None = None,
        memory: MemorySnapshot | None = None,
    ):
        self.cfg = cfg
        self.dir = Path(cfg.run.dir)
        self.backend = backend
        self.parts = dict(parts or {})
        self.memory = memory
        self._settle = settle
        self._on_saving = on_saving
        self._staging = StagingCopies()
        self._writing: CheckpointWrite | None = None  # until its end was told
        self._on_written: Callable[[], None] | None = None
        self._done_at = -1  # the boundary with nothing left to save

    # ---- continue ----

    def restore(self) -> RestoredRun | None:
        """Puts the newest boundary back, from memory or disk; None for a new run."""
        store.clean(self.dir)
        there = store.steps(self.dir)
        on_disk = store.step_of(there[0]) if there else -1
        if self.memory is not None and self.memory.step > on_disk:
            state, extra = self.memory.load()
            self._load(state, extra)
            return RestoredRun(extra, {})
        resume = self.cfg.run.resume
        if not there:
            if resume == "must":
                raise InputError(
                    f"there is no checkpoint in {self.dir}.",
                    where="run.resume",
                    fix="Use resume: auto, or another run.dir.",
                )
            return None
        if resume == "never":
            raise InputError(
                f"{self.dir} already holds a run (checkpoint {there[0].name}).",
                where="run.dir",
                fix="Use another run.dir, or run.resume=auto to continue it.",
            )
        changes = check_changes(self.dir, self.cfg)
        try:
            state, extra = store.load(there[0])
        except InputError as error:
            # it names the intact one: a damaged one is never skipped in silence
            note(self.dir, "damaged_checkpoint", checkpoint=there[0].name, error=str(error))
            raise
        if changes and less_room(changes):
            state = State(state.tensors, {k: v for k, v in state.meta.items() if k != "budget"})
        self._load(state, extra)
        self._done_at = extra["step"]
        return RestoredRun(extra, changes)

    def _load(self, state: State, extra: Mapping[str, Any]) -> None:
        self.backend.load(state)
        saved = extra.get("parts", {})
        for name, part in self.parts.items():
            if name in saved:
                part.load(State(within(state.tensors, f"part/{name}/"), saved[name]))

    # ---- when ----

    def due(self, step: int, *, ending: bool, asked: bool) -> bool:
        """Whether a checkpoint is to be saved. `asked`: by a callback, or by the metric to keep the
        best by.
        """
        if step == 0 or not self.unsaved(step):
            return False
        every = self.cfg.run.checkpoint.every
        return ending or asked or (bool(every) and step % every == 0)

    def unsaved(self, step: int) -> bool:
        """Whether there is something of this boundary that no checkpoint holds."""
        return self._done_at != step

    def reopen(self) -> None:
        """The boundary has changed since it was saved: a signal came before its evaluation."""
        self._done_at = -1

    def snapshot_due(self, step: int) -> bool:
        return self.memory is not None and self.memory.due(step) and self.unsaved(step)

    # ---- save ----

    async def settle(self) -> None:
        """Waits until the state is complete."""
        if self._settle is not None:
            await self._settle()

    async def settle_within(self, step: int, seconds: float) -> bool:
        """The same for a run that is to end now; False if it took too long.

        What is not complete cannot be saved: then the run goes on from the last checkpoint.
        """
        if self._settle is None or not self.unsaved(step):
            return True
        try:
            async with asyncio.timeout(seconds):
                await self._settle()
        except TimeoutError:
            return False
        return True

    def leave(self, step: int) -> None:
        """Nothing is saved of what came after the newest checkpoint."""
        self._done_at = step

    def save(self, step: int, extra: Mapping[str, Any], best_step: int | None) -> None:
        """Begins a checkpoint of this boundary; old ones are removed after it, but not the best.
        `written` tells of its end. One that is under way is waited for.

        In the background a thread writes a copy, on ranks a thread of each. What is in actors is
        written at once.
        """
        self.written(wait=True)
        state, plain = self._with_parts(extra)
        background = self.cfg.run.checkpoint.background
        if background:
            staged = {prefix: shards.stage() for prefix, shards in state.shards.items()}
            copies = {prefix: shards for prefix, shards in staged.items() if shards is not None}
            background = len(copies) == len(staged)
            if background:
                state = self._staging.of(State(state.tensors, state.meta, copies))
                plain = plain_copy(plain)
        self._on_written = None if self._on_saving is None else self._on_saving()
        write = partial(self._write, step, state, plain, best_step)
        self._writing = CheckpointWrite(write, background)
        self._done_at = step

    def _write(self, step: int, state: State, extra: dict[str, Any], best_step: int | None) -> Path:
        path = store.save(self.dir, step, state, extra)
        best = {p for p in store.steps(self.dir) if store.step_of(p) == best_step}
        store.prune(self.dir, self.cfg.run.checkpoint.keep, best)
        return path

    def written(self, *, wait: bool) -> Path | None:
        """The checkpoint that is on disk since this was asked last, or the error that kept it from
        there; None where there is none, or where it is under way and nobody waits.
        """
        writing = self._writing
        if writing is None or (writing.under_way and not wait):
            return None
        self._writing = None
        path = writing.end()
        if self._on_written is not None:
            self._on_written()
        return path

    def newest(self) -> Path:
        """Where the newest checkpoint is."""
        return store.steps(self.dir)[0]

    def snapshot(self, step: int, extra: Mapping[str, Any]) -> None:
        """Keeps this boundary in memory."""
        assert self.memory is not None
        self.memory.keep(step, *self._with_parts(extra))

    def _with_parts(self, extra: Mapping[str, Any]) -> tuple[State, dict[str, Any]]:
        """The backend's state with the tensors of the parts beside its own, and `extra` with their
        plain values.
        """
        state = self.backend.state()
        tensors = dict(state.tensors)
        shards = dict(state.shards)
        plain = {}
        for name, part in self.parts.items():
            own = part.state()
            tensors |= {f"part/{name}/{key}": tensor for key, tensor in own.tensors.items()}
            shards |= {f"part/{name}/{prefix}": shard for prefix, shard in own.shards.items()}
            plain[name] = own.meta
        return State(tensors, state.meta, shards), {**extra, "parts": plain}
