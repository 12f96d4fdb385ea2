"""A real vLLM server on the CPU, in its own environment: what it samples, scores and serves after
updates is what the trainer computes.

One server for all tests, in this order: the last ones end it twice and see it come back.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from helpers.engine_contract import EngineCase, EngineContract
from helpers.vllm_python import START, vllm_python
from reinforge.build.served import setup_of, trainer_score
from reinforge.config.adapter import AdapterConfig
from reinforge.config.load import config_from_dict
from reinforge.config.model import ModelConfig
from reinforge.core.batch import Batch
from reinforge.core.engine import Engine, Sampling
from reinforge.core.errors import InputError
from reinforge.core.sample import Sample, Stop
from reinforge.core.weights import Weights
from reinforge.engines.native import NativeEngine
from reinforge.engines.resumable import ResumableRequests
from reinforge.engines.served.engine import ServedEngine
from reinforge.engines.served.make import make_served
from reinforge.models.adapters import add_adapter
from reinforge.models.causal import CausalModel
from reinforge.models.load import load_model
from reinforge.models.tiny import make_tiny_model
from reinforge.weights.probe import WeightMismatch

pytestmark = pytest.mark.timeout(3 * START)
run = asyncio.run
PROMPT = [5, 60, 7, 100, 9]
FREE = Sampling(12, ignore_eos=True)


@dataclass
class ModelAndEngine:
    model: CausalModel
    engine: ServedEngine

    @property
    def weights(self) -> Weights:
        return Weights("shared", module=self.model.module)

    def logprobs(
        self, prompt: Sequence[int], tokens: Sequence[int], temperature: float
    ) -> torch.Tensor:
        """The trainer's, of the tokens after the prompt."""
        whole = [*prompt, *tokens]
        batch = Batch.pack(
            [Sample.from_tokens("x", whole, [i >= len(prompt) for i in range(len(whole))])]
        )
        with torch.no_grad():
            return self.model.logprobs(batch, temperature=temperature)[0]

    def change(self, seed: int, size: float = 0.05) -> None:
        torch.manual_seed(seed)
        with torch.no_grad():
            for p in self.model.module.parameters():
                p.add_(torch.randn_like(p) * size)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelAndEngine]:
    python = vllm_python()
    folder = tmp_path_factory.mktemp("vllm")
    path = make_tiny_model(
        folder / "model", width=64, layers=2, heads=2, kv_heads=1, context=256, spread=0.2
    )
    cfg = config_from_dict(
        {
            "model": {"path": str(path), "device": "cpu"},
            "algorithm": {"name": "grpo"},
            "data": {"source": "arithmetic:chain"},
            "rewards": [{"name": "exact_number"}],
            "train": {"steps": 1},
            "rollout": {"engine": "vllm", "max_batch": 64},
            "engine": {"python": python, "start_seconds": START, "health_seconds": 30},
            "run": {"dir": str(folder / "run")},
        },
        where="test",
    )
    model = load_model(ModelConfig(path=str(path), device="cpu"))
    engine = make_served(
        setup_of(cfg, model, [2], context=256, longest=200, saved=str(path)), trainer_score(model)
    )
    found = ModelAndEngine(model, engine)
    run(engine.update(found.weights, 0))
    yield found
    engine.close()


def test_is_an_engine_of_its_own_python(pair: ModelAndEngine) -> None:
    assert isinstance(pair.engine, Engine)
    [replica] = pair.engine.replicas
    assert (
        replica.facts["tied"]
        and replica.facts["dtype"] == "float32"
        and replica.facts["device"] == "cpu"
    )
    assert pair.engine.measured["weights/probe_error"] < 1e-4


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_log_probs_are_the_trainers(pair: ModelAndEngine, temperature: float) -> None:
    """After temperature, over the full vocabulary; greedy reports temperature 1."""
    for done in run(
        pair.engine.generate(PROMPT, Sampling(24, temperature, ignore_eos=True), key=3, n=2)
    ):
        want = pair.logprobs(PROMPT, done.tokens, temperature or 1.0)
        assert torch.tensor(done.logprobs).sub(want).abs().max() < 1e-4
        assert len(done.tokens) == 24 and done.stop is Stop.LENGTH and set(done.versions) == {0}


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake_are_understood(pair: ModelAndEngine, level: int) -> None:
    """On a CPU vLLM gives nothing back, so we never ask; but its scheduler stands still and goes on
    as on a GPU.
    """
    [replica] = pair.engine.replicas
    http = replica.http
    assert http is not None and pair.engine.setup.sleep_level == 0

    async def work() -> None:
        [before] = await pair.engine.generate(PROMPT, FREE, key=5)
        await pair.engine.dialect.sleep(http, level)
        assert (await http.post("/reinforge/status"))["asleep"]
        await pair.engine.dialect.wake(http, level)
        assert not (await http.post("/reinforge/status"))["asleep"]
        if level == 2:
            await pair.engine.update(pair.weights, 0)
        [after] = await pair.engine.generate(PROMPT, FREE, key=5)
        assert after.tokens == before.tokens

    run(work())


