"""What a pack holds, token by token: held against the samples themselves."""

from __future__ import annotations

import random

import pytest
import torch

from reinforge.core.batch import Batch, cut, pack
from reinforge.core.sample import Sample


def sample(rng: random.Random, uid: str, group: str, prompt: list[int]) -> Sample:
    """Turns of the model and of others in turn; sometimes nothing is trained."""
    tokens = list(prompt)
    trained = [False] * len(prompt)
    for turn in range(rng.choice([0, 1, 1, 3])):
        for own, most in ((True, 5), (False, 3)) if turn < 2 else ((True, 4),):
            count = rng.randint(1, most)
            tokens += [rng.randrange(100) for _ in range(count)]
            trained += [own] * count
    made = Sample.from_tokens(uid, tokens, trained, group=group)
    return made.with_(
        logprobs=torch.randn(len(tokens)), streams={"teacher": torch.randn(len(tokens))}
    )


def some_samples(seed: int) -> list[Sample]:
    rng = random.Random(seed)
    found = []
    for g in range(5):
        prompt = [rng.randrange(100) for _ in range(rng.randint(1, 7))]
        for i in range(rng.randint(1, 4)):
            own = prompt if rng.random() < 0.8 else [*prompt, rng.randrange(100)]
            found.append(sample(rng, f"{g}#{i}", f"{g}", own))
    return found


def before(batch: Batch, place: int) -> list[int]:
    """The tokens up to a place, those of the segments that its segment continues included."""
    edges = batch.starts.tolist()
    segment = next(i for i in range(len(batch.lengths)) if edges[i] <= place < edges[i + 1])
    own = batch.tokens[edges[segment] : place + 1].tolist()
    parent = -1 if batch.prefix is None else batch.prefix[segment]
    return own if parent < 0 else before(batch, edges[parent + 1] - 1) + own


def check(batch: Batch) -> None:
    """Every trained token is where its sample says, and is predicted by all that comes before."""
    at = 0
    for number, one in enumerate(batch.samples):
        ids = one.tokens.tolist()
        for place in [i for i, own in enumerate(one.trained.tolist()) if own]:
            target, source = int(batch.targets[at]), int(batch.sources[at])
            assert before(batch, target) == ids[: place + 1]
            assert before(batch, source) == ids[:place]
            assert (int(batch.positions[target]), int(batch.positions[source])) == (
                place,
                place - 1,
            )
            assert int(batch.sequence[at]) == number
            assert batch.streams["behaviour"][at] == one.logprobs[place]
            assert batch.streams["teacher"][at] == one.streams["teacher"][place]
            at += 1
        end = int(batch.ends[number])
        assert end < 0 or before(batch, end) == ids
    assert at == batch.n_trained == sum(s.n_trained for s in batch.samples)
    assert batch.n_tokens == sum(batch.lengths) == int(batch.starts[-1])
    kinds = {t.dtype for t in (batch.tokens, batch.positions, batch.targets, batch.sources)}
    kinds |= {batch.sequence.dtype, batch.ends.dtype}
    assert kinds == {torch.int64} and batch.starts.dtype == torch.int32


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_every_trained_token_sees_its_own_past(seed: int, share: bool) -> None:
    samples = some_samples(seed)
    packs = pack(samples, 40, share=share)
    assert sorted(s.uid for b in packs for s in b.samples) == sorted(s.uid for s in samples)
    for batch in [*packs, *(part for whole in packs for part in cut(whole, 20))]:
        check(batch)
        idle = [int(e) < 0 for e in batch.ends]
        assert idle == [share and s.n_trained == 0 for s in batch.samples]


def test_nothing_is_a_pack_too() -> None:
    batch = Batch.pack([])
    assert (batch.n_tokens, batch.n_trained, batch.streams, batch.prefix) == (0, 0, {}, None)
    assert pack([], 10) == []


@pytest.mark.parametrize(("budget", "packs"), [(40, [40]), (39, [36, 24])])
def test_a_prompt_counts_once_in_every_pack(budget: int, packs: list[int]) -> None:
    """Five answers of four tokens to one prompt of twenty."""
    ids = list(range(24))
    samples = [Sample.from_tokens(f"{i}", ids, [t >= 20 for t in ids], group="a") for i in range(5)]
    assert [b.n_tokens for b in pack(samples, budget, share=True)] == packs
    assert [b.n_tokens for b in pack(samples, budget)] == [24] * 5
