"""Why engine and trainer disagree: differences that were planted are named, and nothing else is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.mismatched_runs import RUNS, judged, make_models, mismatched_run
from helpers.toys import tokens_of
from reinforge.build.mismatch import MismatchReport, plan_mismatch
from reinforge.build.mismatch_causes import find_causes
from reinforge.build.readings import LogprobReader, LogprobReading, part_of
from reinforge.cli.main import main
from reinforge.cli.mismatch import print_report
from reinforge.config.load import config_from_dict
from reinforge.core.errors import InputError
from reinforge.core.sample import Sample


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("mismatch"))


def named(found: MismatchReport) -> list[str]:
    return [cause.name for cause in found.causes]


# ---- whole runs ----


@pytest.mark.parametrize("name", ["dtype", "temperature", "template", "never updated"])
def test_a_planted_difference_is_named(name: str, models: Path, tmp_path: Path) -> None:
    run = mismatched_run(name, models, tmp_path / "run")
    found = judged(name, run, 8)
    assert found.differs and found.kept
    assert named(found)[0] == RUNS[name].cause
    assert found.causes[0].explained > 0.5
    assert found.tried[0].name == RUNS[name].cause
    assert found.tried[0].left < 0.5 * min(t.left for t in found.tried[1:])


def test_stale_weights_are_named_with_their_version(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = mismatched_run("stale", models, tmp_path / "run")
    found = judged("stale", run, 8, step=4)
    assert named(found) == ["stale weights"] and found.causes[0].explained > 0.99
    assert "1 update behind: version 2, and the samples say 3" in found.causes[0].what
    assert "model.embed_tokens.weight" in found.causes[0].evidence[0]

    print_report(found)
    page = capsys.readouterr().out
    assert "Cause: stale weights" in page
    assert "turn      see that the engine gets the weights" in page
    # the engine of now is a healthy one
    assert found.paths is not None and found.paths.trainer < 1e-5 < found.paths.told
    assert "What differed then is not in this code and configuration" in page

    # what was kept is enough: no server is started, and the verdict is the same
    served = tmp_path / "served"
    shutil.copytree(run, served)
    _set(served, "rollout", "engine", "vllm")
    assert named(judged("stale", served, 8, step=4)) == ["stale weights"]
    (served / "rollouts" / "step-00000002.safetensors").unlink()
    with pytest.raises(InputError, match=r"step 2 are not kept.*run\.keep_rollouts"):
        plan_mismatch(served, 4)


def _set(run: Path, section: str, key: str, value: Any) -> None:
    config = json.loads((run / "config.json").read_text())
    config[section][key] = value
    (run / "config.json").write_text(json.dumps(config))


def test_other_experts_are_named_with_the_first_choice(models: Path, tmp_path: Path) -> None:
    found = judged("routing", mismatched_run("routing", models, tmp_path / "run"), 8)
    assert named(found)[0] == "routing"
    assert found.causes[0].turn == "train.router_replay=on"
    assert "choices are of other experts" in found.causes[0].evidence[0]
    assert "block" in found.causes[0].evidence[1]


def test_nothing_is_named_where_nothing_differs(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = mismatched_run("copy", models, tmp_path / "run", train={"steps": 2})
    assert main(["runs", "mismatch", str(run)]) == 0
    assert "Nothing differs" in capsys.readouterr().out


def test_rollouts_that_were_not_kept_are_generated_again(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = mismatched_run(
        "fp8", models, tmp_path / "run", run={"keep_rollouts": False}, train={"steps": 2}
    )
    capsys.readouterr()
    assert main(["runs", "mismatch", str(run), "--json"]) == 1
    told = capsys.readouterr()
    assert "note: the rollouts are not kept" in told.err
    found = json.loads(told.out)
    assert found["kept"] is False and found["differs"] is True
    [cause] = found["causes"]
    assert cause["name"] == "dtype" and "rollout.precision" in cause["turn"]


def test_the_first_operation_that_differs_is_named(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No setting explains it, and the engine gives the same numbers again."""
    run = mismatched_run("operation", models, tmp_path / "run", train={"steps": 2})
    found = judged("operation", run, 8)
    assert named(found) == ["numerics"] and found.causes[0].explained > 0.99
    assert found.paths is not None and found.paths.first is not None
    assert found.paths.first.operation == "model.layers.1.mlp.down_proj"
    assert found.paths.first.before < 1e-4 < found.paths.first.gap
    assert found.left == found.paths.told < 1e-5
    print_report(found)
    assert "The first operation that differs: model.layers.1.mlp" in capsys.readouterr().out


def test_a_cache_in_another_precision_is_named(models: Path, tmp_path: Path) -> None:
    """The trainer has no cache: only the engine's own path shows it."""
    run = mismatched_run("cache", models, tmp_path / "run", train={"steps": 1})
    found = judged("cache", run, 8)
    assert named(found) == ["dtype"]
    assert found.causes[0].turn == "rollout.cache_precision=model"
    assert found.paths is not None and found.paths.first is not None
    place = "what comes after model.layers.0.self_attn.v_proj and before"
    assert found.paths.first.operation == f"{place} model.layers.0.self_attn.o_proj"


def test_staleness_that_is_allowed_is_told_as_that(models: Path, tmp_path: Path) -> None:
    found = judged("staleness", mismatched_run("staleness", models, tmp_path / "run"), 8)
    assert named(found) == ["staleness"]
    assert found.apart < found.limit < found.overall


