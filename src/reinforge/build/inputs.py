"""What a run is made from, read before any model is loaded: rows, rewards, algorithm, tokenizer,
prompts.

Everything here is frozen and computed in one order:

    read_inputs      rows -> rewards -> algorithm -> tokenizer and context
    encode_prompts   rows -> token ids, after the length policy
    model_inputs     how long sequences get -> what policy, backend and engine are made from
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reinforge.algorithms.algorithm import Algorithm
from reinforge.build.algorithm import make_algorithm
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.data import check_scored_columns, few_rows, load_data
from reinforge.build.fp8_emulation import emulation_warning
from reinforge.build.limits import episode_tokens
from reinforge.build.reward_weights import reward_weights
from reinforge.config import architectures
from reinforge.config.rules import architecture
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.core.sample import Row
from reinforge.data.bad_rows import SHOWN, BadRows
from reinforge.data.chat import Renderer, fit_prompt
from reinforge.data.disk_rows import DiskRows, select
from reinforge.loops.view import ViewLike
from reinforge.models import rope
from reinforge.models.load import check_architecture, load_config, load_tokenizer
from reinforge.models.mixers import kernel_choice, kernel_note
from reinforge.rewards.build import build_rewards
from reinforge.rewards.execution import note_unfindable
from reinforge.rewards.function import FunctionReward
from reinforge.rewards.load import file_of

NO_LIMIT = 1 << 20  # tokens; of a model whose configuration names no context

MakeRewards = Callable[[Config, Mapping[str, Callable[..., Any]], str], list[FunctionReward]]


@dataclass(frozen=True)
class RunInputs:
    """What a run is made from, apart from its models. Made by `read_inputs`, read by whatever
    builds a part of the run.
    """

    cfg: Config  # with what a Python caller gave in place of its own
    train_rows: Sequence[Row]
    eval_rows: Sequence[Row]
    rewards: list[FunctionReward]
    weights: dict[str, float]  # of the rewards, by name, and of what an environment or agent adds
    algorithm: Algorithm
    tokenizer: Any
    renderer: Renderer
    context: int  # tokens of the longest sequence that the model computes

    @property
    def best(self) -> float:
        """The largest total reward of scores in [0, 1]."""
        return sum(max(0.0, weight) for weight in self.weights.values())

    @property
    def uncontained(self) -> list[str]:
        """Rewards that run what the model writes without containment."""
        return [r.name for r in self.rewards if getattr(r.function, "unsafe", False)]

    @property
    def reward_files(self) -> dict[str, str]:
        """The rewards of the configuration that stand in a file of the user's, and where."""
        found = {}
        for cfg, reward in zip(self.cfg.rewards, self.rewards, strict=False):
            source, _, attribute = cfg.name.rpartition(":")
            if source.endswith(".py"):
                found[cfg.name] = f"{Path(source).expanduser().resolve()}:{attribute}"
            elif place := file_of(reward.function):
                found[cfg.name] = place
        return found


@dataclass(frozen=True)
class EncodedPrompts:
    """The rows whose prompts fit, in the order of the data, and the token ids of each.
    `encode_train_prompts` and `encode_eval_prompts` make it; rollouts ask it for ids.
    """

    rows: Sequence[Row]
    lengths: Sequence[int]  # tokens of each prompt
    longest: int  # tokens that generation may reach: prompt and answer, or a whole episode
    ids_of: Callable[[Row], list[int]]  # of rows on disk they are computed when they are asked for


@dataclass(frozen=True)
class ModelInputs:
    """What policy, backend, critic and engine are made from: plain values, which travel to an actor
    as they are. `model_inputs` makes it, the factories get it.
    """

    cfg: Config
    scores: bool  # the model is to become a reward model
    context: int
    stop_tokens: frozenset[int]  # that end an answer, besides the model's own
    longest: int  # tokens that generation may reach; 0 where nothing is generated
    trains: bool = True  # whether training has the device of the engine too
    all_ranks: bool = False  # every rank that trains generates a share
    budget: int | None = None  # tokens of a micro-batch, where the backend has been made


