"""Chat templates with a bound on what they cost: a template is a program that came with a model,
from anybody.

Jinja's sandbox keeps a template from reaching what it should not. It does not keep it from running
on (`range` in `range` in `range`), or from making three gigabytes of one word
(`"x".ljust(3 * 10 ** 9)`). The environment here is that of transformers, with the same filters,
extensions and settings, so that an honest template renders to the same bytes; and a template pays
for what it does:

steps     turns of loops, calls of macros and methods, filters, comparisons
created   characters and items of everything it makes, whether it keeps it or not
size      of any one value

What an operation will make is known from its operands, so it is refused before it is made. The
bounds grow with the conversation: a long one may cost more. A template that spends more processor
time than any honest one is stopped by the clock of its thread.
"""

from __future__ import annotations

import functools
import re
import time
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.environment import Template
from jinja2.exceptions import TemplateError
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from transformers.utils.chat_template_utils import _cached_compile_jinja_template

LONGEST_SOURCE = 1_000_000  # characters of a template
# of a render with an empty conversation
STEPS = 1_000_000
CREATED = 50_000_000
SIZE = 1_000_000
SECONDS = 20.0  # of processor time
DEPTH = 200  # of lists in lists
BITS = 10_000  # of a whole number
# largest number, and longest text, that a filter takes for an option
NUMBER = 10_000
WORDS = 10_000
BUILDING = 20_000  # characters of a text that a filter with its own loops takes

TEXTS = (str, bytes)
CONTAINERS = (list, tuple, dict, set, frozenset)
# comparisons that read no further than the shorter side
ORDERS = ("eq", "ne", "lt", "lteq", "gt", "gteq")


class TemplateLimitError(TemplateError):
    """A template wants more than a chat template needs."""


@dataclass(slots=True)
class RenderBudget:
    """What one render may still cost."""

    steps: int = STEPS
    created: int = CREATED
    size: int = SIZE
    until: float = 0.0  # thread time; 0: from the first look at the clock on
    # weights of what the caller gave, by identity
    known: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Any) -> RenderBudget:
        """For a render of what the caller gave."""
        known: dict[int, int] = {}
        weight = _remember(given, known, 0)
        turns = len(known)  # a template may build its text in a variable, turn by turn
        return cls(
            STEPS + 100 * weight, CREATED + (100 + turns) * weight, SIZE + 16 * weight, known=known
        )

    def step(self, count: int = 1) -> None:
        """`count` of them; reading 64 characters, or one item of a list, is one."""
        before = self.steps
        self.steps -= count
        if before >> 8 != self.steps >> 8:
            now = time.thread_time()
            self.until = self.until or now + SECONDS
            if self.steps < 0 or now > self.until:
                raise TemplateLimitError(
                    "it runs on: more steps than any conversation of this length needs."
                )

    def fits(self, size: float) -> None:
        """Whether a value of this size may be made."""
        if size > self.size:
            raise TemplateLimitError(f"it wants a value of {size:.3g} characters.")

    def charge(self, size: int) -> None:
        self.created -= size
        if self.created < 0:
            raise TemplateLimitError("it makes more text than any conversation of this length has.")

    def made(self, value: Any) -> Any:
        """A value that the template made."""
        if isinstance(value, TEXTS):
            self.charge(len(value))
        elif isinstance(value, CONTAINERS):
            self.charge(16 * len(value))
        return value

    def weigh(self, value: Any) -> int:
        """The size of a value written out: what it shares counts every time it occurs. Refuses what
        is too large."""
        if isinstance(value, TEXTS):
            return len(value)
        if (weight := self.known.get(id(value), 0)) and weight <= self.size:
            self.step()
            return weight
        if not isinstance(value, (*CONTAINERS, Namespace)):
            return 8
        total = 0
        depth = 0
        open_values: list[Iterator[Any]] = [iter((value,))]
        while open_values:
            item = next(open_values[-1], None)
            if item is None:
                open_values.pop()
                continue
            self.step()
            weight = self.known.get(id(item), -1)
            if weight < 0:
                inside = _inside(item)
                weight = 8 if inside is None else 8 + 8 * len(inside)
                if inside is None and isinstance(item, TEXTS):
                    weight = len(item)
                elif inside is not None:
                    open_values.append(iter([8 if i is None else i for i in inside]))
                    depth = max(depth, len(open_values))
            total += weight
            if total > self.size or depth > DEPTH:
                raise TemplateLimitError("it wants a value that is too large to be written out.")
        return total


