"""Pre-training text in every optimizer step: its gradient, in the loops, and after a resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from helpers.tiny_runs import digest, launch, lines
from helpers.toys import (
    gradients,
    make_model,
    make_module,
    make_samples,
    relative,
    tokens_of,
    train_config,
)
from reinforge.algorithms.losses.supervised import NLLLoss, PretrainingLoss
from reinforge.backends.local import LocalBackend
from reinforge.config.schema import Config
from reinforge.core.backend import State
from reinforge.core.batch import Totals, pack
from reinforge.core.errors import InputError
from reinforge.data.blocks import cut_into_blocks
from reinforge.data.cursor import Cursor
from reinforge.loops.ptx import PretrainingMix

TEXTS = [("", tokens_of(11, seed=i)) for i in range(6)]


def mix(backend: LocalBackend, coefficient: float, blocks: int = 3) -> PretrainingMix:
    units = cut_into_blocks(TEXTS, 8)
    cursor = Cursor(len(units), seed=0, shuffle=True)
    return PretrainingMix(backend, units, cursor, blocks, PretrainingLoss(coefficient))


def test_the_gradient_is_that_of_both_losses() -> None:
    """∇(L + γ · mean −log p(text)), the second part by autograd over transformers' own logits."""
    backend = LocalBackend(make_model(), train_config(), total_steps=10)
    rows = pack(make_samples(), backend.budget)
    backend.forward_backward(rows, NLLLoss(), Totals.of(rows))
    alone = gradients(backend)
    found = mix(backend, 0.25).add()
    both = gradients(backend)

    other = mix(backend, 0.25)
    module = make_module()
    texts = [other.units[i][0].tokens for i in other.cursor.take(3)]
    count = sum(len(text) - 1 for text in texts)
    nll = sum(
        -module(input_ids=text[None]).logits[0, :-1].log_softmax(-1).gather(1, text[1:, None]).sum()
        for text in texts
    ) / torch.tensor(float(count))
    (0.25 * nll).backward()
    expected = {
        name: alone[name] + parameter.grad
        for name, parameter in module.named_parameters()
        if name in alone and parameter.grad is not None
    }
    assert len(expected) == len(both) > 10
    assert relative(both, expected) < 1e-5
    assert relative(alone, expected) > 1e-2, "it does make a difference"
    assert found == {"ptx/nll": pytest.approx(float(nll.detach()), rel=1e-5)}


def test_blocks_are_walked_and_the_walk_is_resumed() -> None:
    backend = LocalBackend(make_model(), train_config(), total_steps=10)
    first = mix(backend, 1.0)
    first.add()
    saved = first.state()
    expected = first.cursor.take(3)
    other = mix(backend, 1.0)
    other.load(State(meta=json.loads(json.dumps(saved.meta))))
    assert other.cursor.take(3) == expected
    assert mix(backend, 1.0).cursor.take(3) != expected


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_in_a_run(make: Callable[..., Config], tmp_path: Path, algorithm: str) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(5):
        (corpus / f"{i}.txt").write_text(f"The number {i} comes before {i + 1}. " * 4)
    ptx = {"source": str(corpus), "coefficient": 0.5, "blocks": 2, "max_length": 24}

    def run(name: str, steps: int, **sections: object) -> Config:
        cfg = make(name, algorithm, f"train.steps={steps}", **sections)
        launch(cfg)
        return cfg

    plain = lines(run("plain", 1))[0]
    whole = run("whole", 4, ptx=ptx)
    told = lines(whole)
    assert told[0]["train/grad_norm"] != plain["train/grad_norm"]
    assert next(line["ptx/nll"] for line in told) > 3 and "ptx/nll" not in plain
    assert told[-1]["ptx/nll"] < told[0]["ptx/nll"], "it is learned"
    run("cut", 2, ptx=ptx)
    assert digest(run("cut", 4, ptx=ptx)) == digest(whole)


def test_what_it_is_refused_for(make: Callable[..., Config], tmp_path: Path) -> None:
    ptx = {"source": str(tmp_path / "x.txt")}
    with pytest.raises(InputError, match="ptx: a reward model predicts no tokens"):
        make("run", "bradley_terry", ptx=ptx, rewards=[])
    with pytest.raises(InputError, match=r"ptx: .*set rollout\.temperature to 1"):
        make("run", "grpo", "rollout.temperature=0.7", ptx=ptx)
    with pytest.raises(InputError, match="there is no such file"):
        launch(make("run", "sft", ptx=ptx))
