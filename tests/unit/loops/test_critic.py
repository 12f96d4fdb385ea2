"""PPO with a critic: what each model learns from what, what warm-up leaves alone, and that a run
goes on where it stopped.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.tiny_runs import DATA, LORA, digest, launch, lines, odd, tensors
from helpers.toy_scalars import make_classifier, make_scalar, true_values
from helpers.toys import SilentView, gradients, make_model, make_samples, relative, train_config
from reinforge.algorithms.losses.value import ValueLoss
from reinforge.backends.local import LocalBackend
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.run import train_config as run_config
from reinforge.checkpoint import store
from reinforge.config.load import config_from_dict
from reinforge.config.model import ModelConfig
from reinforge.config.schema import Config
from reinforge.core.batch import Batch, Totals, pack
from reinforge.core.errors import InputError
from reinforge.core.sample import Sample, Stop
from reinforge.loops.critic import Critic
from reinforge.loops.step import TrainingStep
from reinforge.models.load import load_model
from reinforge.models.scalar import ScalarModel

# the backend with a scalar model


def with_targets(samples: list[Sample], budget: int = 64, share: bool = False) -> list[Batch]:
    """Packs whose streams `values` and `returns` are functions of the sample and the place alone,
    whatever the packing.
    """
    rows = []
    for s in samples:
        place = torch.arange(len(s.tokens), dtype=torch.float32)
        rows.append(
            s.with_(streams={"values": 0.1 * place, "returns": torch.sin(place + len(s.tokens))})
        )
    return pack(rows, budget, share=share)


def make_critic(seed: int = 0, clip: float | None = None, **changes: Any) -> Critic:
    return Critic(
        LocalBackend(make_scalar(seed=seed), train_config(**changes), total_steps=10),
        ValueLoss(clip),
    )


def test_the_gradient_is_that_of_transformers_and_of_any_packing() -> None:
    """Against autograd through transformers' own scores of every prefix; cut and shared in several
    ways.
    """
    samples = make_samples((9, 5, 7, 4))
    count = sum(s.n_trained for s in samples)
    theirs = make_classifier()
    total = torch.zeros(())
    for s in samples:
        place = torch.arange(len(s.tokens), dtype=torch.float32)
        for t in s.trained.nonzero()[:, 0].tolist():
            value = theirs(s.tokens[None, :t]).logits[0, 0]
            total = total + 0.5 * (value - torch.sin(place[t] + len(s.tokens))) ** 2 / count
    total.backward()
    expected = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    for budget, share in ((64, False), (64, True), (9, False)):
        critic = make_critic()
        batches = with_targets(samples, budget, share)
        metrics = critic.backend.forward_backward(batches, critic.loss, Totals.of(batches))
        assert metrics["critic/loss"] == pytest.approx(float(total.detach()), rel=1e-5)
        assert relative(gradients(critic.backend), expected) < 1e-5


def test_the_value_loss_falls_on_a_fixed_batch() -> None:
    critic = make_critic(learning_rate=3e-3)
    batches = with_targets(make_samples())
    found = [critic.update(batches, Totals.of(batches))[0] for _ in range(40)]
    losses = [m["critic/loss"] for m in found]
    assert losses[-1] < 0.02 * losses[0] and found[-1]["critic/explained_variance"] > max(
        0.5, found[0]["critic/explained_variance"]
    )
    assert {"critic/grad_norm", "critic/learning_rate", "critic/skipped"} <= found[
        0
    ].keys() and not any(n.startswith("train/") for n in found[0])


def test_annotation_is_values_and_the_bootstrap_of_what_was_cut() -> None:
    samples = make_samples((9, 5, 7))
    samples = [
        s.with_(stop=stop)
        for s, stop in zip(samples, (Stop.LENGTH, Stop.EOS, Stop.LENGTH), strict=True)
    ]
    critic = make_critic()
    batches = pack(samples, 10)
    critic.annotate(batches)
    module = make_classifier()
    for batch in batches:
        want = [true_values(module, s.tokens.tolist()) for s in batch.samples]
        values = torch.cat(
            [w[:-1][s.trained[1:]] for w, s in zip(want, batch.samples, strict=True)]
        )
        torch.testing.assert_close(batch.streams["values"].double(), values, atol=2e-5, rtol=1e-5)
        after = torch.stack(
            [w[-1] * (s.stop is Stop.LENGTH) for w, s in zip(want, batch.samples, strict=True)]
        )
        assert batch.bootstrap is not None
        torch.testing.assert_close(batch.bootstrap.double(), after, atol=2e-5, rtol=1e-5)
    assert sum(float(b.bootstrap.abs().sum()) > 0 for b in batches) == 2  # type: ignore[union-attr]


def test_a_bad_step_of_the_critic_is_a_bad_step_of_the_run() -> None:
    critic = make_critic()
    batches = with_targets(make_samples())
    for batch in batches:
        batch.streams["returns"][:] = float("nan")
    before = [p.clone() for p in critic.backend.model.module.parameters()]  # type: ignore[attr-defined]
    metrics, report = critic.update(batches, Totals.of(batches))
    assert report.skipped and metrics["critic/skipped"] == metrics["train/skipped"] == 1
    assert TrainingStep(metrics, critic=[report]).skipped
    assert all(
        torch.equal(a, b)
        for a, b in zip(before, critic.backend.model.module.parameters(), strict=True)
    )  # type: ignore[attr-defined]


def test_state_goes_to_another_critic_and_on() -> None:
    """Two steps, or one, a copy of the state into a critic that was somewhere else, and one more:
    the same bits.
    """
    batches = with_targets(make_samples())
    straight = make_critic()
    first = make_critic()
    second = make_critic(seed=5)
    for critic in (straight, straight, first):
        critic.update(batches, Totals.of(batches))
    second.load(first.state())
    second.update(batches, Totals.of(batches))
    ours = second.state()
    theirs = straight.state()
    assert ours.meta == theirs.meta and all(
        torch.equal(t, theirs.tensors[name]) for name, t in ours.tensors.items()
    )


# whole runs

PPO: dict[str, Any] = {"critic": {"learning_rate": 3e-3}}


def values(cfg: Config, prefix: str) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix(prefix): t for name, t in tensors(cfg).items() if name.startswith(prefix)
    }


def test_ppo_trains_two_models_and_reports_both(make: Callable[..., Config], tiny_dir: str) -> None:
    cfg = make("run", "ppo", "algorithm.epochs=2", "algorithm.minibatches=2", **PPO)
    launch(cfg)
    policy = values(cfg, "model/")
    critic = values(cfg, "part/critic/model/")
    start = dict(load_model(ModelConfig(path=tiny_dir, device="cpu")).module.named_parameters())
    assert all(not torch.equal(policy[n], p) for n, p in start.items() if p.ndim > 1)
    assert float(critic["score.weight"].abs().max()) > 1e-3
    trunk = [n for n in critic if n.startswith("model.layers")]
    assert trunk and all(not torch.equal(critic[n], start[n]) for n in trunk if critic[n].ndim > 1)
    first = lines(cfg)[0]
    last = lines(cfg)[-1]
    assert first["critic/learning_rate"] == 3e-3 and first["train/learning_rate"] == 1e-3
    assert {
        "critic/explained_variance",
        "critic/value",
        "critic/return",
        "critic/clip_fraction",
        "policy/ratio",
    } <= first.keys()
    assert last["critic/value"] > first["critic/value"]  # it starts at 0 and rewards are positive
    extra = store.load(store.latest(Path(cfg.run.dir)))[1]  # type: ignore[arg-type]
    assert extra["counters"]["updates"] == 12 and extra["parts"]["critic"]["steps"] == 12


def test_the_first_advantages_are_those_of_a_critic_that_knows_nothing(
    make: Callable[..., Config],
) -> None:
    """With a head of zeros, gamma 1 and lambda 1, the return of every token is the reward of its
    row.
    """
    cfg = make(
        "run", "ppo", "train.steps=1", 'algorithm.options={"lam": 1.0}', critic={"clip": None}
    )
    launch(cfg)
    first = lines(cfg)[0]
    assert first["critic/value"] == 0 and first["critic/explained_variance"] == pytest.approx(
        0, abs=1e-9
    )
    # mean over tokens, not rows
    assert first["critic/return"] == pytest.approx(first["reward/mean"], abs=0.05)
    assert first["critic/loss"] > 0


def test_warm_up_leaves_the_policy_untouched(make: Callable[..., Config], tiny_dir: str) -> None:
    kl = ("algorithm.kl.coefficient=0.05", "algorithm.kl.target=1.0", "algorithm.kl.horizon=100")
    cfg = make(
        "run",
        "ppo",
        "train.steps=3",
        "run.checkpoint.every=1",
        "run.checkpoint.keep=9",
        *kl,
        critic={"warmup": 2, "learning_rate": 1e-3},
    )
    launch(cfg)
    one, two, three = [store.load(p) for p in reversed(store.steps(Path(cfg.run.dir)))]
    start = dict(load_model(ModelConfig(path=tiny_dir, device="cpu")).module.named_parameters())
    for state, extra in (one, two):
        assert all(torch.equal(state.tensors[f"model/{n}"], p) for n, p in start.items())
        assert (
            not any(n.startswith("optimizer/") for n in state.tensors)
            and extra["counters"].get("updates", 0) == 0
        )
    assert not torch.equal(
        one[0].tensors["part/critic/model/score.weight"],
        two[0].tensors["part/critic/model/score.weight"],
    )
    assert (
        any(not torch.equal(three[0].tensors[f"model/{n}"], p) for n, p in start.items())
        and three[1]["counters"]["updates"] == 1
    )
    adapted = [extra["parts"]["algorithm"]["kl"] for _, extra in (one, two, three)]
    # a policy that does not move says nothing about the coefficient
    assert adapted[:2] == [0.05, 0.05] and adapted[2] < 0.05
    logged = lines(cfg)
    assert ["policy/loss" in m for m in logged] == [False, False, True] and all(
        "critic/loss" in m for m in logged
    )


@pytest.mark.parametrize(
    "critic",
    [{"learning_rate": 3e-3, "warmup": 1, "schedule": {"kind": "linear"}}, {"shared": True}],
    ids=["own", "shared"],
)
def test_a_resumed_run_is_the_same_run(make: Callable[..., Config], critic: dict[str, Any]) -> None:
    """Four steps at once, or cut in the third, after everything in it had changed: models,
    optimizers, statistics, to the last bit.
    """
    same = (
        "algorithm.epochs=2",
        "algorithm.minibatches=2",
        "run.checkpoint.every=2",
        "algorithm.kl.coefficient=0.05",
    )
    reward = [
        {
            "name": "helpers.toy_rewards:odd",
            "center": "running",
            "scale": "running",
            "clip": [-3, 3],
        }
    ]
    straight = make("straight", "ppo", "train.steps=4", *same, critic=critic, rewards=reward)
    run_config(straight, CallerObjects(data=DATA), SilentView())
    cut = make("cut", "ppo", "train.steps=4", *same, critic=critic, rewards=reward)
    with pytest.raises(KeyboardInterrupt):
        run_config(cut, CallerObjects(data=DATA), Stopping(2))
    run_config(cut, CallerObjects(data=DATA), SilentView())
    assert digest(straight) == digest(cut)
    keep = lambda m: {k: v for k, v in m.items() if k.startswith(("critic/", "policy/", "reward/"))}  # noqa: E731
    assert [keep(m) for m in lines(straight)] == [keep(m) for m in lines(cut)]


class Stopping(SilentView):
    """Ends the process' work, in the rudest way, once step `at` is saved."""

    def __init__(self, at: int):
        super().__init__()
        self.at = at

    def update(self, step: int, metrics: dict[str, float]) -> None:
        if step > self.at:
            raise KeyboardInterrupt


