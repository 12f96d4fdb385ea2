"""Rollouts that go on in the next step: prefix and rest each under their own weights, none lost,
none twice, none too old, exact on resume.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.dialogues import Echo, make_episodes, make_renderer
from helpers.fake_engine import FakeEngine
from helpers.group_source import take_batch
from helpers.tiny_runs import DATA, digest, launch, lines, odd
from helpers.toys import SilentView, make_model, make_module
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.served import trainer_score
from reinforge.build.source import resumable_requests
from reinforge.build.trainer import build
from reinforge.checkpoint import store
from reinforge.config.schema import Config
from reinforge.core.backend import State
from reinforge.core.engine import Sampling
from reinforge.core.env import RolloutContext
from reinforge.core.errors import InputError, Terminated
from reinforge.core.sample import Group, Row, Sample, Stop
from reinforge.core.seeds import seed_of
from reinforge.core.weights import Weights
from reinforge.data.cursor import Cursor
from reinforge.engines.native import NativeEngine
from reinforge.engines.resumable import ResumableRequests, requests_from_json, requests_to_json
from reinforge.loops.rl import RLTrainer
from reinforge.models.causal import CausalModel
from reinforge.rollout.journal import Journal
from reinforge.rollout.partial import PartialSource

ROWS = [Row(f"r{i}", f"p{i}") for i in range(64)]


# one engine


@pytest.fixture
def engine() -> NativeEngine:
    return NativeEngine(make_model(), max_batch=8, kv_gib=0.01, stop_tokens={2})


async def cut_after(
    requests: ResumableRequests,
    tokens: int,
    *,
    group: str = "g",
    n: int = 2,
    prompt: tuple[int, ...] = (5, 6, 7),
    length: int = 24,
) -> list[Any] | None:
    """Generates for a group until so many tokens are there, then cuts it. None: it was cut."""
    task = asyncio.ensure_future(
        requests.engine_of(group).generate(
            list(prompt), Sampling(length, ignore_eos=True), key=11, n=n
        )
    )
    while not task.done() and requests.tokens() < tokens:
        await asyncio.sleep(0)
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return None


def shaken(engine: NativeEngine, seed: int) -> None:
    with torch.no_grad():
        torch.manual_seed(seed)
        for p in engine.model.module.parameters():
            p += 0.02 * torch.randn_like(p)


def test_each_token_has_the_version_and_the_log_prob_of_the_weights_that_sampled_it(
    engine: NativeEngine,
) -> None:
    async def go() -> None:
        requests = ResumableRequests(engine)
        module = engine.model.module
        await engine.update(Weights("shared", module=module), 3)
        assert await cut_after(requests, 12) is None
        [request] = requests.kept["g"].values()
        before = [p.copy() for p in request.completions]
        assert all(
            6 <= len(p.tokens) < 24 and p.stop is None and set(p.versions) == {3} for p in before
        )
        score = trainer_score(engine.model)
        scores = {3: [score([5, 6, 7, *p.tokens]) for p in before]}
        shaken(engine, 0)
        await engine.update(Weights("shared", module=module), 4)
        done = await cut_after(requests, 10**9)
        assert done is not None and len(done) == 2
        scores[4] = [score([5, 6, 7, *c.tokens]) for c in done]
        for i, (completion, prefix) in enumerate(zip(done, before, strict=True)):
            k = len(prefix.tokens)
            assert (
                completion.tokens[:k] == prefix.tokens
                and completion.logprobs[:k] == prefix.logprobs
            )
            assert (
                completion.versions == [3] * k + [4] * (24 - k) and completion.stop is Stop.LENGTH
            )
            told = torch.tensor(completion.logprobs)
            assert torch.allclose(told[:k], scores[3][i][3:], atol=1e-5)
            assert torch.allclose(told[k:], scores[4][i][3 + k :], atol=1e-5)
            # they are others' under the new weights
            assert not torch.allclose(told[:k], scores[4][i][3 : 3 + k], atol=1e-3)
        assert not engine._busy() and engine.pool.free == engine.pool.total

    asyncio.run(go())


def test_what_is_whole_is_not_generated_again_and_another_prompt_is_another_request(
    engine: NativeEngine,
) -> None:
    async def go() -> None:
        requests = ResumableRequests(engine)
        done = await cut_after(requests, 10**9)
        sampled = engine.stats.generated_tokens
        assert (
            await cut_after(requests, 10**9) == done
            and engine.stats.generated_tokens == sampled == 48
        )
        other = await cut_after(requests, 10**9, prompt=(5, 6, 8))
        assert other != done and engine.stats.generated_tokens == 96
        requests.forget(["g"])
        assert requests.tokens() == 0
        assert requests.kept == {}

    asyncio.run(go())


def test_siblings_that_were_cut_together_go_on_with_draws_of_their_own(
    engine: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        requests = ResumableRequests(engine)
        generate = engine.generate
        keys: list[int] = []

        async def listening(*given: Any, key: int, **named: Any) -> Any:
            keys.append(key)
            return await generate(*given, key=key, **named)

        monkeypatch.setattr(engine, "generate", listening)
        assert await cut_after(requests, 12) is None
        [request] = requests.kept["g"].values()
        assert {len(p.tokens) for p in request.completions} == {6}, (
            "cut at one moment, so nothing but their places tells them apart"
        )
        assert await cut_after(requests, 10**9) is not None
        # the request of both, then one for the rest of each
        assert len(keys) == len(set(keys)) == 3

    asyncio.run(go())


def test_going_on_from_a_saved_state_is_the_same(engine: NativeEngine) -> None:
    async def go() -> None:
        requests = ResumableRequests(engine)
        assert await cut_after(requests, 12) is None
        other = ResumableRequests(engine)
        other.kept = requests_from_json(json.loads(json.dumps(requests_to_json(requests.kept))))
        assert await cut_after(requests, 10**9) == await cut_after(other, 10**9)

    asyncio.run(go())


def test_an_episode_that_was_cut_goes_on_in_the_turn_it_was_in() -> None:
    """Turns that were complete stay as they were sampled; the one that was cut is continued; the
    rest has the new weights.
    """
    renderer = make_renderer()
    module = make_module(
        "llama", vocab_size=len(renderer.tokenizer), max_position_embeddings=512, spread=1.0
    )
    engine = NativeEngine(
        CausalModel(module, renderer.tokenizer),
        stop_tokens=renderer.stop_tokens,
        kv_gib=0.01,
        context=512,
    )
    answers = ["go on"]

    async def go() -> None:
        requests = ResumableRequests(engine)
        episodes = make_episodes(
            engine, renderer, lambda row: Echo(4, answer=answers[0]), n=2, new_tokens=12
        )
        context = RolloutContext("g", engine=requests.engine_of("g"))
        task = asyncio.ensure_future(episodes(Row("r", "hello"), context))
        while not any(
            len(request.completions[0].tokens) in range(3, 12)
            and request.completions[0].stop is None
            and len(requests.kept["g"]) >= 4
            for request in requests.kept.get("g", {}).values()
        ):
            await asyncio.sleep(0)
            assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        kept = requests.copied()["g"]
        before = sum(len(a.completions[0].tokens) for a in kept.values())
        whole = [
            a.completions[0].tokens for a in kept.values() if a.completions[0].stop is not None
        ]
        begun = [
            a.completions[0].tokens
            for a in kept.values()
            if a.completions[0].stop is None and a.completions[0].tokens
        ]
        assert whole and begun
        saved = requests.copied()
        shaken(engine, 0)
        await engine.update(Weights("shared", module=module), 5)
        sampled = engine.stats.generated_tokens
        group = await episodes(Row("r", "hello"), context)
        trained = [s.tokens[s.trained].tolist() for s in group.samples]
        # nothing is sampled twice
        assert engine.stats.generated_tokens - sampled == sum(map(len, trained)) - before
        joined = [",".join(map(str, t)) for t in trained]
        assert all(
            any(",".join(map(str, part)) in row for row in joined) for part in (*whole, *begun)
        )
        for s in group.samples:
            versions = s.versions[s.trained].tolist()
            assert versions == sorted(versions) and set(versions) == {0, 5} and s.reward == 0.0
        # an environment that changes its mind: only first turns can be as they were
        requests.kept = saved
        answers[0] = "something else"
        other = await episodes(Row("r", "hello"), context)
        for s in other.samples:
            first = next(
                a.completions[0].tokens
                for key, a in kept.items()
                if key == seed_of(0, "sample", s.uid, 0)
            )
            row = s.tokens[s.trained].tolist()
            assert row[: len(first)] == first and set(
                s.versions[s.trained].tolist()[len(first) :]
            ) == {5}

    asyncio.run(go())


# the source


class Slow:
    """Groups take `ticks(row)` ticks of the engine's time; requests that count what was done
    before a cut.
    """

    def __init__(self, ticks: Callable[[int], int]):
        self.ticks = ticks
        self.done = dict[str, list[int]]()
        self.version = 0
        self.kept: dict[str, Any] = {}

    async def __call__(self, row: Row, context: RolloutContext) -> Group:
        name = context.group
        sampled = self.done.setdefault(name, [])
        for _ in range(self.ticks(int(row.id[1:])) - len(sampled)):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            sampled.append(self.version)
        context.generated()
        for _ in range(5):
            await asyncio.sleep(0)
        versions = torch.tensor([-1, *sampled], dtype=torch.int32)
        n = len(sampled)
        samples = [
            Sample.from_tokens(
                f"{name}#{i}", [1] * (n + 1), [False] + [True] * n, group=name, reward=float(i)
            ).with_(versions=versions)
            for i in (0, 1)
        ]
        return Group(row, samples, ["", ""])

    def engine_of(self, group: str) -> None:
        """The ticks are its engine."""

    def copied(self) -> dict[str, Any]:
        return {}

    def tokens(self) -> int:
        return sum(map(len, self.done.values()))

    def forget(self, groups: Any) -> None:
        for name in groups:
            self.done.pop(name)


def source_of(
    rollouts: Slow, staleness: int = 2, over_provision: float = 1.5, **kw: Any
) -> PartialSource:
    return PartialSource(
        ROWS,
        Cursor(64, 0, False),
        rollouts,
        4,
        requests=rollouts,
        staleness=staleness,
        over_provision=over_provision,
        **kw,
    )  # type: ignore[arg-type]


def test_nothing_is_lost_twice_or_too_old() -> None:
    """Every seventh row needs ten times as long."""

    async def go(staleness: int) -> None:
        rollouts = Slow(lambda i: 40 if i % 7 == 3 else 4)
        source = source_of(rollouts, staleness)
        trained = []
        ages = []
        for step in range(12):
            rollouts.version = step
            batch = await take_batch(source, step, step)
            assert len(batch.groups) >= 4
            trained += [g.samples[0].group for g in batch.groups]
            for g in batch.groups:
                versions = g.samples[0].versions[1:].tolist()
                assert (
                    versions == sorted(versions)
                    and step - versions[0] <= staleness
                    and len(versions) == (40 if int(g.row.id[1:]) % 7 == 3 else 4)
                )
                ages.append(step - versions[0])
            assert batch.oldest is not None and step - batch.oldest <= staleness
            assert batch.report["rollout/carried"] == len(source.unfinished) <= 2
        begun = {f"{i}:r{i}" for i in range(source.cursor.taken)}
        under_way = {f"{c.choice.position}:r{c.choice.row}" for c in source.unfinished}
        assert (
            len(trained) == len(set(trained))
            and set(trained) | under_way == begun
            and not set(trained) & under_way
        )
        assert max(ages) == staleness and sum(ages) > 0

    for staleness in (1, 3):
        asyncio.run(go(staleness))


def test_a_cut_step_leaves_everything_as_it_was(tmp_path: Path) -> None:
    async def go() -> None:
        rollouts = Slow(lambda i: 40 if i % 3 == 1 else 4)
        source = source_of(rollouts, journal=Journal(tmp_path / "journal"))
        await take_batch(source, 0, 0)
        carried = list(source.unfinished)
        taken = source.cursor.taken
        assert len(carried) == 2
        task = asyncio.ensure_future(take_batch(source, 1, 1))
        for _ in range(6):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert source.unfinished == carried and source.cursor.taken == taken
        state = source.state()
        first = [g.samples[0].group for g in (await take_batch(source, 1, 1)).groups]
        again = source_of(
            Slow(lambda i: 1 if i % 3 == 1 else 4), journal=Journal(tmp_path / "journal")
        )  # another clock: others would be first
        again.load(State({}, {**state.meta, "kept": {}}))
        again.requests = rollouts  # type: ignore[assignment]
        rollouts.done.update({name: [] for name in first})
        again.cursor.take(taken)
        # the journal knows who was taken
        assert [g.samples[0].group for g in (await take_batch(again, 1, 1)).groups] == first

    asyncio.run(go())


# whole runs

PARTIAL = (
    "rollout.partial=true",
    "rollout.staleness=2",
    "sampling.over_provision=1.5",
    "rollout.max_batch=6",
    "rollout.max_new_tokens=12",
)


class Crash(Exception):
    pass


def drop(line: dict[str, Any]) -> dict[str, Any]:
    return {
        k: v
        for k, v in line.items()
        if not k.startswith(("time", "share", "memory", "tokens_per_second", "efficiency"))
    }


def test_a_run_with_partial_rollouts_is_exact_on_resume(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("train.steps=6", "run.checkpoint.every=2", *PARTIAL)
    whole = make("whole", "grpo", *settings)
    cut = make("cut", "grpo", *settings)
    seen: list[Group] = []
    original_pack = RLTrainer._pack
    with monkeypatch.context() as patch:
        patch.setattr(
            RLTrainer,
            "_pack",
            lambda self, groups: (seen.extend(groups), original_pack(self, groups))[1],
        )
        launch(whole)
    names = [g.samples[0].group for g in seen]
    assert len(names) == len(set(names)) == 24
    mixed = [s for g in seen for s in g.samples if len({int(v) for v in s.versions[s.trained]}) > 1]
    assert mixed, "nothing was carried over"
    for s in mixed:
        versions = s.versions[s.trained].tolist()
        assert versions == sorted(versions) and versions[-1] - versions[0] <= 2
    told = lines(whole)
    assert (
        sum(m["rollout/carried"] for m in told) > 0
        and max(m["rollout/staleness/max"] for m in told) <= 2
    )
    assert all(m["tokens/sampled"] == m["tokens/trained"] + m["tokens/dropped"] for m in told)
    from reinforge.backends.local import LocalBackend

    original = LocalBackend.step

    def dies(self: LocalBackend) -> Any:
        if self.steps == 3:
            raise Crash
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(LocalBackend, "step", dies)
        with pytest.raises(Crash):
            launch(cut)
    extra = store.load(store.steps(Path(cut.run.dir))[0])[1]
    assert (
        extra["step"] == 2
        and extra["parts"]["partial"]["carried"]
        and extra["parts"]["partial"]["kept"]
    )
    launch(cut)
    assert digest(cut) == digest(whole)
    assert [drop(m) for m in lines(cut)] == [drop(m) for m in lines(whole)]


def test_a_run_that_is_stopped_while_it_generates_goes_on_exactly(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third step is cut after some tokens: they are thrown away, and those that were carried
    into the step are not.
    """
    settings = ("train.steps=5", *PARTIAL)
    whole = make("whole", "grpo", *settings)
    cut = make("cut", "grpo", *settings)
    launch(whole)
    trainer = build(cut, SilentView(), CallerObjects(data=DATA, rewards=odd))
    assert isinstance(trainer, RLTrainer) and isinstance(trainer.source, PartialSource)
    run = trainer.run
    source = trainer.source
    round_ = NativeEngine._round
    before: list[int] = []  # tokens that were carried into the step

    def counting(self: NativeEngine) -> None:
        if run.step == 2 and not before:
            before.append(source.requests.tokens())
        round_(self)
        if run.step == 2 and source.requests.tokens() >= before[0] + 12:
            run.terminate()

    async def go() -> None:
        with run:
            async for _ in trainer.steps():
                pass

    with monkeypatch.context() as patch:
        patch.setattr(NativeEngine, "_round", counting)
        with pytest.raises(Terminated, match="at step 2 of 5"):
            asyncio.run(go())
    assert before[0] > 0, "nothing was carried over"
    launch(cut)
    assert digest(cut) == digest(whole)


