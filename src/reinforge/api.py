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
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from pydantic import ValidationError

from reinforge.build.caller_objects import CallerObjects
from reinforge.build.result import RunResult
from reinforge.build.run import ConfigTrainer
from reinforge.config.data_source import is_config, source_config
from reinforge.config.explain import all_keys, dotted
from reinforge.config.load import config_from_dict, load_config
from reinforge.config.pipeline import Pipeline, is_pipeline, load_any
from reinforge.config.rewards import RewardConfig
from reinforge.config.schema import Config
from reinforge.config.strict import parse
from reinforge.core.aio import run_sync
from reinforge.core.errors import InputError, ReinforgeError
from reinforge.data.objects import rows_of
from reinforge.data.sources import PYTHON
from reinforge.evals.benchmarks.rows import GivenRows, read_rows
from reinforge.evals.benchmarks.table import preset_of
from reinforge.offline.question_answers import TEMPLATE
from reinforge.pipelines.run import run_pipeline
from reinforge.rewards.build import GivenRewards, describe_rewards
from reinforge.rewards.load import name_of_given
from reinforge.rewards.raised import from_their_code
from reinforge.watch.logs import read_lines

if TYPE_CHECKING:
    from torch import nn

    from reinforge.core.row import Row
    from reinforge.engines.openai import OpenAIServer
    from reinforge.evals.benchmarks.result import BenchmarkResult
    from reinforge.loops.callbacks import GivenCallbacks
    from reinforge.loops.open_step import RunStep
    from reinforge.offline.conversation import Conversation
    from reinforge.offline.make_data import DataMade

T = TypeVar("T")
P = ParamSpec("P")


UNKNOWN = {  # what other libraries' trainers take, and what to do here
    "processing_class": "It is called tokenizer here.",
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
    "num_train_epochs": "It is called epochs here.",
    "environment_factory": "It is called env here, and takes the same classes.",
    "num_generations": "It is called group_size here.",
}
WHERE = "reinforge.train"  # of what is wrong with the arguments


def _known_names(function: Callable[P, T]) -> Callable[P, T]:
    """The function, with an InputError for a keyword that it does not have.

    Its signature stays what it is.
    """
    of_trainer = function.__name__ == "__init__"
    where = WHERE if of_trainer else f"reinforge.{function.__name__}"
    known = [name for name in inspect.signature(function).parameters if name != "self"]

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                listed = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(known)}."
                fix = (UNKNOWN.get(name) or _as_override(name) or listed) if of_trainer else listed
                raise InputError(f"has no argument {name}.", where=where, fix=fix)
        return function(*args, **kwargs)

    return call


def _as_override(name: str) -> str | None:
    """How a key of the configuration is given that is no argument of its own."""
    keys = [dotted(path) for path, _ in all_keys() if path[-1] == name and len(path) == 2]
    return f'Give it as overrides=["{keys[0]}=..."].' if keys else None


