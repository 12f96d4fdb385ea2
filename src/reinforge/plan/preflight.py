"""What can be told about a configuration without importing torch or transformers: paths, names, the
run directory.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from reinforge.algorithms import catalogue
from reinforge.algorithms.settings import closest
from reinforge.config import megatron
from reinforge.config.adapter import AdapterConfig
from reinforge.config.architectures import FIX, refusal, refusal_in_words
from reinforge.config.chat_templates import CHAT_TEMPLATES
from reinforge.config.recipes import how_to_make
from reinforge.config.rollout import RolloutConfig
from reinforge.config.rules.check import doubts
from reinforge.config.rules.machine import missing
from reinforge.config.saved_adapter import as_known, overruled
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.core.hub_trouble import hub_token
from reinforge.data.readers import FILES, kind_of, size_of
from reinforge.envs import names as env_names
from reinforge.loops.config_changes import check_changes
from reinforge.models import constraint_library
from reinforge.plan.hub import models_of
from reinforge.plan.tracker_keys import wandb_has_key
from reinforge.rewards import names as reward_names

KINDS = {"lora": "LoRA", "rslora": "rsLoRA", "dora": "DoRA", "qlora": "QLoRA (base in NF4)"}
# what `reinforge launch` leaves in the run directory before there is a run
LAUNCHED = {"launch", "logs"}
IMPORTING = "importing"  # how a stage of phase 2 begins whose seconds do not count
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass
class PlanReport:
    """What `plan` found.

    Errors mean that the run would fail; warnings that it may not do what was meant.
    """

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.errors

    def refuse(self, where: str, what: str, fix: str = "") -> None:
        self.errors.append(str(InputError(what, where=where, fix=fix or None)))

    def warn(self, where: str, what: str, fix: str = "") -> None:
        self.warnings.append(str(InputError(what, where=where, fix=fix or None)))

    def extend(self, other: dict[str, Any]) -> None:
        self.errors += other["errors"]
        self.warnings += other["warnings"]
        self.summary.update(other["summary"])

    def as_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


def tell_stage(what: str) -> None:
    """Tells what phase 2 begins with: `plan` reads it from standard error when a deadline comes."""
    print(f"stage: {what}", file=sys.stderr, flush=True)


def preflight(config: Config) -> PlanReport:
    """Phase 1 of `plan`: everything wrong that the file system and the lists of names can tell, in
    well under a second.
    """
    report = check_settings(config)
    check_run_dir(config, report)
    return report


def check_settings(config: Config) -> PlanReport:
    """All of it but the run directory: what would be wrong in another one too."""
    report = PlanReport(summary=_step_summary(config))
    if config.algorithm.name not in catalogue.TABLE:
        report.refuse(
            "algorithm.name",
            f"there is no algorithm {config.algorithm.name!r}.",
            _nearest(config.algorithm.name, catalogue.TABLE),
        )
    _check_model(config, report)
    for i, item in enumerate(config.data.mixture):
        _check_source(f"data.mixture.{i}.source", item.source, item.options, report)
    if not config.data.mixture:
        _check_source("data.source", config.data.source, config.data.options, report)
    if config.data.eval.source is not None:
        _check_source("data.eval.source", config.data.eval.source, config.data.eval.options, report)
    if config.ptx is not None:
        _check_source("ptx.source", config.ptx.source, config.ptx.options, report)
    _check_rewards(config, report)
    _check_env(config, report)
    _check_agent(config, report)
    _check_parts(config, report)
    _check_optimizer(config, report)
    _check_cut(config, report)
    _check_structured(config, report)
    for doubt in doubts(config):
        report.warn(doubt.key, f"{doubt.why}.", f"{doubt.fix[0].upper()}{doubt.fix[1:]}.")
    for absent in missing(config):
        report.refuse(*absent)
    _check_hub(config, report)
    _check_trackers(config, report)
    held_out = config.data.eval.size or config.data.eval.source
    if config.eval.every and not held_out and not config.eval.benchmarks:
        report.refuse(
            "eval.every",
            "there are no held-out rows to evaluate on.",
            "Set data.eval.size, data.eval.source or eval.benchmarks, or eval.every=0.",
        )
    return report


def _check_cut(config: Config, report: PlanReport) -> None:
    """What the config.json of a model in a directory tells about ranks that share its matrices."""
    train = config.train
    path = Path(config.model.path).expanduser() / "config.json"
    if not path.is_file() or (train.backend != "megatron" and train.tensor_parallel == 1):
        return
    try:
        model = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return  # whoever loads it will say so
    if train.backend == "megatron" and (why := megatron.unknown_in(model)) is not None:
        report.refuse(
            "train.backend",
            f"{config.model.path} has {why}: the backend megatron does not know it.",
            "Set train.backend=fsdp.",
        )
    elif (why := megatron.uncut(model, train.tensor_parallel)) is not None:
        report.refuse("train.tensor_parallel", why, "Set it to a number that divides them.")


def _check_structured(config: Config, report: PlanReport) -> None:
    """The forms of answers: their files, and whether the library understands them."""
    for where, section in (
        ("rollout.structured", config.rollout.structured),
        ("eval.structured", config.eval.structured),
    ):
        if section is None:
            continue
        try:
            constraint_library.check(section.constraint(where), section.key(where))
        except InputError as error:
            report.refuse(error.where or where, error.what, error.fix or "")


def _check_agent(config: Config, report: PlanReport) -> None:
    agent = config.agent
    if agent is None:
        return
    if agent.name is not None and ".py:" in agent.name:
        _check_function("agent.name", agent.name, report)
    if agent.command and shutil.which(agent.command[0]) is None and agent.command[0] != "python":
        report.refuse(
            "agent.command",
            f"there is no program {agent.command[0]}.",
            "Give its path, or install it.",
        )
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        report.refuse(
            "agent",
            f"agents need {', '.join(missing)}, which is not installed.",
            "pip install 'reinforge[serve]'",
        )


def _check_parts(config: Config, report: PlanReport) -> None:
    """The parts of the algorithm: names that there are, or functions that their files define."""
    cfg = config.algorithm
    parts = (
        ("advantage", cfg.advantage, catalogue.ADVANTAGES),
        ("surrogate", cfg.surrogate, catalogue.SURROGATES),
        ("selection", cfg.selection, catalogue.SELECTIONS),
        ("reduce", cfg.reduce, catalogue.REDUCERS),
        ("correction.name", cfg.correction.name, catalogue.CORRECTIONS),
        ("kl.estimator", cfg.kl.estimator, catalogue.ESTIMATORS),
    )
    for key, name, known in parts:
        if name and ".py:" in name:
            _check_function(f"algorithm.{key}", name, report)
        elif name and ":" not in name and name not in known:
            report.refuse(
                f"algorithm.{key}",
                f"there is no {key.partition('.')[0]} {name!r}.",
                _nearest(name, known),
            )


def _backend(config: Config) -> str | None:
    """Where several processes train: which, and how they stand."""
    train = config.train
    if train.backend == "local":
        return None
    shares = [
        f"{key.replace('_', ' ')} in groups of {n}"
        for key in ("tensor_parallel", "sequence_parallel")
        if (n := getattr(train, key)) > 1
    ]
    return ", ".join(
        [
            f"{train.backend}, {f'{train.ranks} ranks' if train.ranks else 'a rank for every GPU'}",
            *shares,
        ]
    )


def _step_summary(config: Config) -> dict[str, Any]:
    rl = config.algorithm.rl
    per_step = config.train.prompts_per_step
    samples = per_step * config.algorithm.group_size if rl else per_step
    adapter = config.adapter and as_known(config.adapter)
    targets = adapter and (
        adapter.targets if isinstance(adapter.targets, str) else ", ".join(adapter.targets)
    )
    summary: dict[str, Any] = {
        "model": config.model.path,
        "trained": (
            f"{KINDS[adapter.kind]} of rank {adapter.rank} on {targets}{_begins(adapter)}"
            if adapter
            else _trained_weights(config)
        ),
        "algorithm": config.algorithm.name,
        "backend": _backend(config),
        "samples_per_step": samples,
        "optimizer_steps_per_step": (
            config.algorithm.epochs * config.algorithm.minibatches if rl else 1
        ),
        "steps": config.train.steps,
        "run_dir": config.run.dir,
    }
    if rl:
        summary["new_tokens_per_step_at_most"] = samples * config.rollout.max_new_tokens
        summary |= _rollout_summary(config.rollout)
    return summary


def _begins(adapter: AdapterConfig) -> str:
    return ", which begins as the principal part of the weights" if adapter.init == "pissa" else ""


def _trained_weights(config: Config) -> str:
    train = config.train
    found = f"weights of {', '.join(train.only)}" if train.only else "all weights"
    return f"{found} without {', '.join(train.freeze)}" if train.freeze else found


def _rollout_summary(rollout: RolloutConfig) -> dict[str, str]:
    """What is not done to answers unless a configuration asks for it."""
    found = {}
    if rollout.structured is not None:
        found["answers"] = f"match {rollout.structured.shown('rollout.structured')}"
    drafts = rollout.speculation
    if drafts.when != "never":
        few = f" while at most {drafts.rows} sequences are left" if drafts.when == "tail" else ""
        found["drafts"] = f"{drafts.drafts} tokens are guessed at once{few}"
    return found


def _nearest(name: str, names: Iterable[str]) -> str:
    close = closest(name, names, 0.5)
    return (f"Did you mean {close}? " if close else "") + f"There are: {', '.join(names)}."


def _check_architecture(file: Path, report: PlanReport) -> None:
    """That nothing is known against the architecture of the policy."""
    try:
        model = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # told where the configuration is loaded
    if isinstance(model, dict) and (why := refusal(model)) is not None:
        report.refuse("model.path", refusal_in_words(model, why), FIX)


def _check_model(config: Config, report: PlanReport) -> None:
    model = config.model
    adapter = config.adapter
    for i, reward in enumerate(config.rewards):
        if reward.name in ("model", "process") and not isinstance(reward.options.get("path"), str):
            fix = "Write options: {path: org/name}, or the path of a directory."
            report.refuse(
                f"rewards.{i}.options.path", "the reward `model` needs a reward model.", fix
            )
    for key, text in models_of(config):
        path = Path(text).expanduser()
        if path.is_dir():
            if key != "model.tokenizer" and not (path / "config.json").is_file():
                is_adapter = (path / "adapter_config.json").is_file()
                fix = (
                    "This is an adapter: put its base model here and this path under adapter.path."
                    if is_adapter
                    else "Give the model's directory."
                )
                report.refuse(key, f"{text} has no config.json.", fix)
            elif key == "model.path":
                _check_architecture(path / "config.json", report)
        elif path.is_file():
            if path.suffix != ".gguf":
                report.refuse(
                    key,
                    f"{text} is a file, but not a .gguf file.",
                    "Give the directory that holds config.json.",
                )
        elif (making := how_to_make(text)) is not None:
            report.refuse(
                key,
                f"there is no model in {text} yet.",
                f"Make it: `{making}`.",
            )
        elif (
            text.startswith((".", "/", "~")) or text.endswith(".gguf") or not HUB_ID.fullmatch(text)
        ):
            report.refuse(
                key,
                f"no such file or directory: {text}.",
                "Give a hub id (org/name), an existing directory or a .gguf file.",
            )
        elif "/" in text and path.parent.is_dir():
            near = closest(
                path.name, [child.name for child in path.parent.iterdir() if child.is_dir()], 0.6
            )
            fix = f"Did you mean {path.parent / near}?" if near else ""
            report.refuse(
                key, f"{path.parent} is a directory here, and there is no {path.name} in it.", fix
            )
    template = model.chat_template
    if template and template not in CHAT_TEMPLATES and not Path(template).expanduser().is_file():
        report.refuse(
            "model.chat_template",
            f"{template} is neither the name of a chat template nor a file.",
            f"There are: {', '.join(CHAT_TEMPLATES)}.",
        )
    if adapter and adapter.path:
        try:
            for told in overruled(adapter):
                report.warn(
                    f"adapter.{told.partition(':')[0]}",
                    f"a saved adapter stays what it is: {told}.",
                    "Leave it out, or leave out adapter.path for a new one.",
                )
        except InputError as error:
            report.errors.append(str(error))


def _check_source(key: str, source: str, options: dict[str, Any], report: PlanReport) -> None:
    try:
        kind = kind_of(source)
        size_of(source, options)  # generated tasks check their options
    except InputError as error:
        report.errors.append(str(error))
        return
    path = Path(source).expanduser()
    if kind in FILES and not path.is_file():
        near = (
            difflib.get_close_matches(path.name, os.listdir(path.parent), 1, 0.6)
            if path.parent.is_dir()
            else []
        )
        report.refuse(
            key,
            f"no such file: {source}.",
            (
                f"Did you mean {path.parent / near[0]}?"
                if near
                else f"Paths are relative to {Path.cwd()}."
            ),
        )
    elif kind == "reasoning_gym" and importlib.util.find_spec("reasoning_gym") is None:
        report.refuse(
            key, "the package reasoning_gym is not installed.", "pip install 'reinforge[tasks]'"
        )


def _check_rewards(config: Config, report: PlanReport) -> None:
    seen: set[str] = set()
    for i, reward in enumerate(config.rewards):
        key = f"rewards.{i}.name"
        module, colon, _ = reward.name.rpartition(":")
        if ".py:" in reward.name or reward.name.endswith(".py"):
            _check_function(key, reward.name, report)
        elif colon:
            if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", reward.name):
                report.refuse(key, f"{reward.name!r} is not of the form package.module:function.")
            elif (
                importlib.util.find_spec(module.partition(".")[0]) is None
                and not Path(module.partition(".")[0]).exists()
            ):
                report.refuse(
                    key,
                    f"there is no package {module.partition('.')[0]!r}.",
                    "Install it, or write `file.py:function`.",
                )
        elif reward.name not in reward_names.BUILTIN:
            report.refuse(
                key,
                f"there is no reward {reward.name!r}.",
                _nearest(reward.name, reward_names.BUILTIN) + " Your own: `file.py:function`.",
            )
        if reward.name in seen:
            report.warn(
                key, f"{reward.name} is listed twice.", "Give it once with the sum of the weights."
            )
        seen.add(reward.name)
    if config.rewards and all(r.weight == 0 for r in config.rewards):
        report.warn(
            "rewards", "every weight is 0: the total reward is always 0 and nothing is learned."
        )


def _check_env(config: Config, report: PlanReport) -> None:
    """Environments and formats that there are; and somebody who says what an episode is worth."""
    if config.env is None:
        return
    for i, entry in enumerate(config.env.entries):
        key = f"env.mix.{i}.name" if config.env.mix else "env.name"
        library, _, rest = entry.name.partition(":")
        own = rest if library in env_names.FOREIGN else entry.name  # what may be the user's
        if entry.python is not None and shutil.which(Path(entry.python).expanduser()) is None:
            report.refuse(
                key.replace("name", "python"),
                f"{entry.python} is no program that can be run.",
                "Give the path of a Python interpreter.",
            )
        if ".py:" in own or own.endswith(".py"):
            _check_function(key, own, report)
        elif ":" not in entry.name and entry.name not in env_names.BUILTIN:
            report.refuse(
                key,
                f"there is no environment {entry.name!r}.",
                _nearest(entry.name, env_names.BUILTIN) + " Your own: `file.py:Class`.",
            )
        elif entry.name in env_names.UNSCORED and not config.rewards and not config.env.compare:
            report.refuse(
                "rewards",
                f"the environment {entry.name} says nothing about what an answer is worth.",
                "Add rewards, e.g. [{name: exact_number}].",
            )
    if config.env.calls not in ("auto", *env_names.FORMATS):
        report.refuse(
            "env.calls",
            f"there is no format of tool calls {config.env.calls!r}.",
            _nearest(config.env.calls, ("auto", *env_names.FORMATS)),
        )
    if config.env.compare and ".py:" in config.env.compare:
        _check_function("env.compare", config.env.compare, report)


def _check_optimizer(config: Config, report: PlanReport) -> None:
    critic = None if config.critic is None else config.critic.optimizer
    for section, optimizer in (("train", config.train.optimizer), ("critic", critic)):
        if optimizer is not None and ".py" in optimizer.name:
            _check_function(f"{section}.optimizer.name", optimizer.name, report)


def _check_function(key: str, name: str, report: PlanReport) -> None:
    """`file.py:function`: the file parses and defines the name at its top level.

    Nothing is executed.
    """
    file, colon, function = name.rpartition(":")
    if not colon:
        report.refuse(key, f"{name} names a file but no function.", f"Write `{name}:<function>`.")
        return
    if not Path(file).is_file():
        report.refuse(key, f"no such file: {file}.")
        return
    try:
        tree = ast.parse(Path(file).read_bytes(), filename=file)
    except (SyntaxError, ValueError) as error:
        report.refuse(key, f"{file} is not Python: {error}.")
        return
    defined = list(_names_in(tree.body))
    if function not in defined:
        report.refuse(
            key,
            f"{file} does not define {function!r}.",
            _nearest(function, defined) if defined else "",
        )


def _names_in(body: list[ast.stmt]) -> Iterable[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.If | ast.Try):
            yield from _names_in([*node.body, *node.orelse])


def _check_hub(config: Config, report: PlanReport) -> None:
    """A run that is to be on the hub needs the name of a repository, and a token."""
    where = "run.hub.repo"
    if config.run.hub is None:
        return
    if not (HUB_ID.fullmatch(config.run.hub.repo) and "/" in config.run.hub.repo):
        report.refuse(
            where,
            f"{config.run.hub.repo} is no name of a repository.",
            "Write org/name, or your own name in place of org.",
        )
    try:
        hub_token(where)
    except InputError as error:
        report.refuse(where, error.what, error.fix or "")


def _check_trackers(config: Config, report: PlanReport) -> None:
    """A tracker that cannot log in is switched off at the first step, and the run goes on without
    it: better to know before.
    """
    if "wandb" in config.run.log.sinks and not wandb_has_key():
        report.warn(
            "run.log.sinks",
            "Weights & Biases has no key: it would not get this run.",
            "`wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline to keep it here.",
        )


def check_run_dir(config: Config, report: PlanReport) -> None:
    """Whether the run can be begun in its directory, or go on there."""
    path = Path(config.run.dir)
    resume = config.run.resume
    full = path.resolve()
    if Path.cwd().resolve().is_relative_to(full) or full == Path.home():
        report.refuse(
            "run.dir",
            f"{path} is the working directory, its parent or your home.",
            "Give the run a directory of its own, e.g. runs/first.",
        )
        return
    nearest = next(p for p in (full, *full.parents) if p.exists())
    if not nearest.is_dir():
        report.refuse("run.dir", f"{nearest} is a file.", "Choose another directory.")
    elif not os.access(nearest, os.W_OK | os.X_OK):
        report.refuse("run.dir", f"{nearest} is not writable.", "Choose another directory.")
    elif full.exists():
        has_run = any((full / "checkpoints").glob("step-*"))
        if has_run and resume != "never":
            try:
                check_changes(full, config)
            except InputError as error:
                report.refuse(error.where or "run.dir", error.what, error.fix or "")
        if has_run and resume == "never":
            report.refuse(
                "run.dir",
                f"{path} already holds a run with checkpoints.",
                "Choose another run.dir, or run.resume=auto to continue it.",
            )
        elif not has_run and resume == "must" and config.run.hub is None:
            report.refuse(
                "run.resume",
                f"{path} holds no checkpoint to continue from.",
                "Use run.resume=auto, or check run.dir.",
            )
        elif (
            not has_run
            and {p.name for p in full.iterdir()} - LAUNCHED
            and not (full / "metrics.jsonl").exists()
        ):
            report.warn(
                "run.dir",
                f"{path} is not empty and is not a run.",
                "Its files stay, the run's come beside them.",
            )
    elif resume == "must" and config.run.hub is None:
        report.refuse(
            "run.resume",
            f"{path} does not exist: there is nothing to continue.",
            "Use run.resume=auto, or check run.dir.",
        )
