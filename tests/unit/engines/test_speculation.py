"""Drafts make answers come in fewer steps and change nothing else: a draft is taken exactly where
plain decoding draws the same token.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from helpers.toys import VOCABULARY, make_model, make_module, run, tokens_of
from reinforge.core.engine import Completion, Sampling
from reinforge.core.sample import Stop
from reinforge.engines.native import drafts
from reinforge.engines.native import engine as native
from reinforge.engines.native.blocks import BlockPool
from reinforge.engines.native.decode_batch import NEVER, DecodeBatch
from reinforge.engines.native.decoder import bucket
from reinforge.engines.native.drafts import (
    ANSWERS,
    MATCH,
    NOTHING,
    AnswerMemory,
    DraftTrial,
    Speculation,
    kin_of,
    look_up,
    padded,
)
from reinforge.engines.native.engine import BLOCK, NativeEngine
from reinforge.models.causal import CausalModel
from reinforge.models.fused_decode import FusedDecode

ALWAYS = Speculation(drafts=3, rows=None)


# ---- where drafts come from ----


def drafts_of(line: list[int], count: int = 3) -> list[int]:
    """Of one row whose text is all of this line."""
    seen = padded([line], len(line) + count + 1)
    return look_up(seen, torch.tensor([len(line) - 1]), count)[0].tolist()


@pytest.mark.parametrize(
    ("line", "drafts"),
    [
        ([1, 2, 3, 4, 5, 6, 9, 1, 2], [3, 4, 5]),
        ([1, 2, 3, 4, 5, 9, 2, 1], [NOTHING] * 3),  # one token alone says nothing
        ([1, 2, 3, 4, 8, 1, 2, 5, 6, 7, 8, 1, 2], [5, 6, 7]),  # more tokens agree here
        ([1, 2, 3, 9, 9, 1, 2, 4, 9, 9, 5, 1, 2], [4, 9, 9]),  # the last of equals
        ([7, 7, 7, 7, 7, 7, 7, 7], [7, 7, 7]),  # one that has successors
        ([1, 2, 3, 1, 2], [3, 1, 2]),
        ([1, 2], [NOTHING] * 3),
        ([1, 2, 3, NOTHING, 4, 5, 1, 2], [3, NOTHING, NOTHING]),  # another text begins
        ([2], [NOTHING] * 3),
    ],
)
def test_drafts_are_what_followed_the_last_tokens_before(
    line: list[int], drafts: list[int]
) -> None:
    assert drafts_of(line) == drafts


def test_rows_look_in_their_own_lines_and_do_not_match_padding() -> None:
    lines = [[NOTHING, NOTHING, 5], [5, 6, 7, NOTHING, 1, 5, 6], [NOTHING, 8, 9]]
    found = look_up(padded(lines, 12), torch.tensor([2, 6, 2]), 2)
    assert found.tolist() == [[NOTHING, NOTHING], [7, NOTHING], [NOTHING, NOTHING]]


def test_the_memory_keeps_the_newest_answers_within_its_bound() -> None:
    memory = AnswerMemory(100)
    prompt = list(range(20, 30))
    for i in range(ANSWERS + 2):
        memory.add(1, prompt, [i, i])
    line = memory.line(1, 1000)
    assert line.count(NOTHING) == ANSWERS and memory.size == ANSWERS * (MATCH + 2)
    assert line[: MATCH + 3] == [26, 27, 28, 29, 2, 2, NOTHING], "the oldest two are gone"
    assert line[-3:] == [ANSWERS + 1, ANSWERS + 1, NOTHING], "the newest is the last"
    assert memory.line(1, 16) == line[-14:], "as many as fit"
    assert memory.line(2, 1000) == []
    memory.add(2, prompt, [3] * 40)
    memory.line(1, 10)  # 1 was asked for after 2
    memory.add(3, prompt, [4] * 40)
    assert memory.line(2, 1000) == [] and memory.line(1, 1000) == line
    assert memory.size == ANSWERS * (MATCH + 2) + MATCH + 40 <= 100
    assert kin_of([1, 2]) == kin_of([1, 2]) != kin_of([1, 3])


def test_drafts_that_do_not_pay_are_left_for_a_while() -> None:
    trial = DraftTrial()
    trial.count(drafts.TRIAL - 1, drafts.TRIAL - 1)
    assert trial.pays, "too early to tell"
    trial.count(1, 1)
    assert not trial.pays, "one token a step is what plain decoding gives"
    trial.count(0, drafts.PAUSE - 1)
    assert not trial.pays
    trial.count(0, 1)
    assert trial.pays, "another try"
    for _ in range(10):
        trial.count(drafts.TRIAL, int(drafts.TRIAL * drafts.WORTH) + 1)
        assert trial.pays


# ---- the same answers ----


def exact_model() -> CausalModel:
    model = make_model("llama")
    return CausalModel(model.module, model.tokenizer, exact=True)


def make_engine(
    model: CausalModel,
    speculation: Speculation | None = None,
    *,
    steps: int = 1,
    ahead: int = 0,
    blocks: int = 256,
    buckets: bool = False,
    **settings: Any,
) -> NativeEngine:
    engine = NativeEngine(model, speculation=speculation, **settings)
    engine.blocks = blocks
    engine.pool = BlockPool(blocks, BLOCK)
    engine.decoder.ahead = ahead
    engine.decoder.steps = lambda limit, drafts=0: steps  # type: ignore[method-assign]
    if buckets:
        engine.decoder.size = bucket  # type: ignore[method-assign]
    return engine


SETTINGS = [
    Sampling(24, 0.3, ignore_eos=True),
    Sampling(1, ignore_eos=True),
    Sampling(40, 0.8),
    Sampling(23, 0.0),
    Sampling(30, 1.3, top_k=2),
    Sampling(40, 0.4, stop_strings=("ab", "z")),
    Sampling(17, 0.5, top_p=0.7, min_p=0.02, ignore_eos=True),
    Sampling(2, ignore_eos=True),
]
STOPS = range(0, VOCABULARY, 20)


async def mixture(engine: NativeEngine) -> list[Completion]:
    """Other limits, stop tokens, stop strings, filters and temperatures; some come later."""

    async def one(i: int, params: Sampling) -> list[Completion]:
        for _ in range(4 * (i % 3)):
            await asyncio.sleep(0)
        return await engine.generate(tokens_of(3 + 7 * i, i), params, key=i, n=1 + i % 3)

    found = await asyncio.gather(*(one(i, params) for i, params in enumerate(SETTINGS)))
    return [c for group in found for c in group]


def settled(engine: NativeEngine) -> bool:
    return engine.pool.free == engine.pool.total and not engine._in_flight and not engine._running


@pytest.fixture(scope="module")
def exact_answers() -> list[Completion]:
    """Without drafts."""
    found = run(mixture(make_engine(exact_model(), stop_tokens=STOPS)), 120)
    assert {c.stop for c in found} == {Stop.EOS, Stop.LENGTH}
    return found


@pytest.mark.parametrize(
    ("speculation", "how"),
    [
        (Speculation(3, None), {}),
        (Speculation(1, None), {"steps": 3, "ahead": 1, "buckets": True}),
        (Speculation(4, 4), {"steps": 2, "ahead": 2, "buckets": True}),
        (Speculation(4, None), {"blocks": 9, "steps": 2, "ahead": 1}),
        (Speculation(2, 6), {"blocks": 12, "prefix_cache": True}),
    ],
    ids=["always", "windows", "tail", "scarce", "prefixes"],
)
def test_exact_answers_have_the_same_bits_with_drafts_and_a_second_epoch_fewer_steps(
    monkeypatch: pytest.MonkeyPatch,
    exact_answers: list[Completion],
    speculation: Speculation,
    how: dict[str, Any],
) -> None:
    monkeypatch.setattr(native, "AHEAD", 1)
    engine = make_engine(exact_model(), speculation, stop_tokens=STOPS, **how)
    steps = []
    for _ in range(2):
        before = engine.stats.steps
        assert run(mixture(engine), 120) == exact_answers
        steps.append(engine.stats.steps - before)
        assert settled(engine)
    if "blocks" in how:
        assert engine.stats.preemptions > 0
    else:
        assert steps[1] < steps[0]
    assert 0 < engine.stats.draft_steps < engine.stats.draft_tokens


def test_a_second_epoch_is_drafted_by_the_first() -> None:
    """48 tokens in 1 + 47 steps; with 3 drafts, all of them right, in 1 + 12."""
    params = Sampling(48, ignore_eos=True)
    prompt = tokens_of(9)
    plain = make_engine(exact_model())
    [want] = run(plain.generate(prompt, params, key=5))
    engine = make_engine(exact_model(), ALWAYS)
    assert run(engine.generate(prompt, params, key=5)) == [want]
    before = engine.stats.since(engine.stats)
    first = engine.stats.steps
    assert before.steps == 0 and first <= plain.stats.steps
    tokens = engine.stats.draft_tokens
    steps = engine.stats.draft_steps
    assert run(engine.generate(prompt, params, key=5)) == [want]
    assert engine.stats.draft_tokens - tokens == 47
    assert engine.stats.draft_steps - steps == 12
    assert engine.stats.steps - first < 15 < plain.stats.steps


def test_an_engine_stops_to_draft_where_no_draft_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random tokens of a random model: of 200, the first 20 are guessed at, and 20 after a pause
    of 60. What comes of it is what comes without drafts.
    """
    monkeypatch.setattr(drafts, "TRIAL", 20)
    monkeypatch.setattr(drafts, "PAUSE", 60)
    params = Sampling(200, 30.0, ignore_eos=True)
    want = run(make_engine(exact_model()).generate(tokens_of(9), params, key=5), 60)
    engine = make_engine(exact_model(), ALWAYS)
    assert run(engine.generate(tokens_of(9), params, key=5), 60) == want
    assert engine.stats.draft_steps == 60, "20 steps of every 80"
    assert engine.stats.draft_tokens < 1.4 * 60


