"""Models that a program has in memory: trained in place, and continued without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import reinforge
from helpers.toy_rewards import odd
from reinforge.build.saved_model import open_model
from reinforge.checkpoint import store
from reinforge.core.errors import InputError

ROWS = [{"prompt": f"{i}+{i}="} for i in range(16)]
SMALL: dict[str, Any] = dict(
    data=ROWS,
    rewards=[odd],
    group_size=4,
    prompts_per_step=4,
    max_new_tokens=6,
    learning_rate=1e-3,
)
# the reference is what the run began with: a resumed run must know it
KL = ["rollout.kv_gib=0.01", "algorithm.kl.coefficient=0.1"]


def loaded(folder: str) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def saved(run: Path) -> dict[str, torch.Tensor]:
    newest = store.latest(run)
    assert newest is not None
    tensors = store.load(newest)[0].tensors
    return {
        name.removeprefix("model/"): tensor
        for name, tensor in tensors.items()
        if name.startswith("model/")
    }


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_a_module_is_trained_in_place_as_from_its_path(tiny_dir: str, tmp_path: Path) -> None:
    module, tokenizer = loaded(tiny_dir)
    module.model.layers[0].self_attn.attention_dropout = 0.5
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    prompt = tokenizer("1+1=", return_tensors="pt").input_ids
    first = module(prompt).logits
    run = tmp_path / "memory"
    reinforge.train(model=module, tokenizer=tokenizer, dir=run, steps=2, overrides=KL, **SMALL)
    reinforge.train(model=tiny_dir, dir=tmp_path / "path", steps=2, overrides=KL, **SMALL)
    trained = saved(run)
    assert same(trained, saved(tmp_path / "path"))
    now = dict(module.named_parameters())
    assert all(torch.equal(now[name], tensor) for name, tensor in trained.items())
    assert any(not torch.equal(now[name], before[name]) for name in before)
    # what it began with is written down
    initial = AutoModelForCausalLM.from_pretrained(run / "initial")
    own = AutoTokenizer.from_pretrained(run / "tokenizer")
    assert torch.equal(initial(prompt).logits, first)
    assert own("1+1=").input_ids == prompt[0].tolist()
    # it is transformers' own again
    assert module.model.layers[0].self_attn.attention_dropout == 0.5
    assert module.config._attn_implementation == initial.config._attn_implementation
    again = open_model(str(run))[0]
    assert same(dict(again.module.named_parameters()), now)
    assert module.generate(prompt, max_new_tokens=3, do_sample=False).shape[1] >= prompt.shape[1]


def test_a_run_goes_on_with_the_module_another_one_and_none(tiny_dir: str, tmp_path: Path) -> None:
    """Also with the very module that the first part has trained: the reference is not that."""
    module, tokenizer = loaded(tiny_dir)
    whole = dict(model=tiny_dir, dir=tmp_path / "whole", steps=4, overrides=KL)
    reinforge.train(**whole, **SMALL)
    cut = dict(tokenizer=tokenizer, dir=tmp_path / "cut", overrides=KL)
    reinforge.train(model=module, steps=1, **cut, **SMALL)
    reinforge.train(model=module, steps=2, **cut, **SMALL)
    reinforge.train(model=loaded(tiny_dir)[0], steps=3, **cut, **SMALL)
    config = tmp_path / "cut" / "config.json"
    reinforge.train(config, data=ROWS, rewards=[odd], overrides=["train.steps=4"])
    assert same(saved(tmp_path / "cut"), saved(tmp_path / "whole"))


def test_a_peft_model(tiny_dir: str, tmp_path: Path) -> None:
    """Only its adapter is trained; by paths the run is the same."""
    module, tokenizer = loaded(tiny_dir)
    torch.manual_seed(3)
    settings = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0.1)
    adapted = get_peft_model(module, settings)
    adapted.save_pretrained(tmp_path / "adapter")
    run = tmp_path / "memory"
    reinforge.train(model=adapted, tokenizer=tokenizer, dir=run, steps=2, overrides=KL, **SMALL)
    reinforge.train(
        model=tiny_dir,
        adapter={"path": str(tmp_path / "adapter")},
        dir=tmp_path / "path",
        steps=2,
        overrides=KL,
        **SMALL,
    )
    trained = saved(run)
    assert same(trained, saved(tmp_path / "path")) and all("lora_" in name for name in trained)
    now = dict(adapted.named_parameters())
    assert all(torch.equal(now[name], tensor) for name, tensor in trained.items())
    layer = adapted.get_base_model().model.layers[0].self_attn.q_proj
    assert layer.lora_dropout["default"].p == 0.1 and "forward" not in vars(layer)
    plain = AutoModelForCausalLM.from_pretrained(tiny_dir).state_dict()
    base = AutoModelForCausalLM.from_pretrained(run / "initial").state_dict()
    assert same(base, plain)
    # on, without the object
    more = dict(data=ROWS, rewards=[odd], overrides=["train.steps=3"])
    for name in ("memory", "path"):
        reinforge.train(tmp_path / name / "config.json", **more)
    assert same(saved(run), saved(tmp_path / "path"))


@pytest.mark.parametrize("init", ["default", "pissa"])
def test_a_new_adapter_on_a_module(tiny_dir: str, tmp_path: Path, init: str) -> None:
    """PiSSA takes what it begins with out of the weights; they get it back."""
    module, tokenizer = loaded(tiny_dir)
    made = dict(adapter={"rank": 4, "init": init}, steps=1, overrides=KL[:1], **SMALL)
    result = reinforge.train(model=module, tokenizer=tokenizer, dir=tmp_path / "memory", **made)
    reinforge.train(model=tiny_dir, dir=tmp_path / "path", **made)
    trained = saved(tmp_path / "memory")
    assert same(trained, saved(tmp_path / "path"))
    assert isinstance(result.model, PeftModel)
    now = dict(result.model.named_parameters())
    assert all(torch.equal(now[name], tensor) for name, tensor in trained.items())
    # the module is as it was, and can be given again
    plain = AutoModelForCausalLM.from_pretrained(tiny_dir)
    assert same(module.state_dict(), plain.state_dict())
    assert all(p.requires_grad for p in module.parameters())
    more = {**made, "steps": 2}
    reinforge.train(model=module, tokenizer=tokenizer, dir=tmp_path / "memory", **more)
    reinforge.train(model=tiny_dir, dir=tmp_path / "path", **more)
    assert same(saved(tmp_path / "memory"), saved(tmp_path / "path"))


def test_frozen_weights_of_a_module(tiny_dir: str, tmp_path: Path) -> None:
    """By a pattern and by the caller, who gets the module back as it asked for gradients."""
    module, tokenizer = loaded(tiny_dir)
    module.model.norm.weight.requires_grad_(False)
    result = reinforge.train(
        model=module,
        tokenizer=tokenizer,
        dir=tmp_path / "run",
        steps=1,
        overrides=[*KL[:1], 'train.freeze=["model.layers.0"]'],
        **SMALL,
    )
    names = saved(tmp_path / "run").keys()
    assert result.model is module and names
    assert not [n for n in names if n.startswith("model.layers.0.") or n == "model.norm.weight"]
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
    assert frozen == ["model.norm.weight"]


def test_a_tokenizer_beside_a_path(tiny_dir: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    trainer = reinforge.Trainer(
        model=tiny_dir, tokenizer=tokenizer, dir=tmp_path / "run", steps=1, overrides=KL, **SMALL
    )
    with trainer:
        for step in trainer:
            text = tokenizer.decode(step.samples[0].tokens[~step.samples[0].trained])
            assert text.startswith("<") and text.endswith(">")


@pytest.mark.parametrize(
    ("change", "more", "says"),
    [
        (lambda m: m.half(), {}, r"^model: the model is in float16"),
        (lambda m: m, {"overrides": ["train.backend=fsdp"]}, r"^train\.backend: other processes"),
        (
            lambda m: get_peft_model(m, LoraConfig(r=2), adapter_name="mine"),
            {},
            r"the adapters mine \(LORA\)",
        ),
        (
            lambda m: get_peft_model(m, LoraConfig(r=2, inference_mode=True)),
            {},
            r"no weight of the model is to be trained",
        ),
    ],
    ids=["half", "ranks", "another name", "inference"],
)
def test_models_that_cannot_be_taken(
    tiny_dir: str, tmp_path: Path, change: Any, more: dict[str, Any], says: str
) -> None:
    module, tokenizer = loaded(tiny_dir)
    with pytest.raises(InputError, match=says):
        reinforge.train(
            model=change(module), tokenizer=tokenizer, dir=tmp_path / "run", **more, **SMALL
        )
    assert not (tmp_path / "run" / "initial").exists()
