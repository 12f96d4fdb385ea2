"""The native engine with layers that keep state: a slot beside the blocks of every sequence."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from helpers.toy_architectures import STATEFUL, make_architecture, make_config
from helpers.toys import ToyTokenizer, run, tokens_of, true_logprobs
from reinforge.backends import memory_model
from reinforge.core.engine import Completion, Sampling
from reinforge.core.errors import InputError
from reinforge.core.kv_pool import PREFILL_TOKENS, pool_blocks, prefill_bytes, state_slots
from reinforge.core.model_facts import ModelFacts
from reinforge.core.weights import Weights
from reinforge.engines.native import NativeEngine
from reinforge.engines.native import engine as native
from reinforge.engines.native.decoder import bucket
from reinforge.engines.native.drafts import Speculation
from reinforge.models.causal import CausalModel

# one of each kind of mixer; mamba2 has no attention at all
KINDS = ("lfm2", "qwen3_5", "bamba", "mamba2", "jamba")
VOCABULARY = 259
LONG = Sampling(30, 0.9, ignore_eos=True)


def make_engine(
    name: str, blocks: int | None = None, slots: int | None = None, **settings: object
) -> NativeEngine:
    model = CausalModel(make_architecture(name), ToyTokenizer())
    engine = NativeEngine(model, kv_gib=0.002, max_batch=slots or 16, **settings)  # type: ignore[arg-type]
    if blocks is not None:
        engine._resize(blocks)
    return engine


async def groups(engine: NativeEngine, sampling: Sampling = LONG, n: int = 2) -> list[Completion]:
    """Prompts of one, two and three blocks."""
    jobs = [
        engine.generate(tokens_of(length, i, VOCABULARY), sampling, key=i, n=n)
        for i, length in enumerate((5, 20, 45))
    ]
    return [c for group in await asyncio.gather(*jobs) for c in group]


def drained(engine: NativeEngine) -> bool:
    """Everything was given back."""
    pool = engine.pool
    return pool.free == pool.total and sorted(pool._free_slots) == list(range(1, pool.slots + 1))


def agree(found: list[Completion], want: list[Completion]) -> None:
    for a, b in zip(found, want, strict=True):
        assert a.tokens == b.tokens and a.logprobs == pytest.approx(b.logprobs, abs=2e-4)


@pytest.mark.parametrize("name", STATEFUL)
def test_greedy_is_generate_and_log_probs_are_those_of_transformers(name: str) -> None:
    theirs = make_architecture(name)
    engine = make_engine(name)
    prompts = [tokens_of(length, i, VOCABULARY) for i, length in enumerate((5, 20, 45))]
    greedy = run(groups(engine, Sampling(12, 0.0, ignore_eos=True)))
    for prompt, *both in zip(prompts, greedy[::2], greedy[1::2], strict=True):
        want = theirs.generate(
            torch.tensor([prompt]),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0].tolist()
        truth = true_logprobs(theirs, want)[len(prompt) - 1 :]
        for done in both:
            assert done.tokens == want[len(prompt) :]
            found = torch.tensor(done.logprobs).double()
            torch.testing.assert_close(found, truth, atol=2e-4, rtol=0)
    assert drained(engine)


@pytest.mark.parametrize("name", KINDS)
def test_a_group_that_is_forked_after_a_preemption(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks for about half of what they need: sequences leave, come back and are computed again.
    Nobody can tell from the answers.
    """
    monkeypatch.setattr(native, "AHEAD", 2)
    scarce = make_engine(name, blocks=8)
    found = run(groups(scarce))
    assert scarce.stats.preemptions > 0 and drained(scarce)
    agree(found, run(groups(make_engine(name))))


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5"])
def test_fewer_slots_than_sequences(name: str) -> None:
    """Who has no slot waits; a slot that somebody used is as good as new."""
    narrow = make_engine(name, slots=2)
    assert narrow.slots == narrow.max_batch == 2
    agree(run(groups(narrow)), run(groups(make_engine(name))))
    assert drained(narrow)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5"])
