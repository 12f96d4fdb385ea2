"""What every algorithm is, once: its kind, the functions that it is made of, its defaults, papers.

Nothing here imports torch, so that a configuration can be checked, and `reinforge algorithms` can
print, before anything heavy is loaded. Config, build and plan ask the facts below and never compare
an algorithm's name. `build.py` turns a row of `TABLE` into functions.

- `AlgorithmKind`: what the algorithms of one kind have in common: what they train on, which keys
they read.
- `ADVANTAGES`, `SURROGATES`, `SELECTIONS`, ...: the names of the parts and what follows from them.
- `TABLE`: the algorithms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# Keys of the section `algorithm`, beside name, group_size and options, which all read.

POLICY_KEYS = frozenset(
    {
        "advantage",
        "surrogate",
        "selection",
        "selected",
        "penalty",
        "reduce",
        "scale",
        "std",
        "eps",
        "advantage_clip",
        "clip",
        "kl",
        "entropy",
        "entropy_target",
        "entropy_rate",
        "entropy_max",
        "nll",
        "old",
        "correction",
        "overlong",
        "overlong_buffer",
        "dynamic_sampling",
        "max_refills",
        "epochs",
        "minibatches",
    }
)
PREFERENCE_KEYS = frozenset({"beta", "label_smoothing", "losses", "kl.reference"})
REDUCE_KEYS = frozenset({"reduce"})
# how answers are sampled and how often they are trained
SAMPLING_KEYS = frozenset(
    {"epochs", "minibatches", "overlong", "overlong_buffer", "dynamic_sampling", "max_refills"}
)


@dataclass(frozen=True)
class AlgorithmKind:
    """What algorithms of one kind have in common, inside of a family.

    `build.BUILDERS` has a function for each. Config, build and plan ask it.
    """

    name: str
    family: str  # policy_gradient, supervised, preference, reward or distillation
    # keys of the section `algorithm`; "kl.reference": of the section kl this one only
    reads: frozenset[str] = frozenset()
    samples: bool = False  # the policy samples what it is trained on
    wants_rewards: bool = False  # without rewards there is nothing to learn from
    # compares the answers to one prompt, whatever the advantage: one alone teaches nothing
    compares: bool = False
    # how many of the answers to a prompt are sampled from an opponent, not from the policy
    opponent: Literal["none", "half", "all"] = "none"
    wants_answers: bool = False  # the data's own answers are trained beside the sampled ones

    @property
    def online(self) -> bool:
        """Preferences over answers that are sampled for them: fresh ones only, without a critic."""
        return self.samples and self.family == "preference"


POLICY_GRADIENT = AlgorithmKind(
    "policy_gradient", "policy_gradient", POLICY_KEYS, samples=True, wants_rewards=True
)
SUPERVISED = AlgorithmKind("supervised", "supervised", REDUCE_KEYS)
PAIRED = AlgorithmKind("paired", "preference", PREFERENCE_KEYS)
UNPAIRED = AlgorithmKind("unpaired", "preference", PREFERENCE_KEYS)
# pairs of the policy's own answers
ONLINE = AlgorithmKind(
    "online",
    "preference",
    PREFERENCE_KEYS | SAMPLING_KEYS,
    samples=True,
    wants_rewards=True,
    compares=True,
)
# the policy's answers against those of an opponent
OPPOSED = AlgorithmKind(
    "opposed",
    "preference",
    PREFERENCE_KEYS | SAMPLING_KEYS,
    samples=True,
    wants_rewards=True,
    compares=True,
    opponent="half",
)
# the data's answers against those of an opponent: which one is better is known
SELF_PLAY = AlgorithmKind(
    "self_play",
    "preference",
    PREFERENCE_KEYS | SAMPLING_KEYS,
    samples=True,
    opponent="all",
    wants_answers=True,
)
# the likelihood of the best answers that were sampled
BEST_OF = AlgorithmKind(
    "best_of", "preference", REDUCE_KEYS | SAMPLING_KEYS, samples=True, wants_rewards=True
)
REWARD_MODEL = AlgorithmKind("reward_model", "reward")
# numbers that rows bring along: one score, or several attributes with a head each
REGRESSION = AlgorithmKind("regression", "reward", frozenset({"attributes"}))
DISTILLATION = AlgorithmKind("distillation", "distillation", REDUCE_KEYS)
# on the data's answers and the student's own
MIXED_DISTILLATION = AlgorithmKind("mixed_distillation", "distillation", POLICY_KEYS, samples=True)
# a policy gradient towards the teacher
ON_POLICY_DISTILLATION = AlgorithmKind(
    "on_policy_distillation", "distillation", POLICY_KEYS, samples=True
)


# The parts of a policy gradient. `parts/` has the functions, under the same names.


@dataclass(frozen=True)
class AdvantageSpec:
    """What is known of an advantage without its function."""

    # the fields of `AdvantageOptions` that change what it gives
    reads: frozenset[str] = frozenset()
    # streams beside behaviour; "baseline" is no stream but one more, greedy, rollout per prompt
    needs: frozenset[str] = frozenset()
    alone: bool = False  # one sample per prompt is enough; others compare those of a prompt


@dataclass(frozen=True)
class SurrogateSpec:
    """What is known of a surrogate without its function."""

    ratio: bool = True  # corrects for the policy having moved since the answer was sampled
    against_sampler: bool = False  # `old` should be the policy that sampled: algorithm.old engine


@dataclass(frozen=True)
class SelectionSpec:
    """What is known of a selection without its function."""

    selected: Literal["keep", "drop", "penalise"]  # what becomes of selected tokens
    # streams to annotate before, beside behaviour and advantages
    needs: frozenset[str] = frozenset()


def _advantage(*reads: str, needs: str = "", alone: bool = False) -> AdvantageSpec:
    return AdvantageSpec(frozenset(reads), frozenset({needs} if needs else ()), alone)


ADVANTAGES: dict[str, AdvantageSpec] = {
    "group_relative": _advantage("scale", "std", "eps"),
    "batch_baseline": _advantage("scale", "std", "eps", alone=True),
    "leave_one_out": _advantage("whiten", "std", "eps"),
    "return_to_go": _advantage("gamma", "whiten", "std", "eps", alone=True),
    "group_whitened": _advantage("whiten", "std", "eps"),
    "greedy_baseline": _advantage(needs="baseline", alone=True),
    "optimal_baseline": _advantage(),
    "maxrl": _advantage("eps"),
    "pass_at_k": _advantage("k"),
    "decoupled": _advantage("weights", "whiten", "std", "eps"),
    "gpg": _advantage(),
    "gae": _advantage(
        "gamma",
        "lam",
        "lam_critic",
        "length_alpha",
        "whiten",
        "std",
        "eps",
        needs="values",
        alone=True,
    ),
}
SURROGATES: dict[str, SurrogateSpec] = {
    "ppo_clip": SurrogateSpec(),
    "reinforce": SurrogateSpec(ratio=False),
    "gspo": SurrogateSpec(),
    "gspo_token": SurrogateSpec(),
    "sequence_clip": SurrogateSpec(),
    "cispo": SurrogateSpec(),
    "sapo": SurrogateSpec(),
    "gmpo": SurrogateSpec(),
    "vespo": SurrogateSpec(against_sampler=True),
    "dppo_tv": SurrogateSpec(against_sampler=True),
    "dppo_kl": SurrogateSpec(against_sampler=True),
}
SELECTIONS: dict[str, SelectionSpec] = {
    "clip_cov": SelectionSpec("drop"),
    "kl_cov": SelectionSpec("penalise"),
    "top_entropy": SelectionSpec("keep", frozenset({"entropy"})),
    "off_policy_mask": SelectionSpec("drop", frozenset({"old"})),
}
CORRECTIONS: tuple[str, ...] = ("none", "tis", "mis", "icepop", "seq_tis", "seq_mask")
REDUCERS: tuple[str, ...] = ("token_mean", "sequence_mean", "sequence_sum", "fixed_length")
ESTIMATORS: tuple[str, ...] = ("k1", "k2", "k3", "k3+")


def works_alone(advantage: str | None) -> bool:
    """Whether one sample per prompt is enough for an advantage of ours."""
    return advantage in ADVANTAGES and ADVANTAGES[advantage].alone


def needs_values(advantage: str | None) -> bool:
    """Whether an advantage of ours reads the values of a critic."""
    return advantage in ADVANTAGES and "values" in ADVANTAGES[advantage].needs


def has_ratio(surrogate: object) -> bool:
    """Whether a surrogate corrects for old samples. A function of a user's is taken to."""
    return not isinstance(surrogate, str) or SURROGATES.get(surrogate, SurrogateSpec()).ratio


