"""Which kind of algorithm reads which settings: a key that nobody reads is refused, because it
would be ignored in silence.
"""

from __future__ import annotations

from collections.abc import Iterator

from reinforge.config.rules.facts import (
    best_tokens,
    moving,
    opposed,
    samples,
    served_teacher,
    uncorrected,
    whole_distributions,
)
from reinforge.config.rules.table import YES, Cell, Column, Feature, No, Problem, Rule, Table
from reinforge.config.sampling import SamplingConfig
from reinforge.config.sections import Sections
from reinforge.config.teacher import OneTeacherConfig


def _cells(
    *,
    policy: Cell = YES,
    supervised: Cell = YES,
    preference: Cell = YES,
    online: Cell = YES,
    reward: Cell = YES,
    distillation: Cell = YES,
    on_policy: Cell = YES,
) -> dict[str, Cell]:
    return {
        "policy gradient": policy,
        "supervised": supervised,
        "preference": preference,
        "online preference": online,
        "reward model": reward,
        "distillation": distillation,
        "on-policy distillation": on_policy,
    }


def _where_sampled(no: No, *, online: Cell = YES) -> dict[str, Cell]:
    """For algorithms whose policy samples what it is trained on."""
    return _cells(supervised=no, preference=no, online=online, reward=no, distillation=no)


def _column(name: str, family: str, *, sampled: bool, setting: str) -> Column:
    return Column(
        name,
        setting,
        lambda c: c.algorithm.family == family and samples(c) == sampled,
    )


SAMPLES_NOTHING = No(
    "{algorithm} samples nothing",
    "a curriculum by column or length is all that it can have",
    key="sampling",
)
FREE_ANSWERS = No(
    "a constraint on what is trained is for policy gradients, and {algorithm} is none",
    "set it under eval, or remove it",
)
NO_VALUES = No("{algorithm} reads no values", "remove the section")
NOT_IMITATED = No("{algorithm} imitates nobody", "remove the section")
NO_NOISE = No("noise is for supervised fine-tuning, not for {algorithm}", "remove it")
WHICH_TOKENS = No(
    "{algorithm} needs to know which tokens are the answer", "use assistant or completion"
)
NO_BLOCKS = No("{algorithm} does not train whole texts", "remove it, or use sft")
SAMPLED_WITHOUT = No(
    "answers are sampled without dropout, and {algorithm} would take what dropout changes for what"
    " it has learned",
    "leave it out",
)
FRESH_ADAPTER = No(
    "a reward model is trained with a fresh lora, rslora or dora, or whole",
    "use one of them, or leave the adapter out",
)
NO_FROZEN_REFERENCE = No("{algorithm} has no frozen reference", "remove it")

