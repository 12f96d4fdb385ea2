from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reinforge.algorithms.corrections import mis, tis
from reinforge.algorithms.kl import k2, k3
from reinforge.algorithms.loss import NLLLoss, PolicyLoss
from reinforge.algorithms.names import NAMES
from reinforge.algorithms.reduce import REDUCERS, sequence_mean, sequence_sum, token_mean
from reinforge.algorithms.surrogates import ppo_clip
from reinforge.algorithms.table import TABLE, build, describe
from reinforge.core.backend import Loss, TrainedTokens
from reinforge.core.batch import Batch, Totals
from reinforge.core.errors import InputError
from reinforge.core.sample import Sample

STREAMS = ("old", "behaviour", "reference", "advantages")


def random_rows(lengths: list[int], seed: int = 0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def noise(n: int, scale: float) -> Tensor:
        return scale * torch.randn(n, generator=generator, dtype=torch.float64)

    rows = []
    for n in lengths:
        logprobs = -noise(n, 1.0).abs() - 0.1
        rows.append({"logprobs": logprobs, "entropy": noise(n, 1.0).abs(), "old": logprobs + noise(n, 0.3),
                     "behaviour": logprobs + noise(n, 0.3), "reference": logprobs + noise(n, 0.3),
                     "advantages": noise(1, 1.0).expand(n)})  # fmt: skip
    return rows


def view(rows: list[dict[str, Tensor]], leaves: list[Tensor]) -> TrainedTokens:
    sizes = torch.tensor([len(leaf) for leaf in leaves])
    owner = torch.repeat_interleave(torch.arange(len(rows)), sizes)
    streams = {name: torch.cat([row[name] for row in rows]) for name in STREAMS if name in rows[0]}
    return TrainedTokens(torch.cat(leaves), torch.cat([row["entropy"] for row in rows]), owner, sizes, sizes[owner], streams)


def run(
    loss: Loss, rows: list[dict[str, Tensor]], cut: list[list[int]], max_length: int = 16
) -> tuple[float, list[Tensor], dict[str, float]]:
    """Loss, gradient of each row and metrics, with the rows cut into micro-batches and combined as a backend does."""
    leaves = [row["logprobs"].clone().requires_grad_() for row in rows]
    sizes = [len(leaf) for leaf in leaves]
    totals = Totals(sum(sizes), sum(n > 0 for n in sizes), max_length, {})
    total, combined = 0.0, {}
    for part in cut:
        value, metrics = loss(view([rows[i] for i in part], [leaves[i] for i in part]), totals)
        if value.requires_grad:
            value.backward()
        total += value.item()
        for name, number in metrics.items():
            join = max if name.endswith("/max") else min if name.endswith("/min") else lambda a, b: a + b
            combined[name] = join(combined[name], number.item()) if name in combined else number.item()
    return total, [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves], combined


def full_loss(reduce: str = "token_mean", **kw) -> PolicyLoss:
    options = {"correction": partial(tis, cap=1.2), "kl": k3, "kl_coefficient": 0.1, "entropy_coefficient": 0.01, "off_policy": True}
    return PolicyLoss(partial(ppo_clip, low=0.2, high=0.28), REDUCERS[reduce], **{**options, **kw})


@pytest.mark.parametrize("reduce", list(REDUCERS))
def test_whole_loss_against_a_plain_loop(reduce: str) -> None:
    """Every term at once: clip, truncated weights, weighted KL, entropy; token by token in Python floats."""
    rows = random_rows([20, 5, 12, 3])
    expected, kl_sum, clipped = 0.0, 0.0, 0
    n_tokens, n_rows = 40, 4
    for row in rows:
        length = len(row["logprobs"])
        weight = {
            "token_mean": 1 / n_tokens,
            "sequence_mean": 1 / (length * n_rows),
            "sequence_sum": 1 / n_rows,
            "fixed_length": 1 / (16 * n_rows),
        }
        for t in range(length):
            logp, old, behaviour, ref, a, h = (row[k][t].item() for k in ("logprobs", *STREAMS, "entropy"))
            ratio, w = math.exp(logp - old), min(math.exp(old - behaviour), 1.2)
            surrogate = -min(ratio * a, min(max(ratio, 0.8), 1.28) * a)
            kl = math.exp(ref - logp) - (ref - logp) - 1
            expected += weight[reduce] * (w * surrogate + 0.1 * w * ratio * kl - 0.01 * h)
            kl_sum += kl
            clipped += (a > 0 and ratio > 1.28) or (a < 0 and ratio < 0.8)
    total, _, metrics = run(full_loss(reduce), rows, [[0, 1, 2, 3]])
    assert total == pytest.approx(expected, abs=1e-12) and metrics["policy/loss"] == pytest.approx(expected, abs=1e-12)
    assert (
        metrics["policy/kl"] == pytest.approx(kl_sum / 40)
        and metrics["policy/clip_fraction"] == pytest.approx(clipped / 40)
        and clipped > 3
    )
    assert metrics["policy/entropy"] == pytest.approx(torch.cat([r["entropy"] for r in rows]).mean().item())
    everything = {k: torch.cat([r[k] for r in rows]) for k in rows[0]}
    assert metrics["policy/ratio/max"] == pytest.approx((everything["logprobs"] - everything["old"]).max().exp().item())
    delta = (everything["old"] - everything["behaviour"]).abs()
    assert metrics["mismatch/mean"] == pytest.approx(delta.mean().item()) and metrics["mismatch/max"] == pytest.approx(delta.max().item())
    assert metrics["mismatch/truncated"] == pytest.approx(
        ((everything["old"] - everything["behaviour"]).exp() > 1.2).double().mean().item()
    )


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(list(REDUCERS)))
def test_gradient_does_not_depend_on_the_cut(data: st.DataObject, reduce: str) -> None:
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any))
    order = data.draw(st.permutations(range(len(lengths))))
    edges = sorted(data.draw(st.sets(st.integers(1, len(lengths)), max_size=len(lengths)))) + [len(lengths)]
    cut = [order[a:b] for a, b in zip([0, *edges], edges, strict=False) if b > a]
    rows = random_rows(lengths)
    whole, whole_gradient, whole_metrics = run(full_loss(reduce), rows, [list(range(len(lengths)))])
    total, gradient, metrics = run(full_loss(reduce), rows, cut)
    assert total == pytest.approx(whole, abs=1e-12) and metrics == pytest.approx(whole_metrics, abs=1e-12)
    for a, b in zip(gradient, whole_gradient, strict=True):
        assert torch.allclose(a, b, atol=1e-14, rtol=0)


