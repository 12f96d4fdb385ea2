"""The models that a student imitates: their distributions beside the student's, or what was kept of
them before training.

Legend: M trained tokens, k tokens kept per position, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from reinforge.core.backend import TEACHER_IDS, TEACHER_LOGPROBS, Loss
from reinforge.core.batch import DOMAIN, Batch
from reinforge.core.sample import Sample
from reinforge.models import head
from reinforge.models.causal import CausalModel
from reinforge.models.divergence import GivenLogits, chunked_divergence

# the streams that teachers fill
OF_TEACHERS = frozenset({"teacher", TEACHER_IDS, TEACHER_LOGPROBS})


class TeacherModel(Protocol):
    """One teacher, wherever it is: `LocalTeacher` here, a model behind a server
    (`engines/served_teacher.py`), or in actors of its own (`cluster/frozen.py`). `Teachers` asks
    it.
    """

    def logprobs(self, batch: Batch, temperature: float) -> Tensor:
        """[M] of the trained tokens."""
        ...

    def best(self, batch: Batch, k: int, temperature: float) -> tuple[Tensor, Tensor]:
        """([M, k] int32 ids, [M, k] float32 log-probs) of the likeliest tokens at every trained
        place.
        """
        ...


class LocalTeacher:
    """A frozen model in this process. It is loaded when it is first asked: where everything was
    kept on disk, never.
    """

    def __init__(self, load: Callable[[], CausalModel]):
        self._load = load

    @cached_property
    def model(self) -> CausalModel:
        model = self._load()
        model.module.requires_grad_(False)
        return model

    def load(self) -> None:
        """Now, and not when it is asked."""
        _ = self.model

    @torch.no_grad()
    def logprobs(self, batch: Batch, temperature: float) -> Tensor:
        return self.model.logprobs(batch, temperature=temperature)[0]

    @torch.no_grad()
    def best(self, batch: Batch, k: int, temperature: float) -> tuple[Tensor, Tensor]:
        rows = self.model.states(batch).index_select(0, batch.sources)
        output = self.model.output
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


class Teachers:
    """The teachers of a distillation, with weights that sum to 1. `build/teachers.py` makes it, the
    backend asks it.

    `twins`: where a teacher has another tokenizer, the same texts in its tokens, by the uid of the
    student's sample. `k`: how many of a teacher's best tokens a loss wants before every step, and
    `temperature`: at which, where that is not 1.
    """

    def __init__(
        self,
        members: Sequence[TeacherModel],
        weights: Sequence[float],
        twins: Mapping[str, Sample] | None = None,
        k: int = 0,
        temperature: float = 1.0,
    ):
        assert len(members) == len(weights) > 0
        self.members = list(members)
        self.weights = [w / sum(weights) for w in weights]
        self.twins = twins
        self.k = k
        self.temperature = temperature

    def everyone(self) -> list[TeacherModel]:
        """All teachers, in the order of the configuration."""
        return list(self.members)

    def place(self, move: Callable[[TeacherModel], TeacherModel]) -> None:
        """Puts another teacher in the place of each: the same model, elsewhere."""
        self.members = [move(member) for member in self.members]

    @property
    def models(self) -> list[CausalModel]:
        """Those of teachers in this process: whole distributions are asked of no server."""
        local = [member for member in self.members if isinstance(member, LocalTeacher)]
        assert len(local) == len(self.members), "the rules of the config refuse it"
        return [member.model for member in local]

    def logprobs(self, batch: Batch, temperature: float) -> Tensor:
        """[M] the weighted mean of the teachers' log-probs of the trained tokens."""
        found = [
            weight * member.logprobs(batch, temperature)
            for member, weight in zip(self.members, self.weights, strict=True)
        ]
        return torch.stack(found).sum(0)

    def best(self, batch: Batch, k: int, temperature: float) -> tuple[Tensor, Tensor]:
        """([M, k] int32 ids, [M, k] float32 log-probs) of the first teacher's likeliest tokens at
        every trained position.
        """
        return self.members[0].best(batch, k, temperature)

    def divergence(
        self,
        student: CausalModel,
        rows: Tensor,
        batch: Batch,
        function: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """[M] the weighted mean of the divergences, `rows` [M, E] the student's states that predict
        the trained tokens.

        Vocabularies that are padded to different sizes are compared where both have tokens.
        """
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
        rows: Tensor,
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
        out = torch.zeros(batch.n_trained, device=rows.device)
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
        return out.masked_scatter(
            both, chunked_divergence(rows[both], student.output, goal, model.output, function)
        )


class DomainTeachers(Teachers):
    """Teachers of which each teaches the rows of one domain, and reads no others. The stream
    `domain` of a batch says which.
    """

    def __init__(self, teachers: Sequence[Teachers], k: int = 0, temperature: float = 1.0):
        self.of = list(teachers)
        self.twins = None
        self.k = k
        self.temperature = temperature

    def everyone(self) -> list[TeacherModel]:
        return [member for teachers in self.of for member in teachers.everyone()]

    def place(self, move: Callable[[TeacherModel], TeacherModel]) -> None:
        for teachers in self.of:
            teachers.place(move)

    def logprobs(self, batch: Batch, temperature: float) -> Tensor:
        out = torch.zeros(batch.n_trained, device=batch.targets.device)
        for teachers, part, places in self._parts(batch):
            out[places] = teachers.logprobs(part, temperature)
        return out

    def best(self, batch: Batch, k: int, temperature: float) -> tuple[Tensor, Tensor]:
        device = batch.targets.device
        ids = torch.zeros(batch.n_trained, k, dtype=torch.int32, device=device)
        logprobs = torch.zeros(batch.n_trained, k, device=device)
        for teachers, part, places in self._parts(batch):
            ids[places], logprobs[places] = teachers.best(part, k, temperature)
        return ids, logprobs

    def divergence(
        self,
        student: CausalModel,
        rows: Tensor,
        batch: Batch,
        function: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        out = rows.new_zeros(batch.n_trained, dtype=torch.float32)
        for teachers, part, places in self._parts(batch):
            found = teachers.divergence(student, rows[places], part, function)
            out = out.index_copy(0, places, found)
        return out

    def _parts(self, batch: Batch) -> Iterator[tuple[Teachers, Batch, Tensor]]:
        """Of each domain in the batch its teachers, its samples, and where the trained tokens of
        those are.
        """
        domains = batch.streams[DOMAIN].long()
        for number, teachers in enumerate(self.of):
            places = (domains == number).nonzero()[:, 0]
            if len(places) == len(domains):
                yield teachers, batch, places
            elif len(places):
                yield teachers, batch.of(batch.sequence[places].unique().tolist()), places


def teacher_streams(
    teachers: Teachers | None, batch: Batch, needs: frozenset[str], temperature: float
) -> dict[str, Tensor]:
    """What a batch is to know of its teachers before it is trained, in host memory: their log-probs
    of its tokens at `temperature`, or their likeliest tokens.
    """
    assert teachers is not None, "this backend was made without a teacher"
    found = {}
    if "teacher" in needs:
        found["teacher"] = teachers.logprobs(batch, temperature).cpu()
    if TEACHER_LOGPROBS in needs:
        ids, logprobs = teachers.best(batch, teachers.k, teachers.temperature)
        found |= {TEACHER_IDS: ids.cpu(), TEACHER_LOGPROBS: logprobs.cpu()}
    return found


def divergence_to(
    teachers: Teachers | None, student: CausalModel, states: Tensor, batch: Batch, loss: Loss
) -> Tensor:
    """[M] with gradient: from what was kept of a teacher where the batch has it, otherwise from the
    teachers themselves.
    """
    rows = states.index_select(0, batch.sources)
    if TEACHER_LOGPROBS in batch.streams:
        ids = batch.streams[TEACHER_IDS].float()
        given = torch.cat((ids, batch.streams[TEACHER_LOGPROBS]), -1)
        assert loss.given is not None, "this loss reads nothing that was kept of a teacher"
        return chunked_divergence(rows, student.output, given, GivenLogits(), loss.given)
    assert teachers is not None, "this backend was made without a teacher"
    assert loss.divergence is not None, "this loss compares with no teacher"
    compare = teachers.by_position if loss.by_rank else teachers.divergence
    return compare(student, rows, batch, loss.divergence)
