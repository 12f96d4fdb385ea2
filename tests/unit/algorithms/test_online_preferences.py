"""Preferences over what is sampled: which answers become pairs, who the opponent is, and that every
name learns in the ordinary loop.
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.offline_runs import config
from helpers.tiny_runs import digest, lines
from helpers.toy_rewards import letters
from helpers.toys import SilentView, ToyTokenizer, make_module, run, tokens_of
from helpers.toys import train_config as train_section
from reinforge.algorithms.build import build as build_algorithm
from reinforge.algorithms.catalogue import TABLE
from reinforge.algorithms.losses.nash import NashLoss, geometric_mixture
from reinforge.algorithms.losses.rows import with_stream
from reinforge.algorithms.pairing import (
    against_opponent,
    best_and_worst,
    keep_best,
    self_play,
    win_rates,
)
from reinforge.backends.local import LocalBackend
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.run import train_config
from reinforge.build.trainer import build
from reinforge.config.adapter import AdapterConfig
from reinforge.core.backend import TrainedTokens
from reinforge.core.batch import Totals
from reinforge.core.engine import Sampling
from reinforge.core.errors import InputError
from reinforge.core.sample import Group, Row, Sample
from reinforge.engines.native import NativeEngine
from reinforge.engines.with_opponent import EngineWithOpponent
from reinforge.models.adapters import add_adapter
from reinforge.models.causal import CausalModel
from reinforge.models.mixture import ModelMixture
from reinforge.models.tiny import make_tiny_model

# which answers are trained


def answer(
    i: int,
    reward: float | None,
    *,
    opponent: bool | None = None,
    tokens: list[int] | None = None,
    trained: bool = True,
) -> Sample:
    ids = tokens or [5, 6, 7 + i]
    sample = Sample.from_tokens(
        f"g#{i}", ids, [False, *[trained] * (len(ids) - 1)], group="g", reward=reward
    )
    return sample if opponent is None else with_stream(sample, "by_reference", float(opponent))


def group(*samples: Sample, given: Sample | None = None) -> Group:
    return Group(Row("r", "?"), list(samples), given=given)


def uids(samples: list[Sample]) -> list[str]:
    return [s.uid.rpartition("#")[2] for s in samples]


def test_the_best_against_the_worst() -> None:
    four = group(answer(0, 0.5), answer(1, 2.0), answer(2, None), answer(3, -1.0))
    made = best_and_worst(four)
    assert uids(made) == ["1", "3"] and [float(s.streams["score"][0]) for s in made] == [2.0, -1.0]
    assert (
        uids(best_and_worst(four, margin=2.9)) == ["1", "3"]
        and best_and_worst(four, margin=3.0) == []
    )
    assert best_and_worst(group(answer(0, 1.0), answer(1, 1.0))) == []  # equal: nothing to learn
    # the same text
    assert best_and_worst(group(answer(0, 1.0), answer(1, 0.0, tokens=[5, 6, 7]))) == []
    assert uids(
        best_and_worst(group(answer(0, 9.0, trained=False), answer(1, 1.0), answer(2, 0.0)))
    ) == ["1", "2"]
    assert best_and_worst(group(answer(0, None), answer(1, None))) == []
    with pytest.raises(InputError, match="several rows"):
        best_and_worst(group(answer(0, 1.0), answer(1, 0.0), answer(2, 0.5).with_(episode="g#1")))


def test_a_contest_pairs_the_policy_with_its_opponent() -> None:
    own = [answer(i, r, opponent=False) for i, r in enumerate((1.0, 0.0, 1.0))]
    theirs = [0.0, 2.0, 1.0]
    made = against_opponent(
        group(*own, *(answer(3 + i, r, opponent=True) for i, r in enumerate(theirs)))
    )
    assert uids(made) == ["0", "3", "4", "1"]  # the third is a tie
    assert [float(s.streams["by_reference"][-1]) for s in made] == [0, 1, 1, 0]


def test_self_play_prefers_the_data() -> None:
    given = answer(9, 0.0, opponent=False)
    made = self_play(
        group(answer(0, 0.0, opponent=True), answer(2, 0.0, opponent=True), given=given)
    )
    assert uids(made) == ["9", "0", "9", "2"]
    # it wrote the data's answer
    assert self_play(group(answer(9, 0.0, opponent=True), given=given)) == []


def test_win_rates() -> None:
    both = group(
        answer(0, 1.0, opponent=False),
        answer(1, 0.0, opponent=False),
        answer(2, 0.0, opponent=True),
        answer(3, 0.0, opponent=True),
    )
    assert [float(s.streams["wins"][-1]) for s in win_rates(both)] == pytest.approx(
        [1 / (1 + math.exp(-1)), 0.5]
    )
    assert [float(s.streams["wins"][-1]) for s in win_rates(both, wins="hard")] == [1.0, 0.5]
    assert uids(win_rates(both)) == ["0", "1"]
    with pytest.raises(InputError, match="no way to count"):
        win_rates(both, wins="soft")  # type: ignore[arg-type]


def test_the_best_are_kept() -> None:
    five = group(
        answer(0, 0.2),
        answer(1, 0.9),
        answer(2, 0.0),
        answer(3, 0.9, tokens=[5, 6, 8]),
        answer(4, 0.5),
    )
    assert uids(keep_best(five)) == ["1"] and uids(keep_best(five, keep=2)) == ["1", "4"]
    assert uids(keep_best(five, keep=None)) == ["1", "4", "0"]  # above 0, and what is the same once
    assert uids(keep_best(five, keep=None, threshold=0.4, distinct=False)) == ["1", "3", "4"]
    assert keep_best(group(answer(0, 0.0), answer(1, -1.0))) == []
    assert uids(keep_best(group(answer(0, -2.0), answer(1, -1.0)), threshold=None)) == ["1"]


def test_nash_loss_by_hand() -> None:
    """-mean over answers of (P - 1/2 - beta (log pi - log mu)) log pi, and its gradient is minus
    the bracket.
    """
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    streams = {"reference": torch.tensor([-1.5, -1.0, -1.5]), "wins": torch.tensor([0.9, 0.9, 0.2])}
    tokens = TrainedTokens(
        logprobs,
        None,
        torch.tensor([0, 0, 1]),
        torch.tensor([2, 1]),
        torch.tensor([2, 2, 1]),
        streams,
    )
    loss, metrics = NashLoss(beta=0.1)(tokens, Totals(3, 2, 8, {"a": 2, "b": 1}, samples=2))
    first = 0.9 - 0.5 - 0.1 * (-3.0 + 2.5)
    second = 0.2 - 0.5 - 0.1 * (-0.5 + 1.5)
    assert loss.item() == pytest.approx(-(first * -3.0 + second * -0.5) / 2)
    loss.backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx(
        [-first / 2, -first / 2, -second / 2]
    )
    assert metrics["nash/wins"].item() == pytest.approx(0.55) and metrics[
        "nash/kl"
    ].item() == pytest.approx(0.25)


def test_settings_are_checked() -> None:
    assert (
        build_algorithm("nash_md").opponent == 0.125
        and build_algorithm("xpo").opponent == 1.0
        and build_algorithm("spin").given
    )
    assert build_algorithm("online_dpo").opponent is None
    for name, options, message in (
        ("online_dpo", {"settings": {"mixture": 0.5}}, "mixture"),
        ("nash_md", {"settings": {"mixture": 0.0}}, "no share"),
        ("best_of_n", {"settings": {"beta": 0.1}}, "beta"),
        ("online_dpo", {"losses": {"aot": 1.0}}, "ranks"),
        ("xpo", {"losses": {"ipo": 1.0}}, "exploration"),
        ("best_of_n", {"losses": {"ipo": 1.0}}, "losses"),
    ):
        with pytest.raises(InputError, match=message):
            build_algorithm(name, **options)


# the opponent


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("coefficient", [0.3, 1.0])
def test_the_opponent_samples_the_geometric_mixture(coefficient: float, lora: bool) -> None:
    """What it reports for its tokens are the log-probs of pi^(1-c) mu^c, computed by whole forwards
    of either model; the policy has moved away from the reference, and its own engine on the same
    module is left alone.
    """
    module = make_module()
    if lora:
        module = add_adapter(module, AdapterConfig(rank=4), seed=0)
    policy = CausalModel(module, ToyTokenizer())
    backend = LocalBackend(policy, train_section(), total_steps=1, reference=True)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if p.requires_grad and ("lora_B" in name or not lora):
                p.add_(
                    0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name)))
                )
    assert backend.reference is not None
    engine = NativeEngine(policy, kv_gib=0.01)
    opponent = NativeEngine(
        ModelMixture(policy, backend.reference.active, coefficient), kv_gib=0.01
    )
    both = EngineWithOpponent(engine, opponent)
    prompts = [tokens_of(n, n) for n in (5, 19)]
    temperature = 0.7

    async def sample() -> list[Any]:
        await both.update(backend.weights(), 1)
        params = Sampling(12, temperature)
        return list(
            await asyncio.gather(
                *(
                    e.generate(p, params, key=i, n=2)
                    for i, p in enumerate(prompts)
                    for e in (opponent, engine)
                )
            )
        )

    made = run(sample())
    for i, prompt in enumerate(prompts):
        for c, share in ((made[2 * i], coefficient), (made[2 * i + 1], 0.0)):
            for completion in c:
                ids = prompt + completion.tokens
                with torch.no_grad(), backend.reference.active() as reference:
                    theirs = full(reference, ids) / temperature
                ours = full(policy, ids) / temperature
                mixed = geometric_mixture(ours, theirs, coefficient=share)[len(prompt) - 1 : -1]
                expected = mixed.gather(-1, torch.tensor(completion.tokens)[:, None])[:, 0]
                assert completion.logprobs == pytest.approx(expected.tolist(), abs=2e-4)
    sizes = {"block": 16, "opponent_block": 16}
    assert both.state() == {"blocks": engine.blocks, "opponent_blocks": opponent.blocks, **sizes}
    both.load({"blocks": 9, "opponent_blocks": 10, **sizes})
    assert (engine.blocks, opponent.blocks) == (9, 10)


@torch.no_grad()
def full(model: CausalModel, ids: list[int]) -> torch.Tensor:
    from reinforge.models.attention import PackedLayout, starts_of

    device = torch.device("cpu")
    return model.logits(
        model.hidden(
            torch.tensor(ids),
            torch.arange(len(ids)),
            PackedLayout([len(ids)], starts_of([len(ids)], device)),
        )
    )


# whole runs

ONLINE = [name for name, spec in TABLE.items() if spec.kind.online]
ROWS = [
    {"prompt": f"{i} {case}:", "case": case, "completion": "abcd" if case == "small" else "ABCD"}
    for i in range(16)
    for case in ("small", "LARGE")
]


@pytest.fixture(scope="module")
def blank(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(
        make_tiny_model(
            tmp_path_factory.mktemp("blank") / "model",
            width=32,
            layers=1,
            heads=2,
            kv_heads=1,
            context=32,
            spread=0.1,
        )
    )


def setup(
    model: str, folder: Path, name: str, *overrides: str, steps: int = 40, **algorithm: Any
) -> Any:
    return config(
        model,
        folder,
        name,
        *overrides,
        steps=steps,
        lr=1e-2,
        algorithm={"group_size": 8, **algorithm},
        train={"prompts_per_step": 8},
        rollout={"max_new_tokens": 4, "kv_gib": 0.01},
        rewards=[{"name": "letters"}],
    )


def learn(cfg: Any) -> list[dict[str, Any]]:
    train_config(cfg, CallerObjects(data=ROWS, rewards=[letters]), SilentView())
    return lines(cfg)


LEARN: dict[str, dict[str, Any]] = {
    "xpo": {"beta": 0.05},
    "nash_md": {"beta": 0.01, "options": {"wins": "hard"}},
    "spin": {"kl": {"reference": {"kind": "sync", "every": 5}}},
}


# name: (steps, what the last reward must pass). The default is far below the 0.96 that several
# seeds of the others reach; these two are slower: 0.52 to 0.57 (xpo) and 0.55 to 0.77 after 70
# steps.
SLOW: dict[str, tuple[int, float]] = {"xpo": (70, 0.35), "rejection_sampling": (70, 0.4)}


# before the first update policy and reference are the same; xpo adds its exploration
FIRST_LOSS: dict[str, tuple[float, float]] = {
    "online_dpo": (math.log(2), 1e-5),
    "spin": (math.log(2), 1e-5),
    "xpo": (math.log(2), 1e-3),
}
# the most pairs or answers that 8 prompts with 8 answers each can give
UNITS = {
    "online_dpo": 8,
    "xpo": 32,
    "nash_md": 32,
    "spin": 64,
    "best_of_n": 8,
    "raft": 8,
    "rejection_sampling": 64,
}
ALL_ARE_USED = ("nash_md", "spin", "raft")


@pytest.mark.parametrize(
    "name",
    # xpo is online_dpo with another term, and takes four times as long
    [pytest.param(name, marks=pytest.mark.long) if name == "xpo" else name for name in ONLINE],
)
def test_it_learns(blank: str, tmp_path: Path, name: str) -> None:
    """Without reading the prompt no policy passes 1/2."""
    steps, bar = SLOW.get(name, (40, 0.8))
    metrics = learn(setup(blank, tmp_path / "run", name, steps=steps, **LEARN.get(name, {})))
    late = sum(m["reward/mean"] for m in metrics[-4:]) / 4
    assert metrics[0]["reward/mean"] < 0.25 and late > bar, (metrics[0]["reward/mean"], late)
    for m in metrics:
        assert (
            m["tokens/sampled"] + m.get("tokens/given", 0)
            == m["tokens/trained"] + m["tokens/dropped"]
            and m["tokens/dropped"] >= 0
        )
    first = metrics[0]
    if name in FIRST_LOSS:
        want, margin = FIRST_LOSS[name]
        assert first["preference/loss"] == pytest.approx(want, abs=margin)
    if name in UNITS:
        most = UNITS[name]
        assert most / 4 <= first["batch/units"] <= most
        if name in ALL_ARE_USED:
            assert first["batch/units"] == most


@pytest.mark.parametrize("name", ["xpo", "spin", "online_dpo"])
def test_resume_is_exact(blank: str, tmp_path: Path, name: str) -> None:
    extra = {"kl": {"reference": {"kind": "sync", "every": 2}}} if name == "spin" else {}
    whole, cut = (
        setup(blank, tmp_path / kind, name, steps=5, **extra) for kind in ("whole", "cut")
    )
    learn(whole)
    learn(cut.model_copy(update={"train": cut.train.model_copy(update={"steps": 3})}))
    learn(cut)
    assert digest(whole) == digest(cut)


def test_an_adapter_plays_against_itself(blank: str, tmp_path: Path) -> None:
    """The opponent is the module with its adapter off, and no copy is made."""
    cfg = setup(blank, tmp_path / "run", "xpo", steps=3).model_copy(
        update={"adapter": AdapterConfig(rank=4)}
    )
    trainer = build(cfg, SilentView(), CallerObjects(data=ROWS, rewards=[letters]))
    assert isinstance(trainer.backend, LocalBackend) and trainer.backend.frozen is None
    metrics = learn(cfg)
    assert (
        metrics[0]["rewards/margin"] == pytest.approx(0, abs=1e-5)
        and metrics[-1]["rewards/margin"] > 0
    )


def test_other_losses_and_several_updates(blank: str, tmp_path: Path) -> None:
    """Any loss over one pair will do, also one that compares given scores: those are
    the rewards.
    """
    losses = {"ipo": 1.0, "rpo_sq": 0.5}
    once = learn(setup(blank, tmp_path / "once", "online_dpo", steps=1, losses=losses))[0]
    assert (
        once["preference/ipo"] == pytest.approx(25, abs=1e-4)
        and 1 / 16 <= once["preference/rpo_sq"] <= 1
    )  # policy = reference: the gap squared
    assert once["preference/loss"] == pytest.approx(25 + 0.5 * once["preference/rpo_sq"], abs=1e-4)
    more = learn(
        setup(
            blank, tmp_path / "more", "online_dpo", steps=1, losses=losses, minibatches=2, epochs=2
        )
    )[0]
    # the mean of four updates on the same answers
    assert more["preference/ipo"] < 24 and more["batch/units"] == once["batch/units"]


def test_a_step_without_a_pair_changes_nothing(blank: str, tmp_path: Path) -> None:
    metrics = learn(setup(blank, tmp_path / "run", "online_dpo", steps=1, options={"margin": 2.0}))
    assert (
        metrics[0]["train/empty"] == 1
        and metrics[0]["batch/units"] == 0 == metrics[0]["tokens/trained"]
    )


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("xpo", ["algorithm.group_size=3"], "even number"),
        ("online_dpo", ["algorithm.group_size=1"], "nothing to compare"),
        ("online_dpo", ["sampling={replay: {}}"], "fresh answers"),
        ("online_dpo", ["algorithm.clip.low=0.1"], "does not read it"),
        ("best_of_n", ["algorithm.beta=0.1"], "does not read it"),
        ("online_dpo", ["train.precompute_reference=true"], "change with the batch"),
        ("online_dpo", ["rewards=[]"], "needs at least one reward"),
        ("nash_md", ["algorithm.kl.coefficient=0.1"], "does not read it"),
    ],
)
def test_what_makes_no_sense_is_refused(
    blank: str, tmp_path: Path, name: str, overrides: list[str], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        setup(blank, tmp_path / "run", name, *overrides)