def test_a_shared_critic_trains_both_from_one_forward(
    make: Callable[..., Config], tiny_dir: str
) -> None:
    cfg = make("run", "ppo", "algorithm.epochs=2", critic={"shared": True, "coefficient": 0.25})
    launch(cfg)
    found = tensors(cfg)
    assert float(found["model/value_head.weight"].abs().max()) > 1e-3 and not any(
        n.startswith("part/") for n in found
    )
    first = lines(cfg)[0]
    last = lines(cfg)[-1]
    assert first["train/loss"] == pytest.approx(
        first["policy/loss"] + 0.25 * first["critic/loss"], rel=1e-5
    )
    assert last["critic/value"] > first["critic/value"] > 0 or last["critic/value"] > 0.02
    assert "critic/explained_variance" in last and not any("moments" in n for n in last)
    from reinforge.offline.export import export

    out = export(Path(cfg.run.dir), Path(cfg.run.dir) / "out")
    assert not any(
        "value_head" in n
        for n in load_model(ModelConfig(path=str(out), device="cpu")).module.state_dict()
    )


def test_a_shared_critic_moves_the_trunk() -> None:
    """The value loss reaches the policy's trunk: with advantages of 0 its gradient is that of the
    value loss alone, times the coefficient.
    """
    from reinforge.algorithms.losses.policy import PolicyLoss
    from reinforge.algorithms.losses.value import PolicyAndValueLoss
    from reinforge.algorithms.parts.reduce import token_mean
    from reinforge.algorithms.parts.surrogates import ppo_clip

    found = []
    for coefficient in (0.5, 1.0):
        model = make_model()
        model.add_value_head()
        with torch.no_grad():
            model.value_head.weight.fill_(0.1)  # type: ignore[union-attr]
        backend = LocalBackend(model, train_config(), total_steps=1)
        batches = with_targets(make_samples())
        for batch in batches:
            batch.streams["advantages"] = torch.zeros(batch.n_trained)
        backend.forward_backward(
            batches,
            PolicyAndValueLoss(PolicyLoss(ppo_clip, token_mean), ValueLoss(None), coefficient),
            Totals.of(batches),
        )
        found.append({n: g for n, g in gradients(backend).items() if n != "lm_head.weight"})
    assert float(found[0]["model.layers.0.mlp.up_proj.weight"].abs().max()) > 1e-4
    assert relative({n: 2 * g for n, g in found[0].items()}, found[1]) < 1e-5
    alone = ScalarModel.from_causal(make_model())
    with torch.no_grad():
        alone.value_head.weight.fill_(0.1)  # type: ignore[union-attr]
    critic = Critic(LocalBackend(alone, train_config(), total_steps=1), ValueLoss(None))
    batches = with_targets(make_samples())
    critic.backend.forward_backward(batches, critic.loss, Totals.of(batches))
    own = {n.replace("score", "value_head"): g for n, g in gradients(critic.backend).items()}
    assert relative(found[1], own) < 1e-5


