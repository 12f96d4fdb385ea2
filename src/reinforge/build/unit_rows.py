"""Rows become units: what a supervised run trains on, all of them made before the first step."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from reinforge.build.inputs import NO_LIMIT, RunInputs, report_lengths
from reinforge.build.units import units_of
from reinforge.config.data import DataConfig
from reinforge.core.errors import InputError
from reinforge.core.sample import Row
from reinforge.data import units as kinds
from reinforge.data.bad_rows import SHOWN, BadRows
from reinforge.data.blocks import cut_into_blocks
from reinforge.data.chat import Renderer
from reinforge.data.disk_rows import DiskRows, select
from reinforge.data.domains import Domains
from reinforge.data.sources import MIXTURE
from reinforge.data.units import Unit
from reinforge.loops.view import ViewLike


@dataclass(frozen=True)
class UnitRows:
    """What rows became: the units that fit (a text, a pair, a judged answer), and for each the row
    of the data that it is of. Made for training and for held-out rows.
    """

    units: Sequence[Unit]
    rows: Sequence[Row]
    tokens: Sequence[int]  # of each unit
    longest: Sequence[int]  # tokens of the longest sample of each


def make_units(inputs: RunInputs, rows: Sequence[Row], view: ViewLike) -> UnitRows:
    """The units of all rows, after the length policy. Of rows on disk nothing but their lengths is
    kept: a unit is made again when it is trained.
    """
    if not rows:
        return UnitRows([], [], [], [])
    if inputs.cfg.data.blocks:
        return make_blocks(inputs.cfg.data, inputs.renderer, inputs.context, rows, view)
    view.doing(f"tokenising {len(rows)} rows")
    cfg = inputs.cfg.data
    domains = Domains.of(inputs.cfg.teacher)
    units = units_of(inputs.algorithm)

    def make(renderer: Renderer, row: Row) -> list[Unit]:
        made = units(renderer, row)
        return made if domains is None else [domains.mark(row, unit) for unit in made]

    limit = cfg.max_length or inputs.context
    on_disk = isinstance(rows, DiskRows)
    kept: list[Unit] = []
    row_of = array("q")  # the row of each unit
    part_of = array("h")  # and which of the row's units it is
    tokens = array("q")
    longest = array("q")
    lost = array("q")  # rows
    counts = {"rows": 0, "dropped": 0, "truncated": 0}
    bad = BadRows(drop=cfg.bad_rows == "drop")
    for i, row in enumerate(rows):
        made: list[Unit] = []
        with bad.looking_at(row.id):
            made = make(inputs.renderer, row)
        for part, unit in enumerate(made):
            fitting = kinds.fit(cfg, unit, limit)
            counts["rows"] += 1
            if fitting is None:
                counts["dropped"] += 1
                lost.append(i)
                continue
            counts["truncated"] += fitting is not unit
            lengths = [len(sample.tokens) for sample in fitting]
            row_of.append(i)
            part_of.append(part)
            tokens.append(sum(lengths))
            longest.append(max(lengths))
            if not on_disk:
                kept.append(fitting)
    bad.refuse()
    for line in bad.lines():
        view.message(f"data: {line}")
    if not row_of:
        raise InputError(
            f"all {counts['rows']} rows have more than {limit} tokens",
            where="data.max_length",
            fix="Raise it, or check the template.",
        )
    report_lengths(counts, limit, [rows[i] for i in lost[: SHOWN + 1]], view)

    def again(row: Row) -> list[Unit]:
        return [kinds.fit(cfg, unit, limit) or unit for unit in make(inputs.renderer, row)]

    return UnitRows(
        kinds.UnitsOnDemand(rows, row_of, part_of, again) if on_disk else kept,
        select(rows, row_of),
        tokens,
        longest,
    )


def make_blocks(
    cfg: DataConfig,
    renderer: Renderer,
    context: int,
    rows: Sequence[Row],
    view: ViewLike,
    *,
    name: str = "data",
) -> UnitRows:
    """The blocks of whole texts; of a mixture, those of every source by themselves."""
    view.doing(f"tokenising {len(rows)} texts")
    size = cfg.max_length or context
    if size < 2 or size == NO_LIMIT:
        raise InputError(
            f"a block cannot have {size} tokens.", where=f"{name}.max_length", fix="Set it to 1024."
        )
    bad = BadRows(drop=cfg.bad_rows == "drop")

    def documents() -> Iterator[tuple[str, list[int]]]:
        for row in rows:
            ids: list[int] = []
            with bad.looking_at(row.id):
                ids = renderer.document(row)
            yield row.columns.get(MIXTURE, ""), ids

    blocks = cut_into_blocks(documents(), size, on_disk=isinstance(rows, DiskRows))
    bad.refuse()
    for line in bad.lines():
        view.message(f"{name}: {line}")
    tokens = blocks.lengths
    view.message(
        f"{name}: {len(rows)} texts become {len(blocks)} blocks of at most {size} tokens,"
        f" {blocks.tokens} in all"
    )
    return UnitRows(blocks, blocks.rows(), tokens, tokens)
