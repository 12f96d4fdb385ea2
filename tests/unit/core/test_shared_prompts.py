"""Packs that compute the prompt of a group once: fewer tokens, the same log-probs and gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from reinforge.algorithms.build import build
from reinforge.backends.microbatch import combine, trained_tokens
from reinforge.core.backend import Loss
from reinforge.core.batch import Batch, Totals, pack
from reinforge.core.metrics import LossMetrics
from reinforge.core.sample import Sample
from reinforge.core.signal import with_signal
from reinforge.models.causal import CausalModel


def sample(group: int, i: int, prompt: int, response: int) -> Sample:
    tokens = [(7 * k + group) % 50 for k in range(prompt)] + [
        (11 * k + 3 * i + group) % 50 for k in range(response)
    ]
    return Sample.from_tokens(
        f"{group}/{i}", tokens, [False] * prompt + [True] * response, group=str(group)
    )


@pytest.fixture(scope="module")
def model() -> CausalModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        initializer_range=0.2,
    )
    return CausalModel(LlamaForCausalLM(config).eval())


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    rows = [sample(g, i, 5 + 3 * g, 3 + (5 * i + g) % 9) for g in range(4) for i in range(5)]
    multi_turn = rows[6].with_(
        uid="turns", trained=rows[6].trained & (torch.arange(len(rows[6].tokens)) % 3 != 0)
    )
    other_prompt = sample(1, 9, 6, 4)  # in group 1, but not its prompt
    return [
        *rows,
        sample(9, 0, 4, 6),
        multi_turn,
        other_prompt,
        rows[0].with_(uid="idle", trained=torch.zeros_like(rows[0].trained)),
    ]


def run(model: CausalModel, batches: list[Batch]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Log-probs by sample, and the gradient of a sum in which every token has a weight
    of its own.
    """
    model.module.zero_grad()
    found: dict[str, Tensor] = {}
    for batch in batches:
        logprobs, _ = model.logprobs(batch, temperature=1.0)
        weights = torch.cat(
            [
                torch.linspace(0.5, 2.0, s.n_trained) * (1 + len(s.uid + s.group) % 3)
                for s in batch.samples
            ]
        )
        (weights * logprobs).sum().backward()
        found |= {
            s.uid: logprobs[batch.sequence == i].detach() for i, s in enumerate(batch.samples)
        }
    return found, [p.grad.clone() for p in model.module.parameters() if p.grad is not None]


@pytest.mark.parametrize("budget", [10_000, 60, 25])
def test_sharing_changes_no_log_prob_and_no_gradient(
    model: CausalModel, samples: list[Sample], budget: int
) -> None:
    apart = pack(samples, budget)
    together = pack(samples, budget, share=True)
    assert sum(b.n_tokens for b in together) < sum(b.n_tokens for b in apart)
    assert all(b.n_tokens <= budget + 6 for b in together)
    (a, grad_a), (b, grad_b) = run(model, apart), run(model, together)
    assert a.keys() == b.keys() == {s.uid for s in samples}
    for uid in a:
        torch.testing.assert_close(a[uid], b[uid], atol=3e-6, rtol=1e-5)
    for x, y in zip(grad_a, grad_b, strict=True):
        torch.testing.assert_close(x, y, atol=1e-5 * float(x.abs().max()) + 1e-9, rtol=1e-4)


def test_a_shared_pack_counts_tokens_once(samples: list[Sample]) -> None:
    """Group 0: prompt of 5, answers of 3, 8, 4, 9, 5; one of them again as an idle row, which takes
    no room.
    """
    group = [s for s in samples if s.group == "0"]
    batch = Batch.pack(group, share=True)
    assert batch.n_tokens == 5 + 3 + 8 + 4 + 9 + 5 and batch.n_trained == 29
    assert batch.lengths == [5, 9, 8, 5, 4, 3] and batch.prefix == [-1, 0, 0, 0, 0, 0]
    assert batch.positions[5:8].tolist() == [5, 6, 7] and batch.ends[-1] == -1
    first = batch.targets[batch.sequence == 3][0]
    assert batch.sources[batch.sequence == 3][0] == 4 and batch.tokens[first] == group[3].tokens[5]
    assert [int(batch.tokens[e]) for e in batch.ends[:5]] == [int(s.tokens[-1]) for s in group[:5]]


def test_pairs_stay_together(samples: list[Sample]) -> None:
    packs = pack(samples[:20], 40, unit=2, share=True)
    pairs = [
        (b.samples[i].uid, b.samples[i + 1].uid) for b in packs for i in range(0, len(b.samples), 2)
    ]
    assert sorted(pairs) == sorted((samples[i].uid, samples[i + 1].uid) for i in range(0, 20, 2))


def test_rows_without_gradient_are_left_out_and_the_gradient_stays(
    model: CausalModel, samples: list[Sample]
) -> None:
    """Groups 0 and 2 have advantages, the others none: fewer tokens, the same gradient and loss,
    and means over what is computed.
    """
    loss = build("grpo").loss
    assert (
        build("grpo").idle
        and not build("grpo", entropy=0.01).idle
        and not build("grpo", kl_coefficient=0.1).idle
    )
    assert not build(
        "grpo",
        surrogate=lambda logprobs, old, advantages, sequence: (
            logprobs * advantages + logprobs,
            {},
        ),
    ).idle
    grads = []
    values = []
    counts = []
    for skip in (False, True):
        batches = pack(samples, 60, share=True)
        for batch in batches:
            gains = torch.tensor(
                [float(s.group in ("0", "2")) * (1 + len(s.tokens) % 3) for s in batch.samples]
            )
            batch.streams["advantages"] = gains[batch.sequence]
        totals = Totals.of(batches)
        if skip:
            batches = with_signal(batches, 60, share=True)
            totals = replace(totals, left_out=totals.tokens - sum(b.n_trained for b in batches))
        model.module.zero_grad()
        metrics = [_backward(model, batch, loss, totals) for batch in batches if batch.n_trained]
        grads.append([p.grad.clone() for p in model.module.parameters() if p.grad is not None])
        values.append({name: combine(metrics)[name] for name in ("policy/loss", "policy/ratio")})
        counts.append(sum(b.n_tokens for b in batches))
    assert counts[1] < 0.6 * counts[0]
    assert values[0] == pytest.approx(values[1], rel=1e-5) and values[0][
        "policy/ratio"
    ] == pytest.approx(1.0)
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x, y, atol=1e-5 * float(x.abs().max()) + 1e-9, rtol=1e-4)


def _backward(model: CausalModel, batch: Batch, loss: Loss, totals: Totals) -> LossMetrics:
    value, metrics = loss(trained_tokens(model, batch, loss, totals, 1.0), totals)
    value.backward()
    return metrics
