"""Compiled layers on disk: where they lie, and that another process finds them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from helpers.paths import SRC
from reinforge.models.compile_cache import VARIABLE, cache_on_disk


def test_it_lies_in_the_users_cache_and_is_theirs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where torch has written its own place for temporary files into the environment."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for before in (None, default_cache_dir()):
        monkeypatch.delenv(VARIABLE, raising=False)
        if before is not None:
            monkeypatch.setenv(VARIABLE, before)
        assert cache_on_disk() == tmp_path / "reinforge" / "compiled"
        assert os.environ[VARIABLE] == str(tmp_path / "reinforge" / "compiled")
    assert (tmp_path / "reinforge" / "compiled").stat().st_mode & 0o777 == 0o700


def test_without_the_variable_it_is_below_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_on_disk() == tmp_path / ".cache" / "reinforge" / "compiled"


def test_a_place_that_the_user_names_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "mine"))
    assert cache_on_disk() == tmp_path / "mine"
    assert os.environ[VARIABLE] == str(tmp_path / "mine")


def test_where_nothing_can_be_written_it_is_torchs_own_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert str(cache_on_disk()) == os.environ[VARIABLE] == default_cache_dir()


# a training step of compiled layers, on the CPU: what the compiler found in its cache, and weights
STEP = """
import hashlib, json, sys
import torch
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM
from reinforge.algorithms.build import build
from reinforge.backends.local import LocalBackend
from reinforge.config.train import TrainConfig
from reinforge.core.batch import Totals, pack
from reinforge.core.sample import Sample
from reinforge.models.causal import CausalModel

torch.use_deterministic_algorithms(sys.argv[1] == "deterministic")
torch.manual_seed(0)
shape = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
)
model = CausalModel(LlamaForCausalLM(shape))
model.compile_layers()
backend = LocalBackend(model, TrainConfig(steps=1, learning_rate=1e-3), total_steps=1)
samples = []
for n in range(4):
    tokens = torch.arange(12 + n) * (n + 1) % 64
    samples.append(Sample(
        f"0/{n}", "0", f"0/{n}", tokens, torch.arange(12 + n) >= 6, torch.full((12 + n,), -4.0),
        torch.zeros(12 + n, dtype=torch.int32), reward=float(n % 2),
    ))
grpo = build("grpo", max_new_tokens=32)
batches = pack(samples, 1000, share=True)
grpo.advantages(batches)
backend.forward_backward(batches, grpo.loss, Totals.of(batches, 32))
backend.step()
weights = b"".join(p.detach().numpy().tobytes() for p in model.module.parameters())
found = counters["inductor"]
print(json.dumps({
    "hits": found["fxgraph_cache_hit"], "misses": found["fxgraph_cache_miss"],
    "weights": hashlib.sha256(weights).hexdigest(),
}))
"""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU with g++")
def test_the_second_process_compiles_nothing(tmp_path: Path) -> None:
    """Its weights have the same bits. Where torch is to be deterministic, nothing that was compiled
    otherwise is taken.
    """
    first, second, other = (step(tmp_path, kind) for kind in ("any", "any", "deterministic"))
    assert first["misses"] >= 4 and first["hits"] == 0
    assert second["hits"] == first["misses"] and second["misses"] == 0
    assert first["weights"] == second["weights"]
    assert other["hits"] == 0 and other["misses"] == first["misses"]


def step(folder: Path, kind: str) -> dict[str, Any]:
    env = {**os.environ, "XDG_CACHE_HOME": str(folder), "PYTHONPATH": str(SRC)}
    env.pop(VARIABLE, None)
    done = subprocess.run(
        [sys.executable, "-c", STEP, kind], env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
