"""How long a step takes on n GPUs, by a small explicit model. Imports no torch.

    colocated          generate(n) + train(n) + sync
    split, k engines   generate(k) + train(n - k) + sync
    async, staleness s max(generate(k, s), train(n - k)) + sync,
                       generate(k, s) = max(steady(k), generate(k) / s), partial: steady(k)

split is on-policy: each half waits for the other.

generate(k) follows every sequence of one replica to its end, so the long tail costs what it costs:
few rows, full price of a decode step. steady(k) is the same work with the batch kept full. train(n)
is flops, or the gathering of shards where that takes longer, and no less than the longest row of
each optimizer batch takes alone. Shares of the hardware's peak are those of backends/roofline.py,
measured on one GPU; `PhaseRatios` replaces them by a run's own.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist

from reinforge.backends import roofline
from reinforge.backends.memory_model import GIB, kv_token_bytes, weight_bytes
from reinforge.backends.roofline import Machine, StepWork, forward_flops
from reinforge.core.model_facts import ModelFacts

MEMORY_GIB = {
    "B200": 180,
    "GH200": 96,
    "H200": 141,
    "H20": 96,
    "H100 NVL": 94,
    "H100": 80,
    "H800": 80,
    "A100-PCIE-40GB": 40,
    "A100-SXM4-40GB": 40,
    "A100": 80,
    "A800": 80,
    "L40": 48,
    "L4": 24,
    "A40": 48,
    "A6000": 48,
    "RTX 6000 ADA": 48,
    "A10": 24,
    "A30": 24,
    "RTX 5090": 32,
    "RTX 4090": 24,
    "RTX 4080": 16,
    "RTX 3090": 24,
    "V100": 32,
    "T4": 16,
}
LINK_SHARE = 0.8  # of a link's peak that collectives reach
HOP_SECONDS = {"node": 8e-6, "net": 3e-5}  # of one small all-reduce
# while a server decodes: of the peak bandwidth, and of each layer, however little it computes
SERVED_READ_SHARE = 0.72
SERVED_LAYER_SECONDS = {"compiled": 1.0e-4, "eager": 1.8e-4}
WEIGHTS_SHARE = 0.6  # of an engine's memory that weights may take; the rest is for the cache
CACHE_SHARE = 0.9
SYNC_SECONDS = 1.0  # to pause engines, hand the weights over, and go on
FIXED_SECONDS = 1.0  # of a step: rewards, packing, logging
SIGMA = 0.6  # spread of ln(length) where no run tells it
WORTH = 1.03  # staler data must be this much faster


@dataclass(frozen=True)
class GpuCluster:
    """GPUs of one kind, for predictions: how many, how many in a node, and bytes/s of each inside a
    node and between nodes.
    """

    machine: Machine
    gpus: int
    node: int = 8
    inside: float = 450e9
    between: float = 50e9

    def link(self, gpus: int) -> float:
        """What each of so many GPUs gets from the others."""
        return LINK_SHARE * (self.inside if gpus <= self.node else self.between)


@cache
def _normal(n: int) -> tuple[float, ...]:
    return tuple(NormalDist().inv_cdf((i + 0.5) / n) for i in range(n))


@dataclass(frozen=True)
class CompletionLengths:
    """How long completions are, for predictions: log-normal, cut at `cap`, with this mean after the
    cut.
    """

    mean: float
    cap: int
    sigma: float = SIGMA

    def of(self, n: int) -> tuple[float, ...]:
        """n lengths, the shortest first: the middles of n equal parts of the distribution."""
        return _quantiles(self, n)

    def longest(self, n: int) -> float:
        return self.of(n)[-1]


@cache
def _quantiles(lengths: CompletionLengths, n: int) -> tuple[float, ...]:
    """The mean before the cut is found by halving."""
    z = _normal(n)
    cap = float(lengths.cap)
    sigma = lengths.sigma
    low = -5.0
    high = math.log(cap) + 5.0
    for _ in range(30):
        mu = (low + high) / 2
        mean = sum(min(cap, math.exp(mu + sigma * x)) for x in z) / n
        low, high = (mu, high) if mean < lengths.mean else (low, mu)
    return tuple(min(cap, math.exp(mu + sigma * x)) for x in z)


@dataclass(frozen=True)
class ClusterLayout:
    """Where generation is in a prediction: on all GPUs in turn (engines 0), or on `engines` of
    them; `staleness` 0 means on-policy.
    """

    engines: int = 0
    staleness: int = 0
    tensor: int | None = None  # GPUs of one replica; None: as few as hold it
    # sequences live through an update of the weights: nobody waits for the longest
    partial: bool = False

    @property
    def name(self) -> str:
        return (
            "colocated"
            if not self.engines
            else (
                f"async {self.staleness}{', partial' if self.partial else ''}"
                if self.staleness
                else "split"
            )
        )


@dataclass(frozen=True)
class PhaseRatios:
    """Measured over modelled time of each phase, from a run; 1 without one. Predictions for more
    GPUs are multiplied by them.
    """

    generate: float = 1.0
    train: float = 1.0
    fixed: float = FIXED_SECONDS


@dataclass(frozen=True)
class StepEstimate:
    """What a prediction says about one layout: seconds of a step and of its phases. Idle shares: of
    the GPUs that train, of those that generate.
    """

    layout: ClusterLayout
    gpus: int
    seconds: float
    generate: float
    train: float
    sync: float
    tokens: float
    mfu: float
    idle_train: float
    idle_generate: float

    @property
    def tokens_per_gpu(self) -> float:
        return self.tokens / self.seconds / self.gpus


def machine(name: str, memory_gib: float | None = None) -> Machine:
    """A GPU by its name in roofline.GPUS.

    >>> machine("H100").flops, machine("H20").memory // GIB
    (989000000000000.0, 96)
    """
    memory = memory_gib or next((gib for key, gib in MEMORY_GIB.items() if key in name.upper()), 80)
    return roofline.gpu(name, int(memory * GIB))


def replica(f: ModelFacts, m: Machine) -> int:
    """GPUs of one engine: the smallest power of two whose memory holds the weights with room for
    the cache.
    """
    size = 1
    while weight_bytes(f) > WEIGHTS_SHARE * m.memory * size:
        size *= 2
    return size


@dataclass(frozen=True)
class ReplicaTimes:
    """The times of one replica on `size` GPUs: seconds of a decode step for so many rows of such
    length. Predictions ask it.
    """

    f: ModelFacts
    cluster: GpuCluster
    size: int

    def rows(self, length: float, asked: int) -> int:
        """How many sequences the cache holds at once, at most `asked`."""
        room = CACHE_SHARE * self.cluster.machine.memory * self.size - weight_bytes(self.f)
        return max(1, min(asked, int(room / (kv_token_bytes(self.f) * length))))

    def step(self, rows: float, length: float) -> float:
        m = self.cluster.machine
        f = self.f
        mode = "compiled" if f.compiled else "eager"
        # of the experts, by at least one row
        touched = 1 - (1 - f.active / f.experts) ** rows if f.experts > 1 else 1.0
        body = f.body() * f.itemsize
        reads = weight_bytes(f) - body * (1 - touched) + rows * kv_token_bytes(f) * length
        flops = forward_flops(f, rows, 2 * length)
        compute = (
            max(
                reads / (m.bandwidth * SERVED_READ_SHARE),
                flops / (m.flops * roofline.TRAIN_SHARE[mode]),
            )
            / self.size
        )
        return SERVED_LAYER_SECONDS[mode] * f.layers + compute + self._reduce(rows)

    def _reduce(self, rows: float) -> float:
        """Two all-reduces of every layer's output over the GPUs of the replica."""
        if self.size == 1:
            return 0.0
        hop = HOP_SECONDS["node" if self.size <= self.cluster.node else "net"]
        return (
            2
            * self.f.layers
            * (hop + 2 * rows * self.f.hidden * self.f.itemsize / self.cluster.link(self.size))
        )

    def prefill(self, tokens: float, length: float) -> float:
        mode = "compiled" if self.f.compiled else "eager"
        return forward_flops(self.f, tokens, length) / (
            self.cluster.machine.flops * roofline.TRAIN_SHARE[mode] * self.size
        )


