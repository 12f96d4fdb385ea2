"""Packs that are split over ranks (Ulysses) and matrices that are: log-probs, losses and gradients
are those of one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from helpers.split_backends import (
    LENGTHS,
    attributes_pass,
    both,
    load,
    one_pass,
    policy_loss,
    summed,
)
from helpers.toys import gradients, make_samples, relative
from reinforge.algorithms.losses.supervised import NLLLoss
from reinforge.algorithms.losses.value import ValueLoss
from reinforge.algorithms.parts.surrogates import gspo
from reinforge.backends.distributed.ranks import Ranks
from reinforge.core.batch import Batch, Totals, pack
from reinforge.models import checkpointing
from reinforge.models.checkpointing import InputsOnHost, WaitingInput


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks.open(2, "cpu") as opened:
        yield opened


CASES = {
    "llama": ("full", "llama", {}),
    "one key head for two ranks": ("full", "llama", {"num_key_value_heads": 1}),
    "key heads that do not divide": (
        "full",
        "llama",
        {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3},
    ),
    "windows and caps": ("full", "gemma2", {}),
    "adapter": ("lora", "qwen3", {}),
    "checkpointed": ("checkpointed", "qwen3", {}),
    "tied": ("full", "qwen2", {"tie_word_embeddings": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_split_pack_is_the_whole_one(ranks: Ranks, case: str) -> None:
    """Uneven packs, shared prompts or none, and one pack of fewer tokens than would fill two slices
    well.
    """
    kind, arch, changes = CASES[case]
    local, split = both(ranks, partial(load, kind, arch, **changes), sequence_parallel=2)
    assert split.parallel.data_parallel == 1 and split.worker.model.slices is not None
    samples = make_samples(LENGTHS)
    samples[4] = samples[4].with_(trained=torch.zeros_like(samples[4].trained))
    for i in (1, 2, 3):  # one prompt for the group, of another length than the slices
        samples[i] = samples[i].with_(
            tokens=torch.cat((samples[0].tokens[:2], samples[i].tokens[2:]))
        )
    for share, budget, loss in (
        (True, 10_000, policy_loss()),
        (False, 40, policy_loss(partial(gspo, low=0.2, high=0.2))),
        (True, 1, policy_loss()),
    ):
        want, metrics, old, size = one_pass(local, samples, budget, loss, share)
        found, again, mine, norm_here = one_pass(split, samples, budget, loss, share)
        assert float((mine - old).abs().max()) < 2e-5
        assert relative(found, want) < 1e-6, (share, budget)
        assert again == pytest.approx(metrics, rel=1e-4, abs=1e-6) and norm_here == pytest.approx(
            size, rel=1e-5
        )
    split.close()


@pytest.mark.parametrize("split", [{}, {"sequence_parallel": 2}])
def test_inputs_of_layers_that_wait_on_the_host(
    ranks: Ranks, split: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of ranks do, and no gradient changes. Rank 0 is in this process."""
    monkeypatch.setattr(InputsOnHost, "devices", InputsOnHost.devices)  # put back afterwards
    monkeypatch.setattr(checkpointing, "LEAST", checkpointing.LEAST)
    taken: list[WaitingInput] = []
    take = WaitingInput.take

    def counted(waiting: WaitingInput) -> torch.Tensor:
        taken.append(waiting)
        return take(waiting)

    monkeypatch.setattr(WaitingInput, "take", counted)
    local, cut = both(ranks, partial(load, "on host", "qwen3"), **split)
    samples = make_samples(LENGTHS)
    want, metrics, _, size = one_pass(local, samples, 10_000, policy_loss(), True)
    alone = len(taken)
    found, again, _, norm_here = one_pass(cut, samples, 10_000, policy_loss(), True)
    assert alone == len(taken) - alone == len(local.model.layers)
    assert relative(found, want) < 1e-6
    assert again == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    assert norm_here == pytest.approx(size, rel=1e-5)
    cut.close()


