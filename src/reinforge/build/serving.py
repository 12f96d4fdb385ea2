"""What `reinforge serve` puts behind HTTP: a model with its engine, or a reward model."""

from __future__ import annotations

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

    name = options.name or name_of(source)
    if not is_run(Path(source)):
        return RewardModelScorer(
            ModelReward(source, where="MODEL").load("auto"), name=name, most=options.max_completions
        )
    config, _ = config_of(Path(source))
    if config.algorithm.family != "reward":
        raise InputError(
            f"{source} trained {config.algorithm.name}, not a reward model.",
            where="MODEL",
            fix="Leave --reward out to serve its model.",
        )
    model = load_scalar(config.model.model_copy(update={"compile": False}), fresh=True)
    load_weights(model, Path(source), options.checkpoint)
    # as its rows were rendered
    template = next(kind for kind, chat in CHAT.items() if chat == config.data.chat)
    return RewardModelScorer(
        ModelReward(source, template=template, where="MODEL").use(model),
        name=name,
        most=options.max_completions,
    )
