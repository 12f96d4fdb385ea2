"""The reward `code`: does the program in a completion pass its tests? It runs contained, and is judged elsewhere: sandbox/judge.py.

options: {language, tests, entry_point, kind, timeout, total_timeout, memory_mb, partial, tolerance, apart, workers, backend, url,
allow_unsafe, packages, warm}, see docs/sandbox.md. A solution that runs out of time, memory or output fails its tests: 0. A sandbox that
fails gives None, and so do tests that cannot be used.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Literal

from reinforge.core.errors import InputError
from reinforge.rewards.outcome import Outcome
from reinforge.sandbox.isolation import Backend
from reinforge.sandbox.judge import Rules, Verdict, judge_asserts, judge_beside, judge_calls, judge_stdin
from reinforge.sandbox.local import Pool
from reinforge.sandbox.program import LANGUAGES, Limits, Program

Kind = Literal["stdin", "calls", "asserts"]
FENCE = "```"
UNSAFE = "reward code runs WITHOUT containment (allow_unsafe): what the model writes can read, change and delete whatever you can."


def extract(completion: str) -> str:
    """The last fenced block, closed or not; without any fence the whole completion.

    >>> extract("Try this:\\n```python\\nprint(1)\\n```\\nDone.")
    'print(1)'
    """
    blocks: list[list[str]] = []
    inside = False
    for line in completion.splitlines():
        if line.lstrip().startswith(FENCE):
            inside = not inside
            if inside:
                blocks.append([])
        elif inside:
            blocks[-1].append(line)
    return "\n".join(blocks[-1]) if blocks else completion


@dataclass(frozen=True, slots=True)
class Tests:
    kind: Kind
    cases: list[Any]  # stdin: (input, output); calls: (args, expected); asserts: text
    entry: str | None = None


def parse_tests(given: Any, entry: str | None = None, kind: Kind | None = None, where: str = "tests") -> Tests:
    """What a data set says about tests, in any of the usual forms: [{input, output}], [[args, expected]], {inputs, outputs[, fn_name]},
    a list of assert statements, or HumanEval's text with `check`. JSON in a text is read."""
    if isinstance(given, str) and given.lstrip()[:1] in ("[", "{"):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise InputError(f"tests are no JSON: {error}", where=where) from error
    if isinstance(given, Mapping) and "inputs" in given and "outputs" in given:
        entry = given.get("fn_name") or entry
        given = list(zip(given["inputs"], given["outputs"], strict=True))
        kind = kind or ("calls" if entry and not all(isinstance(i, str) for i, _ in given) else "stdin")
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, list | tuple) or not given:
        raise InputError(f"no tests: {str(given)[:60]!r}", where=where, fix="Give a list; its forms are in docs/sandbox.md.")
    if all(isinstance(test, str) for test in given):
        return Tests("asserts", list(given), entry)
    cases = [_pair(test, where) for test in given]
    kind = kind or ("stdin" if all(isinstance(a, str) and isinstance(b, str) for a, b in cases) else "calls")
    if kind == "stdin":
        return Tests(
            "stdin", [("\n".join(a) if isinstance(a, list) else str(a), "\n".join(b) if isinstance(b, list) else str(b)) for a, b in cases]
        )
    if not entry:
        raise InputError(
            "tests call a function, and nothing says which.", where=where, fix="Add a column entry_point, or the option entry_point."
        )
    if not all(isinstance(args, list | tuple) for args, _ in cases):
        raise InputError(
            "the arguments of a call are a list.", where=where, fix="Write [[args, expected]], e.g. [[[1, 2], 3]] for f(1, 2) == 3."
        )
    return Tests("calls", cases, entry)


def _pair(test: Any, where: str) -> tuple[Any, Any]:
    if isinstance(test, Mapping):
        for names in (("input", "output"), ("args", "expected"), ("stdin", "stdout"), ("input", "expected")):
            if all(name in test for name in names):
                return test[names[0]], test[names[1]]
    elif isinstance(test, list | tuple) and len(test) == 2:
        return test[0], test[1]
    raise InputError(f"{str(test)[:60]!r} is no test.", where=where, fix="Write {input, output}, [args, expected], or an assert statement.")


