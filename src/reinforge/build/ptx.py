"""The section `ptx` becomes blocks of text and what adds them to every optimizer step."""

from __future__ import annotations

from reinforge.algorithms.losses.supervised import PretrainingLoss
from reinforge.build.inputs import RunInputs
from reinforge.build.unit_rows import UnitRows, make_blocks
from reinforge.core.backend import Backend
from reinforge.data.chat import Renderer
from reinforge.data.cursor import Cursor
from reinforge.data.source_report import SourceReport, lines_of
from reinforge.data.sources import fingerprint, load_rows
from reinforge.loops.ptx import PretrainingMix
from reinforge.loops.view import ViewLike


def read_ptx(inputs: RunInputs, view: ViewLike) -> UnitRows | None:
    """The blocks of a run's pre-training text, read before weights are; None where it has none."""
    cfg = inputs.cfg.ptx
    if cfg is None:
        return None
    view.doing(f"reading pre-training text ({cfg.source})")
    data = cfg.data(inputs.context)
    reports: list[SourceReport] = []
    rows = load_rows(data, reports)
    for line in lines_of(reports):
        view.message(f"ptx {line}")
    renderer = Renderer(inputs.tokenizer, data)
    return make_blocks(data, renderer, inputs.context, rows, view, name="ptx")


def make_ptx(inputs: RunInputs, text: UnitRows | None, backend: Backend) -> PretrainingMix | None:
    cfg = inputs.cfg.ptx
    if cfg is None or text is None:
        return None
    mark = fingerprint(text.rows)
    return PretrainingMix(
        backend=backend,
        units=text.units,
        cursor=Cursor(len(text.units), inputs.cfg.run.seed, True, fingerprint=mark),
        blocks=cfg.blocks,
        loss=PretrainingLoss(cfg.coefficient),
    )
