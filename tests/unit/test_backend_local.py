"""The local backend beyond the contract: metrics, budgets, memory of what it was given, and refusals."""

from __future__ import annotations

import pytest
import torch

from reinforge.algorithms.loss import NLLLoss, PolicyLoss
from reinforge.algorithms.reduce import token_mean
from reinforge.algorithms.surrogates import ppo_clip
from reinforge.backends.local import LocalBackend
from reinforge.backends.microbatch import auto_budget, combine, trained_tokens
from reinforge.core.batch import Batch, Totals, pack
from reinforge.core.errors import InputError
from toys import make_model, make_samples, parameters, train_config


def make_backend(**changes):  # type: ignore[no-untyped-def]
    return LocalBackend(make_model(), train_config(**changes), total_steps=10)


def test_combine_sums_and_takes_extremes() -> None:
    t = torch.tensor
    parts = [{"a": t(1.0), "x/max": t(3.0), "x/min": t(-1.0)}, {"a": t(2.5), "x/max": t(1.0), "x/min": t(0.0), "late": t(4.0)}]
    assert combine(parts) == {"a": 3.5, "x/max": 3.0, "x/min": -1.0, "late": 4.0} and combine([]) == {}


def test_a_loss_sees_trained_tokens_only() -> None:
    """Flat vectors over the trained tokens, lengths of whole episodes, the behaviour log-probs of exactly those tokens."""
    samples = make_samples((9, 5, 7))
    samples[2] = samples[2].with_(episode=samples[0].episode, group=samples[0].group)  # one episode in two rows
    totals = Totals.of(pack(samples, 10_000))
    batch = Batch.pack(samples)
    seen = trained_tokens(make_model(), batch, NLLLoss(), totals, 1.0)
    counts = [7, 3, 5]
    assert seen.lengths.tolist() == counts and seen.sequence.tolist() == [0] * 7 + [1] * 3 + [2] * 5
    assert seen.episode_tokens.tolist() == [12] * 7 + [3] * 3 + [12] * 5 and totals.sequences == 2 and totals.tokens == 15
    assert torch.equal(seen.streams["behaviour"], torch.cat([s.logprobs[s.trained] for s in samples]))
    assert seen.entropy is None and len(seen.logprobs) == 15


def test_entropy_is_the_distributions_own() -> None:
    samples, model = make_samples(), make_model()
    batch = Batch.pack(samples)
    _, entropy = model.logprobs(batch, temperature=0.7, entropy=True)
    with torch.no_grad():
        from reinforge.models.attention import Packed

        hidden = model.hidden(batch.tokens, batch.positions, Packed(batch.lengths, batch.starts))
        logp = (model.logits(hidden[batch.targets - 1]).double() / 0.7).log_softmax(-1)
    assert entropy is not None
    torch.testing.assert_close(entropy.double(), -(logp.exp() * logp).sum(-1), atol=1e-5, rtol=0)


def test_clipping_shortens_the_gradient_and_keeps_its_direction() -> None:
    """With plain moments (betas 0) Adam hides the length: so look at the first moment after one step."""
    samples = make_samples()
    moments = []
    for limit in (0.0, 0.01):
        backend = make_backend(max_grad_norm=limit)
        batches = pack(samples, 64)
        backend.forward_backward(batches, NLLLoss(), Totals.of(batches))
        norm = backend.step()["train/grad_norm"]
        moments.append(torch.cat([t.flatten() for n, t in sorted(backend.optimizer.tensors().items()) if n.endswith("exp_avg")]) / 0.1)
    assert norm > 0.1  # reported as it was before
    assert float(moments[0].norm()) == pytest.approx(norm, rel=1e-5) and float(moments[1].norm()) == pytest.approx(0.01, rel=1e-5)
    torch.testing.assert_close(moments[1] / 0.01, moments[0] / norm, atol=1e-6, rtol=1e-4)


def test_gradients_accumulate_until_the_step_and_no_longer() -> None:
    backend, samples = make_backend(), make_samples()
    batches = pack(samples, 64)
    totals = Totals.of(batches)
    backend.forward_backward(batches, NLLLoss(), totals)
    once = float(backend.optimizer.gradient_norm())
    backend.forward_backward(batches, NLLLoss(), totals)
    assert float(backend.optimizer.gradient_norm()) == pytest.approx(2 * once, rel=1e-5)
    assert backend.step()["train/grad_norm"] == pytest.approx(2 * once, rel=1e-5)
    assert float(backend.optimizer.gradient_norm()) == 0.0


def test_a_step_goes_downhill_and_up_the_advantage() -> None:
    """Sign of the whole pipeline: SFT lowers the loss, a positive advantage makes its tokens likelier, a negative one unlikelier."""
    samples = make_samples((12, 12))
    backend = make_backend(learning_rate=1e-3)
    batches = pack(samples, 64)
    losses = []
    for _ in range(5):
        losses.append(backend.forward_backward(batches, NLLLoss(), Totals.of(batches))["sft/loss"])
        backend.step()
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.05
    signed = [s.with_(streams={"advantages": torch.full((12,), a)}) for s, a in zip(samples, (1.0, -1.0), strict=True)]
    batches, backend = pack(signed, 64), make_backend(learning_rate=1e-3)
    backend.annotate(batches, frozenset({"old"}))
    before = batches[0].streams["old"].clone()
    backend.forward_backward(batches, PolicyLoss(ppo_clip, token_mean), Totals.of(batches))
    backend.step()
    backend.annotate(batches, frozenset({"old"}))
    change = batches[0].streams["old"] - before
    assert float(change[batches[0].sequence == 0].mean()) > 0.005 and float(change[batches[0].sequence == 1].mean()) < -0.005


def test_learning_rate_zero_changes_nothing() -> None:
    backend, samples = make_backend(learning_rate=0.0), make_samples()
    before = parameters(backend.model.module)
    batches = pack(samples, 64)
    backend.forward_backward(batches, NLLLoss(), Totals.of(batches))
    backend.step()
    after = parameters(backend.model.module)
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_a_state_of_another_model_is_refused() -> None:
    small, tied = make_backend(), LocalBackend(make_model(tie_word_embeddings=True), train_config(), total_steps=1)
    with pytest.raises(InputError, match=r"another model: 1 parameters differ, e.g. lm_head"):
        tied.load(small.state())
    wide = LocalBackend(make_model(intermediate_size=96), train_config(), total_steps=1)
    with pytest.raises(InputError, match="mlp"):
        wide.load(small.state())


def test_auto_budget_is_recorded_and_an_explicit_one_wins() -> None:
    first, second = make_backend(), make_backend()
    assert first.budget == auto_budget(first.model) == 4096
    first.budget = 1024  # what another moment's free memory gave
    second.load(first.state())
    assert second.budget == 1024
    explicit = make_backend(tokens_per_microbatch=77)
    explicit.load(first.state())
    assert explicit.budget == 77


def test_reference_and_old_are_filled_only_when_asked() -> None:
    backend, batches = make_backend(), pack(make_samples(), 64)
    backend.annotate(batches, frozenset())
    assert set(batches[0].streams) == {"behaviour", "advantages"} and backend.frozen is None
