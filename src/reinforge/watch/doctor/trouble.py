"""One finding of the doctor, as everybody tells it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PAGE = "docs/doctor.md"


@dataclass(frozen=True, slots=True)
class Knob:
    """A setting to turn: its key, a value to try, and the one it has."""

    key: str
    value: Any
    was: Any = None

    def __str__(self) -> str:
        """
        >>> str(Knob("train.learning_rate", 1e-4, 1e-3)), str(Knob("algorithm.entropy", 0.01))
        ('train.learning_rate=0.0001 (it is 0.001)', 'algorithm.entropy=0.01')
        """
        value = f"{self.value:.3g}" if isinstance(self.value, float) else self.value
        was = f"{self.was:.3g}" if isinstance(self.was, float) else self.was
        return f"{self.key}={value}" + ("" if self.was is None else f" (it is {was})")


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that kept a run from learning, or from telling: what it is, with its numbers, and
    what to do next. A rule makes it, the doctor ranks it.
    """

    kind: str
    what: str
    fix: str
    since: int | None = None  # the step from which on it shows
    knob: Knob | None = None
    evidence: tuple[str, ...] = ()  # numbers, with their steps and the names of metrics
    samples: tuple[Mapping[str, Any], ...] = ()  # lines of samples.jsonl to look at
    action: str = "warn"  # what the configuration wants done
    because: str | None = None  # the kind of another finding that explains this one

    def __str__(self) -> str:
        return f"{self.what} {self.fix}" + ("" if self.knob is None else f" Try {self.knob}.")

    @property
    def is_cause(self) -> bool:
        """Whether people are warned of it: no note, and nothing else explains it."""
        return self.action != "note" and self.because is None

    @property
    def link(self) -> str:
        """Where it is explained."""
        return f"{PAGE}#{self.kind}"

    def record(self) -> dict[str, Any]:
        """Plain values, for summary.json and `--json`; what a finding does not have is left out."""
        knob = self.knob
        told = {
            "kind": self.kind,
            "what": self.what,
            "fix": self.fix,
            "action": self.action,
            "since": self.since,
            "knob": None if knob is None else {"key": knob.key, "value": knob.value},
            "evidence": list(self.evidence),
            "samples": [dict(sample) for sample in self.samples],
            "because": self.because,
            "link": self.link,
        }
        return {name: value for name, value in told.items() if value not in (None, [])}
