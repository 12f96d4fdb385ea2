"""Weights by vLLM's own transfer API (start, update, finish) into a real server on the CPU: a
process group of the trainer and the server's worker, over gloo.
"""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
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
from reinforge.engines.served.make import make_served
from reinforge.models.causal import CausalModel
from reinforge.models.load import load_model
from reinforge.models.named_weights import named_weights
from reinforge.models.tiny import make_tiny_model

pytestmark = [pytest.mark.timeout(3 * START), pytest.mark.long]
PROMPT = [5, 60, 7, 100, 9]


def change(model: CausalModel, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in model.module.parameters():
            p.add_(torch.randn_like(p) * 0.05)


def off_by(model: CausalModel, done: Completion) -> float:
    """The largest difference of its log-probs from the trainer's."""
    whole = [*PROMPT, *done.tokens]
    trained = [i >= len(PROMPT) for i in range(len(whole))]
    with torch.no_grad():
        batch = Batch.pack([Sample.from_tokens("x", whole, trained)])
        want = model.logprobs(batch, temperature=1.0)[0]
    return float((torch.tensor(done.logprobs) - want).abs().max())


def test_weights_arrive_through_a_process_group(tmp_path: Path) -> None:
    path = make_tiny_model(
        tmp_path / "model", width=64, layers=2, heads=2, kv_heads=1, context=256, spread=0.2
    )
    model = load_model(ModelConfig(path=str(path), device="cpu"))
    setup = ServerSetup(
        kind="vllm",
        cfg=EngineConfig(python=vllm_python(), channel="api", start_seconds=START),
        model=str(path),
        folder=tmp_path / "run",
        dtype="float32",
        device="cpu",
        context=256,
        vocabulary=int(model.head.weight.shape[0]),
        max_batch=16,
    )
    engine = make_served(setup, trainer_score(model))
    weights = Weights("shared", module=model.module)
    sampling = Sampling(12, ignore_eos=True)
    count = sum(t.numel() for _, t in named_weights(model.module))

    async def updated(version: int) -> None:
        change(model, version)
        await engine.update(weights, version)
        assert engine.measured["weights/probe_error"] < 1e-4
        [done] = await engine.generate(PROMPT, sampling, key=1)
        assert set(done.versions) == {version} and off_by(model, done) < 1e-4

    async def work() -> None:
        for version in (1, 2):
            await updated(version)
        _, link = engine.transfer.links[0]
        # twice, and no more than the weights; nothing lies in files
        assert 2.0 <= link.sent / (4 * count) <= 2.1
        assert engine.transfer.published is not None
        assert engine.transfer.published.channel.kind == "group"
        # a server that was started again joins anew and gets the weights of now
        process = engine.replicas[0].process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        [done] = await engine.generate(PROMPT, sampling, key=1)
        assert off_by(model, done) < 1e-4 and engine.restarts == 1
        assert engine.transfer.links[0][1] is not link
        await updated(3)

    try:
        asyncio.run(work())
    finally:
        engine.close()


def test_completions_go_on_under_new_weights_with_their_cache(tmp_path: Path) -> None:
    """`engine.running: keep`: nothing is read again, every token says which weights drew it, and a
    new request finds nothing of what was cached under the old ones.
    """
    path = make_tiny_model(
        tmp_path / "model", width=64, layers=2, heads=2, kv_heads=1, context=1024, spread=0.2
    )
    model = load_model(ModelConfig(path=str(path), device="cpu"))
    setup = ServerSetup(
        kind="vllm",
        cfg=EngineConfig(python=vllm_python(), running="keep", start_seconds=START),
        model=str(path),
        folder=tmp_path / "run",
        dtype="float32",
        device="cpu",
        context=1024,
        vocabulary=int(model.head.weight.shape[0]),
        max_batch=64,
    )
    engine = make_served(setup, trainer_score(model))
    weights = Weights("shared", module=model.module)

    async def prompt_tokens() -> float:
        http = engine.replicas[0].http
        assert http is not None
        lines = str(await http.get("/metrics")).splitlines()
        name = "vllm:prompt_tokens_total"
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    async def work() -> None:
        await engine.update(weights, 0)
        old = {name: p.clone() for name, p in model.module.state_dict().items()}
        task = asyncio.ensure_future(
            engine.generate(PROMPT, Sampling(900, ignore_eos=True), key=1, n=16)
        )
        http = engine.replicas[0].http
        assert http is not None
        while (await http.post("/reinforge/status"))["held"] < 16:
            assert not task.done()
        await asyncio.sleep(0.5)
        read = await prompt_tokens()
        change(model, 1)
        await engine.update(weights, 1)
        assert not task.done(), "it was over before the weights changed"
        # not cached under these weights, whatever was cached before
        [fresh] = await engine.generate(PROMPT, Sampling(12, ignore_eos=True), key=2)
        assert set(fresh.versions) == {1} and off_by(model, fresh) < 1e-4
        found = await task
        # the probe and the fresh prompt were read, and no completion a second time
        assert await prompt_tokens() - read <= 48 + len(PROMPT)
        assert all(set(done.versions) == {0, 1} and len(done.tokens) == 900 for done in found)
        assert all(done.versions == sorted(done.versions) for done in found)
        new = {name: p.clone() for name, p in model.module.state_dict().items()}
        model.module.load_state_dict(old)
        for done in found:
            cut = done.versions.index(1)
            assert off_by(model, replace(done, **sliced(done, cut))) < 1e-4
            # and the first one after it is not of the old weights
            assert off_by(model, replace(done, **sliced(done, cut + 1))) > 1e-3
        model.module.load_state_dict(new)

    try:
        asyncio.run(work())
    finally:
        engine.close()


def sliced(done: Completion, end: int) -> dict[str, Any]:
    return {"tokens": done.tokens[:end], "logprobs": done.logprobs[:end]}