FEATURES = (
    Feature(
        "Rewards",
        "rewards",
        lambda c: bool(c.rewards),
        _cells(reward=No("a reward model generates nothing", "remove the section")),
    ),
    Feature(
        "An agent",
        "agent",
        lambda c: c.agent is not None,
        _where_sampled(No("{algorithm} samples nothing", "remove it")),
    ),
    Feature(
        "A teacher",
        "teacher",
        lambda c: c.teacher is not None,
        _cells(
            policy=NOT_IMITATED,
            supervised=NOT_IMITATED,
            preference=NOT_IMITATED,
            online=NOT_IMITATED,
            reward=NOT_IMITATED,
        ),
    ),
    Feature(
        "Pre-training text beside it (PTX)",
        "ptx",
        lambda c: c.ptx is not None,
        _cells(reward=No("a reward model predicts no tokens", "remove the section")),
    ),
    Feature(
        "Log-probs of the reference computed once",
        "train.precompute_reference",
        lambda c: c.train.precompute_reference,
        _cells(
            policy=NO_FROZEN_REFERENCE,
            supervised=NO_FROZEN_REFERENCE,
            online=No("{algorithm} compares with answers that change with the batch", "remove it"),
            reward=NO_FROZEN_REFERENCE,
            distillation=NO_FROZEN_REFERENCE,
            on_policy=NO_FROZEN_REFERENCE,
        ),
    ),
    Feature(
        "Noise on embeddings (NEFTune)",
        "train.neftune",
        lambda c: c.train.neftune is not None,
        _cells(
            policy=NO_NOISE,
            preference=NO_NOISE,
            online=NO_NOISE,
            reward=NO_NOISE,
            distillation=NO_NOISE,
            on_policy=NO_NOISE,
        ),
    ),
    Feature(
        "Load-balancing loss of a mixture of experts",
        "train.router_aux_loss",
        lambda c: bool(c.train.router_aux_loss),
        _cells(reward=No("a reward model has no load-balancing loss", "remove it")),
    ),
    Feature(
        "Loss of a router's logits",
        "train.router_z_loss",
        lambda c: bool(c.train.router_z_loss),
        _cells(reward=No("a reward model has no loss of its routers", "remove it")),
    ),
    Feature(
        "Biases of routers that follow the load",
        "train.router_bias_rate",
        lambda c: bool(c.train.router_bias_rate),
        _cells(reward=No("a reward model's routers stay as they are", "remove it")),
    ),
    Feature(
        "The experts of the sampled tokens (router replay)",
        "train.router_replay",
        lambda c: c.train.router_replay != "off",
        _where_sampled(
            No("{algorithm} samples nothing whose experts could be kept", "remove it"),
        ),
    ),
    Feature(
        "Loss on all tokens of a row",
        "data.loss_on",
        lambda c: c.data.loss_on == "all",
        _cells(preference=WHICH_TOKENS, online=WHICH_TOKENS, reward=WHICH_TOKENS),
    ),
    Feature(
        "Attributes in the prompt",
        "data.attributes",
        lambda c: c.data.attributes is not None,
        _cells(reward=No("a reward model would read the grades that it is to give", "remove it")),
    ),
    Feature(
        "Whole texts in blocks",
        "data.blocks",
        lambda c: c.data.blocks,
        _cells(
            policy=NO_BLOCKS,
            preference=NO_BLOCKS,
            online=NO_BLOCKS,
            reward=NO_BLOCKS,
            distillation=NO_BLOCKS,
            on_policy=NO_BLOCKS,
        ),
    ),
    Feature(
        "Dropout in an adapter",
        "adapter.dropout",
        lambda c: c.adapter is not None and c.adapter.dropout > 0,
        _cells(policy=SAMPLED_WITHOUT),
    ),
    Feature(
        "QLoRA (base in 4 bits)",
        "adapter.kind",
        lambda c: c.adapter is not None and c.adapter.kind == "qlora",
        _cells(reward=FRESH_ADAPTER),
    ),
    Feature(
        "A saved adapter to continue from",
        "adapter.path",
        lambda c: c.adapter is not None and bool(c.adapter.path),
        _cells(reward=FRESH_ADAPTER),
    ),
    Feature(
        "Replay of old groups",
        "sampling.replay",
        lambda c: c.sampling.replay is not None,
        _where_sampled(
            SAMPLES_NOTHING,
            online=No("{algorithm} trains on fresh answers only", "remove it"),
        ),
    ),
    Feature(
        "Pass rates, preferred prompts, over-provision",
        "sampling",
        lambda c: (
            c.sampling.tracks
            or c.sampling
            != SamplingConfig(curriculum=c.sampling.curriculum, replay=c.sampling.replay)
        ),
        _where_sampled(SAMPLES_NOTHING),
    ),
    Feature(
        "Training on answers of a given form",
        "rollout.structured",
        lambda c: c.rollout.structured is not None,
        _cells(
            supervised=FREE_ANSWERS,
            preference=FREE_ANSWERS,
            online=FREE_ANSWERS,
            reward=FREE_ANSWERS,
            distillation=FREE_ANSWERS,
            on_policy=FREE_ANSWERS,
        ),
    ),
    Feature(
        "A critic",
        "critic",
        lambda c: c.critic is not None,
        _where_sampled(NO_VALUES, online=NO_VALUES),
    ),
)


def _one_sample_teaches_nothing(config: Sections) -> bool:
    algorithm = config.algorithm
    return samples(config) and algorithm.group_size == 1 and algorithm.compares_samples


def _has_turns(config: Sections) -> bool:
    return config.env is not None or config.agent is not None


def _unclear(one: OneTeacherConfig) -> bool:
    return (one.path is None) == (one.server is None)


def _several_of_best(config: Sections) -> bool:
    """Whether servers are asked for their best tokens, which are not the same tokens."""
    return served_teacher(config) and best_tokens(config)


