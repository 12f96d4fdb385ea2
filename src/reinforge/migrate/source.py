"""A file of another library as keys and values, and which library that is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reinforge.config.load import read_text
from reinforge.config.strict import parse
from reinforge.core.errors import InputError
from reinforge.migrate.readers.interpolate import interpolated
from reinforge.migrate.readers.script import Script, read_script
from reinforge.migrate.readers.shell import Shell
from reinforge.migrate.readers.values import flags, flat, overrides

LIBRARIES = {
    "trl": "TRL",
    "verl": "veRL",
    "openrlhf": "OpenRLHF",
    "llamafactory": "LLaMA-Factory",
    "nemo_rl": "NeMo-RL",
}
# keys that one library has and no other
SIGNS: dict[str, re.Pattern[str]] = {
    "verl": re.compile(r"actor_rollout_ref(\.|$)|trainer\.n_gpus_per_node$|trainer\.total_epochs$"),
    "nemo_rl": re.compile(
        r"policy\.(model_name|train_global_batch_size|dtensor_cfg)|loss_fn\.|grpo\."
    ),
    "llamafactory": re.compile(r"(stage|finetuning_type|cutoff_len|template|lora_target)$"),
    "openrlhf": re.compile(
        r"(pretrain|zero_stage|micro_train_batch_size)$|(actor|ds|ckpt|rollout|algo)\.\w"
    ),
    "trl": re.compile(
        r"(model_name_or_path|dataset_name|per_device_train_batch_size|output_dir|use_peft)$"
    ),
}
PROGRAMS = {
    "verl": re.compile(r"verl\.trainer\.|main_ppo|main_dapo|recipe\.dapo|fsdp_sft_trainer"),
    "openrlhf": re.compile(r"openrlhf\.cli\."),
    "llamafactory": re.compile(r"llamafactory-cli|llamafactory\.|(^|/)src/train(_bash)?\.py$"),
    "nemo_rl": re.compile(r"run_(grpo|sft|dpo|rm|distillation|ppo)\w*\.py$"),
    "trl": re.compile(
        r"^trl$|(^|/)(sft|dpo|grpo|kto|reward\w*|rloo|gspo|orpo|cpo|online_dpo|gkd)\w*\.py$|trl/scripts"
    ),
}
MAX_BASES = 8


@dataclass
class Source:
    """Keys and values of a file."""

    path: Path
    library: str
    program: str = ""  # what the command starts: openrlhf.cli.train_dpo
    launcher: dict[str, Any] = field(default_factory=dict)  # flags before the program
    settings: dict[str, Any] = field(default_factory=dict)
    script: Script | None = None
    remarks: list[str] = field(default_factory=list)


def read_source(path: Path, library: str | None = None) -> Source:
    """Reads a file of one of the libraries, which is recognised by what is in it."""
    text = read_text(path)
    if library is not None and library not in LIBRARIES:
        raise InputError(
            f"there is no library {library!r}.",
            where="--from",
            fix=f"There are: {', '.join(LIBRARIES)}.",
        )
    reader = READERS.get(path.suffix, _shell)
    try:
        return reader(path, text, library)
    except RecursionError:
        raise InputError(
            "nested too deeply.", where=str(path), fix="No setting needs that."
        ) from None


def _python(path: Path, text: str, library: str | None) -> Source:
    if library not in (None, "trl"):
        raise InputError(
            f"scripts in Python are read for TRL only, not for {LIBRARIES[str(library)]}.",
            where=str(path),
            fix="Give the YAML file or the shell script that starts it.",
        )
    script = read_script(text, str(path))
    if not script.trainer:
        raise InputError(
            "this script makes no trainer of TRL.",
            where=str(path),
            fix="Give the script that calls SFTTrainer(...), GRPOTrainer(...) or the like.",
        )
    return Source(
        path,
        "trl",
        launcher=script.launcher,
        settings=_with_negations(script.settings),
        script=script,
    )


def _yaml(path: Path, text: str, library: str | None) -> Source:
    remarks: list[str] = []
    tree = _with_bases(path, text, remarks)
    settings = flat(interpolated(tree))
    found = library or _by_keys(settings)
    if found is None:
        raise _unrecognised(path)
    return Source(path, found, settings=settings, remarks=remarks)


def _with_bases(path: Path, text: str, remarks: list[str], depth: int = 0) -> dict[str, Any]:
    """The tree of a file over those that its `defaults` names, where they are files beside it."""
    data, _ = parse(text, str(path))
    if not isinstance(data, dict):
        raise InputError("the top level is no mapping.", where=str(path))
    bases = data.pop("defaults", None)
    tree: dict[str, Any] = {}
    for base in [bases] if isinstance(bases, str) else bases or []:
        other = path.parent / str(base)
        if isinstance(base, str) and other.is_file() and depth < MAX_BASES:
            tree = _merged(tree, _with_bases(other, read_text(other), remarks, depth + 1))
        elif base != "_self_":
            remarks.append(
                f"settings of `{base}`, which `defaults` names, are not in this: no such file"
            )
    return _merged(tree, data)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    tree = dict(below)
    for key, value in above.items():
        old = tree.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        tree[key] = _merged(old, value) if both else value  # type: ignore[arg-type]
    return tree


def _shell(path: Path, text: str, library: str | None) -> Source:
    started = []
    for words in Shell().commands(text):
        for name, program in PROGRAMS.items():
            at = next((i for i, word in enumerate(words) if program.search(word)), None)
            if at is not None and (library in (None, name)):
                started.append((name, words, at))
                break
    if not started:
        raise _unrecognised(path)
    name, words, at = started[0]
    source = Source(path, name, words[at], launcher=flags(words[:at]))
    arguments = words[at + 1 :]
    if len(started) > 1:
        source.remarks.append(f"of {len(started)} commands in this file only the first was read")
    if name in ("verl", "nemo_rl"):
        source.settings = overrides(arguments)
        _named_config(source, flags(arguments))
    elif name == "llamafactory":
        source.settings = _llamafactory(source, arguments)
    else:
        if words[at] == "trl" and arguments:
            source.program, arguments = arguments[0], arguments[1:]
        source.settings = flags(arguments)
    if name == "trl":
        source.settings = _with_negations(source.settings)
    return source


def _with_negations(settings: dict[str, Any]) -> dict[str, Any]:
    """`--no_packing` of transformers' parser is `--packing False`."""
    return {
        key.removeprefix("no_") if key.startswith("no_") and value is True else key: (
            False if key.startswith("no_") and value is True else value
        )
        for key, value in settings.items()
    }


