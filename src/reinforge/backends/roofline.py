"""How long generation and training of one step take at best: flops and bytes against what a machine
can do.

The shares of the peak that are reached are those measured on an H200 (docs/lab-notebook.md).
Imports torch only to time a CPU.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from reinforge.backends.memory_model import is_fused, kv_token_bytes, weight_bytes
from reinforge.core.model_facts import ModelFacts


@dataclass(frozen=True, slots=True)
class Machine:
    """A device as far as times are predicted: peak of dense matrix products (bfloat16 on a GPU,
    float32 on a CPU) in flop/s, and of memory in bytes/s.
    """

    name: str
    flops: float
    bandwidth: float
    memory: int
    kind: str = "cuda"
    known: bool = True  # False: the GPU is not in the table, and its numbers are a guess


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of one step, for predictions. Lengths are means; `new_tokens` 0: nothing is
    generated. `passes` are forwards without gradient (old, reference).
    """

    samples: int
    prompt_tokens: float
    new_tokens: float
    group: int = 1
    max_batch: int = 512
    epochs: int = 1
    passes: int = 0
    critic: bool = False
    shared: bool = False  # the prompt of a group is computed once in training
    fp8: bool = False  # decoding reads the weights of the layers in FP8
    fp8_cache: bool = False  # and keys and values
    fp8_products: bool = False  # training multiplies in FP8

    @property
    def tokens(self) -> float:
        """Tokens that training computes."""
        return self.samples * (
            self.prompt_tokens / (self.group if self.shared else 1) + self.new_tokens
        )


# the first name that is among the words of the device's: teraflop/s in bfloat16 (dense), terabyte/s
GPUS: dict[str, tuple[float, float]] = {
    "GB200": (2250, 8.0),
    "B200": (2250, 8.0),
    "GH200": (989, 4.0),
    "H200": (989, 4.8),
    "H20": (148, 4.0),
    "H100 PCIE": (756, 2.0),
    "H100 NVL": (835, 3.9),
    "H800": (989, 3.35),
    "H100": (989, 3.35),
    "A100-PCIE-40GB": (312, 1.55),
    "A100-SXM4-40GB": (312, 1.55),
    "A100": (312, 2.0),
    "A800": (312, 2.0),
    "L40S": (362, 0.86),
    "L40": (181, 0.86),
    "L4": (121, 0.3),
    "A40": (150, 0.7),
    "A10": (70, 0.6),
    "A10G": (70, 0.6),
    "A30": (165, 0.93),
    "RTX 6000 ADA": (182, 0.96),
    "A6000": (155, 0.77),
    "RTX 5090": (210, 1.79),
    "RTX 4090": (165, 1.0),
    "RTX 4080": (97, 0.72),
    "RTX 3090": (71, 0.94),
    "V100": (28, 0.9),
    "V100S": (28, 1.1),
    "T4": (8, 0.3),
}
UNKNOWN = (100.0, 0.8)
TRAIN_SHARE = {"compiled": 0.45, "fused": 0.44, "eager": 0.3, "cpu": 0.5}  # of the peak flops
# Where norms and gates are a kernel each, what a token costs has three parts. Of the peak flops:
# products, those of experts with all that goes to them and comes back, and attention, which adds up
# its gradients in one order
FUSED_PRODUCTS = 0.65
FUSED_EXPERTS = 0.26
FUSED_ATTENTION = 0.18
# Numbers that a token moves beside them, forward and back: of each number of a hidden state in each
# layer (norms, sums, rotation, adapters), of an MLP's inner state, and of a logit
FUSED_MOVED = {"hidden": 40, "inner": 9, "vocab": 3}
# how many times as fast products in FP8 are in training, numbers rounded on the way
FP8_GAIN = 1.45
# while decoding: of the peak bandwidth, and of the peak flops
READ_SHARE = {"cuda": 0.86, "cpu": 0.72}
PRODUCT_SHARE = {"cuda": 0.55, "cpu": 0.5}
# decoding in FP8 with more sequences than our own kernels take: of the time of a layer's products,
# and seconds for each of the four times that it rounds what they read
FP8_PRODUCTS = 0.77
FP8_ROWS = 64
FP8_ROUNDING = 6e-6
NARROW_HEAD = 64  # attention over so narrow heads is not faster with keys and values in FP8
# of each layer in each decode step, however little it computes
LAYER_SECONDS = {"cuda": 1.1e-5, "cpu": 2.0e-4}
STATE_SECONDS = 8.0e-5  # likewise, of one that keeps state: it has many small kernels


