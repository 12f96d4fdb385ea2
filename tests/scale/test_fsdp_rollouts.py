"""Every rank generates a share: the samples are those that one engine draws, whoever answers;
rounds can be called off; runs are the same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from helpers.collectives import ProofCount, RankTraffic, counted
from helpers.split_backends import LENGTHS, load
from helpers.split_backends import update as train
from helpers.tiny_runs import LORA, launch, lines, tensors
from helpers.toy_architectures import make_architecture
from helpers.toys import make_model, make_samples, relative, run, tokens_of, train_config
from reinforge.backends.distributed.ranks import Ranks
from reinforge.backends.fsdp.backend import FsdpBackend
from reinforge.cluster.data_parallel import DataParallelEngine, RankEngine, dispatch_requests
from reinforge.core.engine import Completion, Engine, Sampling
from reinforge.core.errors import InputError
from reinforge.core.weights import Weights
from reinforge.engines.native import NativeEngine
from reinforge.models.causal import CausalModel
from reinforge.models.router_bias import biases_of

DRAW = Sampling(max_new_tokens=12)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks.open(2, "cpu") as opened:
        yield opened


def make_policy(seed: int = 0) -> CausalModel:
    return make_model("llama", seed, max_position_embeddings=4096, vocab_size=2048)


def make_engine(seed: int = 0) -> NativeEngine:
    return NativeEngine(make_policy(seed), kv_gib=0.01, context=4096)


def told(rank_engine: RankEngine) -> tuple[int, int, float]:
    weights = sum(
        float(p.detach().double().sum()) for p in rank_engine.engine.model.module.parameters()
    )
    return rank_engine.engine.stats.generated_tokens, rank_engine.engine.version, weights


async def ask(engine: Engine, requests: int = 5) -> list[list[Completion]]:
    return await asyncio.gather(
        *(engine.generate(tokens_of(4 + i, i), DRAW, key=100 + i, n=3) for i in range(requests))
    )


def same(a: list[list[Completion]], b: list[list[Completion]]) -> bool:
    tokens = [c.tokens for group in a for c in group] == [c.tokens for group in b for c in group]
    near = all(
        x.logprobs == pytest.approx(y.logprobs, abs=1e-4)
        for g, h in zip(a, b, strict=True)
        for x, y in zip(g, h, strict=True)
    )
    return tokens and near


def test_requests_are_dealt_by_what_they_cost() -> None:
    assert (
        dispatch_requests([5, 9, 5, 4], 2) == [[1, 3], [0, 2]]
        and dispatch_requests([3], 3) == [[0], [], []]
        and dispatch_requests([], 2) == [[], []]
    )


def trained(ranks: Ranks, own: NativeEngine, make: Any, **changes: Any) -> FsdpBackend:
    """What trains on the ranks; rank 0 generates with the engine `own`."""
    return FsdpBackend(
        ranks, make, train_config(backend="fsdp", **changes), full=own.model, total_steps=10
    )


def test_the_samples_are_those_of_one_engine(ranks: Ranks) -> None:
    """Also after an update, which every rank gets, once: the copy of rank 1 was made with other
    weights. What reaches rank 1 is one copy of the weights, and the words of the commands.
    """
    alone = make_engine()
    own = make_engine()
    backend = trained(ranks, own, make_policy)
    spread = DataParallelEngine(ranks, own, partial(make_engine, 7))
    assert isinstance(spread, Engine)
    size = sum(4 * shape.numel() for shape in backend.worker.shapes.values())

    async def work(traffic: int) -> None:
        await spread.update(backend.weights(), 3)
        assert same(await ask(spread), await ask(alone))
        assert same(await ask(spread, 1), await ask(alone, 1))  # one rank has nothing to do
        train(backend, make_samples(LENGTHS))
        await spread.sleep()
        ranks.call(traffic, "received")
        await spread.update(backend.weights(), 4)
        received = ranks.call(traffic, "received")[1]
        assert size <= received < 1.05 * size
        assert size > 500_000  # beside which the commands are nothing
        alone.model.module.load_state_dict(own.model.module.state_dict())
        await alone.update(Weights("shared", module=alone.model.module), 4)
        found = await ask(spread)
        assert same(found, await ask(alone)) and {
            v for g in found for c in g for v in c.versions
        } == {4}

    with counted(ranks, RankTraffic) as traffic:
        run(work(traffic), 120)
    seen = ranks.call(spread.id, told)
    assert (
        all(tokens > 0 and version == 4 for tokens, version, _ in seen) and seen[0][2] == seen[1][2]
    )
    assert (
        spread.stats.generated_tokens
        == sum(tokens for tokens, _, _ in seen)
        == alone.stats.generated_tokens
    )


def make_mixture() -> NativeEngine:
    return NativeEngine(CausalModel(make_architecture("deepseek_v3")), kv_gib=0.01, context=64)


def biases(rank_engine: RankEngine) -> list[list[float]]:
    return [x.tolist() for _, x in biases_of(rank_engine.engine.model.module)]


def test_every_rank_gets_the_biases_of_the_routers(ranks: Ranks) -> None:
    own = make_mixture()
    backend = trained(ranks, own, partial(load, "deepseek_v3"), router_bias_rate=0.004)
    spread = DataParallelEngine(ranks, own, make_mixture)
    for seed in range(3):
        train(backend, make_samples((20, 19, 21), seed))
    run(spread.update(backend.weights(), 1), 120)
    first, second = ranks.call(spread.id, biases)
    assert first == second and max(abs(x) for row in first for x in row) > 0.003


def test_a_bad_request_is_the_askers_error(ranks: Ranks) -> None:
    spread = DataParallelEngine(ranks, make_engine(), make_engine)

    async def work() -> None:
        good = asyncio.ensure_future(spread.generate(tokens_of(5), DRAW, key=1))
        with pytest.raises(InputError, match="past the model's context"):
            await spread.generate(tokens_of(5), Sampling(max_new_tokens=100_000), key=2)
        assert len((await good)[0].tokens) >= 1

    run(work(), 60)


def test_a_round_that_nobody_waits_for_is_called_off(ranks: Ranks) -> None:
    """As SIGTERM does it: afterwards the ranks take commands again within seconds, and a new round
    starts clean.
    """
    spread = DataParallelEngine(ranks, make_engine(), make_engine)
    long = Sampling(max_new_tokens=3000, ignore_eos=True)

    async def work() -> None:
        asked = [
            asyncio.ensure_future(spread.generate(tokens_of(5, i), long, key=i, n=4))
            for i in range(4)
        ]
        await asyncio.sleep(1.0)
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        began = time.monotonic()
        ranks.call(spread.id, told)  # what a checkpoint would do
        assert time.monotonic() - began < 10
        assert same(await ask(spread, 2), await ask(make_engine(), 2))

    run(work(), 120)


@pytest.mark.parametrize(
    ("more", "sections"),
    [((), {}), ((), LORA), (("train.sequence_parallel=2",), {"critic": {"shared": True}})],
)
def test_a_run_is_that_of_one_process(
    ranks: Ranks, make: Any, more: tuple[str, ...], sections: dict[str, Any]
) -> None:
    algorithm = "ppo" if "critic" in sections else "grpo"
    one = make("one", algorithm, **sections)
    all_of_them = make(
        "all",
        algorithm,
        *more,
        "train.backend=fsdp",
        "train.ranks=2",
        "rollout.all_ranks=true",
        **sections,
    )
    for cfg in (one, all_of_them):
        launch(cfg)
    watched = ("train/loss", "train/grad_norm", "reward/mean", "tokens/trained")
    log = [
        [{k: v for k, v in line.items() if k in watched} for line in lines(cfg)]
        for cfg in (one, all_of_them)
    ]
    assert len(log[0]) >= 3 and all(
        b == pytest.approx(a, rel=1e-3, abs=1e-5) for a, b in zip(*log, strict=True)
    )
    theirs = tensors(one)
    mine = tensors(all_of_them)
    trained = [k for k in theirs if k.startswith("model/")]
    assert relative({k: mine[k] for k in trained}, {k: theirs[k] for k in trained}) < 1e-4


def test_a_model_is_proved_once_and_not_by_every_rank(ranks: Ranks, make: Any) -> None:
    """The policy, of which each rank loads a part to train and a copy to generate with, and a
    critic with weights of its own.
    """
    cfg = make(
        "run",
        "ppo",
        "train.backend=fsdp",
        "train.ranks=2",
        "train.steps=1",
        "rollout.all_ranks=true",
        critic={},
    )
    with counted(ranks, ProofCount) as proofs:
        launch(cfg)
        assert ranks.call(proofs, "proofs") == [2, 0]
