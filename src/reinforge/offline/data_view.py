"""What a run would make of data, for people to look at: `reinforge data show`.

Rows are read, recognised, rendered and tokenised as a run does it; nothing is refused that can be
told instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

from reinforge.build.algorithm import algorithm_of
from reinforge.build.units import units_of
from reinforge.config.algorithm import AlgorithmConfig
from reinforge.config.data import DataConfig
from reinforge.config.model import ModelConfig
from reinforge.core.errors import InputError
from reinforge.core.row import Row
from reinforge.core.sample import Sample
from reinforge.data import units as kinds
from reinforge.data.chat import UNUSUAL, Renderer
from reinforge.data.formats import FORMATS
from reinforge.data.formats import table as serving
from reinforge.data.readers import GENERATED, kind_of, read
from reinforge.data.source_report import SourceReport
from reinforge.data.sources import MIXTURE, load_rows
from reinforge.data.units import Unit, Units
from reinforge.models.load import context_length, load_tokenizer

COLUMN_ROWS = 200  # of the source, in which columns are looked for
NEW_TOKENS = 256  # that an answer is given room for, where nothing else is said
RL = "a prompt, which the model answers"
TRAINS = {
    serving.PAIRS: ("pairs of answers, as dpo compares them", kinds.pairs),
    serving.JUDGED: ("judged answers, as kto trains them", kinds.judged),
    serving.STEPS: ("steps with a verdict each", kinds.steps),
    serving.GRADED: ("answers with a grade for each attribute, as regression reads", kinds.texts),
    serving.SFT: ("answers, as sft trains them", kinds.texts),
    serving.TEXT: ("whole texts, as continued pre-training has them", kinds.texts),
    serving.RL: (RL, None),
}


@dataclass(frozen=True)
class SourceColumn:
    """A column of the source, over its first rows."""

    name: str
    kind: str
    share: float  # of rows in which it is there and not empty
    example: str


@dataclass(frozen=True)
class MarkedText:
    """Neighbouring tokens as text: all of them trained, or none."""

    text: str
    trained: bool


@dataclass(frozen=True)
class ShownText:
    """One text that a row becomes."""

    title: str  # chosen, rejected, or nothing
    pieces: list[MarkedText]
    tokens: int
    trained: int


@dataclass(frozen=True)
class ShownRow:
    """A row of the data, and the texts that it becomes."""

    where: str
    texts: list[ShownText]
    answer: str | None  # what a reward compares with, where the model answers


@dataclass
class DataView:
    """Everything that `reinforge data show` prints. `view_data` makes it."""

    source: str
    read_as: list[str] = field(default_factory=list)  # how it was recognised, what was left out
    serves: str = ""
    trains: str = ""  # what a row becomes here
    rendered: str = ""  # by what
    rows: int = 0
    whole: bool = True  # all rows of the source were looked at
    columns: list[SourceColumn] = field(default_factory=list)
    shown: list[ShownRow] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # tokens of every text
    trained: int = 0  # tokens, of all
    limit: int | None = None  # tokens that a text may have
    long: list[tuple[str, int]] = field(default_factory=list)  # places of those with more
    policy: str = ""  # data.length
    bad: list[tuple[str, str]] = field(default_factory=list)  # places of rows that cannot be used
    fixes: list[str] = field(default_factory=list)  # what to do about them, each once
    dropped: bool = False  # such rows are dropped: data.bad_rows
    usable: int = 0  # rows that can be rendered; without a model, that can be read
    unusual: dict[str, int] = field(default_factory=dict)  # what else there is to know: rows


def view_data(
    cfg: DataConfig,
    model: ModelConfig | None,
    *,
    rows: int,
    most: int | None,
    algorithm: AlgorithmConfig | None = None,
    new_tokens: int = NEW_TOKENS,
) -> DataView:
    """`rows` are shown, and the first `most` looked at; None: all. Without a `model` there are no
    tokens. `algorithm`: what is to be trained; default: what the format is for.
    """
    view = DataView(cfg.source, policy=cfg.length, dropped=cfg.bad_rows == "drop")
    reports: list[SourceReport] = []
    asked = cfg.limit if most is None else min(most + 1, cfg.limit or most + 1)
    found = load_rows(cfg.model_copy(update={"bad_rows": "drop", "limit": asked}), reports)
    view.whole = most is None or len(found) <= most
    found = found[:most]
    view.rows = len(found)
    view.usable = len(found)
    for report in reports:
        view.read_as += report.lines()[: None if not report.bad.errors else -1]
        for error in report.bad.errors:
            _add_bad(view, error.where or "", error)
    view.columns = _columns(cfg)
    serves = _serves(reports)
    view.serves = ", ".join(serves)
    make = _units(view, serves, found, algorithm)
    if model is None:
        view.shown = [_unrendered(row, make) for row in found[:rows]]
        return view
    whole_text = cfg.blocks or (algorithm is None and serves[:1] == [serving.TEXT])
    data = cfg.model_copy(update={"loss_on": "all"}) if whole_text else cfg
    _render(view, Renderer(load_tokenizer(model), data), found, make, rows)
    view.limit = cfg.max_length or context_length(model) - (new_tokens if make is None else 0)
    view.long = [(where, n) for where, n in view.long if n > view.limit and not cfg.blocks]
    if cfg.blocks:
        joined = sum(view.lengths)
        count = -(-(joined - 1) // max(1, view.limit - 1))
        view.trains = f"whole texts, which become {count:,} blocks of {view.limit:,} tokens"
    return view


def _serves(reports: Sequence[SourceReport]) -> list[str]:
    """What the most frequent format is for."""
    counts = [pair for report in reports for pair in report.formats.most_common(1)]
    read_as = max(counts, key=lambda pair: pair[1], default=(None, 0))[0]
    return [] if read_as is None else list(FORMATS[read_as.format].serves)


def _units(
    view: DataView, serves: Sequence[str], rows: Sequence[Row], algorithm: AlgorithmConfig | None
) -> Units | None:
    """What a row becomes; None: a prompt."""
    if algorithm is not None:
        view.trains = f"rows of {algorithm.name}"
        if algorithm.rl:
            return None
        return units_of(algorithm_of(algorithm, NEW_TOKENS))
    first = serves[0] if serves else serving.SFT
    if first == serving.SFT and not any(map(_answered, rows)):
        first = serving.RL
    view.trains, make = TRAINS[first]
    return make


def _answered(row: Row) -> bool:
    """Whether there is something that SFT trains."""
    talk = row.columns.get("messages") or []
    return row.columns.get("completion") is not None or any(
        turn.get("role") == "assistant" for turn in talk
    )


# columns


def _columns(cfg: DataConfig) -> list[SourceColumn]:
    """Of the first rows as they are in the source."""
    if cfg.source == MIXTURE or kind_of(cfg.source) in GENERATED:
        return []
    records = [
        record
        for _, record in islice(read(cfg.source, split=cfg.split, options=cfg.options), COLUMN_ROWS)
    ]
    names = dict.fromkeys(name for record in records for name in record)
    return [_column(name, [record.get(name) for record in records]) for name in names]


def _column(name: str, values: Sequence[Any]) -> SourceColumn:
    there = [value for value in values if value not in (None, "", [])]
    kinds_found = list(dict.fromkeys(map(_kind, there)))
    example = _example(there[0]) if there else ""
    return SourceColumn(
        name, " or ".join(kinds_found) or "empty", len(there) / len(values), example
    )


def _example(value: Any) -> str:
    """A value as it may be read in one line: of messages the first, of objects their JSON."""
    if _kind(value) == "messages":
        first = value[0]
        said = first.get("content", first.get("value"))
        more = f" (and {len(value) - 1} more)" if len(value) > 1 else ""
        return f"{first.get('role', first.get('from'))}: {said}{more}"
    if isinstance(value, Mapping | list):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


def _kind(value: Any) -> str:
    if isinstance(value, str):
        return "text"
    if isinstance(value, bool):
        return "true/false"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, Mapping):
        return "object"
    if isinstance(value, list):
        turns = value and all(isinstance(v, Mapping) and {"role", "from"} & v.keys() for v in value)
        return "messages" if turns else "list"
    return type(value).__name__


# texts


def _render(
    view: DataView, renderer: Renderer, rows: Sequence[Row], make: Units | None, shown: int
) -> None:
    """Fills in the texts, their lengths and the rows that cannot be rendered."""
    view.rendered = (
        "the chat template of the model"
        if renderer.chat
        else "plain text: there is no chat template"
    )
    for row in rows:
        try:
            units = _units_of_row(renderer, row, make)
        except InputError as error:
            _add_bad(view, row.place or row.id, error)
            view.usable -= 1
            continue
        samples = [sample for unit in units for sample in unit]
        view.lengths += [len(sample.tokens) for sample in samples]
        view.trained += sum(int(sample.trained.sum()) for sample in samples)
        longest = max(len(sample.tokens) for sample in samples)
        view.long.append((row.place or row.id, longest))
        if len(view.shown) < shown:
            view.shown.append(_shown(row, samples, renderer, make))
    view.unusual = {UNUSUAL[name]: count for name, count in renderer.counts.items() if count}


def _add_bad(view: DataView, where: str, error: InputError) -> None:
    view.bad.append((where, error.what))
    if error.fix and error.fix not in view.fixes:
        view.fixes.append(error.fix)


def _units_of_row(renderer: Renderer, row: Row, make: Units | None) -> list[Unit]:
    if make is not None:
        return make(renderer, row)
    ids = renderer.prompt(row)
    return [[Sample.from_tokens(row.id, ids, [False] * len(ids))]]


def _shown(row: Row, samples: Sequence[Sample], renderer: Renderer, make: Units | None) -> ShownRow:
    titles = [sample.uid.removeprefix(row.id).strip("/") for sample in samples]
    decode = renderer.tokenizer.decode
    texts = [
        ShownText(title, _pieces(sample, decode), len(sample.tokens), int(sample.trained.sum()))
        for title, sample in zip(titles, samples, strict=True)
    ]
    return ShownRow(row.place or row.id, texts, _answer(row) if make is None else None)


def _pieces(sample: Sample, decode: Callable[..., Any]) -> list[MarkedText]:
    """The text of a sample, cut where training begins and ends."""
    ids = sample.tokens.tolist()
    trained = sample.trained.tolist()
    cuts = [0, *(i for i in range(1, len(ids)) if trained[i] != trained[i - 1]), len(ids)]
    return [
        MarkedText(str(decode(ids[a:b], clean_up_tokenization_spaces=False)), trained[a])
        for a, b in pairwise(cuts)
    ]


def _answer(row: Row) -> str | None:
    value = row.columns.get("answer")
    return None if value is None else str(value)


# without a tokenizer


def _unrendered(row: Row, make: Units | None) -> ShownRow:
    """Messages one after the other; what would be trained follows from the columns alone."""
    if make is kinds.pairs:
        sides = [(side, row.columns.get(side)) for side in ("chosen", "rejected")]
    elif make is None or row.columns.get("completion") is not None:
        sides = [("", row.columns.get("completion") if make is not None else None)]
    else:
        talk = row.columns.get("messages")
        return ShownRow(row.place or row.id, [ShownText("", _said(talk or row.prompt), 0, 0)], None)
    texts = [
        ShownText(title, [*_said(row.prompt, asks=True), *_said(value)], 0, 0)
        for title, value in sides
    ]
    return ShownRow(row.place or row.id, texts, _answer(row) if make is None else None)


def _said(value: Any, *, asks: bool = False) -> list[MarkedText]:
    if value is None:
        return []
    if isinstance(value, str):
        return [MarkedText(f"{value}\n", not asks)]
    return [
        piece
        for turn in value
        for piece in (
            MarkedText(f"{turn.get('role')}: ", False),
            MarkedText(
                f"{turn.get('content') or turn.get('tool_calls')}\n",
                turn.get("role") == "assistant" and not asks and turn.get("weight", 1) != 0,
            ),
        )
    ]
