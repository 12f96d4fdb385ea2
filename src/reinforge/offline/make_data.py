"""Training data from a teacher: answers to prompts, questions and answers from documents, or
preference pairs.

Every completion of the teacher stands in a file beside the one that is made: what is left out can
be looked at, and another choice among them asks for nothing. The manifest says how it was made.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from reinforge.config.data import DataConfig
from reinforge.core.engine import Sampling
from reinforge.core.errors import InputError, RequestError
from reinforge.core.redact import redact_settings
from reinforge.core.row import Row
from reinforge.data.documents import TEXT, chunk_rows, load_documents
from reinforge.data.objects import rows_of
from reinforge.data.sources import PYTHON, fingerprint, hold_out, load_rows, rows_from
from reinforge.engines.openai import OpenAIServer
from reinforge.models.constraint_library import check as check_constraint
from reinforge.offline.complete_rows import complete_rows
from reinforge.offline.completion_sources import open_source
from reinforge.offline.journal import REQUEST, GenerationJournal, Line, write_whole
from reinforge.offline.labels import LabelOptions, open_labeller, value_of
from reinforge.offline.made_rows import (
    DropCounts,
    Selection,
    TrainingRow,
    answer_rows,
    distinct_rows,
    pair_rows,
    question_rows,
)
from reinforge.offline.question_answers import TEMPLATE, check_template, filled, reply_form
from reinforge.version import __version__

Kind = Literal["answers", "questions", "pairs"]
LONGEST = 1024  # tokens of a completion, by default


@dataclass(frozen=True)
class QuestionOptions:
    """How documents are cut, and what is asked of each part."""

    most: int = 3  # questions of a chunk
    chunk: int = 4000  # characters
    overlap: int = 400
    template: str = TEMPLATE
    structured: bool = True  # the teacher is held to the form of a reply


@dataclass(frozen=True)
class MakeOptions:
    """How training data are made of rows or documents. The command line and `reinforge.make_data`
    fill it.
    """

    kind: Kind
    teacher: str  # a model, or the address of a server
    server: OpenAIServer | None = None
    adapter: str | None = None
    n: int = 1  # completions of a prompt
    sampling: Sampling = field(default_factory=lambda: Sampling(LONGEST))
    seed: int = 0
    labels: LabelOptions = field(default_factory=LabelOptions)
    selection: Selection = field(default_factory=Selection)
    questions: QuestionOptions = field(default_factory=QuestionOptions)

    def check(self) -> None:
        """Raises InputError for what cannot be, before a model is loaded."""
        scored = self.labels.wanted
        if self.kind == "pairs" and self.n < 2:
            raise InputError("a pair needs two answers.", where="-n", fix="Ask for 2 or more.")
        if self.kind == "pairs" and not scored:
            raise InputError(
                "what makes one answer better than another?",
                where="--reward",
                fix="Name a reward, or a judge (--judge URL).",
            )
        for option, value in (
            ("--at-least", self.selection.at_least),
            ("--best", self.selection.best),
        ):
            if value is not None and not scored:
                raise InputError(
                    "there is no score to choose by.",
                    where=option,
                    fix="Name a reward, or a judge (--judge URL).",
                )
        if self.kind == "questions":
            check_template(self.questions.template)
            if self.questions.overlap > self.questions.chunk // 2:
                raise InputError(
                    f"{self.questions.overlap} characters are more than half of a chunk of"
                    f" {self.questions.chunk}.",
                    where="--overlap",
                    fix="Let chunks overlap less, or make them larger (--chunk).",
                )
            if self.questions.structured and self.server is None:
                check_constraint(reply_form(self.questions.most), "the form of a reply")


@dataclass(frozen=True)
class DataMade:
    """What `reinforge.make_data` gives back: the rows that are in the file, and what was left
    out.
    """

    path: Path
    rows: list[TrainingRow]
    asked: int  # prompts, or chunks of documents
    completions: int
    dropped: dict[str, int]  # by reason
    examples: dict[str, str]  # the first of each
    manifest: dict[str, Any]

    @property
    def raw(self) -> Path:
        """The file with every completion of the teacher."""
        return raw_path(self.path)

    @property
    def manifest_file(self) -> Path:
        return manifest_path(self.path)

    def __repr__(self) -> str:
        return f"<{len(self.rows)} rows in {self.path}, dropped: {self.dropped or 'none'}>"


Progress = Callable[[str, int, int], None]  # what is asked, how many are done, how many there are


async def make_file(
    options: MakeOptions,
    data: DataConfig,
    out: Path,
    *,
    objects: Iterable[Any] | None = None,
    progress: Progress | None = None,
) -> DataMade:
    """Makes the file, whole or not at all. The same call after a kill goes on where it was.

    `objects`: rows or texts in place of `data.source`.
    """
    options.check()
    check_out(out, data.source)
    store = GenerationJournal(raw_path(out), options.n)
    drops = DropCounts()
    found, rows = _rows_to_ask(options, data, objects, drops)
    what = "chunks" if options.kind == "questions" else "prompts"
    refused: dict[str, RequestError] = {}
    sampling = options.sampling
    if options.kind == "questions" and options.questions.structured:
        sampling = replace(sampling, constraint=reply_form(options.questions.most))
    async with open_labeller(options.labels) as labeller:
        if labeller is not None:
            labeller.check(rows)
        async with open_source(
            options.teacher, data, adapter=options.adapter, server=options.server, logprobs=False
        ) as source:
            lines = await complete_rows(
                rows,
                source,
                sampling,
                store,
                seed=options.seed,
                labeller=labeller,
                progress=None if progress is None else partial(progress, what),
                refused=refused,
            )
    for name, error in refused.items():
        drops.add("refused", f"row {name}: {error.what}")
    made = _rows_made(options, lines, drops, chat=source.chat)
    if not made:
        told = ", ".join(f"{reason} {count}" for reason, count in drops.counts.items())
        raise InputError(
            f"nothing is left of {len(lines)} completions ({told}).",
            where=str(out),
            fix=f"{_lower(options.selection, lines)}{raw_path(out)} has all of them.",
        )
    manifest = {
        "reinforge": __version__,
        "file": out.name,
        "kind": options.kind,
        "source": _source_of(data, found, objects is not None),
        "teacher": source.described,
        **_how(options, sampling),
        "asked": len(rows),
        "completions": len(lines),
        "rows": len(made),
        "dropped": dict(drops.counts),
    }
    manifest = _write(out, made, redact_settings(manifest))
    return DataMade(out, made, len(rows), len(lines), dict(drops.counts), drops.examples, manifest)


def _lower(rule: Selection, lines: Sequence[Line]) -> str:
    """What to do where no score was high enough."""
    scores = [value for line in lines if (value := value_of(line)) is not None]
    if rule.at_least is None or not scores or max(scores) >= rule.at_least:
        return ""
    return f"The best score was {max(scores):g}: lower --at-least ({rule.at_least:g}). "


def raw_path(out: Path) -> Path:
    """`made.jsonl` -> `made.raw.jsonl`: every completion of the teacher."""
    return out.with_name(f"{out.stem}.raw.jsonl")


def manifest_path(out: Path) -> Path:
    """`made.jsonl` -> `made.manifest.json`."""
    return out.with_name(f"{out.stem}.manifest.json")


def check_out(out: Path, source: str) -> None:
    """Refuses a file that cannot be written, or that is somebody's."""
    if out.suffix not in (".jsonl", ".parquet"):
        raise InputError(f"{out} is neither .jsonl nor .parquet.", where="--out", fix="Name it so.")
    if out.exists() and Path(source).exists() and out.samefile(source):
        raise InputError(f"{out} is the source.", where="--out", fix="Write to another file.")
    manifest = manifest_path(out)
    if manifest.is_file():
        told = json.loads(manifest.read_text(encoding="utf-8"))
        if told.get("file") != out.name:
            raise InputError(
                f"{manifest} is that of {told.get('file')}.",
                where="--out",
                fix="Write to a file of another name.",
            )
        return
    theirs = [path for path in (out, raw_path(out)) if path.exists() and not _is_raw(path)]
    if theirs:
        raise InputError(
            f"{theirs[0]} exists, and nothing says that this command made it.",
            where="--out",
            fix="Write to another file, or remove it.",
        )


