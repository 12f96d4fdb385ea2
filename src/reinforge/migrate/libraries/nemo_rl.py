"""NeMo-RL: its algorithms, its batch, its schedulers, its environments."""

from __future__ import annotations

import re
from typing import Any

from reinforge.migrate.draft import Draft
from reinforge.migrate.libraries.common import (
    HELD_OUT,
    fit_clip,
    names_of_rows,
    put_adapter,
    put_eval_every,
    put_minibatches,
    put_sinks,
    put_sources,
    reward_for,
    without_megatron,
)
from reinforge.migrate.source import Source

SECTIONS = {"sft": "sft", "dpo": "dpo", "rm": "reward", "distillation": "opd", "ppo": "ppo"}
ENDLESS = 100_000  # steps: then epochs are what ends a run
# what they call data sets of the hub
DATA = {
    "gsm8k": "openai/gsm8k",
    "OpenMathInstruct-2": "nvidia/OpenMathInstruct-2",
    "openmathinstruct2": "nvidia/OpenMathInstruct-2",
    "squad": "rajpurkar/squad",
    "HelpSteer3": "nvidia/HelpSteer3",
    "DAPOMath17K": "BytedTsinghua-SIA/DAPO-Math-17k",
    "DeepScaler": "agentica-org/DeepScaleR-Preview-Dataset",
    "tulu3_sft_mixture": "allenai/tulu-3-sft-mixture",
    "Tulu3Preference": "allenai/llama-3.1-tulu-3-8b-preference-mixture",
}
CORRECTIONS = {"tis": "tis", "icepop": "icepop", "seq-mask-tis": "seq_mask"}

CLIPS = ("ratio_clip_min", "ratio_clip_max", "ratio_clip_c")


def method_of(source: Source) -> str:
    tops = {key.partition(".")[0] for key in source.settings}
    return next((method for top, method in SECTIONS.items() if top in tops), "grpo")


def section_of(draft: Draft) -> str:
    return {"reward": "rm", "opd": "distillation"}.get(draft.method, draft.method)


def finish(draft: Draft, source: Source, devices: int | None) -> None:
    _data(draft)
    _run(draft)
    _machine(draft, devices)
    _optimizer(draft)
    if draft.method in ("grpo", "ppo"):
        _policy_gradient(draft)
    elif draft.method == "opd":
        _distillation(draft)
    elif draft.method == "dpo":
        _dpo(draft)
    else:
        draft.put("algorithm.name", "bradley_terry" if draft.method == "reward" else "sft")
        if draft.get("sft.only_unmask_final") is True:
            draft.put("data.loss_on", "completion")
    if draft.method in ("grpo", "ppo", "opd"):
        _lengths(draft)
        _engine(draft)
    without_megatron(draft)


def _data(draft: Draft) -> None:
    train = draft.get("data.train")
    several = train if isinstance(train, list) else [_inside(draft, "data.train")]
    items = [item for item in several if isinstance(item, dict)]
    sources = [name for item in items if (name := _named(item))]
    if not sources and draft.get("data.dataset_name", "data.train_data_path"):
        sources = [str(draft.get("data.train_data_path", "data.dataset_name"))]
    put_sources(draft, sources)
    if len(items) == 1 and items[0].get("split") not in (None, "train"):
        draft.put("data.split", items[0]["split"])
    columns = {
        ours: value
        for ours, theirs in (("prompt", "input_key"), ("completion", "output_key"))
        if isinstance(value := draft.get(f"data.{theirs}", f"data.default.{theirs}"), str)
    }
    if columns:
        draft.put("data.columns", columns)
    held_out = draft.get("data.validation", "data.val_data_path")
    inside = _inside(draft, "data.validation")
    rows = draft.whole(f"{section_of(draft)}.max_val_samples", default=HELD_OUT)
    path = inside.get("data_path") or (held_out if isinstance(held_out, str) else None)
    if path:
        draft.put("data.eval.source", str(path))
    elif inside or held_out or draft.number("data.train.split_validation_size"):
        draft.put("data.eval.size", rows)
    tokenizer = draft.get("policy.tokenizer.name")
    if isinstance(tokenizer, str) and tokenizer != draft.at("model.path"):
        draft.put("model.tokenizer", tokenizer)