def test_mean_of_micro_batch_means_would_be_wrong() -> None:
    """What the totals prevent: on lengths 20, 5, 12, 3 the mean of local token means has a very different gradient."""
    rows = random_rows([20, 5, 12, 3])
    _, right, _ = run(NLLLoss(), rows, [[0, 1], [2], [3]])
    assert torch.cat(right).tolist() == pytest.approx([-1 / 40] * 40)
    wrong = torch.cat([torch.full((n,), -1 / (3 * local)) for n, local in ((20, 25), (5, 25), (12, 12), (3, 3))])
    assert (wrong - torch.cat(right)).norm() / torch.cat(right).norm() > 0.9


def test_gradient_by_finite_differences() -> None:
    """Without the entropy's own path and with the KL unweighted, so that nothing that is detached moves with the log-probs."""
    rows = random_rows([4, 2, 5], seed=1)
    totals = Totals(11, 3, 16, {})
    for kl in (k2, k3):
        loss = full_loss("sequence_mean", kl=kl, kl_importance=False)
        leaf = torch.cat([r["logprobs"] for r in rows]).requires_grad_()
        assert torch.autograd.gradcheck(lambda x, f=loss: f(view(rows, list(x.split([4, 2, 5]))), totals)[0], leaf)


def test_before_the_first_update_everything_is_neutral() -> None:
    """No old stream: ratio 1, nothing clipped, KL 0 against an equal reference, and the gradient is the policy gradient."""
    rows = [
        {k: v for k, v in r.items() if k != "old"} | {"reference": r["logprobs"], "behaviour": r["logprobs"]} for r in random_rows([3, 4])
    ]
    total, gradient, metrics = run(PolicyLoss(ppo_clip, token_mean, kl_coefficient=0.5, correction=mis), rows, [[0], [1]])
    advantages = torch.cat([r["advantages"] for r in rows])
    assert torch.allclose(torch.cat(gradient), -advantages / 7, atol=1e-15) and total == pytest.approx(-advantages.mean().item())
    assert metrics["policy/ratio"] == pytest.approx(1) and metrics["policy/ratio/max"] == 1
    assert metrics["policy/clip_fraction"] == metrics["policy/kl"] == metrics["mismatch/max"] == metrics["mismatch/dropped"] == 0