class Trainer(ConfigTrainer):
    """A run that can be stepped, stopped, saved and evaluated: `for step in trainer`.
    `reinforge.train` and `reinforge train` go through the same loop.

    A step comes with its rollouts and rewards, before its update: its rewards and advantages can be
    changed, or the step skipped. It is trained when the next one is asked for, or by
    `step.update()`. Use it as a context manager, or close it: a run that is left open holds the
    lock of its directory, and what it has done since its newest checkpoint is lost.

    While it is open, Ctrl-C ends the run after the step in hand, with a checkpoint.
    """

    @_known_names
    def __init__(
        self,
        config: str | Path | Mapping[str, Any] | Config | None = None,
        *,
        model: str | Path | nn.Module | None = None,
        tokenizer: Any = None,
        data: str | Path | Iterable[Any] | None = None,
        eval_data: str | Path | Iterable[Any] | None = None,
        rewards: GivenRewards | None = None,
        algorithm: str = "grpo",
        dir: str | Path | None = None,
        steps: int | None = None,
        epochs: float | None = None,
        learning_rate: float = 1e-5,
        max_new_tokens: int = 256,
        group_size: int = 8,
        prompts_per_step: int = 64,
        seed: int = 0,
        adapter: Mapping[str, Any] | None = None,
        env: str | Mapping[str, Any] | Callable[..., Any] | None = None,
        tools: Sequence[str | Mapping[str, Any] | Callable[..., Any]] | None = None,
        advantage: Callable[..., Any] | None = None,
        loss: Callable[..., Any] | None = None,
        sampler: Callable[[Row, int], float] | None = None,
        callbacks: GivenCallbacks = (),
        overrides: Sequence[str] | None = (),
    ):
        """Give a config (file, dict or object), or the usual few things by name; `overrides` reach
        everything else (`"train.schedule.kind=cosine"`).

        `model` is the path of a directory, a hub id, or a causal LM of transformers or peft that is
        in memory, with its `tokenizer`: it is trained in place, and what it begins with is written
        to `initial` in the run's directory. `tokenizer` beside a path takes the place of the
        model's own: another path, or an object.
        `data` is a path, a source name, or rows: an iterable of dicts with a `prompt` (and whatever
        columns the rewards want), a pandas or polars data frame, a pyarrow table, a
        `datasets.Dataset`, a torch `Dataset`, or a dict of columns; `eval_data` the same, or hold
        rows out with `overrides=["data.eval.size=100"]`.
        `rewards` are names, functions `(prompts, completions, **columns) -> list[float | None]`,
        plain or async, pairs (function, weight), or dicts as in a configuration (`{"name": "model",
        "options": {...}}`), in any mixture; one alone needs no list. Beside a config they take the
        place of its rewards, and one whose name the config has keeps the weight and options that it
        has there.
        `steps` says how long the run is, or `epochs`, in passes over the rows; without either, 100
        steps. `adapter` is its section of the configuration, e.g. `{"rank": 16}`.
        `tools` are functions with type hints and a docstring, plain or async, that the model may
        call before it answers; names of shipped ones (calculator, search, python), and
        `{"mcp": {...}}`. `env` is what answers the model's turns: a name, its section of the
        configuration, a class with `reset`, `step` and `close` (`reinforge.core.env.Env`), or one
        with `reset` and perhaps `get_reward`, whose other public methods are the model's tools.
        `advantage` and `loss` are functions in place of the algorithm's own, of a policy gradient:
        `(rollouts, options) -> advantages` and `(logprobs, old, advantages, sequence) -> (losses,
        metrics)`, one number per trained token. `sampler(row, step)` gives the probability that a
        row is taken when the run comes to it. A run that is continued must be given them again,
        unless they can be imported.
        `callbacks` are objects of classes that derive from `reinforge.Callback`, functions
        `(run, step)` that are called after every step, and callbacks of transformers.
        `dir` is where the run is written: by default a new `runs/<algorithm>-<date>-<time>`. To
        continue a run, give its `dir`.
        """
        _check_objects(model, tokenizer, adapter)
        _check_tools(env, tools)
        overrides = overrides or ()
        made_up = config is None and dir is None
        module = None if model is None or isinstance(model, str | Path) else model
        paths = {
            name: str(value)
            for name, value in (("data", data), ("eval_data", eval_data))
            if isinstance(value, str | Path)
        }
        given = CallerObjects(
            data=_rows("data", data),
            eval_data=_rows("eval_data", eval_data),
            module=module,
            tokenizer=None if isinstance(tokenizer, str | Path) else tokenizer,
            parts={
                name_of_given(part): part
                for part in (advantage, loss, env, *(tools or ()))
                if callable(part)
            },
            sampler=sampler,
            callbacks=callbacks,
        )
        named: dict[str, Any] = {
            "model": model if module is None else None,
            "tokenizer": tokenizer if given.tokenizer is None else None,
            "algorithm": algorithm,
            "dir": dir,
            "steps": steps,
            "epochs": epochs,
            "learning_rate": learning_rate,
            "max_new_tokens": max_new_tokens,
            "group_size": group_size,
            "prompts_per_step": prompts_per_step,
            "seed": seed,
            "adapter": adapter,
            "env": env,
            "tools": tools,
        }
        if config is not None:
            _check_not_ignored(named, paths)
        elif model is None or data is None:
            raise InputError(
                "model and data are needed.",
                where=WHERE,
                fix="Give them by name, or give a config file.",
            )
        else:
            config = _config_of(named, paths)
        if isinstance(config, Config):
            config = config.model_dump(mode="json")
        if rewards is not None:
            described, given.functions = describe_rewards(rewards, _declared(config))
            overrides = [
                f"rewards={json.dumps([r.model_dump(mode='json') for r in described])}",
                *overrides,
            ]
        overrides = [*_part_overrides(advantage, loss), *overrides]
        super().__init__(given.named(_loaded(config, overrides)), given)
        self._dir_made_up = made_up and not any(o.startswith("run.dir=") for o in overrides)

    def _advance(self) -> RunStep | None:
        try:
            return super()._advance()
        except ReinforgeError as error:
            raise _brief(error) from error.__cause__


