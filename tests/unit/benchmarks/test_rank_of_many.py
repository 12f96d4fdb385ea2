"""benchmarks/gpu_rank_of_many.py: the memory of one rank of many, tensor by tensor, against what
the memory model says of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gpu_rank_of_many as many
import pytest
import torch
from gpu_rank_of_many import SHAPES, Case, Found
from transformers import Qwen3Config

from reinforge.backends import memory_model
from reinforge.config.schema import Config
from reinforge.core.model_facts import ModelFacts
from reinforge.plan.options import stated_gpu
from reinforge.plan.prediction import expected

TOY = SHAPES["toy"]
LAYERS = {
    **TOY,
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 4096,
    "num_hidden_layers": 3,
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 128,
}
DEEP = {**TOY, "vocab_size": 1024, "num_hidden_layers": 4}
# what each is the largest part of
CASES = {
    "activations": Case(TOY, tokens=2048),
    "shards": Case(DEEP, ranks=2, tokens=64, reference=True),
    "ends": Case({**TOY, "vocab_size": 65536}, tokens=512, checkpointing=True),
    "a layer": Case(LAYERS, tokens=1024, checkpointing=True),
}


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[Found, ModelFacts]]:
    facts: dict[str, ModelFacts] = {}

    def noted(worker: Any, case: Case) -> dict[str, int]:
        facts[name] = worker.facts()
        return predicted(worker, case)

    predicted = many.predicted
    tracked = {}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(many, "predicted", noted)
        for name, case in CASES.items():
            tracked[name] = many.track(case)
    return {name: (tracked[name], facts[name]) for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_the_peak_is_predicted(found: dict[str, tuple[Found, ModelFacts]], name: str) -> None:
    result, _ = found[name]
    assert abs(result.error) < 0.08, result


def error(name: str, result: Found, facts: ModelFacts) -> float:
    case = CASES[name]
    again = memory_model.training(facts, case.tokens, reference=case.reference)
    return abs(replace(result, predicted=again).error)


@pytest.mark.parametrize(
    "term",
    [
        "weight_bytes",
        "optimizer_bytes",
        "gradient_bytes",
        "kept_bytes",
        "recomputed_bytes",
        "backward_bytes",
        "head_bytes",
        "end_weights",
        "gathered_bytes",
    ],
)
def test_every_term_is_needed(
    found: dict[str, tuple[Found, ModelFacts]], monkeypatch: pytest.MonkeyPatch, term: str
) -> None:
    """Without it some peak is missed by more than a tenth."""
    assert max(error(name, *found[name]) for name in found) < 0.08
    monkeypatch.setattr(memory_model, term, lambda *_: 0)
    assert max(error(name, *found[name]) for name in found) > 0.1


def test_the_shards_and_the_copy_are_counted(found: dict[str, tuple[Found, ModelFacts]]) -> None:
    """Before anything is trained: float32 shards, and those of the reference in bfloat16."""
    result, facts = found["shards"]
    held = memory_model.weight_bytes(facts) + result.predicted["reference"]
    assert held == pytest.approx(result.phases["made"], rel=0.02)
    assert facts.shards == 2 and facts.itemsize == 2


def test_plan_knows_what_the_rank_knows(
    found: dict[str, tuple[Found, ModelFacts]], make: Callable[..., Config]
) -> None:
    """From the configuration alone, and 64 ranks that are not here."""
    case = CASES["ends"]
    cfg = make(
        "run",
        "sft",
        "train.backend=fsdp",
        "train.ranks=64",
        "train.tokens_per_microbatch=512",
        "model.gradient_checkpointing=true",
        "model.compile=false",
    )
    shape = Qwen3Config(**{"tie_word_embeddings": False, **case.shape})
    plan = expected(cfg, stated_gpu("H200"), (512, 512), shape)
    assert plan.facts.fused  # on a GPU, where the rank is not
    assert replace(plan.facts, fused=False) == found["ends"][1]
    whole = replace(plan.facts, shards=None)
    assert memory_model.weight_bytes(whole) > 20 * memory_model.weight_bytes(plan.facts)


def test_the_same_rank_with_numbers() -> None:
    """What a GPU is asked to do, done on a CPU: 64 ranks of which 63 say nothing. The weights begin
    in one vector and become shards of a 64th, and both steps are taken.
    """
    workers: list[Any] = []

    class Meter:
        def reset(self) -> None: ...

        def peak(self) -> int:
            return 1

    def noted(worker: Any, case: Case) -> dict[str, int]:
        workers.append(worker)
        return predicted(worker, case)

    predicted = many.predicted
    case = Case(SMALL, tokens=32, checkpointing=True, reference=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(many, "predicted", noted)
        found = [many.measure(case, torch.device("cpu"), Meter()) for _ in range(2)]
    assert list(found[1].phases) == ["made", "reference", "old", "train", "step"]
    for worker in workers:
        shards = {name: list(p.shape) for name, p in worker.optimizer.parameters.items()}
        assert shards == {
            name: [-(-shape[0] // 64), *shape[1:]] for name, shape in worker.shapes.items()
        }
        assert {float(t) for k, t in worker.state().tensors.items() if k.endswith("/step")} == {2.0}


def test_what_is_resized_to_nothing_is_free() -> None:
    meter = many.TrackedMemory()
    with meter, meter.resizing():
        a = torch.empty(1000)
        b = a.view(10, 100)
        assert meter.now == 4096
        a.untyped_storage().resize_(0)
        assert meter.now == 0 and meter.peak() == 4096
        a.untyped_storage().resize_(4000)
        del a
        assert meter.now == 4096
        del b
        assert meter.now == 0
    assert meter.sizes == {}
