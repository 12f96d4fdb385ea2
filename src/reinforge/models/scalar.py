"""Models that give a number: critics (a value before every token) and reward models (a score of a
whole text).

On disk both are ordinary transformers sequence-classification checkpoints with one label, and score
the same there. An attribute model has a label, with its name, for every attribute.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from reinforge.core.batch import Batch, pack
from reinforge.core.errors import InputError
from reinforge.core.files import readable_as_usual
from reinforge.core.sample import Sample
from reinforge.models import attention, proof
from reinforge.models.causal import CausalModel
from reinforge.models.packed import PackedModel
from reinforge.models.save import attend_as_transformers, writing

HEAD = "score"  # what transformers calls the head of its causal sequence classifiers


class ScalarModel(PackedModel):
    """A `...ForSequenceClassification` with one label, seen as a trunk and a linear head; or with
    several, which are `attributes` of a text.

    `where` names the config key in errors. `attributes`: the labels that it must have, in this
    order; none: one score, whatever its name; None: those that it has.
    """

    def __init__(
        self,
        module: nn.Module,
        tokenizer: Any = None,
        *,
        where: str = "model.path",
        attributes: Sequence[str] | None = (),
    ):
        head = getattr(module, HEAD, None)
        if not isinstance(head, nn.Linear) or (head.out_features != 1 and attributes == ()):
            found = (
                f"{head.out_features} outputs" if isinstance(head, nn.Linear) else "no linear head"
            )
            raise InputError(
                f"{type(module).__name__} has {found}, not one score per token.",
                where=where,
                fix=(
                    "Use a sequence-classification checkpoint of a causal LM with num_labels 1, or"
                    " a causal LM."
                ),
            )
        super().__init__(module, tokenizer)
        self.where = where
        self.value_head = head
        # what its heads are called; none: one score without a name
        self.attributes = _labels(self.plain.config, head.out_features)
        if attributes and self.attributes != tuple(attributes):
            raise InputError(
                f"its heads are {', '.join(self.attributes) or 'one without a name'}, not"
                f" {', '.join(attributes)}.",
                where=where,
                fix="Name them in algorithm.attributes, in this order, or begin with a causal LM.",
            )

    @classmethod
    def on_trunk(
        cls,
        causal: Any,
        tokenizer: Any = None,
        *,
        where: str = "model.path",
        attributes: Sequence[str] | None = (),
    ) -> ScalarModel:
        """Takes the trunk of a transformers causal LM, which must not be used afterwards, and puts
        a head on it that starts at 0; or one for each of the attributes.
        """
        from transformers import AutoModelForSequenceClassification

        config = causal.config
        config.num_labels = len(attributes or ()) or 1
        if attributes:
            config.id2label = dict(enumerate(attributes))
            config.label2id = {name: i for i, name in enumerate(attributes)}
        pad = padding_id(tokenizer, config)
        for part in {id(c): c for c in (config, config.get_text_config())}.values():
            part.pad_token_id = pad
        if pad is not None and getattr(tokenizer, "pad_token_id", pad) != pad:
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
        try:
            with torch.device("meta"):
                module = AutoModelForSequenceClassification.from_config(
                    config, trust_remote_code=False
                )
        except ValueError as error:
            raise InputError(
                f"transformers has no sequence classifier for {type(config).__name__}.",
                where=where,
                fix="Use another architecture for critics and reward models.",
            ) from error
        trunk = causal.base_model
        prefix = module.base_model_prefix
        if type(getattr(module, prefix, None)) is not type(trunk) or not isinstance(
            getattr(module, HEAD, None), nn.Linear
        ):
            raise InputError(
                f"{type(module).__name__} is not {type(trunk).__name__} with a linear head.",
                where=where,
                fix="Use another architecture for critics and reward models.",
            )
        old = getattr(module, HEAD)
        like = next(trunk.parameters())
        head = nn.Linear(
            old.in_features,
            config.num_labels,
            bias=old.bias is not None,
            device=like.device,
            dtype=like.dtype,
        )
        for p in head.parameters():
            nn.init.zeros_(p)
        setattr(module, prefix, trunk)
        setattr(module, HEAD, head)
        module.config = config  # the trunk's own object, as it would be from a checkpoint
        return cls(module, tokenizer, where=where, attributes=attributes)

    @classmethod
    def from_causal(cls, model: CausalModel, *, where: str = "model.path") -> ScalarModel:
        """A copy of the trunk of a model in memory, with a head that starts at 0."""
        assert model.module is model.plain, (
            "an adapted model has no plain trunk to copy: load its base"
        )
        return cls.on_trunk(copy.deepcopy(model.plain), copy.deepcopy(model.tokenizer), where=where)

    def scores(self, texts: Sequence[Sequence[int]], *, budget: int = 16384) -> list[float]:
        """The score of each sequence of token ids, of a model with one head: see `head_scores`."""
        return [score for (score,) in self.head_scores(texts, budget=budget)]

    def head_scores(
        self, texts: Sequence[Sequence[int]], *, budget: int = 16384
    ) -> list[list[float]]:
        """What every head says of each sequence of token ids, by transformers' rule: at the last
        token that is not padding. Forwards hold at most `budget` tokens. Rows of one call are
        packed in an order that depends on them alone, so the bits are repeatable.
        """
        pad = self.config.pad_token_id
        kept = [_without_padding(ids, pad) for ids in texts]
        found: dict[str, list[float]] = {}
        with torch.no_grad():
            for batch in pack(
                [Sample.from_tokens(str(i), ids, [False] * len(ids)) for i, ids in enumerate(kept)],
                budget,
            ):
                values = self.last_values(batch.to(self.device))
                scores = values.reshape(len(batch.samples), -1).tolist()
                found.update(zip((s.uid for s in batch.samples), scores, strict=True))
        return [found[str(i)] for i in range(len(kept))]

    def save(self, path: str | Path) -> None:
        """Weights, configuration and tokenizer, as AutoModelForSequenceClassification
        loads them.
        """

        attend_as_transformers(self.plain)
        try:
            with writing():
                self.module.save_pretrained(path)
        finally:
            self.plain.set_attn_implementation(attention.NAME)
        if hasattr(self.tokenizer, "save_pretrained"):
            self.tokenizer.save_pretrained(path)
        readable_as_usual(*Path(path).glob("*.safetensors"))

    @torch.no_grad()
    def verify(self) -> float:
        """Proves that our forward is this architecture's own (see `models.proof`), or raises: by
        hidden states (a fresh head is 0 and would hide everything) and by what the head makes of
        them. Returns the relative difference.
        """

        def difference(batch: Batch) -> float:
            ours = proof.spread(batch, self.states(batch))
            assert self.value_head is not None
            with proof.by_transformers(self.plain):
                given = [s.tokens[None].to(self.device) for s in batch.samples]
                theirs = [
                    self.trunk(input_ids=row, use_cache=False).last_hidden_state[0] for row in given
                ]
                scores = torch.cat([self.plain(input_ids=row).logits[0] for row in given])
            head = torch.cat([self.value_head(states[-1]) for states in theirs])
            return max(_gap(torch.cat(ours), torch.cat(theirs)), _gap(head, scores))

        return proof.prove(self, difference, self.where, "scores")


def padding_id(tokenizer: Any, config: Any) -> int | None:
    """A token that ends no text. transformers scores a row at its last token that is not padding:
    with the end-of-text token as padding it would look at the token before the end. Candidates: the
    tokenizer's own, then special tokens, the unknown one last.
    """
    own = getattr(tokenizer, "pad_token_id", None) if tokenizer is not None else None
    ends = getattr(config, "eos_token_id", None)
    ends = {
        getattr(tokenizer, "eos_token_id", None),
        *(ends if isinstance(ends, list | tuple) else [ends]),
    }
    size = config.get_text_config().vocab_size
    special = {
        t.content: i for i, t in getattr(tokenizer, "added_tokens_decoder", {}).items() if t.special
    }
    named = [
        i
        for word in ("pad", "reserved", "unused")
        for text, i in sorted(special.items())
        if word in text.lower()
    ]
    others = [getattr(tokenizer, name, None) for name in ("bos_token_id", "unk_token_id")]
    mine = getattr(config.get_text_config(), "pad_token_id", None)
    for candidate in (own, mine, *named, *others):
        if candidate is not None and candidate not in ends and 0 <= candidate < size:
            return candidate
    # there is no other: transformers then scores before the end, and so do we
    return own if own is not None else mine


def _labels(config: Any, heads: int) -> tuple[str, ...]:
    """The names of the heads; none where there is one with the name that transformers gives to
    what has none.
    """
    names = tuple(str(config.id2label.get(i, f"LABEL_{i}")) for i in range(heads))
    return () if names == ("LABEL_0",) else names


def _without_padding(ids: Sequence[int], pad: int | None) -> list[int]:
    """Up to the last token that is not padding.

    A row of nothing else is scored at its first token, as transformers does.
    """
    kept = list(ids)
    while len(kept) > 1 and kept[-1] == pad:
        kept.pop()
    if not kept:
        raise InputError("an empty text has no score.", fix="Give at least one token.")
    return kept


def _gap(found: Tensor, expected: Tensor) -> float:
    found = found.double().flatten()
    expected = expected.double().flatten()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))