def test_evaluations_are_no_steps(models: Path, tmp_path: Path) -> None:
    """They have lines of their own in metrics.jsonl, before the first step and after the last."""
    held_out = {"eval": {"source": "arithmetic:chain", "size": 8}}
    run = mismatched_run(
        "staleness", models, tmp_path / "run", data=held_out, eval={"every": 2, "at_start": True}
    )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    assert any("mismatch/mean" not in line for line in lines)
    assert 1 <= plan_mismatch(run, None).replay.step <= 4


def test_runs_without_an_engine_are_refused(tmp_path: Path) -> None:
    for name, where, what in (
        ("sft", {"algorithm": {"name": "sft"}, "rewards": []}, "no engine"),
        ("kept", {"rollout": {"kept": "runs/other"}}, "runs/other"),
        ("empty", {}, "has not trained a step"),
    ):
        run = tmp_path / name
        run.mkdir()
        config = {
            "model": {"path": "m"},
            "algorithm": {"name": "grpo"},
            "data": {"source": "arithmetic:chain"},
            "rewards": [{"name": "exact_number"}],
            "train": {"steps": 1, "prompts_per_step": 1},
            "run": {"dir": "run"},
        }
        made = config_from_dict({**config, **where})
        (run / "config.json").write_text(json.dumps(made.model_dump(mode="json")))
        (run / "metrics.jsonl").write_text("")
        with pytest.raises(InputError, match=what):
            plan_mismatch(run)


# ---- the search alone: what an engine would have told is computed, and must be found ----


@pytest.fixture(scope="module")
def base(models: Path) -> LogprobReader:
    config = config_from_dict(
        {
            "model": {"path": str(models / "dense")},
            "algorithm": {"name": "grpo"},
            "data": {"source": "arithmetic:chain"},
            "rewards": [{"name": "exact_number"}],
            "train": {"steps": 1, "prompts_per_step": 1},
            "run": {"dir": "run"},
        }
    )
    samples = [made_sample(number) for number in range(6)]
    plain = LogprobReader(config, samples, {}, {})
    own = dict(plain.model("float32").module.named_parameters())
    first = {name: p.detach().clone() for name, p in own.items()}
    noise = torch.Generator().manual_seed(0)
    moved = {n: p + 0.02 * torch.randn(p.shape, generator=noise) for n, p in first.items()}
    prompts: dict[str, Sequence[list[int] | None]] = {
        "with another BOS before it": [[1, *s.tokens[:5].tolist()] for s in samples]
    }
    return LogprobReader(config, samples, {0: first, 3: moved}, prompts)


def made_sample(number: int) -> Sample:
    """Five tokens of prompt and ten of an answer, of weights of version 3."""
    sample = Sample.from_tokens(f"s{number}", tokens_of(15, number), [i >= 5 for i in range(15)])
    versions = torch.where(sample.trained, 3, -1).to(torch.int32)
    return sample.with_(versions=versions)


def told_by(base: LogprobReader, reading: LogprobReading) -> LogprobReader:
    """The same samples with the log-probs that an engine with this reading tells."""
    parts = base.logprobs(reading).split([s.n_trained for s in base.samples])
    samples = []
    for sample, logprobs in zip(base.samples, parts, strict=True):
        whole = torch.zeros(len(sample.tokens))
        whole[sample.trained] = logprobs
        samples.append(sample.with_(logprobs=whole))
    return LogprobReader(base.cfg, samples, base.weights, base.prompts)


def test_a_filter_that_is_counted_in(base: LogprobReader) -> None:
    """Only what it keeps can have been sampled: here everything but the last few."""
    likely = base.logits(base.trainers.forward).argmax(-1).split([10] * len(base.samples))
    samples = []
    for sample, tokens in zip(base.samples, likely, strict=True):
        own = sample.tokens.clone()
        own[5:6] = tokens[:1]  # what follows would change with it
        trained = torch.arange(15) == 5
        samples.append(sample.with_(tokens=own, trained=trained))
    short = LogprobReader(base.cfg, samples, base.weights, base.prompts)
    reading = replace(short.trainers, top_k=20)
    found = find_causes(told_by(short, reading))
    assert [cause.name for cause in found.causes] == ["filter"]
    assert found.causes[0].reading.top_k == 20


@pytest.mark.parametrize("temperature", [0.6, 1.37])
def test_a_temperature_is_found_by_its_value(base: LogprobReader, temperature: float) -> None:
    found = find_causes(told_by(base, replace(base.trainers, temperature=temperature)))
    assert [cause.name for cause in found.causes] == ["temperature"]
    assert found.causes[0].reading.temperature == pytest.approx(temperature, abs=0.005)


def test_one_layer_that_stayed_behind(base: LogprobReader) -> None:
    part = "model.layers.1"
    found = find_causes(told_by(base, replace(base.trainers, version=0, part=part)))
    assert [cause.name for cause in found.causes] == ["stale weights"]
    assert found.causes[0].reading.part == part
    assert part_of("model.layers.1.mlp.up_proj.weight") == part


def test_two_differences_at_once(base: LogprobReader) -> None:
    """Neither explains half of it alone."""
    both = replace(base.trainers, temperature=0.7, prompt="with another BOS before it")
    found = find_causes(told_by(base, both))
    assert {cause.name for cause in found.causes} == {"temperature", "template"}
    assert found.left < 1e-5 and found.ranked[0].explained < 0.5


def test_what_no_cause_explains_is_said(base: LogprobReader) -> None:
    noise = torch.Generator().manual_seed(1)
    samples = [
        s.with_(logprobs=s.logprobs - 0.5 * torch.rand(15, generator=noise) * s.trained)
        for s in told_by(base, base.trainers).samples
    ]
    found = find_causes(LogprobReader(base.cfg, samples, base.weights, base.prompts))
    assert found.causes == [] and found.left == found.apart > found.limit
    assert found.ranked