def _temperature(config: Sections) -> float:
    """At which the teacher's log-probs are wanted."""
    if "advantage" in config.algorithm.spec.parts:
        return config.rollout.temperature
    return float(config.algorithm.options.get("temperature", 1))


RULES = (
    Rule(
        "rewards",
        lambda c: (
            c.algorithm.kind.wants_rewards and not c.rewards and c.env is None and c.agent is None
        ),
        "{algorithm} needs at least one reward, an environment (env) or an agent",
        "add one",
    ),
    Rule(
        "agent", lambda c: c.agent is not None and c.env is not None, "not beside env", "remove one"
    ),
    Rule(
        "rollout",
        lambda c: samples(c) and bool(c.rollout.top_p < 1 or c.rollout.top_k or c.rollout.min_p),
        "top_p, top_k and min_p change the sampling distribution and would bias the policy"
        " gradient",
        "set them under eval, or remove them",
    ),
    Rule(
        "rollout.structured",
        lambda c: c.rollout.structured is not None and _has_turns(c),
        "it is the form of one answer, and an episode has many turns",
        "remove it, or the section env or agent",
    ),
    Rule(
        "eval.structured",
        lambda c: c.eval.structured is not None and _has_turns(c),
        "it is the form of one answer, and an episode has many turns",
        "remove it, or the section env or agent",
    ),
    Rule(
        "eval.benchmarks",
        lambda c: bool(c.eval.benchmarks) and c.algorithm.family == "reward",
        "a reward model writes no answers",
        "remove it",
    ),
    Rule(
        "eval.benchmarks",
        lambda c: len({b.task for b in c.eval.benchmarks}) < len(c.eval.benchmarks),
        "a task stands there twice, and its metrics have one name",
        "remove one",
    ),
    Rule(
        "algorithm.group_size",
        lambda c: _one_sample_teaches_nothing(c) and c.algorithm.family == "policy_gradient",
        "a group of 1 has no spread, every advantage would be 0",
        "use at least 2",
    ),
    Rule(
        "algorithm.group_size",
        lambda c: _one_sample_teaches_nothing(c) and c.algorithm.family != "policy_gradient",
        "a group of 1 has no spread, there is nothing to compare",
        "use at least 2",
    ),
    Rule(
        "algorithm.group_size",
        lambda c: c.algorithm.kind.opponent == "half" and c.algorithm.group_size % 2 == 1,
        "half of the answers are the opponent's in {algorithm}",
        "use an even number",
    ),
    Rule(
        "env",
        lambda c: opposed(c) and c.env is not None,
        "{algorithm} answers prompts with an opponent's words too, in one turn",
        "use online_dpo",
    ),
    Rule(
        "train.precompute_reference",
        lambda c: c.train.precompute_reference and c.algorithm.family == "preference" and moving(c),
        "{algorithm} has no frozen reference",
        "remove it",
    ),
    Rule(
        "ptx",
        lambda c: c.ptx is not None and samples(c) and c.rollout.temperature != 1,
        "the trainer computes log-probs at rollout.temperature, and text is predicted at 1",
        "set rollout.temperature to 1, or remove the section",
    ),
    Rule(
        "teacher",
        lambda c: c.teacher is None and c.algorithm.family == "distillation",
        "{algorithm} needs one",
        "write e.g. `teacher: {path: org/name}`",
    ),
    Rule(
        "teacher.precompute",
        lambda c: (
            c.teacher is not None
            and c.teacher.precompute
            and (not best_tokens(c) or samples(c) or bool(c.teacher.also or c.teacher.domains))
        ),
        "a whole distribution per token does not fit a disk; the best tokens of one teacher on"
        " given text do",
        "use algorithm topk with one teacher",
    ),
    Rule(
        "teacher",
        lambda c: c.teacher is not None and any(_unclear(one) for _, one in c.teacher.teachers()),
        "a teacher is a path or a server, one of them",
        "write e.g. `teacher: {path: org/name}` or `teacher: {server: {url: http://host:8000/v1}}`",
    ),
    Rule(
        "teacher.domains",
        lambda c: (
            c.teacher is not None
            and bool(c.teacher.domains)
            and (bool(c.teacher.also) or c.teacher.weight != 1 or not _unclear(c.teacher))
        ),
        "every domain has one teacher, and no other teacher is asked",
        "remove path, server, weight and also of the section teacher",
    ),
    Rule(
        "teacher.domains",
        lambda c: (
            c.teacher is not None and bool(c.teacher.domains) and c.algorithm.spec.other_tokens
        ),
        "{algorithm} reads texts with the tokenizer of one teacher",
        "name one teacher, or use an algorithm for the student's tokenizer",
    ),
    Rule(
        "teacher.also",
        lambda c: (
            c.teacher is not None
            and bool(c.teacher.also)
            and (c.algorithm.spec.other_tokens or _several_of_best(c))
        ),
        "{algorithm} compares with one teacher",
        "remove it",
    ),
    Rule(
        "teacher.server",
        lambda c: served_teacher(c) and whole_distributions(c),
        "{algorithm} compares the probabilities of all tokens, and a server tells a few",
        "use opd, topk, or gkd or jsd with algorithm.options.k, or give the teacher's path",
    ),
    Rule(
        "teacher.server",
        lambda c: served_teacher(c) and _temperature(c) != 1,
        "a server tells log-probs at temperature 1, and {algorithm} is asked for another",
        "set rollout.temperature and algorithm.options.temperature to 1, or give the teacher's"
        " path",
    ),
    Rule(
        "sampling.replay.share",
        lambda c: (
            samples(c)
            and c.sampling.replay is not None
            and c.sampling.replay.share * c.train.prompts_per_step < 1
        ),
        "{share} of {prompts} prompts is less than one group",
        "raise it",
    ),
    Rule(
        "sampling.replay",
        lambda c: c.sampling.replay is not None and uncorrected(c) and not c.algorithm.has_ratio,
        "replayed groups are off-policy and the surrogate {surrogate} has no ratio",
        "set algorithm.correction.name, e.g. to tis",
    ),
    Rule(
        "sampling.replay",
        lambda c: c.sampling.replay is not None and uncorrected(c) and c.algorithm.has_ratio,
        "replayed groups are off-policy and algorithm.old: recompute leaves behaviour out",
        "set algorithm.correction.name, e.g. to tis",
    ),
    Rule(
        "critic",
        lambda c: c.critic is None and c.algorithm.needs_critic,
        "{advantage} needs the values of a critic",
        "add `critic: {}` for one that starts from the policy's checkpoint",
    ),
    Rule(
        "critic",
        lambda c: (
            c.critic is not None
            and samples(c)
            and not c.algorithm.kind.online
            and not c.algorithm.may_have_critic
        ),
        "{algorithm} with this advantage reads no values",
        "remove the section, or set algorithm.advantage: gae",
    ),
    Rule(
        "critic.warmup",
        lambda c: (
            c.critic is not None and c.train.steps is not None and c.critic.warmup >= c.train.steps
        ),
        "{warmup} of {steps} steps leave none to train the policy",
        "lower it",
    ),
)

