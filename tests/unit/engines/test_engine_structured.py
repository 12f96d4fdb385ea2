"""Answers that must match something, from the native engine: every one of an untrained model does,
they are drawn from the model's own distribution over what is allowed, and nobody beside them
notices.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections import Counter
from typing import Any

import jsonschema
import pytest
import torch

from helpers.toys import make_module, run
from reinforge.core.constraint import Constraint
from reinforge.core.engine import Completion, Sampling
from reinforge.core.errors import InputError
from reinforge.core.sample import Stop
from reinforge.core.weights import Weights
from reinforge.engines.native import NativeEngine
from reinforge.engines.native import engine as native
from reinforge.engines.native.blocks import BlockPool
from reinforge.engines.native.decode_batch import DecodeBatch
from reinforge.engines.native.decoder import LaunchedWindow, bucket
from reinforge.engines.native.drafts import Speculation
from reinforge.engines.resumable import ResumableRequests
from reinforge.models.causal import CausalModel
from reinforge.models.grammars import Matcher
from reinforge.models.tiny import tiny_tokenizer

EOS = 2
TOKENIZER = tiny_tokenizer(["hello hello"] * 5, vocabulary=262)
PROMPT = [70, 71, 72]
DATE = Constraint("regex", r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"enum": ["ada", "bob"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
SUM = Constraint("grammar", 'start: NUMBER ("+" NUMBER)~1..3\nNUMBER: /[0-9]{1,3}/')


def make_model(arch: str = "llama", *, exact: bool = False, seed: int = 0) -> CausalModel:
    return CausalModel(make_module(arch, seed, vocab_size=262), TOKENIZER, exact=exact)


def make_engine(model: CausalModel | None = None, **kw: Any) -> NativeEngine:
    return NativeEngine(model or make_model(), stop_tokens=[EOS], **kw)


def text_of(completion: Completion) -> str:
    return str(TOKENIZER.decode(completion.tokens, skip_special_tokens=True))


@torch.no_grad()
def next_logits(module: Any, tokens: list[int]) -> torch.Tensor:
    """By transformers alone."""
    return module(torch.tensor([tokens]), use_cache=False).logits[0, -1].double()


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 3.0])
def test_every_answer_matches(temperature: float) -> None:
    """Of a model that knows nothing, at any temperature."""
    engine = make_engine()

    async def work() -> list[list[Completion]]:
        schema = Constraint("json_schema", json.dumps(SCHEMA))
        return list(
            await asyncio.gather(
                *(
                    engine.generate(
                        PROMPT, Sampling(90, temperature, constraint=constraint), key=i, n=8
                    )
                    for i, constraint in enumerate((DATE, schema, SUM))
                )
            )
        )

    dates, objects, sums = run(work())
    assert all(re.fullmatch(DATE.text, text_of(c)) for c in dates)
    assert all(re.fullmatch(r"[0-9]{1,3}(\+[0-9]{1,3}){1,3}", text_of(c)) for c in sums)
    for completion in (*dates, *sums):
        assert completion.stop is Stop.EOS and completion.tokens[-1] == EOS
    ended = [c for c in objects if c.stop is Stop.EOS]
    assert len(ended) >= 4, "of eight some may write blanks until they are cut"
    for completion in ended:
        jsonschema.validate(json.loads(text_of(completion)), SCHEMA)


def test_any_json_object() -> None:
    """An untrained model may nest for ever: what is whole is an object, what is cut was cut."""
    engine = make_engine()
    made = run(
        engine.generate(
            PROMPT, Sampling(60, 1.0, constraint=Constraint("json_object")), key=3, n=24
        )
    )
    assert {c.stop for c in made} <= {Stop.EOS, Stop.LENGTH}
    whole = [json.loads(text_of(c)) for c in made if c.stop is Stop.EOS]
    assert whole and all(isinstance(value, dict) for value in whole)


@pytest.mark.parametrize("arch", ["llama", "gemma2", "cohere"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_of_what_was_sampled_from(arch: str, temperature: float) -> None:
    """log-softmax of logits / T over the allowed tokens alone: in float64."""
    module = make_module(arch, vocab_size=262)
    engine = make_engine(make_model(arch))
    [done] = run(engine.generate(PROMPT, Sampling(40, temperature, constraint=DATE), key=5))
    matcher = engine.grammars.matcher(DATE)
    for i, (token, logprob) in enumerate(zip(done.tokens, done.logprobs, strict=True)):
        z = next_logits(module, PROMPT + done.tokens[:i]) / temperature
        bits = torch.from_numpy(matcher.allowed.copy())
        free = (bits[:, None] >> torch.arange(32) & 1).bool().flatten()[: len(z)]
        want = z.masked_fill(~free, -math.inf).log_softmax(-1)[token]
        assert logprob == pytest.approx(float(want), abs=3e-5)
        full = z.log_softmax(-1)[token]
        assert free.sum() == len(z) or logprob > float(full) - 1e-6
        if token != EOS:
            matcher.take(token)
    assert done.logprobs[-1] == 0.0, "nothing but the end was possible"


def test_draws_follow_the_renormalised_distribution() -> None:
    """Chi-square of 4,000 first letters, against the model's own probabilities over four."""
    module = make_module(seed=4, vocab_size=262)
    engine = make_engine(make_model(seed=4))
    made = run(
        engine.generate(
            PROMPT, Sampling(1, 1.3, constraint=Constraint("regex", "[abcd]x")), key=9, n=4000
        )
    )
    letters = [TOKENIZER.convert_tokens_to_ids(letter) for letter in "abcd"]
    p = (next_logits(module, PROMPT)[letters] / 1.3).softmax(-1)
    counts = Counter(c.tokens[0] for c in made)
    assert counts.keys() <= set(letters)
    expected = (p * 4000).tolist()
    assert min(expected) > 5, "the test needs all of them to occur"
    chi = sum((counts[t] - e) ** 2 / e for t, e in zip(letters, expected, strict=True))
    assert chi < 16.3  # 99.9% of chi-square with 3 degrees of freedom
    assert all(c.stop is Stop.LENGTH for c in made)


