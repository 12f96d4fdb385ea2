"""How `reinforge data show` looks at a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from reinforge.cli import show
from reinforge.cli.show import GAP, INDENT, wrapped
from reinforge.data.bad_rows import by_reason

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from reinforge.offline.data_view import DataView, ShownRow, ShownText

MARKS = ("⟦", "⟧")  # around what is trained; they stay where there is no colour
PLAIN_MARKS = ("[[", "]]")  # where the terminal has no such characters
EDGE = "│ "
PLAIN_EDGE = "| "
TRAINED = "bold green"
TROUBLE = "bold yellow"
BEGINNING = 700  # characters of a long text that are shown, and of its end
END = 400
SHOWN = 5  # rows named where some are too long
BINS = 8
BAR = 40  # columns of the longest bar


def print_data(view: DataView, *, full: bool) -> None:
    """All of it, from the format to what would be left out."""
    out = show.console()
    _print_facts(out, view)
    _print_columns(out, view)
    for number, row in enumerate(view.shown, 1):
        _print_row(out, number, row, full=full)
    if view.lengths:
        _print_lengths(out, view)
    _print_left_out(out, view)


def _heading(out: Console, text: str, *, style: str = "bold") -> None:
    from rich.text import Text

    out.print()
    out.print(Text(text, style=style), soft_wrap=True)


def _print_lines(out: Console, text: str, *, indent: int = INDENT) -> None:
    """Broken between words at a terminal."""
    from rich.text import Text

    room = out.width - indent if out.is_terminal else len(text) + 1
    for line in wrapped(text, room):
        out.print(Text(" " * indent + line), soft_wrap=True)


# facts and columns


def _print_facts(out: Console, view: DataView) -> None:
    from rich.text import Text

    first = "" if view.whole else "the first "
    trained = any(piece.trained for row in view.shown for t in row.texts for piece in t.pieces)
    read_as = [part for line in view.read_as for part in line.split("; ")]
    marked = f"; trained is what stands between {' and '.join(_marks(out))}" if trained else ""
    facts = [
        ("data", [view.source]),
        ("format", [line.removeprefix("recognised as ") for line in read_as]),
        ("serves", [view.serves]),
        ("shown", [f"{view.trains}{marked}"]),
        ("rendered", [view.rendered or "not at all: --model M says how, and counts tokens"]),
        ("rows", [f"{first}{view.rows:,}"]),
    ]
    width = max(len(name) for name, _ in facts) + GAP
    for name, lines in facts:
        room = out.width - width if out.is_terminal else 10**6
        parts = [part for line in lines if line for part in wrapped(line, room)]
        for i, part in enumerate(parts):
            label = Text("" if i else name, style="bold")
            label.pad_right(width - len(label))
            out.print(label.append(part, style="not bold"), soft_wrap=True)


def _print_columns(out: Console, view: DataView) -> None:
    from rich.text import Text

    if not view.columns:
        return
    _heading(out, "columns")
    names = max(len(column.name) for column in view.columns)
    sorts = max(len(column.kind) for column in view.columns)
    for column in view.columns:
        line = (
            f"{' ' * INDENT}{column.name:<{names}}{' ' * GAP}{column.kind:<{sorts}}{' ' * GAP}"
            f"{column.share:>4.0%}{' ' * GAP}"
        )
        example = " ".join(column.example.split())
        room = out.width - len(line)
        text = Text(line).append(example if len(example) <= room else f"{example[: room - 1]}…")
        out.print(text, soft_wrap=True)


# rows


def _print_row(out: Console, number: int, row: ShownRow, *, full: bool) -> None:
    _heading(out, f"row {number}: {row.where}")
    for i, text in enumerate(row.texts):
        title = f"{text.title}: " if text.title else ""
        trained = f", {text.trained:,} trained" if text.trained else ""
        size = f"{text.tokens:,} tokens{trained}" if text.tokens else ""
        if title or size:
            _print_lines(out, f"{title}{size}".removesuffix(": "))
        repeated = i > 0 and text.pieces[:1] == row.texts[0].pieces[:1] and len(text.pieces) > 1
        _print_text(out, text, begins=1 if repeated else 0, full=full)
    if row.answer is not None:
        _print_lines(out, f"answer: {row.answer}")


def _print_text(out: Console, text: ShownText, *, begins: int, full: bool) -> None:
    """The text with a line at its left; trained pieces in colour, and between marks."""
    from rich.text import Text

    plain = _is_plain(out)
    opening, closing = _marks(out)
    whole = Text("(the same prompt) " if begins else "")
    for piece in text.pieces[begins:]:
        if piece.trained:
            body = piece.text.rstrip("\n")
            rest = piece.text[len(body) :]
            whole.append(f"{opening}{_short(body, full)}{closing}{rest}", style=TRAINED)
        else:
            whole.append(_short(piece.text, full))
    edge = " " * INDENT + (PLAIN_EDGE if plain else EDGE)
    whole.rstrip()
    for line in whole.split("\n", allow_blank=True):
        for part in _fitted(line, out, len(edge)):
            out.print(Text().append(edge, style="dim").append_text(part), soft_wrap=True)


def _is_plain(out: Console) -> bool:
    """Whether the terminal knows only plain characters."""
    return (out.encoding or "").lower().replace("-", "") != "utf8"


def _marks(out: Console) -> tuple[str, str]:
    return PLAIN_MARKS if _is_plain(out) else MARKS


def _fitted(line: Text, out: Console, edge: int) -> Sequence[Text]:
    line.expand_tabs(4)
    if not out.is_terminal or line.cell_len <= out.width - edge:
        return [line]
    return list(line.wrap(out, out.width - edge, no_wrap=False))


def _short(text: str, full: bool) -> str:
    """
    >>> len(_short("a" * 5000, False)) < 1200, _short("ab", False)
    (True, 'ab')
    """
    left = len(text) - BEGINNING - END
    if full or left < END:
        return text
    return f"{text[:BEGINNING]}\n… {left:,} more characters …\n{text[-END:]}"


# lengths


def _print_lengths(out: Console, view: DataView) -> None:
    ordered = sorted(view.lengths)
    at = {
        name: ordered[round(q * (len(ordered) - 1))]
        for name, q in (("min", 0.0), ("median", 0.5), ("p95", 0.95), ("max", 1.0))
    }
    total = sum(ordered)
    _heading(out, "lengths in tokens")
    said = ", ".join(f"{name} {n:,}" for name, n in at.items())
    share = f", {view.trained / total:.0%} of them trained" if view.trained else ""
    _print_lines(out, f"{said}; {total:,} in all{share}")
    for line in histogram(ordered, out.width - INDENT if out.is_terminal else 80 - INDENT):
        out.print(" " * INDENT + line, soft_wrap=True)


def histogram(ordered: Sequence[int], width: int) -> Iterator[str]:
    """Bars of a sorted list: how many numbers are in each of a few equal ranges, the last of which
    takes all that are larger, so that a few giants do not hide the rest.

    >>> print(*histogram([1, 1, 2, 9, 9, 9, 9], 22), sep="\\n")
    1-2  ███████████  3
    3-4  0
    5-6  0
    7-8  0
    9-9  ██████████████  4
    """
    low = ordered[0]
    most = ordered[round(0.95 * (len(ordered) - 1))]
    step = max(1, -(-(most + 1 - low) // BINS))
    bins = -(-(most + 1 - low) // step)
    counts = [0] * bins
    for n in ordered:
        counts[min((n - low) // step, bins - 1)] += 1
    ends = [low + (i + 1) * step - 1 for i in range(bins - 1)] + [ordered[-1]]
    begins = [low + i * step for i in range(bins)]
    names = [
        f"{begin:,}" if step == 1 and begin == end else f"{begin:,}-{end:,}"
        for begin, end in zip(begins, ends, strict=True)
    ]
    room = max(map(len, names))
    numbers = max(len(f"{count:,}") for count in counts)
    longest = max(1, min(BAR, width - room - numbers - 2 * GAP))
    for name, count in zip(names, counts, strict=True):
        bar = "█" * -(-longest * count // max(counts))
        yield f"{name:>{room}}{' ' * GAP}{bar}{' ' * GAP if bar else ''}{count:,}"


# what would be left out


def _print_left_out(out: Console, view: DataView) -> None:
    found = False
    if view.bad:
        verb = "dropped (data.bad_rows: drop)" if view.dropped else "refused"
        _heading(out, f"{_rows(len(view.bad))} cannot be used: {verb}", style=TROUBLE)
        for line in by_reason(view.bad):
            _print_lines(out, line)
        for fix in view.fixes if view.fixes or view.dropped else ["Repair what is named."]:
            _print_lines(out, fix)
        if not view.dropped and view.usable:
            _print_lines(out, "Or leave such rows out: data.bad_rows=drop.")
        found = True
    if view.long:
        verb = {
            "drop": "dropped (data.length: drop)",
            "truncate": "cut (data.length: truncate)",
            "error": "refused (data.length: error)",
        }[view.policy]
        have = "has" if len(view.long) == 1 else "have"
        title = f"{_rows(len(view.long))} {have} more than {view.limit:,} tokens: {verb}"
        _heading(out, title, style=TROUBLE)
        for where, n in view.long[:SHOWN]:
            _print_lines(out, f"{where}: {n:,} tokens")
        _print_more(out, len(view.long))
        found = True
    if not found and view.lengths:
        limit = f"; a text may have {view.limit:,} tokens" if view.limit else ""
        _heading(out, f"nothing is dropped or cut{limit}")
    if view.unusual:
        _heading(out, "to know")
    for what, count in view.unusual.items():
        _print_lines(out, f"{_rows(count)}: {what}")


def _rows(count: int) -> str:
    """
    >>> _rows(1), _rows(2000)
    ('1 row', '2,000 rows')
    """
    return f"{count:,} row{'' if count == 1 else 's'}"


def _print_more(out: Console, count: int) -> None:
    if count > SHOWN:
        _print_lines(out, f"and {count - SHOWN:,} more")
