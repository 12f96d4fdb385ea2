"""What was found while the rows of a source were read: nothing is left out without a word."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from reinforge.data.bad_rows import BadRows
from reinforge.data.formats import ReadAs


class SourceReport:
    """How the rows of one source were understood, and which were left out. `load_rows` makes one
    for every source and appends it to the list that it is given; whoever starts a run, plans it or
    shows data tells its lines.
    """

    def __init__(self, source: str, *, drop: bool = False, told: bool = True):
        self.source = source
        self.told = told  # generated rows are ours: there is nothing to recognise
        self.formats: Counter[ReadAs | None] = Counter()
        self.filtered = 0  # by data.where
        self.bad = BadRows(drop=drop)

    def lines(self) -> list[str]:
        """Sentences for people; the first says how the rows were recognised."""
        found = self._formats() if self.told else []
        if self.filtered:
            found.append(f"data.where leaves out {self.filtered} of {self.bad.seen} rows")
        return [*found, *self.bad.lines()]

    def _formats(self) -> list[str]:
        names = {"" if read_as is None else read_as.format for read_as in self.formats}
        if len(names) == 1:
            widest = max(self.formats, key=lambda read_as: len(read_as.columns) if read_as else 0)
            return [f"recognised as {widest}"] if widest is not None else []
        return [
            f"{count} rows recognised as {read_as}"
            if read_as is not None
            else f"{count} rows have no format that is known"
            for read_as, count in self.formats.most_common()
        ]


def lines_of(reports: Iterable[SourceReport]) -> list[str]:
    """What all of them tell, each line with its source where there are several."""
    reports = list(reports)
    return [
        f"data: {line}" if len(reports) == 1 else f"data: {report.source}: {line}"
        for report in reports
        for line in report.lines()
    ]
