"""docs/migrate.md: our side of every table exists."""

from __future__ import annotations

import re

import pytest

from helpers.source_tree import ROOT
from reinforge.algorithms import catalogue
from reinforge.config.reference import reference_markdown
from reinforge.config.schema import Config

PAGE = (ROOT / "docs/migrate.md").read_text()
KNOWN = set(re.findall(r"^\| `([\w.]+)`", reference_markdown(), re.MULTILINE))
SECTIONS = "|".join(Config.model_fields)
OURS = re.compile(rf"^((?:{SECTIONS})(?:\.\w+)+)(?:: (.+))?$")
LISTS = {
    "algorithm.name": catalogue.TABLE,
    "algorithm.reduce": catalogue.REDUCERS,
    "algorithm.correction.name": catalogue.CORRECTIONS,
    "algorithm.kl.estimator": catalogue.ESTIMATORS,
    "algorithm.selection": catalogue.SELECTIONS,
}
MEANT = {  # what was wrong or missing once
    "use_vllm": "rollout.engine: vllm",
    "reward.custom_reward_function.path": "kind: verl",
    "reward_funcs": "kind: trl",
    "ref_model_mixup_alpha": "kind: ema",
    "trust_remote_code": "model.trust_remote_code",
    "lr_scheduler_type": "train.schedule.kind",
    "--rollout.n_samples_per_prompt": "algorithm.group_size",
    "algorithm.filter_groups.enable": "algorithm.dynamic_sampling",
    "cutoff_len": "data.max_length",
    "quantization_bit: 4": "adapter.kind: qlora",
}


def rows() -> list[tuple[str, str]]:
    found = [
        tuple(cell.strip() for cell in line.strip("|").split(" | "))
        for line in PAGE.splitlines()
        if line.startswith("| `")
    ]
    assert all(len(row) == 2 for row in found), [row for row in found if len(row) != 2]
    return [(row[0], row[1].removesuffix(" |")) for row in found if row[1] != "here"]


def test_every_key_of_ours_is_in_the_schema() -> None:
    mentioned = 0
    for theirs, ours in rows():
        for code in re.findall(r"`([^`]+)`", ours):
            if (match := OURS.match(code)) is None:
                continue
            key = re.sub(r"\.\d+(?=\.|$)", ".N", match.group(1))
            mentioned += 1
            assert key in KNOWN or any(known.startswith(f"{key}.") for known in KNOWN), (
                f"{theirs}: there is no key {key}"
            )
    assert mentioned > 250


def test_every_value_of_ours_is_one() -> None:
    """Where a key is named with a value, the values beside it in the same cell are meant for it
    too.
    """
    for theirs, ours in rows():
        key = None
        for code in re.findall(r"`([^`]+)`", ours):
            match = OURS.match(code)
            key, value = (match.group(1), match.group(2)) if match else (key, code)
            if (
                key in LISTS
                and value is not None
                and re.fullmatch(r"[\w+]+", value)
                and value not in theirs.replace("`", " ").split()
            ):
                assert value in LISTS[key], f"{theirs}: {value} is no {key}"


@pytest.mark.parametrize("theirs", MEANT)
def test_everyday_keys_lead_where_they_should(theirs: str) -> None:
    found = [ours for left, ours in rows() if f"`{theirs}`" in left]
    assert found and any(MEANT[theirs] in ours for ours in found), found


def test_every_row_says_something() -> None:
    assert len(rows()) > 180
    for theirs, ours in rows():
        plain = re.sub(r"`[^`]*`", "", ours)
        assert "`" in ours or re.search(
            r"\bnot there\b|\bnothing\b|\brefused\b|tokenizer's own", plain
        ), theirs
