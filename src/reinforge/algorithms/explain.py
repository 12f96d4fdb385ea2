"""What an algorithm does, for people: the names of its parts, the settings that decide, equations
in one line, as the parts' docstrings have them, and where in the code they are computed.

The training loop records it beside the numbers of a step (loops/trace.py).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from reinforge.algorithms.algorithm import Algorithm
from reinforge.algorithms.catalogue import TABLE
from reinforge.algorithms.losses.nash import nash_md
from reinforge.algorithms.losses.preference import PREFERENCE
from reinforge.algorithms.pairing import PICKS
from reinforge.algorithms.parts.advantages import ADVANTAGES
from reinforge.algorithms.parts.reduce import REDUCERS
from reinforge.algorithms.parts.rollouts import Rollouts
from reinforge.algorithms.parts.statistics import ScoredEpisodes
from reinforge.algorithms.parts.surrogates import SURROGATES
from reinforge.algorithms.settings import name_of


def explained(algorithm: Algorithm) -> dict[str, Any]:
    """Plain values: {"name", "parts", "equations", "settings", "computed_by"}."""
    row = TABLE[algorithm.name]
    o = algorithm.options
    found: dict[str, Any] = {"name": algorithm.name, "paper": algorithm.paper}
    if algorithm.advantage is None:
        parts: dict[str, Any] = dict(row.parts)
        settings = {"beta": o.beta, "overlong": o.overlong, **row.options, **o.settings}
    else:
        parts = {"advantage": o.advantage, "surrogate": o.surrogate, "reduce": o.reduce}
        settings = {
            "scale": o.scale,
            "std": o.std,
            "eps": o.eps,
            "advantage_clip": o.advantage_clip,
            "clip_low": o.clip_low,
            "clip_high": o.clip_high,
            "kl_coefficient": algorithm.terms.kl,
            "kl_placement": o.kl_placement if algorithm.terms.kl else None,
            "entropy": algorithm.terms.entropy,
            "correction": o.correction,
            "selection": o.selection,
            "overlong": o.overlong,
            "dynamic_sampling": o.dynamic_sampling,
            **row.options,
            **o.settings,
        }
    found["parts"] = {name: _name(part) for name, part in parts.items()}
    functions = {name: _function(name, part) for name, part in parts.items()}
    found["equations"] = {
        name: text for name, function in functions.items() if (text := equation(function))
    }
    found["computed_by"] = _computed_by(algorithm, functions)
    found["settings"] = {
        name: _plain(value) for name, value in settings.items() if value not in (None, {})
    }
    return found


def _computed_by(
    algorithm: Algorithm, functions: Mapping[str, Callable[..., Any] | None]
) -> dict[str, list[str]]:
    """Where a number that looks wrong comes from: the function first, then who calls it."""
    found: dict[str, list[str]] = {}
    if (advantage := functions.get("advantage")) is not None:
        found["advantage"] = [
            place_of(advantage),
            f"means and spreads: {place_of(ScoredEpisodes.moments)}",
            f"rewards gathered: {place_of(Rollouts.of)}",
            f"called by: {place_of(Algorithm.advantages)}",
        ]
    if (pick := functions.get("pick")) is not None:
        found["pick"] = [place_of(pick)]
    parts = [functions.get(name) for name in ("surrogate", "reduce", "loss")]
    found["loss"] = [place_of(part) for part in parts if part is not None]
    found["loss"].append(place_of(type(algorithm.loss)))
    return found


def place_of(function: Callable[..., Any]) -> str:
    """The name of a function or class and the file that has it.

    >>> place_of(Rollouts.of)
    'Rollouts.of (reinforge/algorithms/parts/rollouts.py)'
    """
    while isinstance(function, partial):
        function = function.func
    module = str(getattr(function, "__module__", None) or type(function).__module__)
    name = str(getattr(function, "__qualname__", None) or type(function).__qualname__)
    if module.partition(".")[0] == __name__.partition(".")[0]:
        return f"{name} ({module.replace('.', '/')}.py)"
    # a function of a user's: where the file lies is not for a log that travels
    code = getattr(function, "__code__", None)
    return f"{name} ({module if code is None else Path(code.co_filename).name})"


def _name(part: Any) -> str:
    return part if isinstance(part, str) else name_of(part)


def _plain(value: Any) -> Any:
    return _name(value) if callable(value) else value


def _function(kind: str, part: Any) -> Callable[..., Any] | None:
    if not isinstance(part, str):
        return part if callable(part) else None
    choices: dict[str, Mapping[str, Callable[..., Any]]] = {
        "advantage": ADVANTAGES,
        "surrogate": SURROGATES,
        "reduce": REDUCERS,
        "pick": PICKS,
        "loss": {
            **{name: pair.function for name, pair in PREFERENCE.items()},
            nash_md.__name__: nash_md,
        },
    }
    return choices.get(kind, {}).get(part)


def equation(function: Callable[..., Any] | None) -> str:
    """The first sentence of a docstring; where that ends in a colon, with what stands under it.

    >>> def f(): "A = r - mean (Dr. Somebody, eq. 3). And more."
    >>> equation(f)
    'A = r - mean (Dr. Somebody, eq. 3)'
    """
    text = "" if function is None else inspect.getdoc(function) or ""
    paragraphs = text.split("\n\n")
    said = " ".join(paragraphs[0].split())
    if said.endswith(":") and len(paragraphs) > 1:
        lines = [line.strip() for line in paragraphs[1].splitlines()]
        return f"{said} {'; '.join(lines)}"
    return _first_sentence(said).rstrip(".")


def _first_sentence(text: str) -> str:
    """Up to a full stop that is not in brackets: "(Dr. GRPO, eq. 3)" is no end."""
    for stop in re.finditer(r"\.\s+(?=\D)", text):
        before = text[: stop.start()]
        if before.count("(") == before.count(")"):
            return before
    return text
