"""What the options of `generate` ask for in labels and preference pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reinforge.build.saved_model import config_of, is_run
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.engines.openai import OpenAIServer
from reinforge.offline.labels import LabelOptions


def label_options(
    model: str,
    config: Config | None,
    rewards: bool,
    judge: str | None,
    judge_model: str | None,
    key: str | None,
    parallel: int,
    rate: float | None,
    mode: Any,
    prompt: Path | None,
    pairs: Any,
    margin: float,
    n: int,
) -> LabelOptions:
    """Everything that is wrong with the labels, before a model is loaded."""
    if config is None and is_run(Path(model)):
        config = config_of(Path(model))[0]
    if rewards and (config is None or not config.rewards):
        raise InputError(
            "there are no rewards to score with.",
            where="--rewards",
            fix="Give a .yaml configuration, or a run, that has some.",
        )
    if pairs and n < 2:
        raise InputError(
            "a pair needs two completions.", where="--pairs", fix="Ask for -n 2 or more."
        )
    if pairs and not (rewards or judge):
        raise InputError(
            "what makes one completion better than another?",
            where="--pairs",
            fix="Add --rewards or --judge URL.",
        )
    if prompt is not None and not prompt.is_file():
        raise InputError(f"no such file: {prompt}.", where="--judge-prompt")
    return LabelOptions(
        config.rewards if rewards and config is not None else (),
        OpenAIServer(judge, judge_model, key, parallel, rate) if judge else None,
        mode,
        None if prompt is None else prompt.read_text(),
        pairs=pairs,
        margin=margin,
    )
