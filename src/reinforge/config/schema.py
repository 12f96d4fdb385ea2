"""The whole configuration as frozen models.

Defaults are what we would choose; `None` means "the algorithm's own".

Unknown keys are refused. Every field has a description: the reference page and the JSON schema are
made from here.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, FiniteFloat, model_validator

from reinforge.config.agent import AgentConfig
from reinforge.config.ahead import check_ahead
from reinforge.config.algorithm import AlgorithmConfig
from reinforge.config.base import Count, Fraction, Natural, NonNegative, Positive, Section
from reinforge.config.cluster import ClusterConfig
from reinforge.config.deepspeed import DeepSpeedConfig, check_deepspeed
from reinforge.config.engine import EngineConfig, check_engine
from reinforge.config.env import EnvConfig
from reinforge.config.families import ONLINE, OPPOSED
from reinforge.config.megatron import check_megatron
from reinforge.config.mixture import MixtureConfig
from reinforge.config.parallel import (
    BackendName,
    ParallelConfig,
    ShardedConfig,
    check_parallel,
    check_ranks,
)
from reinforge.config.rewards import RewardConfig as RewardConfig
from reinforge.config.rollout import RolloutConfig as RolloutConfig
from reinforge.config.sampling import SamplingConfig
from reinforge.config.teacher import OtherTeacherConfig as OtherTeacherConfig
from reinforge.config.teacher import TeacherConfig


class ModelConfig(Section):
    path: str = Field(description="Hub id, local directory, or .gguf file.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description=(
            "Precision of the module. auto: bfloat16 on a GPU, float32 on a CPU. bfloat16 always"
            " keeps float32 master weights."
        ),
    )
    device: str = Field(
        "auto", description="auto, cpu, cuda or cuda:N. auto: the first GPU if there is one."
    )
    revision: str | None = Field(None, description="Hub revision (commit, tag or branch).")
    tokenizer: str | None = Field(
        None, description="Take the tokenizer from here instead of from path."
    )
    trust_remote_code: bool = Field(
        False,
        description=(
            "Run Python code that the directories of path and tokenizer bring along, with all your"
            " rights. Only if you have read it."
        ),
    )
    chat_template: str | None = Field(
        None, description="A jinja file that replaces the tokenizer's chat template."
    )
    compile: bool = Field(
        False,
        description=(
            "torch.compile the layers on a GPU: faster steps after half a minute of compiling. Pays"
            " for long runs."
        ),
    )
    gradient_checkpointing: bool = Field(
        False,
        description=(
            "Recompute activations in the backward pass: less memory, about a third more time."
        ),
    )
    exact: bool = Field(
        False,
        description=(
            "Log-probs of sampling and training are bit-identical: no mismatch, nothing to correct."
            " Slower: see benchmarks/exact_cost.py."
        ),
    )

    @model_validator(mode="after")
    def _exact_is_not_compiled(self) -> ModelConfig:
        if self.exact and self.compile:
            raise ValueError(
                "model.exact: compiled layers may add up in another order for another number of"
                " tokens; set model.compile to false"
            )
        return self


class AdapterConfig(Section):
    kind: Literal["lora", "rslora", "dora", "qlora"] = Field(
        "lora",
        description=(
            "lora. rslora: scaled by alpha / sqrt(rank). dora: direction and length apart. qlora:"
            " lora on a base in 4 bits (NF4; needs bitsandbytes)."
        ),
    )
    rank: Count = Field(16, description="Rank of the two factors.")
    alpha: Positive | None = Field(
        None, description="Scale is alpha / rank (rslora: / sqrt(rank)); default 2 x rank."
    )
    targets: Literal["all-linear"] | list[str] = Field(
        "all-linear", description="Module names to adapt."
    )
    path: str | None = Field(None, description="Continue from this saved adapter.")


class EvalDataConfig(Section):
    source: str | None = Field(
        None,
        description="Default: the training source (rows are then split off and never trained on).",
    )
    size: Natural = Field(
        0, description="Held-out rows; 0 = all of `source`, or none when there is no source."
    )
    options: dict[str, Any] = Field(
        {}, description="Options of the source; default: those of the training source."
    )
    where: dict[str, Any] = Field(
        {}, description="Keep only rows whose columns equal these values."
    )
    fixed: dict[str, str | int | float] = Field(
        {}, description="As data.fixed, for evaluation rows: the attributes that are wanted."
    )


class DataConfig(Section):
    source: str = Field(
        description=(
            "A .jsonl/.json/.parquet/.csv file, a hub data set id, `reasoning_gym:<task>`,"
            " `arithmetic:<kind>`, `games:<name>`, or `mixture`."
        )
    )
    mixture: list[MixtureConfig] = Field(
        [], description="With source `mixture`: the sources that are mixed, by their weights."
    )
    split: str = Field("train", description="Split of a hub data set.")
    options: dict[str, Any] = Field(
        {}, description="Options of the source (reasoning_gym: the task's own, plus seed and size)."
    )
    columns: dict[str, str] = Field(
        {}, description="Our name: their name, e.g. {prompt: question, answer: solution}."
    )
    where: dict[str, Any] = Field(
        {}, description="Keep only rows whose columns equal these values."
    )
    system: str | None = Field(None, description="System message put before every prompt.")
    template: str | None = Field(
        None,
        description=(
            "Prompt text with {column} places, e.g. 'Q: {question}\\nA:'. Rounded: {score:.1f}."
        ),
    )
    fixed: dict[str, str | int | float] = Field(
        {},
        description=(
            "Columns with the same value in every row, e.g. {quality: 4}: what the template is to"
            " ask for (SteerLM)."
        ),
    )
    chat: Literal["auto", "always", "never"] = Field(
        "auto", description="Render prompts with the chat template. auto: if the tokenizer has one."
    )
    loss_on: Literal["assistant", "completion", "all"] = Field(
        "assistant", description="SFT: which tokens are trained."
    )
    length: Literal["drop", "truncate", "error"] = Field(
        "drop", description="What to do with rows longer than max_length."
    )
    max_length: Count | None = Field(
        None,
        description=(
            "Longest row in tokens (RL: prompt). Default: what the model and rollout.max_new_tokens"
            " leave."
        ),
    )
    shuffle: bool = Field(
        True, description="Visit rows in a new order every epoch, a function of run.seed."
    )
    limit: Count | None = Field(None, description="Use only the first this many rows.")
    eval: EvalDataConfig = EvalDataConfig()

    @model_validator(mode="after")
    def _mixture(self) -> DataConfig:
        if (self.source == "mixture") != bool(self.mixture):
            raise ValueError(
                "data.mixture: write `source: mixture` and list the sources under mixture; one"
                " without the other means nothing"
            )
        names = [item.name or item.source for item in self.mixture]
        if len(set(names)) < len(names):
            raise ValueError(
                "data.mixture: two sources have the same name; give them different ones with `name`"
            )
        return self


class ScheduleConfig(Section):
    kind: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Shape after the warm-up."
    )
    warmup: Natural = Field(
        0,
        description=(
            "Optimizer steps (in RL epochs x minibatches of them per step) of linear warm-up: the"
            " first has rate / warmup, number `warmup` the whole. transformers and TRL begin at 0,"
            " so that their first step changes nothing."
        ),
    )
    floor: Fraction = Field(0.0, description="The schedule ends at floor x learning_rate.")


class OptimizerConfig(Section):
    betas: tuple[Fraction, Fraction] = Field(
        (0.9, 0.999), description="Decay of AdamW's two moments."
    )
    eps: Positive = Field(1e-8, description="Added to the root of the second moment.")
    weight_decay: NonNegative = Field(
        0.0, description="Decoupled: times learning_rate, not in the gradient."
    )
    offload: bool = Field(
        False,
        description=(
            "Keep master weights and moments in host memory and update there: 12 bytes per weight"
            " less on the GPU, slower steps."
        ),
    )


class TrainConfig(ParallelConfig):
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
    learning_rate: NonNegative = Field(1e-5, description="Of AdamW, at the top of the schedule.")
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

    @model_validator(mode="after")
    def _duration(self) -> TrainConfig:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of train.steps and train.epochs")
        check_ranks(self)
        return self


class CriticConfig(Section):
    """The value model of algorithms whose advantage needs one (ppo, vapo, or `advantage: gae`)."""

    path: str | None = Field(
        None,
        description=(
            "A causal LM or sequence classifier to start from. Default: the policy's checkpoint. A"
            " causal LM gets a head that starts at 0."
        ),
    )
    shared: bool = Field(
        False,
        description=(
            "A value head on the policy's own trunk instead of a second model: half the memory, one"
            " optimizer."
        ),
    )
    coefficient: Positive | None = Field(
        None, description="shared: weight of the value loss beside the policy's; default 0.5."
    )
    clip: Positive | None = Field(
        0.2,
        description=(
            "The value loss does not reward moving further than this from the old value, in units"
            " of reward. null: no clipping."
        ),
    )
    warmup: Natural = Field(
        0, description="Steps at the start in which only the critic is trained."
    )
    learning_rate: NonNegative | None = Field(
        None, description="Of the critic; default: train.learning_rate."
    )
    schedule: ScheduleConfig | None = Field(
        None, description="Of the critic's learning rate; default: train.schedule."
    )
    optimizer: OptimizerConfig | None = Field(
        None, description="Of the critic; default: train.optimizer."
    )
    gradient_checkpointing: bool | None = Field(
        None, description="Of the critic; default: model.gradient_checkpointing."
    )

    @model_validator(mode="after")
    def _useful(self) -> CriticConfig:
        own = [
            n
            for n in ("path", "learning_rate", "schedule", "optimizer", "gradient_checkpointing")
            if getattr(self, n) is not None
        ]
        if self.shared and (own or self.warmup):
            raise ValueError(
                f"{(own or ['warmup'])[0]}: a shared critic is trained with the policy and has none"
                " of its own; leave it out"
            )
        if not self.shared and self.coefficient is not None:
            raise ValueError(
                "coefficient: only a shared critic has one; a critic of its own has learning_rate"
            )
        return self


class EarlyStopConfig(Section):
    metric: str = Field("eval/accuracy", description="An evaluation metric.")
    mode: Literal["max", "min"] = Field(
        "max", description="Whether more or less of the metric is better."
    )
    patience: Count = Field(3, description="Evaluations without improvement before the run stops.")
    threshold: FiniteFloat | None = Field(
        None, description="Also stop as soon as the metric reaches this."
    )


class EvalConfig(Section):
    every: Natural = Field(
        0,
        description=(
            "Steps between evaluations; 0 = only at the start and the end. Needs data.eval."
        ),
    )
    at_start: bool = Field(True, description="Also evaluate before the first step.")
    temperature: NonNegative = Field(0.0, description="0 = greedy.")
    top_p: Fraction = Field(1.0, description="Nucleus of the evaluation's sampling.")
    samples: Count = Field(1, description="Completions per held-out prompt.")
    max_new_tokens: Count | None = Field(None, description="Default: rollout.max_new_tokens.")
    early_stop: EarlyStopConfig | None = None


class CheckpointConfig(ShardedConfig):
    every: Natural = Field(50, description="Steps between checkpoints; 0 = only at the end.")
    keep: Count = Field(2, description="How many of the newest stay on disk.")
    best: str | None = Field(
        None,
        description=(
            "Also keep the checkpoint that is best by this evaluation metric, e.g. eval/accuracy"
            " (max:) or min:eval/loss."
        ),
    )


class LogConfig(Section):
    samples_every: Natural = Field(
        10, description="Steps between tables of prompts, completions and rewards; 0 = never."
    )
    samples: Count = Field(4, description="Rows in such a table.")
    sinks: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = Field(
        [], description="Besides metrics.jsonl, which is always written."
    )
    project: str = Field("reinforge", description="Project name for wandb, mlflow and trackio.")


class RunConfig(Section):
    dir: str = Field(description="Everything the run writes goes here.")
    seed: int = Field(0, description="Every random draw of the run is a function of it.")
    resume: Literal["auto", "never", "must"] = Field(
        "auto",
        description=(
            "auto: continue from the newest checkpoint in dir if there is one. never: refuse a"
            " directory that has one."
        ),
    )
    max_seconds: Positive | None = Field(
        None,
        description=(
            "End the run after this many seconds of training, evaluations and checkpoints not"
            " counted."
        ),
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
    env: EnvConfig | None = None
    agent: AgentConfig | None = None
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    sampling: SamplingConfig = SamplingConfig()
    train: TrainConfig
    critic: CriticConfig | None = None
    teacher: TeacherConfig | None = None
    eval: EvalConfig = EvalConfig()
    cluster: ClusterConfig = ClusterConfig()
    run: RunConfig

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        rl = self.algorithm.rl
        if (
            self.algorithm.wants_rewards
            and not self.rewards
            and self.env is None
            and self.agent is None
        ):
            raise ValueError(
                f"rewards: algorithm {self.algorithm.name} needs at least one reward, an"
                " environment (env) or an agent"
            )
        if self.agent is not None and (self.env is not None or not rl):
            raise ValueError(
                "agent: not beside env"
                if rl
                else f"agent: {self.algorithm.name} samples nothing; remove it"
            )
        if rl and (self.rollout.top_p < 1 or self.rollout.top_k or self.rollout.min_p):
            raise ValueError(
                "rollout: top_p, top_k and min_p change the sampling distribution and would bias"
                " the policy gradient; set them under eval, or remove them"
            )
        if rl and self.algorithm.group_size == 1 and self.algorithm.compares_samples:
            what = (
                "every advantage would be 0"
                if self.algorithm.family == "policy_gradient"
                else "there is nothing to compare"
            )
            raise ValueError(
                f"algorithm.group_size: a group of 1 has no spread, {what}; use at least 2"
            )
        check_parallel(self)
        check_deepspeed(self)
        check_megatron(self)
        check_engine(self)
        self._check_family()
        self._check_online()
        self._check_sampling(rl)
        check_ahead(self)
        self._check_critic()
        return self

    def _check_family(self) -> None:
        """Keys that mean nothing to the algorithm's family are refused: they would be ignored."""
        algorithm = self.algorithm
        if foreign := algorithm.foreign_keys():
            hint = (
                "; the KL to a reference is algorithm.kl.coefficient"
                if foreign[0] == "beta"
                else ""
            )
            raise ValueError(
                f"algorithm.{foreign[0]}: {algorithm.name} ({algorithm.family}) does not read it;"
                f" remove it{hint}"
            )
        precomputed = self.train.precompute_reference
        if precomputed and (
            algorithm.family != "preference"
            or algorithm.kl.reference.kind != "frozen"
            or algorithm.name in ONLINE
        ):
            changing = algorithm.name in ONLINE
            why = (
                "compares with answers that change with the batch"
                if changing
                else "has no frozen reference"
            )
            raise ValueError(f"train.precompute_reference: {algorithm.name} {why}; remove it")
        if (algorithm.family == "distillation") != (self.teacher is not None):
            raise ValueError(
                f"teacher: {algorithm.name} "
                + (
                    "imitates nobody; remove the section"
                    if self.teacher
                    else "needs one; write e.g. `teacher: {path: org/name}`"
                )
            )
        if (
            self.teacher is not None
            and self.teacher.precompute
            and (algorithm.name != "topk" or self.teacher.also)
        ):
            raise ValueError(
                "teacher.precompute: a whole distribution per token does not fit a disk; use"
                " algorithm topk with one teacher"
            )
        if self.train.neftune is not None and algorithm.family != "supervised":
            raise ValueError(
                f"train.neftune: noise is for supervised fine-tuning, not for {algorithm.name};"
                " remove it"
            )
        if self.train.router_aux_loss and algorithm.family == "reward":
            raise ValueError(
                "train.router_aux_loss: a reward model has no load-balancing loss; remove it"
            )
        if algorithm.family in ("preference", "reward") and self.data.loss_on == "all":
            raise ValueError(
                f"data.loss_on: {algorithm.name} needs to know which tokens are the answer; use"
                " assistant or completion"
            )
        if algorithm.family == "reward" and self.rewards:
            raise ValueError("rewards: a reward model generates nothing; remove the section")
        if (
            algorithm.family == "reward"
            and self.adapter is not None
            and (self.adapter.kind == "qlora" or self.adapter.path)
        ):
            key = "kind: qlora" if self.adapter.kind == "qlora" else "path"
            raise ValueError(
                f"adapter.{key}: a reward model is trained with a fresh lora, rslora or dora, or"
                " whole"
            )

    def _check_online(self) -> None:
        """Preferences over what is sampled."""
        algorithm = self.algorithm
        if algorithm.name in OPPOSED and algorithm.group_size % 2:
            raise ValueError(
                f"algorithm.group_size: half of the answers are the opponent's in {algorithm.name};"
                " use an even number"
            )
        if algorithm.name in (*OPPOSED, "spin") and self.env is not None:
            raise ValueError(
                f"env: {algorithm.name} answers prompts with an opponent's words too, in one turn;"
                " use online_dpo"
            )
        if algorithm.name in ONLINE and self.sampling.replay is not None:
            raise ValueError(
                f"sampling.replay: {algorithm.name} trains on fresh answers only; remove it"
            )
        if algorithm.name in ONLINE and self.critic is not None:
            raise ValueError(f"critic: {algorithm.name} reads no values; remove the section")

    def _check_critic(self) -> None:
        algorithm = self.algorithm
        critic = self.critic
        if algorithm.needs_critic and critic is None:
            raise ValueError(
                f"critic: {algorithm.advantage or algorithm.name} needs the values of a critic; "
                "add `critic: {}` for one that starts from the policy's checkpoint"
            )
        if critic is None:
            return
        if not algorithm.may_have_critic:
            raise ValueError(
                f"critic: {algorithm.name} with this advantage reads no values; remove the section,"
                " or set algorithm.advantage: gae"
            )
        if self.train.steps is not None and critic.warmup >= self.train.steps:
            raise ValueError(
                f"critic.warmup: {critic.warmup} of {self.train.steps} steps leave none to train"
                " the policy; lower it"
            )

    def _check_sampling(self, rl: bool) -> None:
        """What the section `sampling` asks of the others."""
        if not rl and (
            self.sampling != SamplingConfig(curriculum=self.sampling.curriculum)
            or self.sampling.tracks
        ):
            raise ValueError(
                f"sampling: {self.algorithm.name} samples nothing; a curriculum by column or length"
                " is all that it can have"
            )
        replay = self.sampling.replay
        algorithm = self.algorithm
        if replay is None:
            return
        if replay.share * self.train.prompts_per_step < 1:
            raise ValueError(
                f"sampling.replay.share: {replay.share} of {self.train.prompts_per_step} prompts is"
                " less than one group; raise it"
            )
        if algorithm.correction.name == "none" and (
            algorithm.surrogate == "reinforce" or algorithm.old == "recompute"
        ):
            why = (
                "the surrogate reinforce has no ratio"
                if algorithm.surrogate == "reinforce"
                else "algorithm.old: recompute leaves behaviour out"
            )
            raise ValueError(
                f"sampling.replay: replayed groups are off-policy and {why}; set"
                " algorithm.correction.name, e.g. to tis"
            )
