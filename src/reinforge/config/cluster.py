"""The section `cluster`: whether workers are actors of Ray, where they are, and what happens when
one is lost.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from reinforge.config.base import Count, Natural, NonNegative, Positive, Section


class RoleConfig(Section):
    """What one actor of a role asks of Ray."""

    cpus: NonNegative = Field(1.0, description="Logical CPUs of one actor; may be a fraction.")
    gpus: NonNegative | None = Field(
        None,
        description=(
            "GPUs of one actor; may be a fraction. Default: one where the cluster has GPUs. Where a"
            " role can be in the actors of another, a number gives it actors of its own."
        ),
    )

    @property
    def apart(self) -> bool:
        """Whether the role is asked to have actors of its own."""
        return self.gpus is not None


class FrozenRoleConfig(RoleConfig):
    """What the actors of a model that is never trained ask of Ray."""

    ranks: Count = Field(
        1, description="Actors over which each such model is cut (FSDP2); 1: it is whole in one."
    )


class ClusterConfig(Section):
    """Where the parts of a run are. The loop is in one process either way."""

    kind: Literal["local", "ray"] = Field(
        "local",
        description="local: this process, and the ranks that it starts. ray: actors of Ray.",
    )
    address: str | None = Field(
        None,
        description=(
            "ray: of a running cluster (host:port, or auto). Default: RAY_ADDRESS, or one is"
            " started for the run, and ends with it."
        ),
    )
    layout: Literal["colocated", "split"] = Field(
        "colocated",
        description=(
            "ray: colocated: the trainer's own module generates, and the critic is beside it."
            " split: engines, critic and reward models have actors and devices of their own. In"
            " both a role whose `gpus` is a number has."
        ),
    )
    engines: Count = Field(1, description="ray, split: how many actors generate.")
    strategy: Literal["pack", "spread"] = Field(
        "pack", description="ray: keep the actors on few machines, or spread them over many."
    )
    trainer: RoleConfig = Field(RoleConfig(), description="ray: of each rank of the trainer.")
    engine: RoleConfig = Field(RoleConfig(), description="ray, split: of each engine.")
    critic: RoleConfig = Field(RoleConfig(), description="ray: of each rank of the critic.")
    reward: RoleConfig = Field(RoleConfig(), description="ray: of each reward model.")
    reference: FrozenRoleConfig = Field(
        FrozenRoleConfig(),
        description=(
            "ray: of a frozen reference with actors of its own, where `gpus` is a number (0: on"
            " CPUs). Default: it is in the policy's actors."
        ),
    )
    teacher: FrozenRoleConfig = Field(
        FrozenRoleConfig(),
        description=(
            "ray: of each teacher with actors of its own, where `gpus` is a number (0: on CPUs)."
            " Default: teachers are in the policy's actors."
        ),
    )
    heartbeat: Positive = Field(
        30.0,
        description=(
            "ray: seconds in which an actor must answer, busy or not, before it counts as hung."
        ),
    )
    timeout: Positive = Field(
        3600.0,
        description=(
            "ray: the longest that one piece of work may take before the actor counts as hung."
        ),
    )
    start: Positive = Field(
        600.0, description="ray: seconds for actors to be placed and models to be loaded."
    )
    restarts: Natural = Field(
        3,
        description=(
            "ray: how often in a row, without a step in between, lost actors are made again."
        ),
    )
    spares: Natural = Field(
        0,
        description=(
            "ray: actors without GPUs that wait beside each one, with everything imported, to take"
            " its place when it is lost."
        ),
    )
    snapshot: Natural = Field(
        0,
        description=(
            "ray: steps between snapshots of the run in the object store, to go on from after a"
            " loss. 0: from the newest checkpoint."
        ),
    )
    object_store_gib: Positive | None = Field(
        None,
        description="ray: memory of the object store of a cluster that is started for the run.",
    )

    @model_validator(mode="after")
    def _useful(self) -> ClusterConfig:
        if self.kind == "local" and (
            odd := [
                name
                for name in sorted(self.model_fields_set - {"kind"})
                if getattr(self, name) != _default(name)
            ]
        ):
            raise ValueError(
                f"{odd[0]}: only actors of Ray have it; set cluster.kind=ray, or leave it out"
            )
        if self.layout == "colocated" and self.engines > 1:
            raise ValueError(
                "engines: in a colocated layout the trainer generates; set cluster.layout=split, or"
                " leave it out"
            )
        if self.layout == "colocated" and self.engine != RoleConfig():
            raise ValueError(
                "engine: in a colocated layout the trainer generates; set cluster.layout=split, or"
                " leave it out"
            )
        for name in ("reference", "teacher"):
            role: FrozenRoleConfig = getattr(self, name)
            if role != FrozenRoleConfig() and not role.apart:
                raise ValueError(
                    f"{name}: without gpus it is in the policy's actors; set cluster.{name}.gpus"
                    " (0: on CPUs), or leave the rest out"
                )
        return self


def _default(name: str) -> object:
    return ClusterConfig.model_fields[name].get_default()
