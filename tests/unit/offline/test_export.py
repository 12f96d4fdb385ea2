"""Exports load elsewhere and compute the same; what others exported loads here."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.tiny_runs import LORA, launch, make_config, tensors
from reinforge.build.saved_model import open_model
from reinforge.build.served import save_model
from reinforge.cli.main import main
from reinforge.config.adapter import AdapterConfig
from reinforge.config.model import ModelConfig
from reinforge.core.errors import InputError
from reinforge.models import attention
from reinforge.models.load import load_model, load_scalar
from reinforge.models.tiny import make_tiny_model
from reinforge.offline.card import cited
from reinforge.offline.export import export
from reinforge.offline.starter_model import make_taught_model
from reinforge.plan.preflight import preflight

IDS = torch.tensor([[5, 17, 40, 41, 9, 100]])


def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits[0].float()


@pytest.fixture(scope="module")
def lora(tiny_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a LoRA that learned something."""
    cfg = make_config(
        tiny_dir, tmp_path_factory.mktemp("lora"), "run", "grpo", "train.learning_rate=0.05", **LORA
    )
    launch(cfg)
    assert any(float(t.abs().max()) > 0 for name, t in tensors(cfg).items() if "lora_B" in name)
    return Path(cfg.run.dir)


@pytest.fixture(scope="module")
def adapter(lora: Path) -> Path:
    return export(lora, lora.parent / "adapter")


@pytest.fixture(scope="module")
def merged(lora: Path) -> Path:
    return export(lora, lora.parent / "merged", merge=True)


@pytest.mark.parametrize("architecture", ["qwen3_5", "gpt_oss"])
def test_a_run_of_an_architecture_with_other_layers_is_exported(
    architecture: str, tmp_path: Path
) -> None:
    """gpt-oss has no attention of torch's; what a server is given has the same weights."""
    from transformers import AutoModelForCausalLM

    source = make_tiny_model(
        tmp_path / "source", width=32, layers=2, heads=4, architecture=architecture
    )
    cfg = make_config(str(source), tmp_path, "run", "grpo", "train.steps=1")
    launch(cfg)
    model, _ = open_model(cfg.run.dir)
    save_model(model, tmp_path / "served")
    assert model.plain.config._attn_implementation == attention.NAME
    before = logits(AutoModelForCausalLM.from_pretrained(source))
    out = export(Path(cfg.run.dir), tmp_path / "out")
    exported = logits(AutoModelForCausalLM.from_pretrained(out))
    served = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "served"))
    assert torch.equal(exported, served) and not torch.equal(exported, before)


