"""TRL: which trainer, its batch, its loss, its rewards, its data."""

from __future__ import annotations

import re
from typing import Any

from reinforge.migrate.draft import Draft
from reinforge.migrate.libraries.common import (
    HELD_OUT,
    fit_clip,
    listed,
    numbers,
    put_adapter,
    put_loss,
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

TRAINERS = {
    "SFT": "sft",
    "DPO": "dpo",
    "KTO": "kto",
    "Reward": "reward",
    "GRPO": "grpo",
    "AsyncGRPO": "grpo",
    "GMPO": "grpo",
    "RLOO": "rloo",
    "ORPO": "orpo",
    "CPO": "cpo",
    "BCO": "bco",
    "OnlineDPO": "online_dpo",
    "NashMD": "nash_md",
    "XPO": "xpo",
    "GKD": "gkd",
    "PPO": "ppo",
    "PRM": "process",
}
# what a file's or a program's name says, the longest first
NAMES = {
    "online_dpo": "online_dpo",
    "nash_md": "nash_md",
    "gspo": "grpo",
    "grpo": "grpo",
    "rloo": "rloo",
    "orpo": "orpo",
    "dpo": "dpo",
    "kto": "kto",
    "cpo": "cpo",
    "bco": "bco",
    "gkd": "gkd",
    "ppo": "ppo",
    "reward": "reward",
    "sft": "sft",
}
LEARNING_RATES = {"sft": 2e-5, "reward": 1e-4, "ppo": 3e-6, "online_dpo": 5e-7, "gkd": 2e-5}
# of DPO, CPO and KTO: names of theirs that are others here
LOSSES = {"sigmoid": "dpo", "kto": "kto", "simpo": "simpo", "alphapo": "alphapo", "sft": "sft_pair"}
REDUCTIONS = {
    "grpo": "sequence_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "dr_grpo": "fixed_length",
}
SURROGATES = ("cispo", "sapo", "vespo", "luspo")
# rewards of trl.rewards and of open-r1's registry
THINK = r"^<think>(?!.*<think>).*?</think>.*$"
REWARDS: dict[str, dict[str, Any]] = {
    "accuracy_reward": {"name": "math"},
    "accuracy": {"name": "math"},
    "think_format_reward": {"name": "regex", "options": {"pattern": THINK}},
    "format_reward": {"name": "tags"},
    "format": {"name": "tags"},
    "tag_count": {"name": "tag_count"},
    "repetition_penalty": {"name": "repetition", "weight": -1.0},
    "code": {"name": "code"},
}
OPTIONS = {
    "sapo_temperature_pos": "tau_positive",
    "sapo_temperature_neg": "tau_negative",
    "vespo_k_pos": "k_positive",
    "vespo_lambda_pos": "lambda_positive",
    "vespo_k_neg": "k_negative",
    "vespo_lambda_neg": "lambda_negative",
    "ld_alpha": "ld_alpha",
    "discopop_tau": "tau",
    "simpo_gamma": "gamma",
    "desirable_weight": "desirable_weight",
    "undesirable_weight": "undesirable_weight",
    "gamma": "gamma",
    "lam": "lam",
}
CORRECTIONS = {
    "token_truncate": "tis",
    "token_mask": "mis",
    "sequence_truncate": "seq_tis",
    "sequence_mask": "seq_mask",
}
SAMPLED = ("grpo", "rloo", "ppo", "online_dpo", "nash_md", "xpo", "gkd")


def method_of(source: Source) -> str:
    """By the trainer, the program, the keys, and the file's name, in this order."""
    if source.script is not None:
        return TRAINERS.get(source.script.trainer.removesuffix("Trainer"), "sft")
    keys = source.settings
    program = source.program.rpartition("/")[2].removesuffix(".py")
    for text in (program, source.path.stem.lower(), source.path.parent.name.lower()):
        for name, method in NAMES.items():
            if re.search(rf"(?:^|[^a-z]){name}", text):
                return method
    if {"num_generations", "max_completion_length", "reward_funcs"} & keys.keys():
        return "grpo"
    return "dpo" if "beta" in keys else "sft"


def finish(draft: Draft, source: Source, devices: int | None) -> None:
    _model(draft)
    _data(draft, source)
    updates = _batch(draft, devices_of(draft, source, devices))
    put_length(draft, updates=updates)
    put_schedule(draft, updates=updates)
    put_machine(draft, source)
    put_run(draft)
    if not draft.is_set("train.learning_rate"):
        draft.put("train.learning_rate", LEARNING_RATES.get(draft.method, 1e-6))
        draft.defaults["train.learning_rate"] = "learning_rate"
    if not draft.is_set("model.gradient_checkpointing"):
        draft.put("model.gradient_checkpointing", True)
        draft.defaults["model.gradient_checkpointing"] = "gradient_checkpointing"
    _algorithm(draft)
    if draft.method in ("grpo", "rloo", "ppo", "online_dpo", "nash_md", "xpo"):
        _rewards(draft, source)
    if draft.method in SAMPLED:
        _engine(draft)


def _model(draft: Draft) -> None:
    model = draft.get("model_name_or_path", "sft_model_path", "model_name", "model")
    if isinstance(model, str):
        draft.put("model.path", model)
    revision = draft.get("model_revision")
    if isinstance(revision, str) and revision != "main":
        draft.put("model.revision", revision)
    tokenizer = draft.get("tokenizer_name_or_path", "processing_class", "tokenizer")
    if isinstance(tokenizer, str) and tokenizer != model:
        draft.put("model.tokenizer", tokenizer)
    template = draft.get("chat_template_path", "chat_template")
    if isinstance(template, str) and "{%" not in template and "{{" not in template:
        draft.put("model.chat_template", template)
    elif template is not None:
        draft.tell(
            "chat_template",
            "missing",
            says="write the template to a file, and name that in model.chat_template",
        )
    teacher = draft.get("teacher_model_name_or_path", "teacher_model")
    if isinstance(teacher, str):
        draft.put("teacher.path", teacher)
    _adapter(draft)


def _adapter(draft: Draft) -> None:
    rank = draft.get("lora_r", "LoraConfig.r")
    four_bits = draft.get("load_in_4bit", "BitsAndBytesConfig.load_in_4bit")
    in_code = draft.get("peft_config") == "LoraConfig" or any(
        key.startswith("LoraConfig.") for key in draft.given
    )
    if draft.get("use_peft") is not True and not in_code:
        for key in draft.given:
            if key.startswith("lora_") or key in ("use_rslora", "use_dora"):
                draft.tell(key, "nothing", says="counts with use_peft only, which is not set")
        return
    put_adapter(
        draft,
        rank=rank or (16 if draft.get("use_peft") else 8),
        alpha=draft.get("lora_alpha", "LoraConfig.lora_alpha", default=8),
        targets=draft.get("lora_target_modules", "LoraConfig.target_modules"),
        dropout=draft.get("lora_dropout", "LoraConfig.lora_dropout"),
    )
    if draft.get("use_peft") and draft.get("lora_alpha") is None:
        draft.put("adapter.alpha", 32)
        draft.defaults["adapter.alpha"] = "lora_alpha"
    if draft.get("use_peft") and draft.get("lora_dropout") is None and draft.method not in SAMPLED:
        draft.put("adapter.dropout", 0.05)
        draft.defaults["adapter.dropout"] = "lora_dropout"
    kinds = {
        "rslora": draft.get("use_rslora", "LoraConfig.use_rslora"),
        "dora": draft.get("use_dora", "LoraConfig.use_dora"),
        "qlora": four_bits,
    }
    for kind, wanted in kinds.items():
        if wanted is True:
            draft.put("adapter.kind", kind)
    saved = listed(draft.get("lora_modules_to_save", "LoraConfig.modules_to_save"))
    if saved:
        draft.put("adapter.modules_to_save", [str(name) for name in saved])


def _data(draft: Draft, source: Source) -> None:
    name = draft.get("dataset_name", "train_dataset")
    if isinstance(name, str):
        draft.put("data.source", name)
    _mixture(draft)
    if draft.is_set("data.source"):
        for key in ("train_dataset", "eval_dataset"):
            if key in draft.notes and draft.notes[key].state == "unread":
                draft.tell(key, "differs", says="the data set that is loaded, by name")
    config = draft.get("dataset_config", "dataset_config_name")
    if isinstance(config, str) and draft.is_set("data.source"):
        draft.put("data.options", {"name": config})
    split = draft.get("dataset_train_split")
    if isinstance(split, list) and split:
        split = split[0]
    if isinstance(split, str) and split != "train":
        draft.put("data.split", split)
    if source.script is not None and source.script.maps_rows:
        draft.remarks.append(
            "the script changes rows with .map(...): data.columns, data.template and data.system do"
            " that here, or write the rows to a file"
        )
    column = draft.get("dataset_prompt_column")
    if isinstance(column, str) and column != "prompt":
        draft.put("data.columns", {"prompt": column})
    field = draft.get("dataset_text_field")
    if isinstance(field, str) and field != "text" and draft.method == "sft":
        draft.put("data.columns", {"text": field})
    if draft.method not in SAMPLED:
        draft.put("data.length", "truncate")
    if draft.get("completion_only_loss") is True:
        draft.put("data.loss_on", "completion")
    elif draft.get("assistant_only_loss") is True:
        draft.put("data.loss_on", "assistant")
    elif draft.get("completion_only_loss") is False:
        draft.put("data.loss_on", "all")
    elif draft.method == "sft":
        draft.remarks.append(
            "TRL trains every token of a conversation unless assistant_only_loss; here the"
            " assistant's are trained unless data.loss_on: all"
        )
    strategy = str(draft.get("eval_strategy", "evaluation_strategy", default="no"))
    if strategy in ("steps", "epoch") or draft.get("eval_dataset", "do_eval"):
        draft.put("data.eval.size", HELD_OUT)


def _mixture(draft: Draft) -> None:
    """Several data sets: of TRL, of alignment-handbook, of open-r1."""
    items: list[dict[str, Any]] = []
    given = draft.get("datasets", "dataset_mixture.datasets")
    for one in given if isinstance(given, list) else ():
        if isinstance(one, dict) and (one.get("path") or one.get("id")):
            items.append(_item(one))
    splits = listed(draft.get("dataset_splits"))
    for key, value in draft.given.items():
        if key.startswith("dataset_mixer."):
            items.append({"source": key.removeprefix("dataset_mixer.")})
            if isinstance(value, int | float) and value != 1:
                draft.tell(key, "differs", says=f"all rows; {value:g} of them is data.limit here")
            if splits and splits[0] != "train":
                items[-1]["split"] = splits[0]
    if len(items) == 1:
        for key, value in items[0].items():
            draft.put(f"data.{key}", value)
        draft.drop("data.weight")
    elif items:
        sources = [item["source"] for item in items]
        for item in items:
            if sources.count(item["source"]) > 1:  # several configurations of one data set
                apart = item.get("options", {}).get("name") or item.get("split", "train")
                item["name"] = f"{item['source']}-{apart}"
        names = [item.get("name", item["source"]) for item in items]
        for i, item in enumerate(items):
            if names.index(names[i]) != i:
                item["name"] = f"{names[i]}-{i}"
        draft.put("data.source", "mixture")
        draft.put("data.mixture", items)


def _item(one: dict[str, Any]) -> dict[str, Any]:
    item: dict[str, Any] = {"source": one.get("path") or one.get("id")}
    config = one.get("name") or one.get("config")
    if isinstance(config, str):
        item["options"] = {"name": config}
    if one.get("split") not in (None, "train"):
        item["split"] = one["split"]
    if isinstance(one.get("weight"), int | float):
        item["weight"] = one["weight"]
    return item


def _batch(draft: Draft, devices: int) -> int:
    """Rows of a step; returns how many optimizer steps are made of one."""
    rows = rows_of_update(draft, devices)
    if draft.method not in ("grpo", "rloo"):
        draft.put("train.prompts_per_step", rows)
        return 1
    accumulated = draft.whole("gradient_accumulation_steps", default=1) or 1
    per_generation = draft.whole("steps_per_generation", default=accumulated) or accumulated
    samples = draft.whole("generation_batch_size", default=rows // accumulated * per_generation)
    size = draft.whole("num_generations", default=8 if draft.method == "grpo" else 2) or 1
    draft.put("train.prompts_per_step", max(1, round((samples or rows) / size)))
    minibatches = max(1, round((samples or rows) / rows))
    if minibatches > 1:
        draft.put("algorithm.minibatches", minibatches)
    draft.tell(
        "per_device_train_batch_size",
        "differs",
        says=(
            f"completions there, {samples} of a generation on {devices} device"
            f"{'s' if devices > 1 else ' (--devices says how many)'}; {size} of a prompt make"
            f" {draft.at('train.prompts_per_step')} prompts a step here"
        ),
    )
    return minibatches * (draft.whole("num_iterations", default=1) or 1)


def _algorithm(draft: Draft) -> None:
    method = draft.method
    if method in ("grpo", "rloo"):
        _policy_gradient(draft)
    elif method == "ppo":
        draft.put("algorithm.name", "ppo")
        draft.put("critic", {})
        _ppo(draft)
    elif method in ("dpo", "kto", "cpo"):
        _preference(draft)
    elif method == "reward":
        centre = draft.number("center_rewards_coefficient")
        draft.put("algorithm.name", "centred" if centre else "bradley_terry")
        if centre:
            draft.put("algorithm.options", {"centre": centre})
    elif method == "sft":
        loss = str(draft.get("loss_type", default="nll"))
        draft.put("algorithm.name", "dft" if loss == "dft" else "sft")
    elif method == "gkd":
        draft.put("algorithm.name", "gkd")
        if not draft.is_set("teacher.path"):
            draft.put("teacher.path", "org/teacher")
            draft.remarks.append("no teacher can be read from the file: write teacher.path")
        options = {"share": draft.number("lmbda", default=0.5)}
        draft.put("algorithm.options", options)
        draft.tell("beta", "missing", says="gkd has the divergence with weights of a half")
    else:
        draft.put("algorithm.name", {"process": "process"}.get(method, method))
        if (beta := draft.get("beta")) is not None:
            draft.put("algorithm.beta", beta[0] if isinstance(beta, list) else beta)
    _reference(draft)
    for theirs, ours in OPTIONS.items():
        value = draft.number(theirs)
        if value is not None and theirs in draft.notes:
            draft.put("algorithm.options", {**(draft.at("algorithm.options") or {}), ours: value})


def _policy_gradient(draft: Draft) -> None:
    loss = str(draft.get("loss_type", default="dapo"))
    name = "rloo" if draft.method == "rloo" else "grpo"
    if draft.method == "grpo":
        if loss in SURROGATES:
            name = loss
        elif draft.get("importance_sampling_level") == "sequence":
            name = "gspo"
        elif draft.get("multi_objective_aggregation") == "normalize_then_sum":
            name = "gdpo"
        reduce = REDUCTIONS.get(loss)
        if reduce is not None and not (name == "gspo" and reduce == "sequence_mean"):
            draft.put("algorithm.reduce", reduce)
            if draft.get("loss_type") is None:
                draft.defaults["algorithm.reduce"] = "loss_type"
    draft.put("algorithm.name", name)
    low = draft.number("epsilon")
    high = draft.number("epsilon_high", default=low)
    if low is not None and name != "rloo":
        draft.put("algorithm.clip.low", min(low, 1.0))
    if high is not None and name != "rloo":
        draft.put("algorithm.clip.high", high)
    fit_clip(draft, ["epsilon", "epsilon_high", "delta"], bound=0.0)
    beta = draft.number("beta", default=0.05 if draft.method == "rloo" else 0.0)
    if beta:
        draft.put("algorithm.kl.coefficient", beta)
        if draft.method == "grpo" and not draft.get("use_bias_correction_kl"):
            draft.put("algorithm.kl.importance", False)
        if draft.method == "rloo":
            draft.put("algorithm.kl.placement", "reward")
    if draft.get("normalize_advantages") is True:
        draft.put("algorithm.scale", "batch")
    share = draft.number("top_entropy_quantile", default=1.0)
    if share is not None and share < 1:
        draft.put("algorithm.selection", "top_entropy")
        draft.put("algorithm.options", {"share": share})
    if draft.get("use_adaptive_entropy") is True:
        draft.put("algorithm.entropy_target", draft.number("entropy_target", default=0.2))
        draft.put("algorithm.entropy_rate", draft.number("entropy_coef_delta", default=0.005))
        draft.put("algorithm.entropy_max", draft.number("entropy_coef_max", default=1.0))


def _ppo(draft: Draft) -> None:
    draft.put("algorithm.kl.coefficient", draft.number("kl_coef", default=0.05))
    draft.put("algorithm.kl.placement", "reward")
    clip = draft.number("cliprange")
    if clip is not None:
        draft.put("algorithm.clip", {"low": clip, "high": clip})
    value = draft.get("value_model")
    if isinstance(value, str):
        draft.put("critic.path", value)


def _preference(draft: Draft) -> None:
    losses = [str(loss) for loss in listed(draft.get("loss_type"))]
    beta = draft.get("beta", default=0.1)
    draft.put("algorithm.beta", beta)
    first = losses[0] if losses else {"kto": "kto", "cpo": "cpo"}.get(draft.method, "sigmoid")
    name = "cpo" if draft.method == "cpo" and first == "sigmoid" else LOSSES.get(first, first)
    weights = draft.get("loss_weights")
    if draft.get("use_weighting") is True:
        name = "wpo"
    elif draft.get("ld_alpha") is not None:
        name = "ld_dpo"
    elif str(draft.get("f_divergence_type", default="reverse_kl")) != "reverse_kl":
        name = "f_dpo"
    put_loss(draft, "loss_type", name)
    if len(losses) > 1:
        draft.put("algorithm.name", "dpo")
        shares = weights if isinstance(weights, list) else [1.0] * len(losses)
        draft.put("algorithm.losses", dict(zip(losses, shares, strict=False)))
    elif draft.number("rpo_alpha"):
        draft.put("algorithm.losses", {"sigmoid": 1.0, "sft": draft.number("rpo_alpha")})


def _reference(draft: Draft) -> None:
    if draft.get("sync_ref_model") is not True:
        return
    alpha = draft.number("ref_model_mixup_alpha", default=0.6) or 0.6
    every = draft.whole("ref_model_sync_steps", default=512)
    moving = {"kind": "sync"} if alpha == 1 else {"kind": "ema", "decay": round(1 - alpha, 6)}
    draft.put("algorithm.kl.reference", {**moving, "every": every})


def _rewards(draft: Draft, source: Source) -> None:
    given = draft.get(
        "reward_funcs", "reward_model_path", "reward_model_name_or_path", "reward_model"
    )
    weights = numbers(draft.get("reward_weights"))
    rewards = []
    for i, name in enumerate(listed(given)):
        reward = _reward(str(name), source)
        if i < len(weights):
            reward = {**reward, "weight": weights[i] * reward.get("weight", 1.0)}
        rewards.append(reward)
    if not rewards:
        rewards = [{"name": "rewards.py:reward", "kind": "trl"}]
        draft.remarks.append(
            "no reward can be read from the file: rewards.py:reward stands for a function of yours"
        )
    clip = draft.get("reward_clip_range")
    if isinstance(clip, list) and len(clip) == 2:
        rewards[0] = {**rewards[0], "clip": clip}
    draft.put("rewards", rewards)
    if source.script is not None and source.script.trains_on_import:
        draft.remarks.append(
            "the script trains when it is imported: move its reward into a file of its own, and"
            " name that in rewards"
        )


def _reward(name: str, source: Source) -> dict[str, Any]:
    script = source.script
    if script is not None and name in script.functions:
        return {"name": f"{source.path}:{name}", "kind": "trl"}
    if script is not None and name in script.imported and "trl" not in script.imported[name]:
        return {"name": f"{script.imported[name]}:{name}", "kind": "trl"}
    if name in REWARDS:
        return dict(REWARDS[name])
    if "/" in name:
        return {"name": "model", "options": {"path": name}}
    module, _, function = name.rpartition(".")
    if module:
        return {"name": f"{module}:{function}", "kind": "trl"}
    return {"name": f"rewards.py:{name}", "kind": "trl"}


def _engine(draft: Draft) -> None:
    if draft.at("rollout.engine") != "vllm":
        return
    if draft.get("vllm_mode") == "server":
        host = draft.get("vllm_server_host", default="127.0.0.1")
        host = "127.0.0.1" if host == "0.0.0.0" else host
        port = draft.get("vllm_server_port", default=8000)
        draft.put(
            "engine.address", [draft.get("vllm_server_base_url", default=f"http://{host}:{port}")]
        )
    args = {
        "tensor-parallel-size": draft.get("vllm_tensor_parallel_size"),
        "max-model-len": draft.get("vllm_max_model_length", "vllm_max_model_len"),
        "enable-prefix-caching": draft.get("vllm_enable_prefix_caching"),
    }
    kept = {key: value for key, value in args.items() if value not in (None, 1, False)}
    if kept and not draft.is_set("engine.address"):
        draft.put("engine.args", kept)
    if draft.method != "grpo" or draft.get("vllm_importance_sampling_correction") is False:
        return
    mode = str(draft.get("vllm_importance_sampling_mode", default="sequence_mask"))
    cap = draft.number(
        "vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap", default=3.0
    )
    draft.put("algorithm.correction", {"name": CORRECTIONS.get(mode, "seq_mask"), "cap": cap})
    draft.defaults.setdefault("algorithm.correction", "vllm_importance_sampling_correction")
