"""The whole way through the command line: plan, train, eval, generate, chat, export, compare.

Numbers are checked against transformers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from helpers import cli_runs
from reinforge.checkpoint import store

STEPS = 30
PROMPTS = ["1+2=", "9-4=", "3+3="]


@dataclass
class Trained:
    folder: Path
    config: Path
    said: str


@pytest.fixture(scope="module")
def trained(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """An SFT run with evaluation, made by the command as a user types it."""
    folder = tmp_path_factory.mktemp("flow")
    config = cli_runs.write_config(
        folder,
        tiny,
        "sft",
        train={"steps": STEPS, "learning_rate": 1e-2, "prompts_per_step": 16},
        eval={"every": 10},
    )
    done = cli_runs.cli("train", config.name, "run.dir=runs/sft", cwd=folder)
    assert done.returncode == 0, done.stderr
    return Trained(folder, config, done.stdout)


@pytest.fixture(scope="module")
def lora(tiny: Path, trained: Trained) -> Path:
    """A LoRA GRPO run beside it."""
    changes = {
        "adapter": {"kind": "lora", "rank": 4},
        "train": {"steps": 3, "learning_rate": 3e-2, "schedule": {"kind": "constant"}},
    }
    config = cli_runs.write_config(trained.folder / "lora", tiny, **changes)
    code, said = cli_runs.forked("train", config, "run.dir=runs/lora", cwd=trained.folder)
    assert code == 0, said
    return trained.folder / "runs" / "lora"


@pytest.fixture(scope="module")
def exported(trained: Trained) -> Path:
    code, said = cli_runs.forked("export", "runs/sft", "out", cwd=trained.folder)
    assert code == 0 and "out, the newest checkpoint of runs/sft" in said, said
    assert said.splitlines()[-1].split() == ["next", "reinforge", "chat", "out"], said
    return trained.folder / "out"


def value(said: str, key: str) -> float:
    """What a `key  value` line says."""
    return float(
        next(line.split()[1] for line in reversed(said.splitlines()) if line.split()[:1] == [key])
    )


def logits(model: torch.nn.Module, tokenizer: object, text: str) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokenizer(text)["input_ids"]])).logits[0].float()  # type: ignore[operator]


# ---- plan and train ----


def test_plan(trained: Trained) -> None:
    done = cli_runs.cli(
        "plan", trained.config.name, "run.dir=runs/new", "--json", cwd=trained.folder
    )
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["ok"] and report["errors"] == []
    assert report["summary"]["samples_per_step"] == 16 and report["summary"]["steps"] == STEPS
    assert not (trained.folder / "runs" / "new").exists(), "plan writes nothing"


def test_training_learned_and_said_so(trained: Trained) -> None:
    lines = cli_runs.lines(trained.folder / "runs" / "sft" / "metrics.jsonl")
    losses = [line["eval/loss"] for line in lines if "eval/loss" in line]
    assert len(losses) == 4 and losses[0] == pytest.approx(5.5, abs=0.2), (
        "about ln(vocabulary) before the first step"
    )
    assert losses[-1] < 3.2
    ending = trained.said[trained.said.index("finished  ") :]
    assert ending.startswith(f"finished  {STEPS} of {STEPS} steps in ")
    assert (
        "\nreached   eval/accuracy " in ending
        and "\n          loss " in ending
        and "tokens_per_second" not in ending
    )
    assert "report    runs/sft/report.html" in ending and "reinforge chat runs/sft" in ending
    for name in ("report.html", "summary.json", "config.json", "versions.json"):
        assert (trained.folder / "runs" / "sft" / name).stat().st_size > 100


def test_eval_of_a_run_and_of_its_config(trained: Trained) -> None:
    """The run's checkpoint scores what its last evaluation said; the config names the untrained
    model.
    """
    last = [
        line
        for line in cli_runs.lines(trained.folder / "runs" / "sft" / "metrics.jsonl")
        if "eval/reward" in line
    ]
    for source, expected in (("runs/sft", last[-1]), (trained.config.name, last[0])):
        code, said = cli_runs.forked("eval", source, cwd=trained.folder)
        assert code == 0, said
        for name in ("eval/reward", "eval/accuracy", "eval/length", "eval/n"):
            assert value(said, name) == pytest.approx(expected[name], rel=1e-3), (source, name)
    assert last[0]["eval/reward"] != last[-1]["eval/reward"]


# ---- out the door ----


def test_the_exported_model_is_the_trained_one(trained: Trained, exported: Path) -> None:
    from transformers import AutoModelForCausalLM

    state, _ = store.load(trained.folder / "runs" / "sft" / "checkpoints" / f"step-{STEPS:08d}")
    model = AutoModelForCausalLM.from_pretrained(exported)
    own = dict(model.named_parameters())
    weights = {
        name.removeprefix("model/"): tensor
        for name, tensor in state.tensors.items()
        if name.startswith("model/")
    }
    assert weights.keys() == own.keys()
    assert all(torch.equal(own[name], tensor) for name, tensor in weights.items())
    assert model.config._attn_implementation in ("sdpa", "eager") and not list(
        exported.glob("*.bin")
    )
    assert "reinforge" not in (exported / "config.json").read_text(), (
        "nothing of ours is needed to load it"
    )


def test_generate_agrees_with_transformers(trained: Trained, exported: Path) -> None:
    """Greedy completions of the run are those of the exported model under transformers, and so are
    their log-probs.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (trained.folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": p, "tag": i}) + "\n" for i, p in enumerate(PROMPTS))
    )
    code, said = cli_runs.forked(
        "generate",
        "runs/sft",
        "--prompts",
        "prompts.jsonl",
        "--out",
        "got.jsonl",
        "-t",
        0,
        "--max-new-tokens",
        8,
        cwd=trained.folder,
    )
    assert code == 0 and said.splitlines()[-1] == "3 rows in got.jsonl", said
    model = AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    rows = cli_runs.lines(trained.folder / "got.jsonl")
    assert [(r["prompt"], r["tag"]) for r in rows] == list(zip(PROMPTS, range(3)))
    for row in rows:
        prompt = tokenizer(row["prompt"], return_tensors="pt")["input_ids"]
        whole = model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)[0]
        assert whole[prompt.shape[1] :].tolist() == row["tokens"]
        theirs = model(whole[None]).logits[0].float().log_softmax(-1)
        picked = [theirs[prompt.shape[1] - 1 + i, t].item() for i, t in enumerate(row["tokens"])]
        assert row["logprobs"] == pytest.approx(picked, abs=1e-4)