def _is_raw(path: Path) -> bool:
    """Whether a file has completions: one that a kill left without a manifest."""
    with path.open("rb") as file:
        return f'"{REQUEST}": '.encode() in file.readline()


def _rows_to_ask(
    options: MakeOptions, data: DataConfig, objects: Iterable[Any] | None, drops: DropCounts
) -> tuple[Sequence[Row], list[Row]]:
    """The rows or documents of the source, and what the teacher is asked."""
    if options.kind != "questions":
        if objects is not None:
            found = _given_rows(objects, data)
        else:
            found = hold_out(data, load_rows(data))[0]  # what comes out may be trained on
        return found, distinct_rows(found, drops)
    how = options.questions
    if objects is None:
        documents = load_documents(data)
    else:
        texts = rows_of(objects, "source")
        named = [{TEXT: item} if isinstance(item, str) else item for item in texts]
        documents = _given_rows(named, data)
    parts = distinct_rows(chunk_rows(documents, how.chunk, how.overlap), drops)
    asked = [
        Row(
            part.id,
            filled(how.template, part.columns[TEXT], how.most),
            {name: value for name, value in part.columns.items() if name != TEXT},
            part.place,
        )
        for part in parts
    ]
    return documents, asked


def _given_rows(objects: Iterable[Any], data: DataConfig) -> Sequence[Row]:
    """Rows that came as Python objects, read as `data` says."""
    return rows_from(
        objects,
        columns=data.columns,
        where=data.where,
        system=data.system,
        template=data.template,
        fixed=data.fixed,
        format=data.format,
        limit=data.limit,
        drop=data.bad_rows == "drop",
        name="source",
    )