def _named_config(source: Source, given: dict[str, Any]) -> None:
    """A configuration file that the command names, under the settings of the command."""
    file = given.get("config") or given.get("config-name")
    folder = given.get("config-path", ".")
    if not isinstance(file, str):
        return
    for base in (source.path.parent, Path.cwd()):
        path = base / str(folder) / file
        path = path if path.suffix in (".yaml", ".yml") else path.with_suffix(".yaml")
        if path.is_file():
            below = _yaml(path, read_text(path), source.library)
            source.settings = below.settings | source.settings
            source.remarks += below.remarks
            return
    source.remarks.append(
        f"settings of `{file}`, which the command names, are not in this: no such file here"
    )


def _llamafactory(source: Source, arguments: Sequence[str]) -> dict[str, Any]:
    files = [word for word in arguments if word.endswith((".yaml", ".yml"))]
    below: dict[str, Any] = {}
    for file in files:
        path = source.path.parent / file
        if path.is_file():
            below |= _yaml(path, read_text(path), "llamafactory").settings
        else:
            source.remarks.append(f"settings of `{file}` are not in this: no such file here")
    return below | overrides(arguments) | flags(arguments)


def _by_keys(settings: Mapping[str, Any]) -> str | None:
    """The library whose signs most keys have, those of the fewest first."""
    counts = {
        library: sum(bool(sign.match(key)) for key in settings) for library, sign in SIGNS.items()
    }
    best = max(counts, key=lambda library: counts[library])
    for library in ("verl", "nemo_rl", "llamafactory", "openrlhf"):
        if counts[library] >= 2 or (counts[library] and library == best):
            return library
    return "trl" if counts["trl"] else None


def _unrecognised(path: Path) -> InputError:
    return InputError(
        "no library is recognised in this file.",
        where=str(path),
        fix=f"Name it with --from: {', '.join(LIBRARIES)}.",
    )


READERS = {".py": _python, ".yaml": _yaml, ".yml": _yaml, ".json": _yaml}  # others: a shell script