def test_a_critic_beside_an_adapter_and_one_of_its_own_checkpoint(
    make: Callable[..., Config], tiny_dir: str, tmp_path: Path
) -> None:
    from reinforge.models.load import load_scalar

    model = load_scalar(ModelConfig(path=tiny_dir, device="cpu"), fresh=True)
    with torch.no_grad():
        model.value_head.weight.normal_(generator=torch.Generator().manual_seed(0))  # type: ignore[union-attr]
    model.save(tmp_path / "critic")
    adapted = make("lora", "ppo", "train.steps=1", **LORA, **PPO)
    launch(adapted)
    found = tensors(adapted)
    assert (
        any("lora" in n for n in found)
        and "part/critic/model/model.layers.0.mlp.up_proj.weight" in found
    )
    own = make(
        "own",
        "ppo",
        "train.steps=1",
        critic={"path": str(tmp_path / "critic"), "learning_rate": 0.0},
    )
    launch(own)
    assert torch.equal(tensors(own)["part/critic/model/score.weight"], model.value_head.weight)  # type: ignore[union-attr]
    assert abs(lines(own)[0]["critic/value"]) > 0.01


def test_useless_combinations_are_refused(
    make: Callable[..., Config], tiny_dir: str, tmp_path: Path
) -> None:
    for sections, overrides, says in (
        ({}, (), "ppo needs the values of a critic; add `critic: {}`"),
        (
            {"critic": {"shared": True, "learning_rate": 1e-3}},
            (),
            "learning_rate: a shared critic is trained with the policy",
        ),
        ({"critic": {"shared": True, "warmup": 2}}, (), "warmup: a shared critic"),
        ({"critic": {"coefficient": 0.5}}, (), "only a shared critic"),
        ({"critic": {"warmup": 3}}, (), "3 of 3 steps leave none"),
        ({"critic": {}}, ("algorithm.name=grpo",), "grpo with this advantage reads no values"),
    ):
        with pytest.raises(InputError, match=says):
            make("run", "ppo", *overrides, **sections)
    (tmp_path / "mine.py").write_text(
        "def plain(rollouts, options):\n    return rollouts.rewards[rollouts.sequence]\n"
    )
    cfg = make("mine", "grpo", f"algorithm.advantage={tmp_path}/mine.py:plain", critic={})
    with pytest.raises(InputError, match="the advantage reads no values"):
        launch(cfg)
    other = shutil.copytree(tiny_dir, tmp_path / "other")
    spec = json.loads((other / "tokenizer.json").read_text())
    spec["model"]["vocab"] |= {"a": spec["model"]["vocab"]["b"], "b": spec["model"]["vocab"]["a"]}
    (other / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(
        InputError,
        match=r"critic.path: the critic reads the policy's tokens, and .* has other ones",
    ):
        launch(make("other", "ppo", critic={"path": str(other)}))


def test_config_defaults() -> None:
    raw = {
        "model": {"path": "x/y"},
        "algorithm": {"name": "ppo"},
        "data": {"source": "arithmetic:sum"},
        "rewards": [{"name": "exact_number"}],
        "train": {"steps": 3},
        "run": {"dir": "r"},
        "critic": {},
    }
    critic = config_from_dict(raw).critic
    assert critic is not None and (
        critic.clip,
        critic.warmup,
        critic.shared,
        critic.learning_rate,
    ) == (0.2, 0, False, None)
    assert odd(["ab"]) == [0.5]
