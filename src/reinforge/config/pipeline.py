"""A pipeline: `stages` in one YAML file, each a run, an evaluation, a generation or an export, and
what they take from each other.

    # merged into every stage; what a stage says itself counts more
    defaults: {model: {path: org/base}, rollout: {max_new_tokens: 64}}
    stages:
      - {name: sft, algorithm: {name: sft}, data: ..., train: ...}
      # the model that the stage sft made
      - {name: grpo, model: {from: sft}, algorithm: {name: grpo}, ...}
    # stage 1 is in runs/pipeline/01-sft
    run: {dir: runs/pipeline, seed: 0}

Here names are checked and stages become configurations. `{from: stage}` stays a reference until
somebody says where things are.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from reinforge.config.base import Count, Fraction, NonNegative, Section
from reinforge.config.explain import problems_of
from reinforge.config.load import apply_override, build_config, load_config, read_text
from reinforge.config.schema import Config
from reinforge.config.strict import dotted, parse
from reinforge.config.structured import StructuredConfig
from reinforge.core.errors import InputError
from reinforge.core.seeds import seed_of

Kind = Literal["train", "eval", "generate", "export"]
Loc = tuple[str | int, ...]
TOP = ("stages", "defaults", "run")
OF_RUNS = tuple(Config.model_fields)
SECTIONS: dict[str, tuple[str, ...]] = {  # what a stage of each kind may say
    "train": (*OF_RUNS, "export"),
    "eval": ("model", "adapter", "data", "rewards", "rollout", "eval", "run"),
    "generate": ("model", "adapter", "data", "rewards", "generate", "run"),
    "export": ("model", "export"),
}
SHORT = {
    "model": "path",
    "adapter": "path",
    "critic": "path",
    "teacher": "path",
    "data": "source",
}  # `model: {from: x}` is `model: {path: {from: x}}`
# of stages that train nothing
FILL: dict[str, Any] = {"algorithm": {"name": "sft"}, "train": {"steps": 1, "prompts_per_step": 1}}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


class GenerateConfig(Section):
    """What a stage of the kind `generate` does with every row of its data."""

    n: Count = Field(1, description="Completions per prompt.")
    temperature: NonNegative = Field(1.0, description="0 = greedy.")
    top_p: Fraction = Field(1.0, description="Nucleus of the sampling.")
    max_new_tokens: Count = Field(256, description="Longest completion.")
    structured: StructuredConfig | None = Field(
        None, description="The form that every completion must have."
    )
    keep: Literal["all", "best"] = Field(
        "all",
        description=(
            "Of the n completions of a prompt: all, or the one with the highest reward above 0."
        ),
    )
    pairs: Literal["best-worst", "all"] | None = Field(
        None,
        description="Make preference pairs by the rewards: the best and the worst, or every two.",
    )
    margin: NonNegative = Field(0.0, description="Pairs must differ in reward by more than this.")


class ExportConfig(Section):
    """Which checkpoint of a training stage counts, and where an export goes."""

    checkpoint: str = Field(
        "latest",
        description="latest, best or a step: the checkpoint whose weights are the stage's model.",
    )
    merge: bool = Field(
        True,
        description=(
            "Fold the adapter into the weights; false: export the adapter alone, as a peft"
            " checkpoint."
        ),
    )
    out: str | None = Field(
        None, description="The directory to write; default: `model` in the stage's own."
    )
    push: str | None = Field(
        None, description="Also upload to this hub id. Needs a token (HF_TOKEN, or a login)."
    )


@dataclass(frozen=True)
class Reference:
    """`{from: stage}` at a place in a stage's settings."""

    place: Loc
    stage: str

    @property
    def key(self) -> str:
        return dotted(self.place)


PathOf = Callable[[Reference], str]


