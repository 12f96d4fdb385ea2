"""What a trainer publishes is what a worker stages, to the bit; the proof after an update names the
culprit.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers.toys import make_module
from reinforge.config.adapter import AdapterConfig
from reinforge.engines.served.vllm_plugin import from_files, on_base
from reinforge.models.adapters import add_adapter, merged
from reinforge.models.causal import CausalModel
from reinforge.models.named_weights import base_weights, low_rank, named_weights
from reinforge.weights.files import FileChannel, SafetensorsChannel, sweep
from reinforge.weights.probe import WeightMismatch, compare, probe_tokens


def tensors() -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(0)
    return [
        ("a", torch.randn(7, 3)),
        ("b.weight", torch.randn(1000, 40).bfloat16()),
        ("c", torch.tensor(3.5)),
        ("d", torch.arange(5)),
        ("e", torch.randn(6, 4).t()),
    ]


@pytest.mark.parametrize("bucket", [1, 100, 1 << 30])
def test_files_come_back_to_the_bit(bucket: int, tmp_path: Path) -> None:
    channel = FileChannel(tmp_path, bucket=bucket)
    channel.publish(tensors(), 4)
    message = channel.message()
    found = from_files(Path(message["folder"]))
    assert message["version"] == 4 and [name for name, _ in found] == [
        "a",
        "b.weight",
        "c",
        "d",
        "e",
    ]
    for (_, got), (_, want) in zip(found, tensors(), strict=True):
        assert got.dtype is want.dtype and torch.equal(got, want)
    channel.close()
    assert not list(tmp_path.iterdir())


def test_a_changed_byte_is_noticed(tmp_path: Path) -> None:
    channel = FileChannel(tmp_path)
    channel.publish(tensors(), 1)
    file = channel.folder / "0.bin"
    raw = bytearray(file.read_bytes())
    raw[10] ^= 1
    file.write_bytes(raw)
    with pytest.raises(RuntimeError, match="does not hold what the trainer wrote"):
        from_files(channel.folder)


def test_what_was_cut_is_not_there(tmp_path: Path) -> None:
    """Without the manifest, which comes last, nobody can stage half of it."""
    channel = FileChannel(tmp_path, bucket=1)

    def cut():  # type: ignore[no-untyped-def]
        yield from tensors()[:2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        channel.publish(cut(), 1)
    with pytest.raises(FileNotFoundError):
        from_files(channel.folder)


def test_what_dead_processes_left_is_swept(tmp_path: Path) -> None:
    mine = FileChannel(tmp_path)
    dead = tmp_path / "reinforge-weights-999999999-x"
    cut = tmp_path / "reinforge-weights-999999998-x"
    dead.mkdir()
    (dead / "owner").touch()
    cut.mkdir()  # killed before it held it
    os.utime(cut, (0, 0))
    sweep(tmp_path)
    assert mine.folder.is_dir() and not dead.exists() and not cut.exists()


def test_what_a_process_of_another_container_holds_is_not_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number means nothing here: containers that share /dev/shm do not see each other's
    processes.
    """
    monkeypatch.setattr(os, "getpid", lambda: 999999999)
    theirs = FileChannel(tmp_path)
    monkeypatch.undo()
    theirs.publish([("a", torch.ones(3))], 1)
    mine = FileChannel(tmp_path)
    assert dict(from_files(theirs.folder))["a"].tolist() == [1.0, 1.0, 1.0]
    folder = theirs.folder
    theirs.close()
    assert not folder.exists() and mine.folder.is_dir()


