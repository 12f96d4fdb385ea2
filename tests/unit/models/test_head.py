"""The chunked head against full float64 logits: log-probs, entropies and every gradient."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from reinforge.models import head
from reinforge.models.device_memory import DeviceMemory
from reinforge.models.head import LogitRule, chunk_rows, keeps_logits, token_logprobs

RULES = {
    "plain": LogitRule(),
    "scaled": LogitRule(scale=0.3),
    "capped": LogitRule(softcap=4.0),
    "both": LogitRule(scale=1.7, softcap=3.0),
}


def reference(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    rule: LogitRule,
) -> tuple[Tensor, Tensor]:
    """Full logits in float64, autograd as it comes."""
    x = h @ weight.t() + (0 if bias is None else bias)
    x = x * rule.scale
    z = (x if rule.softcap is None else rule.softcap * torch.tanh(x / rule.softcap)) / temperature
    logp = z.log_softmax(-1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def inputs(bias: bool, rows: int = 11, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    parts = [draw(rows, 8), draw(37, 8)] + ([draw(37)] if bias else [])
    return parts, torch.randint(0, 37, (rows,), generator=generator)


@pytest.fixture(params=[1, 4, 100], ids=lambda n: f"chunk{n}")
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "chunk_rows", lambda rows, vocabulary, device: request.param)


@pytest.mark.parametrize(
    ("rule", "temperature", "bias", "entropy_gradient"),
    list(product(RULES, (1.0, 0.7, 2.5), (False, True), (False, True))),
)
def test_values_and_gradients(
    chunk: None, rule: str, temperature: float, bias: bool, entropy_gradient: bool
) -> None:
    parts, targets = inputs(bias)
    ours = [p.clone().requires_grad_() for p in parts]
    theirs = [p.double().requires_grad_() for p in parts]
    up_logp = torch.linspace(-1, 2, 11)
    up_entropy = torch.linspace(1, -1, 11)
    logp, entropy = token_logprobs(
        ours[0],
        ours[1],
        ours[2] if bias else None,
        targets,
        temperature=temperature,
        rule=RULES[rule],
        entropy=True,
        entropy_gradient=entropy_gradient,
    )
    want_logp, want_entropy = reference(
        theirs[0], theirs[1], theirs[2] if bias else None, targets, temperature, RULES[rule]
    )
    assert entropy is not None
    torch.testing.assert_close(logp.double(), want_logp, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(entropy.double(), want_entropy, atol=2e-6, rtol=1e-6)
    assert entropy.requires_grad is entropy_gradient
    loss = (logp * up_logp).sum()
    want = (want_logp * up_logp.double()).sum()
    if entropy_gradient:
        loss = loss + (entropy * up_entropy).sum()
        want = want + (want_entropy * up_entropy.double()).sum()
    loss.backward()
    want.backward()
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(a.grad.double(), b.grad, atol=1e-5, rtol=1e-5)
        assert float(b.grad.abs().max()) > 0.05


def test_kept_logits_change_no_bit(chunk: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a second backward, for which they are computed again."""
    parts, targets = inputs(True)
    products: list[int] = []
    plain = head.F.linear

    def linear(*args: Tensor) -> Tensor:
        products.append(1)
        return plain(*args)

    def gradients(keep: bool) -> tuple[list[Tensor | None], int]:
        monkeypatch.setattr(head, "keeps_logits", lambda rows, weight: keep)
        leaves = [p.clone().requires_grad_() for p in parts]
        products.clear()
        logp, entropy = token_logprobs(
            *leaves, targets, temperature=0.7, entropy=True, entropy_gradient=True
        )
        assert entropy is not None
        loss = (logp * torch.linspace(-1, 2, 11)).sum() + entropy.sum()
        loss.backward(retain_graph=True)
        made = len(products)
        first = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        loss.backward()
        for leaf, found in zip(leaves, first, strict=True):
            assert leaf.grad is not None and found is not None and torch.equal(leaf.grad, found)
        return first, made

    monkeypatch.setattr(head.F, "linear", linear)
    (kept, few), (again, many) = gradients(True), gradients(False)
    assert many == 2 * few
    for a, b in zip(kept, again, strict=True):
        assert a is not None and b is not None and torch.equal(a, b)


def test_logits_stay_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(1000, 2, dtype=torch.bfloat16)
    assert not keeps_logits(1, weight)  # on a CPU the product is not what takes the time
    memory = DeviceMemory(free=4 * 2 * 1000 * 50, untaken=0, whole=10**9)
    monkeypatch.setattr(head, "device_memory", lambda device: memory)
    assert keeps_logits(50, weight) and not keeps_logits(51, weight)