def _rows_made(
    options: MakeOptions, lines: Sequence[Line], drops: DropCounts, *, chat: bool
) -> list[TrainingRow]:
    rule = options.selection
    match options.kind:
        case "answers":
            return answer_rows(lines, rule, drops, chat=chat)
        case "questions":
            return question_rows(lines, options.questions.most, rule, drops, chat=chat)
        case "pairs":
            labels = options.labels
            return pair_rows(lines, labels.pairs or "best-worst", labels.margin, rule, drops)


def _source_of(data: DataConfig, found: Sequence[Row], given: bool) -> dict[str, Any]:
    settings = data.model_dump(mode="json", exclude_defaults=True)
    return {
        **settings,
        **({"source": PYTHON} if given else {}),
        "rows": len(found),
        "fingerprint": fingerprint(found),
    }


def _how(options: MakeOptions, sampling: Sampling) -> dict[str, Any]:
    """What the manifest says about sampling, scores and choices."""
    told: dict[str, Any] = {
        "sampling": {
            "n": options.n,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_new_tokens": sampling.max_new_tokens,
        },
        "seed": options.seed,
        "selection": asdict(options.selection),
    }
    if options.kind == "questions":
        told["questions"] = asdict(options.questions)
    labels = options.labels
    if labels.wanted:
        told["rewards"] = [
            reward.model_dump(mode="json", exclude_defaults=True) for reward in labels.rewards
        ]
    if labels.judge is not None:
        told["judge"] = {
            "server": labels.judge.url,
            "model": labels.judge.model,
            "mode": labels.mode,
            "template": labels.template,
        }
    if options.kind == "pairs":
        told["pairs"] = {"rule": labels.pairs or "best-worst", "margin": labels.margin}
    return told


def _write(out: Path, rows: list[TrainingRow], manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest first: a file without one is taken for somebody else's."""
    ready = out.with_name(f".{out.name}.new")
    if out.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), ready)
    else:
        write_whole(ready, rows)
    digest = hashlib.sha256(ready.read_bytes()).hexdigest()
    manifest = {**manifest, "sha256": digest}
    text = json.dumps(manifest, indent=2, ensure_ascii=False, default=str) + "\n"
    manifest_path(out).write_text(text, encoding="utf-8")
    ready.replace(out)
    return manifest
