"""The names that `algorithm.name`, `.advantage` and `.surrogate` may have. No torch here: a config is checked before anything heavy is imported."""

from __future__ import annotations

NAMES: tuple[str, ...] = ("sft", "grpo", "dr_grpo", "dapo")
ADVANTAGES: tuple[str, ...] = ("group_relative",)
SURROGATES: tuple[str, ...] = ("ppo_clip", "reinforce")
