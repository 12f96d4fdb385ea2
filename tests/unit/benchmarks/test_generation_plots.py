"""What benchmarks/gpu_generate.py measures is what its file holds and what plot_gpu.py draws."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from helpers.paths import ROOT
from reinforge.models.causal import CausalModel


@pytest.fixture(scope="module")
def bench() -> Iterator[dict[str, Any]]:
    """The scripts import each other by their names."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    names = ("generation_results", "gpu_generate", "gpu_step", "plot_gpu")
    yield {name: importlib.import_module(name) for name in names}
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def measured(bench: dict[str, Any]) -> list[Any]:
    """Ours, ours exact, and what a peer's script printed, of the smallest workload."""
    gpu_generate = bench["gpu_generate"]
    model = gpu_generate.random_model("tiny", torch.device("cpu"))
    exact = CausalModel(model.module, exact=True)
    said = [
        {"peer": "vllm", "workload": "smoke", "seconds": s, "lengths": [8, 24]} for s in (1.2, 2.4)
    ]
    numbers = gpu_generate.Numbers()
    return [
        *(gpu_generate.measure(one, "tiny", "smoke", 3, numbers) for one in (model, exact)),
        gpu_generate.peers_result(model, "tiny", "smoke", "cpu", said),
    ]


def test_what_is_written_is_what_was_measured(
    bench: dict[str, Any], measured: list[Any], tmp_path: Path
) -> None:
    results = bench["generation_results"]
    path = tmp_path / "gpu_generate.json"
    assert results.add_results(path, measured) == measured == results.read_results(path)
    plain, exact, peer = measured
    assert (plain.variant, exact.variant, peer.variant) == ("fp32", "fp32 exact", "bf16")
    assert [r.key for r in plain.rounds] == [1, 2, 3]
    assert all(4 <= r.tokens <= 4 * 24 and r.longest <= 24 for r in plain.rounds)
    mismatches = {f"mismatch_{name}" for name in ("model", "model_max", "fp8", "fp8_max")}
    assert {"preemptions", "captures", "peak_gib", *mismatches} == plain.details.keys()
    assert plain.details["mismatch_model"] < 1e-5
    assert plain.details["mismatch_fp8"] > 1e-4, "sampled in float32"
    assert peer.median("ms_per_token_of_the_longest") == pytest.approx((50 + 100) / 2)
    assert peer.spread("tokens_per_second") == pytest.approx((20.0, 32 / 2.4, 32 / 1.2))
    entry = json.loads(path.read_text())["results"][0]
    seconds = sorted(r["seconds"] / r["longest"] for r in entry["rounds"])
    assert entry["ms_per_token_of_the_longest"] == pytest.approx(1000 * seconds[1])
    assert 0 < entry["share_of_floor"] < 1


def test_a_second_measurement_takes_the_place_of_the_first(
    bench: dict[str, Any], measured: list[Any], tmp_path: Path
) -> None:
    results = bench["generation_results"]
    path = tmp_path / "gpu_generate.json"
    results.add_results(path, measured)
    newer = replace(measured[0], rounds=measured[0].rounds[:1])
    other = replace(measured[0], workload="wide")
    assert results.add_results(path, [newer, other]) == [newer, *measured[1:], other]


@pytest.mark.parametrize("like", [True, False], ids=["one prompt", "tokens of all kinds"])
def test_no_tokens_need_fewer_experts_than_the_floor_counts(
    bench: dict[str, Any], like: bool
) -> None:
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    module = Qwen3MoeForCausalLM(config).eval()
    rows = torch.full((16, 4), 7) if like else torch.randint(64, (16, 4))
    with torch.no_grad():
        logits = module(rows, output_router_logits=True).router_logits
    used = sum(len(block[3::4].topk(2).indices.unique()) for block in logits)  # by the last tokens
    parts = dict(module.named_parameters())
    one = sum(part.numel() / 16 for name, part in parts.items() if ".experts." in name)
    read = sum(part.numel() for part in parts.values()) - (16 - used) * one
    floor = bench["gpu_step"].weights_read(CausalModel(module))
    assert floor == read if like else floor < read


def test_nothing_in_the_repository_was_faster_than_its_floor(bench: dict[str, Any]) -> None:
    kept = bench["generation_results"].read_results(ROOT / "benchmarks/results/gpu_generate.json")
    assert {"0.5b", "7b", "moe", "hybrid"} == {result.shape for result in kept}
    for result in kept:
        assert all(0 < r.share_of_floor < 1 for r in result.rounds), result.place


def test_the_table_has_the_peer_beside_ours(bench: dict[str, Any], measured: list[Any]) -> None:
    plain = measured[0]
    shown = bench["generation_results"].table(measured).splitlines()
    assert len(shown) == 4
    times = 75 / plain.median("ms_per_token_of_the_longest")
    assert shown[2].startswith("| tiny | fp32 | smoke |") and shown[2].endswith(
        f"| 75.00 | 20 | {times:.2f} |"
    )
    assert "| fp32 exact |" in shown[3]


def test_what_exact_mode_costs(bench: dict[str, Any], measured: list[Any]) -> None:
    plain, exact, _ = measured
    slower = [replace(r, seconds=1.25 * r.seconds) for r in plain.rounds]
    results = [plain, replace(exact, rounds=slower), replace(exact, workload="wide")]
    told = bench["generation_results"].exact_costs(results)
    assert told == ["tiny smoke: exact takes 1.250 times as long"]


def labels(path: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


def test_pictures_are_drawn_of_what_there_is(
    bench: dict[str, Any], measured: list[Any], tmp_path: Path
) -> None:
    """The results of the small workload under the names of the large ones."""
    plain, exact, peer = (
        replace(r, shape="7b", workload="long", variant=v, device="NVIDIA H200")
        for r, v in zip(measured, ("bf16", "bf16 exact", "bf16"), strict=True)
    )
    fp8 = replace(plain, variant="fp8")
    few = replace(plain, workload="rows4")
    missing = bench["plot_gpu"].draw_generation([peer, exact, plain, fp8, few], tmp_path)
    assert missing == ["gpu_wide.svg"]
    found = labels(tmp_path / "gpu_long.svg")
    names = [name for name in found if name.startswith("long")]
    assert names == [
        "long: reinforge bf16",
        "long: reinforge bf16 exact",
        "long: reinforge fp8",
        "long: vLLM bf16",
    ]
    show = importlib.import_module("plots").show
    for result in (plain, exact, peer):
        assert show(result.median("ms_per_token_of_the_longest")) in found
    assert "4 rows: reinforge bf16" in labels(tmp_path / "gpu_rows.svg")
    name = "ms_per_token_of_the_longest"
    ratio = exact.median(name) / plain.median(name)
    assert {"7b long", show(ratio)} <= set(labels(tmp_path / "gpu_exact.svg"))


def test_the_files_of_the_repository_are_drawn(
    bench: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["plot_gpu.py", "--plots", str(tmp_path)])
    bench["plot_gpu"].main()
    drawn = {path.name for path in tmp_path.iterdir()}
    kept = {path.name for path in (ROOT / "docs" / "plots").glob("gpu_*.svg")}
    assert drawn == kept
    for name in kept:
        same = (tmp_path / name).read_text() == (ROOT / "docs" / "plots" / name).read_text()
        assert same, f"{name} is older than its results: python benchmarks/plot_gpu.py"
