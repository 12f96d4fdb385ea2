"""The Python interface. The command line builds the same objects.

import reinforge

def reward(prompts, completions, answer, **columns):
    return [float(c.strip() == a) for c, a in zip(completions, answer)]

result = reinforge.train(
    model="HuggingFaceTB/SmolLM2-135M-Instruct",
    data=rows,
    rewards=[reward],
    algorithm="grpo",
    steps=100,
)
"""

from __future__ import annotations

import difflib
import inspect
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from pydantic import ValidationError

from reinforge.build.caller_objects import CallerObjects
from reinforge.build.run import RunResult, train_config
from reinforge.config.load import config_from_dict
from reinforge.config.pipeline import Pipeline, load_any
from reinforge.config.rewards import RewardConfig
from reinforge.config.schema import Config
from reinforge.config.strict import parse
from reinforge.core.aio import run_sync
from reinforge.core.errors import InputError
from reinforge.data.objects import rows_of
from reinforge.pipelines.run import run_pipeline
from reinforge.rewards.build import GivenRewards, describe_rewards

T = TypeVar("T")
P = ParamSpec("P")


UNKNOWN = {  # what other libraries' trainers take, and what to do here
    "tokenizer": (
        "The tokenizer in the model's directory is used; another one's directory or hub id:"
        ' overrides=["model.tokenizer=PATH"].'
    ),
    "processing_class": (
        "The tokenizer in the model's directory is used; another one's directory or hub id: "
        'overrides=["model.tokenizer=PATH"].'
    ),
    "callbacks": (
        "There are none. Metrics go to metrics.jsonl in the run's directory and to run.log.sinks; "
        "to act between steps, write the loop yourself: recipes/loop.py."
    ),
    "args": "Settings are arguments of their own, or overrides; docs/migrate.md has the names.",
    "train_dataset": "It is called data here.",
    "eval_dataset": "It is called eval_data here.",
    "reward_funcs": "It is called rewards here.",
    "peft_config": 'It is called adapter here, e.g. adapter={"rank": 16}.',
    "ref_model": (
        "The reference is the model that the run begins with; algorithm.kl.reference lets it move."
    ),
    "output_dir": "It is called dir here.",
    "max_steps": "It is called steps here.",
    "num_generations": "It is called group_size here.",
}


def _known_names(function: Callable[P, T]) -> Callable[P, T]:
    """The function, with an InputError for a keyword that it does not have.

    Its signature stays what it is.
    """
    known = inspect.signature(function).parameters

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                listed = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(known)}."
                fix = UNKNOWN.get(name, listed)
                raise InputError(f"has no argument {name}.", where="reinforge.train", fix=fix)
        return function(*args, **kwargs)

    return call


@_known_names
def train(
    config: str | Path | Mapping[str, Any] | Config | None = None,
    *,
    model: str | Path | None = None,
    data: str | Path | Iterable[Any] | None = None,
    eval_data: str | Path | Iterable[Any] | None = None,
    rewards: GivenRewards | None = None,
    algorithm: str = "grpo",
    dir: str | Path | None = None,
    steps: int | None = None,
    learning_rate: float = 1e-5,
    max_new_tokens: int = 256,
    group_size: int = 8,
    prompts_per_step: int = 64,
    seed: int = 0,
    adapter: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
) -> RunResult:
    """Trains a model.

    Give a config (file, dict or object), or the usual few things by name; `overrides` reach
    everything else (`"train.schedule.kind=cosine"`).

    `model` is the path of a directory or a hub id. A model that is in memory is saved first, with
    its tokenizer. `data` is a path, a source name, or rows: an iterable of dicts with a `prompt`
    (and whatever columns the rewards want), a pandas or polars data frame, a pyarrow table, a
    `datasets.Dataset`, or a dict of columns; `eval_data` the same, or hold rows out with
    `overrides=["data.eval.size=100"]`.
    `rewards` are names, functions `(prompts, completions, **columns) -> list[float | None]`, plain
    or async, or pairs (function, weight), in any mixture; one alone needs no list. Beside a config
    they take the place of its rewards, and one whose name the config has keeps the weight and
    options that it has there.
    `dir` is where the run is written: by default a new `runs/<algorithm>-<date>-<time>`. To
    continue a run, give its `dir`.
    """
    _check_named(model, adapter)
    paths = {
        name: str(value)
        for name, value in (("data", data), ("eval_data", eval_data))
        if isinstance(value, str | Path)
    }
    given = CallerObjects(data=_rows("data", data), eval_data=_rows("eval_data", eval_data))
    if config is not None:
        usual = inspect.signature(train).parameters
        named_too = {
            "model": model,
            "algorithm": algorithm,
            "dir": dir,
            "steps": steps,
            "learning_rate": learning_rate,
            "max_new_tokens": max_new_tokens,
            "group_size": group_size,
            "prompts_per_step": prompts_per_step,
            "seed": seed,
            "adapter": adapter,
        }
        ignored = [
            name for name, value in named_too.items() if value != usual[name].default
        ] + list(paths)
        if ignored:
            raise InputError(
                f"{', '.join(ignored)} would be ignored beside a config.",
                where="reinforge.train",
                fix='Set it in the config, or with overrides=["train.learning_rate=1e-4"].',
            )
    elif model is None or data is None:
        raise InputError(
            "model and data are needed.",
            where="reinforge.train",
            fix="Give them by name, or give a config file.",
        )
    else:
        config = {
            "model": {"path": str(model)},
            "algorithm": {"name": algorithm, "group_size": group_size},
            "data": {
                "source": paths.get("data", "python"),
                "eval": {"source": paths.get("eval_data")},
            },
            "rollout": {"max_new_tokens": max_new_tokens},
            "run": {"dir": str(dir or new_dir(algorithm)), "seed": seed},
            "train": {
                "steps": steps or 100,
                "learning_rate": learning_rate,
                "prompts_per_step": prompts_per_step,
            },
            **({"adapter": dict(adapter)} if adapter is not None else {}),
        }
    if isinstance(config, Config):
        config = config.model_dump(mode="json")
    if rewards is not None:
        described, given.functions = describe_rewards(rewards, _declared(config))
        overrides = [
            f"rewards={json.dumps([r.model_dump(mode='json') for r in described])}",
            *overrides,
        ]
    if isinstance(config, (str, Path)):
        loaded = load_any(Path(config), overrides)
        return (
            _train_pipeline(loaded, given)
            if isinstance(loaded, Pipeline)
            else train_config(loaded, given)
        )
    return train_config(
        config_from_dict(dict(config), where="reinforge.train", overrides=overrides), given
    )


