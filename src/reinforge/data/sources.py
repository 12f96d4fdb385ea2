"""From records to `Row`s: columns mapped and filtered, prompts built and checked, ids made,
evaluation rows split off.

Imports neither torch nor transformers, so that `plan` can complain about data quickly.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import string
import unicodedata
import warnings
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reinforge.core.errors import InputError
from reinforge.core.row import Row
from reinforge.core.seeds import seed_of
from reinforge.data.disk_rows import DiskRows, select
from reinforge.data.formats import nearest, read_row
from reinforge.data.formats.instructions import check_nothing_lost
from reinforge.data.formats.recognise import AUTO
from reinforge.data.objects import rows_of
from reinforge.data.readers import GENERATED, Record, did_you_mean, kind_of, read, size_of
from reinforge.data.source_report import SourceReport, lines_of
from reinforge.data.steering import PLACE, steered, written

if TYPE_CHECKING:
    from reinforge.config.data import AttributesConfig, DataConfig, EvalDataConfig
ROLES = ("system", "developer", "user", "assistant", "tool")
PROMPTS = ("prompt", "question", "messages", "text")  # where a prompt is looked for, in this order
# data.source where there are several; also the column that says which one a row is of
MIXTURE = "mixture"
# a column of what `reinforge generate` writes: rows with the same are answers to one prompt, and
# have its id
REQUEST = "_request"
PYTHON = "python"  # data.source of rows that came as Python objects
DECIMALS = re.compile(r"\.\d+f")  # what may stand behind a column's name in a template
LARGE = 1 << 30  # bytes of files whose rows are kept on disk
# generated problems looked at per evaluation row that is wanted, besides one per training row
TRIES = 20


@dataclass(frozen=True, slots=True)
class RowRules:
    """What the section `data` says about single rows. Made from it, or from what a Python caller
    gives; `_rows` follows it.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    where: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None
    template: str | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    format: str = AUTO
    attributes: AttributesConfig | None = None

    @classmethod
    def of(cls, cfg: DataConfig) -> RowRules:
        return cls(
            cfg.columns,
            cfg.where,
            cfg.system,
            cfg.template,
            cfg.fixed,
            cfg.format,
            cfg.attributes,
        )


def load_rows(cfg: DataConfig, reports: list[SourceReport] | None = None) -> Sequence[Row]:
    """All rows of `data.source`, before any evaluation rows are split off: a list, or `DiskRows`
    where they are large.

    `reports` gets what is to be told about each source; without it, rows that are dropped are
    warned of.
    """
    if cfg.source == MIXTURE:
        mixed = _kept(islice(_mixed(cfg, reports), cfg.limit), cfg)
        return _not_empty(mixed, "data.mixture", cfg.where)
    records = read(cfg.source, split=cfg.split, options=cfg.options)
    report = SourceReport(
        cfg.source, drop=cfg.bad_rows == "drop", told=kind_of(cfg.source) not in GENERATED
    )
    rows = _rows(islice(records, size_of(cfg.source, cfg.options)), RowRules.of(cfg), report)
    found = _kept(islice(rows, cfg.limit), cfg)
    _settle(report, reports)
    return _not_empty(found, f"data.source {cfg.source}", cfg.where)


def _kept(rows: Iterable[Row], cfg: DataConfig) -> Sequence[Row]:
    """In memory or on disk: `data.on_disk`."""
    sources = [cfg.source, *(item.source for item in cfg.mixture)]
    size = sum(Path(source).stat().st_size for source in sources if Path(source).is_file())
    large = cfg.on_disk == "always" or (cfg.on_disk == "auto" and size >= LARGE)
    return DiskRows(rows) if large else list(rows)


def _mixed(cfg: DataConfig, reports: list[SourceReport] | None) -> Iterator[Row]:
    """The rows of every source of a mixture, one after the other; their column `mixture` says which
    source they are of.
    """
    for item in cfg.mixture:
        name = item.name or item.source
        own = {
            key: value
            for key, value in item.model_dump(exclude={"weight", "name"}).items()
            if value is not None
        }
        one = cfg.model_copy(update={"limit": None, **own, "mixture": []})
        for row in load_rows(one, reports):
            yield Row(f"{name}:{row.id}", row.prompt, {**row.columns, MIXTURE: name}, row.place)


def _settle(report: SourceReport, reports: list[SourceReport] | None) -> None:
    """Refuses a source with bad rows, or tells of those that are dropped."""
    report.bad.refuse()
    if reports is not None:
        reports.append(report)
    elif report.bad.errors:
        warnings.warn("\n".join(lines_of([report])), stacklevel=3)