def _inside(draft: Draft, section: str) -> dict[str, Any]:
    return {
        key.removeprefix(f"{section}."): value
        for key, value in draft.given.items()
        if key.startswith(f"{section}.") and value is not None
    }


def _named(item: dict[str, Any]) -> str:
    name = str(item.get("data_path") or item.get("dataset_name") or "")
    return DATA.get(name, name)


def _run(draft: Draft) -> None:
    section = section_of(draft)
    steps = draft.whole(f"{section}.max_num_steps", default=-1) or -1
    epochs = draft.number(f"{section}.max_num_epochs", default=1)
    if 0 < steps < ENDLESS or (steps > 0 and (epochs is None or epochs <= 0)):
        draft.put("train.steps", steps)
        draft.tell(f"{section}.max_num_epochs", says="max_num_steps is taken to end first")
    else:
        draft.put("train.epochs", epochs)
        draft.tell(f"{section}.max_num_steps", says=f"{steps} steps are taken for no limit")
    folder = draft.get("checkpointing.checkpoint_dir")
    if isinstance(folder, str):
        draft.put("run.dir", re.sub(r"\$\{[^}]*\}", "model", folder))
    every = draft.whole("checkpointing.save_period", default=50) or 0
    draft.put("run.checkpoint.every", every if draft.get("checkpointing.enabled") else 0)
    metric = str(draft.get("checkpointing.metric_name", default=""))
    if metric == "val:accuracy" and draft.is_set("data.eval"):
        draft.put("run.checkpoint.best", "eval/accuracy")
    elif metric:
        draft.tell(
            "checkpointing.metric_name",
            "missing",
            says="metrics have other names; set run.checkpoint.best, e.g. min:eval/loss",
        )
    put_eval_every(draft, draft.number(f"{section}.val_period"))
    at_start = draft.get(f"{section}.val_at_start")
    if isinstance(at_start, bool):
        draft.put("eval.at_start", at_start)
    sinks = [
        name for name in ("wandb", "tensorboard", "mlflow") if draft.get(f"logger.{name}_enabled")
    ]
    put_sinks(draft, sinks)
    project = draft.get("logger.wandb.project", "logger.mlflow.experiment_name")
    if sinks and isinstance(project, str):
        draft.put("run.log.project", project)


def _machine(draft: Draft, devices: int | None) -> None:
    each = draft.whole("cluster.gpus_per_node", default=1) or 1
    machines = draft.whole("cluster.num_nodes", default=1) or 1
    ranks = devices or each * machines
    megatron = draft.get("policy.megatron_cfg.enabled") is True
    if draft.get(
        "policy.megatron_cfg.activation_checkpointing"
        if megatron
        else "policy.dtensor_cfg.activation_checkpointing"
    ):
        draft.put("model.gradient_checkpointing", True)
    _adapter(draft, "policy.megatron_cfg.peft" if megatron else "policy.dtensor_cfg.lora_cfg")
    if ranks == 1:
        return
    draft.put("train.backend", "megatron" if megatron else "fsdp")
    draft.put("train.ranks", ranks)
    key = (
        "policy.megatron_cfg.tensor_model_parallel_size"
        if megatron
        else "policy.dtensor_cfg.tensor_parallel_size"
    )
    cut = draft.whole(key, default=1) or 1
    if cut > 1:
        draft.put("train.tensor_parallel", cut)
    shared = draft.whole("policy.dtensor_cfg.context_parallel_size", default=1) or 1
    if shared > 1 and not megatron:
        draft.put("train.sequence_parallel", shared)
    if draft.get("policy.dtensor_cfg.cpu_offload") is True and not megatron:
        draft.put("train.offload_weights", True)


