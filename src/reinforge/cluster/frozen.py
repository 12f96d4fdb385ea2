"""Models that are never trained, in actors of their own: a frozen reference, and teachers.

In such an actor is a backend whose model has no gradients; what it is asked is `annotate`. It keeps
nothing between calls, so one that is lost is made again and asked again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from reinforge.backends.teachers import OF_TEACHERS, Teachers, teacher_streams
from reinforge.cluster.errors import ActorLost
from reinforge.cluster.ray_cluster import RayCluster
from reinforge.cluster.stateless import StatelessActors
from reinforge.core.backend import TEACHER_IDS, TEACHER_LOGPROBS, Backend
from reinforge.core.batch import Batch

MODEL = "frozen"  # the object in the actors
AT_ONCE = 8  # batches that teachers have in hand together
BEST = frozenset({TEACHER_IDS, TEACHER_LOGPROBS})


class RemoteFrozenModel:
    """A model that is never trained, in the actors of `role`: `factory(objects, *args)` makes its
    backend there. `FrozenModels` and `RemoteTeacher` ask it.
    """

    def __init__(self, cluster: RayCluster, role: str, factory: Callable[..., Backend], *args: Any):
        self.actors = StatelessActors(cluster, role, MODEL, factory, *args)

    def load(self) -> None:
        """Now, and not when it is first asked."""
        self.actors.opened()

    def streams(self, batches: Sequence[Batch], needs: frozenset[str]) -> list[dict[str, Tensor]]:
        """What its backend fills of each batch."""
        while True:
            workers = self.actors.opened()
            try:
                found: list[dict[str, Tensor]] = workers.apply(
                    MODEL, _annotated, list(batches), needs
                )
                self.actors.answered()
                return found
            except ActorLost as lost:
                self.actors.replace(workers, lost)

    def logprobs(self, batches: Sequence[Batch]) -> list[Tensor]:
        """[M] of the trained tokens of each batch: what is the old policy to its own backend."""
        return [found["old"] for found in self.streams(batches, frozenset({"old"}))]


class RemoteTeacher:
    """A `TeacherModel` in actors of its own. `RayFactories` puts it in the place of a
    `LocalTeacher`.

    `temperature`: of the log-probs of texts; `best_of`: how many of the likeliest tokens it tells,
    and at which temperature.
    """

    def __init__(self, model: RemoteFrozenModel, temperature: float, best_of: tuple[int, float]):
        self.model = model
        self.temperature = temperature
        self.best_of = best_of

    def logprobs(self, batch: Batch, temperature: float) -> Tensor:
        assert temperature == self.temperature, "its actors were made for another temperature"
        return self.model.logprobs([batch])[0].to(batch.targets.device)

    def best(self, batch: Batch, k: int, temperature: float) -> tuple[Tensor, Tensor]:
        assert (k, temperature) == self.best_of, "its actors were made for other tokens"
        (found,) = self.model.streams([batch], BEST)
        device = batch.targets.device
        return found[TEACHER_IDS].to(device), found[TEACHER_LOGPROBS].to(device)

    def close(self) -> None:
        self.model.actors.close()


class FrozenModels:
    """The frozen models of a run that have actors of their own. `RayFactories` makes it; the
    policy's `RemoteBackend` asks it for the streams that its own actors do not fill.
    """

    def __init__(
        self,
        reference: RemoteFrozenModel | None = None,
        teachers: Teachers | None = None,
        temperature: float = 1.0,
    ):
        self.reference = reference
        self.teachers = teachers
        self.temperature = temperature

    @property
    def told(self) -> frozenset[str]:
        """The streams that come from here."""
        of_reference = frozenset() if self.reference is None else frozenset({"reference"})
        return of_reference | (frozenset() if self.teachers is None else OF_TEACHERS)

    def streams(self, batches: Sequence[Batch], needs: frozenset[str]) -> list[dict[str, Tensor]]:
        """Of each batch those of `needs` that come from here. All models work at the same time."""
        found: list[dict[str, Tensor]] = [{} for _ in batches]
        with ThreadPoolExecutor(AT_ONCE + 1) as asking:
            references = None
            if "reference" in needs and self.reference is not None:
                references = asking.submit(self.reference.logprobs, batches)
            if needs & OF_TEACHERS and self.teachers is not None:
                teachers = self.teachers

                def told(batch: Batch) -> dict[str, Tensor]:
                    return teacher_streams(teachers, batch, needs, self.temperature)

                for streams, of_batch in zip(found, asking.map(told, batches), strict=True):
                    streams |= of_batch
            if references is not None:
                for streams, logprobs in zip(found, references.result(), strict=True):
                    streams["reference"] = logprobs
        return found

    def forget_teachers(self) -> None:
        """Everything that they say was kept: their devices are free."""
        if self.teachers is not None:
            for member in self.teachers.everyone():
                if isinstance(member, RemoteTeacher):
                    member.close()
        self.teachers = None


# ---- in the actor ----


def _annotated(
    backend: Backend, batches: list[Batch], needs: frozenset[str]
) -> list[dict[str, Tensor]]:
    backend.annotate(batches, needs)
    return [{name: batch.streams[name] for name in needs} for batch in batches]
