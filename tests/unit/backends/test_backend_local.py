"""The local backend beyond the contract: metrics, budgets, memory of what it was given, and
refusals.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.split_backends import policy_loss
from helpers.tiny_runs import launch, lines, tensors
from helpers.toys import (
    gradients,
    make_model,
    make_module,
    make_samples,
    parameters,
    relative,
    train_config,
)
from reinforge.algorithms.losses.policy import PolicyLoss
from reinforge.algorithms.losses.preference import PairLoss
from reinforge.algorithms.losses.supervised import NLLLoss
from reinforge.algorithms.parts.reduce import token_mean
from reinforge.algorithms.parts.surrogates import ppo_clip
from reinforge.backends.local import LocalBackend
from reinforge.backends.microbatch import auto_budget, trained_tokens
from reinforge.checkpoint import store
from reinforge.config.schema import Config
from reinforge.core.batch import Batch, Totals, cut, pack, rejoin
from reinforge.core.errors import InputError
from reinforge.core.report import OutOfMemory
from reinforge.models.causal import CausalModel


def make_backend(**changes):  # type: ignore[no-untyped-def]
    return LocalBackend(make_model(), train_config(**changes), total_steps=10)


def test_a_loss_sees_trained_tokens_only() -> None:
    """Flat vectors over the trained tokens, lengths of whole episodes, the behaviour log-probs of
    exactly those tokens.
    """
    samples = make_samples((9, 5, 7))
    # one episode in two rows
    samples[2] = samples[2].with_(episode=samples[0].episode, group=samples[0].group)
    totals = Totals.of(pack(samples, 10_000))
    batch = Batch.pack(samples)
    seen = trained_tokens(make_model(), batch, NLLLoss(), totals, 1.0)
    counts = [7, 3, 5]
    assert seen.lengths.tolist() == counts and seen.sequence.tolist() == [0] * 7 + [1] * 3 + [2] * 5
    assert (
        seen.episode_tokens.tolist() == [12] * 7 + [3] * 3 + [12] * 5
        and totals.sequences == 2
        and totals.tokens == 15
    )
    assert torch.equal(
        seen.streams["behaviour"], torch.cat([s.logprobs[s.trained] for s in samples])
    )
    assert seen.entropy is None and len(seen.logprobs) == 15


def test_entropy_is_the_distributions_own() -> None:
    samples = make_samples()
    model = make_model()
    batch = Batch.pack(samples)
    _, entropy = model.logprobs(batch, temperature=0.7, entropy=True)
    with torch.no_grad():
        from reinforge.models.attention import PackedLayout

        hidden = model.hidden(
            batch.tokens, batch.positions, PackedLayout(batch.lengths, batch.starts)
        )
        logp = (model.logits(hidden[batch.targets - 1]).double() / 0.7).log_softmax(-1)
    assert entropy is not None
    torch.testing.assert_close(entropy.double(), -(logp.exp() * logp).sum(-1), atol=1e-5, rtol=0)


def test_clipping_shortens_the_gradient_and_keeps_its_direction() -> None:
    """With plain moments (betas 0) Adam hides the length: so look at the first moment after one
    step.
    """
    samples = make_samples()
    moments = []
    for limit in (0.0, 0.01):
        backend = make_backend(max_grad_norm=limit)
        batches = pack(samples, 64)
        backend.forward_backward(batches, NLLLoss(), Totals.of(batches))
        norm = backend.step().grad_norm
        moments.append(
            torch.cat(
                [
                    t.flatten()
                    for n, t in sorted(backend.optimizer.tensors().items())
                    if n.endswith("exp_avg")
                ]
            )
            / 0.1
        )
    assert norm > 0.1  # reported as it was before
    assert float(moments[0].norm()) == pytest.approx(norm, rel=1e-5) and float(
        moments[1].norm()
    ) == pytest.approx(0.01, rel=1e-5)
    torch.testing.assert_close(moments[1] / 0.01, moments[0] / norm, atol=1e-6, rtol=1e-4)


def test_gradients_accumulate_until_the_step_and_no_longer() -> None:
    backend = make_backend()
    samples = make_samples()
    batches = pack(samples, 64)
    totals = Totals.of(batches)
    backend.forward_backward(batches, NLLLoss(), totals)
    once = float(backend.optimizer.gradient_norm())
    backend.forward_backward(batches, NLLLoss(), totals)
    assert float(backend.optimizer.gradient_norm()) == pytest.approx(2 * once, rel=1e-5)
    assert backend.step().grad_norm == pytest.approx(2 * once, rel=1e-5)
    assert float(backend.optimizer.gradient_norm()) == 0.0


def test_a_step_goes_downhill_and_up_the_advantage() -> None:
    """Sign of the whole pipeline: SFT lowers the loss, a positive advantage makes its tokens
    likelier, a negative one unlikelier.
    """
    samples = make_samples((12, 12))
    backend = make_backend(learning_rate=1e-3)
    batches = pack(samples, 64)
    losses = []
    for _ in range(5):
        losses.append(backend.forward_backward(batches, NLLLoss(), Totals.of(batches))["sft/loss"])
        backend.step()
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.05
    signed = [
        s.with_(streams={"advantages": torch.full((12,), a)})
        for s, a in zip(samples, (1.0, -1.0), strict=True)
    ]
    batches = pack(signed, 64)
    backend = make_backend(learning_rate=1e-3)
    backend.annotate(batches, frozenset({"old"}))
    before = batches[0].streams["old"].clone()
    backend.forward_backward(batches, PolicyLoss(ppo_clip, token_mean), Totals.of(batches))
    backend.step()
    backend.annotate(batches, frozenset({"old"}))
    change = batches[0].streams["old"] - before
    assert (
        float(change[batches[0].sequence == 0].mean()) > 0.005
        and float(change[batches[0].sequence == 1].mean()) < -0.005
    )


def test_learning_rate_zero_changes_nothing() -> None:
    backend = make_backend(learning_rate=0.0)
    samples = make_samples()
    before = parameters(backend.model.module)
    batches = pack(samples, 64)
    backend.forward_backward(batches, NLLLoss(), Totals.of(batches))
    backend.step()
    after = parameters(backend.model.module)
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_a_state_of_another_model_is_refused() -> None:
    small = make_backend()
    tied = LocalBackend(make_model(tie_word_embeddings=True), train_config(), total_steps=1)
    with pytest.raises(InputError, match=r"another model: 1 parameters differ, e.g. lm_head"):
        tied.load(small.state())
    wide = LocalBackend(make_model(intermediate_size=96), train_config(), total_steps=1)
    with pytest.raises(InputError, match="mlp"):
        wide.load(small.state())


def test_auto_budget_is_recorded_and_an_explicit_one_wins() -> None:
    first = make_backend()
    second = make_backend()
    assert first.budget == auto_budget(first.model) == 4096
    first.budget = 1024  # what another moment's free memory gave
    second.load(first.state())
    assert second.budget == 1024
    explicit = make_backend(tokens_per_microbatch=77)
    explicit.load(first.state())
    assert explicit.budget == 77


def test_reference_and_old_are_filled_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is asked for, nothing is sent to the device either."""
    backend = make_backend()
    batches = pack(make_samples(), 64)
    with monkeypatch.context() as patched:
        patched.delattr(Batch, "to")
        backend.annotate(batches, frozenset())
    assert set(batches[0].streams) == {"behaviour", "advantages"} and backend.frozen is None


