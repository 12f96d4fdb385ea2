"""The doctor: looks at a run's history by every rule, and says what is wrong first.

For everybody who tells it: the screen, the end of `train`, summary.json, the report, `reinforge
runs show`, `reinforge runs diagnose`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from reinforge.config.doctor import DoctorConfig
from reinforge.watch.doctor.history import RunHistory
from reinforge.watch.doctor.rules.trackers import tracker
from reinforge.watch.doctor.samples import shown_for
from reinforge.watch.doctor.table import RULES
from reinforge.watch.doctor.trouble import Trouble
from reinforge.watch.logs import flatten, read_json, read_lines

ALWAYS = 50  # steps up to which the doctor looks every time; later less often, the longer the run
FALLS = {"collapse"}  # rules whose evaluations have enough rows of their own


class Doctor:
    """Hears a run's lines of metrics and events, one after the other, and names the troubles there
    are so far. A run has one while it goes; `Doctor.of` makes one from a run directory.
    """

    def __init__(
        self, config: Mapping[str, Any] | None = None, actions: DoctorConfig | None = None
    ):
        """`config`: the run's, by dotted keys. `actions`: what is done about each finding."""
        self.history = RunHistory(config or {})
        self.actions = actions or DoctorConfig()
        self._found: list[Trouble] = []
        self._looked = 0  # steps there were at the last look

    @classmethod
    def of(cls, run_dir: Path) -> Doctor:
        """Of a run directory, as its logs tell it."""
        doctor = cls.for_run(run_dir)
        doctor.read(run_dir)
        return doctor

    @classmethod
    def for_run(cls, run_dir: Path) -> Doctor:
        """With the configuration of a run directory, before anything is read of its logs."""
        config = read_json(run_dir / "config.json")
        asked = (config.get("run") or {}).get("doctor") or {}
        known = {k: v for k, v in asked.items() if k in DoctorConfig.model_fields}
        return cls(flatten(config), DoctorConfig(**known))

    def read(self, run_dir: Path) -> None:
        """The logs that a run has already."""
        self.observe_lines(read_lines(run_dir / "metrics.jsonl"))
        for event in read_lines(run_dir / "events.jsonl"):
            self.hear(event)

    def observe(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One line of metrics: of a step, or of an evaluation."""
        self.history.observe([(step, metrics)])

    def observe_lines(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Many of them at once, as a log has them."""
        self.history.observe((int(line.get("step") or 0), line) for line in lines)

    def hear(self, event: Mapping[str, Any]) -> None:
        """One event."""
        self.history.hear(event)

    def troubles(self, *, ended: bool = False) -> list[Trouble]:
        """Those there are now, the first cause first, what follows from it below.

        While the run goes on, shares and trends need some steps before they mean anything.
        """
        steps = len(self.history)
        every = 1 + steps // ALWAYS
        if ended or steps < ALWAYS or steps % every == 0 or steps - self._looked >= every:
            self._found = self._look(ended)
            self._looked = steps
        return self.newest()

    def newest(self) -> list[Trouble]:
        """Those of the last look, and trackers that failed since. Any thread may ask."""
        found = [replace(t, action=self.actions.tracker) for t in tracker(self.history)]
        return [*self._found, *(t for t in found if t.action != "off")]

    def _look(self, ended: bool) -> list[Trouble]:
        history = self.history
        found = []
        for rule in RULES:
            action = self.actions.action(rule.kind)
            enough = 1 if ended or rule.kind in FALLS else rule.enough
            if action == "off" or (len(history) < enough and rule.kind not in FALLS):
                continue
            trouble = rule.check(history)
            if trouble is not None:
                found.append(replace(trouble, action=action))
        return ranked(found)


def ranked(found: Sequence[Trouble]) -> list[Trouble]:
    """Causes before what they explain, warnings before notes, otherwise in the order of the table.

    >>> idle, constant = Trouble("no_gradient", "", ""), Trouble("constant_reward", "", "")
    >>> [(t.kind, t.because) for t in ranked([idle, constant])]
    [('constant_reward', None), ('no_gradient', 'constant_reward')]
    """
    place = {rule.kind: number for number, rule in enumerate(RULES)}
    explains = {rule.kind: rule.explains for rule in RULES}
    ordered = sorted(found, key=lambda t: place[t.kind])
    told = []
    for trouble in ordered:
        causes = [t.kind for t in ordered if trouble.kind in explains[t.kind]]
        told.append(replace(trouble, because=causes[0] if causes else None))
    return sorted(told, key=lambda t: (t.action == "note", t.because is not None, place[t.kind]))


def with_samples(troubles: Sequence[Trouble], run_dir: Path) -> list[Trouble]:
    """The same, each with answers of samples.jsonl that show it."""
    if not troubles:
        return []
    records = list(read_lines(run_dir / "samples.jsonl"))
    return [replace(t, samples=shown_for(t, records)) if records else t for t in troubles]


def diagnosed(run_dir: Path, status: str) -> list[Trouble]:
    """What a run directory tells, with samples. `status`: how the run stands."""
    return with_samples(Doctor.of(run_dir).troubles(ended=status != "running"), run_dir)