def _brief(error: ReinforgeError) -> ReinforgeError:
    """An error of the caller's, with the caller's lines in its traceback and none of ours: it says
    in words what is wrong. All of them are in the traceback.txt of the run.
    """
    if error.__cause__ is not None:
        error.__cause__.__traceback__ = from_their_code(error.__cause__.__traceback__)
    return error.with_traceback(None)


def _check_not_ignored(named: Mapping[str, Any], paths: Mapping[str, str]) -> None:
    """What would say nothing beside a config is refused."""
    usual = inspect.signature(Trainer).parameters
    ignored = [name for name, value in named.items() if value != usual[name].default]
    ignored += list(paths)
    if ignored:
        raise InputError(
            f"{', '.join(ignored)} would be ignored beside a config.",
            where=WHERE,
            fix='Set it in the config, or with overrides=["train.learning_rate=1e-4"].',
        )


def _config_of(named: Mapping[str, Any], paths: Mapping[str, str]) -> dict[str, Any]:
    """The config of what was given by name."""
    algorithm = named["algorithm"]
    adapter = named["adapter"]
    return {
        # of one that is in memory, `CallerObjects.named` says where it is written
        "model": {"path": str(named["model"] or "python"), **_tokenizer_path(named)},
        "algorithm": {"name": algorithm, "group_size": named["group_size"]},
        "data": {
            "source": paths.get("data", "python"),
            "eval": {"source": paths.get("eval_data")},
        },
        "rollout": {"max_new_tokens": named["max_new_tokens"]},
        "run": {"dir": str(named["dir"] or new_dir(algorithm)), "seed": named["seed"]},
        "train": {
            **_duration(named),
            "learning_rate": named["learning_rate"],
            "prompts_per_step": named["prompts_per_step"],
        },
        **({"adapter": dict(adapter)} if adapter is not None else {}),
        **_env_section(named["env"], named["tools"]),
    }


def _duration(named: Mapping[str, Any]) -> dict[str, Any]:
    if named["steps"] is not None and named["epochs"] is not None:
        raise InputError(
            "steps and epochs both say how long the run is.", where=WHERE, fix="Give one of them."
        )
    if named["epochs"] is not None:
        return {"epochs": named["epochs"]}
    return {"steps": named["steps"] or 100}


def _env_section(env: Any, tools: Sequence[Any] | None) -> dict[str, Any]:
    """The section `env` of what was given as an environment, or as tools; none of neither."""
    if tools is not None:
        names = [name_of_given(tool) if callable(tool) else tool for tool in tools]
        return {"env": {"name": "tools", "options": {"tools": names}}}
    if env is None:
        return {}
    return {"env": {"name": _env_name(env)} if callable(env) else env}


