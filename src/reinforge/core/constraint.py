"""What an answer must look like, where a request says so. Knows no tokenizer and no library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ConstraintKind = Literal["regex", "json_schema", "json_object", "grammar"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a whole answer must match. Requests, options and configurations make one, `Sampling`
    carries it to an engine, and `models/grammars.py` compiles it for a tokenizer.

    >>> Constraint("regex", "yes|no")
    Constraint(kind='regex', text='yes|no')
    """

    kind: ConstraintKind
    # a regular expression, a JSON schema as JSON, a grammar in Lark's or GBNF's notation; nothing
    # of json_object
    text: str = ""