def test_greedy_is_the_native_engines(pair: ModelAndEngine) -> None:
    greedy = Sampling(20, 0.0)
    native = NativeEngine(pair.model, stop_tokens=[2], kv_gib=0.01)
    for prompt in (PROMPT, [11, 12], list(range(20, 50))):
        assert (
            run(pair.engine.generate(prompt, greedy, key=1))[0].tokens
            == run(native.generate(prompt, greedy, key=1))[0].tokens
        )


def test_more_prompts_than_one_pass_takes(pair: ModelAndEngine) -> None:
    """Where vLLM cuts a prompt in two it rewinds the seeded generator; a CPU's cannot be, and the
    worker ended.
    """

    async def work() -> None:
        prompts = [[3 + (i * 7 + j) % 250 for j in range(150)] for i in range(60)]
        asked = [
            pair.engine.generate(prompt, Sampling(2, ignore_eos=True), key=i)
            for i, prompt in enumerate(prompts)
        ]
        for prompt, [done] in zip(prompts, await asyncio.gather(*asked), strict=True):
            assert (
                torch.tensor(done.logprobs).sub(pair.logprobs(prompt, done.tokens, 1.0)).abs().max()
                < 1e-4
            )

    run(work())
    assert pair.engine.restarts == 0


def test_stops(pair: ModelAndEngine) -> None:
    engine = pair.engine
    free = run(engine.generate(PROMPT, FREE, key=8))[0]
    for at in (0, 5, 11):
        first = free.tokens.index(free.tokens[at])
        done = run(engine.generate(PROMPT, Sampling(12, stop_tokens=(free.tokens[at],)), key=8))[0]
        assert (
            done.tokens == free.tokens[: first + 1]
            and done.stop is Stop.EOS
            and len(done.logprobs) == first + 1
        )
    decode = pair.model.tokenizer.decode
    string = decode(free.tokens)[-3:-1]
    want = next(n for n in range(1, 13) if string in decode(free.tokens[:n]))
    done = run(engine.generate(PROMPT, Sampling(12, stop_strings=("never", string)), key=8))[0]
    assert done.tokens == free.tokens[:want] and done.stop is Stop.EOS
    with pytest.raises(InputError, match="empty prompt"):
        run(engine.generate([], FREE, key=1))
    with pytest.raises(InputError, match="past the model's context"):
        run(engine.generate(PROMPT, Sampling(256), key=1))


def test_cancelling_frees_everything(pair: ModelAndEngine) -> None:
    async def work() -> None:
        engine = pair.engine
        http = pair.engine.replicas[0].http
        assert http is not None
        task = asyncio.ensure_future(
            engine.generate(PROMPT, Sampling(190, ignore_eos=True), key=1, n=64)
        )
        while (await http.post("/reinforge/status"))["held"] < 1:
            assert not task.done(), "it was over before it could be cancelled"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        end = time.monotonic() + 20
        while (status := await http.post("/reinforge/status"))["held"] or status["running"]:
            assert time.monotonic() < end, status
            await asyncio.sleep(0.05)

    run(work())


def test_strangers_are_refused(pair: ModelAndEngine) -> None:
    """Whoever has no key can neither generate nor call the worker, by our paths or by
    vLLM's own.
    """
    from reinforge.engines.served.http import ServerClient

    address = pair.engine.replicas[0].http
    assert address is not None
    for path in ("/reinforge/status", "/reinforge/call", "/v1/completions", "/collective_rpc"):
        with pytest.raises(InputError, match="refuses the key"):
            run(ServerClient(address.address, "wrong").post(path, {}))


def test_a_live_update(pair: ModelAndEngine) -> None:
    before = run(pair.engine.generate(PROMPT, FREE, key=8))[0]
    pair.change(1)
    run(pair.engine.update(pair.weights, 3))
    assert (
        pair.engine.measured["weights/probe_error"] < 1e-4
        and pair.engine.measured["weights/seconds"] < 60
    )
    after = run(pair.engine.generate(PROMPT, FREE, key=8))[0]
    assert set(after.versions) == {3} and after.tokens != before.tokens
    assert (
        torch.tensor(after.logprobs).sub(pair.logprobs(PROMPT, after.tokens, 1.0)).abs().max()
        < 1e-4
    )


