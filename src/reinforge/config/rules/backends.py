"""Which backend trains what: `train.backend`, and `cluster.kind: ray` around any of them."""

from __future__ import annotations

from reinforge.config.cluster import RoleConfig
from reinforge.config.deepspeed import DeepSpeedConfig
from reinforge.config.optimizer import ELEMENTWISE, OptimizerConfig
from reinforge.config.rules.facts import best_tokens, moving, opposed, whole_distributions
from reinforge.config.rules.table import YES, Cell, Column, Feature, No, Rule, Table, Yes
from reinforge.config.sections import Sections


def _cells(
    *, local: Cell, fsdp: Cell, deepspeed: Cell, megatron: Cell, ray: Cell = YES
) -> dict[str, Cell]:
    return {"local": local, "fsdp": fsdp, "deepspeed": deepspeed, "megatron": megatron, "ray": ray}


def _only_fsdp(*, megatron: bool = False) -> dict[str, Cell]:
    others = "fsdp or megatron" if megatron else "fsdp"
    no = No("{backend} does not know it", f"set train.backend={others}, or leave it out")
    return _cells(local=no, fsdp=YES, deepspeed=no, megatron=YES if megatron else no)


def _optimizers(config: Sections) -> tuple[OptimizerConfig, ...]:
    """Of the policy, and of the critic where it has one of its own."""
    critic = config.critic.optimizer if config.critic is not None else None
    return (config.train.optimizer, *(() if critic is None else (critic,)))


def _offloads_optimizer(config: Sections) -> bool:
    return any(optimizer.offload for optimizer in _optimizers(config))


def _keeps_inputs_on_host(config: Sections) -> bool:
    critic = None if config.critic is None else config.critic.gradient_checkpointing
    return "host" in (config.model.gradient_checkpointing, critic)


def _sees_matrices(config: Sections) -> bool:
    """Whether an optimizer needs whole tensors, as far as is known."""
    return any(optimizer.name not in ELEMENTWISE for optimizer in _optimizers(config))


def _critic_lora_plus(config: Sections) -> bool:
    critic = config.critic.optimizer if config.critic is not None else None
    return critic is not None and critic.lora_plus is not None


def _own_critic(config: Sections) -> bool:
    """Whether there is a critic with weights of its own."""
    return config.critic is not None and not config.critic.shared


def _unread_zero(config: Sections) -> bool:
    """Whether somebody wrote a default of `train.deepspeed` for a backend that does not read it.
    Who names all keys has not: the configuration that a run keeps does.
    """
    section = config.train.deepspeed
    named = section.model_fields_set
    partly = 0 < len(named) < len(type(section).model_fields)
    return config.train.backend != "deepspeed" and partly and section == DeepSpeedConfig()


MOST_BALANCE = 1.0  # a coefficient of a balancing loss that may still be meant
NOT_BESIDE_AN_ADAPTER = (
    "an adapter leaves all weights of the model as they are",
    "choose its layers with adapter.targets, or train without an adapter",
)
CAUSAL_ONLY = "the backend megatron trains causal LMs only"
ONE_PROCESS = No("it is proved for one process", "set train.backend=local, or leave it out")
BESIDE_TRAINING = No(
    "the engine is in the one process that trains", "set train.backend=local, or leave it out"
)
FOUR_BITS = No(
    "it does not cut a base in 4 bits", "set train.backend to local or fsdp, or use lora"
)
WHOLE_MODULES = No(
    "a module and its original are not cut over several processes",
    "set train.backend=local, or leave it out",
)
WHOLE_WEIGHTS = No(
    "Megatron's layers train whole weights",
    "leave it out, or set train.backend=fsdp",
    key="adapter",
)
DENSE = No("Megatron's layers here are dense", "leave it out, or set train.backend=fsdp")
UNKNOWN_TO_MEGATRON = No(
    "the backend megatron does not know it", "leave it out, or set train.backend=fsdp"
)
FROZEN_ONLY = No(
    "this reference follows the weights, and {backend} has a frozen one only",
    "set train.backend=fsdp or local",
)
REFERENCE_IN_PARTS = No(
    "{algorithm} samples from its reference, which here is cut over several processes",
    "use the local backend, or online_dpo",
)
WHOLE_TENSORS = No("{backend} writes whole tensors", "leave it out")
FOR_RANKS = No(
    "it is for the native engine on the ranks of train.backend fsdp, deepspeed or megatron",
    "leave it out",
)
ONLY_DEEPSPEED = No(
    "only the backend deepspeed reads it", "set train.backend=deepspeed, or remove it"
)
WHOLE_MATRICES = No(
    "a rank has a part of each matrix, and this optimizer looks at whole ones",
    "use adamw or lion, or train.backend=local",
)
ONLY_ADAMW = No("{backend} updates with AdamW only", "use adamw, or train.backend=local or fsdp")
NOT_ON_HOST = No(
    "{backend} was never tried with it", "set it to true, or train.backend=local or fsdp"
)
NO_GROUPS = No("{backend} has one rate for all weights", "set train.backend=local or fsdp")

