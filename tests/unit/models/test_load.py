"""Loading: what comes from disk is what transformers would load, and what cannot be loaded says
why.
"""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.toys import EOS, make_model, make_module
from reinforge.config.adapter import AdapterConfig
from reinforge.config.model import ModelConfig
from reinforge.core.errors import InputError
from reinforge.models.load import (
    context_length,
    load_config,
    load_model,
    load_scalar,
    load_tokenizer,
    model_of,
    pick_device,
    pick_dtype,
    stop_tokens,
)


def test_loads_what_transformers_loads(tiny_dir: str) -> None:
    from transformers import AutoModelForCausalLM

    model = load_model(ModelConfig(path=tiny_dir))
    theirs = AutoModelForCausalLM.from_pretrained(tiny_dir).state_dict()
    ours = model.module.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in theirs)
    assert (
        model.dtype is torch.float32
        and not model.module.training
        and context_length(ModelConfig(path=tiny_dir)) == 128
    )
    assert model.tokenizer.decode(model.tokenizer("7+5=é\n").input_ids) == "7+5=é\n"


@pytest.mark.parametrize("name", ["mps", "xpu", "hpu", "npu:0", "cuda:x", "gpu", ""])
def test_devices_that_nothing_here_runs_on_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"no device that models are trained on: .* cpu"):
        ModelConfig(path="x", device=name)


def test_a_module_on_another_device_is_refused() -> None:
    module = make_module().to("meta")
    with pytest.raises(InputError, match=r"model\.device: the model lies on meta: .*CPUs"):
        model_of(module, ModelConfig(path="x"))


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("cuda:1").index == 1
    with pytest.raises(InputError, match=r"there is no GPU 2: torch sees 2"):
        pick_device("cuda:2")


def test_dtype_and_device() -> None:
    cpu = torch.device("cpu")
    assert (pick_dtype("auto", cpu), pick_dtype("auto", torch.device("cuda"))) == (
        torch.float32,
        torch.bfloat16,
    )
    assert pick_dtype("bfloat16", cpu) is torch.bfloat16 and pick_device("cpu") == cpu
    if not torch.cuda.is_available():
        assert pick_device("auto") == cpu
        with pytest.raises(InputError, match=r"model\.device.*no GPU"):
            pick_device("cuda")


def test_bfloat16_is_asked_for_by_name(tiny_dir: str) -> None:
    assert load_model(ModelConfig(path=tiny_dir, dtype="bfloat16")).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/no/such/directory", "no such directory"),
        ("./nowhere", "no such directory"),
        ("none.gguf", "no such file"),
    ],
)
def test_missing_paths_are_named(path: str, says: str) -> None:
    with pytest.raises(InputError, match=rf"model\.path: {says}"):
        load_model(ModelConfig(path=path))


def test_a_directory_without_a_model_is_explained(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot load the configuration"):
        load_model(ModelConfig(path=str(tmp_path)))


def test_a_damaged_model_is_an_input_error(tmp_path: Path, tiny_dir: str) -> None:
    """Cut short and with a missing tensor: neither may give a half-random model."""
    shutil.copytree(tiny_dir, tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(InputError):
        load_model(ModelConfig(path=str(tmp_path / "cut")))


def test_a_missing_weight_is_refused(tmp_path: Path, tiny_dir: str) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_dir, tmp_path / "holes")
    path = tmp_path / "holes" / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"up_proj"):
        load_model(ModelConfig(path=str(tmp_path / "holes")))


def test_pad_is_eos_where_there_is_none(tmp_path: Path, tiny_dir: str) -> None:
    shutil.copytree(tiny_dir, tmp_path / "model")
    settings = tmp_path / "model" / "tokenizer_config.json"
    text = json.loads(settings.read_text())
    text.pop("pad_token", None)
    settings.write_text(json.dumps(text))
    tokenizer = load_tokenizer(ModelConfig(path=str(tmp_path / "model")))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == EOS


