"""What training does about the experts of a mixture: it sees where tokens go, keeps the load even
where a loss asks for it, and sends tokens where they went when they were sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from reinforge.config.train import TrainConfig
from reinforge.core.batch import Batch
from reinforge.core.metrics import LossMetrics
from reinforge.core.routes import OPEN, wide
from reinforge.models.causal import CausalModel
from reinforge.models.load_balance import RouterLoss
from reinforge.models.packed import PackedModel
from reinforge.models.router_bias import RouterBias
from reinforge.models.routing import Replay, Routers, differs

DISAGREEMENT = "experts/disagreement"
DISAGREEMENT_LEFT = "experts/disagreement_left"


@dataclass(slots=True)
class SeenExperts:
    """What one forward of a pack said of its experts: `TrainedExperts.seen` fills it in."""

    metrics: LossMetrics = field(default_factory=dict)
    loss: Tensor | float = 0.0  # what the routers add to that of the pack


class TrainedExperts:
    """The experts of the model that a backend trains. One that has none does nothing here."""

    def __init__(self, model: PackedModel, cfg: TrainConfig):
        self.model = model
        self.replay = Replay(cfg.router_replay)
        # a critic's and a reward model's tokens go where they will
        self.routers = Routers.of(model) if isinstance(model, CausalModel) else None
        self.loss = RouterLoss.of(model, self.routers, cfg.router_aux_loss, cfg.router_z_loss)
        self.bias = RouterBias.of(model, self.routers, cfg.router_bias_rate)

    def load_biases(self, saved: Mapping[str, Tensor]) -> None:
        """From a state; those of a run that this one branched off stay, whoever moves them."""
        if self.bias is None:
            self.bias = RouterBias.kept(self.model, self.routers, saved)
        if self.bias is not None:
            self.bias.load(saved)

    def follow(self, batch: Batch | None, here: slice = slice(None)) -> None:
        """The next forwards and their backward passes are of this pack, of which `here` is computed
        in this process: its tokens go where they went when they were sampled, if that is wanted and
        known. None: they go where they will.
        """
        if self.routers is None:
            return
        known = None
        if batch is not None and self.replay is not Replay.OFF and batch.routes is not None:
            known = wide(batch.routes[here].to(self.model.device))
        self.routers.give(known, self.replay)

    @contextmanager
    def following(self, batch: Batch, here: slice = slice(None)) -> Iterator[None]:
        """The same until the end of the block."""
        self.follow(batch, here)
        try:
            yield
        finally:
            self.follow(None)

    @contextmanager
    def seen(self, share: float, *, counts: bool = True) -> Iterator[SeenExperts]:
        """What the forward inside of the block did, known when it ends: of a pack that is this
        share of its batch. `counts`: whether it is trained; a rank with nothing to do computes a
        pack of another.
        """
        found = SeenExperts()
        if self.routers is None:
            yield found
            return
        with self.routers.watched():
            yield found
            if self.loss is not None:
                for name, (coefficient, value) in self.loss.terms().items():
                    found.metrics[name] = (value * share).detach()
                    found.loss = found.loss + coefficient * value * share
            if self.bias is not None and counts:
                self.bias.count(self.routers)
            if self.routers.seen:
                found.metrics |= self._loads(self.routers, share)
                found.metrics |= self._disagreement(self.routers, share)

    def _loads(self, routers: Routers, share: float) -> LossMetrics:
        """[E] of every block: the shares of all assignments."""
        return {
            f"experts/{i}/load": counts / counts.sum().clamp(min=1) * share
            for i, counts in enumerate(choice.counts() for choice in routers.choices)
        }

    def _disagreement(self, routers: Routers, share: float) -> LossMetrics:
        """Of the choices that are known: how many would have been of other experts, and how many
        were, replay or not.
        """
        given = routers.given()
        if given is None:
            return {}
        known = (given != OPEN).all(-1)
        all_known = known.sum().clamp(min=1)

        def of(chosen: Tensor) -> Tensor:
            return (differs(given, chosen) & known).sum() / all_known * share

        return {DISAGREEMENT: of(routers.own()), DISAGREEMENT_LEFT: of(routers.taken())}
