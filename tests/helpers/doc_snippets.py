"""The code blocks of the pages (README, CONTRIBUTING, SECURITY, benchmarks, docs), and the commands
in them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from helpers.source_tree import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<kind>[\w-]*)[^\n]*\n(?P<text>.*?)^(?P=indent)```", re.M | re.S
)
INLINE = re.compile(r"(?<!`)`(reinforge [^`\n]+)`(?!`)")
SHELL = ("sh", "bash")


@dataclass(frozen=True, slots=True)
class Snippet:
    """A block of a page, for the tests of the documentation."""

    page: Path
    line: int
    kind: str  # the language that it names
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT).as_posix()}:{self.line}"


def snippets(*kinds: str) -> Iterator[Snippet]:
    """Blocks of these languages; of all without any."""
    for page in PAGES:
        content = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(content):
            if not kinds or match["kind"] in kinds:
                text = re.sub(rf"^{match['indent']}", "", match["text"], flags=re.M)
                yield Snippet(page, content[: match.start()].count("\n") + 1, match["kind"], text)


def commands() -> Iterator[tuple[str, list[str]]]:
    """(where, words) of every command: lines of shell blocks, lines with a prompt in others, and
    `reinforge ...` in a sentence.
    """
    for snippet in snippets():
        lines = snippet.text.replace("\\\n", " ").splitlines()
        if snippet.kind not in SHELL:
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        for line in lines:
            for words in split(line):
                yield str(snippet), words
    for page in PAGES:
        content = page.read_text(encoding="utf-8")
        without = FENCE.sub(lambda match: "\n" * match[0].count("\n"), content)
        for match in INLINE.finditer(without):
            number = without[: match.start()].count("\n") + 1
            where = f"{page.relative_to(ROOT).as_posix()}:{number}"
            for words in split(match[1]):
                yield where, words


def split(line: str) -> list[list[str]]:
    """The commands of a shell line: comments, redirections and variables before it left out.

    >>> split("A=1 make test && reinforge plan c.yaml > out  # all of it")
    [['make', 'test'], ['reinforge', 'plan', 'c.yaml']]
    """
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    words = iter(lexer)
    for word in words:
        if set(word) <= set(";&|"):
            found.append([])
        elif set(word) <= set("<>&"):
            next(words, None)
        elif found[-1] or not re.fullmatch(r"\w+=.*", word):
            found[-1].append(word)
    return [words for words in found if words]
