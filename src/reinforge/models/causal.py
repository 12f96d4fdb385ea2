"""The ONE forward.

Training, scoring, references, prefill and decoding all go through `PackedModel.hidden`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from reinforge.core.batch import Batch
from reinforge.core.errors import InputError
from reinforge.models import proof
from reinforge.models.answer_form import AnswerForm
from reinforge.models.divergence import LogitHead
from reinforge.models.exact import linear
from reinforge.models.head import LogitRule, token_logprobs
from reinforge.models.packed import PackedModel

# of a critic that shares the policy's trunk; not part of the causal LM that is exported
VALUE_HEAD = "value_head"


def _logit_rule(config: Any) -> LogitRule:
    """How this architecture treats its logits, as its config says.

    `CausalModel.verify` proves that it is right.
    """
    scale = 1.0
    if getattr(config, "logit_scale", None):  # Cohere multiplies
        scale = float(config.logit_scale)
    if getattr(config, "logits_scaling", None):  # Granite divides
        scale = 1.0 / float(config.logits_scaling)
    softcap = getattr(config, "final_logit_softcapping", None)
    return LogitRule(scale=scale, softcap=float(softcap) if softcap else None)


class CausalModel(PackedModel):
    """A transformers causal LM seen as a trunk and a head.

    The module is the trainer's and the engine's alike.
    """

    # what the answers that it is trained on had to match: log-probs are of what that allowed
    form: AnswerForm | None = None

    def __init__(self, module: nn.Module, tokenizer: Any = None, *, exact: bool = False):
        super().__init__(module, tokenizer, exact=exact)
        self.causal: Any = self.plain
        self.head = self.causal.get_output_embeddings()
        # trained whole beside an adapter, it is wrapped together with its original
        if not isinstance(getattr(self.head, "original_module", self.head), nn.Linear):
            raise InputError(
                f"{type(self.causal).__name__} has an output head of type"
                f" {type(self.head).__name__}, which cannot be computed in chunks.",
                where="model.path",
                fix="Use a causal LM with a linear head, and leave lm_head out of adapter.targets.",
            )
        self.rule = _logit_rule(self.config)

    def add_value_head(self) -> None:
        """A critic on the policy's own trunk: a linear head that starts at 0 and is trained, saved
        and restored with the module.
        """
        head = nn.Linear(
            self.head.weight.shape[1], 1, bias=False, device=self.device, dtype=torch.float32
        )
        nn.init.zeros_(head.weight)
        self.module.add_module(VALUE_HEAD, head)
        self.value_head = head

    @property
    def output(self) -> LogitHead:
        """How logits are made of hidden states."""
        return LogitHead(self.head.weight, self.head.bias, self.rule)

    def project(self, hidden: Tensor) -> Tensor:
        """[B, V] raw logits in the model's precision."""
        if not self.exact:
            out: Tensor = self.head(hidden)
            return out
        if hidden.is_cuda and not torch.is_grad_enabled():
            from reinforge.models.kernels.exact_product import step_product

            return step_product(hidden, self.head.weight, self.head.bias)
        return linear(hidden, self.head.weight, self.head.bias)

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, V] float32, for sampling."""
        return self.rule.apply(self.project(hidden).float())

    def logprobs(
        self,
        batch: Batch,
        *,
        temperature: float,
        entropy: bool = False,
        entropy_gradient: bool = False,
        states: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs [M] (and entropies) of the trained tokens of a packed batch.

        Row t−1 predicts token t. `states` are the hidden states of the pack, where the caller has
        them.
        """
        states = self.states(batch) if states is None else states
        places = self.reading(batch, batch.sources)
        targets = places.own(batch.tokens[batch.targets])
        allowed = None if self.form is None else self.form.allowed(batch)
        found, spread = token_logprobs(
            places.rows(states),
            self.head.weight,
            self.head.bias,
            targets,
            temperature=temperature,
            rule=self.rule,
            entropy=entropy,
            entropy_gradient=entropy_gradient,
            exact=self.exact,
            allowed=None if allowed is None else places.own(allowed.to(targets.device)),
        )
        return places.join(found), None if spread is None else places.join(spread)

    @torch.no_grad()
    def verify(self) -> float:
        """Proves that our forward is this architecture's own (see `models.proof`), or raises.

        Returns the mean |Δlog-prob| over the vocabulary, in float32.
        """

        def difference(batch: Batch) -> float:
            vocabulary = self.head.weight.shape[0]
            ours = proof.spread(batch, self.logits(self.states(batch)))
            with proof.by_transformers(self.causal):
                theirs = [
                    self.causal(s.tokens[None].to(self.device), use_cache=False).logits[0].float()
                    for s in batch.samples
                ]
            gaps = [
                (a.log_softmax(-1) - b[:, :vocabulary].log_softmax(-1)).abs().mean()
                for a, b in zip(ours, theirs, strict=True)
            ]
            return float(torch.stack(gaps).mean())

        return proof.prove(self, difference, "model.path", "log-probs")
