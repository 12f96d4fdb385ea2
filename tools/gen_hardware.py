"""Writes the tables of docs/hardware.md: what `plan` predicts for models and GPUs that are not
here.

A model is its shape; no weights are read. A test checks that the committed page has these tables.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from reinforge.backends import memory_model  # noqa: E402
from reinforge.backends.memory_model import GIB  # noqa: E402
from reinforge.build.predict import texts_together  # noqa: E402
from reinforge.config.adapter import AdapterConfig  # noqa: E402
from reinforge.config.load import config_from_dict  # noqa: E402
from reinforge.config.pipeline import merge  # noqa: E402
from reinforge.config.schema import Config  # noqa: E402
from reinforge.models.meta_model import count_on_meta  # noqa: E402
from reinforge.models.weight_kinds import WeightCounts  # noqa: E402
from reinforge.plan.options import stated_gpu  # noqa: E402
from reinforge.plan.prediction import Expectation, expected, peak  # noqa: E402
from reinforge.plan.room import room  # noqa: E402

PAGE = ROOT / "docs" / "hardware.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN = "<!-- made by tools/gen_hardware.py: {} -->"
END = "<!-- end -->"

CONTEXT = 32768
TIGHT = 0.9  # of a GPU: predictions were off by up to a tenth
# hidden, inner, layers, heads, key/value heads, one matrix for embedding and head
SIZES = {
    "0.5B": (896, 4864, 24, 14, 2, True),
    "1.5B": (1536, 8960, 28, 12, 2, True),
    "3B": (2048, 11008, 36, 16, 2, True),
    "7B": (3584, 18944, 28, 28, 4, False),
    "14B": (5120, 13824, 48, 40, 8, False),
    "32B": (5120, 27648, 64, 40, 8, False),
}
# as they are sold, and what torch can have of them
GPUS = {
    "24 GB": "RTX 4090:24",
    "48 GB": "L40S:48",
    "80 GB": "H100:79.6",
    "141 GB": "H200:139.8",
}
CHECKPOINTING = {"model": {"gradient_checkpointing": True}}
OFFLOAD = merge(CHECKPOINTING, {"train": {"optimizer": {"offload": True}}})
LADDER = {"": {}, "checkpointing": CHECKPOINTING, "checkpointing, offload": OFFLOAD}
LORA = {"adapter": {"rank": 16}}
RL = {
    "rewards": [{"name": "exact_number"}],
    "rollout": {"max_new_tokens": 1024},
}


@dataclass(frozen=True, slots=True)
class HardwareTask:
    """One table of the page."""

    title: str
    said: str
    settings: dict[str, Any]
    length: int  # tokens of the longest prompt, or row where nothing is generated


ROWS = "64 rows a step, the longest of 2,048 tokens"
PROMPTS = "64 prompts of 256 tokens, 8 answers of up to 1,024 tokens to each"
TASKS = (
    HardwareTask("SFT", f"All weights. {ROWS}.", {"algorithm": {"name": "sft"}}, 2048),
    HardwareTask(
        "SFT with LoRA",
        f"`adapter.rank: 16` on all linear layers. {ROWS}.",
        {"algorithm": {"name": "sft"}, **LORA},
        2048,
    ),
    HardwareTask(
        "SFT with QLoRA",
        f"`adapter: {{kind: qlora, rank: 16}}`: the base in four bits. {ROWS}.",
        {"algorithm": {"name": "sft"}, "adapter": {"kind": "qlora", "rank": 16}},
        2048,
    ),
    HardwareTask(
        "DPO",
        "All weights, and a reference beside them. 64 pairs a step, answers with their prompt up to"
        " 1,024 tokens.",
        {"algorithm": {"name": "dpo"}},
        1024,
    ),
    HardwareTask(
        "GRPO",
        f"All weights, no reference; training and generation take turns on one GPU. {PROMPTS}.",
        {"algorithm": {"name": "grpo", "group_size": 8}, **RL},
        256,
    ),
    HardwareTask(
        "GRPO with LoRA",
        f"`adapter.rank: 16`. {PROMPTS}.",
        {"algorithm": {"name": "grpo", "group_size": 8}, **RL, **LORA},
        256,
    ),
    HardwareTask(
        "PPO",
        "All weights, a critic of the same size with its own optimizer, and a reference for the KL;"
        " rewards are computed, not by a model. 512 prompts of 256 tokens, one answer of up to"
        " 1,024 tokens to each.",
        {
            "algorithm": {"name": "ppo", "group_size": 1, "kl": {"coefficient": 0.02}},
            "critic": {},
            **RL,
            "train": {"prompts_per_step": 512},
        },
        256,
    ),
)


@cache
def shape(size: str, layers: int | None = None) -> Any:
    """Of a size; with so many `layers` instead of its own."""
    from transformers import Qwen2Config

    hidden, inner, own, heads, kv_heads, tied = SIZES[size]
    return Qwen2Config(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers or own,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
        vocab_size=151936,
        max_position_embeddings=CONTEXT,
    )


def config(*parts: dict[str, Any]) -> Config:
    base: dict[str, Any] = {
        "model": {"path": "a shape"},
        "data": {"source": "arithmetic:sum"},
        "train": {"steps": 1, "prompts_per_step": 64},
        "run": {"dir": "runs/hardware"},
    }
    for part in parts:
        base = merge(base, part)
    return config_from_dict(base, where="gen_hardware")


@cache
def counts(size: str, rank: int = 0) -> WeightCounts:
    """As `plan` counts them, in a tenth of the time: all layers are alike, so a model of two layers
    and one of a single layer tell the rest.
    """
    adapter = AdapterConfig(rank=rank) if rank else None
    train = config({"algorithm": {"name": "sft"}}).train
    one, two = (count_on_meta(shape(size, layers), train, adapter) for layers in (1, 2))
    more = shape(size).num_hidden_layers - 1

    def grown(a: int, b: int) -> int:
        return a + more * (b - a)

    return WeightCounts(
        {kind: grown(one.kinds[kind], two.kinds[kind]) for kind in one.kinds},
        trained=grown(one.trained, two.trained),
        matrices=grown(one.matrices, two.matrices),
        met=grown(one.met, two.met),
        linear=grown(one.linear, two.linear),
        packed=grown(one.packed, two.packed),
        head_norms=one.head_norms,
    )


def asked(size: str, cfg: Config, gpu: str, length: int) -> Expectation:
    """What `plan` expects of it."""
    tokens = length * texts_together(cfg)
    counted = counts(size, cfg.adapter.rank if cfg.adapter else 0)
    return expected(cfg, stated_gpu(gpu), (tokens, tokens), shape(size), counted)


def cell(task: HardwareTask, size: str, gpu: str) -> str:
    """The first settings of the ladder that fit; else what the last of them would take."""
    plan = None
    for name, settings in LADDER.items():
        cfg = config(task.settings, settings)
        if cfg.adapter and cfg.train.optimizer.offload:  # it has little to move
            break
        plan = asked(size, cfg, gpu, task.length)
        if plan.fits:
            return _fitting(plan, name)
    assert plan is not None
    return f"no: {peak(plan.prediction())[1]:.0f}"


def _fitting(plan: Expectation, name: str) -> str:
    found = plan.prediction()
    most = room(plan, CONTEXT)
    longest = most.get("new_tokens", most.get("row_tokens", 0))
    takes = peak(found)[1]
    tight = takes > TIGHT * plan.machine.memory / GIB
    said = [
        f"**{takes:.1f}**{' tight' if tight else ''}",
        *([name] if name else []),
        f"{found['assumed']['tokens_per_microbatch'] // 1024}k",
        f"to {longest:,}",
    ]
    return "<br>".join(said)


def tables() -> str:
    lines = []
    for task in TASKS:
        lines += [f"### {task.title}", "", task.said, ""]
        lines += ["| | " + " | ".join(GPUS) + " |", "|---|" + "---|" * len(GPUS)]
        for size in SIZES:
            cells = " | ".join(cell(task, size, gpu) for gpu in GPUS.values())
            lines.append(f"| **{size}** | {cells} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def measured() -> str:
    """Peaks that were measured on an H200, and what is predicted for the same settings."""
    lines = ["| run | measured GiB | predicted GiB | error |", "|---|---|---|---|"]
    compiled = {"model": {"compile": True}}
    for size, name in (("0.5B", "gpu_step_05b"), ("1.5B", "gpu_step_15b")):
        result = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        settings = {"train": {"tokens_per_microbatch": result["budget"]}}
        plan = asked(size, config(TASKS[4].settings, compiled, settings), GPUS["141 GB"], 256)
        parts = plan.prediction()["memory_gib"]["train"]
        # the second run ended before the engine knew that training leaves room for its cache
        given_back = size == "1.5B"
        said = "GRPO step as below, compiled" + (", cache given back" if given_back else "")
        lines.append(
            _compared(
                f"{size}: {said} (`{name}.json`)",
                result["peak_gib"],
                parts["peak"] - (parts["kv"] if given_back else 0) - _logits(plan),
            )
        )
    fp8 = {"train": {"precision": "fp8"}, "rollout": {"precision": "fp8"}}
    for size, name, task, more, said in (
        ("0.5B", "gpu_train_05b", 4, {}, "`reinforge train` with nothing set"),
        ("7B", "gpu_train_7b_lora", 5, {}, "`reinforge train adapter.kind=lora`, 32 prompts"),
        ("7B", "gpu_train_7b_lora_fp8", 5, fp8, "the same, in FP8"),
        ("32B", "gpu_train_32b_qlora", 2, {}, "SFT with QLoRA, 8 rows of 2,304 tokens"),
    ):
        result = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        budget = result.get("predicted", {}).get("tokens_per_microbatch", "auto")
        settings = {"prompts_per_step": result["prompts"], "tokens_per_microbatch": budget}
        cfg = config(TASKS[task].settings, more, {"train": settings})
        tokens = 256 if task > 2 else result["prompt"] + result["response"]
        plan = asked(size, cfg, GPUS["141 GB"], tokens)
        lines.append(
            _compared(
                f"{size}: {said} (`{name}.json`)",
                result["gib"]["peak_gib"],
                plan.prediction()["memory_gib"]["train"]["peak"],
            )
        )
    result = json.loads((RESULTS / "gpu_dpo.json").read_text(encoding="utf-8"))
    ours = next(run for run in result["runs"] if run["peer"] == "reinforge")
    lines.append(
        _compared(
            "SmolLM2-135M: DPO, compiled, 64 pairs a step (`gpu_dpo.json`)",
            ours["peak_gib"],
            _dpo(ours, result["settings"]["pairs"]),
        )
    )
    return "\n".join(lines)


def _dpo(run: dict[str, Any], pairs: int) -> float:
    from transformers import LlamaConfig

    smollm2 = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        vocab_size=49152,
    )
    cfg = config(
        {"model": {"compile": True}, "algorithm": {"name": "dpo"}},
        {"train": {"tokens_per_microbatch": run["budget"], "precompute_reference": True}},
    )
    mean = run["tokens"][0] / pairs  # of a pair
    plan = expected(cfg, stated_gpu(GPUS["141 GB"]), (mean, round(mean)), smollm2)
    return peak(plan.prediction())[1] - _logits(plan)


def _logits(plan: Expectation) -> float:
    """GiB of the logits that stay until the backward, which they did not when this was measured."""
    tokens = plan.prediction()["assumed"]["tokens_per_microbatch"]
    size = tokens * plan.facts.vocab * plan.facts.itemsize
    head = [memory_model.head_bytes(plan.facts, tokens, logits=n) for n in (size, 0)]
    return (head[0] - head[1]) / GIB


def _compared(said: str, measured_gib: float, predicted_gib: float) -> str:
    error = predicted_gib / measured_gib - 1
    return f"| {said} | {measured_gib:.1f} | {predicted_gib:.1f} | {error:+.0%} |"


def host_memory() -> str:
    """Masters and two moments in float32, of all weights."""
    sizes = []
    for size in SIZES:
        sizes.append(f"{size} {12 * counts(size).base / 2**30:.0f} GiB")
    return ", ".join(sizes)


def with_tables(text: str) -> str:
    """The page with fresh tables between its marks."""
    made = {"tables": tables(), "measured": measured(), "host memory": host_memory()}
    for name, content in made.items():
        before, rest = text.split(BEGIN.format(name))
        after = rest.partition(END)[2]
        text = f"{before}{BEGIN.format(name)}\n\n{content}\n\n{END}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