def read_inputs(
    cfg: Config, given: CallerObjects, view: ViewLike, make_rewards: MakeRewards
) -> RunInputs:
    """Reads the data, builds rewards (reward models are loaded) and the algorithm, and opens the
    tokenizer.
    """
    view.doing("reading data" if cfg.data.mixture else f"reading data ({cfg.data.source})")
    train_rows, eval_rows = load_data(cfg.data, given, view.message)
    cfg, functions = given.described(cfg)
    # before anything is loaded
    check_scored_columns(cfg, build_rewards(cfg.rewards, functions), train_rows, eval_rows)
    device = cfg.model.device if given.model is None else str(given.model.device)
    rewards = make_rewards(cfg, functions, device)
    weights = reward_weights(cfg, rewards)
    algorithm = make_algorithm(cfg, weights)
    if given.model is None:
        shape = load_config(cfg.model)
        check_architecture(shape, cfg.model.path, scores=algorithm.family == "reward")
        tokenizer = load_tokenizer(cfg.model)
        model_config = shape.get_text_config()
    else:
        tokenizer = given.model.tokenizer
        model_config = given.model.config
    architecture.check(cfg, model_config if given.model is not None else shape)
    # a model whose rotary embedding follows the length of a sequence goes as far as it does not
    rope.check(model_config, cfg.data.max_length)
    if note := rope.note(model_config):
        view.message(f"model: {note}")
    if note := kernel_note(model_config, device) or kernel_choice(model_config, device):
        view.message(f"model: {note}")
    if warning := emulation_warning(cfg, device):
        view.message(str(warning))
    if cfg.rollout.prefix_cache and architectures.keeps_state(model_config.to_dict()):
        view.message(f"rollout.prefix_cache: {architectures.PREFIXES}")
    for note in algorithm.notes:
        view.message(note)
    for reward in rewards:
        for note in reward.notes:
            view.message(note)
    if note := note_unfindable(rewards):
        view.message(note)
    return RunInputs(
        cfg=cfg,
        train_rows=train_rows,
        eval_rows=eval_rows,
        rewards=rewards,
        weights=weights,
        algorithm=algorithm,
        tokenizer=tokenizer,
        renderer=Renderer(tokenizer, cfg.data),
        context=rope.context(model_config) or NO_LIMIT,
    )


def encode_prompts(
    inputs: RunInputs,
    rows: Sequence[Row],
    max_new_tokens: int,
    view: ViewLike,
    check: Callable[[Row], object] | None = None,
) -> EncodedPrompts:
    """The rows' prompts as token ids, after the length policy. `check` raises what else is wrong
    with a row.
    """
    cfg = inputs.cfg
    context = inputs.context
    view.doing(f"tokenising {len(rows)} prompts")
    if max_new_tokens >= context:
        raise InputError(
            f"max_new_tokens {max_new_tokens} leaves no room for a prompt in the model's context"
            f" of {context}.",
            where="rollout.max_new_tokens",
            fix="Lower it.",
        )
    limit = cfg.data.max_length or context - max_new_tokens
    prompts = _fitted_prompts(inputs, rows, limit, view, check)
    if cfg.env is not None or cfg.agent is not None:
        longest = episode_tokens(cfg, context)
    else:
        longest = max(prompts.lengths, default=-max_new_tokens) + max_new_tokens
    if longest > context:
        raise InputError(
            f"a prompt with {max_new_tokens} new tokens has {longest}, and the model's context is"
            f" {context}.",
            where="data.max_length",
            fix=(f"Set it to {context - max_new_tokens} or less, or lower rollout.max_new_tokens."),
        )
    return replace(prompts, longest=longest)


