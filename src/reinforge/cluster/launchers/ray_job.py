"""`ray job submit` to a cluster that is there.

The config and the command go with it as files: Ray's command line loses quotes.
"""

from __future__ import annotations

import json
import shlex

from reinforge.cluster.launchers.job import LaunchJob

ADDRESS = "http://127.0.0.1:8265"


def script(job: LaunchJob) -> str:
    """`run.sh`, which runs in the directory that is sent along.

    The run directory is a path of the cluster.
    """
    return (
        f"#!/bin/bash\nexec {shlex.join(job.command('config.yaml', 'python', str(job.run_dir)))}\n"
    )


def runtime(job: LaunchJob, folder: str) -> str:
    """What Ray is to prepare, as the text of a file (JSON is YAML): variables may be secrets, and
    arguments are there for every user to read. `folder` holds config.yaml and run.sh and is sent.
    """
    return (
        json.dumps(
            {"working_dir": folder, "env_vars": dict((("PYTHONUNBUFFERED", "1"), *job.env))},
            indent=2,
        )
        + "\n"
    )


def submission(path: str, address: str | None = None) -> list[str]:
    """`path` is the file with what `runtime` says.

    The token comes from RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH.
    """
    return [
        "ray",
        "job",
        "submit",
        "--address",
        address or ADDRESS,
        "--no-wait",
        "--runtime-env",
        path,
        "--",
        "bash",
        "run.sh",
    ]
