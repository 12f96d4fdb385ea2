"""The section `train`: how long, how fast, and on which backend."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, model_validator

from reinforge.config.base import (
    Count,
    Fraction,
    Natural,
    NonNegative,
    Positive,
    Precision,
    Section,
)
from reinforge.config.deepspeed import DeepSpeedConfig
from reinforge.config.optimizer import OptimizerConfig
from reinforge.config.profile import ProfileConfig

# of a whole, and less than it
Share = Annotated[FiniteFloat, Field(gt=0, lt=1)]
BackendName = Literal["local", "fsdp", "deepspeed", "megatron"]


class ScheduleConfig(Section):
    kind: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Shape after the warm-up."
    )
    warmup: Natural | Share = Field(
        0,
        description=(
            "Optimizer steps (in RL epochs x minibatches of them per step) of linear warm-up: the"
            " first has rate / warmup, number `warmup` the whole. Between 0 and 1: a share of all"
            " of them, rounded up. transformers and TRL begin at 0, so that their first step"
            " changes nothing."
        ),
    )
    floor: Fraction = Field(0.0, description="The schedule ends at floor x learning_rate.")


class TrainConfig(Section):
    sequence_parallel: Count = Field(
        1,
        description=(
            "fsdp: so many ranks share every pack, each a slice of its tokens (Ulysses), for rows"
            " too long for one device."
        ),
    )
    tensor_parallel: Count = Field(
        1,
        description=(
            "fsdp, megatron: so many ranks share every matrix product (fsdp: by the plan that"
            " transformers has for the architecture)."
        ),
    )
    offload_weights: bool = Field(
        False,
        description=(
            "fsdp: weights, gradients and moments are in host memory; layers come to the device one"
            " by one. Slow, and small."
        ),
    )
    backend: BackendName = Field(
        "local",
        description=(
            "local: one process. fsdp, deepspeed: several, each with its part of weights and"
            " moments (FSDP2, ZeRO). megatron: several, with Megatron's layers."
        ),
    )
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    ranks: Count | None = Field(
        None,
        description=(
            "fsdp, deepspeed, megatron: how many processes. Default: one per GPU, or as many as"
            " torchrun started."
        ),
    )
    precision: Precision = Field(
        "model",
        description=(
            "Of the matrix products of the decoder layers. model: as model.dtype. fp8: the product"
            " that rollout.precision: fp8 samples with, so that both compute the same function, and"
            " one for the gradients of inputs; gradients of weights, master weights and moments"
            " stay as they are. For large models: see docs/engines.md."
        ),
    )
    steps: Count | None = Field(None, description="Optimizer batches to do. Give this or epochs.")
    epochs: Positive | None = Field(
        None,
        description=(
            "Passes over the data, instead of steps: epochs x rows / prompts_per_step, rounded up,"
            " the last one filled with rows of the next pass. Prompts that are drawn and not"
            " trained (dynamic sampling, over_provision, prefer) come on top: then the run walks"
            " more passes, and the metric `epoch` says how many."
        ),
    )
    prompts_per_step: Count = Field(
        64, description="Data rows per step. In RL each is sampled group_size times."
    )
    learning_rate: NonNegative = Field(
        1e-5, description="Of the optimizer, at the top of the schedule."
    )
    freeze: list[str] = Field(
        [],
        description=(
            "Weights of the policy that stay as they are: names or patterns of modules and weights,"
            " e.g. `model.embed_tokens`, `model.layers.[0-7]`, `*norm*`. Not with an adapter."
        ),
    )
    only: list[str] = Field(
        [],
        description=(
            "Train only the weights of these names or patterns, less those of `freeze`. Empty: all."
            " The new head of a reward model or critic is always trained."
        ),
    )
    schedule: ScheduleConfig = ScheduleConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    max_grad_norm: NonNegative = Field(1.0, description="0 = no clipping.")
    ema: Fraction | None = Field(
        None,
        description=(
            "Keep a moving average of the weights with this decay, e.g. 0.999: evaluation and"
            " export use it. Off by default."
        ),
    )
    tokens_per_microbatch: Literal["auto"] | Count = Field(
        "auto",
        description="Packed tokens per forward/backward. The gradient does not depend on it.",
    )
    deterministic: bool | Literal["auto"] = Field(
        "auto",
        description=(
            "On a GPU: gradients with the same bits in every run of this configuration on the same"
            " kind of GPU with the same versions; 1 to 6% of the training time."
            " auto: with the local backend, unless an operation has no such form (the log names"
            " it). true: such an operation is an error; for every backend. A CPU always does so."
        ),
    )
    skip_idle: bool = Field(
        True,
        description=(
            "RL: rows without gradient (all advantages 0, no KL or entropy term) are not computed,"
            " unless that is all of them. Token metrics are then of the others."
        ),
    )
    neftune: Positive | None = Field(
        None,
        description=(
            "SFT: noise on the input embeddings, alpha / sqrt(length x width) x U(-1, 1); 5 is"
            " usual (2310.05914). Off by default."
        ),
    )
    router_aux_loss: NonNegative | None = Field(
        None,
        description=(
            "Mixture of experts: coefficient of the router's load-balancing loss (2101.03961),"
            " beside any loss of a policy. Default: router_aux_loss_coef of the model's config"
            " where that says output_router_logits, otherwise none. 0: none."
        ),
    )
    router_z_loss: NonNegative = Field(
        0.0,
        description=(
            "Mixture of experts: coefficient of the square of the log of the sum of the router's"
            " exponentials, which keeps its logits small (2202.08906). Off by default."
        ),
    )
    router_bias_rate: NonNegative = Field(
        0.0,
        description=(
            "Mixture of experts: after every update move the bias by which a router chooses"
            " (DeepSeek-V3, GLM, MiniMax and others have one) by this much towards an even load"
            " (2408.15664); 0.001 is usual. Off by default."
        ),
    )
    router_replay: Literal["off", "count", "on", "differing"] = Field(
        "off",
        description=(
            "Mixture of experts: send every token to the experts that it went to when it was"
            " sampled (2510.11370); the weights of the experts are computed anew. count: only"
            " measure how often they would be others (experts/disagreement). differing: where they"
            " are others, whatever their order."
        ),
    )
    precompute_reference: bool = Field(
        False,
        description=(
            "Preference: compute the reference's log-probs of all rows once, before the first step,"
            " and keep no copy of the model."
        ),
    )
    share_prompts: bool = Field(
        True,
        description=(
            "Compute the prompt of a group once instead of once per sample. The gradient is the"
            " same."
        ),
    )

    profile: ProfileConfig | None = Field(
        None,
        description=(
            "Write a torch trace of some steps and a table of what took the time into the folder"
            " profile of the run. Those steps are slower. Off by default."
        ),
    )

    @model_validator(mode="after")
    def _duration(self) -> TrainConfig:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of train.steps and train.epochs")
        return self

    @model_validator(mode="after")
    def _groups_of_ranks(self) -> TrainConfig:
        together = self.sequence_parallel * self.tensor_parallel
        if self.ranks is not None and self.ranks % together:
            raise ValueError(
                f"ranks: {self.ranks} cannot be dealt into groups of {together} (sequence_parallel"
                f" x tensor_parallel must divide it); set a multiple of {together}"
            )
        return self
