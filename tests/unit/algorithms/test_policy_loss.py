from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reinforge.algorithms.algorithm import Algorithm
from reinforge.algorithms.build import build
from reinforge.algorithms.catalogue import TABLE
from reinforge.algorithms.losses.policy import PolicyLoss, positive_weights
from reinforge.algorithms.losses.supervised import NLLLoss
from reinforge.algorithms.parts.corrections import mis, tis
from reinforge.algorithms.parts.kl import k2, k3
from reinforge.algorithms.parts.reduce import REDUCERS, sequence_mean, sequence_sum, token_mean
from reinforge.algorithms.parts.surrogates import ppo_clip
from reinforge.algorithms.parts.terms import LossTerms
from reinforge.backends.microbatch import combine
from reinforge.core.backend import Loss, TrainedTokens
from reinforge.core.batch import Batch, Totals, pack
from reinforge.core.metrics import LossMetrics
from reinforge.core.sample import Sample

STREAMS = ("old", "behaviour", "reference", "advantages")
OPTIONAL = ("selected", "positive")


def random_rows(lengths: list[int], seed: int = 0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def noise(n: int, scale: float) -> Tensor:
        return scale * torch.randn(n, generator=generator, dtype=torch.float64)

    rows = []
    for n in lengths:
        logprobs = -noise(n, 1.0).abs() - 0.1
        rows.append(
            {
                "logprobs": logprobs,
                "entropy": noise(n, 1.0).abs(),
                "old": logprobs + noise(n, 0.3),
                "behaviour": logprobs + noise(n, 0.3),
                "reference": logprobs + noise(n, 0.3),
                "advantages": noise(1, 1.0).expand(n),
            }
        )
    return rows


def view(rows: list[dict[str, Tensor]], leaves: list[Tensor]) -> TrainedTokens:
    sizes = torch.tensor([len(leaf) for leaf in leaves])
    owner = torch.repeat_interleave(torch.arange(len(rows)), sizes)
    streams = {
        name: torch.cat([row[name] for row in rows])
        for name in (*STREAMS, *OPTIONAL)
        if name in rows[0]
    }
    return TrainedTokens(
        torch.cat(leaves),
        torch.cat([row["entropy"] for row in rows]),
        owner,
        sizes,
        sizes[owner],
        streams,
    )


def run(
    loss: Loss, rows: list[dict[str, Tensor]], cut: list[list[int]], max_length: int = 16
) -> tuple[float, list[Tensor], dict[str, float]]:
    """Loss, gradient of each row and metrics, with the rows cut into micro-batches and combined as
    a backend does.
    """
    leaves = [row["logprobs"].clone().requires_grad_() for row in rows]
    sizes = [len(leaf) for leaf in leaves]
    totals = Totals(sum(sizes), sum(n > 0 for n in sizes), max_length, {})
    total = 0.0
    measured: list[LossMetrics] = []
    for part in cut:
        value, metrics = loss(view([rows[i] for i in part], [leaves[i] for i in part]), totals)
        if value.requires_grad:
            value.backward()
        total += value.item()
        measured.append(metrics)
    return (
        total,
        [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves],
        dict(combine(measured)),
    )


def full_loss(reduce: str = "token_mean", **kw) -> PolicyLoss:
    options = {
        "correction": partial(tis, cap=1.2),
        "kl": k3,
        "terms": LossTerms(kl=0.1, entropy=0.01),
        "off_policy": True,
    }
    return PolicyLoss(partial(ppo_clip, low=0.2, high=0.28), REDUCERS[reduce], **{**options, **kw})


@pytest.mark.parametrize("reduce", list(REDUCERS))
def test_whole_loss_against_a_plain_loop(reduce: str) -> None:
    """Every term at once: clip, truncated weights, weighted KL, entropy; token by token in Python
    floats.
    """
    rows = random_rows([20, 5, 12, 3])
    expected = 0.0
    kl_sum = 0.0
    clipped = 0
    n_tokens = 40
    n_rows = 4
    for row in rows:
        length = len(row["logprobs"])
        weight = {
            "token_mean": 1 / n_tokens,
            "sequence_mean": 1 / (length * n_rows),
            "sequence_sum": 1 / n_rows,
            "fixed_length": 1 / (16 * n_rows),
        }
        for t in range(length):
            logp, old, behaviour, ref, a, h = (
                row[k][t].item() for k in ("logprobs", *STREAMS, "entropy")
            )
            ratio = math.exp(logp - old)
            w = min(math.exp(old - behaviour), 1.2)
            surrogate = -min(ratio * a, min(max(ratio, 0.8), 1.28) * a)
            kl = math.exp(ref - logp) - (ref - logp) - 1
            expected += weight[reduce] * (w * surrogate + 0.1 * w * ratio * kl - 0.01 * h)
            kl_sum += kl
            clipped += (a > 0 and ratio > 1.28) or (a < 0 and ratio < 0.8)
    total, _, metrics = run(full_loss(reduce), rows, [[0, 1, 2, 3]])
    assert total == pytest.approx(expected, abs=1e-12) and metrics["policy/loss"] == pytest.approx(
        expected, abs=1e-12
    )
    assert (
        metrics["policy/kl"] == pytest.approx(kl_sum / 40)
        and metrics["policy/clip_fraction"] == pytest.approx(clipped / 40)
        and clipped > 3
    )
    assert metrics["policy/entropy"] == pytest.approx(
        torch.cat([r["entropy"] for r in rows]).mean().item()
    )
    everything = {k: torch.cat([r[k] for r in rows]) for k in rows[0]}
    assert metrics["policy/ratio/max"] == pytest.approx(
        (everything["logprobs"] - everything["old"]).max().exp().item()
    )
    delta = (everything["old"] - everything["behaviour"]).abs()
    assert metrics["mismatch/mean"] == pytest.approx(delta.mean().item()) and metrics[
        "mismatch/max"
    ] == pytest.approx(delta.max().item())
    assert metrics["mismatch/truncated"] == pytest.approx(
        ((everything["old"] - everything["behaviour"]).exp() > 1.2).double().mean().item()
    )


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(list(REDUCERS)))
def test_gradient_does_not_depend_on_the_cut(data: st.DataObject, reduce: str) -> None:
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any))
    order = data.draw(st.permutations(range(len(lengths))))
    edges = sorted(data.draw(st.sets(st.integers(1, len(lengths)), max_size=len(lengths)))) + [
        len(lengths)
    ]
    cut = [order[a:b] for a, b in zip([0, *edges], edges, strict=False) if b > a]
    rows = random_rows(lengths)
    whole, whole_gradient, whole_metrics = run(full_loss(reduce), rows, [list(range(len(lengths)))])
    total, gradient, metrics = run(full_loss(reduce), rows, cut)
    assert total == pytest.approx(whole, abs=1e-12) and metrics == pytest.approx(
        whole_metrics, abs=1e-12
    )
    for a, b in zip(gradient, whole_gradient, strict=True):
        assert torch.allclose(a, b, atol=1e-14, rtol=0)


