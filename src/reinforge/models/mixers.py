"""Lets the layers of transformers that keep state ask a `StateFlow` for it.

transformers writes a mixer (a short convolution, a gated delta net, a Mamba) as projections around
a few functions of its modelling file, which have the same names and arguments in all architectures:
a causal convolution, a chunk-wise recurrence. So the projections stay the module's own, adapters
and all, and only these functions are replaced, by ones that ask who runs: outside of
`PackedModel.hidden` they are the ones that were there.

A mixer is a module whose forward calls one of them. What keeps state in other ways is not found
here, and `models.proof` refuses it.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from reinforge.models.attention import HAS_TRITON
from reinforge.models.delta_rule import LARGEST_KEY
from reinforge.models.recurrences import GatedDelta, SelectiveScan, StateSpace, library_trains
from reinforge.models.state import StateFlow, StateKey

Primitive = Callable[..., Any]


class _RunningMixer:
    """The mixer that computes now: its flow, and how many of its states were asked for."""

    def __init__(self, flow: StateFlow, layer: int, number: int):
        self.flow = flow
        self.layer = layer
        self.number = number
        self.count = 0

    def key(self) -> StateKey:
        """Of its next state: whatever is in a batch, it asks for them in the same order."""
        self.count += 1
        return self.layer, self.number, self.count - 1


class _ThreadState(threading.local):
    """What runs in this thread: the backward pass recomputes layers in another one."""

    flow: StateFlow | None = None
    mixer: _RunningMixer | None = None


_now = _ThreadState()


@contextmanager
def keeping(flow: StateFlow | None) -> Iterator[None]:
    """Inside, mixers get their states from here."""
    before = _now.flow
    _now.flow = flow
    try:
        yield
    finally:
        _now.flow = before


def recomputed(layer: Callable[..., Any], *args: Any) -> Any:
    """Gradient checkpointing, which runs a layer again from the backward pass: with the states that
    it had.
    """
    flow = _now.flow
    return checkpoint(
        layer, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), keeping(flow))
    )


class StateMixer:
    """The forward of a mixer that names its states. `replace_mixers` makes one per mixer."""

    def __init__(self, module: nn.Module, layer: int, number: int):
        self.module = module
        self.layer = layer
        self.number = number  # a layer may have several

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        before = _now.mixer
        _now.mixer = None
        if _now.flow is not None:
            _now.mixer = _RunningMixer(_now.flow, self.layer, self.number)
        try:
            return type(self.module).forward(self.module, *args, **kwargs)
        finally:
            _now.mixer = before


# ---- the functions ----


def _convolution(plain: Primitive, functions: dict[str, Any]) -> Primitive:
    """x [1, C, N], weight [C, K] -> [1, C, N]."""

    @functools.wraps(plain)
    def convolution(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        mixer = _now.mixer
        if mixer is None:
            out: Tensor = plain(x, weight, bias, activation=activation, **kwargs)
            return out
        assert x.shape[0] == 1, f"packed forward has batch size 1, got {x.shape[0]}"
        found = mixer.flow.convolve(mixer.key(), x.squeeze(0).t(), weight, bias, activation)
        return found.t()[None]

    return convolution


def _gated_delta(
    plain: Primitive,
    functions: dict[str, Any],
    single: str = "torch_recurrent_gated_delta_rule",
) -> Primitive:
    """query and key [1, N, H, D], value [1, N, H, V], g and beta [1, N, H] (g of Kimi's rule:
    [1, N, H, D]) -> [1, N, H, V].
    """
    by_token = functions[single]

    @functools.wraps(plain)
    def gated_delta(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        mixer = _now.mixer
        if mixer is None:
            own = inspect.unwrap(plain) if query.dtype == torch.float32 else plain
            out: tuple[Tensor, Tensor | None] = own(query, key, value, g=g, beta=beta, **kwargs)
            return out
        rule = GatedDelta(plain, by_token, bool(kwargs.get("use_qk_l2norm_in_kernel")))
        parts = [x.squeeze(0) for x in (query, key, value, g, beta)]
        return mixer.flow.scan(mixer.key(), rule, parts)[None], None

    return gated_delta


def _kimi_delta(plain: Primitive, functions: dict[str, Any]) -> Primitive:
    return _gated_delta(plain, functions, "recurrent_kimi_delta_attention")


def _state_space(plain: Primitive, functions: dict[str, Any]) -> Primitive:
    """Mamba-2: x [1, N, H, P], dt [1, N, H], A [H], B and C [1, N, G, E] -> [1, N, H, P]."""

    @functools.wraps(plain)
    def state_space(
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **kwargs: Any,
    ) -> Any:
        mixer = _now.mixer
        if mixer is None:
            return plain(
                x,
                dt,
                A,
                B,
                C,
                chunk_size=chunk_size,
                D=D,
                dt_bias=dt_bias,
                dt_softplus=dt_softplus,
                dt_limit=dt_limit,
                **kwargs,
            )
        x, dt, B, C = (part.squeeze(0) for part in (x, dt, B, C))
        step = _time_step(dt, dt_bias, dt_softplus).clamp(*dt_limit)
        out = mixer.flow.scan(mixer.key(), StateSpace(A), [x, step, B, C])
        if D is not None:
            out = out + D[:, None] * x.float()
        return out[None]

    return state_space


def _selective(plain: Primitive, functions: dict[str, Any]) -> Primitive:
    """Mamba: x, dt and z [1, C, N], A [C, E], B and C [1, E, N] -> [1, C, N]."""

    @functools.wraps(plain)
    def selective(
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        **kwargs: Any,
    ) -> Any:
        mixer = _now.mixer
        if mixer is None:
            return plain(
                x,
                dt,
                A,
                B,
                C,
                D=D,
                z=z,
                delta_bias=delta_bias,
                delta_softplus=delta_softplus,
                **kwargs,
            )
        x, dt, B, C = (part[0].t() for part in (x, dt, B, C))
        step = _time_step(dt, delta_bias, delta_softplus)
        out = mixer.flow.scan(mixer.key(), SelectiveScan(A), [x, step, B, C]).to(x.dtype)
        if D is not None:
            out = out + x * D
        if z is not None:
            out = out * F.silu(z[0].t())
        return out.t()[None]

    return selective


def _time_step(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt


# by the names that modelling files give them
PRIMITIVES: dict[str, Callable[[Primitive, dict[str, Any]], Primitive]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _gated_delta,
    "chunk_kimi_delta_attention": _kimi_delta,
    "mamba2_chunk_scan": _state_space,
    "mamba_selective_scan": _selective,
}
_MARK = "reinforge_state"  # on a function of a modelling file that asks who runs
SLOW = (
    "its gated delta nets run as plain torch, which is slow on a GPU; with `pip install"
    " flash-linear-attention` they take the kernels of that library"
)
OURS = "its gated delta nets train by kernels of reinforge"
THEIRS = "its gated delta nets train by the kernels of flash-linear-attention"


def replace_mixers(module: nn.Module) -> int:
    """Lets the mixers of a module ask for their states; returns how many there are."""
    logging.getLogger("transformers.integrations.hub_kernels").addFilter(_true_of_ours)
    count = 0
    for number, part in enumerate(module.modules()):
        names, functions = _primitives_of(part)
        if not names:
            continue
        count += 1
        if "forward" in vars(part):
            continue
        for name in names:
            _replace(functions, name)
        mixer = StateMixer(part, int(part.layer_idx), number)  # type: ignore[arg-type]
        part.forward = mixer.forward  # type: ignore[method-assign]
    return count


def is_mixer(part: nn.Module) -> bool:
    """Whether its own forward computes with states."""
    return bool(_primitives_of(part)[0])


def _primitives_of(part: nn.Module) -> tuple[list[str], dict[str, Any]]:
    """The functions of a modelling file that a module's forward calls and that keep state, and all
    that the file has; no names where it calls none.
    """
    forward = inspect.unwrap(type(part).forward)
    code = getattr(forward, "__code__", None)
    names = [] if code is None else [name for name in PRIMITIVES if name in code.co_names]
    functions: dict[str, Any] = getattr(forward, "__globals__", {})
    return (names if any(name in functions for name in names) else []), functions


def _true_of_ours(record: logging.LogRecord) -> bool:
    """transformers says of each function without a kernel that it is slow and what to install. Our
    forwards have a convolution of their own, and on a CPU there is nothing to install: what helps
    is told by `kernel_note`.
    """
    return "falling back to its reference PyTorch" not in str(record.msg)


def kernel_note(config: Any, device: str) -> str | None:
    """What would make a model faster that keeps state; None: nothing is known."""
    if not _has_delta(config, device) or importlib.util.find_spec("fla") is not None:
        return None
    return None if _fits_ours(config) else SLOW


def kernel_choice(config: Any, device: str) -> str | None:
    """Which kernels train the gated delta nets of a model; None: it has none, or no GPU."""
    if not _has_delta(config, device):
        return None
    if library_trains():
        return THEIRS
    return OURS if _fits_ours(config) else None


def _has_delta(config: Any, device: str) -> bool:
    names = ("linear_num_value_heads", "linear_num_heads")
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    return on_gpu and any(getattr(config, name, None) for name in names)


def _fits_ours(config: Any) -> bool:
    """Whether `models.delta_rule` has kernels for it. Kimi's rule, which counts its heads by
    another name, has a decay for every number of a key.
    """
    size = getattr(config, "linear_key_head_dim", None)
    return HAS_TRITON and isinstance(size, int) and size <= LARGEST_KEY


def holds_mixer(module: nn.Module) -> bool:
    """Whether something inside it keeps state."""
    return any(
        isinstance(getattr(vars(part).get("forward"), "__self__", None), StateMixer)
        for part in module.modules()
    )


def _replace(functions: dict[str, Any], name: str) -> None:
    plain = functions[name]
    if hasattr(plain, _MARK):
        return
    made = torch.compiler.disable(PRIMITIVES[name](plain, functions))
    setattr(made, _MARK, True)
    functions[name] = made
