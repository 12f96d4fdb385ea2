"""Any Python function as a reward: `def reward(prompts, completions, answer, **columns) -> list[float | None]`."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from reinforge.core.errors import InputError
from reinforge.core.sample import Row
from reinforge.rewards.running import Rule


@dataclass
class FunctionReward:
    """Calls `function` with one list per column it asks for. A plain function that is not ours runs in a thread of its own,
    so that a slow one overlaps generation; an async function is awaited."""

    name: str
    function: Callable[..., Any]
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    pure: bool = False  # ours: fast and repeatable, called in place and never journalled
    gate: str | None = None  # the reward that must pass, or this one counts 0
    gate_at: float | None = None  # ... with at least this; None: above 0
    rule: Rule = field(default_factory=Rule)  # how it counts: centred, scaled, clipped

    def __post_init__(self) -> None:
        self._thread = None if self.pure else ThreadPoolExecutor(1, thread_name_prefix=f"reward-{self.name}")
        parameters: Mapping[str, inspect.Parameter] = {}
        try:
            parameters = inspect.signature(self.function).parameters
        except (TypeError, ValueError):  # a builtin that does not say
            pass
        self._takes_all = not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._takes = set(parameters)
        self._required = {n for n, p in parameters.items() if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}

    async def score(self, rows: Sequence[Row], completions: Sequence[str]) -> list[float | None]:
        """One score per completion, each finite or None. Raises InputError when the function is not usable on these rows."""
        available: dict[str, Any] = {"prompts": [r.prompt for r in rows], "completions": list(completions)}
        for column in {name: None for r in rows for name in r.columns}:
            available.setdefault(column, [r.columns.get(column) for r in rows])
        missing = self._required - available.keys() - self.options.keys()
        if missing:
            raise InputError(f"reward {self.name} needs {', '.join(sorted(missing))}, which the rows do not have (columns: {', '.join(sorted(available))}).",
                             where="rewards", fix="Map a column with data.columns, or give it as rewards.options.")  # fmt: skip
        given = {k: v for k, v in available.items() if self._takes_all or k in self._takes} | dict(self.options)
        if inspect.iscoroutinefunction(self.function):
            result = await self.function(**given)
        elif self._thread is None:
            result = self.function(**given)
        else:
            result = await asyncio.get_running_loop().run_in_executor(self._thread, lambda: self.function(**given))
            if inspect.isawaitable(result):
                result = await result
        return self._checked(result, len(completions))

    def _checked(self, result: Any, count: int) -> list[float | None]:
        if hasattr(result, "tolist"):
            result = result.tolist()
        if not isinstance(result, (list, tuple)) or len(result) != count:
            got = f"{len(result)} values" if isinstance(result, (list, tuple)) else f"a {type(result).__name__}"
            raise InputError(
                f"reward {self.name} returned {got} for {count} completions.",
                where="rewards",
                fix="Return a list with one number or None per completion.",
            )
        out: list[float | None] = []
        for value in result:
            if value is not None and (isinstance(value, (str, bytes)) or not math.isfinite(float(value))):
                raise InputError(
                    f"reward {self.name} returned {value!r}.",
                    where="rewards",
                    fix="Return finite numbers, or None for a completion that cannot be scored.",
                )
            out.append(None if value is None else float(value))
        return out
