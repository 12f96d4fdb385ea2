"""Which domain a row is of, where every domain has a teacher of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reinforge.config.teacher import TeacherConfig
from reinforge.core.batch import DOMAIN
from reinforge.core.errors import InputError
from reinforge.core.sample import Row, Sample
from reinforge.data.units import constant


@dataclass(frozen=True)
class Domains:
    """The domains of a run, in the order of their teachers. `build/` makes it from the section
    `teacher`; whatever makes samples of rows marks them with it.
    """

    names: tuple[str, ...]
    column: str

    @classmethod
    def of(cls, teacher: TeacherConfig | None) -> Domains | None:
        """None: rows have no domain."""
        if teacher is None or not teacher.domains:
            return None
        return cls(tuple(teacher.domains), teacher.column)

    def index(self, row: Row) -> int:
        """The number of the row's domain."""
        known = ", ".join(self.names)
        if self.column not in row.columns:
            raise InputError(
                f"has no column {self.column!r}, which names its domain ({known}).",
                where=row.where,
                fix="Add it to the row, or name another column with teacher.column.",
            )
        name = row.columns[self.column]
        if name not in self.names:
            raise InputError(
                f"is of the domain {name!r}, which has no teacher; there are {known}.",
                where=row.where,
                fix=f"Add teacher.domains.{name}, or correct the row's {self.column}.",
            )
        return self.names.index(name)

    def mark(self, row: Row, samples: Sequence[Sample]) -> list[Sample]:
        """The samples of a row, each with its domain."""
        number = float(self.index(row))
        return [constant(sample, DOMAIN, number) for sample in samples]