@pytest.mark.parametrize("entropy", [False, True])
def test_gradient_by_finite_differences(entropy: bool) -> None:
    """The backward formula against the forward alone, in a few random directions."""
    parts, targets = inputs(True, rows=5)
    rule = LogitRule(scale=0.8, softcap=3.0)
    generator = torch.Generator().manual_seed(9)

    def value(at: list[Tensor]) -> Tensor:
        logp, ent = token_logprobs(
            at[0],
            at[1],
            at[2],
            targets,
            temperature=0.9,
            rule=rule,
            entropy=True,
            entropy_gradient=True,
        )
        assert ent is not None
        return (logp * torch.arange(1.0, 6.0)).sum() + (2 * ent.sum() if entropy else 0.0)

    leaves = [p.clone().requires_grad_() for p in parts]
    value(leaves).backward()
    for i, leaf in enumerate(leaves):
        direction = torch.randn(leaf.shape, generator=generator)

        def shift(by: float, i: int = i, direction: Tensor = direction) -> list[Tensor]:
            return [p + by * direction if j == i else p for j, p in enumerate(parts)]

        step = 3e-3
        numeric = float(value(shift(step)) - value(shift(-step))) / (2 * step)
        assert leaf.grad is not None
        assert numeric == pytest.approx(float((leaf.grad * direction).sum()), rel=5e-3, abs=5e-3)


def test_entropy_without_gradient_does_not_reach_the_weights() -> None:
    parts, targets = inputs(False)
    h = parts[0].clone().requires_grad_()
    logp, entropy = token_logprobs(h, parts[1], None, targets, entropy=True)
    assert entropy is not None and not entropy.requires_grad and logp.requires_grad
    assert token_logprobs(h, parts[1], None, targets)[1] is None


@pytest.mark.parametrize("size", [200.0, 1e4])
def test_huge_logits_stay_finite(size: float) -> None:
    """exp(±200) must not become inf·0, in the value, the entropy or the gradient."""
    h = torch.tensor([[size], [-size], [0.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.0]], requires_grad=True)
    logp, entropy = token_logprobs(
        h, weight, None, torch.tensor([0, 0, 0]), entropy=True, entropy_gradient=True
    )
    assert entropy is not None
    assert logp.tolist() == pytest.approx(
        [0.0, -2 * size, -torch.tensor(3.0).log().item()], rel=1e-6
    )
    assert entropy.tolist() == pytest.approx([0.0, 0.0, torch.tensor(3.0).log().item()], abs=1e-6)
    (logp.sum() + entropy.sum()).backward()
    assert h.grad is not None and weight.grad is not None
    # at -size: d(z0 - max)/dh = 1 - (-1)
    assert h.grad[:, 0].tolist() == pytest.approx([0.0, 2.0, 1.0], abs=1e-5)
    assert bool(weight.grad.isfinite().all())


def test_forbidden_tokens_are_possible() -> None:
    """A bias of −inf (a token that can never come) leaves the others' probabilities, entropy and
    gradients finite.
    """
    parts, _ = inputs(True)
    bias = parts[2].clone()
    bias[5] = float("-inf")
    h = parts[0].clone().requires_grad_()
    targets = torch.full((11,), 7)
    logp, entropy = token_logprobs(h, parts[1], bias, targets, entropy=True, entropy_gradient=True)
    keep = [i for i in range(37) if i != 5]
    want, want_entropy = reference(
        parts[0].double(),
        parts[1][keep].double(),
        bias[keep].double(),
        targets - 1,
        1.0,
        LogitRule(),
    )
    assert entropy is not None
    torch.testing.assert_close(logp.double(), want, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(entropy.double(), want_entropy, atol=2e-6, rtol=1e-6)
    (logp.sum() + entropy.sum()).backward()
    assert h.grad is not None and bool(h.grad.isfinite().all())


def test_softmax_is_float32_under_bfloat16() -> None:
    """Log-probs of a bf16 model differ from exact ones by the rounding of logits, not by a bf16
    log-softmax (steps of 1/16 here).
    """
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(64, 16, generator=generator).bfloat16()
    weight = torch.randn(5000, 16, generator=generator).bfloat16()
    targets = torch.randint(0, 5000, (64,), generator=generator)
    logits = torch.nn.functional.linear(h, weight)  # bf16, as the model gives them
    exact = logits.double().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    rough = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0].double()
    ours = token_logprobs(h, weight, None, targets)[0]
    assert ours.dtype is torch.float32
    assert float((ours - exact).abs().max()) < 1e-5 < 1e-2 < float((rough - exact).abs().max())


