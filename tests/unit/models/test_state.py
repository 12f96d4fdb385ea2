"""Layers that keep state beside keys and values: in packs they restart at every segment and fork
where prompts are shared, and everything is transformers' own forward of each sample alone.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.toy_architectures import STATEFUL, make_architecture, make_config
from helpers.toys import relative, tokens_of, true_logprobs
from reinforge.config.adapter import AdapterConfig
from reinforge.core.batch import Batch, pack
from reinforge.core.engine import Sampling
from reinforge.core.errors import InputError
from reinforge.core.sample import Sample
from reinforge.engines.native import NativeEngine
from reinforge.models import exact_proof, mixers
from reinforge.models.adapters import add_adapter
from reinforge.models.causal import CausalModel
from reinforge.models.recurrences import SelectiveScan, StateSpace
from reinforge.models.state import PackedStates, PieceStates, RowStates, StateStore

# one of each kind of mixer; the other architectures have the same
KINDS = ("lfm2", "qwen3_5", "bamba", "jamba")
VOCABULARY = 259


def group(prompt: int, *answers: int) -> list[Sample]:
    """Answers to one prompt, then a row of its own."""
    shared = tokens_of(prompt, 1, VOCABULARY)
    rows = [(shared + tokens_of(n, 2 + i, VOCABULARY), "group") for i, n in enumerate(answers)]
    rows.append((tokens_of(prompt + 3, 9, VOCABULARY), "alone"))
    return [
        Sample.from_tokens(str(i), row, [at >= prompt for at in range(len(row))], group=name)
        for i, (row, name) in enumerate(rows)
    ]


def gradients(model: CausalModel, batches: list[Batch]) -> dict[str, Tensor]:
    """Of the sum of log-probs with a weight for each token of a sample."""
    model.module.zero_grad()
    for batch in batches:
        found, _ = model.logprobs(batch, temperature=1.0)
        weights = torch.cat(
            [
                torch.linspace(-1, 2, int(s.trained.sum())) * (1 + len(s.tokens))
                for s in batch.samples
            ]
        )
        (found * weights).sum().backward()
    return {n: p.grad.clone() for n, p in model.module.named_parameters() if p.grad is not None}


# ---- packs ----


@pytest.mark.parametrize("name", STATEFUL)
def test_packs_give_the_log_probs_of_transformers(name: str) -> None:
    model = CausalModel(make_architecture(name))
    assert model.mixers > 0 and model.verify() < 1e-5
    theirs = make_architecture(name)
    samples = group(70, 3, 70, 1)  # past a chunk of a recurrence; an answer of one token
    want = torch.cat([true_logprobs(theirs, s.tokens.tolist())[s.trained[1:]] for s in samples])
    for share in (False, True):
        with torch.no_grad():
            found = model.logprobs(Batch.pack(samples, share=share), temperature=1.0)[0].double()
        torch.testing.assert_close(found, want, atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", STATEFUL)
def test_bfloat16_is_proven_as_sharply_as_float32(name: str) -> None:
    assert CausalModel(make_architecture(name, dtype=torch.bfloat16)).verify() < 1e-5


@pytest.mark.parametrize("name", KINDS)
def test_in_bfloat16_a_pack_is_as_far_from_the_truth_as_transformers_is(name: str) -> None:
    """Both round to 8 bits: what packs add to the error of transformers' own forward is no more
    than that error.
    """
    truth = make_architecture(name, dtype=torch.bfloat16).float()
    theirs = make_architecture(name, dtype=torch.bfloat16)
    model = CausalModel(make_architecture(name, dtype=torch.bfloat16))
    samples = group(20, 9, 30, 4)

    def of(module: Any) -> Tensor:
        return torch.cat([true_logprobs(module, s.tokens.tolist())[s.trained[1:]] for s in samples])

    want = of(truth)
    with torch.no_grad():
        found = model.logprobs(Batch.pack(samples, share=True), temperature=1.0)[0].double()
    assert float((found - want).abs().mean()) < 2 * float((of(theirs) - want).abs().mean())


@pytest.mark.parametrize("name", KINDS)
def test_a_sample_does_not_change_when_its_neighbour_does(name: str) -> None:
    model = CausalModel(make_architecture(name))

    def second(seed: int) -> Tensor:
        rows = [tokens_of(17, seed, VOCABULARY), tokens_of(11, 1, VOCABULARY)]
        samples = [Sample.from_tokens(str(i), r, [True] * len(r)) for i, r in enumerate(rows)]
        with torch.no_grad():
            return model.logprobs(Batch.pack(samples), temperature=1.0)[0][-10:]

    torch.testing.assert_close(second(5), second(6), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", KINDS)
def test_gradients_of_answers_flow_into_the_state_of_the_prompt_that_they_share(name: str) -> None:
    """Packed with one prompt, packed without, and each sample alone: one gradient."""
    model = CausalModel(make_architecture(name, spread=2.0))
    samples = group(9, 5, 14, 1)
    alone = gradients(model, [Batch.pack([s]) for s in samples])
    for share in (False, True):
        assert relative(gradients(model, [Batch.pack(samples, share=share)]), alone) < 1e-5


@pytest.mark.parametrize("name", KINDS)
def test_layers_are_computed_again_with_the_states_they_had(name: str) -> None:
    """Two forwards, then their backward passes: each layer is run again under its own pack."""
    model = CausalModel(make_architecture(name, spread=2.0))
    batches = [Batch.pack(group(9, 5, 14), share=True), Batch.pack(group(4, 8), share=True)]

    def both() -> dict[str, Tensor]:
        model.module.zero_grad()
        losses = [model.logprobs(b, temperature=1.0)[0].sum() for b in batches]
        for loss in losses:
            loss.backward()
        return {n: p.grad.clone() for n, p in model.module.named_parameters() if p.grad is not None}

    want = both()
    model.module.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    model.recompute(True)
    assert relative(both(), want) < 1e-6


@pytest.mark.parametrize("name", KINDS)
def test_an_adapter_on_the_projections_of_a_mixer(name: str) -> None:
    """It is trained through the mixer's own projections, and a copy of the model has it too."""
    adapter = AdapterConfig(rank=4, targets="all-linear")
    module = add_adapter(make_architecture(name, spread=2.0), adapter, seed=0)
    with torch.no_grad():
        for part, p in module.named_parameters():
            if "lora_B" in part:
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(part))))
    model = CausalModel(module)
    assert model.mixers > 0 and model.verify() < 1e-5
    samples = group(9, 5, 14)
    found = gradients(model, [Batch.pack(samples, share=True)])
    assert relative(found, gradients(model, [Batch.pack([s]) for s in samples])) < 1e-5
    trained = [n for n in found if ".in_proj" in n and "lora_B" in n]
    assert trained and all(float(found[n].abs().max()) > 0 for n in trained)
    twin = CausalModel(copy.deepcopy(module))
    with torch.no_grad():
        for p in model.module.parameters():
            p.zero_()
        mean = twin.logprobs(Batch.pack(samples), temperature=1.0)[0].mean()
    assert float(mean) != pytest.approx(-torch.tensor(VOCABULARY).log().item(), abs=1e-3)


