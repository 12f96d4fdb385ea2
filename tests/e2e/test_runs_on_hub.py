"""Models, data sets, exports and whole runs on a hub, which is a server of this test
(helpers/hub_server.py) that speaks what huggingface_hub asks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import reinforge
from helpers import hub_server
from helpers.cli_runs import ENVIRONMENT
from helpers.hub_server import READER, TOKEN, FakeHub
from helpers.paths import SRC
from helpers.tiny_runs import make_config
from helpers.toys import SilentView
from reinforge.build.run import train_config
from reinforge.checkpoint import store
from reinforge.config.load import config_from_dict
from reinforge.config.model import ModelConfig
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.data.sources import load_rows
from reinforge.models.load import load_model, load_tokenizer
from reinforge.models.tiny import make_tiny_model
from reinforge.offline.export import export

Login = Callable[[str | None], None]
ROWS = [{"prompt": f"{i}+{i}=", "completion": str(2 * i)} for i in range(8)]


def jsonl(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with hub_server.running() as server:
        hub_server.pointed_at(server, tmp_path / "home", monkeypatch)
        yield server


@pytest.fixture
def login(monkeypatch: pytest.MonkeyPatch) -> Login:
    return lambda token: monkeypatch.setenv("HF_TOKEN", token or "")


@pytest.fixture
def on_hub(hub: FakeHub, tiny_dir: str) -> FakeHub:
    """With a model and a data set."""
    hub.add("org/tiny", Path(tiny_dir))
    hub.add("org/rows", {"train.jsonl": jsonl(ROWS)}, "dataset")
    return hub


# ---- models and data ----


def test_a_model_of_a_revision(hub: FakeHub, tiny_dir: str, tmp_path: Path) -> None:
    """Two commits with other weights, a name for the first: each gives its own."""
    first = hub.add("org/tiny", Path(tiny_dir)).tags["main"]
    other = make_tiny_model(
        tmp_path / "other", seed=1, width=32, layers=2, heads=4, kv_heads=2, context=128
    )
    repository = hub.add("org/tiny", other)
    repository.tags["v1"] = first

    def weights(revision: str | None) -> float:
        model = load_model(ModelConfig(path="org/tiny", revision=revision, device="cpu"))
        return float(next(model.module.parameters()).detach().double().sum())

    assert weights("v1") == weights(first) != weights(None) == weights("main")
    assert TOKEN in hub.tokens
    assert any(path.startswith("/large/") for _, path in hub.requests)  # the weights came apart
    hub.busy = 10**6  # from here on it answers nothing: the cache does
    assert weights("v1") == weights(first)


def test_a_data_set_with_patterns_splits_and_revisions(hub: FakeHub) -> None:
    parts = {f"data/part-{i}.jsonl": jsonl(ROWS[2 * i : 2 * i + 2]) for i in range(4)}
    repository = hub.add("org/rows", {**parts, "test.jsonl": jsonl(ROWS[:1])}, "dataset")
    repository.tags["old"] = repository.tags["main"]
    hub.add("org/rows", {"data/part-0.jsonl": jsonl(ROWS[7:])}, "dataset")

    def prompts(**options: Any) -> list[str]:
        data = {"source": "org/rows", "options": options}
        cfg = config_from_dict({**BASE, "data": data})
        return [str(row.prompt) for row in load_rows(cfg.data, [])]

    everything = prompts(revision="old", data_files="data/part-*.jsonl")
    assert everything == [row["prompt"] for row in ROWS]
    assert prompts(revision="old", data_files="data/part-[12].jsonl") == everything[2:6]
    assert prompts(data_files="data/part-*.jsonl") == everything[7:]


BASE: dict[str, Any] = {
    "model": {"path": "org/tiny", "device": "cpu"},
    "algorithm": {"name": "sft"},
    "data": {"source": "org/rows"},
    "train": {"steps": 2, "prompts_per_step": 4, "learning_rate": 1e-3},
    "run": {"dir": "run"},
}


def test_a_run_with_a_model_and_data_of_the_hub(on_hub: FakeHub, tmp_path: Path) -> None:
    result = reinforge.train(
        model="org/tiny",
        data="org/rows",
        algorithm="sft",
        epochs=2,
        prompts_per_step=4,
        learning_rate=1e-2,
        dir=tmp_path / "run",
    )
    losses = result.history["train/loss"]
    assert result.steps == 4 and losses.iloc[-1] < losses.iloc[0] - 0.1


# ---- what it says no to ----


@pytest.mark.parametrize(
    ("name", "token", "says"),
    [
        ("org/nothing", TOKEN, "the hub has no org/nothing that your token may see. Check the"),
        ("org/nothing", None, "the hub has no org/nothing that everybody may see"),
        ("org/secret", None, "if it is private, set HF_TOKEN or run `hf auth login`"),
        ("org/tiny", "hf_wrong", "the hub does not accept your token. To give it a valid one"),
        ("org/gated", TOKEN, "org/gated is gated: its owners decide who may have it. Ask for"),
        ("org/gated", None, "/org/gated, and set HF_TOKEN or run `hf auth login`"),
    ],
)
def test_a_model_that_cannot_be_had(
    on_hub: FakeHub, login: Login, name: str, token: str | None, says: str
) -> None:
    files = on_hub.repositories["model", "org/tiny"].files()[1]
    on_hub.add("org/secret", files, private=True)
    on_hub.add("org/gated", files, gated=True)
    login(token)
    with pytest.raises(InputError) as caught:
        load_tokenizer(ModelConfig(path=name))
    assert says in str(caught.value) and str(caught.value).startswith("model.path: ")


def test_a_revision_that_is_not_there(on_hub: FakeHub) -> None:
    with pytest.raises(InputError, match=r"org/tiny has no such revision\. Give a branch"):
        load_tokenizer(ModelConfig(path="org/tiny", revision="v9"))


def test_a_hub_that_is_too_busy(on_hub: FakeHub) -> None:
    on_hub.busy = 10**6
    with pytest.raises(InputError, match="the hub has had too many requests from here"):
        load_tokenizer(ModelConfig(path="org/tiny"))


@pytest.mark.parametrize(
    ("name", "token", "says"),
    [
        ("org/none", TOKEN, "org/none"),
        ("org/shut", TOKEN, "is gated"),
        ("org/mine", None, "log"),
    ],
)
def test_data_that_cannot_be_had(
    on_hub: FakeHub, login: Login, name: str, token: str | None, says: str
) -> None:
    on_hub.add("org/mine", {"train.jsonl": jsonl(ROWS)}, "dataset", private=True)
    on_hub.add("org/shut", {"train.jsonl": jsonl(ROWS)}, "dataset", gated=True)
    login(token)
    with pytest.raises(InputError) as caught:
        load_rows(config_from_dict({**BASE, "data": {"source": name}}).data, [])
    assert str(caught.value).startswith(f"data.source {name}: ") and says in str(caught.value)


# ---- exports ----


def test_an_export_that_is_pushed_loads_again(
    on_hub: FakeHub, login: Login, tiny_dir: str, tmp_path: Path
) -> None:
    cfg = supervised(tiny_dir, tmp_path / "run", hub=None)
    train_config(cfg, view=SilentView())
    export(tmp_path / "run", tmp_path / "out", push="me/model")
    pushed = on_hub.repositories["model", "me/model"]
    assert pushed.private and pushed.files()[1]["README.md"].startswith(b"---")
    here = load_model(ModelConfig(path=str(tmp_path / "out"), device="cpu"))
    there = load_model(ModelConfig(path="me/model", device="cpu"))
    for a, b in zip(here.module.parameters(), there.module.parameters(), strict=True):
        assert a.equal(b)
    login(READER)
    with pytest.raises(InputError, match=r"could not upload to me/other: your token may not do"):
        export(tmp_path / "run", tmp_path / "again", push="me/other")
    assert (tmp_path / "again" / "model.safetensors").exists()


# ---- runs ----


def supervised(model: str, folder: Path, *overrides: str, hub: str | None = "me/run") -> Config:
    """Four steps, with a checkpoint after every second."""
    file = folder.parent / "rows.jsonl"
    file.write_text(jsonl(ROWS))
    return make_config(
        model,
        folder.parent,
        folder.name,
        "sft",
        f"data.source={file}",
        "train.steps=4",
        "run.checkpoint.every=2",
        "run.checkpoint.keep=1",
        *([f"run.hub.repo={hub}"] if hub else []),
        *overrides,
    )


def pushed(hub: FakeHub) -> dict[str, bytes]:
    return hub.repositories["model", "me/run"].files()[1]


def test_a_run_goes_on_elsewhere(on_hub: FakeHub, tiny_dir: str, tmp_path: Path) -> None:
    """Six steps in one go, and four here and two in an empty directory: the same weights."""
    train_config(supervised(tiny_dir, tmp_path / "here"), view=SilentView())
    repository = on_hub.repositories["model", "me/run"]
    steps = [
        sorted({path.split("/")[1] for path in files if path.startswith("checkpoints/")})
        for files in repository.commits.values()
    ]
    # made, two checkpoints, the end: never two at a time
    assert steps == [[], ["step-00000002"], ["step-00000004"], ["step-00000004"]]
    assert repository.private and b"run.hub: {repo: me/run}" in pushed(on_hub)["README.md"]
    assert pushed(on_hub)["metrics.jsonl"].count(b"\n") == 4

    six = "train.steps=6"
    result = train_config(supervised(tiny_dir, tmp_path / "there", six), view=SilentView())
    train_config(supervised(tiny_dir, tmp_path / "whole", six, hub=None), view=SilentView())
    assert result.steps == 6
    assert store.digest_run(tmp_path / "there") == store.digest_run(tmp_path / "whole")
    logged = (tmp_path / "there" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in logged] == [1, 2, 3, 4, 5, 6]
    assert not list((tmp_path / "there").glob(".from-hub*"))

    # back where it began, whose checkpoint is the older one
    seven = supervised(tiny_dir, tmp_path / "here", "train.steps=7")
    assert train_config(seven, view=SilentView()).steps == 7
    logged = (tmp_path / "here" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in logged] == [1, 2, 3, 4, 5, 6, 7]


def test_a_run_that_must_not_go_on(
    on_hub: FakeHub, login: Login, tiny_dir: str, tmp_path: Path
) -> None:
    def refused(says: str, *overrides: str) -> None:
        with pytest.raises(InputError, match=says):
            cfg = supervised(tiny_dir, tmp_path / "there", *overrides)
            train_config(cfg, view=SilentView())
        assert not (tmp_path / "there" / "checkpoints").exists()

    train_config(supervised(tiny_dir, tmp_path / "here"), view=SilentView())
    refused(r"run\.hub\.repo: me/run already holds a run", "run.resume=never")
    refused(r"was made with another configuration: run\.seed was 0 and is 1", "run.seed=1")
    login(READER)
    refused(r"run\.hub\.repo me/new: your token may not do this", "run.hub.repo=me/new")
    login(None)
    refused(r"run\.hub\.repo: there is no token for the hub\. Set HF_TOKEN")


def test_without_a_network_it_is_said_at_once(
    on_hub: FakeHub, tiny_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(InputError, match=r"run\.hub\.repo: the hub http://127\.0\.0\.1:9 cannot"):
        train_config(supervised(tiny_dir, tmp_path / "run"), view=SilentView())
    with pytest.raises(InputError, match=r"model\.path: no such directory: org/tiny, and the hub"):
        load_tokenizer(ModelConfig(path="org/tiny"))
    assert on_hub.requests == []


def failures(run: Path) -> list[str]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event["error"] for event in events if event["kind"] == "sink_failed"]


def test_a_push_that_fails_is_made_up_for_by_the_next(
    on_hub: FakeHub, tiny_dir: str, tmp_path: Path
) -> None:
    """The first commit fails, the second holds everything; nobody needs to know."""
    on_hub.broken = 1
    train_config(supervised(tiny_dir, tmp_path / "run"), view=SilentView())
    assert any(path.startswith("checkpoints/step-00000004/") for path in pushed(on_hub))
    assert failures(tmp_path / "run") == []


def test_a_last_push_that_fails_is_told(on_hub: FakeHub, tiny_dir: str, tmp_path: Path) -> None:
    on_hub.broken = 10**6
    result = train_config(supervised(tiny_dir, tmp_path / "run"), view=SilentView())
    assert result.steps == 4  # training goes on
    [told] = failures(tmp_path / "run")
    assert "the hub answers with an error of its own (500)" in told


def test_the_command_line(on_hub: FakeHub, tmp_path: Path) -> None:
    """A process that knows the hub by its environment only."""
    settings = {**ENVIRONMENT, **hub_server.environment(on_hub, tmp_path / "home")}
    command = [sys.executable, "-m", "reinforge", "sft", "org/tiny", "org/rows", "--out", "run"]
    command += ["train.steps=2", "run.hub.repo=me/run", "model.device=cpu"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, **settings, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert any(path.startswith("checkpoints/step-00000002/") for path in pushed(on_hub))
    assert json.loads(pushed(on_hub)["summary.json"])["status"] == "finished"
