"""The manifests are what KubeRay takes: validated against its schemas, with every unknown key
refused.
"""

from __future__ import annotations

import json
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.paths import TESTS
from reinforge.cluster.launchers import kubernetes
from reinforge.cluster.launchers.job import LaunchJob

jsonschema = pytest.importorskip("jsonschema")
DATA = TESTS / "data" / "kuberay"
ODD = (
    'data.options.text=it\'s "odd" $(touch pwned) `x` \\ 100%',
    "rollout.stop=a\nb",
    "run.seed=1",
)
TEXT = "model: {path: org/model}\n# a comment: 'quoted'\n"


def closed(schema: Any) -> Any:
    """The schema, in which an object with named properties takes no others.

    Kubernetes would drop them without a word.
    """
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) for key, value in schema.items()}
    if (
        schema.get("type") == "object"
        and isinstance(schema.get("properties"), dict)
        and not schema.get("x-kubernetes-preserve-unknown-fields")
    ):
        found["additionalProperties"] = False
    if schema.get("x-kubernetes-int-or-string"):
        found.pop("type", None)
    return found


@cache
def validator(kind: str) -> Any:
    schema = closed(json.loads((DATA / f"{kind.lower()}.v1.json").read_text()))
    # Kubernetes' own, not part of the definition
    schema["properties"]["metadata"].pop("additionalProperties", None)
    return jsonschema.Draft202012Validator(schema)


def problems(document: dict[str, Any]) -> list[str]:
    return [
        f"{'.'.join(map(str, e.absolute_path))}: {e.message}"
        for e in validator(document["kind"]).iter_errors(document)
    ]


def job(**changes: Any) -> LaunchJob:
    return LaunchJob(
        Path("/configs/c.yaml"),
        Path("/runs/Some Run"),
        **{"overrides": ODD, "nodes": 4, "gpus": 8, "time": "1-0", **changes},
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"nodes": 1, "gpus": 0, "time": None},
        {"env": (("NCCL_DEBUG", "INFO"), ("ODD", "a\n'b'"))},
        {"rdma": "rdma/hca=8", "gang": "volcano", "queue": "team", "shm": "100Gi"},
        {"gang": "kueue", "queue": "team", "cpus": 2, "memory": "4Gi"},
    ],
)
def test_manifests_validate(changes: dict[str, Any]) -> None:
    data, run = kubernetes.manifests(job(**changes), TEXT, in_worker=changes.get("nodes") == 1)
    (cluster,) = kubernetes.manifests(job(**changes), TEXT, standing=True)
    assert [d["kind"] for d in (data, run, cluster)] == ["ConfigMap", "RayJob", "RayCluster"]
    assert problems(run) == [] and problems(cluster) == []


def test_the_validation_would_see_a_mistake() -> None:
    _, run = kubernetes.manifests(job(), TEXT)
    run["spec"]["backoflimit"] = 3
    run["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0][
        "volumemounts"
    ] = []
    run["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"] = "4"
    assert len(problems(run)) == 3