def test_an_update_in_the_middle_of_completions(pair: ModelAndEngine) -> None:
    """The tokens before it are those of the old weights, the ones after it of the new, and each
    says so.
    """

    async def attempt(version: int) -> bool:
        """False: all was written before the update came, or nothing was."""
        engine = pair.engine
        http = pair.engine.replicas[0].http
        assert http is not None
        before = engine.version
        old = {name: p.clone() for name, p in pair.model.module.state_dict().items()}
        task = asyncio.ensure_future(
            engine.generate(PROMPT, Sampling(190, ignore_eos=True), key=version, n=128)
        )
        while not task.done() and not (await http.post("/reinforge/status"))["running"]:
            await asyncio.sleep(0.01)
        pair.change(version)
        await engine.update(pair.weights, version)
        new = {name: p.clone() for name, p in pair.model.module.state_dict().items()}
        completions = await task
        assert all(
            len(done.tokens) == 190 and done.versions == sorted(done.versions)
            for done in completions
        )
        spanning = [done for done in completions if set(done.versions) == {before, version}]
        for done in spanning:
            cut = done.versions.index(version)
            new_part = pair.logprobs([*PROMPT, *done.tokens[:cut]], done.tokens[cut:], 1.0)
            assert torch.tensor(done.logprobs[cut:]).sub(new_part).abs().max() < 1e-4
            pair.model.module.load_state_dict(old)
            old_part = pair.logprobs(PROMPT, done.tokens[:cut], 1.0)
            pair.model.module.load_state_dict(new)
            assert torch.tensor(done.logprobs[:cut]).sub(old_part).abs().max() < 1e-4
        return bool(spanning)

    async def work() -> bool:
        return any([await attempt(version) for version in (101, 102, 103)])

    assert run(work()), "no update fell into the middle of completions"


def test_what_is_cut_goes_on_under_new_weights(pair: ModelAndEngine) -> None:
    """As partial rollouts do it: the part before the cut keeps the versions and the log-probs of
    the old weights, the rest has those of the new.
    """
    requests = ResumableRequests(pair.engine)
    ask = requests.engine_of("group")
    params = Sampling(190, ignore_eos=True)

    async def work() -> None:
        before = pair.engine.version
        task = asyncio.ensure_future(ask.generate(PROMPT, params, key=1, n=32))
        while not requests.tokens():
            await asyncio.sleep(0.01)
        assert not task.done(), "it was over before it could be cut"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        [request] = requests.copied()["group"].values()
        cut = request.completions
        assert all(0 < len(c.tokens) < 190 and c.stop is None for c in cut)
        for c in cut:
            old = pair.logprobs(PROMPT, c.tokens, 1.0)
            assert torch.tensor(c.logprobs).sub(old).abs().max() < 1e-4
        pair.change(7)
        await pair.engine.update(pair.weights, before + 1)
        for part, done in zip(cut, await ask.generate(PROMPT, params, key=1, n=32), strict=True):
            n = len(part.tokens)
            assert done.tokens[:n] == part.tokens and done.logprobs[:n] == part.logprobs
            assert done.versions == [before] * n + [before + 1] * (190 - n)
            new = pair.logprobs([*PROMPT, *done.tokens[:n]], done.tokens[n:], 1.0)
            assert torch.tensor(done.logprobs[n:]).sub(new).abs().max() < 1e-4

    run(work())


def test_an_adapter_travels_alone_once_its_base_is_there(pair: ModelAndEngine) -> None:
    module = load_model(ModelConfig(path=pair.engine.setup.model, device="cpu")).module
    adapted = add_adapter(module, AdapterConfig(rank=4), seed=0)
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.randn_like(p) * 0.2)
    model = CausalModel(adapted, pair.model.tokenizer)
    transfer = pair.engine.transfer
    weights = Weights("shared", module=adapted, probe=trainer_score(model))
    bases = []
    for version in (4, 5):
        with torch.no_grad():
            for name, p in adapted.named_parameters():
                if "lora_B" in name:
                    p.add_(torch.randn_like(p) * 0.1)
        run(pair.engine.update(weights, version))
        assert (
            transfer.published is not None
            and transfer.published.channel.kind == "adapter"
            and transfer.base is not None
        )
        bases.append(transfer.base[1].folder)
        done = run(pair.engine.generate(PROMPT, FREE, key=8))[0]
        want = ModelAndEngine(model, pair.engine).logprobs(PROMPT, done.tokens, 1.0)
        assert torch.tensor(done.logprobs).sub(want).abs().max() < 1e-4 and set(done.versions) == {
            version
        }
    sent = sum(file.stat().st_size for file in transfer.published.channel.folder.glob("*.bin"))  # type: ignore[union-attr]
    assert bases[0] == bases[1] and sent < 0.2 * sum(
        file.stat().st_size for file in bases[0].glob("*.bin")
    )
    pair.engine.transfer.kind = "disk"
    run(pair.engine.update(pair.weights, 6))
    assert (
        len(list((pair.engine.setup.folder / "engine-weights").iterdir())) == 1
        and pair.engine.measured["weights/probe_error"] < 1e-4
    )