def _env_name(env: Callable[..., Any]) -> str:
    """The name of a class that was given. One without `step` has tools as methods, as TRL's
    environments have; a function that makes an environment makes one of ours.
    """
    name = name_of_given(env)
    if not isinstance(env, type) or hasattr(env, "step"):
        return name
    if not hasattr(env, "reset"):
        raise InputError(
            f"{env.__name__} has no method reset.",
            where="env",
            fix="docs/environments.md says what an environment has.",
        )
    return f"trl:{name}"


def _part_overrides(advantage: Any, loss: Any) -> list[str]:
    """The algorithm's keys for functions that were given."""
    parts = (("advantage", advantage), ("surrogate", loss))
    return [
        f"algorithm.{key}={json.dumps(name_of_given(part))}"
        for key, part in parts
        if part is not None
    ]


def _tokenizer_path(named: Mapping[str, Any]) -> dict[str, str]:
    return {} if named["tokenizer"] is None else {"tokenizer": str(named["tokenizer"])}


def _loaded(config: str | Path | Mapping[str, Any], overrides: Sequence[str]) -> Config:
    if not isinstance(config, str | Path):
        return config_from_dict(dict(config), where=WHERE, overrides=overrides)
    return load_config(Path(config), overrides)


def _as_trainer_takes(
    kind: Callable[P, Any],
) -> Callable[[Callable[..., RunResult]], Callable[P, RunResult]]:
    """Gives a function the arguments of `Trainer`."""

    def dressed(function: Callable[..., RunResult]) -> Callable[P, RunResult]:
        signature = inspect.signature(kind)
        function.__signature__ = signature.replace(  # type: ignore[attr-defined]
            return_annotation="RunResult"
        )
        function.__doc__ = f"{inspect.getdoc(function)}\n\n{inspect.getdoc(Trainer.__init__)}"
        return function

    return dressed


@_as_trainer_takes(Trainer)
def train(config: Any = None, **arguments: Any) -> RunResult:
    """Trains a model: all steps of a `reinforge.Trainer` with the same arguments, or all stages of
    a pipeline.
    """
    if isinstance(config, str | Path) and is_pipeline(Path(config)):
        return _train_pipeline(Path(config), **arguments)
    try:
        return Trainer(config, **arguments).run()
    except ReinforgeError as error:
        raise _brief(error) from error.__cause__


def _check_objects(model: Any, tokenizer: Any, adapter: Any) -> None:
    """What is given as an object is what it should be."""
    if adapter is not None and not isinstance(adapter, Mapping):
        raise InputError(
            f"adapter is a {type(adapter).__name__}, not a dict.",
            where="adapter",
            fix=(
                'Give its settings, e.g. {"rank": 16, "alpha": 32, "targets": ["q_proj",'
                ' "v_proj"]}.'
            ),
        )
    if not isinstance(tokenizer, str | Path | None) and not hasattr(tokenizer, "save_pretrained"):
        raise InputError(
            f"tokenizer is a {type(tokenizer).__name__} object.",
            where="tokenizer",
            fix="Give a tokenizer of transformers, or the path of one.",
        )
    if model is None or isinstance(model, str | Path):
        return
    if not hasattr(model, "save_pretrained") or not hasattr(model, "get_output_embeddings"):
        raise InputError(
            f"model is a {type(model).__name__} object, and no causal LM.",
            where="model",
            fix=(
                "Give the path of a directory with config.json and weights, a hub id such as"
                " org/name, or a causal LM of transformers or peft."
            ),
        )
    if tokenizer is None:
        raise InputError(
            "a model that is in memory needs its tokenizer.",
            where="tokenizer",
            fix="Give it too: tokenizer=AutoTokenizer.from_pretrained(...).",
        )
    if adapter is not None and hasattr(model, "peft_config"):
        raise InputError(
            "the model has an adapter already.",
            where="adapter",
            fix="Leave the argument out, or give the model without its adapter.",
        )


