"""Distillation by name in real runs: a student equal to its teacher has nothing to learn, another
one comes nearer; resumes are exact.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.offline_runs import WORDS, config, launch
from helpers.tiny_runs import digest, lines, tensors
from helpers.toys import SilentView, run
from reinforge.algorithms.catalogue import TABLE
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.trainer import build
from reinforge.core.env import RolloutContext
from reinforge.core.errors import InputError
from reinforge.core.sample import Group, Row
from reinforge.models.tiny import make_tiny_model
from reinforge.offline.export import export
from reinforge.rollout.players.demonstrations import DemonstrationRollout

TEACHER_FAMILY = {name: spec for name, spec in TABLE.items() if spec.family == "distillation"}
DISTILLATION = [name for name, spec in TEACHER_FAMILY.items() if not spec.kind.samples]
ON_POLICY = [name for name, spec in TEACHER_FAMILY.items() if spec.kind.samples]
ROWS: list[dict[str, Any]] = [
    {"prompt": f"{n} {w}:", "completion": w.upper()} for n, w in enumerate(WORDS)
]
HELD: list[dict[str, Any]] = [{**row, "prompt": f"9 {row['prompt']}"} for row in ROWS[:4]]
SHAPE: dict[str, Any] = {"layers": 1, "heads": 2, "kv_heads": 1, "context": 64, "spread": 0.1}
ROLLOUT = {"max_new_tokens": 6, "kv_gib": 0.01}


def taught(model: Path, folder: Path, steps: int) -> Path:
    cfg = config(
        str(model), folder / f"sft{steps}", "sft", steps=steps, train={"prompts_per_step": 12}
    )
    launch(cfg, [*ROWS, *HELD])
    return export(folder / f"sft{steps}", folder / f"taught{steps}")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A student, a wider teacher that was taught the rows, another one that knows nothing, one with
    other tokens, and a student that was taught a little: what it samples is not nonsense to the
    teacher.
    """
    folder = tmp_path_factory.mktemp("models")
    made = {
        "student": make_tiny_model(folder / "student", width=32, seed=0, **SHAPE),
        "teacher": taught(make_tiny_model(folder / "blank", width=64, seed=1, **SHAPE), folder, 25),
        "second": make_tiny_model(folder / "second", width=32, seed=2, **{**SHAPE, "spread": 0.4}),
        "other": make_tiny_model(
            folder / "other",
            width=32,
            seed=3,
            text=["APE BEE CAT"] * 9,
            vocabulary=280,
            **{**SHAPE, "spread": 0.4},
        ),
    }
    made["pupil"] = taught(made["student"], folder, 10)
    return {name: str(path) for name, path in made.items()}


def student_of(
    models: dict[str, str], folder: Path, name: str, of: str = "teacher", **sections: Any
) -> Any:
    section = {"path": models[of], **sections.pop("teacher", {})}
    return config(
        models[sections.pop("student", "student")], folder, name, teacher=section, **sections
    )


@pytest.mark.parametrize("name", DISTILLATION)
def test_it_comes_nearer(models: dict[str, str], tmp_path: Path, name: str) -> None:
    cfg = student_of(
        models, tmp_path / "run", name, steps=60, lr=1e-2, train={"prompts_per_step": 12}
    )
    launch(cfg, ROWS, HELD)
    metrics = lines(cfg)
    assert (
        metrics[-1]["eval/divergence"]
        < (0.95 if name == "uld" else 0.7) * metrics[0]["eval/divergence"]
    )
    assert (
        metrics[1]["distillation/loss"]
        == pytest.approx(metrics[1]["distillation/divergence"], rel=1e-5)
        and metrics[1]["distillation/loss"] > 0
    )


@pytest.mark.parametrize("name", [*DISTILLATION, "gkd", "opd", "minillm"])
def test_a_student_that_is_its_teacher_has_nothing_to_learn(
    models: dict[str, str], tmp_path: Path, name: str
) -> None:
    """Divergence 0 and, but for rounding, no gradient: the teacher reads the same tokens at the
    same places.
    """
    extra = {"rollout": ROLLOUT, "algorithm": {"group_size": 2}} if name in ON_POLICY else {}
    cfg = student_of(models, tmp_path / "run", name, of="student", steps=1, **extra)
    launch(cfg, ROWS)
    first = lines(cfg)[0]
    assert (
        first.get("distillation/divergence", 0.0) == pytest.approx(0, abs=1e-5)
        and first["train/grad_norm"] < 1e-4
    )
    if name in ("opd", "minillm"):
        assert first["policy/teacher_kl"] == pytest.approx(0, abs=1e-5)


