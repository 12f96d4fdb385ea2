"""When FlashAttention 4 is taken. There is no GPU here: in place of its kernel stands a function of
torch with the same arguments, or one with a fault; `tests/gpu/test_flash4_cuda.py` runs the kernel.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from reinforge.models import attention, flash4
from reinforge.models.attention import PackedLayout, Segments, starts_of
from reinforge.models.attention_rule import AttentionRule

CPU = torch.device("cpu")
KIND = (64, 3, torch.bfloat16, CPU)  # of a trial: head size, queries of a key head, numbers, where
Kernel = Callable[..., Any]


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """What one test found out about its kernel is nothing to the next."""
    for found in (flash4.proven, flash4.installed, flash4._kernel):
        found.cache_clear()
    yield
    for found in (flash4.proven, flash4.installed, flash4._kernel):
        found.cache_clear()


def stand_in(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    deterministic: bool,
) -> tuple[Tensor, None]:
    """The package's function, as far as we call it: our own tiles in float32."""
    lengths, keys = (x.diff().tolist() for x in (cu_seqlens_q, cu_seqlens_k))
    assert causal and (max(lengths), max(keys)) == (max_seqlen_q, max_seqlen_k)
    rule = AttentionRule(scale=softmax_scale)
    segments = Segments(lengths, cu_seqlens_q, keys, cu_seqlens_k)
    return segments.attend(q.float(), k.float(), v.float(), rule).to(q.dtype), None


def take(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("flash_attn.cute")
    package.flash_attn_varlen_func = kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", package)


# ---- which packs ----


def pack(tokens: int = 4096, heads: int = 4, size: int = 64, **other: Any) -> dict[str, Any]:
    """What `usable` is asked, of a pack that it takes."""
    q = torch.empty(tokens, heads, size, dtype=torch.bfloat16)
    k = torch.empty(2 * tokens, 2, size, dtype=torch.bfloat16)
    starts = torch.tensor([0, 1024, tokens], dtype=torch.int32)
    asked = {"q": q, "k": k, "v": k, "starts": starts, "longest": tokens - 1024}
    return {**asked, "rule": AttentionRule(), **other}


@pytest.fixture
def a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Hopper with the package, whose kernels are right."""
    monkeypatch.setattr(flash4, "on_hopper", lambda device: True)
    monkeypatch.setattr(flash4, "installed", lambda: True)
    monkeypatch.setattr(flash4, "proven", lambda *kind: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


@pytest.mark.parametrize("size", flash4.HEAD_SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("a_hopper")
def test_long_packs_are_taken(size: int, dtype: torch.dtype) -> None:
    asked = pack(size=size)
    asked = {n: x.to(dtype) if n in "qkv" else x for n, x in asked.items()}
    assert flash4.usable(**asked)


REFUSED = {
    "few queries": pack(tokens=4095),
    "short segments": pack(longest=192),
    "many segments": pack(starts=torch.zeros(258, dtype=torch.int32)),
    "more numbers than 32 bits count": pack(
        q=torch.empty(1, dtype=torch.bfloat16).expand(1 << 19, 33, 64)
    ),
    "another head size": pack(size=80),
    "narrow values": pack(v=torch.empty(8192, 2, 32, dtype=torch.bfloat16)),
    "float32": {n: x.float() if n in "qkv" else x for n, x in pack().items()},
    "keys of another precision": pack(k=torch.empty(8192, 2, 64)),
    "a window": pack(rule=AttentionRule(window=128)),
    "chunks": pack(rule=AttentionRule(chunk=128)),
    "a softcap": pack(rule=AttentionRule(softcap=50.0)),
    "sinks": pack(rule=AttentionRule(sinks=torch.zeros(4))),
}


@pytest.mark.parametrize("asked", REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.usefixtures("a_hopper")
def test_others_stay_with_torch(asked: dict[str, Any]) -> None:
    assert flash4.usable(**pack())
    assert not flash4.usable(**asked)


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (flash4, "on_hopper", False),
        (flash4, "installed", False),
        (flash4, "proven", False),
        (torch.compiler, "is_compiling", True),
        (torch.cuda, "is_current_stream_capturing", True),
    ],
)
@pytest.mark.usefixtures("a_hopper")
def test_there_must_be_a_hopper_and_a_kernel_and_no_recording(
    where: Any, name: str, value: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert flash4.usable(**pack())
    monkeypatch.setattr(where, name, lambda *given: value)
    assert not flash4.usable(**pack())


def test_a_cpu_is_no_hopper() -> None:
    assert not flash4.on_hopper(CPU)
    assert not flash4.usable(**pack())


@pytest.mark.parametrize(("device", "taken"), [("cuda:0", True), ("cuda:1", False)])
def test_only_the_current_gpu(device: str, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash4, "_major", lambda device: 9)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert flash4.on_hopper(torch.device(device)) is taken
    monkeypatch.setattr(flash4, "_major", lambda device: 10)
    assert not flash4.on_hopper(torch.device(device))


def test_a_package_of_that_name_that_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As FlashAttention 2 that was built for another torch."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("raise OSError('undefined symbol')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not flash4.installed()


# ---- the call ----


def test_a_layer_gets_the_output_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three answers that share a prompt, with a scale: lengths, starts and scale reach it."""
    take(stand_in, monkeypatch)
    lengths, prefix = [50, 33, 7, 90], [-1, 0, 0, 0]
    layout = PackedLayout(lengths, starts_of(lengths, CPU), prefix)
    q, k, v = (torch.randn(sum(lengths), heads, 64) for heads in (4, 2, 2))
    rule = AttentionRule(scale=0.3)
    want = layout.attend(0, q, k, v, rule)
    monkeypatch.setattr(Segments, "_varlen", lambda self, q, *rest: q.dtype == torch.float16)
    monkeypatch.setattr(flash4, "usable", lambda *asked: True)
    found = layout.attend(0, *(x.half() for x in (q, k, v)), rule)
    assert float((found - want).norm()) < 1e-3 * float(want.norm())


def test_it_is_told_whether_sums_must_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []

    def hear(q: Tensor, *rest: Any, deterministic: bool, **other: Any) -> Tensor:
        told.append(deterministic)
        return q

    take(hear, monkeypatch)
    asked = (torch.zeros(1), torch.zeros(1), torch.zeros(1), torch.zeros(2), torch.zeros(2), 1, 1)
    for on in (True, False):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda on=on: on)
        flash4.attention(*asked, AttentionRule())
    assert told == [True, False]


