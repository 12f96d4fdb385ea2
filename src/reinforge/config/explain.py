"""Turns pydantic's errors into sentences: which key, on which line, what was got, what is expected,
what was probably meant.
"""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from reinforge.algorithms.settings import closest
from reinforge.config.schema import Config
from reinforge.config.strict import dotted

QUOTED = re.compile(r"'([^']*)'")
Loc = tuple[str | int, ...]
MAX_PROBLEMS = 20

EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text (in quotes if it looks like something else)",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a section with keys of its own",
    "greater_than": "a number above {gt:g}",
    "greater_than_equal": "a number of at least {ge:g}",
    "less_than": "a number below {lt:g}",
    "less_than_equal": "a number of at most {le:g}",
    "literal_error": "{expected}",
    "too_long": "at most {max_length} items",
    "too_short": "at least {min_length} items",
}

# What to write for a section that is missing.
EXAMPLES: dict[Loc, str] = {
    ("model",): "write e.g. `model: {path: org/name}`.",
    ("algorithm",): "write e.g. `algorithm: {name: grpo}`.",
    ("data",): "write e.g. `data: {source: rows.jsonl}`.",
    ("train",): "write e.g. `train: {steps: 100, learning_rate: 1e-5}`.",
    ("run",): "write e.g. `run: {dir: runs/first}`.",
}

# What other libraries call our keys.
OTHER_NAMES = {
    "lr": "train.learning_rate",
    "output_dir": "run.dir",
    "max_steps": "train.steps",
    "num_train_epochs": "train.epochs",
    "batch_size": "train.prompts_per_step",
    "per_device_train_batch_size": "train.prompts_per_step",
    "grad_clip": "train.max_grad_norm",
    "num_generations": "algorithm.group_size",
    "n_samples_per_prompt": "algorithm.group_size",
    "beta": "algorithm.kl.coefficient",
    "kl_coef": "algorithm.kl.coefficient",
    "model_name_or_path": "model.path",
    "max_completion_length": "rollout.max_new_tokens",
    "max_tokens": "rollout.max_new_tokens",
    "max_prompt_length": "data.max_length",
    "torch_dtype": "model.dtype",
    "dataset": "data.source",
    "dataset_name": "data.source",
    "lora": "adapter",
    "peft": "adapter",
    "lora_alpha": "adapter.alpha",
    "lora_rank": "adapter.rank",
    "reward": "rewards",
    "reward_funcs": "rewards",
    "generation": "rollout",
    "trainer": "train",
    "gradient_accumulation_steps": "train.tokens_per_microbatch",
    "save_steps": "run.checkpoint.every",
    "eval_steps": "eval.every",
    "warmup_steps": "train.schedule.warmup",
    "report_to": "run.log.sinks",
}