def test_mean_of_micro_batch_means_would_be_wrong() -> None:
    """What the totals prevent: on lengths 20, 5, 12, 3 the mean of local token means has a very
    different gradient.
    """
    rows = random_rows([20, 5, 12, 3])
    _, right, _ = run(NLLLoss(), rows, [[0, 1], [2], [3]])
    assert torch.cat(right).tolist() == pytest.approx([-1 / 40] * 40)
    wrong = torch.cat(
        [torch.full((n,), -1 / (3 * local)) for n, local in ((20, 25), (5, 25), (12, 12), (3, 3))]
    )
    assert (wrong - torch.cat(right)).norm() / torch.cat(right).norm() > 0.9


def test_gradient_by_finite_differences() -> None:
    """Without the entropy's own path and with the KL unweighted, so that nothing that is detached
    moves with the log-probs.
    """
    rows = random_rows([4, 2, 5], seed=1)
    totals = Totals(11, 3, 16, {})
    for kl in (k2, k3):
        loss = full_loss("sequence_mean", kl=kl, kl_importance=False)
        leaf = torch.cat([r["logprobs"] for r in rows]).requires_grad_()
        assert torch.autograd.gradcheck(
            lambda x, f=loss: f(view(rows, list(x.split([4, 2, 5]))), totals)[0], leaf
        )


