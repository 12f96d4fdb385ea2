"""What every dialect owes, over real processes and real HTTP. The servers are the stubs of
tests/helpers/stub_servers.py, whose model can be computed by hand; the servers themselves are not
here. What every engine owes over the same stubs is in tests/contract/test_engine.py.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.bigram_stub import BAD, HOLD_AT
from helpers.stub_servers import STUBS, Stub, StubServers, bigram, told, until
from helpers.toys import run
from reinforge.config.engine import SERVERS
from reinforge.core.constraint import Constraint
from reinforge.core.engine import Sampling
from reinforge.core.errors import InputError
from reinforge.engines.served.make import make_dialect, make_served
from reinforge.weights.probe import WeightMismatch

PROMPT = [5, 9, 33]
FREE = Sampling(12, ignore_eos=True)
# of a dialect that is not right yet, an answer may never end
pytestmark = pytest.mark.timeout(120, func_only=True)


def test_every_kind_of_server_has_a_stub() -> None:
    """But vLLM, which has a plug-in of ours: tests/scale runs the real one."""
    assert {stub.kind for stub in STUBS} == SERVERS.keys() - {"vllm"}


@pytest.fixture(params=STUBS, ids=lambda stub: stub.kind)
def stub(request: pytest.FixtureRequest) -> Stub:
    found: Stub = request.param
    return found


@pytest.fixture
def servers(stub: Stub, tmp_path: Path) -> Iterator[StubServers]:
    made = StubServers(stub, tmp_path)
    yield made
    made.close()


def test_log_probs_are_those_of_the_weights(servers: StubServers) -> None:
    """After temperature."""
    engine = servers.engine()

    async def work() -> None:
        await engine.update(servers.weights, 0)
        assert engine.measured["weights/probe_error"] < 1e-5
        for temperature in (1.0, 0.5):
            params = Sampling(9, temperature, ignore_eos=True)
            [done] = await engine.generate(PROMPT, params, key=1)
            want = bigram(servers.table(), PROMPT + done.tokens, temperature)[len(PROMPT) :]
            assert torch.tensor(done.logprobs).sub(want).abs().max() < 1e-4

    run(work())


def test_filters_are_passed_on_or_refused(servers: StubServers) -> None:
    """Each of these leaves one token: the one that is taken without chance."""
    engine = servers.engine()
    greedy = replace(FREE, temperature=0.0)
    for narrow in ({"top_p": 0.001}, {"top_k": 1}, {"min_p": 1.0}):
        params = replace(FREE, **narrow)
        if servers.stub.facts.filters:
            [want] = run(engine.generate(PROMPT, greedy, key=1))
            [done] = run(engine.generate(PROMPT, params, key=1))
            assert done.tokens == want.tokens, narrow
        else:
            with pytest.raises(InputError, match="knows no top_p, top_k and min_p"):
                run(engine.generate(PROMPT, params, key=1))


def test_the_options_of_the_user_count_more(stub: Stub, tmp_path: Path) -> None:
    setup = StubServers(stub, tmp_path).setup(args={"port": 7, "--of_theirs": True})
    command = make_dialect(stub.kind).command(setup, "py", 5)
    assert command[0] == "py" and "--of-theirs" in command
    assert command.count("--port") == 1 and command[command.index("--port") + 1] == "7"


def test_the_key_is_not_for_other_users_to_read(
    servers: StubServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments of a process are: of the server, of what it starts, and of what ends it with us.

    And a key is not read as an option.
    """
    monkeypatch.setattr(
        "reinforge.engines.served.replica.secrets.token_hex",
        lambda size: f"-{os.urandom(size).hex()}",
    )
    engine = servers.engine()
    run(engine.update(servers.weights, 0))
    replica = engine.replicas[0]
    assert replica.http is not None and replica.http.key and replica.process is not None
    shown = b""
    for words in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has just ended
            shown += words.read_bytes()
    assert str(servers.model).encode() in shown and replica.http.key.encode() not in shown
    assert replica.process.log.stat().st_mode & 0o077 == 0


def test_an_update_in_the_middle(servers: StubServers) -> None:
    """Interrupted, loaded, gone on: each token has the log-prob that the weights it
    names give it.
    """
    engine = servers.engine()
    servers.hold.touch()

    async def work() -> None:
        await engine.update(servers.weights, 1)
        old = servers.table()
        task = asyncio.ensure_future(
            engine.generate(PROMPT, Sampling(60, ignore_eos=True), key=4, n=3)
        )
        await until(engine, "held", 3)
        servers.change(1)
        await engine.update(servers.weights, 2)
        servers.hold.unlink()
        for done in await task:
            assert done.versions == [1] * HOLD_AT + [2] * (60 - HOLD_AT)
            whole = PROMPT + done.tokens
            for table, part in ((old, slice(0, HOLD_AT)), (servers.table(), slice(HOLD_AT, 60))):
                want = bigram(table, whole)[len(PROMPT) :][part]
                assert torch.tensor(done.logprobs[part]).sub(want).abs().max() < 1e-4
        facts = await told(engine)
        assert facts["loads"] == 2 and facts["running"] == 0

    run(work())


