"""FlashAttention 4 (the package `flash-attn-4`), which knows the instructions of a Hopper that
torch's own FlashAttention 2 does not: `attention.varlen_attention` asks `usable` for each pack, and
calls `attention` where it may. Nothing else imports the package.

It is new and compiled on the machine, so each kind of kernel is first tried on a small pack
(`proven`), and what that trial does not cover is left to torch.

Legend: N queries, Nk keys, H query heads, K key/value heads, G = H / K, D head size.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from reinforge.models.attention_rule import AttentionRule
from reinforge.models.compile_cache import cache_folder
from reinforge.models.trial import on_its_own

HEAD_SIZES = (64, 96, 128)
FEWEST = 4096  # queries of a pack: below, starting the kernels takes longer than torch's need
ONE_TILE = 192  # queries: packs whose longest segment fits into one tile have kernels of their own
MOST_SEGMENTS = 256  # of a pack: beyond, too
MOST_NUMBERS = 1 << 30  # of all queries: 32 bits count them, padding and all
NEAR = 0.02  # how far outputs and gradients may be from the truth, relative to their size
LOG = logging.getLogger("reinforge")


def usable(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, rule: AttentionRule
) -> bool:
    """Whether the kernel serves this pack, and better than torch's. q [N, H, D], k and v
    [Nk, K, D]; `starts` and `longest` of the queries of its segments.
    """
    return (
        len(q) >= FEWEST
        and longest > ONE_TILE
        and len(starts) <= MOST_SEGMENTS + 1
        and q.numel() <= MOST_NUMBERS
        and fits(q, k, v, rule)
        and not torch.compiler.is_compiling()
        and on_hopper(q.device)
        and not torch.cuda.is_current_stream_capturing()
        and installed()
        and proven(
            q.shape[-1],
            q.shape[1] // k.shape[1],
            q.dtype,
            q.device,
            torch.are_deterministic_algorithms_enabled(),
        )
    )


def fits(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> bool:
    """Whether heads, numbers and the rule are what `proven` tries."""
    plain = (rule.window, rule.chunk, rule.softcap, rule.sinks) == (None, None, None, None)
    return (
        plain
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.dtype == k.dtype == v.dtype
        and q.shape[-1] in HEAD_SIZES
        and q.shape[-1] == k.shape[-1] == v.shape[-1]
        and q.shape[1] % k.shape[1] == 0
    )


def on_hopper(device: torch.device) -> bool:
    """The GPU of this process, and a Hopper: the kernel is launched on the current one."""
    return (
        device.type == "cuda"
        and _major(device) == 9
        and device.index == torch.cuda.current_device()
    )


@cache
def _major(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


@cache
def installed() -> bool:
    """FlashAttention 2 has a package of the same name, which this imports and which may fail to."""
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except Exception:
        return False


@cache
def _kernel() -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """The package's function. What it compiles is kept for the next start, beside the compiled
    layers; processes that compile the same at once each write a file of their own and rename it.
    """
    folder = cache_folder("flash4")
    if folder is not None:
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder))
    # of its own kernels, about an argument that we do not give
    warnings.filterwarnings("ignore", message="(?s).*aux_data", category=UserWarning)
    from flash_attn.cute import flash_attn_varlen_func

    found: Callable[..., Tensor | tuple[Tensor, ...]] = flash_attn_varlen_func
    return found


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: int,
    longest_key: int,
    rule: AttentionRule,
) -> Tensor:
    """`attention.varlen_attention` of what is `usable`."""
    out = _kernel()(
        q,
        k,
        v,
        cu_seqlens_q=starts,
        cu_seqlens_k=key_starts,
        max_seqlen_q=longest,
        max_seqlen_k=longest_key,
        softmax_scale=rule.scale,
        causal=True,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return out if isinstance(out, Tensor) else out[0]


# ---- the trial ----

TRIAL_QUERIES = [70, 200, 37, 301]  # a prompt, and three answers that see its keys
TRIAL_KEYS = [70, 270, 107, 371]


@cache
def proven(
    size: int, groups: int, dtype: torch.dtype, device: torch.device, deterministic: bool
) -> bool:
    """Whether outputs and gradients are those of dense attention in float32 on this device, and
    `deterministic`: whether they repeat bit for bit.
    """
    name = f"attention: FlashAttention 4 for {groups} heads of {size} per key head"
    try:
        error, repeats = trial(size, groups, dtype, device)
    except Exception as problem:
        LOG.warning(f"{name} does not run ({problem!r}), torch's kernel instead")
        return False
    if not error < NEAR:  # NaN too
        LOG.warning(f"{name} is {error:.2g} away from the truth, torch's kernel instead")
        return False
    if deterministic and not repeats:
        LOG.warning(f"{name} does not repeat bit for bit, torch's kernel instead")
        return False
    LOG.info(f"{name}, {error:.2g} away from the truth")
    return True


@torch.inference_mode(False)
def trial(size: int, groups: int, dtype: torch.dtype, device: torch.device) -> tuple[float, bool]:
    """The largest difference, relative to its size, of outputs (with and without a gradient) and
    gradients of a small pack; and whether a second time they are the same bits.
    """
    heads = 2
    draw = torch.Generator().manual_seed(0)

    def normal(rows: list[int], count: int) -> Tensor:
        return torch.randn(sum(rows), count, size, generator=draw).to(device, dtype)

    q = normal(TRIAL_QUERIES, heads * groups)
    k, v = normal(TRIAL_KEYS, heads), normal(TRIAL_KEYS, heads)
    weights = normal(TRIAL_QUERIES, heads * groups)
    rule = AttentionRule(scale=1.5 * size**-0.5)
    starts, key_starts = (
        torch.tensor([0, *rows]).cumsum(0).to(device, torch.int32)
        for rows in (TRIAL_QUERIES, TRIAL_KEYS)
    )
    lengths = (starts, key_starts, max(TRIAL_QUERIES), max(TRIAL_KEYS))
    with on_its_own(device):
        found, again = (
            with_gradients(lambda q, k, v: attention(q, k, v, *lengths, rule), (q, k, v), weights)
            for _ in range(2)
        )
        want = with_gradients(
            lambda q, k, v: dense(q, k, v, rule.scale), (q.float(), k.float(), v.float()), weights
        )
        with torch.no_grad():  # a kernel of its own, which keeps nothing for a gradient
            scored = attention(q, k, v, *lengths, rule)
    errors = [
        (one.float() - two).norm() / two.norm()
        for one, two in zip((scored, *found), (want[0], *want), strict=True)
    ]
    repeats = all(torch.equal(one, two) for one, two in zip(found, again, strict=True))
    return float(torch.stack(errors).max()), repeats


def with_gradients(
    function: Callable[[Tensor, Tensor, Tensor], Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    weights: Tensor,
) -> list[Tensor]:
    """The output and the gradients of q, k and v, of which `weights` is that of the output."""
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    out = function(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), weights.to(out.dtype))]


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention of the trial's pack as it is defined, segment by segment."""
    groups = q.shape[1] // k.shape[1]
    outs = []
    for x, keys, values in zip(
        q.split(TRIAL_QUERIES), k.split(TRIAL_KEYS), v.split(TRIAL_KEYS), strict=True
    ):
        keys, values = (y.repeat_interleave(groups, 1).transpose(0, 1) for y in (keys, values))
        scores = x.transpose(0, 1) @ keys.transpose(1, 2) * scale  # [H, queries, keys]
        unseen = torch.ones_like(scores[0], dtype=torch.bool).triu(1 + len(keys[0]) - len(x))
        outs.append(
            (scores.masked_fill(unseen, float("-inf")).softmax(-1) @ values).transpose(0, 1)
        )
    return torch.cat(outs)