@dataclass(frozen=True)
class Stage:
    name: str
    kind: Kind
    number: int  # from 1
    settings: Mapping[str, Any]  # merged with the defaults, references in it
    references: tuple[Reference, ...]
    places: Mapping[Loc, str]  # on which line each setting is
    dir: Path
    seed: int
    where: str  # the file and the stage, for errors

    @property
    def parents(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(reference.stage for reference in self.references))

    def config(self, path_of: PathOf) -> Config:
        """The stage as a run of its own, its references replaced.

        What does not train gets the sections that a config must have.
        """
        settings = copy.deepcopy(
            {name: value for name, value in self.settings.items() if name in OF_RUNS}
        )
        for reference in self.references:
            _put(settings, reference.place, path_of(reference))
        run = {"seed": self.seed, **settings.get("run", {}), "dir": str(self.dir)}
        fill = {} if self.kind == "train" else copy.deepcopy(FILL)
        return build_config({**fill, **settings, "run": run}, self.where, (), dict(self.places))

    @property
    def generate(self) -> GenerateConfig:
        return self._section("generate", GenerateConfig)

    @property
    def export(self) -> ExportConfig:
        return self._section("export", ExportConfig)

    def _section(self, name: str, kind: type[Any]) -> Any:
        given = self.settings.get(name) or {}
        try:
            return kind.model_validate_json(json.dumps(given), strict=True)
        except ValidationError as error:
            known = ", ".join(kind.model_fields)
            raise InputError(
                f"{name}: {'; '.join(problems_of(error))}. It has: {known}.", where=self.where
            ) from None


@dataclass(frozen=True)
class Pipeline:
    dir: Path
    seed: int
    stages: tuple[Stage, ...]
    source: str  # the file

    def __getitem__(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.name == name)


def is_pipeline(path: Path) -> bool:
    """Whether a configuration file is that of a pipeline."""
    return _has_stages(parse(read_text(path), str(path))[0])


def _has_stages(data: Any) -> bool:
    return isinstance(data, dict) and "stages" in data


def load_any(path: Path, overrides: Sequence[str] = ()) -> Config | Pipeline:
    """A configuration file, of one run or of a pipeline."""
    data, lines = parse(read_text(Path(path)), str(path))
    if not _has_stages(data):
        return load_config(Path(path), overrides)
    return pipeline_from_dict(
        data,
        where=str(path),
        overrides=overrides,
        places={at: f"line {line}" for at, line in lines.items()},
    )


def pipeline_from_dict(
    data: dict[str, Any],
    *,
    where: str = "pipeline",
    overrides: Sequence[str] = (),
    places: Mapping[Loc, str] | None = None,
) -> Pipeline:
    """Checks names and references of all stages and reports everything that is wrong at once."""
    data = copy.deepcopy(data)
    places = dict(places or {})
    for override in overrides:
        at = apply_override(data, _by_name(data, override))
        places = {key: place for key, place in places.items() if key[: len(at)] != at} | {
            at: f"override `{override}`"
        }
    problems = [f"{key}: unknown key{_near(key, TOP)}" for key in data if key not in TOP]
    run = data.get("run") or {}
    defaults = data.get("defaults") or {}
    raw = data.get("stages")
    if not isinstance(raw, list) or not raw or not all(isinstance(stage, dict) for stage in raw):
        raise InputError(
            "stages: must be a list of stages, each a mapping with a name.",
            where=where,
            fix="Write `stages: [{name: sft, ...}, ...]`.",
        )
    problems += _run_problems(run)
    if not isinstance(defaults, dict):
        problems.append("defaults: must be a mapping of sections.")
    if problems:
        raise _all(problems, where)
    problems += [
        f"defaults.{key}: unknown section{_near(key, SECTIONS['train'])}"
        for key in defaults
        if key not in _known_sections()
    ]
    stages: list[Stage] = []
    for i, own in enumerate(raw):
        found, wrong = _stage(
            own, defaults, i, stages, [s.get("name") for s in raw], run, where, places
        )
        problems += wrong
        if found:
            stages.append(found)
    if problems:
        raise _all(problems, where)
    return Pipeline(Path(run["dir"]), run.get("seed", 0), tuple(stages), where)


