"""Checkpoints with towers for images beside the text: the text half is loaded, trained and run, or
the checkpoint is refused by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.toy_architectures import write_tokenizer
from helpers.toys import run, tokens_of
from reinforge.config.model import ModelConfig
from reinforge.core.batch import Batch
from reinforge.core.engine import Sampling
from reinforge.core.errors import InputError
from reinforge.core.sample import Sample
from reinforge.engines.native import NativeEngine
from reinforge.models.load import load_model
from reinforge.models.save import writing
from reinforge.models.toy_shapes import shrunken

VOCABULARY = 259


def save_composite(name: str, folder: Path) -> Any:
    """A whole checkpoint, with its tower, and the module that wrote it."""
    from transformers import AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = shrunken(CONFIG_MAPPING[name])
    if name == "llama4":
        config.vision_config.hidden_size = 64
        config.vision_config.intermediate_size = 256
        config.vision_config.projector_input_dim = 64
        config.vision_config.projector_output_dim = 64
        config.vision_config.vision_output_dim = 64
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for p in module.parameters():
            if p.ndim > 1:
                p.mul_(4.0)
    with writing():
        module.save_pretrained(folder)
    write_tokenizer(folder)
    return module.eval()


@pytest.mark.parametrize(
    ("name", "tower", "kind"),
    [
        ("qwen3_5", "visual", "Qwen3_5ForCausalLM"),
        ("qwen3_5_moe", "visual", "Qwen3_5MoeForCausalLM"),
        ("llama4", "vision_model", "Llama4ForCausalLM"),
    ],
)
def test_the_text_half_is_that_of_the_whole(
    name: str, tower: str, kind: str, tmp_path: Path
) -> None:
    """Log-probs and greedy answers without an image, then saved alone and loaded again."""
    whole = save_composite(name, tmp_path / "whole")
    assert any(tower in part for part, _ in whole.named_parameters())
    model = load_model(ModelConfig(path=str(tmp_path / "whole"), device="cpu"))
    assert type(model.causal).__name__ == kind
    assert not any(tower in part for part, _ in model.module.named_parameters())
    row = tokens_of(14, 1, VOCABULARY)
    batch = Batch.pack([Sample.from_tokens("0", row, [at > 0 for at in range(14)])])
    with torch.no_grad():
        logits = whole(input_ids=torch.tensor([row])).logits[0, :-1].double()
        found = model.logprobs(batch, temperature=1.0)[0].double()
    want = logits.log_softmax(-1).gather(-1, torch.tensor(row[1:])[:, None])[:, 0]
    assert float((found - want).abs().max()) < 1e-4
    greedy = Sampling(8, temperature=0.0, ignore_eos=True)
    answer = run(NativeEngine(model, kv_gib=0.001).generate(row, greedy, key=0))[0].tokens
    theirs = whole.generate(
        torch.tensor([row]), do_sample=False, max_new_tokens=8, min_new_tokens=8, eos_token_id=None
    )
    assert answer == theirs[0, 14:].tolist()
    with writing():
        model.module.save_pretrained(tmp_path / "text")  # type: ignore[operator]
    model.tokenizer.save_pretrained(tmp_path / "text")
    again = load_model(ModelConfig(path=str(tmp_path / "text"), device="cpu"))
    with torch.no_grad():
        assert torch.equal(again.logprobs(batch, temperature=1.0)[0].double(), found)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("kimi_k25", "Kimi_K25"), ("qwen3_vl", "Qwen3VL"), ("mistral3", "Mistral3")],
)
def test_a_checkpoint_without_a_text_model_of_its_own_is_refused_by_name(
    name: str, kind: str, tmp_path: Path
) -> None:
    """Before weights are read: there are none here."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = shrunken(CONFIG_MAPPING[name])
    config.architectures = [f"{kind}ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    with pytest.raises(
        InputError,
        match=rf"model\.path: {kind}ForConditionalGeneration cannot be trained here: it has a tower"
        r" for vision, and transformers does not load the text half",
    ):
        load_model(ModelConfig(path=str(tmp_path), device="cpu"))