def test_what_it_compiles_is_kept_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the user says where, or that it is not."""
    enabled, folder = (f"FLASH_ATTENTION_CUTE_DSL_CACHE_{x}" for x in ("ENABLED", "DIR"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in (enabled, folder):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    take(stand_in, monkeypatch)
    assert flash4._kernel() is stand_in
    assert os.environ[enabled] == "1"
    assert os.environ[folder] == str(tmp_path / "reinforge" / "flash4")
    assert (tmp_path / "reinforge" / "flash4").stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv(enabled, "0")
    flash4._kernel.cache_clear()
    flash4._kernel()
    assert os.environ[enabled] == "0"


# ---- the trial ----


def test_a_kernel_that_is_right_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, without a draw from torch's random numbers, and also where nothing has gradients."""
    calls = []
    take(lambda *a, **k: calls.append(1) or stand_in(*a, **k), monkeypatch)
    state = torch.get_rng_state()
    with caplog.at_level(logging.INFO, "reinforge"), torch.inference_mode():
        assert flash4.proven(*KIND, True)
        made = len(calls)
        assert flash4.proven(*KIND, True)
    assert len(calls) == made
    assert torch.equal(torch.get_rng_state(), state)
    assert len(caplog.messages) == 1
    assert "attention: FlashAttention 4 for 3 heads of 64" in caplog.messages[0]


class _Faulty(torch.autograd.Function):
    """The identity, whose gradient is what `fault` makes of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.fault = fault
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        return ctx.fault(g), None


def causal_from_the_upper_left(q: Tensor, k: Tensor, v: Tensor, **asked: Any) -> Any:
    """As cuDNN's: the first query of a segment sees its first key, and no more."""
    starts = asked["cu_seqlens_q"]
    spans = zip(asked["cu_seqlens_k"].tolist(), starts.diff().tolist(), strict=False)
    seen = torch.cat([torch.arange(begin, begin + n) for begin, n in spans])
    keys = {"cu_seqlens_k": starts, "max_seqlen_k": asked["max_seqlen_q"]}
    return stand_in(q, k[seen], v[seen], **{**asked, **keys})


