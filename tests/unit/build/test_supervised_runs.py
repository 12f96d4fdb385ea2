"""SFT in all its forms: dft, NEFTune, mixtures, whole texts. Everything through a config."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.offline_runs import WORDS, config, launch, small_model
from helpers.tiny_runs import digest, lines
from helpers.toys import SilentView
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.trainer import build
from reinforge.core.errors import InputError
from reinforge.data.cursor import Cursor
from reinforge.data.mixture import MixtureCursor

ROWS: list[dict[str, Any]] = [
    {"prompt": f"{n} {w}:", "completion": w.upper()} for n, w in enumerate(WORDS)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_model(tmp_path_factory.mktemp("small"))


@pytest.mark.parametrize("name", ["sft", "dft"])
def test_it_learns(model: str, tmp_path: Path, name: str) -> None:
    """dft is p times the NLL: its first loss is the mean of -p log p, far below the NLL of a model
    that knows nothing. Ten seeds of model and run end between 0.00 and 0.09 (sft) and between 0.17
    and 0.54 (dft) of the first loss.
    """
    cfg = config(model, tmp_path / "run", name, steps=60, lr=1e-2, train={"prompts_per_step": 12})
    launch(cfg, ROWS, [{**row, "prompt": f"9 {row['prompt']}"} for row in ROWS[:4]])
    metrics = lines(cfg)
    assert metrics[-1]["eval/loss"] < 0.75 * metrics[0]["eval/loss"]
    first = metrics[1]
    if name == "sft":
        assert first["sft/loss"] == pytest.approx(first["sft/nll"], rel=1e-5)
    else:
        assert 0 < first["sft/loss"] < 0.1 * first["sft/nll"]


def test_noise_is_on_in_training_only_and_resumes_exactly(model: str, tmp_path: Path) -> None:
    held = [{**row, "prompt": f"9 {row['prompt']}"} for row in ROWS[:4]]
    noisy = {"neftune": 5.0}
    runs = {"plain": {}, "whole": noisy, "cut": noisy}
    made = {}
    for name, train in runs.items():
        made[name] = cfg = config(
            model,
            tmp_path / name,
            "sft",
            steps=5,
            train=train,
            run={
                "dir": str(tmp_path / name),
                "seed": 3,
                "checkpoint": {"every": 0},
                "log": {"samples_every": 0},
            },
        )
        if name == "cut":
            launch(
                cfg.model_copy(update={"train": cfg.train.model_copy(update={"steps": 2})}),
                ROWS,
                held,
            )
        launch(cfg, ROWS, held)
    start = [lines(made[name])[0]["eval/loss"] for name in runs]
    assert start[0] == pytest.approx(start[1], abs=1e-6)  # evaluation sees no noise
    assert abs(lines(made["plain"])[1]["sft/loss"] - lines(made["whole"])[1]["sft/loss"]) > 1e-3
    assert digest(made["whole"]) == digest(made["cut"])
    with pytest.raises(InputError, match="neftune"):
        config(model, tmp_path / "dpo", "dpo", train=noisy)


def test_shares_of_a_mixture() -> None:
    """After any number of draws every source is within a row of its share; each source is walked in
    its own epochs.
    """
    rows = {"a": range(10), "b": range(10, 13), "c": range(13, 20)}
    weights = {"a": 5.0, "b": 2.0, "c": 1.0}
    cursor = MixtureCursor(rows, weights, seed=1, shuffle=True)
    drawn: list[int] = []
    for k in (1, 7, 3, 20, 33, 64):
        drawn += cursor.take(k)
        counts = Counter("a" if i < 10 else "b" if i < 13 else "c" for i in drawn)
        assert all(abs(counts[name] - len(drawn) * weights[name] / 8) <= 1 for name in weights)
    assert [i for i in drawn if i < 10] == Cursor(10, 1, True).take(sum(i < 10 for i in drawn))
    again = MixtureCursor(rows, weights, seed=1, shuffle=True)
    head = again.take(41)
    state = json.loads(json.dumps(again.state()))
    other = MixtureCursor(rows, weights, seed=1, shuffle=True)
    other.load(state)
    assert head + other.take(87) == drawn and other.epoch == 128 / 20
    with pytest.raises(InputError, match="another mixture"):
        MixtureCursor(rows, {**weights, "c": 2.0}, seed=1, shuffle=True).load(state)


def test_a_mixture_of_files(model: str, tmp_path: Path) -> None:
    """Columns differ by source; rows held out come from all; the run resumes exactly."""
    names = {"good": ("prompt", "completion", 10), "odd": ("q", "a", 4)}
    for name, (question, answer, n) in names.items():
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({question: f"{name} {i}:", answer: "xy"}) + "\n" for i in range(n))
        )
    data = {
        "source": "mixture",
        "eval": {"size": 2},
        "mixture": [
            {"source": str(tmp_path / "good.jsonl"), "weight": 1, "name": "good"},
            {
                "source": str(tmp_path / "odd.jsonl"),
                "weight": 2,
                "name": "odd",
                "columns": {"prompt": "q", "completion": "a"},
            },
        ],
    }
    whole, cut = (
        config(model, tmp_path / run, "sft", steps=5, data=data) for run in ("whole", "cut")
    )
    trainer = build(whole, SilentView(), CallerObjects())
    seen = Counter(
        trainer.row(i)[0].uid.partition(":")[0] for i in trainer.row_sampler.cursor.take(30)
    )  # type: ignore[union-attr]
    assert seen == {"good": 10, "odd": 20}
    for cfg, steps in ((whole, 5), (cut, 2), (cut, 5)):
        from reinforge.build.run import train_config

        train_config(
            cfg.model_copy(update={"train": cfg.train.model_copy(update={"steps": steps})}),
            CallerObjects(),
            SilentView(),
        )
    assert digest(whole) == digest(cut)
    with pytest.raises(InputError, match="source: mixture"):
        config(model, tmp_path / "x", "sft", data={**data, "source": "a.jsonl"})
    with pytest.raises(InputError, match="same name"):
        config(model, tmp_path / "x", "sft", data={**data, "mixture": [data["mixture"][0]] * 2})  # type: ignore[index]


def test_whole_texts(model: str, tmp_path: Path) -> None:
    cfg = config(
        model, tmp_path / "run", "sft", steps=1, data={"source": "python", "loss_on": "all"}
    )
    trainer = build(cfg, SilentView(), CallerObjects(data=[{"text": "abc"}, {"text": "de"}]))
    samples = [trainer.row(i)[0] for i in range(2)]  # type: ignore[union-attr]
    assert [s.tokens[-1].item() for s in samples] == [2, 2] and [s.n_trained for s in samples] == [
        3,
        2,
    ]
    assert all(torch.equal(s.trained, torch.arange(len(s.tokens)) > 0) for s in samples)
