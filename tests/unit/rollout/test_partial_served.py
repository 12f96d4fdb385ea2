"""Rollouts that go on in the next step, by servers: every token has the version and the log-prob of
the weights that sampled it, whatever was cut, killed or resumed in between. The servers are stubs
whose log-probs can be computed by hand.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.paths import TESTS
from helpers.stub_servers import STUBS, StubServers, bigram, until
from helpers.tiny_runs import launch, lines
from helpers.toys import run
from reinforge.backends.local import LocalBackend
from reinforge.checkpoint import store
from reinforge.config.schema import Config
from reinforge.core.engine import Sampling
from reinforge.core.sample import Group, Sample
from reinforge.core.weights import Weights
from reinforge.engines.resumable import ResumableRequests
from reinforge.engines.served import sglang
from reinforge.engines.served.engine import ServedEngine
from reinforge.loops.rl import RLTrainer
from reinforge.models.causal import CausalModel

PROMPT = [5, 9, 33]
LENGTH = 40


@pytest.fixture(autouse=True)
def every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens are written here, so all are told."""
    monkeypatch.setattr(sglang, "TELL_EVERY", 1)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[StubServers]:
    made = StubServers(STUBS[0], tmp_path)
    yield made
    made.close()


def test_what_a_killed_server_had_told_goes_on_at_another(servers: StubServers) -> None:
    """Of two servers one dies in the middle of two answers: what was told stays, the rest is
    written by the other, at once.
    """
    engine = servers.engine(replicas=2)
    requests = ResumableRequests(engine)
    params = Sampling(LENGTH, ignore_eos=True)

    async def work() -> None:
        await engine.update(servers.weights, 1)
        servers.hold.touch()
        tasks = [
            asyncio.ensure_future(requests.engine_of(str(i)).generate([i], params, key=i, n=2))
            for i in (3, 4)
        ]
        await until(engine, "held", 2, 2)
        while requests.tokens() < 4 * 9:  # of ten each, the newest is never told
            await asyncio.sleep(0.01)
        told = requests.copied()
        victim = engine.replicas[1].process
        assert victim is not None
        asked = engine.stats.prompt_tokens
        began = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        await until(engine, "running", 4)  # both of the dead one's are at the other
        rerouted = time.monotonic() - began
        servers.hold.unlink()
        found = await asyncio.gather(*tasks)
        assert rerouted < 10 and engine.stats.prompt_tokens == asked + 2
        for i, completions in zip((3, 4), found, strict=True):
            [request] = told[str(i)].values()
            for before, done in zip(request.completions, completions, strict=True):
                assert len(before.tokens) == 9 and done.tokens[:9] == before.tokens
                assert done.versions == [1] * LENGTH
                want = bigram(servers.table(), [i, *done.tokens])[1:]
                assert torch.allclose(torch.tensor(done.logprobs), want, atol=1e-5)

    run(work())


# ---- whole runs ----


class Watched:
    """A run whose engine is a stub: the tables of embeddings that it was given, by version, and the
    groups that it trained.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path):
        STUBS[0].install(folder / "site")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder / "site"), str(TESTS)]))
        self.tables: dict[int, torch.Tensor] = {}
        self.trained: list[Group] = []
        update, pack = ServedEngine.update, RLTrainer._pack

        async def updating(engine: ServedEngine, weights: Weights, version: int) -> None:
            assert weights.module is not None
            embedding: Any = weights.module.get_input_embeddings()  # type: ignore[operator]
            self.tables[version] = embedding.weight.detach().clone()
            await update(engine, weights, version)

        def packing(trainer: RLTrainer, groups: list[Group]) -> Any:
            self.trained.extend(groups)
            return pack(trainer, groups)

        monkeypatch.setattr(ServedEngine, "update", updating)
        monkeypatch.setattr(RLTrainer, "_pack", packing)
        monkeypatch.setattr("reinforge.build.engines.trainer_score", of_the_stub)

    def samples(self) -> list[Sample]:
        return [s for g in self.trained for s in g.samples]

    def check(self, sample: Sample) -> None:
        """Its tokens are of ever newer weights, and each has the log-prob of those that its version
        names.
        """
        versions = sample.versions[sample.trained].tolist()
        assert versions == sorted(versions)
        for version in set(versions):
            own = (sample.versions == version) & sample.trained
            want = bigram(self.tables[version], sample.tokens.tolist())
            assert torch.allclose(sample.logprobs[own], want[own], atol=1e-5)


def of_the_stub(model: CausalModel) -> Callable[..., torch.Tensor]:
    """In place of the trainer's own log-probs: a stub is a bigram model."""

    def score(tokens: Any) -> torch.Tensor:
        embedding: Any = model.causal.get_input_embeddings()
        return bigram(embedding.weight.detach().float(), list(tokens))

    return score


SETTINGS = (
    "rollout.engine=sglang",
    "rollout.partial=true",
    "rollout.staleness=2",
    "rollout.max_new_tokens=16",
    "sampling.over_provision=1.5",
    "train.steps=4",
    "train.learning_rate=0.02",
    "run.checkpoint.every=1",
)


class Crash(Exception):
    pass


def test_a_run_with_a_server_goes_on_from_what_its_checkpoint_holds(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A run that dies in its third update and is started again: every prompt is trained once,
    and answers that were cut before the checkpoint go on after the resume, from the same tokens.
    """
    watched = Watched(monkeypatch, tmp_path)
    cfg = make("run", "grpo", *SETTINGS)
    step = LocalBackend.step

    def dies(backend: LocalBackend) -> Any:
        if backend.steps == 2:
            raise Crash
        return step(backend)

    with monkeypatch.context() as patch:
        patch.setattr(LocalBackend, "step", dies)
        with pytest.raises(Crash):
            launch(cfg)
    # steps 1 and 2 are in the checkpoint; 3 is done again
    before = watched.trained[: 2 * 4]
    watched.trained = []
    saved = store.load(store.steps(Path(cfg.run.dir))[0])[1]
    kept = saved["parts"]["partial"]["kept"]
    assert saved["step"] == 2 and kept
    launch(cfg)
    names = [g.samples[0].group for g in (*before, *watched.trained)]
    assert len(names) == len(set(names)) == 4 * 4
    for sample in watched.samples():
        watched.check(sample)
    mixed = [s for s in watched.samples() if len(set(s.versions[s.trained].tolist())) > 1]
    assert mixed, "nothing was carried over"
    told = lines(cfg)
    assert max(line["rollout/staleness/max"] for line in told) <= 2
    assert sum(line["rollout/carried"] for line in told) > 0
    went_on = 0
    for group in watched.trained:
        for _prompt, *parts in kept.get(group.samples[0].group, {}).values():
            for (tokens, logprobs, versions, *_), sample in zip(parts, group.samples, strict=True):
                n = len(tokens)
                assert sample.tokens[sample.trained].tolist()[:n] == tokens
                assert torch.equal(sample.logprobs[sample.trained][:n], torch.tensor(logprobs))
                assert sample.versions[sample.trained].tolist()[:n] == versions
                went_on += n
    assert went_on > 0, "the checkpoint held no token of what was trained later"