def test_layers_that_keep_state(ranks: Ranks) -> None:
    """Each rank computes whole packs."""
    local, cut = both(ranks, partial(load, "checkpointed", "qwen3_5"))
    assert local.model.mixers == 1
    samples = make_samples(LENGTHS)
    for i in (1, 2, 3):
        samples[i] = samples[i].with_(
            tokens=torch.cat((samples[0].tokens[:2], samples[i].tokens[2:]))
        )
    want, metrics, old, size = one_pass(local, samples, 40, policy_loss(), True)
    found, again, mine, norm_here = one_pass(cut, samples, 40, policy_loss(), True)
    assert relative(found, want) < 2e-6 and float((mine - old).abs().max()) < 2e-5
    assert again == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    assert norm_here == pytest.approx(size, rel=1e-5)
    cut.close()


def test_a_pack_of_fewer_tokens_than_ranks(ranks: Ranks) -> None:
    """Three tokens: slices of two and one, and all that is trained is predicted by the first."""
    local, split = both(ranks, partial(load, "full"), sequence_parallel=2)
    samples = make_samples((2,), prompt=1)
    want, metrics, *_ = one_pass(local, samples, 10, NLLLoss(), False)
    found, again, *_ = one_pass(split, samples, 10, NLLLoss(), False)
    assert relative(found, want) < 1e-6 and again == pytest.approx(metrics, rel=1e-5)
    split.close()


def test_values_of_a_split_pack(ranks: Ranks) -> None:
    """A critic reads before each token, a reward model at it, and truncated samples at their end:
    each on the rank that has the row.
    """
    local, split = both(
        ranks, partial(load, "critic"), False, sequence_parallel=2, learning_rate=1e-2
    )
    samples = make_samples(LENGTHS)
    loss = ValueLoss(0.2)
    for _ in range(3):
        found = []
        for backend in (local, split):
            batches = pack(samples, 40)
            backend.annotate(batches, frozenset({"values", "values_after"}))
            for batch in batches:
                batch.streams["returns"] = batch.streams["advantages"]
            metrics = backend.forward_backward(batches, loss, Totals.of(batches, 32))
            grads = (
                gradients(backend) if backend is local else split.ranks.call(split.id, summed)[0]
            )
            streams = torch.cat(
                [
                    torch.cat((b.streams["values"], b.streams["values_after"], b.bootstrap))
                    for b in batches
                ]
            )  # type: ignore[arg-type]
            found.append((grads, {**metrics, **backend.step().metrics()}, streams))
        assert relative(found[1][0], found[0][0]) < 1e-4 and found[1][1] == pytest.approx(
            found[0][1], rel=1e-3, abs=1e-6
        )
        assert torch.allclose(found[0][2], found[1][2], atol=1e-4)
    assert float(found[0][2].abs().max()) > 1e-3
    split.close()


def test_several_heads_on_a_split_pack(ranks: Ranks) -> None:
    local, split = both(
        ranks, partial(load, "attributes"), False, sequence_parallel=2, learning_rate=1e-2
    )
    for _ in range(3):
        want, said = attributes_pass(local)
        found, again = attributes_pass(split)
        assert found == pytest.approx(want, rel=1e-3, abs=1e-6)
        assert torch.allclose(again, said, atol=1e-4)
    assert float(said.abs().max()) > 1e-3
    split.close()


def test_noise_and_collision_on_a_split_pack(ranks: Ranks) -> None:
    local, split = both(ranks, partial(load, "full"), False, sequence_parallel=2, neftune=5.0)
    samples = make_samples(LENGTHS)
    want, metrics, *_ = one_pass(local, samples, 50, NLLLoss(), False)
    found, again, *_ = one_pass(split, samples, 50, NLLLoss(), False)
    assert relative(found, want) < 1e-6 and again == pytest.approx(metrics, rel=1e-5)
    one = Batch.pack(samples)
    two = Batch.pack(samples)
    local.annotate([one], frozenset({"collision"}))
    split.annotate([two], frozenset({"collision"}))
    assert torch.allclose(one.streams["collision"], two.streams["collision"], atol=1e-5)
    split.close()