def test_a_stale_tied_head_is_caught_and_named(pair: ModelAndEngine) -> None:
    """Without our repair vLLM's head keeps the old weights.

    What was served before comes back in a fresh server.
    """
    engine = pair.engine
    old = {name: p.clone() for name, p in pair.model.module.state_dict().items()}
    pair.change(3)
    engine.transfer.fix_head = False
    with pytest.raises(WeightMismatch, match="tied lm_head is stale"):
        run(engine.update(pair.weights, 7))
    engine.transfer.fix_head = True
    pair.model.module.load_state_dict(old)
    done = run(engine.generate(PROMPT, FREE, key=8))[0]
    assert set(done.versions) == {6}
    assert (
        torch.tensor(done.logprobs).sub(pair.logprobs(PROMPT, done.tokens, 1.0)).abs().max() < 1e-4
    )


@pytest.mark.long
def test_what_a_killed_server_had_told_goes_on(pair: ModelAndEngine) -> None:
    requests = ResumableRequests(pair.engine)
    params = Sampling(190, ignore_eos=True)

    async def work() -> None:
        [replica] = pair.engine.replicas
        task = asyncio.ensure_future(
            requests.engine_of("group").generate(PROMPT, params, key=2, n=32)
        )
        while not requests.tokens():
            await asyncio.sleep(0.01)
        assert not task.done() and replica.process is not None
        os.kill(replica.process.pid, signal.SIGKILL)
        [request] = requests.copied()["group"].values()
        for before, done in zip(request.completions, await task, strict=True):
            assert done.tokens[: len(before.tokens)] == before.tokens
            assert len(done.tokens) == 190 and set(done.versions) == {pair.engine.version}
            want = pair.logprobs(PROMPT, done.tokens, 1.0)
            assert torch.tensor(done.logprobs).sub(want).abs().max() < 1e-4

    restarts = pair.engine.restarts
    run(work())
    assert requests.tokens() == 32 * 190 and pair.engine.restarts == restarts + 1


@pytest.mark.long
def test_what_a_killed_server_held_is_sent_again(pair: ModelAndEngine) -> None:
    async def work() -> None:
        engine, [replica] = pair.engine, pair.engine.replicas
        assert replica.process is not None and replica.http is not None
        tasks = [
            asyncio.ensure_future(
                engine.generate([7 + i], Sampling(150, ignore_eos=True), key=i, n=32)
            )
            for i in range(3)
        ]
        while not (await replica.http.post("/reinforge/status"))["held"]:
            assert not any(task.done() for task in tasks), (
                "it was over before the server could be killed"
            )
        os.kill(replica.process.pid, signal.SIGKILL)
        for i, found in enumerate(await asyncio.gather(*tasks)):
            for done in found:
                assert len(done.tokens) == 150 and set(done.versions) == {engine.version}
                assert (
                    torch.tensor(done.logprobs)
                    .sub(pair.logprobs([7 + i], done.tokens, 1.0))
                    .abs()
                    .max()
                    < 1e-4
                )

    restarts = pair.engine.restarts
    run(work())
    assert pair.engine.restarts == restarts + 1


def with_stops(pair: ModelAndEngine, stop_tokens: Sequence[int] = ()) -> ServedEngine:
    """The one engine that there is: stop tokens go with each request."""
    pair.engine.stop_tokens = frozenset(stop_tokens)
    return pair.engine


class TestContract(EngineContract):
    """With the server that the other tests have."""

    cases = (
        EngineCase(
            name="vllm",
            implementation="ServedEngine",
            make=with_stops,
            close=lambda engine: None,
            weights=lambda pair, _: pair.weights,
            idle=lambda e: not any(r.load for r in e.replicas),
            vocabulary=512,
            cannot={
                "test_errors_reach_every_caller_and_nobody_hangs": (
                    "a server that breaks is started again, and asked again"
                ),
                "test_an_update_in_the_middle_of_a_completion": (
                    "one answer is over too soon: above, there are 128"
                ),
                "test_an_update_to_the_same_values_changes_no_draw": (
                    "a server goes on after an update with draws of another stream"
                ),
                "test_stop_strings": "its bytes need not be text: above, those that are",
            },
        ),
    )

    @pytest.fixture(scope="class")
    def started(self, pair: ModelAndEngine) -> ModelAndEngine:
        return pair

    @pytest.fixture(autouse=True)
    def as_at_the_start(self, pair: ModelAndEngine) -> None:
        run(pair.engine.update(pair.weights, 0))


def test_nothing_is_left_in_memory(pair: ModelAndEngine) -> None:
    pair.engine.close()
    left = (
        [p for p in Path("/dev/shm").glob(f"reinforge-weights-{os.getpid()}-*")]
        if Path("/dev/shm").is_dir()
        else []
    )
    assert left == [] and not any(r.up for r in pair.engine.replicas)
