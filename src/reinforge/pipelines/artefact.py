"""What a finished stage leaves behind: artefact.json says what it is, where, made of what, and by
hashes that it is still that.

inputs    what the stage was made of: its settings, the ids of its parents' artefacts, hashes of the
          local files that it names
id        a hash of what came out. Two stages that made the same weights have one id, so their
          children need not be made again
clock     when, and how long; everything that two equal pipelines do not share
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from reinforge.algorithms.catalogue import spec_of
from reinforge.config.pipeline import FILL, Pipeline, Reference, Stage
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.core.redact import redact_settings
from reinforge.watch.runs import flatten, read_json

FORMAT = "reinforge-artefact-1"
FILE = "artefact.json"
STARTED = "stage.json"
MODEL = "model"
ADAPTER = "adapter"
DATA = "data.jsonl"
EVALUATION = "evaluation.json"
# larger files are known by their size, their first and their last bytes
WHOLE_BYTES = 64 << 20
EDGE_BYTES = 1 << 20
# leave what comes out as it is
HARMLESS = (
    "run.dir",
    "run.resume",
    "run.log",
    "run.hub",
    "run.checkpoint.every",
    "run.checkpoint.keep",
)
# metrics of the machine
CLOCKED = ("time/", "share/", "memory/", "tokens_per_second", "efficiency/", "time")


@dataclass(frozen=True)
class Artefact:
    """What a finished stage left: a model, data or an evaluation, with hashes of what it was made
    from. The pipeline writes it when a stage ends, and later stages and runs read it.
    """

    stage: str
    kind: str
    what: str  # model, reward model, data, evaluation
    # model, adapter, data, evaluation: where, relative to the stage's directory unless it was asked
    # for elsewhere
    paths: dict[str, str]
    id: str
    inputs: dict[str, Any]
    hashes: dict[str, Any] = field(default_factory=dict)  # config, data, weights, tokenizer
    parents: dict[str, str] = field(default_factory=dict)  # stage: id of its artefact
    metrics: dict[str, float] = field(default_factory=dict)
    clock: dict[str, float] = field(default_factory=dict)
    format: str = FORMAT

    def write(self, folder: Path) -> None:
        """Appears whole or not at all, after everything that it names."""
        replace_json(folder / FILE, asdict(self))


def read_artefact(folder: Path) -> Artefact | None:
    """The artefact of a finished stage; None where the stage is not finished."""
    found = read_json(folder / FILE)
    if not found:
        return None
    if found.get("format") != FORMAT:
        raise InputError(
            f"written in another format ({found.get('format')!r}).",
            where=str(folder / FILE),
            fix="Use another run.dir.",
        )
    return Artefact(**found)


def replace_json(path: Path, value: Any) -> None:
    """A JSON file that is the old one or the new one, never a part."""
    part = path.with_name(f".{path.name}.part")
    with part.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def write_started(stage: Stage, inputs: Mapping[str, Any]) -> None:
    replace_json(stage.dir / STARTED, {"inputs": inputs})


def read_started(stage: Stage) -> dict[str, Any]:
    return read_json(stage.dir / STARTED).get("inputs", {})


# ---- what a stage makes, and what may be taken from it ----


def makes(stage: Stage, pipeline: Pipeline) -> dict[str, str]:
    """What a stage's paths will be, by what they are."""
    if stage.kind == "generate":
        return {"data": DATA}
    if stage.kind == "eval":
        return {"evaluation": EVALUATION}
    if stage.kind == "export":
        source = pipeline[stage.references[0].stage]
        what = "reward model" if trains_scores(source) else "model"
        return {
            what if stage.export.merge or not source.settings.get("adapter") else "adapter": (
                stage.export.out or MODEL
            )
        }
    return (
        {"reward model": MODEL}
        if trains_scores(stage)
        else {"model": MODEL, **({"adapter": ADAPTER} if stage.settings.get("adapter") else {})}
    )


def trains_scores(stage: Stage) -> bool:
    """Whether a stage trains a model that gives a score instead of text."""
    return (
        stage.kind == "train"
        and spec_of((stage.settings.get("algorithm") or {}).get("name", "")).family == "reward"
    )


def wanted(reference: Reference) -> tuple[str, ...]:
    """What may stand at a place of a configuration."""
    if reference.place[0] == "data":
        return ("data",)
    if reference.place[0] == "rewards":
        return ("reward model",)
    if reference.key == "adapter.path":
        return ("adapter",)
    return ("model", "reward model")


def path_in(pipeline: Pipeline, reference: Reference, where: str) -> Path:
    """Where the artefact is that a reference means; whether it is there already is another
    question.
    """
    parent = pipeline[reference.stage]
    made = makes(parent, pipeline)
    want = wanted(reference)
    found = next((path for what, path in made.items() if what in want), None)
    if found is None:
        raise InputError(
            f"{reference.key}: the stage {parent.name} makes {_a(made)}, and {_a(want)} is needed"
            " here.",
            where=where,
            fix=(
                "A stage with an `adapter` makes an adapter, `generate` makes data, a reward"
                " algorithm makes a reward model."
            ),
        )
    path = Path(found)
    return path if path.parent != Path(".") else parent.dir / found


