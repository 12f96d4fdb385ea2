"""Toy models, samples and references that many tests share.

Everything is a function of its seed, and small.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from reinforge.config.train import TrainConfig
from reinforge.core.sample import Sample
from reinforge.loops.view import NoView
from reinforge.models.causal import CausalModel
from reinforge.watch.doctor.trouble import Trouble

T = TypeVar("T")
VOCABULARY = 64
EOS = 2
_BASE = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=VOCABULARY,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=EOS,
)


def _config(arch: str, **changes: Any) -> Any:
    import transformers as t

    slide = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
    make: dict[str, Callable[[], Any]] = {
        "llama": lambda: t.LlamaConfig(**{**_BASE, **changes}),
        "qwen2": lambda: t.Qwen2Config(**{**_BASE, **changes}),
        "qwen3": lambda: t.Qwen3Config(**{**_BASE, "head_dim": 16, **changes}),
        "mistral": lambda: t.MistralConfig(**{**_BASE, "sliding_window": 5, **changes}),
        "gemma2": lambda: t.Gemma2Config(
            **{
                **_BASE,
                "head_dim": 16,
                **slide,
                "attn_logit_softcapping": 2.0,
                "final_logit_softcapping": 3.0,
                "query_pre_attn_scalar": 20,
                **changes,
            }
        ),
        "gemma3": lambda: t.Gemma3TextConfig(**{**_BASE, "head_dim": 16, **slide, **changes}),
        "gpt2": lambda: t.GPT2Config(
            **{
                **dict(
                    n_embd=32,
                    n_layer=2,
                    n_head=4,
                    vocab_size=VOCABULARY,
                    n_positions=128,
                    bos_token_id=1,
                    eos_token_id=EOS,
                ),
                **changes,
            }
        ),
        "opt": lambda: t.OPTConfig(
            **{
                **dict(
                    hidden_size=32,
                    ffn_dim=64,
                    num_hidden_layers=2,
                    num_attention_heads=4,
                    vocab_size=VOCABULARY,
                    max_position_embeddings=128,
                    word_embed_proj_dim=32,
                    pad_token_id=0,
                    eos_token_id=EOS,
                ),
                **changes,
            }
        ),
        "cohere": lambda: t.CohereConfig(**{**_BASE, "logit_scale": 0.25, **changes}),
        "granite_moe": lambda: t.GraniteMoeConfig(
            **{**_BASE, "num_local_experts": 4, "num_experts_per_tok": 2, **changes}
        ),
        "granite": lambda: t.GraniteConfig(**{**_BASE, "logits_scaling": 4.0, **changes}),
        "mixtral": lambda: t.MixtralConfig(
            **{**_BASE, "num_local_experts": 4, "num_experts_per_tok": 2, **changes}
        ),
        "qwen2_moe": lambda: t.Qwen2MoeConfig(
            **{
                **_BASE,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 24,
                "shared_expert_intermediate_size": 24,
                **changes,
            }
        ),
        "qwen3_moe": lambda: t.Qwen3MoeConfig(
            **{
                **_BASE,
                "head_dim": 16,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 24,
                **changes,
            }
        ),
        # a gated delta net, then attention
        "qwen3_5": lambda: t.Qwen3_5TextConfig(
            **{
                **_BASE,
                "head_dim": 16,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "layer_types": ["linear_attention", "full_attention"],
                **changes,
            }
        ),
        # keeps state in its own way
        "rwkv": lambda: t.RwkvConfig(
            **{
                **dict(
                    hidden_size=32, num_hidden_layers=2, vocab_size=VOCABULARY, context_length=128
                ),
                **changes,
            }
        ),
    }
    return make[arch]()


ARCHS = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt2")


def make_module(arch: str = "llama", seed: int = 0, *, spread: float = 4.0, **changes: Any) -> Any:
    """A causal LM with transformers' own (eager) attention.

    `spread` widens the weights, so that what it predicts depends on every token of the context and
    mistakes in attention, positions or shifts move log-probs by far more than any tolerance.
    """
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = AutoModelForCausalLM.from_config(
            _config(arch, **changes), attn_implementation="eager"
        )
    with torch.no_grad():
        for p in module.parameters():
            if p.ndim > 1:
                p.mul_(spread)
    module.generation_config.eos_token_id = EOS
    return module.eval()


def make_model(arch: str = "llama", seed: int = 0, **changes: Any) -> CausalModel:
    return CausalModel(make_module(arch, seed, **changes), ToyTokenizer())


class ToyTokenizer:
    """Decoding only; several ids give one letter, so that encoding the text again could never give
    the ids back.
    """

    eos_token_id = EOS

    def decode(self, tokens: Iterable[int], **_: Any) -> str:
        return "".join("abcdefgh"[int(t) % 8] for t in tokens if int(t) > EOS)


def tokens_of(length: int, seed: int = 0, vocabulary: int = VOCABULARY) -> list[int]:
    """Random ids without the special ones."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(3, vocabulary, (length,), generator=generator).tolist()