# memory that runs out


class Full:
    """Stands in for a device: a forward of more than `limit` tokens, or number `at`, finds no
    memory. `late`: its backward, when most gradients of the micro-batch have been added already.
    """

    def __init__(self, model: CausalModel, *, limit: int = 10**9, at: int = -1, late: bool = False):
        self.model = model
        self.limit = limit
        self.at = at
        self.late = late
        self.sizes: list[int] = []  # tokens of each forward, failed ones included
        self._logprobs = model.logprobs
        model.logprobs = self  # type: ignore[method-assign, assignment]

    def __call__(self, batch: Batch, **options: Any) -> Any:
        self.sizes.append(batch.n_tokens)
        fails = batch.n_tokens > self.limit or len(self.sizes) == self.at + 1
        if fails and not self.late:
            raise torch.OutOfMemoryError("no memory")
        if fails:
            first = dict(self.model.module.named_parameters())[
                "model.layers.0.self_attn.q_proj.weight"
            ]
            self._hook = first.register_hook(self._fail)
        return self._logprobs(batch, **options)

    def _fail(self, _: torch.Tensor) -> None:
        self._hook.remove()
        # what cuBLAS says then
        raise RuntimeError(
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
        )


LENGTHS = (20, 5, 12, 3, 17, 9, 14, 6)