NAME = "NAME"  # of a section that the user names


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section type inside an annotation: `X`, `X | None`, `list[X]` or `dict[str, X]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in typing.get_args(annotation) if (found := section_of(arg))), None)


def all_keys(model: type[BaseModel] = Config, prefix: Loc = ()) -> Iterator[tuple[Loc, Any]]:
    """Every key of the configuration with its field, sections before what is in them; list items
    are key 0, and names that the user chooses are NAME.
    """
    for name, field in model.model_fields.items():
        yield (*prefix, name), field
        if section := section_of(field.annotation):
            origin = typing.get_origin(field.annotation)
            item: Loc = (0,) if origin is list else (NAME,) if origin is dict else ()
            yield from all_keys(section, (*prefix, name, *item))


def _schema_path(loc: Loc) -> Loc:
    """A place in a file as `all_keys` writes it."""
    keys = {path for path, _ in all_keys()}
    path: Loc = ()
    for part in loc:
        known = (*path, 0 if isinstance(part, int) else part)
        named = known not in keys and any(key[: len(path) + 1] == (*path, NAME) for key in keys)
        path = (*path, NAME) if named else known
    return path


def did_you_mean(loc: Loc) -> str:
    """Looks for a key in the section where it was written, then anywhere."""
    parent = _schema_path(loc[:-1])
    key = str(loc[-1])
    keys = [path for path, _ in all_keys()]
    siblings = [str(path[-1]) for path in keys if path[:-1] == parent]
    if close := difflib.get_close_matches(key, siblings, 1, 0.6):
        return f"did you mean `{dotted((*loc[:-1], close[0]))}`?"
    name = key.replace("-", "_")
    if name in OTHER_NAMES:
        return f"did you mean `{OTHER_NAMES[name]}`?"
    exact = [path for path in keys if path[-1] == name]
    if exact:
        return "did you mean " + " or ".join(f"`{dotted(path)}`" for path in exact[:3]) + "?"
    close = difflib.get_close_matches(name, {str(path[-1]): None for path in keys}, 1, 0.8)
    if close:
        return f"did you mean `{dotted(next(path for path in keys if path[-1] == close[0]))}`?"
    return (
        f"{dotted(loc[:-1]) or 'the top level'} has {', '.join(siblings)}."
        if siblings
        else "it has no keys of its own."
    )


def _real_path(loc: Loc, data: Any, *, missing: bool) -> Loc:
    """`loc` without the names that pydantic puts in for the branches of a union."""
    path: Loc = ()
    for i, part in enumerate(loc):
        if isinstance(data, dict) and (part in data or (missing and i == len(loc) - 1)):
            path = (*path, part)
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int):
            path = (*path, part)
            data = data[part] if part < len(data) else None
    return path


def _shown(value: Any) -> str:
    if value is None:
        return "nothing (null)"
    if isinstance(value, dict | list):
        return f"a {'mapping' if isinstance(value, dict) else 'list'} of {len(value)}"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _nearest_name(value: Any, wanted: str) -> str | None:
    """Of names as pydantic lists them.

    >>> _nearest_name("shargpt", "'alpaca', 'sharegpt' or 'text'")
    'sharegpt'
    """
    return closest(value, QUOTED.findall(wanted)) if isinstance(value, str) else None


def _description(loc: Loc) -> str:
    path = _schema_path(loc)
    return next((field.description or "" for key, field in all_keys() if key == path), "")


def _keys_inside(loc: Loc) -> list[str]:
    path = _schema_path(loc)
    return [str(key[-1]) for key, _ in all_keys() if key[:-1] == path]


def _section_hint(value: Any, inside: Sequence[str]) -> str:
    """What to write where something else than a section stands."""
    if value is None:
        return " Leave it out, or write {} for a section without any of them."
    if isinstance(value, str) and "name" in inside:
        return f" Write {{name: {value}}}."
    return ""


def explain(error: ValidationError, data: Any, places: dict[Loc, str]) -> list[str]:
    """One sentence per wrong key.

    `places` says on which line, or in which override, each key is.
    """
    expected: dict[Loc, list[str]] = {}  # the branches of a union speak about the same key
    got: dict[Loc, str] = {}
    hints: dict[Loc, str] = {}  # what was probably meant
    sentences: dict[Loc, str] = {}
    for item in error.errors(include_url=False):
        kind = item["type"]
        loc = _real_path(item["loc"], data, missing=item["type"] == "missing")
        if kind == "value_error":
            sentences[loc] = str(item["ctx"]["error"])
        elif kind == "extra_forbidden":
            told = len(sentences) < MAX_PROBLEMS  # the others are only counted
            sentences[loc] = f"unknown key, {did_you_mean(loc) if told else ''}"
        elif kind == "missing":
            what = _description(loc) or EXAMPLES.get(loc, "")
            sentences[loc] = "is required but missing" + (f": {what}" if what else ".")
        else:
            form = EXPECTED.get(kind)
            wanted = form.format(**item.get("ctx", {})) if form else item["msg"]
            if kind == "model_type" and (inside := _keys_inside(loc)):
                wanted += f" ({', '.join(inside)})"
                if hint := _section_hint(item["input"], inside):
                    hints[loc] = hint
            expected.setdefault(loc, []).append(wanted)
            got[loc] = _shown(item["input"])
            if kind == "literal_error" and (near := _nearest_name(item["input"], wanted)):
                hints[loc] = f" Did you mean {near!r}?"
    above = {loc[:n] for loc in expected for n in range(len(loc))}
    for loc, branches in expected.items():
        if loc in above:
            continue  # a list was meant, and one of its items is wrong
        wanted = " or ".join(dict.fromkeys(branches))
        sentences[loc] = f"got {got[loc]}, expected {wanted}.{hints.get(loc, '')}"
    problems = [_with_place(loc, sentence, places) for loc, sentence in sentences.items()]
    if len(problems) > MAX_PROBLEMS:
        return [*problems[:MAX_PROBLEMS], f"and {len(problems) - MAX_PROBLEMS} more."]
    return problems


def problems_of(error: ValidationError) -> list[str]:
    """The same in short for a section that is not part of `Config`: `key: what is wrong`."""
    return [f"{dotted(item['loc'])}: {item['msg']}" for item in error.errors(include_url=False)]


def _with_place(loc: Loc, sentence: str, places: dict[Loc, str]) -> str:
    place = next((places[loc[:n]] for n in range(len(loc), 0, -1) if loc[:n] in places), None)
    label = dotted(loc) + (f" ({place})" if place else "")
    return f"{label}: {sentence}" if label else sentence
