"""The Python door: `reinforge.train` with plain functions, inside a running loop, and the same ids everywhere."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import reinforge
from reinforge.app.api import run_sync
from reinforge.app.build import Given, Workshop, build
from reinforge.config.load import config_from_dict
from reinforge.config.schema import Config, ModelConfig
from reinforge.core.errors import InputError
from reinforge.models.load import load_model
from reinforge.rollout.source import Source
from reinforge.train.rl import RLTrainer
from reinforge.train.supervised import SupervisedTrainer

pytestmark = pytest.mark.timeout(120)
ROWS = [{"prompt": f"{i}: "} for i in range(32)]
SMALL: dict[str, Any] = dict(steps=1, group_size=4, prompts_per_step=2, max_new_tokens=4, overrides=["rollout.kv_gib=0.01"])


def share_of_a(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
    return [sum(ch in "aA" for ch in c) / max(1, len(c)) for c in completions]


def rewards_of(run_dir: Path) -> list[float]:
    return [m["reward/mean"] for m in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()) if "reward/mean" in m]


def test_learns_a_trivial_task(tiny_dir: str, tmp_path: Path) -> None:
    """Write `a`. A sign, mask, shift or temperature the wrong way round anywhere in the house and this does not rise."""
    result = reinforge.train(model=tiny_dir, data=ROWS, rewards=[share_of_a], algorithm="grpo", dir=str(tmp_path / "run"), steps=30, group_size=8,
                             prompts_per_step=8, learning_rate=1e-2, max_new_tokens=8, overrides=["rollout.kv_gib=0.01", "run.log.samples_every=0"])  # fmt: skip
    rewards = rewards_of(tmp_path / "run")
    assert sum(rewards[:2]) / 2 < 0.1 and sum(rewards[-3:]) / 3 > 0.6 and result.steps == 30
    assert result.report is not None and result.report.exists() and result.metrics["reward/mean"] == rewards[-1]


def test_inside_a_running_event_loop(tiny_dir: str, tmp_path: Path) -> None:
    """As in a notebook: called in a coroutine, with an async reward; errors come out as they are."""
    called = []

    async def judge(completions: list[str], **_: Any) -> list[float]:
        await asyncio.sleep(0)
        called.append(len(completions))
        return [float(len(c) % 3) for c in completions]

    async def broken(completions: list[str], **_: Any) -> list[float]:
        raise RuntimeError("judge is down")

    async def notebook() -> None:
        result = reinforge.train(model=tiny_dir, data=ROWS, rewards=[judge], dir=str(tmp_path / "a"), **SMALL)
        assert result.steps == 1 and called == [4, 4]
        with pytest.raises(InputError, match="judge is down"):
            reinforge.train(model=tiny_dir, data=ROWS, rewards=[broken], dir=str(tmp_path / "b"), **SMALL)

    asyncio.run(asyncio.wait_for(notebook(), 60))


def test_run_sync_hands_on_values_and_errors() -> None:
    async def value() -> int:
        return 7

    async def error() -> int:
        raise KeyError("x")

    async def inside() -> tuple[int, str]:
        with pytest.raises(KeyError):
            run_sync(error())
        return run_sync(value()), "ok"

    assert run_sync(value()) == 7 and asyncio.run(inside()) == (7, "ok")


def test_a_generator_of_rows_and_named_rewards(tiny_dir: str, tmp_path: Path) -> None:
    rows = ({"prompt": f"{i}+1=", "answer": i + 1} for i in range(8))
    result = reinforge.train(model=tiny_dir, data=rows, rewards=["exact_number", "exact_match"], dir=str(tmp_path / "run"), **SMALL)
    assert {"reward/exact_number", "reward/exact_match"} <= result.metrics.keys()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [({"data": ROWS, "rewards": [share_of_a]}, "model and data are needed"), ({"model": "m", "data": ROWS, "rewards": [share_of_a, "exact_match"]}, "not both"),
     ({"model": "m", "data": ROWS}, "at least one reward"), ({"model": "/no/such", "data": ROWS, "rewards": [share_of_a]}, "no such directory")],
    ids=["no model", "functions and names", "no reward", "no such model"],
)  # fmt: skip
def test_what_is_missing_is_said(arguments: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=says):
        reinforge.train(**arguments, dir=str(tmp_path / "run"))


def config_of(tiny_dir: str, tmp_path: Path, *overrides: str, **sections: Any) -> Config:
    raw = {"model": {"path": tiny_dir}, "algorithm": {"name": "grpo", "group_size": 4}, "data": {"source": "python"}, "rewards": [{"name": "exact_match"}],
           "rollout": {"max_new_tokens": 4, "kv_gib": 0.01}, "train": {"steps": 1, "prompts_per_step": 2}, "run": {"dir": str(tmp_path / "run")}}  # fmt: skip
    return config_from_dict({**raw, **sections}, overrides=overrides)


@pytest.mark.parametrize("named", [{"learning_rate": 0.5}, {"steps": 7}, {"model": "other"}, {"algorithm": "dapo"}, {"seed": 3}, {"dir": "elsewhere"}, {"rewards": ["exact_match"]},
                                   {"data": "rows.jsonl"}], ids=str)  # fmt: skip
def test_a_named_setting_beside_a_config_is_not_ignored(named: dict[str, Any], tiny_dir: str, tmp_path: Path) -> None:
    """`train("config.yaml", learning_rate=1e-3)` must not run with the file's learning rate and say nothing."""
    with pytest.raises(InputError, match=rf"{next(iter(named))}.*overrides"):
        reinforge.train(config_of(tiny_dir, tmp_path), **{"data": ROWS, "rewards": [share_of_a], **named})