def gpu(name: str, memory: int) -> Machine:
    """The machine behind a CUDA device's name."""
    key = known_gpu(name)
    flops, bandwidth = UNKNOWN if key is None else GPUS[key]
    return Machine(name, flops * 1e12, bandwidth * 1e12, memory, known=key is not None)


def known_gpu(name: str) -> str | None:
    """The GPU of our table that a name speaks of, in whole words.

    >>> known_gpu("NVIDIA A100-SXM4-80GB"), known_gpu("RTX A4000"), known_gpu("H2000")
    ('A100', None, None)
    """
    words = name.upper()
    return next((key for key in GPUS if re.search(rf"(?<![A-Z0-9]){key}(?![A-Z0-9])", words)), None)


@cache
def this_cpu(seconds: float = 0.2) -> Machine:
    """This machine's CPU, timed once per process: matrix products of a layer's size, and copies
    that no cache holds.
    """
    import torch

    from reinforge.models.device_memory import whole_memory

    a = torch.rand(256, 1024)
    b = torch.rand(1024, 1024)
    source = torch.empty(1 << 24)
    target = torch.empty_like(source)
    torch.mm(a, b)
    target.copy_(source)
    flops = 2 * 256 * 1024 * 1024 * _repeats(lambda: torch.mm(a, b), 0.75 * seconds)
    bandwidth = (
        2
        * source.numel()
        * source.element_size()
        * _repeats(lambda: target.copy_(source), 0.25 * seconds)
    )
    memory = whole_memory(torch.device("cpu"))
    return Machine(f"CPU with {torch.get_num_threads()} threads", flops, bandwidth, memory, "cpu")


def _repeats(work: Callable[[], object], seconds: float) -> float:
    """How often per second `work` can be called: the best of many, since others use the machine
    too.
    """
    best = float("inf")
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        work()
        best = min(best, time.perf_counter() - start)
    return 1 / best


def mode_of(f: ModelFacts, machine: Machine) -> str:
    """How it trains: a key of `TRAIN_SHARE`."""
    if machine.kind == "cpu":
        return "cpu"
    return "compiled" if f.compiled else "fused" if is_fused(f) else "eager"


def forward_flops(f: ModelFacts, tokens: float, length: float) -> float:
    """Products, and causal attention over rows of `length`: 4·Q per pair, half of the pairs."""
    return product_flops(f, tokens) + tokens * 2 * f.attending * f.query * length


def product_flops(f: ModelFacts, tokens: float) -> float:
    """2 per weight and token that meet. A recurrence changes every number of its states and reads
    it.
    """
    states = 0 if f.state is None else 6 * f.state.wide
    return tokens * (2 * (f.body(active=True) + f.vocab * f.hidden) + states)


