"""`plan`: each thing that can be wrong with a configuration is found, named, and found in time."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from helpers.paths import SRC
from helpers.toys import SilentView
from reinforge.build.trainer import build
from reinforge.cli.main import main
from reinforge.config.load import config_from_dict, load_config
from reinforge.config.model import ModelConfig
from reinforge.config.rules import machine
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.plan import hub, plan
from reinforge.plan.checks import run_checks
from reinforge.plan.data_checks import quantiles
from reinforge.plan.gold_answers import sample
from reinforge.plan.options import PlanOptions
from reinforge.plan.outside import check_other_models
from reinforge.plan.preflight import preflight

ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:=+-*/()?!_\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer of one token per character and a context of 64; there are no
    weights, and none are needed.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    path = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(
        models.WordLevel(
            {**{c: i for i, c in enumerate(ALPHABET)}, "<unk>": 98, "<eos>": 99}, unk_token="<unk>"
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<eos>",
                "unk_token": "<unk>",
            }
        )
    )
    (path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "vocab_size": 100,
                "max_position_embeddings": 64,
            }
        )
    )
    return path


@pytest.fixture
def closed_network(monkeypatch: pytest.MonkeyPatch) -> str:
    """A hub where nobody listens, and a process that has not been told so."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    proxies = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
    for name in (*proxies, "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "")  # and gone, or back, after the test
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("reinforge.core.hub._switched", [])
    return "http://127.0.0.1:9"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return jsonl(
        tmp_path / "rows.jsonl", [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(20)]
    )


def jsonl(path: Path, items: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def settings(model: Path | str, rows: Path | str, tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(model)},
        "algorithm": {"name": "grpo", "group_size": 4},
        "data": {"source": str(rows), "eval": {"size": 4}},
        "rewards": [{"name": "exact_number"}],
        "rollout": {"max_new_tokens": 16},
        "train": {"epochs": 1, "prompts_per_step": 8},
        "run": {"dir": str(tmp_path / "run")},
        **more,
    }


def make(
    model: Path | str, rows: Path | str, tmp_path: Path, *overrides: str, **more: Any
) -> Config:
    return config_from_dict(settings(model, rows, tmp_path, **more), overrides=overrides)


# phase 1


def only_error(config: Config) -> str:
    errors = preflight(config).errors
    assert len(errors) == 1, errors
    return errors[0]


def test_a_good_config_passes_preflight(model: Path, rows: Path, tmp_path: Path) -> None:
    report = preflight(make(model, rows, tmp_path))
    assert report.ok and not report.warnings
    assert (
        report.summary["samples_per_step"] == 32
        and report.summary["new_tokens_per_step_at_most"] == 512
    )
    assert report.summary["trained"] == "all weights"
    assert (
        preflight(make(model, rows, tmp_path, "adapter.rank=4")).summary["trained"]
        == "LoRA of rank 4 on all-linear"
    )


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.name=gpro", ["algorithm.name", "'gpro'", "Did you mean grpo?"]),
        ("model.path=./none", ["model.path", "./none"]),
        ("model.path=none.gguf", ["model.path", "none.gguf"]),
        ("model.path=a/b/c", ["model.path", "a/b/c"]),
        ("model.tokenizer=/none", ["model.tokenizer", "/none"]),
        ("model.chat_template=none.jinja", ["model.chat_template", "none.jinja"]),
        ("adapter.path=none", ["adapter.path", "none"]),
        ("data.source=none.jsonl", ["data.source", "none.jsonl"]),
        ("data.source=arithmetic:sums", ["arithmetic:sums"]),
        ("data.eval.source=none.csv", ["data.eval.source", "none.csv"]),
        (
            "rewards.0.name=exact_numbr",
            ["rewards.0.name", "exact_numbr", "Did you mean exact_number?"],
        ),
        ("rewards.0.name=none.py:f", ["rewards.0.name", "no such file: none.py"]),
        ("rewards.0.name=nopackage.x:f", ["rewards.0.name", "no package 'nopackage'"]),
        ("run.resume=must", ["run.resume", "nothing to continue"]),
        ("algorithm.advantage=none.py:f", ["algorithm.advantage", "none.py"]),
        ("run.dir=..", ["run.dir", "working directory"]),
        ("run.dir=../..", ["run.dir", "parent"]),
    ],
)
def test_preflight_names_the_key(
    model: Path, rows: Path, tmp_path: Path, override: str, words: list[str]
) -> None:
    message = only_error(make(model, rows, tmp_path, override))
    for word in words:
        assert word in message


def test_preflight_reads_reward_files_without_running_them(
    model: Path, rows: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom math import sqrt\ndef score(completions):"
        " ...\nclass Judge: ...\nalias = score\n"
    )
    for name in ("score", "Judge", "alias", "sqrt"):
        assert preflight(make(model, rows, tmp_path, f"rewards.0.name={file}:{name}")).ok
    assert "does not define 'scor'. Did you mean score?" in only_error(
        make(model, rows, tmp_path, f"rewards.0.name={file}:scor")
    )
    assert "names a file but no function" in only_error(
        make(model, rows, tmp_path, f"rewards.0.name={file}")
    )
    file.write_text("def score(:\n")
    assert "is not Python" in only_error(
        make(model, rows, tmp_path, f"rewards.0.name={file}:score")
    )
    assert not (tmp_path / "ran").exists()


