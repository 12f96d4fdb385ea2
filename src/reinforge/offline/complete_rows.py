"""Completions for rows, each asked for once: what a journal knows is not asked again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

from reinforge.core.engine import Sampling
from reinforge.core.errors import RequestError
from reinforge.core.row import Row
from reinforge.core.seeds import seed_of
from reinforge.offline.completion_sources import CompletionSource
from reinforge.offline.journal import REQUEST, GenerationJournal, Line, digest
from reinforge.offline.labels import Labeller

AT_ONCE = 2048  # prompts under way
FEW = 8  # rows that may be refused before any is answered


async def complete_rows(
    rows: Sequence[Row],
    source: CompletionSource,
    sampling: Sampling,
    store: GenerationJournal,
    *,
    seed: int,
    labeller: Labeller | None = None,
    progress: Callable[[int, int], None] | None = None,
    refused: dict[str, RequestError] | None = None,
) -> list[Line]:
    """`store.n` completions of every row, with labels where there is a labeller, in the order of
    the rows; they stand in the journal's file then. `progress` is told how many rows are done, and
    how many there are.

    `refused` gets the ids of rows that the source cannot complete, which are left out; without it,
    and where the first ones are all refused, that is an error.
    """
    n = store.n
    requests = [
        digest(
            source.identity,
            asdict(sampling),
            seed,
            n,
            row.id,
            row.prompt,
            row.columns.get("tools"),
        )
        for row in rows
    ]
    room = asyncio.Semaphore(AT_ONCE)
    done = 0

    def tell() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, len(rows))

    async def one(row: Row, request: str) -> None:
        async with room:
            lines = store.known.get(request)
            if lines is None:
                key = seed_of(seed, "generate", row.id)
                try:
                    made = await source.complete(row, sampling, key=key, n=n)
                except RequestError as error:
                    if refused is None or (not store.known and len(refused) >= FEW):
                        raise
                    refused[row.id] = error
                    tell()
                    return
                lines = [
                    {
                        "id": row.id,
                        "prompt": row.prompt,
                        **_plain(dict(row.columns)),
                        **m,
                        REQUEST: request,
                    }
                    for m in made
                ]
                store.add(lines)
            if labeller is not None and not labeller.knows(lines):
                store.add(await labeller(row, lines))
        tell()

    try:
        async with asyncio.TaskGroup() as tasks:  # the first failure cancels the others
            for row, request in zip(rows, requests, strict=True):
                tasks.create_task(one(row, request))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    left_out = refused or {}
    return store.finish(
        request for row, request in zip(rows, requests, strict=True) if row.id not in left_out
    )


def _plain(columns: dict[str, object]) -> dict[str, object]:
    return json.loads(json.dumps(columns, default=str))
