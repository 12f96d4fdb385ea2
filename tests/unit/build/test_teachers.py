"""Teachers behind a server and teachers by domain, in real runs: what is learned is what the same
models teach in this process, each alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.chat_server import served_model
from helpers.offline_runs import WORDS, config, launch
from helpers.tiny_runs import digest, lines, tensors
from helpers.toys import SilentView
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.run import train_config
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.core.seeds import seed_of
from reinforge.loops.config_changes import allowed
from reinforge.models.tiny import make_tiny_model
from reinforge.rollout.players import single_turn

SHAPE: dict[str, Any] = {"layers": 1, "heads": 2, "kv_heads": 1, "context": 64}
ROLLOUT = {"max_new_tokens": 6, "kv_gib": 0.01}
ROWS: list[dict[str, Any]] = [
    {
        "id": f"row-{n}",
        "prompt": f"{n} {w}:",
        "completion": w.upper(),
        "domain": "code" if n % 3 == 0 else "math",
    }
    for n, w in enumerate(WORDS)
]
OF = {name: [row for row in ROWS if row["domain"] == name] for name in ("math", "code")}
SAMPLED: dict[str, Any] = {"rollout": ROLLOUT, "algorithm": {"group_size": 2}}
# what a server can teach: one log-prob a token, or its best tokens, on given text and on samples
TAUGHT: dict[str, dict[str, Any]] = {
    "opd": SAMPLED,
    "topk": {"algorithm": {"options": {"k": 40}}},
    "gkd": {
        "rollout": ROLLOUT,
        "algorithm": {"group_size": 2, "options": {"k": 8, "beta": 0.3}},
    },
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    made = {
        "student": make_tiny_model(folder / "student", width=32, seed=0, spread=0.1, **SHAPE),
        "math": make_tiny_model(folder / "math", width=64, seed=1, spread=0.4, **SHAPE),
        "code": make_tiny_model(folder / "code", width=32, seed=2, spread=0.4, **SHAPE),
        "other": make_tiny_model(
            folder / "other", width=32, seed=3, text=["APE BEE CAT"] * 9, vocabulary=280, **SHAPE
        ),
    }
    return {name: str(path) for name, path in made.items()}


@pytest.fixture(scope="module")
def url(models: dict[str, str]) -> Iterator[str]:
    """The server of the teacher of mathematics."""
    with served_model(models["math"]) as (address, _):
        yield address


def student(
    models: dict[str, str], folder: Path, name: str, teacher: dict[str, Any], **sections: Any
) -> Config:
    """One or a few steps on all rows, without clipping, so that gradients add up."""
    train = {"prompts_per_step": 12, "max_grad_norm": 0, **sections.pop("train", {})}
    chosen = {**TAUGHT.get(name, {}), **sections}
    return config(models["student"], folder, name, teacher=teacher, train=train, **chosen)


def server(url: str, **more: Any) -> dict[str, Any]:
    return {"server": {"url": url, "retries": 0, **more}}


def gradient(cfg: Config) -> dict[str, torch.Tensor]:
    """Of the first step, times the same number for all: what Adam keeps of it."""
    return {name: t for name, t in tensors(cfg).items() if name.endswith("/exp_avg")}


@pytest.mark.parametrize("name", TAUGHT)
def test_a_served_teacher_teaches_what_the_model_itself_does(
    models: dict[str, str], url: str, tmp_path: Path, name: str
) -> None:
    """Loss and gradient, for every way in which a server can teach."""
    here = student(models, tmp_path / "here", name, {"path": models["math"]}, steps=1)
    there = student(models, tmp_path / "there", name, server(url), steps=1)
    launch(here, ROWS)
    launch(there, ROWS)
    ours = lines(there)[0]
    for metric in ("train/loss", "train/grad_norm"):
        assert ours[metric] == pytest.approx(lines(here)[0][metric], rel=1e-4, abs=1e-7)
    found = gradient(there)
    size = max(float(t.abs().max()) for t in found.values())
    assert size > 1e-4
    for key, value in gradient(here).items():
        torch.testing.assert_close(found[key], value, atol=1e-4 * size, rtol=1e-3)


def test_kept_tokens_of_a_server_need_no_server_later(
    models: dict[str, str], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"algorithm": {"options": {"k": 8}}}
    with served_model(models["math"]) as (address, _):
        teacher = {**server(address), "precompute": True}
        cfg = student(models, tmp_path / "kept", "topk", teacher, steps=2, **settings)
        live = student(models, tmp_path / "live", "topk", server(address), steps=3, **settings)
        launch(cfg, ROWS)
        launch(live, ROWS)
    more = cfg.model_copy(update={"train": cfg.train.model_copy(update={"steps": 3})})
    launch(more, ROWS)
    assert [m["train/loss"] for m in lines(more)] == pytest.approx(
        [m["train/loss"] for m in lines(live)], rel=1e-5
    )


def test_a_server_that_dies_is_named_and_the_run_goes_on_later(
    models: dict[str, str], tmp_path: Path
) -> None:
    """Its address may be another one then; bits are those of a run without the accident."""
    whole, cut = (
        student(
            models,
            tmp_path / name,
            "opd",
            {"server": {"url": "http://127.0.0.1:9/v1", "retries": 0}},
            run={"dir": str(tmp_path / name), "checkpoint": {"every": 1}},
            steps=4,
        )
        for name in ("whole", "cut")
    )

    def at(cfg: Config, address: str) -> Config:
        asked = cfg.model_dump()
        asked["teacher"]["server"]["url"] = address
        return Config.model_validate(asked)

    with ExitStack() as stack:
        address, _ = stack.enter_context(served_model(models["math"]))
        launch(at(whole, address), ROWS)

        def accident(run: Any, step: Any) -> None:
            if step.number == 2:
                stack.close()

        with pytest.raises(InputError) as told:
            train_config(
                at(cut, address), CallerObjects(data=ROWS, callbacks=accident), SilentView()
            )
    assert f"teacher.server: {address} does not answer" in str(told.value)
    assert "goes on from its newest checkpoint" in str(told.value)
    assert len(lines(cut)) == 2
    with served_model(models["math"]) as (elsewhere, _):
        launch(at(cut, elsewhere), ROWS)
    assert digest(cut) == digest(whole)


def test_the_key_is_in_the_environment_and_nowhere_else(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "sk-of-the-teacher-1234"
    with served_model(models["math"], api_key=key) as (address, _):
        teacher = server(address, api_key_env="TEACHER_KEY")
        monkeypatch.setenv("TEACHER_KEY", "another")
        with pytest.raises(InputError, match="teacher.server: .*the API key is missing or wrong"):
            launch(student(models, tmp_path / "wrong", "opd", teacher, steps=1), ROWS)
        monkeypatch.setenv("TEACHER_KEY", key)
        launch(student(models, tmp_path / "run", "opd", teacher, steps=1), ROWS)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 5
    assert not [path for path in written if key.encode() in path.read_bytes()]


@pytest.mark.parametrize(
    ("of", "options", "algorithm", "said"),
    [
        ("other", {}, {}, "has other tokens: 2.. is one, and the student has 259"),
        ("other", {}, {"name": "opd"}, "has other tokens: it splits '0 ape:APE' into"),
        ("math", {"max_logprobs": 7}, {}, "at most 7 here"),
        ("math", {"context": 12}, {"name": "opd"}, "holds 11 tokens, and the run has texts of up"),
        ("math", {}, {"server": {"model": "huge"}}, "there is no model 'huge' here"),
        ("gone", {}, {}, "does not answer after 1 tries"),
    ],
)
def test_a_server_that_cannot_be_the_teacher_is_refused_at_the_start(
    models: dict[str, str],
    tmp_path: Path,
    of: str,
    options: dict[str, Any],
    algorithm: dict[str, Any],
    said: str,
) -> None:
    with ExitStack() as stack:
        address, _ = stack.enter_context(
            served_model(models["math" if of == "gone" else of], **options)
        )
        if of == "gone":
            stack.close()
        teacher = server(address, **algorithm.get("server", {}))
        cfg = student(models, tmp_path / "run", algorithm.get("name", "topk"), teacher, steps=1)
        with pytest.raises(InputError, match=f"^teacher.server: .*{said}"):
            launch(cfg, ROWS)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("name", ["forward_kl", *TAUGHT])
def test_every_domain_learns_from_its_own_teacher_alone(
    models: dict[str, str],
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """The loss and the gradient of a batch of two domains are those of two runs with one teacher
    each, by their tokens; also where one of the teachers is behind a server.
    """
    # a row is answered alike whatever its place in a step
    monkeypatch.setattr(
        single_turn, "seed_of", lambda *key: seed_of(*(str(k).split(":")[-1] for k in key))
    )
    math = {"path": models["math"]} if name == "forward_kl" else server(url)
    code = {"path": models["code"]}
    # the answers of gkd that are the data's own are drawn by group: here all are sampled
    sections = {}
    if name == "gkd":
        algorithm = TAUGHT["gkd"]["algorithm"]
        sections["algorithm"] = {**algorithm, "options": {**algorithm["options"], "share": 1.0}}
    both = student(
        models,
        tmp_path / "both",
        name,
        {"domains": {"math": math, "code": code}},
        steps=1,
        **sections,
    )
    launch(both, ROWS)
    mixed = lines(both)[0]
    alone = {}
    for domain, teacher in (("math", math), ("code", code)):
        rows = OF[domain]
        cfg = student(
            models,
            tmp_path / domain,
            name,
            teacher,
            steps=1,
            train={"prompts_per_step": len(rows)},
            **sections,
        )
        launch(cfg, rows)
        alone[domain] = (lines(cfg)[0], gradient(cfg))
    key = "policy/teacher_kl" if name == "opd" else "distillation/divergence"
    tokens = {domain: metrics["tokens/trained"] for domain, (metrics, _) in alone.items()}
    every = sum(tokens.values())
    assert mixed["tokens/trained"] == every and min(tokens.values()) > 8
    for domain, (metrics, _) in alone.items():
        assert mixed[f"{key}/{domain}"] == pytest.approx(metrics[key], rel=1e-5, abs=1e-6)
    assert abs(mixed[f"{key}/math"] - mixed[f"{key}/code"]) > 1e-2
    loss = sum(tokens[d] * metrics["train/loss"] for d, (metrics, _) in alone.items()) / every
    assert mixed["train/loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
    found = gradient(both)
    size = max(float(t.abs().max()) for t in found.values())
    for part, value in found.items():
        expected = sum(tokens[d] * own[part] for d, (_, own) in alone.items()) / every
        torch.testing.assert_close(value, expected, atol=1e-4 * size, rtol=1e-3)


def test_a_run_with_rows_of_one_domain_is_the_run_with_its_teacher(
    models: dict[str, str], tmp_path: Path
) -> None:
    """To the bit, teachers of other domains or not."""
    domains = {name: {"path": models[name]} for name in ("code", "math")}
    one = student(models, tmp_path / "one", "opd", {"path": models["math"]}, steps=2)
    two = student(models, tmp_path / "two", "opd", {"domains": domains}, steps=2)
    launch(one, OF["math"])
    launch(two, OF["math"])
    weights = tensors(one)
    assert all(torch.equal(value, weights[name]) for name, value in tensors(two).items())


@pytest.mark.parametrize("name", ["opd", "forward_kl"])
def test_a_row_without_a_teacher_is_named(
    models: dict[str, str], tmp_path: Path, name: str
) -> None:
    domains = {domain: {"path": models[domain]} for domain in ("math", "code")}
    cfg = student(models, tmp_path / "run", name, {"domains": domains}, steps=1)
    odd = [*ROWS[:3], {**ROWS[3], "domain": "law"}, *ROWS[4:]]
    with pytest.raises(InputError, match="row-3.*'law', which has no teacher; there are math"):
        launch(cfg, odd)
    without = {key: value for key, value in ROWS[5].items() if key != "domain"}
    with pytest.raises(InputError, match="row-5.*has no column 'domain'"):
        launch(cfg, [*ROWS[:5], without])


def test_a_misspelt_key_of_a_domain_is_found(models: dict[str, str], tmp_path: Path) -> None:
    teacher = {"domains": {"math": {"pth": models["math"]}}}
    with pytest.raises(InputError, match=r"did you mean `teacher\.domains\.math\.path`"):
        student(models, tmp_path, "opd", teacher)


def test_a_server_may_move_and_its_model_may_not_change() -> None:
    assert allowed("teacher.server.url", "http://here/v1", "http://elsewhere/v1")
    assert allowed("teacher.domains.math.server.api_key_env", None, "KEY")
    assert not allowed("teacher.domains.math.server.model", "one", "another")
    assert not allowed("teacher.path", "one", "another")
