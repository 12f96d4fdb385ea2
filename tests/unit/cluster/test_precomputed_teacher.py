"""What a teacher says of all rows before the first step, asked from the controller of a run whose
policy is on another device: nothing is moved there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from helpers.ray_cluster import need_ray
from helpers.toys import make_model, make_samples, train_config
from reinforge.algorithms.losses.distillation import DistillationLoss
from reinforge.backends.local import LocalBackend
from reinforge.backends.teachers import LocalTeacher, Teachers
from reinforge.build.inputs import RunInputs
from reinforge.build.precompute import precompute_teacher
from reinforge.config.teacher import TeacherConfig
from reinforge.core.backend import TEACHER_IDS, TEACHER_LOGPROBS
from reinforge.core.batch import Batch

need_ray()
K = 5


class OnGpu(LocalBackend):
    """A policy that says it is on a GPU, which this process has none of."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda:0")


class ActorHere:
    """A `WorkerGroup` whose actor is this process."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}

    def make(self, name: str, factory: Callable[..., Any], *args: Any) -> None:
        self.objects[name] = factory(self.objects, *args)

    def apply(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        return function(self.objects[name], *args)

    def call(self, name: str, method: str, *args: Any) -> Any:
        return getattr(self.objects[name], method)(*args)


@pytest.mark.parametrize("apart", [False, True], ids=["beside the policy", "in its own actors"])
def test_the_teacher_is_asked_where_it_is(tmp_path: Path, apart: bool) -> None:
    from reinforge.cluster.backend import RemoteBackend
    from reinforge.cluster.frozen import FrozenModels

    loss = DistillationLoss("topk_kl", k=K, temperature=2.0)
    policy = make_model(seed=1)
    teacher = LocalTeacher(lambda: make_model(seed=2))
    teachers = Teachers([teacher], [1.0], k=K, temperature=2.0)

    def make(objects: dict[str, Any]) -> OnGpu:
        return OnGpu(policy, train_config(), total_steps=1, teachers=None if apart else teachers)

    actor = ActorHere()
    backend = RemoteBackend(
        cast(Any, actor),
        "policy",
        make,
        shares=False,
        frozen=FrozenModels(teachers=teachers if apart else None),
    )
    cfg = SimpleNamespace(
        teacher=TeacherConfig(path="org/teacher"), run=SimpleNamespace(dir=str(tmp_path))
    )
    inputs = cast(RunInputs, SimpleNamespace(cfg=cfg, algorithm=SimpleNamespace(loss=loss)))
    samples = make_samples()
    assert backend.device.type == "cuda"
    train, held_out = precompute_teacher(
        inputs, policy, backend, ([[s] for s in samples[:2]], [[s] for s in samples[2:]])
    )
    found = [sample for unit in (*train, *held_out) for sample in unit]
    assert [s.uid for s in found] == [s.uid for s in samples] and len(samples) > 2
    for given, sample in zip(samples, found, strict=True):
        ids, logprobs = teacher.best(Batch.pack([given]), K, 2.0)
        assert torch.equal(sample.streams[TEACHER_IDS][sample.trained], ids)
        torch.testing.assert_close(sample.streams[TEACHER_LOGPROBS][sample.trained], logprobs)
    # nobody holds it any more: neither the actor nor the controller
    assert actor.objects["policy"].teachers is None and backend.frozen.teachers is None
