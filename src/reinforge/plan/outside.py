"""What `plan` asks of others, without weights: that every environment begins an episode that the
model can answer, that the Python of an engine's server has the engine, and that this machine can
start the ranks.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from reinforge.build.environments import mixture_of
from reinforge.build.limits import episode_tokens
from reinforge.build.ranks import ranks_here
from reinforge.build.shared_gpus import planned_placement, trainer_gpus
from reinforge.config import architectures
from reinforge.config.engine import SERVERS, workers_of
from reinforge.config.model import ModelConfig
from reinforge.config.rules import architecture, generators
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.core.model_facts import setting
from reinforge.core.row import Row
from reinforge.core.seeds import seed_of
from reinforge.data.chat import Renderer
from reinforge.data.dialogue import DialogueTokens
from reinforge.envs.calls import tool_template_of
from reinforge.models import rope
from reinforge.models.load import (
    check_architecture,
    context_length,
    load_config,
    load_tokenizer,
    pick_device,
)
from reinforge.models.mixers import kernel_note
from reinforge.plan.hub import models_of
from reinforge.plan.preflight import PlanReport
from reinforge.rollout.dialogue.env_player import first_prompt
from reinforge.rollout.dialogue.environment import EpisodeEnvironment, EpisodeFailure

IMPORT_SECONDS = 20.0


def check_env(config: Config, rows: Sequence[Row], report: PlanReport) -> None:
    """Makes each environment with its options and begins one episode: its first prompt must leave
    room for an answer.
    """
    if config.env is None:
        return
    mixture = mixture_of(config.env, config.run.seed)
    renderer = Renderer(load_tokenizer(config.model), config.data)
    most = episode_tokens(config, context_length(config.model))
    tool_template = tool_template_of(config.env.calls, renderer)
    firsts: dict[str, Row] = {}  # a row for each environment
    for row in rows:
        firsts.setdefault(mixture.choose(row).name, row)
        if len(firsts) == len(mixture.entries):
            break

    async def begin(row: Row, seconds: float | None) -> int:
        environment = EpisodeEnvironment(
            mixture, row, seed_of(config.run.seed, "plan", row.id, "env"), turn_seconds=seconds
        )
        try:
            return len(
                await first_prompt(
                    DialogueTokens(renderer, f"row {row.id}"), tool_template, environment
                )
            )
        finally:
            await environment.close()

    for name, row in firsts.items():
        try:
            tokens = asyncio.run(begin(row, config.env.turn_seconds))
        except EpisodeFailure as failed:
            report.refuse(
                "env",
                f"{name} does not begin row {row.id}: {failed.why.rstrip('.')}.",
                "Such episodes would be unscored, and train nothing.",
            )
            continue
        if tokens >= most:
            report.refuse(
                "env",
                f"the first prompt of {name} has {tokens} tokens with its tools and leaves no room"
                f" for an answer below {most}.",
                "Use a model with a longer context, fewer tools or shorter descriptions, or raise"
                " env.max_tokens.",
            )


def check_engine(config: Config, report: PlanReport) -> None:
    """`engine.python` must find what it is to run."""
    kind = config.rollout.engine
    engine = config.engine
    if kind == "native" or engine.address or engine.python is None:
        return
    package = SERVERS[kind].package
    ask = f"import importlib.util as u, sys; sys.exit(0 if u.find_spec({package!r}) else 3)"
    command = [os.path.expanduser(engine.python), "-c", ask]
    try:
        code = subprocess.run(
            command, env={**os.environ, **engine.env}, capture_output=True, timeout=IMPORT_SECONDS
        ).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        report.refuse(
            "engine.python",
            f"{engine.python} does not run: {error}.",
            f"Give the path of a Python that has {package}.",
        )
        return
    if code:
        report.refuse(
            "engine.python",
            f"{engine.python} has no {package}.",
            f"Install it there, or name a Python that has {package}.",
        )


def check_servers(config: Config, report: PlanReport) -> None:
    """Which GPUs the servers would have here. Warnings, as of ranks: the machine that plans need
    not be the one that trains. Under Ray actors start them, where their GPUs are.
    """
    engine = config.engine
    if config.rollout.engine == "native" or engine.address or config.cluster.kind == "ray":
        return
    try:
        placed = planned_placement(config)
        gpus = trainer_gpus(config)
    except InputError as error:
        report.warnings.append(f"on this machine {error}")
        return
    idle = [gpu for gpu in gpus if not placed.on(gpu)]
    if idle and placed.colocated and not engine.devices:
        most = len(gpus) // workers_of(engine)
        if most > engine.replicas:
            report.warn(
                "engine.replicas",
                f"{len(idle)} of the trainer's {len(gpus)} GPUs generate nothing.",
                f"Set it to {most}.",
            )


def check_model(config: Config, report: PlanReport) -> None:
    """That the model's architecture can be trained, as far as its config.json tells."""
    shape = load_config(config.model)
    check_architecture(shape, config.model.path, scores=config.algorithm.family == "reward")
    report.errors += [str(error) for error in architecture.refusals(config, shape)]
    if note := rope.note(shape.get_text_config()):
        report.warn("model.path", note)
    if note := kernel_note(shape.get_text_config(), config.model.device):
        report.warn("model.path", note)
    if architectures.keeps_state(shape.to_dict()) and config.rollout.engine == "native":
        if config.rollout.speculation.when != "never":
            report.refuse("rollout.speculation.when", architectures.DRAFTS, "Set it to never.")
        if config.rollout.prefix_cache:
            report.warn("rollout.prefix_cache", architectures.PREFIXES)
    rope.check(shape.get_text_config(), config.data.max_length)


