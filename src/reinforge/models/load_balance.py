"""The losses of a mixture's routers: what keeps them from sending everything to a few experts, and
their logits from growing.

    balance  E sum over experts e of f_e P_e
    z        mean over tokens and blocks of (log sum over e of exp(logit_e))^2

f_e: assignments to expert e per token, P_e: the mean of the router's probability of e, both over
all tokens of a forward and all blocks together (Switch Transformer, 2101.03961, equations 4 to 6;
ST-MoE, 2202.08906, equation 5). Where the scores of experts are sigmoids, a probability is the
share of its score (DeepSeek-V3, 2412.19437, equation 18).

Legend: N tokens of a pack, L blocks of experts, E experts, k of them for a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reinforge.config.architectures import balance_of
from reinforge.core.errors import InputError
from reinforge.models.causal import CausalModel
from reinforge.models.packed import PackedModel
from reinforge.models.routing import BlockChoice, Routers

BALANCE = "train.router_aux_loss"
Z = "train.router_z_loss"


@dataclass(frozen=True)
class RouterLoss:
    """The losses of one model's routers, by their coefficients. A backend adds them to those of a
    micro-batch.
    """

    routers: Routers
    balance: float
    z: float

    @classmethod
    def of(
        cls, model: PackedModel, routers: Routers | None, balance: float | None, z: float
    ) -> RouterLoss | None:
        """`balance`: None is what the model's own config says (`output_router_logits`,
        `router_aux_loss_coef`). None comes back where there is nothing to add. A critic and a
        reward model have none, as in transformers.
        """
        asked = next((key for key, c in ((BALANCE, balance), (Z, z)) if c), None)
        if asked and (routers is None or not isinstance(model, CausalModel)):
            raise InputError(
                f"{type(model.plain).__name__} has no experts whose router could have a loss.",
                where=asked,
                fix="Leave it out, or train a mixture of experts.",
            )
        if routers is None or not isinstance(model, CausalModel):
            return None
        coefficient = balance_of(model.config.to_dict(), balance)
        if not coefficient and not z:
            return None
        if model.slices is not None:
            raise InputError(
                "the router's load is that of whole packs, and sequence parallelism cuts them.",
                where=asked or BALANCE,
                fix="Set it to 0, or train.sequence_parallel=1.",
            )
        return cls(routers, coefficient, z)

    def terms(self) -> dict[str, tuple[float, Tensor]]:
        """By the name of its metric: the coefficient and the value of each loss, of the forward
        that the routers have seen.
        """
        self._check()
        found = {}
        if self.balance:
            found["train/router_aux_loss"] = (self.balance, balance_loss(self.routers.choices))
        if self.z:
            found["train/router_z_loss"] = (self.z, z_loss(self.routers.choices))
        return found

    def _check(self) -> None:
        if any(c.taken is None or c.logits is None for c in self.routers.choices):
            raise InputError(
                f"{self.routers.model} does not say how it routes its tokens, so their load cannot"
                " be balanced.",
                where=BALANCE if self.balance else Z,
                fix="Set it to 0.",
            )


def balance_loss(choices: list[BlockChoice]) -> Tensor:
    """A number: k where the load is even. All blocks have the same number of experts."""
    shares = []
    loads = []
    for choice in choices:
        assert choice.logits is not None and choice.taken is not None
        shares.append(choice.probabilities())
        loads.append(torch.zeros_like(shares[-1]).scatter_(1, choice.taken, 1.0))
    share, load = torch.cat(shares).mean(0), torch.cat(loads).mean(0)
    return (share * load).sum() * share.shape[0]


def z_loss(choices: list[BlockChoice]) -> Tensor:
    """A number: how large the routers' logits are, all blocks together."""
    logits = torch.cat([choice.logits for choice in choices if choice.logits is not None])
    return logits.float().logsumexp(-1).square().mean()
