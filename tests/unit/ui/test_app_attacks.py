"""Who must not be answered by the web app, and what must not be shown to anybody."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.web_app import AppClient, web_app
from reinforge.core.errors import InputError
from reinforge.ui.options import AppOptions
from reinforge.ui.server import token_of

RUN = "first/grpo"
EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture(scope="module")
def guarded(runs: Path) -> Iterator[AppClient]:
    with web_app(runs, token="sesame", host="127.0.0.1") as client:
        yield client


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": ""},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS"])
def test_other_names_and_other_sites_are_refused(
    app: AppClient, headers: dict[str, str], method: str
) -> None:
    for path in ("/api/runs", "/", "/api/login"):
        status, found, _ = app.ask(method, path, None, headers)
        assert status == 403 and found["error"]["what"]


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "../..",
        "first/../..",
        "/etc",
        "first/grpo/../../../etc",
        "first\\..\\..",
        "%2e%2e",
        "first/grpo\0",
        "",
        "a" * 999,
        "/".join(["a"] * 400),
    ],
)
def test_paths_stay_in_the_folder(app: AppClient, name: str) -> None:
    for path in ("run", "curves", "samples", "config"):
        code, found, _ = app.ask("GET", f"/api/{path}?{_query(name)}")
        assert code in (400, 404) and set(found["error"]) == {"what", "where", "fix"}


def _query(name: str) -> str:
    from urllib.parse import urlencode

    return urlencode({"run": name})


@pytest.mark.parametrize(
    "path",
    ["/../pyproject.toml", "/%2e%2e/app.py", "/..%2fapp.py", "/app.py", "/assets/../app.py", "//x"],
)
def test_only_built_files_are_served(app: AppClient, path: str) -> None:
    status, found, _ = app.ask("GET", path)
    assert status == 404 and b"FastAPI" not in json.dumps(found).encode()


def test_a_link_that_leads_out_is_no_run(runs: Path, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    shutil.copytree(runs / RUN, tmp_path / "secret")
    (inside / "link").symlink_to(tmp_path / "secret")
    with web_app(inside) as client:
        assert client.get("runs") == []
        assert "leads out" in client.get("run", 400, run="link")["error"]["what"]


def test_the_token_opens_and_nothing_else_does(guarded: AppClient) -> None:
    assert guarded.ask("GET", "/api/runs")[0] == 401
    for wrong in ("", "sesam", "sesamee", "é"):
        assert guarded.ask("POST", "/api/login", {"token": wrong})[0] == 401
        cookie = {"Cookie": f"reinforge_token={wrong.encode().decode('latin-1')}"}
        assert guarded.ask("GET", "/api/runs", None, cookie)[0] == 401
    status, _, headers = guarded.ask("POST", "/api/login", {"token": "sesame"})
    given = headers["set-cookie"]
    assert status == 200 and "HttpOnly" in given and "SameSite=strict" in given
    cookie = {"Cookie": given.partition(";")[0]}
    assert guarded.ask("GET", "/api/runs", None, cookie)[0] == 200
    assert guarded.ask("GET", "/api/runs", None, {"Authorization": "Bearer sesame"})[0] == 200
    evil = {**cookie, "Origin": "http://evil.example"}
    assert guarded.ask("GET", "/api/runs", None, evil)[0] == 403


def test_the_network_is_not_listened_to_without_a_token() -> None:
    with pytest.raises(InputError, match="can be reached from other machines"):
        token_of(AppOptions(root=Path(), host="0.0.0.0"))
    assert token_of(AppOptions(root=Path(), host="0.0.0.0", token="t")) == "t"


def test_a_body_without_end_is_refused(app: AppClient) -> None:
    try:
        status, found, _ = app.ask("POST", "/api/login", b'{"token": "' + b"a" * (3 << 20) + b'"}')
    except (BrokenPipeError, ConnectionResetError):  # refused before it was read to its end
        return
    assert status == 413 and "bytes" in found["error"]["what"]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("text/plain", b'{"token": "a"}'),  # what a form of another site can send
        ("application/x-www-form-urlencoded", b"token=a"),
        ("application/json", b"{"),
        ("application/json", b'{"token": 3}'),
        ("application/json", b'{"token": "a", "more": 1}'),
        ("application/json", b"[" * 100_000),
    ],
)
def test_bodies_that_are_no_requests(app: AppClient, kind: str, body: bytes) -> None:
    status, found, _ = app.ask("POST", "/api/login", body, {"content-type": kind})
    assert status in (400, 422) and found["error"]["what"]


def test_what_a_model_wrote_is_json_and_nothing_runs(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / RUN, tmp_path / "evil")
    lines = (tmp_path / "evil" / "samples.jsonl").read_text().splitlines()
    first = {**json.loads(lines[0]), "completion": EVIL, "turns": [{"role": EVIL, "text": EVIL}]}
    (tmp_path / "evil" / "samples.jsonl").write_text(json.dumps(first) + "\n")
    with web_app(tmp_path) as client:
        status, found, headers = client.ask("GET", "/api/sample?run=evil&line=0")
        assert status == 200 and found["completion"] == found["turns"][0]["role"] == EVIL
    assert headers["content-type"] == "application/json"
    assert headers["x-content-type-options"] == "nosniff"
    policy = headers["content-security-policy"]
    assert "script-src 'self'" in policy and "unsafe" not in policy
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy


def test_logs_that_make_no_sense_break_nothing(runs: Path, tmp_path: Path) -> None:
    """Whoever shares a run wrote its files."""
    odd = tmp_path / "odd"
    shutil.copytree(runs / RUN, odd)
    (odd / "metrics.jsonl").write_bytes(
        b'{"step": "x", "time": 1}\n[1]\n{"step": 1, "time": 1, "reward/mean": "high", "a": NaN}\n'
        b'{"step": 2, "time": 1e999, "reward/mean": 1e999}\n\xff\n{"step": 3, "time": 2'
    )
    (odd / "samples.jsonl").write_bytes(
        b'{"step": "one", "prompt": 3, "completion": null, "reward": "nan", "components": [1],'
        b' "stop": {}, "length": "long", "training": [], "turns": {"a": 1}}\n'
        b'{"training": {"by_token": {"ids": ["a"], "ratio": [1]}, "advantage": {}}, "turns": [1]}\n'
        b'{"step": 1' + b"0" * 400 + b', "reward": 1' + b"0" * 400 + b', "length": true}\n'
        b"null\n"
    )
    (odd / "events.jsonl").write_bytes(b'{"kind": {"a": 1}, "time": "now", "step": "x"}\n{}\n')
    (odd / "tags.json").write_bytes(b'{"tags": "all"}')
    with web_app(tmp_path) as client:
        assert client.get("runs")[0]["run"] == "odd"
        for path in ("run", "curves", "phases", "config", "samples"):
            client.get(path, run="odd")
        for line in (0, 1, 2):
            client.get("sample", run="odd", line=line)
        client.get("sample", 404, run="odd", line=3)