@dataclass(frozen=True)
class AlgorithmSpec:
    """A row of `TABLE`: what an algorithm is, as far as that can be said without its functions."""

    kind: AlgorithmKind
    parts: Mapping[str, str]  # part: name of its function
    paper: str = ""  # arXiv numbers
    # fields of `AlgorithmOptions`, where they are not everybody's
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # defaults of settings that go to the parts by name (`algorithm.options`)
    options: Mapping[str, Any] = field(default_factory=dict)
    shaped: bool = False  # has a soft length penalty unless told otherwise
    other_tokens: bool = False  # its teacher may have another tokenizer, and reads the same texts

    @property
    def family(self) -> str:
        return self.kind.family

    @property
    def dynamic_sampling(self) -> bool:
        """Whether it replaces groups whose rewards are all equal, unless told otherwise."""
        return bool(self.defaults.get("dynamic_sampling"))

    @property
    def reference(self) -> Mapping[str, Any] | None:
        """How its reference moves, unless told otherwise; None: it stays where it is."""
        return self.defaults.get("reference")


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
) -> AlgorithmSpec:
    """A policy gradient: four parts and perhaps a selection."""
    parts = {"advantage": advantage, "surrogate": surrogate, "correction": "none", "reduce": reduce}
    if selection is not None:
        parts["selection"] = selection
    return AlgorithmSpec(POLICY_GRADIENT, parts, paper, defaults, options or {}, shaped)


