"""The page docs/reference/python.md, from the signatures and docstrings of what `reinforge`
exports. `tools/gen_reference.py` writes it; a test checks that the committed page is this.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import reinforge

CHAPTERS = {
    "Training": ["train", "Trainer", "RunStep", "RunResult", "Callback", "RunControl"],
    "With a model": [
        "generate",
        "make_data",
        "evaluate",
        "benchmark",
        "BenchmarkResult",
        "score",
        "chat",
    ],
    "Configurations": ["load_config", "Config"],
    "Data": ["Row", "Sample", "Group", "Sampling"],
    "Errors": ["InputError"],
}
ELSEWHERE = {"Config": "All its keys are in [the configuration reference](config.md)."}
MADE_BY_CALLERS = {"Trainer"}  # of the classes: those whose arguments are of interest
# what the loops call
HIDDEN = {("RunStep", "close"), ("RunStep", "on_update"), ("RunStep", "prepared")}
WIDTH = 88  # of a signature on one line
ARGUMENTS = 4  # of which a paragraph tells, from here on as a list
HEAD = """\
# Python

Made by `make reference` from the signatures and docstrings of the package. [Python](../python.md)
shows how they are used.
"""


def api_markdown() -> str:
    """The page."""
    parts = [HEAD]
    for chapter, names in CHAPTERS.items():
        parts.append(f"## {chapter}\n")
        for name in names:
            parts += _entry(name, getattr(reinforge, name))
    return "\n".join(parts)


def _entry(name: str, value: Any) -> Iterator[str]:
    full = f"reinforge.{name}"
    yield f"### {full}\n"
    if name in ELSEWHERE:
        yield f"{_text(value)} {ELSEWHERE[name]}\n"
        return
    if not inspect.isclass(value):
        yield _code(full, value)
        yield f"{_text(value)}\n"
        return
    yield f"{_text(value)}\n"
    if name in MADE_BY_CALLERS:
        yield _code(full, value)
        yield f"{_text(value.__init__)}\n"
    yield from _fields(value)
    yield from _members(name, value)


def _text(value: Any) -> str:
    """The docstring, whose lines are joined by paragraph; examples stay as they are."""
    told = inspect.getdoc(value)
    assert told, f"{value!r} has no docstring"
    paragraphs = []
    for part in told.split("\n\n"):
        if part.lstrip().startswith((">>>", "import ", "def ")):
            paragraphs.append(f"```pycon\n{part}\n```")
        else:
            paragraphs.append(_listed(" ".join(part.split()), value))
    return "\n\n".join(paragraphs)


def _listed(paragraph: str, value: Any) -> str:
    """A paragraph that goes through many arguments is a list, an argument a line."""
    if not inspect.isfunction(value):
        return paragraph
    names = "|".join(inspect.signature(value).parameters)
    told = re.split(rf"(?<=\.) (?=`(?:{names})`)", paragraph)
    if len(told) < ARGUMENTS:
        return paragraph
    return "\n".join(f"- {sentences}" for sentences in told)


def _code(name: str, value: Any) -> str:
    return f"```text\n{_signature(name, value)}\n```\n"


def _signature(name: str, value: Any, *, method: bool = False) -> str:
    """On one line where it fits, else an argument a line."""
    signature = inspect.signature(value)
    told: list[str] = []
    starred = False
    for parameter in list(signature.parameters.values())[1 if method else 0 :]:
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            told.append("*")
        starred = starred or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        told.append(_parameter(parameter))
    returned = _type(signature.return_annotation)
    gives = f" -> {returned}" if returned else ""
    flat = f"{name}({', '.join(told)}){gives}"
    if len(flat) <= WIDTH:
        return flat
    lines = "".join(f"    {part},\n" for part in told)
    return f"{name}(\n{lines}){gives}"


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    kind = _type(parameter.annotation)
    told = f"{stars}{parameter.name}" + (f": {kind}" if kind else "")
    if parameter.default is not parameter.empty:
        told += f" = {parameter.default!r}"
    return told


def _type(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _fields(kind: type) -> Iterator[str]:
    """What is declared in a class, with the comments that stand there, as a table."""
    declared = vars(kind).get("__annotations__", {})
    if not declared:
        return
    said = _comments(kind)
    yield "| | type | |\n|---|---|---|"
    for name, annotation in declared.items():
        kind_name = str(annotation).replace("|", "\\|")
        yield f"| `{name}` | `{kind_name}` | {said.get(name, '')} |"
    yield ""


def _comments(kind: type) -> dict[str, str]:
    """The comment of each declaration: before it, or at the end of its line."""
    found: dict[str, str] = {}
    before: list[str] = []
    for line in inspect.getsource(kind).splitlines():
        code, _, comment = line.strip().partition("#")
        name = re.match(r" {4}(\w+): ", line)
        if name is not None and name[1] not in found:
            found[name[1]] = " ".join([*before, comment.strip()]).strip().replace("|", "\\|")
        before = [*before, comment.strip()] if not code and comment else []
    return found


def _members(owner: str, kind: type) -> Iterator[str]:
    """Properties and methods that are not private, with those of parents of ours."""
    found: dict[str, Any] = {}
    for parent in reversed(kind.__mro__):
        if parent.__module__.startswith("reinforge."):
            found |= {
                name: member
                for name, member in vars(parent).items()
                if not name.startswith("_") or name == "__iter__"
            }
    found = {name: member for name, member in found.items() if (owner, name) not in HIDDEN}
    for name, member in found.items():
        if isinstance(member, property) or hasattr(member, "attrname"):
            getter = member.fget if isinstance(member, property) else member.func
            returned = _type(inspect.signature(getter).return_annotation)
            yield f"- **{name}** `{returned}`{_said(member)}"
        elif isinstance(member, classmethod | staticmethod) or inspect.isfunction(member):
            function = getattr(kind, name)
            is_method = not isinstance(member, classmethod | staticmethod)
            flat = " ".join(_signature(name, function, method=is_method).split())
            flat = flat.replace("( ", "(").replace(", )", ")")
            yield f"- `{flat}`{_said(member)}"
    yield ""


def _said(member: Any) -> str:
    told = inspect.getdoc(member)
    return f": {' '.join(told.split())}" if told else ""