def test_a_chat_template_file_replaces_the_template(tmp_path: Path, tiny_dir: str) -> None:
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    tokenizer = load_tokenizer(ModelConfig(path=tiny_dir, chat_template=str(tmp_path / "t.jinja")))
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
        == "[user]hi"
    )


def test_stop_tokens_come_from_everywhere() -> None:
    model = make_model()
    # an id past the vocabulary cannot be sampled
    model.causal.generation_config.eos_token_id = [7, 9, 10**6]
    assert stop_tokens(model) == (EOS, 7, 9)


def test_gradient_checkpointing_with_an_adapter(tiny_dir: str) -> None:
    """Frozen embeddings would cut the graph: the adapter must still get its gradient."""
    from helpers.toys import gradients, make_samples, relative, train_config
    from reinforge.algorithms.losses.supervised import NLLLoss
    from reinforge.backends.local import LocalBackend
    from reinforge.core.batch import Totals, pack

    batches = pack(make_samples(), 64)
    found = []
    for checkpointing in (False, True):
        model = load_model(
            ModelConfig(path=tiny_dir, gradient_checkpointing=checkpointing),
            AdapterConfig(rank=2),
            seed=1,
        )
        backend = LocalBackend(model, train_config(), total_steps=1)
        backend.forward_backward(batches, NLLLoss(), Totals.of(batches))
        found.append(gradients(backend))
    assert found[0] and relative(found[1], found[0]) < 1e-6


@pytest.mark.skipif(
    "REINFORGE_TEST_GGUF" not in os.environ, reason="REINFORGE_TEST_GGUF names no file"
)
def test_gguf(tmp_path: Path) -> None:
    model = load_model(ModelConfig(path=os.environ["REINFORGE_TEST_GGUF"]))
    assert (
        model.verify() < 1e-3 and getattr(model.causal.config, "quantization_config", None) is None
    )
    model.causal.set_attn_implementation("sdpa")
    model.module.save_pretrained(tmp_path)
    from transformers import AutoModelForCausalLM

    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert all(torch.equal(again[k], v) for k, v in model.module.state_dict().items())


def test_rwkv_is_refused_by_name(tmp_path: Path, tiny_dir: str) -> None:
    make_module("rwkv").save_pretrained(tmp_path)
    with pytest.raises(
        InputError,
        match=(
            r"model\.path: RwkvForCausalLM cannot be trained here: .*keep state.*standard"
            r" attention"
        ),
    ):
        load_model(ModelConfig(path=str(tmp_path), tokenizer=tiny_dir))


# ---- nothing that a directory brings along is run ----

MARK = "open({mark!r}, 'a').write('ran')\n"
CODE = (
    "from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast\n"
    "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
    "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    "class OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
)


