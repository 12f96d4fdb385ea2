"""The Python interface: `reinforge.train` with plain functions and rows, and the same ids
everywhere.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import reinforge
from helpers.toy_rewards import halves, ones, share_of_a
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.data import load_data
from reinforge.build.evaluation import build_heldout
from reinforge.build.inputs import read_inputs
from reinforge.build.local import LocalFactories
from reinforge.build.trainer import build
from reinforge.config.load import config_from_dict
from reinforge.config.model import ModelConfig
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.loops.rl import RLTrainer
from reinforge.loops.supervised import SupervisedTrainer
from reinforge.models.load import load_model
from reinforge.models.tiny import make_tiny_model
from reinforge.rollout.source import GroupSource

ROWS = [{"prompt": f"{i}: "} for i in range(32)]
SMALL: dict[str, Any] = dict(
    steps=1, group_size=4, prompts_per_step=2, max_new_tokens=4, overrides=["rollout.kv_gib=0.01"]
)


def rewards_of(run_dir: Path) -> list[float]:
    return [
        m["reward/mean"]
        for m in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        if "reward/mean" in m
    ]


def test_learns_a_trivial_task(tiny_dir: str, tmp_path: Path) -> None:
    """Write `a`.

    A sign, mask, shift or temperature the wrong way round anywhere in the house and this does not
    rise.
    """
    result = reinforge.train(
        model=tiny_dir,
        data=ROWS,
        rewards=[share_of_a],
        algorithm="grpo",
        dir=str(tmp_path / "run"),
        steps=30,
        group_size=8,
        prompts_per_step=8,
        learning_rate=1e-2,
        max_new_tokens=8,
        overrides=["rollout.kv_gib=0.01", "run.log.samples_every=0"],
    )
    rewards = rewards_of(tmp_path / "run")
    assert sum(rewards[:2]) / 2 < 0.1 and sum(rewards[-3:]) / 3 > 0.6 and result.steps == 30
    assert (
        result.report is not None
        and result.report.exists()
        and result.metrics["reward/mean"] == rewards[-1]
    )


def test_a_generator_of_rows_and_named_rewards(tiny_dir: str, tmp_path: Path) -> None:
    rows = ({"prompt": f"{i}+1=", "answer": i + 1} for i in range(8))
    result = reinforge.train(
        model=tiny_dir,
        data=rows,
        rewards=["exact_number", "exact_match"],
        dir=str(tmp_path / "run"),
        **SMALL,
    )
    assert {"reward/exact_number", "reward/exact_match"} <= result.metrics.keys()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"data": ROWS, "rewards": [share_of_a]}, "model and data are needed"),
        ({"model": "m", "data": ROWS, "rewards": [share_of_a, 3]}, "is no reward"),
        ({"model": "m", "data": {"train": ROWS}, "rewards": [share_of_a]}, "not a list of rows"),
        ({"model": "m", "data": ROWS}, "at least one reward"),
        ({"model": "/no/such", "data": ROWS, "rewards": [share_of_a]}, "no such directory"),
    ],
    ids=["no model", "a number as reward", "a dict of splits", "no reward", "no such model"],
)
def test_what_is_missing_is_said(arguments: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=says):
        reinforge.train(**arguments, dir=str(tmp_path / "run"))


# objects that other libraries take


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"processing_class": object()},
            r"has no argument processing_class\. It is called tokenizer",
        ),
        ({"train_dataset": ROWS}, r"has no argument train_dataset\. It is called data"),
        ({"peft_config": object()}, r"has no argument peft_config\. It is called adapter"),
        ({"learning_rat": 1e-4}, r"has no argument learning_rat\. Did you mean learning_rate"),
        (
            {"router_aux_loss": 0.01},
            r"has no argument router_aux_loss\. Give it as overrides=\[\"train\.router_aux_loss=",
        ),
        ({"zzz": 1}, r"has no argument zzz\. There are: config, model, tokenizer, data"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_argument_that_there_is_not_is_an_input_error(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        reinforge.train(model="m", data=ROWS, rewards=[share_of_a], **given)


def test_other_functions_tell_it_too() -> None:
    with pytest.raises(
        InputError, match=r"^reinforge\.make_data: has no argument at_leest\. Did you mean at_least"
    ):
        reinforge.make_data(at_leest=1)  # type: ignore[call-arg]
    with pytest.raises(
        InputError, match=r"^reinforge\.benchmark: has no argument row\. Did you mean rows\?"
    ):
        reinforge.benchmark("m", "gsm8k", row="rows.jsonl")  # type: ignore[call-arg]
    with pytest.raises(InputError, match=r"has no argument args\. There are: model, tasks"):
        reinforge.benchmark("m", "gsm8k", args=1)  # type: ignore[call-arg]


def test_objects_that_are_no_model_are_refused(tiny_dir: str, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    module = AutoModelForCausalLM.from_pretrained(tiny_dir)
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)

    def refused(model: Any, says: str, **more: Any) -> None:
        with pytest.raises(InputError, match=says):
            reinforge.train(
                model=model, data=ROWS, rewards=[share_of_a], dir=tmp_path / "run", **more
            )

    refused(module, r"^tokenizer: a model that is in memory needs its tokenizer")
    refused(tokenizer, r"model is a \w+ object, and no causal LM", tokenizer=tokenizer)
    refused(object(), r"model is a object object.*hub id")
    refused(tiny_dir, r"tokenizer is a object object", tokenizer=object())
    settings = LoraConfig(r=2, target_modules=["q_proj"])
    refused(tiny_dir, r"^adapter: adapter is a LoraConfig, not a dict\..*rank", adapter=settings)
    adapted = get_peft_model(module, settings)
    refused(adapted, "has an adapter already", tokenizer=tokenizer, adapter={"rank": 2})
    assert not (tmp_path / "run").exists()


def config_of(tiny_dir: str, tmp_path: Path, *overrides: str, **sections: Any) -> Config:
    raw = {
        "model": {"path": tiny_dir},
        "algorithm": {"name": "grpo", "group_size": 4},
        "data": {"source": "python"},
        "rewards": [{"name": "exact_match"}],
        "rollout": {"max_new_tokens": 4, "kv_gib": 0.01},
        "train": {"steps": 1, "prompts_per_step": 2},
        "run": {"dir": str(tmp_path / "run")},
    }
    return config_from_dict({**raw, **sections}, overrides=overrides)


@pytest.mark.parametrize(
    "named",
    [
        {"learning_rate": 0.5},
        {"steps": 7},
        {"model": "other"},
        {"algorithm": "dapo"},
        {"seed": 3},
        {"dir": "elsewhere"},
        {"data": "rows.jsonl"},
        {"data": Path("rows.jsonl")},
        {"eval_data": "rows.jsonl"},
    ],
    ids=str,
)
def test_a_named_setting_beside_a_config_is_not_ignored(
    named: dict[str, Any], tiny_dir: str, tmp_path: Path
) -> None:
    """`train("config.yaml", learning_rate=1e-3)` must not run with the file's learning rate and say
    nothing.
    """
    with pytest.raises(InputError, match=rf"{next(iter(named))}.*overrides"):
        reinforge.train(
            config_of(tiny_dir, tmp_path), **{"data": ROWS, "rewards": [share_of_a], **named}
        )


def test_a_config_object_with_overrides(tiny_dir: str, tmp_path: Path) -> None:
    cfg = config_of(tiny_dir, tmp_path)
    result = reinforge.train(cfg, data=ROWS, rewards=[share_of_a], overrides=["train.steps=2"])
    assert result.steps == 2


def test_a_dict_and_the_weights_of_rewards(tiny_dir: str, tmp_path: Path) -> None:
    cfg = config_of(
        tiny_dir,
        tmp_path,
        rewards=[
            {"name": "exact_match", "weight": 0.5},
            {"name": "regex", "weight": 2.0, "options": {"pattern": "."}},
        ],
    )
    result = reinforge.train(
        cfg.model_dump(mode="json"), data=[{**r, "answer": "zz"} for r in ROWS]
    )
    assert result.metrics["reward/mean"] == pytest.approx(
        2 * result.metrics["reward/regex"] + 0.5 * result.metrics["reward/exact_match"]
    )


# rewards


@pytest.mark.parametrize(
    ("rewards", "mean"),
    [
        (ones, 1.0),
        ((ones, 3), 3.0),
        ([ones, halves], 1.5),
        ((ones, halves), 1.5),
        ([(ones, 2.0), halves, "exact_match"], 2.5),
        (
            [
                (ones, 2.0),
                ("exact_match", 9.0),
                lambda completions: [0.25] * len(completions),
                lambda completions: [0.5] * len(completions),
            ],
            2.75,
        ),
    ],
    ids=["function", "pair", "list", "tuple", "pair, function and name", "with lambdas"],
)
def test_rewards_are_names_functions_and_pairs(
    rewards: Any, mean: float, tiny_dir: str, tmp_path: Path
) -> None:
    result = reinforge.train(
        model=tiny_dir,
        data=[{**r, "answer": "zz"} for r in ROWS],
        rewards=rewards,
        dir=tmp_path / "run",
        **SMALL,
    )
    assert (
        result.metrics["reward/mean"] == pytest.approx(mean)
        and result.metrics.get("reward/exact_match", 0.0) == 0.0
    )
    recorded = [
        r["name"] for r in json.loads((tmp_path / "run" / "config.json").read_text())["rewards"]
    ]
    assert (
        len(recorded) == len(set(recorded))
        and {f"reward/{name}" for name in recorded} <= result.metrics.keys()
    )


@pytest.mark.parametrize("form", ["file", "dict", "object"])
def test_rewards_beside_a_config(form: str, tiny_dir: str, tmp_path: Path) -> None:
    """Without rewards of its own it is completed; a name that it has keeps its weight; an override
    is the last word.
    """
    entry = {"name": "ones", "weight": 0.5}
    raw = {
        k: v
        for k, v in config_of(tiny_dir, tmp_path).model_dump(mode="json").items()
        if k != "rewards"
    }

    def run(name: str, declared: list[Any], *overrides: str) -> float:
        dumped = {
            **raw,
            "run": {"dir": str(tmp_path / name)},
            **({"rewards": declared} if declared else {}),
        }
        config: Any = tmp_path / f"{name}.yaml"
        config.write_text(json.dumps(dumped))
        config = (
            config if form == "file" else dumped if form == "dict" else config_from_dict(dumped)
        )
        return reinforge.train(
            config, data=ROWS, rewards=[halves, ones], overrides=overrides
        ).metrics["reward/mean"]

    if form != "object":  # which needs a reward to exist
        assert run("none", []) == 1.5
    assert run("kept", [entry]) == 1.0
    assert run("replaced", [{"name": "exact_match", "weight": 7.0}]) == 1.5
    assert run("overridden", [entry], "rewards.1.weight=4") == 4.5


def test_a_name_beside_a_config_is_used(tiny_dir: str, tmp_path: Path) -> None:
    result = reinforge.train(
        config_of(tiny_dir, tmp_path),
        data=[{**r, "answer": 1} for r in ROWS],
        rewards="exact_number",
    )
    assert "reward/exact_number" in result.metrics and "reward/exact_match" not in result.metrics


# where it is written


def test_two_runs_without_a_directory_are_two_runs(
    tiny_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = reinforge.train(model=Path(tiny_dir), data=ROWS, rewards=ones, **SMALL)
    second = reinforge.train(model=Path(tiny_dir), data=ROWS, rewards=halves, **SMALL)
    assert (
        first.metrics["reward/mean"] == 1.0
        and second.metrics["reward/mean"] == 0.5
        and first.run_dir != second.run_dir
    )
    assert all(re.fullmatch(r"runs/grpo-\d{8}-\d{6}(-2)?", str(r.run_dir)) for r in (first, second))


# data


def rows_file(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def loaded(
    tiny_dir: str, tmp_path: Path, given: CallerObjects, **data: Any
) -> tuple[set[Any], set[Any]]:
    cfg = config_of(tiny_dir, tmp_path, data={"source": "python", **data})
    train, held = load_data(cfg.data, given, print)
    return {row.prompt for row in train}, {row.prompt for row in held}


def test_held_out_rows_from_files_and_objects(tiny_dir: str, tmp_path: Path) -> None:
    """Which rows are held out depends on the rows and data.eval, not on how they came."""
    file = rows_file(tmp_path / "rows.jsonl", ROWS)
    other = [{"prompt": "x"}, {"prompt": "y"}]
    train, held = loaded(tiny_dir, tmp_path, CallerObjects(), source=str(file), eval={"size": 5})
    assert len(train) == 27 and len(held) == 5 and not train & held
    assert loaded(tiny_dir, tmp_path, CallerObjects(data=ROWS), eval={"size": 5}) == (train, held)
    assert loaded(
        tiny_dir, tmp_path, CallerObjects(data=ROWS), source="arithmetic:chain", eval={"size": 5}
    ) == (train, held)
    assert loaded(tiny_dir, tmp_path, CallerObjects(eval_data=other), source=str(file)) == (
        train | held,
        {"x", "y"},
    )
    assert loaded(
        tiny_dir, tmp_path, CallerObjects(data=ROWS, eval_data=other), eval={"size": 1}
    ) == (
        train | held,
        {"x"},
    )
    assert loaded(tiny_dir, tmp_path, CallerObjects(data=other), eval={"source": str(file)}) == (
        {"x", "y"},
        train | held,
    )
    with pytest.raises(InputError, match=r"data\.eval\.size.*asks for 3"):
        loaded(tiny_dir, tmp_path, CallerObjects(data=ROWS, eval_data=other), eval={"size": 3})
    with pytest.raises(InputError, match=r"data\.eval\.source.*Give one"):
        loaded(
            tiny_dir,
            tmp_path,
            CallerObjects(data=ROWS, eval_data=other),
            eval={"source": str(file)},
        )


def test_paths_of_data(tiny_dir: str, tmp_path: Path) -> None:
    file = rows_file(tmp_path / "rows.jsonl", ROWS)
    held = rows_file(tmp_path / "held.jsonl", [{"prompt": "x"}, {"prompt": "y"}])
    result = reinforge.train(
        model=tiny_dir, data=file, eval_data=held, rewards=halves, dir=tmp_path / "run", **SMALL
    )
    assert result.metrics["eval/reward"] == 0.5 and result.metrics["eval/n"] == 2


@pytest.mark.parametrize("source", ["python", "file"])
def test_evaluating_a_run_of_python_objects_says_so(
    source: str, tiny_dir: str, tmp_path: Path
) -> None:
    """Also when a config names a file that was not used."""
    file = rows_file(tmp_path / "rows.jsonl", [{**r, "answer": 1} for r in ROWS])
    cfg = config_of(
        tiny_dir, tmp_path, data={"source": "python" if source == "python" else str(file)}
    )
    result = reinforge.train(
        cfg, data=[{**r, "answer": 2} for r in ROWS], eval_data=[{"prompt": "x", "answer": 2}]
    )
    with pytest.raises(InputError, match=r"data\.source: .*Python objects"):
        reinforge.evaluate(result.run_dir)
    with pytest.raises(InputError, match=r"data\.eval\.source: .*Python objects"):
        reinforge.evaluate(result.run_dir, [f"data.source={file}"])
    assert (
        reinforge.evaluate(
            result.run_dir, [f"data.source={file}", "data.eval.source=null", "data.eval.size=3"]
        )["eval/n"]
        == 3
    )


def test_a_tiny_model_at_a_text_path(tmp_path: Path) -> None:
    path = make_tiny_model(str(tmp_path / "m"), width=32, layers=1, heads=2)
    assert (
        path == tmp_path / "m"
        and json.loads((path / "config.json").read_text())["hidden_size"] == 32
    )


# how it looks


def test_looking_at_train_does_not_import_torch() -> None:
    code = (
        "import sys, inspect, reinforge; reinforge.train; inspect.signature(reinforge.train);"
        " assert reinforge.train.__doc__; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_train_and_evaluation_rows_are_disjoint(tiny_dir: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="also training rows"):
        reinforge.train(
            config_of(tiny_dir, tmp_path), data=ROWS, eval_data=ROWS[:1], rewards=[share_of_a]
        )


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


def test_prompts_of_rollout_evaluation_and_sft_are_the_same_ids(
    bos_dir: str, tmp_path: Path
) -> None:
    """Exactly one BOS, and special text in the prompt stays text."""
    rows = [
        {"prompt": "1+1=", "completion": "2"},
        {"prompt": "say <|eos|> or <|bos|>", "completion": "<|eos|> no"},
        {"prompt": "é 7", "completion": "x"},
    ]
    rl = build(
        config_of(bos_dir, tmp_path, "data.shuffle=false"),
        _quiet(),
        CallerObjects(data=rows, rewards=[share_of_a]),
    )
    sft = build(
        config_of(bos_dir, tmp_path, "data.shuffle=false", algorithm={"name": "sft"}),
        _quiet(),
        CallerObjects(data=rows),
    )
    assert (
        isinstance(rl, RLTrainer)
        and isinstance(sft, SupervisedTrainer)
        and isinstance(rl.source, GroupSource)
    )
    rollout: Any = rl.source.rollout
    inputs = read_inputs(
        config_of(bos_dir, tmp_path),
        CallerObjects(data=rows[:1], eval_data=rows[1:], rewards=[share_of_a]),
        _quiet(),
        LocalFactories().make_rewards,
    )
    evaluation = build_heldout(inputs, LocalFactories(), _quiet())
    assert evaluation is not None
    held: Any = evaluation.rollout
    for i, row in enumerate(rl.source.rows):
        ids, (sample,) = rollout.encode(row), sft.row(i)
        assert ids.count(1) == 1 and ids[0] == 1 and 2 not in ids
        first = int(sample.trained.nonzero()[0])
        assert sample.tokens[:first].tolist() == ids and sample.tokens.tolist().count(1) == 1
        # the end is learned, once
        assert (
            sample.tokens[-1] == 2
            and bool(sample.trained[-1])
            and sample.tokens.tolist().count(2) == 1
        )
        if i:
            assert held.encode(evaluation.rows[i - 1]) == ids


def _quiet() -> Any:
    from helpers.toys import SilentView

    return SilentView()


# evaluate and generate


def test_evaluate_scores_the_checkpoint_not_the_start(tiny_dir: str, tmp_path: Path) -> None:
    """The last evaluation of the run again from its directory: the same number; the config alone:
    the untrained model's.
    """
    data = tmp_path / "rows.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": f"{i}: ", "answer": "a"}) + "\n" for i in range(24))
    )
    cfg = config_of(
        tiny_dir,
        tmp_path,
        "train.steps=12",
        "train.learning_rate=1e-2",
        "train.prompts_per_step=8",
        "algorithm.group_size=8",
        "eval.temperature=1",
        data={"source": str(data), "eval": {"size": 4}},
        rewards=[{"name": "reinforge.check.learning:share_of_even"}],
    )
    result = reinforge.train(cfg)
    again = reinforge.evaluate(tmp_path / "run")
    assert again["eval/reward"] == result.metrics["eval/reward"] > 0.02
    start = next(
        m
        for m in map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        if "eval/reward" in m
    )
    assert start["step"] == 0 and again["eval/reward"] > start["eval/reward"] + 0.05


def test_generate_writes_what_was_sampled(tiny_dir: str, tmp_path: Path) -> None:
    generate = reinforge.generate
    prompts = tmp_path / "p.jsonl"
    out = tmp_path / "deep" / "o.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}: ", "tag": i}) + "\n" for i in range(3)))
    made = generate(tiny_dir, prompts, out, n=2, max_new_tokens=5, seed=1)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert made == lines and [line["tag"] for line in lines] == [0, 0, 1, 1, 2, 2]
    model = load_model(ModelConfig(path=tiny_dir))
    for line in lines:
        prompt = model.tokenizer(line["prompt"], add_special_tokens=False).input_ids
        from reinforge.core.batch import Batch
        from reinforge.core.sample import Sample

        sample = Sample.from_tokens(
            "x", prompt + line["tokens"], [False] * len(prompt) + [True] * len(line["tokens"])
        )
        with torch.no_grad():
            exact = model.logprobs(Batch.pack([sample]), temperature=1.0)[0]
        assert line["logprobs"] == pytest.approx(exact.tolist(), abs=1e-5)
        assert line["completion"] == model.tokenizer.decode(
            line["tokens"], skip_special_tokens=True
        )
    first = out.read_text()
    generate(tiny_dir, prompts, out, n=2, max_new_tokens=5, seed=1)
    assert out.read_text() == first


def test_generate_for_prompts_in_memory(tiny_dir: str) -> None:
    texts = [f"{i}: " for i in range(3)]
    plain = reinforge.generate(tiny_dir, texts, max_new_tokens=5, seed=1)
    rows = reinforge.generate(
        Path(tiny_dir), [{"prompt": text} for text in texts], max_new_tokens=5, seed=1
    )
    assert [line["prompt"] for line in plain] == texts
    assert [line["tokens"] for line in plain] == [line["tokens"] for line in rows]
    assert all(1 <= len(line["tokens"]) <= 5 for line in plain)


def test_score() -> None:
    rows = [{"prompt": "1+1=", "answer": 2, "completion": c} for c in ("2", "3", "it is 2")]
    found = reinforge.score([("exact_match", 0.5), ones], rows)
    assert found == [
        {"exact_match": 1.0, "ones": 1.0, "reward": 1.5},
        {"exact_match": 0.0, "ones": 1.0, "reward": 1.0},
        {"exact_match": 0.0, "ones": 1.0, "reward": 1.0},
    ]
    assert reinforge.score("exact_number", rows, ["2", "2", "5"]) == [
        {"exact_number": 1.0, "reward": 1.0},
        {"exact_number": 1.0, "reward": 1.0},
        {"exact_number": 0.0, "reward": 0.0},
    ]
    with pytest.raises(InputError, match=r"completions: 3 rows"):
        reinforge.score(ones, rows, ["2"])


def test_chat(tiny_dir: str) -> None:
    """The model's context fills up with what was said."""
    talk = reinforge.chat(tiny_dir, temperature=0.0, max_new_tokens=4)
    first = talk.say("1+1=")
    assert [m["role"] for m in talk.messages] == ["user", "assistant"]
    assert talk.messages[1]["content"] == first
    talk.reset()
    assert talk.say("1+1=") == first and len(talk.messages) == 2
    with pytest.raises(InputError, match=r"chat: the conversation has \d+ tokens"):
        talk.say("x" * 5000)