def _stage(
    own: dict[str, Any],
    defaults: dict[str, Any],
    index: int,
    before: Sequence[Stage],
    names: list[Any],
    run: Mapping[str, Any],
    where: str,
    places: Mapping[Loc, str],
) -> tuple[Stage | None, list[str]]:
    """One stage, and what is wrong with its name, kind, sections and references.

    The sections themselves are checked by `config`.
    """
    name = own.get("name")
    line = f" ({places[('stages', index)]})" if ("stages", index) in places else ""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        return None, [
            f"stages.{index}{line}: {name!r} is no name. Give each stage a `name` of letters,"
            " digits, - and _."
        ]
    label = f"stage {name}{line}"
    kind = own.get("kind", name if name in SECTIONS else "train")
    if kind not in SECTIONS:
        return None, [
            f"{label}: there is no kind {kind!r}{_near(str(kind), SECTIONS)} There are:"
            f" {', '.join(SECTIONS)}."
        ]
    problems = [f"{label}: there are two stages of this name."] if names.index(name) < index else []
    for key in own:
        if key not in ("name", "kind", *SECTIONS[kind]):
            elsewhere = [k for k, known in SECTIONS.items() if key in known]
            problems.append(
                f"{label}: {key}: "
                + (
                    f"a stage of kind {kind} has no such section (but {', '.join(elsewhere)} has)."
                    if elsewhere
                    else f"unknown section{_near(key, SECTIONS[kind])}"
                )
            )
    base, wrong = _long(
        {key: value for key, value in defaults.items() if key in SECTIONS[kind]}, "defaults"
    )
    mine, also = _long({key: value for key, value in own.items() if key in SECTIONS[kind]}, label)
    settings = merge(_for_source(base, mine), mine)
    references = tuple(_references(settings))
    for reference in references:
        if reference.stage not in {s.name for s in before}:
            problems.append(
                f"{label}: {reference.key}: {_unknown(reference.stage, name, names[:index], names)}"
            )
    if kind == "export" and not references:
        problems.append(
            f"{label}: model: which stage's? Write `model: {{from:"
            f" {before[-1].name if before else 'sft'}}}`."
        )
    if isinstance(settings.get("run"), dict) and "dir" in settings["run"]:
        problems.append(
            f"{label}: run.dir: a stage has its own directory below the pipeline's run.dir."
            " Remove it."
        )
    stage = Stage(
        name,
        kind,
        index + 1,
        settings,
        references,
        _stage_places(settings, index, places),
        _dir(Path(run["dir"]), index + 1, name),
        seed_of(run.get("seed", 0), "stage", name) % 2**31,
        f"{where}, stage {name}",
    )
    return stage, problems + wrong + also


