"""What several arguments of transformers' Trainer make together, for TRL and LLaMA-Factory."""

from __future__ import annotations

import math
import re

from reinforge.migrate.draft import Draft
from reinforge.migrate.libraries.common import (
    listed,
    put_deepspeed,
    put_eval_every,
    put_sinks,
    put_warmup,
)
from reinforge.migrate.source import Source

DEVICES = ("num_processes", "nproc_per_node", "nproc-per-node", "num_gpus")
# how a name of transformers begins, and what it is here
OPTIMIZERS = {
    "adamw_torch_8bit": "adamw_8bit",
    "adamw_torch_4bit": "adamw_8bit",
    "adamw_8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit",
    "adamw": "adamw",
    "lion": "lion",
    "adafactor": "adafactor",
    "muon": "muon",
    "sgd": "torch.optim:SGD",
    "adagrad": "torch.optim:Adagrad",
    "rmsprop": "torch.optim:RMSprop",
}
MIN_LR = ("min_lr_rate", "lr_scheduler_kwargs.min_lr_rate")


def devices_of(draft: Draft, source: Source, devices: int | None) -> int:
    """On how many devices the file is meant to run: told, or of its launcher, or one."""
    if devices is not None:
        return devices
    for name in DEVICES:
        number = source.launcher.get(name, draft.given.get(name))
        if isinstance(number, int):
            return number
    return 1


def rows_of_update(draft: Draft, devices: int, *, per_device: int = 8) -> int:
    """Rows of one optimizer step, on all devices."""
    each = draft.whole("per_device_train_batch_size", default=per_device) or 1
    accumulated = draft.whole("gradient_accumulation_steps", default=1) or 1
    rows = each * accumulated * devices
    for key in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        draft.tell(
            key,
            "differs",
            says=(
                f"{each} a device x {accumulated} accumulated x {devices} device"
                f"{'s' if devices > 1 else ' (--devices says how many)'}; here the batch is counted"
                " over all devices and cut by memory"
            ),
        )
    return rows


def put_length(draft: Draft, *, updates: int = 1) -> None:
    """How long to train. `updates`: optimizer steps that are made of one step of ours."""
    steps = draft.number("max_steps")
    if steps is not None and steps > 0:
        draft.put("train.steps", math.ceil(steps / updates))
        draft.tell("num_train_epochs", says="max_steps goes before it")
    else:
        draft.put("train.epochs", draft.number("num_train_epochs", default=3))


def put_schedule(draft: Draft, *, updates: int = 1) -> None:
    steps = draft.number("warmup_steps", default=0) or 0
    if steps >= 1:
        draft.put("train.schedule.warmup", round(steps))
    elif steps > 0:
        put_warmup(draft, steps, updates=updates)
    else:
        ratio = draft.number("warmup_ratio", default=0) or 0
        put_warmup(draft, ratio, updates=updates)
    kwargs = draft.get("lr_scheduler_kwargs")
    inside = kwargs.get("min_lr_rate") if isinstance(kwargs, dict) else None
    floor = draft.number(*MIN_LR, default=inside)
    if floor is not None:
        draft.put("train.schedule.floor", floor)
    betas = [draft.number(f"adam_beta{i}") for i in (1, 2)]
    if any(beta is not None for beta in betas):
        draft.put("train.optimizer.betas", [betas[0] or 0.9, betas[1] or 0.999])


def put_machine(draft: Draft, source: Source) -> None:
    """Precision, memory and backend."""
    for key, dtype in (("bf16", "bfloat16"), ("pure_bf16", "bfloat16")):
        if draft.get(key) is True and not draft.is_set("model.dtype"):
            draft.put("model.dtype", dtype)
    for key in ("gradient_checkpointing", "torch_compile"):
        value = draft.get(key)
        ours = "model.gradient_checkpointing" if key.startswith("grad") else "model.compile"
        if isinstance(value, bool):
            draft.put(ours, value)
    file = str(
        draft.get("deepspeed", "config_file", default=source.launcher.get("config_file", ""))
    )
    stage = re.search(r"z(?:ero)?[_-]?(?:stage)?[_-]?(\d)", file, re.IGNORECASE)
    if stage is not None and stage.group(1) != "0":
        put_deepspeed(draft, int(stage.group(1)), offload="offload" in file)
    elif draft.get("deepspeed"):
        put_deepspeed(draft, None)
    elif draft.get("fsdp", "fsdp_config") or "fsdp" in file:
        draft.put("train.backend", "fsdp")
    put_optimizer(draft)


def put_optimizer(draft: Draft) -> None:
    """transformers' `optim`. Paged is in host memory here, and 8 bits are small enough to stay."""
    asked = str(draft.get("optim", default="muon" if draft.get("use_muon") is True else ""))
    plain = asked.removeprefix("paged_")
    name = next((ours for theirs, ours in OPTIMIZERS.items() if plain.startswith(theirs)), None)
    if asked.startswith("paged") and name != "adamw_8bit":
        draft.put("train.optimizer.offload", True)
    if not asked or name == "adamw":
        return
    on_ranks = draft.at("train.backend") in ("deepspeed", "fsdp")
    if name is None or (on_ranks and (name != "lion" or draft.at("train.backend") != "fsdp")):
        draft.tell("optim", "missing", says=f"{asked}: AdamW with float32 moments instead")
        return
    draft.put("train.optimizer.name", name)
    if name in ("muon", "adamw_8bit"):
        return
    betas = draft.at("train.optimizer.betas")
    for key in ("betas", "eps"):
        draft.drop(f"train.optimizer.{key}")
    if name == "lion":  # which has transformers' betas of Adam, not those of its paper
        draft.put("train.optimizer.options.betas", betas or [0.9, 0.999])


def put_run(draft: Draft) -> None:
    """Directory, checkpoints, evaluations, trackers, seed."""
    folder = draft.get("output_dir")
    if isinstance(folder, str):
        draft.put("run.dir", folder)
    strategy = str(draft.get("save_strategy", default="steps"))
    steps = draft.number("save_steps")
    if strategy in ("no", "False", "epoch", "best"):
        draft.put("run.checkpoint.every", 0 if strategy != "epoch" else 50)
        draft.tell("save_strategy", "differs", says="checkpoints go by steps: run.checkpoint.every")
    elif steps is not None and steps >= 1:
        draft.put("run.checkpoint.every", round(steps))
    seed = draft.whole("seed", default=42)
    draft.put("run.seed", seed)
    if draft.get("seed") is None:
        draft.defaults["run.seed"] = "seed"
    put_sinks(draft, listed(draft.get("report_to")))
    project = draft.get("project", "wandb_project")
    if isinstance(project, str):
        draft.put("run.log.project", project)
    asked = str(draft.get("eval_strategy", "evaluation_strategy", default="no")) in (
        "steps",
        "epoch",
    )
    if asked or draft.get("do_eval"):
        put_eval_every(draft, draft.number("eval_steps"))
    if not asked:
        draft.drop("eval.every")
