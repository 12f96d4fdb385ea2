"""`reinforge check rewards`: right answers must get everything there is, and answers that deserve
nothing must not.

A config's rewards are tried together, as training would add them up. Right answers are written in
several ways, and the way that gets everything is the form in which hostile answers are also tried:
a hole is of most use to a policy inside the right form.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reinforge.check.attacks import WRAPS, attacks, wrapped
from reinforge.config.rewards import RewardConfig
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.core.row import Row
from reinforge.data.sources import train_and_eval_rows
from reinforge.plan.gold_answers import sample, tokens_for
from reinforge.rewards.build import build_rewards
from reinforge.rewards.combine import combined, gates_of
from reinforge.rewards.function import FunctionReward
from reinforge.rewards.raised import raised_in_words

ALL = 0.99  # of the sum of positive weights
# a right answer may get less than everything there
GRADED = {"judge", "http", "cosine_length", "language"}
SOME = 0.5


@dataclass
class AnswerTrial:
    """What came of one kind of answer."""

    kind: str
    totals: list[float | None]
    parts: dict[str, list[float | None]]
    raised: str | None = None
    passed: int = 0
    ok: bool = True

    def line(self, names: Sequence[str]) -> dict[str, Any]:
        said = "ok" if self.ok else "RAISES" if self.raised else "FAILS"
        unscored = sum(t is None for t in self.totals)
        return {
            "": said,
            "answer": self.kind,
            "full reward": f"{self.passed} of {len(self.totals)}",
            "unscored": unscored or "",
            **{name: _mean(self.parts.get(name, [])) for name in names},
            "total": self.raised or _mean(self.totals),
        }


@dataclass
class RewardFindings:
    """What `reinforge check rewards` found: every answer that was tried, and the rewards that were
    left out.
    """

    names: list[str]
    tried: list[AnswerTrial] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(t.ok for t in self.tried)

    def table(self) -> list[dict[str, Any]]:
        return [t.line(self.names) for t in self.tried]


def check_rewards(
    config: Config, *, rows: int = 16, allowed: float = 0.1, gold: str | None = None
) -> RewardFindings:
    """Tries all rewards but reward models, which have no highest score.

    `allowed`: the share of rows on which a hostile answer may be right by chance. `gold`: how a
    right answer is written, with {answer} in it, where none of the usual ways is.
    """
    if gold is not None and "{answer}" not in gold:
        raise InputError(
            "has no {answer} in it.",
            where="--gold",
            fix='Write e.g. --gold "<answer>{answer}</answer>".',
        )
    tried = [cfg for cfg in config.rewards if cfg.name not in ("model", "process")]
    kept = {cfg.name.rpartition(":")[2] for cfg in tried}
    tried = [
        (
            cfg
            if cfg.gate is None or cfg.gate.rpartition(":")[2] in kept
            else cfg.model_copy(update={"gate": None})
        )
        for cfg in tried
    ]
    chosen = [
        row
        for row in sample(train_and_eval_rows(config.data)[0], rows)
        if row.columns.get("answer") is not None
    ]
    if not tried or not chosen:
        what = (
            "there is no reward to try."
            if not tried
            else "the rows have no `answer`, so nothing is known to be right."
        )
        raise InputError(
            what,
            where="rewards" if not tried else "data.columns",
            fix=(
                "Map it, e.g. columns: {answer: solution}. A reward that compares with no right"
                " answer cannot be checked: read the best samples of a short run instead."
                if tried
                else None
            ),
        )
    found = asyncio.run(
        _RewardCheck(config, tried, chosen, {"as you say": gold} if gold else WRAPS, allowed).run()
    )
    found.left_out = [cfg.name for cfg in config.rewards if cfg.name in ("model", "process")]
    return found


def score_text(
    config: Config, prompt: str, completion: str, columns: Mapping[str, Any]
) -> tuple[AnswerTrial, dict[str, float]]:
    """What the rewards of a configuration give one answer, and their weights."""
    row = Row("typed", prompt, dict(columns))
    check = _RewardCheck(config, config.rewards, [row], {}, 0.0)
    return asyncio.run(check._score("typed", [completion])), check.weights


class _RewardCheck:
    def __init__(
        self,
        config: Config,
        configs: Sequence[RewardConfig],
        rows: list[Row],
        wraps: Any,
        allowed: float,
    ):
        self.config = config
        self.rewards: list[FunctionReward] = build_rewards(configs, device="cpu")
        self.gates = gates_of(self.rewards)
        self.weights = {r.name: r.weight for r in self.rewards}
        self.rows = rows
        self.wraps = wraps
        self.allowed = allowed
        self.golds = [str(row.columns.get("answer")) for row in rows]
        self.full = sum(max(0.0, w) for w in self.weights.values())
        self.needed = (SOME if any(c.name in GRADED for c in configs) else ALL) * self.full

    async def run(self) -> RewardFindings:
        found = RewardFindings([r.name for r in self.rewards])
        best: list[tuple[float, str]] = [(float("-inf"), "{answer}") for _ in self.rows]
        written = [
            (name, await self._score(f"right, {name}", [wrapped(w, g) for g in self.golds]), w)
            for name, w in self.wraps.items()
        ]
        for _, result, template in written:
            for i, value in enumerate(result.totals):
                if value is not None and value > best[i][0]:
                    best[i] = (value, template)
        _, shown, _ = max(written, key=lambda item: sum(t for t in item[1].totals if t is not None))
        shown.passed = sum(value >= self.needed for value, _ in best)
        shown.ok = shown.passed == len(self.rows) and shown.raised is None
        found.tried.append(shown)
        bars = [
            max(self.needed, ALL * value) if value >= self.needed else ALL * self.full
            for value, _ in best
        ]
        hostile = [attacks(row, g) for row, g in zip(self.rows, self.golds, strict=True)]
        for kind in hostile[0]:
            for form in ("", ", in the right form"):
                texts = [
                    None if (t := h[kind]) is None else wrapped(best[i][1], t) if form else t
                    for i, h in enumerate(hostile)
                ]
                if form and all(best[i][1] == "{answer}" for i in range(len(texts))):
                    continue  # the same again
                result = await self._score(kind + form, texts)
                if result.totals:
                    places = [i for i, t in enumerate(texts) if t is not None]
                    result.passed = sum(
                        v is not None and v >= bars[i]
                        for i, v in zip(places, result.totals, strict=True)
                    )
                    result.ok = result.raised is None and result.passed <= self.allowed * len(
                        result.totals
                    )
                    found.tried.append(result)
        return found

    async def _score(self, kind: str, texts: Sequence[str | None]) -> AnswerTrial:
        pairs = [
            (row, text) for row, text in zip(self.rows, texts, strict=True) if text is not None
        ]
        parts: dict[str, list[float | None]] = {}
        raised = None
        for reward in self.rewards:
            try:
                said = [t for _, t in pairs]
                outcome = await reward.outcome(
                    [r for r, _ in pairs], said, tokens_for(self.config, reward, said)
                )
                parts[reward.name] = outcome.marked
            except Exception as error:  # somebody's function: whatever it raises is the finding
                raised = f"{reward.name} {raised_in_words(error)[:240]}"
                parts[reward.name] = [math.nan] * len(pairs)
        counted = [
            combined({n: v[i] for n, v in parts.items()}, self.gates, self.weights)
            for i in range(len(pairs))
        ]
        scored = {
            n: [None if v is None or math.isnan(v) else v for v in values]
            for n, values in parts.items()
        }
        return AnswerTrial(kind, [reward for _, reward in counted], scored, raised)


def _mean(values: Sequence[float | None]) -> str:
    scored = [v for v in values if v is not None]
    return f"{sum(scored) / len(scored):.3g}" if scored else "-"
