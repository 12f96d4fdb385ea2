"""GRPO in one file, with nothing but torch and transformers: read this first, then the library.

The definitions are the library's (`grpo`: group-relative advantages, PPO clip, mean over sequences
of their token means) on plain padded tensors, and a test holds both to the same losses and weights
step by step. What the library adds is not here: packing, a KV cache, micro-batches, resume,
anything that has to be fast.

    python recipes/loop.py

trains a small random Llama to say the last digit of its prompt and stop. Under a minute on one CPU
core.

Legend: B rows (prompts x group size), T padded length, V vocabulary.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

PAD = 0
EOS = 1
EQUALS = 2
FIRST_DIGIT = 3
VOCABULARY = FIRST_DIGIT + 10


@dataclass(frozen=True)
class Settings:
    steps: int = 60
    prompts: int = 32  # per step
    group_size: int = 16  # samples of each prompt
    max_new_tokens: int = 4
    temperature: float = 1.0
    learning_rate: float = 3e-3
    clip_low: float = 0.2
    clip_high: float = 0.2
    eps: float = 1e-4  # added to the std of a group
    beta: float = 0.0  # weight of the KL to the reference
    updates: int = 1  # optimizer steps on each batch of samples
    seed: int = 0


@dataclass(frozen=True)
class Samples:
    """Rows are right-padded: under causal attention nothing real ever sees the padding, so no mask
    and no position ids are needed.
    """

    tokens: Tensor  # [B, T] prompt, response, padding
    trained: Tensor  # [B, T] bool: sampled by the policy, the stop token included
    group: Tensor  # [B] which prompt
    responses: list[list[int]]


# --- the policy -----------------------------------------------------------------------------------


def token_logprobs(model: nn.Module, tokens: Tensor, temperature: float) -> Tensor:
    """[B, T]: log p(tokens[t] | tokens[:t]) at `temperature`; 0 at t = 0, which has no context.

    The logits at t - 1 predict the token at t. At least float32, whatever the model computes in.
    """
    logits = model(input_ids=tokens).logits[:, :-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    chosen = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    return nn.functional.pad(chosen, (1, 0))


@torch.no_grad()
def sample(
    model: nn.Module, prompts: list[list[int]], settings: Settings, generator: torch.Generator
) -> Samples:
    """`group_size` responses to each prompt.

    Every step runs the whole prefix again: slow, and hard to get wrong.
    """
    rows = [prompt for prompt in prompts for _ in range(settings.group_size)]
    start = torch.tensor([len(row) for row in rows])
    tokens = torch.full((len(rows), int(start.max()) + settings.max_new_tokens), PAD)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
    end = start.clone()
    running = torch.ones(len(rows), dtype=torch.bool)
    every = torch.arange(len(rows))
    for _ in range(settings.max_new_tokens):
        logits = model(input_ids=tokens[:, : int(end.max())]).logits[every, end - 1]
        drawn = torch.multinomial(
            (logits.float() / settings.temperature).softmax(-1), 1, generator=generator
        )[:, 0]
        tokens[every[running], end[running]] = drawn[running]
        end = end + running.long()
        running = running & (drawn != EOS)
        if not running.any():
            break
    place = torch.arange(tokens.shape[1])
    # by length, so a sampled PAD is trained like any token
    trained = (place >= start[:, None]) & (place < end[:, None])
    responses = [tokens[i, start[i] : end[i]].tolist() for i in range(len(rows))]
    return Samples(tokens, trained, every // settings.group_size, responses)


# --- the algorithm --------------------------------------------------------------------------------


def group_advantages(rewards: Tensor, group: Tensor, eps: float) -> Tensor:
    """[B]: (r - mean) / (std + eps) within each group, std with ddof 1; exactly 0 where all rewards
    are equal.
    """
    advantages = torch.zeros_like(rewards)
    for g in group.unique():
        mine = rewards[group == g]
        if len(mine) > 1 and mine.max() > mine.min():
            advantages[group == g] = (mine - mine.mean()) / (mine.std() + eps)
    return advantages


def grpo_loss(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    trained: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    reference: Tensor | None = None,
    beta: float = 0.0,
) -> Tensor:
    """The mean over rows of the mean over their trained tokens of -min(rho A, clip(rho) A) + beta
    rho k3.

    logprobs, old, reference, trained: [B, T]; advantages: [B]. rho = exp(logp - old), without
    gradient before the KL.
    """
    ratio = (logprobs - old).clamp(-20, 20).exp()
    a = advantages[:, None]
    per_token = -torch.minimum(ratio * a, ratio.clamp(1 - clip_low, 1 + clip_high) * a)
    if reference is not None and beta > 0:
        d = (logprobs - reference).clamp(-20, 20)
        per_token = per_token + beta * ratio.detach() * ((-d).exp() + d - 1)
    lengths = trained.sum(1)
    per_row = torch.where(trained, per_token, 0.0).sum(1) / lengths.clamp(min=1)
    return per_row.sum() / (lengths > 0).sum().clamp(min=1)


def train_on(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    samples: Samples,
    rewards: Tensor,
    settings: Settings,
    reference: nn.Module | None = None,
) -> list[float]:
    """All updates on one batch of samples. Returns the loss of each."""
    advantages = group_advantages(rewards, samples.group, settings.eps)
    with torch.no_grad():
        old = token_logprobs(model, samples.tokens, settings.temperature)
        anchor = (
            token_logprobs(reference, samples.tokens, settings.temperature)
            if reference is not None
            else None
        )
    losses = []
    for _ in range(settings.updates):
        logprobs = token_logprobs(model, samples.tokens, settings.temperature)
        loss = grpo_loss(
            logprobs,
            old,
            advantages,
            samples.trained,
            settings.clip_low,
            settings.clip_high,
            anchor,
            settings.beta,
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# --- the task -------------------------------------------------------------------------------------


def make_prompts(n: int, generator: torch.Generator) -> list[list[int]]:
    """One to three digits and an equals sign."""
    lengths = torch.randint(1, 4, (n,), generator=generator).tolist()
    return [
        (torch.randint(0, 10, (k,), generator=generator) + FIRST_DIGIT).tolist() + [EQUALS]
        for k in lengths
    ]


def reward(prompt: list[int], response: list[int]) -> float:
    """Half for beginning with the prompt's last digit, half for stopping right after it."""
    return 0.5 * (response[:1] == [prompt[-2]]) + 0.5 * (response == [prompt[-2], EOS])


def score(prompts: list[list[int]], samples: Samples, dtype: torch.dtype = torch.float32) -> Tensor:
    """[B]"""
    pairs = zip(samples.group.tolist(), samples.responses, strict=True)
    return torch.tensor([reward(prompts[g], response) for g, response in pairs], dtype=dtype)


def make_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            pad_token_id=PAD,
            bos_token_id=None,
            eos_token_id=EOS,
        )
    )


def train(settings: Settings, quiet: bool = False) -> list[float]:
    """The mean reward of each step."""
    model = make_model(settings.seed)
    reference = make_model(settings.seed).requires_grad_(False) if settings.beta > 0 else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(settings.seed)
    history = []
    for step in range(settings.steps):
        prompts = make_prompts(settings.prompts, generator)
        samples = sample(model, prompts, settings, generator)
        rewards = score(prompts, samples)
        losses = train_on(model, optimizer, samples, rewards, settings, reference)
        history.append(rewards.mean().item())
        if not quiet:
            print(f"step {step:3d}  reward {history[-1]:.3f}  loss {losses[0]:+.4f}")
    return history


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    arguments = parser.parse_args()
    train(Settings(steps=arguments.steps, seed=arguments.seed))


if __name__ == "__main__":
    main()