def test_temperature_divides_logits_not_logprobs() -> None:
    parts, targets = inputs(False)
    logp = token_logprobs(parts[0], parts[1], None, targets, temperature=0.5)[0]
    wrong = token_logprobs(parts[0], parts[1], None, targets)[0] / 0.5
    assert float((logp - wrong).abs().max()) > 1.0


@pytest.mark.parametrize(
    "bad", [{"temperature": 0.0}, {"targets": torch.zeros(3, dtype=torch.int64)}], ids=str
)
def test_misuse_is_refused(bad: dict[str, Any]) -> None:
    parts, targets = inputs(False)
    with pytest.raises(AssertionError):
        token_logprobs(
            parts[0],
            parts[1],
            None,
            bad.get("targets", targets),
            temperature=bad.get("temperature", 1.0),
        )


def test_no_rows_give_no_gradient() -> None:
    weight = torch.randn(5, 4, requires_grad=True)
    logp, _ = token_logprobs(
        torch.zeros(0, 4, requires_grad=True), weight, None, torch.zeros(0, dtype=torch.int64)
    )
    logp.sum().backward()
    assert logp.shape == (0,) and weight.grad is not None and float(weight.grad.abs().sum()) == 0.0


def test_chunks_bound_memory() -> None:
    cpu = torch.device("cpu")
    assert (
        chunk_rows(10_000, 150_000, cpu) * 150_000 * 4 <= 8 << 20
        and chunk_rows(10, 100, cpu) == 10
        and chunk_rows(5, 1 << 30, cpu) == 1
    )
    gpu = torch.device("cuda")
    # ten chunks of whole tiles, of 1,766 rows at most
    assert (
        chunk_rows(16_384, 151_936, gpu) == 1792
        and chunk_rows(1_767, 151_936, gpu) == 1024
        and chunk_rows(300, 151_936, gpu) == 300
    )


def bits_of(free: Tensor) -> Tensor:
    """[R, V] bool as [R, W] int32 words of 32 bits."""
    rows, vocabulary = free.shape
    padded = torch.zeros(rows, -(-vocabulary // 32) * 32, dtype=torch.int64)
    padded[:, :vocabulary] = free
    words = (padded.view(rows, -1, 32) << torch.arange(32)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


@pytest.mark.parametrize(("rule", "temperature"), list(product(RULES, (1.0, 0.7))))
@pytest.mark.parametrize("exact", [False, True])
def test_what_is_not_allowed_has_no_probability_and_no_gradient(
    chunk: None, rule: str, temperature: float, exact: bool
) -> None:
    """Against float64 logits of which the forbidden ones are -inf; a row that allows everything has
    the bits of one without masks.
    """
    parts, targets = inputs(True)
    free = torch.rand(11, 37, generator=torch.Generator().manual_seed(3)) < 0.3
    free[torch.arange(11), targets] = True
    free[4] = True
    free[5] = torch.arange(37) == targets[5]  # nothing else is possible
    ours = [p.clone().requires_grad_() for p in parts]
    theirs = [p.double().requires_grad_() for p in parts]
    settings: dict[str, Any] = {"temperature": temperature, "rule": RULES[rule], "exact": exact}
    logp, entropy = token_logprobs(
        *ours, targets, **settings, entropy=True, entropy_gradient=True, allowed=bits_of(free)
    )
    x = (theirs[0] @ theirs[1].t() + theirs[2]) * RULES[rule].scale
    cap = RULES[rule].softcap
    z = (x if cap is None else cap * torch.tanh(x / cap)) / temperature
    full = z.masked_fill(~free, -1e9).log_softmax(-1)
    want = full.gather(-1, targets[:, None])[:, 0]
    want_entropy = -(full.exp() * full).sum(-1)
    assert entropy is not None
    torch.testing.assert_close(logp.double(), want, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(entropy.double(), want_entropy, atol=3e-6, rtol=1e-6)
    assert logp[5] == 0.0 and entropy[5] == 0.0
    assert torch.equal(token_logprobs(*parts, targets, **settings)[0][4], logp[4])
    weights = torch.linspace(-1, 2, 11)
    (logp * weights).sum().add((entropy * weights.flip(0)).sum()).backward()
    (want * weights.double()).sum().add((want_entropy * weights.flip(0).double()).sum()).backward()
    for mine, right in zip(ours, theirs, strict=True):
        assert mine.grad is not None and right.grad is not None
        torch.testing.assert_close(mine.grad.double(), right.grad, atol=2e-5, rtol=1e-5)
