"""Verdicts on programs, given here and not where the program runs.

    stdin    the program reads a text and prints one; what it printed is compared here
    calls    a function is called inside with arguments from here; the plain value that comes back
             is compared here
    asserts  test code runs in a second sandbox (asserts.py); its calls are passed on to the first,
             where the solution is

Exit codes, printed verdicts and objects of the solution's own types decide nothing. A test that
could not be tried because the sandbox failed makes the whole verdict `failed_here`; every other
trouble is the solution's and a failed test.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from reinforge.sandbox.isolation import Isolation
from reinforge.sandbox.local import DEFAULT, drive, run_sync
from reinforge.sandbox.plain import LARGEST, decode, dumps, encode, loads
from reinforge.sandbox.process import Process
from reinforge.sandbox.program import Limits, Program, Result
from reinforge.sandbox.remote import calls_program


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many tests a program passed, and how the judging ended. The reward `code` makes a score
    of it.
    """

    passed: int
    total: int
    # or how the run ended that stopped the judging; "failed_here": not the solution's fault
    status: str = "judged"
    reason: str = ""
    unsafe: bool = False
    # took, or wanted, more than one core for a while: those beside it may have run out of time for
    # that
    greedy: bool = False

    @property
    def failed_here(self) -> bool:
        return self.status == "failed_here"


@dataclass(frozen=True, slots=True)
class JudgeRules:
    """Limits and tolerances of the judging of one program."""

    limits: Limits = DEFAULT  # `seconds` is for each test
    total_seconds: float = 60.0  # for all tests of one solution
    tolerance: float = 0.0  # for numbers, absolute and relative
    stop_at_failure: bool = False  # all or nothing: the rest need not be tried


# -- comparing


def same_output(got: bytes, expected: str, tolerance: float = 0.0) -> bool:
    """Line by line, without white space at the ends of lines and empty lines at the end; with a
    tolerance, number by number.
    """
    lines = [
        [line.rstrip() for line in text.rstrip().splitlines()]
        for text in (got.decode("utf-8", "replace"), expected)
    ]
    if lines[0] == lines[1]:
        return True
    words = [[line.split() for line in text] for text in lines]
    if tolerance <= 0 or [len(line) for line in words[0]] != [len(line) for line in words[1]]:
        return False
    return all(
        a == b or _close(a, b, tolerance)
        for mine, theirs in zip(*words, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    )


def _close(a: str, b: str, tolerance: float) -> bool:
    try:
        return (
            len(a) < 40
            and len(b) < 40
            and math.isclose(float(a), float(b), rel_tol=tolerance, abs_tol=tolerance)
        )
    except ValueError:
        return False


def same_value(got: Any, expected: Any, tolerance: float = 0.0) -> bool:
    """Whether the values agree.

    What cannot be compared (too deep, too large) does not: it came from the solution.
    """
    try:
        return _same(got, expected, tolerance)
    except (ArithmeticError, ValueError, TypeError, RecursionError):
        return False


def _same(got: Any, expected: Any, tolerance: float) -> bool:
    """Both plain.

    As in Python, but what was expected came from JSON, which has no tuples and only text as keys;
    nan equals nan.
    """
    if isinstance(got, list | tuple) and isinstance(expected, list | tuple):
        return len(got) == len(expected) and all(
            _same(g, e, tolerance) for g, e in zip(got, expected, strict=True)
        )
    if isinstance(got, dict) and isinstance(expected, dict):
        if got.keys() != expected.keys() and all(isinstance(k, str) for k in expected):
            got = {k if isinstance(k, str) else str(encode(k)): v for k, v in got.items()}
        return got.keys() == expected.keys() and all(
            _same(v, expected[k], tolerance) for k, v in got.items()
        )
    if (
        isinstance(got, float)
        and isinstance(expected, float)
        and math.isnan(got)
        and math.isnan(expected)
    ):
        return True
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (got, expected))
    if tolerance > 0 and numbers and isinstance(got, float) | isinstance(expected, float):
        try:
            return math.isclose(got, expected, rel_tol=tolerance, abs_tol=tolerance)
        except OverflowError:
            return False
    return bool(got == expected)


# -- programs that read and print


def judge_stdin(
    isolation: Isolation,
    cancel: threading.Event | None,
    program: Program,
    tests: Sequence[tuple[str, str]],
    rules: JudgeRules,
) -> Verdict:
    """Each test is a process of its own.

    After the first that runs out of time the rest count as failed.
    """
    passed = 0
    status = "judged"
    reason = ""
    greedy = False
    until = time.monotonic() + rules.total_seconds
    for text, expected in tests:
        seconds = min(rules.limits.seconds, until - time.monotonic())
        if seconds <= 0:
            status = "timeout"
            reason = "all tests together"
            break
        result = run_sync(
            replace(program, stdin=text), replace(rules.limits, seconds=seconds), isolation, cancel
        )
        greedy |= result.greedy
        if result.failed_here:
            return Verdict(0, len(tests), "failed_here", result.reason, isolation.unsafe)
        if result.status == "ok" and same_output(result.stdout, expected, rules.tolerance):
            passed += 1
            continue
        status, reason = (
            (result.status, result.reason) if result.status != "ok" else (status, "another output")
        )
        if result.status == "timeout" or rules.stop_at_failure:
            break
    return Verdict(passed, len(tests), status, reason, isolation.unsafe, greedy)


