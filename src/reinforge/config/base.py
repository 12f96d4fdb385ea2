"""What every section of the configuration is made of: the strict model and the kinds of numbers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

Positive = Annotated[FiniteFloat, Field(gt=0)]
NonNegative = Annotated[FiniteFloat, Field(ge=0)]
Fraction = Annotated[FiniteFloat, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
# what is graded of an answer: the name of a column, of a head and in a prompt
Attribute = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$")]
# of numbers that are computed with or kept: as the module has them (model.dtype), or FP8
Precision = Literal["model", "fp8"]
# gradient checkpointing: off, on, or on with the inputs of layers in host memory
Checkpointing = Literal["host"] | bool


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, protected_namespaces=())


SHORT: dict[str, dict[type, str]] = {
    "env": {str: "name", list: "mix"},
    "agent": {str: "name", list: "command"},
}


def spelled_out(section: str, data: Any) -> Any:
    """A section that may be a text or a list, as the mapping that is meant.

    >>> spelled_out("env", "games.py:Chess")
    {'name': 'games.py:Chess'}
    """
    key = SHORT.get(section, {}).get(type(data))
    return data if key is None else {key: data}
