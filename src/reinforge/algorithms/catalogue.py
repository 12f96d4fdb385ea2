"""Every algorithm as a row: which functions it names, its defaults, its papers.

No torch: `reinforge algorithms` only prints it.

A row of another family has other parts; `table.py` has a builder per family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    family: str  # "policy_gradient", "supervised", "preference", "reward", "distillation"
    parts: Mapping[str, str]  # part: name of its function
    paper: str = ""  # arXiv numbers
    # fields of `Options`, where they are not everybody's
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # defaults of settings that go to the parts by name (`algorithm.options`)
    options: Mapping[str, Any] = field(default_factory=dict)
    shaped: bool = False  # has a soft length penalty unless told otherwise
    # which function of `table.BUILDERS` puts the parts together; default: the family's
    builder: str = ""


def _pg(
    advantage: str,
    surrogate: str,
    reduce: str,
    paper: str,
    *,
    selection: str | None = None,
    options: Mapping[str, Any] | None = None,
    shaped: bool = False,
    **defaults: Any,
) -> Row:
    parts = {"advantage": advantage, "surrogate": surrogate, "correction": "none", "reduce": reduce}
    return Row(
        "policy_gradient",
        parts | ({"selection": selection} if selection else {}),
        paper,
        defaults,
        options or {},
        shaped,
    )


def _pair(
    loss: str,
    paper: str,
    *,
    losses: Mapping[str, float] | None = None,
    reference: Mapping[str, Any] | None = None,
    **options: Any,
) -> Row:
    """A loss over pairs of answers; `losses`: several with weights."""
    defaults: dict[str, Any] = {
        **({"losses": losses} if losses else {}),
        **({"reference": reference} if reference else {}),
    }
    return Row("preference", {"loss": loss}, paper, defaults, options)


def _other(family: str, loss: str, paper: str, builder: str = "", **options: Any) -> Row:
    return Row(family, {"loss": loss}, paper, {}, options, builder=builder)


def _online(
    loss: str, pick: str, paper: str, *, reference: Mapping[str, Any] | None = None, **options: Any
) -> Row:
    """A loss over answers that the policy (or an opponent) samples; `pick` says which of a prompt's
    answers are trained, and how.
    """
    return Row(
        "preference",
        {"loss": loss, "pick": pick},
        paper,
        {"reference": reference} if reference else {},
        options,
        builder="online",
    )


MPO: dict[str, float] = {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0}  # the paper's weights
# TR-DPO's alpha 0.6, as TRL does it
MOVING: dict[str, Any] = {"kind": "ema", "decay": 0.4, "every": 512}
# an iteration of self-play; the opponent is the policy at its start
SPIN: dict[str, Any] = {"kind": "sync", "every": 100}
# at 0.2 the mean ratio of a sequence practically never clips
GSPO_CLIP: dict[str, Any] = {"clip_low": 3e-4, "clip_high": 4e-4}
# kl_cov: the penalty is the trust region
NO_CLIP: dict[str, Any] = {"clip_low": 1.0, "clip_high": 1e9}
SAMPLER: dict[str, Any] = {"old": "engine"}  # ratios are meant against the policy that sampled

TABLE: dict[str, Row] = {
    "sft": Row("supervised", {"loss": "nll", "reduce": "token_mean"}),
    "dft": Row("supervised", {"loss": "dft", "reduce": "token_mean"}, "2508.05629"),
    # group baselines, a clipped ratio per token
    "grpo": _pg("group_relative", "ppo_clip", "sequence_mean", "2402.03300"),
    "dr_grpo": _pg("group_relative", "ppo_clip", "fixed_length", "2503.20783", scale="none"),
    "dapo": _pg(
        "group_relative",
        "ppo_clip",
        "token_mean",
        "2503.14476",
        clip_high=0.28,
        dynamic_sampling=True,
        shaped=True,
    ),
    # the ratio of a whole sequence
    "gspo": _pg("group_relative", "gspo", "sequence_mean", "2507.18071", **GSPO_CLIP),
    "gspo_token": _pg("group_relative", "gspo_token", "sequence_mean", "2507.18071", **GSPO_CLIP),
    "luspo": _pg("group_relative", "gspo", "sequence_sum", "2602.05261", **GSPO_CLIP),
    "gmpo": _pg(
        "group_relative", "gmpo", "sequence_mean", "2507.20673", clip_low=0.4, clip_high=0.4
    ),
    "vespo": _pg("group_relative", "vespo", "sequence_mean", "2602.10693", **SAMPLER),
    # other trust regions
    "cispo": _pg("group_relative", "cispo", "token_mean", "2506.13585"),
    "sapo": _pg("group_relative", "sapo", "token_mean", "2511.20347"),
    "dppo_tv": _pg("group_relative", "dppo_tv", "token_mean", "2602.04879", **SAMPLER),
    "dppo_kl": _pg("group_relative", "dppo_kl", "token_mean", "2602.04879", **SAMPLER),
    "clip_cov": _pg("group_relative", "ppo_clip", "token_mean", "2505.22617", selection="clip_cov"),
    "kl_cov": _pg(
        "group_relative", "ppo_clip", "token_mean", "2505.22617", selection="kl_cov", **NO_CLIP
    ),
    # the plain policy gradient
    "reinforce": _pg("batch_baseline", "reinforce", "token_mean", "Williams 1992"),
    "gpg": _pg("gpg", "reinforce", "token_mean", "2504.02546"),
    "rloo": _pg("leave_one_out", "reinforce", "sequence_sum", "2402.14740"),
    "remax": _pg("greedy_baseline", "reinforce", "token_mean", "2310.10505"),
    "opo": _pg("optimal_baseline", "reinforce", "token_mean", "2505.23585"),
    # whitened over the batch
    "reinforce_pp": _pg(
        "return_to_go",
        "ppo_clip",
        "token_mean",
        "2501.03262",
        kl_placement="reward",
        kl_coefficient=0.01,
    ),
    "reinforce_pp_baseline": _pg("group_whitened", "ppo_clip", "token_mean", "2501.03262"),
    # other uses of a group's rewards
    "maxrl": _pg("maxrl", "ppo_clip", "token_mean", "2602.02710"),
    "passk": _pg("pass_at_k", "ppo_clip", "token_mean", "2503.19595"),
    "gdpo": _pg("decoupled", "ppo_clip", "sequence_mean", "2601.05242"),
    # with a critic
    "ppo": _pg("gae", "ppo_clip", "token_mean", "1707.06347, 2403.17031"),
    "vapo": _pg(
        "gae",
        "ppo_clip",
        "token_mean",
        "2504.05118",
        clip_high=0.28,
        nll=0.1,
        options={"lam_critic": 1.0, "length_alpha": 0.05},
    ),
    # pairs of answers, against a reference
    "dpo": _pair("sigmoid", "2305.18290"),
    "sigmoid": _pair("sigmoid", "2305.18290"),
    "cdpo": _pair("cdpo", "2305.18290"),
    "robust": _pair("robust", "2403.00409"),
    "hinge": _pair("hinge", "2305.10425, 2309.06657"),
    "ipo": _pair("ipo", "2310.12036"),
    "exo_pair": _pair("exo_pair", "2402.00856"),
    "nca_pair": _pair("nca_pair", "2402.05369"),
    "bco_pair": _pair("bco_pair", "2404.04656"),
    "sppo_hard": _pair("sppo_hard", "2405.00675"),
    "aot": _pair("aot", "2406.05882"),
    "aot_unpaired": _pair("aot_unpaired", "2406.05882"),
    "apo_zero": _pair("apo_zero", "2408.06266"),
    "apo_down": _pair("apo_down", "2408.06266"),
    "discopop": _pair("discopop", "2406.08414"),
    "sigmoid_norm": _pair("sigmoid_norm", "2411.15124"),
    "rpo": _pair("rpo", "2404.19733, 2405.16436"),
    "rpo_sq": _pair("rpo_sq", "2406.11704"),
    "rpo_bwd_kl": _pair("rpo_bwd_kl", "2406.11704"),
    "rpo_fwd_kl": _pair("rpo_fwd_kl", "2406.11704"),
    "tr_dpo": _pair("sigmoid", "2404.09656", reference=MOVING),
    "wpo": _pair("sigmoid", "2406.11827", wpo=True),
    "ld_dpo": _pair("sigmoid", "2409.06411", ld_alpha=0.5),
    "f_dpo": _pair("sigmoid", "2309.16240", divergence="js"),
    "mpo": _pair("sigmoid, bco_pair, sft", "2411.10442", losses=MPO),
    # pairs without a reference
    "simpo": _pair("simpo", "2405.14734"),
    "orpo": _pair("orpo", "2403.07691"),
    "cpo": _pair("cpo", "2401.08417"),
    "alphapo": _pair("alphapo", "2501.03884"),
    "sft_pair": _pair("sft", "2411.10442"),
    # answers that were judged one by one
    "kto": _other("preference", "kto", "2402.01306", "unpaired"),
    "bco": _other("preference", "bco", "2404.04656", "unpaired"),
    "apo_zero_unpaired": _other("preference", "apo_zero_unpaired", "2408.06266", "unpaired"),
    # pairs (or the best) of what the policy samples
    "online_dpo": _online("sigmoid", "best_and_worst", "2402.04792"),
    "xpo": _online("xpo", "contest", "2405.21046", mixture=1.0),
    "nash_md": _online("nash_md", "win_rates", "2312.00886", mixture=0.125),
    "spin": _online("sigmoid", "self_play", "2401.01335", reference=SPIN),
    "best_of_n": _online("nll", "keep_best", "2112.09332", keep=1, threshold=0.0),
    "raft": _online("nll", "keep_best", "2304.06767", keep=1, threshold=None),
    "rejection_sampling": _online("nll", "keep_best", "2308.01825", keep=None, threshold=0.0),
    # reward models
    "bradley_terry": _other("reward", "bradley_terry", "2204.05862"),
    "margin": _other("reward", "margin", "2307.09288"),
    "scaled": _other("reward", "scaled", "2410.01257"),
    "logexp": _other("reward", "logexp", "2204.05862"),
    "centred": _other("reward", "bradley_terry", "2312.09244", centre=0.01),
    "regression": _other("reward", "regression", "2310.05344"),
    "process": _other("reward", "process", "2211.14275"),
    # distillation from text, with the teacher's whole distribution
    "forward_kl": _other("distillation", "forward_kl", "1503.02531"),
    "reverse_kl": _other("distillation", "reverse_kl", "2306.08543"),
    "jsd": _other("distillation", "jsd", "2306.13649"),
    "skew_forward": _other("distillation", "skew_kl", "2402.03898"),
    "skew_reverse": _other("distillation", "skew_rkl", "2402.03898"),
    "topk": _other("distillation", "topk_kl", ""),
    "uld": _other("distillation", "uld", "2402.12030"),
    # and on what the student samples
    "gkd": _other("distillation", "jsd", "2306.13649", "gkd", share=0.5),
    "opd": Row(
        "distillation",
        _pg("teacher_ratio", "ppo_clip", "token_mean", "").parts,
        "2306.13649",
        builder="on_policy",
    ),
    "minillm": Row(
        "distillation",
        {**_pg("teacher_returns", "ppo_clip", "token_mean", "").parts, "loss": "reverse_kl"},
        "2306.08543",
        builder="on_policy",
    ),
}


def describe() -> list[dict[str, Any]]:
    """One entry per algorithm: name, family, parts, defaults where they are not
    everybody's, paper.
    """
    return [
        {
            "name": name,
            "family": row.family,
            "parts": dict(row.parts),
            "paper": row.paper,
            "defaults": {
                **row.defaults,
                **row.options,
                **({"overlong_buffer": "max_new_tokens/5"} if row.shaped else {}),
            },
        }
        for name, row in TABLE.items()
    ]


def printed() -> list[dict[str, str]]:
    """The same for people: a column per part that is not the same everywhere, "-" where an
    algorithm has no such part.
    """
    entries = describe()
    used = {
        part: {e["parts"].get(part, "-") for e in entries} for e in entries for part in e["parts"]
    }
    columns = [part for part, names in used.items() if names - {"-", "none"}]
    return [
        {
            "name": e["name"],
            "family": e["family"],
            **{c: e["parts"].get(c, "-") for c in columns},
            "defaults": ", ".join(f"{k}={v}" for k, v in e["defaults"].items()),
            "paper": e["paper"],
        }
        for e in entries
    ]