def test_before_the_first_update_everything_is_neutral() -> None:
    """No old stream: ratio 1, nothing clipped, KL 0 against an equal reference, and the gradient is
    the policy gradient.
    """
    rows = [
        {k: v for k, v in r.items() if k != "old"}
        | {"reference": r["logprobs"], "behaviour": r["logprobs"]}
        for r in random_rows([3, 4])
    ]
    total, gradient, metrics = run(
        PolicyLoss(ppo_clip, token_mean, terms=LossTerms(kl=0.5), correction=mis), rows, [[0], [1]]
    )
    advantages = torch.cat([r["advantages"] for r in rows])
    assert torch.allclose(
        torch.cat(gradient), -advantages / 7, atol=1e-15
    ) and total == pytest.approx(-advantages.mean().item())
    assert metrics["policy/ratio"] == pytest.approx(1) and metrics["policy/ratio/max"] == 1
    assert (
        metrics["policy/clip_fraction"]
        == metrics["policy/kl"]
        == metrics["mismatch/max"]
        == metrics["mismatch/dropped"]
        == 0
    )


def test_a_dropped_token_has_no_gradient() -> None:
    rows = [
        {
            "logprobs": torch.tensor([-1.0, -1.0], dtype=torch.float64),
            "entropy": torch.zeros(2),
            "behaviour": torch.tensor([-3.0, -1.0]),
            "reference": torch.tensor([-2.0, -2.0]),
            "advantages": torch.ones(2),
        }
    ]
    _, gradient, metrics = run(
        PolicyLoss(
            ppo_clip, sequence_sum, correction=partial(mis, cap=2.0), terms=LossTerms(kl=0.1)
        ),
        rows,
        [[0]],
    )
    assert gradient[0][0] == 0 and gradient[0][1] != 0 and metrics["mismatch/dropped"] == 0.5


