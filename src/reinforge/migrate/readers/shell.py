"""Commands of a shell script, with its variables put in. Nothing is run.

What only a shell could tell, the output of another command say, stays as it is written.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from reinforge.core.errors import InputError

NAME = re.compile(r"[A-Za-z_]\w*")
TOO_LARGE = "Give the command that starts the run alone."
ASSIGNMENT = re.compile(r"(?:export\s+|local\s+|declare\s+(?:-\w+\s+)?)?([A-Za-z_]\w*)\+?=")
CLOSING = re.compile("['\")}({]")
HEREDOC = re.compile(r"read\s+-r\s+-d\s+(?:''|\"\")\s+(\w+)\s*<<-?\s*['\"]?(\w+)['\"]?\s*$")
MAX_STATEMENT = 50_000  # characters; no command of a training run has as many
MAX_WORD = 20_000  # characters of a word with its variables put in, which may double one another
MAX_WORDS = 5_000
# what a run is started with leaves nothing
ARGUMENTS = re.compile(r"\d|[@*#?]")
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,  # a shell divides whole numbers
    ast.Mod: operator.mod,
}


@dataclass
class Shell:
    """Variables of a script, as far as it has been read."""

    variables: dict[str, list[str]] = field(default_factory=lambda: {"HOME": ["~"]})

    def commands(self, text: str) -> Iterator[list[str]]:
        """The words of every command, in order."""
        for statement in _statements(text):
            here = HEREDOC.match(statement.partition("\n")[0])
            if here is not None:
                body = statement.partition("\n")[2]
                self.variables[here.group(1)] = self.words(body)
                continue
            match = ASSIGNMENT.match(statement)
            if match is not None and not self._is_command(statement[match.end() :]):
                value = statement[match.end() :].strip()
                array = value.startswith("(") and value.endswith(")")
                words = self.words(value[1:-1] if array else value)
                before = self.variables.get(match.group(1), [])
                added = statement[: match.end()].endswith("+=")
                self.variables[match.group(1)] = [*before, *words] if added else words
                continue
            words = self.words(statement)
            if "-c" in words[:-1]:  # bash -c "..."
                yield from self.commands(words[words.index("-c") + 1])
            elif words:
                yield words

    def _is_command(self, rest: str) -> bool:
        """Whether a command follows the assignment on its line: `CUDA_VISIBLE_DEVICES=0 python`."""
        return not rest.lstrip().startswith("(") and len(self.words(rest)) > 1

    def words(self, text: str) -> list[str]:
        """The words of a statement: quotes taken off, variables put in."""
        words: list[str] = []
        word: str | None = None
        i = 0
        while i < len(text):
            char = text[i]
            if len(word or "") > MAX_WORD or len(words) > MAX_WORDS:
                raise InputError(
                    "its variables make words without end.", where=text[:60], fix=TOO_LARGE
                )
            if char.isspace():
                if word is not None:
                    words.append(word)
                word = None
                i += 1
            elif char == "#" and word is None:
                i = _end(text, "\n", i)
            elif char == "'":
                end = _end(text, "'", i + 1)
                word = (word or "") + text[i + 1 : end]
                i = end + 1
            elif char == '"':
                inner, i = self._quoted(text, i + 1)
                if len(inner) == 1:
                    word = (word or "") + inner[0]
                else:  # "${array[@]}"
                    words += inner
            elif char == "\\" and i + 1 < len(text):
                word = (word or "") + text[i + 1].replace("\n", "")
                i += 2
            elif char == "$":
                found, i = self._expanded(text, i)
                if word is None and len(found) != 1:
                    words += found
                else:
                    word = (word or "") + " ".join(found)
            else:
                word = (word or "") + char
                i += 1
        return words if word is None else [*words, word]

    def _quoted(self, text: str, i: int) -> tuple[list[str], int]:
        parts = ""
        while i < len(text) and text[i] != '"':
            if text[i] == "\\" and i + 1 < len(text) and text[i + 1] in '"\\$`\n':
                parts += text[i + 1].replace("\n", "")
                i += 2
            elif text[i] == "$":
                found, i = self._expanded(text, i)
                if not parts and len(found) != 1 and text[i : i + 1] == '"':
                    return found, i + 1
                parts += " ".join(found)
            else:
                parts += text[i]
                i += 1
            if len(parts) > MAX_WORD:
                raise InputError(
                    "its variables make words without end.", where=text[:60], fix=TOO_LARGE
                )
        return [parts], i + 1

    def _expanded(self, text: str, i: int) -> tuple[list[str], int]:
        """What stands for the `$...` at a place, and where it ends."""
        if text.startswith("$((", i):
            end = text.find("))", i)
            if end > 0:
                return [self._computed(text[i + 3 : end], text[i : end + 2])], end + 2
        if text.startswith("$(", i):
            end = _closing(text, i + 1)
            return [text[i : end + 1]], end + 1
        if text.startswith("${", i):
            end = _closing(text, i + 1)
            return self._braced(text[i + 2 : end], text[i : end + 1]), end + 1
        name = NAME.match(text, i + 1)
        if name is not None:
            return self.variables.get(name.group(), [f"${name.group()}"]), name.end()
        if ARGUMENTS.match(text, i + 1):
            return [], i + 2
        return ["$"], i + 1

    def _braced(self, inner: str, whole: str) -> list[str]:
        name = NAME.match(inner)
        if name is None:
            rest = inner[1:]
            default = re.match(r":?[-=](.*)", rest, re.DOTALL)
            return self.words(default.group(1)) if default else []
        rest = inner[name.end() :].removeprefix("[@]").removeprefix("[*]")
        known = self.variables.get(name.group())
        default = re.match(r":?[-=](.*)", rest, re.DOTALL)
        if default is not None:
            return known if known else self.words(default.group(1)) or [""]
        if known is None or rest:
            return [whole] if rest or known is None else known
        return known

    def _computed(self, expression: str, whole: str) -> str:
        plain = " ".join(self.words(re.sub(r"(?<![\w$])([A-Za-z_]\w*)", r"$\1", expression)))
        try:
            return str(_whole(ast.parse(plain, mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return whole


def _whole(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_whole(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        value: int = OPERATORS[type(node.op)](_whole(node.left), _whole(node.right))
        if abs(value) < 10**15:
            return value
    raise ValueError("no whole number")


def _end(text: str, char: str, start: int) -> int:
    end = text.find(char, start)
    return len(text) if end < 0 else end


def _closing(text: str, start: int) -> int:
    """Where the bracket that opens at a place closes."""
    pairs = {"(": ")", "{": "}"}
    opening = text[start]
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == opening) - (text[i] == pairs[opening])
        if depth == 0:
            return i
    return len(text) - 1


def _statements(text: str) -> Iterator[str]:
    """Commands, assignments and here-documents, each whole, however many lines it has.

    A comment line between two lines of a command is left out: people put settings aside that way.
    """
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    gathered = ""
    is_open = False  # a quote or bracket
    goes_on = False  # the line before ends with a backslash
    until: str | None = None  # the word that ends a here-document
    for line in lines:
        if until is not None:
            if line.strip() == until:
                yield gathered
                gathered, until = "", None
            else:
                gathered += f"\n{line.rstrip().removesuffix(chr(92))}"
            continue
        gathered += f"\n{line}" if gathered and not goes_on else line
        if len(gathered) > MAX_STATEMENT:
            raise InputError(
                "a command without end: a quote or bracket is not closed.",
                where=gathered.strip()[:60],
                fix=TOO_LARGE,
            )
        goes_on = gathered.rstrip().endswith("\\")
        if goes_on:
            gathered = f"{gathered.rstrip()[:-1]} "
            continue
        here = HEREDOC.match(gathered.strip())
        if here is not None:
            gathered, until = gathered.strip(), here.group(2)
            continue
        if is_open and not CLOSING.search(line):
            continue
        is_open = _open(gathered)
        if is_open:
            continue
        yield from _split(gathered)
        gathered = ""
    if gathered.strip():
        if _open(gathered):
            raise InputError(
                "a quote or bracket is not closed.", where=gathered.strip().splitlines()[0][:60]
            )
        yield from _split(gathered)


def _scan(text: str) -> Iterator[tuple[int, str, bool]]:
    """Every character outside of quotes and brackets, and at the end whether one is open."""
    quote = ""
    depth = 0
    i = 0
    while i < len(text):
        char = text[i]
        if char == "\\" and quote != "'":
            i += 2
            continue
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "#" and (i == 0 or text[i - 1].isspace()):
            i = _end(text, "\n", i)
            continue
        elif char in "({":
            depth += 1
        elif char in ")}":
            depth = max(0, depth - 1)
        elif not depth:
            yield i, char, False
        i += 1
    yield i, "", bool(quote or depth)


def _open(text: str) -> bool:
    return any(is_open for _, _, is_open in _scan(text))


def _split(text: str) -> Iterator[str]:
    """At `;`, `&&`, `|` and line ends."""
    start = 0
    for i, char, _ in _scan(text):
        if char in ";&|\n" or not char:
            part = text[start:i].strip()
            if part:
                yield part
            start = i + 1