def _a(things: Any) -> str:
    return " or ".join(
        f"{'an' if thing[0] in 'aeiou' else 'a'} {thing}" if thing != "data" else "data"
        for thing in things
    )


# ---- hashes ----


def hash_of(value: Any) -> str:
    return hashlib.sha256(
        json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def hash_file(path: Path) -> str:
    """SHA-256 of a file, or of a large one's size and edges."""
    size = path.stat().st_size
    total = hashlib.sha256()
    with path.open("rb") as file:
        if size <= WHOLE_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{size}\0".encode() + file.read(EDGE_BYTES))
        file.seek(size - EDGE_BYTES)
        total.update(file.read())
    return total.hexdigest()


def hash_path(path: Path) -> str:
    """Of a file, or of the files in a directory by their names."""
    if path.is_file():
        return hash_file(path)
    return hash_of(
        {
            p.name: hash_file(p)
            for p in sorted(path.iterdir())
            if p.is_file() and p.name != "README.md"
        }
    )


def weights_of(folder: Path) -> dict[str, str]:
    """Hashes of an exported model: of every byte of its weights, and of its tokenizer."""
    groups = {
        "weights": sorted(folder.glob("*.safetensors")),
        "tokenizer": [folder / n for n in ("tokenizer.json", "chat_template.jinja")],
    }
    out = {}
    for name, files in groups.items():
        total = hashlib.sha256()
        for path in files:
            if path.is_file():
                with path.open("rb") as file:
                    total.update(
                        f"{path.name}\0".encode() + hashlib.file_digest(file, "sha256").digest()
                    )
        out[name] = total.hexdigest()
    return out


def inputs_of(stage: Stage, config: Config | None, parents: Mapping[str, str]) -> dict[str, Any]:
    """What a stage is made of.

    Settings that have their default value, and those that only say where and how watched, do not
    count.
    """
    settings = (
        {}
        if config is None
        else redact_settings(config.model_dump(mode="json", exclude_defaults=True))
    )
    for reference in stage.references:
        _put(settings, reference.place, f"from {reference.stage}")
    left_out = HARMLESS if stage.kind == "train" else (*HARMLESS, *FILL)
    flat = {
        key: value
        for key, value in flatten(settings).items()
        if not any(f"{key}.".startswith(f"{name}.") for name in left_out)
    }
    for section in ("generate", "export"):
        given = getattr(stage, section).model_dump(mode="json", exclude_defaults=True)
        flat |= {f"{section}.{key}": value for key, value in given.items()}
    known = {reference.key for reference in stage.references}
    files = (
        {key: hash_path(path) for key, path in local_files(config).items() if key not in known}
        if config is not None
        else {}
    )
    return {"kind": stage.kind, "settings": flat, "files": files, "parents": dict(parents)}


def _put(settings: Any, place: tuple[str | int, ...], value: str) -> None:
    for part in place[:-1]:
        if isinstance(settings, dict):
            settings = settings.setdefault(part, {})
        elif isinstance(part, int) and part < len(settings):
            settings = settings[part]
    settings[place[-1]] = value


def local_files(config: Config) -> dict[str, Path]:
    """The files and directories on this machine that a configuration names, by key."""
    named = {
        key: value
        for key, value in flatten(config.model_dump(mode="json")).items()
        if isinstance(value, str) and value
    }
    found = {}
    for key, value in named.items():
        text = value.rpartition(":")[0] if ".py:" in value else value
        reads = (
            key in ("data.source", "data.eval.source", "ptx.source")
            or key.endswith((".path", ".tokenizer", ".chat_template"))
            or ".py:" in value
        )
        if reads and len(text) < 1000 and (path := Path(text).expanduser()).exists():
            found[key] = path
    return found


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """In words, what is not as it was when the stage was made."""
    out = []
    before = old.get("settings", {})
    after = new.get("settings", {})
    for key in dict.fromkeys((*before, *after)):
        if before.get(key) != after.get(key):
            out.append(f"{key} was {_shown(before, key)} and is {_shown(after, key)}")
    out += [
        f"the contents of {key} are other ones"
        for key in {**old.get("files", {}), **new.get("files", {})}
        if old.get("files", {}).get(key) != new.get("files", {}).get(key)
        and key not in " ".join(out)
    ]
    out += [
        f"the stage {name} made something else"
        for name in {**old.get("parents", {}), **new.get("parents", {})}
        if old.get("parents", {}).get(name) != new.get("parents", {}).get(name)
    ]
    return out


def _shown(values: Mapping[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "the default"


def split_metrics(metrics: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Metrics of what was learned, and of the machine."""
    timed = {name: value for name, value in metrics.items() if name.startswith(CLOCKED)}
    return {name: value for name, value in metrics.items() if name not in timed}, timed
