"""Which family an algorithm's name belongs to: what it trains on, and which keys mean something to
it. `catalogue.TABLE` agrees.
"""

from __future__ import annotations

SUPERVISED = ("sft", "dft")
PREFERENCE = (
    "dpo",
    "sigmoid",
    "cdpo",
    "robust",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "sigmoid_norm",
    "sft_pair",
    "rpo",
    "rpo_sq",
    "rpo_bwd_kl",
    "rpo_fwd_kl",
    "simpo",
    "orpo",
    "cpo",
    "alphapo",
    "mpo",
    "tr_dpo",
    "wpo",
    "ld_dpo",
    "f_dpo",
)
UNPAIRED = ("kto", "bco", "apo_zero_unpaired")
BEST = ("best_of_n", "raft", "rejection_sampling")  # likelihood of the best that was sampled
OPPOSED = ("xpo", "nash_md")  # half of the answers are an opponent's
ONLINE = ("online_dpo", *OPPOSED, "spin", *BEST)  # preferences over what is sampled
REWARD = ("bradley_terry", "margin", "scaled", "logexp", "centred", "regression", "process")
DISTILLATION = ("forward_kl", "reverse_kl", "jsd", "skew_forward", "skew_reverse", "topk", "uld")
ON_POLICY = ("gkd", "opd", "minillm")  # distillation on what the student itself samples
FAMILIES: dict[str, tuple[str, ...]] = {
    "supervised": SUPERVISED,
    "preference": PREFERENCE + UNPAIRED + ONLINE,
    "reward": REWARD,
    "distillation": DISTILLATION + ON_POLICY,
}

# Keys of the section `algorithm` that a family reads beside name, group_size and options. Policy
# gradients read all but these others.
KEYS: dict[str, frozenset[str]] = {
    "supervised": frozenset({"reduce"}),
    "preference": frozenset({"beta", "label_smoothing", "losses", "kl"}),
    "reward": frozenset(),
    "distillation": frozenset({"reduce"}),
}
# and those that a preference over sampled answers reads beside them
ONLINE_KEYS = frozenset(
    {"epochs", "minibatches", "overlong", "overlong_buffer", "dynamic_sampling", "max_refills"}
)
ROW_KEYS = frozenset({"beta", "label_smoothing", "losses"})  # mean nothing where the policy samples


def family_of(name: str) -> str:
    """>>> family_of("kto"), family_of("grpo")
    ('preference', 'policy_gradient')"""
    return next((family for family, names in FAMILIES.items() if name in names), "policy_gradient")
