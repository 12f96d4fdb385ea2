"""The veRL half of pg_reference.py: functions of verl.trainer.ppo.core_algos and
rollout_corr_helper, called as they are.

`verl` imports ray at its top. None of these functions uses it, so an empty module stands in for it.
Everything else is the real thing.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from pg_reference import (
    ADVANTAGES,
    BASELINE,
    COMPONENTS,
    CONTROLLER,
    GROUP,
    LENGTHS,
    MAX_LENGTH,
    RAGGED,
    RAGGED_REWARDS,
    REWARDS,
    TRUNCATED,
    WEIGHTS,
    Cases,
    flat,
    mask_of,
    padded,
)
from torch import Tensor

DTYPES = (torch.float64, torch.float32)


class _Ray(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def run() -> tuple[str, Cases]:
    sys.modules["ray"] = _Ray("ray")
    import verl

    assert verl.__version__ == "0.9.1", verl.__version__
    cases = Cases()
    for dtype in DTYPES:
        _advantages(cases, dtype)
        _losses(cases, dtype)
        _selections(cases, dtype)
        _kl(cases, dtype)
        _kl_loss(cases, dtype)
        _values(cases, dtype)
        _corrections(cases, dtype)
        _aggregation(cases, dtype)
    _controller(cases)
    return verl.__version__, cases


def _rewards(
    rewards: list[float], dtype: torch.dtype, lengths: list[int] = LENGTHS, tokens: bool = False
) -> Tensor:
    """[S, MAX_LENGTH]: the reward of a row at its last token, and the token rewards if wanted."""
    reward = (
        padded("token_rewards", dtype, 0.0)
        if tokens
        else torch.zeros(len(lengths), MAX_LENGTH, dtype=dtype)
    )
    reward[torch.arange(len(lengths)), torch.tensor(lengths) - 1] += torch.tensor(
        rewards, dtype=dtype
    )
    return reward


def _advantages(cases: Cases, dtype: torch.dtype) -> None:
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo import core_algos as core

    mask = mask_of().to(dtype)
    config = AlgoConfig(gamma=0.9, norm_adv_by_std_in_grpo=False)
    scaled = AlgoConfig(norm_adv_by_std_in_grpo=True)

    def add(method: str, call: str, found: tuple[Tensor, Tensor], returns: bool = False) -> None:
        more = {"returns": flat(found[1], False)} if returns else {}
        cases.add(method, call, dtype, advantages=flat(found[0], False), **more)

    for name, groups, rewards in (
        ("", GROUP, REWARDS),
        (", a group of one", RAGGED, RAGGED_REWARDS),
    ):
        given: dict[str, Any] = {
            "token_level_rewards": _rewards(rewards, dtype),
            "response_mask": mask,
            "index": np.array(groups),
        }
        norm: dict[str, Any] = {"norm_adv_by_std_in_grpo": False}
        add(f"group_relative{name}", "grpo", core.compute_grpo_outcome_advantage(**given))
        if dtype == torch.float32:  # its statistics are float32 in any case
            add(
                f"group_relative, vectorised{name}",
                "grpo_vectorized",
                core.compute_grpo_vectorized_outcome_advantage(**given),
            )
        add(
            f"group_relative, scale none{name}",
            "grpo, norm_adv_by_std_in_grpo=False",
            core.compute_grpo_outcome_advantage(**given, **norm),
        )
        add(f"leave_one_out{name}", "rloo", core.compute_rloo_outcome_advantage(**given))
        add(
            f"leave_one_out, vectorised{name}",
            "rloo_vectorized",
            core.compute_rloo_vectorized_outcome_advantage(**given),
        )
        add(f"optimal_baseline{name}", "opo", core.compute_opo_outcome_advantage(**given))
        add(
            f"group_whitened{name}",
            "reinforce_plus_plus_baseline",
            core.compute_reinforce_plus_plus_baseline_outcome_advantage(**given),
        )
        add(f"gpg{name}", "gpg", core.compute_gpg_outcome_advantage(**given))
    given = {
        "token_level_rewards": _rewards(REWARDS, dtype),
        "response_mask": mask,
        "index": np.array(GROUP),
    }
    add(
        "pass_at_k",
        "grpo_passk, norm_adv_by_std_in_grpo=False",
        core.compute_grpo_passk_outcome_advantage(**given, config=config),
    )
    add(
        "pass_at_k, divided by the std",
        "grpo_passk",
        core.compute_grpo_passk_outcome_advantage(**given, config=scaled),
    )
    baseline = torch.tensor(BASELINE, dtype=dtype)
    for name, tokens in (("", False), (", with token rewards", True)):
        rewards_ = _rewards(REWARDS, dtype, tokens=tokens)
        add(
            f"greedy_baseline{name}",
            "remax",
            core.compute_remax_outcome_advantage(rewards_, baseline, mask),
        )
    dense = _rewards(REWARDS, dtype, tokens=True)
    add(
        "return_to_go",
        "reinforce_plus_plus",
        core.compute_reinforce_plus_plus_outcome_advantage(dense, mask, config),
        returns=True,
    )
    add(
        "gae",
        "gae",
        core.compute_gae_advantage_return(dense, padded("old_values", dtype), mask, 0.9, 0.8),
        returns=True,
    )
    if dtype == torch.float32:  # the components become float32 there
        parts = {
            name: np.array([0.0 if x is None else x for x in values])
            for name, values in COMPONENTS.items()
        }
        batch = {
            "prompts": torch.zeros(len(LENGTHS), 2),
            "attention_mask": torch.cat((torch.ones(len(LENGTHS), 2), mask), 1).long(),
        }
        config = AlgoConfig(
            gdpo_reward_keys=list(parts), gdpo_reward_weights=[WEIGHTS[name] for name in parts]
        )
        add(
            "decoupled",
            "gdpo",
            core.compute_gdpo_outcome_advantage(
                **given, config=config, non_tensor_batch=parts, batch=batch
            ),
        )


def _actor(policy_loss: dict[str, Any] | None = None, **settings: Any) -> Any:
    from verl.workers.config import ActorConfig
    from verl.workers.config.actor import PolicyLossConfig

    settings = {
        "clip_ratio": 0.2,
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.28,
        "clip_ratio_c": 1e9,
    } | settings
    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(**(policy_loss or {})),
        **settings,
    )


def _loss(
    cases: Cases,
    dtype: torch.dtype,
    method: str,
    name: str,
    *,
    mode: str = "token-mean",
    old: str = "old",
    weights: Tensor | None = None,
    mask: Tensor | None = None,
    policy_loss: dict[str, Any] | None = None,
    **settings: Any,
) -> None:
    """A policy loss and its gradient. Its settings are part of the name of the case's call."""
    from verl.trainer.ppo import core_algos as core

    function: Callable[..., Any] = (
        core.compute_policy_loss_reinforce if name == "reinforce" else core.get_policy_loss_fn(name)
    )
    mask = (mask_of() if mask is None else mask).to(dtype)
    leaf = padded("logprobs", dtype).requires_grad_()
    advantages = torch.tensor(ADVANTAGES, dtype=dtype)[:, None] * mask
    config = _actor(policy_loss, **settings)
    loss, _ = function(
        padded(old, dtype),
        leaf,
        advantages,
        mask,
        loss_agg_mode=mode,
        config=config,
        rollout_is_weights=weights,
    )
    loss.backward()
    assert leaf.grad is not None
    shown = {**settings, **(policy_loss or {})}
    call = ", ".join(
        [name, mode, *(f"{k}={v}" for k, v in shown.items() if k != "rollout_correction")]
    )
    cases.add(method, call, dtype, loss=loss, gradient=flat(leaf.grad))


