"""The newest boundary of a run, kept in memory beside the checkpoints on disk: for a run that
outlives the processes that train.

What is kept is what a checkpoint holds, so going on from it is a resume like any other. A restart
of this very process forgets it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from reinforge.core.backend import State


@dataclass
class MemorySnapshot:
    """The newest boundary of a run, kept in memory, for a run that outlives the processes that
    train. Whoever attempts a run again makes it; the `Checkpointer` fills it and restores from it.
    """

    every: int  # steps
    step: int = -1  # of what is kept; -1: nothing
    _state: State = field(default_factory=State)
    _extra: str = ""

    def due(self, step: int) -> bool:
        return step > 0 and step % self.every == 0 and step != self.step

    def keep(self, step: int, state: State, extra: dict[str, Any]) -> None:
        """Tensors of the backend are taken as they are: it has to give a copy.

        Those of parts may live on, and are copied.
        """
        own = {
            name: t.clone() if name.startswith("part/") else t for name, t in state.tensors.items()
        }
        for prefix, shards in state.shards.items():
            own |= {f"{prefix}{name}": tensor for name, tensor in shards.gather().items()}
        self.step = step
        self._state = State(own, json.loads(json.dumps(state.meta)))
        self._extra = json.dumps(extra)

    def load(self) -> tuple[State, dict[str, Any]]:
        return self._state, json.loads(self._extra)
