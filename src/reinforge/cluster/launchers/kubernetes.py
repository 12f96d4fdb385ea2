"""KubeRay manifests: a RayJob that makes its cluster, runs, and takes it away; or a RayCluster that
stays, for `launch --on ray`.

Runs are on a PersistentVolumeClaim, so a retried job (`backoffLimit`) continues where the last one
was. Containers are not root, have no capabilities (but one, where there is RDMA) and no service
account token; Ray asks for a
token that the operator makes a secret of.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import yaml

from reinforge.cluster.launchers.job import (
    CPUS_PER_GPU,
    MEMORY_LEAST,
    LaunchJob,
    mebibytes,
    seconds_of,
)

CONFIG_DIR = "/etc/reinforge"
RUNS_DIR = "/runs"
USER = 1000  # of deploy/Dockerfile
RETRIES = 3
KEPT_SECONDS = 600  # a finished job and its logs
RAY_VERSION = "2.60.0"
HEAD_PORTS = {"gcs": 6379, "dashboard": 8265, "client": 10001}


def manifests(
    job: LaunchJob, text: str, *, standing: bool = False, in_worker: bool = False
) -> list[dict[str, Any]]:
    """What is applied: the configuration with its command, and the job; `standing`: a cluster
    alone. `text` is the YAML of the config.

    `in_worker`: the run is one process tree without Ray actors and goes to the node with the GPUs;
    else it drives from the head.
    """
    cluster = _cluster(job, config=not standing)
    if standing:
        return [_object(job, "RayCluster", cluster)]
    command = job.command(f"{CONFIG_DIR}/config.yaml", "python", f"{RUNS_DIR}/{job.run_dir.name}")
    # a file: an entrypoint is cut into words by others
    run = "#!/bin/bash\n" + f"cd {RUNS_DIR} && exec {shlex.join(command)}\n"
    data = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job),
        "data": {"config.yaml": text, "run.sh": run},
    }
    spec: dict[str, Any] = {
        "entrypoint": f"bash {CONFIG_DIR}/run.sh",
        "submissionMode": "K8sJobMode",
        "backoffLimit": RETRIES,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": KEPT_SECONDS,
        "rayClusterSpec": cluster,
    }
    if job.time is not None:
        spec["activeDeadlineSeconds"] = seconds_of(job.time)
    if in_worker:
        spec |= {"entrypointNumGpus": job.gpus} if job.gpus else {"entrypointNumCpus": 1}
    return [data, _object(job, "RayJob", spec)]


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks, as a person would write them."""


_Dumper.add_representer(
    str,
    lambda d, text: d.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def as_yaml(documents: list[dict[str, Any]]) -> str:
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)


def submission(job: LaunchJob, path: str) -> list[str]:
    return ["kubectl", "apply", "--namespace", job.namespace, "--filename", path]


def read_config(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _metadata(job: LaunchJob) -> dict[str, Any]:
    return {
        "name": job.name,
        "namespace": job.namespace,
        "labels": {"app.kubernetes.io/name": "reinforge", "app.kubernetes.io/instance": job.name},
    }


def _object(job: LaunchJob, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = _metadata(job)
    metadata["labels"] |= _gang_labels(job)
    return {"apiVersion": "ray.io/v1", "kind": kind, "metadata": metadata, "spec": spec}


def _gang_labels(job: LaunchJob) -> dict[str, str]:
    """By which a scheduler knows that half of the pods are of no use."""
    if job.gang == "kueue":
        assert job.queue is not None, "the launch refuses it"
        return {"kueue.x-k8s.io/queue-name": job.queue}
    if job.gang == "volcano":
        queue = {"volcano.sh/queue-name": job.queue} if job.queue else {}
        return {"ray.io/scheduler-name": "volcano", **queue}
    return {}


def _cluster(job: LaunchJob, config: bool) -> dict[str, Any]:
    """A head that only drives, and `nodes` workers with the GPUs.

    The dashboard answers inside the cluster, to who has the token.
    """
    workers = {
        "groupName": "workers",
        "replicas": job.nodes,
        "minReplicas": job.nodes,
        "maxReplicas": job.nodes,
        "rayStartParams": {},
    }
    return {
        "rayVersion": RAY_VERSION,
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            "rayStartParams": {"dashboard-host": "0.0.0.0", "num-cpus": "0"},
            "template": _pod(job, "head", config, gpus=0, ports=HEAD_PORTS),
        },
        "workerGroupSpecs": [
            {**workers, "template": _pod(job, "worker", config, gpus=job.gpus, ports={})}
        ],
    }


def _pod(
    job: LaunchJob, role: str, config: bool, gpus: int, ports: dict[str, int]
) -> dict[str, Any]:
    cpus = job.cpus_of(gpus)
    memory = job.memory_of(gpus)
    if role == "head":  # drives, whatever the workers are
        cpus = min(cpus, CPUS_PER_GPU)
        memory = min(memory, MEMORY_LEAST)
    shm = memory // 2 if job.shm is None or role == "head" else mebibytes(job.shm)
    size: dict[str, Any] = {
        "cpu": str(cpus),
        "memory": f"{memory + shm}Mi",  # what lies in /dev/shm counts
        **({"nvidia.com/gpu": str(gpus)} if gpus else {}),
    }
    capabilities: dict[str, Any] = {"drop": ["ALL"]}
    if role == "worker" and job.rdma is not None:
        resource, _, count = job.rdma.partition("=")
        size[resource] = count
        capabilities["add"] = ["IPC_LOCK"]  # memory that a network card reads must stay in place
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "runs", "mountPath": RUNS_DIR}]
    volumes: list[dict[str, Any]] = [
        # Ray's object store, weights for engines and NCCL are there; 64 MiB is the default
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{shm}Mi"}},
        {"name": "runs", "persistentVolumeClaim": {"claimName": job.claim}},
    ]
    if config:
        mounts.append({"name": "config", "mountPath": CONFIG_DIR})
        volumes.append({"name": "config", "configMap": {"name": job.name}})
    container: dict[str, Any] = {
        "name": f"ray-{role}",
        "image": job.image,
        "resources": {"requests": size, "limits": dict(size)},
        "env": [
            {"name": name, "value": value} for name, value in (("PYTHONUNBUFFERED", "1"), *job.env)
        ],
        "volumeMounts": mounts,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": capabilities,
            "privileged": False,
        },
    }
    if ports:
        container["ports"] = [{"name": name, "containerPort": port} for name, port in ports.items()]
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes,
    }
    if gpus:
        spec["tolerations"] = [
            {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
        ]
    return {
        "metadata": {"labels": _metadata(job)["labels"] | {"reinforge/role": role}},
        "spec": spec,
    }