def test_a_dropped_token_has_no_gradient() -> None:
    rows = [{"logprobs": torch.tensor([-1.0, -1.0], dtype=torch.float64), "entropy": torch.zeros(2), "behaviour": torch.tensor([-3.0, -1.0]),
             "reference": torch.tensor([-2.0, -2.0]), "advantages": torch.ones(2)}]  # fmt: skip
    _, gradient, metrics = run(PolicyLoss(ppo_clip, sequence_sum, correction=partial(mis, cap=2.0), kl_coefficient=0.1), rows, [[0]])
    assert gradient[0][0] == 0 and gradient[0][1] != 0 and metrics["mismatch/dropped"] == 0.5


def test_off_policy_kl_is_weighted_by_the_ratio() -> None:
    """Tabular: every token of a five-word vocabulary once, with reducer weights p_old: the expectation under the old policy."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1, -0.4], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([0.0, -0.4, 1.2, 0.5, 0.2], dtype=torch.float64).log_softmax(0)
    reference = torch.tensor([-0.2, 0.5, 0.4, -1.5, 0.3], dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    streams = {"old": old, "reference": reference, "advantages": torch.zeros(5, dtype=torch.float64)}
    one = torch.ones(5, dtype=torch.int64)
    for importance in (True, False):
        loss = PolicyLoss(ppo_clip, lambda tokens, totals: old.exp(), kl=k2, kl_coefficient=1.0, kl_importance=importance)
        value, _ = loss(TrainedTokens(policy, None, one, one, one, streams), Totals(5, 5, 1, {}))
        (gradient,) = torch.autograd.grad(value, logits, retain_graph=True)
        assert torch.allclose(gradient, exact, atol=1e-12) is importance


def test_zero_variance_group_has_exactly_zero_gradient() -> None:
    samples = [Sample.from_tokens(f"s{i}", [1] * (i + 3), [False] + [True] * (i + 2), group="g", reward=0.1) for i in range(3)]
    batch = Batch.pack(samples)
    algorithm = build("grpo", max_new_tokens=8)
    algorithm.advantages([batch])
    leaf = torch.randn(batch.n_trained, requires_grad=True)
    lengths = batch.trained_lengths()
    loss, _ = algorithm.loss(TrainedTokens(leaf, None, batch.sequence, lengths, lengths[batch.sequence], batch.streams), Totals.of([batch]))
    loss.backward()
    assert loss == 0 and leaf.grad is not None and leaf.grad.tolist() == [0.0] * batch.n_trained


@pytest.mark.parametrize("loss", [full_loss(), full_loss("sequence_mean"), NLLLoss()], ids=["token", "sequence", "nll"])
def test_a_micro_batch_without_trained_tokens(loss: Loss) -> None:
    total, _, _ = run(loss, random_rows([0, 0]), [[0, 1]])
    assert total == 0.0
    mixed, gradient, metrics = run(loss, random_rows([0, 3]), [[0], [1]])
    assert math.isfinite(mixed) and gradient[1].abs().min() > 0 and all(math.isfinite(v) for v in metrics.values())


def test_nll() -> None:
    rows = random_rows([2, 3])
    everything = torch.cat([r["logprobs"] for r in rows])
    total, gradient, metrics = run(NLLLoss(), rows, [[0], [1]])
    assert total == metrics["sft/loss"] == pytest.approx(-everything.mean().item())
    assert torch.cat(gradient).tolist() == pytest.approx([-0.2] * 5)
    total, _, metrics = run(NLLLoss(sequence_mean), rows, [[0], [1]])
    assert total == pytest.approx(-sum(r["logprobs"].mean().item() for r in rows) / 2)
    assert metrics["sft/nll"] == pytest.approx(-everything.mean().item())


def test_needs() -> None:
    assert build("grpo").loss.needs == frozenset()
    assert build("grpo", updates=2).loss.needs == {"old"}
    assert build("grpo", kl_coefficient=0.1).loss.needs == {"reference"}
    assert build("grpo", entropy=0.1).loss.entropy_gradient and not build("grpo").loss.entropy_gradient
    assert all(isinstance(build(name).loss, Loss) for name in NAMES)


def test_rows_of_the_table() -> None:
    assert tuple(TABLE) == NAMES == tuple(entry["name"] for entry in describe())
    grpo, dr, dapo, sft = (build(name, max_new_tokens=100, clip_high=None) for name in ("grpo", "dr_grpo", "dapo", "sft"))
    clips = [(a.options.clip_low, a.options.clip_high, a.options.scale, a.options.reduce) for a in (grpo, dr, dapo)]
    assert clips == [(0.2, 0.2, "group", "sequence_mean"), (0.2, 0.2, "none", "fixed_length"), (0.2, 0.28, "group", "token_mean")]
    assert [(a.dynamic_sampling, a.overlong_buffer) for a in (grpo, dr, dapo)] == [(False, 0), (False, 0), (True, 20)]
    assert sft.kind == "sft" and sft.advantage is None
    own = build(
        "dapo", max_new_tokens=100, clip_high=0.5, overlong_buffer=0, dynamic_sampling=False, reduce="sequence_sum", std="population"
    )
    assert own.options.clip_high == 0.5 and own.overlong_buffer == 0 and not own.dynamic_sampling
    assert next(e for e in describe() if e["name"] == "dapo") == {
        "name": "dapo", "kind": "rl", "advantage": "group_relative", "surrogate": "ppo_clip", "correction": "none", "reduce": "token_mean",
        "defaults": "clip_high=0.28, dynamic_sampling=True, overlong_buffer=max_new_tokens/5", "paper": "2503.14476",
    }  # fmt: skip


def test_options_reach_the_functions() -> None:
    rows = random_rows([6, 6])
    tight, _, _ = run(build("grpo", clip_low=0.01, clip_high=0.01).loss, rows, [[0, 1]])
    wide, _, _ = run(build("grpo", clip_low=0.99, clip_high=9.0).loss, rows, [[0, 1]])
    assert tight != pytest.approx(wide)
    expected, _, _ = run(PolicyLoss(partial(ppo_clip, dual=1.1), sequence_mean, correction=partial(mis, cap=1.05)), rows, [[0, 1]])
    assert run(build("grpo", clip_dual=1.1, correction="mis", cap=1.05).loss, rows, [[0, 1]])[0] == pytest.approx(expected)


def test_users_own_functions() -> None:
    def advantage(rollouts, options):
        return rollouts.rewards[rollouts.sequence] * options.eps

    def surrogate(logprobs, old, advantages, sequence):
        return -3 * advantages * logprobs, {}

    algorithm = build("grpo", advantage=advantage, surrogate=surrogate, eps=0.5, reduce="sequence_sum")
    batch = Batch.pack([Sample.from_tokens("a", [1, 2, 3], [False, True, True], reward=4.0)])
    algorithm.advantages([batch])
    assert batch.streams["advantages"].tolist() == [2.0, 2.0] and batch.streams["advantages"].dtype == torch.float32
    leaf = torch.tensor([-1.0, -2.0], requires_grad=True)
    two = torch.tensor([2, 2])
    loss, _ = algorithm.loss(TrainedTokens(leaf, None, batch.sequence, two[:1], two, batch.streams), Totals.of([batch]))
    assert loss.item() == pytest.approx(18.0)


def test_notes_and_errors() -> None:
    assert "zero expected gradient" in build("grpo", kl_coefficient=0.1, kl_estimator="k1").notes[0]
    assert build("grpo", kl_coefficient=0.1, kl_estimator="k2").notes == () == build("grpo", kl_estimator="k1").notes
    with pytest.raises(InputError, match="Did you mean grpo"):
        build("grpoo")
    with pytest.raises(InputError, match=r"algorithm.surrogate.*ppo_clip"):
        build("grpo", surrogate="ppo")
    with pytest.raises(InputError, match="dual clip must be above 1"):
        build("grpo", clip_dual=0.5)
    with pytest.raises(InputError, match="more than max_new_tokens"):
        build("dapo", max_new_tokens=10, overlong_buffer=11)
