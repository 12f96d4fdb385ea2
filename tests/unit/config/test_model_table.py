"""The table of architectures: its names, and what it says of models and to people."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from helpers.paths import ROOT
from helpers.toy_architectures import EXCLUDED
from reinforge.cli.main import main
from reinforge.cli.models import support_of
from reinforge.config import model_table
from reinforge.config.architectures import KNOWN
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.plan.preflight import preflight


def test_nothing_is_both_right_and_refused_and_every_decoder_has_a_verdict() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert set(model_table.RIGHT).isdisjoint(KNOWN)
    assert set(model_table.KNOWN_AS) <= set(model_table.names())
    untold = {
        name
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if model_table.support({"model_type": name}).verdict == "not tried"
    }
    assert untold <= set(EXCLUDED)


def test_classes_of_checkpoints_are_names_too() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    types: dict[str, set[str]] = {}
    for name, made in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if name in model_table.names():
            types.setdefault(made, set()).add(name)
    found = {made: model_table.named(made) for made in types}
    assert {made: name for made, name in found.items() if name not in types[made]} == {}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("SmolLM2", "llama"),
        ("phi-4", "phi3"),
        ("Granite 4", "granitemoehybrid"),
        ("DeepSeek-R1", "deepseek_v3"),
        ("Qwen3.5", "qwen3_5_text"),
        ("Llama 4", "llama4_text"),
        ("Qwen3_5ForConditionalGeneration", "qwen3_5"),
    ],
)
def test_names_that_people_know(
    name: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory of that name that holds no model does not hide them."""
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir()
    assert support_of(name).name == meant


def test_weights_that_are_quantised_already(tmp_path: Path) -> None:
    plain = model_table.support({"model_type": "gpt_oss"}).cells["qlora"]
    assert plain.mark == "yes" and "MXFP4" in plain.why
    file = tmp_path / "config.json"
    published = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    file.write_text(json.dumps(published))
    assert support_of(str(file)).cells["qlora"].mark == "no"


def test_the_cells_of_three_architectures() -> None:
    llama, mixtral, bloom = (
        {k: cell.mark for k, cell in model_table.support({"model_type": name}).cells.items()}
        for name in ("llama", "mixtral", "bloom")
    )
    assert set(llama.values()) == {"yes"} and mixtral["sglang"] == "code"
    assert [mixtral[k] for k in ("native", "fsdp", "megatron", "fp8", "gguf")] == [
        "yes",
        "yes",
        "no",
        "no",
        "no",
    ]
    assert set(bloom.values()) == {"no"}


def test_a_model_is_asked_for_what_its_architecture_does_not_tell(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "mistral", "sliding_window": 8}))
    assert support_of(str(tmp_path)).cells["megatron"].mark == "no"
    assert support_of("mistral").cells["megatron"].mark == "code"
    file.write_text(json.dumps({"model_type": "new", "text_config": {"model_type": "llama"}}))
    assert support_of(str(file)).name == "llama"
    file.write_text(json.dumps({"model_type": "new"}))
    assert support_of(str(file)).verdict == "not tried"


@pytest.mark.parametrize("text", ["{}", "[", None])
def test_what_is_no_config_is_told(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=r"NAME: .*config\.json"):
        support_of(str(tmp_path))


def test_the_command_guesses_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "mixtrall"]) == 2
    assert "Did you mean mixtral?" in capsys.readouterr().err
    assert main(["models", "gpt-os-20b"]) == 2  # near what people call it
    assert "Did you mean gpt_oss?" in capsys.readouterr().err
    assert main(["models", "Qwen/Qwen3-8B"]) == 2  # where there is no hub
    told = capsys.readouterr().err
    assert "no such directory" in told and "`reinforge models qwen3` shows" in told
    assert main(["models", "BloomForCausalLM"]) == 0
    assert KNOWN["bloom"] in capsys.readouterr().out
    assert main(["models"]) == 0
    listed = capsys.readouterr().out
    assert all(f"{name}\t" in listed for name in model_table.RIGHT)
    assert main(["models", "--json"]) == 0
    told = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert told["llama"]["cells"]["native"]["mark"] == "yes"


def test_what_ran_with_the_text_half_ran_with_the_checkpoint() -> None:
    whole, text = (model_table.support({"model_type": n}) for n in ("qwen3_5", "qwen3_5_text"))
    assert whole.cells == text.cells | {"megatron": whole.cells["megatron"]}
    assert whole.known_as == text.known_as == "Qwen3.5"
    assert model_table.support({"model_type": "qwen3_moe"}).cells["vllm"].mark == "yes"


@pytest.mark.parametrize("name", ["qwen3_vl", "Qwen3-VL"])
def test_towers_are_refused_by_name_as_plan_refuses_them(name: str, tmp_path: Path) -> None:
    found = support_of(name)
    assert (found.name, found.verdict) == ("qwen3_vl", "refused")
    assert "a tower for vision" in (found.reason or "")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl"}))
    assert support_of(str(tmp_path)) == found
    assert support_of("phi4_multimodal").verdict == "not tried"


def test_why_exact_is_refused_is_what_the_model_says(tmp_path: Path) -> None:
    from helpers.toy_architectures import save_architecture, write_tokenizer
    from reinforge.config.model import ModelConfig
    from reinforge.models.load import load_model

    model = save_architecture("gpt_oss", tmp_path, write_tokenizer)
    with pytest.raises(InputError, match="attention sinks, which exact attention does not know"):
        load_model(ModelConfig(path=str(model), device="cpu", exact=True))
    why = model_table.support({"model_type": "gpt_oss"}).cells["exact"].why
    assert "attention sinks, which exact attention does not know" in why


def test_a_narrow_terminal_has_the_names_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["models"]) == 0
    listed = capsys.readouterr().out
    assert "gpt-oss-120b" in listed and "\t" not in listed


def test_the_first_phase_of_plan_refuses_with_the_same_words(tmp_path: Path) -> None:
    """It reads config.json alone; there is no model in the directory."""
    file = tmp_path / "config.json"
    config = Config.model_validate(
        {
            "model": {"path": str(tmp_path)},
            "algorithm": {"name": "sft"},
            "data": {"source": "arithmetic:chain"},
            "train": {"steps": 1},
            "run": {"dir": str(tmp_path / "run")},
        }
    )
    file.write_text(json.dumps({"model_type": "llama"}))
    assert not [line for line in preflight(config).errors if "model.path" in line]
    file.write_text(json.dumps({"model_type": "bloom", "architectures": ["BloomForCausalLM"]}))
    said = [line for line in preflight(config).errors if "model.path" in line]
    assert len(said) == 1
    assert f"BloomForCausalLM cannot be trained here: {KNOWN['bloom']}." in said[0]


def test_the_page_has_the_table() -> None:
    made = runpy.run_path(str(ROOT / "tools" / "gen_models.py"))
    text = made["PAGE"].read_text(encoding="utf-8")
    assert text == made["with_tables"](text), "run `make reference`"
