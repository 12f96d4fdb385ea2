"""Why engine and trainer disagree on the log-probs of sampled tokens.

The run is done again up to the step, on its kept rollouts where there are any, so that the weights
of the step and of those before it are at hand. Then a few samples of the step are read in every way
that an engine may have computed them (`build/mismatch_causes.py`), and what the engine told says
which of them it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from reinforge.backends.local import LocalBackend
from reinforge.build.counterfactual import current_logprobs
from reinforge.build.execute import OpenRun
from reinforge.build.mismatch_causes import EXPLAINS, LAGS, CauseSearch, find_causes
from reinforge.build.mismatch_paths import PathComparison, compare_paths
from reinforge.build.mismatch_words import CauseWords, guess_of, words_of, words_of_path
from reinforge.build.prompt_variants import prompt_variants
from reinforge.build.readings import LogprobReader
from reinforge.build.replay import ReplayPlan, go, plan_replay, scratch_directory
from reinforge.config.load import config_from_dict
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.core.sample import Row, Sample
from reinforge.core.token_text import token_text
from reinforge.loops.open_step import RunStep
from reinforge.models.answer_form import AnswerForm
from reinforge.models.causal import CausalModel
from reinforge.models.load import load_config, load_tokenizer
from reinforge.rollout.kept import KeptRollouts
from reinforge.watch.logs import read_json, read_lines
from reinforge.watch.runs import show_run

NATIVE = "native"
ROOM = 50_000_000  # logits that are held of one reading
CONTEXT = 12  # tokens before one that is shown
METRIC = "mismatch/mean"
NEARLY = 0.8  # of the largest mismatch: of such steps the last one, which has the longest past


@dataclass(frozen=True)
class MismatchPlan:
    """Which step is looked at, and how it is come to. `plan_mismatch` makes it."""

    replay: ReplayPlan
    kept: bool  # whether the rollouts are those that the run kept; otherwise they are made again

    @property
    def config(self) -> Config:
        return self.replay.stretches[-1].config


def plan_mismatch(run_dir: Path, step: int | None = None) -> MismatchPlan:
    """Without a step: a late one of those in which engine and trainer were furthest apart."""
    show_run(run_dir)  # it is one
    config = config_from_dict(read_json(run_dir / "config.json"), where=str(run_dir))
    if not config.algorithm.rl:
        raise InputError(
            "this run has no engine: it learns from given rows.",
            where=str(run_dir),
            fix="Give a run that generates.",
        )
    if config.rollout.kept is not None:
        raise InputError(
            f"this run trained on the rollouts of {config.rollout.kept}, and generated nothing.",
            where=str(run_dir),
            fix=f"Look at {config.rollout.kept}.",
        )
    step = _worst_step(run_dir) if step is None else step
    replay = plan_replay(run_dir, step, lead=LAGS + config.rollout.staleness)
    there = KeptRollouts(run_dir)
    steps = range(replay.begin + 1, step + 1)
    kept = all(there.keeps(number) for number in steps)
    config = replay.stretches[-1].config
    if not kept and config.rollout.engine != NATIVE:
        missing = next(number for number in steps if not there.keeps(number))
        raise InputError(
            f"the rollouts of step {missing} are not kept, and {config.rollout.engine} does not"
            " sample the same ones again.",
            where=str(run_dir),
            fix="Set run.keep_rollouts: true, and run a few steps.",
        )
    return MismatchPlan(replay, kept)


def _worst_step(run_dir: Path) -> int:
    # evaluations have lines of their own, before the first step and after the last one
    lines = [line for line in read_lines(run_dir / "metrics.jsonl") if METRIC in line]
    found = {line["step"]: line[METRIC] for line in lines if math.isfinite(line[METRIC] or 0)}
    steps = {step: value for step, value in found.items() if step >= 1}
    if not steps:
        raise InputError(
            "this run has not trained a step.", where=str(run_dir), fix="Train it first."
        )
    enough = NEARLY * max(value or 0.0 for value in steps.values())
    return max(step for step, value in steps.items() if (value or 0.0) >= enough)


# ---- the step, done again ----


@dataclass
class MismatchProbe:
    """What is wanted of a run that is done again: the weights of its last steps, and the samples of
    the step with the trainer's own log-probs. `go` calls it with every step.
    """

    number: int
    held: int  # how many steps' weights are held, beside those of the first
    weights: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # by version
    samples: list[Sample] = field(default_factory=list)
    rows: dict[str, Row] = field(default_factory=dict)  # by sample
    logprobs: dict[str, Tensor] = field(default_factory=dict)  # by sample, of its trained tokens
    form: AnswerForm | None = None

    def __call__(self, opened: OpenRun, step: RunStep) -> None:
        if step.done:
            return
        backend = opened.run.checkpointer.backend
        if not isinstance(backend, LocalBackend):
            raise InputError(
                "the weights of this run are in other processes.",
                where="train.backend",
                fix="Run a few steps with train.backend: local and run.keep_rollouts: true.",
            )
        self.weights[opened.run.counters.get("updates", 0)] = _weights_of(backend)
        for version in sorted(self.weights)[1 : -self.held]:
            del self.weights[version]
        if step.number != self.number:
            return
        self.samples = [sample for sample in step.samples if sample.n_trained]
        self.rows = {s.uid: group.row for group in step.groups for s in group.samples}
        self.logprobs = current_logprobs(backend, self.samples)
        assert isinstance(backend.model, CausalModel)
        self.form = backend.model.form


def _weights_of(backend: LocalBackend) -> dict[str, Tensor]:
    """Everything that an update changes, in float32."""
    found = {
        name: p.detach().float().cpu().clone() for name, p in backend.optimizer.masters.items()
    }
    if backend.experts.bias is not None:
        buffers = dict(backend.model.module.named_buffers())
        found |= {name: b.detach().cpu().clone() for name, b in buffers.items()}
    return found


def _on_kept(config: Config, run_dir: Path) -> Config:
    """Trains on what the run kept. No server is started for that."""
    rollout = config.rollout.model_copy(
        update={"kept": str(run_dir), "engine": NATIVE, "overlap": False}
    )
    return config.model_copy(update={"rollout": rollout})


# ---- what is told of it ----


@dataclass(frozen=True)
class WorstToken:
    """The token that engine and trainer disagree on most. Part of a report."""

    sample: str
    position: int  # among the trained tokens of its sample
    token: str
    context: str
    engine: float  # log-probs
    trainer: float


@dataclass(frozen=True)
class TriedCause:
    """A cause that was tried by itself. Part of a report."""

    name: str
    guess: str
    left: float  # nats per token that it leaves
    explained: float


@dataclass(frozen=True)
class MismatchReport:
    """What `runs mismatch` says. `explain_mismatch` makes it."""

    run: str
    step: int
    engine: str
    kept: bool
    samples: tuple[int, int]  # that were looked at, and all of the step
    tokens: int  # that were looked at
    overall: float  # mean |engine - trainer| in nats over all tokens of the step
    apart: float  # ... over those that were looked at, with the weights that the engine had
    limit: float
    precision: str
    rounding: float | None
    left: float
    causes: list[CauseWords]
    tried: list[TriedCause]
    worst: WorstToken
    paths: PathComparison | None  # native engine: the same tokens through both
    notes: list[str]

    @property
    def differs(self) -> bool:
        """Whether engine and trainer disagree by more than rounding."""
        return bool(self.causes) or max(self.overall, self.apart) > self.limit


def explain_mismatch(
    plan: MismatchPlan, *, samples: int = 16, progress: Callable[[int], None] = lambda step: None
) -> MismatchReport:
    """Does the step again and looks for the cause in at most so many of its samples."""
    replay = plan.replay
    config = plan.config
    probe = MismatchProbe(replay.step, held=LAGS + 1 + config.rollout.staleness)
    with scratch_directory() as folder:
        go(
            replay,
            folder,
            step=progress,
            seen=probe,
            change=(lambda c: _on_kept(c, replay.run_dir)) if plan.kept else (lambda c: c),
        )
    if not probe.samples:
        raise InputError(
            f"step {replay.step} trained on nothing.", where="--step", fix="Give another step."
        )
    chosen = _chosen(config, probe, samples)
    reader = _reader(config, probe, chosen)
    found = find_causes(reader)
    paths = None
    if config.rollout.engine == NATIVE and found.apart > found.limit and probe.form is None:
        paths = compare_paths(reader)
    return _report(plan, probe, reader, found, paths)


def _gaps(sample: Sample, ours: Tensor) -> Tensor:
    return (sample.logprobs[sample.trained] - ours).abs()


def _chosen(config: Config, probe: MismatchProbe, count: int) -> list[Sample]:
    """Half of them those that are furthest apart, half evenly from all; as many of their tokens as
    there is room for.
    """
    ranked = sorted(
        probe.samples, key=lambda s: -float(_gaps(s, probe.logprobs[s.uid]).double().mean())
    )
    count = max(1, min(count, len(ranked)))
    worst = ranked[: (count + 1) // 2]
    rest = ranked[len(worst) :]
    apart = max(1, len(rest) // max(1, count - len(worst)))
    taken = [*worst, *rest[::apart]][:count]
    vocabulary = load_config(config.model).get_text_config().vocab_size
    room = max(16, ROOM // vocabulary)
    return [_cut(sample, max(8, room // count)) for sample in taken]


def _cut(sample: Sample, tokens: int) -> Sample:
    """Up to so many trained tokens."""
    if sample.n_trained <= tokens:
        return sample
    end = int(sample.trained.nonzero()[tokens])
    return sample.with_(
        tokens=sample.tokens[:end],
        trained=sample.trained[:end],
        logprobs=sample.logprobs[:end],
        versions=sample.versions[:end],
        token_rewards=None,
        streams={},
        extras={name: value[:end] for name, value in sample.extras.items()},
    )


def _reader(config: Config, probe: MismatchProbe, samples: Sequence[Sample]) -> LogprobReader:
    prompts = [s.tokens[: int(s.trained.nonzero()[0])].tolist() for s in samples]
    variants = {}
    if config.env is None and config.agent is None:
        tokenizer = load_tokenizer(config.model)
        rows = [probe.rows[s.uid] for s in samples]
        variants = prompt_variants(tokenizer, config.data, rows, prompts)
    reader = LogprobReader(config, samples, probe.weights, variants, probe.form)
    reader.add_first()
    return reader


def _report(
    plan: MismatchPlan,
    probe: MismatchProbe,
    reader: LogprobReader,
    found: CauseSearch,
    paths: PathComparison | None,
) -> MismatchReport:
    config = plan.config
    every = torch.cat([_gaps(s, probe.logprobs[s.uid]) for s in probe.samples])
    overall = float(every.double().mean())
    causes = [words_of(cause, reader, config) for cause in found.causes]
    left = found.left
    rest = None if paths is None else _of_path(reader, found, paths)
    if rest is not None:
        causes.append(rest)
        left = rest.left
    notes: list[str] = []
    newest = max(probe.weights)
    ages = torch.cat([newest - s.versions[s.trained] for s in probe.samples]).double()
    if not causes and overall > found.limit >= found.apart:
        causes.append(
            CauseWords(
                "staleness",
                f"The samples are {float(ages.mean()):.2g} updates old, as rollout.staleness"
                " allows; the engine computed what the trainer computed then.",
                "rollout.staleness down, or algorithm.correction.name=tis",
                found.apart,
                1 - found.apart / overall,
            )
        )
    return MismatchReport(
        run=str(plan.replay.run_dir),
        step=plan.replay.step,
        engine=config.rollout.engine,
        kept=plan.kept,
        samples=(len(reader.samples), len(probe.samples)),
        tokens=sum(s.n_trained for s in reader.samples),
        overall=overall,
        apart=found.apart,
        limit=found.limit,
        precision=reader.trainers.precision,
        rounding=found.rounding,
        left=left,
        causes=causes,
        tried=[
            TriedCause(cause.name, guess_of(cause), cause.left, cause.explained)
            for cause in found.ranked
        ],
        worst=_worst(config, probe),
        paths=paths,
        notes=notes,
    )


def _of_path(reader: LogprobReader, found: CauseSearch, paths: PathComparison) -> CauseWords | None:
    """What the causes leave, where the engine's own path gives its numbers; None: it does not."""
    if found.left <= found.limit:
        return None
    ours = reader.logprobs(found.reading or reader.trainers)
    gaps = (reader.recorded - ours).abs()[: paths.tokens]
    before = float(gaps.double().mean())
    if paths.told > (1 - EXPLAINS) * before:
        return None
    return words_of_path(paths, before, reader.cfg)


def _worst(config: Config, probe: MismatchProbe) -> WorstToken:
    _, sample, i = max(
        (
            (float(gaps.max()), s, int(gaps.argmax()))
            for s in probe.samples
            for gaps in [_gaps(s, probe.logprobs[s.uid])]
        ),
        key=lambda found: found[0],
    )
    tokenizer = load_tokenizer(config.model)
    at = int(sample.trained.nonzero()[i])
    return WorstToken(
        sample.uid,
        i,
        token_text(tokenizer, sample.tokens[at : at + 1].tolist()),
        token_text(tokenizer, sample.tokens[max(0, at - CONTEXT) : at].tolist()),
        float(sample.logprobs[at]),
        float(probe.logprobs[sample.uid][i]),
    )