def test_sampling_is_a_function_of_the_seed(trained: Trained, exported: Path) -> None:
    (trained.folder / "one.jsonl").write_text(json.dumps({"prompt": "1+1="}) + "\n")
    texts = []
    for seed in (0, 0, 1):
        code, said = cli_runs.forked(
            "generate",
            "out",
            "--prompts",
            "one.jsonl",
            "--out",
            "s.jsonl",
            "-n",
            4,
            "--max-new-tokens",
            8,
            "--seed",
            seed,
            cwd=trained.folder,
        )
        assert code == 0, said
        texts.append([row["tokens"] for row in cli_runs.lines(trained.folder / "s.jsonl")])
    assert (
        texts[0] == texts[1] != texts[2]
        and len(texts[0]) == 4
        and len({str(t) for t in texts[0]}) > 1
    )


def test_lora_adapter_and_merged_agree(trained: Trained, lora: Path, tiny: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for out, merge in (("adapter", []), ("merged", ["--merge"])):
        code, said = cli_runs.forked("export", lora, out, *merge, cwd=trained.folder)
        assert code == 0, said
    tokenizer = AutoTokenizer.from_pretrained(trained.folder / "merged")
    base = AutoModelForCausalLM.from_pretrained(tiny)
    plain = logits(base, tokenizer, PROMPTS[0])
    adapted = logits(
        PeftModel.from_pretrained(base, trained.folder / "adapter"), tokenizer, PROMPTS[0]
    )
    merged = logits(
        AutoModelForCausalLM.from_pretrained(trained.folder / "merged"), tokenizer, PROMPTS[0]
    )
    assert not (trained.folder / "merged" / "adapter_config.json").exists()
    torch.testing.assert_close(adapted, merged, atol=1e-5, rtol=1e-4)
    assert (plain - merged).abs().max() > 1e-3


# ---- runs ----


def test_runs_list_show_compare_digest(trained: Trained, lora: Path) -> None:
    code, said = cli_runs.forked("runs", "list", "runs", "--json", cwd=trained.folder)
    found = {Path(run["dir"]).name: run for run in json.loads(said)}
    assert code == 0 and found.keys() == {"sft", "lora"}
    assert (found["sft"]["status"], found["sft"]["step"], found["sft"]["algorithm"]) == (
        "finished",
        STEPS,
        "sft",
    )
    code, said = cli_runs.forked("runs", "show", "runs/sft", "--json", cwd=trained.folder)
    shown = json.loads(said)
    assert code == 0 and [c["step"] for c in shown["checkpoints"]] == [STEPS - 2, STEPS]
    code, said = cli_runs.forked(
        "runs", "compare", "runs/sft", "runs/lora", "--json", cwd=trained.folder
    )
    compared = json.loads(said)
    assert (
        code == 0
        and compared["config"]["algorithm.name"] == ["sft", "grpo"]
        and "data.source" not in compared["config"]
    )
    assert compared["metrics"]["train/loss"][0] == shown["last"]["train/loss"]
    digests = [
        cli_runs.forked("runs", "digest", f"runs/{name}", cwd=trained.folder)[1].strip()
        for name in ("sft", "lora")
    ]
    assert (
        digests == [store.digest_run(trained.folder / "runs" / name) for name in ("sft", "lora")]
        and digests[0] != digests[1]
    )


def test_chat_through_a_pipe(trained: Trained) -> None:
    done = cli_runs.cli(
        "chat",
        "runs/sft",
        "-t",
        "0",
        "--max-new-tokens",
        "6",
        cwd=trained.folder,
        text="1+2=\n\n/reset\n1+2=\n/quit\nnot read\n",
    )
    assert done.returncode == 0, done.stderr
    answers = [part.strip() for part in done.stdout.split("> ")[1:]]
    assert answers[0] and answers[0] == answers[3] and answers[1] == answers[2] == "", (
        "the same question from the start has the same answer"
    )
    assert len(answers) == 5


def test_schema_and_algorithms(tmp_path: Path) -> None:
    done = cli_runs.cli("schema", cwd=tmp_path)
    schema = json.loads(done.stdout)
    assert (
        done.returncode == 0
        and schema["additionalProperties"] is False
        and {"model", "algorithm", "data", "train", "run"} <= set(schema["required"])
    )
    code, said = cli_runs.forked("algorithms", cwd=tmp_path)
    assert code == 0 and {"sft", "grpo", "dapo"} <= {
        line.split("\t")[0] for line in said.splitlines()
    }


# ---- mistakes ----

BAD: list[tuple[list[str], str]] = [
    (["train", "missing.yaml"], "missing.yaml"),
    (["train", "."], "directory"),
    (["train", "sft.yaml", "train.lerning_rate=1"], "did you mean `train.learning_rate`?"),
    (["train", "sft.yaml", "train.steps"], "train.steps"),
    (["train", "sft.yaml", "train.steps=0"], "train.steps"),
    (["train", "sft.yaml", "model.path=./nowhere"], "nowhere"),
    (["train", "sft.yaml", "model.path=no-such/model", "run.dir=runs/hub"], "no-such/model"),
    (["train", "sft.yaml", "data.source=rows.jsonl"], "rows.jsonl"),
    (["train", "sft.yaml", "data.source=arithmetic:chian"], "arithmetic:chain"),
    (["train", "sft.yaml", "run.dir=sft.yaml"], "run.dir"),
    (["train", "sft.yaml", "algorithm.name=grop"], "grpo"),
    (
        ["train", "grpo.yaml", "rewards=[{name: 'bad.py:raises'}]", "run.dir=runs/bad1"],
        "bad.py:2 in raises: ZeroDivisionError: division by zero",
    ),
    (
        ["train", "grpo.yaml", "rewards=[{name: 'bad.py:short'}]", "run.dir=runs/bad2"],
        "returned 1 values for 4 completions",
    ),
    (["train", "grpo.yaml", "rewards=[{name: 'bad.py:nan'}]", "run.dir=runs/bad3"], "returned nan"),
    (["train", "grpo.yaml", "rollout.max_new_tokens=4000", "run.dir=runs/bad4"], "max_new_tokens"),
    (["plan", "sft.yaml", "model.path=./nowhere"], "nowhere"),
    (["eval", "nowhere"], "nowhere"),
    (["eval", "sft.yaml", "data.eval.size=0", "eval.every=0"], "nothing to evaluate"),
    (["generate", "out", "--prompts", "nowhere.jsonl", "--out", "x.jsonl"], "nowhere.jsonl"),
    (["generate", "out", "--prompts", "torn.jsonl", "--out", "x.jsonl"], "torn.jsonl"),
    (
        [
            "generate",
            "out",
            "--prompts",
            "unnamed.jsonl",
            "--out",
            "x.jsonl",
            "--max-new-tokens",
            "8",
        ],
        "unnamed.jsonl",
    ),
    (["generate", "./nowhere", "--prompts", "good.jsonl", "--out", "x.jsonl"], "nowhere"),
    (
        [
            "generate",
            "out",
            "--prompts",
            "good.jsonl",
            "--out",
            "x.jsonl",
            "--max-new-tokens",
            "100000",
        ],
        "max_new_tokens",
    ),
    (["generate", "out", "--prompts", "good.jsonl", "--out", "x.jsonl", "-t", "-1"], "temperature"),
    (["chat", "./nowhere"], "nowhere"),
    (["export", "nowhere", "y"], "nowhere"),
    (["export", "runs/sft", "out"], "not empty"),
    (["export", "runs/sft", "y", "--checkpoint", "99"], "99"),
    (["export", "runs/sft", "y", "--checkpoint", "best"], "best"),
    (["runs", "show", "out"], "not a run directory"),
    (["runs", "digest", "nowhere"], "nowhere"),
    (["runs", "compare", "runs/sft", "nowhere"], "nowhere"),
    (["trian", "sft.yaml"], "trian"),
]

BAD_REWARDS = """
def raises(completions, **columns): return [1 / 0 for _ in completions]
def short(completions, **columns): return [1.0]
def nan(completions, **columns): return [float("nan") for _ in completions]
"""


@pytest.fixture(scope="module")
def mistakes(trained: Trained, exported: Path, tiny: Path) -> Path:
    folder = trained.folder
    cli_runs.write_config(folder, tiny)
    (folder / "bad.py").write_text(BAD_REWARDS)
    (folder / "torn.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": \n')
    (folder / "unnamed.jsonl").write_text('{"colour": "red"}\n')
    (folder / "good.jsonl").write_text('{"prompt": "1+1="}\n')
    return folder


@pytest.mark.parametrize(("args", "said"), BAD, ids=[" ".join(args) for args, _ in BAD])
def test_a_mistake_is_one_paragraph_and_exit_code_2(
    mistakes: Path, args: list[str], said: str
) -> None:
    code, output = cli_runs.forked(*args, cwd=mistakes)
    assert code == 2, output
    assert "Traceback" not in output and "unexpected" not in output
    assert said in output, output
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 or args[0] == "trian" or "-t" in args, output
    assert not (mistakes / "x.jsonl").exists() and not (mistakes / "y").exists()


def test_mistakes_as_a_user_sees_them(mistakes: Path) -> None:
    """In a process of its own: nothing on stdout, one line on stderr, and fast, because torch was
    never imported.
    """
    done = cli_runs.cli("train", "sft.yaml", "train.stps=3", cwd=mistakes)
    assert (
        (done.returncode, done.stdout) == (2, "")
        and done.stderr.count("\n") == 1
        and done.stderr.startswith("error: ")
    )
