"""A model behind a server as a teacher: it says what the model itself says, however it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.chat_server import served_model
from reinforge.backends.teachers import DomainTeachers, LocalTeacher, Teachers
from reinforge.config.model import ModelConfig
from reinforge.config.teacher import TeacherServerConfig
from reinforge.core.batch import DOMAIN, Batch
from reinforge.core.errors import InputError
from reinforge.core.sample import Sample
from reinforge.data.units import constant
from reinforge.engines import served_teacher
from reinforge.engines.served_teacher import WAYS, ScoringWay, ServedTeacher
from reinforge.models.load import load_model, load_tokenizer
from reinforge.models.tiny import make_tiny_model

SHAPE: dict[str, Any] = {"width": 32, "layers": 1, "heads": 2, "kv_heads": 1, "context": 64}
K = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def model(folder: Path) -> str:
    words = ["cats dogs cats dogs"] * 9
    return str(make_tiny_model(folder / "model", spread=0.4, text=words, vocabulary=264, **SHAPE))


@pytest.fixture(scope="module")
def url(model: str) -> Iterator[str]:
    with served_model(model) as (address, _):
        yield address


@pytest.fixture(scope="module")
def local(model: str) -> LocalTeacher:
    return LocalTeacher(partial(load_model, ModelConfig(path=model, device="cpu")))


def tokenizer_of(path: str) -> Any:
    return load_tokenizer(ModelConfig(path=path, device="cpu"))


def served(url: str) -> ServedTeacher:
    return ServedTeacher(TeacherServerConfig(url=url, retries=0), "teacher", 264)


def sample(uid: str, seed: int, length: int, trained: slice) -> Sample:
    torch.manual_seed(seed)
    mask = [i in range(length)[trained] for i in range(length)]
    return Sample.from_tokens(uid, torch.randint(3, 250, (length,)).tolist(), mask)


def batch() -> Batch:
    """An answer, one with a tool's words between two turns and after the last, and nothing."""
    between = sample("b", 1, 30, slice(8, 12))
    between.trained[20:23] = True
    return Batch.pack(
        [sample("a", 0, 14, slice(6, None)), between, sample("c", 2, 9, slice(9, None))]
    )


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.kind}-{way.max_tokens}")
def test_it_says_what_the_model_says(
    url: str, model: str, local: LocalTeacher, monkeypatch: pytest.MonkeyPatch, way: ScoringWay
) -> None:
    monkeypatch.setattr(served_teacher, "WAYS", (way,))
    teacher = served(url)
    k = 0 if way.kind == "echo" else K
    teacher.check(tokenizer_of(model), k, ["the cats and the dogs, 3.14"])
    assert teacher.way == way
    given = batch()
    expected = local.logprobs(given, 1.0)
    assert len(expected) == 15 and float(expected.std()) > 0.5
    torch.testing.assert_close(teacher.logprobs(given, 1.0), expected, atol=1e-5, rtol=1e-5)
    if k:
        ids, logprobs = teacher.best(given, K, 1.0)
        best = local.best(given, K, 1.0)
        assert torch.equal(ids, best[0]) and ids.dtype == best[0].dtype
        torch.testing.assert_close(logprobs, best[1], atol=1e-5, rtol=1e-5)
    nothing = Batch.pack([given.samples[2]])
    assert teacher.logprobs(nothing, 1.0).shape == (0,)
    assert teacher.best(nothing, K, 1.0)[0].shape == (0, K)


def test_the_cheapest_way_is_found_and_kept(url: str, model: str) -> None:
    teacher = served(url)
    teacher.check(tokenizer_of(model), 0, [])
    assert teacher.way == WAYS[0] and teacher.model == "tiny"


def test_ids_of_other_tokens_are_refused(url: str, folder: Path) -> None:
    """As many tokens, and the last of them are others: a student whose ids mean something else."""
    words = ["ape bee ape bee owl owl"] * 9
    other = str(make_tiny_model(folder / "other", text=words, vocabulary=264, **SHAPE))
    with pytest.raises(InputError, match=r"other tokens: 2\d\d is '.+' there and '.+' for the stu"):
        served(url).check(tokenizer_of(other), 0, [])


def test_a_server_that_scores_nothing_is_refused(
    url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ScoringWay, "request", lambda self, prompt, k: {"prompt": prompt, "max_tokens": 1}
    )
    with pytest.raises(InputError, match="^teacher.server: .*does not tell the log-probs of a pro"):
        served(url).check(tokenizer_of(model), 0, [])


def test_domains_ask_their_own_teacher(url: str, local: LocalTeacher, folder: Path) -> None:
    """Also where packs share prompts, and a sample of neither has nothing to train."""
    second = str(make_tiny_model(folder / "second", spread=0.4, vocabulary=264, **SHAPE))
    there = LocalTeacher(partial(load_model, ModelConfig(path=second, device="cpu")))
    teachers = DomainTeachers([Teachers([there], [1.0]), Teachers([served(url)], [1.0])], K)
    samples = [constant(s, DOMAIN, float(i % 2)) for i, s in enumerate(batch().samples * 2)]
    for share in (False, True):
        given = Batch.pack(samples, share=share)
        apart = given.streams[DOMAIN].bool()
        assert apart.tolist() == [False] * 8 + [True] * 15 + [False] * 7
        expected = torch.where(apart, local.logprobs(given, 1.0), there.logprobs(given, 1.0))
        torch.testing.assert_close(teachers.logprobs(given, 1.0), expected, atol=1e-5, rtol=1e-5)
        best = zip(local.best(given, K, 1.0), there.best(given, K, 1.0), strict=True)
        for found, (ours, theirs) in zip(teachers.best(given, K, 1.0), best, strict=True):
            expected = torch.where(apart[:, None], ours, theirs)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
