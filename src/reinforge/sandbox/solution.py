"""Inside the sandbox: loads a solution and calls its functions on request.

Values go in and out; nothing is judged here.

The solution shares this process and may do with it what it likes: all it can gain is to say a value
of its choice, which it could by returning it. It sees the arguments of one call at a time and never
what is expected.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from typing import Any, BinaryIO

from reinforge.sandbox.plain import decode, dumps, encode, loads


def load(path: str) -> types.ModuleType:
    """Run the file as a module, so that its `if __name__ == "__main__"` stays quiet."""
    module = types.ModuleType("solution")
    module.__file__ = path
    sys.modules["solution"] = module
    with open(path, encoding="utf-8", errors="surrogatepass") as file:
        code = file.read()
    exec(compile(code, "solution.py", "exec"), module.__dict__)
    return module


def find(module: types.ModuleType, name: str) -> Callable[..., Any]:
    """A function, `Class.method` of a fresh object, or a method of the class `Solution`."""
    first, _, rest = name.partition(".")
    if not rest and not hasattr(module, first) and hasattr(module, "Solution"):
        first = "Solution"
        rest = name
    found = getattr(module, first)
    return getattr(found(), rest) if rest else found


def answer(module: types.ModuleType, request: dict[str, Any]) -> dict[str, Any]:
    """The value of one call, and its arguments where the call changed them."""
    try:
        args = decode(request["args"])
        kwargs = decode(request["kwargs"])
        before = dumps({"a": encode(args)})
        value = find(module, request["call"])(*args, **kwargs)
        said: dict[str, Any] = {"value": encode(value)}
        after = {"a": encode(args)}
        if dumps(after) != before:
            said["args"] = after["a"]
        dumps(said)  # its size
    except BaseException as error:
        return {"raised": [type(error).__name__[:80], str(error)[:500]]}
    return said


def serve(requests: BinaryIO, replies: int, path: str, before: bytes = b"") -> None:
    """One line in, one line out, each with the nonce of its request.

    The first asks whether the solution loads. `before` each reply may stand a line end, where
    others write to the same place.
    """
    module: types.ModuleType | None = None
    for line in requests:
        request = loads(line.rstrip(b"\n"))
        if module is None:
            try:
                module = load(path)
                said: dict[str, Any] = {"value": None}
            except BaseException as error:
                said = {"raised": [type(error).__name__[:80], str(error)[:500]]}
        else:
            said = answer(module, request)
        try:
            sys.stdout.flush()
        except (OSError, ValueError, AttributeError):
            pass
        data = before + dumps({"nonce": request["nonce"], **said}) + b"\n"
        while data:
            data = data[os.write(replies, data) :]


def main() -> None:
    with os.fdopen(3, "rb") as requests:
        serve(requests, 4, "main.py")
