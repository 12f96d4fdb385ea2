"""Architectures at toy size, each tried as `benchmarks/architectures.py` tries all of them."""

from __future__ import annotations

import pytest

from helpers.architecture_trial import differences, try_architecture
from helpers.toy_architectures import EXCLUDED, make_config, names
from reinforge.config import architectures

# one of each kind of trouble: a router that is a linear layer by kind, towers beside the text, two
# attentions to a layer, a head that scales, rotary frequencies that end at a length
SAMPLE = {"phimoe": "right", "gemma3": "right", "cohere2": "right", "longrope": "right"}


@pytest.mark.parametrize("name", SAMPLE)
def test_a_toy_is_what_transformers_says(name: str) -> None:
    found = try_architecture(name, make_config(name), "float32")
    assert (found.verdict, found.wrong) == (SAMPLE[name], []), found.said
    assert found.gaps["shared prompts"] < 1e-4 and found.gaps["gradient shared"] < 1e-4
    assert found.gaps["LoRA packed"] < 1e-4
    assert differences(found) == []


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss"])
def test_a_toy_in_bfloat16_is_as_near_as_transformers_own(name: str) -> None:
    """State, and experts with sinks: all that is compared, LoRA and saving among it."""
    found = try_architecture(name, make_config(name), "bfloat16")
    assert (found.verdict, found.wrong) == ("right", []), found.said
    assert found.gaps["LoRA begins"] == found.gaps["saved and loaded"] == 0
    assert found.gaps["shared prompts"] <= found.limits["shared prompts"] < 0.15


def test_layers_with_two_attentions_are_found() -> None:
    found = try_architecture("longcat_flash", make_config("longcat_flash"), "float32")
    assert found.verdict in ("right", "trains") and found.wrong == [], found.said


def test_every_decoder_of_transformers_has_a_toy_or_a_reason() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    listed = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert listed <= {*names(), *EXCLUDED}
    assert set(EXCLUDED) <= listed


@pytest.mark.parametrize("name", architectures.NO_DECODERS)
def test_what_is_no_decoder_is_refused_by_name(name: str) -> None:
    assert architectures.refusal({"model_type": name}) == architectures.NO_DECODERS[name]
