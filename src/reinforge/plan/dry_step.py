"""One step of a run at toy size: the run's own configuration, rows, rewards and tokenizer with a
model of the same architecture and almost no weights, in a directory that is thrown away.

What fails in the first step of the run fails here, in seconds. Weights that are not there, servers
and several processes are not tried.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reinforge.build.caller_objects import CallerObjects
from reinforge.build.run import train_config
from reinforge.config.load import config_from_dict
from reinforge.config.schema import Config
from reinforge.core.errors import InputError, ReinforgeError
from reinforge.core.row import Row
from reinforge.loops.view import NoView
from reinforge.models.load import load_config, load_tokenizer
from reinforge.models.save import writing
from reinforge.models.toy_shapes import shrunken
from reinforge.plan.gold_answers import UNTRIED
from reinforge.plan.proofs import Proof, failed_by
from reinforge.watch.runs import read_lines

NAME = "one dry step"
PROMPTS = 2
GROUP = 4
NEW_TOKENS = 16
APART = "apart"
NOT_SCORES = ("mean", "std", "unscored")  # of the metrics `reward/...`
CANDIDATES = 256  # rows of which the shortest are taken


def apart(completions: list[str], **_: Any) -> list[float]:
    """A reward beside the run's own. A toy answers nonsense, which those score alike: without a
    difference inside a group there would be no gradient to try.
    """
    return [sum(map(ord, text)) % 7 / 7 for text in completions]


def dry_step(config: Config, rows: Sequence[Row]) -> tuple[Proof, dict[str, Any]]:
    """Whether the step could be done, and its metrics."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="reinforge-dry-") as folder:
        try:
            toy = make_toy(config, Path(folder) / "model")
            result = train_config(
                toy_config(config, toy, Path(folder)),
                CallerObjects(data=[_record(row) for row in _short(rows)]),
                NoView(),
            )
        except InputError as error:
            return failed_by(NAME, error), {}
        except ReinforgeError as error:
            return Proof(NAME, False, str(error), "plan", "The run would end in the same way."), {}
        except Exception as error:  # whatever ends the step would end the run
            what = f"{type(error).__name__}: {error}"
            return Proof(NAME, False, what, "plan", "The run would end in the same way."), {}
        lines = [
            line for line in read_lines(result.run_dir / "metrics.jsonl") if line.get("step") == 1
        ]
    metrics = {key: value for line in lines for key, value in line.items()}
    return _judged(config, metrics, time.monotonic() - start), metrics


def make_toy(config: Config, path: Path) -> Path:
    """A model of the run's architecture and tokenizer, with few and random weights."""
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    shape = load_config(config.model)
    text = shape.get_text_config()
    tokenizer = load_tokenizer(config.model)
    kind = type(text) if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING else type(shape)
    ids = {
        name: value
        for name in ("pad_token_id", "bos_token_id", "eos_token_id")
        if (value := getattr(tokenizer, name)) is not None
    }
    context = getattr(text, "max_position_embeddings", None)
    positions = {"max_position_embeddings": context} if isinstance(context, int) else {}
    toy = shrunken(
        kind,
        vocab_size=max(int(text.vocab_size), len(tokenizer)),
        tie_word_embeddings=bool(getattr(text, "tie_word_embeddings", False)),
        **ids,
        **positions,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = AutoModelForCausalLM.from_config(toy)
    with writing():
        module.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def toy_config(config: Config, model: Path, folder: Path) -> Config:
    """The configuration of the run, with what only its size, its machines or its weights have to do
    with taken out.
    """
    raw: dict[str, Any] = config.model_dump(mode="json")
    raw["model"] |= {
        "path": str(model),
        "tokenizer": None,
        "revision": None,
        "device": "cpu",
        "dtype": "float32",
        "compile": False,
        "exact": False,
    }
    raw["train"] |= {
        "steps": 1,
        "epochs": None,
        "prompts_per_step": PROMPTS,
        "backend": "local",
        "ranks": None,
        "tensor_parallel": 1,
        "sequence_parallel": 1,
        "offload_weights": False,
        "precision": "model",
        "freeze": [],
        "only": [],
        "tokens_per_microbatch": "auto",
    }
    raw["train"]["schedule"]["warmup"] = 0
    raw["algorithm"]["minibatches"] = 1
    raw["algorithm"]["group_size"] = min(config.algorithm.group_size, GROUP)
    raw["rollout"] |= {
        "engine": "native",
        "max_new_tokens": min(config.rollout.max_new_tokens, NEW_TOKENS),
        "max_batch": 64,
        "all_ranks": False,
        "kv_gib": None,
        "precision": "model",
        "cache_precision": "model",
        "staleness": 0,
        "overlap": False,
        "partial": False,
        "kept": None,
    }
    raw["data"] |= {"eval": {}, "mixture": [], "limit": None, "source": "python"}
    for name in ("columns", "where", "fixed"):
        raw["data"][name] = {}
    for name in ("system", "template", "attributes"):
        raw["data"][name] = None
    raw["data"]["format"] = "auto"
    raw["rewards"] = [r for r in raw["rewards"] if r["name"] not in UNTRIED]
    if config.algorithm.rl and (raw["rewards"] or config.env is None):
        raw["rewards"].append({"name": f"{__name__}:{APART}"})
    raw["eval"] = {}
    raw["run"] = {
        "dir": str(folder / "run"),
        "seed": config.run.seed,
        "checkpoint": {"every": 0},
        "log": {"samples_every": 0},
    }
    for section in ("cluster", "engine", "ptx"):
        raw.pop(section, None)
    if raw.get("adapter"):
        raw["adapter"] |= {"path": None, "init": "default"}
        raw["adapter"]["kind"] = {"qlora": "lora"}.get(raw["adapter"]["kind"]) or raw["adapter"][
            "kind"
        ]
    if raw.get("critic"):
        raw["critic"]["path"] = None
    return config_from_dict(raw, where="plan --deep")


def _short(rows: Sequence[Row]) -> list[Row]:
    """A few, of the shortest: what is tried does not depend on how long they are."""
    some = [rows[i] for i in range(min(len(rows), CANDIDATES))]
    return sorted(some, key=lambda row: len(str(row.prompt)) + len(str(row.columns)))[: 2 * PROMPTS]


def _record(row: Row) -> dict[str, Any]:
    """The row as a Python caller would give it."""
    return {**row.columns, "prompt": row.prompt, "id": row.id}


def _judged(config: Config, metrics: dict[str, Any], seconds: float) -> Proof:
    """A step that went to its end has finite numbers, and answers that could be scored."""
    tried = config.env is not None or any(r.name not in UNTRIED for r in config.rewards)
    own = [name for name in metrics if name.startswith("reward/") and APART not in name]
    scores = [name for name in own if name.removeprefix("reward/") not in NOT_SCORES]
    names = ("train/loss", "train/grad_norm", *scores)
    numbers = {name: metrics[name] for name in names if metrics.get(name) is not None}
    wrong = [name for name, value in numbers.items() if not math.isfinite(value)]
    if wrong:
        return Proof(NAME, False, f"{wrong[0]} is {numbers[wrong[0]]}.", wrong[0])
    if config.algorithm.rl and tried and not any(metrics.get(name) is not None for name in scores):
        return Proof(
            NAME,
            False,
            "no answer got a score: every reward returned None or raised, and nothing would be"
            " trained.",
            "rewards",
            "Return 0.0 for a wrong answer, None only for one that cannot be scored.",
        )
    told = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
    return Proof(NAME, True, f"{told} in {seconds:.1f} s")
