"""Tools of real MCP servers, over pipes and over HTTP: called with deadlines, read whatever they
answer, and gone when the run is.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")

from helpers.dialogues import Saying, make_episodes, make_renderer
from reinforge.build.environments import mixture_of
from reinforge.config.env import EnvConfig
from reinforge.core.env import Action, Call, RolloutContext
from reinforge.core.errors import InputError
from reinforge.core.sample import Row
from reinforge.envs.mcp import MARK, server_of
from reinforge.envs.toolbox import ToolEnv
from reinforge.envs.tools import ToolUnavailable
from reinforge.rollout.dialogue.episode import EpisodeLimits

ROW = Row("r0", "What is 2 and 3?", {})
# in the environment of what these tests start: others may run the same tests
OURS = secrets.token_hex(8)

# written with the package, as its documentation says
SERVER = '''
import os, subprocess, sys, time
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ImageContent, TextContent

server = MCPServer("test")

@server.tool()
def add(a: int, b: int = 0) -> str:
    """Adds two numbers."""
    return str(a + b)

@server.tool()
def many(items: list[dict[str, int | None]], label: str | None = None) -> str:
    """Counts."""
    return f"{len(items)} {label}"

@server.tool()
def fails() -> str:
    """Raises."""
    raise ToolError("the cat is on the keyboard")

@server.tool()
def hangs() -> str:
    """Answers much too late."""
    time.sleep(60)
    return ""

@server.tool()
def noise() -> str:
    """Writes what is no message to stdout, and answers."""
    sys.__stdout__.write("this is no JSON\\n{}\\n[1]\\n")
    sys.__stdout__.flush()
    return "after the noise"

@server.tool()
def picture() -> list[TextContent | ImageContent]:
    """Text and an image."""
    image = ImageContent(type="image", data="QUJDRA==", mime_type="image/png")
    return [TextContent(type="text", text="see"), image]

@server.tool()
def spawn() -> str:
    """Leaves a child behind that has left the group."""
    none = subprocess.DEVNULL
    child = subprocess.Popen(["sleep", "600"], start_new_session=True, stdin=none, stdout=none)
    return str(child.pid)

server.run(*sys.argv[1:2], **({"port": int(sys.argv[2])} if len(sys.argv) > 2 else {}))
'''

# the protocol by hand, in its older form: starts at once, lists its tools in two pages, and does
# what no library lets it do
PLAIN = """
import json, os, sys
count = 0
for line in sys.stdin:
    request, result = json.loads(line), None
    if "id" not in request:
        continue
    given = request.get("params") or {}
    name = given.get("name")
    if request["method"] == "initialize":
        result = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
        result["serverInfo"] = {"name": "plain", "version": "1"}
    elif request["method"] == "tools/list":
        names = ["broken"] if given.get("cursor") else ["counted", "crashes"]
        result = {"tools": [{"name": n, "inputSchema": {"type": "object"}} for n in names]}
        if names != ["broken"]:
            result["nextCursor"] = "2"
    elif name == "counted":
        count += 1
        result = {"content": [{"type": "text", "text": f"{count} of {os.getpid()}"}]}
    elif name == "broken":
        result = {"content": 7}
    elif name == "crashes":
        os._exit(3)
    unknown = {"error": {"code": -32601, "message": "unknown"}}
    answer = unknown if result is None else {"result": result}
    print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **answer}), flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mcp")
    (path / "server.py").write_text(SERVER)
    (path / "plain.py").write_text(PLAIN)
    return path


def command(path: Path, *words: str, **more: Any) -> dict[str, Any]:
    return {"mcp": {"command": ["python", str(path), *words], "env": {"OURS": OURS}, **more}}


def calls(*given: tuple[str, dict[str, Any]]) -> Action:
    return Action(
        "", [], calls=[Call(name, arguments, f"c{i}") for i, (name, arguments) in enumerate(given)]
    )


async def said(env: ToolEnv, *given: tuple[str, dict[str, Any]]) -> list[str]:
    step = await env.step(calls(*given))
    assert step.observation is not None
    return [m["content"] for m in step.observation.messages]


