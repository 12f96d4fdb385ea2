"""A few samples of one step as a table: prompt, completion, reward and its components, advantage.

`Recorder.samples` makes it from what it writes to samples.jsonl; every tracker shows it in its own
way (watch/trackers.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reinforge.watch.transcripts import cut

TEXT = 2000  # characters of a prompt or completion
TRAINING = "samples"  # the name of a table of samples that were trained on
EVALUATION = "eval/samples"


@dataclass(frozen=True, slots=True)
class SampleTable:
    """The samples of one step for people. The recorder makes it and hands it to every tracker.

    `name` is the key in the tracker; `records` are lines of samples.jsonl.

    >>> told = {"prompt": "2+2=", "completion": "4", "reward": 0.5, "stop": "eos", "length": 1}
    >>> table = SampleTable("samples", 3, [{**told, "components": {"exact": 1.0}}])
    >>> table.columns
    ['step', 'prompt', 'completion', 'reward', 'reward/exact', 'advantage', 'stop', 'length']
    >>> table.rows
    [[3, '2+2=', '4', 0.5, 1.0, None, 'eos', 1]]
    """

    name: str
    step: int
    records: Sequence[Mapping[str, Any]]

    @property
    def components(self) -> list[str]:
        """The components of the reward that any of the samples has."""
        found = [name for record in self.records for name in record.get("components") or {}]
        return list(dict.fromkeys(found))

    @property
    def columns(self) -> list[str]:
        parts = [f"reward/{name}" for name in self.components]
        return ["step", "prompt", "completion", "reward", *parts, "advantage", "stop", "length"]

    @property
    def rows(self) -> list[list[Any]]:
        return [self._row(record) for record in self.records]

    def _row(self, record: Mapping[str, Any]) -> list[Any]:
        components = record.get("components") or {}
        return [
            self.step,
            cut(str(record["prompt"]), TEXT),
            cut(str(record["completion"]), TEXT),
            _number(record["reward"]),
            *(_number(components.get(name)) for name in self.components),
            _number(_advantage(record)),
            record["stop"],
            record["length"],
        ]

    def markdown(self) -> str:
        """What models and data wrote is code there: nothing in it is markup."""
        lines = [self.columns, ["---"] * len(self.columns), *map(_marked, self.rows)]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _advantage(record: Mapping[str, Any]) -> Any:
    """One number for the answer: the mean where its tokens have different ones. None where the
    sample was not trained on, or what training did is not recorded (run.log.groups).
    """
    found = (record.get("training") or {}).get("advantage")
    return found["mean"] if isinstance(found, Mapping) else found


def _number(value: Any) -> float | None:
    """A column of numbers has nothing else: NaN, which is text in samples.jsonl, is left out."""
    return value if isinstance(value, int | float) else None


def _marked(row: Sequence[Any]) -> list[str]:
    return [_cell(value) for value in row]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    text = str(value).replace("`", "'").replace("|", "\\|").replace("\n", " ⏎ ")
    return f"`{text}`" if isinstance(value, str) and text else text
