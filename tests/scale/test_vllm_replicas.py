"""Several vLLM processes on the CPU: two replicas of which one is killed while it generates, and
one server whose weights are cut over two workers.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.vllm_python import START, vllm_python
from reinforge.build.served import trainer_score
from reinforge.config.engine import EngineConfig
from reinforge.config.model import ModelConfig
from reinforge.core.batch import Batch
from reinforge.core.engine import Completion, Sampling
from reinforge.core.sample import Sample
from reinforge.core.weights import Weights
from reinforge.engines.served.dialect import ServerSetup
from reinforge.engines.served.engine import ServedEngine
from reinforge.engines.served.make import make_served
from reinforge.models.causal import CausalModel
from reinforge.models.load import load_model
from reinforge.models.named_weights import named_weights
from reinforge.models.tiny import make_tiny_model

pytestmark = [pytest.mark.timeout(3 * START), pytest.mark.long]
CLOSE = 1e-4  # log-probs


@contextmanager
def opened(folder: Path, **options: Any) -> Iterator[tuple[CausalModel, ServedEngine]]:
    """A model and its servers."""
    path = make_tiny_model(
        folder / "model", width=64, layers=2, heads=2, kv_heads=1, context=256, spread=0.2
    )
    model = load_model(ModelConfig(path=str(path), device="cpu"))
    setup = ServerSetup(
        kind="vllm",
        cfg=EngineConfig(python=vllm_python(), start_seconds=START, **options),
        model=str(path),
        folder=folder / "run",
        dtype="float32",
        device="cpu",
        context=256,
        vocabulary=int(model.head.weight.shape[0]),
        max_batch=64,
    )
    engine = make_served(setup, trainer_score(model))
    try:
        yield model, engine
    finally:
        engine.close()


def change(model: CausalModel, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in model.module.parameters():
            p.add_(torch.randn_like(p) * 0.05)


def off_by(model: CausalModel, prompt: list[int], done: Completion) -> float:
    """The largest difference of its log-probs from the trainer's."""
    whole = [*prompt, *done.tokens]
    trained = [i >= len(prompt) for i in range(len(whole))]
    with torch.no_grad():
        batch = Batch.pack([Sample.from_tokens("x", whole, trained)])
        want = model.logprobs(batch, temperature=1.0)[0]
    return float((torch.tensor(done.logprobs) - want).abs().max())


def test_one_of_two_replicas_is_killed_while_it_generates(tmp_path: Path) -> None:
    """What it held is asked of the other; it comes back with the weights of now."""
    with opened(tmp_path, replicas=2) as (model, engine):
        asyncio.run(_killed(model, engine))


async def _killed(model: CausalModel, engine: ServedEngine) -> None:
    change(model, 1)
    await engine.update(Weights("shared", module=model.module), 1)
    sampling = Sampling(150, ignore_eos=True)
    prompts = [[7 + i] for i in range(4)]
    tasks = [
        asyncio.ensure_future(engine.generate(prompt, sampling, key=i, n=16))
        for i, prompt in enumerate(prompts)
    ]
    lost, other = engine.replicas
    assert lost.process is not None and lost.http is not None
    while not (await lost.http.post("/reinforge/status"))["held"]:
        assert not any(task.done() for task in tasks), "it was over before it could be killed"
    assert lost.load and other.load, "both generate"
    os.kill(lost.process.pid, signal.SIGKILL)
    for prompt, found in zip(prompts, await asyncio.gather(*tasks), strict=True):
        for done in found:
            assert len(done.tokens) == 150 and set(done.versions) == {1}
            assert off_by(model, prompt, done) < CLOSE
    assert engine.restarts == 1
    change(model, 2)
    await engine.update(Weights("shared", module=model.module), 2)
    assert [replica.version for replica in engine.replicas] == [2, 2]
    assert engine.measured["weights/probe_error"] < CLOSE


@pytest.mark.parametrize("channel", ["api", "memory"])
def test_weights_that_are_cut_over_two_workers(tmp_path: Path, channel: str) -> None:
    """Both receive all of them and keep their part: the answers are the trainer's."""
    options = {"channel": channel, "args": {"tensor-parallel-size": 2}}
    with opened(tmp_path, env={"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, **options) as pair:
        asyncio.run(_cut(*pair))


async def _cut(model: CausalModel, engine: ServedEngine) -> None:
    prompt = [5, 60, 7, 100, 9]
    for version in (1, 2):
        change(model, version)
        await engine.update(Weights("shared", module=model.module), version)
        assert engine.measured["weights/probe_error"] < CLOSE
        [done] = await engine.generate(prompt, Sampling(12, ignore_eos=True), key=version)
        assert set(done.versions) == {version} and off_by(model, prompt, done) < CLOSE
    facts = engine.replicas[0].facts
    assert facts is not None and facts["workers"] == 2
    if engine.setup.cfg.channel == "api":
        count = sum(t.numel() for _, t in named_weights(model.module))
        _, link = engine.transfer.links[0]
        # two updates for two workers, and no more than the weights
        assert 4.0 <= link.sent / (4 * count) <= 4.2
