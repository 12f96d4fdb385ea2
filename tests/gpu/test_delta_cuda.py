"""The gated delta rule by kernels with a gradient, against the plain recurrence in float64; the
interpreter runs them on a CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from helpers.toy_architectures import make_architecture
from helpers.toys import relative, tokens_of
from reinforge.core.batch import Batch
from reinforge.core.sample import Sample
from reinforge.models import delta_rule, recurrences
from reinforge.models.causal import CausalModel
from reinforge.models.delta_rule import chunked, token_by_token
from reinforge.models.exact import RowWiseMode
from reinforge.models.recurrences import GatedDelta
from reinforge.models.segment_table import SegmentTable

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LOW = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter has no other
# a GPU adds three products of 11 bits for one of float32, and others in another order
FINE = 1e-5 if DEVICE.type == "cpu" else 1e-3
NAMES = ("query", "key", "value", "decay", "beta")


def inputs(
    tokens: int, heads: int, size: int, wide: int, strength: float = 1.0, alike: float = 0.0
) -> list[Tensor]:
    """`strength`: of the decays; `alike`: what all keys have in common."""
    draw = torch.Generator().manual_seed(tokens + size)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    common = alike * normal(1, heads, size)
    parts = [
        normal(tokens, heads, size),
        normal(tokens, heads, size) + common,
        normal(tokens, heads, wide),
        -strength * normal(tokens, heads).exp(),
        (normal(tokens, heads) + alike).sigmoid(),
    ]
    return [x.to(DEVICE).requires_grad_() for x in parts]


def one_segment(parts: list[Tensor], state: Tensor, normed: bool) -> tuple[Tensor, Tensor]:
    """One segment, as the rule is written: parts [L, H, ...], state [H, D, V]."""
    query, key, value, decay, beta = parts
    if normed:
        query, key = (x * torch.rsqrt((x * x).sum(-1, True) + 1e-6) for x in (query, key))
    outs = []
    for q, k, v, g, b in zip(query, key, value, decay, beta, strict=True):
        state = state * g.exp()[:, None, None]
        known = (state * k[..., None]).sum(-2)
        state = state + k[..., None] * ((v - known) * b[:, None])[:, None]
        outs.append((state * q[..., None]).sum(-2) * q.shape[-1] ** -0.5)
    return torch.stack(outs), state


def pack_of(
    parts: list[Tensor], lengths: list[int], prefix: list[int], normed: bool
) -> tuple[Tensor, list[Tensor]]:
    """The outputs of a pack in float64, and the last state of each segment."""
    pieces = [x.double().split(lengths) for x in parts]
    _, heads, size = parts[0].shape
    nothing = pieces[0][0].new_zeros(heads, size, parts[2].shape[-1])
    outs: list[Tensor] = []
    ends: list[Tensor] = []
    for i, parent in enumerate(prefix):
        begun = nothing if parent < 0 else ends[parent]
        out, end = one_segment([x[i] for x in pieces], begun, normed)
        outs.append(out)
        ends.append(end)
    return torch.cat(outs), ends


def gradients(loss: Tensor, parts: list[Tensor]) -> list[Tensor]:
    return [x.double() for x in torch.autograd.grad(loss, parts)]


def assert_near(found: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    for name, one, true in zip(NAMES, found, want, strict=False):
        error = float(((one - true).norm() / true.norm()).detach())
        assert error < tolerance, f"{name}: {error}"


PACK = ([40, 3, 33, 32, 1], [-1, 0, 0, -1, 3])  # two prompts, three answers


@pytest.mark.parametrize(
    ("size", "wide", "normed", "strength", "alike"),
    [
        (16, 16, True, 0.1, 0.0),
        (24, 40, False, 0.1, 0.0),
        (32, 64, True, 0.01, 3.0),  # keys almost alike, large betas: the system is far from 1
        (16, 32, True, 30.0, 0.0),  # what is kept of a state is 0 in float32
    ],
    ids=["plain", "odd sizes", "alike", "strong decay"],
)
def test_packs_restart_and_fork(
    size: int, wide: int, normed: bool, strength: float, alike: float
) -> None:
    lengths, prefix = PACK
    heads = 2 if size == wide else 1
    parts = inputs(sum(lengths), heads, size, wide, strength, alike)
    if not normed:
        with torch.no_grad():
            parts[1] /= 5
    table = SegmentTable.of_pack(lengths, prefix, DEVICE)
    out, _ = chunked(parts, table, None, normed)
    true, _ = pack_of(parts, lengths, prefix, normed)
    assert_near([out.double()], [true], FINE)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    found = gradients((out * weights).sum(), parts)
    assert_near(found, gradients((true * weights).sum(), parts), FINE)


def test_rows_of_one_length_with_first_and_last_states() -> None:
    """Views of one tensor, as a mixer has them; gradients through both states, some heads at a
    time.
    """
    rows, length, heads, size = 2, 35, 3, 16
    query, key, value, decay, beta = inputs(rows * length, heads, size, size, 0.1)
    mixed = torch.cat([query, key, value], -1).detach().requires_grad_()
    parts = [*mixed.split(size, -1), decay, beta]
    draw = torch.Generator().manual_seed(5)
    state = torch.randn(rows, heads, size, size, generator=draw).to(DEVICE).requires_grad_()
    weights = torch.randn(rows, length, heads, size, generator=draw).to(DEVICE)
    asked = [mixed, decay, beta, state]

    def found() -> list[Tensor]:
        table = SegmentTable.of_tile(rows, length, True, DEVICE)
        out, final = chunked(parts, table, state, True)
        return gradients((out.unflatten(0, (rows, -1)) * weights).sum() + final.sum(), asked)

    tile = [x.unflatten(0, (rows, length)) for x in parts]
    out, final = token_by_token(tile, state, True)
    whole = found()
    assert_near(whole, gradients((out * weights).sum() + final.sum(), asked), FINE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_rule, "ROOM", 1)
        for one, all_at_once in zip(found(), whole, strict=True):
            assert torch.equal(one, all_at_once)


def test_the_backward_of_exact_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward keeps the bits of the kernel that decodes, the gradient is that of the chunks."""
    monkeypatch.setattr(recurrences, "_has_kernel", lambda *_: True)
    monkeypatch.setattr(recurrences, "_takes_ours", lambda *_: True)
    parts = [x.unflatten(0, (1, 40)) for x in inputs(40, 2, 16, 16, 0.1)]
    rule = GatedDelta(lambda: None, lambda: None, True)
    with RowWiseMode():
        out, _ = rule(parts, None, None)
    with torch.no_grad():
        assert torch.equal(out, rule._scan(*parts, None)[0])
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    true, _ = token_by_token(parts, None, True)
    want = gradients((true * weights).sum(), parts)
    assert_near(gradients((out * weights).sum(), parts), want, FINE)