def _check_tools(env: Any, tools: Any) -> None:
    if env is not None and tools is not None:
        raise InputError(
            "tools are called in an environment of their own.",
            where="tools",
            fix="Give tools or env; an environment can have tools as methods.",
        )
    if isinstance(tools, str | Mapping) or callable(tools):
        raise InputError("is one tool, not a list.", where="tools", fix="Write [tool].")


def _train_pipeline(
    config: Path, overrides: Sequence[str] | None = (), **arguments: Any
) -> RunResult:
    """Metrics are named by stage: `grpo/eval/accuracy`."""
    if arguments:
        raise InputError(
            "objects cannot be given beside a pipeline: its stages could not be made again.",
            where=WHERE,
            fix="Write data to files, and name rewards as `file.py:function`.",
        )
    pipeline = load_any(config, overrides or ())
    assert isinstance(pipeline, Pipeline)
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


@_known_names
def benchmark(
    model: str | Path,
    tasks: str | Sequence[str],
    *,
    rows: GivenRows | Mapping[str, GivenRows] | None = None,
    shots: GivenRows | Mapping[str, GivenRows] | None = None,
    out: str | Path | None = None,
    limit: int | None = None,
    fewshot: int | None = None,
    chat: bool | None = None,
    n: int = 1,
    temperature: float | None = None,
    top_p: float = 1.0,
    max_new_tokens: int | None = None,
    seed: int = 0,
    adapter: str | None = None,
    checkpoint: str = "latest",
    server: str | OpenAIServer | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, BenchmarkResult]:
    """What a model scores on known benchmarks (gsm8k, math, mmlu, ifeval, humaneval), by task: the
    metrics with 95% intervals, and a record of every answer with its verdict and why.

    `model` is a run directory (its newest checkpoint, or `checkpoint`), a directory, a hub id, a
    GGUF file, or a name of your own for the model of `server`. `rows`: a file with the columns of
    the original data set, a directory of such files, a hub id, or the rows themselves; for several
    tasks by task; default: the hub. `shots` likewise for the examples of few-shot prompts. `chat`:
    ask in a conversation, by default where the model has a chat template, else with a plain
    few-shot prompt. `n` answers to each row give pass@n. With `out`, a directory, records and
    results are written there, and what was answered before a kill is not asked again. `progress` is
    told the task, how many rows are done and how many there are.
    """
    names = [tasks] if isinstance(tasks, str) else list(dict.fromkeys(tasks))
    presets = {name: preset_of(name) for name in names}
    given = _by_task(rows, names, "rows")
    read = {name: read_rows(preset, given.get(name), limit) for name, preset in presets.items()}
    # what is wrong with rows is told before torch is imported
    from reinforge.engines.openai import OpenAIServer
    from reinforge.offline.benchmark import run_benchmarks

    with TemporaryDirectory() as folder:
        return run_sync(
            run_benchmarks(
                str(model),
                read,
                Path(out) if out is not None else Path(folder),
                shots=_by_task(shots, names, "shots"),
                fewshot=fewshot,
                chat=chat,
                n=n,
                temperature=temperature,
                top_p=top_p,
                max_new_tokens=max_new_tokens,
                seed=seed,
                adapter=adapter,
                checkpoint=checkpoint,
                server=OpenAIServer(server) if isinstance(server, str) else server,
                progress=progress,
            )
        )


