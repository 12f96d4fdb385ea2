"""Inside a second sandbox, where the solution is not: runs assert-style tests. A name that the tests use but do not define is a
function of the solution; calling it asks, through the judge outside, the process that holds the solution, and a plain value comes back.

So the test compares plain values in a process that the solution cannot touch: `os._exit(0)`, an `__eq__` that is always true or a
patched `unittest` stay on the other side.
"""

from __future__ import annotations

import ast
import builtins
import os
from typing import Any, BinaryIO

from reinforge.sandbox.plain import Opaque, decode, dumps, encode, loads


class SolutionError(Exception):
    """The solution raised something that is no built-in exception."""


class CannotPass(BaseException):
    """The test gives the solution something that is not plain data."""


def plain(value: Any) -> bool:
    """Whether it can be sent: no functions and no objects, at any depth. What came from the solution as opaque counts as sent."""
    if isinstance(value, dict):
        return all(plain(k) and plain(v) for k, v in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(plain, value))
    said = encode(value)
    return isinstance(value, Opaque) or not (isinstance(said, dict) and said["t"] == "opaque")


class Remote:
    """The other end of the judge's pipe, and the functions behind it."""

    def __init__(self, lines: BinaryIO, out: int):
        self.lines, self.out, self.nonce = lines, out, ""

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
                raise CannotPass(f"{name} is called with something that is not plain data")
            self.say({"call": name, "args": encode(list(args)), "kwargs": encode(kwargs)})
            reply = self.hear()
            if "raised" in reply:
                kind = getattr(builtins, reply["raised"][0], None)
                usable = isinstance(kind, type) and issubclass(kind, Exception)
                raise (kind if usable and kind is not None else SolutionError)(reply["raised"][1])
            for mine, changed in zip(args, decode(reply["args"]) if "args" in reply else (), strict=False):
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
    read, bound = set(), set(dir(builtins))
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


def run(remote: Remote, tests: list[str], entry: str | None) -> dict[str, Any]:
    """Each text is one test; one that defines `check` has it called with the entry point, as HumanEval does."""
    whole = "\n".join(tests)
    names: dict[str, Any] = {"__name__": "tests"} | {name: remote.function(name) for name in unknown_names(whole)}
    if entry:
        names |= {"candidate": remote.function(entry), entry: remote.function(entry)}
    passed, reasons = [], []
    for text in tests:
        try:
            exec(compile(text, "test.py", "exec"), names)
            if "def check(" in text and callable(names.get("check")) and "\ncheck(" not in text:
                names["check"](names["candidate"])
            passed.append(True)
        except CannotPass as error:
            return {"cannot": str(error)}
        except BaseException as error:
            passed.append(False)
            reasons.append(f"{type(error).__name__}: {error}"[:200])
    return {"passed": passed, "reasons": reasons[:20]}


def main() -> None:
    with os.fdopen(3, "rb") as lines:
        remote = Remote(lines, 4)
        request = remote.hear()
        try:
            said = run(remote, request["tests"], request["entry"])
        except SyntaxError as error:
            said = {"cannot": f"the tests do not parse: {error}"}
        remote.say(said)
        remote.hear()
