"""Runs the lists of attacks on rewards, chat templates and servers, and counts those that held.

    python benchmarks/attacks.py [--list NAME ...] [--out FILE]

Each list is data in tests/helpers/attack_lists, which the tests run too, one case each; how a list
is run is written below. An attack holds if it gets what it deserves: no reward, no time of the
trainer, no memory, an error that says so. What a hostile text could stall is run in a process with
a deadline and a limit on memory, so that an attack that breaks something is counted and not waited
for. Attacks on the sandbox have their own measurement: benchmarks/sandbox.py.

Exits with 1 if one broke. To add a list: a generator of (name, held) with @attacks("its name")
before it.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parents[1] / "tests"), os.environ.get("PYTHONPATH", "")]
)
from helpers.attack_lists import bombs, escapes, restatements, web
from helpers.attack_lists import templates as chat_templates
from reinforge.config.rewards import RewardConfig
from reinforge.core.sample import Row
from reinforge.rewards.build import build_rewards
from reinforge.rollout.scoring import RewardScorer

Cases = Iterator[tuple[str, bool]]
LISTS: dict[str, Callable[[], Cases]] = {}
SECONDS = 30.0  # for what takes milliseconds where it holds
MEMORY = 1 << 30  # bytes beside what is there


def attacks(name: str) -> Callable[[Callable[[], Cases]], Callable[[], Cases]]:
    """Adds a list."""

    def add(cases: Callable[[], Cases]) -> Callable[[], Cases]:
        LISTS[name] = cases
        return cases

    return add


def holds(check: Callable[[], bool], *, seconds: float = SECONDS, memory: int = MEMORY) -> bool:
    """What `check` says in a process of its own; False if it takes too long or too much, or
    dies."""
    child = os.fork()
    if child == 0:
        try:
            with open("/proc/self/statm") as file:
                limit = int(file.read().split()[0]) * resource.getpagesize() + memory
            hard = resource.getrlimit(resource.RLIMIT_AS)[1]
            resource.setrlimit(
                resource.RLIMIT_AS,
                (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard),
            )
            signal.setitimer(signal.ITIMER_REAL, seconds)  # nobody handles the alarm: it kills
            os._exit(0 if check() else 1)
        except BaseException:
            traceback.print_exc()
            os._exit(2)
    return os.waitpid(child, 0)[1] == 0


def short(text: str) -> str:
    return text if len(text) < 60 else f"{text[:40]}... ({len(text)} characters)"


@attacks("math: the question again")
def restated() -> Cases:
    [reward] = build_rewards([RewardConfig(name="math", timeout=60)])

    async def score(answer: str, gold: str) -> float | None:
        row = Row("r", restatements.ASKED, {"answer": gold})
        return (await reward.outcome([row], [rf"\boxed{{{answer}}}"])).scores[0]

    async def all_of(pairs: list[tuple[str, str]]) -> list[float | None]:
        return [await score(*pair) for pair in pairs]

    for (answer, gold), got in zip(
        restatements.RESTATED, asyncio.run(all_of(restatements.RESTATED)), strict=True
    ):
        yield f"{answer} for {gold}", got == 0.0
    for (answer, gold), got in zip(
        restatements.HONEST, asyncio.run(all_of(restatements.HONEST)), strict=True
    ):
        yield f"honest: {answer} for {gold}", got == 1.0


@attacks("regex: patterns that never end")
def regex() -> Cases:
    """The event loop goes on meanwhile: a clock in it never stops for long. The neighbours of the
    bomb are scored."""

    async def tried(pattern: str, bomb: str) -> bool:
        [reward] = build_rewards(
            [RewardConfig(name="regex", options={"pattern": pattern}, timeout=2.0, workers=2)]
        )
        row = Row("r", "?")
        await reward.outcome([row], ["warm"])
        stalled = 0.0

        async def clock() -> None:
            nonlocal stalled
            loop = asyncio.get_running_loop()
            while True:
                before = loop.time()
                await asyncio.sleep(0.01)
                stalled = max(stalled, loop.time() - before)

        ticking = asyncio.ensure_future(clock())
        outcome = await reward.outcome([row] * 3, ["plain", bomb, "plain"])
        ticking.cancel()
        return (
            stalled < 1.5
            and outcome.scores[1] in (None, 0.0)
            and None not in (outcome.scores[0], outcome.scores[2])
        )

    for pattern, bomb in bombs.REGEX:
        yield f"{pattern} on {short(bomb)}", asyncio.run(tried(pattern, bomb))


@attacks("judge: replies that never end")
def judge() -> Cases:
    from reinforge.rewards.judge import parse_score, parse_verdict

    for reply in bombs.JUDGE:
        yield (
            short(repr(reply)),
            holds(lambda reply=reply: parse_score(reply) is None and parse_verdict(reply) is None),
        )


@attacks("built-in rewards: texts that never end")
def long_texts() -> Cases:
    from reinforge.rewards.math import decided

    made = [
        (build_rewards([RewardConfig(name=name, options=options)])[0], answer)
        for name, options, answer in bombs.ASKED
    ]

    def read(text: str) -> bool:
        for reward, answer in made:
            asyncio.run(reward.outcome([Row("r", "?", {"answer": answer})], [text]))
        return decided(text, "7", "?") in (0.0, None) or isinstance(decided(text, "7", "?"), tuple)

    for text in bombs.TEXTS:
        yield short(repr(text)), holds(lambda text=text: read(text), seconds=10.0)


@attacks("gates and penalties: made to fail")
def gates() -> Cases:
    """A completion is worth 1 without the reward that it makes fail."""

    async def total(role: str, verb: str) -> Any:
        failing = RewardConfig(
            name="helpers.hostile_rewards:obey",
            timeout=0.5,
            workers=1,
            memory_gib=1.0,
            **escapes.ROLES[role],
        )
        base = RewardConfig(name="base", gate="obey" if role == "gate" else None)
        rewards = build_rewards(
            [base, failing], {"base": lambda completions: [1.0] * len(completions)}
        )
        scorer = RewardScorer(rewards, on_error="unscored")
        scores = await scorer.score([Row("r", "?")], "g", [[1]], [verb])
        return scorer.total({name: values[0] for name, values in scores.items()}, 1)[1]

    for role in escapes.ROLES:
        for verb in escapes.VERBS:
            yield f"{verb!r} where the reward is a {role}", asyncio.run(total(role, verb)) is None


@attacks("serve: hostile requests")
def hostile_requests() -> Cases:
    """A real server of a toy model. While each is sent, a client asks again and again for a
    completion, and gets it."""
    with reinforge_serve() as server:
        for hostile in web.REQUESTS:
            with server.honest_client() as client:
                status = server.ask(hostile.path, hostile.body)[0]
            refused = status == hostile.status or (hostile.status == 413 and status == 0)
            yield hostile.name, refused and client.answered


@attacks("serve: rude connections")
def rude_connections() -> Cases:
    """The server ends each of them by itself; five hundred half-sent headers at once leave room,
    and no flood in the log."""
    with reinforge_serve() as server:
        for rude in web.CONNECTIONS:
            with server.honest_client() as client:
                ended = server.ends(rude)
            yield rude.name, ended and client.answered
        with ExitStack() as held, server.honest_client() as client:
            for _ in range(520):
                with suppress(OSError):  # the server may have had enough already
                    held.enter_context(server.connect()).sendall(web.HALF)
        yield "520 half-sent headers", client.answered
        yield "and what all this wrote to the log", server.log.stat().st_size < 1 << 20


class Server:
    """`reinforge serve` with a toy model, 256 open files and little patience."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, port: int):
        self.process = process
        self.log = log
        self.port = port

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=0.1)

    def ask(self, path: str, body: bytes, seconds: float = 60.0) -> tuple[int, bytes]:
        """Status 0: it was cut."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            connection.request("POST", path, body)
            reply = connection.getresponse()
            return reply.status, reply.read()
        except (OSError, http.client.HTTPException):
            return 0, b""
        finally:
            connection.close()

    def ends(self, rude: web.Rude, seconds: float = 60.0) -> bool:
        until = time.monotonic() + seconds
        with self.connect() as connection:
            connection.sendall(rude.said)
            while time.monotonic() < until:
                try:
                    connection.sendall(rude.more)
                    if not connection.recv(65536):
                        return True
                except TimeoutError:
                    continue
                except OSError:
                    return True
        return False

    @contextmanager
    def honest_client(self) -> Iterator[HonestClient]:
        client = HonestClient(self)
        client.start()
        try:
            yield client
        finally:
            client.done.set()
            client.join()


class HonestClient(threading.Thread):
    """Asks for a completion until it is done, and once after that; each must come in time."""

    def __init__(self, server: Server):
        super().__init__(daemon=True)
        self.server = server
        self.done = threading.Event()
        self.answered = True

    def run(self) -> None:
        last = False
        while self.answered and not last:
            last = self.done.is_set()
            self.answered = (
                self.server.ask(web.COMPLETIONS, b'{"prompt": "hi", "max_tokens": 2}', SECONDS)[0]
                == 200
            )
            time.sleep(0.05)


@contextmanager
def reinforge_serve() -> Iterator[Server]:
    from helpers.chat_server import make_chat_model

    def few_files() -> None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))

    with tempfile.TemporaryDirectory() as folder:
        model = make_chat_model(Path(folder) / "model")
        log = Path(folder) / "log"
        command = [
            sys.executable,
            "-m",
            "reinforge",
            "serve",
            model,
            "--port",
            "0",
            "--kv-gib",
            "0.05",
        ]
        command += ["--header-seconds", "2", "--body-seconds", "4"]
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=out, preexec_fn=few_files
            )
        try:
            assert process.stdout is not None
            # NAME: http://127.0.0.1:PORT/v1  (Ctrl-C ends)
            told = process.stdout.readline().decode()
            assert "http://" in told, log.read_text()
            yield Server(
                process, log, int(told.partition("http://127.0.0.1:")[2].partition("/")[0])
            )
        finally:
            process.terminate()
            process.wait(timeout=30)


@attacks("chat templates: gigabytes and endless loops")
def templates() -> Cases:
    """A hostile template is refused; an honest one renders to the bytes that transformers makes of
    it."""
    from transformers.utils.chat_template_utils import render_jinja_template

    from reinforge.core.errors import InputError
    from reinforge.data.templates import Template

    class Tokenizer:
        added_tokens_decoder: dict[int, Any] = {}
        all_special_tokens: list[str] = []
        all_special_ids: list[int] = []
        special_tokens_map = {"bos_token": "<s>", "eos_token": "</s>"}

        def __init__(self, source: str):
            self.source = source

        def get_chat_template(self, tools: Any = None) -> str:
            return self.source

    def refused(source: str) -> bool:
        try:
            Template(Tokenizer(source)).render(
                [{"role": "user", "content": "hi"}], None, generation_prompt=True, where="row"
            )  # type: ignore[arg-type]
        except InputError:
            return True
        return False

    def same(source: str, messages: Any) -> bool:
        want = render_jinja_template(
            [messages], chat_template=source, **Tokenizer.special_tokens_map
        )[0][0]
        return (
            Template(Tokenizer(source))
            .render(messages, None, generation_prompt=False, where="row")
            .text
            == want
        )  # type: ignore[arg-type]

    for source in chat_templates.HOSTILE:
        yield short(source), holds(lambda source=source: refused(source))
    for source in chat_templates.HONEST:
        yield (
            f"honest: {short(source)}",
            all(same(source, messages) for messages in chat_templates.CONVERSATIONS[:3]),
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="append", choices=sorted(LISTS), help="only these lists")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    report: dict[str, Any] = {}
    for name, cases in LISTS.items():
        if given.list and name not in given.list:
            continue
        found = list(cases())
        broke = [case for case, held in found if not held]
        report[name] = {"tried": len(found), "held": len(found) - len(broke), "broke": broke}
        print(f"{name}: {len(found)} tried, {len(found) - len(broke)} held", flush=True)
        for case in broke:
            print(f"  BROKE: {case}", flush=True)
    broken = sum(len(part["broke"]) for part in report.values())
    print(
        f"{sum(part['tried'] for part in report.values())} attacks in {len(report)} lists, {broken}"
        " broke"
    )
    if given.out:
        given.out.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
