"""`ray job submit` to a cluster that is there. The config and the command go with it as files: Ray's command line loses quotes."""

from __future__ import annotations

import json
import shlex

from reinforge.cluster.launchers.job import Job

ADDRESS = "http://127.0.0.1:8265"


def script(job: Job) -> str:
    """`run.sh`, which runs in the directory that is sent along. The run directory is a path of the cluster."""
    return f"#!/bin/bash\nexec {shlex.join(job.command('config.yaml', 'python', str(job.run_dir)))}\n"


def submission(job: Job, folder: str, address: str | None = None) -> list[str]:
    """`folder` holds config.yaml and run.sh and is sent. The token comes from RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH."""
    runtime = {"working_dir": folder, "env_vars": dict((("PYTHONUNBUFFERED", "1"), *job.env))}
    return [
        "ray",
        "job",
        "submit",
        "--address",
        address or ADDRESS,
        "--no-wait",
        "--runtime-env-json",
        json.dumps(runtime),
        "--",
        "bash",
        "run.sh",
    ]
