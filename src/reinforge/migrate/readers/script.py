"""The settings in a Python script for TRL, read from its syntax tree: it is never run.

Settings are the arguments of `...Config(...)`, `TrainingArguments(...)`, `...Trainer(...)` and
`LoraConfig(...)`, what is assigned to fields of them, and where a script takes its settings from
the command line, the command in its own docstring.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from reinforge.core.errors import InputError
from reinforge.migrate.readers.shell import Shell
from reinforge.migrate.readers.values import flags

CONFIG = re.compile(r"(\w+)Config|TrainingArguments")
TRAINER = re.compile(r"(\w+)Trainer")
NO_CONFIG = {"Mxfp4Config", "ModelConfig", "AutoConfig", "GenerationConfig"}
# arguments of other classes, under the name of the class
APART = {"LoraConfig", "BitsAndBytesConfig"}
PARSERS = {"TrlParser", "HfArgumentParser"}
# methods of a data set that leave it the same data set
ROW_METHODS = {"map", "filter", "select", "shuffle", "remove_columns", "rename_column"}
DTYPES = {"bfloat16", "float16", "float32"}
MAX_LOOKS = 20_000  # expressions that one value may be made of
MAX_TEXT = 20_000  # characters
MAX_NUMBER = 1e15
OPERATORS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


@dataclass(frozen=True)
class Unread:
    """The value of a key that only a run could tell."""

    code: str

    def __str__(self) -> str:
        return self.code


@dataclass
class Script:
    """What was found in a script."""

    trainer: str = ""  # GRPOTrainer
    settings: dict[str, Any] = field(default_factory=dict)
    functions: set[str] = field(default_factory=set)  # defined at the top level
    imported: dict[str, str] = field(default_factory=dict)  # name: module
    launcher: dict[str, Any] = field(default_factory=dict)  # flags before the script
    trains_on_import: bool = False
    maps_rows: bool = False


def read_script(text: str, where: str) -> Script:
    try:
        tree = ast.parse(text, filename=where)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"this is not Python: {error}.", where=where) from None
    return _Reader(tree).read()


class _Reader:
    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.script = Script()
        self.names: dict[str, ast.expr] = {}
        self.arguments: dict[str, ast.expr] = {}  # argparse's defaults
        self.reading: set[str] = set()  # names on the way to a value
        self.looked_at = 0  # expressions on the way to a value

    def read(self) -> Script:
        script = self.script
        for statement in self.tree.body:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                script.functions.add(statement.name)
            elif (
                isinstance(statement, ast.Expr | ast.Assign) and _called(statement.value) == "train"
            ):
                script.trains_on_import = True
        for node in ast.walk(self.tree):
            self._note(node)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                self._call(node)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
                self._assigned(node.targets[0], node.value)
        if self._parses():
            script.settings |= self._command()
        return script

    def _note(self, node: ast.AST) -> None:
        """Names, imports and arguments of the command line."""
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                self.script.imported[alias.asname or alias.name] = node.module or ""
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            self.names[node.targets[0].id] = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            self.names[node.target.id] = node.value
        elif isinstance(node, ast.Call):
            called = _called(node)
            if called == "add_argument" and node.args:
                name = self.value(node.args[-1])
                given = {k.arg: k.value for k in node.keywords}
                if isinstance(name, str) and "default" in given:
                    self.arguments[name.lstrip("-").replace("-", "_")] = given["default"]
            elif called == "map":
                self.script.maps_rows = True

    def _call(self, call: ast.Call) -> None:
        name = _called(call)
        if name in APART:
            self._take(call, f"{name}.")
        elif name in NO_CONFIG:
            return
        elif TRAINER.fullmatch(name):
            self.script.trainer = self.script.trainer or name
            self._take(call, "", skip={"args"})
            if call.args and "model" not in self.script.settings:
                self.script.settings["model"] = self.value(call.args[0])
        elif CONFIG.fullmatch(name):
            self._take(call, "")
        elif name == "load_dataset":
            self._data(call)
        elif name == "from_pretrained" and "Model" in ast.unparse(call.func) and call.args:
            self.script.settings.setdefault("model_name_or_path", self.value(call.args[0]))

    def _take(self, call: ast.Call, prefix: str, skip: Collection[str] = ()) -> None:
        for keyword in call.keywords:
            if keyword.arg is None:  # **settings
                node = keyword.value
                inner = self.names.get(node.id) if isinstance(node, ast.Name) else node
                if isinstance(inner, ast.Dict | ast.Call):
                    value = self.value(inner)
                    if isinstance(value, dict):
                        self.script.settings |= {f"{prefix}{k}": v for k, v in value.items()}
            elif keyword.arg not in skip:
                value = self.value(keyword.value)
                if value is not None or not self._parses():  # else it is on the command line
                    self.script.settings[f"{prefix}{keyword.arg}"] = value

    def _data(self, call: ast.Call) -> None:
        """The first data set that is loaded is taken for the one that is trained on."""
        settings = self.script.settings
        if "dataset_name" in settings or not call.args:
            return
        settings["dataset_name"] = self.value(call.args[0])
        given = {k.arg: self.value(k.value) for k in call.keywords}
        if len(call.args) > 1:
            given["name"] = self.value(call.args[1])
        if "name" in given:
            settings["dataset_config"] = given["name"]
        if "split" in given:
            settings["dataset_train_split"] = given["split"]

    def _assigned(self, target: ast.Attribute, value: ast.expr) -> None:
        owner = target.value.id if isinstance(target.value, ast.Name) else ""
        if re.search(r"args$|config$", owner) and not re.search(r"model|script|lora|peft", owner):
            self.script.settings[target.attr] = self.value(value)

    def _command(self) -> dict[str, Any]:
        """The flags of the first command in the docstring that starts this script."""
        docstring = ast.get_docstring(self.tree, clean=False) or ""
        # the lines of a command are one line, unless the docstring is raw
        for line in re.sub(r"\\\n", " ", docstring).splitlines():
            if not re.search(r"\.py\s+--|\btrl \w+ --", line):
                continue
            for words in Shell().commands(line):
                scripts = [i for i, word in enumerate(words) if word.endswith(".py")]
                if scripts or words[:1] == ["trl"]:
                    self.script.launcher = flags(words[: scripts[0]] if scripts else [])
                    return flags(words[scripts[0] + 1 :] if scripts else words[2:])
        return {}

    def value(self, node: ast.expr) -> Any:
        """What an expression is, if that can be told without running anything."""
        self.looked_at = 0
        try:
            return self._value(node)
        except (_Unknown, TypeError, ValueError, ArithmeticError, RecursionError):
            self.reading.clear()
            return Unread(_code(node))

    def _value(self, node: ast.expr) -> Any:
        self.looked_at += 1
        if self.looked_at > MAX_LOOKS:
            raise _Unknown
        match node:
            case ast.Constant():
                return node.value
            case ast.List() | ast.Tuple() | ast.Set():
                return [self._item(item) for item in node.elts]
            case ast.Dict():
                return {
                    self._value(key): self._value(value)
                    for key, value in zip(node.keys, node.values, strict=True)
                    if key is not None
                }
            case ast.Name():
                return self._named(node.id)
            case ast.UnaryOp(op=ast.USub()):
                return -self._value(node.operand)
            case ast.BinOp() if type(node.op) in OPERATORS:
                return _computed(node.op, self._value(node.left), self._value(node.right))
            case ast.JoinedStr():
                return "".join(str(self._value(part)) for part in node.values)
            case ast.FormattedValue():
                return self._value(node.value)
            case ast.Attribute() if node.attr in DTYPES:
                return node.attr
            case ast.Attribute() if node.attr in self.arguments:
                return self._value(self.arguments[node.attr])
            case ast.Call() if _called(node) == "LoraConfig":
                return "LoraConfig"  # its arguments are taken by themselves
            case ast.Call() if _called(node) == "dict":
                return {k.arg: self._value(k.value) for k in node.keywords if k.arg}
            case ast.Call() if _called(node) in ROW_METHODS:
                return self._value(node.func.value)  # type: ignore[attr-defined]
            case ast.Call() if _called(node) in ("get_peft_config", "get_quantization_config"):
                return None  # made of the command line's own settings
            case ast.Call() if _called(node) in ("from_pretrained", "load_dataset") and node.args:
                return self._value(node.args[0])
            case ast.Attribute(value=ast.Name(id=owner)) if self._parsed(owner):
                return None  # of the command line, which is read by itself
            case ast.IfExp():
                return self._value(node.body)
            case ast.Subscript():
                return self._value(node.value)  # a split of the data
        raise _Unknown

    def _parsed(self, owner: str) -> bool:
        return owner.endswith("args") and self._parses()

    def _parses(self) -> bool:
        """Whether the settings come from the command line."""
        return any(name in PARSERS for name in self.script.imported)

    def _item(self, node: ast.expr) -> Any:
        """An item of a list: functions by name."""
        return (
            node.id if isinstance(node, ast.Name) and self._function(node.id) else self._value(node)
        )

    def _function(self, name: str) -> bool:
        return name in self.script.functions or (
            name in self.script.imported and name not in self.names
        )

    def _named(self, name: str) -> Any:
        if self._function(name):
            return name
        if name not in self.names or name in self.reading:
            raise _Unknown
        self.reading.add(name)
        try:
            return self._value(self.names[name])
        finally:
            self.reading.discard(name)


class _Unknown(Exception):
    """An expression that only a run could tell."""


def _computed(op: ast.operator, left: Any, right: Any) -> Any:
    """Sums and products of numbers, and joined texts; nothing that could grow without end."""
    numbers = isinstance(left, int | float) and isinstance(right, int | float)
    texts = isinstance(left, str) and isinstance(right, str) and isinstance(op, ast.Add)
    if not numbers and not texts:
        raise _Unknown
    value = OPERATORS[type(op)](left, right)
    if len(value) > MAX_TEXT if texts else abs(value) > MAX_NUMBER:
        raise _Unknown
    return value


def _code(node: ast.expr) -> str:
    """An expression as it is written, if it is short enough to be shown."""
    try:
        return ast.unparse(node)[:MAX_TEXT]
    except RecursionError:
        return "..."


def _called(node: ast.expr) -> str:
    """The last part of the name of what is called: load_dataset, GRPOConfig, train."""
    if not isinstance(node, ast.Call):
        return ""
    match node.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""