def alive() -> list[int]:
    """Servers, and what they started, that are still there."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (
                all(
                    text.encode() in (process / "environ").read_bytes()
                    for text in (OURS, f"{MARK}=")
                )
                and "State:\tZ" not in (process / "status").read_text()
            ):
                found.append(int(process.name))
        except OSError:
            continue
    return found


def until(true: Callable[[], bool], seconds: float = 5.0) -> bool:
    """A process that was started may not be there yet, one that was killed may be there for a
    moment longer.
    """
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.05)
    return true()


def gone() -> bool:
    return until(lambda: not alive())


def test_tools_of_a_server_are_called_like_any_other_and_nothing_is_left_of_it(
    folder: Path,
) -> None:
    async def go() -> int:
        env = ToolEnv(["calculator", command(folder / "server.py", "stdio")], tool_seconds=20)
        assert not env.pure, "what a server says must be journalled"
        first = await env.reset(ROW, 0)
        schemas = {t["function"]["name"]: t["function"] for t in first.tools or []}
        assert list(schemas) == [
            "calculator",
            "add",
            "many",
            "fails",
            "hangs",
            "noise",
            "picture",
            "spawn",
        ]
        assert schemas["add"]["description"] == "Adds two numbers."
        assert schemas["add"]["parameters"]["properties"]["a"]["type"] == "integer" and schemas[
            "add"
        ]["parameters"]["required"] == ["a"]
        assert await said(
            env,
            ("add", {"a": 2, "b": 3}),
            ("calculator", {"expression": "6*7"}),
            ("add", {"a": "4"}),
        ) == ["5", "42", "4"]
        assert await said(env, ("many", {"items": [{"x": 1}, {"x": None}], "label": "rows"})) == [
            "2 rows"
        ]
        assert await said(env, ("picture", {})) == ["see\n(image, image/png, 6 bytes)"]
        wrong = await said(
            env,
            ("add", {}),
            ("add", {"a": "many"}),
            ("many", {"items": 3}),
            ("nothing", {}),
            ("fails", {}),
        )
        assert (
            wrong[0] == "error: add needs the argument a"
            and wrong[1] == 'error: add: a must be a whole number, not "many"'
        )
        assert wrong[2].startswith("error: ") and "items" in wrong[2], "the server's own words"
        assert (
            wrong[3].startswith("error: there is no tool nothing")
            and "the cat is on the keyboard" in wrong[4]
        )
        assert await said(env, ("noise", {})) == ["after the noise"]
        env.tool_seconds = 0.5
        start = time.monotonic()
        assert (
            await said(env, ("hangs", {})) == ["error: hangs took longer than 0.5 s"]
            and time.monotonic() - start < 20
        )
        env.tool_seconds = 20
        child = int((await said(env, ("spawn", {})))[0])
        assert until(lambda: child in alive() and len(alive()) == 2)
        return child

    child = asyncio.run(go())  # the end of the loop is the end of the run
    assert gone() and not (
        Path(f"/proc/{child}/status").exists()
        and "State:\tZ" not in Path(f"/proc/{child}/status").read_text()
    )


def test_episodes_share_a_server_or_have_their_own(folder: Path) -> None:
    async def go(shared: bool) -> list[str]:
        envs = [
            ToolEnv([command(folder / "plain.py", shared=shared, only=["counted"])])
            for _ in range(3)
        ]
        seen = await asyncio.gather(*(env.reset(ROW, 0) for env in envs))
        assert [len(s.tools or []) for s in seen] == [1, 1, 1]
        out = [(await said(env, ("counted", {})))[0] for env in envs]
        await asyncio.gather(*(env.close() for env in envs))
        assert len(alive()) == (1 if shared else 0)
        return out

    shared = asyncio.run(go(True))
    own = asyncio.run(go(False))
    assert [o.split()[0] for o in shared] == ["1", "2", "3"] and len(
        {o.split()[2] for o in shared}
    ) == 1
    assert [o.split()[0] for o in own] == ["1", "1", "1"] and len({o.split()[2] for o in own}) == 3
    assert gone()


def test_a_crash_is_an_unscored_episode_and_the_next_finds_the_server_up(folder: Path) -> None:
    renderer = make_renderer()

    def episodes(name: str) -> Any:
        engine = Saying(
            renderer, [f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>', "done"]
        )
        return make_episodes(
            engine,
            renderer,
            lambda row: ToolEnv([command(folder / "plain.py")]),
            limits=EpisodeLimits(4000, 3),
        )

    async def go() -> None:
        rollout = episodes("crashes")
        crashed = await rollout(ROW, RolloutContext("g0"))
        assert crashed.samples[0].reward is None and crashed.metrics["env/failed"] == 1.0
        assert "plain.py ended while crashes ran" in rollout.errors[0]
        for name, answer in (("counted", "1 of "), ("broken", "error: ")):
            played = await episodes(name)(ROW, RolloutContext(f"g-{name}"))
            assert played.metrics["env/failed"] == 0.0 and played.metrics["env/calls"] == 1.0
            [messages] = played.transcripts.values()
            [result] = [m["content"] for m in messages if m["role"] == "tool"]
            assert result.startswith(answer), result

    asyncio.run(go())
    assert gone()


def test_a_server_ends_with_a_run_that_is_killed(folder: Path) -> None:
    """Even one that does not care for the end of its input."""
    (folder / "stubborn.py").write_text(PLAIN + "\nimport time\ntime.sleep(600)\n")
    program = f"""
