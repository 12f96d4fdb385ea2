"""How much memory training and generation take, part by part, from the numbers in a model's
configuration.

Imports no torch: `plan` asks before anything is loaded. Checked against peaks measured on an H200
(tests/unit/backends/test_memory_model.py), and of one rank of many against every tensor that FSDP2
allocates (tests/unit/benchmarks/test_rank_of_many.py).

Legend: N packed tokens, L layers, H hidden, I inner size of the MLP, Q = heads x head size, K =
key/value heads x head size, V vocabulary, b bytes per element of the module.
"""

from __future__ import annotations

from dataclasses import dataclass

from reinforge.core.kv_pool import (
    HOST,
    DeviceShare,
    block_tokens,
    gpu_room,
    logit_bytes,
    pool_size,
    prefill_bytes,
)
from reinforge.core.logit_memory import CHUNK_ELEMENTS, stay
from reinforge.core.mlp_tiles import TILE, in_tiles
from reinforge.core.model_facts import FLOAT, ModelFacts

GIB = 2**30
# torch and transformers in the memory of a process; a GPU's allocator does not count them
LIBRARIES = int(0.4 * GIB)
# of what is left for activations; the rest is fragmentation and what the model below does not see
SHARE = 0.85
# bytes of a number in NF4 with double quantisation: half a byte, one for every 64 numbers, and four
# for every 256 of those
NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
# bytes that a split master has beside the weight: 16 bits, and one for ties
SPLIT = 2 + 1 / 8
# layers' inputs that are on the device at once where the others wait in host memory
HERE = 3
# tokens per micro-batch
CPU_BUDGET = 4096
LEAST = 1024
MOST = 131072


def weight_bytes(f: ModelFacts) -> int:
    """With the adapter, which is float32. Of weights in NF4 one matrix at a time is unpacked. A
    shard that is trained is float32: it is its own master.
    """
    largest = max(a * b for a, b, _ in f.linears().values()) if f.packed else 0
    if f.shards is not None:
        frozen = f.parameters() - f.packed - (f.learning() if f.rank is None else 0)
        cut = f.learning() * FLOAT + frozen * f.itemsize + int(NF4 * f.packed)
        return cut // f.shards + largest * f.itemsize
    base = (f.parameters() - f.packed + largest) * f.itemsize + int(NF4 * f.packed)
    return base + (f.learning() * FLOAT if f.rank is not None else 0)


def optimizer_bytes(f: ModelFacts) -> int:
    """What it keeps, and the masters. On the device nothing of it with offload."""
    if f.offload:
        return 0
    if f.shards is not None:
        return moment_bytes(f)
    master = SPLIT if f.split else FLOAT
    return moment_bytes(f) + (int(f.learning() * master) if f.masters else 0)


def moment_bytes(f: ModelFacts) -> int:
    """What the optimizer makes in its first step; of one that is not known as much as AdamW."""
    return 0 if f.offload else _moments_of_all(f) // (f.shards or 1)


