"""A small hub on this machine that speaks what huggingface_hub, transformers and datasets ask:
repositories with revisions, files with ETags, large files that are uploaded and fetched apart,
commits, tokens, and the errors of the real one.

`running()` starts one, `pointed_at` makes this process use it; a process that is started with
`environment(hub)` uses it by itself.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

TOKEN = "hf_of_me"  # may do everything
READER = "hf_reader"  # may read what is private, and write nothing
LARGE = 2000  # bytes from which a file is a large one
API = re.compile(r"/api/(model|dataset)s/([\w.-]+/[\w.-]+)(?:/(\w[\w-]*)(?:/([^/]+)(?:/(.+))?)?)?")
RESOLVE = re.compile(r"/(datasets/)?([\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)")
BATCH = re.compile(r"/(datasets/)?([\w.-]+/[\w.-]+)\.git/info/lfs/objects/batch")
Files = dict[str, bytes]


class HubRefusal(Exception):
    """An answer of the hub that is an error."""

    def __init__(self, status: int, code: str | None, message: str):
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}
        if status == 429:
            self.headers["Retry-After"] = "0"


@dataclass
class Repository:
    """A repository: its commits, and names for some of them."""

    private: bool = False
    gated: bool = False
    commits: dict[str, Files] = field(default_factory=dict)  # by oid, the oldest first
    tags: dict[str, str] = field(default_factory=dict)

    def commit(self, files: Files) -> str:
        text = f"{len(self.commits)} {sorted(files)}"
        oid = hashlib.sha1(text.encode()).hexdigest()
        self.commits[oid] = files
        self.tags["main"] = oid
        return oid

    def files(self, revision: str = "main") -> tuple[str, Files]:
        oid = self.tags.get(revision, revision)
        if oid not in self.commits:
            raise HubRefusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return oid, self.commits[oid]


@dataclass
class FakeHub:
    """What the server holds and what it was asked. A test fills it, and looks into it."""

    repositories: dict[tuple[str, str], Repository] = field(default_factory=dict)
    large: Files = field(default_factory=dict)  # what was uploaded apart, by SHA-256
    requests: list[tuple[str, str]] = field(default_factory=list)  # method and path
    tokens: set[str | None] = field(default_factory=set)  # that came to the hub itself
    busy: int = 0  # so many answers to come are 429
    broken: int = 0  # so many commits to come are 500
    url: str = ""
    store: str = ""  # where large files are: by another name, or the library would stay on the hub

    def add(
        self, name: str, files: Mapping[str, bytes | str] | Path, kind: str = "model", **facts: Any
    ) -> Repository:
        """A repository with one commit more."""
        repository = self.repositories.setdefault((kind, name), Repository(**facts))
        if isinstance(files, Path):
            files = {
                path.relative_to(files).as_posix(): path.read_bytes()
                for path in sorted(files.rglob("*"))
                if path.is_file()
            }
        held = {name: f.encode() if isinstance(f, str) else f for name, f in files.items()}
        repository.commit(held)
        return repository

    def find(self, kind: str, name: str, token: str | None) -> Repository:
        repository = self.repositories.get((kind, name))
        known = token in (TOKEN, READER)
        if token is not None and not known:
            raise HubRefusal(401, None, "Invalid credentials in Authorization header")
        if repository is None or (repository.private and not known):
            raise HubRefusal(404 if known else 401, "RepoNotFound", "Repository not found")
        return repository


def entry(path: str, content: bytes) -> dict[str, Any]:
    """A file as the hub lists it."""
    found: dict[str, Any] = {
        "type": "file",
        "path": path,
        "size": len(content),
        "oid": etag(content),
    }
    if len(content) >= LARGE:
        sha = hashlib.sha256(content).hexdigest()
        found["lfs"] = {"oid": sha, "size": len(content), "pointerSize": 134}
    return found


def etag(content: bytes) -> str:
    """As git names a blob; of a large file its SHA-256."""
    if len(content) >= LARGE:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def listed(files: Files, folder: str, recursive: bool) -> list[dict[str, Any]]:
    """What is in a folder, with the folders in it."""
    prefix = f"{folder}/" if folder else ""
    found: dict[str, dict[str, Any]] = {}
    for path, content in files.items():
        if not path.startswith(prefix):
            continue
        parts = path.removeprefix(prefix).split("/")
        for depth in range(1, len(parts)):
            inner = prefix + "/".join(parts[:depth])
            if recursive or depth == 1:
                found[inner] = {"type": "directory", "path": inner, "oid": "0" * 40, "size": 0}
        if recursive or len(parts) == 1:
            found[path] = entry(path, content)
    return list(found.values())


class HubHandler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_: Any) -> None:
        """Nothing on the screen."""

    # ---- what comes in ----

    def answer(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        place = urlsplit(self.path)
        path = unquote(place.path)
        self.hub.requests.append((self.command, path))
        authorization = self.headers.get("Authorization") or ""
        token = authorization.removeprefix("Bearer ") or None
        if not path.startswith("/large/"):
            self.hub.tokens.add(token)
        try:
            if self.hub.busy:
                self.hub.busy -= 1
                raise HubRefusal(429, None, "Too many requests")
            self._route(path, place.path, parse_qs(place.query), sent, token)
        except HubRefusal as refusal:
            body = json.dumps({"error": str(refusal)}).encode()
            self._send(refusal.status, body, refusal.headers)

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def _route(
        self, path: str, raw: str, query: dict[str, list[str]], sent: bytes, token: str | None
    ) -> None:
        if path == "/api/whoami-v2":
            self._whoami(token)
        elif path == "/api/repos/create":
            self._create(json.loads(sent), token)
        elif path == "/api/validate-yaml":
            self._json({"warnings": [], "errors": []})
        elif match := API.fullmatch(raw):
            kind, name, verb, revision, rest = (part and unquote(part) for part in match.groups())
            self._api(kind, name, verb, revision or "main", rest or "", query, sent, token)
        elif match := RESOLVE.fullmatch(path):
            kind = "dataset" if match[1] else "model"
            self._resolve(kind, match[2], match[3], match[4], token)
        elif match := BATCH.fullmatch(path):
            self._batch("dataset" if match[1] else "model", match[2], json.loads(sent), token)
        elif path.startswith("/large/"):
            self._large(path.removeprefix("/large/"), sent)
        else:
            raise HubRefusal(404, None, f"nothing at {path}")

    # ---- repositories ----

    def _whoami(self, token: str | None) -> None:
        if token not in (TOKEN, READER):
            raise HubRefusal(401, None, "Invalid credentials in Authorization header")
        self._json({"type": "user", "name": "me", "auth": {"type": "access_token"}})

    def _create(self, wanted: dict[str, Any], token: str | None) -> None:
        self._may_write(token)
        name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        kind = wanted.get("type") or "model"
        url = f"{self.hub.url}/{name}"
        if (kind, name) in self.hub.repositories:
            self._json({"error": "You already created this repo", "url": url}, status=409)
            return
        private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
        self.hub.add(name, {".gitattributes": "* text"}, kind, private=private)
        self._json({"url": url, "name": name, "id": name})

    def _api(
        self,
        kind: str,
        name: str,
        verb: str | None,
        revision: str,
        rest: str,
        query: dict[str, list[str]],
        sent: bytes,
        token: str | None,
    ) -> None:
        repository = self.hub.find(kind, name, token)
        if verb in (None, "revision"):
            oid, files = repository.files(revision)
            self._json(self._info(name, repository, oid, files))
        elif verb == "tree":
            recursive = query.get("recursive", ["false"])[0].lower() in ("true", "1")
            _, files = repository.files(revision)
            found = listed(files, rest, recursive)
            if rest and not found:
                raise HubRefusal(404, "EntryNotFound", f"{rest} does not exist")
            self._json(found)
        elif verb == "paths-info":
            _, files = repository.files(revision)
            wanted = parse_qs(sent.decode()).get("paths", [])
            folders = {path.rpartition("/")[0] for path in files}
            known = [entry(path, files[path]) for path in wanted if path in files]
            known += [
                {"type": "directory", "path": path, "oid": "0" * 40, "size": 0}
                for path in wanted
                if path in folders
            ]
            self._json(known)
        elif verb == "refs":
            branch = {
                "name": "main",
                "ref": "refs/heads/main",
                "targetCommit": repository.tags["main"],
            }
            self._json({"branches": [branch], "tags": [], "converts": []})
        elif verb == "preupload":
            self._may_write(token)
            self._json({"files": [self._mode(file) for file in json.loads(sent)["files"]]})
        elif verb == "commit":
            self._may_write(token)
            self._commit(name, repository, revision, sent)
        else:
            raise HubRefusal(404, None, f"no {verb} here")

    @staticmethod
    def _info(name: str, repository: Repository, oid: str, files: Files) -> dict[str, Any]:
        return {
            "_id": "1",
            "id": name,
            "modelId": name,
            "sha": oid,
            "private": repository.private,
            "gated": "manual" if repository.gated else False,
            "disabled": False,
            "tags": [],
            "downloads": 0,
            "likes": 0,
            "lastModified": "2026-01-01T00:00:00.000Z",
            "createdAt": "2026-01-01T00:00:00.000Z",
            "siblings": [{"rfilename": path} for path in files],
        }

    def _may_write(self, token: str | None) -> None:
        if token == READER:
            raise HubRefusal(403, None, "this token may only read")
        if token != TOKEN:
            raise HubRefusal(401, None, "Invalid credentials in Authorization header")

    # ---- files ----

    def _resolve(self, kind: str, name: str, revision: str, path: str, token: str | None) -> None:
        repository = self.hub.find(kind, name, token)
        if repository.gated:
            raise HubRefusal(403 if token else 401, "GatedRepo", f"Access to {name} is restricted")
        oid, files = repository.files(revision)
        headers = {"X-Repo-Commit": oid}
        if path not in files:
            refusal = HubRefusal(404, "EntryNotFound", f"{path} does not exist")
            refusal.headers |= headers
            raise refusal
        content = files[path]
        headers["ETag"] = f'"{etag(content)}"'
        if len(content) >= LARGE:
            self.hub.large[etag(content)] = content
            headers |= {
                "X-Linked-ETag": f'"{etag(content)}"',
                "X-Linked-Size": str(len(content)),
                "Location": f"{self.hub.store}/large/{etag(content)}",
            }
            self._send(302, b"", headers)
        else:
            self._content(content, headers)

    def _large(self, sha: str, sent: bytes) -> None:
        """The store of large files: PUT and GET."""
        if self.command == "PUT":
            if hashlib.sha256(sent).hexdigest() != sha:
                raise HubRefusal(400, None, "the content does not have this hash")
            self.hub.large[sha] = sent
            self._send(200, b"")
        elif sha in self.hub.large:
            self._content(self.hub.large[sha], {"ETag": f'"{sha}"'})
        else:
            raise HubRefusal(404, None, "no such object")

    def _content(self, content: bytes, headers: dict[str, str]) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked is None or self.command == "HEAD":
            self._send(200, content, headers)
            return
        first = int(asked[1])
        last = int(asked[2]) if asked[2] else len(content) - 1
        part = content[first : last + 1]
        headers["Content-Range"] = f"bytes {first}-{first + len(part) - 1}/{len(content)}"
        self._send(206, part, headers)

    # ---- commits ----

    @staticmethod
    def _mode(file: dict[str, Any]) -> dict[str, Any]:
        large = file["size"] >= LARGE
        return {
            "path": file["path"],
            "uploadMode": "lfs" if large else "regular",
            "shouldIgnore": False,
            "oid": None,
        }

    def _batch(self, kind: str, name: str, wanted: dict[str, Any], token: str | None) -> None:
        self._may_write(token)
        self.hub.find(kind, name, token)
        objects = []
        for each in wanted["objects"]:
            upload = {"href": f"{self.hub.store}/large/{each['oid']}", "header": {}}
            there = each["oid"] in self.hub.large
            objects.append({**each, **({} if there else {"actions": {"upload": upload}})})
        self._json({"transfer": "basic", "objects": objects})

    def _commit(self, name: str, repository: Repository, revision: str, sent: bytes) -> None:
        if self.hub.broken:
            self.hub.broken -= 1
            raise HubRefusal(500, None, "out of order")
        files = dict(repository.files(revision)[1])
        for line in sent.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            match operation["key"]:
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    if value["oid"] not in self.hub.large:
                        raise HubRefusal(400, None, f"{value['path']} was not uploaded")
                    files[value["path"]] = self.hub.large[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
                case "deletedFolder":
                    gone = [path for path in files if path.startswith(value["path"])]
                    for path in gone:
                        del files[path]
        oid = repository.commit(files)
        self._json({"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{name}"})

    # ---- what goes out ----

    def _json(self, value: Any, *, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def running() -> Iterator[FakeHub]:
    """A hub that answers until the end of the block."""
    hub = FakeHub()
    handler = type("Handler", (HubHandler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    hub.store = f"http://localhost:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def environment(hub: FakeHub, home: Path, token: str | None = TOKEN) -> dict[str, str]:
    """Of a process that uses this hub, with caches of its own."""
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        "HF_DATASETS_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_TOKEN": token or "",
        "NO_PROXY": "127.0.0.1,localhost",
    }


def pointed_at(
    hub: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch, token: str | None = TOKEN
) -> None:
    """Makes this process use the hub: what its libraries read when they were imported is set."""
    import datasets.config
    from huggingface_hub import constants

    from reinforge.core import hub as ours

    for name, value in environment(hub, home, token).items():
        monkeypatch.setenv(name, value)
    template = "/{repo_id}/resolve/{revision}/{filename}"
    settings = {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + template,
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_TOKEN_PATH": str(home / "token"),
    }
    for name, value in settings.items():
        monkeypatch.setattr(constants, name, value)
    theirs = {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": False,
        "HF_DATASETS_CACHE": home / "datasets",
        "HF_CACHE_HOME": home,
        "HUB_DATASETS_URL": hub.url + "/datasets/{repo_id}/resolve/{revision}/{path}",
    }
    for name, value in theirs.items():
        if hasattr(datasets.config, name):
            monkeypatch.setattr(datasets.config, name, value)
    monkeypatch.setattr(ours, "_switched", [])
    ours.refused.cache_clear()
