"""recipes/loop.py against the library: the same samples and rewards give the same losses, gradients
and weights at every step.

The recipe works on padded rows in one piece. Here the library's side packs the same samples into
several micro-batches and puts `build("grpo")` around the same model. Float64, so that what is
compared is the definition and not the rounding.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.paths import ROOT
from reinforge.algorithms.algorithm import Algorithm
from reinforge.algorithms.build import build
from reinforge.backends.local import LocalBackend
from reinforge.config.train import TrainConfig
from reinforge.core.backend import TrainedTokens
from reinforge.core.batch import Batch, Totals, pack
from reinforge.core.sample import Sample
from reinforge.models.causal import CausalModel


def load_recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recipe_loop", ROOT / "recipes" / "loop.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["recipe_loop"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


loop = load_recipe()


def to_library(samples: Any, rewards: Tensor) -> list[Sample]:
    """The recipe's padded rows as flat samples, without the padding."""
    rows = []
    for i, response in enumerate(samples.responses):
        mask = samples.trained[i]
        start = int(mask.nonzero()[0])
        end = start + len(response)
        tokens = samples.tokens[i, :end].tolist()
        trained = mask[:end].tolist()
        assert tokens[start:] == response and sum(trained) == len(response)
        rows.append(
            Sample.from_tokens(
                f"row{i}",
                tokens,
                trained,
                group=str(int(samples.group[i])),
                reward=rewards[i].item(),
            )
        )
    return rows


def packed_logprobs(model: torch.nn.Module, batch: Batch, temperature: float) -> Tensor:
    """[M] of the trained tokens of a pack, one sequence at a time."""
    parts = []
    for s in batch.samples:
        logits = model(input_ids=s.tokens[None]).logits[0, :-1] / temperature
        parts.append(
            logits.log_softmax(-1)[torch.arange(len(s.tokens) - 1), s.tokens[1:]][s.trained[1:]]
        )
    return torch.cat(parts)


def library_step(
    algorithm: Algorithm,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: list[Sample],
    settings: Any,
    reference: torch.nn.Module | None,
) -> list[float]:
    batches = pack(rows, budget=24)
    assert len(batches) > 2
    with torch.no_grad():
        for batch in batches:
            if "old" in algorithm.loss.needs:
                batch.streams["old"] = packed_logprobs(model, batch, settings.temperature)
            if reference is not None:
                batch.streams["reference"] = packed_logprobs(reference, batch, settings.temperature)
            del batch.streams["behaviour"]
    algorithm.advantages(batches)
    totals = Totals.of(batches, settings.max_new_tokens)
    losses = []
    for _ in range(settings.updates):
        optimizer.zero_grad()
        total = 0.0
        for batch in batches:
            lengths = batch.trained_lengths()
            logprobs = packed_logprobs(model, batch, settings.temperature)
            loss, _ = algorithm.loss(
                TrainedTokens(
                    logprobs, None, batch.sequence, lengths, lengths[batch.sequence], batch.streams
                ),
                totals,
            )
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses


@pytest.mark.parametrize(
    "changes",
    [{}, {"updates": 3, "clip_high": 0.28}, {"updates": 2, "beta": 0.1, "temperature": 0.7}],
    ids=str,
)
def test_same_losses_and_weights(changes: dict[str, Any]) -> None:
    settings = loop.Settings(prompts=4, group_size=4, seed=3, **changes)
    ours = loop.make_model(0).double()
    theirs = loop.make_model(0).double()
    reference = loop.make_model(1).double() if settings.beta else None
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (ours, theirs)]
    algorithm = build(
        "grpo",
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        kl_coefficient=settings.beta,
        updates=settings.updates,
        max_new_tokens=settings.max_new_tokens,
    )
    generator = torch.Generator().manual_seed(0)
    initial = [p.detach().clone() for p in theirs.parameters()]
    for _ in range(3):
        prompts = loop.make_prompts(settings.prompts, generator)
        samples = loop.sample(theirs, prompts, settings, generator)
        # every group has a signal
        rewards = torch.rand(len(samples.responses), generator=generator, dtype=torch.float64)
        rewards[:4] = 0.1  # but one
        expected = loop.train_on(theirs, optimizers[1], samples, rewards, settings, reference)
        found = library_step(
            algorithm, ours, optimizers[0], to_library(samples, rewards), settings, reference
        )
        assert found == pytest.approx(expected, abs=1e-6)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, atol=1e-6, rtol=0)
            torch.testing.assert_close(p, q, atol=1e-6, rtol=0)
    moved = max(
        (p - q).abs().max().item() for p, q in zip(theirs.parameters(), initial, strict=True)
    )
    assert moved > 1e-2


