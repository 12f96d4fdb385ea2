"""The Python door. The command line builds the same objects.

import reinforge

def reward(prompts, completions, answer, **columns):
    return [float(c.strip() == a) for c, a in zip(completions, answer)]

result = reinforge.train(model="HuggingFaceTB/SmolLM2-135M-Instruct", data=rows, rewards=[reward], algorithm="grpo", steps=100)
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from reinforge.config.load import config_from_dict, load_config
from reinforge.config.schema import Config
from reinforge.core.errors import InputError

if TYPE_CHECKING:
    from reinforge.app.build import Given
    from reinforge.train.session import ViewLike

T = TypeVar("T")


@dataclass(frozen=True)
class RunResult:
    run_dir: Path
    metrics: dict[str, float]  # the newest value of each
    steps: int
    stopped: str | None = None  # why it ended before its time
    report: Path | None = None


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end, also inside a running event loop (a notebook): then in a thread of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    box: dict[str, Any] = {}

    def target() -> None:
        try:
            box["value"] = asyncio.run(work)
        except BaseException as error:
            box["error"] = error

    thread = threading.Thread(target=target, name="reinforge")
    thread.start()
    thread.join()
    if "error" in box:
        raise box["error"]
    return box["value"]


def train_config(config: Config, given: Given | None = None, view: ViewLike | None = None) -> RunResult:
    """Runs one config to its end, or on from where it stopped, and writes the report."""
    from reinforge.app.build import build
    from reinforge.watch.report import write_report
    from reinforge.watch.view import View

    trainer = build(config, view or View(), given)
    session = trainer.session

    async def go() -> None:
        with session:
            await trainer.run()

    started = time.monotonic()
    run_sync(go())
    finite = {name: value for name, value in session.last.items() if math.isfinite(value)}  # NaN is not JSON
    summary = {
        "steps": session.step,
        "stopped": session.stopped,
        "seconds": time.monotonic() - started,
        "metrics": finite,
        "counters": session.counters,
    }
    (session.dir / "summary.json").write_text(json.dumps(summary, indent=1))
    return RunResult(session.dir, session.last, session.step, session.stopped, write_report(session.dir))


def train(
    config: str | Path | Mapping[str, Any] | Config | None = None, *, model: str | None = None, data: str | Iterable[Any] | None = None,
    eval_data: Iterable[Any] | None = None, rewards: Sequence[str | Callable[..., Any]] | None = None, algorithm: str = "grpo",
    dir: str = "runs/latest", steps: int | None = None, learning_rate: float = 1e-5, max_new_tokens: int = 256, group_size: int = 8,
    prompts_per_step: int = 64, seed: int = 0, adapter: Mapping[str, Any] | None = None, overrides: Sequence[str] = (),
) -> RunResult:  # fmt: skip
    """Trains a model. Give a config (file, dict or object), or the usual few things by name; `overrides` reach everything else
    (`"train.schedule.kind=cosine"`).

    `data` is a path, a source name, or an iterable of dicts with a `prompt` (and whatever columns the rewards want).
    `rewards` are names or functions `(prompts, completions, **columns) -> list[float | None]`, plain or async.
    """
    from reinforge.app.build import Given

    functions = [r for r in rewards or () if callable(r)]
    if functions and len(functions) != len(rewards or ()):
        raise InputError(
            "rewards are functions or names, not both.", where="rewards", fix="Write named ones as `file.py:function`, or wrap them."
        )
    given = Given(data=None if data is None or isinstance(data, str) else list(data), eval_data=eval_data, rewards=functions or None)
    if config is not None:
        usual = inspect.signature(train).parameters
        named_too = {"model": model, "algorithm": algorithm, "dir": dir, "steps": steps, "learning_rate": learning_rate, "max_new_tokens": max_new_tokens,
                     "group_size": group_size, "prompts_per_step": prompts_per_step, "seed": seed, "adapter": adapter}  # fmt: skip
        ignored = [name for name, value in named_too.items() if value != usual[name].default]
        ignored += ["data"] * isinstance(data, str) + ["rewards"] * bool(rewards and not functions)
        if ignored:
            raise InputError(f"{', '.join(ignored)} would be ignored beside a config.", where="reinforge.train",
                             fix='Set it in the config, or with overrides=["train.learning_rate=1e-4"].')  # fmt: skip
    if isinstance(config, Config):
        config = config.model_dump(mode="json")
    if isinstance(config, (str, Path)):
        return train_config(load_config(Path(config), overrides), given)
    if config is None:
        if model is None or data is None:
            raise InputError("model and data are needed.", where="reinforge.train", fix="Give them by name, or give a config file.")
        named: list[dict[str, Any]] = [{"name": r if isinstance(r, str) else getattr(r, "__name__", "reward")} for r in rewards or ()]
        config = {
            "model": {"path": model}, "algorithm": {"name": algorithm, "group_size": group_size}, "data": {"source": data if isinstance(data, str) else "python"},
            "rewards": named, "rollout": {"max_new_tokens": max_new_tokens}, "run": {"dir": dir, "seed": seed},
            "train": {"steps": steps or 100, "learning_rate": learning_rate, "prompts_per_step": prompts_per_step},
            **({"adapter": dict(adapter)} if adapter is not None else {}),
        }  # fmt: skip
    return train_config(config_from_dict(dict(config), where="reinforge.train", overrides=overrides), given)


def evaluate(config_or_run: str | Path, overrides: Sequence[str] = (), *, checkpoint: str = "latest") -> dict[str, float]:
    """Scores the model of a config, or the newest checkpoint of a run, on its held-out rows. Writes nothing but the result."""
    from reinforge.app.build import Given, Workshop
    from reinforge.app.runs import config_of, load_weights
    from reinforge.watch.view import View

    config, run_dir = config_of(Path(config_or_run), overrides)
    shop = Workshop(config, Given(), View())
    if run_dir is not None:
        load_weights(shop.model, run_dir, checkpoint)
    heldout = shop.heldout()
    if heldout is None:
        raise InputError("there is nothing to evaluate: no held-out rows, or no reward to score them.", where="data.eval",
                         fix="Set data.eval.size or data.eval.source, and rewards.")  # fmt: skip
    return run_sync(heldout())


def generate(model: str, prompts: str | Path, out: str | Path, *, n: int = 1, temperature: float = 1.0, top_p: float = 1.0, max_new_tokens: int = 256,
             seed: int = 0, adapter: str | None = None) -> int:  # fmt: skip
    """Completions for every row of a prompts file, as JSONL: the row's columns, completion, tokens, logprobs, stop. Returns rows written."""
    from reinforge.app.generate import generate_file

    return run_sync(
        generate_file(
            model,
            Path(prompts),
            Path(out),
            n=n,
            temperature=temperature,
            top_p=top_p,
            max_new_tokens=max_new_tokens,
            seed=seed,
            adapter=adapter,
        )
    )
