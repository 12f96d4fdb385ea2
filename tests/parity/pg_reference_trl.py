"""The TRL half of pg_reference.py: real trainers (GRPO, RLOO, experimental GMPO) around a random
two-layer model.

Advantages, importance weights and KL in the reward come out of their
`_generate_and_score_completions`, with `_generate` replaced by fixed completions and reward
functions that return fixed rewards. Losses come out of their `_compute_loss`, with the forward pass
replaced by leaf tensors, so that gradients with respect to log-probs and entropies can be read.
vLLM is not there: `use_vllm` is set on the finished trainer, for the correction that goes with it.
trl_reference.py has more of GRPO itself: scaling, KL, two micro-batches.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from pg_reference import (
    ADVANTAGES,
    COMPONENTS,
    CONTROLLER,
    LENGTHS,
    MAX_LENGTH,
    REWARDS,
    TRUNCATED,
    UNSCORED,
    WEIGHTS,
    Cases,
    flat,
    mask_of,
    padded,
)
from trl_reference import GROUP as GROUP_SIZE
from trl_reference import tiny_policy

DTYPES = (torch.float64, torch.float32)
CLIP = {"epsilon": 0.2, "epsilon_high": 0.28}


def run() -> tuple[str, Cases]:
    import trl

    assert trl.__version__ == "1.16.0", trl.__version__
    cases = Cases()
    with tempfile.TemporaryDirectory() as directory:
        maker = Maker(directory)
        _advantages(cases, maker)
        for dtype in DTYPES:
            _losses(cases, maker, dtype)
            _vespo(cases, maker, dtype)
            _corrections(cases, maker, dtype)
            _entropy(cases, maker, dtype)
            _rloo(cases, maker, dtype)
        _controller(cases, maker)
    _overlong(cases)
    return trl.__version__, cases


class Maker:
    """Makes trainers of one kind or another, all around the same model."""

    def __init__(self, directory: str):
        self.directory = directory
        self.model, self.tokenizer = tiny_policy(directory)

    def __call__(
        self, kind: str = "grpo", rewards: list[list[float | None]] | None = None, **settings: Any
    ) -> Any:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
        from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

        trainers = {
            "grpo": (GRPOTrainer, GRPOConfig),
            "rloo": (RLOOTrainer, RLOOConfig),
            "gmpo": (GMPOTrainer, GMPOConfig),
        }
        make, configure = trainers[kind]
        fixed = [lambda completions, values=values, **_: values for values in rewards or [REWARDS]]
        for i, function in enumerate(fixed):
            function.__name__ = f"reward{i}"
        args = configure(
            output_dir=self.directory,
            report_to=[],
            use_cpu=True,
            bf16=False,
            num_generations=GROUP_SIZE,
            max_completion_length=MAX_LENGTH,
            per_device_train_batch_size=len(LENGTHS),
            **settings,
        )
        rows = Dataset.from_list([{"prompt": f"w{i}"} for i in range(len(LENGTHS) // GROUP_SIZE)])
        trainer = make(
            self.model,
            reward_funcs=fixed,
            args=args,
            train_dataset=rows,
            processing_class=self.tokenizer,
        )
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        ids = [[4] * (n - 1) + [1] for n in LENGTHS]
        full = ([[4, 5]] * len(ids), ids, None, ["w"] * len(ids), None, {}, None, None)
        trainer._generate = lambda prompts: (full[0], full[1], full[3]) if kind == "rloo" else full
        return trainer


def score(trainer: Any) -> dict[str, torch.Tensor]:
    return trainer._generate_and_score_completions(
        [{"prompt": f"w{i // GROUP_SIZE}"} for i in range(len(LENGTHS))]
    )


def _advantages(cases: Cases, maker: Maker) -> None:
    """float32: TRL knows nothing else for rewards."""

    def add(method: str, call: str, trainer: Any) -> None:
        cases.add(method, call, torch.float32, advantages=score(trainer)["advantages"])

    for scale in ("group", "batch", "none"):
        name = "" if scale == "group" else f", scale {scale}"
        add(f"group_relative{name}", f"scale_rewards={scale}", maker(scale_rewards=scale))
        add(
            f"group_relative{name}, unscored rows",
            f"scale_rewards={scale}",
            maker(scale_rewards=scale, rewards=[UNSCORED]),
        )
    parts = list(COMPONENTS.values())
    weights = list(WEIGHTS.values())
    add(
        "group_relative, weighted components",
        "sum_then_normalize",
        maker(rewards=parts, reward_weights=weights),
    )
    add(
        "decoupled",
        "normalize_then_sum",
        maker(
            rewards=parts, reward_weights=weights, multi_objective_aggregation="normalize_then_sum"
        ),
    )
    add("leave_one_out", "RLOOTrainer", maker("rloo", beta=0.0))
    add("leave_one_out, unscored rows", "RLOOTrainer", maker("rloo", beta=0.0, rewards=[UNSCORED]))
    add(
        "leave_one_out, whiten",
        "RLOOTrainer, normalize_advantages",
        maker("rloo", beta=0.0, normalize_advantages=True),
    )
    trainer = maker("rloo", beta=0.1)
    both = iter(("old", "reference"))
    trainer._get_per_token_logps_and_entropies = lambda *a, **k: (
        padded(next(both), torch.float32),
        None,
        None,
    )
    add("leave_one_out, KL in the reward", "RLOOTrainer, beta=0.1", trainer)


def _inputs(dtype: torch.dtype, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "prompt_ids": torch.full((len(mask), 2), 4),
        "prompt_mask": torch.ones(len(mask), 2, dtype=torch.long),
        "completion_ids": torch.full(mask.shape, 4),
        "completion_mask": mask.long(),
        "advantages": torch.tensor(ADVANTAGES, dtype=dtype),
        "old_per_token_logps": padded("old", dtype),
        "ref_per_token_logps": padded("reference", dtype),
        "num_items_in_batch": mask.sum(),
        "sampling_per_token_logps": padded("behaviour", dtype),
        "old_logps": (padded("old", dtype) * mask).sum(1),
    }


def _loss(
    trainer: Any, dtype: torch.dtype, mask: torch.Tensor | None = None, **more: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Loss and gradients."""
    logprobs = padded("logprobs", dtype).requires_grad_()
    entropy = padded("entropy", dtype).requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *a, **k: (logprobs, entropy, None)
    loss = trainer._compute_loss(
        trainer.model, _inputs(dtype, mask_of() if mask is None else mask) | more
    )
    loss.backward()
    assert logprobs.grad is not None
    found = {"loss": loss, "gradient": flat(logprobs.grad)}
    return found if entropy.grad is None else found | {"entropy_gradient": flat(entropy.grad)}