def test_sixteen_bits_are_as_near_as_they_can_be() -> None:
    size = 128 if DEVICE.type == "cuda" else 16
    near = 0.02 if DEVICE.type == "cuda" else 0.002  # bfloat16 has 8 bits, float16 11
    with torch.inference_mode():  # whoever asks first
        assert delta_rule.distance(size, size, LOW, True, DEVICE) < near


def test_kernels_that_are_wrong_here_are_not_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from reinforge.models.kernels import delta

    case = (16, 16, LOW, False, DEVICE)
    delta_rule.proven.cache_clear()
    right = delta.backward

    def wrong(*args):  # type: ignore[no-untyped-def]
        right(*args)
        args[7][3].mul_(1.1)  # the gradient of decays

    monkeypatch.setattr(delta, "backward", wrong)
    assert not delta_rule.proven(*case)
    assert "away from the truth" in caplog.text and "plain torch" in caplog.text
    monkeypatch.setattr(delta, "backward", lambda *args: 1 / 0)
    delta_rule.proven.cache_clear()
    assert not delta_rule.proven(*case)
    assert "no kernel for 16 x 16 (ZeroDivisionError" in caplog.text
    monkeypatch.setattr(delta, "backward", right)
    delta_rule.proven.cache_clear()
    assert delta_rule.proven(*case)
    delta_rule.proven.cache_clear()


def test_a_whole_model_has_the_gradients_of_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Answers to a shared prompt, which is longer than a chunk, and a row of its own; two heads of
    values to one of keys.
    """
    model = CausalModel(make_architecture("qwen3_5", spread=2.0).to(DEVICE))
    prompt = tokens_of(34, 1, 259)
    rows = [prompt + tokens_of(5, 2, 259), prompt + tokens_of(9, 3, 259), tokens_of(12, 4, 259)]
    samples = [
        Sample.from_tokens(str(i), row, [at > 0 for at in range(len(row))], group=str(i // 2))
        for i, row in enumerate(rows)
    ]
    found = {}
    for ours in (False, True):
        monkeypatch.setattr(recurrences, "_takes_ours", lambda *_, ours=ours: ours)
        model.module.zero_grad()
        batch = Batch.pack(samples, share=True).to(DEVICE)
        loss = model.logprobs(batch, temperature=1.0)[0]
        (loss * torch.linspace(-1, 2, len(loss), device=DEVICE)).sum().backward()
        found[ours] = {
            n: p.grad.clone() for n, p in model.module.named_parameters() if p.grad is not None
        }
    assert relative(found[True], found[False]) < FINE


@pytest.mark.long
def test_kernels_compile_for_a_hopper_without_wgmma() -> None:
    """Triton 3.4 to 3.7 compile it wrongly in kernels like these. Half a minute: five kernels."""
    root = Path(__file__).parents[2]
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(root / "benchmarks/gated_delta.py"), "--compile"]
    said = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    rows = [json.loads(line) for line in said.splitlines()]
    assert [row["kernel"] for row in rows].count("_advance") == 2 and len(rows) == 5
    for row in rows:
        assert row["wgmma"] == 0 and row["mma"] > 0, row
        assert row["shared"] < 96 * 1024, row  # two programs on a multiprocessor
        assert row.get("spilled", 0) < 1024, row
