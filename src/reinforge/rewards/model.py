"""The reward `model`: a reward model scores prompt and completion together.

options: {path: org/reward-model}, and if wanted revision, dtype, template and batch_tokens; of a
model with several heads weights, e.g. {helpfulness: 0.65, verbosity: -0.4}: its score is the sum
over them. The
text is rendered as the reward model's own training rows are: its tokenizer, its chat template if it
has one, otherwise prompt + completion + end of text. Completions of one prompt are scored in one
call and nothing else enters it, so the same completions get the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from reinforge.config.data import DataConfig
from reinforge.config.model import ModelConfig
from reinforge.core.errors import InputError
from reinforge.core.row import Row
from reinforge.data.chat import Renderer
from reinforge.models.load import load_scalar
from reinforge.models.scalar import ScalarModel
from reinforge.rewards.outcome import RewardOutcome

Kind = Literal["auto", "chat", "text"]
# as data.chat calls them
CHAT: dict[Kind, Any] = {"auto": "auto", "chat": "always", "text": "never"}


@dataclass
class ModelReward:
    """A reward function `(prompts, completions) -> scores`.

    Nothing is loaded before `load`, so that a config can be checked cheaply. Of a model whose heads
    have names the scores come as a `RewardOutcome`, with what each head says.
    """

    path: str  # hub id or directory of a sequence classifier
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    # chat: the tokenizer's chat template; text: prompt, completion, end of text; auto: chat if
    # there is a template
    template: Kind = "auto"
    batch_tokens: int = 16384  # packed tokens per forward
    # of heads in the score, by their names; None: the model has one
    weights: Mapping[str, float] | None = None
    where: str = "rewards"
    model: ScalarModel | None = field(default=None, repr=False)
    renderer: Renderer | None = field(default=None, repr=False)
    # the heads that its model must have; None: any
    heads: ClassVar[Sequence[str] | None] = None

    def __post_init__(self) -> None:
        if self.template not in CHAT:
            raise InputError(
                f"{self.template!r} is no template.",
                where=f"{self.where}.template",
                fix=f"There are: {', '.join(CHAT)}.",
            )
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise InputError(
                f"{self.dtype!r} is no precision.",
                where=f"{self.where}.dtype",
                fix="There are: auto, float32, bfloat16.",
            )

    def load(self, device: str, *, weighed: bool = True) -> ModelReward:
        """Puts the model on `device`; it is never trained. `weighed`: a score is wanted, which
        several heads have by their weights only.
        """
        cfg = ModelConfig(path=self.path, revision=self.revision, dtype=self.dtype, device=device)
        model = load_scalar(cfg, where=f"{self.where}.path", attributes=self.heads)
        if weighed:
            self.check_weights(model)
        return self.use(model)

    def check_weights(self, model: ScalarModel) -> None:
        """Refuses heads that nobody weighs, and weights of heads that are not there."""
        names = ", ".join(model.attributes)
        if self.weights is None:
            if len(model.attributes) > 1:
                raise InputError(
                    f"{self.path} has the heads {names}: a score is a weighted sum of them.",
                    where=f"{self.where}.weights",
                    fix=f"Write e.g. weights: {{{model.attributes[0]}: 1.0}}.",
                )
            return
        for name in self.weights:
            if name not in model.attributes:
                raise InputError(
                    f"{self.path} has no head {name!r}.",
                    where=f"{self.where}.weights",
                    fix=f"Its heads are: {names or 'one without a name, which needs no weights'}.",
                )

    def use(self, model: ScalarModel) -> ModelReward:
        """A model that is in memory already."""
        model.module.requires_grad_(False)
        self.model, self.renderer = (
            model,
            Renderer(
                model.tokenizer,
                DataConfig(source="reward", chat=CHAT[self.template], loss_on="all"),
            ),
        )
        return self

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[str]
    ) -> list[float] | RewardOutcome:
        said = self.head_scores(prompts, completions)
        assert self.model is not None
        if not self.model.attributes:
            return [score for (score,) in said]
        attributes = [dict(zip(self.model.attributes, scores, strict=True)) for scores in said]
        scores = [weighted(one, self.weights) for one in attributes]
        return RewardOutcome(scores, attributes=attributes)

    def head_scores(self, prompts: Sequence[Any], completions: Sequence[str]) -> list[list[float]]:
        """What every head says of each completion."""
        assert self.model is not None, "load() comes first"
        rows = [
            self.ids(prompt, completion)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        limit = self.model.context or 1 << 20
        longest = max(map(len, rows), default=0)
        if longest > limit:
            raise InputError(
                f"a completion with its prompt has {longest} tokens, more than the {limit} that"
                f" {self.path} was made for.",
                where=self.where,
                fix="Lower rollout.max_new_tokens or data.max_length, or use another reward model.",
            )
        return self.model.head_scores(rows, budget=self.batch_tokens)

    def ids(self, prompt: str | list[dict[str, Any]], completion: str) -> list[int]:
        """What the reward model reads of one completion."""
        assert self.renderer is not None
        # no training row, but a policy may say nothing
        if not completion and not self.renderer.chat:
            return [
                *self.renderer.prompt(Row("reward", prompt)),
                self.renderer.tokenizer.eos_token_id,
            ]
        columns: dict[str, Any] = {"completion": completion}
        if self.renderer.chat:
            asked = (
                [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            )
            columns = {"messages": [*asked, {"role": "assistant", "content": completion}]}
        return self.renderer.training_row(Row("reward", prompt, columns)).tokens.tolist()


def weighted(attributes: Mapping[str, float], weights: Mapping[str, float] | None) -> float | None:
    """The score of a text: Σ weight·attribute. Without weights that of the only head; None where
    there are several.

    >>> weighted({"helpfulness": 3.0, "verbosity": 2.0}, {"helpfulness": 1.0, "verbosity": -0.5})
    2.0
    """
    if weights is not None:
        return sum(weight * attributes[name] for name, weight in weights.items())
    return next(iter(attributes.values())) if len(attributes) == 1 else None


OPTIONS = ("path", "revision", "dtype", "template", "batch_tokens", "weights")


def model_reward(options: dict[str, Any], where: str) -> ModelReward:
    """The reward that `rewards.N.options` describes, not yet loaded."""
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise InputError(
            f"model has no option {', '.join(unknown)}.",
            where=where,
            fix=f"It has: {', '.join(OPTIONS)}.",
        )
    if not isinstance(options.get("path"), str):
        raise InputError(
            "which reward model?",
            where=where,
            fix="Write options: {path: org/name}, or the path of a directory.",
        )
    if not isinstance(options.get("batch_tokens", 1), int) or options.get("batch_tokens", 1) < 1:
        raise InputError(
            "batch_tokens is no number of tokens.",
            where=where,
            fix="Give a whole number from 1 on.",
        )
    if not are_weights(options.get("weights", {"score": 1.0})):
        raise InputError(
            f"{options['weights']!r} are no weights of heads.",
            where=f"{where}.weights",
            fix="Write e.g. weights: {helpfulness: 0.65, verbosity: -0.4}.",
        )
    return ModelReward(**options, where=where)


def are_weights(given: Any) -> bool:
    return (
        isinstance(given, Mapping)
        and bool(given)
        and all(
            isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            for value in given.values()
        )
    )