def test_off_policy_kl_is_weighted_by_the_ratio() -> None:
    """Tabular: every token of a five-word vocabulary once, with reducer weights p_old: the
    expectation under the old policy.
    """
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1, -0.4], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([0.0, -0.4, 1.2, 0.5, 0.2], dtype=torch.float64).log_softmax(0)
    reference = torch.tensor([-0.2, 0.5, 0.4, -1.5, 0.3], dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    (exact,) = torch.autograd.grad(
        (policy.exp() * (policy - reference)).sum(), logits, retain_graph=True
    )
    streams = {
        "old": old,
        "reference": reference,
        "advantages": torch.zeros(5, dtype=torch.float64),
    }
    one = torch.ones(5, dtype=torch.int64)
    for importance in (True, False):
        loss = PolicyLoss(
            ppo_clip,
            lambda tokens, totals: old.exp(),
            kl=k2,
            terms=LossTerms(kl=1.0),
            kl_importance=importance,
        )
        value, _ = loss(TrainedTokens(policy, None, one, one, one, streams), Totals(5, 5, 1, {}))
        (gradient,) = torch.autograd.grad(value, logits, retain_graph=True)
        assert torch.allclose(gradient, exact, atol=1e-12) is importance


def test_zero_variance_group_has_exactly_zero_gradient() -> None:
    samples = [
        Sample.from_tokens(
            f"s{i}", [1] * (i + 3), [False] + [True] * (i + 2), group="g", reward=0.1
        )
        for i in range(3)
    ]
    batch = Batch.pack(samples)
    algorithm = build("grpo", max_new_tokens=8)
    algorithm.advantages([batch])
    leaf = torch.randn(batch.n_trained, requires_grad=True)
    lengths = batch.trained_lengths()
    loss, _ = algorithm.loss(
        TrainedTokens(leaf, None, batch.sequence, lengths, lengths[batch.sequence], batch.streams),
        Totals.of([batch]),
    )
    loss.backward()
    assert loss == 0 and leaf.grad is not None and leaf.grad.tolist() == [0.0] * batch.n_trained


@pytest.mark.parametrize(
    "loss", [full_loss(), full_loss("sequence_mean"), NLLLoss()], ids=["token", "sequence", "nll"]
)
def test_a_micro_batch_without_trained_tokens(loss: Loss) -> None:
    total, _, _ = run(loss, random_rows([0, 0]), [[0, 1]])
    assert total == 0.0
    mixed, gradient, metrics = run(loss, random_rows([0, 3]), [[0], [1]])
    assert (
        math.isfinite(mixed)
        and gradient[1].abs().min() > 0
        and all(math.isfinite(v) for v in metrics.values())
    )


def test_nll() -> None:
    rows = random_rows([2, 3])
    everything = torch.cat([r["logprobs"] for r in rows])
    total, gradient, metrics = run(NLLLoss(), rows, [[0], [1]])
    assert total == metrics["sft/loss"] == pytest.approx(-everything.mean().item())
    assert torch.cat(gradient).tolist() == pytest.approx([-0.2] * 5)
    total, _, metrics = run(NLLLoss(sequence_mean), rows, [[0], [1]])
    assert total == pytest.approx(-sum(r["logprobs"].mean().item() for r in rows) / 2)
    assert metrics["sft/nll"] == pytest.approx(-everything.mean().item())


# selection, positive samples, old log-probs of the engine: worked out by hand


def two_tokens(**streams: list[float]) -> list[dict[str, Tensor]]:
    """logp -1 and -2, A = 1 and -1, ratios e^0.1 and e^-0.1, unless told otherwise."""
    base = {
        "logprobs": [-1.0, -2.0],
        "old": [-1.1, -1.9],
        "advantages": [1.0, -1.0],
        "entropy": [0.5, 1.5],
    }
    return [
        {
            name: torch.tensor(values, dtype=torch.float64)
            for name, values in {**base, **streams}.items()
        }
    ]


UP = math.exp(0.1)
DOWN = math.exp(-0.1)


@pytest.mark.parametrize(
    ("use", "loss", "gradient"),
    [
        ("keep", -UP, [-UP, 0.0]),
        ("drop", DOWN, [0.0, DOWN]),
        ("penalise", -UP + DOWN + 0.5 * 0.1, [-UP + 0.5, DOWN]),
    ],
)
def test_what_becomes_of_selected_tokens(use: str, loss: float, gradient: list[float]) -> None:
    """The first token is selected.

    Denominators stay those of both tokens; KL and entropy are those of both tokens too.
    """
    rows = two_tokens(selected=[1.0, 0.0], reference=[-1.5, -2.0])
    total, found, metrics = run(
        PolicyLoss(ppo_clip, token_mean, selected=use, penalty=0.5), rows, [[0]]
    )
    assert total == pytest.approx(loss / 2) and found[0].tolist() == pytest.approx(
        [g / 2 for g in gradient]
    )
    assert metrics["policy/selected"] == 0.5
    with_terms = PolicyLoss(
        ppo_clip,
        token_mean,
        selected=use,
        penalty=0.5,
        kl=k2,
        terms=LossTerms(kl=0.1, entropy=0.2),
        kl_importance=False,
    )
    total, _, metrics = run(with_terms, rows, [[0]])
    assert total == pytest.approx((loss + 0.1 * 0.125 - 0.2 * 2.0) / 2) and metrics[
        "policy/kl"
    ] == pytest.approx(0.0625)


def test_likelihood_of_positive_samples() -> None:
    """Rewards 1, 0, nan and 2 with 1, 2, 1 and 2 tokens: N / N+ = 6 / 3 = 2 at the tokens of the
    first and the last.
    """
    rewards = torch.tensor([1.0, 0.0, math.nan, 2.0])
    sequence = torch.tensor([0, 1, 1, 2, 3, 3])
    weights = positive_weights(rewards, sequence)
    assert weights.tolist() == [2, 0, 0, 0, 2, 2]
    assert positive_weights(-rewards, sequence).tolist() == [0] * 6
    rows = two_tokens(positive=[2.0, 0.0])
    plain, _, _ = run(PolicyLoss(ppo_clip, token_mean), rows, [[0]])
    total, gradient, metrics = run(
        PolicyLoss(ppo_clip, token_mean, terms=LossTerms(nll=0.1)), rows, [[0]]
    )
    # -logp of the only positive token
    assert total == pytest.approx(plain + 0.1 * 1.0) and metrics["policy/nll"] == pytest.approx(1.0)
    assert gradient[0].tolist() == pytest.approx([-UP / 2 - 0.1, DOWN / 2])


def test_old_log_probs_of_the_engine() -> None:
    """The ratio is to `behaviour` whatever `old` says; nothing is left to correct, and the mismatch
    is that of the policy itself.
    """
    rows = two_tokens(behaviour=[-1.2, -2.0])
    total, _, metrics = run(
        PolicyLoss(
            partial(ppo_clip, low=0.5, high=0.5), token_mean, correction=tis, engine_old=True
        ),
        rows,
        [[0]],
    )
    assert total == pytest.approx((-math.exp(0.2) + 1) / 2)
    assert metrics["policy/ratio/max"] == pytest.approx(math.exp(0.2)) == metrics[
        "mismatch/ratio/max"
    ] and metrics["mismatch/mean"] == pytest.approx(0.1)
    assert "mismatch/truncated" not in metrics


def test_an_adapted_coefficient_is_used_at_once() -> None:
    rows = two_tokens(reference=[-1.5, -2.0])
    terms = LossTerms(kl=0.1, entropy_target=1.0)
    loss = PolicyLoss(ppo_clip, token_mean, kl=k2, terms=terms, kl_importance=False)
    before, _, _ = run(loss, rows, [[0]])
    assert loss.entropy_gradient and loss.needs == {"reference"}
    terms.kl = 0.3
    terms.entropy = 0.01
    after, _, _ = run(loss, rows, [[0]])
    assert after - before == pytest.approx(0.2 * 0.0625 - 0.01 * 1.0)


# every algorithm: the gradient is that of the batch


def full_samples(seed: int = 0) -> list[Sample]:
    """Three groups of four rows with everything that any algorithm reads: two reward components, a
    greedy baseline, streams.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i, length in enumerate((9, 4, 12, 6, 3, 8, 5, 10, 7, 2, 11, 6)):
        n = length + 2
        trained = torch.arange(n) >= 2
        noise = lambda scale=1.0, n=n: scale * torch.randn(n, generator=generator)  # noqa: E731
        old = -noise().abs()
        exact = float(i % 3 == 0)
        style = (i * 7 % 5) / 4
        rows.append(
            Sample(
                uid=f"s{i}",
                group=f"g{i // 4}",
                episode=f"s{i}",
                tokens=torch.arange(n),
                trained=trained,
                logprobs=old + noise(0.3),
                versions=torch.zeros(n, dtype=torch.int32),
                rewards={"exact": exact, "style": style},
                reward=exact + 0.5 * style,
                baseline=0.5,
                streams={
                    "old": old,
                    "reference": old + noise(0.3),
                    "values": noise(0.3),
                    "entropy": noise().abs(),
                },
            )
        )
    return rows


def gradient_by_row(
    algorithm: Algorithm, samples: list[Sample], budget: int
) -> tuple[dict[str, Tensor], float, dict[str, float]]:
    """As a loop and a backend do it: pack, advantages over the batch, then micro-batch by
    micro-batch.
    """
    batches = pack(samples, budget)
    measured = algorithm.advantages(batches)
    totals = Totals.of(batches, 16)
    gradients = {}
    total = 0.0
    parts: list[LossMetrics] = []
    for batch in batches:
        start = torch.cat(
            [
                (
                    s.streams["old"].double()
                    + 0.2 * torch.sin(torch.arange(len(s.tokens)) * 1.7 + int(s.uid[1:]))
                )[s.trained]
                for s in batch.samples
            ]
        )
        leaf = start.requires_grad_()
        lengths = batch.trained_lengths()
        streams = {name: value.double() for name, value in batch.streams.items()}
        whole = torch.tensor([totals.episode_tokens[s.episode] for s in batch.samples])
        tokens = TrainedTokens(
            leaf, 0.5 * leaf.square(), batch.sequence, lengths, whole[batch.sequence], streams
        )
        loss, found = algorithm.loss(tokens, totals)
        loss.backward()
        total += loss.item()
        assert leaf.grad is not None
        gradients |= dict(
            zip([s.uid for s in batch.samples], leaf.grad.split(lengths.tolist()), strict=True)
        )
        parts.append(found)
    return gradients, total, dict(combine(parts)) | measured


MODIFIED: dict[str, dict] = {
    "top_entropy": {"selection": "top_entropy"},
    "off_policy_mask": {"selection": "off_policy_mask", "settings": {"drift": 0.0}},
    "icepop": {"correction": "icepop"},
    "seq_tis": {"correction": "seq_tis"},
    "delta": {"clip_delta": 1.5},
    "kl_in_reward": {"kl_placement": "reward", "kl_coefficient": 0.1},
    "everything": {
        "kl_coefficient": 0.1,
        "entropy": 0.01,
        "nll": 0.1,
        "advantage_clip": 0.7,
        "correction": "tis",
        "selection": "kl_cov",
    },
}
CASES = {name: (name, {}) for name in TABLE if TABLE[name].family == "policy_gradient"} | {
    f"grpo+{k}": ("grpo", v) for k, v in MODIFIED.items()
}


@pytest.mark.parametrize("case", CASES)
def test_every_algorithm_gives_one_gradient_however_the_batch_is_cut(case: str) -> None:
    """Whole, in small packs, and in another order: each row's gradient and every metric are the
    same, and there is a gradient.
    """
    name, options = CASES[case]
    algorithm = build(
        name, max_new_tokens=16, updates=2, weights={"exact": 1.0, "style": 0.5}, **options
    )
    samples = full_samples()
    want, loss, metrics = gradient_by_row(algorithm, samples, 10_000)
    assert sum(float(g.abs().sum()) for g in want.values()) > 1e-3 and math.isfinite(loss)
    for budget, order in ((1, 1), (20, 1), (31, -1), (10_000, -1)):
        found, total, again = gradient_by_row(algorithm, samples[::order], budget)
        assert total == pytest.approx(loss, abs=1e-9) and again == pytest.approx(metrics, abs=1e-9)
        for uid, gradient in want.items():
            assert torch.allclose(found[uid], gradient, atol=1e-9, rtol=1e-6), uid


def test_the_whole_advantage_loss_chain_of_rloo() -> None:
    """By hand: rewards 1, 0, 0: A = 1, -1/2, -1/2; the loss is the mean over sequences of -A times
    the summed log-prob.
    """
    samples = [
        Sample.from_tokens(f"s{i}", [1] * (n + 1), [False] + [True] * n, group="g", reward=r)
        for i, (n, r) in enumerate(((1, 1.0), (2, 0.0), (3, 0.0)))
    ]
    batches = pack(samples, 3)
    algorithm = build("rloo")
    algorithm.advantages(batches)
    totals = Totals.of(batches)
    found = {}
    for batch in batches:
        leaf = torch.zeros(batch.n_trained, dtype=torch.float64, requires_grad=True)
        lengths = batch.trained_lengths()
        streams = {"advantages": batch.streams["advantages"].double()}
        algorithm.loss(
            TrainedTokens(leaf, None, batch.sequence, lengths, lengths[batch.sequence], streams),
            totals,
        )[0].backward()
        found |= dict(
            zip([s.uid for s in batch.samples], leaf.grad.split(lengths.tolist()), strict=True)
        )  # type: ignore[union-attr]
    assert [found[f"s{i}"].tolist() for i in range(3)] == [[-1 / 3], [1 / 6] * 2, [1 / 6] * 3]
