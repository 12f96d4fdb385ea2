"""The benchmarks of a run's evaluations (eval.benchmarks): asked with the engine that the run has,
judged as `reinforge benchmark` judges.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reinforge.build.inputs import EncodedPrompts, RunInputs
from reinforge.config.eval import BenchmarkConfig
from reinforge.core.aio import together
from reinforge.core.engine import Engine
from reinforge.core.errors import InputError
from reinforge.core.sample import Stop
from reinforge.core.seeds import seed_of
from reinforge.data.chat import Renderer
from reinforge.evals.benchmarks.preset import AnswerJudge
from reinforge.evals.benchmarks.result import result_of
from reinforge.evals.benchmarks.rows import RowsOption, read_rows
from reinforge.evals.benchmarks.table import preset_of
from reinforge.evals.benchmarks.task import BenchmarkTask, make_task
from reinforge.loops.view import ViewLike


@dataclass(frozen=True)
class EncodedBenchmark:
    """A benchmark whose prompts are token ids. An item of `RunBenchmarks`."""

    task: BenchmarkTask
    judge: AnswerJudge
    renderer: Renderer
    prompts: Sequence[list[int]]
    context: int

    async def ask(self, engine: Engine, seed: int) -> dict[str, float]:
        """All rows at once, greedily: metrics by the names that a run logs."""
        records = await together(
            [self._record(engine, seed, i) for i in range(len(self.task.rows))]
        )
        found = result_of(self.task.preset, records, 1, self.task.settings)
        start = f"eval/{found.task}/"
        main = found.metrics[found.metric]
        return {
            **{f"{start}{name}": metric.value for name, metric in found.metrics.items()},
            f"{start}{found.metric}_low": main.low,
            f"{start}{found.metric}_high": main.high,
            f"{start}unscored": found.unscored,
            f"{start}cut": found.cut,
        }

    async def _record(self, engine: Engine, seed: int, i: int) -> dict[str, Any]:
        prompt = self.prompts[i]
        sampling = self.task.sampling
        room = min(self.context - len(prompt), sampling.max_new_tokens)
        text = ""
        stop = Stop.LENGTH
        if room > 0:
            name = self.task.preset.name
            key = seed_of(seed, "benchmark", name, self.task.rows[i].id)
            (made,) = await engine.generate(prompt, replace(sampling, max_new_tokens=room), key=key)
            text = self.renderer.decode(made.tokens)
            stop = made.stop
        return {
            **self.task.record(i, None),
            "stop": str(stop),
            **await self.task.judged(self.judge, i, text),
        }


@dataclass(frozen=True)
class RunBenchmarks:
    """The benchmarks of a run, read before its models are loaded. `read_benchmarks` makes it; what
    builds an evaluation calls `evaluation` with the engine.
    """

    items: Sequence[EncodedBenchmark]
    seed: int

    @property
    def prompts(self) -> EncodedPrompts:
        """For what is made as large as sequences get."""
        ids = [prompt for item in self.items for prompt in item.prompts]
        longest = max(
            min(item.context, len(prompt) + item.task.sampling.max_new_tokens)
            for item in self.items
            for prompt in item.prompts
        )
        return EncodedPrompts([], [len(prompt) for prompt in ids], longest, lambda row: [])

    def evaluation(self, engine: Engine) -> Callable[[], Coroutine[Any, Any, dict[str, float]]]:
        async def ask() -> dict[str, float]:
            metrics: dict[str, float] = {}
            for item in self.items:
                metrics |= await item.ask(engine, self.seed)
            return metrics

        return ask


def prompts_of(benchmarks: RunBenchmarks | None) -> EncodedPrompts | None:
    return None if benchmarks is None else benchmarks.prompts


def read_benchmarks(inputs: RunInputs, view: ViewLike) -> RunBenchmarks | None:
    """Those of the configuration; None where it has none."""
    asked = inputs.cfg.eval.benchmarks
    if not asked:
        return None
    items = []
    for i, item in enumerate(asked):
        view.doing(f"reading the benchmark {item.task}")
        items.append(_encoded(inputs, item, f"eval.benchmarks.{i}"))
    return RunBenchmarks(items, inputs.cfg.run.seed)


def _encoded(inputs: RunInputs, item: BenchmarkConfig, where: str) -> EncodedBenchmark:
    preset = preset_of(item.task, f"{where}.task")
    chat = inputs.renderer.chat if item.chat is None else item.chat
    rows = read_rows(preset, item.rows, item.limit, RowsOption(f"{where}.rows", "rows: FILE"))
    task = make_task(
        preset,
        rows,
        chat=chat,
        shots=item.shots,
        fewshot=item.fewshot,
        max_new_tokens=item.max_new_tokens,
        shots_given_by=RowsOption(f"{where}.shots", "shots: FILE", ".shots", " or fewshot: 0"),
    )
    if task.by_likelihood:
        raise InputError(
            f"a plain prompt of {item.task} is answered by log-probs of given words, which no"
            " engine of a run tells.",
            where=f"{where}.chat",
            fix="Set chat: true (it needs a chat template), or use `reinforge benchmark`.",
        )
    data = inputs.cfg.data.model_copy(update={"chat": "always" if chat else "never"})
    renderer = Renderer(inputs.tokenizer, data)
    prompts = [renderer.prompt(task.row(i)) for i in range(len(rows))]
    return EncodedBenchmark(task, preset.judge(chat=chat), renderer, prompts, inputs.context)