def _adapter(draft: Draft, section: str) -> None:
    if draft.get(f"{section}.enabled") is not True:
        return
    everything = draft.get(f"{section}.match_all_linear")
    put_adapter(
        draft,
        rank=draft.whole(f"{section}.dim", default=8),
        alpha=draft.get(f"{section}.alpha"),
        targets=None if everything else draft.get(f"{section}.target_modules") or None,
        dropout=draft.get(f"{section}.dropout"),
    )


def _optimizer(draft: Draft) -> None:
    if draft.get("policy.megatron_cfg.enabled") is True:
        prefix = "policy.megatron_cfg.optimizer"
        rate = draft.number(f"{prefix}.lr", default=1e-6)
        betas = [draft.number(f"{prefix}.adam_beta{i}") for i in (1, 2)]
        eps = draft.number(f"{prefix}.adam_eps")
        least = draft.number(f"{prefix}.min_lr", default=0)
        kind = str(draft.get("policy.megatron_cfg.scheduler.lr_decay_style", default="constant"))
        warmup = draft.whole("policy.megatron_cfg.scheduler.lr_warmup_iters", default=0)
        floor = round(least / rate, 6) if least and rate and kind != "constant" else 0
    else:
        prefix = "policy.optimizer.kwargs"
        rate = draft.number(f"{prefix}.lr", "policy.optimizer.lr", default=1e-6)
        given = draft.get(f"{prefix}.betas")
        betas = list(given) if isinstance(given, list) and len(given) == 2 else [None, None]
        eps = draft.number(f"{prefix}.eps")
        kind, warmup, floor = _schedule(draft, rate)
    draft.put("train.learning_rate", rate)
    if all(beta is not None for beta in betas):
        draft.put("train.optimizer.betas", betas)
    if eps is not None:
        draft.put("train.optimizer.eps", eps)
    decay = draft.number(f"{prefix}.weight_decay")
    if decay is not None:
        draft.put("train.optimizer.weight_decay", decay)
    if kind in ("cosine", "linear"):
        draft.put("train.schedule.kind", kind)
        if floor:
            draft.put("train.schedule.floor", floor)
    if warmup:
        draft.put("train.schedule.warmup", warmup)


def _schedule(draft: Draft, rate: float | None) -> tuple[str, int | None, float]:
    """Kind, warm-up and floor of a list of torch's schedulers."""
    given = draft.get("policy.scheduler")
    kind, warmup, floor = "constant", None, 0.0
    several = given if isinstance(given, list) else [_inside(draft, "policy.scheduler")]
    for one in (item for item in several if isinstance(item, dict)):
        name = str(one.get("name", "")).rpartition(".")[2]
        kwargs = one.get("kwargs") or {k.removeprefix("kwargs."): v for k, v in one.items()}
        if name == "LinearLR" and kwargs.get("start_factor", 1) < 1:
            total = kwargs.get("total_iters")
            warmup = total if isinstance(total, int) else None
        elif name == "CosineAnnealingLR":
            kind = "cosine"
            least = kwargs.get("eta_min", 0)
            floor = round(least / rate, 6) if rate and isinstance(least, int | float) else 0.0
    return kind, warmup, floor


