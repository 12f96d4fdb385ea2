"""The native engine with weights of its own, in the process that trains: it generates while the
trainer's are being changed (`rollout.overlap`).

Its module is a second one of the same kind. What is trained has a copy there, and is copied again
after every update; what stays as it is is the trainer's own, so that an adapter's base is there
once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from reinforge.core.engine import Completion, GenerationStats, Sampling, StreamingEngine
from reinforge.core.weights import Weights
from reinforge.engines.native.engine import NativeEngine, join_weights
from reinforge.models.causal import CausalModel
from reinforge.models.fused_linear import share_joined
from reinforge.models.router_bias import biases_of


class WeightCopy:
    """Where a second model of the same kind keeps what a trainer changes, beside where the trainer
    has it. `build/engines.py` makes it, `EngineBeside` copies after every update.
    """

    def __init__(self, copy: CausalModel, model: CausalModel):
        """Gives the copy the parameters of the model that stay as they are."""
        self.copy = copy.module
        self.module = model.module
        join_weights(model)  # as the engine of a run without a copy does
        theirs = dict(self.module.named_parameters(remove_duplicate=False))
        moved = {name for name, _ in biases_of(self.module)}  # though no gradient reaches them
        for prefix, part in self.copy.named_modules(remove_duplicate=False):
            for name, own in part._parameters.items():
                path = f"{prefix}.{name}" if prefix else name
                if own is None or path not in theirs or path in moved:
                    continue
                if not theirs[path].requires_grad:
                    part._parameters[name] = theirs[path]
        share_joined(self.copy, self.module)
        self.refresh()

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Where the copy has something of its own, and what the trainer has there."""
        theirs = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        ours = {**dict(self.copy.named_parameters()), **dict(self.copy.named_buffers())}
        return [(own, theirs[name]) for name, own in ours.items() if own is not theirs[name]]

    @torch.no_grad()
    def refresh(self) -> None:
        """The copy has the values that the module has now."""
        for own, trained in self._pairs():
            own.copy_(trained)


class EngineBeside:
    """An `Engine` that generates while the policy is trained: a native engine on a copy of the
    weights, on a GPU with a stream of its own. `build/engines.py` makes it.

    Whoever trains waits for tokens before it gives new weights: then an answer has one version.
    """

    def __init__(self, engine: NativeEngine, weights: WeightCopy):
        self.engine = engine
        self.weights = weights

    @property
    def stats(self) -> GenerationStats:
        return self.engine.stats

    @property
    def measured(self) -> Mapping[str, float]:
        return self.engine.measured

    @property
    def streaming(self) -> StreamingEngine:
        return self.engine

    async def generate(
        self, tokens: Sequence[int], params: Sampling, *, key: int, n: int = 1
    ) -> list[Completion]:
        return await self.engine.generate(tokens, params, key=key, n=n)

    async def update(self, weights: Weights, version: int) -> None:
        assert weights.kind == "shared" and weights.module is self.weights.module
        stream = self.engine.stream
        if stream is None:
            self.weights.refresh()
        else:
            trains = torch.cuda.current_stream(stream.device)
            stream.wait_stream(trains)  # for the update
            with torch.cuda.stream(stream):
                self.weights.refresh()
            trains.wait_stream(stream)  # before it changes them again
        await self.engine.update(Weights("shared", module=self.weights.copy), version)

    async def sleep(self) -> None:
        """It has its memory as long as the run goes on."""

    def state(self) -> dict[str, int]:
        return self.engine.state()

    def load(self, state: dict[str, int]) -> None:
        self.engine.load(state)

    def close(self) -> None:
        self.engine.close()
