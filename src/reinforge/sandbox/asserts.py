"""Inside a second sandbox, where the solution is not: runs assert-style tests.

A name that the tests use but do not define is a function of the solution; calling it asks, through
the judge outside, the process that holds the solution, and a plain value comes back.

So the test compares plain values in a process that the solution cannot touch: `os._exit(0)`, an
`__eq__` that is always true or a patched `unittest` stay on the other side.

What the solution raises is raised here again, and Python swallows some exceptions by itself:
StopIteration ends `zip(map(f, xs), ys)`, AttributeError makes `hasattr` false, IndexError ends a
loop over `__getitem__`, a thread forgets any. A test that went on like that has not looked at the
rest. So a test passes only if every exception of the solution was handled by the test's own words:

- an `except` that came to its end, or a `with` that kept it,
- unittest's `assertRaises`, which calls a function and keeps what comes out of it,
- a call that gave the exception to the test as a value: `Future.exception()`,
  `gather(..., return_exceptions=True)`.
"""

from __future__ import annotations

import ast
import builtins
import os
import sys
import threading
from types import CodeType, TracebackType
from typing import Any, BinaryIO

from reinforge.sandbox.plain import Opaque, decode, dumps, encode, loads


class SolutionError(Exception):
    """The solution raised something that is no built-in exception."""


class CannotPass(BaseException):
    """The test gives the solution something that is not plain data."""


def plain(value: Any) -> bool:
    """Whether it can be sent: no functions and no objects, at any depth.

    What came from the solution as opaque counts as sent.
    """
    if isinstance(value, dict):
        return all(plain(k) and plain(v) for k, v in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(plain, value))
    said = encode(value)
    return isinstance(value, Opaque) or not (isinstance(said, dict) and said["t"] == "opaque")


# what the words of a test are wrapped in, see `ErrorTracker`
HANDLER = "__handling__"
KEEPER = "__keeping__"
GIVEN = "__given__"


class PendingErrors:
    """Exceptions of the solution that nobody has handled yet.

    Threads of the test may raise and handle at the same time.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.errors: list[BaseException] = []
        self.cannot: CannotPass | None = None  # stays, whoever caught it

    def handled(self, error: BaseException | None) -> None:
        """This one, what it came from, and what it is a group of."""
        chain = [error] if error is not None else []
        for one in chain:  # grows while it is walked
            found = (
                one.__cause__,
                one.__context__,
                *(one.exceptions if isinstance(one, BaseExceptionGroup) else ()),
            )
            chain += [e for e in found if e is not None and not any(e is known for known in chain)]
        with self.lock:
            self.errors = [e for e in self.errors if not any(e is known for known in chain)]

    def add(self, error: BaseException) -> None:
        with self.lock:
            self.errors.append(error)

    def given(self, value: Any) -> Any:
        """What a call of the test came to.

        An exception in it is in the test's hands: in a list, or in what `pytest.raises` returns.
        """
        if self.errors:
            pytest = sys.modules.get("pytest")
            if pytest is not None and isinstance(value, pytest.ExceptionInfo):
                inside = [value.value]
            else:
                inside = list(value) if isinstance(value, (list, tuple, set)) else [value]
            for one in inside:
                if isinstance(one, BaseException):
                    self.handled(one)
        return value


class HandlerGuard:
    """Around the body of an `except`: what it caught is handled once the body has come to its end,
    and not if that raises.
    """

    def __init__(self, pending: PendingErrors):
        self.pending = pending
        self.error = sys.exc_info()[1]

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.pending.handled(self.error)


class WithGuard:
    """Around a `with`, and again, as `inside`, within it: what arrived inside and did not come out
    was kept on purpose.
    """

    def __init__(self, pending: PendingErrors):
        self.pending = pending
        self.inside = WithBody()

    def __enter__(self) -> WithGuard:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.pending.handled(self.inside.error)


class WithBody:
    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.error = error


class ErrorTracker(ast.NodeTransformer):
    """Puts `HandlerGuard` into every `except` of a test, `WithGuard` around every `with`, and
    `PendingErrors.given` around every call.
    """

    def __init__(self) -> None:
        self.withs = 0

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        self.generic_visit(node)
        node.body = [ast.With([ast.withitem(_call(HANDLER))], node.body)]
        return node

    def visit_With(self, node: ast.With | ast.AsyncWith) -> ast.AST:
        self.generic_visit(node)
        self.withs += 1
        name = f"{KEEPER}{self.withs}"
        inside = ast.Attribute(ast.Name(name, ast.Load()), "inside", ast.Load())
        node.body = [ast.With([ast.withitem(inside)], node.body)]
        return ast.With([ast.withitem(_call(KEEPER), ast.Name(name, ast.Store()))], [node])

    visit_AsyncWith = visit_With

    def visit_Call(self, node: ast.Call | ast.Await) -> ast.AST:
        self.generic_visit(node)
        return _call(GIVEN, node)

    visit_Await = visit_Call


def _call(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(args), [])


def watch_unittest(pending: PendingErrors) -> None:
    """Whatever `assertRaises` keeps is handled, in whichever thread it was raised.

    Few tests need unittest: none has to load it.
    """
    load = builtins.__import__

    def watched(*args: Any, **kwargs: Any) -> Any:
        module = load(*args, **kwargs)
        context = getattr(sys.modules.get("unittest.case"), "_AssertRaisesContext", None)
        if context is not None and builtins.__import__ is watched:
            builtins.__import__ = load
            watch_exit(context, pending)
        return module

    builtins.__import__ = watched
    watched("sys")  # unittest may be there already


def watch_exit(context: Any, pending: PendingErrors) -> None:
    leave = context.__exit__

    def watched(
        self: Any,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Any:
        kept = leave(self, kind, error, trace)
        if kept:
            pending.handled(error)
        return kept

    context.__exit__ = watched


def compiled(text: str) -> CodeType:
    tree: ast.Module = ErrorTracker().visit(ast.parse(text))
    return compile(ast.fix_missing_locations(tree), "test.py", "exec")


def raised(name: str, text: str) -> Exception:
    """What the solution raised, as far as it is one of Python's own that a text makes."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(text)
        except TypeError:
            pass
    return SolutionError(text)


