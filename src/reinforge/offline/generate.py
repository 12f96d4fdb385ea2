"""Batch generation to JSONL, from the native engine or a server, with labels and preference pairs
where they are wanted.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reinforge.build.constraints import rollout_constraint
from reinforge.build.saved_model import config_of, is_run
from reinforge.config.data import DataConfig
from reinforge.config.schema import Config
from reinforge.core.constraint import Constraint
from reinforge.core.engine import Sampling
from reinforge.core.errors import InputError
from reinforge.data.sources import hold_out, load_rows
from reinforge.engines.openai import OpenAIServer
from reinforge.offline.complete_rows import complete_rows
from reinforge.offline.completion_sources import open_source
from reinforge.offline.journal import GenerationJournal, write_whole
from reinforge.offline.labels import LabelOptions, make_pairs, open_labeller

DEFAULT_NEW_TOKENS = 256


async def generate_file(
    model_name: str,
    prompts: Path | str | None,
    out: Path,
    *,
    n: int,
    temperature: float,
    top_p: float,
    max_new_tokens: int | None,
    seed: int,
    adapter: str | None,
    config: Config | None = None,
    server: OpenAIServer | None = None,
    labelling: LabelOptions | None = None,
    raw: bool = False,
    logprobs: bool = True,
    token_ids: bool = False,
    constraint: Constraint | None = None,
    fixed: Mapping[str, Any] | None = None,
) -> int:
    """One JSON line per completion, in the order of the rows.

    `fixed`: columns with the same value in every row, as data.fixed: attributes that are wanted.
    `constraint`: what every answer must match; default: the configuration's or run's
    rollout.structured. The file appears whole or not at all; what was answered before a kill is
    kept beside it and not asked again.
    """
    how = labelling or LabelOptions()
    if config is None and is_run(Path(model_name)):
        config = config_of(Path(model_name))[0]
    data = data_of(prompts, config)
    data = data.model_copy(update={"fixed": {**data.fixed, **(fixed or {})}})
    rows = load_rows(data)
    if prompts is None:
        rows = hold_out(data, rows)[0]  # what comes out may be trained on
    longest = max_new_tokens or (
        config.rollout.max_new_tokens if config is not None else DEFAULT_NEW_TOKENS
    )
    if constraint is None and config is not None:
        constraint = rollout_constraint(config)
    sampling = Sampling(longest, temperature, top_p=top_p, constraint=constraint)
    store = GenerationJournal(out, n)
    async with (
        open_source(
            model_name,
            data,
            config=config,
            adapter=adapter,
            server=server,
            raw=raw,
            logprobs=logprobs,
            token_ids=token_ids,
        ) as source,
        open_labeller(how) as labeller,
    ):
        lines = await complete_rows(rows, source, sampling, store, seed=seed, labeller=labeller)
    if how.pairs is not None:
        write_whole(pairs_path(out), make_pairs(lines, how.pairs, how.margin))
    return len(lines)


def pairs_path(out: Path) -> Path:
    """`answers.jsonl` -> `answers.pairs.jsonl`."""
    return out.with_name(f"{out.stem}.pairs{out.suffix or '.jsonl'}")


def data_of(prompts: Path | str | None, config: Config | None) -> DataConfig:
    """The prompts of a file (or source) are rendered as the config's own; what chose its rows is
    left out. None: those of the config.
    """
    if prompts is None:
        if config is None:
            raise InputError(
                "which prompts?",
                where="--data",
                fix=(
                    "Give a .jsonl file with a `prompt` per line, or a configuration that has data."
                ),
            )
        return config.data
    data = config.data if config is not None else DataConfig(source=str(prompts))
    return data.model_copy(
        update={"source": str(prompts), "options": {}, "where": {}, "limit": None}
    )
