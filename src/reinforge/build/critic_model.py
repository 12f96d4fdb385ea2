"""The model of a critic: from its own checkpoint, or from the policy's."""

from __future__ import annotations

from typing import Any

from reinforge.config.model import ModelConfig
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.models.causal import CausalModel
from reinforge.models.checkpointing import checkpoint_layers
from reinforge.models.load import load_config, load_scalar, load_tokenizer
from reinforge.models.scalar import ScalarModel


def critic_section(cfg: Config) -> tuple[ModelConfig, str]:
    """The section `model` of the critic, and the key that names its checkpoint."""
    critic = cfg.critic
    assert critic is not None
    recompute = critic.gradient_checkpointing
    if recompute is None:
        recompute = cfg.model.gradient_checkpointing
    section = cfg.model.model_copy(update={"gradient_checkpointing": recompute})
    if not critic.path:
        return section, "model.path"
    own = {"path": critic.path, "revision": None, "trust_remote_code": False}
    return section.model_copy(update=own), "critic.path"


def load_critic(cfg: Config, policy: CausalModel) -> ScalarModel:
    """From its own checkpoint, or a copy of the policy's trunk as it is before training.

    Of an adapted policy the base is loaded again.
    """
    assert cfg.critic is not None
    section, where = critic_section(cfg)
    if cfg.critic.path is not None or policy.module is not policy.plain:
        on_device = section.model_copy(update={"device": str(policy.device)})
        return load_scalar(on_device, where=where, fresh=True)
    model = ScalarModel.from_causal(policy, where=where)
    model.module.requires_grad_(True)  # what is frozen is frozen in the policy (train.freeze)
    if section.gradient_checkpointing:
        checkpoint_layers(model.plain, section.gradient_checkpointing)
    else:
        model.plain.gradient_checkpointing_disable()
    return model


def check_same_tokens(cfg: Config, tokenizer: Any, policy: CausalModel) -> None:
    """Refuses a critic with a checkpoint of its own that reads other tokens than the policy."""
    assert cfg.critic is not None
    if cfg.critic.path is None:
        return
    section, where = critic_section(cfg)
    theirs = load_tokenizer(section, where).get_vocab()
    ours = tokenizer.get_vocab()
    vocabulary = load_config(section, where).get_text_config().vocab_size
    other = next((token for token, i in ours.items() if theirs.get(token) != i), None)
    if other is None and vocabulary >= policy.config.vocab_size:
        return
    example = f", e.g. {other!r} is not {ours[other]}" if other is not None else ""
    raise InputError(
        f"the critic reads the policy's tokens, and {cfg.critic.path} has other ones{example}.",
        where="critic.path",
        fix="Use a model with the same tokenizer, or leave path out.",
    )