def _by_task(given: Any, tasks: Sequence[str], name: str) -> dict[str, GivenRows]:
    """What was given for single tasks, or for all: a directory, or the rows of the only one."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        if odd := [task for task in given if task not in tasks]:
            raise InputError(
                f"{odd[0]!r} is no task of this call.",
                where=name,
                fix=f"The tasks are: {', '.join(tasks)}.",
            )
        return dict(given)
    if len(tasks) > 1 and not (isinstance(given, str | Path) and Path(given).expanduser().is_dir()):
        raise InputError(
            f"there are {len(tasks)} tasks, and one file for all of them.",
            where=name,
            fix=f"Say whose rows these are ({tasks[0]}), or give a directory with a file for each.",
        )
    return dict.fromkeys(tasks, given)


def generate(
    model: str | Path,
    prompts: str | Path | Iterable[Any] | None,
    out: str | Path | None = None,
    *,
    n: int = 1,
    temperature: float = 1.0,
    top_p: float = 1.0,
    max_new_tokens: int | None = None,
    seed: int = 0,
    adapter: str | None = None,
    fixed: Mapping[str, Any] | None = None,
    **more: Any,
) -> list[dict[str, Any]]:
    """Completions: for every prompt `n` dicts with the row's columns, completion, tokens, logprobs
    and stop.

    `model` is a run directory (its newest checkpoint), a directory, a hub id or a GGUF file.
    `prompts` are texts, rows as `reinforge.train` takes them, or the path of a file; None: those of
    the run or configuration. With `out` they are written there too, as JSONL; what was answered
    before a kill is then not asked again. `max_new_tokens` is by default that of the run or
    configuration, else 256. `fixed` are columns with the same value in every row, as data.fixed:
    the attributes that are wanted of a model that was trained with data.attributes. `more`: config,
    server, labelling, raw, logprobs, token_ids and constraint
    (`reinforge.core.constraint.Constraint`) of `reinforge.offline.generate.generate_file`.
    """
    from reinforge.offline.generate import generate_file

    with TemporaryDirectory() as folder:
        file = Path(out) if out is not None else Path(folder) / "completions.jsonl"
        run_sync(
            generate_file(
                str(model),
                _prompts_file(prompts, Path(folder)),
                file,
                n=n,
                temperature=temperature,
                top_p=top_p,
                max_new_tokens=max_new_tokens,
                seed=seed,
                adapter=adapter,
                fixed=fixed,
                **more,
            )
        )
        return list(read_lines(file))


def _prompts_file(prompts: str | Path | Iterable[Any] | None, folder: Path) -> Path | str | None:
    """Prompts that are given as objects, as a file."""
    if prompts is None or isinstance(prompts, str | Path):
        return prompts
    rows = [{"prompt": row} if isinstance(row, str) else row for row in rows_of(prompts, "prompts")]
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(row, default=str) + "\n" for row in rows))
    return file


@_known_names
def make_data(
    kind: Literal["answers", "questions", "pairs"],
    source: str | Path | Iterable[Any],
    out: str | Path,
    *,
    teacher: str | Path,
    rewards: GivenRewards | None = None,
    judge: str | None = None,
    n: int | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    max_new_tokens: int = 1024,
    seed: int = 0,
    adapter: str | None = None,
    at_least: float | None = None,
    best: int | None = None,
    keep_cut: bool = False,
    pairs: Literal["best-worst", "all"] = "best-worst",
    margin: float = 0.0,
    questions: int = 3,
    chunk: int = 4000,
    overlap: int = 400,
    template: str | None = None,
    structured: bool = True,
    judge_model: str | None = None,
    judge_mode: Literal["score", "pairwise"] = "score",
    judge_prompt: str | None = None,
    model_name: str | None = None,
    api_key: str | None = None,
    parallel: int = 16,
    rate: float | None = None,
    overrides: Sequence[str] = (),
    progress: Callable[[str, int, int], None] | None = None,
) -> DataMade:
    """Training data from a teacher, in a .jsonl or .parquet file that `reinforge.train` takes:
    `answers` to prompts (SFT), `questions` and answers from documents (SFT), or preference `pairs`.

    `source` is a path, a source name or a configuration, or rows as `reinforge.train` takes them;
    for questions documents: texts, rows with a `text`, a directory. `overrides` say how rows are
    read (`"data.columns.prompt=query"`). `teacher` is a run directory, a directory, a hub id, a
    GGUF file, or the address of an OpenAI-compatible server (`http://...`), for which there are
    `model_name`, `api_key`, `parallel` and `rate` (requests per minute).
    `n` completions are sampled for each prompt (default: 1, of pairs 4). `rewards`, as
    `reinforge.train` takes them or the path of a configuration, or the model of the server `judge`
    score them: answers with at least the score `at_least` are kept, and the `best` so many of each
    prompt; a pair is the best against the worst, or all, and differs by more than `margin`.
    Documents are cut into chunks of `chunk` characters that overlap, and each is asked for
    `questions` with `template`, a text with the places {text} and {n}.
    Empty, cut and repeated ones are left out, and counted by reason. What the teacher said is kept
    beside `out`: the same call after a kill asks only for the rest. `progress` is
    told what is asked (prompts, chunks), how many are done and how many there are.
    """
    from reinforge.core.engine import Sampling
    from reinforge.engines.openai import OpenAIServer
    from reinforge.offline.labels import LabelOptions
    from reinforge.offline.made_rows import Selection
    from reinforge.offline.make_data import MakeOptions, QuestionOptions, make_file

    described, functions = _rewards_of(rewards)
    named = str(teacher)
    options = MakeOptions(
        kind,
        named,
        server=(
            OpenAIServer(named, model_name, api_key, parallel, rate)
            if named.startswith(("http://", "https://"))
            else None
        ),
        adapter=adapter,
        n=n if n is not None else 4 if kind == "pairs" else 1,
        sampling=Sampling(max_new_tokens, temperature, top_p=top_p),
        seed=seed,
        labels=LabelOptions(
            described,
            OpenAIServer(judge, judge_model, api_key, parallel, rate) if judge else None,
            judge_mode,
            judge_prompt,
            pairs=pairs,
            margin=margin,
            functions=functions,
        ),
        selection=Selection(at_least, best, keep_cut),
        questions=QuestionOptions(questions, chunk, overlap, template or TEMPLATE, structured),
    )
    given = None if isinstance(source, str | Path) else source
    where = "reinforge.make_data"
    config = source_config(PYTHON if given is not None else str(source), overrides, where=where)
    return run_sync(make_file(options, config.data, Path(out), objects=given, progress=progress))


def _rewards_of(
    rewards: GivenRewards | None,
) -> tuple[Sequence[RewardConfig], Mapping[str, Callable[..., Any]]]:
    """Those of a configuration, or those that were given."""
    if rewards is None:
        return (), {}
    if isinstance(rewards, str) and is_config(rewards):
        return load_config(Path(rewards)).rewards, {}
    return describe_rewards(rewards)


def score(
    rewards: GivenRewards,
    data: str | Path | Iterable[Any],
    completions: Sequence[str] | None = None,
) -> list[dict[str, float | None]]:
    """What rewards say of completions: for each a dict with every component and their weighted
    total, `reward`; of a reward model with several heads also every attribute.

    `rewards` and `data` are as `reinforge.train` takes them. The completions are given beside the
    rows, or stand in their column `completion`.
    """
    from reinforge.offline.score import score_rows

    return score_rows(rewards, data, completions)


def chat(
    model: str | Path,
    *,
    system: str | None = None,
    temperature: float = 0.7,
    top_p: float = 0.95,
    max_new_tokens: int = 512,
    seed: int = 0,
) -> Conversation:
    """A conversation with a model: `say` gives its answer, `reset` forgets what was said.

    `model` is a run directory (its newest checkpoint), a directory, a hub id or a GGUF file.
    """
    from reinforge.offline.conversation import Conversation

    return Conversation(
        str(model),
        system=system,
        temperature=temperature,
        top_p=top_p,
        max_new_tokens=max_new_tokens,
        seed=seed,
    )
