"""What rollouts need beside the policy: the data's answers (gkd, self-play), and an opponent to
sample from.
"""

from __future__ import annotations

from collections.abc import Sequence

from reinforge.backends.local import LocalBackend
from reinforge.build.engines import device_share
from reinforge.build.inputs import ModelInputs, RunInputs
from reinforge.core.backend import Backend
from reinforge.core.engine import Engine
from reinforge.core.env import Rollout
from reinforge.core.errors import InputError
from reinforge.core.sample import Row, Sample
from reinforge.engines.native import NativeEngine
from reinforge.engines.with_opponent import EngineWithOpponent
from reinforge.models.causal import CausalModel
from reinforge.models.load import stop_tokens
from reinforge.models.mixture import ModelMixture
from reinforge.rollout.players.demonstrations import DemonstrationRollout
from reinforge.rollout.players.opponent import OpponentRollout
from reinforge.rollout.players.single_turn import SingleTurn


def add_demonstrations(inputs: RunInputs, rows: Sequence[Row], rollout: Rollout) -> Rollout:
    """Where the algorithm samples only a share of the answers (gkd), the others are the data's."""
    share = inputs.algorithm.share
    if share is None:
        return rollout
    answers = answers_of(inputs, rows) if share < 1 else {}
    return DemonstrationRollout(rollout, answers, share, inputs.cfg.run.seed)


def add_opponent(
    inputs: RunInputs,
    models: ModelInputs,
    rows: Sequence[Row],
    rollout: Rollout,
    engine: Engine,
    policy: CausalModel,
    backend: Backend,
) -> tuple[Rollout, Engine]:
    """The rollout with an opponent, where the algorithm has one, and the engine that the loop sends
    new weights to: the policy's, or with the opponent's.
    """
    algorithm = inputs.algorithm
    if algorithm.opponent is None:
        return rollout, engine
    assert isinstance(backend, LocalBackend), "the rules of the config refuse an opponent elsewhere"
    assert isinstance(rollout, SingleTurn) and backend.reference is not None
    cfg = inputs.cfg.rollout
    opponent = NativeEngine(
        ModelMixture(policy, backend.reference.active, algorithm.opponent),
        stop_tokens={*stop_tokens(policy), *models.stop_tokens},
        max_batch=cfg.max_batch,
        kv_gib=cfg.kv_gib,
        context=models.context,
        longest=models.longest,
        share=device_share(models, policy),
    )
    answers = answers_of(inputs, rows) if algorithm.given else None
    return OpponentRollout(rollout, opponent, answers), EngineWithOpponent(engine, opponent)


def answers_of(inputs: RunInputs, rows: Sequence[Row]) -> dict[str, Sample]:
    """The data's own answers by row id."""
    found = {row.id: inputs.renderer.training_row(row) for row in rows}
    for name, sample in found.items():
        if len(sample.tokens) > inputs.context:
            raise InputError(
                f"has {len(sample.tokens)} tokens with its answer, more than the model's context of"
                f" {inputs.context}.",
                where=f"row {name}",
                fix="Remove the row, or shorten it.",
            )
    return found