def test_a_config_object_with_overrides(tiny_dir: str, tmp_path: Path) -> None:
    cfg = config_of(tiny_dir, tmp_path)
    result = reinforge.train(cfg, data=ROWS, rewards=[share_of_a], overrides=["train.steps=2"])
    assert result.steps == 2


def test_a_dict_and_the_weights_of_rewards(tiny_dir: str, tmp_path: Path) -> None:
    cfg = config_of(
        tiny_dir, tmp_path, rewards=[{"name": "exact_match", "weight": 0.5}, {"name": "regex", "weight": 2.0, "options": {"pattern": "."}}]
    )
    result = reinforge.train(cfg.model_dump(mode="json"), data=[{**r, "answer": "zz"} for r in ROWS])
    assert result.metrics["reward/mean"] == pytest.approx(2 * result.metrics["reward/regex"] + 0.5 * result.metrics["reward/exact_match"])


def test_train_and_evaluation_rows_are_disjoint(tiny_dir: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="also training rows"):
        reinforge.train(config_of(tiny_dir, tmp_path), data=ROWS, eval_data=ROWS[:1], rewards=[share_of_a])


# one rendering for everything


@pytest.fixture
def bos_dir(tiny_dir: str, tmp_path: Path) -> str:
    """The tiny model with a tokenizer that puts a BOS before every text, as Llama's does."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    load_model(ModelConfig(path=tiny_dir)).module.save_pretrained(tmp_path / "bos")
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(tmp_path / "bos")
    return str(tmp_path / "bos")


def test_prompts_of_rollout_evaluation_and_sft_are_the_same_ids(bos_dir: str, tmp_path: Path) -> None:
    """Exactly one BOS, and special text in the prompt stays text (24, 29)."""
    rows = [
        {"prompt": "1+1=", "completion": "2"},
        {"prompt": "say <|eos|> or <|bos|>", "completion": "<|eos|> no"},
        {"prompt": "é 7", "completion": "x"},
    ]
    rl = build(config_of(bos_dir, tmp_path, "data.shuffle=false"), _quiet(), Given(data=rows, rewards=[share_of_a]))
    sft = build(config_of(bos_dir, tmp_path, "data.shuffle=false", algorithm={"name": "sft"}), _quiet(), Given(data=rows))
    assert isinstance(rl, RLTrainer) and isinstance(sft, SupervisedTrainer) and isinstance(rl.source, Source)
    rollout: Any = rl.source.rollout
    evaluation = Workshop(config_of(bos_dir, tmp_path), Given(data=rows[:1], eval_data=rows[1:], rewards=[share_of_a]), _quiet()).heldout()
    assert evaluation is not None
    held: Any = evaluation.rollout
    for i, row in enumerate(rl.source.rows):
        ids, sample = rollout.encode(row), sft.row(i)
        assert ids.count(1) == 1 and ids[0] == 1 and 2 not in ids
        first = int(sample.trained.nonzero()[0])
        assert sample.tokens[:first].tolist() == ids and sample.tokens.tolist().count(1) == 1
        assert sample.tokens[-1] == 2 and bool(sample.trained[-1]) and sample.tokens.tolist().count(2) == 1  # the end is learned, once
        if i:
            assert held.encode(evaluation.rows[i - 1]) == ids


def _quiet() -> Any:
    from toys import SilentView

    return SilentView()


# evaluate and generate


def test_evaluate_scores_the_checkpoint_not_the_start(tiny_dir: str, tmp_path: Path) -> None:
    """The last evaluation of the run again from its directory: the same number; the config alone: the untrained model's."""
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}: ", "answer": "a"}) + "\n" for i in range(24)))
    cfg = config_of(tiny_dir, tmp_path, "train.steps=12", "train.learning_rate=1e-2", "train.prompts_per_step=8", "algorithm.group_size=8", "eval.temperature=1",
                    data={"source": str(data), "eval": {"size": 4}}, rewards=[{"name": "reinforge.app.check:share_of_a"}])  # fmt: skip
    result = reinforge.train(cfg)
    again = reinforge.evaluate(tmp_path / "run")
    assert again["eval/reward"] == result.metrics["eval/reward"] > 0.02
    start = next(m for m in map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) if "eval/reward" in m)
    assert start["step"] == 0 and again["eval/reward"] > start["eval/reward"] + 0.05


def test_generate_writes_what_was_sampled(tiny_dir: str, tmp_path: Path) -> None:
    from reinforge.app.api import generate

    prompts, out = tmp_path / "p.jsonl", tmp_path / "deep" / "o.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}: ", "tag": i}) + "\n" for i in range(3)))
    assert generate(tiny_dir, prompts, out, n=2, max_new_tokens=5, seed=1) == 6
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["tag"] for line in lines] == [0, 0, 1, 1, 2, 2]
    model = load_model(ModelConfig(path=tiny_dir))
    for line in lines:
        prompt = model.tokenizer(line["prompt"], add_special_tokens=False).input_ids
        from reinforge.core.batch import Batch
        from reinforge.core.sample import Sample

        sample = Sample.from_tokens("x", prompt + line["tokens"], [False] * len(prompt) + [True] * len(line["tokens"]))
        with torch.no_grad():
            exact = model.logprobs(Batch.pack([sample]), temperature=1.0)[0]
        assert line["logprobs"] == pytest.approx(exact.tolist(), abs=1e-5)
        assert line["completion"] == model.tokenizer.decode(line["tokens"], skip_special_tokens=True)
    first = out.read_text()
    generate(tiny_dir, prompts, out, n=2, max_new_tokens=5, seed=1)
    assert out.read_text() == first