def test_siblings_that_ended_draft_for_those_that_go_on() -> None:
    """In ordinary mode on a CPU the answers of other requests are not used, for a resumed run does
    not know them.
    """
    prompt = tokens_of(9)
    params = Sampling(60, 0.1)
    taken = {}
    for memory in (0, 10_000):
        speculation = Speculation(3, None, memory)
        engine = make_engine(make_model("llama"), speculation, stop_tokens=STOPS)
        found = run(engine.generate(prompt, params, key=1, n=12), 60)
        assert len({len(c.tokens) for c in found}) > 2, "they end one after the other"
        taken[memory] = (engine.stats.draft_steps, engine.stats.draft_tokens)
        before = engine.stats.draft_steps
        run(engine.generate(prompt, params, key=1, n=12), 60)
        assert engine.stats.draft_steps == 2 * before, "a second epoch is as the first"
    assert taken[10_000][1] == taken[0][1], "as many tokens"
    assert taken[10_000][0] < taken[0][0], "in fewer steps"


def test_rows_take_what_agrees_up_to_a_stop_token_or_the_limit() -> None:
    """Rows: all right; the second wrong; a stop token among them; the limit; done; no draft."""
    drafts = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 9, 3], [1, 2, 3], [1, 2, 3], [NOTHING] * 3])
    picked = torch.tensor([[1, 2, 3, 4], [1, 5, 3, 4], [1, 9, 3, 4], [1, 2, 3, 4]] + 2 * [[1] * 4])
    rows = DecodeBatch.of([], torch.device("cpu"), size=6, width=1)
    rows.newest.fill_(7)
    rows.cached.fill_(10)
    rows.produced.fill_(2)
    rows.limits.copy_(torch.tensor([50, 50, 50, 5, 50, 50]))
    rows.done.copy_(torch.tensor([False, False, False, False, True, False]))
    rows.stops = torch.tensor([[9, NEVER]] * 6)
    rows.drafts = 3
    rows.room = 2
    rows.seen = torch.full((6, 20), NOTHING)
    rows.verified = torch.zeros(6, dtype=torch.int64)
    rows.advance(picked, drafts)
    assert rows.produced.tolist() == [6, 4, 4, 5, 2, 3]
    assert rows.cached.tolist() == [14, 12, 12, 13, 10, 11]
    assert rows.newest.tolist() == [4, 5, 9, 3, 7, 1]
    assert rows.done.tolist() == [False, False, True, True, True, False]
    assert rows.verified.tolist() == [1, 1, 1, 1, 0, 1]
    written = [[t for t in row if t != NOTHING] for row in rows.seen.tolist()]
    assert written == [[1, 2, 3, 4], [1, 5], [1, 9], [1, 2, 3], [], [1]]
    assert rows.seen[0, 2 + 10 + 1] == 1, "after the newest token"