def rows_from(
    items: Iterable[Any],
    *,
    columns: Mapping[str, str] | None = None,
    where: Mapping[str, Any] | None = None,
    system: str | None = None,
    template: str | None = None,
    fixed: Mapping[str, Any] | None = None,
    format: str = AUTO,
    attributes: AttributesConfig | None = None,
    limit: int | None = None,
    drop: bool = False,
    name: str = "rows",
    reports: list[SourceReport] | None = None,
) -> Sequence[Row]:
    """Rows from what a Python caller has: dicts, texts that are prompts, or what `rows_of` makes
    dicts of. `drop`: rows that cannot be used are left out, and told as in `load_rows`.
    """

    def records() -> Iterator[Record]:
        for i, item in enumerate(rows_of(items, name)):
            record = {"prompt": item} if isinstance(item, str) else item
            if not isinstance(record, Mapping):
                raise InputError(
                    f"is {type(item).__name__}, not a dict or a string",
                    where=f"{name} row {i}",
                    fix='A row is a dict such as {"prompt": "...", "answer": "..."}.',
                )
            yield f"{name} row {i}", dict(record)

    rules = RowRules(columns or {}, where or {}, system, template, fixed or {}, format, attributes)
    report = SourceReport(name, drop=drop)
    found = list(islice(_rows(records(), rules, report), limit))
    _settle(report, reports)
    return _not_empty(found, name, where or {})


def fingerprint(rows: Sequence[Row]) -> str:
    """Of ids and prompts in their order: what a checkpoint compares to know that the data are still
    the same.
    """
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.update(f"{row.id}\x1f{prompt_text(row)}\x1e".encode())
    return digest.hexdigest()


def _not_empty(rows: Sequence[Row], where: str, condition: Mapping[str, Any]) -> Sequence[Row]:
    if not rows and condition:
        raise InputError(
            f"no row is left after data.where {dict(condition)}",
            where=where,
            fix="Check the values: text and numbers differ.",
        )
    if not rows:
        raise InputError(
            "there are no rows.",
            where=where,
            fix="Give a source that has some, one JSON object to a line, in data.source.",
        )
    return rows


# one row


def _rows(records: Iterable[Record], rules: RowRules, report: SourceReport) -> Iterator[Row]:
    """Rows one by one; `report` is told how they were understood, and what is wrong with single
    ones.

    Their ids: the id or uid column, which must be unique; otherwise a hash of the contents, and the
    how-many-eth it is of equal rows.
    """
    seen: dict[str, str] = {}  # id -> where it was
    equal: dict[int, int] = {}  # contents -> how many so far
    moved = set(rules.columns.values()) - set(rules.columns)
    for place, raw in records:
        row = None
        with report.bad.looking_at(place):
            view = _mapped(raw, rules.columns, place)
            if not all(
                _equal(_column(view, name, place), value) for name, value in rules.where.items()
            ):
                report.filtered += 1
                continue
            templated = rules.template is not None
            if not templated:
                check_nothing_lost(raw, rules.columns, place)
            view, read_as = read_row(
                {**view, **rules.fixed}, place, format=rules.format, templated=templated
            )
            prompt, rest = _prompt(
                {k: v for k, v in view.items() if k not in moved}, view, rules, place
            )
            uid, rest = _identified(prompt, rest, seen, equal, place)
            row = Row(id=uid, prompt=prompt, columns=rest, place=place)
            report.formats[read_as] += 1
        if row is not None:
            yield row


def _mapped(raw: Mapping[str, Any], columns: Mapping[str, str], place: str) -> dict[str, Any]:
    """The record with our names for its columns beside its own."""
    return {**raw, **{ours: _column(raw, theirs, place) for ours, theirs in columns.items()}}


def _identified(
    prompt: str | list[dict[str, Any]],
    columns: dict[str, Any],
    seen: dict[str, str],
    equal: dict[int, int],
    place: str,
) -> tuple[str, dict[str, Any]]:
    """The id of a row, and its columns without it. `seen` and `equal` are told of it."""
    rest = dict(columns)
    key = next((name for name in ("id", "uid") if rest.get(name) is not None), None)
    if key is None:
        text = json.dumps([prompt, rest], sort_keys=True, default=str, ensure_ascii=False)
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        contents = int(digest, 16)
        number = equal.get(contents, 0)
        equal[contents] = number + 1
        return f"{digest}-{number}", rest
    uid = str(rest.pop(key))
    if uid in seen and rest.get(REQUEST) is not None:  # another answer to the same prompt
        uid = next(name for n in count(1) if (name := f"{uid}-{n}") not in seen)
    if uid in seen:
        raise InputError(
            f"has the id {uid!r} that {seen[uid]} has too",
            where=place,
            fix=(
                f"Ids must be unique. If {key!r} is no row id, rename it, e.g. data.columns:"
                f" {{source_{key}: {key}}}."
            ),
        )
    seen[uid] = place
    return uid, rest