def _policy_gradient(draft: Draft) -> None:
    name = "ppo" if draft.method == "ppo" else "grpo"
    estimator = str(draft.get("grpo.adv_estimator.name", default="grpo"))
    if estimator == "reinforce_plus_plus":
        baseline = draft.get("grpo.adv_estimator.minus_baseline") is not False
        name = "reinforce_pp_baseline" if baseline else "reinforce_pp"
    elif estimator == "gdpo":
        name = "gdpo"
    elif draft.get("loss_fn.use_cispo") is True:
        name = "cispo"
    elif draft.get("loss_fn.sequence_level_importance_ratios") is True:
        name = "gspo"
    draft.put("algorithm.name", name)
    if draft.get("grpo.use_leave_one_out_baseline") is True and name in ("grpo", "cispo", "gspo"):
        draft.put("algorithm.advantage", "leave_one_out")
        draft.tell(
            "grpo.use_leave_one_out_baseline",
            "differs",
            says="algorithm.advantage: leave_one_out, which is not divided by the group's spread",
        )
        draft.tell(
            "grpo.normalize_rewards",
            "missing",
            says="leave-one-out advantages are not divided by the spread of the others",
        )
    elif isinstance(draft.get("grpo.normalize_rewards"), bool):
        draft.put("algorithm.scale", "group" if draft.get("grpo.normalize_rewards") else "none")
    if draft.get("loss_fn.disable_ppo_ratio") is True:
        draft.put("algorithm.surrogate", "reinforce")
    for key, ours in (("ratio_clip_min", "low"), ("ratio_clip_max", "high")):
        value = draft.number(f"loss_fn.{key}")
        if value is not None:
            draft.put(f"algorithm.clip.{ours}", min(value, 1.0) if ours == "low" else value)
    fit_clip(draft, [f"loss_fn.{key}" for key in CLIPS])
    _kl(draft)
    _correction(draft)
    section = section_of(draft)
    bound = draft.number(f"{section}.advantage_clip_high")
    if bound is not None and bound > 0:
        draft.put("algorithm.advantage_clip", bound)
    rounds = draft.whole(f"{section}.dynamic_sampling_max_gen_batches", default=0) or 0
    if draft.get(f"{section}.use_dynamic_sampling") is True and rounds > 1:
        draft.put("algorithm.max_refills", rounds - 1)
    buffer = draft.whole(f"{section}.reward_shaping.overlong_buffer_length")
    if draft.get(f"{section}.reward_shaping.enabled") is True and buffer:
        draft.put("algorithm.overlong_buffer", buffer)
    if draft.get(f"{section}.async_{section}.enabled") is True:
        age = draft.whole(f"{section}.async_{section}.max_trajectory_age_steps", default=1)
        draft.put("rollout.staleness", age)
    size = draft.whole(f"{section}.num_generations_per_prompt", default=8) or 1
    draft.put("algorithm.group_size", size)
    prompts = draft.whole(f"{section}.num_prompts_per_step", default=32) or 1
    key = "policy.train_global_batch_size"
    put_minibatches(draft, key, prompts * size, draft.number(key))
    _rewards(draft)
    if name == "ppo":
        draft.put("critic", {})
        options = {
            ours: draft.number(f"ppo.adv_estimator.gae_{theirs}")
            for theirs, ours in (("gamma", "gamma"), ("lambda", "lam"))
            if draft.number(f"ppo.adv_estimator.gae_{theirs}") is not None
        }
        if options:
            draft.put("algorithm.options", options)
        warmup = draft.whole("ppo.policy_training_start_step", default=0)
        if warmup:
            draft.put("critic.warmup", warmup)
        path = draft.get("value.model_name")
        if isinstance(path, str) and path != draft.at("model.path"):
            draft.put("critic.path", path)


def _kl(draft: Draft) -> None:
    coefficient = draft.number("loss_fn.reference_policy_kl_penalty", default=0)
    draft.put("algorithm.kl.coefficient", coefficient)
    if not coefficient:
        for key in ("estimator", "clamp", "importance"):
            draft.drop(f"algorithm.kl.{key}")
        return
    if draft.get("loss_fn.use_kl_in_reward") is True:
        draft.put("algorithm.kl.placement", "reward")
        draft.drop("algorithm.kl.importance")
    elif not draft.is_set("algorithm.kl.importance"):
        draft.put("algorithm.kl.importance", False)


