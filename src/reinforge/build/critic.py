"""The section `critic` becomes a critic: a model of its own with its optimizer, or a value head on
the policy.
"""

from __future__ import annotations

from reinforge.algorithms.losses.value import ValueLoss
from reinforge.build.critic_model import check_same_tokens
from reinforge.build.factories import Factories
from reinforge.build.inputs import ModelInputs, RunInputs
from reinforge.config.critic import CriticConfig
from reinforge.config.train import TrainConfig
from reinforge.loops.critic import Critic
from reinforge.models.causal import CausalModel


def make_critic(
    inputs: RunInputs,
    models: ModelInputs,
    policy: CausalModel,
    factories: Factories,
    updates: int,
) -> Critic | None:
    """The critic, to be trained for `updates` optimizer steps.

    None where the run has none, or where it is a value head: that becomes part of the policy, and
    its loss is part of the algorithm's.
    """
    critic = inputs.cfg.critic
    if critic is None:
        return None
    if critic.shared:
        policy.add_value_head()
        return None
    check_same_tokens(inputs.cfg, inputs.tokenizer, policy)
    train = critic_training(inputs.cfg.train, critic)
    backend = factories.make_critic_backend(models, policy, train, updates)
    return Critic(backend, ValueLoss(critic.clip), critic.warmup)


def critic_training(train: TrainConfig, critic: CriticConfig) -> TrainConfig:
    """The policy's section `train` with what the critic does differently."""
    rate = train.learning_rate if critic.learning_rate is None else critic.learning_rate
    return train.model_copy(
        update={
            "learning_rate": rate,
            "schedule": critic.schedule or train.schedule,
            "optimizer": critic.optimizer or train.optimizer,
            "ema": None,
            "router_aux_loss": None,
            "router_z_loss": 0.0,
            "router_bias_rate": 0.0,
            "router_replay": "off",
            "precision": "model",
        }
    )
