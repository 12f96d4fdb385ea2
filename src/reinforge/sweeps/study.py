"""Optuna, as far as a sweep needs it: draws the values of a trial, keeps what came out in a file,
and says which trial is to end before its time. The only file that imports it.

Trials are asked for and told one by one (Optuna's ask-and-tell). The sampler is made anew for every
trial, with a seed of its number, so that what is drawn depends on the trials before it alone: a
sweep that was cut draws what it would have drawn.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.pruners import BasePruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

from reinforge.config.search import Domain, Interval
from reinforge.config.sweep import Direction, PrunerConfig, SweepConfig, grid_of
from reinforge.core.seeds import seed_of

FILE = "sweep.db"
NAME = "sweep"
FACTS = "run"  # what we keep of a trial beside what Optuna does
STATES = {
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}
PLAIN = (bool, int, float, str, type(None))  # what Optuna has as a choice


@dataclass(frozen=True)
class TrialRecord:
    """A trial as the study knows it: what the sweep runs, and what its tables show."""

    number: int
    values: dict[str, Any]  # by key of the configuration
    state: str  # running, finished, pruned or failed
    value: float | None = None  # the metric, of a pruned one at its last evaluation
    steps: int | None = None
    seconds: float | None = None
    error: str | None = None


class SweepStudy:
    """The trials of a sweep in `sweep.db`. `run_sweep` makes it; nobody else writes to it."""

    def __init__(self, folder: Path, sweep: SweepConfig, direction: Direction, every: int):
        """`every`: steps between two evaluations."""
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.sweep = sweep
        self.space = sweep.space()
        self.path = folder / FILE
        self._storage = optuna.storages.RDBStorage(f"sqlite:///{self.path}")
        self._study = optuna.create_study(
            study_name=NAME,
            storage=self._storage,
            direction=direction,
            load_if_exists=True,
            pruner=_pruner(sweep.pruner, every),
        )
        if sweep.sampler == "grid" and not self._study.get_trials(deepcopy=False):
            self._enqueue_grid()

    def _enqueue_grid(self) -> None:
        values = grid_of(self.space)
        for point in itertools.product(*values.values()):
            labels = {
                key: _label(value) if not isinstance(self.space[key], Interval) else value
                for key, value in zip(values, point, strict=True)
            }
            self._study.enqueue_trial(labels)

    def close(self) -> None:
        """The file may be removed."""
        self._storage.remove_session()
        self._storage.engine.dispose()

    # ---- trials ----

    def all(self) -> list[TrialRecord]:
        """Every trial that was begun, in order."""
        found = self._study.get_trials(deepcopy=False)
        return [self._record(trial) for trial in found if trial.state in STATES]

    def begin(self) -> TrialRecord:
        """The next trial: the one that was cut, or a new one."""
        for cut in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if cut.params.keys() == self.space.keys():
                return self._record(cut)
            self._study.tell(cut.number, state=TrialState.FAIL)  # it was never drawn to the end
        self._study.sampler = self._sampler(len(self.all()))
        spaces = {key: _distribution(domain) for key, domain in self.space.items()}
        asked = self._study.ask(fixed_distributions=spaces)
        return self._record(self._storage.get_trial(self._id(asked.number)))

    def _id(self, number: int) -> int:
        study = self._storage.get_study_id_from_name(NAME)
        return self._storage.get_trial_id_from_study_id_trial_number(study, number)

    def report(self, number: int, step: int, value: float) -> bool:
        """The metric at an evaluation; True where the trial is to be pruned."""
        trial = self._id(number)
        self._storage.set_trial_intermediate_value(trial, step, value)
        return self._study.pruner.prune(self._study, self._storage.get_trial(trial))

    def tell(
        self,
        number: int,
        state: str,
        value: float | None = None,
        *,
        steps: int | None = None,
        seconds: float | None = None,
        error: str | None = None,
    ) -> None:
        """The trial has ended."""
        facts = {"steps": steps, "seconds": seconds, "error": error}
        self._storage.set_trial_user_attr(self._id(number), FACTS, facts)
        wanted = next(kind for kind, name in STATES.items() if name == state)
        self._study.tell(number, value if state == "finished" else None, state=wanted)

    # ---- what Optuna has, and what we have ----

    def _record(self, trial: FrozenTrial) -> TrialRecord:
        told = trial.user_attrs.get(FACTS, {})
        value = trial.value if trial.state is TrialState.COMPLETE else None
        if trial.state is TrialState.PRUNED and trial.intermediate_values:
            value = trial.intermediate_values[max(trial.intermediate_values)]
        return TrialRecord(
            trial.number,
            {key: self._meant(key, trial.params[key]) for key in self.space if key in trial.params},
            STATES[trial.state],
            value,
            told.get("steps"),
            told.get("seconds"),
            told.get("error"),
        )

    def _meant(self, key: str, label: Any) -> Any:
        """The value of a key that Optuna's label stands for."""
        domain = self.space[key]
        if isinstance(domain, Interval):
            return label
        return next(value for value in domain.values if _same(_label(value), label))

    def _sampler(self, number: int) -> BaseSampler:
        seed = seed_of(self.sweep.seed, "sweep", number) % 2**32
        if self.sweep.sampler == "tpe":
            return TPESampler(seed=seed)
        return RandomSampler(seed=seed)


def _pruner(config: PrunerConfig, every: int) -> BasePruner:
    match config.kind:
        case "median":
            return MedianPruner(config.startup, config.warmup)
        case "asha":
            return SuccessiveHalvingPruner(max(1, every), config.factor)
        case _:
            return NopPruner()


def _distribution(domain: Domain) -> BaseDistribution:
    if not isinstance(domain, Interval):
        return CategoricalDistribution([_label(value) for value in domain.values])
    if domain.whole:
        low, high = int(domain.low), int(domain.high)
        return IntDistribution(low, high, log=domain.log, step=int(domain.step or 1))
    return FloatDistribution(domain.low, domain.high, log=domain.log, step=domain.step)


def _label(value: Any) -> Any:
    """A choice as Optuna keeps it: a list or a mapping as JSON."""
    return value if isinstance(value, PLAIN) else json.dumps(value, sort_keys=True)


def _same(one: Any, other: Any) -> bool:
    """1 is not True."""
    return type(one) is type(other) and one == other