# ---- what is refused ----


@pytest.mark.parametrize("name", ["bamba", "jamba"])
def test_exact_mode_is_refused_where_a_recurrence_is_not_exact(name: str) -> None:
    with pytest.raises(
        InputError, match=r"model\.exact: the forward of this architecture contains"
    ):
        exact_proof.prove(CausalModel(make_architecture(name), exact=True))


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5"])
def test_engine_and_trainer_have_the_same_bits_in_exact_mode(name: str) -> None:
    """Prompts, tokens one by one, packs and answers that share a prompt; gradients are those of the
    chunks.
    """
    model = CausalModel(make_architecture(name), exact=True)
    exact_proof.prove(model)
    engine = NativeEngine(model, kv_gib=0.01)
    prompt = tokens_of(9, 1, VOCABULARY)
    said = asyncio.run(engine.generate(prompt, Sampling(7, ignore_eos=True), key=3, n=3))
    samples = []
    for i, one in enumerate(said):
        trained = [False] * len(prompt) + [True] * len(one.tokens)
        samples.append(Sample.from_tokens(str(i), [*prompt, *one.tokens], trained, group="g"))
    want = torch.tensor([one.logprobs for one in said])
    for share in (False, True):
        [batch] = pack(samples, 1000, share=share)
        got = model.logprobs(batch, temperature=1.0)[0]
        assert torch.equal(got.detach().view(3, -1), want)
    found = gradients(model, [Batch.pack(samples)])
    plain = CausalModel(copy.deepcopy(model.module))
    assert relative(found, gradients(plain, [Batch.pack(samples)])) < 1e-5


