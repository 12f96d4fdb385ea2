"""The models that a student imitates: their distributions beside the student's, or what was kept of
them before training.

Legend: M trained tokens, k tokens kept per position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from reinforge.core.backend import Loss
from reinforge.core.batch import Batch
from reinforge.core.sample import Sample
from reinforge.models import head
from reinforge.models.causal import CausalModel
from reinforge.models.divergence import GivenLogits, chunked_divergence

# streams [M, k] of what was kept
IDS = "teacher_ids"
LOGPROBS = "teacher_logprobs"


class Teachers:
    """The teachers of a distillation: frozen models with weights that sum to 1. `build/teachers.py`
    makes it, the backend asks it. Models are loaded when they are first asked: where everything was
    kept on disk, never.

    `twins`: where a teacher has another tokenizer, the same texts in its tokens, by the uid of the
    student's sample.
    """

    def __init__(
        self,
        load: Sequence[Callable[[], CausalModel]],
        weights: Sequence[float],
        twins: Mapping[str, Sample] | None = None,
    ):
        assert len(load) == len(weights) > 0
        self._load = list(load)
        self.weights = [w / sum(weights) for w in weights]
        self.twins = twins

    @cached_property
    def models(self) -> list[CausalModel]:
        models = [load() for load in self._load]
        for model in models:
            model.module.requires_grad_(False)
        return models

    @torch.no_grad()
    def logprobs(self, batch: Batch, temperature: float) -> Tensor:
        """[M] the weighted mean of the teachers' log-probs of the trained tokens."""
        found = [
            weight * model.logprobs(batch, temperature=temperature)[0]
            for model, weight in zip(self.models, self.weights, strict=True)
        ]
        return torch.stack(found).sum(0)

    @torch.no_grad()
    def best(self, batch: Batch, k: int, temperature: float) -> tuple[Tensor, Tensor]:
        """([M, k] int32 ids, [M, k] float32 log-probs) of the first teacher's likeliest tokens at
        every trained position.
        """
        model = self.models[0]
        rows = model.states(batch).index_select(0, batch.sources)
        output = model.output
        step = head.chunk_rows(len(rows), len(output.weight), rows.device) if len(rows) else 1
        parts = [
            (output.logits(rows[a : a + step]) / temperature).log_softmax(-1).topk(k, -1)
            for a in range(0, len(rows), step)
        ]
        empty = rows.new_zeros(0, k, dtype=torch.float32)
        return (
            (torch.cat([p.indices.int() for p in parts]), torch.cat([p.values for p in parts]))
            if parts
            else (empty.int(), empty)
        )

    def divergence(
        self,
        student: CausalModel,
        states: Tensor,
        batch: Batch,
        function: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """[M] the weighted mean of the divergences.

        Vocabularies that are padded to different sizes are compared where both have tokens.
        """
        rows = states.index_select(0, batch.sources)
        found = []
        for model, weight in zip(self.models, self.weights, strict=True):
            with torch.no_grad():
                theirs = model.states(batch).index_select(0, batch.sources)
            size = min(len(student.head.weight), len(model.head.weight))
            found.append(
                weight
                * chunked_divergence(
                    rows, student.output.first(size), theirs, model.output.first(size), function
                )
            )
        return torch.stack(found).sum(0)

    def by_position(
        self,
        student: CausalModel,
        states: Tensor,
        batch: Batch,
        function: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """[M] for another tokenizer: the i-th token of an answer against the i-th of the teacher's;
        0 where the teacher's is shorter.
        """
        assert self.twins is not None, (
            "a teacher with another tokenizer needs the texts in its own tokens"
        )
        model = self.models[0]
        out = torch.zeros(batch.n_trained, device=states.device)
        twin = Batch.pack([self.twins[s.uid] for s in batch.samples]).to(model.device)
        ours = batch.trained_lengths()
        theirs = twin.trained_lengths()
        place = (
            torch.arange(batch.n_trained, device=out.device)
            - (ours.cumsum(0) - ours)[batch.sequence]
        )
        both = place < theirs[batch.sequence]
        partner = ((theirs.cumsum(0) - theirs)[batch.sequence] + place)[both]
        with torch.no_grad():
            goal = model.states(twin).index_select(0, twin.sources).index_select(0, partner)
        rows = states.index_select(0, batch.sources)[both]
        return out.masked_scatter(
            both, chunked_divergence(rows, student.output, goal, model.output, function)
        )


def divergence_to(
    teachers: Teachers | None, student: CausalModel, states: Tensor, batch: Batch, loss: Loss
) -> Tensor:
    """[M] with gradient: from what was kept of a teacher where the batch has it, otherwise from the
    teachers themselves.
    """
    if LOGPROBS in batch.streams:
        rows = states.index_select(0, batch.sources)
        given = torch.cat((batch.streams[IDS].float(), batch.streams[LOGPROBS]), -1)
        assert loss.given is not None, "this loss reads nothing that was kept of a teacher"
        return chunked_divergence(rows, student.output, given, GivenLogits(), loss.given)
    assert teachers is not None, "this backend was made without a teacher"
    assert loss.divergence is not None, "this loss compares with no teacher"
    compare = teachers.by_position if loss.by_rank else teachers.divergence
    return compare(student, states, batch, loss.divergence)
