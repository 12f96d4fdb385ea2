"""A strict reader of YAML: core-schema scalars of YAML 1.2, no tags, few aliases, no key twice,
every value with its line.

PyYAML follows YAML 1.1, where `1e-5` is text, `no` is False, `12:30:45` is 45045, and the last of
two equal keys wins. Here it only splits the text into nodes; what a scalar means is decided by
`scalar`.
"""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

from reinforge.core.errors import InputError

MAX_ALIASES = 16
MAX_DEPTH = 40
MAX_NODES = 100_000
MAX_DIGITS = 300
Path = tuple[str | int, ...]  # where a value is: ("rewards", 0, "weight")

_WORDS = {
    "": None,
    "~": None,
    **dict.fromkeys(("null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def dotted(path: Path) -> str:
    return ".".join(map(str, path))


def scalar(text: str, *, where: str) -> Any:
    """What an unquoted scalar means. `where` names the key for errors.

    >>> [scalar(text, where="") for text in ("1e-5", "no", "1_000", "true")]
    [1e-05, 'no', '1_000', True]
    """
    if text in _WORDS:
        return _WORDS[text]
    if len(text) > MAX_DIGITS and (_INT.fullmatch(text) or _FLOAT.fullmatch(text)):
        raise InputError(
            f"a number of {len(text)} characters.", where=where, fix=f"Use at most {MAX_DIGITS}."
        )
    if _INT.fullmatch(text):
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    value = float(text) if _FLOAT.fullmatch(text) else None
    if _NOT_FINITE.fullmatch(text) or (value is not None and not math.isfinite(value)):
        raise InputError(
            f"{text} is not a finite number.",
            where=where,
            fix="Give a finite one, or quote it if it is text.",
        )
    return text if value is None else value


def clean(text: str, *, where: str) -> str:
    """Text that can be written to a file and used as a path: no lone surrogates, no NUL."""
    if "\0" in text or any(0xD800 <= ord(c) <= 0xDFFF for c in text):
        raise InputError(
            "the text holds a NUL or half a surrogate pair.", where=where, fix="Remove that escape."
        )
    return text


class _Composer(yaml.SafeLoader):
    """Builds the node tree and refuses what could surprise: tags, many aliases, deep nesting."""

    aliases = depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        line = event.start_mark.line + 1
        if getattr(event, "tag", None) is not None:
            raise InputError(
                f"the tag {event.tag} is not allowed: a configuration is plain data.",
                where=f"line {line}",
                fix="Remove the tag; quote text.",
            )
        self.aliases += isinstance(event, yaml.AliasEvent)
        if self.aliases > MAX_ALIASES:
            raise InputError(
                f"more than {MAX_ALIASES} aliases (*name).",
                where=f"line {line}",
                fix="Write the values out.",
            )
        if self.depth > MAX_DEPTH:
            raise InputError(
                f"nested deeper than {MAX_DEPTH} levels.",
                where=f"line {line}",
                fix="No setting needs that.",
            )
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Builder:
    """Turns nodes into plain values, and remembers the line of each."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.lines: dict[Path, int] = {}
        self.nodes = 0

    def build(self, node: yaml.Node, path: Path = ()) -> Any:
        line = node.start_mark.line + 1
        self.nodes += 1
        where = f"{self.source} line {line}" + (f", {dotted(path)}" if path else "")
        if self.nodes > MAX_NODES or len(path) > MAX_DEPTH:
            raise InputError(
                "too many values, or an alias inside itself.",
                where=where,
                fix="Write the values out without aliases.",
            )
        self.lines.setdefault(path, line)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*path, i)) for i, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and node.style is None:  # not quoted, not a block
            return scalar(node.value, where=where)
        return clean(node.value, where=where)

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        out: dict[str, Any] = {}
        first: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise InputError(
                    "a key must be plain text.",
                    where=f"{self.source} line {line}",
                    fix="Lists and mappings cannot be keys.",
                )
            key = clean(key_node.value, where=f"{self.source} line {line}")
            if key in out:
                raise InputError(
                    f"the key `{dotted((*path, key))}` is given twice, on lines {first[key]} and"
                    f" {line}.",
                    where=f"{self.source} line {line}",
                    fix="Remove one of them.",
                )
            self.lines[(*path, key)] = first[key] = line
            out[key] = self.build(value_node, (*path, key))
        return out


def parse(text: str, source: str) -> tuple[Any, dict[Path, int]]:
    """The value of a YAML text and the line of every value in it.

    `source` names the file for errors.
    """
    try:
        node = yaml.compose(text, Loader=_Composer)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"{source} line {mark.line + 1}, column {mark.column + 1}" if mark else source
        raise InputError(
            f"this is not YAML: {error.problem or error.context}.",
            where=at,
            fix=_yaml_hint(text, mark, error),
        ) from error
    except yaml.YAMLError as error:  # a character that YAML does not allow
        raise InputError(
            f"this is not YAML: {' '.join(str(error).split())}.", where=source
        ) from error
    except InputError as error:
        raise InputError(error.what, where=f"{source} {error.where}", fix=error.fix) from None
    if node is None:
        return None, {}
    builder = _Builder(source)
    return builder.build(node), builder.lines


def _yaml_hint(text: str, mark: yaml.Mark | None, error: yaml.MarkedYAMLError) -> str | None:
    line = text.splitlines()[mark.line] if mark and mark.line < len(text.splitlines()) else ""
    if "\t" in line[: len(line) - len(line.lstrip())]:
        return "The line is indented with a tab: use spaces."
    if "alias" in f"{error.context} {error.problem}":  # a value that has a name of its own
        return "Put quotes around what begins with *, as in ['*.mlp']."
    return None