@pytest.fixture
def hostile(tmp_path: Path, tiny_dir: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A model whose config, weights and tokenizer come with code that leaves a mark; and where the
    mark would be. Yes to all questions.
    """
    import builtins

    folder = tmp_path / "hostile"
    mark = tmp_path / "mark"
    shutil.copytree(tiny_dir, folder)
    (folder / "own.py").write_text(MARK.format(mark=str(mark)) + CODE)
    config = json.loads((folder / "config.json").read_text())
    names = {
        "AutoConfig": "own.OwnConfig",
        "AutoModelForCausalLM": "own.OwnModel",
        "AutoModelForSequenceClassification": "own.OwnModel",
    }
    (folder / "config.json").write_text(
        json.dumps({**config, "model_type": "own", "auto_map": names})
    )
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    return folder, mark


@pytest.mark.parametrize(
    "load", [load_model, load_tokenizer, load_config, load_scalar, context_length]
)
def test_code_in_a_model_directory_is_not_run_whoever_says_yes(
    hostile: tuple[Path, Path], load: Any
) -> None:
    folder, mark = hostile
    with pytest.raises(InputError, match=r"is Python code in its own directory.*trust_remote_code"):
        load(ModelConfig(path=str(folder), device="cpu"))
    assert not mark.exists()


def test_a_key_of_the_config_allows_it_for_this_model_alone(hostile: tuple[Path, Path]) -> None:
    from reinforge.build.critic_model import critic_section
    from reinforge.config.load import config_from_dict

    folder, mark = hostile
    assert (
        load_model(ModelConfig(path=str(folder), device="cpu", trust_remote_code=True)).dtype
        is torch.float32
    )
    assert mark.read_text().startswith("ran")
    cfg = config_from_dict(
        {
            "model": {"path": "a", "trust_remote_code": True},
            "data": {"source": "b"},
            "algorithm": {"name": "ppo"},
            "critic": {"path": str(folder)},
            "rewards": [{"name": "exact_number"}],
            "train": {"steps": 1},
            "run": {"dir": "c"},
        }
    )
    assert cfg.critic is not None and critic_section(cfg)[0].trust_remote_code is False


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_a_checkpoint_cannot_choose_an_attention_from_a_hub(
    tmp_path: Path, tiny_dir: str, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """transformers takes `org/repo` for a kernel to fetch and to run."""
    from transformers import modeling_utils

    asked: list[str] = []
    monkeypatch.setattr(
        modeling_utils, "lazy_import_flash_attention", lambda name, **_: asked.append(name)
    )
    shutil.copytree(tiny_dir, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, key: "someone/kernel"}))
    load_model(ModelConfig(path=str(tmp_path / "model"), device="cpu"))
    assert asked == []


# ---- a model of another kind ----


def test_a_reward_model_is_no_policy(tmp_path: Path, tiny_dir: str) -> None:
    load_scalar(ModelConfig(path=tiny_dir, device="cpu"), fresh=True).save(tmp_path / "scorer")
    with pytest.raises(
        InputError,
        match=r"model\.path: .*LlamaForSequenceClassification: it gives scores.*goes under rewards",
    ):
        load_model(ModelConfig(path=str(tmp_path / "scorer")))
    assert load_scalar(ModelConfig(path=str(tmp_path / "scorer"), device="cpu")).scores(
        [[5, 6]]
    ) == [0.0]


def test_the_directory_of_a_run_says_how_its_model_is_written(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    for name in ("config.json", "metrics.jsonl"):
        (tmp_path / name).write_text("{}")
    for load, where in (
        (load_model, "model.path"),
        (partial(load_scalar, where="rewards.0.options.path"), "rewards.0.options.path"),
    ):
        with pytest.raises(
            InputError, match=rf"{where}: .* is the directory of a run.*reinforge export {tmp_path}"
        ):
            load(ModelConfig(path=str(tmp_path)))


@pytest.mark.parametrize(
    "outside", ["../outside.safetensors", "absolute", "sub/../../outside.safetensors"]
)
def test_an_index_that_names_a_file_outside_of_the_model_is_refused(
    tiny_dir: str, tmp_path: Path, outside: str
) -> None:
    model = load_model(ModelConfig(path=tiny_dir, device="cpu")).module
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    index = tmp_path / "model" / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    moved = next(iter(listed["weight_map"].values()))
    (tmp_path / "model" / moved).rename(tmp_path / "outside.safetensors")
    name = str(tmp_path / "outside.safetensors") if outside == "absolute" else outside
    (tmp_path / "model" / "sub").mkdir()
    listed["weight_map"] = {
        key: name if file == moved else file for key, file in listed["weight_map"].items()
    }
    index.write_text(json.dumps(listed))
    for file in Path(tiny_dir).glob("token*"):
        shutil.copy(file, tmp_path / "model")
    with pytest.raises(InputError, match=r"model\.path.*outside of the model's directory"):
        load_model(ModelConfig(path=str(tmp_path / "model"), device="cpu"))


def test_a_directory_without_a_tokenizer_is_told(tmp_path: Path) -> None:
    """transformers would make one without words for some architectures, and lists files for
    others.
    """
    for model_type in ("qwen3_moe", "phimoe"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        with pytest.raises(InputError, match=r"model\.path: there is no tokenizer in .*model\.tok"):
            load_tokenizer(ModelConfig(path=str(tmp_path)))
