"""The names that the parts of an algorithm may have.

No torch here: a config is checked before anything heavy is imported.
"""

from __future__ import annotations

from reinforge.algorithms.catalogue import TABLE

NAMES: tuple[str, ...] = tuple(TABLE)
ADVANTAGES: tuple[str, ...] = (
    "group_relative",
    "batch_baseline",
    "leave_one_out",
    "return_to_go",
    "group_whitened",
    "greedy_baseline",
    "optimal_baseline",
    "maxrl",
    "pass_at_k",
    "decoupled",
    "gpg",
    "gae",
)
SURROGATES: tuple[str, ...] = (
    "ppo_clip",
    "reinforce",
    "gspo",
    "gspo_token",
    "sequence_clip",
    "cispo",
    "sapo",
    "gmpo",
    "vespo",
    "dppo_tv",
    "dppo_kl",
)
CORRECTIONS: tuple[str, ...] = ("none", "tis", "mis", "icepop", "seq_tis", "seq_mask")
SELECTIONS: tuple[str, ...] = ("clip_cov", "kl_cov", "top_entropy", "off_policy_mask")
REDUCERS: tuple[str, ...] = ("token_mean", "sequence_mean", "sequence_sum", "fixed_length")
ESTIMATORS: tuple[str, ...] = ("k1", "k2", "k3", "k3+")
