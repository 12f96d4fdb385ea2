"""Completions of a mixture tell which experts the tokens went to."""

from __future__ import annotations

import asyncio

import pytest
import torch
from torch import Tensor

from helpers.toy_architectures import make_architecture
from helpers.toys import make_model, run
from reinforge.core.batch import Batch
from reinforge.core.engine import Completion, Sampling
from reinforge.core.routes import OPEN, wide
from reinforge.core.weights import Weights
from reinforge.engines.native import NativeEngine
from reinforge.engines.native.drafts import Speculation
from reinforge.engines.resumable import ResumableRequests, requests_from_json, requests_to_json
from reinforge.models.causal import CausalModel
from reinforge.models.routing import Routers, differs
from reinforge.rollout.track import TokenTrack

PROMPTS = ([5, 9, 7, 4, 8], list(range(20, 41)))
FREE = Sampling(24, ignore_eos=True)


def trained(model: CausalModel, prompt: list[int], done: Completion) -> tuple[Tensor, Tensor]:
    """(what the sample says, what the trainer's forward chooses): [T, L, k]."""
    track = TokenTrack()
    track.give(prompt)
    track.take(done)
    batch = Batch.pack([track.sample("a", group="a", episode="a")])
    assert batch.routes is not None
    routers = Routers.of(model)
    assert routers is not None
    with torch.no_grad(), routers.watched():
        model.states(batch)
        return wide(batch.routes), routers.taken()


def agree(model: CausalModel, prompt: list[int], done: Completion) -> None:
    told, own = trained(model, prompt, done)
    assert (told[-1] == OPEN).all()  # nobody read the last token
    # the order of two experts with equal weights may turn with the last bit
    assert not differs(told[:-1], own[:-1]).any() and (told[:-1] == own[:-1]).float().mean() > 0.95


def sampled(engine: NativeEngine, params: Sampling = FREE) -> list[list[Completion]]:
    async def work() -> list[list[Completion]]:
        asked = (engine.generate(p, params, key=i, n=3) for i, p in enumerate(PROMPTS))
        return await asyncio.gather(*asked)

    return run(work())


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_5_moe"])
def test_the_trainer_would_choose_the_same(kind: str) -> None:
    model = CausalModel(make_architecture(kind))
    for prompt, group in zip(PROMPTS, sampled(NativeEngine(model, routes=True)), strict=True):
        for done in group:
            agree(model, prompt, done)


def test_of_sequences_that_gave_way() -> None:
    """Preempted and computed again, in another slot of the cache."""
    model = CausalModel(make_architecture("qwen3_moe"))
    engine = NativeEngine(model, routes=True)
    engine._resize(12)
    groups = sampled(engine, Sampling(60, ignore_eos=True))
    assert engine.stats.preemptions > 0
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for done in group:
            agree(model, prompt, done)


def test_with_drafts_and_prefixes_that_are_found_again() -> None:
    model = CausalModel(make_architecture("mixtral"))
    engine = NativeEngine(
        model, routes=True, prefix_cache=True, speculation=Speculation(3, None, 1 << 16)
    )
    cold = Sampling(24, temperature=0.0, ignore_eos=True)
    first = sampled(engine, cold)
    again = sampled(engine, cold)
    assert engine.stats.draft_tokens > engine.stats.draft_steps
    for prompt, a, b in zip(PROMPTS, first, again, strict=True):
        for done in (*a, *b):
            agree(model, prompt, done)


def test_new_weights_in_the_middle() -> None:
    """What was sampled before is read again by the new weights, and routed by them."""
    model = CausalModel(make_architecture("olmoe"))
    engine = NativeEngine(model, routes=True)

    async def work() -> list[Completion]:
        asked = asyncio.ensure_future(engine.generate(PROMPTS[0], FREE, key=1, n=2))
        while engine.stats.generated_tokens < 12:
            await asyncio.sleep(0)
        with torch.no_grad():
            for p in model.module.parameters():
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.02)
        await engine.update(Weights("shared", module=model.module), 1)
        return await asked

    for done in run(work()):
        assert set(done.versions) == {0, 1}
        agree(model, PROMPTS[0], done)


def test_nobody_asked_or_no_experts() -> None:
    quiet = NativeEngine(CausalModel(make_architecture("mixtral")))
    plain = NativeEngine(make_model("llama"), routes=True)
    for engine in (quiet, plain):
        assert all(done.routes is None for group in sampled(engine) for done in group)


def test_a_request_that_was_cut_keeps_them() -> None:
    """Those of the whole answer come with its last piece; what is whole already keeps its own,
    in a checkpoint too.
    """
    model = CausalModel(make_architecture("qwen3_moe"))
    engine = NativeEngine(model, routes=True)
    requests = ResumableRequests(engine)
    short = Sampling(24, stop_tokens=tuple(range(0, 250, 5)))

    async def cut() -> None:
        asked = asyncio.ensure_future(
            requests.engine_of("g").generate(PROMPTS[0], short, key=3, n=4)
        )
        while not any(c.stop for r in requests.kept.get("g", {}).values() for c in r.completions):
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    run(cut())
    [request] = requests.kept["g"].values()
    assert {c.stop is None for c in request.completions} == {True, False}
    requests.kept = requests_from_json(requests_to_json(requests.kept))
    found = run(requests.engine_of("g").generate(PROMPTS[0], short, key=3, n=4))
    for done in found:
        agree(model, PROMPTS[0], done)
