"""Known benchmarks on a model or a server: every answer and verdict is a line of a file, and what
was answered before a kill is not asked again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from reinforge.build.saved_model import parts_of
from reinforge.config.data import DataConfig
from reinforge.core.errors import InputError
from reinforge.core.seeds import seed_of
from reinforge.engines.openai import OpenAIClient, OpenAIServer
from reinforge.evals.benchmarks.preset import AnswerJudge, Judgement
from reinforge.evals.benchmarks.result import BenchmarkResult, result_of
from reinforge.evals.benchmarks.rows import BenchmarkRow, GivenRows
from reinforge.evals.benchmarks.table import preset_of
from reinforge.evals.benchmarks.task import BenchmarkTask, make_task
from reinforge.evals.loglikelihood import score_continuations
from reinforge.models.load import load_tokenizer
from reinforge.offline.complete_rows import AT_ONCE
from reinforge.offline.completion_sources import NativeSource, ServerSource
from reinforge.offline.journal import REQUEST, GenerationJournal, Line, digest
from reinforge.version import __version__

RESULTS = "results.json"
QUESTIONS = 16  # whose options are scored together
Progress = Callable[[str, int, int], None]  # task, rows done, rows


async def run_benchmarks(
    model: str,
    rows: Mapping[str, Sequence[BenchmarkRow]],
    out: Path,
    *,
    shots: Mapping[str, GivenRows] | None = None,
    fewshot: int | None = None,
    chat: bool | None = None,
    n: int = 1,
    temperature: float | None = None,
    top_p: float = 1.0,
    max_new_tokens: int | None = None,
    seed: int = 0,
    adapter: str | None = None,
    checkpoint: str = "latest",
    server: OpenAIServer | None = None,
    progress: Progress | None = None,
) -> dict[str, BenchmarkResult]:
    """See `reinforge.benchmark`. `rows`: those of every task. Writes `results.json` and, for every
    task, `TASK.jsonl`.
    """
    heat = _temperature(temperature, n)
    form = _chat(model, adapter, server) if chat is None else chat
    made = [
        make_task(
            preset_of(name),
            found,
            chat=form,
            shots=(shots or {}).get(name),
            fewshot=fewshot,
            max_new_tokens=max_new_tokens,
            temperature=heat,
            top_p=top_p,
        )
        for name, found in rows.items()
    ]
    for task in made:
        if server is not None and task.by_likelihood:
            raise InputError(
                f"a plain prompt of {task.preset.name} is answered by log-probs of given words,"
                " which a server does not tell.",
                where="--plain",
                fix="Leave --plain out: the letter that the model writes is then judged.",
            )
    async with AsyncExitStack() as stack:
        judges: list[AnswerJudge] = []
        for task in made:
            judges.append(task.preset.judge(chat=form))
            stack.callback(judges[-1].close)
        source = await _source(stack, model, adapter, checkpoint, server, form)
        results: dict[str, BenchmarkResult] = {}
        for task, judge in zip(made, judges, strict=True):
            one = BenchmarkRun(task, judge, source, out, n, seed, progress)
            results[task.preset.name] = await one()
            _write_results(out, model, source.identity, results)
    return results


def _temperature(given: float | None, n: int) -> float:
    if given is None and n > 1:
        raise InputError(
            f"{n} greedy answers would be one answer {n} times.",
            where="--temperature",
            fix="Give one above 0; 0.8 is usual for pass@k.",
        )
    return given or 0.0


def _chat(model: str, adapter: str | None, server: OpenAIServer | None) -> bool:
    """A conversation, where the model has a template for one."""
    if server is not None:
        return True
    return bool(load_tokenizer(parts_of(model, adapter)[0]).chat_template)


async def _source(
    stack: AsyncExitStack,
    model: str,
    adapter: str | None,
    checkpoint: str,
    server: OpenAIServer | None,
    chat: bool,
) -> NativeSource | ServerSource:
    if server is None:
        data = DataConfig(source="benchmark", chat="always" if chat else "never")
        return NativeSource(model, data, None, adapter, checkpoint)
    client = await stack.enter_async_context(OpenAIClient(server))
    return ServerSource(client, await client.model(), raw=not chat, logprobs=False, token_ids=False)


class BenchmarkRun:
    """One benchmark on one model. `run_benchmarks` makes it and calls it once."""

    def __init__(
        self,
        task: BenchmarkTask,
        judge: AnswerJudge,
        source: NativeSource | ServerSource,
        out: Path,
        n: int,
        seed: int,
        progress: Progress | None,
    ):
        self.task = task
        self.judge = judge
        self.source = source
        self.n = 1 if task.by_likelihood else n
        self.seed = seed
        self.progress = progress
        self.done = 0
        self.journal = GenerationJournal(out / f"{task.preset.name}.jsonl", self.n)
        asked = ["likelihood"] if task.by_likelihood else [asdict(task.sampling), seed, self.n]
        self.requests = [
            digest(source.identity, asked, row.id, row.prompt)
            for row in map(task.row, range(len(task.rows)))
        ]

    async def __call__(self) -> BenchmarkResult:
        if self.task.by_likelihood:
            assert isinstance(self.source, NativeSource)
            self._compare_options(self.source)
        else:
            await self._generate()
        settings = {**self.task.settings, "seed": self.seed}
        lines = self.journal.finish(self.requests)
        return result_of(self.task.preset, lines, self.n, settings)

    async def _generate(self) -> None:
        room = asyncio.Semaphore(AT_ONCE)

        async def one(i: int) -> None:
            async with room:
                await self._answer(i)
                self._tell(1)

        try:
            async with asyncio.TaskGroup() as tasks:  # the first failure cancels the others
                for i in range(len(self.task.rows)):
                    tasks.create_task(one(i))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _answer(self, i: int) -> None:
        """Asks, unless that was done before a kill, and judges."""
        request = self.requests[i]
        lines = self.journal.known.get(request)
        if lines is None:
            lines = await self._asked(i)
            self.journal.add(lines)
        verdicts = [await self.task.judged(self.judge, i, line["completion"]) for line in lines]
        for line, verdict in zip(lines, verdicts, strict=True):
            line.update(verdict)
            if "trouble" in line:
                line["why"] = line["trouble"]

    async def _asked(self, i: int) -> list[Line]:
        row = self.task.row(i)
        start = {**self.task.record(i, row.prompt), REQUEST: self.requests[i]}
        sampling = self.task.sampling
        room = self.source.room(row) if isinstance(self.source, NativeSource) else None
        if room is not None and room < 1:
            # counts as wrong: to leave it out would make the benchmark easier
            trouble = f"the prompt is {1 - room} tokens too long for the model"
            return [
                {**start, "completion": "", "stop": "length", "trouble": trouble}
                for _ in range(self.n)
            ]
        if room is not None:
            sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))
        key = seed_of(self.seed, "benchmark", self.task.preset.name, row.id)
        made = await self.source.complete(row, sampling, key=key, n=self.n)
        return [{**start, "completion": m["completion"], "stop": m["stop"]} for m in made]

    def _compare_options(self, source: NativeSource) -> None:
        """The log-prob of every option of every row."""
        new = [i for i, r in enumerate(self.requests) if r not in self.journal.known]
        self._tell(len(self.requests) - len(new))
        for at in range(0, len(new), QUESTIONS):
            some = new[at : at + QUESTIONS]
            rows = [self.task.row(i) for i in some]
            options = [self.task.preset.options(self.task.rows[i].record) for i in some]
            pairs = [
                source.continued(row, option)
                for row, own in zip(rows, options, strict=True)
                for option in own
            ]
            scored = iter(
                score_continuations(source.model, pairs, longest=source.engine.context or 1 << 20)
            )
            for i, row, own in zip(some, rows, options, strict=True):
                values = [next(scored)[0] for _ in own]
                start = {**self.task.record(i, row.prompt), REQUEST: self.requests[i]}
                self.journal.add([{**start, "logprobs": values, "stop": "eos"}])
            self._tell(len(some))
        for i, request in enumerate(self.requests):
            (line,) = self.journal.known[request]
            found = self.task.preset.picked(self.task.rows[i].record, line["logprobs"])
            line.update(_verdict(found))

    def _tell(self, rows: int) -> None:
        self.done += rows
        if self.progress is not None:
            self.progress(self.task.preset.name, self.done, len(self.task.rows))


def _verdict(found: Judgement) -> Line:
    return {"answer": found.answer, "scores": dict(found.scores), "why": found.why}


def _write_results(
    out: Path, model: str, identity: Any, results: Mapping[str, BenchmarkResult]
) -> None:
    """With what an earlier command found of the same model and stands there already."""
    path = out / RESULTS
    who = {"model": model, "identity": digest(identity)}
    kept: dict[str, Any] = {}
    try:
        before = json.loads(path.read_text())
        kept = before["tasks"] if {k: before[k] for k in who} == who else {}
    except (OSError, ValueError, KeyError, TypeError):
        pass
    found = {
        name: {k: v for k, v in asdict(result).items() if k != "records"}
        for name, result in results.items()
    }
    said = {**who, "reinforge": __version__, "tasks": {**kept, **found}}
    temporary = path.with_name(f".{RESULTS}.tmp")
    temporary.write_text(json.dumps(said, indent=2, ensure_ascii=False) + "\n")
    temporary.replace(path)
