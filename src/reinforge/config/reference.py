"""The configuration's JSON schema (for editors and forms) and its reference page, both made from
the models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from reinforge.config.explain import section_of
from reinforge.config.schema import Config


def json_schema() -> dict[str, Any]:
    """JSON schema of a configuration file.

    An editor checks a file that starts with `# yaml-language-server: $schema=<path of this
    schema>`.
    """
    schema = Config.model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "reinforge configuration",
    }


def reference_markdown() -> str:
    """The reference page: one table per section; the keys of nested sections follow with their
    dotted names.
    """
    schema = json_schema()
    lines = [
        "# Configuration reference",
        "",
        (
            "Made from the schema by `reinforge schema --markdown`. Overrides on the command line"
            " use the same keys: `train.learning_rate=1e-5`, `rewards.0.weight=2`."
        ),
        "",
    ]
    for name, field in Config.model_fields.items():
        spec = schema["properties"][name]
        section = section_of(field.annotation)
        many = spec.get("type") == "array"
        assert section is not None, name
        kind = (
            "list, each item:"
            if many
            else (
                "required"
                if field.is_required()
                else "off unless given"
                if field.default is None
                else "optional"
            )
        )
        lines += [
            f"## {name}",
            "",
            *([_line(section.__doc__), ""] if section.__doc__ else []),
            f"({kind})",
            "",
        ]
        lines += ["| key | type | default | description |", "|---|---|---|---|"]
        lines += [_row(*row) for row in _rows(section, schema, f"{name}.N" if many else name)]
        lines.append("")
    return "\n".join(lines)


def _rows(
    model: type[BaseModel], schema: dict[str, Any], prefix: str
) -> Iterator[tuple[str, str, str, str]]:
    definition = schema["$defs"][model.__name__]
    for name, field in model.model_fields.items():
        key = f"{prefix}.{name}"
        spec = definition["properties"][name]
        section = section_of(field.annotation)
        many = spec.get("type") == "array"
        named = spec.get("type") == "object"  # several, by names of the user's
        if section:
            if field.default is None or many or named:
                yield (
                    key,
                    "list" if many else "mapping" if named else "section",
                    "off",
                    field.description or _line(section.__doc__),
                )
            below = f"{key}.N" if many else f"{key}.NAME" if named else key
            yield from _rows(section, schema, below)
        else:
            default = (
                "required"
                if field.is_required()
                else ""
                if field.default is None
                else f"`{json.dumps(spec['default'])}`"
            )
            yield key, type_name(spec), default, field.description or ""


def type_name(spec: dict[str, Any]) -> str:
    """A short name for a piece of JSON schema.

    >>> number = {"type": "integer", "minimum": 1}
    >>> type_name({"anyOf": [{"const": "auto"}, number, {"type": "null"}]})
    '`auto` or integer ≥ 1'
    """
    if "anyOf" in spec:
        return " or ".join(
            type_name(option) for option in spec["anyOf"] if option.get("type") != "null"
        )
    if "const" in spec:
        return f"`{spec['const']}`"
    if "enum" in spec:
        return ", ".join(f"`{value}`" for value in spec["enum"])
    if spec.get("type") == "array":
        items = [type_name(item) for item in spec.get("prefixItems", [spec.get("items", {})])]
        return f"list of {items[0]}" if "items" in spec else f"[{', '.join(items)}]"
    if spec.get("type") == "object":
        return "mapping"
    bounds = (
        ("minimum", "≥"),
        ("exclusiveMinimum", ">"),
        ("maximum", "≤"),
        ("exclusiveMaximum", "<"),
    )
    limits = [f"{sign} {spec[key]:g}" for key, sign in bounds if key in spec]
    names = {"string": "text", "integer": "integer", "number": "number", "boolean": "true, false"}
    return " ".join([names.get(spec.get("type", ""), "anything"), ", ".join(limits)]).strip()


def _line(text: str | None) -> str:
    return " ".join((text or "").split())


def _row(*cells: str) -> str:
    key, *rest = (cell.replace("|", "\\|").replace("\n", " ") for cell in cells)
    return f"| `{key}` | {' | '.join(rest)} |"