def _moments_of_all(f: ModelFacts) -> int:
    n = f.learning()
    if f.optimizer == "adamw_8bit":
        return int(n * (2 + 2 * FLOAT / 256))
    if f.optimizer == "lion":
        return FLOAT * n
    if f.optimizer == "muon":  # of the matrices of layers one moment
        return 2 * FLOAT * n - FLOAT * (n if f.rank is not None else min(n, f.body()))
    if f.optimizer == "adafactor":  # a number for each row and each column
        return FLOAT * (n // f.rank if f.rank is not None else _sides(f))
    return 2 * FLOAT * n


def _sides(f: ModelFacts) -> int:
    """Rows and columns of all matrices."""
    ends = (1 if f.tied else 2) * (f.vocab + f.hidden)
    return f.layers * sum((a + b) * n for a, b, n in f.linears().values()) + ends


def gradient_bytes(f: ModelFacts) -> int:
    """Sums, and the largest gradient as it comes out of the backward, before it is added (the
    embedding's). Of shards the sums; what comes out of the backward is in `gathered`.
    """
    if f.gradients is not None:
        return f.gradients
    if f.shards is not None:
        return f.learning() * FLOAT // f.shards
    each = f.itemsize if f.narrow and f.masters else FLOAT
    return f.learning() * each + (f.vocab * f.hidden * f.itemsize if f.masters else 0)


def critic_bytes(f: ModelFacts) -> int:
    """Another model of the same shape with its own optimizer."""
    return weight_bytes(f) + optimizer_bytes(f) + gradient_bytes(f)


def kept_logits(f: ModelFacts, tokens: int, left: int) -> int:
    """Bytes of the logits that stay from the forward to the backward, with `left` bytes of a GPU
    beside everything else: none where they would take too much of it.
    """
    size = tokens * f.vocab * f.itemsize
    return size if stay(size, left) else 0


def head_bytes(f: ModelFacts, tokens: int, device: str = "cuda", logits: int = 0) -> int:
    """The head's own gradient in float32; beside it a chunk of logits, which become their gradient
    in place (on a CPU with five float32 copies), and in the end the gradient as the weights are (on
    a CPU beside every chunk). Where there are several chunks, the next one is made before that one
    is gone. `logits`: of those that were kept, which are all there.
    """
    elements = min(tokens * f.vocab, CHUNK_ELEMENTS[device])
    several = tokens * f.vocab > CHUNK_ELEMENTS[device]
    weights = f.vocab * f.hidden if f.rank is None else 0
    rounded = weights * f.itemsize
    if device == "cuda":
        chunk = elements * f.itemsize
        return weights * FLOAT + max(rounded, logits or (2 * chunk if several else chunk))
    chunk = elements * (2 * f.itemsize + 5 * FLOAT)
    return weights * FLOAT + max(chunk + rounded, 2 * chunk if several else 0)


def is_fused(f: ModelFacts) -> bool:
    """Float32 trains as transformers computes it."""
    return f.fused and f.itemsize < FLOAT


def saved_attention(f: ModelFacts) -> dict[str, int]:
    """Of what `saved` lists, the part of attention. Norms of queries and keys keep what the other
    norms keep of their inputs.
    """
    b = f.itemsize
    normed = f.query + f.key if f.head_norms else 0
    if is_fused(f) or (f.compiled and f.rank is None):
        norms = b * normed
    else:
        norms = normed * (FLOAT if f.rank is not None else FLOAT + b)
    return {
        "head_norms": norms,
        "q": b * f.query,
        "k": b * f.key,
        "v": b * f.value,
        "attention": b * f.attended,
        "attention_sums": FLOAT * f.heads,
    }


def saved_state(f: ModelFacts) -> int:
    """Bytes that the mixer of one layer that keeps state keeps of one token."""
    if f.state is None:
        return 0
    return f.state.kept_narrow * f.itemsize + f.state.kept_wide * FLOAT


def saved(f: ModelFacts) -> dict[str, int]:
    """Bytes that one decoder layer that attends keeps of one token for its backward pass, tensor by
    tensor.

    Eager: RMSNorm keeps its input in float32 and, for the gradient of its weight, the normalised
    input; a matrix keeps its input; attention keeps q, k, v, its output and one float32 per head;
    silu keeps gate, the product keeps silu(gate) and up. Compiled, or with a kernel for norms and
    one for gates: what is elementwise is computed again; left are the inputs of matrices, of norms,
    of gates and of attention. Adapters keep the inputs of the matrices, which the matrices share,
    and what is between their two factors; with those kernels an MLP with adapters is one function,
    which computes the input of its last matrix again (models/lora_linear.py), unless the weights
    are in NF4.
    """
    b = f.itemsize
    h = f.hidden
    inner = f.wide
    attention = saved_attention(f)
    gate = {"gate": b * inner, "activated": b * inner} if f.gated else {"activated": b * inner}
    if is_fused(f) and f.gated:
        gate.pop("activated")
    if f.rank is not None:
        # what the last matrix of an MLP reads
        again = is_fused(f) and f.gated and f.experts == 1 and not f.packed
        return {
            "norms": 2 * (b if is_fused(f) else FLOAT) * h,
            "norm_outputs": 2 * b * h,
            **({} if again else {"product": b * inner}),
            "ranks": 2 * b * f.rank * len(f.linears()),
            **attention,
            **gate,
            "up": b * inner,
        }
    if f.compiled or is_fused(f):
        mlp = {"gate": b * inner} if f.gated else {}
        return {
            "inputs": 2 * b * h,
            "normalised": 2 * b * h,
            **attention,
            **mlp,
            "up": b * inner,
            "product": b * inner,
        }
    return {
        "norms": 2 * FLOAT * h,
        "normalised": 2 * b * h,
        "norm_outputs": 2 * b * h,
        **attention,
        **gate,
        "up": b * inner,
        "product": b * inner,
    }


def activation_bytes(f: ModelFacts) -> int:
    """Per packed token, all that a pass can keep: of all layers, of one that is computed again, and
    of what is outside of them.
    """
    return kept_bytes(f) + recomputed_bytes(f) + outside_bytes(f)


def kept_bytes(f: ModelFacts) -> int:
    """Per packed token, what all layers keep; with gradient checkpointing their inputs. Where these
    wait in host memory: of the layer that computes, of the one before it, and a copy under way.
    """
    if f.checkpointing:
        there = min(f.layers, HERE) if f.on_host else f.layers
        return there * f.hidden * f.itemsize
    attention = sum(saved_attention(f).values())
    around = sum(saved(f).values()) - attention  # norms and MLP, which every layer has
    mixers = 0 if f.state is None else f.state.layers
    return f.layers * around + f.attending * attention + mixers * saved_state(f)


def recomputed_bytes(f: ModelFacts) -> int:
    """Per packed token, the layer that gradient checkpointing has computed again, in whole."""
    if not f.checkpointing:
        return 0
    attention = sum(saved_attention(f).values())
    return sum(saved(f).values()) - attention + max(attention, saved_state(f))


def outside_bytes(f: ModelFacts) -> int:
    """Per packed token: embedding, final norm, rotary tables, the rows that the head reads and
    their gradient.
    """
    return f.hidden * (5 * f.itemsize + FLOAT) + 4 * f.head_dim * FLOAT + 64


def backward_bytes(f: ModelFacts) -> int:
    """Per packed token: gradients inside the layer that the backward is in. Most are there inside
    the MLP: of gate and up, while what `saved` lists of it is there too.
    """
    work = 0 if f.state is None else FLOAT * f.state.work
    # an MLP with adapters has what its last matrix reads, and the gradient of that, once more
    wide = 4 if f.rank is not None and "product" not in saved(f) else 2
    return max(f.itemsize * (wide * f.wide + 4 * f.hidden), work)


def far_enough(f: ModelFacts) -> int:
    """Tokens per micro-batch past which more is not faster: wide matrices keep a GPU busy with
    fewer.
    """
    return 19456 if f.hidden < 3072 else 10240


def tiled_bytes(f: ModelFacts, tokens: int) -> tuple[int, int]:
    """What is not there in the backward of a layer because its MLP goes through a long pack in
    tiles (see models/tiled_mlp.py): of what is kept, and of gradients.
    """
    dense = f.gated and f.experts == 1 and f.state is None
    if not (f.checkpointing and dense and in_tiles(tokens)):
        return 0, 0
    wide = sum(saved(f).get(name, 0) for name in ("gate", "activated", "up", "product"))
    return (tokens - TILE) * wide, (tokens - TILE) * 2 * f.itemsize * f.wide


def fp8_bytes(f: ModelFacts) -> int:
    """The native engine's FP8 copies of the matrices of the layers, with a float32 for each output:
    models/fp8_layers.py.
    """
    outputs = sum(out * count for _, out, count in f.linears().values())
    return f.body() + f.layers * FLOAT * outputs


def kv_token_bytes(f: ModelFacts, fp8: bool = False) -> int:
    """`fp8`: one byte a number, and a float32 for each head."""
    numbers = f.key + f.value
    of_layer = numbers + 2 * FLOAT * f.kv_heads if fp8 else numbers * f.itemsize
    return f.attending * of_layer


@dataclass(frozen=True, slots=True)
class CachePool:
    """What the native engine's cache is expected to hold."""

    tokens: int
    slots: int  # of state, each of one sequence; 0: no layer keeps state
    bytes: int


def kv_pool(
    f: ModelFacts,
    free: int | None,
    max_batch: int,
    longest: int,
    *,
    at_once: int | None = None,
    share: DeviceShare | None = None,
    kv_gib: float | None = None,
    fp8: bool = False,
) -> CachePool:
    """What the native engine takes for its cache on a GPU where `free` are free, or on a CPU
    (None). `at_once`: see `pool_size`.
    """
    block = block_tokens("cpu" if free is None else "cuda")
    unit = kv_token_bytes(f, fp8) * block
    room = HOST if free is None else gpu_room(f, free, max_batch, share or DeviceShare())
    blocks, slots = pool_size(
        unit,
        f.slot_bytes,
        room,
        rows=max_batch,
        longest=longest,
        at_once=at_once,
        kv_gib=kv_gib,
        block=block,
    )
    return CachePool(blocks * block, slots, blocks * unit + slots * f.slot_bytes)


def end_weights(f: ModelFacts) -> int:
    """Embedding and head."""
    return (1 if f.tied else 2) * f.vocab * f.hidden


def gathered_bytes(f: ModelFacts) -> int:
    """What FSDP2 has of the whole model on a rank while the backward is in a layer: the ends, this
    layer and the one before it in the precision of the module; of the one after it the gradients
    in float32, on their way to the shards; and gradients that wait: of the head, and of the first
    matrix of this layer that the backward meets.
    """
    if f.shards is None:
        return 0
    layer = f.body() // f.layers
    found = (end_weights(f) + 2 * layer) * f.itemsize
    if f.rank is None:
        a, b, n = f.linears()["down_proj"]
        found += layer * FLOAT + (f.vocab * f.hidden + a * b * n) * f.itemsize
    return found


def stages(
    f: ModelFacts, tokens: int, device: str = "cuda", logits: int = 0
) -> dict[str, dict[str, int]]:
    """What a training pass over micro-batches of `tokens` has at the stages that can be its peak,
    beside what it always has: in the backward of the head, in that of the last layer, and where
    shards get the gradients of the ends.
    """
    kept = tokens * kept_bytes(f)
    tiled, gradients = tiled_bytes(f, tokens)
    cut = f.shards is not None
    found = {
        "head": {
            "activations": kept + tokens * outside_bytes(f),
            "head": head_bytes(f, tokens, device, logits),
            # the last layer that was gathered, and the ends
            "gathered": (end_weights(f) + f.body() // f.layers) * f.itemsize if cut else 0,
        },
        "layer": {
            "activations": kept + tokens * recomputed_bytes(f) - tiled,
            "head": tokens * backward_bytes(f) - gradients,
            "gathered": gathered_bytes(f),
        },
    }
    if cut and f.rank is None:
        ends = end_weights(f) * (f.itemsize + FLOAT) + f.body() // f.layers * FLOAT
        found["end"] = {"activations": 0, "head": 0, "gathered": ends}
    return found


def training(
    f: ModelFacts,
    tokens: int,
    device: str = "cuda",
    *,
    reference: bool = False,
    critic: bool = False,
    logits: int = 0,
) -> dict[str, int]:
    """Bytes of each part at the peak of a training pass over micro-batches of `tokens`. `logits`:
    see `kept_logits`.
    """
    peak = max(stages(f, tokens, device, logits).values(), key=total)
    copied = f.parameters() * f.itemsize // (f.shards or 1)
    return {
        "weights": weight_bytes(f),
        "optimizer": optimizer_bytes(f),
        "gradients": gradient_bytes(f),
        **peak,
        "reference": copied if reference and f.rank is None else 0,
        "critic": critic_bytes(f) if critic else 0,
        **({"libraries": LIBRARIES} if device == "cpu" else {}),
    }


def copy_bytes(f: ModelFacts) -> int:
    """A copy of what is trained, in the precision of the model, where the engine generates while a
    step trains.
    """
    return f.learning() * f.itemsize


def passing_bytes(f: ModelFacts, tokens: int, models: int = 1) -> int:
    """What only a training pass over micro-batches of `tokens` has, at its peak: the gradients, and
    what the backward reads. With a critic of its own, which trains after the policy, there are two
    `models`.
    """
    return models * gradient_bytes(f) + max(total(parts) for parts in stages(f, tokens).values())


def frozen(f: ModelFacts, tokens: int, device: str = "cuda", ranks: int = 1) -> dict[str, int]:
    """Bytes of each part of a model that only tells log-probs, where it is cut over `ranks`: a pass
    without gradient over `tokens`, whose layers leave nothing behind.
    """
    elements = min(tokens * f.vocab, CHUNK_ELEMENTS[device])
    return {
        "weights": f.parameters() * f.itemsize // ranks,
        "activations": tokens * sum(saved(f).values()),
        "head": elements * (f.itemsize + (0 if device == "cuda" else 5 * FLOAT)),
        **({"libraries": LIBRARIES} if device == "cpu" else {}),
    }


def generation(
    f: ModelFacts,
    kv: int,
    rows: int,
    device: str = "cuda",
    *,
    reference: bool = False,
    critic: bool = False,
) -> dict[str, int]:
    """Bytes of each part while `rows` sequences are decoded: no gradients, float32 logits of all
    rows a few times over.
    """
    held = training(f, 0, device, reference=reference, critic=critic)
    if critic:
        held["critic"] -= gradient_bytes(f)
    still = {k: v for k, v in held.items() if k not in ("gradients", "activations", "gathered")}
    prefill = prefill_bytes(f) if device == "cuda" else 0
    return {**still, "head": logit_bytes(f, rows), "prefill": prefill, "kv": kv}


def budget(
    f: ModelFacts,
    free: int,
    *,
    reference: bool = False,
    critic: bool = False,
    reserved: int = 0,
    longest: int = 0,
) -> int:
    """Packed tokens per micro-batch that fit a GPU with `free` bytes left beside the weights: SHARE
    of what remains after the optimizer, gradients, copies and the head's chunk; a multiple of 1024.
    No more than are `far_enough`, unless a row is longer.
    """
    parts = training(f, MOST, reference=reference, critic=critic)
    left = (
        free
        - reserved
        - sum(parts[name] for name in ("optimizer", "gradients", "reference", "critic"))
        - head_bytes(f, MOST)
        - gathered_bytes(f)
    )
    fits = int(SHARE * left / (activation_bytes(f) + backward_bytes(f))) // 1024 * 1024
    return max(LEAST, min(fits, MOST, max(far_enough(f), -(-longest // 1024) * 1024)))


def total(parts: dict[str, int]) -> int:
    return sum(parts.values())
