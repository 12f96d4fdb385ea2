"""The recurrences of layers that keep state, over several sequences at once and from any state:
`Recurrence`s of `models.state`.

The gated delta rule is computed by transformers' own functions, chunk by chunk for several tokens
and token by token for one; transformers takes the kernels of `flash-linear-attention` in their
place where that is installed. Where it is not, or has no backward, a GPU takes the kernels of
`models.delta_rule`. The two of Mamba are written here: transformers' own hold a number
for every pair of tokens, head and state, or do not begin with a state.

Legend: S segments, L their padded length, H heads, D size of a key, V size of a value; of Mamba P
size of a head, G groups of heads, E size of a state, C channels.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from reinforge.core.state_facts import CHUNK
from reinforge.models.attention import HAS_TRITON
from reinforge.models.decoding import is_decoding
from reinforge.models.delta_rule import (
    LARGEST_KEY,
    chunked,
    proven,
    token_by_token,
)
from reinforge.models.exact import RowWiseMode
from reinforge.models.segment_table import SegmentTable
from reinforge.models.state import StateShape


def _quiet(x: Tensor, real: Tensor | None) -> Tensor:
    """0 at pads."""
    if real is None:
        return x
    return x.masked_fill(~real.view(*real.shape, *[1] * (x.ndim - 2)), 0)


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """The gated delta rule (2412.06464): S_t = exp(g_t) S_{t-1} (1 - b_t k_t k_t') + b_t k_t v_t'.

    With g = b = 0 a token leaves the state as it is: so do pads. In float32, which the kernels that
    transformers may have in its place do not know, and on a CPU it is the torch code, which solves
    a system for each chunk: a short segment has a chunk of its own length.
    """

    by_chunk: Callable[..., Any]
    by_token: Callable[..., Any]
    normed: bool  # queries and keys are normed

    def __call__(
        self, parts: Sequence[Tensor], real: Tensor | None, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Parts: queries and keys [S, L, H, D], values [S, L, H, V], g and beta [S, L, H]."""
        query, key, value, decay, beta = parts
        decay, beta = _quiet(decay, real), _quiet(beta, real)
        if RowWiseMode.active():
            return self._one_by_one(query, key, value, decay, beta, state)
        if is_decoding() and _has_kernel(query, decay):
            return self._scan(query, key, value, decay, beta, state)
        if _takes_ours(query, value, decay, self.normed):
            return self._in_tile(query, key, value, decay, beta, state)
        # the kernel for single tokens has no gradient
        single = query.shape[1] == 1 and not torch.is_grad_enabled()
        rule = self.by_token if single else self.by_chunk
        sizes = {}
        theirs = query.is_cuda and query.dtype != torch.float32
        if not theirs or (torch.is_grad_enabled() and not kernels_train()):
            rule = inspect.unwrap(rule)
            sizes = {} if single else {"chunk_size": min(CHUNK, query.shape[1])}
        out, final = rule(
            query,
            key,
            value,
            g=decay,
            beta=beta,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=self.normed,
            **sizes,
        )
        return out, final

    def in_pack(
        self, parts: Sequence[Tensor], table: Callable[[], SegmentTable]
    ) -> tuple[Tensor, StateShape] | None:
        query, _, value, decay, _ = parts
        if RowWiseMode.active() or is_decoding():
            return None
        if not _takes_ours(query, value, decay[:, None], self.normed):
            return None
        out, _ = chunked(parts, table(), None, self.normed)
        return out, ((*query.shape[1:], value.shape[-1]), torch.float32)

    def _in_tile(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        state: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """By the kernels with a gradient."""
        rows, length = query.shape[:2]
        table = SegmentTable.of_tile(rows, length, state is not None, query.device)
        parts = [x.flatten(0, 1) for x in (query, key, value, decay, beta)]
        out, final = chunked(parts, table, state, self.normed)
        return out.unflatten(0, (rows, length)), final

    def in_place(self, parts: Sequence[Tensor], states: Tensor, slots: Tensor) -> Tensor | None:
        if not _has_kernel(parts[0], parts[3][:, None]):
            return None
        from reinforge.models.kernels import state as kernels

        query, key, value, decay, beta = (x[:, None] for x in parts)
        return kernels.delta_scan(
            query, key, value, decay, beta, states, states, slots, self.normed
        )[:, 0]

    def _scan(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        state: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """By the kernel that decodes."""
        from reinforge.models.kernels import state as kernels

        segments, _, heads, size = query.shape
        held = None if state is None else state.float().contiguous()
        shape = (segments, heads, size, value.shape[-1])
        final = torch.empty(shape, dtype=torch.float32, device=query.device)
        slots = torch.arange(segments, device=query.device)
        out = kernels.delta_scan(query, key, value, decay, beta, held, final, slots, self.normed)
        return out, final

    def _one_by_one(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        state: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Token by token with a fixed arithmetic, for `model.exact`."""
        if _has_kernel(query, decay):
            out, final = _ExactDelta.apply(self, query, key, value, decay, beta, state)
            return out, final
        return token_by_token((query, key, value, decay, beta), state, self.normed)


def _takes_ours(query: Tensor, value: Tensor, decay: Tensor, normed: bool) -> bool:
    """Whether our kernels compute what has a gradient or is compared with what has one."""
    if not _has_kernel(query, decay) or query.shape[-1] > LARGEST_KEY:
        return False
    if query.dtype not in (torch.bfloat16, torch.float16) or library_trains():
        return False
    return proven(query.shape[-1], value.shape[-1], query.dtype, normed, query.device)


@cache
def library_trains() -> bool:
    """Whether flash-linear-attention is there and has a backward here. It is taken then: many have
    run it, and nobody has compared its speed with that of our kernels yet.
    """
    return importlib.util.find_spec("fla") is not None and kernels_train()


@cache
def kernels_train() -> bool:
    """Whether the kernels of flash-linear-attention have a backward here. With Triton 3.4 to 3.7.0
    on a Hopper they refuse, because it would be wrong, unless they may use tilelang.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return True
    if not HAS_TRITON or importlib.util.find_spec("tilelang") is not None:
        return True
    import triton

    version = tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:3])
    return not (3, 4, 0) <= version < (3, 7, 1)


def _has_kernel(x: Tensor, decay: Tensor) -> bool:
    """Kimi's rule, which has a decay for every key, has none."""
    return x.is_cuda and HAS_TRITON and decay.ndim == 3


class _ExactDelta(torch.autograd.Function):
    """The forward token by token; the backward is that of the chunks."""

    @staticmethod
    def forward(ctx, rule, *inputs):  # type: ignore[no-untyped-def]
        ctx.rule = rule
        ctx.save_for_backward(*inputs)
        with torch._C.DisableTorchFunction():
            return rule._scan(*inputs)

    @staticmethod
    def backward(ctx, g_out, g_final):  # type: ignore[no-untyped-def]
        wanted = ctx.needs_input_grad[1:]
        with torch._C.DisableTorchFunction(), torch.enable_grad():
            near: list[Any] = [
                None if one is None else one.detach().requires_grad_(wants)
                for one, wants in zip(ctx.saved_tensors, wanted, strict=True)
            ]
            out, final = ctx.rule(near[:5], None, near[5])
            asked = [one for one, wants in zip(near, wanted, strict=True) if wants]
            found = iter(torch.autograd.grad([out, final], asked, [g_out, g_final]))
        return None, *(next(found) if wants else None for wants in wanted)


@dataclass(frozen=True, slots=True)
class StateSpace:
    """Mamba-2 (2405.21060): S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t', y_t = S_t C_t, in chunks.

    With dt = 0 a token leaves the state as it is: so do pads.
    """

    A: Tensor  # [H] negative

    def __call__(
        self, parts: Sequence[Tensor], real: Tensor | None, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Parts: x [S, L, H, P], dt [S, L, H], B and C [S, L, G, E]. The state is [S, H, P, E]."""
        x, dt, B, C = (part.float() for part in parts)
        length = x.shape[1]
        heads = x.shape[2]
        dt = _quiet(dt, real)
        chunk = min(CHUNK, length)
        pad = -length % chunk

        def chunked(part: Tensor) -> Tensor:
            """[S, n, H, chunk, ...]"""
            part = F.pad(part, (*[0, 0] * (part.ndim - 2), 0, pad))
            return part.unflatten(1, (-1, chunk)).transpose(2, 3)

        B, C = (chunked(part.repeat_interleave(heads // part.shape[2], 2)) for part in (B, C))
        inputs = chunked(x * dt[..., None])
        decay = chunked(dt * self.A.float()).cumsum(-1)  # [S, n, H, chunk] in logs, from its start
        between = decay[..., :, None] - decay[..., None, :]
        later = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).triu(1)
        seen = (C @ B.transpose(-1, -2)) * between.masked_fill(later, float("-inf")).exp()
        out = seen @ inputs  # what comes from tokens of the same chunk
        left = (decay[..., -1:] - decay).exp()[..., None]
        added = inputs.transpose(-1, -2) @ (B * left)  # [S, n, H, P, E]
        kept = decay[..., -1].exp()[..., None, None]
        reached = C * decay.exp()[..., None]
        now = torch.zeros_like(added[:, 0]) if state is None else state.float()
        past = []
        for i in range(out.shape[1]):
            past.append(reached[:, i] @ now.transpose(-1, -2))
            now = kept[:, i] * now + added[:, i]
        out = (out + torch.stack(past, 1)).transpose(2, 3).flatten(1, 2)
        return out[:, :length], now

    def in_pack(
        self, parts: Sequence[Tensor], table: Callable[[], SegmentTable]
    ) -> tuple[Tensor, StateShape] | None:
        return None

    def in_place(self, parts: Sequence[Tensor], states: Tensor, slots: Tensor) -> Tensor | None:
        return None


@dataclass(frozen=True, slots=True)
class SelectiveScan:
    """Mamba (2312.00752): S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t', y_t = S_t C_t, where every
    channel has a decay of its own: token by token.
    """

    A: Tensor  # [C, E] negative

    def __call__(
        self, parts: Sequence[Tensor], real: Tensor | None, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Parts: x and dt [S, L, C], B and C [S, L, E]. The state is [S, C, E]."""
        x, dt, B, C = (part.float() for part in parts)
        dt = _quiet(dt, real)
        A = self.A.float()
        now = x.new_zeros(x.shape[0], *A.shape) if state is None else state.float()
        outs = []
        for i in range(x.shape[1]):
            added = (dt[:, i] * x[:, i])[..., None] * B[:, i, None]
            now = (dt[:, i, :, None] * A).exp() * now + added
            outs.append((now @ C[:, i, :, None])[..., 0])
        return torch.stack(outs, 1), now

    def in_pack(
        self, parts: Sequence[Tensor], table: Callable[[], SegmentTable]
    ) -> tuple[Tensor, StateShape] | None:
        return None

    def in_place(self, parts: Sequence[Tensor], states: Tensor, slots: Tensor) -> Tensor | None:
        return None