def test_an_answer_of_a_given_form_begins_again_after_an_update(servers: StubServers) -> None:
    """A server begins a grammar at its beginning, so nothing can go on inside of one."""
    engine = servers.engine()
    servers.hold.touch()
    params = Sampling(60, ignore_eos=True, constraint=Constraint("regex", "[a-h]{60}"))

    async def work() -> None:
        await engine.update(servers.weights, 1)
        if not servers.stub.facts.structured:
            with pytest.raises(InputError, match="no answers of a given form"):
                await engine.generate(PROMPT, params, key=4)
            return
        task = asyncio.ensure_future(engine.generate(PROMPT, params, key=4, n=2))
        await until(engine, "held", 2)
        servers.change(1)
        await engine.update(servers.weights, 2)
        servers.hold.unlink()
        for done in await task:
            assert done.versions == [2] * 60
            want = bigram(servers.table(), PROMPT + done.tokens)[len(PROMPT) :]
            assert torch.tensor(done.logprobs).sub(want).abs().max() < 1e-4

    run(work())


def test_a_request_that_breaks_is_not_the_servers_fault(servers: StubServers) -> None:
    engine = servers.engine()
    run(engine.update(servers.weights, 1))
    with pytest.raises(RuntimeError, match="this request breaks"):
        run(engine.generate([BAD, 5], FREE, key=1, n=3))
    assert engine.restarts == 0 and engine.replicas[0].load == 0
    assert len(run(engine.generate(PROMPT, FREE, key=1))[0].tokens) == 12


def test_weights_that_do_not_arrive_stop_the_run(servers: StubServers) -> None:
    engine = servers.engine(env={"STUB_STALE": "1"})
    run(engine.update(servers.weights, 1))
    old = servers.table()
    servers.change(1)
    with pytest.raises(WeightMismatch, match="still serves the weights of before"):
        run(engine.update(servers.weights, 2))
    # and what was served before is served again
    done = run(engine.generate(PROMPT, FREE, key=1))[0]
    want = bigram(old, PROMPT + done.tokens)[len(PROMPT) :]
    assert set(done.versions) == {1} and torch.tensor(done.logprobs).sub(want).abs().max() < 1e-4


def test_cancelling_frees_everything(servers: StubServers) -> None:
    engine = servers.engine()
    servers.hold.touch()

    async def work() -> None:
        await engine.update(servers.weights, 1)
        task = asyncio.ensure_future(
            engine.generate(PROMPT, Sampling(100, ignore_eos=True), key=1, n=4)
        )
        await until(engine, "held", 4)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(engine, "running", 0)
        assert engine.replicas[0].load == 0

    run(work())


@pytest.mark.parametrize(("sleep", "left"), [("cache", ["weights"]), ("all", [])])
def test_sleep_and_wake(servers: StubServers, sleep: str, left: list[str]) -> None:
    """A stub of a server that sleeps has the fact `memory`."""
    if not servers.stub.facts.sleeps:
        assert servers.setup(device="cuda", sleep=sleep).sleep_level == 0
        return
    engine = servers.engine(device="cuda", sleep=sleep)

    async def work() -> None:
        await engine.update(servers.weights, 1)
        before = (await engine.generate(PROMPT, FREE, key=8))[0]
        await engine.sleep()
        await engine.sleep()
        assert (await told(engine))["memory"] == left
        # wakes by itself, its weights with it
        assert (await engine.generate(PROMPT, FREE, key=8))[0].tokens == before.tokens
        await engine.sleep()
        servers.change(1)
        await engine.update(servers.weights, 2)
        assert (await told(engine))["memory"] == ["kv_cache", "weights"]

    run(work())


def test_an_address_that_is_not_ours(servers: StubServers, monkeypatch: pytest.MonkeyPatch) -> None:
    first = servers.engine()
    run(first.update(servers.weights, 1))
    http = first.replicas[0].http
    assert http is not None and http.key is not None
    with_key = {"key_env": "THE_KEY"} if servers.stub.facts.key else {}
    monkeypatch.setenv("THE_KEY", http.key)
    engine = servers.engine(address=[http.address], **with_key)
    servers.change(1)
    run(engine.update(servers.weights, 7))
    assert run(engine.generate(PROMPT, FREE, key=1))[0].versions == [7] * 12
    engine.close()
    assert first.replicas[0].up  # it is not ours to end
    with pytest.raises(InputError, match="does not know /nowhere") as refused:
        run(http.post("/nowhere"))
    assert engine.dialect.unknown_path in str(refused.value)
    if servers.stub.facts.key:
        monkeypatch.setenv("THE_KEY", "wrong")
        with pytest.raises(InputError, match="refuses the key"):
            run(make_served(engine.setup).generate(PROMPT, FREE, key=1))
