"""Tools that come with the library: a calculator, a search over local text files, and Python in the
sandbox.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from reinforge.core.errors import InputError
from reinforge.envs.tools import NoSandbox, Tool, ToolError, tool

BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "round": round,
    "min": min,
    "max": max,
    "sqrt": math.sqrt,
}
BITS = 4096  # of any number on the way; larger ones are an attack, not arithmetic
LONGEST = 1000  # characters of an expression
WORD = re.compile(r"\w+")


def calculator(expression: str) -> str:
    """Works out an arithmetic expression with + - * / // % ** and parentheses.

    Args:
        expression: The expression, e.g. (12 + 7) * 3
    """
    if len(expression) > LONGEST:
        raise ToolError(
            f"the expression has {len(expression)} characters; at most {LONGEST} are read"
        )
    text = (
        expression.replace("×", "*")
        .replace("÷", "/")
        .replace("−", "-")
        .replace("^", "**")
        .strip()
        .removesuffix("=")
    )
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ToolError(
            f"{expression!r} is no arithmetic expression: {getattr(error, 'msg', None) or error}"
        ) from None
    except (ZeroDivisionError, OverflowError) as error:
        raise ToolError(str(error)) from None
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        raise ToolError("the result is no real number")
    return (
        str(int(value))
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53
        else str(value)
    )


def _value(node: ast.expr) -> Any:
    """Numbers and operators alone: nothing has a name that could be looked up."""
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, int | float)
        and not isinstance(node.value, bool)
    ):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        left = _value(node.left)
        right = _value(node.right)
        if (
            isinstance(node.op, ast.Pow)
            and isinstance(left, int)
            and isinstance(right, int)
            and abs(right) * left.bit_length() > BITS
        ):
            raise OverflowError("the result is too large")
        return _bounded(BINARY[type(node.op)](left, right))
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in FUNCTIONS
        and not node.keywords
        and len(node.args) <= 8
    ):
        try:
            return _bounded(FUNCTIONS[node.func.id](*(_value(a) for a in node.args)))
        except TypeError as error:
            raise ValueError(str(error)) from None
    raise ValueError("only numbers, operators and parentheses are read")


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > BITS:
        raise OverflowError("the result is too large")
    return value


class SearchTool:
    """BM25 (k1 1.2, b 0.75) over the paragraphs of text files:

    score(q, d) = sum over words w of q of idf(w) · f(w, d) (k1 + 1) / (f(w, d) + k1 (1 - b + b |d|
    / mean |d|))
    """

    def __init__(
        self,
        path: str,
        results: int = 3,
        suffixes: tuple[str, ...] = (".txt", ".md"),
        characters: int = 1000,
    ):
        root = Path(path).expanduser()
        files = (
            [root]
            if root.is_file()
            else sorted(p for p in root.rglob("*") if p.suffix in suffixes and p.is_file())
        )
        if not files:
            raise InputError(
                f"there are no text files in {path}.",
                where="search",
                fix=f"Give a file, or a folder with {', '.join(suffixes)} files.",
            )
        self.results = results
        self.characters = characters
        parts = [
            (f.name, part.strip())
            for f in files
            for part in re.split(r"\n\s*\n", f.read_text("utf-8", errors="replace"))
        ]
        self.parts = [(name, part) for name, part in parts if part]
        self.counts = [Counter(words(part)) for _, part in self.parts]
        self.lengths = [sum(c.values()) for c in self.counts]
        self.mean = sum(self.lengths) / max(1, len(self.lengths))
        self.documents = Counter(w for c in self.counts for w in c)

    def scores(self, query: str, k1: float = 1.2, b: float = 0.75) -> list[float]:
        n = len(self.counts)
        out = [0.0] * n
        for word in sorted(set(words(query))):
            df = self.documents[word]
            idf = math.log(1 + (n - df + 0.5) / (df + 0.5))
            for i, count in enumerate(self.counts):
                if f := count[word]:
                    out[i] += (
                        idf * f * (k1 + 1) / (f + k1 * (1 - b + b * self.lengths[i] / self.mean))
                    )
        return out

    def __call__(self, query: str) -> str:
        """Searches the documents for words and returns the best paragraphs.

        Args:
            query: Words to look for
        """
        scores = self.scores(query)
        best = sorted((i for i, s in enumerate(scores) if s > 0), key=lambda i: (-scores[i], i))[
            : self.results
        ]
        return (
            "\n\n".join(f"[{self.parts[i][0]}] {self.parts[i][1][: self.characters]}" for i in best)
            or "nothing found"
        )


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())


@lru_cache(maxsize=16)
def _search(path: str, results: int) -> SearchTool:
    return SearchTool(path, results)  # read once, shared by all episodes


class PythonTool:
    """Runs Python in the sandbox. Without a sandbox there is no tool: it fails closed."""

    def __init__(self, seconds: float = 10.0, characters: int = 4000):
        try:
            from reinforge import sandbox
        except ImportError as error:
            raise InputError(
                f"the tool python needs the sandbox: {error}.",
                where="env.options.tools",
                fix="Remove the tool.",
            ) from None
        self.sandbox = sandbox
        self.seconds = seconds
        self.characters = characters

    async def __call__(self, code: str) -> str:
        """Runs a Python program and returns what it prints.

        Args:
            code: The program; print what you want to see
        """
        result = await self.sandbox.run(
            self.sandbox.Program(code), self.sandbox.Limits(seconds=self.seconds)
        )
        if result.failed_here:
            raise NoSandbox(
                f"the sandbox did not run the program: {result.reason or result.status}"
            )
        text = (
            b"\n".join(part for part in (result.stdout, result.stderr) if part.strip())
            .decode("utf-8", "replace")
            .strip()
        )
        ended = "" if result.status == "ok" else f"({result.status})"
        return (
            "\n".join(part for part in (text[-self.characters :], ended) if part) or "(no output)"
        )


def shipped(name: str, options: dict[str, Any]) -> Tool | None:
    """One of ours by name; None where there is no such."""
    if name == "calculator":
        return tool(calculator, pure=True)
    if name == "search":
        if "path" not in options:
            raise InputError(
                "the tool search needs a path.",
                where="env.options.search",
                fix="Write search: {path: folder}.",
            )
        return tool(
            _search(str(options["path"]), int(options.get("results", 3))), name="search", pure=True
        )
    return tool(PythonTool(**options), name="python") if name == "python" else None