def check_other_models(config: Config) -> None:
    """That the teachers, the critic and the reward models on the hub are there: asks for their
    configurations. Directories were looked at before.
    """
    revisions: dict[str, str | None] = {}
    if config.teacher is not None:
        revisions = {f"{key}.path": one.revision for key, one in config.teacher.teachers()}
    for key, name in models_of(config):
        of_the_policy = key in ("model.path", "model.tokenizer")
        if not of_the_policy and not Path(name).expanduser().exists():
            load_config(ModelConfig(path=name, revision=revisions.get(key)), key)


def check_heads(config: Config, report: PlanReport) -> None:
    """A server may have no attention kernel for small heads on a CPU (`ServerFacts.cpu_head_size`):
    it would end at the first token.
    """
    server = config.rollout.engine
    if server == "native" or config.engine.address:
        return
    smallest = SERVERS[server].cpu_head_size
    if smallest == 1 or pick_device(config.model.device).type != "cpu":
        return
    shape = load_config(config.model)
    heads = getattr(shape, "num_attention_heads", None)
    size = setting(shape, "head_dim") or (shape.hidden_size // heads if heads else None)
    if size is not None and size < smallest:
        report.refuse(
            "rollout.engine",
            f"the model's heads have size {size}, and {server} on a CPU knows sizes from"
            f" {smallest} up.",
            "Use the native engine, or another model.",
        )


def check_ranks(config: Config, report: PlanReport, *, gpu: str | None = None) -> None:
    """Who generates, here or on GPUs of the kind `gpu`. What is wrong is a warning, because the
    machine that plans need not be the one that trains.
    """
    if config.train.backend == "local":
        return
    asked = config.model.device.partition(":")[0]
    device: str | None
    try:
        if gpu is not None:
            ranks, device = config.train.ranks, "cuda"
        elif config.cluster.kind == "ray":  # which devices it has is known when it is there
            ranks, device = config.train.ranks, None if asked == "auto" else asked
        else:
            ranks, device = ranks_here(config), pick_device(config.model.device).type
        report.summary["rollouts"] = generators.told(config, ranks, device)
    except InputError as error:
        report.warnings.append(f"on this machine {error}")
