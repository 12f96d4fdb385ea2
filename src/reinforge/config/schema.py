"""The whole configuration as frozen models. Defaults are what we would choose; `None` means "the algorithm's own".

Unknown keys are refused. Every field has a description: the reference page and the JSON schema are made from here.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, FiniteFloat, model_validator

from reinforge.config.algorithm import AlgorithmConfig
from reinforge.config.base import Count, Fraction, Natural, NonNegative, Positive, Section


class ModelConfig(Section):
    path: str = Field(description="Hub id, local directory, or .gguf file.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Precision of the module. auto: bfloat16 on a GPU, float32 on a CPU. bfloat16 always keeps float32 master weights.",
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N. auto: the first GPU if there is one.")
    revision: str | None = Field(None, description="Hub revision (commit, tag or branch).")
    tokenizer: str | None = Field(None, description="Take the tokenizer from here instead of from path.")
    chat_template: str | None = Field(None, description="A jinja file that replaces the tokenizer's chat template.")
    compile: bool = Field(
        False, description="torch.compile the layers on a GPU: faster steps after half a minute of compiling. Pays for long runs."
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass: less memory, about a third more time."
    )


class AdapterConfig(Section):
    kind: Literal["lora"] = Field("lora", description="The kind of adapter.")
    rank: Count = Field(16, description="Rank of the two factors.")
    alpha: Positive | None = Field(None, description="Scale is alpha / rank; default 2 x rank.")
    targets: Literal["all-linear"] | list[str] = Field("all-linear", description="Module names to adapt.")
    path: str | None = Field(None, description="Continue from this saved adapter.")


class EvalDataConfig(Section):
    source: str | None = Field(None, description="Default: the training source (rows are then split off and never trained on).")
    size: Natural = Field(0, description="Held-out rows; 0 = all of `source`, or none when there is no source.")
    options: dict[str, Any] = Field({}, description="Options of the source; default: those of the training source.")
    where: dict[str, Any] = Field({}, description="Keep only rows whose columns equal these values.")


class DataConfig(Section):
    source: str = Field(description="A .jsonl/.json/.parquet/.csv file, a hub data set id, `reasoning_gym:<task>`, or `arithmetic:<kind>`.")
    split: str = Field("train", description="Split of a hub data set.")
    options: dict[str, Any] = Field({}, description="Options of the source (reasoning_gym: the task's own, plus seed and size).")
    columns: dict[str, str] = Field({}, description="Our name: their name, e.g. {prompt: question, answer: solution}.")
    where: dict[str, Any] = Field({}, description="Keep only rows whose columns equal these values.")
    system: str | None = Field(None, description="System message put before every prompt.")
    template: str | None = Field(None, description="Prompt text with {column} places, e.g. 'Q: {question}\\nA:'.")
    chat: Literal["auto", "always", "never"] = Field(
        "auto", description="Render prompts with the chat template. auto: if the tokenizer has one."
    )
    loss_on: Literal["assistant", "completion", "all"] = Field("assistant", description="SFT: which tokens are trained.")
    length: Literal["drop", "truncate", "error"] = Field("drop", description="What to do with rows longer than max_length.")
    max_length: Count | None = Field(
        None, description="Longest row in tokens (RL: prompt). Default: what the model and rollout.max_new_tokens leave."
    )
    shuffle: bool = Field(True, description="Visit rows in a new order every epoch, a function of run.seed.")
    limit: Count | None = Field(None, description="Use only the first this many rows.")
    eval: EvalDataConfig = EvalDataConfig()


class RewardConfig(Section):
    name: str = Field(description="A built-in reward, `file.py:function`, or `package.module:function`.")
    weight: FiniteFloat = Field(1.0, description="Factor in the total reward. Negative makes it a penalty.")
    options: dict[str, Any] = Field({}, description="Keyword arguments of the reward.")


class RolloutConfig(Section):
    engine: Literal["native"] = Field("native", description="native: the trainer's own module generates; nothing is copied.")
    temperature: Positive = Field(1.0, description="Of sampling, and of the log-probs that are trained.")
    max_new_tokens: Count = Field(256, description="Longest completion; longer ones are cut and count as truncated.")
    top_p: Fraction = Field(1.0, description="Refused in RL unless 1; see eval.top_p.")
    top_k: Natural = Field(0, description="Refused in RL unless 0 (off).")
    min_p: Fraction = Field(0.0, description="Refused in RL unless 0 (off).")
    stop: list[str] = Field([], description="Strings that end a completion.")
    max_batch: Count = Field(512, description="Sequences decoded at once.")
    kv_gib: Positive | None = Field(None, description="Memory of the KV cache; default: computed once from what is free, then recorded.")
    on_reward_error: Literal["unscored", "raise"] = Field(
        "raise", description="A reward that raises or returns nonsense: stop, or leave the sample unscored and count it."
    )


class ScheduleConfig(Section):
    kind: Literal["constant", "linear", "cosine"] = Field("constant", description="Shape after the warm-up.")
    warmup: Natural = Field(0, description="Steps of linear warm-up.")
    floor: Fraction = Field(0.0, description="The schedule ends at floor x learning_rate.")


class OptimizerConfig(Section):
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.999), description="Decay of AdamW's two moments.")
    eps: Positive = Field(1e-8, description="Added to the root of the second moment.")
    weight_decay: NonNegative = Field(0.0, description="Decoupled: times learning_rate, not in the gradient.")


class TrainConfig(Section):
    backend: Literal["local"] = Field("local", description="local: one process, one device.")
    steps: Count | None = Field(None, description="Optimizer batches to do. Give this or epochs.")
    epochs: Positive | None = Field(None, description="Passes over the data, instead of steps.")
    prompts_per_step: Count = Field(64, description="Data rows per step. In RL each is sampled group_size times.")
    learning_rate: NonNegative = Field(1e-5, description="Of AdamW, at the top of the schedule.")
    schedule: ScheduleConfig = ScheduleConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    max_grad_norm: NonNegative = Field(1.0, description="0 = no clipping.")
    ema: Fraction | None = Field(
        None, description="Keep a moving average of the weights with this decay, e.g. 0.999: evaluation and export use it. Off by default."
    )
    tokens_per_microbatch: Literal["auto"] | Count = Field(
        "auto", description="Packed tokens per forward/backward. The gradient does not depend on it."
    )
    share_prompts: bool = Field(True, description="Compute the prompt of a group once instead of once per sample. The gradient is the same.")

    @model_validator(mode="after")
    def _duration(self) -> TrainConfig:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of train.steps and train.epochs")
        return self


class EarlyStopConfig(Section):
    metric: str = Field("eval/accuracy", description="An evaluation metric.")
    mode: Literal["max", "min"] = Field("max", description="Whether more or less of the metric is better.")
    patience: Count = Field(3, description="Evaluations without improvement before the run stops.")
    threshold: FiniteFloat | None = Field(None, description="Also stop as soon as the metric reaches this.")


class EvalConfig(Section):
    every: Natural = Field(0, description="Steps between evaluations; 0 = only at the start and the end. Needs data.eval.")
    at_start: bool = Field(True, description="Also evaluate before the first step.")
    temperature: NonNegative = Field(0.0, description="0 = greedy.")
    top_p: Fraction = Field(1.0, description="Nucleus of the evaluation's sampling.")
    samples: Count = Field(1, description="Completions per held-out prompt.")
    max_new_tokens: Count | None = Field(None, description="Default: rollout.max_new_tokens.")
    early_stop: EarlyStopConfig | None = None


class CheckpointConfig(Section):
    every: Natural = Field(50, description="Steps between checkpoints; 0 = only at the end.")
    keep: Count = Field(2, description="How many of the newest stay on disk.")
    best: str | None = Field(
        None, description="Also keep the checkpoint that is best by this evaluation metric, e.g. eval/accuracy (max:) or min:eval/loss."
    )


class LogConfig(Section):
    samples_every: Natural = Field(10, description="Steps between tables of prompts, completions and rewards; 0 = never.")
    samples: Count = Field(4, description="Rows in such a table.")
    sinks: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = Field(
        [], description="Besides metrics.jsonl, which is always written."
    )
    project: str = Field("reinforge", description="Project name for wandb, mlflow and trackio.")


class RunConfig(Section):
    dir: str = Field(description="Everything the run writes goes here.")
    seed: int = Field(0, description="Every random draw of the run is a function of it.")
    resume: Literal["auto", "never", "must"] = Field(
        "auto", description="auto: continue from the newest checkpoint in dir if there is one. never: refuse a directory that has one."
    )
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()


class Config(Section):
    """One run: a model, an algorithm, data, and for RL the rewards."""

    model: ModelConfig
    adapter: AdapterConfig | None = None
    algorithm: AlgorithmConfig
    data: DataConfig
    rewards: list[RewardConfig] = []
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig
    eval: EvalConfig = EvalConfig()
    run: RunConfig

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        rl = self.algorithm.name != "sft"
        if rl and not self.rewards:
            raise ValueError(f"rewards: algorithm {self.algorithm.name} needs at least one reward")
        if rl and (self.rollout.top_p < 1 or self.rollout.top_k or self.rollout.min_p):
            raise ValueError(
                "rollout: top_p, top_k and min_p change the sampling distribution and would bias the policy gradient; "
                "set them under eval, or remove them"
            )
        if rl and self.algorithm.group_size == 1 and self.algorithm.compares_samples:
            raise ValueError("algorithm.group_size: a group of 1 has no spread, every advantage would be 0; use at least 2")
        return self
