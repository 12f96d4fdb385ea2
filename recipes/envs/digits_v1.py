"""A verifiers taskset for recipes/envs/verifiers.yaml: write a digit."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["DigitsTaskset"]


class DigitData(vf.TaskData):
    answer: str


class DigitTask(vf.Task[DigitData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)


class DigitsTaskset(vf.Taskset[DigitTask]):
    def load(self) -> Iterator[DigitTask]:
        for i in range(10):
            yield DigitTask(
                DigitData(prompt=f"Write the digit {i}.", answer=str(i)), self.config.task
            )