def generate_seconds(
    engine: ReplicaTimes, work: StepWork, lengths: CompletionLengths, replicas: int
) -> float:
    """Until the slowest replica has ended: it has the longest sequence of all.

    Sequences wait for a place and are then followed to their end.
    """
    own = max(1, math.ceil(work.samples / replicas))
    waiting = list(lengths.of(own))
    waiting[-1] = lengths.longest(work.samples)
    waiting = [waiting[i * _stride(own) % own] for i in range(own)]  # in no particular order
    places = engine.rows(work.prompt_tokens + lengths.mean, min(own, work.max_batch))
    live = waiting[:places]
    heapq.heapify(live)
    waiting = waiting[places:]
    done = 0.0
    seconds = engine.prefill(own / work.group * work.prompt_tokens, work.prompt_tokens)
    while live:
        until = heapq.heappop(live)
        seconds += (until - done) * engine.step(
            len(live) + 1,
            (
                work.prompt_tokens + lengths.mean / 2
                if waiting
                else work.prompt_tokens + min(done, lengths.cap)
            ),
        )
        done = until
        if waiting:
            heapq.heappush(live, done + waiting.pop())
    return seconds


def _stride(n: int) -> int:
    """A number without common divisor with n, near the golden section of it."""
    return next(k for k in range(max(1, int(0.618 * n)), n + 2) if math.gcd(k, n) == 1)


