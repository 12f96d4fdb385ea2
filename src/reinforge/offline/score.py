"""Completions that somebody has, scored by rewards, without a run; and a file of them, labelled."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from reinforge.build.saved_model import config_of, is_run
from reinforge.build.serving import open_reward
from reinforge.config.data import DataConfig
from reinforge.config.schema import Config
from reinforge.core.aio import run_sync, together
from reinforge.core.errors import InputError
from reinforge.core.row import Row
from reinforge.data.sources import hold_out, load_rows, rows_from
from reinforge.models.load import pick_device
from reinforge.offline.generate import data_of
from reinforge.offline.journal import Line, write_whole
from reinforge.rewards.build import GivenRewards, build_rewards, describe_rewards
from reinforge.rewards.function import FunctionReward, check_columns
from reinforge.rollout.scoring import RewardScorer

COMPLETION = "completion"
AT_ONCE = 256  # rows that a reward is asked about in one call


def score_rows(
    rewards: GivenRewards, data: str | Path | Iterable[Any], completions: Sequence[str] | None
) -> list[dict[str, float | None]]:
    """See `reinforge.score`."""
    if isinstance(data, str | Path):
        rows = load_rows(DataConfig(source=str(data)))
    else:
        rows = rows_from(data, name="data")
    texts = _texts(rows) if completions is None else list(completions)
    if len(texts) != len(rows) or not all(isinstance(text, str) for text in texts):
        raise InputError(
            f"{len(rows)} rows, and not one completion for each.",
            where="completions",
            fix=f"Give a list of texts, or rows with the column `{COMPLETION}`.",
        )
    described, functions = describe_rewards(rewards)
    built = build_rewards(described, functions, str(pick_device("auto")))
    check_columns(built, rows)
    scored = []
    for attributes, components, total in _asked(built, rows, texts):
        scored.append({**attributes, **components, "reward": total})
    return scored


def score_file(
    model_name: str,
    source: Path | str | None,
    out: Path,
    *,
    config: Config | None = None,
    weights: Mapping[str, float] | None = None,
) -> list[Line]:
    """The rows of a source with what a reward model (a directory, a hub id or a run), or the
    rewards of `config`, say of their completions, written to `out`: a column for each attribute,
    and `reward` and `rewards` where there is a total. Returns what was added to each row.
    """
    rewards: list[FunctionReward]
    if config is not None:
        rewards = build_rewards(config.rewards, device=config.model.device)
    else:
        reward = open_reward(model_name, weights)
        rewards = [FunctionReward("model", reward, pure=True)]
        if is_run(Path(model_name)):
            config = config_of(Path(model_name))[0]
    data = data_of(source, config)
    rows = load_rows(data)
    if source is None:
        rows = hold_out(data, rows)[0]  # what comes out may be trained on
    texts = _texts(rows)
    for row, text in zip(rows, texts, strict=True):
        if not isinstance(text, str):
            raise InputError(
                "has no completion to score",
                where=row.where,
                fix=f"Name it with data.columns: {{{COMPLETION}: <their name>}}.",
            )
    check_columns(rewards, rows)
    labels: list[Line] = []
    lines: list[Line] = []
    said = _asked(rewards, rows, texts)
    for row, text, (attributes, components, total) in zip(rows, texts, said, strict=True):
        label: Line = dict(attributes)
        if total is not None or not attributes:
            label |= {"rewards": components, "reward": total}
        columns = json.loads(json.dumps(dict(row.columns), default=str))
        labels.append(label)
        lines.append({"id": row.id, "prompt": row.prompt, **columns, COMPLETION: text, **label})
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, lines)
    return labels


def _texts(rows: Sequence[Row]) -> list[Any]:
    """The completion of each row: its column, or the last turn of its conversation."""
    return [_text(row) for row in rows]


def _text(row: Row) -> Any:
    if row.columns.get(COMPLETION) is not None:
        return row.columns[COMPLETION]
    messages = row.columns.get("messages")
    if messages and messages[-1]["role"] == "assistant":
        return messages[-1].get("content")
    return None


def _asked(
    rewards: Sequence[FunctionReward], rows: Sequence[Row], texts: Sequence[str]
) -> Iterator[tuple[dict[str, float], dict[str, float | None], float | None]]:
    """For each completion: what attribute models say, the components, and their total."""
    scorer = RewardScorer(rewards)
    for begin in range(0, len(rows), AT_ONCE):
        part = rows[begin : begin + AT_ONCE]
        said = texts[begin : begin + AT_ONCE]
        outcomes = run_sync(together([reward.outcome(part, said) for reward in rewards]))
        for i in range(len(part)):
            attributes: dict[str, float] = {}
            for outcome in outcomes:
                attributes |= outcome.attributes[i] if outcome.attributes else {}
            scores = [outcome.scores[i] for outcome in outcomes]
            components = dict(zip([reward.name for reward in rewards], scores, strict=True))
            counted, total = scorer.total(components, 0)
            yield attributes, counted, total
