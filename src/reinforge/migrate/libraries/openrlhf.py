"""OpenRLHF: its estimators, its batch, its rewards, its devices."""

from __future__ import annotations

import re
from typing import Any

from reinforge.migrate.draft import Draft
from reinforge.migrate.libraries.common import (
    fit_clip,
    listed,
    numbers,
    put_adapter,
    put_deepspeed,
    put_eval_every,
    put_held_out,
    put_minibatches,
    put_sinks,
    put_sources,
    put_warmup,
)
from reinforge.migrate.source import Source

PROGRAMS = {"sft": "sft", "dpo": "dpo", "kto": "kto", "rm": "reward"}
ESTIMATORS = {
    "gae": "ppo",
    "rloo": "rloo",
    "reinforce": "reinforce_pp",
    "reinforce_baseline": "reinforce_pp_baseline",
    "group_norm": "grpo",
    "dr_grpo": "dr_grpo",
}
COLUMNS = {"input": "prompt", "output": "completion", "label": "answer", "prompt": "prompt"}
CORRECTIONS = {"tis": "tis", "icepop": "icepop", "seq-mask-tis": "seq_mask"}
ALL_ROWS = 1_000_000  # their default: no limit


def method_of(source: Source) -> str:
    match = re.search(r"train_(\w+?)(?:_ray)?$", source.program)
    return PROGRAMS.get(match.group(1) if match else "", "rl")


def finish(draft: Draft, source: Source, devices: int | None) -> None:
    _data(draft)
    _run(draft)
    _machine(draft, devices)
    if draft.method == "rl":
        updates = _policy_gradient(draft)
        _engine(draft)
    else:
        updates = 1
        _supervised(draft)
    put_warmup(
        draft,
        draft.number("actor.lr_warmup_ratio", "lr_warmup_ratio", default=0.03) or 0,
        updates=updates,
    )


def _data(draft: Draft) -> None:
    names = ("data.prompt_dataset", "data.dataset", "prompt_data", "dataset")
    weights = numbers(
        draft.get("data.prompt_probs", "data.dataset_probs", "prompt_data_probs", "dataset_probs")
    )
    sources = [str(name) for name in listed(draft.get(*names))]
    put_sources(draft, sources, weights)
    limit = draft.whole("data.max_samples", "max_samples")
    if limit and limit < ALL_ROWS:
        if draft.is_set("data.mixture"):
            for item in draft.at("data.mixture"):
                item["limit"] = limit
        else:
            draft.put("data.limit", limit)
    if draft.at("data.max_length") is not None and draft.method != "rl":
        draft.put("data.length", "truncate")
    columns = {}
    for key in ("input", "output", "label", "prompt", "chosen", "rejected"):
        theirs = draft.get(f"data.{key}_key", f"{key}_key")
        ours = COLUMNS.get(key, key)
        if isinstance(theirs, str) and theirs != ours:
            columns[ours] = theirs
    if columns:
        draft.put("data.columns", columns)
    template = draft.get("data.input_template", "input_template")
    if isinstance(template, str) and "{}" in template:
        draft.put("data.template", template.replace("{}", "{prompt}").replace("\\n", "\n"))
    held_out = [str(name) for name in listed(draft.get("eval.dataset", "eval_dataset"))]
    put_held_out(draft, held_out, "eval.dataset")


def _run(draft: Draft) -> None:
    folder = draft.get("ckpt.path", "ckpt_path", "ckpt.output_dir", "save_path")
    if isinstance(folder, str):
        draft.put("run.dir", folder)
    every = draft.whole("ckpt.save_steps", "save_steps", default=-1) or -1
    draft.put("run.checkpoint.every", max(0, every))
    put_eval_every(draft, draft.number("eval.steps", "eval_steps", default=-1))
    sinks = []
    if draft.get("logger.wandb.key", "use_wandb"):
        sinks.append("wandb")
    if draft.get("logger.tensorboard_dir", "use_tensorboard"):
        sinks.append("tensorboard")
    put_sinks(draft, sinks)
    if not draft.is_set("run.seed"):
        draft.put("run.seed", 42)
        draft.defaults["run.seed"] = "train.seed"
    for key in ("logger.wandb.key", "use_wandb"):
        if key in draft.notes and isinstance(draft.given[key], str):
            note = draft.notes[key]
            draft.notes[key] = type(note)(key, "***", note.state, note.ours, note.says)


