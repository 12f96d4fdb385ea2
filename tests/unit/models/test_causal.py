"""The one forward against transformers' own, for every kind of architecture: alone, packed, padded,
shifted, checkpointed.
"""

from __future__ import annotations

import copy

import pytest
import torch

from helpers.toys import (
    ARCHS,
    VOCABULARY,
    gradients,
    make_model,
    make_module,
    make_samples,
    relative,
    train_config,
    true_logprobs,
)
from reinforge.algorithms.losses.supervised import NLLLoss
from reinforge.backends.local import LocalBackend
from reinforge.core.batch import Batch, Totals, pack
from reinforge.core.errors import InputError
from reinforge.core.sample import Sample
from reinforge.models.causal import CausalModel

LENGTHS = (20, 5, 12, 3, 19, 2, 33)


def wanted(
    module: torch.nn.Module, samples: list[Sample], temperature: float = 1.0
) -> torch.Tensor:
    return torch.cat(
        [true_logprobs(module, s.tokens.tolist(), temperature)[s.trained[1:]] for s in samples]
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("arch", [*ARCHS, "opt", "cohere", "granite"])
def test_packed_is_alone_is_transformers(arch: str, temperature: float) -> None:
    samples = make_samples(LENGTHS)
    model = make_model(arch)
    want = wanted(make_module(arch), samples, temperature)
    with torch.no_grad():
        packed = model.logprobs(Batch.pack(samples), temperature=temperature)[0]
        alone = torch.cat(
            [model.logprobs(Batch.pack([s]), temperature=temperature)[0] for s in samples]
        )
        shuffled = model.logprobs(Batch.pack(samples[::-1]), temperature=temperature)[0]
    for ours in (packed, alone):
        torch.testing.assert_close(ours.double(), want, atol=1e-5, rtol=0)
    back = torch.cat(list(shuffled.split([s.n_trained for s in samples[::-1]]))[::-1])
    torch.testing.assert_close(back.double(), want, atol=1e-5, rtol=0)
    assert float(want.std()) > 0.1  # the tolerance means something


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("arch", ARCHS)
def test_packed_is_a_padded_batch_of_transformers(arch: str, side: str) -> None:
    """Padding needs a mask and position ids there; here there is none.

    GPT-2 (learned positions) would show a mistake at once.
    """
    samples = make_samples(LENGTHS)
    longest = max(LENGTHS)
    ids = torch.zeros(len(LENGTHS), longest, dtype=torch.int64)
    mask = torch.zeros(len(LENGTHS), longest, dtype=torch.int64)
    place = [slice(longest - n, longest) if side == "left" else slice(0, n) for n in LENGTHS]
    for i, s in enumerate(samples):
        ids[i, place[i]], mask[i, place[i]] = s.tokens, 1
    with torch.no_grad():
        logits = make_module(arch)(
            ids,
            attention_mask=mask,
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
            use_cache=False,
        ).logits.double()
        ours = make_model(arch).logprobs(Batch.pack(samples), temperature=1.0)[0].double()
    rows = [
        logits[i, place[i]][:-1].log_softmax(-1).gather(-1, s.tokens[1:, None])[:, 0][s.trained[1:]]
        for i, s in enumerate(samples)
    ]
    torch.testing.assert_close(ours, torch.cat(rows), atol=1e-5, rtol=0)


@pytest.mark.parametrize("by", [-1, 1])
def test_a_shift_by_one_would_be_seen(by: int) -> None:
    """Row t−1 predicts token t.

    Reading row t or t−2 instead moves the mean log-prob by tenths of nats, far above every
    tolerance.
    """
    samples = make_samples(LENGTHS, prompt=3)
    batch = Batch.pack([s for s in samples if len(s.tokens) > 4])
    model = make_model()
    want = wanted(make_module(), batch.samples)
    right = model.logprobs(batch, temperature=1.0)[0].detach().double()
    hidden = model.hidden(batch.tokens, batch.positions, _packed(batch))
    rows = (batch.targets - 1 + by).clamp(0, batch.n_tokens - 1)
    wrong = (
        model.logits(hidden[rows])
        .log_softmax(-1)
        .gather(-1, batch.tokens[batch.targets][:, None])[:, 0]
        .detach()
        .double()
    )
    assert float((right - want).abs().max()) < 1e-5 and float((wrong - want).abs().mean()) > 0.25


def _packed(batch: Batch):  # type: ignore[no-untyped-def]
    from reinforge.models.attention import PackedLayout

    return PackedLayout(batch.lengths, batch.starts)


@pytest.mark.parametrize("arch", ["llama", "gpt2", "gemma2", "opt"])
def test_gradient_is_transformers_own(arch: str) -> None:
    """Packed backward against one unpadded row after the other; also: packed loss = sum of separate
    losses.
    """
    samples = make_samples()
    theirs = make_module(arch)
    count = sum(s.n_trained for s in samples)
    total = 0.0
    for s in samples:
        logits = theirs(s.tokens[None], use_cache=False).logits[0].float()
        nll = (
            -logits[:-1].log_softmax(-1).gather(-1, s.tokens[1:, None])[:, 0][s.trained[1:]].sum()
            / count
        )
        nll.backward()
        total += float(nll.detach())
    backend = LocalBackend(make_model(arch), train_config(), total_steps=1)
    batches = pack(samples, 64)
    metrics = backend.forward_backward(batches, NLLLoss(), Totals.of(batches))
    assert metrics["sft/loss"] == pytest.approx(total, abs=1e-5)
    expected = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    assert relative(gradients(backend), expected) < 2e-6


DROPOUTS = {
    "gpt2": {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5},
    "llama": {"attention_dropout": 0.5},
    "gemma2": {"attention_dropout": 0.5},
    "opt": {"dropout": 0.5, "attention_dropout": 0.5, "layerdrop": 0.5},
}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("arch", DROPOUTS)
def test_dropout_in_the_config_does_not_matter(arch: str, checkpointing: bool) -> None:
    """In training mode, where it would strike: the same loss and gradient as without, twice."""
    batches = pack(make_samples(), 64)
    clean = LocalBackend(
        make_model(arch, **{key: 0.0 for key in DROPOUTS[arch]}), train_config(), total_steps=1
    )
    expected = clean.forward_backward(batches, NLLLoss(), Totals.of(batches))
    model = make_model(arch, **DROPOUTS[arch])
    if checkpointing:
        model.module.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    for seed in (1, 2):
        torch.manual_seed(seed)
        backend = LocalBackend(model, train_config(), total_steps=1)
        assert backend.forward_backward(batches, NLLLoss(), Totals.of(batches))[
            "sft/loss"
        ] == pytest.approx(expected["sft/loss"], abs=1e-6)
        assert relative(gradients(backend), gradients(clean)) < 1e-6
        backend.optimizer.zero()
    with torch.no_grad():
        model.module.train()
        trained = model.logprobs(batches[0], temperature=1.0)[0]
        model.module.eval()
        torch.testing.assert_close(
            trained, model.logprobs(batches[0], temperature=1.0)[0], atol=1e-6, rtol=0
        )


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_gradient_checkpointing_recomputes_and_agrees(arch: str) -> None:
    batches = pack(make_samples(), 64)
    results = []
    calls = []
    for enabled in (False, True):
        model = make_model(arch)
        if enabled:
            model.module.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        count = [0]
        first = next(
            m
            for name, m in model.module.named_modules()
            if name.endswith(("layers.0.mlp", "h.0.mlp"))
        )
        first.register_forward_pre_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
        backend = LocalBackend(model, train_config(), total_steps=1)
        backend.forward_backward(batches, NLLLoss(), Totals.of(batches))
        results.append(gradients(backend))
        calls.append(count[0])
    assert calls == [len(batches), 2 * len(batches)]  # it really recomputes
    assert relative(results[1], results[0]) < 1e-6


def test_tied_embeddings_get_both_gradients() -> None:
    samples = make_samples()
    batches = pack(samples, 64)
    tied = make_model(tie_word_embeddings=True)
    loose = make_model(tie_word_embeddings=False)
    with torch.no_grad():
        loose.module.load_state_dict(
            {**tied.module.state_dict(), "lm_head.weight": tied.head.weight.clone()}
        )
    assert tied.head.weight is tied.module.get_input_embeddings().weight
    grads = []
    for model in (tied, loose):
        backend = LocalBackend(model, train_config(), total_steps=1)
        backend.forward_backward(batches, NLLLoss(), Totals.of(batches))
        grads.append(gradients(backend))
    together = grads[1].pop("lm_head.weight") + grads[1]["model.embed_tokens.weight"]
    torch.testing.assert_close(
        grads[0]["model.embed_tokens.weight"], together, atol=1e-6, rtol=1e-5
    )
    assert len(grads[0]) == len(grads[1])


def test_what_cannot_be_right_is_refused() -> None:
    with pytest.raises(InputError, match="2 of the 2 layers of RwkvForCausalLM"):
        CausalModel(make_module("rwkv")).verify()
    odd = make_module("llama")
    original = odd.forward

    def doubled(*args, **kwargs):  # type: ignore[no-untyped-def]
        out = original(*args, **kwargs)
        out.logits = 2 * out.logits  # an architecture with a rule of its own
        return out

    odd.forward = doubled
    with pytest.raises(
        InputError, match="computes other log-probs.*treats its outputs in its own way"
    ):
        CausalModel(odd).verify()
    headless = copy.deepcopy(make_module("llama"))
    headless.lm_head = torch.nn.Bilinear(2, 2, 2)
    with pytest.raises(InputError, match="output head"):
        CausalModel(headless)


@pytest.mark.parametrize("arch", [*ARCHS, "cohere", "granite"])
def test_verify_accepts_and_leaves_the_model_ready(arch: str) -> None:
    model = make_model(arch)
    assert model.verify() < 1e-5
    assert (
        model.causal.config._attn_implementation == "reinforge"
        and model.head.weight.shape[0] == VOCABULARY
    )


def test_bfloat16_logprobs_are_float32_and_near() -> None:
    samples = make_samples(LENGTHS)
    want = wanted(make_module(), samples)
    model = CausalModel(make_module().bfloat16())
    ours = model.logprobs(Batch.pack(samples), temperature=1.0)[0].detach()
    assert ours.dtype is torch.float32 and float((ours - want).abs().mean()) < 0.05