def test_drafts_touch_no_block_of_others_and_none_past_the_limit() -> None:
    """15 tokens fill 15 places of the first block but the last, which is never fed; its drafts
    reach past the limit and past the block, and go to the spare one.
    """
    engine = make_engine(exact_model(), ALWAYS)
    run(engine.wake())
    assert engine.cache is not None
    parts = [*engine.cache.keys, *engine.cache.values]
    for part in parts:
        part.fill_(7.5)
    params = Sampling(9, ignore_eos=True)
    for _ in range(2):
        [found] = run(engine.generate([3, 4, 3, 4, 3, 4, 3], params, key=1))
        assert len(found.tokens) == 9
    assert engine.stats.draft_tokens > engine.stats.draft_steps
    for part in parts:
        written = (part != 7.5).flatten(2).any(2)  # [blocks, places]
        used = written[: engine.blocks].any(1).nonzero()[:, 0].tolist()
        assert len(used) == 1
        assert written[used[0]].tolist() == [True] * 15 + [False]


# ---- distributed alike ----


def test_ordinary_answers_with_drafts_are_those_without() -> None:
    """On a CPU the last bits differ with the shape of the batch, and no token with them here."""
    want = run(mixture(make_engine(make_model("llama"), stop_tokens=STOPS)), 120)
    engine = make_engine(make_model("llama"), ALWAYS, stop_tokens=STOPS)
    for a, b in zip(run(mixture(engine), 120), want, strict=True):
        assert a.tokens == b.tokens and a.stop is b.stop
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
    assert engine.stats.draft_tokens > engine.stats.draft_steps


