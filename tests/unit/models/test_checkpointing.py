"""Inputs of layers that wait in host memory: what is moved, what is there when, and that nothing
that is computed changes. Here "the host" is another tensor on the CPU; tests/gpu has a GPU's.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.passes import passed
from helpers.tiny_runs import digest, make_config
from helpers.toy_architectures import make_architecture
from helpers.toys import SilentView, make_model, make_samples
from reinforge.build.run import train_config
from reinforge.core.batch import Batch
from reinforge.models import checkpointing
from reinforge.models.causal import CausalModel
from reinforge.models.checkpointing import (
    InputsOnHost,
    WaitingInput,
    checkpoint_layers,
    is_on_host,
)


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every input is moved, on a CPU too; what happened, in order."""
    seen: list[str] = []
    numbers: dict[int, int] = {}
    begin, fetch, take, leave = (
        WaitingInput.__init__,
        WaitingInput.fetch,
        WaitingInput.take,
        WaitingInput.leave,
    )

    def number(waiting: WaitingInput) -> int:
        return numbers.setdefault(id(waiting), len(numbers))

    def began(self: WaitingInput, *args: Any) -> None:
        begin(self, *args)
        seen.append(f"keep {number(self)}")

    def left(self: WaitingInput) -> None:
        leave(self)
        seen.append(f"leave {number(self)}")

    def fetched(self: WaitingInput) -> None:
        if self.here is None:
            seen.append(f"fetch {number(self)}")
        fetch(self)

    def taken(self: WaitingInput) -> torch.Tensor:
        found = take(self)
        seen.append(f"take {number(self)}")
        return found

    monkeypatch.setattr(InputsOnHost, "devices", ("cpu",))
    monkeypatch.setattr(checkpointing, "LEAST", 1)
    monkeypatch.setattr(WaitingInput, "__init__", began)
    monkeypatch.setattr(WaitingInput, "leave", left)
    monkeypatch.setattr(WaitingInput, "fetch", fetched)
    monkeypatch.setattr(WaitingInput, "take", taken)
    yield seen


KINDS = ["llama", "gemma2", "gpt2", "qwen3_moe", "qwen3_5", "gpt_oss"]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_that_is_computed_changes(kind: str, everywhere: list[str]) -> None:
    """Log-probs and gradients are those of plain checkpointing, bit for bit."""
    plain, moved = (CausalModel(make_architecture(kind)) for _ in range(2))
    expected, grads = passed(plain, True)
    assert not everywhere
    logprobs, found = passed(moved, "host")
    assert torch.equal(logprobs, expected)
    assert found.keys() == grads.keys() and len(grads) > 4
    assert all(torch.equal(found[name], grads[name]) for name in grads)
    kept = [event for event in everywhere if event.startswith("keep")]
    taken = [event for event in everywhere if event.startswith("take")]
    assert len(kept) == len(taken) == len(moved.layers)


def test_an_input_leaves_when_the_next_one_is_kept_and_comes_before_it_is_needed(
    everywhere: list[str],
) -> None:
    model = make_model("llama", num_hidden_layers=4)
    passed(model, "host")
    forward, backward = everywhere[:7], everywhere[7:]
    assert forward == ["keep 0", "leave 0", "keep 1", "leave 1", "keep 2", "leave 2", "keep 3"]
    # the last one is still there; each other one is on its way while the layer above computes
    assert backward == [
        *("fetch 2", "take 3"),
        *("fetch 1", "take 2"),
        *("fetch 0", "take 1"),
        "take 0",
    ]


def test_what_a_pass_kept_is_gone_after_it(everywhere: list[str]) -> None:
    model = make_model("llama")
    checkpoint_layers(model.module, "host")
    model.recompute(True)
    batch = Batch.pack(make_samples([9, 5]))
    held: list[weakref.ref[WaitingInput]] = []
    for _ in range(2):
        logprobs, _ = model.logprobs(batch, temperature=1.0)
        functions = {id(f): f for f in map(on_host, model.layers)}
        assert len(functions) == 1, "all layers share one, so that each knows the one before"
        newest = next(iter(functions.values()))._newest()
        assert newest is not None and newest.before() is not None
        held.append(weakref.ref(newest))
        del newest
        logprobs.sum().backward()
        del logprobs
    assert [waiting() for waiting in held] == [None, None]


def on_host(layer: torch.nn.Module) -> InputsOnHost:
    function = layer._gradient_checkpointing_func
    assert isinstance(function, InputsOnHost)
    return function


def test_without_gradients_nothing_is_moved(everywhere: list[str]) -> None:
    model = make_model("llama")
    checkpoint_layers(model.module, "host")
    batch = Batch.pack(make_samples([9, 5]))
    with torch.no_grad():
        model.recompute(True)
        model.logprobs(batch, temperature=1.0)
        model.recompute(False)
    model.logprobs(batch, temperature=1.0)  # as a score with a gradient that nobody asks for
    assert not everywhere


def test_on_a_cpu_and_of_little_nothing_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any) -> None:
        raise AssertionError("it was moved")

    monkeypatch.setattr(WaitingInput, "__init__", refused)
    expected, _ = passed(make_model("llama"), True)
    for devices in (InputsOnHost.devices, ("cpu",)):
        monkeypatch.setattr(InputsOnHost, "devices", devices)
        logprobs, _ = passed(make_model("llama"), "host")
        assert torch.equal(logprobs, expected)


def test_a_copy_of_a_model_waits_by_itself() -> None:
    module = make_model("llama").module
    checkpoint_layers(module, "host")
    copied = copy.deepcopy(module)
    assert is_on_host(module) and is_on_host(copied)
    ours, theirs = ({id(on_host(x)) for x in CausalModel(m).layers} for m in (module, copied))
    assert len(ours) == len(theirs) == 1 and ours != theirs
    checkpoint_layers(copied, True)
    assert not is_on_host(copied) and is_on_host(module)


@pytest.mark.parametrize("more", [(), ("adapter={kind: lora, rank: 4}",), ("model.exact=true",)])
def test_a_run_is_that_of_plain_checkpointing(
    more: tuple[str, ...], tiny_dir: str, tmp_path: Path, everywhere: list[str]
) -> None:
    weights = {}
    for how in ("true", "host"):
        settings = (f"model.gradient_checkpointing={how}", "data.source=arithmetic:chain", *more)
        cfg = make_config(tiny_dir, tmp_path, how, "grpo", *settings)
        everywhere.clear()
        train_config(cfg, None, SilentView())
        assert bool(everywhere) == (how == "host")
        weights[how] = digest(cfg)
    assert weights["true"] == weights["host"]
