"""How large the cache of the native engine is: what a device has left while nothing is trained.

Imports no torch: `plan` computes the same numbers before anything is loaded
(docs/decisions/0024-what-the-cache-takes.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from reinforge.core.model_facts import FLOAT, ModelFacts

# tokens of a block: on a GPU a tile of keys that one instruction fetches
BLOCK = 16
GPU_BLOCK = 64
LEAST = 8  # blocks
UNSEEN = 4096  # blocks of each sequence where they take nothing and nobody says how long one is
PREFILL_TOKENS = 16384  # packed prompt tokens per forward
TOO_LARGE = "Lower it, or leave it out: the cache then takes what training does not need."
HOST = int(0.8 * 2**30)  # bytes on a CPU, whose memory is not what training runs short of
# of what a GPU has left; the rest is for CUDA graphs, for models that score answers meanwhile, and
# for holes between tensors
SHARE = 0.9
# a cache of at most this share of a GPU always stays while training; micro-batches leave it free
KEEP = 1 / 12
# where the engine generates while a step trains, what micro-batches of our own choice leave free
# for its cache
BESIDE = 1 / 4
# a larger one stays where training leaves this share of the GPU free beside it: a graph that is
# captured later cannot have what torch's allocator holds
SPARE = 0.05


def block_tokens(device: str) -> int:
    """Tokens of a block on such a device."""
    return GPU_BLOCK if device == "cuda" else BLOCK


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """What the native engine must leave of its GPU to others. The builders of a run make it;
    without one the engine is alone.
    """

    # bytes that training takes after the engine was made, and holds while it generates
    to_come: int = 0
    engines: int = 1  # that share the rest


def left_free(whole: int, overlap: bool) -> int:
    """Bytes of a GPU of `whole` that micro-batches leave to the cache."""
    return int((BESIDE if overlap else KEEP) * whole)


def prefill_bytes(f: ModelFacts) -> int:
    """Activations of one forward over prompts, and what a recurrence computes with in float32."""
    work = 0 if f.state is None else FLOAT * f.state.work
    return PREFILL_TOKENS * (f.itemsize * (4 * f.hidden + 3 * f.wide) + work)


def logit_bytes(f: ModelFacts, rows: int) -> int:
    """Float32 logits of all rows, a few times over."""
    return 4 * FLOAT * rows * f.vocab


def gpu_room(f: ModelFacts, free: int, rows: int, share: DeviceShare) -> int:
    """Bytes that the cache of one engine may take of a GPU where `free` are free now: SHARE of what
    training does not need, less what forwards over prompts and over `rows` sequences need.
    """
    work = share.engines * (prefill_bytes(f) + logit_bytes(f, rows))
    return max(0, int(SHARE * (free - share.to_come - work))) // share.engines


def pool_blocks(
    block_bytes: int,
    room: int,
    *,
    rows: int,
    longest: int | None,
    kv_gib: float | None = None,
    block: int = BLOCK,
) -> int:
    """Blocks of the cache: as configured, or as many as have room, at most those that `rows` of the
    longest sequences fill.
    """
    wanted = None if not longest else max(LEAST, rows * -(-longest // block))
    if not block_bytes:  # no layer attends
        return wanted or rows * UNSEEN
    if kv_gib is not None:
        return max(LEAST, int(kv_gib * 2**30) // block_bytes)
    most = max(LEAST, room // block_bytes)
    return most if wanted is None else min(most, wanted)


def state_slots(slot_bytes: int, room: int, *, rows: int, sequence_bytes: int) -> int:
    """Slots of state: one for each of `rows` sequences, fewer where so many do not have room
    together with the blocks of each, which take `sequence_bytes`.
    """
    if not slot_bytes:
        return 0
    return max(1, min(rows, room // (slot_bytes + sequence_bytes)))


def pool_size(
    block_bytes: int,
    slot_bytes: int,
    room: int,
    *,
    rows: int,
    longest: int | None,
    at_once: int | None = None,
    ahead: int = BLOCK,
    kv_gib: float | None = None,
    block: int = BLOCK,
) -> tuple[int, int]:
    """Blocks, and slots of state, of a cache with this room, or with what is configured. A sequence
    that has a slot has blocks for `longest` tokens too, or, where that is not known, for `ahead`.
    `at_once`: of `rows` sequences, those that are expected to be there together.
    """
    if kv_gib is not None:
        room = int(kv_gib * 2**30)
    sequence = -(-(longest or ahead) // block) * block_bytes
    slots = state_slots(slot_bytes, room, rows=rows, sequence_bytes=sequence)
    room -= slots * slot_bytes
    blocks = pool_blocks(
        block_bytes,
        room,
        rows=min(slots or rows, at_once or rows),
        longest=longest,
        kv_gib=None if kv_gib is None else max(room, 0) / 2**30,
        block=block,
    )
    return blocks, slots


def too_large(kv_gib: float | None, memory: int) -> str | None:
    """What is wrong with a cache of so many GiB where there are so many bytes."""
    if kv_gib is None or kv_gib * 2**30 <= memory:
        return None
    return f"{kv_gib:g} GiB are asked for, and there are {memory / 2**30:.1f} in all."


def stays(pool: int, whole: int, beside: int | None) -> bool:
    """Whether a cache of `pool` bytes stays on a GPU of `whole` while training. `beside`: bytes
    that training leaves free at its worst moment, where that is known.
    """
    if pool <= KEEP * whole:
        return True
    return beside is not None and pool <= beside - SPARE * whole
