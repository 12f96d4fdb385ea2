"""Files of other libraries, with the keys and values of their own examples: all keys are mapped or
explained, and what comes out passes `plan`.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from helpers.source_tree import ROOT
from reinforge.config.load import config_from_dict
from reinforge.migrate.source import LIBRARIES, read_source
from reinforge.migrate.translate import Migration, migrate_file, translated
from reinforge.models.tiny import make_tiny_model
from reinforge.plan.checks import run_checks
from reinforge.plan.preflight import preflight

FILES = sorted(
    path
    for path in (ROOT / "tests/data/migrate").glob("*/*")
    if path.suffix in (".yaml", ".sh", ".py")
)
EXPLAINED = 0.9
# what `plan` says of a machine that lacks files, packages or keys, and not of a configuration
OUTSIDE = re.compile(
    r"no such file|this Python has no (vllm|sglang)|is not installed|there is no package"
)
ROWS_HERE = 64
PAIR = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
ROWS: dict[str, dict[str, Any]] = {
    "dpo": PAIR,
    "reward": PAIR,
    "kto": {"prompt": "2+2=", "completion": "4", "label": True},
    "sft": {"prompt": "2+2=", "completion": "4"},
}


@cache
def migrated(path: Path) -> Migration:
    return migrate_file(path)


def names(path: Path) -> str:
    return path.relative_to(ROOT / "tests/data/migrate").as_posix()


def test_there_are_at_least_five_of_every_library() -> None:
    assert {
        folder: sum(path.parent.name == folder for path in FILES) >= 5 for folder in LIBRARIES
    } == (dict.fromkeys(LIBRARIES, True))


@pytest.mark.parametrize("path", FILES, ids=names)
def test_the_library_is_recognised_and_its_keys_are_explained(path: Path) -> None:
    found = migrated(path)
    assert found.library == LIBRARIES[path.parent.name]
    assert len(found.notes) >= 10
    assert found.share >= EXPLAINED, [
        n.theirs for n in found.notes if n.state in ("unknown", "unread")
    ]


@pytest.mark.parametrize("path", FILES, ids=names)
def test_the_first_phase_of_plan_says_only_what_the_machine_lacks(path: Path) -> None:
    report = preflight(config_from_dict(migrated(path).config))
    assert [error for error in report.errors if not OUTSIDE.search(error)] == []


def test_odd_values_are_no_reason_to_crash() -> None:
    """Every value of every file is another kind of thing than it should be."""
    odd = [None, "x", [], {}, -1, 0, True, 1e30, [1], "a,b", {"a": 1}, 0.5, ""]
    for path in FILES:
        source = read_source(path)
        for shift in range(2):
            settings = {
                key: odd[(i + 5 * shift) % len(odd)] for i, key in enumerate(source.settings)
            }
            found = translated(replace(source, settings=settings))
            assert [note.theirs for note in found.notes] == list(settings)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("migrate") / "model"
    return make_tiny_model(folder, width=32, layers=1, heads=2, kv_heads=1, context=131072)


def at_hand(config: dict[str, Any], method: str, model: Path, folder: Path) -> dict[str, Any]:
    """The same configuration with a model, rows and an engine that are here."""
    tree = json.loads(json.dumps(config))
    tree.get("train", {}).pop("router_aux_loss", None)  # the model here has no experts
    rows = folder / "rows.jsonl"
    row = ROWS.get(method, {"prompt": "2+2=", "answer": "4"})
    text = {"text": "two and two are four " * 200}
    whole = tree["data"].get("blocks")
    lines = [text if whole else {**row, "prompt": f"{n}+0="} for n in range(ROWS_HERE)]
    rows.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    tree["model"] |= {"path": str(model), "dtype": "float32", "chat_template": "zephyr"}
    for key in ("tokenizer", "revision"):
        tree["model"].pop(key, None)
    for key in ("mixture", "options", "split", "columns", "template", "limit", "chat"):
        tree["data"].pop(key, None)
    tree["data"]["source"] = str(rows)
    if tree["data"].get("eval"):
        tree["data"]["eval"] = {"size": 4}
    tree.pop("engine", None)
    if "rollout" in tree:
        tree["rollout"]["engine"] = "native"
    train = tree["train"]
    for key in ("ranks", "deepspeed", "sequence_parallel", "tensor_parallel", "offload_weights"):
        train.pop(key, None)
    train["backend"] = "local"
    if "adapter" in tree:
        tree["adapter"] |= {"kind": "lora", "targets": "all-linear"}
    for section in ("critic", "teacher"):
        if tree.get(section, {}).get("path"):
            tree[section]["path"] = str(model)
    for reward in tree.get("rewards", []):
        if ":" in reward["name"] or reward["name"] in ("model", "math"):
            reward["name"] = "exact_number"
            reward.pop("options", None)
            reward.pop("kind", None)
    tree["run"] = {"dir": str(folder / "run")}
    return dict(tree)


def test_the_second_phase_passes_with_a_model_and_rows_that_are_here(
    model: Path, tmp_path: Path
) -> None:
    """One test for all files: what takes time is importing torch."""
    wrong = {}
    for path in FILES:
        found = migrated(path)
        folder = tmp_path / names(path)
        folder.mkdir(parents=True)
        config = config_from_dict(at_hand(found.config, found.method, model, folder))
        errors = [*preflight(config).errors, *run_checks(config).errors]
        if errors:
            wrong[names(path)] = errors
    assert wrong == {}