@pytest.mark.parametrize("exact", [False, True])
def test_neighbours_keep_their_bits(exact: bool) -> None:
    """The same tokens and the same log-probs, bit by bit, beside constrained sequences."""
    free = Sampling(24, 0.9, ignore_eos=True)
    filtered = Sampling(24, 0.9, top_p=0.8, ignore_eos=True)

    async def work(beside: bool) -> list[list[Completion]]:
        engine = make_engine(make_model(exact=exact))
        tasks = [engine.generate(PROMPT, free, key=1, n=3)]
        tasks.append(engine.generate([80, 81], filtered, key=2, n=2))
        constraint = DATE if beside else None
        # as many rows either way: a BLAS may add up in another order for another number
        tasks.append(
            engine.generate(
                [90, 91, 92, 93], Sampling(24, constraint=constraint, ignore_eos=False), key=3, n=3
            )
        )
        return list(await asyncio.gather(*tasks))

    alone, together = run(work(False)), run(work(True))
    assert all(re.fullmatch(DATE.text, text_of(c)) for c in together[2])
    assert not any(re.fullmatch(DATE.text, text_of(c)) for c in alone[2])
    for one, other in zip(alone[:2], together[:2], strict=True):
        assert [c.tokens for c in one] == [c.tokens for c in other]
        if exact:
            assert [c.logprobs for c in one] == [c.logprobs for c in other]
        for a, b in zip(one, other, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_a_sample_does_not_depend_on_its_company() -> None:
    engine = make_engine()
    params = Sampling(40, 1.2, constraint=SUM)
    four = run(engine.generate(PROMPT, params, key=11, n=4))
    assert len({text_of(c) for c in four}) > 1
    [again] = run(engine.generate(PROMPT, params, key=11, n=1))
    assert again.tokens == four[0].tokens


def test_the_limit_cuts_and_a_whole_answer_is_whole_at_the_limit() -> None:
    engine = make_engine()
    [cut] = run(engine.generate(PROMPT, Sampling(3, constraint=DATE), key=1))
    assert cut.stop is Stop.LENGTH and len(cut.tokens) == 3
    word = Constraint("regex", "[ab]")
    [whole] = run(engine.generate(PROMPT, Sampling(1, constraint=word), key=1))
    assert whole.stop is Stop.EOS and text_of(whole) in "ab"


def test_stop_strings_end_an_answer_too() -> None:
    engine = make_engine()
    params = Sampling(40, constraint=DATE, stop_strings=("-",))
    [done] = run(engine.generate(PROMPT, params, key=2))
    assert done.stop is Stop.EOS and re.fullmatch(r"(19|20)[0-9]{2}-", text_of(done))


def test_new_weights_on_the_way_do_not_lose_the_place() -> None:
    """What runs is prefilled again with its tokens so far; the grammar goes on where it was."""
    model = make_model()
    engine = make_engine(model)

    async def work() -> list[Completion]:
        task = asyncio.ensure_future(
            engine.generate(PROMPT, Sampling(60, 1.0, constraint=DATE), key=4, n=5)
        )
        for _ in range(4):
            await asyncio.sleep(0)
        assert engine._running and any(s.tokens for s in engine._running)
        await engine.update(Weights("shared", module=model.module), 1)
        return await task

    made = run(work())
    assert all(re.fullmatch(DATE.text, text_of(c)) for c in made)
    assert {v for c in made for v in c.versions} == {0, 1}


def test_a_preempted_answer_does_not_lose_its_place() -> None:
    """A cache too small for all of them: some give way, are prefilled again with their tokens and
    go on inside the grammar.
    """
    long = Constraint("regex", "([ab][cd]){55}")
    engine = make_engine()
    engine.blocks = 12
    engine.pool = BlockPool(12, native.BLOCK)
    made = run(engine.generate(PROMPT, Sampling(115, 1.0, constraint=long), key=6, n=4))
    assert engine.stats.preemptions > 0
    assert all(re.fullmatch(long.text, text_of(c)) for c in made)
    roomy = run(make_engine().generate(PROMPT, Sampling(115, 1.0, constraint=long), key=6, n=4))
    assert [c.tokens for c in made] == [c.tokens for c in roomy]


def test_windows_in_flight_wait_for_the_grammar() -> None:
    """As on a GPU: several steps between two looks, one window late. While a constrained answer is
    among them each step is looked at; its neighbours and those who come later notice nothing.
    """

    async def work(engine: NativeEngine) -> list[Completion]:
        free = asyncio.ensure_future(
            engine.generate(PROMPT, Sampling(60, 0.9, ignore_eos=True), key=1, n=2)
        )
        for _ in range(3):
            await asyncio.sleep(0)
        dates = await engine.generate([80, 81], Sampling(40, 1.0, constraint=DATE), key=2, n=3)
        late = await engine.generate([90], Sampling(20, ignore_eos=True), key=3)
        return [*await free, *dates, *late]

    windows = []
    ahead = make_engine()
    ahead.decoder.ahead = 1
    ahead.decoder.steps = lambda limit, drafts=0: 5  # type: ignore[method-assign]
    ahead.decoder.size = bucket  # type: ignore[method-assign]
    launch = ahead.decoder.launch

    def watched(rows: DecodeBatch, *given: Any) -> LaunchedWindow:
        windows.append((given[1], rows.allowed is not None))
        return launch(rows, *given)

    ahead.decoder.launch = watched  # type: ignore[method-assign]
    found = run(work(ahead))
    for a, b in zip(found, run(work(make_engine())), strict=True):
        assert a.tokens == b.tokens and a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
    assert all(re.fullmatch(DATE.text, text_of(c)) for c in found[2:5])
    assert {steps for steps, constrained in windows if constrained} == {1}
    assert {steps for steps, constrained in windows if not constrained} > {5}
    assert ahead.pool.free == ahead.pool.total


def test_a_cut_answer_goes_on_where_it_was() -> None:
    """Partial rollouts ask again with the tokens so far as a part of the prompt."""
    model = make_model()

    async def work() -> tuple[list[int], Completion]:
        requests = ResumableRequests(make_engine(model))
        group = requests.engine_of("g")
        params = Sampling(60, 1.0, constraint=DATE)
        task = asyncio.ensure_future(group.generate(PROMPT, params, key=4))
        for _ in range(6):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        [kept] = requests.kept["g"][4].completions
        before = list(kept.tokens)
        [done] = await group.generate(PROMPT, params, key=4)
        return before, done

    before, done = run(work())
    assert 0 < len(before) < len(done.tokens) and done.tokens[: len(before)] == before
    assert re.fullmatch(DATE.text, text_of(done))


def test_cancelled_answers_leave_nothing_behind() -> None:
    engine = make_engine()

    async def work() -> list[Completion]:
        params = Sampling(60, constraint=Constraint("regex", "[ab]{50}"))
        task = asyncio.ensure_future(engine.generate(PROMPT, params, key=1, n=3))
        for _ in range(6):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return await engine.generate(PROMPT, Sampling(40, constraint=DATE), key=2)

    [done] = run(work())
    assert re.fullmatch(DATE.text, text_of(done))
    assert engine.pool.free == engine.pool.total


def test_the_likeliest_tokens_are_among_the_allowed() -> None:
    engine = make_engine()
    [done] = run(engine.generate(PROMPT, Sampling(40, 0.8, constraint=DATE), key=2))
    own, top = run(
        engine.likeliest(PROMPT + done.tokens, len(PROMPT), k=5, temperature=0.8, constraint=DATE)
    )
    assert own == pytest.approx(done.logprobs, abs=1e-5)
    assert {TOKENIZER.decode([i]) for i, _ in top[0]} <= {"1", "2"}
    assert top[-1] == [(EOS, 0.0)]
    assert all(sum(math.exp(p) for _, p in places) <= 1 + 1e-5 for places in top)


def test_an_answer_without_a_way_on_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a model whose vocabulary has no token for what must come after a `b`."""
    engine = make_engine()
    last = TOKENIZER.convert_tokens_to_ids("b")
    take = Matcher.take

    def dead(self: Matcher, token: int) -> None:
        take(self, token)
        if token == last:
            raise InputError("no token of this model goes on")

    monkeypatch.setattr(Matcher, "take", dead)

    async def work() -> list[Any]:
        return list(
            await asyncio.gather(
                *(
                    engine.generate(
                        PROMPT, Sampling(9, constraint=Constraint("regex", text)), key=1
                    )
                    for text in ("abc", "acc")
                ),
                return_exceptions=True,
            )
        )

    broken, [fine] = run(work())
    assert isinstance(broken, InputError)
    assert text_of(fine) == "acc"
    assert engine.pool.free == engine.pool.total


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (Sampling(9, constraint=Constraint("regex", "(")), "cannot be used"),
        (Sampling(9, constraint=DATE, ignore_eos=True), "ignore_eos"),
    ],
)
def test_refusals(params: Sampling, said: str) -> None:
    with pytest.raises(InputError, match=said):
        run(make_engine().generate(PROMPT, params, key=1))


def test_drafts_wait_while_an_answer_of_a_given_form_is_alive() -> None:
    """Rows beside it are decoded plainly until it ends; in exact mode nobody's bits change."""
    settings = [Sampling(30, 0.1, ignore_eos=True), Sampling(40, constraint=DATE)]

    async def work(engine: NativeEngine) -> list[Completion]:
        jobs = [engine.generate(PROMPT, params, key=1, n=2) for params in settings]
        return [c for group in await asyncio.gather(*jobs) for c in group]

    want = run(work(make_engine(make_model(exact=True), kv_gib=0.01)), 60)
    engine = make_engine(
        make_model(exact=True), kv_gib=0.01, speculation=Speculation(rows=None, drafts=3)
    )
    launch = engine.decoder.launch
    seen = []

    def watched(rows: DecodeBatch, *given: Any) -> LaunchedWindow:
        seen.append((rows.allowed is not None, rows.drafts))
        return launch(rows, *given)

    engine.decoder.launch = watched  # type: ignore[method-assign]
    for _ in range(2):
        assert run(work(engine), 60) == want
    assert set(seen) == {(True, 0), (False, 3)}
    assert engine.stats.draft_tokens > engine.stats.draft_steps
