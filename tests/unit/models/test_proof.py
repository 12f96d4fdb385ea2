"""The proof at load: what it accepts is right in packs and in the engine, what it refuses would be
wrong, in every precision.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.toy_architectures import (
    NAMED,
    ORIGINAL,
    REFUSED,
    RIGHT,
    STATEFUL,
    WINDOW,
    make_architecture,
    make_config,
)
from helpers.toys import make_model, make_module, run, tokens_of, true_logprobs
from reinforge.config import architectures
from reinforge.config.schema import Config
from reinforge.core.batch import Batch
from reinforge.core.engine import Sampling
from reinforge.core.errors import InputError
from reinforge.core.sample import Sample
from reinforge.engines.native import NativeEngine
from reinforge.models import proof
from reinforge.models.attention import (
    PackedLayout,
    extent_of,
    mask_extents,
    set_mask_extents,
    starts_of,
    windows,
)
from reinforge.models.causal import CausalModel
from reinforge.models.load import check_architecture
from reinforge.models.scalar import ScalarModel
from reinforge.plan.checks import run_checks

PRECISIONS = [torch.float32, torch.bfloat16]


def by_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- what is accepted is right ----


def pair(prompt: int, *answers: int) -> list[Sample]:
    """Answers to one prompt, and a row of its own that is as long as the longest."""
    shared = tokens_of(prompt, 1, 259)
    rows = [shared + tokens_of(n, 2 + i, 259) for i, n in enumerate(answers)] + [
        tokens_of(prompt + max(answers), 9, 259)
    ]
    return [
        Sample.from_tokens(
            str(i),
            row,
            [at >= prompt for at in range(len(row))],
            group="pair" if i < len(answers) else "alone",
        )
        for i, row in enumerate(rows)
    ]


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("name", RIGHT)
def test_packs_and_the_engine_give_the_log_probs_of_transformers(name: str, share: bool) -> None:
    model = CausalModel(make_architecture(name))
    assert model.verify() < 1e-5
    theirs = make_architecture(name)
    samples = pair(7, 8, 3)
    batch = Batch.pack(samples, share=share)
    want = torch.cat([true_logprobs(theirs, s.tokens.tolist())[s.trained[1:]] for s in samples])
    with torch.no_grad():
        torch.testing.assert_close(
            model.logprobs(batch, temperature=1.0)[0].double(), want, atol=1e-4, rtol=0
        )
    engine = NativeEngine(model, kv_gib=0.001)
    for done in run(
        engine.generate(
            tokens_of(7, 1, 259), Sampling(max_new_tokens=9, temperature=1.0), key=1, n=2
        )
    ):
        want = true_logprobs(theirs, [*tokens_of(7, 1, 259), *done.tokens])[6:]
        torch.testing.assert_close(torch.tensor(done.logprobs).double(), want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", RIGHT)
def test_bfloat16_is_proven_as_sharply_as_float32(name: str) -> None:
    assert CausalModel(make_architecture(name, dtype=torch.bfloat16)).verify() < 1e-5


# ---- windows that only the mask carries ----


@pytest.mark.parametrize("name", ["qwen2_moe", "phimoe"])
def test_a_window_that_only_the_mask_carries_is_heard(name: str) -> None:
    model = CausalModel(make_architecture(name))
    model.verify()
    assert windows(model.trunk) == [WINDOW]
    tokens = tokens_of(20, 3, 259)
    row = Batch.pack([Sample.from_tokens("0", tokens, [True] * 20)])
    with torch.no_grad():
        near = model.logprobs(row, temperature=1.0)[0].double()
        for part in model.trunk.modules():
            vars(part).pop("mask_window", None)
        blind = model.logprobs(row, temperature=1.0)[0].double()
    want = true_logprobs(make_architecture(name), tokens)
    assert float((near - want).abs().max()) < 1e-4 and float((blind - want).abs().max()) > 0.01


@pytest.mark.parametrize("name", ["qwen2_moe", "phimoe", "llama4"])
def test_a_copy_is_told_what_the_masks_said(name: str) -> None:
    """As other ranks are, which prove nothing themselves."""
    proved = CausalModel(make_architecture(name))
    proved.verify()
    copy = CausalModel(make_architecture(name))
    row = Batch.pack([Sample.from_tokens("0", tokens_of(20, 3, 259), [True] * 20)])
    with torch.no_grad():
        want = proved.logprobs(row, temperature=1.0)[0]
        blind = copy.logprobs(row, temperature=1.0)[0]
        set_mask_extents(copy.trunk, mask_extents(proved.trunk))
        told = copy.logprobs(row, temperature=1.0)[0]
    assert torch.equal(told, want) and not torch.equal(blind, want)
    assert mask_extents(copy.trunk).keys() == mask_extents(proved.trunk).keys()


def test_windows_are_read_from_the_mask_function_whatever_their_size() -> None:
    from transformers import masking_utils as masks

    assert extent_of(masks.causal_mask_function, None) == (None, None)
    for size in (3, 4096):
        assert extent_of(masks.sliding_window_causal_mask_function(size), size) == (size, None)
        chunks = masks.chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.int64))
        assert extent_of(chunks, size) == (None, size)
    with pytest.raises(InputError, match="in both directions"):
        extent_of(masks.bidirectional_mask_function, None)


def test_no_mask_is_made_outside_the_proof() -> None:
    """It would cost a question to the device in every forward."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    make_model("mistral").verify()
    assert "reinforge" not in ALL_MASK_ATTENTION_FUNCTIONS._global_mapping