def steady_seconds(
    engine: ReplicaTimes, work: StepWork, lengths: CompletionLengths, replicas: int, staleness: int
) -> float:
    """The same tokens with every place taken all the time: (1 + staleness) steps' worth of
    sequences are in flight.
    """
    own = work.samples / replicas
    length = work.prompt_tokens + lengths.mean / 2
    places = engine.rows(
        work.prompt_tokens + lengths.mean, max(1, min(int(own * (1 + staleness)), work.max_batch))
    )
    return own * lengths.mean / places * engine.step(places, length) + engine.prefill(
        own / work.group * work.prompt_tokens, work.prompt_tokens
    )


def train_seconds(
    f: ModelFacts,
    cluster: GpuCluster,
    work: StepWork,
    lengths: CompletionLengths,
    gpus: int,
    microbatch: int,
    updates: int = 1,
) -> float:
    """Flops of all passes on `gpus`, no less than the longest row of each of the `updates` takes
    alone; or the shards' way around, where that is longer.
    """
    compute = roofline.train_seconds(f, cluster.machine, work) / gpus
    longest = (
        (work.prompt_tokens + lengths.longest(math.ceil(work.samples / updates)))
        * gpus
        * updates
        / work.tokens
    )  # against an even share
    rounds = updates * math.ceil(work.tokens / gpus / updates / microbatch)
    # of each micro-batch: forward and backward, or to score
    gathers = 2 * work.epochs + work.passes
    reduces = work.epochs  # gradients
    moved = f.itemsize * (gathers * f.parameters() + reduces * f.learning()) if gpus > 1 else 0.0
    # tokens go to their experts and back, in the forward, the backward, and what is computed again
    if f.experts > 1:
        moved_tokens = (
            work.tokens
            / gpus
            * f.hidden
            * f.itemsize
            * 2
            * f.active
            * f.layers
            * (2 + f.checkpointing + work.passes)
        )
        compute += moved_tokens / cluster.link(min(gpus, f.experts, cluster.node))
    return max(compute * max(1.0, longest), rounds * moved / cluster.link(gpus))


def sync_seconds(f: ModelFacts, cluster: GpuCluster, layout: ClusterLayout, tensor: int) -> float:
    """Every GPU of every engine gets its part of the weights."""
    across = cluster.gpus > cluster.node
    return SYNC_SECONDS + weight_bytes(f) / tensor / (
        LINK_SHARE * (cluster.between if across else cluster.inside)
    )


def simulate(
    f: ModelFacts,
    cluster: GpuCluster,
    work: StepWork,
    lengths: CompletionLengths,
    layout: ClusterLayout,
    *,
    ratios: PhaseRatios = PhaseRatios(),
    microbatch: int = 16384,
    updates: int = 1,
) -> StepEstimate:
    """One step under one layout; `updates`: its optimizer batches."""
    tensor = layout.tensor or replica(f, cluster.machine)
    generating = layout.engines or cluster.gpus
    training = cluster.gpus - layout.engines
    replicas = max(1, generating // tensor)
    engine = ReplicaTimes(f, cluster, tensor)
    work = replace(work, new_tokens=lengths.mean)
    generate = ratios.generate * generate_seconds(engine, work, lengths, replicas)
    train = ratios.train * train_seconds(f, cluster, work, lengths, training, microbatch, updates)
    sync = sync_seconds(f, cluster, layout, tensor)
    if layout.staleness:
        steady = ratios.generate * steady_seconds(engine, work, lengths, replicas, layout.staleness)
        generate = steady if layout.partial else max(steady, generate / layout.staleness)
        seconds = max(generate, train) + sync + ratios.fixed
    else:
        seconds = generate + train + sync + ratios.fixed
    useful = 3 * forward_flops(f, work.tokens, work.prompt_tokens + work.new_tokens) * work.epochs
    tokens = work.samples * (work.prompt_tokens + lengths.mean)
    return StepEstimate(
        layout,
        cluster.gpus,
        seconds,
        generate,
        train,
        sync,
        tokens,
        useful / (seconds * cluster.gpus * cluster.machine.flops),
        1 - train / seconds,
        1 - generate / seconds,
    )


def layouts(
    cluster: GpuCluster, tensor: int, staleness: tuple[int, ...] = (1, 2, 4)
) -> Iterator[ClusterLayout]:
    """Colocated, and splits at eighths of the cluster that whole replicas fit into."""
    yield ClusterLayout(tensor=tensor)
    sizes = sorted(
        {cluster.gpus * i // 8 // tensor * tensor for i in range(1, 8)} - {0, cluster.gpus}
    )
    for size in sizes:
        for s in (0, *staleness):
            yield ClusterLayout(size, s, tensor)


def best(steps: list[StepEstimate]) -> StepEstimate:
    """The fastest; of those nearly as fast the ones with the freshest data, of these a colocated
    one.
    """
    fastest = min(step.seconds for step in steps)
    near = [step for step in steps if step.seconds <= WORTH * fastest]
    return min(near, key=_order)


def _order(step: StepEstimate) -> tuple[int, bool, float]:
    return step.layout.staleness, step.layout.engines > 0, step.seconds