def _losses(cases: Cases, maker: Maker, dtype: torch.dtype) -> None:
    def add(
        method: str, kind: str = "grpo", mask: torch.Tensor | None = None, **settings: Any
    ) -> None:
        shown = {k: v for k, v in settings.items() if settings.get("beta", 0.0) > 0 or k != "beta"}
        call = ", ".join(
            (["GMPOTrainer"] if kind == "gmpo" else []) + [f"{k}={v}" for k, v in shown.items()]
        )
        cases.add(
            method, call, dtype, **_loss(maker(kind, **({"beta": 0.0} | settings)), dtype, mask)
        )

    sequence = {"importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.1}
    trained = mask_of()
    trained[TRUNCATED] = False
    kinds = {
        "sequence_mean": "grpo",
        "token_mean": "dapo",
        "token_mean, one micro-batch": "bnpo",
        "fixed_length": "dr_grpo",
    }
    for reduce, kind in kinds.items():
        add(f"ppo_clip, {reduce}", loss_type=kind, **CLIP)
        if kind != "bnpo":
            add(f"truncated rows left out, {reduce}", mask=trained, loss_type=kind, **CLIP)
    add("ppo_clip, delta", loss_type="grpo", delta=1.5, **CLIP)
    add("gspo", loss_type="grpo", **sequence)
    add("luspo", loss_type="luspo", **sequence)
    add("cispo", loss_type="cispo", epsilon_high=1.5)
    add("sapo", loss_type="sapo", sapo_temperature_pos=1.0, sapo_temperature_neg=1.25)
    add("gmpo", kind="gmpo", epsilon=0.4, epsilon_high=0.4)
    add("off_policy_mask", loss_type="grpo", off_policy_mask_threshold=0.1, **CLIP)
    for share in (0.2, 0.5):
        add(f"top_entropy, share {share}", loss_type="dapo", top_entropy_quantile=share, **CLIP)
    add("kl k3 in the loss", loss_type="grpo", beta=0.1, use_bias_correction_kl=False, **CLIP)
    add(
        "kl k3+ in the loss, weighted",
        loss_type="grpo",
        beta=0.1,
        use_bias_correction_kl=True,
        **CLIP,
    )
    add(
        "gspo, kl k3 in the loss",
        loss_type="grpo",
        beta=0.1,
        use_bias_correction_kl=False,
        **sequence,
    )
    add(
        "gspo, kl in the loss, weighted",
        loss_type="grpo",
        beta=0.1,
        use_bias_correction_kl=True,
        **sequence,
    )


def _correct(
    trainer: Any, mode: str, low: float | None, high: float | None, dtype: torch.dtype
) -> torch.Tensor:
    """[S, MAX_LENGTH] or [S, 1] importance weights.

    `_generate` gives the sampler's log-probs, the forward pass the old ones.
    """
    trainer.use_vllm = True
    trainer.vllm_importance_sampling_correction = True
    trainer.vllm_importance_sampling_mode = mode
    trainer.vllm_importance_sampling_clip_min = low
    trainer.vllm_importance_sampling_clip_max = high
    ids = [[4] * (n - 1) + [1] for n in LENGTHS]
    sampled = [
        row[:n].tolist() for row, n in zip(padded("behaviour", torch.float64), LENGTHS, strict=True)
    ]
    trainer._generate = lambda prompts: (
        [[4, 5]] * len(ids),
        ids,
        None,
        ["w"] * len(ids),
        sampled,
        {},
        None,
        None,
    )
    trainer._get_per_token_logps_and_entropies = lambda *a, **k: (padded("old", dtype), None, None)
    return score(trainer)["importance_sampling_ratio"]


def _corrections(cases: Cases, maker: Maker, dtype: torch.dtype) -> None:
    """The sampler's log-probs are float32 in any case, and the weights of float64 with them."""
    trainer = maker(beta=0.0, loss_type="dapo", **CLIP)
    mask = mask_of()
    for method, mode, low, high in (
        ("tis", "token_truncate", None, 1.5),
        ("mis", "token_mask", None, 1.5),
        ("icepop", "token_mask", 0.5, 1.5),
        ("seq_tis", "sequence_truncate", None, 1.5),
        ("seq_mask", "sequence_mask", 0.5, 1.5),
    ):
        weights = _correct(trainer, mode, low, high, dtype)
        call = f"vllm_importance_sampling_mode={mode}, clip_min={low}, clip_max={high}"
        cases.add(method, call, dtype, weights=weights.expand(mask.shape)[mask])
        if method in ("tis", "seq_mask"):
            cases.add(
                f"ppo_clip, corrected by {method}",
                call,
                dtype,
                **_loss(trainer, dtype, importance_sampling_ratio=weights),
            )
    trainer = maker(beta=0.1, loss_type="dapo", use_bias_correction_kl=False, **CLIP)
    weights = _correct(trainer, "token_truncate", None, 1.5, dtype)
    cases.add(
        "kl k3 in the loss, corrected by tis",
        "beta=0.1",
        dtype,
        **_loss(trainer, dtype, importance_sampling_ratio=weights),
    )


def _vespo(cases: Cases, maker: Maker, dtype: torch.dtype) -> None:
    trainer = maker(beta=0.0, loss_type="vespo")
    cases.add("vespo", "loss_type=vespo", dtype, **_loss(trainer, dtype))
    for method, cap in (("vespo, old engine", 1e6), ("vespo, old engine and a cap", 1.5)):
        weights = _correct(trainer, "token_truncate", None, cap, dtype)
        call = f"loss_type=vespo, vllm_importance_sampling_mode=token_truncate, clip_max={cap:g}"
        cases.add(method, call, dtype, **_loss(trainer, dtype, importance_sampling_ratio=weights))


def _entropy(cases: Cases, maker: Maker, dtype: torch.dtype) -> None:
    for reduce, kind in (("token_mean", "dapo"), ("sequence_mean", "grpo")):
        trainer = maker(beta=0.0, loss_type=kind, entropy_coef=0.1, **CLIP)
        cases.add(
            f"entropy bonus, {reduce}",
            f"loss_type={kind}, entropy_coef=0.1",
            dtype,
            **_loss(trainer, dtype),
        )


def _rloo(cases: Cases, maker: Maker, dtype: torch.dtype) -> None:
    trainer = maker("rloo", beta=0.0, **CLIP)
    cases.add("sequence_clip", "RLOOTrainer", dtype, **_loss(trainer, dtype))


def _controller(cases: Cases, maker: Maker) -> None:
    """The coefficient after steps of a given entropy, and what was applied in each."""
    trainer = maker(
        beta=0.0,
        entropy_coef=0.02,
        use_adaptive_entropy=True,
        entropy_target=0.25,
        entropy_coef_delta=0.01,
        entropy_coef_max=0.035,
    )
    coefficients = []
    applied = []
    for value in CONTROLLER:
        logprobs = padded("logprobs", torch.float64).requires_grad_()
        entropy = torch.full(mask_of().shape, value, dtype=torch.float64)
        entropy.requires_grad_()
        trainer._get_per_token_logps_and_entropies = lambda *a, l=logprobs, e=entropy, **k: (
            l,
            e,
            None,
        )
        trainer._compute_loss(trainer.model, _inputs(torch.float64, mask_of())).backward()
        applied.append(0.0 if entropy.grad is None else -float(entropy.grad.sum()))
        coefficients.append(float(trainer.entropy_coef))
    cases.add(
        "adaptive_entropy",
        "use_adaptive_entropy",
        torch.float64,
        coefficients=coefficients,
        applied=applied,
    )


def _overlong(cases: Cases) -> None:
    from trl.rewards import get_soft_overlong_punishment

    found = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)(
        completion_ids=[[1] * n for n in (0, 79, 80, 81, 95, 100, 101)]
    )
    cases.add("overlong_penalty", "get_soft_overlong_punishment", torch.float64, value=found)
