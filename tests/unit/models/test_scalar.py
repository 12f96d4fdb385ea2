"""Critics and reward models: values and scores against transformers' own, from every kind of
checkpoint and back to disk.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.toy_scalars import make_classifier, make_scalar, true_values
from helpers.toys import (
    ARCHS,
    ToyTokenizer,
    _config,
    make_model,
    make_module,
    make_samples,
    tokens_of,
)
from reinforge.config.model import ModelConfig
from reinforge.core.batch import Batch
from reinforge.core.errors import InputError
from reinforge.models.load import load_model, load_scalar
from reinforge.models.scalar import ScalarModel, padding_id
from reinforge.models.tiny import tiny_tokenizer

LENGTHS = (20, 5, 12, 3, 19, 2, 33)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("arch", [*ARCHS, "opt"])
def test_values_are_the_scores_of_prefixes(arch: str, share: bool) -> None:
    """The value before token t is the score of what came before it; the last value that of the
    whole. Shared prompts change nothing.
    """
    samples = make_samples(LENGTHS)
    first = samples[0].tokens[:2]
    samples = [
        s.with_(tokens=torch.cat([first, s.tokens[2:]])) if len(s.tokens) > 2 else s
        for s in samples
    ]
    module = make_classifier(arch)
    model = make_scalar(arch)
    want = [true_values(module, s.tokens.tolist()) for s in samples]
    batch = Batch.pack(samples, share=share)
    with torch.no_grad():
        values = model.values(batch)
        last = model.last_values(batch)
    assert values.dtype is last.dtype is torch.float32 and (batch.prefix is not None) == share
    torch.testing.assert_close(
        values.double(),
        torch.cat([w[:-1][s.trained[1:]] for w, s in zip(want, samples, strict=True)]),
        atol=2e-5,
        rtol=1e-5,
    )
    torch.testing.assert_close(
        last.double(), torch.stack([w[-1] for w in want]), atol=2e-5, rtol=1e-5
    )
    assert float(torch.cat(want).std()) > 0.5  # the tolerance means something


def test_a_sample_that_a_pack_left_out_has_last_value_zero() -> None:
    samples = make_samples((6, 7))
    samples[1] = samples[1].with_(trained=torch.zeros(7, dtype=torch.bool))
    last = make_scalar().last_values(Batch.pack(samples, share=True)).tolist()
    assert last[0] != 0 and last[1] == 0


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_scores_are_those_of_a_padded_batch_in_transformers(arch: str, tmp_path: Path) -> None:
    """Saved, loaded in plain transformers and scored there in one padded batch; also for a row that
    ends in padding and one of nothing else.
    """
    from transformers import AutoModelForSequenceClassification

    model = make_scalar(arch, **({"pad_token_id": 0} if arch == "gpt2" else {}))
    rows = [tokens_of(n, n) for n in (9, 4, 15, 1)] + [[7, 8, 0, 9, 0, 0], [0, 0]]
    model.save(tmp_path)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    with torch.no_grad():
        want = plain(
            ids,
            attention_mask=(
                torch.arange(longest)[None] < torch.tensor([len(r) for r in rows])[:, None]
            ).long(),
        ).logits[:, 0]
    torch.testing.assert_close(torch.tensor(model.scores(rows)), want, atol=1e-5, rtol=1e-5)
    assert (
        plain.config.num_labels == 1
        and float(want.std()) > 0.5
        and model.plain.config._attn_implementation == "reinforge"
    )
    assert model.scores(rows, budget=8) == pytest.approx(
        model.scores(rows), abs=1e-5
    ) and model.scores(rows) == model.scores(rows)


def test_a_causal_checkpoint_gets_a_head_of_zeros_and_comes_back_as_a_classifier(
    tiny_dir: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = load_scalar(ModelConfig(path=tiny_dir, device="cpu"), fresh=True)
    policy = load_model(ModelConfig(path=tiny_dir, device="cpu"))
    trunk = dict(policy.trunk.named_parameters())
    assert all(torch.equal(p, trunk[name]) for name, p in model.trunk.named_parameters())
    rows = [tokens_of(n, n, 200) for n in (5, 11)]
    assert model.scores(rows) == [0.0, 0.0] and bool((model.value_head.weight == 0).all())  # type: ignore[union-attr]
    with torch.no_grad():
        model.value_head.weight.copy_(torch.linspace(-1, 1, 32)[None])  # type: ignore[union-attr]
    model.save(tmp_path / "critic")
    again = load_scalar(ModelConfig(path=str(tmp_path / "critic"), device="cpu"))
    assert again.scores(rows) == model.scores(rows) and model.scores(rows)[0] != 0
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "critic")
    assert plain.config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
    texts = ["2+2=4", "a much longer text than that<|eos|>"]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    with torch.no_grad():
        want = plain(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[
            :, 0
        ]
    ours = model.scores([tokenizer(t)["input_ids"] for t in texts])
    torch.testing.assert_close(torch.tensor(ours), want, atol=1e-5, rtol=1e-5)


def test_a_copy_of_a_model_in_memory_is_its_own() -> None:
    policy = make_model()
    copy = ScalarModel.from_causal(policy)
    batch = Batch.pack(make_samples())
    torch.testing.assert_close(copy.states(batch), policy.states(batch), atol=0, rtol=0)
    with torch.no_grad():
        next(iter(copy.trunk.parameters())).add_(1.0)
    assert float((copy.states(batch) - policy.states(batch)).detach().abs().max()) > 0.1
    assert policy.verify() < 1e-5


@pytest.mark.parametrize("arch", [*ARCHS, "opt"])
def test_verify_accepts_and_leaves_the_model_ready(arch: str) -> None:
    model = make_scalar(arch)
    assert model.verify() < 1e-5 and model.plain.config._attn_implementation == "reinforge"
    # a head of zeros hides nothing
    assert ScalarModel.from_causal(make_model(arch)).verify() < 1e-5


def test_verify_sees_a_head_with_a_rule_of_its_own_and_another_trunk() -> None:
    odd = make_classifier()
    original = odd.forward

    def doubled(*args, **kwargs):  # type: ignore[no-untyped-def]
        out = original(*args, **kwargs)
        out.logits = 2 * out.logits
        return out

    odd.forward = doubled
    with pytest.raises(InputError, match="other scores"):
        ScalarModel(odd).verify()
    model = make_scalar()
    original_states = model.states
    model.states = lambda batch: original_states(batch).roll(1, 0)  # type: ignore[method-assign]
    with pytest.raises(InputError, match=r"other scores.*difference [0-9.]+"):
        model.verify()


def test_what_cannot_be_a_scalar_model_is_refused(tiny_dir: str, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"rewards.0.options.path: .*LlamaForCausalLM: it has no head"
    ):
        load_scalar(ModelConfig(path=tiny_dir, device="cpu"), where="rewards.0.options.path")
    with pytest.raises(
        InputError, match=r"critic.path: LlamaForSequenceClassification has 3 outputs"
    ):
        ScalarModel(type(make_classifier())(_config("llama", num_labels=3)), where="critic.path")
    with pytest.raises(InputError, match=r"critic.path: no such directory"):
        load_scalar(
            ModelConfig(path=str(tmp_path / "none"), device="cpu"), where="critic.path", fresh=True
        )
    with pytest.raises(InputError, match="no sequence classifier for RwkvConfig"):
        ScalarModel.on_trunk(make_module("rwkv"))
    with pytest.raises(InputError, match="empty text"):
        make_scalar().scores([[]])


def test_padding_is_never_what_ends_a_text() -> None:
    """A pad token equal to the end of text would make transformers score the token before it."""
    tokenizer = tiny_tokenizer()
    config = _config("llama", vocab_size=300)
    assert padding_id(tokenizer, config) == 0
    tokenizer.pad_token = tokenizer.eos_token
    config.pad_token_id = None
    assert padding_id(tokenizer, config) == 0  # <|pad|> is still among the special tokens
    # nothing to choose from: transformers looks at the last token, and so do we
    assert padding_id(None, _config("gpt2")) is None
    assert padding_id(ToyTokenizer(), _config("llama")) == 0


def test_bfloat16_values_are_float32_and_near() -> None:
    batch = Batch.pack(make_samples(LENGTHS))
    exact = make_scalar(spread=2.0)
    rough = ScalarModel(make_classifier(spread=2.0).bfloat16())
    with torch.no_grad():
        want = exact.values(batch)
        found = rough.values(batch)
    assert (
        found.dtype is torch.float32
        and float((found - want).abs().mean()) < 0.05 * float(want.std()) + 0.05
    )
    # not rounded to three digits
    assert len(set(found.tolist())) > len(set(found.bfloat16().tolist()))
