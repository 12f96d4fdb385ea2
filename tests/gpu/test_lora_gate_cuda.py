"""What a gated MLP with adapters computes between its products, beside float64. Without a GPU the
kernels are interpreted.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reinforge.models import lora_linear
from reinforge.models.lora_linear import LoraLinears, lora_mlp

pytest.importorskip("triton")
lora_gate = pytest.importorskip("reinforge.models.kernels.lora_gate")
pytestmark = pytest.mark.skipif(not lora_gate.common.HAS_TMA, reason="needs a newer GPU")
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SCALES = [0.5, 2.0]
# the interpreter has no products of bfloat16
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]
# M, I, ranks: less than a tile, tiles and a rest of both, ranks that fill a tile
SIZES = [(9, 16, (4, 2, 8)), (150, 136, (5, 16, 3)), (70, 72, (1, 33, 64))]


def normal(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw).to(dtype).to(DEVICE)


class Given:
    """What the kernels read."""

    def __init__(self, rows: int, width: int, ranks: tuple[int, int, int], dtype: torch.dtype):
        self.both = normal(rows, 2 * width, seed=0, dtype=dtype)
        self.narrow = normal(rows, ranks[0] + ranks[1], seed=1, dtype=dtype)
        self.ups = [
            normal(width, rank, seed=2 + i, dtype=dtype) / rank for i, rank in enumerate(ranks[:2])
        ]
        self.down = normal(ranks[2], width, seed=4, dtype=dtype) / ranks[2]
        self.dinner = normal(rows, width, seed=5, dtype=dtype)
        self.dnarrow = normal(rows, ranks[2], seed=6, dtype=dtype)

    def forward(self) -> list[Tensor]:
        return list(lora_gate.gated(self.both, self.narrow, self.ups, SCALES, self.down))

    def backward(self) -> list[Tensor]:
        dboth, grads = lora_gate.gated_backward(
            self.both, self.narrow, self.ups, SCALES, self.down, self.dinner, self.dnarrow
        )
        return [dboth, *grads]

    def truth(self) -> tuple[list[Tensor], list[Tensor]]:
        """Both in float64."""
        both, narrow, down = (part.double() for part in (self.both, self.narrow, self.down))
        learned = [both, *(up.double() for up in self.ups)]
        learned = [part.requires_grad_() for part in learned]
        smalls = narrow.split([up.shape[1] for up in self.ups], 1)
        gate, up = (
            half + scale * small @ b.t()
            for half, small, b, scale in zip(
                both.chunk(2, 1), smalls, learned[1:], SCALES, strict=True
            )
        )
        inner = F.silu(gate) * up
        dnarrow = self.dnarrow.double()
        grads = torch.autograd.grad(inner, learned, self.dinner.double() + dnarrow @ down)
        inner = inner.detach()
        return [inner, inner @ down.t()], [*grads, dnarrow.t() @ inner]


def near(got: list[Tensor], want: list[Tensor], dtype: torch.dtype) -> None:
    """As near as a few roundings to this precision."""
    close = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert float((a.double() - b).norm() / b.norm()) < close
        torch.testing.assert_close(
            a.double(), b, rtol=4 * close, atol=4 * close * float(b.abs().max())
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width", "ranks"), SIZES)
@pytest.mark.parametrize("alone", [False, True])
def test_numbers_and_gradients_are_those_of_float64(
    rows: int,
    width: int,
    ranks: tuple[int, int, int],
    dtype: torch.dtype,
    alone: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether one program goes through all of a sum, or each tile has its own."""
    if alone:
        monkeypatch.setattr(lora_gate, "ENOUGH", 1)
    given = Given(rows, width, ranks, dtype)
    assert lora_gate.takes(given.both, ranks)
    forward, backward = given.truth()
    near(given.forward(), forward, dtype)
    near(given.backward(), backward, dtype)