def _correction(draft: Draft) -> None:
    kind = draft.get("loss_fn.truncated_importance_sampling_type")
    cap = draft.number("loss_fn.truncated_importance_sampling_ratio")
    if draft.get("loss_fn.use_importance_sampling_correction") is not True:
        return
    name = CORRECTIONS.get(str(kind), "tis")
    correction: dict[str, Any] = {"name": name}
    if cap is not None:
        correction["cap"] = cap
    floor = draft.number("loss_fn.truncated_importance_sampling_ratio_min")
    if floor is not None and name == "icepop":
        correction["floor"] = floor
    draft.put("algorithm.correction", correction)


def _distillation(draft: Draft) -> None:
    teacher = draft.get("teacher.model_name")
    kind = str(draft.get("loss_fn.kl_type", default="forward"))
    k = draft.whole("distillation.topk_logits_k", default=64)
    if isinstance(teacher, str):
        draft.put("teacher.path", teacher)
    else:
        draft.put("teacher.path", "org/teacher")
        draft.remarks.append("no single teacher is named in the file: write teacher.path")
    draft.put("algorithm.name", "gkd")
    draft.put("algorithm.options", {"share": 1.0, "k": k})
    draft.tell(
        "loss_fn.kl_type",
        "differs",
        says=f"{kind}; gkd has the generalised Jensen-Shannon divergence over the k best tokens",
    )
    size = draft.whole("distillation.num_generations_per_prompt", default=1) or 1
    draft.put("algorithm.group_size", size)
    prompts = draft.whole("distillation.num_prompts_per_step", default=32) or 1
    key = "policy.train_global_batch_size"
    put_minibatches(draft, key, prompts * size, draft.number(key))


def _dpo(draft: Draft) -> None:
    draft.put("algorithm.name", "dpo")
    draft.put("algorithm.beta", draft.number("dpo.reference_policy_kl_penalty", default=0.05))
    share = draft.number("dpo.sft_loss_weight", default=0)
    if share:
        main = draft.number("dpo.preference_loss_weight", default=1.0)
        draft.put("algorithm.losses", {"sigmoid": main, "sft": share})


def _lengths(draft: Draft) -> None:
    both = draft.whole("policy.max_total_sequence_length")
    prompt = draft.whole("data.max_input_seq_length")
    answer = draft.whole("policy.generation.max_new_tokens")
    if both is None:
        return
    if answer is None or answer >= both:
        answer = both - prompt if prompt is not None and prompt < both else both // 2
        draft.put("rollout.max_new_tokens", answer)
        draft.tell(
            "policy.generation.max_new_tokens",
            "differs",
            says=f"as long as prompt and answer together there; {answer} is written",
        )
    draft.put("data.max_length", max(1, both - answer))


def _rewards(draft: Draft) -> None:
    names = {key.split(".")[1] for key in draft.given if key.startswith("env.") and "." in key[4:]}
    rewards: list[dict[str, Any]] = []
    path = draft.get("env.reward_model.model_name")
    if isinstance(path, str):
        rewards.append({"name": "model", "options": {"path": path}})
    elif "code" in names:
        rewards.append({"name": "code"})
    else:
        rewards.append(reward_for(f"{names_of_rows(draft)} math"))
        if "math" not in names:
            draft.remarks.append(
                "the environment of the file is not there: the reward math is written in its place;"
                " rewards and env say what an answer is worth"
            )
    draft.put("rewards", rewards)


def _engine(draft: Draft) -> None:
    if draft.at("rollout.engine") != "vllm":
        draft.drop("engine")
        return
    prefix = "policy.generation.vllm_cfg."
    args: dict[str, Any] = {}
    cut = draft.whole(f"{prefix}tensor_parallel_size", default=1) or 1
    if cut > 1:
        args["tensor-parallel-size"] = cut
    if draft.get(f"{prefix}enforce_eager") is True:
        args["enforce-eager"] = True
    length = draft.whole(f"{prefix}max_model_len")
    if length:
        args["max-model-len"] = length
    if args:
        draft.put("engine.args", args)
    if draft.get("policy.generation.colocated.enabled") is False:
        draft.tell(
            "policy.generation.colocated.enabled",
            "differs",
            says="name the GPUs of the engines in engine.devices",
        )
