"""One step of a group source, as the rollout buffer runs it."""

from __future__ import annotations

from reinforge.rollout.source import GroupSource, RolloutBatch


async def take_batch(source: GroupSource, step: int = 0, version: int = 0) -> RolloutBatch:
    """The groups of a step, gathered and committed; one that is cut can be done again."""
    before = source.cursor.state()
    try:
        result = await source.gather(step, version)
    except BaseException:
        source.cursor.load(before)
        raise
    source.commit(result, step, version)
    return result