@pytest.mark.parametrize("changes", [{}, {"updates": 2, "beta": 0.1, "temperature": 0.7}], ids=str)
def test_same_losses_and_weights_through_the_backend(changes: dict[str, Any]) -> None:
    """Ten steps of the recipe with its own sampler, rewards and AdamW, beside the library's packed
    forward, chunked head, micro-batches and optimizer on the same samples. Float32: losses agree to
    rounding, weights to what Adam makes of it.
    """
    settings = loop.Settings(prompts=6, group_size=4, seed=1, **changes)
    theirs = loop.make_model(0)
    ours = CausalModel(loop.make_model(0).eval())
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    reference = loop.make_model(0).requires_grad_(False) if settings.beta else None
    cfg = TrainConfig(steps=10, learning_rate=settings.learning_rate, max_grad_norm=0.0)
    backend = LocalBackend(
        ours, cfg, total_steps=100, temperature=settings.temperature, reference=settings.beta > 0
    )
    algorithm = build(
        "grpo",
        kl_coefficient=settings.beta,
        updates=settings.updates,
        max_new_tokens=settings.max_new_tokens,
    )
    generator = torch.Generator().manual_seed(settings.seed)
    initial = [p.detach().clone() for p in theirs.parameters()]
    for _ in range(10):
        prompts = loop.make_prompts(settings.prompts, generator)
        samples = loop.sample(theirs, prompts, settings, generator)
        rewards = torch.rand(len(samples.responses), generator=generator)
        expected = loop.train_on(theirs, optimizer, samples, rewards, settings, reference)
        batches = pack(to_library(samples, rewards), budget=40)
        assert len(batches) > 2
        backend.annotate(batches, algorithm.loss.needs)
        algorithm.advantages(batches)
        found = []
        for _ in range(settings.updates):
            found.append(
                backend.forward_backward(
                    batches, algorithm.loss, Totals.of(batches, settings.max_new_tokens)
                )["train/loss"]
            )
            backend.step()
        assert found == pytest.approx(expected, abs=2e-5)
    for p, q, start in zip(ours.module.parameters(), theirs.parameters(), initial, strict=True):
        assert (p - q).norm() < 0.02 * (q - start).norm()


def test_advantages_and_sampling() -> None:
    """The pieces that the comparison takes from the recipe: a hand-worked group, and rows that end
    where they should.
    """
    advantages = loop.group_advantages(
        torch.tensor([1.0, 0.1, 0.0, 0.1], dtype=torch.float64), torch.tensor([0, 1, 0, 1]), 1e-4
    )
    assert advantages.tolist() == pytest.approx(
        [0.5 / (0.5**0.5 + 1e-4), 0.0, -0.5 / (0.5**0.5 + 1e-4), 0.0]
    )
    settings = loop.Settings(max_new_tokens=6)
    prompts = [[5, loop.EQUALS], [5, 6, 7, loop.EQUALS]]
    samples = loop.sample(loop.make_model(0), prompts, settings, torch.Generator().manual_seed(0))
    for i, response in enumerate(samples.responses):
        prompt = prompts[i // settings.group_size]
        assert samples.tokens[i, : len(prompt)].tolist() == prompt and loop.EOS not in response[:-1]
        assert response[-1] == loop.EOS or len(response) == 6
    assert len({tuple(r) for r in samples.responses}) > 4


def test_the_recipe_is_small_and_learns() -> None:
    source = (ROOT / "recipes" / "loop.py").read_text()
    assert len(source.splitlines()) < 300 and "reinforge" not in source
    rewards = loop.train(loop.Settings(steps=20), quiet=True)
    assert sum(rewards[-3:]) > 3 * sum(rewards[:3])
