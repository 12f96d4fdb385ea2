"""The model card of an export: from what, how, on which data, with which result, and how to load
it. The licence is for you to choose.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from reinforge.algorithms.catalogue import spec_of
from reinforge.config.saved_adapter import as_known
from reinforge.config.schema import Config
from reinforge.version import __version__
from reinforge.watch.ending import SUMMARY, ungrouped
from reinforge.watch.runs import read_json, uncontained

Form = Literal["model", "adapter", "reward model"]
ARXIV = re.compile(r"\d{4}\.\d{4,5}")
SHOWN = ("eval/", "reward/", "train/loss")
LOAD = {
    "model": (
        """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("THIS_DIRECTORY")
tokenizer = AutoTokenizer.from_pretrained("THIS_DIRECTORY")"""
    ),
    "adapter": (
        """from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained(BASE)
model = PeftModel.from_pretrained(base, "THIS_DIRECTORY")
tokenizer = AutoTokenizer.from_pretrained("THIS_DIRECTORY")"""
    ),
    "reward model": (
        """from transformers import AutoModelForSequenceClassification, AutoTokenizer

# one label: the score at the last token
model = AutoModelForSequenceClassification.from_pretrained("THIS_DIRECTORY")
tokenizer = AutoTokenizer.from_pretrained("THIS_DIRECTORY")"""
    ),
}
TASK = {
    "model": "text-generation",
    "adapter": "text-generation",
    "reward model": "text-classification",
}


def card(
    run: Path,
    config: Config,
    form: Form,
    checkpoint: str,
    *,
    averaged: bool = False,
    lineage: Sequence[str] = (),
    parent: str | None = None,
) -> str:
    """README.md of an export.

    `lineage`: the steps up to this one, oldest first, where a pipeline knows them. `parent`: what
    the model was made from, in words, where its path means nothing.
    """
    name = config.algorithm.name
    base = config.model.path
    metrics = ungrouped(read_json(run / SUMMARY).get("metrics", {}))
    rows = "\n".join(
        f"| {key} | {value:.4g} |"
        for key, value in sorted(metrics.items())
        if key.startswith(SHOWN)
    )
    tags = ["reinforge", name, *(["lora", "peft"] if form == "adapter" else [])]
    # a path means nothing there
    on_hub = (
        []
        if lineage or parent or Path(base).expanduser().exists()
        else [f"base_model: {json.dumps(base)}"]
    )
    front = [
        "---",
        *on_hub,
        f"library_name: {'peft' if form == 'adapter' else 'transformers'}",
        f"pipeline_tag: {TASK[form]}",
        f"tags: [{', '.join(tags)}]",
        "# license: choose one before you publish; the base model and the data may decide it",
        "---",
    ]
    adapter = (
        f", LoRA of rank {as_known(config.adapter).rank}{' (merged)' if form != 'adapter' else ''}"
        if config.adapter
        else ""
    )
    parts = [
        *front,
        f"# {run.resolve().name}: {name} from {parent or base}",
        "",
        f"{'An' if form == 'adapter' else 'A'} {form} trained with reinforge {__version__}.",
        "",
        "## How it was made",
        "",
        *(f"{i}. {step}" for i, step in enumerate(lineage, 1)),
        *([""] if lineage else []),
        f"- parent: {parent or f'`{base}`'}"
        + (f", revision `{config.model.revision}`" if config.model.revision else ""),
        f"- method: {name}{adapter}{cited(name)}",
        f"- data: `{config.data.source}`"
        + (f" with {json.dumps(config.data.options)}" if config.data.options else ""),
        *(f"- reward: `{reward.name}`, weight {reward.weight:g}" for reward in config.rewards),
        *(
            f"- **uncontained**: {name} ran the model's programs without a sandbox (allow_unsafe);"
            " they could change their rewards"
            for name in uncontained(run)
        ),
        (
            f"- weights: {checkpoint}{', the moving average of the weights' if averaged else ''};"
            f" seed {config.run.seed}, learning rate {config.train.learning_rate:g},"
            f" {config.train.prompts_per_step} rows per step"
        ),
        "",
        "## Results",
        "",
        "| metric | last value |\n|---|---|\n" + rows if rows else "Nothing was evaluated.",
        "",
        "## How to load it",
        "",
        f"```python\n{LOAD[form].replace('BASE', json.dumps(base))}\n```",
    ]
    return "\n".join(parts) + "\n"


def cited(algorithm: str) -> str:
    """The papers behind an algorithm, as links where they have a number.

    >>> cited("grpo")
    ' ([arXiv:2402.03300](https://arxiv.org/abs/2402.03300))'
    """
    paper = spec_of(algorithm).paper
    return (
        f" ({ARXIV.sub(lambda m: f'[arXiv:{m[0]}](https://arxiv.org/abs/{m[0]})', paper)})"
        if paper
        else ""
    )