def test_slots_change_hands_while_windows_are_in_flight(name: str) -> None:
    """As on a GPU: five steps between two looks, the next window launched before the last one is
    looked at, batches of fixed sizes whose fillers have no sequence. Answers of 1 to 12 tokens, so
    that rows end in the middle of windows and others enter.
    """

    async def work(engine: NativeEngine) -> list[Completion]:
        jobs = [
            engine.generate(
                tokens_of(3 + 5 * i, i, VOCABULARY), Sampling(limit, 0.9, ignore_eos=True), key=i
            )
            for i, limit in enumerate((7, 1, 12, 4, 9, 2, 5))
        ]
        return [c for group in await asyncio.gather(*jobs) for c in group]

    late = make_engine(name, slots=3)
    late.decoder.ahead = 1
    late.decoder.steps = lambda limit, drafts=0: 5  # type: ignore[method-assign]
    late.decoder.size = bucket  # type: ignore[method-assign]
    agree(run(work(late)), run(work(make_engine(name))))
    assert drained(late)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "bamba", "jamba"])
def test_in_bfloat16_it_is_as_far_from_the_truth_as_transformers_is(name: str) -> None:
    """Both round to 8 bits. The states of recurrences are kept in float32."""
    truth = make_architecture(name, dtype=torch.bfloat16).float()
    theirs = make_architecture(name, dtype=torch.bfloat16)
    model = CausalModel(make_architecture(name, dtype=torch.bfloat16))
    engine = NativeEngine(model, kv_gib=0.002, max_batch=8)
    prompt = tokens_of(20, 1, VOCABULARY)
    answers = run(engine.generate(prompt, Sampling(30, 1.0, ignore_eos=True), key=1, n=4))
    ours = rounding = 0.0
    for done in answers:
        tokens = [*prompt, *done.tokens]
        want, plain = (true_logprobs(m, tokens)[len(prompt) - 1 :] for m in (truth, theirs))
        ours += float((torch.tensor(done.logprobs).double() - want).abs().mean())
        rounding += float((plain - want).abs().mean())
    assert ours < 2 * rounding