FEATURES = (
    Feature(
        "Several ranks",
        "train.ranks",
        lambda c: (c.train.ranks or 1) > 1,
        _cells(
            local=No(
                "the backend local is one process",
                "set train.backend=fsdp, deepspeed or megatron for {ranks}, or leave ranks out"
                " (train.ranks=null)",
            ),
            fsdp=YES,
            deepspeed=YES,
            megatron=YES,
        ),
    ),
    Feature(
        "Sequence parallel",
        "train.sequence_parallel",
        lambda c: c.train.sequence_parallel > 1,
        _only_fsdp(),
    ),
    Feature(
        "Tensor parallel",
        "train.tensor_parallel",
        lambda c: c.train.tensor_parallel > 1,
        _only_fsdp(megatron=True),
    ),
    Feature(
        "Weights in host memory",
        "train.offload_weights",
        lambda c: c.train.offload_weights,
        _only_fsdp(),
    ),
    Feature(
        "ZeRO stages",
        "train.deepspeed",
        lambda c: c.train.deepspeed != DeepSpeedConfig(),
        _cells(local=ONLY_DEEPSPEED, fsdp=ONLY_DEEPSPEED, deepspeed=YES, megatron=ONLY_DEEPSPEED),
    ),
    Feature(
        "Bit-identical log-probs",
        "model.exact",
        lambda c: c.model.exact,
        _cells(local=YES, fsdp=ONE_PROCESS, deepspeed=ONE_PROCESS, megatron=ONE_PROCESS),
    ),
    Feature(
        "Log-probs under a constraint",
        "rollout.structured",
        lambda c: c.rollout.structured is not None,
        _cells(local=YES, fsdp=ONE_PROCESS, deepspeed=ONE_PROCESS, megatron=ONE_PROCESS),
    ),
    Feature(
        "Biases of routers that follow the load",
        "train.router_bias_rate",
        lambda c: bool(c.train.router_bias_rate),
        _cells(local=YES, fsdp=YES, deepspeed=YES, megatron=DENSE),
    ),
    Feature(
        "Training with products in FP8",
        "train.precision",
        lambda c: c.train.precision == "fp8",
        _cells(local=YES, fsdp=ONE_PROCESS, deepspeed=ONE_PROCESS, megatron=ONE_PROCESS),
    ),
    Feature(
        "Compiled layers",
        "model.compile",
        lambda c: c.model.compile is True,
        _cells(
            local=YES,
            fsdp=YES,
            deepspeed=No(
                "DeepSpeed's hooks are in the way of a compiler",
                "set it to false, or train.backend=fsdp",
            ),
            megatron=No(
                "Megatron's layers are not compiled", "set it to false, or train.backend=fsdp"
            ),
        ),
    ),
    Feature(
        "LoRA, rsLoRA, DoRA",
        "adapter",
        lambda c: c.adapter is not None,
        _cells(local=YES, fsdp=YES, deepspeed=YES, megatron=WHOLE_WEIGHTS),
    ),
    Feature(
        "QLoRA (base in 4 bits)",
        "adapter.kind",
        lambda c: c.adapter is not None and c.adapter.kind == "qlora",
        _cells(local=YES, fsdp=YES, deepspeed=FOUR_BITS, megatron=WHOLE_WEIGHTS),
    ),
    Feature(
        "Modules trained whole beside an adapter",
        "adapter.modules_to_save",
        lambda c: c.adapter is not None and bool(c.adapter.modules_to_save),
        _cells(
            local=YES,
            fsdp=WHOLE_MODULES,
            deepspeed=WHOLE_MODULES,
            megatron=WHOLE_WEIGHTS,
        ),
    ),
    Feature(
        "Weights that stay as they are",
        "train.freeze",
        lambda c: bool(c.train.freeze or c.train.only),
        _cells(local=YES, fsdp=YES, deepspeed=YES, megatron=UNKNOWN_TO_MEGATRON),
    ),
    Feature(
        "Reward models",
        "algorithm.name",
        lambda c: c.algorithm.family == "reward",
        _cells(
            local=YES,
            fsdp=YES,
            deepspeed=YES,
            megatron=No(CAUSAL_ONLY, "set train.backend=fsdp for a reward model"),
        ),
    ),
    Feature(
        "A critic",
        "critic",
        lambda c: c.critic is not None,
        _cells(
            local=YES,
            fsdp=YES,
            deepspeed=YES,
            megatron=No(
                CAUSAL_ONLY,
                "set train.backend=fsdp, or use an algorithm without a critic",
            ),
        ),
    ),
    Feature(
        "A teacher",
        "teacher",
        lambda c: c.teacher is not None,
        _cells(
            local=YES,
            fsdp=YES,
            deepspeed=YES,
            megatron=No("distillation was not tried with Megatron", "set train.backend=fsdp"),
        ),
    ),
    Feature(
        "Moving average of the weights",
        "train.ema",
        lambda c: c.train.ema is not None,
        _cells(
            local=YES,
            fsdp=YES,
            deepspeed=No(
                "DeepSpeed keeps no average of its cut weights",
                "leave it out, or set train.backend=fsdp",
            ),
            megatron=UNKNOWN_TO_MEGATRON,
        ),
    ),
    Feature(
        "Noise on embeddings (NEFTune)",
        "train.neftune",
        lambda c: c.train.neftune is not None,
        _cells(local=YES, fsdp=YES, deepspeed=YES, megatron=UNKNOWN_TO_MEGATRON),
    ),
    Feature(
        "Optimizer in host memory",
        "train.optimizer.offload",
        _offloads_optimizer,
        _cells(
            local=YES,
            fsdp=YES,
            deepspeed=No(
                "DeepSpeed has a key of its own for it",
                "set train.deepspeed.offload_optimizer=cpu instead",
            ),
            megatron=No(
                "the backend megatron does not know it",
                "set train.backend=fsdp and train.offload_weights",
            ),
        ),
    ),
    Feature(
        "Inputs of layers in host memory",
        "model.gradient_checkpointing",
        _keeps_inputs_on_host,
        _cells(local=YES, fsdp=YES, deepspeed=NOT_ON_HOST, megatron=NOT_ON_HOST),
    ),
    Feature(
        "Lion",
        "train.optimizer.name",
        lambda c: any(optimizer.name == "lion" for optimizer in _optimizers(c)),
        _cells(local=YES, fsdp=YES, deepspeed=ONLY_ADAMW, megatron=ONLY_ADAMW),
    ),
    Feature(
        "Muon, Adafactor, an optimizer of your own",
        "train.optimizer.name",
        _sees_matrices,
        _cells(local=YES, fsdp=WHOLE_MATRICES, deepspeed=ONLY_ADAMW, megatron=ONLY_ADAMW),
    ),
    Feature(
        "Moments in 8 bits, split masters, gradients in bfloat16",
        "train.optimizer",
        lambda c: any(optimizer.compact for optimizer in _optimizers(c)),
        _cells(local=YES, fsdp=ONE_PROCESS, deepspeed=ONE_PROCESS, megatron=ONE_PROCESS),
    ),
    Feature(
        "Weights with rates and decays of their own",
        "train.optimizer.groups",
        lambda c: any(optimizer.groups for optimizer in _optimizers(c)),
        _cells(local=YES, fsdp=YES, deepspeed=NO_GROUPS, megatron=NO_GROUPS),
    ),
    Feature(
        "A reference that moves",
        "algorithm.kl.reference",
        moving,
        _cells(local=YES, fsdp=YES, deepspeed=FROZEN_ONLY, megatron=FROZEN_ONLY),
    ),
    Feature(
        "An opponent (self-play)",
        "train.backend",
        opposed,
        _cells(
            local=YES,
            fsdp=REFERENCE_IN_PARTS,
            deepspeed=REFERENCE_IN_PARTS,
            megatron=REFERENCE_IN_PARTS,
            ray=No(
                "{algorithm} samples from its reference, which is in an actor here",
                "set cluster.kind=local, or use online_dpo",
                key="cluster.kind",
            ),
        ),
    ),
    Feature(
        "Log-probs of the reference computed once",
        "train.precompute_reference",
        lambda c: c.train.precompute_reference,
        _cells(local=YES, fsdp=YES, deepspeed=YES, megatron=YES),
    ),
    Feature(
        "Every rank generates",
        "rollout.all_ranks",
        lambda c: c.rollout.all_ranks is True,
        _cells(
            local=FOR_RANKS,
            fsdp=YES,
            deepspeed=YES,
            megatron=YES,
            ray=Yes("Where the ranks are the engines, too: `cluster.layout: colocated`."),
        ),
    ),
    Feature(
        "Generating while a step trains, with a copy of the weights",
        "rollout.overlap",
        lambda c: c.rollout.overlap,
        _cells(
            local=YES,
            fsdp=BESIDE_TRAINING,
            deepspeed=BESIDE_TRAINING,
            megatron=BESIDE_TRAINING,
            ray=No(
                "it is for a run without actors",
                "leave it out; with cluster.layout=split engines have actors of their own",
            ),
        ),
    ),
    Feature(
        "Checkpoints in parts, one a rank",
        "run.checkpoint.sharded",
        lambda c: c.run.checkpoint.sharded is True,
        _cells(
            local=WHOLE_TENSORS,
            fsdp=YES,
            deepspeed=WHOLE_TENSORS,
            megatron=WHOLE_TENSORS,
            ray=Yes(
                "On ranks it is the default. The state of one actor travels to the controller."
            ),
        ),
    ),
)