@pytest.mark.parametrize("run", [Given.forward, Given.backward])
def test_bits_repeat(run: Callable[[Given], list[Tensor]]) -> None:
    given = Given(150, 136, (5, 16, 3), DTYPES[-1])
    assert all(torch.equal(a, b) for a, b in zip(run(given), run(given), strict=True))


@pytest.mark.parametrize(
    ("width", "ranks", "dtype"),
    [
        (16, (4, 65, 4), torch.float32),  # more than a tile has room for
        (18, (4, 4, 4), torch.float32),  # rows that begin anywhere
        (16, (4, 4, 4), torch.float64),
    ],
)
def test_what_it_does_not_take(width: int, ranks: tuple[int, int, int], dtype: torch.dtype) -> None:
    assert not lora_gate.takes(torch.zeros(3, 2 * width, dtype=dtype), ranks)
    assert not lora_gate.takes(torch.zeros(0, 32), (4, 4, 4))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("down_rank", [6, 70])
def test_a_whole_mlp_with_and_without_kernels(
    biased: bool, down_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output and all gradients; a rank that is too large for them is the sums in memory."""
    hidden, width, ranks = 24, 40, (3, 5, down_rank)
    dtype = torch.float32

    def linears(sizes: list[int], inputs: int, scales: list[float], seed: int) -> LoraLinears:
        weights = [normal(n, inputs, seed=seed + i, dtype=dtype) for i, n in enumerate(sizes)]
        biases = [normal(n, seed=seed + 5 + i, dtype=dtype) for i, n in enumerate(sizes)]
        return LoraLinears(weights, biases if biased else [], scales)

    wide = linears([width, width], hidden, [0.5, 2.0], 10)
    last = linears([hidden], width, [1.5], 20)
    shapes = [
        *((rank, hidden) for rank in ranks[:2]),
        *((width, rank) for rank in ranks[:2]),
        (down_rank, width),
        (hidden, down_rank),
    ]
    given = [normal(*shape, seed=30 + i, dtype=dtype) for i, shape in enumerate(shapes)]
    learned = [normal(2, 35, hidden, seed=40, dtype=dtype), *given]
    learned = [part.requires_grad_() for part in learned]
    weigh = normal(2, 35, hidden, seed=41, dtype=dtype)
    taken: list[bool] = []
    usual = lora_linear._kernels
    monkeypatch.setattr(
        lora_linear,
        "_kernels",
        lambda *args: (taken.append((found := usual(*args)) is not None), found)[1],
    )

    def computed() -> list[Tensor]:
        y = lora_mlp(wide, last, *learned[:1], learned[1:])
        return [y.detach(), *torch.autograd.grad((y * weigh).sum(), learned)]

    fused = computed()
    monkeypatch.setattr(lora_gate, "takes", lambda both, ranks: False)
    plain = computed()
    assert taken == [down_rank <= lora_gate.RANKS, False]
    for a, b in zip(fused, plain, strict=True):
        assert a.shape == b.shape and float(b.abs().max()) > 0
        torch.testing.assert_close(a, b, atol=2e-5 * float(b.abs().max()), rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_engines_compute_the_same_of_the_same_numbers(dtype: torch.dtype) -> None:
    """Rounded where decoding rounds: gate, silu of it, up and their product."""
    from reinforge.models.kernels import low_rank
    from reinforge.models.projections import Adapter

    width, rank = 136, 8
    given = Given(70, width, (rank, rank, 4), dtype)
    trained = given.forward()[0]
    down = torch.empty(rank, 1, dtype=dtype, device=DEVICE)  # its product is there already
    adapters = [
        Adapter(down, up, scale, i * width)
        for i, (up, scale) in enumerate(zip(given.ups, SCALES, strict=True))
    ]
    parts = given.narrow.float()[None].contiguous()
    decoded = low_rank.gated_expand(given.both, parts, adapters)
    # sums of a product may have another order, or exponentials another last bit
    apart = (trained != decoded).float().mean()
    assert apart < (0.02 if dtype.itemsize == 2 else 1.0)
    torch.testing.assert_close(trained, decoded, atol=1e-5, rtol=4 * torch.finfo(dtype).eps)
