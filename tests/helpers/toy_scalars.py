"""Toy critics and reward models, and what transformers alone says about them."""

from __future__ import annotations

import torch

from helpers.toys import ToyTokenizer, _config
from reinforge.models.scalar import ScalarModel


def make_classifier(arch: str = "llama", seed: int = 0, spread: float = 4.0, **changes):  # type: ignore[no-untyped-def]
    """A sequence classifier with transformers' own attention and a head that is not 0."""
    from transformers import AutoModelForSequenceClassification

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = AutoModelForSequenceClassification.from_config(
            _config(arch, num_labels=1, **changes), attn_implementation="eager"
        )
        with torch.no_grad():
            for p in module.parameters():
                if p.ndim > 1:
                    p.mul_(spread)
            module.score.weight.normal_()
    return module.eval()


def make_scalar(arch: str = "llama", seed: int = 0, **changes) -> ScalarModel:  # type: ignore[no-untyped-def]
    return ScalarModel(make_classifier(arch, seed, **changes), ToyTokenizer())


@torch.no_grad()
def true_values(module, tokens: list[int]) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """[T] float64: the head after each token, by transformers alone: the score of every prefix."""
    return torch.stack(
        [module(torch.tensor([tokens[: t + 1]])).logits[0, 0].double() for t in range(len(tokens))]
    )