RULES = (
    Rule(
        "rollout.all_ranks",
        lambda c: (
            c.rollout.all_ranks is True and c.cluster.kind == "ray" and c.cluster.layout == "split"
        ),
        "in a split layout engines have actors of their own, and ranks do not generate",
        "leave it out, or set cluster.layout=colocated",
    ),
    Rule(
        "train.tensor_parallel",
        lambda c: c.train.tensor_parallel > 1 and c.adapter is not None,
        "the matrices of an adapter are not cut",
        "set it to 1, or train all weights",
    ),
    Rule(
        "train.sequence_parallel",
        lambda c: c.train.sequence_parallel > 1 and c.teacher is not None,
        "a teacher's distributions are not split over ranks",
        "set it to 1",
    ),
    Rule(
        "cluster.reference",
        lambda c: c.cluster.reference.apart and moving(c),
        "this reference follows the weights, which are in the policy's actors",
        "remove it, or set algorithm.kl.reference.kind=frozen",
    ),
    Rule(
        "cluster.reference",
        lambda c: c.cluster.reference.apart and c.train.precompute_reference,
        "the log-probs of the reference are computed once, before the first step and by the policy"
        " itself, so there is no reference to place",
        "remove it, or set train.precompute_reference to false",
    ),
    Rule(
        "cluster.reference.ranks",
        lambda c: c.cluster.reference.ranks > 1 and c.train.backend == "local",
        "the policy is whole in one process, and its reference is to compute as it does",
        "leave it out, or set train.backend=fsdp",
    ),
    Rule(
        "cluster.critic",
        lambda c: c.cluster.critic != RoleConfig() and not _own_critic(c),
        "there is no critic with weights of its own, so there is none to place",
        "remove it, or use ppo with `critic: {}`",
    ),
    Rule(
        "cluster.reward",
        lambda c: (
            c.cluster.reward != RoleConfig() and all(reward.name != "model" for reward in c.rewards)
        ),
        "there is no reward `model`, so there is none to place",
        "remove it, or write e.g. `rewards: [{name: model, options: {path: org/name}}]`",
    ),
    Rule(
        "cluster.teacher",
        lambda c: c.cluster.teacher.apart and (c.teacher is None or not c.teacher.loaded()),
        "there is no teacher that is loaded, so there is none to place",
        "remove it, or write e.g. `teacher: {path: org/name}`",
    ),
    Rule(
        "cluster.teacher",
        lambda c: c.cluster.teacher.apart and whole_distributions(c),
        "{algorithm} compares the probabilities of all tokens, which do not travel between actors",
        "use opd, topk, or gkd or jsd with algorithm.options.k, or remove it",
    ),
    Rule(
        "cluster.teacher",
        lambda c: (
            c.cluster.teacher.apart
            and best_tokens(c)
            and c.teacher is not None
            and bool(c.teacher.also)
        ),
        "{algorithm} is told the best tokens of one teacher, and several have not the same",
        "name one teacher, or remove it",
    ),
    Rule(
        "cluster.teacher.ranks",
        lambda c: c.cluster.teacher.ranks > 1 and best_tokens(c),
        "a teacher that is cut tells the log-probs of given tokens, and {algorithm} asks for its"
        " best ones",
        "leave it out, or use opd",
    ),
    Rule(
        "train.precision",
        lambda c: c.train.precision == "fp8" and c.model.exact,
        "products in FP8 are added up in another order for another number of rows, so log-probs"
        " cannot be exact",
        "leave it out, or set model.exact to false",
    ),
    Rule(
        "train.precision",
        lambda c: (
            c.train.precision == "fp8" and c.adapter is not None and c.adapter.kind == "qlora"
        ),
        "a base in 4 bits is not multiplied in FP8",
        "leave it out, or set adapter.kind=lora",
    ),
    Rule(
        "adapter.dropout",
        lambda c: c.adapter is not None and c.adapter.dropout > 0 and c.model.exact,
        "exact log-probs are those of the engine, which has no dropout",
        "leave it out, or set model.exact to false",
    ),
    Rule(
        "adapter.dropout",
        lambda c: c.adapter is not None and c.adapter.dropout > 0 and c.model.compile is True,
        "it draws other numbers for every row, which compiled layers cannot",
        "leave it out, or set model.compile to false",
    ),
    Rule(
        "train.freeze",
        lambda c: bool(c.train.freeze) and c.adapter is not None,
        *NOT_BESIDE_AN_ADAPTER,
    ),
    Rule(
        "train.only",
        lambda c: bool(c.train.only) and c.adapter is not None,
        *NOT_BESIDE_AN_ADAPTER,
    ),
    Rule(
        "train.optimizer.masters",
        lambda c: c.train.optimizer.masters == "split" and c.adapter is not None,
        "an adapter is float32 and its own master",
        "leave it out, or train all weights",
    ),
    Rule(
        "train.optimizer.lora_plus",
        lambda c: c.train.optimizer.lora_plus is not None and c.adapter is None,
        "it is the rate of an adapter's matrices B, and there is no adapter",
        "remove it, or set adapter.rank=16",
    ),
    Rule(
        "critic.optimizer.lora_plus",
        _critic_lora_plus,
        "a critic has no adapter",
        "remove it",
    ),
)

DOUBTS = (
    Rule(
        "train.deepspeed",
        _unread_zero,
        "only the backend deepspeed reads it, and {backend} ignores it",
        "set train.backend=deepspeed, or remove it",
    ),
    Rule(
        "train.router_aux_loss",
        lambda c: (c.train.router_aux_loss or 0) > MOST_BALANCE,
        "a balancing loss is about as large as the number of experts for a token: so much of it"
        " outweighs what is to be learned",
        "set it to 0.001 to 0.01, as is usual",
    ),
)

BACKENDS = Table(
    "Backends",
    "Who trains: `train.backend`, and whether the workers are actors of Ray.",
    (
        Column("local", "`train.backend: local`", lambda c: c.train.backend == "local"),
        Column("fsdp", "`train.backend: fsdp`", lambda c: c.train.backend == "fsdp"),
        Column("deepspeed", "`train.backend: deepspeed`", lambda c: c.train.backend == "deepspeed"),
        Column("megatron", "`train.backend: megatron`", lambda c: c.train.backend == "megatron"),
        Column("ray", "`cluster.kind: ray`, with any of them", lambda c: c.cluster.kind == "ray"),
    ),
    FEATURES,
    RULES,
)