def _pair(
    loss: str,
    paper: str,
    *,
    losses: Mapping[str, float] | None = None,
    reference: Mapping[str, Any] | None = None,
    **options: Any,
) -> AlgorithmSpec:
    """A loss over pairs of answers; `losses`: several with weights."""
    defaults: dict[str, Any] = {}
    if losses is not None:
        defaults["losses"] = losses
    if reference is not None:
        defaults["reference"] = reference
    return AlgorithmSpec(PAIRED, {"loss": loss}, paper, defaults, options)


def _loss(kind: AlgorithmKind, loss: str, paper: str, **options: Any) -> AlgorithmSpec:
    """A loss, and settings of it."""
    return AlgorithmSpec(kind, {"loss": loss}, paper, options=options)


def _sampled(
    kind: AlgorithmKind,
    loss: str,
    pick: str,
    paper: str,
    *,
    reference: Mapping[str, Any] | None = None,
    **options: Any,
) -> AlgorithmSpec:
    """A loss over answers that the policy (or an opponent) samples; `pick` says which of a prompt's
    answers are trained, and how.
    """
    defaults: dict[str, Any] = {}
    if reference is not None:
        defaults["reference"] = reference
    return AlgorithmSpec(kind, {"loss": loss, "pick": pick}, paper, defaults, options)


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