def merge(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Deep: mappings are merged key by key, anything else (lists too) replaces, and what `own` says
    counts more. null takes a key away.

    >>> base = {"train": {"steps": 3, "epochs": None}, "rewards": [1, 2]}
    >>> merge(base, {"train": {"steps": 5}, "rewards": [3]})
    {'train': {'steps': 5, 'epochs': None}, 'rewards': [3]}
    """
    out = copy.deepcopy(dict(base))
    for key, value in own.items():
        both = (
            isinstance(value, Mapping)
            and isinstance(out.get(key), Mapping)
            and not _is_reference(value)
            and not _is_reference(out[key])
        )
        out[key] = merge(out[key], value) if both else copy.deepcopy(value)
        if value is None and key in base:
            del out[key]
    return out


def _for_source(base: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults without what belongs to another data source than the stage's own: its options,
    columns, filter and split.
    """
    out = copy.deepcopy(base)
    mine = own.get("data")
    theirs = out.get("data")
    for key in ("", "eval"):
        if key:
            mine, theirs = (
                part.get(key) if isinstance(part, Mapping) else None for part in (mine, theirs)
            )
        if (
            isinstance(mine, Mapping)
            and isinstance(theirs, dict)
            and "source" in mine
            and mine["source"] != theirs.get("source")
        ):
            for name in ("options", "columns", "where", "split"):
                theirs.pop(name, None)
    return out


def _is_reference(value: Any) -> bool:
    return isinstance(value, Mapping) and set(value) == {"from"}


def _references(value: Any, place: Loc = ()) -> Iterator[Reference]:
    if _is_reference(value):
        yield Reference(place, str(value["from"]))
    elif isinstance(value, Mapping | list):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _references(item, (*place, key))


def _long(settings: dict[str, Any], label: str) -> tuple[dict[str, Any], list[str]]:
    """`model: {from: x, device: cpu}` written out as `model: {path: {from: x}, device: cpu}`."""
    out = dict(settings)
    problems = []
    for section, key in SHORT.items():
        value = out.get(section)
        if isinstance(value, Mapping) and "from" in value:
            if key in value:
                problems.append(f"{label}: {section}: give `from` or `{key}`, not both.")
            out[section] = {
                **{k: v for k, v in value.items() if k not in ("from", key)},
                key: {"from": value["from"]},
            }
    return out, problems


def _put(settings: Any, place: Loc, value: Any) -> None:
    for part in place[:-1]:
        settings = settings[part]
    settings[place[-1]] = value


def _stage_places(
    settings: Mapping[str, Any], index: int, places: Mapping[Loc, str]
) -> dict[Loc, str]:
    """Lines by the stage's own keys; where it does not have one, the line in `defaults`."""
    own = {
        at[2:]: place for at, place in places.items() if at[:2] == ("stages", index) and len(at) > 2
    }
    shared = {
        at[1:]: f"{place}, in defaults"
        for at, place in places.items()
        if at[:1] == ("defaults",) and len(at) > 1
    }
    return {**shared, **own}


def _dir(root: Path, number: int, name: str) -> Path:
    """`01-sft`; a stage that was there before others were put in front of it keeps the directory
    that it has.
    """
    there = sorted(root.glob(f"[0-9][0-9]-{name}")) if root.is_dir() else []
    return there[0] if there else root / f"{number:02d}-{name}"


def _by_name(data: Mapping[str, Any], override: str) -> str:
    """`stages.grpo.train.steps=3` as `stages.1.train.steps=3`."""
    parts = override.partition("=")[0].strip().split(".")
    names = [
        stage.get("name") if isinstance(stage, Mapping) else None
        for stage in data.get("stages") or ()
    ]
    if len(parts) > 1 and parts[0] == "stages" and not parts[1].isdecimal():
        if parts[1] not in names:
            raise InputError(
                f"there is no stage {parts[1]!r}{_near(parts[1], [n for n in names if n])}",
                where=f"override `{override}`",
            )
        return override.replace(f"stages.{parts[1]}", f"stages.{names.index(parts[1])}", 1)
    if parts[0] not in TOP:
        raise InputError(
            f"a pipeline has no key {parts[0]!r}.",
            where=f"override `{override}`",
            fix=(
                f"Write `stages.<name>.{override}` for one stage, or `defaults.{override}` for all."
            ),
        )
    return override


def _run_problems(run: Any) -> list[str]:
    if not isinstance(run, dict) or not isinstance(run.get("dir"), str):
        return ["run.dir: is required but missing: the directory of the pipeline."]
    wrong = [
        f"run.{key}: unknown key; a pipeline's run has dir and seed, the rest goes into a stage or"
        " defaults."
        for key in run
        if key not in ("dir", "seed")
    ]
    if isinstance(run.get("seed", 0), bool) or not isinstance(run.get("seed", 0), int):
        wrong.append("run.seed: must be a whole number.")
    return wrong


def _known_sections() -> set[str]:
    return {section for known in SECTIONS.values() for section in known}


def _unknown(wanted: str, own: str, before: Sequence[Any], names: Sequence[Any]) -> str:
    if wanted == own:
        return f"a stage cannot start from itself{_near(wanted, before)}"
    if wanted in names:
        return f"the stage {wanted} comes later. Move it before this one."
    return f"there is no stage {wanted!r}{_near(wanted, before)}" + (
        f" Earlier stages: {', '.join(before)}." if before else " This is the first stage."
    )


def _near(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, [str(k) for k in known], 1, 0.5)
    return f"; did you mean {close[0]}?" if close else "."


def _all(problems: Sequence[str], where: str) -> InputError:
    return InputError(
        (
            "\n  - ".join([f"{len(problems)} problems:", *problems])
            if len(problems) > 1
            else problems[0]
        ),
        where=where,
    )
