"""What a configuration wants of the model hub, and whether it can be had, before anything large is
imported or loaded.
"""

from __future__ import annotations

from pathlib import Path

from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.core.hub import offline, unavailable
from reinforge.data.sources import MIXTURE, PYTHON

FIX = (
    "Check the path, the spelling and the network; without a network, give the directory of a"
    " model."
)


def models_of(config: Config) -> list[tuple[str, str]]:
    """The models that a configuration names, each with its key."""
    model = config.model
    teacher = config.teacher
    places = [("model.path", model.path)]
    if model.tokenizer:
        places.append(("model.tokenizer", model.tokenizer))
    if config.critic and config.critic.path:
        places.append(("critic.path", config.critic.path))
    if teacher is not None:
        places += [(f"{key}.path", one.path) for key, one in teacher.teachers() if one.path]
    for i, reward in enumerate(config.rewards):
        path = reward.options.get("path")
        if reward.name in ("model", "process") and isinstance(path, str):
            places.append((f"rewards.{i}.options.path", path))
    return places


def not_here(config: Config) -> list[str]:
    """An error for each model that is neither on this machine nor to be had from the hub."""
    wanted = [
        (key, name) for key, name in models_of(config) if not Path(name).expanduser().exists()
    ]
    found = [(key, unavailable(name)) for key, name in wanted]
    return [str(InputError(f"{why}.", where=key, fix=FIX)) for key, why in found if why is not None]


def needs_hub(config: Config) -> bool:
    """Whether any name in the configuration is a hub id."""
    sources = [
        config.data.source,
        config.data.eval.source,
        *(item.source for item in config.data.mixture),
    ]
    hosted = [
        source
        for source in sources
        if source and ":" not in source and source not in (MIXTURE, PYTHON)
    ]
    names = [name for _, name in models_of(config)] + hosted
    return any(not Path(name).expanduser().exists() for name in names)


def go_offline_if_unreachable(config: Config) -> str | None:
    """Switches the hub libraries to their caches if the hub does not answer, and says why."""
    return offline() if needs_hub(config) else None