def make_samples(
    lengths: Sequence[int] = (20, 5, 12, 3), seed: int = 0, *, prompt: int = 2, group: int = 4
) -> list[Sample]:
    """Rows of the given lengths, groups of `group` neighbours with differing rewards, behaviour
    log-probs and advantages.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i, length in enumerate(lengths):
        trained = torch.arange(length) >= min(prompt, length - 1)
        noise = lambda n=length: torch.randn(n, generator=generator)  # noqa: E731
        rows.append(
            Sample(
                uid=f"s{i}",
                group=f"g{i // group}",
                episode=f"s{i}",
                tokens=torch.tensor(tokens_of(length, 100 * seed + i)),
                trained=trained,
                logprobs=-noise().abs() * trained,
                versions=torch.zeros(length, dtype=torch.int32),
                reward=float(i % 3),
                streams={"advantages": noise(1).expand(length) * trained},
            )
        )
    return rows


@torch.no_grad()
def true_logprobs(module: Any, tokens: Sequence[int], temperature: float = 1.0) -> Tensor:
    """[T−1] float64 log-probs of tokens[1:], by transformers alone: one unpadded row, full logits,
    no attention of ours.
    """
    assert module.config._attn_implementation == "eager"
    logits = module(torch.tensor([list(tokens)]), use_cache=False).logits[0].double() / temperature
    return logits[:-1].log_softmax(-1).gather(-1, torch.tensor(list(tokens[1:]))[:, None])[:, 0]


def train_config(**changes: Any) -> TrainConfig:
    return TrainConfig(**{"steps": 10, "learning_rate": 1e-3, "max_grad_norm": 0.0, **changes})


def parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def gradients(backend: Any) -> dict[str, Tensor]:
    return {
        name: m.grad.clone() for name, m in backend.optimizer.masters.items() if m.grad is not None
    }


def relative(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """|found − expected| / |expected| over all tensors together."""
    assert found.keys() == expected.keys()
    gap = (
        sum(float((found[k].double() - expected[k].double()).square().sum()) for k in expected)
        ** 0.5
    )
    return gap / sum(float(expected[k].double().square().sum()) for k in expected) ** 0.5


def run(work: Awaitable[T], timeout: float = 30.0) -> T:
    """Runs to the end, or fails: a test must never hang."""

    async def limited() -> T:
        return await asyncio.wait_for(work, timeout)

    return asyncio.run(limited())


class SilentView(NoView):
    """A view that remembers what it was told."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.activities: list[str] = []
        self.found: list[Trouble] = []  # the troubles that it was told of last

    def message(self, text: str) -> None:
        self.messages.append(text)

    def doing(self, text: str) -> None:
        self.activities.append(text)

    def troubles(self, found: Sequence[Trouble]) -> None:
        self.found = list(found)