def test_what_was_kept_on_disk_is_the_teacher(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Top-k from the file gives the run of top-k with the teacher at hand, and a resume does not
    load the teacher.
    """
    runs = {
        kind: student_of(
            models,
            tmp_path / kind,
            "topk",
            steps=6,
            teacher={"precompute": kind == "kept"},
            algorithm={"options": {"k": 8, "temperature": 1.5}},
        )
        for kind in ("there", "kept")
    }
    launch(runs["there"], ROWS, HELD)
    short = runs["kept"].model_copy(
        update={"train": runs["kept"].train.model_copy(update={"steps": 2})}
    )
    launch(short, ROWS, HELD)
    from reinforge.backends.teachers import Teachers

    monkeypatch.setattr(Teachers, "best", None)
    launch(runs["kept"], ROWS, HELD)
    theirs = tensors(runs["there"])
    ours = tensors(runs["kept"])
    for name, value in theirs.items():
        if name.startswith("model/"):
            torch.testing.assert_close(ours[name], value, atol=2e-5, rtol=1e-3)
    assert lines(runs["kept"])[0]["eval/divergence"] == pytest.approx(
        lines(runs["there"])[0]["eval/divergence"], abs=1e-5
    )


def test_several_teachers_are_a_weighted_mean(models: dict[str, str], tmp_path: Path) -> None:
    def first(name: str, **teacher: Any) -> float:
        cfg = student_of(
            models,
            tmp_path / name,
            "forward_kl",
            steps=1,
            teacher=teacher,
            train={"prompts_per_step": 12},
        )
        launch(cfg, ROWS)
        return lines(cfg)[0]["distillation/divergence"]

    both = first("both", weight=3.0, also=[{"path": models["second"], "weight": 1.0}])
    assert both == pytest.approx(
        0.75 * first("a") + 0.25 * first("b", path=models["second"]), rel=1e-5
    )


@pytest.mark.parametrize("name", ON_POLICY)
def test_on_policy(models: dict[str, str], tmp_path: Path, name: str) -> None:
    """Student and teacher agree more on what the student writes: per token, and for minillm, which
    counts what a token leads to, per answer.
    """
    cfg = student_of(
        models,
        tmp_path / "run",
        name,
        student="pupil",
        steps=40,
        lr=3e-3,
        algorithm={"group_size": 8, "options": {"share": 1.0} if name == "gkd" else {}},
        rollout=ROLLOUT,
        train={"prompts_per_step": 12},
    )
    launch(cfg, [{"prompt": row["prompt"]} for row in ROWS])
    metrics = lines(cfg)
    key = "distillation/divergence" if name == "gkd" else "policy/teacher_kl"
    start, end = (
        sum(m[key] * (m["response/length"] if name == "minillm" else 1) for m in part) / 4
        for part in (metrics[:4], metrics[-4:])
    )
    assert 0 < end < 0.75 * start


def test_gkd_mixes_and_resumes_exactly(models: dict[str, str], tmp_path: Path) -> None:
    whole, cut = (
        student_of(
            models, tmp_path / run, "gkd", steps=4, algorithm={"group_size": 1}, rollout=ROLLOUT
        )
        for run in ("whole", "cut")
    )
    launch(whole, ROWS)
    launch(cut.model_copy(update={"train": cut.train.model_copy(update={"steps": 2})}), ROWS)
    launch(cut, ROWS)
    assert digest(whole) == digest(cut)
    trainer: Any = build(
        student_of(models, tmp_path / "share", "gkd", rollout=ROLLOUT),
        SilentView(),
        CallerObjects(data=ROWS),
    )
    asked: list[str] = []

    async def sampled(row: Row, context: RolloutContext) -> Group:
        group = context.group
        asked.append(group)
        return Group(row, [])

    rollout = trainer.source.rollout
    assert isinstance(rollout, DemonstrationRollout) and rollout.share == 0.5
    rollout.rollout = sampled
    row = trainer.source.rows[0]
    groups = [run(rollout(row, RolloutContext(f"g{i}"))) for i in range(200)]
    assert 80 < len(asked) < 120
    given = next(g for g in groups if g.samples)
    assert (
        given.texts == ["APE"]
        and given.samples[0].n_trained == 4
        and given.samples[0].reward == 0.0
    )


@pytest.mark.parametrize(
    ("name", "sections", "said"),
    [
        ("sft", {}, "imitates nobody"),
        ("forward_kl", {"teacher": None}, "needs one"),
        ("jsd", {"teacher": {"precompute": True}}, "does not fit a disk"),
        ("forward_kl", {"algorithm": {"options": {"beta": 0.5}}}, "has no setting 'beta'"),
        ("forward_kl", {"teacher": {"path": "other"}}, "has other tokens"),
    ],
)
def test_refusals(
    models: dict[str, str], tmp_path: Path, name: str, sections: dict[str, Any], said: str
) -> None:
    teacher = sections.pop("teacher", {})
    section = None if teacher is None else {"path": models["teacher"], **teacher}
    if section is not None and section["path"] in models:
        section["path"] = models[section["path"]]
    with pytest.raises(InputError, match=said):
        launch(
            config(
                models["student"],
                tmp_path / "run",
                name,
                **({"teacher": section} if section else {}),
                **sections,
            ),
            ROWS,
        )
