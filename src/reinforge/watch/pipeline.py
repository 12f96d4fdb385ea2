"""Looking at pipelines: which stages there are, and one page about all of them.

Reads directories only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reinforge.core.errors import InputError
from reinforge.watch.report import escape
from reinforge.watch.runs import read_json

RECORD = "pipeline.json"
HEADLINES = ("eval/", "reward/mean", "train/loss", "train/grad_norm", "rows", "response/length")
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:75rem;margin:2rem auto;padding:0 1rem;
color:#1c2733;background:#fff}
h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2rem 0 .5rem}.soft{color:#66727f}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.35rem .7rem;border-bottom:1px solid #dfe4ea;vertical-align:top}
th{font-weight:600;color:#66727f}
td.number{font-variant-numeric:tabular-nums;text-align:right}code{font-size:.85em}.scroll{overflow-x:auto}
@media(prefers-color-scheme:dark){body{background:#11161c;color:#dce3ea}th,td{border-color:#2a333d}a{color:#8ab4f8}}"""


def stages_of(folder: Path) -> list[dict[str, Any]]:
    """name, kind, dir and from of every stage, in order."""
    found = read_json(folder / RECORD).get("stages")
    if not found:
        raise InputError(
            "this is not the directory of a pipeline (no pipeline.json).",
            where=str(folder),
            fix="Give a pipeline's run.dir.",
        )
    return found


def show_pipeline(folder: Path) -> list[dict[str, Any]]:
    """One line per stage: what it is, whether it is done, what it came from, its
    headline numbers.
    """
    lines = []
    for stage in stages_of(folder):
        made = read_json(folder / stage["dir"] / "artefact.json")
        state = (
            "finished"
            if made
            else "unfinished"
            if (folder / stage["dir"]).exists()
            else "not begun"
        )
        path = next(iter(made.get("paths", {}).values()), None)
        metrics = {
            key: value
            for key, value in made.get("metrics", {}).items()
            if key in ("eval/accuracy", "eval/loss", "reward/mean", "rows")
        }
        lines.append(
            {
                "stage": stage["name"],
                "kind": stage["kind"],
                "state": state,
                "from": ", ".join(dict.fromkeys(stage["from"].values())) or None,
                "made": made.get("what"),
                "path": str(folder / stage["dir"] / path) if path else None,
                "id": made.get("id", "")[:12] or None,
                **metrics,
            }
        )
    return lines


def write_pipeline_report(folder: Path) -> Path:
    """report.html of the whole pipeline: stages, lineage, metrics side by side, links to the
    stages' own reports.
    """
    stages = stages_of(folder)
    made = {stage["name"]: read_json(folder / stage["dir"] / "artefact.json") for stage in stages}
    page = "\n".join(
        [
            (
                "<!doctype html><html lang=en><head><meta charset=utf-8><meta name=viewport"
                " content='width=device-width'>"
            ),
            (
                "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src"
                " 'unsafe-inline'\">"
            ),
            f"<title>{escape(folder.resolve().name)}</title><style>{STYLE}</style></head><body>",
            (
                f"<h1>{escape(folder.resolve().name)}</h1><div"
                f" class=soft>{sum(map(bool, made.values()))} of {len(stages)} stages are"
                " finished</div>"
            ),
            (
                "<h2>Stages</h2><div class=scroll><table><thead>"
                "<tr><th>stage<th>kind<th>made<th>from<th>time<th>report</tr></thead><tbody>"
            ),
            *(_stage_row(folder, stage, made[stage["name"]]) for stage in stages),
            "</tbody></table></div>",
            (
                "<h2>Lineage</h2><div class=scroll><table><thead>"
                "<tr><th>stage<th>id<th>parents<th>data<th>weights<th>settings</tr></thead><tbody>"
            ),
            *(_lineage_row(stage["name"], made[stage["name"]]) for stage in stages),
            "</tbody></table></div>",
            "<h2>Metrics</h2><div class=scroll><table>",
            _metrics(made),
            "</table></div></body></html>",
        ]
    )
    target = folder / "report.html"
    part = folder / ".report.html.part"
    part.write_text(page, encoding="utf-8")
    os.replace(part, target)
    return target


def _stage_row(folder: Path, stage: Mapping[str, Any], made: Mapping[str, Any]) -> str:
    where = folder / stage["dir"]
    link = (
        f'<a href="{escape(stage["dir"])}/report.html">report</a>'
        if (where / "report.html").exists()
        else ""
    )
    clock = made.get("clock", {})
    spent = (
        f"{clock['seconds']:.0f} s, until"
        f" {time.strftime('%Y-%m-%d %H:%M', time.localtime(clock['finished']))}"
        if clock
        else ""
    )
    what = (
        f"{made['what']}: <code>{escape(', '.join(made['paths'].values()))}</code>"
        if made
        else "<span class=soft>not finished</span>"
    )
    sources = ", ".join(
        f"{escape(parent)} <span class=soft>as {escape(key)}</span>"
        for key, parent in stage["from"].items()
    )
    return (
        f"<tr><td>{escape(stage['name'])}<td>{escape(stage['kind'])}<td>{what}"
        f"<td>{sources}<td>{escape(spent)}<td>{link}</tr>"
    )


def _lineage_row(name: str, made: Mapping[str, Any]) -> str:
    if not made:
        return ""
    hashes = made.get("hashes", {})
    parents = ", ".join(
        f"{escape(parent)} <code>{escape(i[:12])}</code>"
        for parent, i in made.get("parents", {}).items()
    )
    cells = (
        made["id"],
        hashes.get("data", ""),
        hashes.get("weights", ""),
        hashes.get("config", ""),
    )
    own, data, weights, config = (f"<td><code>{escape(str(value)[:12])}</code>" for value in cells)
    return f"<tr><td>{escape(name)}{own}<td>{parents}{data}{weights}{config}</tr>"


def _metrics(made: Mapping[str, Mapping[str, Any]]) -> str:
    """A column per stage, a row per metric that any of them has."""
    values = {
        name: found.get("metrics", {}) for name, found in made.items() if found.get("metrics")
    }
    names = sorted(
        {key for metrics in values.values() for key in metrics if key.startswith(HEADLINES)}
    )
    head = "<thead><tr><th>" + "".join(f"<th>{escape(name)}" for name in values) + "</tr></thead>"
    rows = (
        f"<tr><td>{escape(key)}"
        + "".join(
            f"<td class=number>{metrics[key]:.4g}" if key in metrics else "<td>"
            for metrics in values.values()
        )
        + "</tr>"
        for key in names
    )
    return head + "<tbody>" + "".join(rows) + "</tbody>"