def train_seconds(f: ModelFacts, machine: Machine, work: StepWork) -> float:
    """Forward, twice that for the backward (once where weights are frozen), once more for what is
    computed again.
    """
    length = work.prompt_tokens + work.new_tokens
    whole = work.epochs * (3 + f.checkpointing) * (2 if work.critic else 1)
    # gradients of frozen weights are the only part of a backward that nobody computes
    frozen = work.epochs * (f.rank is not None) * (2 if work.critic else 1)
    products = product_flops(f, work.tokens) * (whole - frozen + work.passes)
    if work.fp8_products and machine.kind == "cuda":
        # the layers' products, forward and for the gradients of inputs, of the policy
        passes = work.epochs * (2 + f.checkpointing) + work.passes
        products -= 2 * f.body(active=True) * work.tokens * passes * (1 - 1 / FP8_GAIN)
    attention = forward_flops(f, work.tokens, length) - product_flops(f, work.tokens)
    mode = mode_of(f, machine)
    if mode != "fused" or f.packed:  # in 4 bits adapters have no kernels of their own
        attention *= whole - frozen + work.passes
        return (products + attention) / (machine.flops * TRAIN_SHARE[mode])
    attention *= (whole + work.passes) / FUSED_ATTENTION
    moved = work.tokens * fused_bytes(f) * (whole + work.passes) / 3
    products /= FUSED_EXPERTS if f.experts > 1 else FUSED_PRODUCTS
    return (products + attention) / machine.flops + moved / (
        machine.bandwidth * READ_SHARE[machine.kind]
    )


def fused_bytes(f: ModelFacts) -> float:
    """What a token moves beside products and attention, forward and back."""
    inner = f.active * f.inner + f.shared
    layer = FUSED_MOVED["hidden"] * f.hidden + FUSED_MOVED["inner"] * inner
    return f.itemsize * (f.layers * layer + FUSED_MOVED["vocab"] * f.vocab)


def generate_seconds(f: ModelFacts, machine: Machine, work: StepWork) -> float:
    """Prefill once per prompt; each decode step reads the weights or does its products, whichever
    takes longer, then reads the cache, and pays for each layer.
    """
    if not work.new_tokens:
        return 0.0
    rows = min(work.samples, work.max_batch)
    length = work.prompt_tokens + work.new_tokens / 2
    prefill = forward_flops(
        f, work.samples / work.group * work.prompt_tokens, work.prompt_tokens
    ) / (machine.flops * TRAIN_SHARE[mode_of(f, machine)])
    weights = weights_read(f, rows)
    if work.fp8:
        weights *= 1 - f.body() * (f.itemsize - 1) / weight_bytes(replace(f, shards=None))
    halved = work.fp8_cache and f.head_dim > NARROW_HEAD
    cache = rows * kv_token_bytes(f, halved) * length
    step = decode_seconds(f, machine, rows, weights, cache) + layer_seconds(f, machine.kind)
    if work.fp8 and machine.kind == "cuda" and rows > FP8_ROWS:
        step += f.layers * 4 * FP8_ROUNDING - (1 - FP8_PRODUCTS) * _body_seconds(f, machine, rows)
    return prefill + work.new_tokens * work.samples / rows * step


def weights_read(f: ModelFacts, rows: float) -> float:
    """Bytes of weights that a decode step of so many rows reads: of the experts those that at least
    one row goes to.
    """
    touched = 1 - (1 - f.active / f.experts) ** rows if f.experts > 1 else 1.0
    return weight_bytes(replace(f, shards=None)) - f.body() * f.itemsize * (1 - touched)


def decode_seconds(
    f: ModelFacts, machine: Machine, rows: float, weights: float, cache: float
) -> float:
    """Of one step that reads so many bytes of weights and of cache; what layers take however little
    they compute is `layer_seconds`.
    """
    bandwidth = machine.bandwidth * READ_SHARE[machine.kind]
    products = forward_flops(f, rows, 0.0) / (machine.flops * PRODUCT_SHARE[machine.kind])
    return max(weights / bandwidth, products) + cache / bandwidth


def _body_seconds(f: ModelFacts, machine: Machine, rows: float) -> float:
    """Of the products of all layers in a decode step."""
    return 2 * f.body(active=True) * rows / (machine.flops * PRODUCT_SHARE[machine.kind])


def layer_seconds(f: ModelFacts, kind: str) -> float:
    if kind == "cuda" and f.state is not None:
        return LAYER_SECONDS[kind] * f.attending + STATE_SECONDS * (f.layers - f.attending)
    return LAYER_SECONDS[kind] * f.layers
