"""veRL: its estimators and losses, its batch, its rewards, its devices."""

from __future__ import annotations

from typing import Any

from reinforge.migrate.draft import Draft
from reinforge.migrate.libraries.common import (
    fit_clip,
    listed,
    names_of_rows,
    put_adapter,
    put_eval_every,
    put_held_out,
    put_minibatches,
    put_sinks,
    put_sources,
    put_warmup,
    reward_for,
    without_megatron,
)
from reinforge.migrate.source import Source

ESTIMATORS = {
    "gae": "ppo",
    "grpo": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "remax": "remax",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "opo": "opo",
    "gpg": "gpg",
    "grpo_passk": "passk",
    "gdpo": "gdpo",
    "grpo_vectorized": "grpo",
}
LOSSES = {
    "gspo": "gspo",
    "sapo": "sapo",
    "gpg": "gpg",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "geo_mean": "gmpo",
    "cispo": "cispo",
    "dppo_tv": "dppo_tv",
    "dppo_kl": "dppo_kl",
}
KL = {
    "kl": "k1",
    "k1": "k1",
    "abs": "k1",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
    "low_var_kl+": "k3+",
    "k3+": "k3+",
}
A = "actor_rollout_ref"
CLIPS = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")


def method_of(source: Source) -> str:
    if "sft" in source.program or "model.partial_pretrain" in source.settings:
        return "sft"
    estimator = str(source.settings.get("algorithm.adv_estimator", "gae"))
    return {"gae": "ppo", "grpo": "grpo"}.get(estimator, "rl")


def finish(draft: Draft, source: Source, devices: int | None) -> None:
    _model(draft)
    _data(draft)
    _run(draft, source)
    _machine(draft, devices)
    if draft.method == "sft":
        draft.put("algorithm.name", "sft")
        draft.put("data.length", "truncate")
        draft.tell("data.truncation", says="right is what truncate does here")
        return
    _algorithm(draft)
    updates = _batch(draft)
    _warmup(draft, updates)
    _rewards(draft)
    _engine(draft)
    without_megatron(draft)


def _model(draft: Draft) -> None:
    model = draft.get(f"{A}.model.path", "model.path", "model.partial_pretrain")
    if isinstance(model, str):
        draft.put("model.path", model)
    dtype = draft.get(f"{A}.model.torch_dtype", f"{A}.actor.fsdp_config.model_dtype")
    if dtype in ("bfloat16", "bf16"):
        draft.put("model.dtype", "bfloat16")
    for prefix in (f"{A}.model.", "model.", f"{A}.model.lora."):
        for name in ("lora_rank", "rank"):
            rank = draft.whole(prefix + name)
            if rank:
                short = "" if name == "rank" else "lora_"
                put_adapter(
                    draft,
                    rank=rank,
                    alpha=draft.get(f"{prefix}{short}alpha", default=16),
                    targets=draft.get(f"{prefix}target_modules"),
                )
    path = draft.get(f"{A}.model.lora_adapter_path")
    if isinstance(path, str):
        draft.put("adapter.path", path)


def _data(draft: Draft) -> None:
    put_sources(draft, [str(file) for file in listed(draft.get("data.train_files"))])
    held_out = [str(file) for file in listed(draft.get("data.val_files"))]
    size = draft.whole("data.val_max_samples", default=0) or 0
    put_held_out(draft, held_out, "data.val_files", size)
    limit = draft.whole("data.train_max_samples", default=-1) or -1
    if limit > 0:
        draft.put("data.limit", limit)
    key = draft.get("data.prompt_key")
    if isinstance(key, str) and key != "prompt":
        draft.put("data.columns", {"prompt": key})
    if draft.get("data.filter_overlong_prompts") is True:
        draft.put("data.length", "drop")
    elif draft.get("data.truncation") in ("right", "left", "middle"):
        draft.put("data.length", "truncate")
    else:
        draft.put("data.length", "error")
    seed = draft.whole("data.seed", "trainer.seed", f"{A}.actor.data_loader_seed")
    if seed is not None:
        draft.put("run.seed", seed)


