"""The compatibility tables: every pair is decided, and a configuration is refused, with the key,
exactly where its cell says no.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from reinforge.config.engine import SERVERS, ServerFacts
from reinforge.config.load import apply_override, config_from_dict
from reinforge.config.rules import asynchrony, backends, engines
from reinforge.config.rules.check import TABLES, doubts, problems
from reinforge.config.rules.page import compatibility_markdown
from reinforge.config.rules.table import Column, Feature, No, Rule, Table
from reinforge.config.sections import Sections
from reinforge.core.errors import InputError

Overrides = tuple[str, ...]

TEACHER = "teacher={path: org/teacher}"
SERVED = "teacher={server: {url: http://127.0.0.1:8000/v1}}"
VLLM = "rollout.engine=vllm"
FORM = "rollout.structured={regex: a}"
AGENT = "agent={name: 'module:play'}"
OVERLAP = ("rollout.staleness=1", "rollout.overlap=true")
PARTIAL = ("rollout.staleness=1", "rollout.partial=true", "sampling.over_provision=2.0")
NO_REWARDS = "rewards=[]"
# with actors of their own
APART = ("cluster={kind: ray, reference: {gpus: 1}}",)
TAUGHT = ("cluster={kind: ray, teacher: {gpus: 1}}",)

# how each column is chosen
COLUMNS: dict[str, Overrides] = {
    "local": ("train.backend=local",),
    "fsdp": ("train.backend=fsdp",),
    "deepspeed": ("train.backend=deepspeed",),
    "megatron": ("train.backend=megatron",),
    "ray": ("cluster.kind=ray",),
    "native": ("rollout.engine=native",),
    **{server: (f"rollout.engine={server}",) for server in SERVERS},
    "running servers": (VLLM, "engine.address=['http://127.0.0.1:8000']"),
    "on-policy": (),
    "staleness": ("rollout.staleness=1",),
    "partial": PARTIAL,
    "policy gradient": ("algorithm.name=grpo",),
    "supervised": ("algorithm.name=sft", NO_REWARDS),
    "preference": ("algorithm.name=dpo", NO_REWARDS),
    "online preference": ("algorithm.name=online_dpo",),
    "reward model": ("algorithm.name=bradley_terry", NO_REWARDS),
    "distillation": ("algorithm.name=forward_kl", NO_REWARDS, TEACHER),
    "on-policy distillation": ("algorithm.name=gkd", NO_REWARDS, TEACHER),
}

# How each feature is asked for. Where a feature needs another backend or engine too, the column
# `ray` says how it is asked for there.
FEATURES: dict[str, dict[str, Overrides]] = {
    "Backends": {
        "Several ranks": ("train.ranks=2",),
        "Sequence parallel": ("train.sequence_parallel=2",),
        "Tensor parallel": ("train.tensor_parallel=2",),
        "Weights in host memory": ("train.offload_weights=true",),
        "ZeRO stages": ("train.deepspeed.stage=3",),
        "Bit-identical log-probs": ("model.exact=true",),
        "Log-probs under a constraint": (FORM,),
        "Biases of routers that follow the load": ("train.router_bias_rate=0.001",),
        "Training with products in FP8": ("train.precision=fp8",),
        "Compiled layers": ("model.compile=true",),
        "LoRA, rsLoRA, DoRA": ("adapter={kind: lora}",),
        "QLoRA (base in 4 bits)": ("adapter={kind: qlora}",),
        "Modules trained whole beside an adapter": ("adapter={modules_to_save: [lm_head]}",),
        "Weights that stay as they are": ("train.freeze=[model.embed_tokens]",),
        "Reward models": ("algorithm.name=bradley_terry", NO_REWARDS),
        "A critic": ("algorithm.name=ppo", "critic={}"),
        "A teacher": ("algorithm.name=forward_kl", NO_REWARDS, TEACHER),
        "Moving average of the weights": ("train.ema=0.9",),
        "Noise on embeddings (NEFTune)": ("algorithm.name=sft", NO_REWARDS, "train.neftune=5.0"),
        "Optimizer in host memory": ("train.optimizer.offload=true",),
        "Inputs of layers in host memory": ("model.gradient_checkpointing=host",),
        "Lion": ("train.optimizer.name=lion",),
        "Muon, Adafactor, an optimizer of your own": ("train.optimizer.name=muon",),
        "Moments in 8 bits, split masters, gradients in bfloat16": (
            "train.optimizer.name=adamw_8bit",
        ),
        "Weights with rates and decays of their own": (
            "train.optimizer.groups=[{match: ['*embed*'], rate: 0.1}]",
        ),
        "A reference that moves": ("algorithm.kl.reference.kind=ema",),
        "An opponent (self-play)": ("algorithm.name=xpo",),
        "Log-probs of the reference computed once": (
            "algorithm.name=dpo",
            NO_REWARDS,
            "train.precompute_reference=true",
        ),
        "Every rank generates": ("rollout.all_ranks=true",),
        "Generating while a step trains, with a copy of the weights": OVERLAP,
        "Checkpoints in parts, one a rank": ("run.checkpoint.sharded=true",),
    },
    "Engines": {
        "The section `engine`": ("engine.memory=0.5",),
        "Bit-identical log-probs": ("model.exact=true",),
        "Weights by handles of GPU memory (ipc)": ("engine.channel=ipc",),
        "Weights by the server's own transfer API": ("engine.channel=api",),
        "Completions that go on under new weights": ("engine.running=keep",),
        "Stop strings": ("rollout.stop=[x]",),
        "Evaluation with top_p": ("eval.top_p=0.9",),
        "Answers of a given form in an evaluation": ("eval.structured={regex: a}",),
        "Answers of a given form in training": (FORM,),
        "The experts of the sampled tokens (router replay)": ("train.router_replay=on",),
        "A server that sleeps": ("engine.sleep=cache",),
        "The key of a server that runs already": ("engine.key_env=THE_KEY",),
        "Every rank generates": ("train.backend=fsdp", "rollout.all_ranks=true"),
        "Generating while a step trains, with a copy of the weights": OVERLAP,
        "Lossless speculative decoding": ("rollout.speculation.when=tail",),
        "Products in FP8": ("rollout.precision=fp8",),
        "A KV cache in FP8": ("rollout.cache_precision=fp8",),
    },
    "Asynchrony": {
        "An algorithm that samples nothing": ("algorithm.name=sft", NO_REWARDS),
        "Replay of old groups": ("sampling.replay={}",),
        "Rewards centred or scaled by a running mean": ("rewards.0.center=running",),
        "Stop strings": ("rollout.stop=[x]",),
        "An agent": (AGENT,),
        "Preferences over sampled answers": ("algorithm.name=online_dpo",),
        "Dynamic sampling": ("algorithm.dynamic_sampling=true",),
        "Every rank generates": ("train.backend=fsdp", "rollout.all_ranks=true"),
        "Generating while a step trains, in its process": ("rollout.overlap=true",),
    },
    "Algorithms": {
        "Rewards": ("rewards=[{name: exact_number}]",),
        "An agent": (AGENT,),
        "A teacher": (TEACHER,),
        "Pre-training text beside it (PTX)": ("ptx={source: x.txt}",),
        "Log-probs of the reference computed once": ("train.precompute_reference=true",),
        "Noise on embeddings (NEFTune)": ("train.neftune=5.0",),
        "Load-balancing loss of a mixture of experts": ("train.router_aux_loss=0.01",),
        "Loss of a router's logits": ("train.router_z_loss=0.01",),
        "Biases of routers that follow the load": ("train.router_bias_rate=0.001",),
        "The experts of the sampled tokens (router replay)": ("train.router_replay=on",),
        "Loss on all tokens of a row": ("data.loss_on=all",),
        "Attributes in the prompt": ("data.attributes={names: [wit]}",),
        "Whole texts in blocks": ("data.blocks=true",),
        "Dropout in an adapter": ("adapter={dropout: 0.1}",),
        "QLoRA (base in 4 bits)": ("adapter={kind: qlora}",),
        "A saved adapter to continue from": ("adapter={path: saved}",),
        "Replay of old groups": ("sampling.replay={}",),
        "Pass rates, preferred prompts, over-provision": ("sampling.prefer=teachable",),
        "Training on answers of a given form": (FORM,),
        "A critic": ("critic={}", "algorithm.advantage='mine.py:mine'"),
    },
}
# features that only one backend has, in actors of Ray
BESIDE_RAY: dict[str, str] = {
    "Several ranks": "train.backend=fsdp",
    "Sequence parallel": "train.backend=fsdp",
    "Tensor parallel": "train.backend=fsdp",
    "Weights in host memory": "train.backend=fsdp",
    "ZeRO stages": "train.backend=deepspeed",
    "Every rank generates": "train.backend=fsdp",
    "Checkpoints in parts, one a rank": "train.backend=fsdp",
}

# a configuration that breaks each rule, in the order of the tables
BROKEN: dict[str, list[Overrides]] = {
    "Backends": [
        (
            "train.backend=fsdp",
            "rollout.all_ranks=true",
            "cluster={kind: ray, layout: split}",
        ),
        ("train.backend=fsdp", "train.tensor_parallel=2", "adapter={kind: lora}"),
        (
            "train.backend=fsdp",
            "train.sequence_parallel=2",
            "algorithm.name=forward_kl",
            NO_REWARDS,
            TEACHER,
        ),
        (*APART, "algorithm.kl={coefficient: 0.1, reference: {kind: ema}}"),
        (*APART, "algorithm.name=dpo", NO_REWARDS, "train.precompute_reference=true"),
        (*APART, "algorithm.kl.coefficient=0.1", "cluster.reference.ranks=2"),
        ("cluster={kind: ray, critic: {gpus: 1}}",),
        ("cluster={kind: ray, reward: {gpus: 1}}",),
        (*TAUGHT,),
        (*TAUGHT, "algorithm.name=forward_kl", NO_REWARDS, TEACHER),
        (
            *TAUGHT,
            "algorithm.name=topk",
            NO_REWARDS,
            "teacher={path: org/teacher, also: [{path: org/other}]}",
        ),
        (*TAUGHT, "algorithm.name=topk", NO_REWARDS, TEACHER, "cluster.teacher.ranks=2"),
        ("train.precision=fp8", "model.exact=true"),
        ("train.precision=fp8", "adapter={kind: qlora}"),
        ("algorithm.name=online_dpo", "adapter={dropout: 0.1}", "model.exact=true"),
        ("algorithm.name=online_dpo", "adapter={dropout: 0.1}", "model.compile=true"),
        ("train.freeze=[lm_head]", "adapter={kind: lora}"),
        ("train.only=[lm_head]", "adapter={kind: lora}"),
        ("train.optimizer.masters=split", "adapter={kind: lora}"),
        ("train.optimizer.lora_plus=16.0",),
        (
            "algorithm.name=ppo",
            "critic={optimizer: {lora_plus: 16.0}}",
        ),
    ],
    "Engines": [
        ("rollout.engine=vllm", "engine.channel=api", "cluster={kind: ray, layout: split}"),
        ("rollout.precision=fp8", "model.exact=true"),
        ("rollout.precision=fp8", "adapter={kind: qlora}"),
        ("rollout.precision=fp8", "algorithm.name=xpo"),
        (*OVERLAP, "algorithm.name=xpo"),
        (*OVERLAP, "adapter={kind: qlora}"),
        ("rollout.cache_precision=fp8", "model.exact=true"),
    ],
    "Asynchrony": [
        ("rollout.partial=true", "sampling.over_provision=2.0"),
        ("rollout.partial=true", "rollout.staleness=1"),
        (*OVERLAP, "algorithm.dynamic_sampling=true"),
        (*OVERLAP, "sampling.over_provision=2.0"),
        (*OVERLAP, "rollout.kept=runs/other"),
    ],
    "Algorithms": [
        (NO_REWARDS,),
        (AGENT, "env={name: single}"),
        ("rollout.top_p=0.9",),
        (FORM, "env={name: single}"),
        ("eval.structured={regex: a}", AGENT),
        ("eval.benchmarks=[{task: gsm8k}]", "algorithm.name=bradley_terry", NO_REWARDS),
        ("eval.benchmarks=[{task: gsm8k}, {task: gsm8k}]",),
        ("algorithm.group_size=1",),
        ("algorithm.name=online_dpo", "algorithm.group_size=1"),
        ("algorithm.name=xpo", "algorithm.group_size=3"),
        ("algorithm.name=xpo", "env={name: single}"),
        ("algorithm.name=tr_dpo", NO_REWARDS, "train.precompute_reference=true"),
        ("ptx={source: x.txt}", "rollout.temperature=0.7"),
        ("algorithm.name=forward_kl", NO_REWARDS),
        ("algorithm.name=jsd", NO_REWARDS, "teacher={path: org/teacher, precompute: true}"),
        ("algorithm.name=opd", NO_REWARDS, "teacher={domains: {a: {path: org/a}, b: {}}}"),
        ("algorithm.name=opd", NO_REWARDS, "teacher={path: org/a, domains: {b: {path: org/b}}}"),
        ("algorithm.name=uld", NO_REWARDS, "teacher={domains: {a: {path: org/a}}}"),
        ("algorithm.name=topk", NO_REWARDS, SERVED, "teacher.also=[{path: org/a}]"),
        ("algorithm.name=minillm", NO_REWARDS, SERVED),
        ("algorithm.name=opd", NO_REWARDS, SERVED, "rollout.temperature=0.7"),
        ("sampling.replay={share: 0.1}", "train.prompts_per_step=4"),
        ("algorithm.name=rloo", "sampling.replay={}"),
        ("algorithm.old=recompute", "sampling.replay={}"),
        ("algorithm.name=ppo",),
        ("critic={}",),
        ("algorithm.name=ppo", "critic={warmup: 3}", "train.steps=3"),
    ],
}
DOUBTFUL: list[Overrides] = [
    ("train.backend=fsdp", "train.deepspeed.stage=2"),
    ("train.router_aux_loss=2.0",),
    ("rollout.precision=fp8",),
    ("model.exact=true", "algorithm.correction.name=tis"),
    ("model.exact=true", "algorithm.old=recompute"),
    ("model.exact=true", "train.router_replay=on"),
    ("rollout.speculation.when=tail", "rollout.structured.regex=a+"),
    (VLLM, "engine.sleep=cache", "rollout.staleness=1"),
    ("rollout.staleness=10",),
    ("algorithm.name=rloo", "rollout.staleness=2"),
    ("algorithm.old=recompute", "rollout.staleness=2"),
    ("algorithm.dynamic_sampling=true", "rollout.staleness=1"),
    ("sampling.over_provision=2.0", "rollout.staleness=1"),
]


def plain(*overrides: str) -> dict[str, Any]:
    """A small valid configuration, changed."""
    data: dict[str, Any] = {
        "model": {"path": "org/name"},
        "algorithm": {"name": "grpo", "group_size": 4},
        "data": {"source": "rows.jsonl"},
        "rewards": [{"name": "exact_number"}],
        "train": {"steps": 8},
        "run": {"dir": "runs/one"},
    }
    for override in overrides:
        apply_override(data, override)
    return data


def sections(*overrides: str) -> Sections:
    """The same without the rules."""
    return Sections.model_validate(plain(*overrides))


def pairs() -> Iterator[tuple[Table, Feature, Column]]:
    for table in TABLES:
        for feature in table.features:
            for column in table.columns:
                yield table, feature, column


def asked_for(table: Table, feature: Feature, column: Column) -> Overrides:
    """The configuration of a pair. Whoever is asked for comes last."""
    wanted = FEATURES[table.title][feature.name]
    if column.name == "ray" and feature.name in BESIDE_RAY:
        wanted = (*wanted, BESIDE_RAY[feature.name])
    if table.title == "Algorithms" and wanted == (TEACHER,):
        wanted = ()  # the columns that have one need it anyway
        if isinstance(feature.cells[column.name], No):
            wanted = (TEACHER,)
    return (*COLUMNS[column.name], *wanted)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.title)
def test_every_pair_is_decided(table: Table) -> None:
    names = [column.name for column in table.columns]
    assert len(set(names)) == len(names)
    for feature in table.features:
        assert list(feature.cells) == names, feature.name
    assert [feature.name for feature in table.features] == list(FEATURES[table.title])
    assert len(table.rules) == len(BROKEN[table.title])


@pytest.mark.parametrize(
    ("table", "feature", "column"),
    [
        pytest.param(*pair, id=f"{pair[0].title}, {pair[1].name}, {pair[2].name}")
        for pair in pairs()
    ],
)
def test_a_pair_is_refused_where_its_cell_says_so(
    table: Table, feature: Feature, column: Column
) -> None:
    overrides = asked_for(table, feature, column)
    config = sections(*overrides)
    assert feature.used(config) and column.chosen(config)
    cell = feature.cells[column.name]
    if isinstance(cell, No):
        key = cell.key or feature.key
        assert key in [problem.key for problem in table.problems(config)]
        with pytest.raises(InputError) as refused:
            config_from_dict(plain(*overrides))
        first = next(iter(problems(config)))
        assert f"{first.key}: {first.why}; {first.fix}" in str(refused.value)
    else:
        config_from_dict(plain(*overrides))


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.title)
def test_a_feature_that_is_not_asked_for_is_not_found(table: Table) -> None:
    """A plain configuration uses none of them, but for the rewards that it has."""
    config = sections()
    used = [feature.name for feature in table.features if feature.used(config)]
    assert used == (["Rewards"] if table.title == "Algorithms" else [])
    assert list(problems(config)) == [] == list(doubts(config))


@pytest.mark.parametrize(
    ("rule", "overrides"),
    [
        pytest.param(rule, overrides, id=f"{rule.key}, {rule.why}")
        for table in TABLES
        for rule, overrides in zip(table.rules, BROKEN[table.title], strict=True)
    ],
)
def test_a_broken_rule_is_told_with_its_key(rule: Rule, overrides: Overrides) -> None:
    assert rule.broken(sections(*overrides)) and not rule.broken(sections())
    with pytest.raises(InputError, match=rule.key):
        config_from_dict(plain(*overrides))


def test_what_may_not_be_meant_is_accepted_and_told() -> None:
    rules = [*backends.DOUBTS, *engines.DOUBTS, *asynchrony.DOUBTS]
    rules.remove(engines.OPEN_SERVER)  # below: all servers have a key
    for rule, overrides in zip(rules, DOUBTFUL, strict=True):
        config = config_from_dict(plain(*overrides))
        assert rule.broken(config), rule.why
        assert rule.key in [doubt.key for doubt in doubts(config)]
    # the configuration that a run keeps names every key, and nobody meant them
    kept = config_from_dict(sections().model_dump(mode="json"))
    assert not list(doubts(kept))


@pytest.mark.parametrize(
    "more",
    [
        "model.exact=false",
        "train.router_replay=off",
        "rollout.staleness=1",
        "algorithm.epochs=2",
        "algorithm.minibatches=2",
    ],
)
def test_router_replay_is_not_doubted_where_it_does_something(more: str) -> None:
    """Weights that are newer than those that sampled choose other experts, exact or not."""
    both = ("model.exact=true", "train.router_replay=on")
    assert [doubt.key for doubt in doubts(sections(*both))] == ["train.router_replay"]
    assert "train.router_replay" not in [doubt.key for doubt in doubts(sections(*both, more))]


# a server that can do nothing that another can do without
PLAIN = ServerFacts(
    "module:class",
    package="plain",
    filters=False,
    stop_strings=False,
    structured=False,
    sleeps=False,
    key=False,
)


@pytest.mark.parametrize(
    "asked",
    ["rollout.stop=[x]", "eval.top_p=0.9", "eval.structured={regex: a}", "engine.sleep=all"],
)
def test_what_a_server_cannot_do_follows_from_its_facts(asked: str) -> None:
    """Under a name that a configuration may have."""
    config = sections(VLLM, asked)
    [problem] = engines.engine_table({"vllm": PLAIN}).problems(config)
    assert problem.key == asked.partition("=")[0] and problem.why.startswith("vllm ")
    able = ServerFacts("module:class", package="able")
    assert list(engines.engine_table({"vllm": able}).problems(config)) == []


def test_a_server_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for none, and `plan` warns where one is started."""
    running = ("engine.address=['http://127.0.0.1:8000']",)
    [problem] = engines.engine_table({"vllm": PLAIN}).problems(
        sections(VLLM, *running, "engine.key_env=THE_KEY")
    )
    assert problem.key == "engine.key_env"
    assert not engines.OPEN_SERVER.broken(sections(VLLM))
    monkeypatch.setitem(SERVERS, "vllm", PLAIN)
    assert [doubt.key for doubt in doubts(sections(VLLM))] == ["rollout.engine"]
    assert list(doubts(sections(VLLM, *running))) == []


def test_no_text_keeps_a_place_that_nobody_fills() -> None:
    for table in TABLES:
        for overrides in BROKEN[table.title]:
            for problem in problems(sections(*overrides)):
                assert "{algorithm}" not in str(problem) and "None" not in str(problem)
    page = compatibility_markdown()
    for word in ("{algorithm}", "{backend}", "{engine}", "{surrogate}", "{ranks}", "{share}"):
        assert word not in page


def test_the_rules_import_no_torch() -> None:
    code = "import reinforge.config.rules.page, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
