"""Runs that have an illness, and runs that have none: does the doctor name it first, and is it
quiet otherwise?

    python benchmarks/doctor.py --runs runs/doctor --out benchmarks/results/doctor.json

For each rule three runs of a tiny model (that of `reinforge tiny`) whose settings, reward or rows
give it the illness; then healthy runs, six seeds of each algorithm. Every run is judged by
`reinforge runs diagnose` from its directory. Finished runs are kept: the same command goes on.
`--only RULE` does some of them. Exits with 1 unless every sick run has its illness as the first
cause and no healthy one has a warning.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

CHAIN = {"terms": 3, "max_value": 9, "operators": "+", "seed": 1}
HEALTHY = "healthy"
# settings that rules read
READ = (
    "algorithm.clip",
    "algorithm.e",
    "algorithm.group_size",
    "algorithm.kl",
    "algorithm.minibatches",
    "algorithm.reduce",
    "critic.learning_rate",
    "eval.every",
    "rewards.",
    "rollout.cache_precision",
    "rollout.max_new_tokens",
    "rollout.precision",
    "rollout.staleness",
    "rollout.temperature",
    "run.checkpoint.every",
    "train.learning_rate",
    "train.prompts_per_step",
    "train.router_aux_loss",
    "train.steps",
)
SEEDS = 6
# illnesses that show in a few small steps; the others take as long as a healthy run
QUICK = {
    "nonfinite",
    "learning_rate_high",
    "unscored",
    "truncation",
    "stale",
    "mismatch",
    "dead_experts",
    "constant_reward",
    "kl_negative",
    "critic",
    "entropy_explosion",
    "clip_share",
    "no_gradient",
    "memory_growth",
    "slow_phase",
}


# ---- rewards and parts of an algorithm that make a run ill ----


def always_half(completions: Sequence[str]) -> list[float]:
    return [0.5] * len(completions)


def hopeless(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    """The answer in roman numerals, which the model has never seen."""
    return [
        float(c.strip() == "M" * (int(a) + 1)) for c, a in zip(completions, answer, strict=True)
    ]


def by_prompt(completions: Sequence[str], prompts: Sequence[str]) -> list[float]:
    return [float(p[0] in "02468") for p in prompts]


def unparsable(completions: Sequence[str], answer: Sequence[str]) -> list[float | None]:
    """Cannot score answers of one character."""
    return [
        None if len(c.strip()) < 2 else float(c.strip() == a)
        for c, a in zip(completions, answer, strict=True)
    ]


def contains_one(completions: Sequence[str]) -> list[float]:
    return [float(c.strip() in ("1", "11", "111")) for c in completions]


def likes_seven(completions: Sequence[str]) -> list[float]:
    return [0.5 * ("7" in c) + 0.5 * (c.strip() == "17") for c in completions]


def pays_length(completions: Sequence[str]) -> list[float]:
    return [min(1.0, len(c) / 40) for c in completions]


def pays_digits(completions: Sequence[str]) -> list[float]:
    return [min(1.0, sum(ch.isdigit() for ch in c) / 12) for c in completions]


def longest_wins(completions: Sequence[str]) -> list[float]:
    """A judge of the answers to one prompt that likes them long: on average it gives a half."""
    return [_place(len(c), [len(other) for other in completions]) for c in completions]


def shortest_wins(completions: Sequence[str]) -> list[float]:
    return [1 - value for value in longest_wins(completions)]


def _place(own: int, others: Sequence[int]) -> float:
    return sum((own > other) + 0.5 * (own == other) for other in others) / len(others)


def swapped_kl(logprob: Any, reference: Any) -> Any:
    """The difference the wrong way round."""
    return reference - logprob


def slow(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    time.sleep(0.4)
    return [float(c.strip() == a) for c, a in zip(completions, answer, strict=True)]


LEAK: list[bytearray] = []


def leaky(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    LEAK.append(bytearray(os.urandom(1 << 20) * 3))
    return [float(c.strip() == a) for c, a in zip(completions, answer, strict=True)]


class SecondChance:
    """A sum, and once more if the answer was wrong: an environment of two turns."""

    pure = True

    async def reset(self, row: Any, seed: int) -> Any:
        from reinforge.core.env import Observation

        self.row = row
        return Observation([{"role": "user", "content": row.prompt}])

    async def step(self, action: Any) -> Any:
        from reinforge.core.env import Observation, Step

        right = action.text.strip() == self.row.columns["answer"]
        if right or action.last:
            return Step(None, float(right), done=True)
        return Step(Observation([{"role": "user", "content": self.row.prompt}]))

    async def close(self) -> None:
        pass


# ---- cases ----


@dataclass(frozen=True)
class Case:
    """One run: which illness it has, and how it is made."""

    rule: str
    name: str
    changed: str  # for people
    algorithm: str = "grpo"
    settings: Mapping[str, Any] = field(default_factory=dict)  # dotted keys
    rewards: Callable[..., Any] | None = None
    rows: Callable[[], list[dict[str, Any]]] | None = None
    parts: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    seed: int = 0
    apart: bool = False  # in a process of its own
    model: str = "tiny"

    @property
    def first(self) -> bool:
        """Whether it is the run that stands for its kind in the tests."""
        if self.rule == HEALTHY:
            return self.seed == 0
        return next(c.name for c in cases() if c.rule == self.rule) == self.name

    @property
    def folder(self) -> str:
        return f"{self.rule}-{self.name}"


def base(case: Case, model: Path, folder: Path) -> dict[str, Any]:
    """The settings of a healthy run."""
    pairs = case.algorithm == "dpo"
    supervised = case.algorithm in ("sft", "dpo")
    options = {**CHAIN, "size": 2000, **({"compare": True} if pairs else {})}
    held = {**options, "split": "eval", "size": 64}
    raw: dict[str, Any] = {
        "model": {"path": str(model), "device": "cpu"},
        "algorithm": {"name": case.algorithm, "group_size": 8},
        "data": {
            "source": "arithmetic:chain",
            "options": options,
            "eval": {"source": "arithmetic:chain", "size": 64, "options": held},
        },
        "rewards": [{"name": "exact_number"}],
        "rollout": {"max_new_tokens": 6},
        "train": {
            "steps": 60,
            "prompts_per_step": 32 if supervised else 16,
            "learning_rate": 1e-3 if supervised else 3e-4,
        },
        "eval": {"every": 20},
        "run": {"dir": str(folder), "seed": case.seed, "checkpoint": {"every": 0}},
    }
    if case.rule in QUICK:
        raw["train"] |= {"steps": 30, "prompts_per_step": 8}
    if case.algorithm == "dpo":
        raw["train"]["learning_rate"] = 1e-4
    if case.algorithm == "ppo":
        raw["critic"] = {"learning_rate": 1e-3, "warmup": 5}
        raw["algorithm"]["group_size"] = 4
        raw["algorithm"]["epochs"] = 2
    for key, value in case.settings.items():
        at = raw
        *path, last = key.split(".")
        for part in path:
            at = at.setdefault(part, {})
        if key == "critic.path":
            value = str(model.parent / value)
        if value is None:
            at.pop(last, None)
        else:
            at[last] = value
    return raw


def rows_of(shift: int, size: int = 2000) -> list[dict[str, Any]]:
    """Sums whose answers are wrong by `shift`, for training only."""
    from reinforge.data.arithmetic import parse, problem

    options = parse("chain", {**CHAIN, "size": size})
    found = [problem(options, i) for i in range(size)]
    for row in found:
        row["answer"] = row["completion"] = str(int(row["answer"]) + shift)
    return found


def forgetful_rows() -> list[dict[str, Any]]:
    """Sums whose answers forget the last number, as the model does now and then."""
    found = rows_of(0)
    for row in found:
        row["answer"] = str(sum(int(n) for n in row["prompt"].rstrip("=").split("+")[:-1]))
    return found


def cases() -> list[Case]:
    lr = "train.learning_rate"
    found = [
        Case("nonfinite", "grpo", "train.learning_rate=1e30", settings={lr: 1e30}),
        Case("nonfinite", "sft", "train.learning_rate=1e30", "sft", {lr: 1e30}),
        Case("nonfinite", "rloo", "train.learning_rate=1e30", "rloo", {lr: 1e30}),
        Case("learning_rate_high", "grpo", "train.learning_rate=0.03", settings={lr: 0.03}),
        Case("learning_rate_high", "sft", "train.learning_rate=0.3", "sft", {lr: 0.3}),
        Case("learning_rate_high", "dpo", "train.learning_rate=0.1", "dpo", {lr: 0.1}),
        Case(
            "unscored", "grpo", "a reward that returns None for short answers", rewards=unparsable
        ),
        Case("unscored", "ppo", "the same", "ppo", rewards=unparsable),
        Case("unscored", "rloo", "the same", "rloo", rewards=unparsable),
        *(
            Case(
                "truncation",
                name,
                f"rollout.max_new_tokens={n}",
                name,
                {"rollout.max_new_tokens": n},
            )
            for name, n in (("grpo", 1), ("ppo", 1), ("rloo", 1))
        ),
        *(
            Case(
                "stale",
                f"{name}-{age}",
                f"rollout.staleness={age}, train.learning_rate=3e-3",
                name,
                {"rollout.staleness": age, lr: 3e-3},
            )
            for name, age in (("grpo", 4), ("grpo", 8), ("rloo", 8))
        ),
        *(
            Case("mismatch", name, "rollout.precision=fp8", name, {"rollout.precision": "fp8"})
            for name in ("grpo", "rloo")
        ),
        Case(
            "mismatch",
            "both",
            "rollout.precision=fp8, rollout.cache_precision=fp8",
            "dapo",
            {"rollout.precision": "fp8", "rollout.cache_precision": "fp8"},
        ),
        Case("constant_reward", "grpo", "a reward that is always 0.5", rewards=always_half),
        Case("constant_reward", "ppo", "the same", "ppo", rewards=always_half),
        Case("constant_reward", "hard", "a task that no answer solves", "rloo", rewards=hopeless),
        *(
            Case(
                "overoptimised",
                f"{name}-{seed}",
                "training rows whose answers forget the last number",
                name,
                {lr: 1e-3},
                rows=forgetful_rows,
                seed=seed,
            )
            for name, seed in (("grpo", 0), ("grpo", 1), ("rloo", 0))
        ),
        Case("reward_hacking", "one", "a reward that looks for 1", rewards=contains_one),
        Case("reward_hacking", "seven", "a reward that likes 17", "rloo", rewards=likes_seven),
        Case(
            "reward_hacking",
            "length",
            "a reward that counts characters",
            rewards=pays_length,
            settings={"rollout.max_new_tokens": 32},
        ),
        *(
            Case(
                "entropy_explosion",
                name,
                f"algorithm.entropy={bonus}",
                name,
                {"algorithm.entropy": bonus},
            )
            for name, bonus in (("grpo", 0.3), ("rloo", 1.0), ("ppo", 0.3))
        ),
        *(
            Case(
                "length_drift",
                f"{name}-{wish.__name__}",
                "a judge that compares answers and likes "
                + ("long ones" if wish is longest_wins else "short ones"),
                name,
                {"rollout.max_new_tokens": 16},
                rewards=wish,
            )
            for name, wish in (
                ("grpo", longest_wins),
                ("rloo", longest_wins),
                ("grpo", shortest_wins),
            )
        ),
        *(
            Case(
                "dead_experts",
                f"{name}-{seed}",
                "a router that was injected to use two of four experts",
                name,
                seed=seed,
                model="experts-dead",
            )
            for name, seed in (("sft", 0), ("sft", 1), ("dpo", 0))
        ),
        *(
            Case(
                "entropy_collapse",
                f"{name}-{seed}",
                "rollout.temperature=0.02",
                name,
                {"rollout.temperature": 0.02, "train.prompts_per_step": 8},
                seed=seed,
            )
            for name, seed in (("grpo", 0), ("grpo", 1), ("rloo", 0))
        ),
        *(
            Case(
                "kl_negative",
                name,
                "an estimator with its arguments swapped",
                name,
                {"algorithm.kl.coefficient": weight, "algorithm.kl.estimator": "python:swapped_kl"},
                parts={"python:swapped_kl": swapped_kl},
            )
            for name, weight in (("grpo", 0.01), ("rloo", 0.01), ("dapo", 0.02))
        ),
        *(
            Case(
                "kl_runaway",
                f"{name}-{seed}",
                "another task (no held-out rows), algorithm.kl.coefficient=1e-5,"
                " train.learning_rate=1e-3",
                name,
                {"algorithm.kl.coefficient": 1e-5, lr: 1e-3, "data.eval": None},
                rows=forgetful_rows,
                seed=seed,
            )
            for name, seed in (("grpo", 0), ("grpo", 1), ("rloo", 0))
        ),
        *(
            Case(
                "clip_share",
                f"{name}-{seed}",
                "algorithm.clip.low and high=0.0005, algorithm.epochs=16, train.learning_rate=1e-3",
                name,
                {
                    "algorithm.clip.low": 0.0005,
                    "algorithm.clip.high": 0.0005,
                    "algorithm.epochs": 16,
                    lr: 1e-3,
                    "train.steps": 15,
                },
                seed=seed,
            )
            for name, seed in (("grpo", 0), ("grpo", 1), ("dr_grpo", 0))
        ),
        *(
            Case(
                "critic",
                f"{rate:g}-{seed}",
                f"critic.path: a classifier of something else, critic.learning_rate={rate:g}",
                "ppo",
                {"critic.learning_rate": rate, "critic.warmup": 0, "critic.path": "classifier"},
                seed=seed,
            )
            for rate, seed in ((1e-6, 0), (1e-6, 1), (1e-5, 0))
        ),
        Case(
            "repeated_data",
            "sft",
            "16 rows",
            "sft",
            {"data.options.size": 16, "train.prompts_per_step": 16},
        ),
        Case(
            "repeated_data",
            "dpo",
            "8 rows, train.learning_rate=1e-3",
            "dpo",
            {"data.options.size": 8, "train.prompts_per_step": 8, lr: 1e-3},
        ),
        Case(
            "repeated_data",
            "grpo",
            "4 rows",
            settings={"data.options.size": 4, "train.prompts_per_step": 4},
        ),
        *(
            Case(
                "no_gradient", name, "a reward that reads the prompt only", name, rewards=by_prompt
            )
            for name in ("grpo", "rloo", "dapo")
        ),
        *(
            Case("learning_rate_low", name, "train.learning_rate=1e-9", name, {lr: 1e-9})
            for name in ("grpo", "sft", "dpo")
        ),
        *(
            Case(
                "collapse",
                f"sft-{shift}",
                f"demonstrations that are wrong by {shift}",
                "sft",
                rows=lambda shift=shift: rows_of(shift),
            )
            for shift in (1, 2, 5)
        ),
        Case(
            "slow_phase",
            "grpo",
            "a reward that sleeps for each prompt",
            rewards=slow,
            settings={"train.steps": 12, "train.prompts_per_step": 4},
        ),
        Case(
            "slow_phase",
            "rloo",
            "the same",
            "rloo",
            rewards=slow,
            settings={"train.steps": 12, "train.prompts_per_step": 4},
        ),
        Case(
            "slow_phase",
            "eval",
            "eval.every=1, eval.samples=16",
            settings={
                "eval.every": 1,
                "eval.samples": 16,
                "eval.temperature": 1.0,
                "train.steps": 12,
                "train.prompts_per_step": 4,
            },
        ),
        *(
            Case(
                "memory_growth",
                name,
                "a reward that keeps 3 MiB per prompt",
                name,
                rewards=leaky,
                apart=True,
            )
            for name in ("grpo", "rloo", "ppo")
        ),
    ]
    for seed in range(SEEDS):
        for name in ("sft", "dpo", "grpo", "ppo", "rloo"):
            found.append(Case(HEALTHY, f"{name}-{seed}", "", name, seed=seed))
        if seed == 0:
            held = {"algorithm.kl.coefficient": 0.05}
            found.append(Case(HEALTHY, "kl", "", "grpo", held))
            found.append(Case(HEALTHY, "experts", "", "sft", model="experts"))
        turns = {"env": {"name": "python:SecondChance", "max_turns": 2}, "rewards": None}
        played = {"python:SecondChance": SecondChance}
        found.append(
            Case(
                HEALTHY,
                f"turns-{seed}",
                "",
                settings=turns,
                parts=played,
                model="tiny-turns",
                seed=seed,
            )
        )
        found.append(
            Case(HEALTHY, f"async-{seed}", "", settings={"rollout.staleness": 1}, seed=seed)
        )
    # one of each kind first: what goes wrong there goes wrong everywhere
    turns: Counter[str] = Counter()
    order = {}
    for case in found:
        kind = case.name.partition("-")[0] if case.rule == HEALTHY else case.rule
        order[case.folder] = turns[kind]
        turns[kind] += 1
    return sorted(found, key=lambda case: order[case.folder])


# ---- running and judging ----


def make_experts(path: Path, *, dead: bool) -> None:
    """A mixture of four experts from nothing. `dead`: in every layer two rows of the router point
    against each other and are far longer than the others, so that one of the two takes every token.
    """
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    from reinforge.models.tiny import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=1,
            max_position_embeddings=128,
            initializer_range=0.08,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    for name, weight in model.named_parameters():
        if dead and name.endswith("gate.weight"):
            with torch.no_grad():
                weight[0] *= 300
                weight[1] = -weight[0]
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def make_classifier(path: Path, tiny: Path) -> None:
    """The tiny model with a head that scores something else."""
    import torch
    from transformers import AutoTokenizer, LlamaForSequenceClassification

    torch.manual_seed(0)
    model = LlamaForSequenceClassification.from_pretrained(tiny, num_labels=1)
    with torch.no_grad():
        model.score.weight.normal_(std=0.3)
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(path)


def make_turns(path: Path, tiny: Path) -> None:
    """The tiny model with a chat template that adds nothing but the ends of answers."""
    from transformers import AutoTokenizer

    shutil.copytree(tiny, path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}"
        "{% endif %}{% endfor %}"
    )
    tokenizer.save_pretrained(path)


def make_models(folder: Path) -> None:
    from reinforge.offline.starter_model import make_taught_model

    if not (folder / "tiny").exists():
        make_taught_model(folder / "tiny")
    for name in ("experts", "experts-dead"):
        if not (folder / name).exists():
            make_experts(folder / name, dead=name.endswith("dead"))
    if not (folder / "tiny-turns").exists():
        make_turns(folder / "tiny-turns", folder / "tiny")
    if not (folder / "classifier").exists():
        make_classifier(folder / "classifier", folder / "tiny")


def run_case(case: Case, model: Path, folder: Path) -> None:
    from reinforge.build.caller_objects import CallerObjects
    from reinforge.build.run import train_config
    from reinforge.config.load import config_from_dict
    from reinforge.core.errors import StoppedByPolicy
    from reinforge.loops.view import NoView

    raw = base(case, model, folder)
    given: dict[str, Any] = {}
    if case.rewards is not None:
        given["rewards"] = [case.rewards]
    if case.rows is not None:
        given["data"] = case.rows()
    if case.parts:
        given["parts"] = case.parts
    try:
        train_config(config_from_dict(raw), CallerObjects(**given), NoView())
    except StoppedByPolicy:
        pass  # that is how an illness may end


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """The results for the page."""
    sick = [r for r in results if r["rule"] != HEALTHY]
    healthy = [r for r in results if r["rule"] == HEALTHY]
    right = sum(r["right"] for r in sick)
    place = {rule: i for i, rule in enumerate(dict.fromkeys(r["rule"] for r in sick))}
    sick.sort(key=lambda r: place[r["rule"]])
    lines = [
        f"{right} of {len(sick)} runs with an illness have it as the first cause;"
        f" {sum(r['right'] for r in healthy)} of {len(healthy)} healthy runs have no warning.",
        "",
        "| illness | run | what was changed | first cause | what follows from it, and others |",
        "|---|---|---|---|---|",
    ]
    for r in sick:
        first = r["first"] if r["right"] else f"**{r['first']}**"
        others = ", ".join(r["others"]) or "-"
        lines.append(
            f"| {r['rule']} | {r['algorithm']}, {r['steps']} steps | {r['changed']} | {first} |"
            f" {others} |"
        )
    lines += ["", "| healthy | runs | without a warning | learning: yes |", "|---|---|---|---|"]
    kinds = list(dict.fromkeys(r["run"].partition("-")[0] for r in healthy))
    for kind in kinds:
        own = [r for r in healthy if r["run"].partition("-")[0] == kind]
        quiet = sum(r["right"] for r in own)
        learn = sum(r["learning"] == "yes" for r in own)
        lines.append(f"| {kind} | {len(own)} | {quiet} | {learn} |")
    return "\n".join(lines)


def write_table(page: Path, text: str) -> None:
    """Between the two marks of the page."""
    begin, end = ("<!-- doctor: begin -->", "<!-- doctor: end -->")
    head, _, rest = page.read_text().partition(begin)
    tail = rest.partition(end)[2]
    page.write_text(f"{head}{begin}\n{text}\n{end}{tail}")


def finished(folder: Path) -> bool:
    """Whether a run has ended by itself."""
    path = folder / "summary.json"
    return path.exists() and json.loads(path.read_text())["status"] in ("finished", "stopped")


def alarms_while_going(folder: Path) -> list[str]:
    """What would have been warned of at some step of the run."""
    from reinforge.watch.doctor.doctor import Doctor
    from reinforge.watch.logs import flatten, read_json, read_lines

    doctor = Doctor(flatten(read_json(folder / "config.json")))
    told = set()
    for line in read_lines(folder / "metrics.jsonl"):
        doctor.observe(line["step"], line)
        told |= {t.kind for t in doctor.troubles() if t.action != "note"}
    return sorted(told)


def judged(case: Case, folder: Path) -> dict[str, Any]:
    from reinforge.watch.doctor.page import diagnose

    found = diagnose(folder)
    first = found["first"]
    alarm = first is not None and first["action"] != "note"
    if case.rule == HEALTHY and not alarm:
        alarm = alarms_while_going(folder)
    right = not alarm if case.rule == HEALTHY else first is not None and first["kind"] == case.rule
    return {
        "rule": case.rule,
        "run": case.name,
        "algorithm": case.algorithm,
        "changed": case.changed,
        "steps": found["step"],
        "first": None if first is None else first["kind"],
        **({"alarms": alarm} if isinstance(alarm, list) and alarm else {}),
        "what": None if first is None else first["what"],
        "knob": None if first is None else first.get("knob"),
        "others": [other["kind"] for other in found["others"]],
        "learning": found["learning"]["answer"],
        "right": right,
    }


def recorded(case: Case, folder: Path) -> dict[str, Any]:
    """The history of a run as the tests read it: columns of what rules read, with four digits."""
    from reinforge.watch.doctor.doctor import Doctor
    from reinforge.watch.doctor.history import SHARES, TIMES

    history = Doctor.of(folder).history
    timed = case.rule == "slow_phase"
    columns: dict[str, Any] = {}
    for name, column in history.columns.items():
        if name.startswith((SHARES, TIMES)) and not timed:
            continue
        values = [None if v != v else float(f"{v:.4g}") for v in column]
        columns[name] = values if len(set(values)) > 1 else values[0]
    config = {
        key: value
        for key, value in history.config.items()
        if key.startswith(READ) and value is not None and key != "run.dir"
    }
    scores = {
        name: [[s.step, s.value, s.low, s.high] for s in found]
        for name, found in history.scores.items()
    }
    steps = list(history.steps)
    return {
        "rule": case.rule,
        "config": config,
        "steps": steps,
        "columns": columns,
        "scores": scores,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/doctor"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", type=Path, help="write the table there, between its marks")
    parser.add_argument("--record", type=Path, help="write histories for the tests there")
    parser.add_argument("--only", nargs="*", default=[], metavar="RULE")
    parser.add_argument("--again", action="store_true", help="do finished runs again")
    parser.add_argument("--judge", action="store_true", help="only look at the runs there are")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a run in a process of its own
    asked = parser.parse_args()
    asked.runs.mkdir(parents=True, exist_ok=True)
    from reinforge.core.errors import Terminated

    wanted = [c for c in cases() if not asked.only or c.rule in asked.only]
    if asked.one:
        [case] = [c for c in wanted if c.folder == asked.one]
        run_case(case, asked.runs / case.model, asked.runs / case.folder)
        return 0
    if not asked.judge:
        import torch

        torch.set_num_threads(1)
        make_models(asked.runs)
    results = []
    histories: dict[str, Any] = {}
    for case in wanted:
        folder = asked.runs / case.folder
        done = finished(folder)
        began = time.monotonic()
        if not asked.judge and (asked.again or not done):
            shutil.rmtree(folder, ignore_errors=True)
            if case.apart:
                command = [
                    sys.executable,
                    __file__,
                    "--runs",
                    str(asked.runs),
                    "--one",
                    case.folder,
                ]
                subprocess.run(command, check=True)
            else:
                try:
                    run_case(case, asked.runs / case.model, folder)
                except Terminated:
                    raise
                except Exception as error:
                    print(f"FAILED {case.folder}: {error!r}", flush=True)
                    continue
        elif not done:
            continue
        found = judged(case, folder)
        results.append(found)
        if found["right"] and case.first:
            histories[case.folder] = recorded(case, folder)
        took = time.monotonic() - began
        print(
            f"{'ok ' if found['right'] else 'NO '} {case.folder:32} {found['first']}"
            f" {found['others']} learning: {found['learning']} {took:.1f} s",
            flush=True,
        )
    if asked.out is not None:
        asked.out.write_text(json.dumps(results, indent=1) + "\n")
    if asked.page is not None:
        write_table(asked.page, table(results))
    if asked.record is not None:
        lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(histories.items())]
        asked.record.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    wrong = [r for r in results if not r["right"]]
    print(f"{len(results) - len(wrong)} of {len(results)} as they should be")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