# results


def test_what_a_result_has(tiny_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = reinforge.train(
        model=tiny_dir,
        data=ROWS,
        eval_data=[{"prompt": "x"}],
        rewards=halves,
        dir=tmp_path / "run",
        **{**SMALL, "steps": 2},
    )
    assert repr(result) == (
        f"<run {tmp_path / 'run'}: 2 steps, reward/mean 0.5, train/loss 0, eval/reward 0.5,"
        " eval/accuracy 0>"
    )
    history = result.history
    assert history.index.tolist() == [0, 1, 2] and history["reward/mean"].tolist()[1:] == [0.5, 0.5]
    assert history["eval/reward"].notna().tolist() == [True, False, True]
    prompt = result.tokenizer("1+1=", return_tensors="pt").input_ids
    assert result.model(prompt).logits.shape[:2] == prompt.shape
    assert result.model is result.model
    figure = result.plot("reward/mean", "train/grad_norm")
    drawn = [axis.get_title() for axis in figure.axes]
    assert drawn == ["reward/mean", "train/grad_norm"]
    assert figure.axes[0].lines[0].get_ydata().tolist() == [0.5, 0.5]
    assert [axis.get_title() for axis in result.plot().axes][:2] == ["reward/mean", "train/loss"]
    with pytest.raises(InputError, match=r"no metric 'reward/men'\. Did you mean reward/mean"):
        result.plot("reward/men")
    for package, use in (
        ("pandas", lambda r: r.history),
        ("matplotlib.figure", lambda r: r.plot()),
    ):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(InputError, match=f"needs {package.partition('.')[0]}"):
            use(replace(result))


def test_a_reward_that_raises_shows_its_authors_lines(tiny_dir: str, tmp_path: Path) -> None:
    """... and none of ours: those are in a file, until the run is begun again."""
    known: dict[str, float] = {}

    def scored(completions: list[str], **columns: Any) -> list[float]:
        return [known["score"] for _ in completions]

    given: dict[str, Any] = SMALL | dict(
        model=tiny_dir, data=ROWS, rewards=[scored], dir=str(tmp_path)
    )
    with pytest.raises(InputError, match=r"reward scored raised at .*KeyError") as caught:
        reinforge.train(**given)
    error = caught.value
    assert [frame.name for frame in traceback.extract_tb(error.__traceback__)] == [
        "test_a_reward_that_raises_shows_its_authors_lines",
        "train",
    ]
    assert error.__cause__ is not None
    cause = traceback.extract_tb(error.__cause__.__traceback__)
    assert cause[0].name == "scored" and {frame.filename for frame in cause} == {__file__}
    file = tmp_path / "traceback.txt"
    whole = file.read_text()
    assert "scoring.py" in whole and "in scored" in whole and "InputError: row " in whole
    with pytest.raises(InputError) as stepped, reinforge.Trainer(**given) as trainer:
        next(iter(trainer))
    assert len(traceback.extract_tb(stepped.value.__traceback__)) <= 5
    known["score"] = 1.0
    assert reinforge.train(**given).steps == 1 and not file.exists()
