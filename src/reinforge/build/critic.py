"""The section `critic` becomes objects: a model of its own with its optimizer, or a value head on
the policy.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from reinforge.algorithms.algorithm import Algorithm
from reinforge.algorithms.losses.value import ValueLoss, WithValues
from reinforge.backends.local import LocalBackend
from reinforge.build.sharded import AnyBackend, compiles, hosted, in_pieces, on_ranks, ranks_of
from reinforge.config.critic import CriticConfig
from reinforge.config.schema import Config
from reinforge.config.train import TrainConfig
from reinforge.core.errors import InputError
from reinforge.loops.critic import Critic
from reinforge.models.causal import CausalModel
from reinforge.models.load import load_config, load_scalar, load_tokenizer
from reinforge.models.scalar import ScalarModel

COEFFICIENT = 0.5  # of a shared critic's loss, unless told otherwise


def make_critic(
    cfg: Config, algorithm: Algorithm, policy: CausalModel, updates: int
) -> tuple[Algorithm, Critic | None]:
    """The critic, to be trained for `updates` optimizer steps.

    A shared one becomes part of the policy and of the algorithm's loss.
    """
    critic = cfg.critic
    reads = "values" in algorithm.needs
    if critic is None:
        if reads:
            raise InputError(
                "the advantage needs the values of a critic.",
                where="critic",
                fix="Add `critic: {}`.",
            )
        return algorithm, None
    if not reads:
        raise InputError(
            "the advantage reads no values, so there is nothing that a critic could be for.",
            where="critic",
            fix=(
                "Remove the section; a function of your own says `function.needs ="
                " frozenset({'values'})`."
            ),
        )
    loss = ValueLoss(critic.clip)
    if critic.shared:
        policy.add_value_head()
        return (
            replace(
                algorithm, loss=WithValues(algorithm.loss, loss, critic.coefficient or COEFFICIENT)
            ),
            None,
        )
    train = cfg.train.model_copy(
        update={
            "learning_rate": (
                cfg.train.learning_rate if critic.learning_rate is None else critic.learning_rate
            ),
            "schedule": critic.schedule or cfg.train.schedule,
            "optimizer": critic.optimizer or cfg.train.optimizer,
            "ema": None,
            "router_aux_loss": None,
        }
    )
    return algorithm, Critic(_backend(cfg, critic, policy, train, updates), loss, critic.warmup)


def _backend(
    cfg: Config, critic: CriticConfig, policy: CausalModel, train: TrainConfig, updates: int
) -> AnyBackend:
    remote = cfg.cluster.kind != "local"
    if ranks_of(cfg) is None and not remote:
        return LocalBackend(_model(cfg, critic, policy), train, total_steps=updates, paired=True)
    changes, where = _changes(cfg, critic)
    if critic.path is not None:
        source = hosted(cfg.model.model_copy(update=changes))
        _same_tokens(
            critic.path,
            load_tokenizer(source, where),
            load_config(source, where).get_text_config().vocab_size,
            policy,
        )
    if remote:
        from reinforge.build.remote import remote_critic

        return remote_critic(cfg, train, updates)
    return critic_backend(cfg, critic, train, updates)


def critic_backend(
    cfg: Config, critic: CriticConfig, train: TrainConfig, updates: int
) -> AnyBackend:
    """A critic from its checkpoint: on every rank, or in this process."""
    ranks = ranks_of(cfg)
    changes, where = _changes(cfg, critic)
    loaded = cfg.model.model_copy(update=changes)
    if ranks is None:
        return LocalBackend(
            load_scalar(loaded, where=where, fresh=True), train, total_steps=updates, paired=True
        )
    make = partial(load_scalar, hosted(loaded), where=where, fresh=True)
    return on_ranks(train.backend)(
        ranks,
        make,
        train,
        compiled=compiles(cfg.model),
        sharded=in_pieces(cfg),
        total_steps=updates,
        paired=True,
    )


def _changes(cfg: Config, critic: CriticConfig) -> tuple[dict[str, Any], str]:
    """What is different from the policy's `model` section, and the key that names the critic's
    checkpoint.
    """
    recompute = (
        cfg.model.gradient_checkpointing
        if critic.gradient_checkpointing is None
        else critic.gradient_checkpointing
    )
    own = {"path": critic.path, "revision": None, "trust_remote_code": False} if critic.path else {}
    return {
        "gradient_checkpointing": recompute,
        **own,
    }, ("critic.path" if critic.path else "model.path")


def _model(cfg: Config, critic: CriticConfig, policy: CausalModel) -> ScalarModel:
    """From its own checkpoint, or a copy of the policy's trunk as it is before training.

    Of an adapted policy the base is loaded again.
    """
    changes, where = _changes(cfg, critic)
    if critic.path is not None or policy.module is not policy.plain:
        model = load_scalar(
            cfg.model.model_copy(update={**changes, "device": str(policy.device)}),
            where=where,
            fresh=True,
        )
    else:
        model = ScalarModel.from_causal(policy, where=where)
        if changes["gradient_checkpointing"]:
            model.plain.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        else:
            model.plain.gradient_checkpointing_disable()
    if critic.path is not None:
        _same_tokens(critic.path, model.tokenizer, model.config.vocab_size, policy)
    return model


def _same_tokens(path: str, tokenizer: Any, vocabulary: int, policy: CausalModel) -> None:
    theirs = tokenizer.get_vocab()
    ours = policy.tokenizer.get_vocab()
    other = next((token for token, i in ours.items() if theirs.get(token) != i), None)
    if other is not None or vocabulary < policy.config.vocab_size:
        raise InputError(
            f"the critic reads the policy's tokens, and {path} has other ones"
            + (f", e.g. {other!r} is not {ours[other]}" if other is not None else "")
            + ".",
            where="critic.path",
            fix="Use a model with the same tokenizer, or leave path out.",
        )