def _column(record: Mapping[str, Any], name: str, place: str) -> Any:
    if name not in record:
        raise InputError(
            f"has no column {name!r}, only {', '.join(map(str, record)) or 'none at all'}",
            where=place,
            fix=(
                f"{did_you_mean(name, map(str, record))} Columns are mapped by data.columns: {{our"
                " name: their name}."
            ),
        )
    return record[name]


def _equal(value: Any, wanted: Any) -> bool:
    """Equal, or equal as text: a CSV file knows no numbers."""
    return bool(value == wanted) or (
        isinstance(value, str) and not isinstance(wanted, bool) and value == str(wanted)
    )


def _prompt(
    record: dict[str, Any],
    view: Mapping[str, Any],
    rules: RowRules,
    place: str,
) -> tuple[Any, dict[str, Any]]:
    """The prompt, and the columns that are left."""
    template = rules.template
    system = rules.system
    line = None if rules.attributes is None else written(rules.attributes, view, place)

    def dressed(prompt: str | list[dict[str, Any]]) -> Any:
        whole = _with_system(prompt, system, place)
        if rules.attributes is None or line is None or template is not None:
            return whole
        return steered(whole, line, rules.attributes.turn, place)

    if "messages" in record and record["messages"] is not None:
        record["messages"] = dressed(check_messages(record["messages"], place, "messages"))
    if template is not None:
        record.pop("prompt", None)
        return dressed(_filled(template, view, line, place)), record
    name = next((name for name in PROMPTS if name in record), None)
    if name is None:
        near = "; ".join(nearest(record))
        raise InputError(
            f"has no prompt: its columns are {', '.join(map(str, record)) or 'none at all'}, which"
            f" is no format that is known{f'. The nearest: {near}' if near else ''}",
            where=place,
            fix=(
                "Name the columns with data.columns: {prompt: <their name>, completion: <their"
                " name>}, build a prompt with data.template, or see docs/data.md for the formats."
            ),
        )
    value = record[name] if name in ("messages", "text") else record.pop(name)
    if name == "messages" and value is not None:
        prompt = value[:-1] if value[-1]["role"] == "assistant" else value
        if not prompt:
            raise InputError(
                "the conversation is one assistant turn that answers nothing", where=place
            )
        return prompt, record
    if isinstance(value, list):
        value = check_messages(value, place, name)
    elif name == "text":
        key = "system" if system is not None else "attributes"
        if system is not None or line is not None:
            raise InputError(
                f"is one whole text, which has no place for data.{key}",
                where=place,
                fix=f"Remove data.{key}.",
            )
        return check_text(value, place, name), record
    else:
        value = check_text(value, place, name)
    return dressed(value), record


def _filled(template: str, view: Mapping[str, Any], line: str | None, place: str) -> str:
    """The template, with the attributes where it has a place for them."""
    if line is None:
        return fill(template, view, place)
    if f"{{{PLACE}}}" not in template:
        raise InputError(
            "has no place for data.attributes.",
            where="data.template",
            fix=f"Write {{{PLACE}}} where they are to stand, e.g. '{{{PLACE}}} {{prompt}}'.",
        )
    return fill(template, {**view, PLACE: line}, place)


def check_text(value: Any, place: str, name: str) -> str:
    if not isinstance(value, str) or not value:
        what = (
            "empty"
            if value == ""
            else "missing (null)"
            if value is None
            else f"{type(value).__name__}, not text"
        )
        other = ", or build the prompt with data.template" if name in PROMPTS else ""
        raise InputError(f"{name} is {what}", where=place, fix=f"Repair or remove the row{other}.")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(
            f"{name} has half of a surrogate pair, which is no text",
            where=place,
            fix="Repair or remove the row.",
        ) from None
    return value


def check_messages(value: Any, place: str, name: str) -> list[dict[str, Any]]:
    """A list of messages with known roles and text; content may be missing only beside
    tool calls.
    """
    if not isinstance(value, list) or not value or not all(isinstance(m, Mapping) for m in value):
        raise InputError(
            f"{name} is not a list of messages",
            where=place,
            fix='A message is {"role": "user", "content": "..."}.',
        )
    for i, message in enumerate(value):
        if message.get("role") not in ROLES:
            raise InputError(
                f"{name}[{i}] has the role {message.get('role')!r}",
                where=place,
                fix=f"Roles are: {', '.join(ROLES)}.",
            )
        content = message.get("content")
        if content != "" and not (content is None and message.get("tool_calls")):
            check_text(content, place, f"{name}[{i}].content")
    return [{k: v for k, v in m.items() if v is not None or k == "content"} for m in value]


