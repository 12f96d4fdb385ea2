"""What a saved adapter (adapter.path) says of itself, without torch: what is wrong with its files,
and the section `adapter` as it is with it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reinforge.config.adapter import AdapterConfig
from reinforge.core.errors import InputError

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
WHERE = "adapter.path"
EXPORT = "`reinforge export RUN OUT` makes one of a run."
AGAIN = "Save or export it again, or copy it again."
OTHER = "Give an adapter of this base model, or the base of this adapter as model.path."
# what a weight of experts or of a router is called, and one of a layer
_OF_EXPERTS = re.compile(r"\.experts\.|\.block_sparse_moe\.|\.router\.|\.mlp\.gate\.")
_LAYER = re.compile(r"\.(?:layers|h)\.(\d+)\.")


def read_adapter(text: str) -> dict[str, Any]:
    """Its configuration. Anything that makes it no LoRA adapter with whole files is an error that
    names the file.
    """
    folder = Path(text)
    path = folder / CONFIG
    if not path.is_file():
        what = f"has no {CONFIG}" if folder.is_dir() else "is no directory"
        is_run = (folder / "metrics.jsonl").is_file()
        fix = f"Give the directory of a saved adapter. {EXPORT if is_run else ''}".strip()
        raise InputError(f"{text} {what}.", where=WHERE, fix=fix)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}.", where=WHERE, fix=AGAIN) from error
    if not isinstance(found, dict):
        raise InputError(f"{path} is no JSON object.", where=WHERE, fix=AGAIN)
    kind = found.get("peft_type", "LORA")
    if kind != "LORA":
        raise InputError(
            f"{text} is an adapter of the kind {kind}.",
            where=WHERE,
            fix="Give a LoRA adapter (DoRA and rsLoRA are LoRA too).",
        )
    if not isinstance(found.get("r"), int):
        raise InputError(f"{path} has no r.", where=WHERE, fix=AGAIN)
    _check_weights(folder, found)
    return found


def _check_weights(folder: Path, config: Mapping[str, Any]) -> None:
    """They are there, whole, and of a rank that the configuration names."""
    file = _file(folder)
    if file is None:
        raise InputError(f"{folder} has no {WEIGHTS[0]}.", where=WHERE, fix=AGAIN)
    if file.suffix != ".safetensors":
        return
    ranks = {config["r"], *(config.get("rank_pattern") or {}).values()}
    for name, shape in _shapes(file):
        # of stacked experts the factors of all lie one below the other
        if "lora_A" in name and shape and not any(r > 0 and shape[0] % r == 0 for r in ranks):
            raise InputError(
                f"{file.name} of {folder} has a rank of {shape[0]} ({name}), and {CONFIG} says"
                f" {config['r']}.",
                where=WHERE,
                fix=AGAIN,
            )


def _file(folder: Path) -> Path | None:
    return next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)


def shapes(text: str) -> dict[str, list[int]]:
    """By name the shapes of its weights; none where only torch can read the file."""
    file = _file(Path(text))
    return dict(_shapes(file)) if file is not None and file.suffix == ".safetensors" else {}


def check_base(text: str, model: Any) -> None:
    """Refuses an adapter with weights that a model cannot have, by its transformers configuration:
    of experts where it has none, of layers behind its last. Of a model with towers nothing is
    certain.
    """
    if model.get_text_config() is not model:
        return
    layers = getattr(model, "num_hidden_layers", None)
    said = json.dumps({**model.to_dict(), "_name_or_path": ""}, default=str)
    mixture = re.search("expert|moe", said, re.IGNORECASE) is not None
    kind = model.model_type
    for name in shapes(text):
        layer = _LAYER.search(name)
        if not mixture and _OF_EXPERTS.search(name):
            what, without = "experts or their router", f"this model ({kind}) has no experts"
        elif layer and isinstance(layers, int) and int(layer[1]) >= layers:
            what, without = f"layer {layer[1]}", f"this model ({kind}) has layers 0 to {layers - 1}"
        else:
            continue
        raise other_model(text, f"has weights for {what} ({name}), and {without}")


def other_model(text: str, what: str) -> InputError:
    """The error of an adapter that was made for another model, with what it says of its own."""
    base = read_adapter(text).get("base_model_name_or_path")
    made = f"; it was made for {base}" if base else ""
    return InputError(f"{_file(Path(text))} {what}{made}.", where=WHERE, fix=OTHER)


def _shapes(file: Path) -> Iterator[tuple[str, list[int]]]:
    """By name the shapes in a file of safetensors: eight bytes that say how long the JSON is that
    follows, which says where the numbers are.
    """
    size = file.stat().st_size
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length)) if 8 + length <= size else {}
        header.pop("__metadata__", None)
        end = max(facts["data_offsets"][1] for facts in header.values())
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise InputError(
            f"{file} cannot be read: it is no file of safetensors, or was cut off.",
            where=WHERE,
            fix=AGAIN,
        ) from error
    if 8 + length + end != size:
        raise InputError(
            f"{file} is not whole: it has {size} bytes and says that it has {8 + length + end}.",
            where=WHERE,
            fix=AGAIN,
        )
    for name, facts in header.items():
        yield name, facts["shape"]


def as_saved(adapter: AdapterConfig) -> AdapterConfig:
    """The section as it is with what its saved adapter says: rank, scale and targets come from
    there, whatever is written beside adapter.path.
    """
    if adapter.path is None:
        return adapter
    saved = read_adapter(adapter.path)
    targets = saved.get("target_modules") or []  # nothing where experts alone are adapted
    stacked = saved.get("target_parameters") or []
    kind = "dora" if saved.get("use_dora") else "rslora" if saved.get("use_rslora") else "lora"
    return adapter.model_copy(
        update={
            "kind": "qlora" if adapter.kind == "qlora" else kind,
            "rank": saved["r"],
            "alpha": saved.get("lora_alpha"),
            "targets": targets if isinstance(targets, str) else sorted({*targets, *stacked}),
            "modules_to_save": saved.get("modules_to_save") or [],
        }
    )


def as_known(adapter: AdapterConfig) -> AdapterConfig:
    """The same for people to read: where the saved adapter is gone or broken, as it is written."""
    try:
        return as_saved(adapter)
    except InputError:
        return adapter


def overruled(adapter: AdapterConfig) -> list[str]:
    """What is written beside adapter.path and is not so: `rank: 32, where it has 4`. The defaults
    count where somebody wrote them; the configuration that a run leaves has every key.
    """
    saved = as_saved(adapter)
    written = adapter.model_fields_set & {"rank", "targets"}
    if adapter.model_fields_set == AdapterConfig.model_fields.keys():
        written = set()
    found = []
    for key in ("kind", "rank", "alpha", "targets"):
        said, there = getattr(adapter, key), getattr(saved, key)
        default = AdapterConfig.model_fields[key].default
        if said == there or (isinstance(said, list) and sorted(said) == there):
            continue
        if said == default and key not in written:
            continue
        if isinstance(said, float) and isinstance(there, int | float) and math.isclose(said, there):
            continue
        found.append(f"{key}: {said}, where it has {there}")
    return found
