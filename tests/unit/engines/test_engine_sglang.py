"""Served engines over real processes and real HTTP: routing, updates, deaths.

The servers are the stub of tests/helpers/sglang_stub.py, which speaks SGLang's API with a model
that can be computed by hand; that SGLang itself does the same was not run here.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.paths import TESTS
from helpers.toys import make_module, run
from reinforge.config.engine import EngineConfig
from reinforge.core.engine import Sampling
from reinforge.core.errors import InputError
from reinforge.core.weights import Weights
from reinforge.engines.served.dialect import ServerSetup
from reinforge.engines.served.engine import ServedEngine
from reinforge.engines.served.make import make_served
from reinforge.weights.probe import WeightMismatch

PROMPT = [5, 9, 33]
FREE = Sampling(12, ignore_eos=True)


@dataclass
class Made:
    module: Any
    engine: ServedEngine

    @property
    def weights(self) -> Weights:
        return Weights("shared", module=self.module)

    def table(self) -> torch.Tensor:
        return self.module.get_input_embeddings().weight.detach().clone()

    def change(self, seed: int) -> None:
        torch.manual_seed(seed)
        with torch.no_grad():
            self.module.get_input_embeddings().weight.add_(torch.randn(64, 32) * 0.05)

    def ask(self, path: str, replica: int = 0) -> Any:
        http = self.engine.replicas[replica].http
        assert http is not None
        return http.post(path)

    async def until_held(self, *counts: int) -> None:
        """Waits until as many requests stand in the middle of their answer, by replica."""
        found: list[int] = []
        end = time.monotonic() + 60
        while found != list(counts):
            assert time.monotonic() < end, f"{found} requests are held, not {counts}"
            await asyncio.sleep(0.02)
            found = [(await self.ask("/stub", i))["held"] for i in range(len(counts))]


def bigram(table: torch.Tensor, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    logp = (table[tokens[:-1]] @ table.T / temperature).log_softmax(-1)
    return torch.cat([torch.zeros(1), logp.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]])


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Made]]:
    """make(replicas=.., env={..}, ...) -> engine and the trainer's module."""
    stub = tmp_path / "site" / "sglang"
    stub.mkdir(parents=True)
    (stub / "__init__.py").touch()
    shutil.copyfile(TESTS / "helpers" / "sglang_stub.py", stub / "launch_server.py")
    opened: list[ServedEngine] = []

    def build(*, env: dict[str, str] | None = None, device: str = "cpu", **options: Any) -> Made:
        module = make_module(spread=8.0)
        saved = tmp_path / "model"
        module.save_pretrained(saved)
        cfg = EngineConfig(
            env={"PYTHONPATH": str(tmp_path / "site"), **(env or {})},
            **{"start_seconds": 120, **options},
        )
        setup = ServerSetup(
            "sglang",
            cfg,
            str(saved),
            tmp_path / "run",
            "float32",
            device,
            128,
            64,
            stop_tokens=(2,),
            seed=3,
        )
        engine = make_served(
            setup,
            lambda tokens: bigram(module.get_input_embeddings().weight.detach(), list(tokens)),
        )
        opened.append(engine)
        return Made(module, engine)

    yield build
    for engine in opened:
        engine.close()


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """While it exists a server with STUB_HOLD stops in the middle of every answer."""
    file = tmp_path / "hold"
    file.touch()
    return file


def test_log_probs_are_those_of_the_weights(make: Callable[..., Made]) -> None:
    """After temperature. The contract of engines over the same server is in tests/contract."""
    made = make()
    engine = made.engine

    async def work() -> None:
        await engine.update(made.weights, 0)
        assert engine.measured["weights/probe_error"] < 1e-5
        for temperature in (1.0, 0.5):
            params = Sampling(9, temperature, ignore_eos=True)
            [done] = await engine.generate(PROMPT, params, key=1)
            want = bigram(made.table(), PROMPT + done.tokens, temperature)[len(PROMPT) :]
            assert torch.tensor(done.logprobs).sub(want).abs().max() < 1e-4
        args = (await made.ask("/stub"))["args"]
        assert args["enable_deterministic_inference"] and args["dtype"] == "float32"
        assert not args["enable_memory_saver"]

    run(work())