def test_what_the_job_asks_for() -> None:
    _, run = kubernetes.manifests(job(env=(("NCCL_DEBUG", "INFO"),)), TEXT)
    spec = run["spec"]
    assert (
        run["metadata"]["name"] == "some-run"
        and spec["activeDeadlineSeconds"] == 86400
        and spec["backoffLimit"] == 3
    )
    assert (
        spec["ttlSecondsAfterFinished"] == 600
        and spec["shutdownAfterJobFinishes"]
        and spec["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    )
    (workers,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 4
    for group, gpus in ((spec["rayClusterSpec"]["headGroupSpec"], None), (workers, "8")):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert (
            container["resources"]["requests"] == container["resources"]["limits"]
            and container["resources"]["limits"].get("nvidia.com/gpu") == gpus
        )
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "privileged": False,
        }
        assert (
            pod["securityContext"]["runAsNonRoot"] and pod["automountServiceAccountToken"] is False
        )
        mounted = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
        volumes = {v.pop("name"): v for v in pod["volumes"]}
        # 32 GiB for each GPU, and half as much for /dev/shm, which counts as the container's
        shm, whole = (32 << 10, 96 << 10) if gpus is None else (128 << 10, 384 << 10)
        assert volumes[mounted["/dev/shm"]] == {
            "emptyDir": {"medium": "Memory", "sizeLimit": f"{shm}Mi"}
        }
        assert container["resources"]["limits"]["memory"] == f"{whole}Mi"
        assert container["resources"]["limits"]["cpu"] == ("8" if gpus is None else "64")
        assert volumes[mounted["/runs"]] == {
            "persistentVolumeClaim": {"claimName": "reinforge-runs"}
        }
        assert {"name": "NCCL_DEBUG", "value": "INFO"} in container["env"]


def limits(document: dict[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Of the head and of a worker."""
    spec = document["spec"].get("rayClusterSpec", document["spec"])
    head, worker = (
        group["template"]["spec"]["containers"][0]["resources"]["limits"]
        for group in (spec["headGroupSpec"], spec["workerGroupSpecs"][0])
    )
    return head, worker


def test_rdma_is_for_the_workers() -> None:
    _, run = kubernetes.manifests(job(rdma="vpc.amazonaws.com/efa=32"), TEXT)
    head, worker = limits(run)
    assert worker["vpc.amazonaws.com/efa"] == "32" and len(head) == 2 and len(worker) == 4
    spec = run["spec"]["rayClusterSpec"]
    may = [
        group["template"]["spec"]["containers"][0]["securityContext"]["capabilities"]
        for group in (spec["headGroupSpec"], spec["workerGroupSpecs"][0])
    ]
    assert may == [{"drop": ["ALL"]}, {"drop": ["ALL"], "add": ["IPC_LOCK"]}]


def test_what_is_said_of_sizes_holds() -> None:
    given = {"cpus": 96, "memory": "1Ti", "shm": "200Gi"}
    (cluster,) = kubernetes.manifests(job(**given), TEXT, standing=True)
    head, worker = limits(cluster)
    assert worker == {"cpu": "96", "memory": f"{(1024 + 200) << 10}Mi", "nvidia.com/gpu": "8"}
    assert head == {"cpu": "8", "memory": f"{96 << 10}Mi"}
    (small,) = kubernetes.manifests(job(cpus=2, memory="4Gi"), TEXT, standing=True)
    assert [size["memory"] for size in limits(small)] == [f"{6 << 10}Mi"] * 2


def test_a_scheduler_is_told_that_the_pods_belong_together() -> None:
    known = {"app.kubernetes.io/name", "app.kubernetes.io/instance"}
    for changes, wanted in (
        ({}, {}),
        ({"gang": "volcano"}, {"ray.io/scheduler-name": "volcano"}),
        (
            {"gang": "volcano", "queue": "team"},
            {"ray.io/scheduler-name": "volcano", "volcano.sh/queue-name": "team"},
        ),
        ({"gang": "kueue", "queue": "team"}, {"kueue.x-k8s.io/queue-name": "team"}),
    ):
        for standing in (False, True):
            document = kubernetes.manifests(job(**changes), TEXT, standing=standing)[-1]
            labels = document["metadata"]["labels"]
            assert {k: v for k, v in labels.items() if k not in known} == wanted


def test_odd_words_arrive_as_they_are() -> None:
    """Through YAML and the shell: the words that bash finds in run.sh are those of the user."""
    documents = kubernetes.manifests(job(), TEXT, in_worker=True)
    data, run = yaml.safe_load_all(kubernetes.as_yaml(documents))
    assert (
        [data, run] == documents
        and data["data"]["config.yaml"] == TEXT
        and run["spec"]["entrypointNumGpus"] == 8
    )
    words = shlex.split(data["data"]["run.sh"].removeprefix("#!/bin/bash\n"))
    assert words[:3] == ["cd", "/runs", "&&"]
    assert words[3:] == [
        "exec",
        "python",
        "-m",
        "reinforge",
        "train",
        "/etc/reinforge/config.yaml",
        *ODD,
        "run.dir=/runs/Some Run",
    ]
    assert run["spec"]["entrypoint"] == "bash /etc/reinforge/run.sh"