def _fitted_prompts(
    inputs: RunInputs,
    rows: Sequence[Row],
    limit: int,
    view: ViewLike,
    check: Callable[[Row], object] | None,
) -> EncodedPrompts:
    """All prompts, tokenised once. Of rows on disk nothing but lengths is kept."""
    cfg = inputs.cfg.data
    on_disk = isinstance(rows, DiskRows)
    bad = BadRows(drop=cfg.bad_rows == "drop")
    ids: dict[str, list[int]] = {}
    kept = array("q")  # rows
    lengths = array("q")
    lost = array("q")
    counts = {"dropped": 0, "truncated": 0}
    for i, row in enumerate(rows):
        whole: list[int] | None = None
        with bad.looking_at(row.id):
            if check is not None:
                check(row)
            whole = inputs.renderer.prompt(row)
        if whole is None:
            continue
        fitting = fit_prompt(cfg, row, whole, limit)
        if fitting is None:
            counts["dropped"] += 1
            lost.append(i)
            continue
        counts["truncated"] += fitting is not whole
        kept.append(i)
        lengths.append(len(fitting))
        if not on_disk:
            ids[row.id] = fitting
    bad.refuse()
    for line in bad.lines():
        view.message(f"data: {line}")
    if lost and not kept:
        raise InputError(
            f"all {len(lost)} rows have more than {limit} tokens",
            where="data.max_length",
            fix="Raise it, or check the template.",
        )
    report_lengths(counts, limit, [rows[i] for i in lost[: SHOWN + 1]], view)

    def again(row: Row) -> list[int]:
        whole = inputs.renderer.prompt(row)
        return fit_prompt(cfg, row, whole, limit) or whole

    ids_of = again if on_disk else lambda row: ids[row.id]
    return EncodedPrompts(select(rows, kept), lengths, longest=0, ids_of=ids_of)


def encode_train_prompts(
    inputs: RunInputs, view: ViewLike, check: Callable[[Row], object] | None = None
) -> EncodedPrompts:
    longest = inputs.cfg.rollout.max_new_tokens
    return encode_prompts(inputs, inputs.train_rows, longest, view, check)


def encode_eval_prompts(inputs: RunInputs, view: ViewLike) -> EncodedPrompts | None:
    """The held-out prompts; None where there are no rows, or nothing to score an answer with."""
    if not inputs.eval_rows or not inputs.weights:
        return None
    return encode_prompts(inputs, inputs.eval_rows, eval_new_tokens(inputs.cfg), view)


def eval_new_tokens(cfg: Config) -> int:
    """The most tokens that an answer may have in an evaluation."""
    return cfg.eval.max_new_tokens or cfg.rollout.max_new_tokens


def report_few_rows(cfg: Config, rows: int, view: ViewLike) -> None:
    """Says that a step has the same row more than once, where it must."""
    doubt = few_rows(cfg, rows)
    if doubt is not None:
        view.message(f"warning: {doubt}")


def report_lengths(
    counts: Mapping[str, int], limit: int, dropped: Sequence[Row], view: ViewLike
) -> None:
    """Says how many rows the length policy changed, and which it dropped."""
    for name, count in counts.items():
        if count and name != "rows":
            shown = ", ".join(row.place or row.id for row in dropped[:SHOWN])
            more = ", ..." if len(dropped) > SHOWN else ""
            which = f": {shown}{more}" if name == "dropped" and dropped else ""
            view.message(f"data: {count} rows {name} (longer than {limit} tokens){which}")


def model_inputs(inputs: RunInputs, *prompts: EncodedPrompts | None) -> ModelInputs:
    """What the models are made from, for a run that generates for these prompts."""
    return ModelInputs(
        cfg=inputs.cfg,
        scores=inputs.algorithm.family == "reward",
        context=inputs.context,
        stop_tokens=frozenset(inputs.renderer.stop_tokens),
        longest=max((p.longest for p in prompts if p is not None), default=0),
        all_ranks=inputs.cfg.rollout.all_ranks is True,
    )
