"""What rollouts need beside the policy: the data's answers (gkd, self-play), and an opponent to
sample from.
"""

from __future__ import annotations

from collections.abc import Sequence

from reinforge.backends.local import LocalBackend
from reinforge.build.workshop import Workshop
from reinforge.core.engine import Engine
from reinforge.core.env import Rollout
from reinforge.core.errors import InputError
from reinforge.core.sample import Row, Sample
from reinforge.engines.native import NativeEngine
from reinforge.engines.paired import Both
from reinforge.models.load import stop_tokens
from reinforge.models.mixture import Mixture
from reinforge.rollout.players.demonstrations import DemonstrationRollout
from reinforge.rollout.players.opponent import OpponentRollout
from reinforge.rollout.players.single_turn import SingleTurn


def joined(
    shop: Workshop, rows: Sequence[Row], rollout: Rollout, backend: object
) -> tuple[Rollout, Engine]:
    """The rollout with everybody whose answers count, and the engine that the loop updates."""
    algorithm = shop.algorithm
    share = algorithm.share
    if share is not None:
        return (
            DemonstrationRollout(
                rollout, answers_of(shop, rows) if share < 1 else {}, share, shop.cfg.run.seed
            ),
            shop.engine,
        )
    if algorithm.opponent is None:
        return rollout, shop.engine
    assert isinstance(backend, LocalBackend), "the rules of the config refuse an opponent elsewhere"
    assert isinstance(rollout, SingleTurn) and backend.reference is not None
    cfg = shop.cfg.rollout
    opponent = NativeEngine(
        Mixture(shop.policy, backend.reference.active, algorithm.opponent),
        stop_tokens={*stop_tokens(shop.policy), *shop.renderer.stop_tokens},
        max_batch=cfg.max_batch,
        kv_gib=cfg.kv_gib,
        context=shop.context,
        longest=shop.longest,
    )
    answers = answers_of(shop, rows) if algorithm.given else None
    return OpponentRollout(rollout, opponent, answers), Both(shop.engine, opponent)


def answers_of(shop: Workshop, rows: Sequence[Row]) -> dict[str, Sample]:
    """The data's own answers by row id."""
    found = {row.id: shop.renderer.training_row(row) for row in rows}
    for name, sample in found.items():
        if len(sample.tokens) > shop.context:
            raise InputError(
                f"has {len(sample.tokens)} tokens with its answer, more than the model's context of"
                f" {shop.context}.",
                where=f"row {name}",
                fix="Remove the row, or shorten it.",
            )
    return found