ALGORITHMS = Table(
    "Algorithms",
    "What the kinds of algorithms read. Keys of the section `algorithm` that an algorithm does not"
    " read are refused too.",
    (
        _column("policy gradient", "policy_gradient", sampled=True, setting="e.g. grpo, dapo, ppo"),
        _column("supervised", "supervised", sampled=False, setting="e.g. sft"),
        _column("preference", "preference", sampled=False, setting="e.g. dpo, kto"),
        _column("online preference", "preference", sampled=True, setting="e.g. online_dpo, spin"),
        _column("reward model", "reward", sampled=False, setting="e.g. bradley_terry"),
        _column("distillation", "distillation", sampled=False, setting="e.g. forward_kl"),
        _column("on-policy distillation", "distillation", sampled=True, setting="e.g. gkd, opd"),
    ),
    FEATURES,
    RULES,
)


def unread_keys(config: Sections) -> Iterator[Problem]:
    """Keys of the section `algorithm` that the algorithm does not read."""
    algorithm = config.algorithm
    for key in algorithm.foreign_keys():
        fix = "remove it"
        if key == "beta":
            fix += "; the KL to a reference is algorithm.kl.coefficient"
        yield Problem(
            f"algorithm.{key}", f"{algorithm.name} ({algorithm.family}) does not read it", fix
        )
