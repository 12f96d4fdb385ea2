"""The tables of `reinforge migrate`: our side exists, every row says something, and the pages are
made from them.
"""

from __future__ import annotations

import re
import runpy

import pytest

from helpers.source_tree import ROOT
from reinforge.algorithms import catalogue
from reinforge.config.reference import reference_markdown
from reinforge.migrate.source import LIBRARIES
from reinforge.migrate.table import KeyRow, load_table

KNOWN = set(re.findall(r"^\| `([\w.]+)`", reference_markdown(), re.MULTILINE))
# sections of docs/migrate.md: which library
PAGES = {
    "TRL": "trl",
    "veRL": "verl",
    "OpenRLHF": "openrlhf",
    "LLaMA-Factory": "llamafactory",
    "NeMo-RL": "nemo_rl",
}
METHODS = ("sft", "dpo", "kto", "reward", "grpo", "rloo", "ppo", "gkd", "cpo", "opd", "rl")
ROWS = [(name, row) for name in LIBRARIES for row in load_table(name).rows]


@pytest.mark.parametrize("name", LIBRARIES)
def test_every_key_of_ours_is_in_the_schema(name: str) -> None:
    for row in load_table(name).rows:
        for ours in filter(None, row.ours.split(", ")):
            assert ours in KNOWN or any(known.startswith(f"{ours}.") for known in KNOWN), (
                f"{row.theirs}: there is no key {ours}"
            )


def test_every_row_is_a_key_of_ours_or_says_why_not() -> None:
    for name, row in ROWS:
        assert row.ours or row.state in ("nothing", "missing"), (name, row.theirs)
        assert row.state == "same" or len(row.says) > 8, (name, row.theirs)
        if row.ours and row.state in ("same", "differs") and row.read == "value":
            assert ", " not in row.ours, f"{row.theirs}: one value, several keys"


def test_values_of_ours_are_some() -> None:
    lists = {"algorithm.reduce": catalogue.REDUCERS, "algorithm.kl.estimator": catalogue.ESTIMATORS}
    for _, row in ROWS:
        for value in (row.values or {}).values():
            assert row.ours not in lists or value in lists[row.ours]


@pytest.mark.parametrize("name", LIBRARIES)
def test_no_key_stands_twice_for_one_method(name: str) -> None:
    seen: dict[tuple[str, str], KeyRow] = {}
    own = load_table(name).rows
    for row in own:
        for key in row.theirs:
            for method in row.methods or METHODS:
                if "*" not in key:
                    before = seen.setdefault((key, method), row)
                    both = before.methods and not row.methods  # a general row after a special one
                    assert before is row or both, (key, method)


def test_keys_of_the_page_are_known_to_the_command() -> None:
    text = (ROOT / "docs/migrate.md").read_text()
    for title, name in PAGES.items():
        part = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
        assert part is not None
        last = ""
        unknown = []
        for cell in re.findall(r"^\| (.+?) \| ", part.group(1), re.MULTILINE):
            for code in re.findall(r"`([^`]+)`", cell):
                key = code.lstrip("-").partition(":")[0].partition(" ")[0]
                key = key.rpartition("Config.")[2]
                if key.startswith("."):  # goes on from the section of the one before
                    key = last.rpartition(".")[0] + key
                if not re.fullmatch(r"[\w.]+", key) or (key.count(".") == 0 and not _is_key(key)):
                    continue
                last = key if "." in key else last
                rows = [load_table(name).find(key, method) for method in METHODS]
                if not any(rows) and not load_table(name).find(f"{key}.x", "grpo"):
                    unknown.append(key)
        assert set(unknown) <= NOT_KEYS, sorted(set(unknown) - NOT_KEYS)


def _is_key(word: str) -> bool:
    return "_" in word and word not in NOT_KEYS


# values, classes and files that stand in the first column
NOT_KEYS = {
    "custom_reward_function", "clip_cov", "kl_cov", "geo_mean", "dppo_tv", "dppo_kl", "low_var_kl",
    "reinforce_plus_plus", "reinforce_plus_plus_baseline", "grpo_passk", "dr_grpo",
    "reinforce_baseline", "group_norm", "token_truncate", "token_mask", "sequence_truncate",
    "sequence_mask", "kto_pair", "normalize_then_sum", "keep_start", "dataset_info.json",
}  # fmt: skip


def test_the_pages_are_what_the_tables_say() -> None:
    made = runpy.run_path(str(ROOT / "tools" / "gen_migrate.py"))
    fix = "run: make reference"
    page = (ROOT / "docs/migrate.md").read_text(encoding="utf-8")
    assert made["with_counts"](page) == page, fix
    assert made["reference"]() == (ROOT / "docs/reference/migrate.md").read_text("utf-8"), fix