def _with_system(
    prompt: str | list[dict[str, Any]], system: str | None, place: str
) -> str | list[dict[str, Any]]:
    if system is None:
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if messages[0]["role"] == "system":
        raise InputError(
            "begins with a system message of its own, and data.system is set too",
            where=place,
            fix="Remove data.system.",
        )
    return [{"role": "system", "content": system}, *messages]


def fill(template: str, record: Mapping[str, Any], place: str) -> str:
    """`template` with each {column} replaced by the row's value; {{ and }} are braces.

    Numbers may be rounded: {score:.1f}.

    >>> fill("Q: {q}\\nA:", {"q": "1+1"}, "row 0"), fill("<{s:.0f}>", {"s": 3.6}, "row 0")
    ('Q: 1+1\\nA:', '<4>')
    """
    text = ""
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise InputError(
            str(error), where="data.template", fix="Write {{ and }} for braces that are not places."
        ) from None
    for literal, name, spec, conversion in pieces:
        text += literal
        if name is None:
            continue
        if not name or conversion or (spec and not DECIMALS.fullmatch(spec)):
            raise InputError(
                f"{{{name}...}} is not a {{column}} place",
                where="data.template",
                fix="Write {{ and }} for braces that are not places.",
            )
        value = _column(record, name, place)
        if not isinstance(value, str | int | float):
            raise InputError(
                f"column {name!r} is {type(value).__name__}, and data.template needs text or a"
                " number",
                where=place,
            )
        if spec and (isinstance(value, str) or not math.isfinite(value)):
            raise InputError(
                f"column {name!r} is {value!r}, and {{{name}:{spec}}} in data.template needs a"
                " number",
                where=place,
            )
        text += format(value, spec) if spec else str(value)
    return check_text(text, place, "the filled data.template")


# evaluation rows


def prompt_text(row: Row) -> str:
    """The prompt as one normalised text: what decides whether two rows ask the same."""
    prompt = row.prompt
    text = (
        prompt
        if isinstance(prompt, str)
        else "\n".join(
            f"{m['role']}: {m.get('content')} {m.get('tool_calls') or ''}" for m in prompt
        )
    )
    return normalised(text)


def normalised(text: str) -> str:
    """A text as it is compared: white space and the spelling of accents do not count."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def overlap(train: Sequence[Row], evaluation: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Pairs (training row, evaluation row) that ask the same. Must be empty."""
    if not evaluation:
        return []
    wanted = {prompt_text(row) for row in evaluation}
    asked: dict[str, Row] = {}
    for row in train:
        text = prompt_text(row)
        if text in wanted:
            asked.setdefault(text, row)
    return [(asked[text], row) for row in evaluation if (text := prompt_text(row)) in asked]


def train_and_eval_rows(
    cfg: DataConfig, reports: list[SourceReport] | None = None
) -> tuple[Sequence[Row], Sequence[Row]]:
    """Training rows, and held-out rows as `data.eval` asks."""
    return hold_out(cfg, load_rows(cfg, reports), reports)


def hold_out(
    cfg: DataConfig, rows: Sequence[Row], reports: list[SourceReport] | None = None
) -> tuple[Sequence[Row], Sequence[Row]]:
    """`rows` without those that `data.eval` splits off, and the held-out rows.

    Generated and split-off evaluation rows never occur in training; for two separate files that is
    the user's promise, which `overlap` checks.
    """
    wanted = cfg.eval
    if wanted.source is None and wanted.size == 0:
        return rows, []
    generated = _kind(wanted.source or cfg.source) in GENERATED
    if generated:
        return rows, _generated(cfg, rows)
    if wanted.source is None and wanted.fixed:
        raise InputError(
            "rows that are split off have their prompts already.",
            where="data.eval.fixed",
            fix="Give data.eval.source.",
        )
    if wanted.source is None:
        return _split_off(rows, wanted.size, wanted.where)
    kind = kind_of(wanted.source)
    options = wanted.options or (cfg.options if kind == _kind(cfg.source) else {})
    rows_eval = load_rows(
        cfg.model_copy(
            update={
                "source": wanted.source,
                "options": options,
                "where": wanted.where,
                "limit": wanted.size or None,
                "fixed": {**cfg.fixed, **wanted.fixed},
            }
        ),
        reports,
    )
    if len(rows_eval) < wanted.size:
        raise InputError(
            f"asks for {wanted.size} rows, but {wanted.source} has {len(rows_eval)}",
            where="data.eval.size",
            fix="Ask for fewer, or 0 for all.",
        )
    return rows, rows_eval