def test_safetensors_are_a_model_directory(tmp_path: Path) -> None:
    source = tmp_path / "model"
    make_module().save_pretrained(source)
    channel = SafetensorsChannel(tmp_path / "out", source)
    module = make_module(seed=1)
    channel.publish(named_weights(module), 2)
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(channel.message()["folder"])
    for name, tensor in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    assert json.loads((channel.folder / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.parametrize("tied", [False, True])
def test_names_are_those_of_a_checkpoint(tied: bool, tmp_path: Path) -> None:
    module = make_module("qwen2", tie_word_embeddings=tied)
    model = CausalModel(module)
    model.add_value_head()
    (
        module.save_pretrained(tmp_path)
        if not tied
        else make_module("qwen2", tie_word_embeddings=True).save_pretrained(tmp_path)
    )
    want = {
        n: t
        for n, t in load_file(tmp_path / "model.safetensors").items()
        if not n.startswith("value_head")
    }
    found = dict(named_weights(model.module))
    assert found.keys() == want.keys() and ("lm_head.weight" in found) is not tied
    assert all(torch.equal(found[name], want[name]) for name in want)


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
def test_adapters_travel_merged(kind: str) -> None:
    module = add_adapter(make_module(), AdapterConfig(kind=kind, rank=4), seed=0)  # type: ignore[arg-type]
    with torch.no_grad():
        for name, p in module.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.randn_like(p) * 0.3)
    model = CausalModel(module)
    found = {name: tensor.clone() for name, tensor in named_weights(module)}
    before = model.verify()
    plain = merged(module).state_dict()
    assert (
        found.keys() == {n for n in plain if n in found}
        and found.keys() == dict(make_module().named_parameters()).keys()
    )
    assert max(float((found[name] - plain[name]).abs().max()) for name in found) < 1e-6
    moved = max(
        float((found[name] - tensor.detach()).abs().max())
        for name, tensor in make_module().named_parameters()
    )
    assert moved > 0.1 and before < 1e-4


def test_a_module_is_untouched_by_being_named() -> None:
    module = add_adapter(make_module(), AdapterConfig(kind="dora", rank=4), seed=0)
    before = {name: t.clone() for name, t in module.state_dict().items()}
    list(named_weights(module))
    assert all(torch.equal(before[name], t) for name, t in module.state_dict().items())


WANT = torch.tensor([0.0, -1.0, -2.0, -3.0])


def test_the_proof_passes_rounding() -> None:
    check = compare(WANT + 1e-4, WANT, version=3, dtype="float32", before=None, head_error=1e-6)
    assert check.error == pytest.approx(1e-4, rel=1e-2) and check.version == 3


def test_errors_of_both_signs_do_not_cancel() -> None:
    with pytest.raises(WeightMismatch, match=r"differ from the trainer's by 0\.2 nats"):
        compare(
            WANT + torch.tensor([0.0, 0.3, -0.3, 0.0]),
            WANT,
            version=3,
            dtype="float32",
            before=None,
            head_error=0.0,
        )


@pytest.mark.parametrize(
    ("found", "before", "head_error", "culprit"),
    [
        (WANT + 0.3, WANT + 9, 0.7, "tied lm_head is stale"),
        (WANT, WANT, 0.7, "tied lm_head is stale"),  # the probe does not see it yet
        (WANT + 0.3, WANT + 0.3001, 0.0, "still serves the weights of before"),
        (WANT + 0.3, WANT - 0.5, 0.0, "did not arrive"),
        (WANT + 0.3, None, 0.0, "another function"),
    ],
)
def test_the_culprit_is_named(
    found: torch.Tensor, before: torch.Tensor | None, head_error: float, culprit: str
) -> None:
    with pytest.raises(WeightMismatch, match=culprit):
        compare(found, WANT, version=5, dtype="float32", before=before, head_error=head_error)


def test_probe_tokens_are_in_the_vocabulary_and_differ() -> None:
    for size in (64, 259, 32000, 151936):
        tokens = probe_tokens(size)
        assert len(tokens) == 48 and all(0 <= t < size for t in tokens) and len(set(tokens)) > 40


@pytest.mark.parametrize(
    ("arch", "options"),
    [("llama", {}), ("qwen2", {"kind": "rslora"}), ("qwen3", {"rank": 3, "alpha": 7})],
    ids=str,
)
def test_an_adapter_alone_makes_the_merged_weights(arch: str, options: dict[str, object]) -> None:
    """Base once, then the adapter: what the worker adds up is what the trainer would have sent, to
    the rounding of one sum.
    """
    module = add_adapter(make_module(arch, 0), AdapterConfig(**{"rank": 4, **options}), seed=0)  # type: ignore[arg-type]
    with torch.no_grad():
        for name, p in module.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    low = low_rank(module)
    base = dict(base_weights(module))
    want = dict(named_weights(module))
    assert low is not None and base.keys() == want.keys()
    sent = {f"{name}/{side}": getattr(pair, side) for name, pair in low.items() for side in "ab"}
    assert sum(t.numel() for t in sent.values()) < sum(base[name].numel() for name in low)
    found = dict(on_base(base, sent, torch.device("cpu"), changed_only=False))
    assert found.keys() == want.keys() and all(
        torch.allclose(found[k], want[k], atol=1e-6, rtol=1e-5) for k in want
    )
    assert any(not torch.equal(found[name], base[name]) for name in low)
    assert {name for name, _ in on_base(base, sent, torch.device("cpu"), changed_only=True)} == set(
        low
    )


def test_what_is_no_plain_sum_travels_merged() -> None:
    assert low_rank(make_module("llama", 0)) is None
    assert (
        low_rank(add_adapter(make_module("llama", 0), AdapterConfig(rank=2, kind="dora"), seed=0))
        is None
    )
    module = add_adapter(make_module("llama", 0), AdapterConfig(rank=2), seed=0)
    assert low_rank(module) is not None
    # trained beside the adapter
    next(p for name, p in module.named_parameters() if "norm" in name).requires_grad_()
    assert low_rank(module) is None
