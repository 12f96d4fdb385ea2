"""rsLoRA, DoRA and QLoRA beside LoRA: each trains, is the reference when it is off, comes back from
disk, and merges to the same logits.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.offline_runs import PAIRS, config, launch, small_model
from helpers.tiny_runs import digest, lines
from helpers.toys import make_module
from reinforge.config.adapter import AdapterConfig
from reinforge.config.model import ModelConfig
from reinforge.core.batch import Batch
from reinforge.core.errors import InputError
from reinforge.core.sample import Sample
from reinforge.models.adapters import adapter_off, add_adapter
from reinforge.models.fused_linear import join
from reinforge.models.load import load_model, load_scalar
from reinforge.offline.export import export

BNB = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
KINDS = ["lora", "rslora", "dora", pytest.param("qlora", marks=BNB)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_model(tmp_path_factory.mktemp("small"))


@torch.no_grad()
def logprobs(model: Any) -> torch.Tensor:
    ids = [model.tokenizer.bos_token_id or 1, *model.tokenizer("3 dog: DOG!").input_ids]
    batch = Batch.pack([Sample.from_tokens("x", ids, [True] * len(ids))])
    return model.logprobs(batch, temperature=1.0)[0]


def opened(model: str, kind: str, run: Path) -> Any:
    from reinforge.build.saved_model import load_weights

    found = load_model(ModelConfig(path=model, device="cpu"), AdapterConfig(kind=kind, rank=4))  # type: ignore[arg-type]
    load_weights(found, run)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_and_merges(model: str, tmp_path: Path, kind: str) -> None:
    """DPO with the adapter off as reference; then merged and unmerged exports say what the run's
    own model says.
    """
    cfg = config(model, tmp_path / "run", "dpo", steps=6, adapter={"kind": kind, "rank": 4})
    launch(cfg, PAIRS)
    metrics = lines(cfg)
    assert (
        metrics[0]["preference/loss"] == pytest.approx(math.log(2), abs=1e-6)
        and metrics[-1]["rewards/margin"] > 0.01
    )
    trained = opened(model, kind, tmp_path / "run")
    base = logprobs(load_model(ModelConfig(path=model, device="cpu")))
    with adapter_off(trained.module):
        gap = float((logprobs(trained) - base).abs().max())
    assert gap == 0 if kind != "qlora" else 1e-4 < gap < 0.5  # 4 bits are not 32
    found = logprobs(trained)
    assert float((found - base).abs().max()) > 0.01
    plain = load_model(
        ModelConfig(
            path=str(export(tmp_path / "run", tmp_path / "merged", merge=True)), device="cpu"
        )
    )
    assert float((logprobs(plain) - found).abs().max()) < 1e-4
    assert not hasattr(plain.module.config, "quantization_config")
    adapter = AdapterConfig(kind=kind, path=str(export(tmp_path / "run", tmp_path / "adapter")))  # type: ignore[arg-type]
    again = load_model(ModelConfig(path=model, device="cpu"), adapter)
    assert float((logprobs(again) - found).abs().max()) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_exactly(model: str, tmp_path: Path, kind: str) -> None:
    whole, cut = (
        config(model, tmp_path / run, "sft", steps=4, adapter={"kind": kind, "rank": 4})
        for run in ("whole", "cut")
    )
    rows = [{"prompt": r["prompt"], "completion": r["chosen"]} for r in PAIRS]
    launch(whole, rows)
    launch(cut.model_copy(update={"train": cut.train.model_copy(update={"steps": 2})}), rows)
    launch(cut, rows)
    assert digest(whole) == digest(cut) and lines(whole)[-1]["sft/nll"] < lines(whole)[0]["sft/nll"]


def test_what_each_kind_is() -> None:
    """rsLoRA scales by alpha / sqrt(rank), and both it and LoRA have the lean forward; DoRA keeps a
    length per output and peft's forward.
    """
    from peft.tuners.lora import Linear

    for kind, scale, lean in (("lora", 2.0, True), ("rslora", 8 / 2.0, True), ("dora", 2.0, False)):
        wrapped = add_adapter(make_module(), AdapterConfig(kind=kind, rank=4, alpha=8), seed=0)  # type: ignore[arg-type]
        layer = next(m for m in wrapped.modules() if type(m) is Linear)
        assert layer.scaling["default"] == scale and ("forward" in vars(layer)) == lean
        lengths = [p for n, p in wrapped.named_parameters() if "magnitude" in n and p.requires_grad]
        assert bool(lengths) == (kind == "dora")
        if lengths:
            torch.testing.assert_close(
                next(iter(layer.lora_magnitude_vector.values())).weight,
                layer.base_layer.weight.norm(dim=1),
            )


@pytest.mark.parametrize("kind", KINDS)
def test_sampling_is_training(model: str, tmp_path: Path, kind: str) -> None:
    """Joint projections leave quantised layers alone, and an adapter answers with the log-probs
    that it is trained with.
    """
    run = config(model, tmp_path / "run", "sft", steps=3, adapter={"kind": kind, "rank": 4})
    launch(run, [{"prompt": r["prompt"], "completion": r["chosen"]} for r in PAIRS])
    found = opened(model, kind, tmp_path / "run")
    before = logprobs(found)
    joined = join(found.module)
    assert joined == (0 if kind == "qlora" else 2)  # one layer: q, k, v and gate, up
    torch.testing.assert_close(logprobs(found), before, atol=1e-5, rtol=1e-5)
    # nothing was repacked for inference: that would be bfloat16, and pass no gradient on
    for part in found.module.modules():
        assert not getattr(
            getattr(getattr(part, "weight", None), "quant_state", None),
            "packing_format_for_cpu",
            False,
        )


def test_without_bitsandbytes(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(InputError, match=r"reinforge\[qlora\]"):
        load_model(ModelConfig(path=model, device="cpu"), AdapterConfig(kind="qlora"))


# reward models


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_reward_model_learns_with_an_adapter(model: str, tmp_path: Path, kind: str) -> None:
    """Only the adapter and the head are trained; what is exported is whole, and scores the same."""
    cfg = config(
        model,
        tmp_path / "run",
        "bradley_terry",
        steps=30,
        adapter={"kind": kind, "rank": 4},
        train={"prompts_per_step": 12},
    )
    launch(cfg, PAIRS)
    metrics = lines(cfg)
    assert metrics[-1]["train/loss"] < 0.5 * metrics[0]["train/loss"] and metrics[0][
        "train/loss"
    ] == pytest.approx(math.log(2), abs=1e-5)
    from reinforge.build.saved_model import load_weights

    trained = load_scalar(cfg.model, cfg.adapter, fresh=True)
    names = {n for n, p in trained.module.named_parameters() if p.requires_grad}
    assert all("lora_" in n or n.endswith("score.weight") for n in names) and any(
        n.endswith("score.weight") for n in names
    )
    load_weights(trained, tmp_path / "run")
    texts = [[1, 5, 9, 12], [1, 7, 3]]
    whole = load_scalar(
        ModelConfig(path=str(export(tmp_path / "run", tmp_path / "out")), device="cpu")
    )
    assert (
        whole.scores(texts) == pytest.approx(trained.scores(texts), abs=1e-4)
        and abs(whole.scores(texts)[0]) > 1e-3
    )


def test_a_quantised_reward_model_is_refused(model: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="fresh lora"):
        config(model, tmp_path / "run", "bradley_terry", adapter={"kind": "qlora"})
