"""What `reinforge serve` puts behind HTTP: a model with its engine, or a reward model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from reinforge.build.saved_model import config_of, is_run, load_weights, open_model
from reinforge.config.data import DataConfig
from reinforge.core.errors import InputError
from reinforge.data.chat import Renderer
from reinforge.engines.native import NativeEngine
from reinforge.models.load import load_scalar, stop_tokens
from reinforge.rewards.model import CHAT, ModelReward
from reinforge.serve.options import ServeOptions, name_of
from reinforge.serve.prompt_scores import PromptScoringService
from reinforge.serve.scorer import RewardModelScorer
from reinforge.serve.service import ModelService


def load_service(source: str, options: ServeOptions) -> ModelService:
    model, _ = open_model(source, adapter=options.adapter, checkpoint=options.checkpoint)
    longest = model.context
    if options.context is not None and longest is not None and options.context > longest:
        raise InputError(
            f"{source} was made for {longest} tokens.", where="--context", fix="Ask for fewer."
        )
    stops = {
        *stop_tokens(model),
        *Renderer(model.tokenizer, DataConfig(source="serve")).stop_tokens,
    }
    context = options.context or longest
    engine = NativeEngine(
        model,
        stop_tokens=stops,
        max_batch=options.max_batch,
        kv_gib=options.kv_gib,
        context=context,
        longest=context,
        prefix_cache=True,
    )
    name = options.name or name_of(source)
    return PromptScoringService(
        engine,
        name=name,
        max_new_tokens=options.max_new_tokens,
        max_completions=options.max_completions,
        max_logprobs=options.max_logprobs,
    )


def load_scorer(source: str, options: ServeOptions) -> RewardModelScorer:
    """A reward model from a directory or the hub, or out of a run that trained one."""
    reward = open_reward(source, checkpoint=options.checkpoint)
    name = options.name or name_of(source)
    return RewardModelScorer(reward, name=name, most=options.max_completions)


def open_reward(
    source: str, weights: Mapping[str, float] | None = None, *, checkpoint: str = "latest"
) -> ModelReward:
    """A reward model that gives what its heads say; with `weights` also their sum."""
    if not is_run(Path(source)):
        return ModelReward(source, weights=weights, where="MODEL").load(
            "auto", weighed=weights is not None
        )
    config, _ = config_of(Path(source))
    if config.algorithm.family != "reward":
        raise InputError(
            f"{source} trained {config.algorithm.name}, not a reward model.",
            where="MODEL",
            fix="Give the run of a reward model, or its export.",
        )
    model = load_scalar(
        config.model.model_copy(update={"compile": False}),
        config.adapter,
        fresh=True,
        attributes=tuple(config.algorithm.attributes),
    )
    load_weights(model, Path(source), checkpoint)
    # as its rows were rendered
    template = next(kind for kind, chat in CHAT.items() if chat == config.data.chat)
    reward = ModelReward(source, template=template, weights=weights, where="MODEL")
    if weights is not None:
        reward.check_weights(model)
    return reward.use(model)