def test_an_adapter_is_a_peft_checkpoint_and_merging_changes_nothing(
    tiny_dir: str, adapter: Path, merged: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tiny_dir)
    before = logits(base).clone()
    on_base = logits(PeftModel.from_pretrained(base, adapter))
    assert (on_base - before).abs().max() > 0.01, "the adapter does something"
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(merged)), on_base, atol=1e-4, rtol=1e-4
    )
    assert not (adapter / "config.json").exists() and not (merged / "adapter_config.json").exists()
    assert json.loads((adapter / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(Path(tiny_dir).resolve())


def test_an_adapter_is_not_exported_without_the_biases_that_were_trained_beside_it(
    lora: Path, tmp_path: Path
) -> None:
    """`train.router_bias_rate` moves them, and peft's file has no place for them."""
    run = tmp_path / "run"
    shutil.copytree(lora, run)
    config = json.loads((run / "config.json").read_text())
    config["train"]["router_bias_rate"] = 0.001
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"train\.router_bias_rate.*Add --merge"):
        export(run, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
    assert (export(run, tmp_path / "merged", merge=True) / "config.json").is_file()


def test_what_else_is_in_an_export(adapter: Path, merged: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    for folder in (adapter, merged):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert (
            tokenizer("1+2=")["input_ids"]
            == AutoTokenizer.from_pretrained(merged)("1+2=")["input_ids"]
        )
        generation = GenerationConfig.from_pretrained(folder)
        assert (
            generation.eos_token_id == tokenizer.eos_token_id
            and generation.pad_token_id == tokenizer.pad_token_id
        )


def test_the_card(adapter: Path, merged: Path, tiny_dir: str, tmp_path: Path) -> None:
    card, other = ((folder / "README.md").read_text() for folder in (merged, adapter))
    for said in (
        "grpo, LoRA of rank 4 (merged) ([arXiv:2402.03300]",
        f"parent: `{tiny_dir}`",
        "reward: `odd`, weight 1",
        "| reward/mean |",
        "# license:",
        'AutoModelForCausalLM.from_pretrained("THIS_DIRECTORY")',
        "library_name: transformers",
    ):
        assert said in card, said
    assert "base_model:" not in card, "a path on this machine means nothing on the hub"
    assert (
        "library_name: peft" in other
        and "PeftModel.from_pretrained(base" in other
        and "An adapter" in other
    )
    made = make_taught_model(tmp_path / "taught", steps=1) / "README.md"
    assert "# sft: sft from random weights\n" in made.read_text()
    assert "- parent: random weights\n" in made.read_text()  # the path of it is gone
    assert cited("sft") == "" and cited("reinforce") == " (Williams 1992)"


def test_a_run_whose_summary_has_no_groups_is_exported(lora: Path, tmp_path: Path) -> None:
    """A run that finished before metrics were written by group."""
    run = tmp_path / "run"
    shutil.copytree(lora, run)
    summary = json.loads((run / "summary.json").read_text())
    flat = {"reward/mean": 0.625, "eval/accuracy": 0.5, "epoch": 1}
    (run / "summary.json").write_text(json.dumps({**summary, "metrics": flat}))
    card = (export(run, tmp_path / "out") / "README.md").read_text()
    assert "| eval/accuracy | 0.5 |\n| reward/mean | 0.625 |" in card


def test_a_chat_template_and_its_end_of_turn(tiny_dir: str, tmp_path: Path) -> None:
    """A base model that was taught to chat ends its turns with another token than its tokenizer's
    eos; servers must know.
    """
    from transformers import AutoTokenizer, GenerationConfig

    template = tmp_path / "chat.jinja"
    template.write_text(
        "{% for m in messages %}<|bos|>{{ m['content'] }}<|pad|>{% endfor %}{% if"
        " add_generation_prompt %}<|bos|>{% endif %}"
    )
    cfg = make_config(
        tiny_dir, tmp_path, "chat", "sft", f"model.chat_template={template}", "data.chat=always"
    )
    launch(cfg)
    out = export(Path(cfg.run.dir), tmp_path / "out")
    assert AutoTokenizer.from_pretrained(out).chat_template == template.read_text()
    ends = GenerationConfig.from_pretrained(out).eos_token_id
    assert ends == [0, 2], "the template's <|pad|> and the tokenizer's <|eos|>"


def test_a_reward_model_is_a_sequence_classifier(tiny_dir: str, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    rows = tmp_path / "pairs.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"prompt": f"{i}=", "chosen": "aa", "rejected": "zz"}) + "\n"
            for i in range(16)
        )
    )
    cfg = make_config(
        tiny_dir,
        tmp_path,
        "rm",
        "bradley_terry",
        "train.steps=8",
        "train.learning_rate=0.01",
        f"data.source={rows}",
        rewards=[],
    )
    from helpers.toys import SilentView
    from reinforge.build.run import train_config

    train_config(cfg, view=SilentView())
    out = export(Path(cfg.run.dir), tmp_path / "out")
    ours = load_scalar(ModelConfig(path=str(out)))
    texts = [ours.tokenizer(text)["input_ids"] for text in ("3=aa", "3=zz")]
    good, bad = ours.scores(texts)
    assert good > bad + 0.5, "it learned to tell them apart"
    theirs = AutoModelForSequenceClassification.from_pretrained(out)
    assert [float(logits(theirs, torch.tensor([ids]))) for ids in texts] == pytest.approx(
        [good, bad], abs=1e-4
    )
    assert "AutoModelForSequenceClassification" in (out / "README.md").read_text()


# ---- from elsewhere ----


@pytest.fixture
def foreign(tiny_dir: str, tmp_path: Path) -> Path:
    """An adapter as TRL and LLaMA-Factory leave it: peft's own files, other rank and targets than
    our defaults, rsLoRA.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    lora = LoraConfig(
        r=3,
        lora_alpha=7,
        target_modules=["q_proj", "down_proj"],
        task_type="CAUSAL_LM",
        lora_dropout=0.1,
        use_rslora=True,
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_dir), lora)
    with torch.no_grad():
        for i, (_, p) in enumerate((n, p) for n, p in model.named_parameters() if "lora_B" in n):
            p.copy_(torch.sin(torch.arange(p.numel()) + i).view_as(p))
    model.save_pretrained(tmp_path / "foreign")
    torch.save(logits(model.eval()), tmp_path / "logits.pt")
    return tmp_path / "foreign"


def test_a_foreign_adapter_loads_as_it_is(foreign: Path, tiny_dir: str) -> None:
    wanted = torch.load(foreign.parent / "logits.pt")
    for model in (
        load_model(ModelConfig(path=tiny_dir), AdapterConfig(path=str(foreign))),
        open_model(str(foreign))[0],  # its base is named in it
    ):
        model.causal.set_attn_implementation("eager")
        torch.testing.assert_close(logits(model.module), wanted, atol=1e-4, rtol=1e-4)


def test_an_adapter_is_not_a_model(foreign: Path, tiny_dir: str, tmp_path: Path) -> None:
    with pytest.raises(
        InputError,
        match=(
            r"is a peft adapter, not a model\. Put its base model here, and this path under"
            r" adapter.path"
        ),
    ):
        load_model(ModelConfig(path=str(foreign)))
    cfg = make_config(str(foreign), tmp_path, "x", "sft", "data.source=arithmetic:chain")
    assert any("This is an adapter" in error for error in preflight(cfg).errors)
    described = json.loads((foreign / "adapter_config.json").read_text())
    (foreign / "adapter_config.json").write_text(json.dumps({**described, "peft_type": "IA3"}))
    cfg = make_config(
        tiny_dir, tmp_path, "x", "sft", f"adapter.path={foreign}", "data.source=arithmetic:chain"
    )
    assert any("is an adapter of the kind IA3" in error for error in preflight(cfg).errors)


def test_a_foreign_checkpoint_in_several_files(tmp_path: Path) -> None:
    """veRL and OpenRLHF merge to sharded directories of bfloat16 weights."""
    from transformers import AutoModelForCausalLM

    source = make_tiny_model(tmp_path / "one", width=32, layers=2, heads=4)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    ours = load_model(
        ModelConfig(path=str(tmp_path / "many"), tokenizer=str(source), dtype="bfloat16")
    )
    assert all(
        torch.equal(p, dict(model.named_parameters())[name])
        for name, p in ours.module.named_parameters()
    )


# ---- modes ----


def modes(folder: Path) -> dict[str, str]:
    return {
        path.name: oct(path.stat().st_mode & 0o777) for path in folder.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077], ids=oct)
def test_what_is_exported_can_be_read_by_whom_the_umask_lets(
    mask: int, lora: Path, tmp_path: Path
) -> None:
    """safetensors writes weights that only their owner can read, beside a config.json that
    everybody can.
    """
    before = os.umask(mask)
    try:
        found = {
            **modes(export(lora, tmp_path / "adapter")),
            **modes(export(lora, tmp_path / "merged", merge=True)),
        }
        tiny = modes(
            make_tiny_model(tmp_path / "tiny", width=32, layers=1, heads=2, kv_heads=1, context=64)
        )
    finally:
        os.umask(before)
    assert {
        "adapter_model.safetensors",
        "model.safetensors",
        "config.json",
    } <= found.keys() and "model.safetensors" in tiny
    assert {*found.values(), *tiny.values()} == {oct(0o666 & ~mask)}


def test_checkpoints_have_the_mode_of_any_other_file(lora: Path, tmp_path: Path) -> None:
    (tmp_path / "any").write_text("x")
    found = modes(lora / "checkpoints")
    assert any(name.endswith(".safetensors") for name in found)
    assert set(found.values()) == set(modes(tmp_path).values())


# ---- the hub ----


class Hub:
    """Stands in for huggingface_hub.HfApi."""

    calls: list[tuple[str, dict[str, Any]]] = []

    def __init__(self, token: str):
        self.calls.append(("token", {"token": token}))

    def create_repo(self, repo: str, **options: Any) -> None:
        self.calls.append(("create", {"repo": repo, **options}))

    def upload_folder(self, **options: Any) -> None:
        if options["repo_id"] == "me/broken":
            raise OSError("403 Forbidden\nand more")
        self.calls.append(
            (
                "upload",
                {
                    **options,
                    "files": sorted(p.name for p in Path(options["folder_path"]).iterdir()),
                },
            )
        )


def test_push(
    lora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert main(["export", str(lora), str(tmp_path / "a"), "--push", "me/model"]) == 2
    assert "Set HF_TOKEN" in capsys.readouterr().err and not (tmp_path / "a").exists(), (
        "asked before anything is written"
    )
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_secret")
    assert main(["export", str(lora), str(tmp_path / "a"), "--push", "me/model"]) == 0
    (_, token), (_, made), (_, sent) = Hub.calls
    assert token == {"token": "hf_secret"} and made == {
        "repo": "me/model",
        "private": True,
        "exist_ok": True,
    }
    assert sent["repo_id"] == "me/model" and {
        "README.md",
        "adapter_model.safetensors",
        "tokenizer.json",
    } <= set(sent["files"])
    assert main(["export", str(lora), str(tmp_path / "b"), "--push", "me/broken"]) == 2
    assert (
        "could not upload to me/broken: 403 Forbidden The export itself"
        in capsys.readouterr().err.replace("Forbidden. The", "Forbidden The")
    )


def test_a_merged_run_as_a_file_for_llama_cpp(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is loaded here like any model, and is the merged one."""
    words = ["count the apples, then count the pears"]
    model = make_tiny_model(
        tmp_path / "model", width=32, layers=1, heads=2, kv_heads=1, text=words, vocabulary=270
    )
    cfg = make_config(str(model), tmp_path, "run", "grpo", "train.learning_rate=0.05", **LORA)
    launch(cfg)
    run, out = cfg.run.dir, tmp_path / "out"
    assert main(["export", run, str(out), "--merge", "--gguf", "f32"]) == 0
    assert "model-F32.gguf" in capsys.readouterr().out
    told = open_model(str(out / "model-F32.gguf"))[0]
    want = open_model(str(out))[0]
    for name, weight in want.module.state_dict().items():
        torch.testing.assert_close(told.module.state_dict()[name], weight, atol=0, rtol=0)
    assert main(["export", run, str(tmp_path / "a"), "--gguf", "f16"]) == 2
    assert "Add --merge" in capsys.readouterr().err
    assert main(["export", run, str(tmp_path / "a"), "--merge", "--gguf", "q4"]) == 2
    assert "no precision 'q4'" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