@dataclass
class CodeReward:
    """A reward function. The sandbox is tried and its threads are started by `open`, so that a config can be checked cheaply."""

    language: str = "python"
    tests: str = "tests"  # the column with the tests
    entry_point: str | None = None  # the function that is called; None: the column entry_point
    kind: Kind | None = None  # of the tests; None: as they look
    timeout: float = 10.0  # seconds for one test
    total_timeout: float = 60.0  # seconds for all tests of a completion
    memory_mb: int = 512
    partial: bool = False  # the share of tests passed; otherwise all or nothing
    tolerance: float = 0.0  # between numbers
    apart: bool = True  # assert-style tests in a sandbox of their own; false: beside the solution, which can then cheat
    workers: int | None = None  # solutions at once; None: one per core
    backend: Backend = "auto"
    url: str | None = None  # of a remote sandbox
    allow_unsafe: bool = False
    packages: Sequence[str] = ()
    warm: bool = True  # judge in processes of their own, which stay up between runs
    where: str = "rewards"
    counts: Counter[str] = field(default_factory=Counter)  # how verdicts came about: judged, timeout, memory, crashed, failed_here, ...
    pool: Pool | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.language not in LANGUAGES:
            raise InputError(
                f"unknown language {self.language!r}.", where=f"{self.where}.language", fix=f"There are: {', '.join(LANGUAGES)}."
            )
        if self.kind not in (None, "stdin", "calls", "asserts"):
            raise InputError(f"{self.kind!r} is no kind of tests.", where=f"{self.where}.kind", fix="There are: stdin, calls, asserts.")
        limits = Limits(seconds=self.timeout, memory_mb=self.memory_mb, packages=tuple(self.packages))
        self.rules = Rules(limits, max(self.total_timeout, self.timeout), self.tolerance, not self.partial)

    def open(self) -> CodeReward:
        """Raises InputError where programs cannot be contained."""
        self.pool = self.pool or Pool(self.workers, backend=self.backend, allow_unsafe=self.allow_unsafe, url=self.url, warm=self.warm)
        return self

    @property
    def unsafe(self) -> bool:
        """Whether programs run without containment here."""
        return self.pool is not None and self.pool.isolation.unsafe

    @property
    def notes(self) -> list[str]:
        return [UNSAFE] if self.unsafe else []

    async def __call__(self, completions: Sequence[str], **columns: Sequence[Any]) -> Outcome:
        self.open()
        if self.tests not in columns:
            raise InputError(f"reward code needs the column {self.tests}, which the rows do not have.", where=self.where,
                             fix="Map a column with data.columns, or name it in options.tests.")  # fmt: skip
        entries = columns.get("entry_point") or [None] * len(completions)
        parsed = [
            None if t is None else parse_tests(t, self.entry_point or e, self.kind, self.tests)
            for t, e in zip(columns[self.tests], entries, strict=True)
        ]
        asked: dict[tuple[str, str], asyncio.Future[Verdict | None]] = {}  # the same program with the same tests is run once
        names = [(extract(text), repr(tests)) for text, tests in zip(completions, parsed, strict=True)]
        for name, text, tests in zip(names, completions, parsed, strict=True):
            if name not in asked:
                asked[name] = asyncio.ensure_future(self.verdict(text, tests))
        try:
            await asyncio.gather(*asked.values())
        finally:
            for task in asked.values():
                task.cancel()
        verdicts = [asked[name].result() for name in names]
        ran = [v for v in verdicts if v is not None]
        return Outcome([self.score(v) for v in verdicts], sandbox=sum(v.failed_here for v in ran), unsafe=sum(v.unsafe for v in ran))

    def score(self, verdict: Verdict | None) -> float | None:
        if verdict is None:
            return None
        self.counts[verdict.status] += 1
        self.counts["unsafe"] += verdict.unsafe
        if verdict.failed_here:
            return None
        return verdict.passed / verdict.total if self.partial else float(verdict.passed == verdict.total)

    async def verdict(self, completion: str, tests: Tests | None) -> Verdict | None:
        """One completion; None if there is nothing to test it with."""
        if tests is None:
            return None
        try:
            return await self._judged(completion, tests)
        except (OSError, ValueError) as error:  # no processes or descriptors left; tests too large to be sent
            return Verdict(0, len(tests.cases), "failed_here", str(error))

    async def _judged(self, completion: str, tests: Tests) -> Verdict:
        assert self.pool is not None
        code, rules = extract(completion), self.rules
        if tests.kind == "stdin":
            return await self.pool.call(judge_stdin, Program(code, self.language), tests.cases, rules)
        if self.language != "python":
            raise InputError(
                f"tests of kind {tests.kind} are for Python.",
                where=f"{self.where}.language",
                fix="Other languages have tests by stdin and stdout.",
            )
        if tests.kind == "calls":
            assert tests.entry is not None
            return await self.pool.call(judge_calls, code, tests.entry, tests.cases, rules)
        if not self.apart:
            return await self.pool.call(judge_beside, code, [_with_check(t, tests.entry) for t in tests.cases], rules)
        if self.url is not None:
            raise InputError("assert-style tests need two sandboxes that can talk, which a remote one cannot.", where=f"{self.where}.apart",
                             fix="Set apart: false (the solution can then forge its verdict), or remove url.")  # fmt: skip
        return await self.pool.call(judge_asserts, code, tests.cases, tests.entry, rules)


def _with_check(test: str, entry: str | None) -> str:
    """HumanEval's tests define `check` and leave calling it to others."""
    return f"{test}\n\ncheck({entry})\n" if "def check(" in test and "\ncheck(" not in test and entry else test


def code_reward(options: Mapping[str, Any], where: str = "rewards") -> CodeReward:
    """From the options of a config; an unknown one is an error with the nearest name."""
    known = [f.name for f in fields(CodeReward) if f.name not in ("where", "counts", "pool")]
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            raise InputError(
                f"code has no option {name}.",
                where=where,
                fix=(f"Did you mean {near[0]}? " if near else "") + f"It has: {', '.join(known)}.",
            )
    return CodeReward(**options, where=where)
