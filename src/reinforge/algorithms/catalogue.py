"""Every algorithm as a row: which functions it names, its defaults, its papers. No torch: `reinforge algorithms` only prints it.

A row of another family has other parts; `table.py` has a builder per family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    family: str  # "policy_gradient", "supervised": which builder puts the parts together
    parts: Mapping[str, str]  # part: name of its function
    paper: str = ""  # arXiv numbers
    defaults: Mapping[str, Any] = field(default_factory=dict)  # fields of `Options`, where they are not everybody's
    options: Mapping[str, Any] = field(default_factory=dict)  # defaults of settings that go to the parts by name (`algorithm.options`)
    shaped: bool = False  # has a soft length penalty unless told otherwise


def _pg(advantage: str, surrogate: str, reduce: str, paper: str, *, selection: str | None = None, options: Mapping[str, Any] | None = None,
        shaped: bool = False, **defaults: Any) -> Row:  # fmt: skip
    parts = {"advantage": advantage, "surrogate": surrogate, "correction": "none", "reduce": reduce}
    return Row("policy_gradient", parts | ({"selection": selection} if selection else {}), paper, defaults, options or {}, shaped)


GSPO_CLIP: dict[str, Any] = {"clip_low": 3e-4, "clip_high": 4e-4}  # at 0.2 the mean ratio of a sequence practically never clips
NO_CLIP: dict[str, Any] = {"clip_low": 1.0, "clip_high": 1e9}  # kl_cov: the penalty is the trust region
SAMPLER: dict[str, Any] = {"old": "engine"}  # ratios are meant against the policy that sampled

TABLE: dict[str, Row] = {
    "sft": Row("supervised", {"loss": "nll", "reduce": "token_mean"}),
    # group baselines, a clipped ratio per token
    "grpo": _pg("group_relative", "ppo_clip", "sequence_mean", "2402.03300"),
    "dr_grpo": _pg("group_relative", "ppo_clip", "fixed_length", "2503.20783", scale="none"),
    "dapo": _pg("group_relative", "ppo_clip", "token_mean", "2503.14476", clip_high=0.28, dynamic_sampling=True, shaped=True),
    # the ratio of a whole sequence
    "gspo": _pg("group_relative", "gspo", "sequence_mean", "2507.18071", **GSPO_CLIP),
    "gspo_token": _pg("group_relative", "gspo_token", "sequence_mean", "2507.18071", **GSPO_CLIP),
    "luspo": _pg("group_relative", "gspo", "sequence_sum", "2602.05261", **GSPO_CLIP),
    "gmpo": _pg("group_relative", "gmpo", "sequence_mean", "2507.20673", clip_low=0.4, clip_high=0.4),
    "vespo": _pg("group_relative", "vespo", "sequence_mean", "2602.10693", **SAMPLER),
    # other trust regions
    "cispo": _pg("group_relative", "cispo", "token_mean", "2506.13585"),
    "sapo": _pg("group_relative", "sapo", "token_mean", "2511.20347"),
    "dppo_tv": _pg("group_relative", "dppo_tv", "token_mean", "2602.04879", **SAMPLER),
    "dppo_kl": _pg("group_relative", "dppo_kl", "token_mean", "2602.04879", **SAMPLER),
    "clip_cov": _pg("group_relative", "ppo_clip", "token_mean", "2505.22617", selection="clip_cov"),
    "kl_cov": _pg("group_relative", "ppo_clip", "token_mean", "2505.22617", selection="kl_cov", **NO_CLIP),
    # the plain policy gradient
    "reinforce": _pg("batch_baseline", "reinforce", "token_mean", "Williams 1992"),
    "gpg": _pg("gpg", "reinforce", "token_mean", "2504.02546"),
    "rloo": _pg("leave_one_out", "reinforce", "sequence_sum", "2402.14740"),
    "remax": _pg("greedy_baseline", "reinforce", "token_mean", "2310.10505"),
    "opo": _pg("optimal_baseline", "reinforce", "token_mean", "2505.23585"),
    # whitened over the batch
    "reinforce_pp": _pg("return_to_go", "ppo_clip", "token_mean", "2501.03262", kl_placement="reward", kl_coefficient=0.01),
    "reinforce_pp_baseline": _pg("group_whitened", "ppo_clip", "token_mean", "2501.03262"),
    # other uses of a group's rewards
    "maxrl": _pg("maxrl", "ppo_clip", "token_mean", "2602.02710"),
    "passk": _pg("pass_at_k", "ppo_clip", "token_mean", "2503.19595"),
    "gdpo": _pg("decoupled", "ppo_clip", "sequence_mean", "2601.05242"),
    # with a critic
    "ppo": _pg("gae", "ppo_clip", "token_mean", "1707.06347, 2403.17031"),
    "vapo": _pg("gae", "ppo_clip", "token_mean", "2504.05118", clip_high=0.28, nll=0.1, options={"lam_critic": 1.0, "length_alpha": 0.05}),
}


def describe() -> list[dict[str, Any]]:
    """One entry per algorithm: name, family, parts, defaults where they are not everybody's, paper."""
    return [
        {"name": name, "family": row.family, "parts": dict(row.parts), "paper": row.paper,
         "defaults": {**row.defaults, **row.options, **({"overlong_buffer": "max_new_tokens/5"} if row.shaped else {})}}
        for name, row in TABLE.items()
    ]  # fmt: skip


def printed() -> list[dict[str, str]]:
    """The same for people: a column per part that is not the same everywhere, "-" where an algorithm has no such part."""
    entries = describe()
    used = {part: {e["parts"].get(part, "-") for e in entries} for e in entries for part in e["parts"]}
    columns = [part for part, names in used.items() if names - {"-", "none"}]
    return [
        {"name": e["name"], "family": e["family"], **{c: e["parts"].get(c, "-") for c in columns},
         "defaults": ", ".join(f"{k}={v}" for k, v in e["defaults"].items()), "paper": e["paper"]}
        for e in entries
    ]  # fmt: skip
