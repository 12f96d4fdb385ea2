"""docs/gallery.md and its pictures are those of the results that were kept, and its commands are
those of recipes that load.
"""

from __future__ import annotations

import json
import sys
from xml.etree import ElementTree

import pytest

from helpers.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
sys.path.insert(0, str(ROOT / "tools"))

import gallery
import gen_gallery

from reinforge.config.load import load_config


def test_page_and_pictures_are_fresh() -> None:
    text = gen_gallery.PAGE.read_text(encoding="utf-8")
    assert text == gen_gallery.with_contents(text), "run tools/gen_gallery.py"
    drawn = gen_gallery.drawn()
    assert {path: path.read_text(encoding="utf-8") for path in drawn} == drawn
    assert set(gen_gallery.PICTURES.iterdir()) == drawn.keys()


@pytest.mark.parametrize("name", gallery.ENTRIES)
def test_the_command_of_an_entry_loads(name: str) -> None:
    """With the settings that the page shows."""
    entry = gallery.ENTRIES[name]
    cfg = load_config(ROOT / "recipes" / f"{entry.recipe}.yaml", list(entry.settings))
    assert cfg.model.device == "cpu"
    words = " ".join(entry.commands)
    assert cfg.model.path in words, "made by a command before it"
    if cfg.teacher is not None:
        assert str(cfg.teacher.path) in words


def test_a_picture_ends_where_the_runs_end() -> None:
    """The last number of a curve is the mean of the seeds' last ones."""
    kept = json.loads(gallery.RESULTS.read_text(encoding="utf-8"))["entries"]
    assert kept.keys() == gallery.ENTRIES.keys()
    for name, runs in kept.items():
        last = sum(run["curve"][-1][1] for run in runs) / len(runs)
        drawn = ElementTree.parse(gen_gallery.PICTURES / f"{name}.svg").getroot()
        bold = [part.text for part in drawn if part.get("font-weight") == "bold"]
        assert bold == [f"{last:.4g}"]


def test_families_are_mixed() -> None:
    found = gen_gallery.pictures()
    assert len(found) >= 10
    assert len({picture.family for picture in found}) >= 5
    assert len({picture.title for picture in found}) == len(found)
