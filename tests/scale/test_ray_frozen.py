"""References and teachers in actors of their own: the same losses and weights as in the policy's
process, also when such an actor dies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers import ray_cluster
from helpers.ray_cluster import FAST, Hurting, kill, need_ray, plain
from helpers.tiny_runs import digest, launch, lines, make_config
from helpers.toys import SilentView
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.run import train_config
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.models.tiny import make_tiny_model

need_ray()
pytestmark = pytest.mark.timeout(600)
KL = ("algorithm.kl.coefficient=0.1",)
APART = (*FAST, "cluster.reference.gpus=0")
TAUGHT = (*FAST, "cluster.teacher.gpus=0")
# what the update did, step by step
SAID = ("train/", "policy/", "distillation/", "dpo/", "preference/", "eval/", "critic/")
PAIRS = [
    {"prompt": f"{i}+{i}=", "chosen": str(2 * i), "rejected": str(2 * i + 1)} for i in range(16)
]
TEXTS = [{"prompt": f"{i}+{i}=", "completion": str(2 * i)} for i in range(16)]


@pytest.fixture(scope="module", autouse=True)
def ray_is_up() -> Iterator[None]:
    with ray_cluster.one_ray():
        yield


@pytest.fixture
def setup(tiny_dir: str, tmp_path: Path) -> Callable[..., Config]:
    def made(name: str, algorithm: str, *overrides: str, **sections: Any) -> Config:
        return make_config(
            tiny_dir, tmp_path, name, algorithm, "run.checkpoint.every=2", *overrides, **sections
        )

    return made


@pytest.fixture(scope="module")
def teacher(tiny_dir: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Other weights, and the tokens of the student."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    size = {"width": 48, "layers": 2, "heads": 4, "kv_heads": 2, "context": 128}
    return str(make_tiny_model(folder, seed=7, **size))


def said(cfg: Config) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k.startswith(SAID)} for line in lines(cfg)]


def roles(cfg: Config, kind: str) -> list[str]:
    return [e["role"] for e in lines(cfg, "events.jsonl") if e["kind"] == kind]


def on_rows(cfg: Config, rows: list[dict[str, Any]]) -> Config:
    train_config(cfg, CallerObjects(data=rows), SilentView())
    return cfg


def test_a_reference_and_a_teacher_of_their_own_that_die(
    setup: Callable[..., Config], teacher: str
) -> None:
    """On-policy distillation with a KL. Both are killed in the second step's rollout: they are made
    again and asked again, the trainer goes on, and every bit is that of models in the policy's
    process.
    """
    sections = {"rewards": [], "teacher": {"path": teacher}}
    opd = ("opd", *KL, "train.steps=2")
    here = setup("here", *opd, **sections)
    launch(here, plain)
    there = setup("there", *opd, *APART, "cluster.teacher.gpus=0", **sections)

    def deaths() -> None:
        kill("reference")()
        kill("teacher-0")()

    launch(there, Hurting(6, deaths))
    assert digest(there) == digest(here) and said(there) == said(here)
    assert max(line["policy/kl"] for line in said(here)) > 1e-5
    both = ["reference", "teacher-0"]
    assert sorted(roles(there, "actor_lost")) == both == sorted(roles(there, "actor_restored"))


@pytest.mark.long
def test_a_reference_and_a_critic_of_their_own_beside_a_colocated_engine(
    setup: Callable[..., Config],
) -> None:
    ppo = (*KL, "train.steps=2")
    critic = {"learning_rate": 1e-3}
    here = setup("here", "ppo", *ppo, critic=critic)
    launch(here, plain)
    there = setup("there", "ppo", *ppo, *APART, "cluster.critic.gpus=0", critic=critic)
    launch(there, plain)
    assert digest(there) == digest(here) and said(there) == said(here)


@pytest.mark.long
def test_dpo_asks_a_reference_of_its_own(setup: Callable[..., Config]) -> None:
    """With an adapter the reference is the model with a new adapter off."""
    sections = {"rewards": [], "adapter": {"kind": "lora", "rank": 4}}
    here = on_rows(setup("here", "dpo", **sections), PAIRS)
    there = on_rows(setup("there", "dpo", *APART, **sections), PAIRS)
    assert digest(there) == digest(here) and said(there) == said(here)
    first, *_, last = (line["train/loss"] for line in said(here))
    assert first == pytest.approx(0.6931, abs=1e-4) and last != first


@pytest.mark.long
@pytest.mark.parametrize("precompute", [False, True])
def test_the_best_tokens_of_a_teacher_of_its_own(
    setup: Callable[..., Config], teacher: str, precompute: bool
) -> None:
    """What travels are k ids and log-probs a token; in one process, where they are not kept either,
    whole logits are compared.
    """
    options = ("algorithm.options={k: 8, temperature: 2.0}",)
    sections = {"rewards": [], "teacher": {"path": teacher, "precompute": precompute}}
    here = on_rows(setup("here", "topk", *options, **sections), TEXTS)
    there = on_rows(setup("there", "topk", *options, *TAUGHT, **sections), TEXTS)
    losses = [line["distillation/loss"] for line in said(here)]
    # sums of log-probs near 5, which float32 knows to 5e-7
    assert [line["distillation/loss"] for line in said(there)] == pytest.approx(losses, abs=1e-7)
    assert losses[-1] < losses[0]


@pytest.mark.long
def test_a_reference_that_is_cut(setup: Callable[..., Config]) -> None:
    """Over two ranks, beside a policy on two others: its log-probs are those of FSDP2's own
    reference to float32 rounding.
    """
    ranks = (*KL, "train.backend=fsdp", "train.ranks=2")
    here = setup("here", "grpo", *ranks)
    launch(here, plain)
    there = setup("there", "grpo", *ranks, *APART, "cluster.reference.ranks=2")
    launch(there, plain)
    for ours, theirs in zip(said(there), said(here), strict=True):
        assert ours["policy/kl"] == pytest.approx(theirs["policy/kl"], rel=1e-4, abs=1e-8)
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-4, abs=1e-8)


def test_a_reference_that_nobody_asks_is_refused(setup: Callable[..., Config]) -> None:
    with pytest.raises(InputError, match="grpo compares with no reference here"):
        launch(setup("run", "grpo", *APART), plain)