def _losses(cases: Cases, dtype: torch.dtype) -> None:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    def loss(method: str, name: str, **settings: Any) -> None:
        _loss(cases, dtype, method, name, **settings)

    for ours, mode in (
        ("token_mean", "token-mean"),
        ("sequence_mean", "seq-mean-token-mean"),
        ("sequence_sum", "seq-mean-token-sum"),
        ("fixed_length", "seq-mean-token-sum-norm"),
    ):
        loss(f"ppo_clip, {ours}", "vanilla", mode=mode)
        trained = mask_of()
        trained[TRUNCATED] = False
        info = (
            {"batch_num_tokens": int(trained.sum())}
            if ours == "token_mean"
            else {"global_batch_size": len(LENGTHS)}
        )  # as in its training
        loss(
            f"truncated rows left out, {ours}",
            "vanilla",
            mode=mode,
            mask=trained,
            global_batch_info=info,
        )
    loss("ppo_clip, dual", "vanilla", clip_ratio_c=1.5)
    for ours in ("gspo", "gspo_token"):
        loss(ours, "gspo", mode="seq-mean-token-mean", clip_ratio_low=0.05, clip_ratio_high=0.1)
    loss("sapo", "sapo", tau_pos=1.0, tau_neg=1.25)
    loss("gmpo", "geo_mean", clip_ratio_low=0.4, clip_ratio_high=0.4)
    loss("cispo", "cispo", clip_ratio_low=1.0, clip_ratio_high=0.5)
    loss("cispo, with a lower bound", "cispo", clip_ratio_low=0.1, clip_ratio_high=0.5)
    loss("dppo_tv", "dppo_tv", clip_ratio_low=0.1, clip_ratio_high=0.1, clip_ratio_c=20.0)
    loss("dppo_tv, truncate", "dppo_tv", clip_ratio_low=0.1, clip_ratio_high=0.1, clip_ratio_c=1.5)
    loss("dppo_kl", "dppo_kl", clip_ratio_low=0.05, clip_ratio_high=0.05, clip_ratio_c=20.0)
    loss("reinforce, token_mean", "gpg")
    loss("reinforce, sequence_sum", "reinforce", mode="seq-mean-token-sum")
    bypass = {
        "loss_type": "reinforce",
        "rollout_is": "token",
        "rollout_is_threshold": 1.5,
        "rollout_rs": None,
    }
    loss(
        "reinforce, corrected by tis",
        "bypass_mode",
        old="behaviour",
        policy_loss={"rollout_correction": bypass},
    )
    loss(
        "ppo_clip, old engine",
        "bypass_mode",
        old="behaviour",
        policy_loss={"rollout_correction": bypass | {"loss_type": "ppo_clip"}},
    )
    ratio = padded("old", dtype) - padded("behaviour", dtype)
    weights, _ = compute_rollout_correction_weights(ratio, mask_of().to(dtype), "token", 1.5)
    loss("ppo_clip, corrected by tis", "vanilla", weights=weights)