class JudgeConnection:
    """The other end of the judge's pipe, and the functions behind it."""

    def __init__(self, lines: BinaryIO, out: int):
        self.lines = lines
        self.out = out
        self.nonce = ""
        self.pending = PendingErrors()
        self.asked = 0
        # one question at a time: the judge has one pipe for all threads of a test
        self.turn = threading.RLock()

    def say(self, message: dict[str, Any]) -> None:
        data = dumps({"nonce": self.nonce, **message}) + b"\n"
        while data:
            data = data[os.write(self.out, data) :]

    def hear(self) -> dict[str, Any]:
        line = self.lines.readline()
        if not line:
            os._exit(0)  # nobody asks any more
        message = loads(line.rstrip(b"\n"))
        self.nonce = message["nonce"]
        return message

    def function(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not (plain(args) and plain(kwargs)):
                self.pending.cannot = CannotPass(
                    f"{name} is called with something that is not plain data"
                )
                raise self.pending.cannot
            with self.turn:
                self.asked += 1
                self.say({"call": name, "args": encode(list(args)), "kwargs": encode(kwargs)})
                reply = self.hear()
            if "raised" in reply:
                error = raised(*reply["raised"])
                self.pending.add(error)
                raise error
            for mine, changed in zip(
                args, decode(reply["args"]) if "args" in reply else (), strict=False
            ):
                if isinstance(mine, list) and isinstance(changed, list):
                    mine[:] = changed
                elif isinstance(mine, (dict, set)) and type(mine) is type(changed):
                    mine.clear()
                    mine.update(changed)
            return decode(reply["value"])

        call.__name__ = name
        return call


def unknown_names(code: str) -> set[str]:
    """Names that are read somewhere and bound nowhere: the solution's."""
    read = set()
    bound = set(dir(builtins))
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                read.add(name)
            case (
                ast.Name(id=name)
                | ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.arg(arg=name)
            ):
                bound.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                bound |= {(n.asname or n.name).partition(".")[0] for n in names}
            case ast.ExceptHandler(name=str(name)):
                bound.add(name)
    return read - bound


def run(remote: JudgeConnection, tests: list[str], entry: str | None) -> dict[str, Any]:
    """Each text is one test; one that defines `check` has it called with the entry point, as
    HumanEval does.
    """
    whole = "\n".join(tests)
    names: dict[str, Any] = {"__name__": "tests"} | {
        name: remote.function(name) for name in unknown_names(whole)
    }
    if entry:
        names |= {"candidate": remote.function(entry), entry: remote.function(entry)}
    names |= {
        HANDLER: lambda: HandlerGuard(remote.pending),
        KEEPER: lambda: WithGuard(remote.pending),
        GIVEN: remote.pending.given,
    }
    passed = []
    reasons = []
    # all before the first: what does not compile is the tests' fault
    for text, code in [(text, compiled(text)) for text in tests]:
        reason = one(remote, text, code, names)
        if remote.pending.cannot is not None:
            return {"cannot": str(remote.pending.cannot)}
        if reason is not None and not remote.asked:
            return {
                "cannot": f"a test failed before it asked the solution anything: {reason}"[:300]
            }
        passed.append(reason is None)
        reasons += [reason[:200]] if reason is not None else []
    return {"passed": passed, "reasons": reasons[:20]}


def one(remote: JudgeConnection, text: str, code: CodeType, names: dict[str, Any]) -> str | None:
    """None if the test passes, otherwise why not."""
    remote.pending.errors.clear()
    try:
        exec(code, names)
        if "def check(" in text and callable(names.get("check")) and "\ncheck(" not in text:
            names["check"](names["candidate"])
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    for unhandled in remote.pending.errors:
        return (
            f"the solution raised {type(unhandled).__name__}: {unhandled}, which the test did not"
            " handle"
        )
    return None


def main() -> None:
    with os.fdopen(3, "rb") as lines:
        remote = JudgeConnection(lines, 4)
        watch_unittest(remote.pending)
        request = remote.hear()
        try:
            said = run(remote, request["tests"], request["entry"])
        except SyntaxError as error:
            said = {"cannot": f"the tests do not parse: {error}"}
        remote.say(said)
        remote.hear()
