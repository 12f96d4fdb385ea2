"""The configuration of pipelines: defaults, references, seeds, directories, and everything that can
be wrong with the names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from reinforge.config.load import load_config
from reinforge.config.pipeline import Pipeline, load_any, merge, pipeline_from_dict
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.pipelines.artefact import differences, hash_path, inputs_of, makes, path_in
from reinforge.pipelines.plan import first_phase, stand_in
from reinforge.pipelines.run import lineage, redone

DEFAULTS: dict[str, Any] = {
    "model": {"path": "org/base", "device": "cpu"},
    "data": {"source": "arithmetic:chain", "options": {"size": 60}, "eval": {"size": 4}},
    "rewards": [{"name": "exact_number"}],
    "train": {"steps": 6, "learning_rate": 3e-3},
}
SFT: dict[str, Any] = {"name": "sft", "algorithm": {"name": "sft"}}
GRPO: dict[str, Any] = {"name": "grpo", "model": {"from": "sft"}, "algorithm": {"name": "grpo"}}


def pipeline(*stages: dict[str, Any], overrides: tuple[str, ...] = (), **top: Any) -> Pipeline:
    return pipeline_from_dict(
        {"defaults": DEFAULTS, "stages": list(stages), "run": {"dir": "runs/p", "seed": 7}, **top},
        overrides=overrides,
    )


def wrong(*stages: dict[str, Any], **top: Any) -> str:
    with pytest.raises(InputError) as caught:
        pipeline(*stages, **top)
    return str(caught.value)


def config(found: Pipeline, name: str) -> Config:
    made = found[name].config(lambda reference: str(path_in(found, reference, name)))
    assert isinstance(made, Config)
    return made


# ---- merging ----


def test_merge_is_deep_lists_replace_and_null_removes() -> None:
    base = {"a": {"x": 1, "y": {"z": 2}}, "l": [1, 2], "gone": {"k": 1}}
    assert merge(base, {"a": {"y": {"w": 3}}, "l": [3], "gone": None}) == {
        "a": {"x": 1, "y": {"z": 2, "w": 3}},
        "l": [3],
    }
    assert base["gone"] == {"k": 1} and base["a"] == {
        "x": 1,
        "y": {"z": 2},
    }, "nothing was changed in place"
    assert merge({"p": {"from": "a"}}, {"p": "b"}) == {"p": "b"} and merge(
        {"p": "b"}, {"p": {"from": "a"}}
    ) == {"p": {"from": "a"}}


def test_a_stage_beats_the_defaults() -> None:
    found = pipeline(SFT, {**GRPO, "train": {"steps": 9}})
    sft = config(found, "sft")
    grpo = config(found, "grpo")
    assert (sft.train.steps, grpo.train.steps, grpo.train.learning_rate) == (6, 9, 3e-3)
    assert (sft.model.path, grpo.model.path, grpo.model.device) == (
        "org/base",
        "runs/p/01-sft/model",
        "cpu",
    )
    assert grpo.data.options == {"size": 60}


def test_another_source_does_not_inherit_options() -> None:
    found = pipeline({**SFT, "data": {"source": "rows.jsonl"}})
    assert config(found, "sft").data.options == {} and config(found, "sft").data.eval.size == 4


def test_defaults_reach_only_the_kinds_that_know_them() -> None:
    """An evaluation has no `train`, and gets none of it; what a configuration must have is filled
    in and means nothing.
    """
    found = pipeline(SFT, {"name": "eval", "model": {"from": "sft"}})
    assert found["eval"].kind == "eval" and "train" not in found["eval"].settings
    inputs = inputs_of(found["eval"], config(found, "eval"), {"sft": "1"})
    assert (
        not any(key.startswith(("train.", "algorithm.")) for key in inputs["settings"])
        and inputs["settings"]["model.path"] == "from sft"
    )


# ---- seeds and directories ----


def test_seeds_depend_on_the_name_and_not_on_the_place() -> None:
    alone = pipeline(GRPO | {"model": {"path": "org/x"}})
    second = pipeline(SFT, GRPO)
    assert alone["grpo"].seed == second["grpo"].seed != second["sft"].seed
    assert config(second, "grpo").run.seed == second["grpo"].seed
    assert config(pipeline(SFT | {"run": {"seed": 5}}), "sft").run.seed == 5
    assert pipeline(SFT, run={"dir": "runs/p", "seed": 8})["sft"].seed != second["sft"].seed


def test_directories(tmp_path: Path) -> None:
    run = {"dir": str(tmp_path)}
    assert [s.dir.name for s in pipeline(SFT, GRPO, run=run).stages] == ["01-sft", "02-grpo"]
    (tmp_path / "01-sft").mkdir()
    before = {"name": "first", "algorithm": {"name": "sft"}}
    assert [s.dir.name for s in pipeline(before, SFT, GRPO, run=run).stages] == [
        "01-first",
        "01-sft",
        "03-grpo",
    ]


# ---- references ----


def test_references_everywhere() -> None:
    reward = {
        "name": "rm",
        "model": {"from": "sft"},
        "algorithm": {"name": "bradley_terry"},
        "data": {"source": {"from": "pairs"}},
        "rewards": None,
    }
    ppo = {
        "name": "ppo",
        "model": {"from": "sft"},
        "algorithm": {"name": "ppo"},
        "critic": {"path": {"from": "rm"}},
        "rewards": [{"name": "model", "options": {"path": {"from": "rm"}}}],
    }
    pairs = {
        "name": "pairs",
        "kind": "generate",
        "model": {"from": "sft"},
        "generate": {"n": 4, "pairs": "best-worst"},
    }
    found = pipeline(SFT, pairs, reward, ppo)
    made = config(found, "ppo")
    assert (
        made.critic is not None
        and made.critic.path == "runs/p/03-rm/model"
        and made.rewards[0].options == {"path": "runs/p/03-rm/model"}
    )
    assert (
        config(found, "rm").data.source == "runs/p/02-pairs/data.jsonl"
        and config(found, "rm").rewards == []
    )
    assert found["ppo"].parents == ("sft", "rm") and makes(found["rm"], found) == {
        "reward model": "model"
    }
    assert redone(found, ["pairs"]) == {"pairs", "rm", "ppo"} and redone(found, ["ppo"]) == {"ppo"}
    assert lineage(found, found["ppo"]) == [
        "`sft`: sft from `org/base`",
        "`ppo`: ppo from the stage `sft`",
    ]


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        (
            [SFT, {**GRPO, "model": {"from": "stf"}}],
            (
                "stage grpo: model.path: there is no stage 'stf'; did you mean sft? Earlier stages:"
                " sft."
            ),
        ),
        (
            [GRPO, SFT],
            "stage grpo: model.path: the stage sft comes later. Move it before this one.",
        ),
        ([SFT, {**GRPO, "model": {"from": "grpo"}}], "a stage cannot start from itself"),
        ([SFT, SFT], "there are two stages of this name"),
        ([{"name": "a b"}], "'a b' is no name"),
        ([{**SFT, "kind": "trian"}], "there is no kind 'trian'; did you mean train?"),
        (
            [SFT, {"name": "eval", "model": {"from": "sft"}, "train": {"steps": 1}}],
            "a stage of kind eval has no such section (but train has)",
        ),
        ([{**SFT, "rewrds": []}], "stage sft: rewrds: unknown section; did you mean rewards?"),
        ([SFT, {**GRPO, "model": {"from": "sft", "path": "x"}}], "give `from` or `path`, not both"),
        ([SFT, {"name": "export"}], "model: which stage's? Write `model: {from: sft}`."),
        ([{**SFT, "run": {"dir": "x"}}], "a stage has its own directory"),
    ],
)
def test_what_is_wrong_is_said(stages: list[dict[str, Any]], said: str) -> None:
    top = {"defaults": {**DEFAULTS, "model": {"device": "cpu"}}} if "which stage" in said else {}
    assert said in wrong(*stages, **top)


def test_several_problems_at_once() -> None:
    text = wrong({**SFT, "rewrds": []}, {**GRPO, "model": {"from": "sfd"}})
    assert text.startswith("pipeline: 2 problems:") and "rewrds" in text and "sfd" in text
    assert "run.dir: is required" in wrong(
        SFT, run={}
    ) and "stagse: unknown key; did you mean stages?" in wrong(SFT, stagse=[])


def test_the_wrong_kind_of_thing() -> None:
    """Of the right name, but a model where data are needed, and the other way round."""
    pairs = {"name": "more", "kind": "generate", "model": {"from": "sft"}}
    for stage, said in (
        (
            {**GRPO, "model": {"from": "more"}},
            "model.path: the stage more makes data, and a model or a reward model is needed here",
        ),
        (
            {**GRPO, "data": {"source": {"from": "sft"}}},
            "data.source: the stage sft makes a model, and data is needed here",
        ),
        (
            {**GRPO, "adapter": {"path": {"from": "sft"}}},
            "adapter.path: the stage sft makes a model, and an adapter is needed here",
        ),
        (
            {**GRPO, "rewards": [{"name": "model", "options": {"path": {"from": "sft"}}}]},
            "and a reward model is needed here",
        ),
    ):
        report, _ = first_phase(pipeline(SFT, pairs, stage))
        assert (
            len(report.errors) == 1
            and report.errors[0].startswith("stage grpo: ")
            and said in report.errors[0]
        )
    lora = {**SFT, "adapter": {"rank": 4}}
    assert first_phase(
        pipeline(
            lora, {**GRPO, "adapter": {"path": {"from": "sft"}}, "model": {"path": "org/base"}}
        )
    )[0].ok


# ---- files and overrides ----


def test_from_a_file_with_lines_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(
        yaml.safe_dump({"defaults": DEFAULTS, "stages": [SFT, GRPO], "run": {"dir": "runs/p"}})
    )
    found = load_any(
        path,
        [
            "stages.grpo.train.steps=2",
            "defaults.train.learning_rate=1e-4",
            "stages.0.train.steps=1",
        ],
    )
    assert isinstance(found, Pipeline)
    assert (
        config(found, "sft").train.steps,
        config(found, "grpo").train.steps,
        config(found, "grpo").train.learning_rate,
    ) == (1, 2, 1e-4)
    for override, said in (
        ("stages.grop.train.steps=2", "did you mean grpo?"),
        ("train.steps=2", "Write `stages.<name>.train.steps=2`"),
    ):
        with pytest.raises(InputError, match="override") as caught:
            load_any(path, [override])
        assert said in str(caught.value)
    with pytest.raises(InputError, match="this is a pipeline"):
        load_config(path)


def test_a_wrong_key_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(
        "defaults:\n  model: {path: org/base}\n  data: {source: 'arithmetic:chain'}\n  train:"
        " {stesp: 3, steps: 1}\nstages:\n  - name: sft\n    algorithm:\n      nam: sft\n      name:"
        " sft\nrun: {dir: runs/p}\n"
    )
    found = load_any(path)
    assert isinstance(found, Pipeline)
    with pytest.raises(InputError) as caught:
        config(found, "sft")
    assert "algorithm.nam (line 8): unknown key" in str(
        caught.value
    ) and "train.stesp (line 4, in defaults): unknown key" in str(caught.value)


# ---- what is known of inputs ----


def test_inputs_name_what_changed(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1", "completion": "2"}\n')
    data = {"data": {"source": str(rows)}}
    first = pipeline({**SFT, **data})
    old = inputs_of(first["sft"], config(first, "sft"), {})
    assert old["files"] == {"data.source": hash_path(rows)}
    same = pipeline(
        {
            **SFT,
            **data,
            "train": {"max_grad_norm": 1.0},
            "run": {"log": {"samples": 1}, "checkpoint": {"every": 1}},
        }
    )
    assert differences(old, inputs_of(same["sft"], config(same, "sft"), {})) == [], (
        "a default said aloud, and how the run is watched"
    )
    other = pipeline({**SFT, **data, "train": {"max_grad_norm": 2.0}})
    rows.write_text('{"prompt": "1", "completion": "3"}\n')
    assert differences(old, inputs_of(other["sft"], config(other, "sft"), {"x": "1"})) == [
        "train.max_grad_norm was the default and is 2.0",
        "the contents of data.source are other ones",
        "the stage x made something else",
    ]


def test_large_files_are_known_by_their_edges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reinforge.pipelines.artefact.WHOLE_BYTES", 100)
    monkeypatch.setattr("reinforge.pipelines.artefact.EDGE_BYTES", 10)
    path = tmp_path / "x"
    found = []
    for text in ("a" * 200, "b" + "a" * 199, "a" * 199 + "b", "a" * 201):
        path.write_text(text)
        found.append(hash_path(path))
    assert len(set(found)) == 4


def test_plan_stands_in_the_first_model_of_a_line() -> None:
    found = pipeline(SFT, GRPO, {"name": "eval", "model": {"from": "grpo"}})
    made, missing = stand_in(found, found["eval"])
    assert (
        made is not None
        and made.model.path == "org/base"
        and [r.key for r in missing] == ["model.path"]
    )
