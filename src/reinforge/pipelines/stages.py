"""What the stages of a pipeline do, one function per kind.

Each writes into the stage's directory and says what came out.

Whatever is cut is done again and comes out the same: training from its checkpoint, generation from
its journal, the rest from its start.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reinforge.build.caller_objects import CallerObjects
from reinforge.build.evaluation import build_heldout
from reinforge.build.inputs import read_inputs
from reinforge.build.local import LocalFactories
from reinforge.build.run import train_config
from reinforge.checkpoint import files, store
from reinforge.checkpoint.crash_points import crash_point
from reinforge.config.pipeline import Stage
from reinforge.config.schema import Config
from reinforge.core.aio import run_sync
from reinforge.core.errors import InputError
from reinforge.core.hub_trouble import hub_token
from reinforge.core.row import prompt_text
from reinforge.core.sample import Group
from reinforge.data.sources import fingerprint
from reinforge.models.constraint_library import check as check_constraint
from reinforge.offline.export import PUSH, export, upload
from reinforge.offline.generate import generate_file, pairs_path
from reinforge.offline.journal import LABELS, REQUEST, write_whole
from reinforge.offline.labels import LabelOptions
from reinforge.pipelines.artefact import (
    ADAPTER,
    DATA,
    EVALUATION,
    MODEL,
    hash_file,
    hash_of,
    split_metrics,
    trains_scores,
    weights_of,
)
from reinforge.watch.default_view import default_view
from reinforge.watch.runs import read_lines

# nothing can be learned from a row in which one of them is empty
TEXTS = ("completion", "chosen", "rejected")


@dataclass
class StageOutput:
    """What one stage gave, before it is written down as an `Artefact`."""

    what: str
    paths: dict[str, str]
    id: str  # a hash of what came out
    hashes: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    machine: dict[str, float] = field(default_factory=dict)  # metrics of the machine and the hour
    steps: int = 0


def train_stage(stage: Stage, config: Config, lineage: Sequence[str]) -> StageOutput:
    """Trains to the end, then exports the model; of an adapter also the adapter."""
    result = train_config(config)
    checkpoint = stage.export.checkpoint
    scores = trains_scores(stage)
    whole(
        stage.dir / MODEL,
        lambda out: export(stage.dir, out, checkpoint=checkpoint, merge=True, lineage=lineage),
    )
    paths = {"reward model" if scores else "model": MODEL}
    if config.adapter is not None and not scores:
        whole(
            stage.dir / ADAPTER,
            lambda out: export(stage.dir, out, checkpoint=checkpoint, lineage=lineage),
        )
        paths["adapter"] = ADAPTER
    newest = store.latest(stage.dir)
    assert newest is not None, "a run that ended has a checkpoint"
    hashes = {
        "data": files.read_state(newest)["extra"]["cursor"]["fingerprint"],
        **weights_of(stage.dir / MODEL),
    }
    metrics, machine = split_metrics(result.metrics)
    what = "reward model" if scores else "model"
    return StageOutput(
        what,
        paths,
        hash_of([what, hashes["weights"], hashes["tokenizer"]]),
        hashes,
        metrics,
        machine,
        result.steps,
    )


def eval_stage(stage: Stage, config: Config) -> StageOutput:
    """Scores the model on the held-out rows; evaluation.json has the result, samples.jsonl every
    completion.
    """
    view = default_view()
    factories = LocalFactories()
    inputs = read_inputs(config, CallerObjects(), view, factories.make_rewards)
    groups: list[Group] = []
    heldout = build_heldout(inputs, factories, view, on_groups=groups.extend)
    if heldout is None:
        raise InputError(
            "there is nothing to evaluate: no held-out rows, or no reward to score them.",
            where=f"{stage.where}, data.eval",
            fix="Set data.eval.size or data.eval.source, and rewards.",
        )
    found = run_sync(heldout())
    metrics = {k: v for k, v in found.items() if math.isfinite(v)}  # NaN is not JSON
    write_whole(
        stage.dir / "samples.jsonl",
        [
            {
                "row": group.row.id,
                "prompt": prompt_text(group.row.prompt),
                "completion": text,
                "reward": sample.reward,
                "stop": str(sample.stop),
            }
            for group in groups
            for sample, text in zip(group.samples, group.texts, strict=True)
        ],
    )
    (stage.dir / EVALUATION).write_text(json.dumps(metrics, indent=1))
    hashes = {"data": fingerprint(inputs.eval_rows)}
    return StageOutput(
        "evaluation", {"evaluation": EVALUATION}, hash_of(["evaluation", metrics]), hashes, metrics
    )


def generate_stage(stage: Stage, config: Config) -> StageOutput:
    """Completions of every row of `data`, labelled by the rewards where there are some, as rows
    that a later stage can read.
    """
    how = stage.generate
    raw = stage.dir / "generated.jsonl"
    if (how.pairs or how.keep == "best") and not config.rewards:
        raise InputError(
            "choosing between completions needs a reward.",
            where=f"{stage.where}, generate",
            fix="Add a `rewards` section.",
        )
    constraint = None
    if how.structured is not None:
        where = f"{stage.where}, generate.structured"
        constraint = how.structured.constraint(where)
        check_constraint(constraint, how.structured.key(where))
    labelling = LabelOptions(rewards=tuple(config.rewards), pairs=how.pairs, margin=how.margin)
    work = generate_file(
        config.model.path,
        None,
        raw,
        n=how.n,
        temperature=how.temperature,
        top_p=how.top_p,
        max_new_tokens=how.max_new_tokens,
        seed=config.run.seed,
        adapter=config.adapter.path if config.adapter else None,
        config=config,
        labelling=labelling,
        constraint=constraint,
    )
    rows = run_sync(work)
    made = [
        line
        for line in read_lines(pairs_path(raw) if how.pairs else raw)
        if all(line.get(name, "-").strip() for name in TEXTS)
    ]
    if how.keep == "best" and not how.pairs:
        made = _best(made)
    if not made:
        raise InputError(
            f"nothing was kept of {rows} completions.",
            where=f"{stage.where}, generate",
            fix="Generate more (n), or choose less strictly.",
        )
    seen: dict[str, int] = {}
    for line in made:
        seen[line["id"]] = seen.get(line["id"], -1) + 1
        # a prompt's completions are rows of their own
        line["id"] = f"{line['id']}-{seen[line['id']]}"
        for name in (REQUEST, LABELS):
            line.pop(name, None)
    write_whole(stage.dir / DATA, made)
    rewards = [line["reward"] for line in read_lines(raw) if line.get("reward") is not None]
    metrics = {
        "rows": float(len(made)),
        **({"reward/mean": sum(rewards) / len(rewards)} if rewards else {}),
    }
    data = hash_file(stage.dir / DATA)
    return StageOutput("data", {"data": DATA}, hash_of(["data", data]), {"data": data}, metrics)


def _best(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each prompt the first completion with its highest reward, if that is above 0."""
    best: dict[str, dict[str, Any]] = {}
    for line in lines:
        if (line.get("reward") or 0.0) > max(0.0, best.get(line["id"], {}).get("reward", 0.0)):
            best[line["id"]] = line
    return list(best.values())


