"""Rollouts on disk: what a run trained on, step by step, and a run that trains on it again.

So the training half of a run can be tuned without generating, and `reinforge runs replay --change`
sees one step with other settings on the same answers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from reinforge.core.backend import State
from reinforge.core.errors import InputError
from reinforge.core.sample import Group, Row, Sample
from reinforge.rollout.buffer import RolloutBuffer
from reinforge.rollout.group_state import groups_from_state, groups_to_state
from reinforge.rollout.scoring import RewardScorer
from reinforge.rollout.source import GroupSource, RolloutBatch

FOLDER = "rollouts"
KINDS = ("groups", "discarded", "replayed", "stale")


class KeptRollouts:
    """The rollouts of a run's steps, one file each: run_dir/rollouts/step-00000012.safetensors.
    With `run.keep_rollouts` the loop writes them; a `KeptRolloutBuffer` reads them.
    """

    def __init__(self, run_dir: Path):
        self.folder = run_dir / FOLDER

    def _path(self, number: int) -> Path:
        return self.folder / f"step-{number:08d}.safetensors"

    def keeps(self, number: int) -> bool:
        """Whether those of step `number` (from 1) are there."""
        return self._path(number).exists()

    def write(self, number: int, batch: RolloutBatch, taken: int) -> None:
        """Those of step `number` (from 1). `taken`: rows that the cursor had given out then."""
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, Tensor] = {}
        meta: dict[str, Any] = {
            "taken": taken,
            "rounds": batch.rounds,
            "cancelled": batch.cancelled,
            "report": batch.report,
        }
        for kind in KINDS:
            saved = groups_to_state(getattr(batch, kind))
            meta[kind] = saved.meta
            own = saved.tensors.items()
            tensors |= {f"{kind}/{name}": tensor.contiguous().clone() for name, tensor in own}
        path = self._path(number)
        part = path.with_suffix(".part")
        save_file(tensors, part, metadata={"meta": json.dumps(meta)})
        os.replace(part, path)

    def samples(self, number: int) -> dict[str, list[Sample]] | None:
        """What step `number` trained on, by group; None where it is not kept."""
        if not self.keeps(number):
            return None
        batch, _ = self.read(number, None)
        return {group.samples[0].group: group.samples for group in batch.trained if group.samples}

    def read(self, number: int, rows: Sequence[Row] | None) -> tuple[RolloutBatch, int]:
        """Those of step `number`, and how many rows the cursor had given out. Without `rows` each
        has its id alone.
        """
        path = self._path(number)
        if not path.exists():
            there = sorted(self.folder.glob("step-*.safetensors"))
            raise InputError(
                f"the rollouts of step {number} are not kept in {self.folder}"
                f" ({len(there)} steps are).",
                where="rollout.kept",
                fix="Ask for fewer train.steps, or give a run with run.keep_rollouts: true.",
            )
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            meta = json.loads(file.metadata()["meta"])
        named = {group["row"] for kind in KINDS for group in meta[kind]["groups"]}
        by_id = {row.id: row for row in ([Row(n, "") for n in named] if rows is None else rows)}
        kinds = {}
        for kind in KINDS:
            own = {
                name.removeprefix(f"{kind}/"): tensor
                for name, tensor in tensors.items()
                if name.startswith(f"{kind}/")
            }
            kinds[kind] = groups_from_state(State(own, meta[kind]), by_id, str(path.name))
        batch = RolloutBatch(
            kinds["groups"],
            discarded=kinds["discarded"],
            replayed=kinds["replayed"],
            stale=kinds["stale"],
            rounds=meta["rounds"],
            cancelled=meta["cancelled"],
            report=dict(meta["report"]),
        )
        return batch, meta["taken"]


class KeptRolloutBuffer(RolloutBuffer):
    """Hands over rollouts that another run kept, instead of generating: step n of this run trains
    on those of its step n. The builders make it where `rollout.kept` names a run.

    `scorer`: its rewards are other ones, which are asked about the same answers; None: the rewards
    that were kept count.
    """

    def __init__(self, source: GroupSource, kept: KeptRollouts, scorer: RewardScorer | None):
        super().__init__(source)
        self.kept = kept
        self.scorer = scorer

    async def advance(self, step: int, version: int) -> None:
        """Nothing is generated."""

    async def take(self, step: int) -> RolloutBatch:
        batch, taken = self.kept.read(step + 1, self.source.rows)
        cursor = self.source.cursor
        cursor.load({**cursor.state(), "taken": taken})
        if self.scorer is not None:
            for kind in KINDS:
                groups = [await self._scored(group) for group in getattr(batch, kind)]
                setattr(batch, kind, groups)
        return batch

    async def _scored(self, group: Group) -> Group:
        """The same answers with rewards that are asked now."""
        assert self.scorer is not None
        if len(group.texts) != len(group.samples) or any(
            sample.token_rewards is not None or sample.baseline is not None
            for sample in group.samples
        ):
            raise InputError(
                "rewards of single tokens and of greedy baselines cannot be computed again.",
                where="rewards",
                fix="Leave the rewards as they were, and change other settings.",
            )
        tokens = [sample.tokens[sample.trained].tolist() for sample in group.samples]
        name = group.samples[0].group
        rows = [group.row] * len(tokens)
        scores = await self.scorer.score(rows, name, tokens, group.texts)
        samples = []
        for i, sample in enumerate(group.samples):
            components = {component: values[i] for component, values in scores.items()}
            rewards, reward = self.scorer.total(components, len(tokens[i]))
            samples.append(sample.with_(rewards=rewards, reward=reward))
        faults, why = self.scorer.faults(name)
        return replace(group, samples=samples, faults=faults, why=why)