def test_what_was_trained_is_in_no_later_checkpoint(make: Callable[..., Config]) -> None:
    """A checkpoint holds the tokens of the groups that are under way and of no others: it does not
    grow with the run.
    """
    cfg = make(
        "run", "grpo", "train.steps=6", "run.checkpoint.every=1", "run.checkpoint.keep=6", *PARTIAL
    )
    launch(cfg)
    found = [store.load(path)[1]["parts"]["partial"] for path in store.steps(Path(cfg.run.dir))]
    assert len(found) == 6 and any(saved["kept"] for saved in found)
    for saved in found:
        under_way = {position for position, *_ in saved["carried"]}
        assert {int(name.partition(":")[0]) for name in saved["kept"]} <= under_way


@pytest.mark.parametrize(
    ("overrides", "algorithm", "says"),
    [
        (("rollout.staleness=0",), "grpo", "staleness to at least 1"),
        (("sampling.over_provision=1",), "grpo", "over_provision"),
        (("rollout.stop=[x]",), "grpo", "stop string"),
        ((), "online_dpo", "fresh answers"),
    ],
    ids=str,
)
def test_what_cannot_be_partial(
    make: Callable[..., Config], overrides: tuple[str, ...], algorithm: str, says: str
) -> None:
    with pytest.raises(InputError, match=says):
        make("x", algorithm, *PARTIAL, *overrides)


def test_an_engine_that_does_not_tell_tokens_is_refused(make: Callable[..., Config]) -> None:
    with pytest.raises(InputError, match=r"rollout\.partial.*tokens as they come"):
        resumable_requests(make("x", "grpo", *PARTIAL), FakeEngine())
    assert resumable_requests(make("x", "grpo"), FakeEngine()) is None
