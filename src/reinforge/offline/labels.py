"""What generated completions are worth: by the rewards of a configuration, by a judge, or both; and
preference pairs from that.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import combinations, groupby
from pathlib import Path
from typing import Any, Literal

from reinforge.config.rewards import RewardConfig
from reinforge.core.engine import Sampling
from reinforge.core.sample import Row
from reinforge.core.seeds import seed_of
from reinforge.engines.openai import OpenAIClient, OpenAIServer
from reinforge.offline.journal import LABELS, REQUEST, Line, digest
from reinforge.rewards.build import build_rewards
from reinforge.rewards.combine import combined, gates_of
from reinforge.rewards.function import check_columns
from reinforge.rewards.judge import Judge, Mode
from reinforge.rewards.normalization import RewardNormalization

PairRule = Literal["best-worst", "all"]
LABEL_COLUMNS = ("rewards", "reward", "judge")


@dataclass(frozen=True)
class LabelOptions:
    """How to label. Nothing set: not at all."""

    rewards: Sequence[RewardConfig] = ()
    judge: OpenAIServer | None = None
    mode: Mode = "score"
    template: str | None = None  # the judge's prompt
    temperature: float = 0.0  # of the judge
    max_tokens: int = 1024  # of its reply
    pairs: PairRule | None = None
    margin: float = 0.0  # pairs must differ by more than this
    # rewards that came from Python, by name; nobody knows whether they are what they were, so
    # whatever they said before is asked again
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    @property
    def wanted(self) -> bool:
        return bool(self.rewards) or self.judge is not None

    @property
    def identity(self) -> str:
        """What the labels depend on, beside the completions."""
        judge = (
            None
            if self.judge is None
            else [
                self.judge.url,
                self.judge.model,
                self.mode,
                self.template,
                self.temperature,
                self.max_tokens,
            ]
        )
        rewards = [[r.model_dump(mode="json"), _contents(r.name)] for r in self.rewards]
        return digest(rewards, judge)


def _contents(name: str) -> str | None:
    """What is in the file of a reward `file.py:function`, which may have been edited."""
    path = Path(name.rpartition(":")[0])
    return path.read_text(errors="replace") if path.suffix == ".py" and path.is_file() else None


@dataclass
class Labeller:
    """Adds `rewards` and `reward` (the weighted total), and `judge`, to the lines of one prompt."""

    how: LabelOptions
    client: OpenAIClient | None = None  # of the judge
    device: str = "auto"
    failed: int = 0  # completions that got no label
    _rewards: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._identity = self.how.identity
        self._rewards = build_rewards(self.how.rewards, self.how.functions, self.device)
        self._gates, self._running = gates_of(self._rewards), RewardNormalization.of(self._rewards)
        self._judge = (
            Judge(self._ask, mode=self.how.mode, template=self.how.template)
            if self.client is not None
            else None
        )

    def knows(self, lines: Sequence[Line]) -> bool:
        """Whether lines have these labels already."""
        return not self.how.functions and all(line.get(LABELS) == self._identity for line in lines)

    def check(self, rows: Sequence[Row]) -> None:
        """Raises InputError if a reward needs a column that the rows do not have."""
        check_columns(self._rewards, rows)

    async def _ask(self, text: str) -> str:
        assert self.client is not None
        params = Sampling(self.how.max_tokens, self.how.temperature)
        return (await self.client.complete(text, params, key=seed_of("judge", text)))[0].text

    async def __call__(self, row: Row, lines: list[Line]) -> list[Line]:
        texts = [line["completion"] for line in lines]
        labels: list[Line] = [{} for _ in lines]
        if self._rewards:
            tokens = (
                [line["tokens"] for line in lines]
                if all("tokens" in line for line in lines)
                else None
            )
            outcomes = {
                r.name: await r.outcome([row] * len(texts), texts, tokens) for r in self._rewards
            }
            for outcome in outcomes.values():
                for label, said in zip(labels, outcome.attributes, strict=False):
                    label |= said  # of an attribute model: a column for each
            scores = {name: outcome.marked for name, outcome in outcomes.items()}
            weights = {r.name: r.weight for r in self._rewards}
            for i, label in enumerate(labels):
                given = {name: values[i] for name, values in scores.items()}
                parts, reward = combined(given, self._gates, weights, self._running)
                label |= {"rewards": parts, "reward": reward}
        if self._judge is not None:
            for label, score in zip(labels, await self._judge(row.prompt, texts), strict=True):
                label["judge"] = score
        self.failed += sum(value_of(label) is None for label in labels)
        return [
            {**_unlabelled(line), **label, LABELS: self._identity}
            for line, label in zip(lines, labels, strict=True)
        ]


def _unlabelled(line: Line) -> Line:
    """A line without what was said of it before, by others."""
    return {name: value for name, value in line.items() if name not in LABEL_COLUMNS}


@asynccontextmanager
async def open_labeller(how: LabelOptions) -> AsyncIterator[Labeller | None]:
    """What labels as the options say; None where they ask for nothing."""
    if how.judge is None:
        yield Labeller(how) if how.wanted else None
        return
    async with OpenAIClient(how.judge, where="--judge") as client:
        yield Labeller(how, client)


def value_of(line: Line) -> float | None:
    """What pairs are ordered by: the reward where there is one, otherwise the judge's score."""
    return line["reward"] if "reward" in line else line.get("judge")


def make_pairs(lines: Sequence[Line], rule: PairRule, margin: float = 0.0) -> list[Line]:
    """Rows {id, prompt, chosen, rejected, margin} as preference training reads them. best-worst:
    one per prompt, its best against its worst completion; all: every two that differ. Equal ones,
    unscored ones and equal texts make no pair.
    """
    made: list[Line] = []
    for _, group in groupby(lines, lambda line: line[REQUEST]):
        ranked = sorted(
            (line for line in group if value_of(line) is not None), key=_value, reverse=True
        )
        candidates = (
            [(ranked[0], ranked[-1])]
            if rule == "best-worst" and ranked
            else list(combinations(ranked, 2))
        )
        for i, (better, worse) in enumerate(candidates):
            gap = _value(better) - _value(worse)
            if gap > margin and better["completion"] != worse["completion"]:
                made.append(
                    {
                        "id": better["id"] if rule == "best-worst" else f"{better['id']}-{i}",
                        "prompt": better["prompt"],
                        "chosen": better["completion"],
                        "rejected": worse["completion"],
                        "margin": gap,
                        **({"tools": better["tools"]} if better.get("tools") else {}),
                    }
                )
    return made


def _value(line: Line) -> float:
    value = value_of(line)
    assert value is not None
    return value
