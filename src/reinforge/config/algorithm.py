"""The section `algorithm`: which functions, and their settings.

`None` means "the algorithm's own"; see `reinforge algorithms`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, FiniteFloat, field_validator

from reinforge.algorithms.catalogue import (
    AlgorithmKind,
    AlgorithmSpec,
    has_ratio,
    needs_values,
    spec_of,
    works_alone,
)
from reinforge.config.base import (
    Attribute,
    Count,
    Fraction,
    Natural,
    NonNegative,
    Positive,
    Section,
)


class ClipConfig(Section):
    low: Fraction | None = Field(
        None, description="The ratio is clipped below at 1 - low (gmpo: at exp(-low))."
    )
    high: NonNegative | None = Field(
        None, description="The ratio is clipped above at 1 + high (gmpo: at exp(high))."
    )
    dual: Positive | None = Field(
        None,
        description=(
            "Dual clip: bound of the loss for negative advantages, e.g. 3.0. Off by default."
        ),
    )
    delta: Positive | None = Field(
        None,
        description=(
            "Two-sided clip: largest ratio whatever the sign of the advantage, above 1 + high, e.g."
            " 4.0. Off by default."
        ),
    )


class ReferenceConfig(Section):
    kind: Literal["frozen", "sync", "ema"] = Field(
        "frozen",
        description=(
            "frozen: the policy that the run starts from (a new adapter: off; adapter.path: as"
            " loaded). sync: a copy of the policy every so often. ema: its moving average."
        ),
    )
    every: Count = Field(
        1, description="sync, ema: optimizer steps between two moves of the reference."
    )
    decay: Fraction = Field(
        0.99, description="ema: reference = decay x reference + (1 - decay) x policy."
    )


class KLConfig(Section):
    coefficient: NonNegative | None = Field(
        None,
        description=(
            "Weight of the KL to the reference. 0 (nearly always the default) loads no reference."
        ),
    )
    estimator: str | None = Field(
        None,
        description=(
            "k1, k2, k3, k3+ or `file.py:function`; default k3 in the loss, k1 in the reward. As a"
            " loss: k2 and k3+ have the reverse-KL gradient, k3 the forward-KL gradient, k1 none in"
            " expectation. In the reward: k1 is exact, the others are biased."
        ),
    )
    placement: Literal["loss", "reward"] | None = Field(
        None,
        description=(
            "loss: a term beside the surrogate. reward: taken off each token's reward before the"
            " advantage."
        ),
    )
    importance: bool = Field(
        True,
        description=(
            "Weight the KL term by the importance ratio, without which it is biased off-policy."
            " TRL's and veRL's plain k3: false."
        ),
    )
    clamp: Positive | None = Field(
        None,
        description=(
            "The log-ratio to the reference is clamped to this much either way; default 20."
        ),
    )
    target: Positive | None = Field(
        None,
        description=(
            "Adapt the coefficient so that the mean KL per token stays near this (1909.08593)."
        ),
    )
    horizon: Count = Field(
        10_000,
        description="Samples over which the adaptive coefficient may grow or shrink by a fifth.",
    )
    reference: ReferenceConfig = ReferenceConfig()


class CorrectionConfig(Section):
    name: str = Field(
        "none",
        description=(
            "Importance correction for rollout/trainer mismatch: none, tis (truncates the token"
            " weight), mis (masks the token), icepop (masks on both sides), seq_tis, seq_mask (of"
            " whole sequences), or `file.py:function`."
        ),
    )
    cap: Positive | None = Field(
        None,
        description="The largest importance weight; default: the correction's own (tis, mis: 2).",
    )
    floor: NonNegative | None = Field(
        None, description="The smallest importance weight, where the correction has one (icepop)."
    )


class AlgorithmConfig(Section):
    name: str = Field(
        description=(
            "See `reinforge algorithms`: sft, grpo, dr_grpo, dapo, dpo, kto, bradley_terry,"
            " forward_kl, ..."
        )
    )
    group_size: Count = Field(8, description="Samples per prompt.")
    advantage: str | None = Field(
        None, description="An advantage function by name, or `file.py:function`."
    )
    surrogate: str | None = Field(None, description="A surrogate by name, or `file.py:function`.")
    selection: str | None = Field(
        None,
        description=(
            "Tokens to treat apart: clip_cov, kl_cov, top_entropy, off_policy_mask, or"
            " `file.py:function`."
        ),
    )
    selected: Literal["keep", "drop", "penalise"] | None = Field(
        None,
        description=(
            "What becomes of selected tokens: keep (only they have a surrogate), drop (they have"
            " none), penalise (|log p - old| is added). Default: the selection's own; keep for a"
            " function of yours."
        ),
    )
    penalty: NonNegative = Field(1.0, description="Coefficient of that penalty.")
    reduce: str | None = Field(
        None,
        description=(
            "How token losses become one number: token_mean, sequence_mean, sequence_sum,"
            " fixed_length, or `file.py:function`."
        ),
    )
    options: dict[str, Any] = Field(
        {},
        description=(
            "Settings of the parts by name, e.g. {gamma: 0.99, share: 0.2}: each goes to whichever"
            " part takes it."
        ),
    )
    beta: Positive | None = Field(
        None,
        description=(
            "Preference: how strongly the policy is held to the reference; default: the loss's own."
        ),
    )
    label_smoothing: Fraction | None = Field(
        None,
        description="Preference: the share of labels taken to be wrong, where the loss has it.",
    )
    losses: dict[str, FiniteFloat] = Field(
        {},
        description=(
            "Preference: several losses over pairs with their weights, e.g. {sigmoid: 0.8,"
            " bco_pair: 0.2, sft: 1.0}, in place of the name's."
        ),
    )
    attributes: list[Attribute] = Field(
        [],
        description=(
            "Regression: columns with one number each, e.g. [helpfulness, verbosity]; the model"
            " gets a head for each (SteerLM). A row may lack some. Default: the column score."
        ),
    )
    scale: Literal["group", "batch", "none"] | None = Field(
        None,
        description="What advantages are divided by: the group's std, the batch's std, or nothing.",
    )
    std: Literal["sample", "population"] = Field("sample", description="ddof of that std: 1 or 0.")
    eps: Positive = Field(1e-4, description="Added to that std.")
    advantage_clip: Positive | None = Field(
        None,
        description="Advantages are clipped to this much either way, last of all. Off by default.",
    )
    clip: ClipConfig = ClipConfig()
    kl: KLConfig = KLConfig()
    entropy: NonNegative = Field(0.0, description="Coefficient of the entropy bonus.")
    entropy_target: Positive | None = Field(
        None,
        description=(
            "Adapt that coefficient: it rises while the mean entropy is below this and falls while"
            " it is above (2505.22312)."
        ),
    )
    entropy_rate: Positive = Field(1e-3, description="By how much it moves per step.")
    entropy_max: Positive = Field(0.1, description="Where it stops rising.")
    nll: NonNegative | None = Field(
        None,
        description=(
            "Coefficient of the negative log-likelihood of samples with positive reward (VAPO,"
            " 2504.05118)."
        ),
    )
    old: Literal["auto", "engine", "recompute"] | None = Field(
        None,
        description=(
            "Where the old log-probs of the ratio come from. engine: those of sampling. recompute:"
            " a pass of the trainer. auto (nearly always the default): recompute if there are"
            " several updates per batch; with one, the policy itself."
        ),
    )
    correction: CorrectionConfig = CorrectionConfig()
    overlong: Literal["keep", "mask"] | None = Field(
        None,
        description=(
            "mask: truncated samples are not trained (they still count in group statistics)."
        ),
    )
    overlong_buffer: Natural | None = Field(
        None,
        description=(
            "DAPO's soft length penalty: the last this many tokens before max_new_tokens cost"
            " linearly up to -1 reward."
        ),
    )
    dynamic_sampling: bool | None = Field(
        None, description="Groups whose rewards are all equal are replaced by fresh prompts."
    )
    max_refills: Natural = Field(
        3, description="How many extra rounds dynamic sampling may take in one step."
    )
    epochs: Count = Field(1, description="Passes over each rollout batch.")
    minibatches: Count = Field(1, description="Optimizer steps per pass.")

    @field_validator("attributes")
    @classmethod
    def _different(cls, names: list[str]) -> list[str]:
        if len(set(names)) < len(names):
            raise ValueError(f"attributes: {', '.join(names)} names one of them twice")
        return names

    @property
    def spec(self) -> AlgorithmSpec:
        """What the catalogue knows of the algorithm."""
        return spec_of(self.name)

    @property
    def kind(self) -> AlgorithmKind:
        """What it trains on, and which keys it reads."""
        return self.spec.kind

    @property
    def family(self) -> str:
        """policy_gradient, supervised, preference, reward or distillation."""
        return self.kind.family

    @property
    def rl(self) -> bool:
        """Whether the policy samples what it is trained on."""
        return self.kind.samples

    def foreign_keys(self) -> list[str]:
        """Keys that were changed and that this kind of algorithm does not read."""
        shared = {"group_size", "options"}
        return [
            name
            for name, field in type(self).model_fields.items()
            if not field.is_required()
            and getattr(self, name) != field.default
            and name not in shared
            and not self._reads(name)
        ]

    def _reads(self, key: str) -> bool:
        if key == "kl" and "kl.reference" in self.kind.reads:
            return self.kl == KLConfig(reference=self.kl.reference)
        return key in self.kind.reads

    @property
    def compares_samples(self) -> bool:
        """Whether the samples of a prompt are compared, so that one alone teaches nothing."""
        if self.family != "policy_gradient":
            return self.kind.compares
        if ":" in (self.advantage or ""):
            return False
        return not works_alone(self.advantage or self.spec.parts.get("advantage"))

    @property
    def needs_critic(self) -> bool:
        """Whether the advantage reads values."""
        return needs_values(self.advantage or self.spec.parts.get("advantage"))

    @property
    def may_have_critic(self) -> bool:
        """A user's own advantage may read them too."""
        return self.needs_critic or (self.rl and ":" in (self.advantage or ""))

    @property
    def has_ratio(self) -> bool:
        """Whether the surrogate corrects for samples that are older than the weights."""
        return has_ratio(self.surrogate or self.spec.parts.get("surrogate"))
