"""Architectures that once trained on wrong numbers without a word: through the command line they
are right, or refused before training.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from helpers import cli_runs
from helpers.toy_architectures import ORIGINAL, save_architecture, write_tokenizer

NARROW = ("model.dtype=bfloat16",)
SHORT = ("rollout.max_new_tokens=8",)  # prompts of the task have a few tokens
LONG = (f"rollout.max_new_tokens={ORIGINAL}",)
ROWS = (f"data.max_length={ORIGINAL + 1}",)

# the architecture, changes of the config, and why it is refused
CASES: dict[str, tuple[str, tuple[str, ...], str | None]] = {
    "longrope": ("longrope", SHORT, None),
    "longrope, answers past its original length": (
        "longrope",
        LONG,
        f"no room for a prompt in the model's context of {ORIGINAL}",
    ),
    "longrope, rows past its original length": (
        "longrope",
        ROWS,
        f"{ORIGINAL + 1} tokens are more than the {ORIGINAL} up to which",
    ),
    "dynamic": ("dynamic", SHORT, None),
    "qwen2_moe": ("qwen2_moe", SHORT, None),
    "phimoe": ("phimoe", SHORT, None),
    "gptj": (
        "gptj",
        (),
        "GPTJForCausalLM cannot be trained here: its layers have an attention of their own making",
    ),
    "gpt_neo": (
        "gpt_neo",
        (),
        (
            "GPTNeoForCausalLM cannot be trained here: its layers have an attention of their own"
            " making"
        ),
    ),
    "codegen": (
        "codegen",
        (),
        (
            "CodeGenForCausalLM cannot be trained here: its layers have an attention of their own"
            " making"
        ),
    ),
    "lfm2": ("lfm2", SHORT, None),
    "qwen3_5": ("qwen3_5", SHORT, None),
    "nemotron_h": ("nemotron_h", SHORT, None),
    "rwkv": ("rwkv", NARROW, "RwkvForCausalLM cannot be trained here: its layers keep state"),
    "llama4": ("llama4", SHORT, None),
    "deepseek_v3": ("deepseek_v3", SHORT, None),
    "gpt_oss": ("gpt_oss", SHORT, None),
    "gemma4": ("gemma4_text", SHORT, None),  # heads of several sizes
}


@pytest.mark.parametrize("case", CASES)
def test_trained_right_or_refused_before_training(case: str, tmp_path: Path) -> None:
    name, changes, refused = CASES[case]
    model = save_architecture(name, tmp_path / "model", write_tokenizer)
    config = cli_runs.write_config(
        tmp_path, model, train={"steps": 2}, data={"eval": {"size": 0}}, eval={"every": 0}
    )
    code, said = cli_runs.forked("train", config, *changes, cwd=tmp_path)
    if refused is None:
        assert code == 0, said
        metrics = cli_runs.lines(tmp_path / "run" / "metrics.jsonl")
        assert [line["step"] for line in metrics] == [1, 2]
        # engine and trainer agree
        assert all(
            line["policy/entropy"] < 5.5 and line["mismatch/max"] < 1e-4 for line in metrics
        ), metrics
        return
    assert code == 2, said
    [paragraph] = [line for line in said.splitlines() if "error:" in line]
    assert re.search(refused, paragraph) and "unexpected" not in said, said
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_yes_on_standard_input_runs_no_code_of_a_model(tmp_path: Path, tiny: Path) -> None:
    """transformers would ask, and `yes | reinforge train` would answer."""
    model = tmp_path / "model"
    mark = tmp_path / "mark"
    shutil.copytree(tiny, model)
    (model / "own.py").write_text(
        f"open({str(mark)!r}, 'w').close()\nfrom transformers import LlamaConfig as OwnConfig\n"
    )
    settings = json.loads((model / "config.json").read_text())
    settings |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (model / "config.json").write_text(json.dumps(settings))
    config = cli_runs.write_config(tmp_path, model)
    done = cli_runs.cli(
        "train",
        config,
        cwd=tmp_path,
        text="y\n" * 100,
        env={"HF_MODULES_CACHE": str(tmp_path / "modules")},
    )
    assert done.returncode == 2 and "is Python code in its own directory" in done.stderr, (
        done.stderr
    )
    assert not mark.exists()
