"""The ONE forward. Training, scoring, references, prefill and decoding all go through `CausalModel.hidden`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from reinforge.core.batch import Batch
from reinforge.core.errors import InputError
from reinforge.models import attention
from reinforge.models.attention import Layout, Packed
from reinforge.models.head import LogitRule, token_logprobs


def _logit_rule(config: Any) -> LogitRule:
    """How this architecture treats its logits, as its config says. `CausalModel.verify` proves that it is right."""
    scale = 1.0
    if getattr(config, "logit_scale", None):  # Cohere multiplies
        scale = float(config.logit_scale)
    if getattr(config, "logits_scaling", None):  # Granite divides
        scale = 1.0 / float(config.logits_scaling)
    softcap = getattr(config, "final_logit_softcapping", None)
    return LogitRule(scale=scale, softcap=float(softcap) if softcap else None)


class CausalModel:
    """A transformers causal LM seen as a trunk and a head. The module is the trainer's and the engine's alike."""

    def __init__(self, module: nn.Module, tokenizer: Any = None):
        self.module = module  # what is trained and saved: the causal LM, or its peft wrapper
        causal = module.get_base_model() if hasattr(module, "get_base_model") else module
        self.causal: Any = causal
        self.tokenizer = tokenizer
        self.config = causal.config.get_text_config()
        self.trunk = causal.base_model
        self.head = causal.get_output_embeddings()
        if not isinstance(self.head, nn.Linear):
            raise InputError(f"{type(causal).__name__} has an output head of type {type(self.head).__name__}, which cannot be computed in chunks.",
                             where="model.path", fix="Use a causal LM with a linear head, and leave lm_head out of adapter.targets.")  # fmt: skip
        self.rule = _logit_rule(self.config)
        attention.register()
        if attention.NAME not in {causal.config._attn_implementation, self.config._attn_implementation}:
            causal.set_attn_implementation(attention.NAME)
        _silence_dropout(module.eval())

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight.dtype

    def compile_layers(self) -> None:
        """torch.compile of each decoder layer, attention left out: norms, rotary embedding and activations are fused. All
        layers of a class share one compilation, for any number of tokens; training and decoding make one each."""
        import torch._dynamo

        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        attention.register(compiled=True)
        stacks = [part for part in self.trunk.modules() if isinstance(part, nn.ModuleList) and len(part) == self.config.num_hidden_layers]
        for layer in stacks[0]:
            layer.compile(dynamic=True)

    def recompute(self, on: bool) -> None:
        """Lets layers with gradient checkpointing do it. Only their own flag is set: the rest stays in evaluation mode, where no
        architecture adds noise (router jitter, dropout of its own making) that the sampling policy did not have."""
        for part in self.module.modules():
            if getattr(part, "gradient_checkpointing", False):
                part.training = on

    def hidden(self, tokens: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        """[N, E] last hidden states of N tokens whose relations `layout` describes."""
        out = self.trunk(input_ids=tokens[None], position_ids=positions[None], use_cache=False, layout=layout)
        return out.last_hidden_state[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, V] float32, for sampling."""
        return self.rule.apply(self.head(hidden).float())

    def logprobs(
        self, batch: Batch, *, temperature: float, entropy: bool = False, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs [M] (and entropies) of the trained tokens of a packed batch. Row t−1 predicts token t."""
        layout = Packed(batch.lengths, batch.starts)
        rows = self.hidden(batch.tokens, batch.positions, layout).index_select(0, batch.targets - 1)
        return token_logprobs(rows, self.head.weight, self.head.bias, batch.tokens[batch.targets], temperature=temperature,
                              rule=self.rule, entropy=entropy, entropy_gradient=entropy_gradient)  # fmt: skip

    @torch.no_grad()
    def verify(self) -> float:
        """Proves on a few tokens that our forward is this architecture's own: mean |Δlog-prob| against transformers' eager
        path, over the vocabulary. Raises for an architecture that ignores the attention interface or treats logits in a way unknown to us."""
        vocabulary = self.head.weight.shape[0]
        tokens = torch.arange(12, device=self.device) * 7919 % min(vocabulary, 1000) % vocabulary
        lengths = [7, 5]
        batch_positions = torch.cat([torch.arange(n, device=self.device) for n in lengths])
        starts = torch.tensor([0, 7, 12], dtype=torch.int32, device=self.device)
        ours = self.logits(self.hidden(tokens, batch_positions, Packed(lengths, starts)))
        self.causal.set_attn_implementation("eager")
        try:
            theirs = torch.cat([self.causal(part[None], use_cache=False).logits[0].float() for part in tokens.split(lengths)])
        finally:
            self.causal.set_attn_implementation(attention.NAME)
        theirs = theirs[:, :vocabulary]
        error = float((ours.log_softmax(-1) - theirs.log_softmax(-1)).abs().mean())
        limit = 1e-3 if self.dtype == torch.float32 else 0.1  # bfloat16 rounds: a mean of 0.02 and single values of 0.8 are its noise
        if not error < limit:
            raise InputError(f"{type(self.causal).__name__} computes other log-probs through the native forward than through transformers "
                             f"(mean difference {error:.3g}).", where="model.path",
                             fix="This architecture keeps state that cannot be paged or treats logits in its own way; use a model with standard attention.")  # fmt: skip
        return error


def _silence_dropout(module: nn.Module) -> None:
    """Dropout makes the policy that trains another one than the policy that sampled: it is off everywhere."""
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        for name, value in list(vars(part).items()):  # architectures that call F.dropout keep the rate as a number: dropout, layerdrop, ...
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