# -- functions


class SolutionCaller:
    """A solution that is loaded in a sandbox and answers calls.

    Every request has a nonce, which its reply must repeat.
    """

    def __init__(self, process: Process):
        self.process = process

    def ask(self, message: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """The reply as said, checked to be plain; None if the process ended, ran out of time or
        broke the protocol.
        """
        nonce = secrets.token_hex(8)
        line = self.process.ask(dumps({"nonce": nonce, **message}), seconds)
        return None if line is None else checked(line, nonce)


def checked(line: bytes, nonce: str) -> dict[str, Any] | None:
    """A reply of the solution's process, reduced to what a reply may be and what can be passed on;
    None for anything else.
    """
    try:
        said = loads(line)
        if said.pop("nonce", None) != nonce:
            return None
        if "raised" in said:
            kind, text = said["raised"]
            return {"raised": [str(kind)[:80], str(text)[:500]]}
        decode(said["value"])
        reply = {"value": said["value"]} | (
            {"args": said["args"]} if isinstance(decode(said.get("args")), list) else {}
        )
        return reply if len(dumps(reply)) < LARGEST - 100 else None
    except (ArithmeticError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _limits(rules: JudgeRules, calls: int | None = None) -> Limits:
    """A process that answers all calls may live as long as all of them may take.

    So much processor time it has, too.
    """
    total = rules.total_seconds
    # one to load it
    cpu = total if calls is None else min(total, rules.limits.seconds * (calls + 1))
    return replace(
        rules.limits, seconds=total, cpu_seconds=rules.limits.cpu_seconds or int(cpu) + 2
    )


def _ended(process: Process, passed: int, total: int, unsafe: bool) -> Verdict:
    """The solution's process said nothing, or nonsense."""
    result: Result = process.finish(kill=True)
    if result.failed_here:
        return Verdict(0, total, "failed_here", result.reason, unsafe)
    status = "crashed" if result.status == "ok" else result.status
    return Verdict(passed, total, status, result.reason or "gave no answer", unsafe)


def judge_calls(
    isolation: Isolation,
    cancel: threading.Event | None,
    code: str,
    name: str,
    tests: Sequence[tuple[Sequence[Any], Any]],
    rules: JudgeRules,
) -> Verdict:
    """One process answers all calls. When it ends or runs out of time the rest count as failed."""
    if isolation.url is not None:
        return _calls_at_once(isolation, code, name, tests, rules)
    limits = _limits(rules, len(tests))
    with drive(
        isolation, "solution", limits, {"main.py": code.encode("utf-8", "surrogatepass")}, cancel
    ) as process:
        verdict = _called(process, name, tests, rules)
        return replace(verdict, greedy=process.greedy)


def _called(
    process: Process, name: str, tests: Sequence[tuple[Sequence[Any], Any]], rules: JudgeRules
) -> Verdict:
    unsafe = process.isolation.unsafe
    passed = 0
    reason = ""
    caller = SolutionCaller(process)
    loaded = caller.ask({}, rules.limits.seconds)
    if loaded is None:
        return _ended(process, 0, len(tests), unsafe)
    if "raised" in loaded:
        return Verdict(0, len(tests), "crashed", ": ".join(loaded["raised"]), unsafe)
    for args, expected in tests:
        said = caller.ask(
            {"call": name, "args": encode(list(args)), "kwargs": encode({})}, rules.limits.seconds
        )
        if said is None:
            return _ended(process, passed, len(tests), unsafe)
        if "value" in said and same_value(decode(said["value"]), expected, rules.tolerance):
            passed += 1
            continue
        reason = ": ".join(said["raised"]) if "raised" in said else "another value"
        if rules.stop_at_failure:
            break
    return Verdict(passed, len(tests), "judged", reason, unsafe)


def _calls_at_once(
    isolation: Isolation,
    code: str,
    name: str,
    tests: Sequence[tuple[Sequence[Any], Any]],
    rules: JudgeRules,
) -> Verdict:
    """The same over a remote sandbox, which has no channel."""
    program, nonces = calls_program(code, name, [args for args, _ in tests])
    result = run_sync(program, _limits(rules), isolation)
    if result.failed_here:
        return Verdict(0, len(tests), "failed_here", result.reason)
    lines = [line for line in result.stdout.split(b"\n") if line.startswith(b"{")]
    passed = 0
    for nonce, (_, expected) in zip(nonces[1:], tests, strict=True):
        said = next(
            (
                reply
                for line in lines
                if nonce.encode() in line and (reply := checked(line, nonce)) is not None
            ),
            None,
        )
        passed += (
            said is not None
            and "value" in said
            and same_value(decode(said["value"]), expected, rules.tolerance)
        )
    return Verdict(
        passed, len(tests), "judged" if result.status == "ok" else result.status, result.reason
    )


def judge_asserts(
    isolation: Isolation,
    cancel: threading.Event | None,
    code: str,
    tests: Sequence[str],
    entry: str | None,
    rules: JudgeRules,
) -> Verdict:
    """Two sandboxes: tests ask, the solution answers, and this function carries the messages
    between them.
    """
    own = replace(_limits(rules), packages=rules.limits.packages)
    with drive(
        isolation, "solution", own, {"main.py": code.encode("utf-8", "surrogatepass")}, cancel
    ) as process:
        with drive(isolation, "asserts", own, {}, cancel) as bench:
            verdict = _between(process, bench, tests, entry, rules)
            return replace(verdict, greedy=process.greedy or bench.greedy)


def _between(
    process: Process, bench: Process, tests: Sequence[str], entry: str | None, rules: JudgeRules
) -> Verdict:
    """Carries messages from the tests to the solution and back until there is a verdict."""
    total = len(tests)
    asked = 0
    unsafe = process.isolation.unsafe
    caller = SolutionCaller(process)
    loaded = caller.ask({}, rules.limits.seconds)
    if loaded is None:
        return _ended(process, 0, total, unsafe)
    if "raised" in loaded:
        return Verdict(0, total, "crashed", ": ".join(loaded["raised"]), unsafe)
    message: dict[str, Any] = {"tests": list(tests), "entry": entry}
    while True:
        nonce = secrets.token_hex(8)
        line = bench.ask(dumps({"nonce": nonce, **message}), rules.total_seconds)
        heard = _parsed(line)
        if heard.get("nonce") != nonce or not heard.keys() & {"passed", "call"}:
            return _no_verdict(bench, asked, total, heard, unsafe)
        if "passed" in heard:
            ok = [flag is True for flag in heard["passed"]]
            return Verdict(sum(ok), total, "judged", "; ".join(heard["reasons"])[:500], unsafe)
        asked += 1
        said = caller.ask(
            {key: heard[key] for key in ("call", "args", "kwargs")}, rules.limits.seconds
        )
        if said is None:
            return _ended(process, 0, total, unsafe)
        message = said


def _parsed(line: bytes | None) -> dict[str, Any]:
    try:
        return loads(line) if line is not None else {}
    except ValueError:
        return {}


def _no_verdict(
    bench: Process, asked: int, total: int, heard: dict[str, Any], unsafe: bool
) -> Verdict:
    """The tests did not come to an end.

    Before they asked the solution anything that is their fault, afterwards its.
    """
    result = bench.finish(kill=True)
    reason = heard.get("cannot") or f"the tests ended with {result.status} {result.reason}"
    if "cannot" in heard or not asked or result.failed_here:
        return Verdict(0, total, "failed_here", str(reason), unsafe)
    return Verdict(
        0, total, result.status if result.status != "ok" else "crashed", str(reason), unsafe
    )


def judge_beside(
    isolation: Isolation,
    cancel: threading.Event | None,
    code: str,
    tests: Sequence[str],
    rules: JudgeRules,
) -> Verdict:
    """The weak way: tests in the process of the solution, one process per test.

    Its word is that a secret was printed after the last assert, and a solution that reads its own
    memory or its own file finds that secret. For tests of classes, which cannot be passed as plain
    values, there is no other.
    """
    passed = 0
    status = "judged"
    reason = ""
    greedy = False
    until = time.monotonic() + rules.total_seconds
    for test in tests:
        nonce = secrets.token_hex(16)
        seconds = min(rules.limits.seconds, until - time.monotonic())
        if seconds <= 0:
            status = "timeout"
            reason = "all tests together"
            break
        program = Program(f"{code}\n\n{test}\nprint('\\n' + {nonce!r})\n")
        result = run_sync(program, replace(rules.limits, seconds=seconds), isolation, cancel)
        greedy |= result.greedy
        if result.failed_here:
            return Verdict(0, len(tests), "failed_here", result.reason, isolation.unsafe)
        if result.status == "ok" and result.stdout.endswith(nonce.encode() + b"\n"):
            passed += 1
            continue
        reason = result.reason or result.stderr[-200:].decode("utf-8", "replace")
        if result.status == "timeout":
            status = "timeout"
            break
        if rules.stop_at_failure:
            break
    return Verdict(passed, len(tests), status, reason, isolation.unsafe, greedy)