def one_row_left_out(q: Tensor, k: Tensor, v: Tensor, **asked: Any) -> Any:
    out, _ = stand_in(q, k, v, **asked)
    return torch.cat([out[:-1], torch.zeros_like(out[-1:])])


def another_scale(q: Tensor, k: Tensor, v: Tensor, **asked: Any) -> Any:
    return stand_in(q, k, v, **{**asked, "softmax_scale": q.shape[-1] ** -0.5})


def not_a_number(q: Tensor, k: Tensor, v: Tensor, **asked: Any) -> Any:
    return stand_in(q, k, v, **asked)[0] * float("nan")


def wrong_gradient(q: Tensor, k: Tensor, v: Tensor, **asked: Any) -> Any:
    return stand_in(q, _Faulty.apply(k, lambda g: 1.05 * g), v, **asked)


def wrong_without_gradient(q: Tensor, k: Tensor, v: Tensor, **asked: Any) -> Any:
    kernel = stand_in if q.requires_grad else another_scale
    return kernel(q, k, v, **asked)


def raises(*given: Any, **asked: Any) -> Any:
    raise RuntimeError("no such instruction")


FAULTS = {
    causal_from_the_upper_left: "away from the truth",
    one_row_left_out: "away from the truth",
    another_scale: "away from the truth",
    not_a_number: "nan away from the truth",
    wrong_gradient: "away from the truth",
    wrong_without_gradient: "away from the truth",
    raises: "does not run (RuntimeError('no such instruction'))",
}


@pytest.mark.parametrize("kernel", FAULTS, ids=lambda x: x.__name__)
def test_a_kernel_with_a_fault_is_refused(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    take(kernel, monkeypatch)
    assert not flash4.proven(*KIND, False)
    [said] = caplog.messages
    assert FAULTS[kernel] in said and said.endswith("torch's kernel instead")


def test_a_gradient_that_does_not_repeat_is_refused_where_it_must(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second gradient of the first value is one bit off."""
    calls = []

    def fault(g: Tensor) -> Tensor:
        calls.append(1)
        g = g.clone()
        g.view(torch.int16)[0, 0, 0] += len(calls) % 2
        return g

    def kernel(q: Tensor, k: Tensor, v: Tensor, **asked: Any) -> Any:
        return stand_in(q, k, _Faulty.apply(v, fault), **asked)

    take(kernel, monkeypatch)
    assert not flash4.proven(*KIND, True)
    assert "does not repeat bit for bit, torch's kernel instead" in caplog.messages[0]
    assert flash4.proven(*KIND, False)


def test_a_checkpointed_layer_may_be_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial saves tensors for gradients of its own, while the layer counts what it saves."""
    take(stand_in, monkeypatch)
    weight = torch.randn(8, 8, requires_grad=True)
    x = torch.randn(8, 8)

    def layer(x: Tensor) -> Tensor:
        x = torch.tanh(x @ weight)
        assert flash4.proven(*KIND, True)
        return torch.tanh(x @ weight)

    found, want = (
        torch.autograd.grad(out.sum(), weight)[0]
        for out in (checkpoint(layer, x, use_reentrant=False), layer(x))
    )
    assert torch.equal(found, want)


def test_a_refused_kernel_leaves_torch_its_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """`varlen_attention` goes on to torch's kernel, with the rule as it was."""
    given = []
    monkeypatch.setattr(
        attention, "_flash_forward", lambda q, k, v, lengths, rule: given.append(rule) or (q,)
    )
    rule = replace(AttentionRule(), scale=0.5)
    q = torch.zeros(8, 2, 64, dtype=torch.bfloat16)
    starts = torch.tensor([0, 8], dtype=torch.int32)
    attention.varlen_attention(q, q, q, starts, starts, 8, 8, rule)
    assert given == [rule]
