"""Rewards in killable processes: what hangs, dies, floods or forges costs its own scores and
nothing else.
"""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers import hostile_rewards
from helpers.fake_engine import FakeEngine
from helpers.paths import TESTS
from helpers.toys import run
from reinforge.config.rewards import RewardConfig
from reinforge.core.engine import Sampling
from reinforge.core.env import RolloutContext
from reinforge.core.errors import InputError
from reinforge.core.sample import Group, Row
from reinforge.rewards.build import build_rewards
from reinforge.rewards.execution import note_unfindable
from reinforge.rewards.function import FunctionReward
from reinforge.rewards.outcome import RewardOutcome
from reinforge.rewards.pool import PoolSpec, RewardPool, pool_of
from reinforge.rewards.wire import NotPlainData, decode, encode
from reinforge.rollout.journal import Journal
from reinforge.rollout.players.single_turn import SingleTurn
from reinforge.rollout.scoring import RewardScorer
from reinforge.rollout.source import RolloutBatch, rollout_metrics

TIMEOUT = 0.25  # for what never ends
PATIENCE = 60.0  # for what does, on a busy machine too
ENDLESS = ("hang", "sleep", "spawn")
OBEY = "helpers.hostile_rewards:obey"


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    made = RewardPool(PoolSpec(OBEY, workers=3, timeout=TIMEOUT, memory_gib=1.0))
    yield made
    made.close()


def wait_for(pool: RewardPool, texts: Sequence[str]) -> None:
    """From now on, as long as rewards of these texts need."""
    endless = any(text.startswith(ENDLESS) for text in texts)
    pool.spec = replace(pool.spec, timeout=TIMEOUT if endless else PATIENCE)


def call(pool: RewardPool, *texts: str) -> RewardOutcome:
    wait_for(pool, texts)
    return run(pool.call("obey", {"completions": list(texts)}, len(texts)))


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def test_scores_come_back(pool: RewardPool) -> None:
    assert call(pool, "abc", "", "ab") == RewardOutcome([3.0, 0.0, 2.0])


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("hang", RewardOutcome([None], timeouts=1)),
        ("sleep 5", RewardOutcome([None], timeouts=1)),
        ("exit", RewardOutcome([None], crashes=1)),
        ("segfault", RewardOutcome([None], crashes=1)),
        ("allocate", RewardOutcome([None], crashes=1)),
    ],
)
def test_faults_leave_no_score_and_never_a_zero(
    pool: RewardPool, text: str, want: RewardOutcome
) -> None:
    start = time.monotonic()
    assert call(pool, text) == want
    assert time.monotonic() - start < TIMEOUT + 10
    assert call(pool, "abc") == RewardOutcome([3.0])  # the next one finds a worker
    assert len(set(run(pool.ready()))) == 3


def test_what_it_raises_arrives_by_name(pool: RewardPool) -> None:
    for text, name, says in (("raise gone", "KeyError", "gone"), ("quit", "SystemExit", "3")):
        with pytest.raises(Exception, match=says) as caught:
            call(pool, text)
        assert type(caught.value).__name__ == name
    assert call(pool, "abc") == RewardOutcome([3.0])


def test_a_flood_is_cut(capfd: pytest.CaptureFixture[str]) -> None:
    slow = RewardPool(PoolSpec(OBEY, workers=1, timeout=30.0))
    try:
        assert call(slow, "flood") == RewardOutcome([5.0])
    finally:
        slow.close()
    printed = capfd.readouterr().err
    assert 19_000 < len(printed) < 22_000 and "dropped" in printed


def test_a_hundred_hung_rewards_in_a_row(pool: RewardPool) -> None:
    """The pool is whole afterwards, and nobody waits longer than the bound."""
    longest = 0.0

    async def one(text: str) -> RewardOutcome:
        nonlocal longest
        start = time.monotonic()
        outcome = await pool.call("obey", {"completions": [text]}, 1)
        longest = max(longest, time.monotonic() - start)
        return outcome

    async def work() -> None:
        wait_for(pool, ["hang"])
        for i in range(0, 99, 3):
            outcomes = await asyncio.gather(*(one("hang") for _ in range(3)))
            assert outcomes == [RewardOutcome([None], timeouts=1)] * 3, i
        assert await one("hang") == RewardOutcome([None], timeouts=1)
        pids = await pool.ready()
        assert len(set(pids)) == 3 and all(alive(pid) for pid in pids)
        wait_for(pool, ["x"])
        assert await asyncio.gather(*(one("x" * n) for n in range(30))) == [
            RewardOutcome([float(n)]) for n in range(30)
        ]

    killed = pool.killed
    run(work())
    assert pool.killed == killed + 100
    assert longest < TIMEOUT + 10  # most of it a busy machine; without the bound it hangs for good