TABLE: dict[str, AlgorithmSpec] = {
    "sft": AlgorithmSpec(SUPERVISED, {"loss": "nll", "reduce": "token_mean"}),
    "dft": AlgorithmSpec(SUPERVISED, {"loss": "dft", "reduce": "token_mean"}, "2508.05629"),
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
    "kto": _loss(UNPAIRED, "kto", "2402.01306"),
    "bco": _loss(UNPAIRED, "bco", "2404.04656"),
    "apo_zero_unpaired": _loss(UNPAIRED, "apo_zero_unpaired", "2408.06266"),
    # pairs (or the best) of what the policy samples
    "online_dpo": _sampled(ONLINE, "sigmoid", "best_and_worst", "2402.04792"),
    "xpo": _sampled(OPPOSED, "xpo", "against_opponent", "2405.21046", mixture=1.0),
    "nash_md": _sampled(OPPOSED, "nash_md", "win_rates", "2312.00886", mixture=0.125),
    "spin": _sampled(SELF_PLAY, "sigmoid", "self_play", "2401.01335", reference=SPIN),
    "best_of_n": _sampled(BEST_OF, "nll", "keep_best", "2112.09332", keep=1, threshold=0.0),
    "raft": _sampled(BEST_OF, "nll", "keep_best", "2304.06767", keep=1, threshold=None),
    "rejection_sampling": _sampled(
        BEST_OF, "nll", "keep_best", "2308.01825", keep=None, threshold=0.0
    ),
    # reward models
    "bradley_terry": _loss(REWARD_MODEL, "bradley_terry", "2204.05862"),
    "margin": _loss(REWARD_MODEL, "margin", "2307.09288"),
    "scaled": _loss(REWARD_MODEL, "scaled", "2410.01257"),
    "logexp": _loss(REWARD_MODEL, "logexp", "2204.05862"),
    "centred": _loss(REWARD_MODEL, "bradley_terry", "2312.09244", centre=0.01),
    "regression": _loss(REGRESSION, "regression", "2310.05344"),
    "process": _loss(REWARD_MODEL, "process", "2211.14275"),
    # distillation from text, with the teacher's whole distribution
    "forward_kl": _loss(DISTILLATION, "forward_kl", "1503.02531"),
    "reverse_kl": _loss(DISTILLATION, "reverse_kl", "2306.08543"),
    "jsd": _loss(DISTILLATION, "jsd", "2306.13649"),
    "skew_forward": _loss(DISTILLATION, "skew_kl", "2402.03898"),
    "skew_reverse": _loss(DISTILLATION, "skew_rkl", "2402.03898"),
    "topk": _loss(DISTILLATION, "topk_kl", "", k=32),
    "uld": AlgorithmSpec(DISTILLATION, {"loss": "uld"}, "2402.12030", other_tokens=True),
    # and on what the student samples
    "gkd": _loss(MIXED_DISTILLATION, "jsd", "2306.13649", share=0.5),
    "opd": AlgorithmSpec(
        ON_POLICY_DISTILLATION,
        _pg("teacher_ratio", "ppo_clip", "token_mean", "").parts,
        "2306.13649",
    ),
    "minillm": AlgorithmSpec(
        ON_POLICY_DISTILLATION,
        {**_pg("teacher_returns", "ppo_clip", "token_mean", "").parts, "loss": "reverse_kl"},
        "2306.08543",
    ),
}


# A name that is in no row. `plan` and `build` refuse it; until then it counts as a policy gradient.
UNKNOWN = AlgorithmSpec(POLICY_GRADIENT, {})


def spec_of(name: str) -> AlgorithmSpec:
    """What the algorithm of this name is.

    >>> spec_of("kto").family, spec_of("ppo").kind.samples
    ('preference', True)
    """
    return TABLE.get(name, UNKNOWN)


def describe() -> list[dict[str, Any]]:
    """One entry per algorithm: name, family, parts, defaults where they are not
    everybody's, paper.
    """
    entries = []
    for name, spec in TABLE.items():
        defaults = {**spec.defaults, **spec.options}
        if spec.shaped:
            defaults["overlong_buffer"] = "max_new_tokens/5"
        entries.append(
            {
                "name": name,
                "family": spec.family,
                "parts": dict(spec.parts),
                "paper": spec.paper,
                "defaults": defaults,
            }
        )
    return entries


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