def export_stage(stage: Stage, source: Stage, lineage: Sequence[str], again: bool) -> StageOutput:
    """Exports another stage's run once more: elsewhere, unmerged, or onto the hub.

    `again`: what is there is ours, of a run that was cut.
    """
    how = stage.export
    scores = trains_scores(source)
    token = hub_token(PUSH) if how.push else None
    out = Path(how.out) if how.out else stage.dir / MODEL
    if out.exists() and not again and (out.is_file() or any(out.iterdir())):
        raise InputError(
            f"{out} is not empty.",
            where=f"{stage.where}, export.out",
            fix="Choose another directory, or empty it first.",
        )
    checkpoint = how.checkpoint if how.checkpoint != "latest" else source.export.checkpoint
    whole(
        out,
        lambda part: export(
            source.dir, part, checkpoint=checkpoint, merge=how.merge, lineage=lineage
        ),
    )
    if how.push is not None and token is not None:
        upload(out, how.push, token)
    adapter = bool(source.settings.get("adapter")) and not how.merge and not scores
    what = "reward model" if scores else "adapter" if adapter else "model"
    hashes = weights_of(out)
    return StageOutput(
        what,
        {what: how.out or MODEL},
        hash_of([what, hashes["weights"], hashes["tokenizer"]]),
        hashes,
    )


def whole(folder: Path, write: Callable[[Path], Any]) -> None:
    """A directory that appears complete. What an earlier attempt left of it is replaced."""
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    write(part)
    crash_point("stage:exported")
    if folder.exists():
        shutil.rmtree(folder)
    os.rename(part, folder)
    files.fsync_path(folder.parent)
