"""LLaMA-Factory: its stages, its adapters, its registered data sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from reinforge.migrate.draft import Draft
from reinforge.migrate.libraries.common import (
    HELD_OUT,
    listed,
    numbers,
    put_adapter,
    put_eval_every,
    put_held_out,
    put_loss,
    put_sources,
)
from reinforge.migrate.libraries.trainer_arguments import (
    devices_of,
    put_length,
    put_machine,
    put_run,
    put_schedule,
    rows_of_update,
)
from reinforge.migrate.source import Source

STAGES = {"pt": "sft", "sft": "sft", "rm": "reward", "dpo": "dpo", "kto": "kto", "ppo": "ppo"}
LOSSES = {
    "sigmoid": "dpo",
    "hinge": "hinge",
    "ipo": "ipo",
    "kto_pair": "kto",
    "orpo": "orpo",
    "simpo": "simpo",
}


def method_of(source: Source) -> str:
    return STAGES.get(str(source.settings.get("stage", "sft")), "sft")


def finish(draft: Draft, source: Source, devices: int | None) -> None:
    _data(draft, source)
    draft.put("train.prompts_per_step", rows_of_update(draft, devices_of(draft, source, devices)))
    put_length(draft)
    put_schedule(draft)
    put_machine(draft, source)
    put_run(draft)
    if not draft.is_set("train.learning_rate"):
        draft.put("train.learning_rate", 5e-5)
        draft.defaults["train.learning_rate"] = "learning_rate"
    if draft.get("disable_gradient_checkpointing") is not True:
        draft.put("model.gradient_checkpointing", True)
        draft.defaults["model.gradient_checkpointing"] = "disable_gradient_checkpointing"
    _adapter(draft)
    _algorithm(draft)
    patience = draft.whole("early_stopping_steps")
    if patience:
        draft.put("eval.early_stop", {"metric": "eval/loss", "mode": "min", "patience": patience})
    if draft.get("fp8") is True:
        draft.put("train.precision", "fp8")


def _data(draft: Draft, source: Source) -> None:
    names = [str(name) for name in listed(draft.get("dataset"))]
    registered = _registered(draft, source)
    sources = [_file(name, registered, draft) for name in names]
    shares = numbers(draft.get("interleave_probs"))
    put_sources(draft, sources, shares)
    limit = draft.whole("max_samples")
    if limit:
        if draft.is_set("data.mixture"):
            for item in draft.at("data.mixture"):
                item["limit"] = limit
        else:
            draft.put("data.limit", limit)
    if draft.get("stage") == "pt":
        draft.put("data.blocks", True)
    else:
        draft.put("data.length", "truncate")
    if draft.get("train_on_prompt") is True:
        draft.put("data.loss_on", "all")
    elif draft.get("mask_history") is True:
        draft.put("data.loss_on", "completion")
    held_out = [_file(str(name), registered, draft) for name in listed(draft.get("eval_dataset"))]
    put_held_out(draft, held_out, "eval_dataset")
    share = draft.number("val_size", default=0) or 0
    if share >= 1:
        draft.put("data.eval.size", round(share))
    elif share > 0:
        rows = round(share * limit * len(names)) if limit else HELD_OUT
        draft.put("data.eval.size", max(1, rows))
        draft.tell("val_size", "differs", says=f"a number of rows here, not a share: {rows}")
    put_eval_every(draft, draft.number("eval_steps"))


def _registered(draft: Draft, source: Source) -> dict[str, Any]:
    """Their register of data sets, where it lies beside the file or in its data directory."""
    folder = Path(str(draft.get("dataset_dir", default="data")))
    for base in (source.path.parent, *source.path.parent.parents[:3], Path()):
        path = base / folder / "dataset_info.json"
        if path.is_file() and path.stat().st_size < 5_000_000:
            try:
                found = json.loads(path.read_text(encoding="utf-8"))
            except ValueError:
                return {}
            return found if isinstance(found, dict) else {}
    return {}


def _file(name: str, registered: dict[str, Any], draft: Draft) -> str:
    folder = str(draft.get("dataset_dir", default="data"))
    entry = registered.get(name, {})
    if entry.get("file_name"):
        return f"{folder}/{entry['file_name']}"
    if entry.get("hf_hub_url"):
        return str(entry["hf_hub_url"])
    if "/" in name or name.endswith((".json", ".jsonl", ".parquet", ".csv")):
        return name
    return f"{folder}/{name}.json"


def _adapter(draft: Draft) -> None:
    kind = str(draft.get("finetuning_type", default="lora"))
    if kind == "freeze":
        draft.put("train.only", ["model.layers.*"])
        draft.tell(
            "finetuning_type",
            "differs",
            says="train.only has patterns of names; name the layers that are to be trained",
        )
        return
    if kind != "lora":
        if kind == "oft":
            draft.tell("finetuning_type", "missing", says="lora, rslora, dora or qlora")
        return
    rank = draft.whole("lora_rank", default=8) or 8
    put_adapter(
        draft,
        rank=rank,
        alpha=draft.get("lora_alpha"),
        targets=draft.get("lora_target"),
        dropout=draft.get("lora_dropout"),
    )
    bits = draft.whole("quantization_bit")
    for name, wanted in (
        ("rslora", draft.get("use_rslora") is True),
        ("dora", draft.get("use_dora") is True),
        ("qlora", bits == 4),
    ):
        if wanted:
            draft.put("adapter.kind", name)
    if bits not in (None, 4):
        draft.tell("quantization_bit", "missing", says="4 bits are there: adapter.kind: qlora")
    if draft.get("pissa_init") is True:
        draft.put("adapter.init", "pissa")
    saved = [str(name) for name in listed(draft.get("additional_target"))]
    if saved:
        draft.put("adapter.modules_to_save", saved)
    path = draft.get("adapter_name_or_path")
    if isinstance(path, str):
        draft.put("adapter.path", path)


def _algorithm(draft: Draft) -> None:
    if draft.method == "dpo":
        loss = str(draft.get("pref_loss", default="sigmoid"))
        put_loss(draft, "pref_loss", LOSSES.get(loss, loss))
        share = draft.number("pref_ftx", default=0)
        if share and loss == "sigmoid":
            draft.put("algorithm.losses", {"sigmoid": 1.0, "sft": share})
        gamma = draft.number("simpo_gamma")
        if gamma is not None and loss == "simpo":
            draft.put("algorithm.options", {"gamma": gamma})
        return
    if draft.method == "kto":
        weights = {
            ours: draft.number(theirs)
            for theirs, ours in (
                ("kto_chosen_weight", "desirable_weight"),
                ("kto_rejected_weight", "undesirable_weight"),
            )
            if draft.number(theirs) is not None
        }
        if weights:
            draft.put("algorithm.options", weights)
    names = {"reward": "bradley_terry", "sft": "dft" if draft.get("use_dft_loss") else "sft"}
    draft.put("algorithm.name", names.get(draft.method, draft.method))
    if draft.method == "ppo":
        draft.put("critic", {})
        reward: dict[str, Any] = {"name": "model"}
        reward["options"] = {"path": draft.get("reward_model", default="org/reward-model")}
        if draft.get("ppo_score_norm") is True:
            reward["scale"] = "running"
        draft.put("rewards", [reward])
