"""The native engine in numbers: token by token what transformers generates, log-probs of the
training forward, and paging that nobody sees.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from helpers.toys import (
    ARCHS,
    EOS,
    VOCABULARY,
    make_model,
    make_module,
    run,
    tokens_of,
    true_logprobs,
)
from reinforge.build.served import trainer_score
from reinforge.core.batch import Batch
from reinforge.core.engine import Completion, Sampling
from reinforge.core.errors import InputError
from reinforge.core.sample import Sample, Stop
from reinforge.core.weights import Weights
from reinforge.engines.native import NativeEngine
from reinforge.engines.native import engine as native
from reinforge.engines.native.blocks import BlockPool
from reinforge.models.attention import KVCache
from reinforge.models.causal import CausalModel

AROUND_A_BLOCK = (1, 15, 16, 17, 31, 32, 33)


def make_engine(model: CausalModel | None = None, blocks: int = 512, **kw: Any) -> NativeEngine:
    engine = NativeEngine(model or make_model(), **kw)
    engine.blocks = blocks
    engine.pool = BlockPool(blocks, native.BLOCK)
    return engine


async def batch_of(
    engine: NativeEngine, params: Sampling, n: int = 1, lengths: tuple[int, ...] = AROUND_A_BLOCK
) -> list[list[Completion]]:
    return list(
        await asyncio.gather(
            *(
                engine.generate(tokens_of(length, i), params, key=i, n=n)
                for i, length in enumerate(lengths)
            )
        )
    )


def same(a: list[list[Completion]], b: list[list[Completion]]) -> None:
    for x, y in zip(a, b, strict=True):
        assert [c.tokens for c in x] == [c.tokens for c in y]
        for c, d in zip(x, y, strict=True):
            assert c.logprobs == pytest.approx(d.logprobs, abs=1e-5) and c.stop is d.stop


@pytest.mark.parametrize("arch", [*ARCHS, "opt", "cohere", "granite"])
def test_greedy_is_transformers_generate(arch: str) -> None:
    """Many prompts at once, prompts and answers across block borders, against one unpadded prompt
    at a time.
    """
    engine = make_engine(make_model(arch), stop_tokens=[EOS])
    found = run(batch_of(engine, Sampling(24, 0.0)))
    theirs = make_module(arch)
    for i, length in enumerate(AROUND_A_BLOCK):
        prompt = torch.tensor([tokens_of(length, i)])
        out = theirs.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=EOS,
            pad_token_id=0,
        )
        assert found[i][0].tokens == out[0, length:].tolist()
    assert len({tuple(f[0].tokens) for f in found}) > 3 and engine.pool.free == engine.pool.total


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("arch", [*ARCHS, "opt", "cohere", "granite"])
def test_logprobs_are_the_training_forwards(arch: str, temperature: float) -> None:
    """Decode with a cache = prefill = packed training forward = transformers, after temperature."""
    model = make_model(arch)
    found = run(
        batch_of(
            make_engine(model),
            Sampling(20, temperature, ignore_eos=True),
            n=2,
            lengths=(3, 15, 16, 17),
        )
    )
    samples = []
    for i, group in enumerate(found):
        prompt = tokens_of((3, 15, 16, 17)[i], i)
        samples += [
            Sample.from_tokens(f"{i}", prompt + c.tokens, [False] * len(prompt) + [True] * 20)
            for c in group
        ]
    sampled = torch.tensor([p for group in found for c in group for p in c.logprobs])
    with torch.no_grad():
        trained = model.logprobs(Batch.pack(samples), temperature=temperature)[0]
    theirs = make_module(arch)
    exact = torch.cat(
        [true_logprobs(theirs, s.tokens.tolist(), temperature)[s.trained[1:]] for s in samples]
    )
    assert (
        float((sampled - trained).abs().max()) < 1e-5
        and float((sampled - exact).abs().max()) < 1e-5
    )
    assert float(exact.std()) > 0.1


def test_sampled_tokens_follow_the_model() -> None:
    """First tokens of 4000 samples of one prompt have the frequencies of the softmax at that
    prompt.
    """
    prompt = tokens_of(9)
    count = 4000
    temperature = 0.7
    done = run(
        make_engine(blocks=8200, max_batch=4000).generate(
            prompt, Sampling(1, temperature, ignore_eos=True), key=3, n=count
        )
    )
    with torch.no_grad():
        p = (make_module()(torch.tensor([prompt])).logits[0, -1].double() / temperature).softmax(-1)
    expected = p * count
    counts = torch.bincount(
        torch.tensor([c.tokens[0] for c in done]), minlength=VOCABULARY
    ).double()
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert statistic < VOCABULARY - 1 + 4 * (2 * (VOCABULARY - 1)) ** 0.5


@pytest.mark.parametrize("length", [15, 16, 17, 32, 33])
def test_shared_prompt_blocks_are_not_corrupted(length: int) -> None:
    """Eight samples share the full blocks of a prompt and own a copy of the part-filled one: each
    comes out as if alone.
    """
    prompt = tokens_of(length)
    params = Sampling(20, ignore_eos=True)
    together = run(make_engine().generate(prompt, params, key=9, n=8))
    theirs = make_module()
    for i, done in enumerate(together):
        exact = true_logprobs(theirs, prompt + done.tokens)[length - 1 :]
        assert float((torch.tensor(done.logprobs) - exact).abs().max()) < 1e-5
        if i == 0:
            assert run(make_engine().generate(prompt, params, key=9))[0].tokens == done.tokens
    assert len({tuple(c.tokens) for c in together}) == 8


@pytest.mark.parametrize(
    "limits",
    [
        {"blocks": 10},
        {"blocks": 13},
        {"max_batch": 1},
        {"max_batch": 3},
        {"blocks": 8, "max_batch": 2},
    ],
    ids=str,
)
def test_scarcity_changes_no_token(limits: dict[str, int]) -> None:
    """A pool where most have to wait, groups are cut in two, or one runs at a time: the same tokens
    as with plenty.
    """
    params = Sampling(20, 0.9, ignore_eos=True)
    plenty, scarce = make_engine(), make_engine(**limits)  # type: ignore[arg-type]
    same(run(batch_of(scarce, params, n=4)), run(batch_of(plenty, params, n=4)))
    assert scarce.pool.free == scarce.pool.total and scarce.stats.steps > plenty.stats.steps


def test_small_prefill_budget_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    params = Sampling(10, 0.9, ignore_eos=True)
    want = run(batch_of(make_engine(), params, n=2))
    monkeypatch.setattr(native, "PREFILL_TOKENS", 20)
    same(run(batch_of(make_engine(), params, n=2)), want)


def test_different_limits_and_stops_leave_at_their_own_time() -> None:
    async def work() -> None:
        engine = make_engine()
        short = Sampling(3, ignore_eos=True)
        long = Sampling(40, ignore_eos=True)
        alone = [
            (await engine.generate(tokens_of(6, i), p, key=i))[0]
            for i, p in enumerate((short, long, short, long))
        ]
        both = await asyncio.gather(
            *(
                engine.generate(tokens_of(6, i), p, key=i)
                for i, p in enumerate((short, long, short, long))
            )
        )
        same([[a] for a in alone], list(both))

    run(work())


def test_a_prompt_is_prefilled_once_for_its_group() -> None:
    engine = make_engine()
    run(engine.generate(tokens_of(30), Sampling(5, ignore_eos=True), key=1, n=8))
    assert (
        engine.stats.prompt_tokens == 30
        and engine.stats.generated_tokens == 40
        and engine.stats.steps == 4
    )  # prefill draws the first token


def test_an_update_in_the_middle_serves_the_new_weights() -> None:
    """Tokens before the update have the old model's log-probs, tokens after it the new one's over
    the whole context.
    """
    old = make_module(seed=0)
    new = make_module(seed=1)

    async def work() -> tuple[list[Completion], int]:
        model = make_model(seed=0)
        engine = make_engine(model)
        task = asyncio.ensure_future(
            engine.generate(tokens_of(20), Sampling(40, ignore_eos=True), key=2, n=3)
        )
        for _ in range(15):
            await asyncio.sleep(0)
        with torch.no_grad():
            for p, q in zip(model.module.parameters(), new.parameters(), strict=True):
                p.copy_(q)
        await engine.update(Weights("shared", module=model.module), 5)
        done = await task
        assert engine.pool.free == engine.pool.total
        return done, engine.stats.prompt_tokens

    results, prefilled = run(work())
    for done in results:
        n = done.versions.count(0)
        assert 5 < n < 30 and done.versions == [0] * n + [5] * (40 - n)
        whole = tokens_of(20) + done.tokens
        exact = torch.cat(
            [true_logprobs(old, whole)[19 : 19 + n], true_logprobs(new, whole)[19 + n :]]
        )
        assert float((torch.tensor(done.logprobs) - exact).abs().max()) < 1e-5
    assert prefilled == 20 + sum(20 + done.versions.count(0) for done in results)


def test_nothing_cached_survives_between_requests() -> None:
    """The same prompt before and after an update of the weights: the second answer is the new
    model's own.
    """

    async def work() -> None:
        model = make_model(seed=0)
        engine = make_engine(model)
        params = Sampling(12, 0.0, ignore_eos=True)
        prompt = tokens_of(33)
        before = (await engine.generate(prompt, params, key=0))[0]
        with torch.no_grad():
            for p, q in zip(
                model.module.parameters(), make_module(seed=1).parameters(), strict=True
            ):
                p.copy_(q)
        await engine.update(Weights("shared", module=model.module), 1)
        after = (await engine.generate(prompt, params, key=0))[0]
        fresh = (await make_engine(make_model(seed=1)).generate(prompt, params, key=0))[0]
        assert after.tokens == fresh.tokens != before.tokens

    run(work())


def test_other_weights_are_refused() -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match="the module that it was made with"):
        run(engine.update(Weights("full"), 1))
    with pytest.raises(ValueError, match="the module that it was made with"):
        run(engine.update(Weights("shared", module=make_module()), 1))


def test_filters_reach_the_engine() -> None:
    """top_k=1 is greedy whatever the temperature; a filtered and a free request in one batch do not
    mix.
    """

    async def work() -> None:
        engine = make_engine()
        prompt = tokens_of(7)
        greedy, one, nucleus, free, mixed = await asyncio.gather(
            engine.generate(prompt, Sampling(15, 0.0, ignore_eos=True), key=1),
            engine.generate(prompt, Sampling(15, 1.5, top_k=1, ignore_eos=True), key=2),
            engine.generate(prompt, Sampling(15, 1.5, top_p=1e-6, ignore_eos=True), key=3),
            engine.generate(prompt, Sampling(15, ignore_eos=True), key=4),
            engine.generate(prompt, Sampling(15, 1.5, min_p=1.0, ignore_eos=True), key=5),
        )
        assert greedy[0].tokens == one[0].tokens == nucleus[0].tokens == mixed[0].tokens
        assert (
            free[0].tokens
            == (await make_engine().generate(prompt, Sampling(15, ignore_eos=True), key=4))[
                0
            ].tokens
        )

    run(work())


def test_memory_is_given_back_and_taken_again() -> None:
    async def work() -> None:
        engine = make_engine()
        assert engine.cache is None
        task = asyncio.ensure_future(
            engine.generate(tokens_of(5), Sampling(30, ignore_eos=True), key=1)
        )
        for _ in range(5):
            await asyncio.sleep(0)
        with pytest.raises(AssertionError, match="cannot sleep"):
            await engine.sleep()
        await task
        assert engine.cache is not None
        await engine.sleep()
        # host memory is kept: clearing it takes long
        assert (engine.cache is None) == (engine.model.device.type == "cuda")

    run(work())


def test_a_cache_that_cannot_be_had_is_an_error_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> KVCache:
        raise MemoryError("no room for the cache")

    engine = make_engine()
    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "allocate", refuse)
        with pytest.raises(MemoryError, match="no room"):
            run(engine.generate(tokens_of(5), Sampling(3), key=1), timeout=5)
    assert (
        len(run(engine.generate(tokens_of(5), Sampling(3, ignore_eos=True), key=1))[0].tokens) == 3
    )


def test_what_can_never_fit_is_refused_before_it_waits() -> None:
    with pytest.raises(
        InputError, match=r"rollout\.max_new_tokens.*past the model's context of 32"
    ):
        run(make_engine(context=32).generate(tokens_of(20), Sampling(13), key=1))
    with pytest.raises(
        InputError, match=r"rollout\.kv_gib.*does not fit the KV cache of 128 tokens"
    ):
        run(make_engine(blocks=8).generate(tokens_of(100), Sampling(29), key=1))
    assert (
        len(
            run(
                make_engine(blocks=8).generate(
                    tokens_of(100), Sampling(28, ignore_eos=True), key=1, n=2
                )
            )[1].tokens
        )
        == 28
    )


def test_pool_size_follows_the_memory_asked_for() -> None:
    engine = NativeEngine(make_model(), kv_gib=0.001)
    per_block = 16 * 2 * 2 * 2 * 8 * 4  # tokens, layers, key and value, heads, size, bytes
    assert engine.pool.total == int(0.001 * 2**30) // per_block
    assert NativeEngine(CausalModel(make_module().bfloat16()), kv_gib=0.001).pool.total == int(
        0.001 * 2**30
    ) // (per_block // 2)


def test_bfloat16_generates_its_own_distribution() -> None:
    model = CausalModel(make_module().bfloat16())
    prompt = tokens_of(9)
    done = run(make_engine(model).generate(prompt, Sampling(20, ignore_eos=True), key=1, n=4))
    samples = [
        Sample.from_tokens(str(i), prompt + c.tokens, [False] * 9 + [True] * 20)
        for i, c in enumerate(done)
    ]
    with torch.no_grad():
        trained = model.logprobs(Batch.pack(samples), temperature=1.0)[0]
    assert (
        float((torch.tensor([p for c in done for p in c.logprobs]) - trained).abs().mean()) < 0.02
    )


def test_eos_counts_only_when_sampled() -> None:
    """pad == eos, eos in the prompt, eos as the last allowed token: the stop reason says it, not
    the id.
    """
    engine = make_engine(stop_tokens=range(VOCABULARY))  # every token ends
    done = run(engine.generate([EOS, 5, EOS], Sampling(4), key=1))[0]
    assert len(done.tokens) == 1 and done.stop is Stop.EOS
    ignoring = run(engine.generate([EOS, 5, EOS], Sampling(4, ignore_eos=True), key=1))[0]
    assert len(ignoring.tokens) == 4 and ignoring.stop is Stop.LENGTH


def test_sampled_tokens_have_the_log_probs_of_the_trainer() -> None:
    async def work() -> None:
        engine = NativeEngine(make_model(), kv_gib=0.01)
        prompt = tokens_of(7)
        done = (await engine.generate(prompt, Sampling(12, ignore_eos=True), key=8))[0]
        scores = trainer_score(engine.model)(prompt + done.tokens)
        assert scores.dtype is torch.float32
        assert scores.shape == (len(prompt) + 12,)
        assert float(scores[0]) == 0.0
        # sampled at temperature 1
        assert scores[len(prompt) :].tolist() == pytest.approx(done.logprobs, abs=1e-5)

    run(work())