def test_slices_of_a_sequence_are_refused_by_name() -> None:
    model = CausalModel(make_architecture("lfm2"))
    model.slices = object()  # type: ignore[assignment]
    with pytest.raises(InputError, match=r"train\.sequence_parallel: 1 layers of Lfm2ForCausalLM"):
        model.states(Batch.pack(group(4, 2)))


# ---- kernels that may be missing ----


def test_nothing_is_said_of_kernels_that_our_forwards_do_not_use() -> None:
    """transformers wants a convolution to be installed that packs and the engine never call."""
    from transformers.integrations import hub_kernels

    heard: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    hub_kernels.logger.addHandler(listener)
    try:
        CausalModel(make_architecture("qwen3_5"))
        hub_kernels.logger.warning_once.cache_clear()
        true_logprobs(make_architecture("qwen3_5"), tokens_of(5, 1, VOCABULARY))
        hub_kernels.logger.warning("something else")
    finally:
        hub_kernels.logger.removeHandler(listener)
    assert heard == ["something else"]


def test_what_would_make_gated_delta_nets_faster_on_a_gpu_is_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    delta = make_config("qwen3_5")
    mamba = make_config("granite_hybrid")
    monkeypatch.setattr(mixers.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(mixers, "library_trains", lambda: False)
    monkeypatch.setattr(mixers, "HAS_TRITON", False)
    assert "flash-linear-attention" in (mixers.kernel_note(delta, "cuda:1") or "")
    assert mixers.kernel_choice(delta, "cuda:1") is None
    assert mixers.kernel_note(delta, "cpu") is None
    assert mixers.kernel_note(mamba, "cuda") is None, "it is a Mamba"
    monkeypatch.setattr(mixers, "HAS_TRITON", True)
    assert mixers.kernel_note(delta, "cuda") is None
    assert mixers.kernel_choice(delta, "cuda") == mixers.OURS
    assert mixers.kernel_choice(delta, "cpu") is None
    assert mixers.kernel_choice(mamba, "cuda") is None
    delta.linear_key_head_dim = 256
    assert mixers.kernel_note(delta, "cuda") == mixers.SLOW
    monkeypatch.setattr(mixers.importlib.util, "find_spec", lambda name: name == "fla")
    assert mixers.kernel_note(delta, "cuda") is None
    monkeypatch.setattr(mixers, "library_trains", lambda: True)
    assert mixers.kernel_choice(delta, "cuda") == mixers.THEIRS


# ---- the flow of states ----


def inputs(kind: str, tokens: int) -> tuple[Any, list[Tensor]]:
    draw = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    if kind == "state space":
        step = normal(tokens, 4).exp()
        parts = [normal(tokens, 4, 6), step, normal(tokens, 2, 5), normal(tokens, 2, 5)]
        return StateSpace(-normal(4).exp()), parts
    step = normal(tokens, 6).exp()
    parts = [normal(tokens, 6), step, normal(tokens, 5), normal(tokens, 5)]
    return SelectiveScan(-normal(6, 5).exp()), parts


@pytest.mark.parametrize("kind", ["state space", "selective scan"])
def test_chunks_pieces_and_tokens_are_one_recurrence(kind: str) -> None:
    """A sequence of 150 at once, in pieces beside another one, and token by token."""
    rule, parts = inputs(kind, 150)
    key = (0, 0, 0)
    whole = PackedStates([150], torch.device("cpu"))
    want = whole.scan(key, rule, parts)
    store = StateStore(whole.shapes, 3, torch.device("cpu"))
    store.parts[key].fill_(float("nan"))  # what others left there
    slots = torch.tensor([3, 1])
    pieces = []
    for begin, end in ((0, 64), (64, 67), (67, 140)):
        flow = PieceStates([end - begin, 5], store, slots, torch.tensor([begin > 0, False]))
        both = [torch.cat([x[begin:end], x[:5]]) for x in parts]
        out = flow.scan(key, rule, both)
        pieces.append(out[: end - begin])
        torch.testing.assert_close(out[end - begin :], want[:5], atol=1e-4, rtol=1e-4)
    for at in range(140, 150):
        rows = [x[[at, at]] for x in parts]
        pieces.append(RowStates(store, torch.tensor([3, 2])).scan(key, rule, rows)[:1])
    torch.testing.assert_close(torch.cat(pieces), want, atol=1e-4, rtol=1e-4)


def test_a_convolution_in_pieces_and_by_token() -> None:
    """Pieces shorter than its reach too: a tail is made of several of them."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(12, 3, generator=draw)
    weight = torch.randn(3, 4, generator=draw)
    bias = torch.randn(3, generator=draw)
    padded = torch.cat([torch.zeros(3, 3), x])
    want = sum(padded[i : i + 12] * weight[:, i] for i in range(4)) + bias
    key = (0, 0, 0)
    device = torch.device("cpu")
    packed = PackedStates([5, 2, 1, 4], device, [-1, 0, 0, 0])
    rows = torch.cat([x[:5], x[5:7], x[5:6], x[5:9]])
    found = packed.convolve(key, rows, weight, bias)
    torch.testing.assert_close(found, torch.cat([want[:7], want[5:6], want[5:9]]))
    store = StateStore(packed.shapes, 2, device)
    store.parts[key].fill_(float("nan"))
    pieces = []
    for begin, end in ((0, 2), (2, 3), (3, 9)):
        flow = PieceStates(
            [1, end - begin], store, torch.tensor([2, 1]), torch.tensor([False, begin > 0])
        )
        out = flow.convolve(key, torch.cat([x[:1], x[begin:end]]), weight, bias)
        torch.testing.assert_close(out[:1], want[:1])
        pieces.append(out[1:])
    for at in range(9, 12):
        pieces.append(RowStates(store, torch.tensor([1])).convolve(key, x[[at]], weight, bias))
    torch.testing.assert_close(torch.cat(pieces), want)


def test_a_convolution_and_its_activation_are_what_they_are_apart() -> None:
    """To the bit, in a pack with a shared prompt, in pieces and by token."""
    draw = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=draw) for shape in ((9, 6), (6, 4), (6,)))
    key = (0, 0, 0)
    device = torch.device("cpu")

    def packed() -> PackedStates:
        return PackedStates([5, 3, 1], device, [-1, 0, 0])

    whole = packed()
    before = whole.convolve(key, x, weight, bias)
    store = StateStore(whole.shapes, 3, device)

    def piece() -> PieceStates:
        return PieceStates([4, 5], store, torch.tensor([2, 1]), torch.tensor([False, False]))

    pieces = piece().convolve(key, x, weight, bias)
    assert torch.equal(pieces[:4], before[:4])
    for name, own in (("silu", torch.nn.functional.silu), ("gelu", torch.nn.functional.gelu)):
        assert torch.equal(packed().convolve(key, x, weight, bias, name), own(before))
        assert torch.equal(piece().convolve(key, x, weight, bias, name), own(pieces))
        held = store.parts[key].clone()
        rows = RowStates(store, torch.tensor([3, 1]))
        plain = rows.convolve(key, x[:2], weight, bias)
        store.parts[key].copy_(held)
        assert torch.equal(rows.convolve(key, x[:2], weight, bias, name), own(plain))