@pytest.mark.parametrize("name", KINDS)
def test_a_long_prompt_is_continued_from_its_slot(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = run(groups(make_engine(name)))
    monkeypatch.setattr(native, "PREFILL_TOKENS", 16)
    pieces = make_engine(name)
    agree(run(groups(pieces)), want)
    assert pieces.stats.prompt_tokens == 5 + 20 + 45 and drained(pieces)


def test_who_holds_the_state_of_a_half_read_prompt_may_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first of two samples is cancelled between two pieces of their prompt: the other one reads
    it again from the start.
    """
    prompt = tokens_of(45, 2, VOCABULARY)
    [want] = run(make_engine("qwen3_5").generate(prompt, LONG, key=7))
    monkeypatch.setattr(native, "PREFILL_TOKENS", 16)
    engine = make_engine("qwen3_5")

    async def work() -> Completion:
        first, second = (
            asyncio.ensure_future(engine.generate(prompt, LONG, key=key)) for key in (1, 7)
        )
        while not (engine._entering and engine._entering[0].done):
            await asyncio.sleep(0)
        assert engine._entering[0].done < len(prompt)
        first.cancel()
        return (await second)[0]

    agree([run(work())], [want])
    assert engine.stats.prompt_tokens > len(prompt) and drained(engine)


def test_who_is_cancelled_while_no_slot_is_free() -> None:
    """Its slot comes back when its caller has heard of it; who waits for one waits until then."""
    engine = make_engine("lfm2", slots=2)
    prompt = tokens_of(9, 1, VOCABULARY)
    [want] = run(make_engine("lfm2").generate(prompt, LONG, key=3))

    async def work() -> Completion:
        first, second, third = (
            asyncio.ensure_future(engine.generate(prompt, LONG, key=key)) for key in (1, 2, 3)
        )
        while len(engine._running) < 2:
            await asyncio.sleep(0)
        first.cancel()
        found = await third
        await second
        return found[0]

    agree([run(work())], [want])
    assert drained(engine)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5"])
def test_new_weights_recompute_the_states(name: str) -> None:
    """Half of an answer under old weights, half under new ones: the log-probs of the second half
    are those of the new model over everything.
    """
    engine = make_engine(name)
    prompt = tokens_of(20, 1, VOCABULARY)

    async def work() -> Completion:
        task = asyncio.ensure_future(engine.generate(prompt, LONG, key=1))
        while not any(len(s.tokens) >= 15 for s in engine._running):
            await asyncio.sleep(0)
        with torch.no_grad():
            for p in engine.model.module.parameters():
                p.mul_(0.7)
        await engine.update(Weights("shared", engine.model.module), 1)
        return (await task)[0]

    done = run(work())
    since = done.versions.index(1)
    theirs = make_architecture(name)
    with torch.no_grad():
        for p in theirs.parameters():
            p.mul_(0.7)
    want = true_logprobs(theirs, [*prompt, *done.tokens], 0.9)[len(prompt) - 1 + since :]
    found = torch.tensor(done.logprobs[since:]).double()
    torch.testing.assert_close(found, want, atol=2e-4, rtol=0)


def test_prefixes_are_not_remembered_and_nothing_is_drafted() -> None:
    """A state is not known where a block ends, and cannot go back behind a draft."""
    with pytest.raises(InputError, match=r"rollout\.speculation\.when: .* cannot go back behind"):
        make_engine("qwen3_5", speculation=Speculation(2))
    engine = make_engine("qwen3_5", prefix_cache=True)
    first = run(groups(engine))
    agree(run(groups(engine)), first)
    assert engine.stats.prompt_tokens == 2 * (5 + 20 + 45)


def test_slots_take_their_part_of_the_memory() -> None:
    assert state_slots(0, 1000, rows=8, sequence_bytes=10) == 0
    assert state_slots(90, 10_000, rows=8, sequence_bytes=10) == 8
    assert state_slots(90, 450, rows=8, sequence_bytes=10) == 4
    assert state_slots(90, 5, rows=8, sequence_bytes=10) == 1
    assert pool_blocks(0, 0, rows=3, longest=40) == 9, "blocks that hold nothing cost nothing"


@pytest.mark.parametrize("name", STATEFUL)
def test_plan_counts_the_layers_that_attend_and_the_states_of_the_others(name: str) -> None:
    """From the configuration alone, and from the tensors that the engine makes; also from the
    bare config.json.
    """
    model = CausalModel(make_architecture(name, dtype=torch.bfloat16), ToyTokenizer())
    facts = ModelFacts.of(model.config, itemsize=2)
    raw = SimpleNamespace(**make_config(name).to_dict())
    assert ModelFacts.of(raw, itemsize=2).state == facts.state
    for kv_gib in (0.00004, None):  # room for some of the sequences, and for all
        engine = NativeEngine(model, max_batch=8, longest=100, kv_gib=kv_gib)
        run(engine.generate([5, 6, 7], Sampling(2), key=0))
        assert engine.cache is not None and engine.states is not None
        made = [*engine.cache.keys, *engine.cache.values, *engine.states.tensors]
        pool = memory_model.kv_pool(facts, None, 8, 100, kv_gib=kv_gib)
        assert (pool.tokens, pool.slots) == (engine.blocks * engine.block, engine.slots)
        # without the one block and the one slot that are nobody's
        assert pool.bytes == sum(part[1:].nbytes for part in made)


def test_a_recurrence_has_room_to_compute_in() -> None:
    """The shape of Qwen3.5-9B: a gated delta net needs about as much as the layers around it."""
    from transformers import Qwen3_5TextConfig

    facts = ModelFacts.of(Qwen3_5TextConfig())
    assert facts.attending == 8 and facts.slot_bytes == 24 * (3 * 8192 * 2 + 32 * 128 * 128 * 4)
    beside = replace(facts, state=None)
    measured = 266_596  # bytes of each token: models/recurrences.py on a CPU in bfloat16
    work = prefill_bytes(facts) - prefill_bytes(beside)
    assert 1 <= work / (PREFILL_TOKENS * measured) < 1.1
