"""A proof of `plan --deep`: something that was tried, whether it held, and in which numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from reinforge.core.errors import InputError


@dataclass(frozen=True, slots=True)
class Proof:
    """What was tried and what came out. Of one that failed `where` and `fix` say where to look and
    what to do; `plan` makes an error of it.
    """

    name: str
    ok: bool
    said: str
    where: str = ""
    fix: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value != ""}

    @property
    def error(self) -> str:
        said = self.said if self.where == self.name else f"{self.name}: {self.said}"
        return str(InputError(said, where=self.where, fix=self.fix or None))


def failed_by(name: str, error: InputError) -> Proof:
    """Of an error that speaks for itself."""
    return Proof(name, False, error.what, error.where or "plan", error.fix or "")