def _run(draft: Draft, source: Source) -> None:
    steps = draft.whole("trainer.total_training_steps")
    if steps and steps > 0:
        draft.put("train.steps", steps)
        draft.tell("trainer.total_epochs", says="total_training_steps goes before it")
    else:
        draft.put("train.epochs", draft.number("trainer.total_epochs", default=30))
    folder = draft.get("trainer.default_local_dir")
    if isinstance(folder, str) and "${" not in folder:
        draft.put("run.dir", folder)
    else:
        parts = [
            str(part)
            for part in (draft.get("trainer.project_name"), draft.get("trainer.experiment_name"))
            if isinstance(part, str) and "$" not in part
        ]
        draft.put("run.dir", "/".join(["checkpoints", *(parts or [source.path.stem])]))
    every = draft.whole("trainer.save_freq", default=-1) or -1
    draft.put("run.checkpoint.every", max(0, every))
    put_eval_every(draft, draft.number("trainer.test_freq", default=-1))
    put_sinks(draft, listed(draft.get("trainer.logger", default=["console", "wandb"])))
    shown = draft.whole("trainer.log_val_generations", default=0)
    if shown:
        draft.put("run.log.samples", shown)


def _machine(draft: Draft, devices: int | None) -> None:
    each = draft.whole("trainer.n_gpus_per_node", default=8) or 1
    machines = draft.whole("trainer.nnodes", default=1) or 1
    ranks = devices or each * machines
    strategy = str(draft.get(f"{A}.actor.strategy", "strategy", "engine.strategy", default="fsdp"))
    megatron = strategy == "megatron" or any(".megatron." in key for key in draft.given)
    if ranks == 1 and not megatron:
        return
    draft.put("train.backend", "megatron" if megatron else "fsdp")
    draft.put("train.ranks", ranks)
    if machines > 1:
        draft.tell(
            "trainer.nnodes",
            "differs",
            says=f"{ranks} ranks on {machines} machines: `reinforge launch` starts them",
        )
    if megatron:
        cut = draft.whole(f"{A}.actor.megatron.tensor_model_parallel_size", default=1) or 1
        if cut > 1:
            draft.put("train.tensor_parallel", cut)
        for key in list(draft.given):
            if key.endswith("sequence_parallel_size"):
                draft.tell(key, "nothing", says="with Megatron the ranks share matrix products")
        return
    shared = draft.whole(f"{A}.actor.ulysses_sequence_parallel_size", default=1) or 1
    if shared > 1:
        draft.put("train.sequence_parallel", shared)
    if draft.get(f"{A}.actor.fsdp_config.param_offload") is True:
        draft.put("train.offload_weights", True)
    elif draft.get(f"{A}.actor.fsdp_config.optimizer_offload") is True:
        draft.put("train.optimizer.offload", True)


def _algorithm(draft: Draft) -> None:
    estimator = str(draft.get("algorithm.adv_estimator", default="gae")).rpartition(".")[2]
    loss = str(draft.get(f"{A}.actor.policy_loss.loss_mode", default="vanilla"))
    name = ESTIMATORS.get(estimator.lower())
    if name is None:
        draft.tell(
            "algorithm.adv_estimator",
            "missing",
            says=f"{estimator} is not there; grpo is written",
        )
        name = "grpo"
    if loss in LOSSES and name in ("grpo", "gpg"):
        name = LOSSES[loss]
    elif loss != "vanilla":
        draft.tell(
            f"{A}.actor.policy_loss.loss_mode",
            "missing",
            says=f"{loss} with {estimator} is not there; {name} is written",
        )
    draft.put("algorithm.name", name)
    _clip(draft, name)
    fit_clip(draft, [f"{A}.actor.{key}" for key in CLIPS])
    _kl(draft)
    _correction(draft)
    if name in ("ppo", "reinforce_pp"):
        options = {
            ours: draft.number(f"algorithm.{ours}")
            for ours in ("gamma", "lam")
            if draft.number(f"algorithm.{ours}") is not None
        }
        if options:
            draft.put("algorithm.options", options)
    if name == "ppo":
        _critic(draft)
    elif draft.get("trainer.critic_warmup") is not None:
        draft.tell("trainer.critic_warmup", "nothing", says="there is no critic")
    rounds = draft.whole("algorithm.filter_groups.max_num_gen_batches", default=0) or 0
    if rounds > 1:
        draft.put("algorithm.max_refills", rounds - 1)
    buffer = draft.whole(
        "reward_model.overlong_buffer.len", "reward_model.reward_kwargs.overlong_buffer_cfg.len"
    )
    on = draft.get(
        "reward_model.overlong_buffer.enable",
        "reward_model.reward_kwargs.overlong_buffer_cfg.enable",
    )
    if on is True and buffer:
        draft.put("algorithm.overlong_buffer", buffer)