def _remember(value: Any, known: dict[int, int], depth: int) -> int:
    """What `RenderBudget.weigh` finds, noted for each container in what the caller gave."""
    kind = type(value)
    if kind is str:
        return len(value)
    inside: Any = value
    if kind is dict:
        inside = (*value, *value.values())
    elif kind is not list:
        if isinstance(value, TEXTS):
            return len(value)
        inside = _inside(value)
        if inside is None:
            return 8
    if depth > DEPTH:
        raise TemplateLimitError("it wants a value that is too large to be written out.")
    if (weight := known.get(id(value), 0)) == 0:
        weight = 8 + 8 * len(inside)
        for item in inside:
            weight += len(item) if type(item) is str else _remember(item, known, depth + 1)
        known[id(value)] = weight
    return weight


def _inside(value: Any) -> list[Any] | None:
    """What a container holds; None for anything else."""
    if isinstance(value, Namespace):
        value = object.__getattribute__(value, "_Namespace__attrs")
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return list(value) if isinstance(value, list | tuple | set | frozenset) else None


_BUDGET: ContextVar[RenderBudget] = ContextVar("template_budget")


def budget() -> RenderBudget:
    """Of the render under way. What the compiler works out ahead has its own."""
    found = _BUDGET.get(None)
    return found if found is not None else RenderBudget()


@contextmanager
def spending(given: Any) -> Iterator[None]:
    """A render of these conversations and tools, in this thread."""
    token = _BUDGET.set(RenderBudget.of(given))
    try:
        yield
    finally:
        _BUDGET.reset(token)


# what an operation will make


def _number(value: Any) -> int:
    return abs(value) if isinstance(value, int) else 0


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else 8


def _reading(value: Any) -> int:
    """The steps that reading a value takes."""
    if isinstance(value, str | bytes):
        return 1 + (len(value) >> 6)
    return 1 + (
        len(value) if isinstance(value, list | tuple | dict | set | frozenset | range) else 0
    )


def _check_format(template: Any, values: Any = ()) -> None:
    """`%` and format(): widths and precisions are the only way to make more than was given."""
    if isinstance(template, str | bytes):
        text = template if isinstance(template, str) else template.decode("latin-1")
        if re.search(r"%[^a-zA-Z%]{0,40}(?:[0-9]{5}|\*)", text):
            raise TemplateLimitError("it formats with a width of more than 9999.")
        budget().fits(len(text) + (text.count("%") + 1) * budget().weigh(values))


