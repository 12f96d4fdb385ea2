"""Commands over a tree: nine processes in blocks of three, and the sockets that each of them
holds.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.paths import SRC, TESTS
from reinforge.backends.distributed import commands
from reinforge.backends.distributed.ranks import RankMember

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")
SIZE = 9


def connections() -> int:
    """TCP connections of this process that are established."""
    own = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{fd}").removeprefix("socket:[").rstrip("]"))
        except OSError:  # the one that lists them
            continue
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path("/proc/self/net", name).read_text().splitlines()[1:]
    ]
    return sum(words[3] == "01" and words[9] in own for words in lines)


def life(rank: int, port: Any, told: Any, done: Any) -> None:
    """A rank that gets a command, adds numbers up with the others and answers, twice."""
    first = rank == 0
    if first:
        store = dist.TCPStore("127.0.0.1", 0, SIZE, is_master=True, wait_for_workers=False)
        for _ in range(SIZE - 1):
            port.put(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", port.get(), SIZE, is_master=False)
    member = RankMember(store, rank, SIZE, "cpu")
    for turn in range(2):
        messages = [b"%d for %d" % (turn, i) for i in range(SIZE)] if first else None
        message = member.commands.scatter(messages)
        total = torch.full((1000,), float(rank))
        dist.all_reduce(total)
        answers = member.commands.gather(message + b": %d" % total[0])
    told.put((rank, connections(), answers))
    done.wait()  # a rank that ends takes its connections with it
    os._exit(0)


def measured(block: int, lazy: str) -> list[tuple[int, list[str]]]:
    """By rank: its connections, and the answers that it collected."""
    commands.BLOCK = block
    os.environ[commands.LAZY] = lazy
    context = multiprocessing.get_context("fork")
    port, told, done = context.Queue(), context.Queue(), context.Event()
    ranks = [context.Process(target=life, args=(i, port, told, done)) for i in range(SIZE)]
    for process in ranks:
        process.start()
    try:
        found = sorted(told.get(timeout=60) for _ in ranks)
    finally:
        done.set()
        for process in ranks:
            process.join(10)
            process.kill()
    return [(sockets, [answer.decode() for answer in answers]) for _, sockets, answers in found]


@pytest.fixture(scope="module")
def found() -> dict[str, list[tuple[int, list[str]]]]:
    """In a process that has no groups and threads yet: it is forked."""
    path = os.pathsep.join([str(SRC), str(TESTS)])
    done = subprocess.run(
        [sys.executable, __file__],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    read: dict[str, list[tuple[int, list[str]]]] = json.loads(done.stdout)
    return read


ANSWERS = [f"1 for {rank}: 36" for rank in range(SIZE)]


def test_commands_and_answers_pass_the_tree_and_ranks_hold_few_connections(found: Any) -> None:
    tree = found["tree"]
    assert tree[0][1] == ANSWERS and not any(answers for _, answers in tree[1:])
    sockets = [count for count, _ in tree]
    # the store has one for each other rank and two for rank 0 itself; then two other heads, two in
    # its block, and two neighbours in the ring of the all-reduce
    assert sockets[0] == (SIZE - 1) + 2 + 2 + 2 + 2 == 16
    # the store, two in the block, two in the ring; heads also two other heads
    assert sockets[1:] == [5, 5, 7, 5, 5, 7, 5, 5]


def test_without_tree_rank_0_held_three_for_each_other_rank(found: Any) -> None:
    """What gloo does by itself, so that the numbers above mean something."""
    assert [count for count, _ in found["all with all"]] == [3 * (SIZE - 1) + 2] + [17] * (SIZE - 1)
    assert found["all with all"][0][1] == ANSWERS


def test_a_process_may_open_more_than_the_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: asked.append(limits))
    for had, wanted in (
        ((1024, 4096), (4096, 4096)),
        ((1024, 1 << 20), (1 << 16, 1 << 20)),
        ((1024, resource.RLIM_INFINITY), (1 << 16, resource.RLIM_INFINITY)),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, had=had: had)
        assert commands.raise_file_limit() == wanted[0] and asked.pop() == wanted
    for enough in ((1 << 16, 1 << 20), (512, 512), (resource.RLIM_INFINITY,) * 2):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, enough=enough: enough)
        assert commands.raise_file_limit() == enough[0] and not asked


if __name__ == "__main__":
    print(json.dumps({"tree": measured(3, "1"), "all with all": measured(SIZE, "0")}))