def _kind(source: str) -> str:
    return source if source in (PYTHON, MIXTURE) else kind_of(source)


def _split_off(
    rows: Sequence[Row], size: int, where: Mapping[str, Any]
) -> tuple[Sequence[Row], list[Row]]:
    """Exactly `size` rows to evaluation, or an error that says how many there can be."""
    if size >= len(rows):
        raise InputError(
            f"cannot hold out {size} of {len(rows)} rows",
            where="data.eval.size",
            fix="Ask for fewer.",
        )
    held = held_out(rows, size, where)
    if len(held) < size:
        few = " and data.eval.where selects few" if where else ""
        raise InputError(
            f"cannot hold out exactly {size} rows: rows with the same prompt stay together{few}",
            where="data.eval.size",
            fix=f"Ask for {len(held)}, or give data.eval.source.",
        )
    inside = array("q", (i for i, row in enumerate(rows) if row.id in held))
    apart = set(inside)
    left = (i for i in range(len(rows)) if i not in apart)
    return select(rows, left), list(select(rows, inside))


def held_out(rows: Sequence[Row], most: int, where: Mapping[str, Any]) -> set[str]:
    """Ids of at most `most` rows: whole prompts in the order of their hashes, all rows of a prompt
    together.
    """
    keys = array("q", (seed_of("held out", prompt_text(row)) for row in rows))
    order = sorted(range(len(rows)), key=keys.__getitem__)
    held: set[str] = set()
    for _, places in groupby(order, key=keys.__getitem__):
        if len(held) == most:
            break
        group = [rows[i] for i in places]
        if len(held) + len(group) <= most and all(
            _equal(_column(row.columns, name, f"row {row.id}"), value)
            for row in group
            for name, value in where.items()
        ):
            held.update(row.id for row in group)
    return held


def _generated(cfg: DataConfig, train: Sequence[Row]) -> list[Row]:
    """Exactly as many fresh problems as asked for, none of which occurs in training or twice.

    From the training source, arithmetic takes the other split, and the others the seeds after those
    of training.
    """
    wanted = cfg.eval
    source = cfg.eval.source or cfg.source
    kind = kind_of(source)
    same = source == cfg.source
    options = (
        {**cfg.options, **wanted.options}
        if same or (not wanted.options and kind == _kind(cfg.source))
        else dict(wanted.options)
    )
    size = wanted.size or size_of(source, options) or 0
    if (
        same
        and kind == "arithmetic"
        and "split" not in wanted.options
        and options.get("split", "train") == "train"
    ):
        options["split"] = "eval"
    if same and kind in ("games", "reasoning_gym") and "seed" not in wanted.options:
        options["seed"] = options.get("seed", 0) + (size_of(source, cfg.options) or 0)
    if kind != "episodes":  # it says how many in its name, and further ones follow
        options["size"] = size
    where = {**cfg.where, **wanted.where} if wanted.source is None else wanted.where
    asked = {prompt_text(row) for row in train}
    kept: list[Row] = []
    records = islice(read(source, options=options), len(train) + size * TRIES)
    fixed = {**cfg.fixed, **wanted.fixed}
    report = SourceReport(source, told=False)
    for row in _rows(records, replace(RowRules.of(cfg), where=where, fixed=fixed), report):
        if len(kept) == size:
            break
        if (text := prompt_text(row)) not in asked:
            asked.add(text)
            kept.append(row)
    report.bad.refuse()
    if len(kept) < size:
        raise _too_few(wanted, source, len(kept), size)
    return kept


def _too_few(wanted: EvalDataConfig, source: str, found: int, size: int) -> InputError:
    """That a task has not as many fresh problems as an evaluation asks for. 0 is no number that
    somebody asked for: it stands for as many as the source makes.
    """
    if not wanted.size:
        return InputError(
            f"0 is no size for a generated task: it stands for the {size} problems that {source} is"
            f" to make (options.size), and only {found} can be found that training does not have",
            where="data.eval.size",
            fix=(
                f"Ask for at most {found}. For no evaluation leave out data.eval.source too."
                if found
                else "Make the task larger, or leave out data.eval.source for no evaluation."
            ),
        )
    return InputError(
        f"only {found} of {size} evaluation problems are not also training problems",
        where=f"data.eval ({source})",
        fix=(
            "The task has too few problems: make it larger (more terms, more digits), or train"
            " on fewer (data.options.size)."
        ),
    )
