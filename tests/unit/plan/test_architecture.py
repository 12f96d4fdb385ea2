"""What a model's architecture cannot do is told by `plan` and by a run before weights are read:
the directories here have none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.toy_architectures import make_config, write_tokenizer
from helpers.toys import SilentView
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.inputs import read_inputs
from reinforge.build.local import LocalFactories
from reinforge.cli.main import main
from reinforge.config import model_table
from reinforge.config.architectures import has_experts
from reinforge.config.load import config_from_dict
from reinforge.config.rules import architecture
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.models.router_bias import biases_of
from reinforge.models.routing import holds_experts
from reinforge.plan.outside import check_model
from reinforge.plan.preflight import PlanReport

RANKS = {"backend": "fsdp", "ranks": 2}
SLICES = {**RANKS, "sequence_parallel": 2}
CUTS = {**RANKS, "tensor_parallel": 2}
QLORA = {"rank": 4, "kind": "qlora"}
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}
FP8 = {"precision": "fp8"}
NO_EXPERTS = "has no experts"

# architecture, what its config.json has besides, sections: the key that is refused, and why
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
    ("qwen3_moe", {"num_experts_per_tok": 99}, {}, "model.path", "to 99 experts"),
    ("qwen3_5", {}, {"train": SLICES}, "train.sequence_parallel", "keep state"),
    ("lfm2", {}, {"train": SLICES}, "train.sequence_parallel", "keep state"),
    ("llama", {}, {"train": {"router_aux_loss": 0.01}}, "train.router_aux_loss", NO_EXPERTS),
    ("llama", {}, {"train": {"router_z_loss": 0.1}}, "train.router_z_loss", NO_EXPERTS),
    ("llama", {}, {"train": {"router_bias_rate": 0.01}}, "train.router_bias_rate", NO_EXPERTS),
    ("qwen3_5", {}, {"train": {"router_replay": "on"}}, "train.router_replay", NO_EXPERTS),
    ("llama", {}, {"train": {"router_replay": "count"}}, "train.router_replay", NO_EXPERTS),
    ("gpt_oss", {}, {"train": {"router_bias_rate": 0.01}}, "train.router_bias_rate", "no bias"),
    ("phimoe", {}, {"train": {"router_replay": "on"}}, "train.router_replay", "one topk"),
    ("gpt_oss", {}, {"train": CUTS}, "train.tensor_parallel", "no plan for cutting"),
    ("qwen3_moe", {}, {"train": CUTS}, "train.tensor_parallel", "experts of Qwen3Moe"),
    ("gpt_oss", {}, {"model": {"exact": True}}, "model.exact", "attention sinks"),
    ("deepseek_v3", {}, {"model": {"exact": True}}, "model.exact", "different widths"),
    ("gpt_oss", {}, {"rollout": FP8}, "rollout.precision", "no plain linear layers"),
    ("qwen3_moe", {}, {"train": FP8}, "train.precision", "no plain linear layers"),
    ("gpt_oss", MXFP4, {"adapter": QLORA}, "adapter.kind", "quantised already"),
    (
        "qwen3_moe",
        {},
        {"train": {**SLICES, "router_aux_loss": 0.1}},
        "train.router_aux_loss",
        "whole packs",
    ),
    (
        "qwen3_moe",
        {"output_router_logits": True, "router_aux_loss_coef": 0.1},
        {"train": SLICES},
        "train.router_aux_loss",
        "whole packs",
    ),
]

# what is like the above and works, or is left to the module to show
FINE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {}, {"train": {**SLICES, "router_aux_loss": 0.0}}),
    ("llama", {}, {"train": CUTS}),
    ("llama", {}, {"model": {"exact": True}}),
    ("llama", {}, {"train": FP8, "rollout": FP8}),
    ("qwen3_5", {}, {"model": {"exact": True}}),
    ("qwen3_moe", {}, {"train": {**SLICES, "router_replay": "on"}}),
    ("qwen2_moe", {}, {"train": CUTS}),
    ("deepseek_v3", {}, {"train": {"router_bias_rate": 0.01, "router_replay": "on"}}),
    ("deepseek_v3", {"v_head_dim": 16}, {"model": {"exact": True}}),
    ("gpt_oss", {}, {"adapter": QLORA, "train": {"router_aux_loss": 0.1}}),
    (
        "granitemoehybrid",
        {"num_local_experts": 0, "layer_types": ["attention", "attention"]},
        {"model": {"exact": True}},
    ),
]


def without_weights(folder: Path, name: str, **more: Any) -> Path:
    shape = make_config(name, **more)
    kind = type(shape).__name__.removesuffix("Config").removesuffix("Text")
    shape.architectures = [f"{kind}ForCausalLM"]
    shape.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def config(model: Path, sections: dict[str, Any]) -> Config:
    base: dict[str, dict[str, Any]] = {
        "model": {"path": str(model), "device": "cpu"},
        "algorithm": {"name": "grpo"},
        "data": {"source": "arithmetic:chain"},
        "rollout": {"max_new_tokens": 8},
        "train": {"steps": 1},
        "run": {"dir": str(model / "run")},
    }
    merged = {key: base.get(key, {}) | sections.get(key, {}) for key in {*base, *sections}}
    return config_from_dict({**merged, "rewards": [{"name": "exact_number"}]})


def told_by_plan(cfg: Config) -> list[str]:
    report = PlanReport()
    check_model(cfg, report)
    return report.errors


def begin(cfg: Config) -> None:
    """What a run does before it loads a model."""
    read_inputs(cfg, CallerObjects(), SilentView(), LocalFactories().make_rewards)


@pytest.mark.parametrize(("name", "more", "sections", "key", "why"), REFUSED)
def test_plan_and_a_run_refuse_in_the_same_words(
    name: str,
    more: dict[str, Any],
    sections: dict[str, Any],
    key: str,
    why: str,
    tmp_path: Path,
) -> None:
    cfg = config(without_weights(tmp_path, name, **more), sections)
    [error] = told_by_plan(cfg)
    assert error.startswith(f"{key}: ") and why in error
    with pytest.raises(InputError) as refused:
        begin(cfg)
    assert str(refused.value) == error and refused.value.fix


@pytest.mark.parametrize(("name", "more", "sections"), FINE)
def test_what_works_is_not_refused(
    name: str, more: dict[str, Any], sections: dict[str, Any], tmp_path: Path
) -> None:
    cfg = config(without_weights(tmp_path, name, **more), sections)
    assert told_by_plan(cfg) == []
    begin(cfg)


def test_plan_tells_all_of_it_at_once(tmp_path: Path) -> None:
    cfg = config(
        without_weights(tmp_path, "qwen3_5"),
        {"train": {**SLICES, "router_replay": "on", "router_z_loss": 0.1}, "rollout": FP8},
    )
    assert [error.partition(":")[0] for error in told_by_plan(cfg)] == [
        "train.sequence_parallel",
        "train.router_z_loss",
        "train.router_replay",
        "rollout.precision",
    ]


def test_train_ends_before_it_looks_for_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = without_weights(tmp_path / "model", "llama")
    file = tmp_path / "config.yaml"
    file.write_text(
        f"model: {{path: {model}, device: cpu}}\nalgorithm: {{name: grpo}}\n"
        "data: {source: 'arithmetic:chain'}\nrewards: [{name: exact_number}]\n"
        f"rollout: {{max_new_tokens: 8}}\ntrain: {{steps: 1}}\nrun: {{dir: {tmp_path / 'run'}}}\n"
    )
    assert main(["train", str(file), "train.router_replay=on"]) == 2
    assert "train.router_replay: LlamaForCausalLM has no experts" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    ["llama", "gemma4", "dots1", "deepseek_v2", "glm4_moe", "dbrx", "jamba", "lfm2", "aria_text"],
)
def test_the_table_says_what_modules_have(name: str) -> None:
    """Experts, and biases of their routers, whatever the keys of the config.json are called."""
    from transformers import AutoModelForCausalLM

    shape = make_config(name)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(shape)
    experts = any(holds_experts(part) for part in module.modules())
    assert has_experts(shape.to_dict()) == experts
    assert (experts and not [*biases_of(module)]) == (name in model_table.NO_BIAS)


def test_the_table_says_which_experts_peft_counts_among_linear_layers() -> None:
    from peft.utils import transformers_weight_conversion as known

    kinds = known._MODEL_TO_CONVERSION_PATTERN.items()
    stacked = {kind for kind, form in kinds if form in known._MOE_TARGET_MODULE_MAPPING}
    assert stacked == model_table.STACKED_BY_PEFT


@pytest.mark.parametrize(
    ("key", "value", "name"), [("kind", "dora", "DoRA"), ("init", "pissa", "PiSSA")]
)
def test_adapters_for_linear_layers_alone(tmp_path: Path, key: str, value: str, name: str) -> None:
    """Not of stacked experts, which all-linear means; of layers that are named, and of mixtures
    whose experts peft leaves out.
    """
    adapter = {"rank": 4, key: value}
    [told] = told_by_plan(
        config(without_weights(tmp_path / "a", "qwen3_moe"), {"adapter": adapter})
    )
    assert told.startswith(f"adapter.{key}: {name} is for linear layers")
    assert "experts of Qwen3MoeForCausalLM lie stacked" in told and "adapter.targets" in told
    named = {**adapter, "targets": ["q_proj"]}
    for number, (kind, asked) in enumerate(
        [("qwen3_moe", named), ("gpt_oss", adapter), ("qwen3_moe", {"rank": 4}), ("llama", adapter)]
    ):
        model = without_weights(tmp_path / str(number), kind)
        assert told_by_plan(config(model, {"adapter": asked})) == []


def test_names_in_the_lists_are_architectures() -> None:
    assert {*model_table.NO_BIAS, *model_table.NO_REPLAY, *architecture.VARYING} <= set(
        model_table.RIGHT
    )