import asyncio, sys, time
from reinforge.envs.mcp import McpConnection, server_of

async def main():
    server = server_of({command(folder / "stubborn.py")["mcp"]!r})
    print(len(await McpConnection(server).tools()), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
    run = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert run.stdout is not None and run.stdout.readline() == b"3\n"
    assert len(alive()) == 1
    run.kill()
    run.wait()
    deadline = time.monotonic() + 10
    while alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gone()


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import sys; print('no licence', file=sys.stderr); sys.exit(1)", "no licence"),
        ("import time; time.sleep(60)", "was not ready after 1 s"),
        ("print('hello', flush=True); import time; time.sleep(60)", "was not ready after 1 s"),
    ],
)
def test_a_server_that_does_not_start_says_why(tmp_path: Path, code: str, why: str) -> None:
    (tmp_path / "bad.py").write_text(code)

    async def go() -> None:
        with pytest.raises(ToolUnavailable, match=why):
            await ToolEnv(
                [command(tmp_path / "bad.py", start_seconds=1 if "ready" in why else 30)]
            ).reset(ROW, 0)

    asyncio.run(go())
    assert gone()


def test_what_is_wrong_with_the_config_is_said_before_the_first_episode(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for given, why in (
        ({"mcp": {}}, "a command or a url"),
        ({"mcp": {"command": ["python"], "url": "http://x"}}, "a command or a url"),
        ({"mcp": {"comand": ["python"]}}, "no option comand"),
        ({"mcp": {"command": ["no-such-program"]}}, "no program 'no-such-program'"),
        ({"mpc": {}}, "is no tool"),
        ("calculater", "no tool 'calculater'"),
    ):
        with pytest.raises(InputError, match=why):
            mixture_of(
                EnvConfig.model_validate({"name": "tools", "options": {"tools": [given]}}), 0
            )
    with pytest.raises(InputError, match="two tools are named calculator"):
        ToolEnv(["calculator", "calculator"])

    async def go() -> None:
        with pytest.raises(InputError, match="has no tool subtract"):
            await ToolEnv([command(folder / "plain.py", only=["subtract"])]).reset(ROW, 0)

    asyncio.run(go())
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(InputError, match=r"reinforge\[mcp\]"):
        server_of({"url": "http://x"})


@pytest.fixture
def http(folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    quiet = subprocess.DEVNULL
    server = subprocess.Popen(
        [sys.executable, str(folder / "server.py"), "streamable-http", str(port)],
        stdout=quiet,
        stderr=quiet,
    )
    for _ in range(300):
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}/mcp", server
    server.kill()
    server.wait()


def test_a_server_behind_http(http: tuple[str, subprocess.Popen[bytes]]) -> None:
    url, server = http

    async def go() -> None:
        env = ToolEnv([{"mcp": {"url": url}}])
        await env.reset(ROW, 0)
        answers = await said(env, ("add", {"a": 2, "b": 3}), ("fails", {}))
        assert answers[0] == "5" and "the cat is on the keyboard" in answers[1]
        server.kill()
        server.wait()
        with pytest.raises(ToolUnavailable):
            await env.step(calls(("add", {"a": 1})))
        with pytest.raises(ToolUnavailable, match="did not start"):
            await ToolEnv([{"mcp": {"url": url}}]).reset(ROW, 0)

    asyncio.run(go())