@pytest.mark.parametrize("late", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pass_without_memory_is_done_again_in_smaller_parts(
    at: int, late: bool, dtype: torch.dtype
) -> None:
    """Micro-batch `at` fails: the gradient and the metrics are those of a pass that had memory, and
    the budget is halved.
    """
    found = []
    for fails in (False, True):
        model = CausalModel(make_module().to(dtype))
        backend = LocalBackend(model, train_config(tokens_per_microbatch=40), total_steps=10)
        batches = pack(
            make_samples(LENGTHS), backend.budget, unit=PolicyLoss(ppo_clip, token_mean).unit
        )
        assert len(batches) >= 3
        full = Full(model, at=at if fails else -1, late=late)
        metrics = backend.forward_backward(
            batches, PolicyLoss(ppo_clip, token_mean), Totals.of(batches)
        )
        grads = gradients(backend)
        found.append((grads, metrics, backend.step(), backend.budget, len(full.sizes)))
    (want, plain, without, _, count), (got, told, report, budget, tries) = found
    assert relative(got, want) < (1e-6 if dtype == torch.float32 else 2e-2)
    failed = batches[at].n_tokens
    assert (
        budget == max(max(len(s.tokens) for s in batches[at].samples), min(40, failed) // 2) < 40
        and tries > count
    )
    assert without.out_of_memory is None
    assert report.out_of_memory == OutOfMemory(times=1, old_budget=40, new_budget=budget)
    oom = {name: n for name, n in report.metrics().items() if name.startswith("train/oom")}
    assert oom == {
        "train/oom": 1.0,
        "train/oom_budget/max": 40.0,
        "train/oom_budget/min": float(budget),
    }
    assert told == pytest.approx(
        plain,
        rel=1e-4 if dtype == torch.float32 else 0.1,
        abs=1e-6 if dtype == torch.float32 else 1e-2,
    )
    # told once
    backend.forward_backward(batches, PolicyLoss(ppo_clip, token_mean), Totals.of(batches))
    again = backend.step()
    assert again.out_of_memory is None and "train/oom" not in again.metrics()


@pytest.mark.parametrize("kind", ["old", "pairs"])
def test_what_a_pass_without_memory_compares_with_is_kept(kind: str) -> None:
    """Cut into smaller parts, rows keep what they are compared with: their old log-probs (which are
    not those of now), and the other answer of their pair.
    """
    loss: Any = policy_loss() if kind == "old" else PairLoss("sigmoid", beta=0.5)
    # half of them all ends inside of a pair
    lengths = LENGTHS if kind == "old" else (15, 4, 9, 8, 14, 10)
    found = []
    for fails in (False, True):
        model = make_model()
        backend = LocalBackend(
            model, train_config(tokens_per_microbatch=60), total_steps=10, reference=True
        )
        batches = pack(make_samples(lengths), backend.budget, unit=loss.unit)
        backend.annotate(batches, loss.needs | {"old", "reference"})
        for i, batch in enumerate(batches):
            for name in ("old", "reference"):
                noise = torch.randn(batch.n_trained, generator=torch.Generator().manual_seed(i))
                batch.streams[name] = batch.streams[name] + 0.3 * noise
        full = Full(model, at=0 if fails else -1)
        metrics = backend.forward_backward(batches, loss, Totals.of(batches))
        found.append((gradients(backend), metrics["train/loss"], len(full.sizes)))
    assert found[1][2] > found[0][2] + 1  # it was cut
    assert relative(found[1][0], found[0][0]) < 1e-5 and found[1][1] == pytest.approx(
        found[0][1], abs=1e-5
    )


@pytest.mark.parametrize("limit", [0.0, 1.0], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_one_bad_element_of_a_gradient_leaves_everything_untouched(
    bad: float, limit: float
) -> None:
    """An infinite norm is larger than 0 and than any limit: clipping by it would make NaN of one
    weight and 0 of all others.
    """
    backend = make_backend(max_grad_norm=limit)
    batches = pack(make_samples(), 64)
    backend.forward_backward(batches, NLLLoss(), Totals.of(batches))
    backend.step()
    before = {name: tensor.clone() for name, tensor in backend.state().tensors.items()}
    backend.forward_backward(batches, NLLLoss(), Totals.of(batches))
    backend.optimizer.masters["lm_head.weight"].grad[3, 5] = bad
    report = backend.step()
    assert report.skipped and not report.empty
    assert report.metrics()["train/skipped"] == 1 and report.metrics()["train/empty"] == 0
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in backend.state().tensors.items()
    )


def test_memory_that_is_short_by_far_is_halved_until_it_fits() -> None:
    model = make_model()
    backend = LocalBackend(model, train_config(), total_steps=10)
    batches = pack(make_samples(LENGTHS), backend.budget)
    full = Full(model, limit=21)
    assert [b.n_tokens for b in batches] == [86]
    backend.forward_backward(batches, NLLLoss(), Totals.of(batches))
    plain = make_backend()
    plain.forward_backward(batches, NLLLoss(), Totals.of(batches))
    assert relative(gradients(backend), gradients(plain)) < 1e-6
    assert backend.budget == 20
    assert backend.step().out_of_memory == OutOfMemory(times=2, old_budget=4096, new_budget=20)
    count = len(full.sizes)
    # packed before the budget shrank: cut without failing
    backend.forward_backward(batches, NLLLoss(), Totals.of(batches))
    assert max(full.sizes[count:]) <= 20 and backend.budget == 20
    assert backend.step().out_of_memory is None


def test_pairs_stay_together_and_prompts_stay_shared() -> None:
    samples = make_samples(LENGTHS)
    prompt = torch.tensor([7, 8, 9, 10])
    tied = [
        s.with_(
            tokens=torch.cat([prompt, s.tokens[:-2]]),
            trained=torch.cat([torch.zeros(4, dtype=torch.bool), s.trained[2:]]),
            logprobs=torch.cat([torch.zeros(4), s.logprobs[2:]]),
            versions=torch.zeros(len(s.tokens) + 2, dtype=torch.int32),
            streams={"advantages": torch.cat([torch.zeros(4), s.streams["advantages"][2:]])},
        )
        for s in samples
    ]
    batch = Batch.pack(tied, share=True)
    parts = cut(batch, 40, unit=2)
    assert [s.uid for p in parts for s in p.samples] == [s.uid for s in tied] and all(
        len(p.samples) % 2 == 0 for p in parts
    )
    assert 1 < len(parts) < 4 and all(p.n_tokens <= 40 or len(p.samples) == 2 for p in parts)
    assert any(p.prefix is not None for p in parts)
    for name in batch.streams:
        assert torch.equal(torch.cat([p.streams[name] for p in parts]), batch.streams[name])
    sums = []
    for batches in ([batch], parts):
        backend = make_backend()
        backend.forward_backward(batches, PolicyLoss(ppo_clip, token_mean), Totals.of([batch]))
        sums.append(gradients(backend))
    assert relative(sums[1], sums[0]) < 1e-6


def test_annotating_without_memory_fills_the_batch_that_was_given() -> None:
    """Streams and the bootstrap come back in the order of the whole batch."""
    model = make_model()
    backend = LocalBackend(model, train_config(), total_steps=10, reference=True)
    batches = pack(make_samples(LENGTHS), 4096)
    plain = pack(make_samples(LENGTHS), 4096)
    make = LocalBackend(make_model(), train_config(), total_steps=10, reference=True)
    make.annotate(plain, frozenset({"old", "reference"}))
    Full(model, limit=30)
    backend.annotate(batches, frozenset({"old", "reference"}))
    for name in ("old", "reference", "behaviour", "advantages"):
        torch.testing.assert_close(
            batches[0].streams[name], plain[0].streams[name], atol=1e-5, rtol=0
        )
    assert backend.budget <= 30
    backend.forward_backward(batches, NLLLoss(), Totals.of(batches))
    short = backend.step().out_of_memory
    assert short is not None and short.times >= 1
    batches[0].bootstrap = torch.arange(8.0)
    parts = cut(batches[0], 30)
    assert [p.bootstrap.tolist() for p in parts if p.bootstrap is not None] == [
        [float(LENGTHS_ORDER.index(s.uid)) for s in p.samples] for p in parts
    ]
    batches[0].bootstrap = None
    rejoin(batches[0], parts)
    assert batches[0].bootstrap is not None and batches[0].bootstrap.tolist() == list(range(8))


LENGTHS_ORDER = [s.uid for s in pack(make_samples(LENGTHS), 4096)[0].samples]


def test_a_row_that_never_fits_says_what_to_do() -> None:
    model = make_model()
    backend = LocalBackend(model, train_config(), total_steps=10)
    batches = pack(make_samples(LENGTHS), 64)
    Full(model, limit=19)
    with pytest.raises(
        InputError,
        match=(
            "a row of 20 tokens does not fit.*max_new_tokens.*gradient_checkpointing.*adapter.rank"
        ),
    ) as caught:
        backend.forward_backward(batches, NLLLoss(), Totals.of(batches))
    assert caught.value.exit_code == 2 and not backend.optimizer.gradients()
    pair = NLLLoss()
    pair.unit = 2
    with pytest.raises(InputError, match="a unit of 2 rows of "):
        backend.forward_backward(pack(make_samples(LENGTHS), 64, unit=2), pair, Totals.of(batches))


def test_gradients_of_an_earlier_call_are_not_lost_in_silence() -> None:
    model = make_model()
    backend = LocalBackend(model, train_config(), total_steps=10)
    batches = pack(make_samples(LENGTHS), 64)
    backend.forward_backward(batches, NLLLoss(), Totals.of(batches))
    Full(model, at=0)
    with pytest.raises(torch.OutOfMemoryError):
        backend.forward_backward(batches, NLLLoss(), Totals.of(batches))


def test_a_budget_that_shrank_survives_a_resume() -> None:
    for asked in ("auto", 64):
        first = make_backend(tokens_per_microbatch=asked)
        second = make_backend(tokens_per_microbatch=asked)
        first.budget = 16
        second.load(first.state())
        assert second.budget == 16
        other = make_backend(tokens_per_microbatch=48)  # the user has changed it since
        other.load(first.state())
        assert other.budget == 48


def test_a_run_out_of_memory_goes_on_and_says_so(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 2 finds no memory once.

    The event is logged, later steps use the new budget, also after a resume, and the run learns the
    same.
    """
    calls: list[int] = []
    real = CausalModel.logprobs

    def short(self: CausalModel, batch: Batch, **options: Any) -> Any:
        if torch.is_grad_enabled():
            calls.append(batch.n_tokens)
            if len(calls) == fails:
                raise torch.OutOfMemoryError("no memory")
        return real(self, batch, **options)

    monkeypatch.setattr(CausalModel, "logprobs", short)
    weights = {}
    sizes = {}
    for name, fails in (("plain", 0), ("short", 2)):  # a step is one micro-batch here
        calls.clear()
        launch(
            make(
                name, "grpo", "train.steps=2", "run.checkpoint.every=1", "train.learning_rate=1e-4"
            )
        )
        fails = 0
        calls.clear()
        cfg = make(
            name, "grpo", "train.steps=3", "run.checkpoint.every=1", "train.learning_rate=1e-4"
        )
        launch(cfg)
        weights[name], sizes[name] = tensors(cfg), list(calls)
    events = [e for e in lines(cfg, "events.jsonl") if e["kind"] == "out_of_memory"]
    assert (
        len(events) == 1
        and events[0]["step"] == 2
        and events[0]["old_budget"] == 4096
        and events[0]["role"] == "train"
    )
    assert [m["train/oom"] for m in lines(cfg) if "train/oom" in m] == [1.0]
    assert (
        len(sizes["plain"]) == 1
        and len(sizes["short"]) > 1
        and max(sizes["short"]) <= events[0]["new_budget"] < sizes["plain"][0]
    )
    store_meta = store.load(store.latest(Path(cfg.run.dir)))[0].meta  # type: ignore[arg-type]
    assert store_meta["budget"] == events[0]["new_budget"]
    names = [n for n in weights["plain"] if n.startswith("model/")]
    assert (
        relative({n: weights["short"][n] for n in names}, {n: weights["plain"][n] for n in names})
        < 1e-4
    )


def test_a_pack_of_rows_without_anything_to_train_takes_no_room_and_no_pass() -> None:
    """With shared prompts such rows are left out: alone, or after a row that is longer than the
    budget, they must not be computed.
    """
    rows = [s.with_(trained=torch.zeros_like(s.trained)) for s in make_samples((5, 9))]
    backend = make_backend()
    (nothing,) = pack(rows, 64, share=True)
    backend.annotate([nothing], frozenset({"old"}))
    assert nothing.n_tokens == 0 and nothing.streams["old"].shape == (0,)
    long = make_samples((20,))[0].with_(group="other")
    assert [b.n_tokens for b in pack([long, *rows], 4, share=True)] == [20]