def test_preflight_on_models_and_run_directories(model: Path, rows: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    assert "This is an adapter" in only_error(make(adapter, rows, tmp_path))
    broken = only_error(make(model, rows, tmp_path, f"adapter.path={adapter}"))
    assert broken.startswith("adapter.path: ") and "has no r" in broken
    (adapter / "adapter_config.json").write_text('{"r": 4, "target_modules": ["q_proj"]}')
    save_file({"lora_A": torch.zeros(4, 8)}, adapter / "adapter_model.safetensors")
    fine = preflight(make(model, rows, tmp_path, f"adapter.path={adapter}"))
    assert fine.ok and not any("adapter" in warning for warning in fine.warnings)
    assert fine.summary["trained"] == "LoRA of rank 4 on q_proj"
    other = preflight(make(model, rows, tmp_path, f"adapter.path={adapter}", "adapter.rank=32"))
    assert other.ok and other.summary["trained"] == "LoRA of rank 4 on q_proj"
    [warning] = [one for one in other.warnings if "adapter" in one]
    assert warning.startswith("adapter.rank: ") and "rank: 32, where it has 4" in warning
    # loading takes it for a directory too, and does not ask the hub
    with contextlib.chdir(tmp_path):
        (tmp_path / "models" / "small").mkdir(parents=True)
        told = only_error(make("models/smal", rows, tmp_path))
    assert told == (
        "model.path: models is a directory here, and there is no smal in it. Did you mean"
        " models/small?"
    )
    run = tmp_path / "run"
    (run / "checkpoints" / "step-00000010").mkdir(parents=True)
    assert preflight(make(model, rows, tmp_path)).ok
    assert preflight(make(model, rows, tmp_path, "run.resume=must")).ok
    assert "already holds a run" in only_error(make(model, rows, tmp_path, "run.resume=never"))
    file = tmp_path / "file"
    file.write_text("x")
    assert "is a file" in only_error(make(model, rows, tmp_path, f"run.dir={file}/run"))
    assert (
        "not empty and is not a run"
        in preflight(make(model, rows, tmp_path, f"run.dir={adapter}")).warnings[0]
    )
    assert "eval.every" in only_error(
        make(model, rows, tmp_path, "eval.every=5", "data.eval.size=0")
    )


def test_preflight_looks_for_the_key_of_wandb(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where W&B looks: the environment, what `wandb login` and `wandb offline` write."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    tracked = make(model, rows, tmp_path, "run.log.sinks=[wandb]")

    def warnings() -> list[str]:
        return preflight(tracked).warnings

    [told] = warnings()
    assert told.startswith("run.log.sinks: Weights & Biases has no key") and "wandb login" in told
    assert preflight(make(model, rows, tmp_path)).warnings == []
    for name, value in (("API_KEY", "0" * 40), ("MODE", "offline"), ("MODE", "disabled")):
        monkeypatch.setenv(f"WANDB_{name}", value)
        assert warnings() == []
        monkeypatch.delenv(f"WANDB_{name}")
    login = tmp_path / ".netrc"
    login.write_text("machine api.wandb.ai\n  login user\n  password 0\n")
    login.chmod(0o600)
    assert warnings() == []
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert warnings() == [told]  # a key of another host
    login.write_text("machine wandb.example.org login user password 0")
    assert warnings() == []
    login.write_text("no such thing")
    assert warnings() == [told]
    settings_file = tmp_path / "wandb" / "settings"
    settings_file.parent.mkdir()
    settings_file.write_text("[default]\nmode = offline\n")
    assert warnings() == []
    settings_file.write_text("mode = offline")
    assert warnings() == [told]


def test_preflight_on_a_run_on_the_hub(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert "run.hub.repo: there is no token for the hub. Set HF_TOKEN" in only_error(
        make(model, rows, tmp_path, "run.hub.repo=me/run")
    )
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_mine")
    # what is to be continued may be there
    assert preflight(make(model, rows, tmp_path, "run.hub.repo=me/run", "run.resume=must")).ok
    assert "run.hub.repo: run is no name of a repository. Write org/name" in only_error(
        make(model, rows, tmp_path, "run.hub.repo=run")
    )


@pytest.mark.parametrize(
    ("recipe", "key", "making"),
    [
        ("algorithms/grpo", "model.path", "reinforge tiny runs/tiny"),
        ("envs/gem", "model.path", "reinforge tiny runs/tiny-1024 --context 1024"),
        ("scale", "model.path", "reinforge demo --dir runs/demo"),
        (
            "families/forward_kl",
            "teacher.path",
            "reinforge train recipe:algorithms/sft && reinforge export runs/algorithms/sft"
            " runs/teacher",
        ),
    ],
)
def test_a_recipe_says_how_to_make_the_model_that_it_starts_from(
    recipe: str, key: str, making: str, tmp_path: Path
) -> None:
    with contextlib.chdir(tmp_path):
        if key == "teacher.path":
            (tmp_path / "runs" / "tiny").mkdir(parents=True)
            (tmp_path / "runs" / "tiny" / "config.json").write_text("{}")
        told = preflight(load_config(f"recipe:{recipe}")).errors
    assert told[-1].startswith(f"{key}: there is no model in runs/")
    assert told[-1].endswith(f"Make it: `{making}`.")


def test_a_teacher_that_the_hub_does_not_have_is_found(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def absent(cfg: ModelConfig, where: str) -> None:
        asked.append((cfg.path, cfg.revision, where))
        raise InputError(f"there is no {cfg.path}.", where=where)

    monkeypatch.setattr("reinforge.plan.outside.load_config", absent)
    teacher = {"path": "org/teacher", "revision": "v2"}
    config = config_from_dict(
        settings(model, rows, tmp_path, algorithm={"name": "opd"}, rewards=[], teacher=teacher)
    )
    with pytest.raises(InputError, match="teacher.path: there is no org/teacher"):
        check_other_models(config)
    assert asked == [("org/teacher", "v2", "teacher.path")]


def test_a_run_that_is_past_what_is_asked_is_told_before_it_starts(
    model: Path, rows: Path, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000016"
    checkpoint.mkdir(parents=True)
    (checkpoint / "MANIFEST.json").write_text("{}")
    for steps, told in ((12, True), (16, False)):
        asked = ("train.epochs=null", f"train.steps={steps}")
        found = run_checks(make(model, rows, tmp_path, *asked)).warnings
        said = (
            f"train.steps: the run in {tmp_path / 'run'} has done 16 steps already, and 12 are"
            " asked for: nothing would be done. Ask for more than 16, or use another run.dir for a"
            " run of 12 steps."
        )
        assert (said in found) is told


def test_a_run_without_a_checkpoint_is_told_to_begin_again(
    model: Path, rows: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    told = run_checks(make(model, rows, tmp_path)).warnings
    assert (
        f"run.dir: {run} has no checkpoint to continue from. The run begins again, and the 2 steps"
        " that it had done are lost." in told
    )


def test_phase_one_is_fast_and_imports_nothing_heavy(
    model: Path, rows: Path, tmp_path: Path
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps(settings(model, rows, tmp_path)))
    code = (
        "import sys; from pathlib import Path; from reinforge.plan import plan; plan.worker_report"
        " = lambda *a, **k: {'errors': [], 'warnings': [], 'summary': {}};"
        " from reinforge.pipelines import plan as plans; report ="
        f" plans.plan(Path({str(path)!r}), ['train.epochs=2']); assert report.ok, report; heavy ="
        " {'torch', 'transformers', 'numpy', 'datasets', 'pandas', 'reasoning_gym'} &"
        " set(sys.modules); sys.exit(str(heavy) if heavy else 0)"
    )
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(SRC)},
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("kind", ["local", "ray"])
def test_ray_that_is_not_installed(
    model: Path, rows: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    errors = preflight(make(model, rows, tmp_path, f"cluster.kind={kind}")).errors
    assert errors == (
        [
            "cluster.kind: Ray is not installed. pip install 'reinforge[ray]', or set"
            " cluster.kind=local."
        ]
        if kind == "ray"
        else []
    )


# phase 2, in this process


def test_a_reference_that_nobody_compares_with_cannot_be_placed(
    model: Path, rows: Path, tmp_path: Path
) -> None:
    apart = ("cluster.kind=ray", "cluster.reference.gpus=0")
    (told,) = run_checks(make(model, rows, tmp_path, *apart)).errors
    assert told.startswith("cluster.reference: grpo compares with no reference here")
    assert run_checks(make(model, rows, tmp_path, *apart, "algorithm.kl.coefficient=0.1")).ok


def test_fp8_on_a_cpu_is_told_and_not_of_a_gpu_that_is_named(
    model: Path, rows: Path, tmp_path: Path
) -> None:
    cfg = make(model, rows, tmp_path, "train.precision=fp8", "model.device=cpu")
    said = "train.precision: a CPU does not multiply in FP8"
    assert [w.startswith(said) for w in run_checks(cfg).warnings] == [True]
    assert run_checks(cfg, PlanOptions(gpu="H100")).warnings == []


def test_the_median_prompt_is_for_predictions_of_clusters(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps(settings(model, rows, tmp_path)))

    def here(config: Path, overrides: list[str], deadline: float) -> dict[str, Any]:
        return run_checks(load_config(config, overrides)).as_dict()

    monkeypatch.setattr(plan, "worker_report", here)
    assert 4 <= (plan.prompt_tokens(path, []) or 0) <= 6
    assert plan.prompt_tokens(path, [f"model.path={tmp_path}"]) is None


def test_checks_on_a_good_config(model: Path, rows: Path, tmp_path: Path) -> None:
    report = run_checks(make(model, rows, tmp_path))
    assert report.ok and not report.warnings, report
    assert report.summary["rows"] == {"train": 16, "eval": 4}
    assert report.summary["steps"] == 2
    assert (
        report.summary["prompt_tokens"]["min"] >= 4 and report.summary["prompt_tokens"]["max"] <= 6
    )
    assert report.summary["prompt_tokens"]["limit"] == 64 - 16
    assert report.summary["rewards"] == {"exact_number": {"gold": 1.0, "empty": 0.0}}


def test_checks_predict_memory_and_time(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every part, from the model's configuration alone; what will not fit is a warning that says
    what to do.
    """
    from reinforge.backends import roofline

    gpu = roofline.gpu("NVIDIA L4", 1 << 30)
    monkeypatch.setattr("reinforge.plan.prediction.machine_at", lambda device: gpu)
    report = run_checks(make(model, rows, tmp_path, "algorithm.kl.coefficient=0.1"))
    found = report.summary["prediction"]
    # embedding and head, attention, MLP, norms
    n = 100 * 16 * 2 + 4 * 16 * 16 + 3 * 16 * 16 + 3 * 16
    gib = lambda count: pytest.approx(count / 2**30, rel=1e-3)  # noqa: E731
    assert (
        found["memory_gib"]["train"]["weights"] == gib(2 * n)
        and found["assumed"]["samples"] == 32
        and report.ok
    )
    assert (
        found["memory_gib"]["generate"]["kv"] == gib(512 * 64 * 2 * 16 * 2)
        and found["memory_gib"]["train"]["reference"] == gib(2 * n)
        and 0 < found["seconds"]["train"] < found["seconds"]["generate"]
    )
    lines = dict(plan.describe(report))
    whole = report.summary["steps"] * sum(report.summary["prediction"]["seconds"].values())
    assert lines["time of the run"] == (
        f"about {plan._span(whole)}, {report.summary['steps']:,} such steps; start, evaluations and"
        " checkpoints come on top"
    )
    assert (
        " of 1 GiB on NVIDIA L4: " in lines["memory to train"]
        and "tokens)" in lines["memory to train"]
        and "kv" in lines["memory to generate"]
    )
    assert lines["time of a step"].startswith("about train ") and not [
        w for w in report.warnings if w.startswith("memory")
    ]
    gpu = roofline.gpu("Tiny", 1 << 20)
    report = run_checks(make(model, rows, tmp_path))
    assert (
        report.ok
        and "memory: " in report.warnings[0]
        and "Tiny has 0.0" in report.warnings[0]
        and "adapter.rank=16" in report.warnings[0]
    )
    assert "a guess" in dict(plan.describe(report))["time of a step"]
    gpu = roofline.this_cpu()
    assert (
        "model.device: there is no GPU here"
        in run_checks(make(model, rows, tmp_path, "model.device=cuda")).warnings[0]
    )


def test_rows_that_cannot_be_used(model: Path, tmp_path: Path) -> None:
    empty = jsonl(tmp_path / "empty.jsonl", [])
    assert "no rows" in run_checks(make(model, empty, tmp_path, "data.eval.size=0")).errors[0]
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "a"}\n{"prompt": \n')
    message = run_checks(make(model, broken, tmp_path, "data.eval.size=0")).errors[0]
    assert "broken.jsonl" in message and "2" in message


def test_overlap_is_refused_by_text_not_by_id(model: Path, rows: Path, tmp_path: Path) -> None:
    held = jsonl(
        tmp_path / "held.jsonl",
        [
            {"id": f"other{i}", "prompt": f"{i}+{i}= " if i < 3 else f"{i}-{i}=", "answer": "0"}
            for i in range(9)
        ],
    )
    report = run_checks(make(model, rows, tmp_path, f"data.eval.source={held}", "data.eval.size=0"))
    assert len(report.errors) == 1
    assert (
        "3 of 9 evaluation rows" in report.errors[0]
        and "'other0'" in report.errors[0]
        and "0+0=" in report.errors[0]
    )


@pytest.mark.parametrize(
    ("policy", "refused"), [("error", True), ("drop", False), ("truncate", False)]
)
def test_long_prompts(model: Path, tmp_path: Path, policy: str, refused: bool) -> None:
    items = [
        {"id": f"r{i}", "prompt": "x" * (60 if i == 7 else 5 + i), "answer": "1"} for i in range(10)
    ]
    rows = jsonl(tmp_path / "long.jsonl", items)
    report = run_checks(make(model, rows, tmp_path, "data.eval.size=0", f"data.length={policy}"))
    message = (report.errors if refused else report.warnings)[0]
    assert report.ok is not refused
    assert (
        "1 of 10 checked training rows are longer than 48 tokens" in message
        and "'r7'" in message
        and "with 60" in message
    )
    assert report.summary.get("dropped") == ({"training": 1} if policy == "drop" else None)
    assert report.summary.get("truncated") == ({"training": 1} if policy == "truncate" else None)
    assert report.summary["prompt_tokens"] == {
        "min": 5,
        "median": 9,
        "p90": 14,
        "max": 60,
        "limit": 48,
        "checked": 10,
    }
    every = run_checks(
        make(model, rows, tmp_path, "data.eval.size=0", "data.max_length=2", "data.length=drop")
    )
    assert "All of them would be dropped" in every.errors[0]
    none = run_checks(make(model, rows, tmp_path, "data.eval.size=0", "rollout.max_new_tokens=64"))
    assert "no room for a prompt in a context of 64" in none.errors[0]


def test_sft_counts_whole_rows(model: Path, tmp_path: Path) -> None:
    rows = jsonl(
        tmp_path / "sft.jsonl",
        [{"prompt": "x" * 10, "completion": "y" * (5 + i)} for i in range(3)],
    )
    config = make(model, rows, tmp_path, "data.eval.size=0", algorithm={"name": "sft"}, rewards=[])
    # and EOS
    assert run_checks(config).summary["row_tokens"] == {
        "min": 16,
        "median": 17,
        "p90": 18,
        "max": 18,
        "limit": 64,
        "checked": 3,
    }


REWARDS = """
def good(completions, answer): return [float(c == a) for c, a in zip(completions, answer)]
def raises(completions, answer): return [1 / (int(a) - 10) for a in answer]
def empty(completions): return [len(c) / len(c) for c in completions]
def short(completions): return [1.0]
def nan(completions): return [float("nan") for _ in completions]
def unsure(completions, answer): return [None if a == "38" else 1.0 for a in answer]
def flat(completions): return [0.5 for _ in completions]
def silent(completions): return [None for _ in completions]
def wants_text(completions): return [float(c == "x") if c else None for c in completions]
"""


@pytest.mark.parametrize(
    ("name", "errors", "warnings"),
    [
        ("good", [], []),
        ("raises", ["ZeroDivisionError", "own gold answer", "'5+5='"], []),
        ("empty", ["ZeroDivisionError", "empty completion"], []),
        ("short", ["returned 1 values for"], []),
        ("nan", ["nan"], []),
        ("unsure", [], ["could not score 1 of 2 gold", "'38' of row", "two.jsonl:2"]),
        ("flat", [], ["gold answers score 0.5", "empty completions 0.5"]),
        ("silent", [], ["silent): could score none of the 2 gold", "'10' of row", "No reward sco"]),
        ("wants_text", [], ["score 0 on average and empty completions could not be scored."]),
    ],
)
def test_rewards_meet_their_gold_answers(
    model: Path, tmp_path: Path, name: str, errors: list[str], warnings: list[str]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(REWARDS)
    rows = jsonl(
        tmp_path / "two.jsonl", [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in (5, 19)]
    )
    report = run_checks(
        make(
            model,
            rows,
            tmp_path,
            f"rewards.0.name={file}:{name}",
            "data.eval.size=0",
            "train.prompts_per_step=2",
        )
    )
    assert bool(report.errors) == bool(errors), report.errors
    for word in errors:
        assert word in report.errors[0]
    for word in warnings:
        assert any(word in warning for warning in report.warnings), report.warnings
    if name == "silent":
        assert not any("on average" in warning for warning in report.warnings)
    if name == "good":
        assert (
            report.summary["rewards"] == {"good": {"gold": 1.0, "empty": 0.0}}
            and not report.warnings
        )


def test_gold_answers_that_no_reward_can_read(model: Path, tmp_path: Path) -> None:
    """An error where every row of the data is such a one and the run is long enough to stop."""
    words = [{"prompt": f"{i}+{i}=", "answer": f"word number {'x' * i}"} for i in range(40)]
    unread = jsonl(tmp_path / "words.jsonl", words)

    def found(file: Path, *more: str) -> tuple[list[str], list[str]]:
        given = ("data.eval.size=0", "train.prompts_per_step=8", *more)
        report = run_checks(make(model, file, tmp_path, *given))
        assert not any("on average" in warning for warning in report.warnings)
        about = [w for w in report.warnings if w.startswith("rewards")]
        return report.errors, about

    [error], warnings = found(unread)
    assert not warnings
    assert error.startswith(
        "rewards.0 (exact_number): could score none of the 8 gold answers that it was tried on; the"
        " first is 'word number ' of "
    )
    assert "words.jsonl:1" in error and "No answer to any of the 40 rows can be scored" in error
    assert "stops after 3 steps" in error
    says = "No reward scored any of them, or an empty completion"
    errors, [warning] = found(unread, "train.epochs=null", "train.steps=2")  # ends before it stops
    assert not errors and says in warning
    one = [{**row, "answer": "7"} if i == 1 else row for i, row in enumerate(words)]
    errors, [warning] = found(jsonl(tmp_path / "one.jsonl", one))  # which was not looked at
    assert not errors and says in warning
    # another reward scores them
    errors, warnings = found(
        unread, "rewards.1.name=regex", "rewards.1.options={pattern: word}", "rewards.1.weight=0.5"
    )
    assert not errors and len(warnings) == 1
    assert "unscored by it in training too" in warnings[0] and "rewards.0 (exact_n" in warnings[0]


def test_a_total_that_is_not_known_beforehand_is_no_warning(model: Path, tmp_path: Path) -> None:
    """What counts comes from a server that is not asked: whether gold answers are preferred cannot
    be said.
    """
    file = tmp_path / "mine.py"
    file.write_text(REWARDS)
    rows = jsonl(
        tmp_path / "two.jsonl", [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in (5, 19)]
    )
    more = (
        f"rewards.0.name={file}:flat",
        "rewards.0.weight=0",
        "data.eval.size=0",
        "train.prompts_per_step=2",
    )
    assert any(
        "gold answers score 0" in w for w in run_checks(make(model, rows, tmp_path, *more)).warnings
    )
    other = ("rewards.1.name=http", "rewards.1.options={url: 'http://127.0.0.1:9'}")
    assert not any(
        "gold answers score" in w
        for w in run_checks(make(model, rows, tmp_path, *more, *other)).warnings
    )


@pytest.mark.parametrize("on_error", ["raise", "unscored"])
def test_without_gold_answers_empty_completions_are_tried(
    model: Path, tmp_path: Path, on_error: str
) -> None:
    """A model may say nothing: where a reward that raises ends the run, that is an error."""
    file = tmp_path / "mine.py"
    file.write_text(REWARDS)
    rows = jsonl(tmp_path / "bare.jsonl", [{"prompt": f"{i}"} for i in range(10)])
    given = settings(model, rows, tmp_path)
    rollout = {**given.get("rollout", {}), "on_reward_error": on_error}
    own = {
        "data": {"source": str(rows)},
        "rewards": [{"name": f"{file}:empty"}],
        "rollout": rollout,
    }
    report = run_checks(config_from_dict({**given, **own}))
    told = report.errors if on_error == "raise" else report.warnings
    assert report.ok == (on_error == "unscored")
    assert any("ZeroDivisionError" in line and "empty completion" in line for line in told)


def test_rows_without_answers_are_a_warning(model: Path, tmp_path: Path) -> None:
    rows = jsonl(tmp_path / "bare.jsonl", [{"prompt": f"{i}"} for i in range(10)])
    form = [{"name": "regex", "options": {"pattern": "."}}]  # needs no answer
    report = run_checks(
        config_from_dict(
            {**settings(model, rows, tmp_path), "data": {"source": str(rows)}, "rewards": form}
        )
    )
    assert report.ok and "have no `answer`" in report.warnings[0]


def test_columns_that_rewards_ask_for_are_looked_for_before_the_model(
    model: Path, tmp_path: Path
) -> None:
    """By `plan` and by `train`: a model that is not there is not what they complain about."""
    bare = jsonl(tmp_path / "bare.jsonl", [{"prompt": f"{i}"} for i in range(10)])
    wants = r"reward exact_number needs answer, which the rows do not have \(there are no columns\)"
    found = run_checks(make(tmp_path / "nowhere", bare, tmp_path, "data.eval.size=0")).errors
    assert any(re.search(wants, error) for error in found), found
    with pytest.raises(InputError, match=wants):
        build(make(tmp_path / "nowhere", bare, tmp_path, "data.eval.size=0"), SilentView())
    some = jsonl(
        tmp_path / "some.jsonl",
        [{"prompt": f"{i}", **({} if i == 7 else {"answer": "1"})} for i in range(10)],
    )
    [error] = run_checks(make(model, some, tmp_path, "data.eval.size=0")).errors
    assert re.search(r"which row \S+ \(.*some\.jsonl:8\) does not have", error), error
    assert run_checks(
        make(model, some, tmp_path, "data.eval.size=0", "rollout.on_reward_error=unscored")
    ).ok
    asks = [
        {"name": "code", "options": {"tests": "cases"}},
        {"name": "http", "options": {"url": "http://127.0.0.1:9", "columns": ["gold"]}},
    ]
    for reward, column in zip(asks, ("cases", "gold"), strict=True):
        [error] = run_checks(
            make(model, bare, tmp_path, "data.eval.size=0", rewards=[reward])
        ).errors
        assert f"needs {column}, which the rows do not have" in error


def test_sampling_and_quantiles() -> None:
    picked = sample(list(range(100_000)), 10_000)  # type: ignore[arg-type]
    assert len(set(picked)) == 10_000 and picked[0] == 0 and picked[-1] == 99_999
    assert sample([1, 2, 3], 10) == [1, 2, 3]  # type: ignore[list-item]
    assert quantiles(range(101)) == {"min": 0, "median": 50, "p90": 90, "max": 100}


def test_an_unreachable_model_is_not_ok_and_the_rest_is_checked(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed_network: str
) -> None:
    """It was: ok, exit 0, `it would run`."""
    report = run_checks(make("nobody/no-such-model-at-all", rows, tmp_path))
    assert report.errors == [
        f"model.path: no such directory: nobody/no-such-model-at-all, and the hub {closed_network}"
        " cannot be reached. Check the path, the spelling and the network; without a network, give"
        " the directory of a model."
    ]
    assert "cannot be reached" in report.warnings[0]
    assert "prompts, memory and time could not be checked" in report.warnings[1]
    # the rest was checked
    assert report.summary["rewards"] == {"exact_number": {"gold": 1.0, "empty": 0.0}}
    # nothing to ask a hub for
    assert hub.go_offline_if_unreachable(make(tmp_path, rows, tmp_path)) is None


@pytest.mark.parametrize(
    "key", ["critic.path", "teacher.path", "rewards.0.options.path", "model.tokenizer"]
)
def test_every_model_that_a_configuration_names_is_looked_for(
    key: str, model: Path, rows: Path, tmp_path: Path, closed_network: str
) -> None:
    more: dict[str, Any] = {
        "critic.path": {"algorithm": {"name": "ppo"}, "critic": {"path": "org/none"}},
        "teacher.path": {
            "algorithm": {"name": "opd"},
            "teacher": {"path": "org/none"},
            "rewards": [],
        },
        "rewards.0.options.path": {"rewards": [{"name": "model", "options": {"path": "org/none"}}]},
        "model.tokenizer": {"model": {"path": str(model), "tokenizer": "org/none"}},
    }[key]
    (error,) = hub.not_here(config_from_dict({**settings(model, rows, tmp_path), **more}))
    assert error.startswith(
        f"{key}: no such directory: org/none, and the hub {closed_network} cannot be reached."
    )


# phase 2, in its own process


def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Puts a shell script in the place of the worker's interpreter."""
    program = tmp_path / "worker"
    program.write_text("#!/bin/sh\n" + script)
    program.chmod(0o755)
    monkeypatch.setattr(plan.sys, "executable", str(program))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_hanging_worker_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker(
        tmp_path,
        monkeypatch,
        f"echo 'stage: scoring gold answers' >&2\nsleep 600 &\necho $! > {tmp_path}/pid\nwhile"
        " true; do echo flood; done\n",
    )
    start = time.monotonic()
    found = plan.worker_report(Path("c.yaml"), [], 1.0)
    assert 1.0 <= time.monotonic() - start < 4.0
    assert (
        "did not end within 1 s" in found["errors"][0]
        and "while scoring gold answers" in found["errors"][0]
    )
    time.sleep(0.1)
    assert not alive(int((tmp_path / "pid").read_text()))


def test_importing_does_not_count_and_what_does_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline was spent on importing torch, and `rendering prompts` was blamed."""
    report = """printf '{"errors": ["e"], "warnings": [], "summary": {}}'\n"""
    worker(
        tmp_path,
        monkeypatch,
        f"sleep 2\necho 'stage: importing torch' >&2\nsleep 3\necho 'stage: reading' >&2\n{report}",
    )
    assert plan.worker_report(Path("c.yaml"), [], 4.0)["errors"] == ["e"]
    slow = "echo 'stage: importing torch' >&2\necho 'stage: reading the data' >&2\nsleep 600\n"
    worker(tmp_path, monkeypatch, slow)
    message = plan.worker_report(Path("c.yaml"), [], 0.3)["errors"][0]
    assert "did not end within 0.3 s and were killed, while reading the data." in message
    monkeypatch.setattr(plan, "IMPORT_SECONDS", 0.3)
    worker(tmp_path, monkeypatch, "echo 'stage: importing torch' >&2\nsleep 600\n")
    message = plan.worker_report(Path("c.yaml"), [], 60.0)["errors"][0]
    assert "plan: importing torch took more than 0.3 s." in message and "too busy" in message


def test_a_stage_is_known_though_its_line_comes_in_pieces_and_a_flood_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker(
        tmp_path,
        monkeypatch,
        "printf 'stage: import' >&2\nsleep 0.3\nprintf 'ing torch\\nstage: rea' >&2\nsleep"
        " 0.3\nprintf 'ding\\n' >&2\nhead -c 300000 /dev/zero | tr '\\0' 'x' >&2\nkill -9 $$\n",
    )
    assert (
        "killed by signal 9, while reading: xxx"
        in plan.worker_report(Path("c.yaml"), [], 30.0)["errors"][0]
    )


def test_a_dying_worker_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker(
        tmp_path,
        monkeypatch,
        "echo 'stage: reading the data' >&2\necho 'ValueError: bad file' >&2\nexit 1\n",
    )
    message = plan.worker_report(Path("c.yaml"), [], 10.0)["errors"][0]
    assert "ended with code 1, while reading the data: ValueError: bad file" in message
    worker(tmp_path, monkeypatch, "kill -9 $$\n")
    assert (
        "killed by signal 9, while starting"
        in plan.worker_report(Path("c.yaml"), [], 10.0)["errors"][0]
    )


def test_children_that_outlive_the_worker_do_not_delay_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker(
        tmp_path,
        monkeypatch,
        """sleep 600 &\nprintf '{"errors": ["e"], "warnings": [], "summary": {}}'\n""",
    )
    start = time.monotonic()
    assert plan.worker_report(Path("c.yaml"), [], 30.0)["errors"] == ["e"]
    assert time.monotonic() - start < 4.0


def test_plan_from_end_to_end(model: Path, rows: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "print('loaded')\ndef score(completions, answer):\n    print('{}')\n    return [1.0 if c =="
        " a else 0.0 for c, a in zip(completions, answer)]\n"
    )
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps(settings(model, rows, tmp_path)))
    command = [
        sys.executable,
        "-m",
        "reinforge",
        "plan",
        str(path),
        f"rewards.0.name={file}:score",
        "train.epochs=3",
        "--json",
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(SRC)},
    )
    report = json.loads(done.stdout)
    assert done.returncode == 0, report
    assert (
        report["ok"]
        and report["summary"]["steps"] == 6
        and report["summary"]["rewards"] == {"score": {"gold": 1.0, "empty": 0.0}}
    )
    assert report["summary"]["check_seconds"] < 90
    lines = dict(plan.describe(plan.PlanReport(summary=report["summary"])))
    assert (
        lines["rows"] == "16 to train on, 4 held out"
        and lines["one step"] == "32 samples, at most 512 new tokens"
    )
    assert lines["reward score"] == "gold 1, empty 0"


OFFLINE = {
    "HF_HUB_OFFLINE": "",
    "HF_ENDPOINT": "http://127.0.0.1:9",
    "HTTPS_PROXY": "",
    "ALL_PROXY": "",
    "PYTHONPATH": str(SRC),
}


@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_missing_model_is_told_at_once_and_is_no_success(
    command: str, rows: Path, tmp_path: Path
) -> None:
    """`train` waited a minute with `Retrying in 8s`; now it does not even import torch.

    `plan` said ok.
    """
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps(settings("org/name", rows, tmp_path)))
    code = f"""
import sys
from reinforge.cli.main import main
code = main([{command!r}, {str(path)!r}])
assert "torch" not in sys.modules
sys.exit(code)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, **OFFLINE},
    )
    assert done.returncode == 2, done.stderr
    assert (
        "error: model.path: no such directory: org/name, and the hub http://127.0.0.1:9 cannot be"
        " reached." in done.stderr
    )
    assert "Retrying" not in done.stderr and "ok" not in done.stdout.split()
    assert not (tmp_path / "run").exists()


def test_without_the_hub_a_cached_model_is_loaded_and_another_refused_without_a_retry(
    model: Path, tmp_path: Path
) -> None:
    """The Python interface: whoever loads asks first."""
    cache = tmp_path / "cache" / "models--org--here"
    shutil.copytree(model, cache / "snapshots" / ("0" * 40))
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0" * 40)
    code = """
import huggingface_hub.constants  # it has read the flags before we look
from reinforge.config.model import ModelConfig
from reinforge.config.rules import machine
from reinforge.core.errors import InputError
from reinforge.models.load import load_tokenizer
assert load_tokenizer(ModelConfig(path="org/here")).eos_token == "<eos>"
try:
    load_tokenizer(ModelConfig(path="org/name"))
except InputError as error:
    print(error)
"""
    environment = {**os.environ, **OFFLINE, "HF_HUB_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "model.path: no such directory: org/name, and the hub http://127.0.0.1:9 cannot be reached."
    )
    assert "Retrying" not in done.stderr


def test_a_changed_config_is_refused_before_the_model_is_loaded(
    model: Path, rows: Path, tmp_path: Path
) -> None:
    """`train` would refuse to resume it, after loading weights; `plan` says so first."""
    first = make(model, rows, tmp_path)
    (tmp_path / "run" / "checkpoints" / "step-00000002").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text(first.model_dump_json())
    assert (
        not preflight(first).errors
        and not preflight(make(model, rows, tmp_path, "eval.every=3")).errors
    )
    refused = preflight(make(model, rows, tmp_path, "train.learning_rate=0.5")).errors
    assert len(refused) == 1 and "train.learning_rate was 1e-05 and is 0.5" in str(refused[0])


def used(model: Path, rows: Path, tmp_path: Path, *wrong: str) -> Path:
    """A file that does not fit the run in its directory, which is finished, for more reasons than
    the directory.
    """
    run = tmp_path / "run"
    first = make(model, rows, tmp_path)
    checkpoint = run / "checkpoints" / "step-00000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "MANIFEST.json").write_text("{}")
    (checkpoint / "state.json").write_text('{"extra": {"step": 2, "clock": {"last": {}}}}')
    (run / "config.json").write_text(first.model_dump_json())
    jsonl(run / "metrics.jsonl", [{"step": 2}])
    jsonl(run / "events.jsonl", [{"kind": "started", "steps": 2}, {"kind": "finished"}])
    changed = make(model, rows, tmp_path, "train.learning_rate=0.5", *wrong)
    file = tmp_path / "changed.yaml"
    file.write_text(changed.model_dump_json(exclude_unset=True))
    return file


def test_train_tells_a_used_directory_with_whatever_else_is_wrong(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who chooses another directory should not meet the next error then."""
    file = used(model, rows, tmp_path, "rewards.0.name=exact_numbr")
    assert main(["train", str(file)]) == 2
    told = capsys.readouterr().err
    assert "error: 2 problems:" in told
    assert "train.learning_rate was 1e-05 and is 0.5" in told
    assert "there is no reward 'exact_numbr'. Did you mean exact_number?" in told


def test_plan_reads_the_data_though_the_directory_is_used(
    model: Path, rows: Path, tmp_path: Path
) -> None:
    file = used(model, rows, tmp_path, "data.where.nothing=1")
    errors = plan.plan_run(load_config(file), file).errors
    assert len(errors) == 2, errors
    assert "train.learning_rate was 1e-05 and is 0.5" in errors[1]
    assert "nothing" in errors[0] and "train.learning_rate" not in errors[0]