def test_steps_of_split_packs(ranks: Ranks) -> None:
    """Three steps and a state that continues in one process."""
    local, split = both(
        ranks, partial(load, "full"), sequence_parallel=2, learning_rate=1e-3, max_grad_norm=0.5
    )
    for seed in range(3):
        rows = []
        for backend in (local, split):
            batches = pack(make_samples(LENGTHS, seed), 64)
            backend.annotate(batches, policy_loss().needs)
            rows.append(
                {
                    **backend.forward_backward(batches, policy_loss(), Totals.of(batches, 32)),
                    **backend.step().metrics(),
                }
            )
        assert rows[1] == pytest.approx(rows[0], rel=2e-3, abs=1e-5)
    a = local.state()
    b = split.state()
    exp = [k for k in a.tensors if k.endswith("exp_avg")]
    assert (
        a.tensors.keys() == b.tensors.keys()
        and relative({k: b.tensors[k] for k in exp}, {k: a.tensors[k] for k in exp}) < 1e-3
    )
    split.close()


# ---- tensor parallel ----

CUTS = {
    "llama": ("full", "llama", {}),
    "norms of heads": ("full", "qwen3", {}),
    "biases": ("full", "qwen2", {"tie_word_embeddings": True}),
    "windows and caps": ("full", "gemma2", {}),
    "checkpointed": ("checkpointed", "llama", {}),
    "value head": ("head", "llama", {}),
}


@pytest.mark.parametrize("case", CUTS)
def test_cut_matrices_compute_the_whole_ones(ranks: Ranks, case: str) -> None:
    kind, arch, changes = CUTS[case]
    local, cut = both(ranks, partial(load, kind, arch, **changes), tensor_parallel=2)
    assert cut.parallel.data_parallel == 1 and cut.worker.split
    name = next(iter(cut.worker.split))
    assert (
        cut.worker.optimizer.parameters[name].numel() * 2
        == dict(local.model.module.named_parameters())[name].numel()
    )
    samples = make_samples(LENGTHS)
    loss = policy_loss()
    want, metrics, _, size = one_pass(local, samples, 10_000, loss, True)
    for budget in (10_000, 40):
        found, again, _, norm_here = one_pass(cut, samples, budget, loss, True)
        assert relative(found, want) < 1e-6
        assert again == pytest.approx(metrics, rel=1e-4, abs=1e-6) and norm_here == pytest.approx(
            size, rel=1e-5
        )
    start = dict(load(kind, arch, **changes).module.named_parameters())
    whole = {
        k.removeprefix("model/"): t
        for k, t in cut.state().tensors.items()
        if k.startswith("model/")
    }
    assert whole.keys() == start.keys() and all(torch.equal(whole[k], start[k]) for k in start)
    for seed in range(2):
        for backend in (local, cut):
            batches = pack(make_samples(LENGTHS, seed), 64)
            backend.annotate(batches, loss.needs)
            backend.forward_backward(batches, loss, Totals.of(batches, 32))
            backend.step()
    a = local.state()
    b = cut.state()
    exp = [k for k in a.tensors if k.endswith("exp_avg")]
    assert relative({k: b.tensors[k] for k in exp}, {k: a.tensors[k] for k in exp}) < 1e-3
    served = dict(cut.weights().module.named_parameters())
    assert all(torch.equal(served[k], b.tensors[f"model/{k}"]) for k in served)
    cut.load(b)
    again_state = cut.state()
    assert all(torch.equal(again_state.tensors[k], b.tensors[k]) for k in b.tensors)
    cut.close()


# ---- host memory ----


@pytest.mark.parametrize("kind", ["bfloat16", "checkpointed", "head"])
def test_weights_in_host_memory(ranks: Ranks, kind: str) -> None:
    """Whatever lies where: the same bits, also through a reference that is in host memory too."""
    _, plain = both(ranks, partial(load, kind), learning_rate=1e-2)
    _, moved = both(ranks, partial(load, kind), learning_rate=1e-2, offload_weights=True)
    # where tokens go, also between passes, when its weights are elsewhere
    assert moved.worker.model.computes_on == moved.worker.member.device
    for seed in range(2):
        told = []
        for backend in (plain, moved):
            batches = pack(make_samples(LENGTHS, seed), 64)
            backend.annotate(batches, policy_loss().needs)
            told.append(
                {
                    **backend.forward_backward(batches, policy_loss(), Totals.of(batches, 32)),
                    **backend.step().metrics(),
                }
            )
        assert told[0] == told[1]
    a = plain.state()
    b = moved.state()
    assert all(torch.equal(a.tensors[k], b.tensors[k]) for k in a.tensors)
    plain.close(), moved.close()