def test_the_key_is_not_for_other_users_to_read(
    make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments of a process are: of the server, of what it starts, and of what ends it with us.

    And a key is not read as an option.
    """
    monkeypatch.setattr(
        "reinforge.engines.served.replica.secrets.token_hex",
        lambda size: f"-{os.urandom(size).hex()}",
    )
    made = make()
    run(made.engine.update(made.weights, 0))
    replica = made.engine.replicas[0]
    assert replica.http is not None and replica.http.key and replica.process is not None
    shown = b""
    for words in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has just ended
            shown += words.read_bytes()
    assert b"launch_server" in shown and replica.http.key.encode() not in shown
    assert replica.process.log.stat().st_mode & 0o077 == 0


def test_an_update_in_the_middle(make: Callable[..., Made], hold: Path) -> None:
    """Interrupted, loaded, gone on: each token has the log-prob that the weights it
    names give it.
    """
    made = make(env={"STUB_HOLD": str(hold)})

    async def work() -> None:
        await made.engine.update(made.weights, 1)
        old = made.table()
        task = asyncio.ensure_future(
            made.engine.generate(PROMPT, Sampling(60, ignore_eos=True), key=4, n=3)
        )
        await made.until_held(3)
        made.change(1)
        await made.engine.update(made.weights, 2)
        hold.unlink()
        for done in await task:
            cut = 20
            assert len(done.tokens) == 60 and done.versions == [1] * cut + [2] * (60 - cut)
            whole = PROMPT + done.tokens
            for table, part in ((old, slice(0, cut)), (made.table(), slice(cut, 60))):
                want = bigram(table, whole)[len(PROMPT) :][part]
                assert torch.tensor(done.logprobs[part]).sub(want).abs().max() < 1e-4
        facts = await made.ask("/stub")
        assert facts["flushed"] == 2 and facts["running"] == 0

    run(work())


def test_least_loaded_first_and_everybody_is_updated(make: Callable[..., Made], hold: Path) -> None:
    made = make(replicas=2, env={"STUB_HOLD": str(hold)})

    async def work() -> None:
        await made.engine.update(made.weights, 1)
        tasks = [
            asyncio.ensure_future(
                made.engine.generate([i], Sampling(30, ignore_eos=True), key=i, n=2)
            )
            for i in range(3, 7)
        ]
        await made.until_held(4, 4)
        assert [r.load for r in made.engine.replicas] == [4, 4]
        assert [(await made.ask("/stub", i))["running"] for i in (0, 1)] == [4, 4]
        hold.unlink()
        await asyncio.gather(*tasks)
        made.change(1)
        await made.engine.update(made.weights, 2)
        assert [r.version for r in made.engine.replicas] == [2, 2]
        assert [(await made.ask("/stub", i))["flushed"] for i in (0, 1)] == [2, 2]

    run(work())


def test_what_a_killed_replica_held_is_sent_to_another(
    make: Callable[..., Made], hold: Path
) -> None:
    """Nothing is lost, the samples are those that they would have been, and the dead one comes back
    with the current weights.
    """
    made = make(replicas=2, env={"STUB_HOLD": str(hold)})

    async def work() -> None:
        engine = made.engine
        await engine.update(made.weights, 1)
        made.change(1)
        await engine.update(made.weights, 2)
        hold.unlink()
        want = [
            (await engine.generate([i], Sampling(40, ignore_eos=True), key=i, n=2))
            for i in range(3, 7)
        ]
        hold.touch()
        tasks = [
            asyncio.ensure_future(engine.generate([i], Sampling(40, ignore_eos=True), key=i, n=2))
            for i in range(3, 7)
        ]
        await made.until_held(4, 4)
        victim = engine.replicas[1]
        assert victim.process is not None and victim.load == 4
        os.kill(victim.process.pid, signal.SIGKILL)
        hold.unlink()
        assert [[c.tokens for c in found] for found in await asyncio.gather(*tasks)] == [
            [c.tokens for c in found] for found in want
        ]
        while victim.version != 2:
            await engine.generate([3], Sampling(1), key=1)
            await asyncio.sleep(0.05)
        await engine.update(made.weights, 3)
        assert engine.measured["engine/restarts"] == 1.0
        assert victim.up and engine.restarts == 1 and (await made.ask("/stub", 1))["flushed"] == 2

    run(work())


def test_a_replica_that_hangs_is_replaced(
    make: Callable[..., Made], tmp_path: Path, hold: Path
) -> None:
    hang = tmp_path / "hang"
    made = make(replicas=1, env={"STUB_HOLD": str(hold), "STUB_HANG": str(hang)}, health_seconds=1)

    async def work() -> None:
        engine = made.engine
        await engine.update(made.weights, 1)
        task = asyncio.ensure_future(engine.generate(PROMPT, Sampling(40, ignore_eos=True), key=1))
        await made.until_held(1)
        hang.touch()
        hold.unlink()
        while not engine.restarts:
            await asyncio.sleep(0.05)
        hang.unlink()
        assert len((await task)[0].tokens) == 40 and engine.restarts >= 1

    run(work())


def test_a_request_that_breaks_is_not_the_servers_fault(make: Callable[..., Made]) -> None:
    made = make()
    run(made.engine.update(made.weights, 1))
    with pytest.raises(RuntimeError, match="this request breaks"):
        run(made.engine.generate([62, 5], FREE, key=1))
    assert (
        made.engine.restarts == 0
        and made.engine.replicas[0].load == 0
        and run(made.engine.generate(PROMPT, FREE, key=1))
    )


def test_weights_that_do_not_arrive_stop_the_run(make: Callable[..., Made]) -> None:
    made = make(env={"STUB_STALE": "1"})
    run(made.engine.update(made.weights, 1))
    old = made.table()
    made.change(1)
    with pytest.raises(WeightMismatch, match="still serves the weights of before"):
        run(made.engine.update(made.weights, 2))
    # and what was served before is served again
    done = run(made.engine.generate(PROMPT, FREE, key=1))[0]
    want = bigram(old, PROMPT + done.tokens)[len(PROMPT) :]
    assert set(done.versions) == {1} and torch.tensor(done.logprobs).sub(want).abs().max() < 1e-4


def test_cancelling_frees_everything(make: Callable[..., Made], hold: Path) -> None:
    made = make(env={"STUB_HOLD": str(hold)})

    async def work() -> None:
        await made.engine.update(made.weights, 1)
        task = asyncio.ensure_future(
            made.engine.generate(PROMPT, Sampling(100, ignore_eos=True), key=1, n=4)
        )
        await made.until_held(4)
        assert (await made.ask("/stub"))["running"] == 4
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        end = time.monotonic() + 60
        while (await made.ask("/stub"))["running"]:
            assert time.monotonic() < end
            await asyncio.sleep(0.02)
        assert made.engine.replicas[0].load == 0

    run(work())


@pytest.mark.parametrize(("sleep", "left"), [("cache", ["weights"]), ("all", [])])
def test_sleep_and_wake(make: Callable[..., Made], sleep: str, left: list[str]) -> None:
    made = make(device="cuda", sleep=sleep)

    async def work() -> None:
        engine = made.engine
        await engine.update(made.weights, 1)
        before = (await engine.generate(PROMPT, FREE, key=8))[0]
        await engine.sleep()
        await engine.sleep()
        assert (await made.ask("/stub"))["memory"] == left
        # wakes by itself, its weights with it
        assert (await engine.generate(PROMPT, FREE, key=8))[0].tokens == before.tokens
        await engine.sleep()
        made.change(1)
        await engine.update(made.weights, 2)
        assert (await made.ask("/stub"))["memory"] == ["kv_cache", "weights"]

    run(work())


def test_a_server_that_does_not_start_is_a_readable_error(
    make: Callable[..., Made], tmp_path: Path
) -> None:
    made = make()
    made.engine.close()
    (tmp_path / "model" / "model.safetensors").unlink()
    engine = make_served(made.engine.setup)
    with pytest.raises(InputError, match=r"FileNotFoundError.*model\.safetensors"):
        run(engine.generate(PROMPT, FREE, key=1))
    engine.close()


def test_an_address_that_is_not_ours(
    make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make()
    run(first.engine.update(first.weights, 1))
    http = first.engine.replicas[0].http
    assert http is not None and http.key is not None
    monkeypatch.setenv("THE_KEY", http.key)
    cfg = EngineConfig(address=[http.address], key_env="THE_KEY")
    setup = ServerSetup(
        "sglang",
        cfg,
        first.engine.setup.model,
        first.engine.setup.folder,
        "float32",
        "cpu",
        128,
        64,
    )
    engine = make_served(setup, first.engine.transfer.score)
    first.change(1)
    run(engine.update(first.weights, 7))
    assert run(engine.generate(PROMPT, FREE, key=1))[0].versions == [7] * 12
    engine.close()
    assert first.engine.replicas[0].up  # it is not ours to end
    monkeypatch.setenv("THE_KEY", "wrong")
    with pytest.raises(InputError, match="refuses the key"):
        run(make_served(setup).generate(PROMPT, FREE, key=1))
