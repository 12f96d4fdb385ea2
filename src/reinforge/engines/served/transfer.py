"""Weights on their way to a replica: published once, staged and committed by each, then proved
against the trainer's own forward.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reinforge.config.engine import is_remote
from reinforge.core.weights import ProbeScores, Weights
from reinforge.engines.served.dialect import Dialect, ServerSetup
from reinforge.engines.served.http import ServerFault
from reinforge.engines.served.replica import Replica
from reinforge.models.named_weights import (
    added,
    base_weights,
    low_rank,
    low_rank_pairs,
    named_weights,
)
from reinforge.weights.files import AdapterChannel, FileChannel, SafetensorsChannel
from reinforge.weights.group import GroupChannel, GroupLink
from reinforge.weights.ipc import IpcChannel, usable
from reinforge.weights.probe import ProbeCheck, Scorer, compare, probe_of, scores_of

Channel = FileChannel | IpcChannel | GroupChannel


@dataclass
class PublishedWeights:
    """One set of weights where servers can read it, and what the trainer says about the probe under
    it. `WeightTransfer.publish` makes it.
    """

    channel: Channel
    version: int
    number: int  # of the probe: a new one for every update
    want: Tensor | None  # what the trainer says about it
    # what it says about the next one: what an engine that keeps these weights will find
    ahead: Tensor | None


class WeightTransfer:
    """Sends weights to replicas in two phases, stage and commit, and proves that they arrived.
    `ServedEngine` has one and calls it in `update`, and for a replica that comes back.
    """

    def __init__(self, setup: ServerSetup, dialect: Dialect, score: Scorer | None):
        self.setup = setup
        self.dialect = dialect
        self.score = score
        self.fix_head = True  # a test turns it off to see that the proof notices
        self.kind = self._kind()
        self.published: PublishedWeights | None = None  # what replicas serve
        # what an adapter is added to
        self.base: tuple[Any, FileChannel] | None = None  # and whose weights these are
        self.note = ""
        self.links: dict[int, tuple[int, GroupLink]] = {}  # by replica, with the life it is of

    def _kind(self) -> str:
        asked = self.setup.cfg.channel
        if asked != "auto":
            return asked
        if any(is_remote(address) for address in self.setup.cfg.address):
            return "disk"
        near = self.setup.near and "ipc" in self.dialect.channels
        return "ipc" if near and usable() else "memory"

    def tokens(self, number: int) -> list[int]:
        """The probe of one update."""
        return probe_of(self.setup.vocabulary, self.setup.context, number)

    @torch.no_grad()
    def publish(self, weights: Weights, version: int) -> PublishedWeights:
        """The new weights, ready to be staged; those of before are still there."""
        # not where ranks gather into host memory
        ours = weights.module is not None and next(weights.module.parameters()).is_cuda
        channel: Channel
        by_api = self.kind == "api"
        if by_api and not self.setup.near:
            channel = GroupChannel()
            pairs = self.pairs(weights)
        elif self.kind in ("ipc", "api") and ours:
            # handles of merged weights: nothing travels
            channel = IpcChannel()
            pairs = self.pairs(weights)
        elif (low := self._low_rank(weights)) is not None:
            channel = AdapterChannel(self._base(weights), self._root)
            pairs = low
        else:
            channel = self._files()
            pairs = self.pairs(weights)
        channel.publish(pairs, version)
        scores = weights.scores or self._scores(weights)
        if scores is None:
            return PublishedWeights(channel, version, self._next, None, None)
        return PublishedWeights(channel, version, scores.number, scores.want, scores.ahead)

    @property
    def _next(self) -> int:
        """The number of the next probe."""
        return 0 if self.published is None else self.published.number + 1

    def _scores(self, weights: Weights) -> ProbeScores | None:
        """What the trainer, in this process, says about the probe."""
        score = weights.probe or self.score
        if score is None:
            return None
        return scores_of(score, self.setup.vocabulary, self.setup.context, self._next)

    def _low_rank(self, weights: Weights) -> Iterator[tuple[str, Tensor]] | None:
        """The adapter, where it can travel alone."""
        if "adapter" not in self.dialect.channels:
            return None
        if weights.kind == "adapter":
            assert weights.buckets is not None, "an adapter without its numbers"
            return weights.buckets()
        found = None if weights.module is None else low_rank(weights.module)
        return None if found is None else low_rank_pairs(found)

    @property
    def _root(self) -> Path | None:
        return self.setup.folder / "engine-weights" if self.kind == "disk" else None

    def _files(self) -> FileChannel:
        return (
            FileChannel(self._root)
            if "files" in self.dialect.channels
            else SafetensorsChannel(self._root, Path(self.setup.model))
        )

    def _base(self, weights: Weights) -> FileChannel:
        """The weights below an adapter, published once: afterwards only the adapter travels."""
        whose = weights.base.fingerprint if weights.base else weakref.ref(_module(weights))
        if self.base is None or self.base[0] != whose:
            channel = FileChannel(self._root)
            channel.publish(self._cast(_below(weights)()), 0)
            self.base = (whose, channel)
        return self.base[1]

    def pairs(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """In the precision that the engine computes in."""
        if weights.kind == "shared":
            found = named_weights(_module(weights))
        elif weights.kind == "adapter":
            assert weights.buckets is not None, "an adapter without its numbers"
            found = added(_below(weights)(), dict(weights.buckets()))
        else:
            assert weights.buckets is not None, f"weights of kind {weights.kind} without buckets"
            found = weights.buckets()
        return self._cast(found)

    def _cast(self, pairs: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        dtype = getattr(torch, self.setup.dtype)
        return (
            (name, t.to(dtype) if t.is_floating_point() and t.dtype is not dtype else t)
            for name, t in pairs
        )

    def keep(self, fresh: PublishedWeights) -> None:
        """The update is through: what was served before may go."""
        old = self.published
        self.published = fresh
        if old is not None:
            old.channel.close()
            if isinstance(old.channel, AdapterChannel) and (
                self.base is None or old.channel.base is not self.base[1]
            ):
                old.channel.base.close()  # of another model

    async def stage(self, replica: Replica, source: PublishedWeights) -> None:
        """Phase one.

        Where handles of GPU memory cannot be opened, files in memory do it from now on.
        """
        assert replica.http is not None
        if isinstance(source.channel, GroupChannel):
            await self._join(replica)
        try:
            await self.dialect.stage(replica.http, source.channel.message())
        except ServerFault:
            if (
                not isinstance(source.channel, IpcChannel)
                or self.setup.cfg.channel == "ipc"
                or not replica.up
            ):
                raise
            self.kind = "memory"
            self.note = (
                "the engine cannot open the trainer's GPU memory: weights go through files in host"
                " memory"
            )
            pairs = source.channel.pairs
            source.channel = FileChannel()
            source.channel.publish(pairs, source.version)
            await self.dialect.stage(replica.http, source.channel.message())

    async def _join(self, replica: Replica) -> None:
        """A process group with the workers of this server, once in its life."""
        if self.links.get(replica.index, (None,))[0] == replica.life:
            return
        assert replica.http is not None and replica.facts is not None
        remote = is_remote(replica.http.address)
        link = GroupLink(int(replica.facts["workers"]), self.setup.device, remote=remote)
        joining = self.dialect.stage(replica.http, {"kind": "join", **link.message()})
        await asyncio.gather(joining, asyncio.to_thread(link.join))
        self.links[replica.index] = (replica.life, link)

    async def commit(self, replica: Replica, source: PublishedWeights) -> ProbeCheck | None:
        """Phase two, and the proof."""
        assert replica.http is not None
        replica.version = None
        keep = self.setup.cfg.running == "keep"
        loaded = self.dialect.commit(replica.http, source.version, self.fix_head, keep)
        if isinstance(source.channel, GroupChannel):
            # the workers receive while they load
            _, link = self.links[replica.index]
            channel = source.channel
            sent = asyncio.to_thread(link.send, channel.pairs, channel.buckets)
            head_error, _ = await asyncio.gather(loaded, sent)
        else:
            head_error = await loaded
        check = None
        if source.want is not None:
            tokens = self.tokens(source.number)
            found = torch.tensor(await self.dialect.score(replica.http, tokens))
            before = (
                None if self.published is None or self.published is source else self.published.ahead
            )
            check = compare(
                found,
                source.want,
                version=source.version,
                dtype=self.setup.dtype,
                before=before,
                head_error=head_error,
                tolerance=self.setup.cfg.tolerance,
            )
        replica.version = source.version
        return check

    def close(self) -> None:
        if self.published is not None:
            self.published.channel.close()
            self.published = None
        if self.base is not None:
            self.base[1].close()
            self.base = None


def _module(weights: Weights) -> torch.nn.Module:
    assert weights.module is not None, f"weights of kind {weights.kind} have no module to read"
    return weights.module


def _below(weights: Weights) -> Callable[[], Iterator[tuple[str, Tensor]]]:
    """What an adapter is added to."""
    if weights.base is None:
        return partial(base_weights, _module(weights))
    assert weights.base.buckets is not None, "an adapter without what it is added to"
    return weights.base.buckets