def _clip(draft: Draft, name: str) -> None:
    both = draft.number(f"{A}.actor.clip_ratio")
    low = draft.number(f"{A}.actor.clip_ratio_low", default=both)
    high = draft.number(f"{A}.actor.clip_ratio_high", default=both)
    if low is not None:
        # below 0 no ratio is: the same as no bound
        draft.put("algorithm.clip.low", min(low, 1.0))
    if high is not None:
        draft.put("algorithm.clip.high", high)
    dual = draft.number(f"{A}.actor.clip_ratio_c", default=3.0)
    if name in ("grpo", "ppo", "reinforce_pp", "reinforce_pp_baseline", "rloo", "opo", "remax"):
        draft.put("algorithm.clip.dual", dual)
        if draft.get(f"{A}.actor.clip_ratio_c") is None:
            draft.defaults["algorithm.clip.dual"] = f"{A}.actor.clip_ratio_c"
    if name in ("rloo", "remax", "opo", "gpg"):
        draft.put("algorithm.surrogate", "ppo_clip")
        draft.remarks.append(
            "veRL clips the ratio with every estimator: algorithm.surrogate: ppo_clip says so"
        )


def _kl(draft: Draft) -> None:
    in_loss = draft.get(f"{A}.actor.use_kl_loss") is True
    in_reward = draft.get("algorithm.use_kl_in_reward") is True
    if in_loss:
        draft.put(
            "algorithm.kl.coefficient", draft.number(f"{A}.actor.kl_loss_coef", default=0.001)
        )
        draft.put("algorithm.kl.placement", "loss")
        draft.put("algorithm.kl.importance", False)
        kind = str(draft.get(f"{A}.actor.kl_loss_type", default="low_var_kl"))
        draft.put("algorithm.kl.estimator", KL.get(kind, "k3"))
    elif in_reward:
        draft.put(
            "algorithm.kl.coefficient", draft.number("algorithm.kl_ctrl.kl_coef", default=0.001)
        )
        draft.put("algorithm.kl.placement", "reward")
        kind = str(draft.get("algorithm.kl_penalty", default="kl"))
        draft.put("algorithm.kl.estimator", KL.get(kind, "k1"))
        if draft.get("algorithm.kl_ctrl.type") == "adaptive":
            target = draft.number("algorithm.kl_ctrl.target_kl", default=0.1)
            draft.put("algorithm.kl.target", target)
            horizon = draft.whole("algorithm.kl_ctrl.horizon", default=10000)
            draft.put("algorithm.kl.horizon", horizon)
    else:
        draft.put("algorithm.kl.coefficient", 0)
    if not in_loss:
        for key in ("kl_loss_coef", "kl_loss_type"):
            draft.tell(f"{A}.actor.{key}", "nothing", says="counts with use_kl_loss only")
    if not in_reward:
        for key in ("kl_ctrl.kl_coef", "kl_penalty", "kl_ctrl.type", "kl_ctrl.target_kl"):
            draft.tell(f"algorithm.{key}", "nothing", says="counts with use_kl_in_reward only")


def _correction(draft: Draft) -> None:
    level = draft.get("algorithm.rollout_correction.rollout_is", "algorithm.rollout_is_level")
    cap = draft.number(
        "algorithm.rollout_correction.rollout_is_threshold",
        "algorithm.rollout_is_threshold",
        f"{A}.actor.tis_imp_ratio_cap",
        default=2.0,
    )
    if draft.number(f"{A}.actor.tis_imp_ratio_cap", default=-1) > 0:  # type: ignore[operator]
        level = "token"
    names = {"token": "tis", "sequence": "seq_tis"}
    if level in names:
        draft.put("algorithm.correction", {"name": names[str(level)], "cap": cap})
    if draft.get("algorithm.rollout_correction.bypass_mode") is True:
        draft.put("algorithm.old", "engine")