def _machine(draft: Draft, devices: int | None) -> None:
    stage = draft.whole("ds.zero_stage", "zero_stage", default=2)
    offload = draft.get("ds.adam_offload", "adam_offload") is True
    cut = draft.whole("ds.tensor_parallel_size", "ds_tensor_parallel_size", default=1) or 1
    ring = draft.whole("ds.ring_attn_size", "ring_attn_size", default=1) or 1
    each = draft.whole("actor.num_gpus_per_node", "actor_num_gpus_per_node", default=0) or 0
    machines = draft.whole("actor.num_nodes", "actor_num_nodes", default=1) or 1
    ranks = devices or each * machines
    if cut > 1 or ring > 1:
        draft.put("train.backend", "fsdp")
        draft.remarks.append(
            "train.backend: fsdp in place of deepspeed, which shares neither matrices nor packs"
        )
        if cut > 1:
            draft.put("train.tensor_parallel", cut)
        if ring > 1:
            draft.put("train.sequence_parallel", ring)
        if offload:
            draft.put("train.optimizer.offload", True)
    else:
        put_deepspeed(draft, stage, offload=offload)
    if ranks > 1:
        draft.put("train.ranks", ranks)
    rank = draft.whole("ds.lora.rank", "lora_rank", default=0)
    if rank:
        put_adapter(
            draft,
            rank=rank,
            alpha=draft.get("ds.lora.alpha", "lora_alpha", default=16),
            targets=draft.get("ds.lora.target_modules", "target_modules"),
            dropout=draft.get("ds.lora.dropout", "lora_dropout"),
        )
        if draft.get("ds.load_in_4bit", "load_in_4bit") is True:
            draft.put("adapter.kind", "qlora")
            draft.put("train.backend", "local")
            for key in ("train.deepspeed", "train.ranks"):
                draft.drop(key)
    if draft.get("train.enable_ema", "enable_ema") is True:
        draft.put("train.ema", draft.number("train.ema_beta", "ema_beta", default=0.992))


def _supervised(draft: Draft) -> None:
    if draft.method == "reward":
        loss = str(draft.get("model.loss_type", "loss", default="sigmoid"))
        margin = draft.get("model.margin_loss_enable", "margin_loss") is True
        name = "margin" if margin else "logexp" if loss == "logexp" else "bradley_terry"
        draft.put("algorithm.name", name)
        return
    draft.put("algorithm.name", draft.method)
    if draft.method == "dpo":
        if draft.get("model.ipo_enable", "ipo") is True:
            draft.put("algorithm.name", "ipo")
        share = draft.number("model.nll_loss_coef", "nll_loss_coef", default=0)
        if share:
            draft.put("algorithm.losses", {"sigmoid": 1.0, "sft": share})


def _policy_gradient(draft: Draft) -> int:
    """Returns how many optimizer steps are made of one batch."""
    estimator = str(draft.get("algo.advantage.estimator", "advantage_estimator", default="gae"))
    name = ESTIMATORS.get(estimator, "grpo")
    if str(draft.get("actor.policy_loss_type", "policy_loss_type", default="ppo")) == "gspo":
        name = "gspo"
    draft.put("algorithm.name", name)
    if name in ("ppo", "grpo", "reinforce_pp", "reinforce_pp_baseline", "dr_grpo"):
        draft.put("algorithm.reduce", "token_mean" if name != "dr_grpo" else "fixed_length")
    _lengths(draft)
    _clip_and_kl(draft)
    size = draft.whole("rollout.n_samples_per_prompt", "n_samples_per_prompt", default=1) or 1
    draft.put("algorithm.group_size", size)
    prompts = draft.whole("rollout.batch_size", "rollout_batch_size", default=1024) or 1024
    key = "train.batch_size" if "train.batch_size" in draft.given else "train_batch_size"
    per_update = draft.number("train.batch_size", "train_batch_size", default=128)
    minibatches = put_minibatches(draft, key, prompts * size, per_update)
    if minibatches > prompts:
        draft.put("algorithm.minibatches", prompts)
    _rewards(draft)
    _critic(draft, name)
    if draft.get("train.async_enable", "async_train") is True:
        queue = draft.whole("train.async_queue_size", "async_queue_size", default=1)
        draft.put("rollout.staleness", queue)
    return minibatches * (draft.whole("train.max_epochs", "max_epochs", default=1) or 1)


def _lengths(draft: Draft) -> None:
    both = draft.whole("data.max_len", "max_len")
    if both is None:
        return
    answer = draft.whole("rollout.max_new_tokens", "generate_max_len")
    if answer is None:
        answer = both // 2
        draft.put("rollout.max_new_tokens", answer)
    draft.put("data.max_length", max(1, both - answer))
    key = "data.max_len" if "data.max_len" in draft.given else "max_len"
    draft.tell(
        key,
        "differs",
        says=f"prompt and answer together there; here {both - answer} and {answer} tokens",
    )