def _check_replaced(text: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> None:
    text, old, new = (v if isinstance(v, str | bytes) else str(v) for v in (text, old, new))
    budget().fits(
        len(text) + (text.count(old) if type(text) is type(old) else len(text)) * len(new)
    )


def _check_joined(separator: Any, items: Any) -> None:
    if isinstance(items, list | tuple | dict | set | frozenset):
        budget().fits(budget().weigh(items) + len(items) * _length(separator))


def _check_width(_: Any, width: Any = 0, *__: Any, **___: Any) -> None:
    budget().fits(_number(width))


def _check_tabs(text: Any, tabsize: Any = 8, **__: Any) -> None:
    budget().fits(
        len(text) + text.count("\t" if isinstance(text, str) else b"\t") * _number(tabsize)
    )


def _check_translated(text: Any, table: Any = None, *_: Any) -> None:
    values = table.values() if isinstance(table, Mapping) else ()
    budget().fits(len(text) * max([1, *(_length(v) for v in values if isinstance(v, str))]))


def _refused(*_: Any, **__: Any) -> None:
    raise TemplateLimitError("it calls a method that no chat template needs.")


METHODS: dict[str, Callable[..., None]] = {  # of texts and numbers
    "ljust": _check_width,
    "rjust": _check_width,
    "center": _check_width,
    "zfill": _check_width,
    "expandtabs": _check_tabs,
    "replace": _check_replaced,
    "join": _check_joined,
    "translate": _check_translated,
    "to_bytes": _refused,
}


def _check_indent(text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    text = str(text)
    budget().fits(
        len(text)
        + (text.count("\n") + 1) * (len(width) if isinstance(width, str) else _number(width))
    )


def _check_json(value: Any, *options: Any, **named: Any) -> None:
    given = [*options, *named.values()]
    if any(_number(o) > 100 or (isinstance(o, str) and len(o) > 100) for o in given):
        raise TemplateLimitError("it indents JSON by more than 100.")
    budget().fits(budget().weigh(value))


def _check_sum(value: Any, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, int | float):
        raise TemplateLimitError("it adds up what are no numbers.")


def _check_built(text: Any, *options: Any, **named: Any) -> None:
    if _length(text) > BUILDING:
        raise TemplateLimitError("it rewrites a long text in a way that no chat template needs.")
    _check_options(text, *options, **named)


def _check_options(_: Any, *options: Any, **named: Any) -> None:
    for option in (*options, *named.values()):
        if _number(option) > NUMBER or (isinstance(option, str | bytes) and len(option) > WORDS):
            raise TemplateLimitError("it gives a filter a number or a text that is too large.")


FILTERS: dict[str, Callable[..., None]] = {  # others: _check_options
    "replace": _check_replaced,
    "indent": _check_indent,
    "tojson": _check_json,
    "format": lambda text, *values, **named: _check_format(text, [*values, *named.values()]),
    "join": lambda items, d="", *_, **__: _check_joined(d, items),
    "sum": _check_sum,
    "urlize": _check_built,
    "striptags": _check_built,
    "wordwrap": _check_built,
    "xmlattr": _check_built,
    **dict.fromkeys(
        ("default", "d", "map", "select", "reject", "selectattr", "rejectattr", "attr"),
        lambda *_, **__: None,
    ),
}
AS_THEY_ARE = {
    "length",
    "count",
    "list",
    "first",
    "last",
    "default",
    "d",
    "attr",
    "items",
    "map",
    "select",
    "reject",
    "selectattr",
    "rejectattr",
    "reverse",
    "int",
    "float",
    "abs",
    "round",
}
# filters that do not read what they are given
GLANCES = {"length", "count", "first", "last", "default", "d", "attr"}
COMPARES = {
    "eq",
    "equalto",
    "==",
    "ne",
    "!=",
    "lt",
    "lessthan",
    "<",
    "le",
    "<=",
    "gt",
    "greaterthan",
    ">",
    "ge",
    ">=",
    "in",
}


def _filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    check = FILTERS.get(name, _check_options)
    # its first argument is the environment or the context
    passed = getattr(function, "jinja_pass_arg", None) is not None

    @functools.wraps(function)
    def bounded(*args: Any, **named: Any) -> Any:
        now = budget()
        given = args[1:] if passed else args
        now.step(1 if name in GLANCES or not given else _reading(given[0]))
        if name not in AS_THEY_ARE:
            for value in (*given, *named.values()):
                now.weigh(value)
        check(*given, **named)
        return now.made(function(*args, **named))

    return bounded


def _test(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def bounded(*args: Any) -> Any:
        now = budget()
        now.step(1 + (sum(map(now.weigh, args)) >> 6))
        return function(*args)

    return bounded


@pass_context
def _tick(_: Any, value: Any, text: int = 0) -> Any:
    """At the start of a body that may be run many times: `text` characters of the template itself
    come out of it."""
    now = budget()
    now.step()
    now.charge(text)
    return value


@pass_context
def _weighed(_: Any, value: Any) -> Any:
    now = budget()
    now.step(1 + (now.weigh(value) >> 6))
    return value


@pass_context
def _made(_: Any, value: Any) -> Any:
    return budget().made(value)


@pass_context
def _concat(_: Any, values: list[Any]) -> str:
    now = budget()
    now.step()
    now.fits(sum(map(now.weigh, values)))
    return now.made("".join(map(str, values)))


def _shown(value: Any) -> Any:
    """What comes out of the template."""
    now = budget()
    now.charge(now.weigh(value))
    return value


class MeterInserter(NodeTransformer):
    """Puts the counting into a parsed template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _counted(node.body))
        if node.test is not None:
            node.test = _filtered(node.test, "_tick")  # every item that it looks at
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _counted(node.body))
        return node

    visit_CallBlock = visit_Macro

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_concat")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if (
            len(node.ops) == 1
            and node.ops[0].op in ORDERS
            and (_short(node.expr) or _short(node.ops[0].expr))
        ):
            return node  # costs no more than the constant is long
        node.expr = _heavy(node.expr)
        for operand in node.ops:
            operand.expr = _heavy(operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return (
            _filtered(node, "_made")
            if isinstance(node.arg, nodes.Slice) and node.ctx == "load"
            else node
        )


def _filtered(node: Any, name: str, *options: Any) -> nodes.Filter:
    return nodes.Filter(
        node, name, [nodes.Const(o) for o in options], [], None, None, lineno=node.lineno
    )


def _heavy(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _filtered(node, "_weighed")


def _short(node: nodes.Expr) -> bool:
    """A constant that is read in one step."""
    return isinstance(node, nodes.Const) and (
        not isinstance(node.value, str) or len(node.value) <= 64
    )


def _counted(body: list[nodes.Node]) -> nodes.ExprStmt:
    """A statement that counts one turn, and the text that stands in the body outside of bodies that
    count for themselves."""
    line = body[0].lineno if body else 1
    return nodes.ExprStmt(
        _filtered(nodes.Const(0, lineno=line), "_tick", sum(map(_text_in, body))), lineno=line
    )


def _text_in(node: nodes.Node) -> int:
    if isinstance(node, nodes.TemplateData):
        return len(node.data)
    if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
        return 0
    return sum(map(_text_in, node.iter_child_nodes()))


class MeteredFormatter(SandboxedFormatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        if re.search(r"[0-9]{5}", format_spec):
            raise TemplateLimitError("it formats with a width of more than 9999.")
        now = budget()
        now.step()
        now.weigh(value)
        return now.made(super().format_field(value, format_spec))


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """That of transformers, counting."""

    intercepted_binops = frozenset(["+", "*", "%", "**"])

    def __init__(self, like: Any):
        super().__init__(
            trim_blocks=like.trim_blocks,
            lstrip_blocks=like.lstrip_blocks,
            extensions=[type(extension) for extension in like.extensions.values()],
            finalize=_shown,
        )
        self.globals.update(
            {name: value for name, value in like.globals.items() if name != "range"}
        )
        self.globals["lipsum"] = _refused
        self.filters.update(
            {name: _filter(name, function) for name, function in like.filters.items()}
        )
        self.filters.update(_tick=_tick, _weighed=_weighed, _made=_made, _concat=_concat)
        self.tests.update(
            {name: _test(function) for name, function in like.tests.items() if name in COMPARES}
        )

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > LONGEST_SOURCE:
            raise TemplateLimitError(f"it is {len(source)} characters long.")
        return MeterInserter().visit(super()._parse(source, name, filename))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        now = budget()
        now.step()
        if isinstance(left, int | float) and isinstance(right, int | float):
            bits = [n.bit_length() if isinstance(n, int) else 64 for n in (left, right)]
            if (
                operator in "**"
                and (bits[0] * max(1, _number(right)) if operator == "**" else sum(bits)) > BITS
            ):
                raise TemplateLimitError("it computes with a number of more than 10,000 bits.")
        elif operator == "*":
            now.fits(max(_length(left) * _number(right), _length(right) * _number(left)))
        elif operator == "+":
            now.fits(_length(left) + _length(right))
        elif operator == "%":
            _check_format(left, right)
        return now.made(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        text = value.__self__
        by_map = value.__name__ == "format_map"

        def formatted(*args: Any, **named: Any) -> str:
            given = (args[0] if args else {}) if by_map else named
            now = budget()
            now.fits(len(text) + text.count("{") * now.weigh([*args, *named.values()]))
            return now.made(
                type(text)(MeteredFormatter(self).vformat(text, () if by_map else args, given))
            )

        return functools.update_wrapper(formatted, value)

    def call(__self, __context: Any, __obj: Any, *args: Any, **named: Any) -> Any:
        now = budget()
        if isinstance(__obj, types.BuiltinMethodType):
            now.step(_reading(__obj.__self__))
            if __obj.__name__ in METHODS and isinstance(__obj.__self__, str | bytes | int):
                METHODS[__obj.__name__](__obj.__self__, *args, **named)
        else:
            now.step()
        if not isinstance(__obj, types.BuiltinMethodType | Macro):
            for value in (*args, *named.values()):
                now.weigh(value)
        return now.made(super().call(__context, __obj, *args, **named))


@functools.lru_cache(maxsize=64)
def compiled(source: str) -> Template:
    """A chat template, ready to be rendered within `spending`."""
    return _environment().from_string(source)


def _environment() -> MeteredEnvironment:
    """A new one for every template, as transformers does: the tracker of generated text belongs to
    one."""
    return MeteredEnvironment(_cached_compile_jinja_template("").environment)
