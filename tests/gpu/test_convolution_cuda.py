"""The convolution of packs by kernels with a gradient, against plain torch in float64; the
interpreter runs them on a CPU.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from helpers.toy_architectures import make_architecture
from helpers.toys import relative, tokens_of
from reinforge.core.batch import Batch
from reinforge.core.sample import Sample
from reinforge.models import convolution, state
from reinforge.models.causal import CausalModel
from reinforge.models.convolution import TapRows
from reinforge.models.state import PackedStates, PieceStates, RowStates, StateStore

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LOW = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter has no other
KEY = (0, 0, 0)
# a prompt with three answers, one of them of one token; a row of its own; a prompt that is shorter
# than the taps reach, with two answers. More rows than one program adds up
PACK = ([40, 3, 230, 1, 17, 2, 5, 9], [-1, 0, 0, 0, -1, -1, 5, 5])


@pytest.fixture(autouse=True)
def by_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (convolution, state):
        monkeypatch.setattr(module, "has_kernel", lambda x, _: x.dtype != torch.float64)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def inputs(tokens: int, channels: int, taps: int, biased: bool) -> list[Tensor]:
    """x is a piece of something wider, as LFM2 has it."""
    wide = random(tokens, channels + 8)
    made = [wide[:, 8:], random(channels, taps, seed=1)]
    made += [random(channels, seed=2)] if biased else []
    return made


def found(parts: list[Tensor], pack: PackedStates, activation: str | None) -> list[Tensor]:
    """The outputs of a pack, and the gradients of what asks for one."""
    x, weight, *bias = parts
    out = pack.convolve(KEY, x, weight, bias[0] if bias else None, activation)
    loss = (out * random(*out.shape, seed=5).to(out.dtype)).sum()
    return [out, *torch.autograd.grad(loss, [x for x in parts if x.requires_grad])]


def asking(parts: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [x.detach().to(dtype).requires_grad_() for x in parts]


def distance(got: list[Tensor], want: list[Tensor]) -> list[float]:
    return [
        float((a.detach().double() - b.detach()).norm() / b.detach().norm())
        for a, b in zip(got, want, strict=True)
    ]


@pytest.mark.parametrize(
    ("taps", "channels", "biased", "activation"),
    [
        (4, 136, True, "silu"),
        (4, 32, False, None),
        (2, 70, False, "silu"),
        (3, 70, True, None),
        (1, 30, True, "silu"),
        (5, 16, False, "gelu"),  # not in the kernel
    ],
)
def test_outputs_and_gradients_of_a_pack_with_shared_prompts(
    taps: int, channels: int, biased: bool, activation: str | None
) -> None:
    lengths, prefix = PACK
    parts = inputs(sum(lengths), channels, taps, biased)
    pack = PackedStates(lengths, DEVICE, prefix)
    true = found(asking(parts, torch.float64), pack, activation)
    got = found([x.detach().requires_grad_() for x in parts], pack, activation)
    assert max(distance(got, true)) < 2e-6


def test_sixteen_bits_are_rounded_where_torch_rounds() -> None:
    lengths, prefix = PACK
    pack = PackedStates(lengths, DEVICE, prefix)
    low = asking(inputs(sum(lengths), 24, 4, True), LOW)
    wide = [x.detach().double().requires_grad_() for x in low]
    got = found(low, pack, "silu")
    z = pack.convolve(KEY, *wide).to(LOW)
    assert float((got[0] == F.silu(z)).float().mean()) > 0.99
    near = 6e-3 if torch.bfloat16 == LOW else 7e-4
    assert max(distance(got, found(wide, pack, "silu"))) < near


def test_same_bits_twice_and_frozen_weights() -> None:
    def of(parts: list[Tensor], activation: str | None = "silu") -> list[Tensor]:
        return found(parts, PackedStates([40, 9, 5], DEVICE, [-1, 0, 0]), activation)

    parts = asking(inputs(54, 24, 4, True), LOW)
    first = of(parts)
    assert all(torch.equal(a, b) for a, b in zip(first, of(parts), strict=True))
    frozen = [parts[0], *(x.detach() for x in parts[1:])]
    assert torch.equal(of(frozen)[1], first[1])
    assert torch.equal(of(frozen, None)[1], of(parts, None)[1])
    biased = [parts[0].detach(), parts[1].detach(), parts[2]]
    assert torch.equal(of(biased)[1], first[3])


def test_nothing_is_kept_but_the_inputs() -> None:
    lengths, prefix = PACK
    x, weight = asking(inputs(sum(lengths), 40, 4, False), LOW)
    PackedStates(lengths, DEVICE, prefix).convolve(KEY, x, weight, None, "silu")  # kernels proved
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        PackedStates(lengths, DEVICE, prefix).convolve(KEY, x, weight, None, "silu")
    assert {t.data_ptr() for t in kept} == {x.data_ptr(), weight.data_ptr()}


def test_a_pack_without_tokens() -> None:
    x, weight, bias = asking([random(0, 6), random(6, 4), random(6)], LOW)
    out = TapRows.of([0], [[0, 0, 0]], 0, DEVICE).convolve(x, weight, bias, "silu")
    grads = torch.autograd.grad(out.sum(), [x, weight, bias])
    assert out.shape == (0, 6) and [g.shape for g in grads] == [(0, 6), (6, 4), (6,)]
    assert not grads[1].any() and not grads[2].any()


def test_pieces_of_a_prompt_and_single_tokens() -> None:
    """A sequence at once, in pieces (the same to the bit) and token by token, in another order of
    the taps.
    """
    x = random(40, 20).to(LOW)
    weight = random(20, 4, seed=1).to(LOW)
    bias = random(20, seed=2).to(LOW)
    whole = PackedStates([40], DEVICE)
    want = whole.convolve(KEY, x, weight, bias, "silu")
    store = StateStore(whole.shapes, 2, DEVICE)
    store.parts[KEY].fill_(float("nan"))
    slots = torch.tensor([2], device=DEVICE)
    pieces = []
    for begin, end in ((0, 2), (2, 3), (3, 35)):
        begun = torch.tensor([begin > 0], device=DEVICE)
        flow = PieceStates([end - begin], store, slots, begun)
        pieces.append(flow.convolve(KEY, x[begin:end], weight, bias, "silu"))
    assert torch.equal(torch.cat(pieces), want[:35])
    rows = RowStates(store, slots)
    tokens = [rows.convolve(KEY, x[[t]], weight, bias, "silu") for t in range(35, 40)]
    torch.testing.assert_close(torch.cat(tokens), want[35:], rtol=2**-6, atol=1e-3)


def test_kernels_that_are_wrong_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    proven = convolution.proven.__wrapped__
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
    assert proven(4, dtype, DEVICE)
    from reinforge.models.kernels import convolution as kernels

    own = kernels.output_grads
    monkeypatch.setattr(kernels, "output_grads", lambda *args: (2 * own(*args)[0], own(*args)[1]))
    assert not proven(4, dtype, DEVICE)


@pytest.mark.parametrize("name", [pytest.param("qwen3_5", marks=pytest.mark.long), "lfm2"])
def test_a_whole_model_has_the_gradients_of_torch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = CausalModel(make_architecture(name, spread=2.0).to(DEVICE))
    prompt = tokens_of(9, 1, 259)
    rows = [prompt + tokens_of(5, 2, 259), prompt + tokens_of(9, 3, 259), tokens_of(12, 4, 259)]
    samples = [
        Sample.from_tokens(str(i), row, [at > 0 for at in range(len(row))], group=str(i // 2))
        for i, row in enumerate(rows)
    ]
    grads = {}
    for ours in (False, True):
        monkeypatch.setattr(convolution, "has_kernel", lambda *_, ours=ours: ours)
        model.module.zero_grad()
        loss = model.logprobs(Batch.pack(samples, share=True).to(DEVICE), temperature=1.0)[0]
        (loss * torch.linspace(-1, 2, len(loss), device=DEVICE)).sum().backward()
        grads[ours] = {
            n: p.grad.clone() for n, p in model.module.named_parameters() if p.grad is not None
        }
    near = 1e-5 if DEVICE.type == "cpu" else 1e-3  # torch's products there have 11 bits
    assert relative(grads[True], grads[False]) < near