def test_the_fused_forward_sees_the_drafts_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It turns queries and keys inside of attention; all keys must be turned and there first."""
    model = make_model("llama")
    params = Sampling(40, 0.0, ignore_eos=True)
    prompts = [tokens_of(9, i) for i in range(3)]

    async def work(engine: NativeEngine) -> list[list[int]]:
        found = await asyncio.gather(*(engine.generate(p, params, key=1) for p in prompts))
        return [c.tokens for [c] in found]

    want = run(work(make_engine(model)))
    engine = make_engine(model, ALWAYS)
    fused = FusedDecode.of(model)
    assert fused is not None
    plain = DecodeBatch.step
    monkeypatch.setattr(
        DecodeBatch, "step", lambda rows, *given: plain(rows, *given[:2], fused, *given[3:])
    )
    assert run(work(engine)) == want
    assert engine.stats.draft_tokens > engine.stats.draft_steps


def test_what_is_drawn_with_drafts_has_the_distribution_of_the_model() -> None:
    """The third token after the likeliest beginning, of 4,000 answers drafted by earlier ones,
    against the model's own probabilities: chi-square over the likeliest tokens and the rest.
    """
    model = make_model("llama")
    engine = make_engine(model, ALWAYS, max_batch=500)
    prompt = [3, 4, 5, 3, 4, 5, 3, 4]
    engine._kin = kin_of  # type: ignore[method-assign]
    found = []
    for key in range(8):
        found += run(
            engine.generate(prompt, Sampling(3, 0.1, ignore_eos=True), key=key, n=500), 120
        )
    assert engine.stats.draft_tokens > engine.stats.draft_steps, "some drafts were taken"
    beginnings = [tuple(c.tokens[:2]) for c in found]
    begin = max(set(beginnings), key=beginnings.count)
    thirds = [c.tokens[2] for c, b in zip(found, beginnings, strict=True) if b == begin]
    own = make_module("llama")(torch.tensor([[*prompt, *begin]]), use_cache=False)
    p = (own.logits[0, -1].detach().double() / 0.1).softmax(-1)
    top = [t for t in p.argsort(descending=True).tolist() if float(p[t]) * len(thirds) >= 8]
    expected = [float(p[t]) * len(thirds) for t in top]
    counts = [thirds.count(t) for t in top]
    rest = len(thirds) - sum(expected)
    if rest >= 5:
        expected.append(rest)
        counts.append(len(thirds) - sum(counts))
    chi = sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True))
    free = len(expected) - 1
    assert len(thirds) >= 100 and free >= 3
    # mean + 4.5 standard deviations
    assert chi < free + 4.5 * (2 * free) ** 0.5, (counts, expected)