def _selections(cases: Cases, dtype: torch.dtype) -> None:
    # all in range: no random choice
    everything = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.3, "clip_cov_ub": 2.0}
    _loss(cases, dtype, "clip_cov", "clip_cov", policy_loss=everything)
    _loss(cases, dtype, "clip_cov, on-policy", "clip_cov", old="logprobs", policy_loss=everything)
    _loss(cases, dtype, "kl_cov", "kl_cov", policy_loss={"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7})


def _kl(cases: Cases, dtype: torch.dtype) -> None:
    from verl.trainer.ppo.core_algos import kl_penalty

    for ours, theirs in (("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl"), ("k3+", "k3+")):
        leaf = padded("logprobs", dtype).requires_grad_()
        value = kl_penalty(leaf, padded("reference", dtype), theirs)
        (value * mask_of()).sum().backward()
        assert leaf.grad is not None
        cases.add(
            f"kl {ours}",
            f"kl_penalty {theirs}",
            dtype,
            value=flat(value, False),
            gradient=flat(leaf.grad),
        )


def _kl_loss(cases: Cases, dtype: torch.dtype) -> None:
    """The surrogate and the KL term as verl.workers.utils.losses.ppo_loss adds them."""
    from verl.trainer.ppo.core_algos import agg_loss, compute_policy_loss_vanilla, kl_penalty

    mask = mask_of().to(dtype)
    mode = "seq-mean-token-mean"
    leaf = padded("logprobs", dtype).requires_grad_()
    advantages = torch.tensor(ADVANTAGES, dtype=dtype)[:, None] * mask
    loss, _ = compute_policy_loss_vanilla(
        padded("old", dtype), leaf, advantages, mask, mode, _actor()
    )
    loss = loss + 0.1 * agg_loss(
        kl_penalty(leaf, padded("reference", dtype), "low_var_kl"), mask, mode
    )
    loss.backward()
    assert leaf.grad is not None
    cases.add(
        "kl k3 in the loss",
        f"use_kl_loss, kl_loss_type=low_var_kl, {mode}",
        dtype,
        loss=loss,
        gradient=flat(leaf.grad),
    )


def _values(cases: Cases, dtype: torch.dtype) -> None:
    from verl.trainer.ppo.core_algos import compute_value_loss

    leaf = padded("values", dtype).requires_grad_()
    loss, share = compute_value_loss(
        leaf, padded("returns", dtype), padded("old_values", dtype), mask_of().to(dtype), 0.2
    )
    loss.backward()
    assert leaf.grad is not None
    cases.add(
        "ValueLoss",
        "compute_value_loss",
        dtype,
        loss=loss,
        gradient=flat(leaf.grad),
        clip_fraction=share,
    )


def _corrections(cases: Cases, dtype: torch.dtype) -> None:
    from verl.trainer.ppo.rollout_corr_helper import (
        compute_rollout_correction_weights,
        compute_rollout_rejection_mask,
    )

    mask = mask_of().to(dtype)
    ratio = padded("old", dtype) - padded("behaviour", dtype)
    for method, level, threshold in (
        ("tis", "token", 1.5),
        ("seq_tis", "sequence", 1.5),
        ("icepop", "token", "0.5_1.5"),
        ("seq_mask", "sequence", "0.5_1.5"),
    ):
        weights, _ = compute_rollout_correction_weights(ratio, mask, level, threshold)
        cases.add(
            method,
            f"rollout_is={level}, rollout_is_threshold={threshold}",
            dtype,
            weights=flat(weights),
        )
    for method, option in (
        ("mis", "token_k1"),
        ("seq_mask, kept", "seq_sum_k1"),
        ("seq_mask geometric, kept", "seq_mean_k1"),
    ):
        kept, _ = compute_rollout_rejection_mask(ratio, mask, option, "0.7_1.2")
        cases.add(
            method, f"rollout_rs={option}, rollout_rs_threshold=0.7_1.2", dtype, kept=flat(kept)
        )


def _aggregation(cases: Cases, dtype: torch.dtype) -> None:
    from verl.trainer.ppo.core_algos import agg_loss

    entropy = padded("entropy", dtype)
    for ours, mode in (("token_mean", "token-mean"), ("sequence_mean", "seq-mean-token-mean")):
        cases.add(
            f"entropy bonus, {ours}",
            f"entropy_coeff, {mode}",
            dtype,
            value=agg_loss(entropy, mask_of().to(dtype), mode),
        )


def _controller(cases: Cases) -> None:
    from verl.trainer.ppo.core_algos import AdaptiveKLController

    controller = AdaptiveKLController(init_kl_coef=0.1, target_kl=0.2, horizon=100)
    found = []
    for kl in CONTROLLER:
        controller.update(kl, n_steps=16)
        found.append(float(controller.value))
    cases.add("adaptive_kl", "AdaptiveKLController", torch.float64, coefficients=found)
