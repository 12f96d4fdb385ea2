"""A connection to Ray: to a cluster that runs, or to one that is started for this run and ends with
it.

What is started here asks everybody for a token, which only this user can read, and has no
dashboard. It does not outlive this process, however that ends: Ray's own processes watch it.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reinforge.config.cluster import ClusterConfig
from reinforge.core.errors import InputError, said_by

TOKEN = "RAY_AUTH_TOKEN_PATH"
MODE = "RAY_AUTH_MODE"


def _ask_for_tokens() -> None:
    """Ray reads how it authenticates when it is imported.

    Where the user has no token and says nothing of them, this process gets one of its own, in a
    file that nobody else can read.
    """
    if "ray" in sys.modules or MODE in os.environ:
        return
    os.environ[MODE] = "token"
    if (
        os.environ.get("RAY_AUTH_TOKEN")
        or TOKEN in os.environ
        or (Path.home() / ".ray" / "auth_token").exists()
    ):
        return
    folder = Path(tempfile.mkdtemp(prefix="rf-token-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with os.fdopen(
        os.open(folder / "token", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w"
    ) as file:
        file.write(secrets.token_hex(32))
    os.environ[TOKEN] = str(folder / "token")


_ask_for_tokens()
try:
    import ray
    import ray.util
    from ray.exceptions import GetTimeoutError as GetTimeoutError
    from ray.exceptions import RayError as RayError
    from ray.exceptions import RayTaskError as RayTaskError
    from ray.util.placement_group import PlacementGroup as PlacementGroup
    from ray.util.placement_group import placement_group as placement_group
    from ray.util.placement_group import placement_group_table as placement_group_table
    from ray.util.placement_group import remove_placement_group as remove_placement_group
    from ray.util.scheduling_strategies import (
        NodeAffinitySchedulingStrategy as NodeAffinitySchedulingStrategy,
    )
    from ray.util.scheduling_strategies import (
        PlacementGroupSchedulingStrategy as PlacementGroupSchedulingStrategy,
    )
except ModuleNotFoundError as error:
    raise InputError(
        "Ray is not installed.",
        where="cluster.kind",
        fix="pip install 'reinforge[ray]', or set cluster.kind=local.",
    ) from error

QUIET = {
    # an actor without GPUs keeps the environment that it has
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # the work is in the workers: 15, as Ray has it, starves them on a busy machine
    "RAY_worker_niceness": "0",
}


@contextlib.contextmanager
def ray_connection(cfg: ClusterConfig, cpus: float) -> Iterator[None]:
    """A cluster that is started here has at least so many logical CPUs, real or not: nothing would
    be gained by waiting for a core.
    """
    if ray.is_initialized():  # a notebook or a test that has its own connection
        yield
        return
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    with contextlib.ExitStack() as stack:
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if address := cfg.address or os.environ.get("RAY_ADDRESS"):
            _join(address, quiet)
        else:
            if os.environ.get(MODE) != "token":
                raise InputError(
                    f"Ray was imported with {MODE}={os.environ.get(MODE)!r}: whoever reaches its"
                    " ports could run code.",
                    where="cluster.kind",
                    fix=(
                        f"Set {MODE}=token before Ray is imported, or give the address of a"
                        " cluster."
                    ),
                )
            # short: the names of sockets have a limit
            folder = Path(tempfile.mkdtemp(prefix="rf-ray-"))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            store = int(cfg.object_store_gib * 2**30) if cfg.object_store_gib is not None else None
            ray.init(
                num_cpus=max(os.cpu_count() or 1, int(cpus) + 1),
                include_dashboard=False,
                object_store_memory=store,
                _temp_dir=str(folder),
                **quiet,
            )
        stack.callback(ray.shutdown)
        yield


def _join(address: str, quiet: dict[str, Any]) -> None:
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InputError(
            f"no Ray cluster answers at {address!r}: {said_by(error)}",
            where="cluster.address",
            fix=(
                "Check the address, and RAY_AUTH_TOKEN_PATH where the cluster asks for a token; or"
                " leave it out to start one."
            ),
        ) from error


def check_resources(needed: dict[str, float]) -> None:
    """What can never be placed is told now, instead of waited for."""
    have = ray.cluster_resources()
    for name, count in needed.items():
        if count > have.get(name, 0) + 1e-6:
            raise InputError(
                f"the layout needs {count:g} {name}, and the cluster has {have.get(name, 0):g}.",
                where="cluster",
                fix=(
                    f"Lower train.ranks, cluster.engines or the {name.lower()}s of a role, or use a"
                    " larger cluster."
                ),
            )


def gpu_count() -> float:
    return float(ray.cluster_resources().get("GPU", 0))
