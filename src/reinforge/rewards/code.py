"""The reward `code`: does the program in a completion pass its tests?

It runs contained, and is judged elsewhere: sandbox/judge.py.

options: {language, tests, entry_point, kind, timeout, total_timeout, memory_mb, partial, tolerance,
apart, workers, backend, url, allow_unsafe, packages, warm}, see docs/sandbox.md. A solution that
runs out of time, memory or output fails its tests: 0. A sandbox that fails gives None, and so do
tests that cannot be used.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Literal

from reinforge.core.errors import InputError
from reinforge.rewards.outcome import RewardOutcome
from reinforge.sandbox.detect import Backend
from reinforge.sandbox.isolation import Isolation
from reinforge.sandbox.judge import (
    JudgeRules,
    Verdict,
    judge_asserts,
    judge_beside,
    judge_calls,
    judge_stdin,
)
from reinforge.sandbox.local import Pool
from reinforge.sandbox.program import LANGUAGES, Limits, Program

Kind = Literal["stdin", "calls", "asserts"]
Call = tuple[Callable[..., Verdict], tuple[Any, ...], int]
Span = tuple[float, float]  # from, to, on the monotonic clock
MOST_AT_ONCE = 8  # programs in one message to a process that judges
MESSAGE_SECONDS = 0.03  # as many as take about this long
FENCE = "```"
# fields that a config does not set
NO_OPTIONS = ("where", "counts", "pool", "seconds", "greedy", "unusable", "tried_again")
UNSAFE = (
    "reward code runs WITHOUT containment (allow_unsafe): what the model writes can read, change"
    " and delete whatever you can."
)


def extract(completion: str) -> str:
    """The last fenced block, closed or not; without any fence the whole completion.

    >>> extract("Try this:\\n```python\\nprint(1)\\n```\\nDone.")
    'print(1)'
    """
    blocks = fenced(completion)
    return blocks[-1] if blocks else completion


def fenced(completion: str) -> list[str]:
    """All fenced blocks; the last may be open."""
    blocks: list[list[str]] = []
    inside = False
    for line in completion.splitlines():
        if line.lstrip().startswith(FENCE):
            inside = not inside
            if inside:
                blocks.append([])
        elif inside:
            blocks[-1].append(line)
    return ["\n".join(block) for block in blocks]


@dataclass(frozen=True, slots=True)
class CodeTests:
    """The tests of a row for programs. `parse_tests` makes it, the reward `code` runs them."""

    kind: Kind
    cases: list[Any]  # stdin: (input, output); calls: (args, expected); asserts: text
    entry: str | None = None


def parse_tests(
    given: Any, entry: str | None = None, kind: Kind | None = None, where: str = "tests"
) -> CodeTests:
    """What a data set says about tests, in any of the usual forms: [{input, output}], [[args,
    expected]], {inputs, outputs[, fn_name]}, a list of assert statements, or HumanEval's text with
    `check`. JSON in a text is read.
    """
    if isinstance(given, str) and given.lstrip()[:1] in ("[", "{"):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise InputError(f"tests are no JSON: {error}", where=where) from error
    if isinstance(given, Mapping) and "inputs" in given and "outputs" in given:
        entry = given.get("fn_name") or entry
        inputs = given["inputs"]
        outputs = given["outputs"]
        if (
            not isinstance(inputs, list | tuple)
            or not isinstance(outputs, list | tuple)
            or len(inputs) != len(outputs)
        ):
            raise InputError(
                "inputs and outputs are no lists of the same length.",
                where=where,
                fix="Give one output for each input.",
            )
        given = list(zip(inputs, outputs, strict=True))
        kind = kind or (
            "calls" if entry and not all(isinstance(i, str) for i, _ in given) else "stdin"
        )
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, list | tuple) or not given:
        raise InputError(
            f"no tests: {str(given)[:60]!r}",
            where=where,
            fix="Give a list; its forms are in docs/sandbox.md.",
        )
    if all(isinstance(test, str) for test in given):
        return CodeTests("asserts", list(given), entry)
    cases = [_pair(test, where) for test in given]
    kind = kind or (
        "stdin" if all(isinstance(a, str) and isinstance(b, str) for a, b in cases) else "calls"
    )
    if kind == "stdin":
        return CodeTests(
            "stdin",
            [
                (
                    "\n".join(a) if isinstance(a, list) else str(a),
                    "\n".join(b) if isinstance(b, list) else str(b),
                )
                for a, b in cases
            ],
        )
    if not entry:
        raise InputError(
            "tests call a function, and nothing says which.",
            where=where,
            fix="Add a column entry_point, or the option entry_point.",
        )
    if not all(isinstance(args, list | tuple) for args, _ in cases):
        raise InputError(
            "the arguments of a call are a list.",
            where=where,
            fix="Write [[args, expected]], e.g. [[[1, 2], 3]] for f(1, 2) == 3.",
        )
    return CodeTests("calls", cases, entry)


def _pair(test: Any, where: str) -> tuple[Any, Any]:
    if isinstance(test, Mapping):
        for names in (
            ("input", "output"),
            ("args", "expected"),
            ("stdin", "stdout"),
            ("input", "expected"),
        ):
            if all(name in test for name in names):
                return test[names[0]], test[names[1]]
    elif isinstance(test, list | tuple) and len(test) == 2:
        return test[0], test[1]
    raise InputError(
        f"{str(test)[:60]!r} is no test.",
        where=where,
        fix="Write {input, output}, [args, expected], or an assert statement.",
    )


@dataclass
class CodeReward:
    """A reward function.

    The sandbox is tried and its threads are started by `open`, so that a config can be checked
    cheaply.
    """

    language: str = "python"
    tests: str = "tests"  # the column with the tests
    entry_point: str | None = None  # the function that is called; None: the column entry_point
    kind: Kind | None = None  # of the tests; None: as they look
    timeout: float = 10.0  # seconds for one test
    total_timeout: float = 60.0  # seconds for all tests of a completion
    memory_mb: int = 512
    partial: bool = False  # the share of tests passed; otherwise all or nothing
    tolerance: float = 0.0  # between numbers
    # assert-style tests in a sandbox of their own; false: beside the solution, which can then cheat
    apart: bool = True
    workers: int | None = None  # solutions at once; None: one per core
    backend: Backend = "auto"
    url: str | None = None  # of a remote sandbox
    allow_unsafe: bool = False
    packages: Sequence[str] = ()
    warm: bool = True  # judge in processes of their own, which stay up between runs
    where: str = "rewards"
    # how verdicts came about: judged, timeout, memory, crashed, failed_here, ...
    counts: Counter[str] = field(default_factory=Counter)
    pool: Pool | None = field(default=None, repr=False)
    seconds: float = 0.1  # that a program takes: a running mean
    # when programs took more than a core
    greedy: deque[Span] = field(default_factory=lambda: deque(maxlen=1000), repr=False)
    unusable: str = ""  # why tests of a row could not be used, the first time
    # programs that ran out of time beside such a one, and were run once more, alone
    tried_again: int = 0

    def __post_init__(self) -> None:
        if self.language not in LANGUAGES:
            raise InputError(
                f"unknown language {self.language!r}.",
                where=f"{self.where}.language",
                fix=f"There are: {', '.join(LANGUAGES)}.",
            )
        if self.kind not in (None, "stdin", "calls", "asserts"):
            raise InputError(
                f"{self.kind!r} is no kind of tests.",
                where=f"{self.where}.kind",
                fix="There are: stdin, calls, asserts.",
            )
        limits = Limits(
            seconds=self.timeout, memory_mb=self.memory_mb, packages=tuple(self.packages)
        )
        self.rules = JudgeRules(
            limits, max(self.total_timeout, self.timeout), self.tolerance, not self.partial
        )

    def open(self) -> CodeReward:
        """Raises InputError where programs cannot be contained."""
        if self.pool is None:
            self.pool = Pool(
                self.workers,
                backend=self.backend,
                allow_unsafe=self.allow_unsafe,
                url=self.url,
                warm=self.warm,
            )
            self.pool.note = self._note
        return self

    @property
    def unsafe(self) -> bool:
        """Whether programs run without containment here."""
        return self.pool is not None and self.pool.isolation.unsafe

    @property
    def notes(self) -> list[str]:
        return [UNSAFE] if self.unsafe else []

    @property
    def needs(self) -> tuple[str, ...]:
        """Columns that rows must have."""
        return (self.tests,)

    async def __call__(self, completions: Sequence[str], **columns: Sequence[Any]) -> RewardOutcome:
        self.open()
        if self.tests not in columns:
            raise InputError(
                f"reward code needs the column {self.tests}, which the rows do not have.",
                where=self.where,
                fix="Map a column with data.columns, or name it in options.tests.",
            )
        entries = columns.get("entry_point") or [None] * len(completions)
        parsed = [self._parsed(t, e) for t, e in zip(columns[self.tests], entries, strict=True)]
        names = [
            (extract(text), repr(tests)) for text, tests in zip(completions, parsed, strict=True)
        ]
        different = {
            name: (name[0], tests)
            for name, tests in zip(names, parsed, strict=True)
            if tests is not None
        }
        found = dict(
            zip(different, await self.judge(list(different.values())), strict=True)
        )  # the same program with the same tests is run once
        verdicts = [found.get(name) for name in names]
        ran = [v for v in verdicts if v is not None]
        failed = {i for i, v in enumerate(verdicts) if v is not None and v.failed_here}
        unusable = {
            i
            for i, (given, tests) in enumerate(zip(columns[self.tests], parsed, strict=True))
            if given is not None and tests is None
        }
        lost = frozenset(failed | unusable)
        scores = [self.score(v) for v in verdicts]
        return RewardOutcome(
            scores, sandbox=len(failed), unsafe=sum(v.unsafe for v in ran), lost=lost
        )

    def _parsed(self, given: Any, entry: str | None) -> CodeTests | None:
        """None for a row without tests, and for one whose tests make no sense: that row is
        unscored, and the others are not.
        """
        if given is None:
            return None
        try:
            return parse_tests(given, self.entry_point or entry, self.kind, self.tests)
        except InputError as error:
            self.counts["unusable tests"] += 1
            self.unusable = self.unusable or str(error)
            return None

    def score(self, verdict: Verdict | None) -> float | None:
        if verdict is None:
            return None
        self.counts[verdict.status] += 1
        self.counts["unsafe"] += verdict.unsafe
        if verdict.failed_here:
            return None
        return (
            verdict.passed / verdict.total
            if self.partial
            else float(verdict.passed == verdict.total)
        )

    async def judge(self, programs: Sequence[tuple[str, CodeTests]]) -> list[Verdict]:
        """All of them at once, several in a message where they are quick: each message costs the
        process that trains.
        """
        calls = [self._call(code, tests) for code, tests in programs]
        size = min(MOST_AT_ONCE, max(1, int(MESSAGE_SECONDS / max(self.seconds, 1e-9))))
        tasks = [
            asyncio.ensure_future(self._judged(calls[at : at + size]))
            for at in range(0, len(calls), size)
        ]
        try:
            found = [one for several in await asyncio.gather(*tasks) for one in several]
            return [
                await self._once_more(call, verdict, span)
                for call, (verdict, span) in zip(calls, found, strict=True)
            ]
        finally:
            for task in tasks:
                task.cancel()

    async def _judged(self, calls: Sequence[Call]) -> list[tuple[Verdict, Span]]:
        """Where the process that judges died with several of them, each gets another try, alone."""
        assert self.pool is not None
        try:
            found = await self.pool.call(several, calls)
        except (OSError, ValueError) as error:
            # no processes or descriptors left; tests too large to be sent
            if len(calls) == 1:
                return [(Verdict(0, calls[0][2], "failed_here", str(error)), (0.0, 0.0))]
            return [one for call in calls for one in await self._judged([call])]
        self.seconds += 0.2 * ((found[-1][1][1] - found[0][1][0]) / len(calls) - self.seconds)
        return found

    async def _once_more(self, call: Call, verdict: Verdict, span: Span) -> Verdict:
        """Time is wall clock time: who ran out of it beside a program that took more than one core
        is run again, alone.
        """
        assert self.pool is not None
        if verdict.status != "timeout" or verdict.greedy:
            return verdict
        while self.pool.running_since(span[1]):  # it may turn out to be such a one
            await asyncio.sleep(0.02)
        if not any(start < span[1] and span[0] < end for start, end in list(self.greedy)):
            return verdict
        self.tried_again += 1
        try:
            [(verdict, _)] = await self.pool.call_alone(several, [call])
        except (OSError, ValueError) as error:
            return Verdict(0, call[2], "failed_here", str(error))
        return verdict

    def _note(self, found: Any) -> None:
        """Called by a thread of the pool with what `several` returned, before its turn is over."""
        self.greedy.extend(span for verdict, span in found or () if verdict.greedy)

    def _call(self, code: str, tests: CodeTests) -> Call:
        """What judges it, and how many tests there are."""
        rules = self.rules
        total = len(tests.cases)
        if tests.kind == "stdin":
            return judge_stdin, (Program(code, self.language), tests.cases, rules), total
        if self.language != "python":
            raise InputError(
                f"tests of kind {tests.kind} are for Python.",
                where=f"{self.where}.language",
                fix="Other languages have tests by stdin and stdout.",
            )
        if tests.kind == "calls":
            return judge_calls, (code, tests.entry, tests.cases, rules), total
        if not self.apart:
            return (
                judge_beside,
                (code, [_with_check(t, tests.entry) for t in tests.cases], rules),
                total,
            )
        if self.url is not None:
            raise InputError(
                "assert-style tests need two sandboxes that can talk, which a remote one cannot.",
                where=f"{self.where}.apart",
                fix="Set apart: false (the solution can then forge its verdict), or remove url.",
            )
        return judge_asserts, (code, tests.cases, tests.entry, rules), total


def several(
    isolation: Isolation, cancel: threading.Event | None, calls: Sequence[Call]
) -> list[tuple[Verdict, Span]]:
    """One after the other, and when each ran."""
    found = []
    for function, args, total in calls:
        start = time.monotonic()
        try:
            verdict = function(isolation, cancel, *args)
        except (OSError, ValueError) as error:
            # no processes or descriptors left; tests too large to be sent
            verdict = Verdict(0, total, "failed_here", str(error))
        except Exception as error:
            # what a solution said was too much for us: its own fault, and not that of the next
            verdict = Verdict(
                0, total, "crashed", f"{type(error).__name__}: {error}"[:300], isolation.unsafe
            )
        found.append((verdict, (start, time.monotonic())))
    return found


def _with_check(test: str, entry: str | None) -> str:
    """HumanEval's tests define `check` and leave calling it to others."""
    return (
        f"{test}\n\ncheck({entry})\n"
        if "def check(" in test and "\ncheck(" not in test and entry
        else test
    )


def code_reward(options: Mapping[str, Any], where: str = "rewards") -> CodeReward:
    """From the options of a config; an unknown one is an error with the nearest name."""
    known = [f.name for f in fields(CodeReward) if f.name not in NO_OPTIONS]
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            raise InputError(
                f"code has no option {name}.",
                where=where,
                fix=(f"Did you mean {near[0]}? " if near else "") + f"It has: {', '.join(known)}.",
            )
    return CodeReward(**options, where=where)