def _check_named(model: Any, adapter: Any) -> None:
    """Objects where a path is wanted: other libraries take them."""
    if adapter is not None and not isinstance(adapter, Mapping):
        raise InputError(
            f"adapter is a {type(adapter).__name__}, not a dict.",
            where="adapter",
            fix=(
                'Give its settings, e.g. {"rank": 16, "alpha": 32, "targets": ["q_proj",'
                ' "v_proj"]}.'
            ),
        )
    if model is None or isinstance(model, str | Path):
        return
    kind = type(model).__name__
    if hasattr(model, "peft_config") and hasattr(model, "merge_and_unload"):
        fix = (
            'Save it with model.save_pretrained("my-adapter") and give the base model\'s path, with'
            ' adapter={"path": "my-adapter"}; or save model.merge_and_unload() and give that'
            " directory."
        )
    elif hasattr(model, "save_pretrained"):
        fix = (
            'Save it with model.save_pretrained("my-model") and'
            ' tokenizer.save_pretrained("my-model"), and give model="my-model".'
        )
    else:
        fix = (
            "Give the path of a directory with config.json and weights, or a hub id such as"
            " org/name."
        )
    raise InputError(f"model is a {kind} object, and a path is needed.", where="model", fix=fix)


def _train_pipeline(pipeline: Pipeline, given: CallerObjects) -> RunResult:
    """Metrics are named by stage: `grpo/eval/accuracy`."""
    if given.data is not None or given.eval_data is not None or given.functions:
        raise InputError(
            "objects cannot be given beside a pipeline: its stages could not be made again.",
            where="reinforge.train",
            fix="Write data to files, and name rewards as `file.py:function`.",
        )
    result = run_pipeline(pipeline)
    return RunResult(result.run_dir, result.metrics, 0, None, result.report)


def new_dir(name: str) -> Path:
    """`runs/<name>-<date>-<time>`, with a number when there is one already."""
    first = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return next(
        path
        for n in count(1)
        if not (path := first if n == 1 else first.with_name(f"{first.name}-{n}")).exists()
    )


def _rows(name: str, value: Any) -> list[Any] | None:
    """Rows that were given as objects; None for a path or nothing."""
    return None if value is None or isinstance(value, str | Path) else rows_of(value, name)


def _declared(config: str | Path | Mapping[str, Any]) -> list[RewardConfig]:
    """The rewards that a config has. What is wrong with it otherwise is said when it is loaded."""
    if isinstance(config, Mapping):
        found = config.get("rewards")
    else:
        path = Path(config)
        raw = (
            parse(path.read_text("utf-8-sig", errors="replace"), str(path))[0]
            if path.is_file()
            else None
        )
        found = raw.get("rewards") if isinstance(raw, dict) else None
    try:
        return (
            [RewardConfig.model_validate(reward) for reward in found]
            if isinstance(found, list)
            else []
        )
    except ValidationError:
        return []


def evaluate(
    config_or_run: str | Path, overrides: Sequence[str] = (), *, checkpoint: str = "latest"
) -> dict[str, float]:
    """Scores the model of a config, or the newest checkpoint of a run, on its held-out rows.

    Writes nothing but the result. Rows that were given as Python objects are not kept: for such a
    run, name files, `overrides=["data.source=rows.jsonl", ...]`.
    """
    from reinforge.offline.evaluate import evaluate_saved

    return evaluate_saved(Path(config_or_run), overrides, checkpoint)


def generate(
    model: str,
    prompts: str | Path | None,
    out: str | Path,
    *,
    n: int = 1,
    temperature: float = 1.0,
    top_p: float = 1.0,
    max_new_tokens: int | None = None,
    seed: int = 0,
    adapter: str | None = None,
    **more: Any,
) -> int:
    """Completions for every row of a prompts file, as JSONL: the row's columns, completion, tokens,
    logprobs, stop. Returns rows written. `max_new_tokens` is by default that of the run or
    configuration, else 256. `more`: config, server, labelling, raw, logprobs, token_ids and
    constraint (`reinforge.core.constraint.Constraint`) of
    `reinforge.offline.generate.generate_file`.
    """
    from reinforge.offline.generate import generate_file

    return run_sync(
        generate_file(
            model,
            prompts,
            Path(out),
            n=n,
            temperature=temperature,
            top_p=top_p,
            max_new_tokens=max_new_tokens,
            seed=seed,
            adapter=adapter,
            **more,
        )
    )