# ---- rotary embeddings that follow the length ----


@pytest.mark.parametrize(("name", "limit"), [("longrope", ORIGINAL), ("dynamic", NAMED)])
def test_length_dependent_rope_reaches_as_far_as_it_does_not_depend_on_it(
    name: str, limit: int
) -> None:
    model = CausalModel(make_architecture(name))
    assert model.verify() < 1e-5 and model.reach == model.context == limit
    fits, long = (
        Batch.pack([Sample.from_tokens("0", tokens_of(n, 1, 259), [True] * n)])
        for n in (limit, limit + 1)
    )
    model.logprobs(fits, temperature=1.0)
    with pytest.raises(
        InputError,
        match=rf"{limit + 1} tokens is past the {limit} of this model's own rotary embedding",
    ):
        model.logprobs(long, temperature=1.0)
    engine = NativeEngine(model, kv_gib=0.001)
    with pytest.raises(InputError, match=f"past the model's context of {limit}"):
        run(engine.generate(tokens_of(limit, 1, 259), Sampling(max_new_tokens=1), key=1))


@pytest.mark.parametrize(("name", "limit"), [("longrope", ORIGINAL), ("dynamic", NAMED)])
def test_a_long_neighbour_does_not_move_a_short_row(name: str, limit: int) -> None:
    """Below the check of lengths: a warm-up or a proof may run longer sequences than a run does."""
    model = CausalModel(make_architecture(name))
    short = torch.tensor(tokens_of(9, 1, 259))

    def first_row(neighbour: int) -> torch.Tensor:
        lengths = [9, neighbour]
        tokens = torch.cat([short, torch.tensor(tokens_of(neighbour, 2, 259))])
        positions = torch.cat([torch.arange(n) for n in lengths])
        with torch.no_grad():
            return model.hidden(
                tokens, positions, PackedLayout(lengths, starts_of(lengths, model.device))
            )[:9]

    torch.testing.assert_close(first_row(2 * limit), first_row(5), atol=1e-5, rtol=0)


def test_a_long_sequence_before_does_not_move_the_frequencies() -> None:
    """transformers keeps the frequencies of the last forward in the module."""
    module = make_architecture("longrope")
    fresh = make_architecture("longrope")
    with torch.no_grad():
        module(torch.tensor([tokens_of(3 * ORIGINAL, 1, 259)]))
    used = CausalModel(module)
    clean = CausalModel(fresh)
    batch = Batch.pack([Sample.from_tokens("0", tokens_of(9, 1, 259), [True] * 9)])
    with torch.no_grad():
        assert torch.equal(
            used.logprobs(batch, temperature=1.0)[0], clean.logprobs(batch, temperature=1.0)[0]
        )


# ---- what is refused ----


@pytest.mark.parametrize("dtype", PRECISIONS, ids=by_name)
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_wrong_is_refused(name: str, dtype: torch.dtype) -> None:
    """By the module itself, without a list of names; whatever the architecture raises on the way is
    a refusal too.
    """
    module = make_architecture(name, dtype=dtype)
    with pytest.raises(InputError, match=r"model\.path: "), proof.refusing(module):
        CausalModel(module).verify()


@pytest.mark.parametrize("name", REFUSED)
def test_the_configuration_alone_tells(name: str) -> None:
    config = make_config(name)
    with pytest.raises(InputError, match=r"model\.path: .* cannot be trained here: it"):
        check_architecture(config, "somewhere")


@pytest.mark.parametrize("name", [*RIGHT, *STATEFUL])
def test_the_configuration_of_what_works_tells_nothing(name: str) -> None:
    config = make_config(name)
    check_architecture(config, "somewhere")
    assert architectures.keeps_state(config.to_dict()) == (name in STATEFUL)


