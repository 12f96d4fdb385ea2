"""What differs between the configuration that a run was started with and the one that is to
continue it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.core.redact import redact_settings
from reinforge.watch.runs import flatten, read_json

OVERLAP = "rollout.overlap"
# Keys, and sections that end in a dot, that say how long, where and how watched a run is, and not
# what it learns.
MAY_CHANGE = (
    "train.steps",
    "train.epochs",
    "train.tokens_per_microbatch",
    "eval.",
    "run.log.",
    "run.doctor.",
    "run.checkpoint.",
    "run.keep_rollouts",
    "run.hub.",
    "run.resume",
    "run.dir",
    "run.max_seconds",
    "rollout.kv_gib",
    "rollout.max_batch",
    "rollout.all_ranks",
    OVERLAP,
    "rollout.speculation.",
    "rollout.precision",
    "rollout.cache_precision",
    "rollout.on_reward_error",
    "model.device",
    "train.optimizer.offload",
    "train.optimizer.masters",
    "train.profile.",
    "train.backend",
    "train.ranks",
    "train.sequence_parallel",
    "train.tensor_parallel",
    "train.offload_weights",
    "train.deepspeed.",
    "cluster.",
    "rollout.engine",
    "engine.",
)
# What a state belongs to: no branch of a run can have another.
BOUND_TO_STATE = ("model.", "adapter.", "critic.", "data.")
# Of a teacher's server: where it is and how it is asked.
MAY_CHANGE_OF_SERVER = ("url", "api_key_env", "parallel", "retries", "timeout")
Changes = dict[str, list[Any]]  # dotted key: [old value, new value]


def less_room(found: Changes) -> bool:
    """Whether sizes that followed what was free of a GPU are found anew: it has more to hold."""
    return found.get(OVERLAP, [None, None])[1] is True


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Changes:
    """The dotted keys whose values differ. What is not there, or empty, is None."""
    before, after = (
        {key: value for key, value in flatten(config).items() if value not in ({}, [])}
        for config in (old, new)
    )
    return {
        key: [before.get(key), after.get(key)]
        for key in {**before, **after}
        if before.get(key) != after.get(key)
    }


def allowed(key: str, old: Any, new: Any) -> bool:
    """Whether `key` may change from `old` to `new` without making the run another one than it was
    so far.
    """
    if key == "train.tokens_per_microbatch":
        return bool(new != "auto")  # it keeps what the run had, and the record would not say so
    if key == "model.compile":
        return old is False and new == "auto"  # the same, and checkpoints say so
    *section, name = key.split(".")
    if section and section[0] == "teacher" and section[-1] == "server":
        return name in MAY_CHANGE_OF_SERVER
    return _among(key, MAY_CHANGE)


def _among(key: str, keys: Sequence[str]) -> bool:
    """Whether it is one of these keys, or in one of these sections."""
    return any(f"{key}.".startswith(one) if one.endswith(".") else key == one for one in keys)


def said_of(value: Any) -> str:
    """A value of a setting as messages about changes write it.

    >>> said_of(0.001), said_of("a"), said_of(None)
    ('0.001', "'a'", 'not set')
    """
    return "not set" if value is None else repr(value)


def check_branch(parent: Config, branch: Config) -> Changes:
    """What a branch changes of the run that it comes from; an error where the state of that run
    cannot go on with it.

    What may change when a run is continued may change here. Other settings make a branch another
    run than its parent, which is what it is for.
    """
    found = changes(parent.model_dump(mode="json"), branch.model_dump(mode="json"))
    found.pop("run.dir", None)
    refused = [
        key
        for key, (old, new) in found.items()
        if not allowed(key, old, new) and _among(key, BOUND_TO_STATE)
    ]
    if refused:
        raise InputError(
            f"weights, optimizer and data order of the run belong to its {', '.join(refused)}.",
            where=refused[0],
            fix="Begin a new run with it (`reinforge export` writes this one's model).",
        )
    return found


def check_changes(run_dir: Path, cfg: Config) -> Changes | None:
    """The harmless changes since the run was recorded; any other is an error.

    None where there is no record to compare with. Secrets are hidden in the record, so they may
    change, and functions given from Python are known by their names.
    """
    old = read_json(run_dir / "config.json")
    if not old:
        return None
    try:
        # keys that are newer than the record get their defaults
        old = redact_settings(Config.model_validate(old).model_dump(mode="json"))
    except ValidationError:
        pass  # a record of another version: compared as it stands
    found = changes(old, redact_settings(cfg.model_dump(mode="json")))
    refused = {key: values for key, values in found.items() if not allowed(key, *values)}
    if refused:
        told = ", ".join(
            f"{key} was {said_of(before)} and is {said_of(after)}"
            for key, (before, after) in refused.items()
        )
        raise InputError(
            f"the run in {run_dir} was made with another configuration: {told}.",
            where=", ".join(refused),
            fix="Use another run.dir for a new run, or restore the value to continue this one.",
        )
    return found