def _critic(draft: Draft) -> None:
    draft.put("critic", {})
    path = draft.get("critic.model.path")
    if isinstance(path, str):
        draft.put("critic.path", path)
    draft.put("critic.learning_rate", draft.number("critic.optim.lr", default=1e-5))
    draft.put("critic.clip", draft.number("critic.cliprange_value", default=0.5))
    warmup = draft.whole("trainer.critic_warmup", default=0)
    if warmup:
        draft.put("critic.warmup", warmup)
    recompute = draft.get("critic.model.enable_gradient_checkpointing")
    if isinstance(recompute, bool):
        draft.put("critic.gradient_checkpointing", recompute)


def _batch(draft: Draft) -> int:
    prompts = draft.whole("data.train_batch_size", default=1024) or 1024
    size = draft.whole(f"{A}.rollout.n", default=1) or 1
    draft.put("algorithm.group_size", size)
    generated = draft.whole("data.gen_batch_size", default=prompts) or prompts
    dynamic = draft.get("algorithm.filter_groups.enable") is True
    if generated > prompts and not dynamic:
        draft.put("sampling.over_provision", min(16.0, generated / prompts))
    key = f"{A}.actor.ppo_mini_batch_size"
    minibatches = put_minibatches(draft, key, prompts, draft.number(key, default=256))
    epochs = draft.whole(f"{A}.actor.ppo_epochs", default=1) or 1
    return minibatches * epochs


def _warmup(draft: Draft, updates: int) -> None:
    steps = draft.whole(f"{A}.actor.optim.lr_warmup_steps", default=-1) or -1
    ratio = draft.number(f"{A}.actor.optim.lr_warmup_steps_ratio", default=0) or 0
    if steps > 0:
        draft.put("train.schedule.warmup", steps)
    else:
        put_warmup(draft, ratio, updates=updates)


def _rewards(draft: Draft) -> None:
    prefixes = ("custom_reward_function", "reward.custom_reward_function")
    path = draft.get(*(f"{prefix}.path" for prefix in prefixes))
    model = draft.get("reward.reward_model.model_path", "reward_model.model.path")
    rewards: list[dict[str, Any]] = []
    if isinstance(path, str):
        name = draft.get(*(f"{prefix}.name" for prefix in prefixes), default="compute_score")
        rewards.append({"name": f"{path}:{name}", "kind": "verl"})
    if isinstance(model, str) and draft.get("reward_model.enable", default=True) is not False:
        rewards.append({"name": "model", "options": {"path": model}})
    if not rewards:
        rewards = [reward_for(names_of_rows(draft))]
        draft.remarks.append(
            f"veRL chooses a reward by the column data_source of a row; {rewards[0]['name']} is"
            " written, by the names of the files. A function of theirs runs as it is:"
            " rewards: [{name: 'file.py:compute_score', kind: verl}]"
        )
    draft.put("rewards", rewards)


def _engine(draft: Draft) -> None:
    engine = draft.at("rollout.engine")
    if engine not in ("vllm", "sglang"):
        return
    rollout = f"{A}.rollout."
    cut = draft.whole(f"{rollout}tensor_model_parallel_size", default=1) or 1
    names = {
        "vllm": ("tensor-parallel-size", "enforce-eager", "max-model-len"),
        "sglang": ("tp-size", "disable-cuda-graph", "context-length"),
    }[engine]
    values = (
        cut if cut > 1 else None,
        draft.get(f"{rollout}enforce_eager") or None,
        draft.get(f"{rollout}max_model_len"),
    )
    args = {name: value for name, value in zip(names, values, strict=True) if value is not None}
    if args:
        draft.put("engine.args", args)
    draft.drop("rollout.max_batch")
    draft.drop("rollout.prefix_cache")