@pytest.mark.parametrize("name", ["gptj", "longrope"])
def test_plan_says_it_before_weights_are_read(name: str, tmp_path: Path, tiny_dir: str) -> None:
    """From config.json alone: there are no weights in the directory."""
    shutil.copytree(tiny_dir, tmp_path / "model")
    for file in (tmp_path / "model").glob("*.safetensors"):
        file.unlink()
    make_config(name, architectures=["SomeForCausalLM"]).save_pretrained(tmp_path / "model")
    changes = {"train": {"steps": 1, "prompts_per_step": 2}, "rollout": {"max_new_tokens": 4}}
    config = Config.model_validate(
        {
            "model": {"path": str(tmp_path / "model"), "device": "cpu"},
            "algorithm": {"name": "grpo"},
            "rewards": [{"name": "exact_number"}],
            "data": {
                "source": "arithmetic:chain",
                "options": {"size": 8, "max_value": 9, "terms": 2},
            },
            "run": {"dir": "r"},
            **changes,
        }
    )
    report = run_checks(config)
    said = " ".join([*report.errors, *report.warnings])
    assert report.ok == (name == "longrope"), said
    assert {
        "gptj": "cannot be trained here: its layers have an attention of their own making",
        "longrope": f"sequences may have {ORIGINAL} tokens",
    }[name] in said


def test_a_reward_model_of_an_architecture_with_its_own_attention_is_refused() -> None:
    from transformers import AutoModelForSequenceClassification

    module = AutoModelForSequenceClassification.from_config(
        make_config("gptj", num_labels=1, pad_token_id=0)
    ).eval()
    with (
        pytest.raises(InputError, match=r"rewards\.0: .*2 of the 2 layers"),
        proof.refusing(module, "rewards.0"),
    ):
        ScalarModel(module, where="rewards.0").verify()


class _Neighbour(nn.Module):
    """A layer that also reads the token before, as a short convolution does, or the one after."""

    def __init__(self, inner: nn.Module, share: float, shift: int):
        super().__init__()
        self.inner = inner
        self.share = share
        self.shift = shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x + self.share * x.roll(self.shift, 1))


@pytest.mark.parametrize("shift", [1, -1], ids=["before", "after"])
@pytest.mark.parametrize("dtype", PRECISIONS, ids=by_name)
def test_a_leak_far_below_rounding_is_seen(dtype: torch.dtype, shift: int) -> None:
    """A millionth of a neighbouring token: in bfloat16 no number of the other sample would change
    at all. From the token after, only the last row of a sample is touched.
    """
    module = make_module("llama")
    last = module.model.layers[-1]
    last.mlp = _Neighbour(last.mlp, 1e-6, shift)
    with pytest.raises(InputError, match="one sample reaches another"):
        CausalModel(module.to(dtype)).verify()


def test_a_shared_prompt_that_is_not_seen_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With both comparisons of numbers out of the way, the poisoned prompt alone must show it."""
    original = PackedLayout.__post_init__

    def without_prompt(self: Any) -> None:
        self.prefix = None
        original(self)

    model = make_model("llama")
    monkeypatch.setattr(PackedLayout, "__post_init__", without_prompt)
    with pytest.raises(InputError, match="does not see the prompt that it shares"):
        proof.prove(model, lambda batch: 0.0, "model.path", "log-probs")
    with pytest.raises(InputError, match="other log-probs"):
        model.verify()


def test_lack_of_memory_is_no_refusal() -> None:
    with pytest.raises(torch.OutOfMemoryError), proof.refusing(nn.Linear(1, 1)):
        raise torch.OutOfMemoryError("CUDA out of memory")


# ---- the parts ----


def test_in_float32_a_narrow_module_computes_what_its_wide_twin_computes() -> None:
    narrow = make_module("gemma2").bfloat16()
    wide = make_module("gemma2").bfloat16().float()
    tokens = torch.tensor([tokens_of(20)])
    with torch.no_grad(), proof.Float32Mode():
        found = narrow(tokens, use_cache=False).logits
    with torch.no_grad():
        want = wide(tokens, use_cache=False).logits
        rounded = narrow(tokens, use_cache=False).logits.float()
    assert found.dtype is torch.float32 and all(
        p.dtype is torch.bfloat16 for p in narrow.parameters()
    )
    assert float((found - want).abs().max()) < 1e-2 * float((rounded - want).abs().max())


def test_the_pack_of_the_proof_is_one_that_training_makes() -> None:
    model = make_model("gemma3")
    model.verify()
    batch = proof.probe(model)
    lengths = [len(s.tokens) for s in batch.samples]
    assert (
        batch.prefix is not None
        and sorted(batch.prefix) == [-1, -1, 0, 0]
        and len(set(lengths)) == 3
    )
    assert (
        max(lengths) > WINDOW + 5
        and [len(part) for part in proof.spread(batch, batch.tokens[:, None])] == lengths
    )
    for sample, part in zip(batch.samples, proof.spread(batch, batch.tokens[:, None]), strict=True):
        assert part[:, 0].tolist() == sample.tokens.tolist()
