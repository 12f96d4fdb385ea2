"""Tries the rewards on a few rows' own gold answers and on empty completions: a reward that cannot
take those will not take a model's.
"""

from __future__ import annotations

import asyncio
import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reinforge.config.schema import Config
from reinforge.core.errors import ReinforgeError
from reinforge.core.row import Row
from reinforge.plan.preflight import PlanReport, tell_stage
from reinforge.rewards.build import build_rewards
from reinforge.rewards.raised import raised_in_words

GOLD_ROWS = 8
UNTRIED = ("model", "judge", "http")  # weights are not loaded and servers not asked for a check
# those that leave a completion unscored because of its row alone, if it is an empty one
BY_THE_ROW = ("exact_match", "exact_number", "number", "choice", "math")
AT_ONCE = 1000  # rows


@dataclass(frozen=True)
class UnreadGold:
    """A reward that could score none of the gold answers that it was tried on."""

    key: str
    what: str


def sample(rows: Sequence[Row], limit: int) -> list[Row]:
    """At most `limit` rows, evenly spread from the first to the last."""
    if len(rows) <= limit:
        return list(rows)
    return [rows[i * (len(rows) - 1) // (limit - 1)] for i in range(limit)]


def named(row: Row) -> str:
    text = (
        row.prompt
        if isinstance(row.prompt, str)
        else str(row.prompt[-1].get("content") if row.prompt else "")
    )
    return f"row {row.id!r} ({text[:60]!r}{'...' if len(text) > 60 else ''})"


def check_rewards(config: Config, rows: Sequence[Row], report: PlanReport) -> None:
    """Scores the gold answers of a few rows with every reward, and empty completions.

    The rows' `answer` column is the gold.
    """
    if not config.rewards:
        return
    rewards = build_rewards(config.rewards)
    if all(cfg.name in UNTRIED for cfg in config.rewards):
        return  # nothing that could be tried without loading weights or asking a server
    tried = sample(rows, GOLD_ROWS)
    gold = [row for row in tried if row.columns.get("answer") is not None]
    if gold:
        unread, unscored = asyncio.run(
            _score_rows(config, rewards, gold, ("gold", "empty"), report)
        )
        stops = unscored and asyncio.run(_stops(config, rewards, rows))
        _tell_unread(unread, len(rows), report, unscored=unscored, stops=stops)
    else:
        asyncio.run(_score_rows(config, rewards, tried, ("empty",), report))
        if all(":" in cfg.name for cfg in config.rewards):
            return  # functions of the user's own, which may need no right answer
        what = "the rows have no `answer`: the rewards were tried on empty completions only."
        fix = "If another column has the gold answers, name it: columns: {answer: solution}."
        report.warn("data.columns", what, fix)


async def _score_rows(
    config: Config,
    rewards: Sequence[Any],
    rows: list[Row],
    kinds: tuple[str, ...],
    report: PlanReport,
) -> tuple[list[UnreadGold], bool]:
    """Every reward must take gold answers and empty completions without raising, and together they
    should prefer the first. Those that could score no gold answer; and whether all rewards were
    tried and none scored anything.
    """
    totals = dict.fromkeys(kinds, 0.0)
    known_kinds: set[str] = set()  # of which any reward scored any
    unread: list[UnreadGold] = []
    scores: dict[str, Any] = {}
    report.summary["rewards"] = scores
    for i, reward in enumerate(rewards):
        if config.rewards[i].name in UNTRIED:
            continue
        key = f"rewards.{i} ({reward.name})"
        scores[reward.name] = {}
        tell_stage(f"scoring gold answers with {key}")
        for kind in kinds:
            texts = [str(row.columns["answer"]) if kind == "gold" else "" for row in rows]
            ends = kind == "gold" or config.rollout.on_reward_error == "raise"
            values = await _score(
                reward, key, rows, texts, tokens_for(config, reward, texts), kind, ends, report
            )
            if values is None:
                break
            scored = [v for v in values if v is not None]
            scores[reward.name][kind] = mean = sum(scored) / len(scored) if scored else None
            if mean is not None:
                totals[kind] += config.rewards[i].weight * mean
                known_kinds.add(kind)
            if kind == "gold" and not scored:
                what = (
                    f"could score none of the {len(values)} gold answers that it was tried on; the"
                    f" first is {reprlib.repr(texts[0])} of {rows[0].where}."
                )
                unread.append(UnreadGold(key, what))
            elif kind == "gold" and len(scored) < len(values):
                at = values.index(None)
                report.warn(
                    key,
                    f"could not score {len(values) - len(scored)} of {len(values)} gold answers;"
                    f" the first is {reprlib.repr(texts[at])} of {rows[at].where}.",
                    "Their rows will be unscored in training too: repair or remove them.",
                )
    # nothing that counts was left out
    known = all(cfg.name not in UNTRIED for cfg in config.rewards if cfg.weight)
    compared = report.ok and scores and known and "gold" in known_kinds
    if compared and totals["gold"] <= totals["empty"]:
        empty = (
            f"empty completions {totals['empty']:g}"
            if "empty" in known_kinds
            else "empty completions could not be scored"
        )
        what = f"gold answers score {totals['gold']:g} on average and {empty}."
        report.warn("rewards", what, "Is the answer column what the rewards expect?")
    tried = all(cfg.name not in UNTRIED for cfg in config.rewards)
    return unread, report.ok and tried and not known_kinds


async def _stops(config: Config, rewards: Sequence[Any], rows: Sequence[Row]) -> bool:
    """Whether a run is sure to stop since no answer to any row can be scored."""
    from reinforge.build.data import total_steps
    from reinforge.loops.troubles import BAD_STEPS_IN_A_ROW

    sure = (
        config.algorithm.family == "policy_gradient"
        and config.env is None
        and config.agent is None
        and all(cfg.name in BY_THE_ROW for cfg in config.rewards)
        and total_steps(config, len(rows)) >= BAD_STEPS_IN_A_ROW
    )
    if not sure:
        return False
    for start in range(0, len(rows), AT_ONCE):
        some = rows[start : start + AT_ONCE]
        for reward in rewards:
            try:
                scores = (await reward.outcome(some, [""] * len(some))).scores
            except ReinforgeError:  # none of these has an answer: not what was looked for
                return False
            if any(score is not None for score in scores):
                return False
    return True


def _tell_unread(
    unread: Sequence[UnreadGold], rows: int, report: PlanReport, *, unscored: bool, stops: bool
) -> None:
    """`unscored`: no reward scored anything that was tried. `stops`: nor can it on any row."""
    from reinforge.loops.troubles import BAD_STEPS_IN_A_ROW

    fix = (
        "Name the column that has answers as the reward reads them (columns: {answer: solution}),"
        " repair them, or take another reward."
    )
    after = f"`train` stops after {BAD_STEPS_IN_A_ROW} steps in which no sample could be scored."
    for one in unread:
        if stops:
            more = f" No answer to any of the {rows:,} rows can be scored: {after}"
            report.refuse(one.key, one.what + more, fix)
        elif unscored:
            more = f" No reward scored any of them, or an empty completion: {after}"
            report.warn(one.key, one.what + more, fix)
        else:
            more = " Rows like these will be unscored by it in training too."
            report.warn(one.key, one.what + more, fix)


def tokens_for(config: Config, reward: Any, texts: Sequence[str]) -> list[list[int]] | None:
    """Of the answers, for a reward that asks for them."""
    if not reward.reads_ids:
        return None
    from reinforge.models.load import load_tokenizer

    tokenizer = load_tokenizer(config.model)
    return [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]


async def _score(
    reward: Any,
    key: str,
    rows: list[Row],
    texts: list[str],
    tokens: list[list[int]] | None,
    kind: str,
    ends: bool,
    report: PlanReport,
) -> list[float | None] | None:
    """The scores of all rows at once, or None after noting what was wrong. `ends`: a reward that
    raises would end the run.
    """
    try:
        values = (await reward.outcome(rows, texts, tokens)).scores
    except ReinforgeError as error:  # speaks for itself
        report.refuse(key, str(error))
        return None
    except Exception as error:  # a reward is somebody's function: whatever it raises is the finding
        row, cause = await _culprit(reward, rows, texts, tokens) or (rows[0], error)
        what = "its own gold answer" if kind == "gold" else "an empty completion"
        said = f"{raised_in_words(cause)} on {what} of {named(row)}."
        note = report.refuse if ends else report.warn
        note(key, said, "Return 0.0 for a wrong answer, None for one that cannot be scored.")
        return None
    if len(values) != len(rows) or not all(
        v is None or (isinstance(v, int | float) and math.isfinite(v)) for v in values
    ):
        report.refuse(
            key,
            f"returned {values!r} for {len(rows)} completions.",
            "Return one finite number or None for each.",
        )
        return None
    return list(values)


async def _culprit(
    reward: Any, rows: list[Row], texts: list[str], tokens: list[list[int]] | None
) -> tuple[Row, Exception] | None:
    """The first row on which a reward raises when it is asked one by one."""
    for i, (row, text) in enumerate(zip(rows, texts, strict=True)):
        try:
            await reward.outcome([row], [text], tokens and tokens[i : i + 1])
        except Exception as error:
            return row, error
    return None