def test_what_a_hung_reward_started_dies_with_it(pool: RewardPool, tmp_path: Path) -> None:
    assert call(pool, f"spawn {tmp_path / 'pid'}").timeouts == 1
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(pid)


def test_a_template_that_is_killed_is_started_again(pool: RewardPool) -> None:
    workers = run(pool.ready()) or [0]
    assert pool._template is not None
    os.kill(pool._template.pid, 9)
    pool._template.wait()
    deadline = time.monotonic() + 5
    while any(alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(alive(pid) for pid in workers)  # none is left without a parent
    call(pool, "abc")
    assert call(pool, "abc") == RewardOutcome([3.0])


def test_a_cancelled_call_gives_its_worker_back(pool: RewardPool) -> None:
    async def work() -> None:
        tasks = [
            asyncio.ensure_future(pool.call("obey", {"completions": ["sleep 0.2"]}, 1))
            for _ in range(6)
        ]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        wait_for(pool, ["abc"])
        assert await pool.call("obey", {"completions": ["abc"]}, 1) == RewardOutcome([3.0])
        assert len(set(await pool.ready())) == 3

    run(work())


# forging


def test_a_forged_answer_is_not_believed(pool: RewardPool) -> None:
    """Frames that a completion writes into the worker's socket carry no nonce, and are of no use to
    those who come after.
    """
    assert call(pool, "forge").scores == [None]
    assert [call(pool, "a" * n).scores for n in range(6)] == [[float(n)] for n in range(6)]


def test_in_fresh_processes_one_completion_cannot_forge_the_next() -> None:
    """The hole is the reward's own `eval`. What it does is gone with its process."""
    attack = "[globals().update(float=lambda ok: 1.0), 42][1]"
    worn, fresh = (
        RewardPool(PoolSpec("helpers.hostile_rewards:careless", workers=1, fresh=fresh))
        for fresh in (False, True)
    )
    try:
        for pool, later in ((worn, 1.0), (fresh, 0.0)):
            scores = [
                run(pool.call("careless", {"completions": [c]}, 1)).scores
                for c in ("41", attack, "41")
            ]
            assert scores == [[0.0], [1.0], [later]]
    finally:
        worn.close()
        fresh.close()


def test_state_lasts_unless_fresh() -> None:
    worn, fresh = (
        RewardPool(PoolSpec("helpers.hostile_rewards:seen_before", workers=1, fresh=fresh))
        for fresh in (False, True)
    )
    try:
        assert [run(worn.call("x", {"completions": ["a"]}, 1)).scores for _ in range(3)] == [
            [1.0],
            [2.0],
            [3.0],
        ]
        assert [run(fresh.call("x", {"completions": ["a"]}, 1)).scores for _ in range(3)] == [
            [1.0]
        ] * 3
    finally:
        worn.close()
        fresh.close()


# what crosses


def test_columns_arrive_as_they_are() -> None:
    meta = {1: (2, [3]), "when": (4, b"x")}
    assert decode(encode(meta)) == meta and type(decode(encode(meta))[1]) is tuple
    assert decode(encode({"\x00": 1, "a": {2, 3}})) == {"\x00": 1, "a": {2, 3}} and encode(
        {"a": [1.5, None, "é\ud800"]}
    ) == {"a": [1.5, None, "é\ud800"]}
    with pytest.raises(NotPlainData, match="object"):
        encode([object()])
    [reward] = build_rewards([RewardConfig(name="helpers.hostile_rewards:types", timeout=20)])
    rows = [Row("a", "p", {"meta": meta}), Row("b", "p", {"meta": {"1": [2, [3]]}})]
    assert run(reward.score(rows, ["", ""])) == [1.0, 0.0]
    with pytest.raises(InputError, match="given meta, which holds a Thread.*in_process: true"):
        import threading

        run(reward.score([Row("a", "p", {"meta": threading.Thread()})], [""]))


# where a reward runs


def test_place_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = {
        "closure": lambda completions: [1.0] * len(completions),
        "obey": hostile_rewards.obey,
        "awaited": hostile_rewards.awaited,
    }
    even = "reinforge.check.learning:share_of_even"
    names = ["closure", "obey", "awaited", "exact_match", OBEY, even]
    closure, given, awaited, builtin, named, ours = build_rewards(
        [RewardConfig(name=n, timeout=7) for n in names], functions
    )
    assert [r.pool is not None for r in (closure, given, awaited, builtin, named, ours)] == [
        False,
        True,
        False,
        False,
        True,
        False,
    ]
    assert given.pool is named.pool  # the same function and limits: the same processes
    assert [r.pure for r in (closure, given, awaited, builtin, named, ours)] == [
        False,
        False,
        False,
        True,
        False,
        False,
    ]
    others = (given, awaited, builtin, named, ours)
    assert closure.unfindable and not any(r.unfindable for r in others)
    note = note_unfindable([closure, given, closure])
    assert note is not None and "run in this one: closure, closure. If one hangs" in note
    assert note_unfindable(others) is None
    # as in a notebook, where all functions are such
    monkeypatch.setattr("sys.ps1", "In : ", raising=False)
    [shown] = build_rewards([RewardConfig(name="closure")], functions)
    assert shown.pool is None and not shown.unfindable
    assert run(given.score([Row("r", "p")], ["abc"])) == [3.0] and run(
        awaited.score([Row("r", "p")], ["abc"])
    ) == [0.5]
    [here] = build_rewards([RewardConfig(name=OBEY, in_process=True)])
    [there] = build_rewards(
        [RewardConfig(name="regex", in_process=False, options={"pattern": "b"}, timeout=20)]
    )
    assert here.pool is None and there.pool is not None and not there.pure
    assert run(there.score([Row("r", "p")] * 2, ["abc", "x"])) == [1.0, 0.0]
    with pytest.raises(InputError, match=r"rewards\.0\.in_process.*no other process"):
        build_rewards([RewardConfig(name="closure", in_process=False)], functions)


def test_an_edited_file_gets_new_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Edited within a second, and as long as before: what Python kept of it would still pass for
    it.
    """
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    file = tmp_path / "mine.py"
    found = []
    for value in (1.0, 2.5):
        file.write_text(f"def mine(completions):\n    return [{value}] * len(completions)\n")
        [reward] = build_rewards([RewardConfig(name=f"{file}:mine", workers=1)])
        found += run(reward.score([Row("r", "p")], ["x"]))
    assert found == [1.0, 2.5]


def test_a_reward_that_cannot_be_imported_there(tmp_path: Path) -> None:
    (tmp_path / "exits.py").write_text(
        "import os, sys\nif 'pytest' not in sys.modules:\n    os._exit(3)\ndef f(completions):\n   "
        " return [0.0]\n"
    )
    (tmp_path / "fails.py").write_text(
        "import sys\nif 'pytest' not in sys.modules:\n    raise OSError('no GPU')\ndef"
        " f(completions):\n    return [0.0]\n"
    )
    for name, says in (("exits", "died 3 times"), ("fails", "OSError: no GPU")):
        [reward] = build_rewards([RewardConfig(name=f"{tmp_path}/{name}.py:f", workers=1)])
        with pytest.raises(InputError, match=says):
            run(reward.score([Row("r", "p")], ["x"]))


def test_in_this_process_a_hung_function_is_left_behind() -> None:
    """Its thread cannot be killed, but nobody waits for it."""

    def stuck(completions: list[str]) -> list[float]:
        if completions == ["hang"]:
            time.sleep(5)
        return [1.0]

    async def forever(completions: list[str]) -> list[float]:
        await asyncio.sleep(60 if completions == ["hang"] else 0)
        return [1.0]

    for function in (stuck, forever):
        reward = FunctionReward("mine", function, timeout=0.1)
        start = time.monotonic()
        assert run(reward.outcome([Row("r", "p")], ["hang"])) == RewardOutcome([None], timeouts=1)
        assert run(reward.outcome([Row("r", "p")], ["go"])) == RewardOutcome([1.0])
        assert time.monotonic() - start < 4.5

    def own(completions: list[str]) -> list[float]:
        raise TimeoutError("the database")

    # an error of the function is not our clock
    with pytest.raises(TimeoutError, match="the database"):
        run(FunctionReward("mine", own, timeout=5).score([Row("r", "p")], ["x"]))


def test_waiting_for_a_turn_is_no_timeout() -> None:
    reward = FunctionReward("mine", lambda completions: [time.sleep(0.05) or 1.0], timeout=0.2)

    async def work() -> list[RewardOutcome]:
        return await asyncio.gather(*(reward.outcome([Row("r", "p")], ["x"]) for _ in range(8)))

    assert run(work()) == [RewardOutcome([1.0])] * 8


# other libraries' functions


def test_trl_functions_get_what_trl_passes() -> None:
    """The tokens that were sampled, and the functions that they may log with: in a process and
    here, named or in **kwargs.
    """
    for name in ("trl_named", "trl_kwargs"):
        for in_process in (True, False):
            [reward] = build_rewards(
                [
                    RewardConfig(
                        name=f"helpers.hostile_rewards:{name}", kind="trl", in_process=in_process
                    )
                ]
            )
            assert reward.reads_ids
            scorer = RewardScorer([reward])
            scores = run(scorer.score([Row("r", "p")] * 2, "g", [[5, 6, 7], [8]], ["a", "b"]))
            assert scores == {name: [18.0, 8.0]}
    with pytest.raises(InputError, match="asks for trainer_state of TRL's trainer"):
        build_rewards([RewardConfig(name="helpers.hostile_rewards:trl_state", kind="trl")])


def test_any_function_may_ask_for_the_tokens() -> None:
    """... by naming them: a function that takes every column does not get one more than the rows
    have.
    """
    named = FunctionReward(
        "named", lambda completions, completion_ids: [float(len(t)) for t in completion_ids]
    )
    every = FunctionReward(
        "every",
        lambda completions, **columns: [float("completion_ids" in columns)] * len(completions),
    )
    row = Row("r", "p")
    assert run(named.outcome([row], ["a"], [[1, 2, 3]])).scores == [3.0]
    assert run(every.outcome([row], ["a"], [[1, 2, 3]])).scores == [0.0]
    with pytest.raises(InputError, match="needs completion_ids"):
        run(named.outcome([row], ["a"]))


def test_workers_start_where_memory_is_limited_from_outside() -> None:
    """`ulimit -v` below what a worker would ask for: its own limit is then the outer one, and never
    above it.
    """
    code = """
import asyncio, resource
from reinforge.rewards.pool import PoolSpec, RewardPool
target = "helpers.hostile_rewards:memory_limit"
pool = RewardPool(PoolSpec(target, workers=1, timeout=30.0, memory_gib=64.0))
[limit] = asyncio.run(pool.call("limit", {"completions": ["x"]}, 1)).scores
assert limit == resource.getrlimit(resource.RLIMIT_AS)[1], limit
pool.close()
"""
    program = [sys.executable, "-c", code]
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    limited = ["bash", "-c", 'ulimit -v 8000000; exec "$@"', "-", *program]
    done = subprocess.run(
        limited, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=100
    )
    assert done.returncode == 0, done.stderr


def test_a_worker_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit on memory is named, not the import."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (3 << 30, 3 << 30))
    made = RewardPool(PoolSpec("helpers.hostile_rewards:no_such_function", workers=1, timeout=5.0))
    try:
        with pytest.raises(InputError, match=r"3 GiB of address space \(ulimit -v\)"):
            run(made.call("x", {"completions": ["x"]}, 1))
    finally:
        made.close()


def test_functions_of_trl_and_verl() -> None:
    chat = Row("a", [{"role": "user", "content": "?"}])
    text = Row("b", "?")
    for in_process in (True, None):
        [trl] = build_rewards(
            [
                RewardConfig(
                    name="helpers.hostile_rewards:trl_reward", kind="trl", in_process=in_process
                )
            ]
        )
        assert run(trl.score([chat, text, chat, text], ["yes", "yes", "no", "no"])) == [
            1.0,
            1.0,
            0.0,
            0.0,
        ]
        # found by its parameters
        [verl] = build_rewards(
            [RewardConfig(name="helpers.hostile_rewards:compute_score", in_process=in_process)]
        )
        columns: dict[str, Any] = {"data_source": "d", "extra_info": {"i": 1}, "unused": object()}
        rows = [
            Row("a", "?", {**columns, "reward_model": {"ground_truth": "7", "style": "rule"}}),
            Row("b", "?", {**columns, "reward_model": {"ground_truth": "8"}}),
        ]
        assert run(verl.score(rows, ["7", "7"])) == [1.0, 0.0]
        assert run(verl.score([Row("a", "?", {**columns, "answer": "7"})], ["7"])) == [1.0]


# in a run


def test_a_redone_step_reads_what_the_clock_decided(tmp_path: Path) -> None:
    """Timeouts and crashes are journalled before they are used: the second time nobody is asked."""
    texts = ["abc", "hang", "exit"]
    first = FunctionReward(
        "obey",
        hostile_rewards.obey,
        pool=pool_of(PoolSpec(OBEY, workers=2, timeout=TIMEOUT)),
        each=True,
    )
    second = FunctionReward("obey", lambda completions: [9.0] * len(completions))
    found = []
    for reward in (first, second):
        scorer = RewardScorer([reward], journal=Journal(tmp_path / "journal.jsonl"))
        scores = run(scorer.score([Row("r", "p")] * 3, "0:r", [[1], [2], [3]], texts))
        totals = [scorer.total({"obey": score}, 5) for score in scores["obey"]]
        found.append((totals, scorer.faults("0:r")[0], scorer.faults("0:r")[0]))
    lost: Any = ({"obey": None}, None)
    assert (
        found[0]
        == found[1]
        == ([({"obey": 3.0}, 3.0), lost, lost], {"reward_timeout": 1, "reward_crash": 1}, {})
    )


def test_faults_are_counted_in_the_metrics() -> None:
    groups = [
        Group(Row("a", "p"), [], [], faults={"reward_timeout": 2}),
        Group(Row("b", "p"), [], [], faults={"reward_timeout": 1, "reward_crash": 4}),
        Group(Row("c", "p"), []),
    ]
    metrics = rollout_metrics(RolloutBatch(groups=groups), {})
    assert metrics["faults/reward_timeout"] == 3 and metrics["faults/reward_crash"] == 4
    assert "faults/reward_timeout" not in rollout_metrics(RolloutBatch(groups=groups[2:]), {})


def test_generation_goes_on_while_a_slow_reward_sleeps() -> None:
    """Twenty groups are written while the reward of the first one sleeps in its process."""
    slow = pool_of(PoolSpec(OBEY, workers=2, timeout=20.0))
    reward = FunctionReward("obey", hostile_rewards.obey, pool=slow)
    engine = FakeEngine(
        lambda prompt, i: [ord(ch) for ch in ("sleep 4.0" if prompt[0] == 0 else "fast")] + [3],
        stop_tokens=[3],
    )
    order: list[str] = []

    async def one(i: int) -> None:
        rollout = SingleTurn(
            engine,
            lambda row: [i],
            lambda t: "".join(chr(c) for c in t if c != 3),
            [reward],
            Sampling(20),
            n=2,
            seed=0,
        )
        group = await rollout(Row(str(i), "p"), RolloutContext(f"0:{i}"))
        order.append(str(i))
        assert [s.reward for s in group.samples] == [9.0 if i == 0 else 4.0] * 2

    async def work() -> None:
        await reward.score([Row("r", "p")], ["warm"])
        first = asyncio.ensure_future(one(0))
        while engine.running or not engine.requests:
            await asyncio.sleep(0.005)
        await asyncio.gather(*(one(i) for i in range(1, 21)))
        assert not first.done()
        await first

    run(work())
    assert order[-1] == "0" and sorted(order[:-1], key=int) == [str(i) for i in range(1, 21)]