def _clip_and_kl(draft: Draft) -> None:
    both = draft.number("actor.eps_clip", "eps_clip", default=0.2)
    pair = numbers(draft.get("actor.eps_clip_low_high", "eps_clip_low_high"))
    low, high = pair if len(pair) == 2 else (both, both)
    if draft.at("algorithm.name") not in ("gspo", "rloo"):
        draft.put("algorithm.clip", {"low": low, "high": high})
    fit_clip(draft, ["actor.eps_clip", "eps_clip", "actor.dual_clip", "dual_clip"])
    entropy = draft.number("actor.entropy_coef", "entropy_loss_coef", default=0)
    if entropy:
        draft.put("algorithm.entropy", entropy)
    coefficient = draft.number("algo.kl.init_coef", "init_kl_coef", default=0.01)
    draft.put("algorithm.kl.coefficient", coefficient)
    in_loss = draft.get("algo.kl.use_loss", "use_kl_loss") is True
    if coefficient:
        draft.put("algorithm.kl.placement", "loss" if in_loss else "reward")
        if in_loss:
            draft.put("algorithm.kl.importance", False)
    if draft.get("algo.advantage.is_correction_enable", "enable_vllm_is_correction") is True:
        kind = str(
            draft.get("algo.advantage.is_correction_type", "vllm_is_correction_type", default="tis")
        )
        bounds = numbers(
            draft.get("algo.advantage.is_correction_threshold", "vllm_is_truncated_threshold")
        )
        low, high = (bounds[0], bounds[-1]) if len(bounds) > 1 else (0.5, (bounds or [5.0])[0])
        name = CORRECTIONS.get(kind, "tis")
        correction: dict[str, Any] = {"name": name, "cap": high}
        if name == "icepop":
            correction["floor"] = low
        draft.put("algorithm.correction", correction)


def _rewards(draft: Draft) -> None:
    remote = draft.get("reward.remote_url", "remote_rm_url")
    model = draft.get("reward.model_name_or_path", "reward_pretrain")
    reward: dict[str, Any]
    if isinstance(remote, str) and remote.startswith("http"):
        reward = {"name": "http", "options": {"url": remote}}
    elif isinstance(remote, str):
        reward = {"name": f"{remote}:reward_func"}
        draft.remarks.append(
            f"{remote} has a function for queries, prompts and labels; a reward here is"
            " (completions, answer, **_) -> list of numbers: docs/howto-reward.md"
        )
    elif isinstance(model, str):
        reward = {"name": "model", "options": {"path": model}}
    else:
        reward = {"name": "rewards.py:reward"}
        draft.remarks.append("no reward is named in the file: rewards.py:reward is to be written")
    if draft.get("reward.normalize_enable", "normalize_reward") is True:
        reward |= {"center": "running", "scale": "running"}
    clip = numbers(draft.get("reward.clip_range", "reward_clip_range"))
    if len(clip) == 2:
        reward["clip"] = clip
    draft.put("rewards", [reward])


def _critic(draft: Draft, name: str) -> None:
    if name != "ppo":
        for key in draft.given:
            if key.startswith(("critic.", "critic_")):
                draft.tell(key, "nothing", says="there is no critic")
        return
    draft.put("critic", {})
    path = draft.get("critic.model_name_or_path", "critic_pretrain")
    if isinstance(path, str):
        draft.put("critic.path", path)
    rate = draft.number("critic.adam.lr", "critic_learning_rate", default=9e-6)
    draft.put("critic.learning_rate", rate)
    draft.put("critic.clip", draft.number("critic.value_clip", "value_clip", default=0.5))
    frozen = draft.whole("critic.freezing_steps", "freezing_actor_steps", default=-1) or -1
    if frozen > 0:
        draft.put("critic.warmup", frozen)
    options = {
        ours: draft.number(f"algo.advantage.{theirs}", theirs)
        for theirs, ours in (("gamma", "gamma"), ("lambd", "lam"))
        if draft.number(f"algo.advantage.{theirs}", theirs) is not None
    }
    if options:
        draft.put("algorithm.options", options)


def _engine(draft: Draft) -> None:
    engines = draft.whole("vllm.num_engines", "vllm_num_engines", default=0) or 0
    if not engines:
        draft.drop("engine")
        return
    draft.put("rollout.engine", "vllm")
    if engines > 1:
        draft.put("engine.replicas", engines)
    cut = draft.whole("vllm.tensor_parallel_size", "vllm_tensor_parallel_size", default=1) or 1
    args: dict[str, Any] = {}
    if cut > 1:
        args["tensor-parallel-size"] = cut
    if draft.get("vllm.enforce_eager", "enforce_eager") is True:
        args["enforce-eager"] = True
    if draft.get("vllm.enable_prefix_caching", "enable_prefix_caching") is True:
        args["enable-prefix-caching"] = True
    if args:
        draft.put("engine.args", args)
