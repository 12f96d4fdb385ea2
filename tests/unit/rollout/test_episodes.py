"""Multi-turn rollouts: token in, token out; what fails is unscored and stays so; what the clock
decided is journalled.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.dialogues import (
    ENDLESS,
    FORGETFUL,
    UNDECIDED,
    Blocking,
    Echo,
    Misbehaving,
    Saying,
    end_of,
    make_episodes,
    make_renderer,
    spelled,
)
from helpers.toys import gradients, make_module, relative, run, train_config, true_logprobs
from reinforge.algorithms.build import build
from reinforge.algorithms.parts.rollouts import Rollouts
from reinforge.backends.local import LocalBackend
from reinforge.core.batch import Batch, Totals, pack
from reinforge.core.engine import Sampling
from reinforge.core.env import Action, Observation, RolloutContext, Step
from reinforge.core.errors import InputError
from reinforge.core.sample import Group, Row, Stop
from reinforge.core.seeds import seed_of
from reinforge.data.dialogue import DialogueTokens
from reinforge.engines.native import NativeEngine
from reinforge.envs.single import SingleTurnEnv
from reinforge.envs.toolbox import ToolEnv
from reinforge.models.causal import CausalModel
from reinforge.rewards.function import FunctionReward
from reinforge.rollout.dialogue.episode import EpisodeLimits
from reinforge.rollout.journal import Journal
from reinforge.rollout.players.single_turn import SingleTurn
from reinforge.rollout.scoring import RewardScorer
from reinforge.rollout.source import RolloutBatch, has_signal, rollout_metrics

ROW = Row("r", "What is 12*34?", {"answer": "408"})
CALLS = [
    (
        'Let me see.<tool_call>{"name": "calculator", "arguments": {"expression":'
        ' "12*34"}}</tool_call>'
    ),
    '<tool_call>{"name":"calculator","arguments":{"expression":"400+8"}}</tool_call>',
    '<tool_call>{"name": "calculator", "arguments": oops</tool_call>',
    '<tool_call>{"name": "abacus"}</tool_call>',
    "It is 408.",
]


def test_five_turns_with_tools_are_the_engines_ids_byte_for_byte() -> None:
    """Every request continues the row so far; the row's trained ids are what was sampled, and not
    what the text would encode to.
    """
    renderer = make_renderer()
    engine = Saying(renderer, CALLS)
    episodes = make_episodes(engine, renderer, lambda row: ToolEnv(["calculator"]))
    group = run(episodes(ROW, RolloutContext("g")))
    [sample] = group.samples
    tokens = sample.tokens.tolist()
    trained = sample.trained.tolist()
    assert len(engine.said) == 5
    end = 0
    for prompt, completion in engine.said:
        assert tokens[: len(prompt)] == prompt, "the context is the exact ids so far"
        assert not any(trained[end : len(prompt)]) and all(
            trained[len(prompt) : len(prompt) + len(completion)]
        )
        assert tokens[len(prompt) : len(prompt) + len(completion)] == completion
        end = len(prompt) + len(completion)
    assert end == len(tokens) and sample.n_trained == sum(len(c) for _, c in engine.said)
    said = [c for _, c in engine.said]
    assert all(renderer.template.plain(renderer.decode(c)) != c[:-1] for c in said), (
        "decode and encode must not be inverse here"
    )
    text = renderer.tokenizer.decode(tokens)
    assert text.count("<|im_end|>") == text.count("<|im_start|>") == 11, (
        "no end of turn twice, none missing"
    )
    assert (
        "<|im_start|>tool\n408<|im_end|>" in text
        and "error: there is no tool abacus" in text
        and "could not be read" in text
    )
    assert (
        group.metrics["env/calls"],
        group.metrics["env/malformed_calls"],
        group.metrics["env/turns"],
    ) == (3.0, 1.0, 5.0)
    assert sample.reward == 0.0 and sample.stop is Stop.ENVIRONMENT


def test_the_context_is_what_the_template_renders() -> None:
    """With turns as an encoder writes them, a conversation that grew equals one that is rendered at
    once.
    """
    renderer = make_renderer()
    dialogue = DialogueTokens(renderer, "test")
    ids = dialogue.begin([{"role": "user", "content": "a <|im_end|> b"}])
    for answer, new in (("first", "more <|im_start|>"), ("second", "enough")):
        sampled = [*renderer.template.plain(answer), end_of(renderer)]
        ids += (
            sampled
            + dialogue.go_on(
                sampled,
                {"role": "assistant", "content": answer},
                [{"role": "user", "content": new}],
            ).ids
        )
    assert ids == renderer.prompt(Row("x", dialogue.messages))
    assert ids.count(end_of(renderer)) == 5, "what users spell stays text"


def test_a_last_turn_that_looks_different_is_no_rewriting() -> None:
    """The template writes more into the last answer than into earlier ones: nothing that was
    sampled changes.
    """
    renderer = make_renderer(UNDECIDED)
    group = run(
        make_episodes(Saying(renderer, ["a", "b", "c"]), renderer, lambda row: Echo(3))(
            ROW, RolloutContext("g")
        )
    )
    text = renderer.tokenizer.decode(group.samples[0].tokens.tolist())
    assert (
        len(group.samples) == 1
        and "think" not in text
        and text.count("<|im_end|>") == text.count("<|im_start|>") == 6
    )


def test_a_turn_may_end_where_the_next_begins() -> None:
    """The model stops by sampling the header of the next turn, which is then not written a second
    time.
    """
    renderer = make_renderer(ENDLESS)
    start = int(renderer.tokenizer.convert_tokens_to_ids("<|im_start|>"))
    engine = Saying(renderer, [[*spelled(renderer, "hi", end=False), start]])
    engine.stop_tokens = frozenset({start})
    group = run(make_episodes(engine, renderer, lambda row: Echo(2))(ROW, RolloutContext("g")))
    text = renderer.tokenizer.decode(group.samples[0].tokens.tolist())
    assert (
        text == "<|im_start|>user\nWhat is 12*34?<|im_start|>assistant\nhi<|im_start|>user\ngo"
        " on<|im_start|>assistant\nhi<|im_start|>"
    )
    assert group.samples[0].n_trained == 6


@pytest.mark.parametrize("last", ["cut", "eos"])
def test_a_missing_end_of_turn_is_added_and_not_trained(last: str) -> None:
    renderer = make_renderer()
    eos = renderer.tokenizer.eos_token_id
    line = spelled(renderer, "abcdef", end=False) + ([] if last == "cut" else [eos])
    engine = Saying(renderer, [line, "x"])
    group = run(
        make_episodes(engine, renderer, lambda row: Echo(2), new_tokens=6 if last == "cut" else 50)(
            ROW, RolloutContext("g")
        )
    )
    tokens = group.samples[0].tokens.tolist()
    trained = group.samples[0].trained.tolist()
    prompt, completion = engine.said[0]
    at = len(prompt) + len(completion)
    assert completion == line and tokens[at] == end_of(renderer) and not trained[at]
    assert renderer.tokenizer.decode(tokens[at:]).startswith(
        "<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    )


def test_draws_depend_on_seed_purpose_sample_and_turn_alone() -> None:
    renderer = make_renderer()
    engine = Saying(renderer, ["x"])
    run(
        make_episodes(engine, renderer, lambda row: Echo(2), n=3, seed=7)(
            ROW, RolloutContext("5:r")
        )
    )
    keys = {key for _, _, key, _ in engine.requests}
    assert keys == {seed_of(7, "sample", f"5:r#{i}", t) for i in range(3) for t in range(2)}


def test_chance_in_the_environment_is_shared_by_a_group() -> None:
    seeds: list[int] = []
    chances: list[int] = []

    class Drawing(Echo):
        async def reset(self, row: Row, seed: int) -> Observation:
            seeds.append(seed)
            return await super().reset(row, seed)

        async def step(self, action: Action) -> Step:
            chances.append(action.seed)
            return await super().step(action)

    renderer = make_renderer()
    episodes = make_episodes(Saying(renderer, ["x"]), renderer, lambda row: Drawing(2), n=3)
    for name in ("a", "b", "a"):
        run(episodes(ROW, RolloutContext(name)))
    assert len(set(seeds)) == 2 and seeds[:3] == [seeds[0]] * 3 and seeds[6:] == seeds[:3]
    assert len(set(chances)) == 12 and chances[12:] == chances[:6]


def test_one_turn_is_the_single_turn_rollout() -> None:
    """The environment that is none: the same prompt ids, and rewards of the config on the final
    text.
    """
    renderer = make_renderer()
    seen: list[Any] = []

    def length(
        completions: list[str], transcript: list[Any] | None = None, **_: Any
    ) -> list[float | None]:
        seen.append(transcript)
        return [float(len(c)) for c in completions]

    def make_reward() -> FunctionReward:
        return FunctionReward("length", length, 0.5, pure=True)

    single = SingleTurn(
        Saying(renderer, ["four"]),
        renderer.prompt,
        renderer.decode,
        [make_reward()],
        Sampling(50),
        n=2,
        seed=0,
    )
    many = make_episodes(
        Saying(renderer, ["four"]),
        renderer,
        lambda row: SingleTurnEnv(),
        n=2,
        scorer=RewardScorer([make_reward()], weights={"env": 1.0}),
    )
    one = run(single(ROW, RolloutContext("g")))
    other = run(many(ROW, RolloutContext("g")))
    for a, b in zip(one.samples, other.samples, strict=True):
        assert (
            torch.equal(a.tokens, b.tokens)
            and torch.equal(a.trained, b.trained)
            and torch.equal(a.logprobs, b.logprobs)
            and a.uid == b.uid
        )
        assert a.reward == b.reward == 2.0 and b.rewards == {"env": None, "length": 4.0}
    assert one.texts == other.texts == ["four", "four"]
    assert seen[1][0] == [
        {"role": "user", "content": ROW.prompt},
        {"role": "assistant", "content": "four"},
    ]


def test_rewards_of_turns_are_at_their_last_tokens() -> None:
    renderer = make_renderer()
    engine = Saying(renderer, ["a", "bb", "ccc"])
    scorer = RewardScorer([], weights={"env": 2.0})
    group = run(
        make_episodes(engine, renderer, lambda row: Echo(3, [0.25, None, 1.0]), scorer=scorer)(
            ROW, RolloutContext("g")
        )
    )
    [sample] = group.samples
    at = len(engine.said[0][0]) + len(engine.said[0][1]) - 1
    assert (
        sample.token_rewards is not None
        and sample.token_rewards.nonzero()[:, 0].tolist() == [at]
        and float(sample.token_rewards[at]) == 0.5
    )
    assert (
        sample.reward == 2.0
        and sample.rewards == {"env": 1.0}
        and group.metrics["env/return"] == 1.25
        and group.metrics["env/heard"] == 3.0
    )
    assert float(Rollouts.of([Batch.pack([sample])]).totals[0]) == 2.5


def test_limits_end_an_episode_as_truncated() -> None:
    renderer = make_renderer()
    turns = run(
        make_episodes(
            Saying(renderer, ["x"]),
            renderer,
            lambda row: Echo(99, [0.5] * 99),
            limits=EpisodeLimits(4000, 3),
        )(ROW, RolloutContext("g"))
    )
    assert (
        turns.samples[0].stop is Stop.LENGTH
        and turns.metrics["env/turns"] == 3
        and turns.samples[0].reward == 0.5
    )
    full = run(
        make_episodes(
            Saying(renderer, ["x" * 30]),
            renderer,
            lambda row: Echo(99),
            limits=EpisodeLimits(150, 99),
        )(ROW, RolloutContext("g"))
    )
    assert (
        full.samples[0].stop is Stop.LENGTH
        and len(full.samples[0].tokens) <= 150 + 60
        and full.samples[0].reward == 0.0
    )
    none = run(
        make_episodes(
            Saying(renderer, ["x"]), renderer, lambda row: Echo(2), limits=EpisodeLimits(10, 9)
        )(ROW, RolloutContext("g"))
    )
    assert (
        none.samples[0].stop is Stop.ERROR
        and none.samples[0].reward is None
        and none.samples[0].n_trained == 0
    )


@pytest.mark.parametrize("truncated", [True, False])
def test_an_environment_that_ran_into_its_own_limit_says_so(truncated: bool) -> None:
    """The answer itself ended by a stop token: only the environment knows that the episode did not
    end by itself.
    """

    class Limited(Echo):
        async def step(self, action: Action) -> Step:
            return Step(None, 1.0, done=True, truncated=truncated)

    renderer = make_renderer()
    [sample] = run(
        make_episodes(Saying(renderer, ["x"]), renderer, lambda row: Limited())(
            ROW, RolloutContext("g")
        )
    ).samples
    assert sample.stop is (Stop.LENGTH if truncated else Stop.ENVIRONMENT) and sample.reward == 1.0


# ---- templates that rewrite history ----


def test_a_template_that_rewrites_history_makes_new_rows() -> None:
    renderer = make_renderer(FORGETFUL)
    engine = Saying(renderer, ["<think>hm</think>one", "<think>well</think>two", "three"])
    episodes = make_episodes(engine, renderer, lambda row: Echo(3, [None, None, 1.0]), n=2)
    group = run(episodes(ROW, RolloutContext("g")))
    assert [s.uid for s in group.samples] == ["g#0", "g#0.1", "g#0.2", "g#1", "g#1.1", "g#1.2"]
    assert [s.episode for s in group.samples] == ["g#0"] * 3 + ["g#1"] * 3 and len(
        group.episodes
    ) == 2
    assert episodes.counts["rewritten"] == 4 and group.metrics["env/rewritten"] == 2.0
    first = engine.said[::2]
    assert len(first) == 3
    for sample, (prompt, completion) in zip(group.samples, first, strict=False):
        assert sample.tokens.tolist() == [*prompt, *completion] and sample.n_trained == len(
            completion
        ), "each sampled id is trained once"
    assert "hm" not in renderer.tokenizer.decode(group.samples[1].tokens.tolist())
    assert all(s.reward == 1.0 for s in group.samples)


def forked(rewards: list[float]) -> tuple[list[Group], list[Group]]:
    """Two episodes of one prompt, the first in three rows, and the same as single rows."""
    out = []
    for template in (FORGETFUL, None):
        renderer = make_renderer(template) if template else make_renderer()
        given = iter(rewards)
        engine = Saying(renderer, ["<think>hm</think>one", "<think>well</think>two"])
        out.append(
            [
                run(
                    make_episodes(
                        engine,
                        renderer,
                        lambda row, given=given: Echo(2, [None, next(given)]),
                        n=len(rewards),
                    )(ROW, RolloutContext("g"))
                )
            ]
        )
    return out[0], out[1]


def test_forked_rows_count_once_in_group_statistics() -> None:
    """Advantages, signal and metrics are those of the same episodes in one row each."""
    forks, plain = forked([1.0, 0.0, 0.0])
    assert len(forks[0].samples) == 6 and len(plain[0].samples) == 3
    found = []
    for [group] in (forks, plain):
        batch = Batch.pack(group.samples)
        build("grpo").advantages([batch])
        advantages = batch.streams["advantages"]
        found.append(
            {
                s.episode: float(advantages[batch.sequence == i][0])
                for i, s in enumerate(batch.samples)
            }
        )
        assert has_signal(group)
        metrics = rollout_metrics(RolloutBatch([group]), {"env": 1.0})
        assert metrics["reward/mean"] == pytest.approx(1 / 3) and metrics[
            "response/length"
        ] == pytest.approx(sum(s.n_trained for s in group.samples) / 3)
    assert found[0] == pytest.approx(found[1]) and found[0]["g#0"] == pytest.approx(
        2 / 3**0.5, rel=1e-3
    )


# ---- what must not be trained ----


def native(renderer: Any) -> tuple[CausalModel, NativeEngine]:
    module = make_module(
        "llama", vocab_size=len(renderer.tokenizer), max_position_embeddings=512, spread=1.0
    )
    model = CausalModel(module, renderer.tokenizer)
    return model, NativeEngine(model, stop_tokens=renderer.stop_tokens, kv_gib=0.01, context=512)


def test_behaviour_is_the_training_forward_over_many_turns() -> None:
    """The native engine's log-probs of every turn are those of one forward over the whole row."""
    renderer = make_renderer()
    _, engine = native(renderer)
    group = run(
        make_episodes(engine, renderer, lambda row: Echo(4), n=3, new_tokens=6)(
            ROW, RolloutContext("g")
        )
    )
    module = make_module(
        "llama", vocab_size=len(renderer.tokenizer), max_position_embeddings=512, spread=1.0
    )
    for sample in group.samples:
        assert sample.n_trained >= 4
        truth = true_logprobs(module, sample.tokens.tolist())
        torch.testing.assert_close(
            sample.logprobs[1:][sample.trained[1:]].double(),
            truth[sample.trained[1:]],
            atol=1e-5,
            rtol=0,
        )


def test_no_gradient_comes_from_what_the_environment_said() -> None:
    """The backend's gradient is that of the sampled tokens alone: exactly zero at the logits of
    every other token.
    """
    renderer = make_renderer()
    model, engine = native(renderer)
    group = run(
        make_episodes(engine, renderer, lambda row: Echo(3), n=2, new_tokens=5)(
            ROW, RolloutContext("g")
        )
    )
    samples = [
        s.with_(streams={"advantages": torch.where(s.trained, 1.0 + i, 0.0)})
        for i, s in enumerate(group.samples)
    ]
    module = make_module(
        "llama", vocab_size=len(renderer.tokenizer), max_position_embeddings=512, spread=1.0
    )
    total = sum(s.n_trained for s in samples)
    for i, sample in enumerate(samples):
        logits = module(sample.tokens[None], use_cache=False).logits[0]
        logits.retain_grad()
        logp = logits[:-1].log_softmax(-1).gather(-1, sample.tokens[1:, None])[:, 0]
        ratio = (logp - logp.detach()).exp()
        (-(1.0 + i) * ratio[sample.trained[1:]].sum() / total).backward()
        assert logits.grad is not None
        silent = ~torch.cat([sample.trained[1:], torch.tensor([False])])
        assert (
            int(silent.sum()) > 40
            and bool((logits.grad[silent] == 0).all())
            and bool((logits.grad[~silent].abs().sum(-1) > 0).all())
        )
    expected = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    backend = LocalBackend(model, train_config(), total_steps=1)
    batches = pack(samples, 10_000)
    backend.forward_backward(batches, build("grpo", reduce="token_mean").loss, Totals.of(batches))
    found = gradients(backend)
    assert relative({k: found[k] for k in expected}, expected) < 1e-4


# ---- failures ----


@pytest.mark.parametrize(
    "how,at,kind",
    [
        ("sleeps", 1, "timeout"),
        ("sleeps", -1, "timeout"),
        ("raises", 1, "error"),
        ("raises", -1, "error"),
        ("lies", 0, "error"),
    ],
)
def test_an_environment_that_misbehaves_leaves_the_episode_unscored(
    how: str, at: int, kind: str
) -> None:
    renderer = make_renderer()
    turn = iter(range(100))
    told: list[str] = []
    episodes = make_episodes(
        Saying(renderer, ["x"]),
        renderer,
        lambda row: (
            Misbehaving(how, at, rewards=[0, 0, 1]) if next(turn) == 0 else Echo(3, [0, 0, 1])
        ),
        n=3,
        limits=EpisodeLimits(4000, 8, turn_seconds=0.2),
        tell=told.append,
    )
    group = run(episodes(ROW, RolloutContext("g")))
    assert (
        [s.reward for s in group.samples] == [None, 1.0, 1.0]
        and group.samples[0].stop is Stop.ERROR
        and group.samples[0].rewards == {"env": None}
    )
    assert (
        episodes.counts[f"failed_{kind}"] == 1
        and group.metrics["env/failed"] == pytest.approx(1 / 3)
        and len(told) == 1
    )
    assert group.metrics["env/timeouts"] == pytest.approx(1 / 3 if kind == "timeout" else 0.0)
    Batch.pack(group.samples)


def test_raise_stops_the_run() -> None:
    renderer = make_renderer()
    with pytest.raises(
        InputError, match=r"row r: the environment failed: turn 2: ZeroDivisionError: oh"
    ):
        run(
            make_episodes(
                Saying(renderer, ["x"]),
                renderer,
                lambda row: Misbehaving("raises"),
                on_error="raise",
            )(ROW, RolloutContext("g"))
        )


def test_an_episode_has_a_deadline_of_its_own() -> None:
    """Every turn is fast enough, all together are not."""
    renderer = make_renderer()

    class Slow(Echo):
        async def step(self, action: Action) -> Step:
            await asyncio.sleep(0.1)
            return await super().step(action)

    start = time.monotonic()
    group = run(
        make_episodes(
            Saying(renderer, ["x"]),
            renderer,
            lambda row: Slow(50),
            limits=EpisodeLimits(4000, 99, 5.0, 0.35),
        )(ROW, RolloutContext("g"))
    )
    assert (
        group.samples[0].reward is None
        and group.metrics["env/timeouts"] == 1.0
        and time.monotonic() - start < 3
    )
    assert 1 <= group.metrics["env/turns"] <= 4


def test_code_that_blocks_runs_beside_the_loop_and_is_left_behind() -> None:
    renderer = make_renderer()
    start = time.monotonic()
    group = run(
        make_episodes(Saying(renderer, ["x"]), renderer, lambda row: Blocking(0.3), n=8)(
            ROW, RolloutContext("g")
        )
    )
    assert [s.reward for s in group.samples] == [1.0] * 8 and time.monotonic() - start < 2.0, (
        "one after the other would take 2.4 s"
    )
    late = run(
        make_episodes(
            Saying(renderer, ["x"]),
            renderer,
            lambda row: Blocking(30),
            limits=EpisodeLimits(4000, 8, 0.2),
        )(ROW, RolloutContext("g"))
    )
    assert late.samples[0].reward is None and late.metrics["env/timeouts"] == 1.0


def test_backpressure_bounds_what_runs_at_once() -> None:
    renderer = make_renderer()
    running: list[int] = [0, 0]

    class Counting(Echo):
        async def reset(self, row: Row, seed: int) -> Observation:
            running[0] += 1
            running[1] = max(running)
            return await super().reset(row, seed)

        async def close(self) -> None:
            running[0] -= 1

    episodes = make_episodes(
        Saying(renderer, ["x"]), renderer, lambda row: Counting(2), n=30, concurrent=7
    )

    async def many() -> list[Group]:
        return list(
            await asyncio.gather(*(episodes(ROW, RolloutContext(f"g{i}")) for i in range(10)))
        )

    groups = run(many(), 60)
    assert sum(len(g.samples) for g in groups) == 300 and running == [
        0,
        7,
    ], "all were played and closed, never more than 7 at once"


# ---- the journal ----


def test_a_timeout_is_journalled_and_a_redone_step_reads_it(tmp_path: Path) -> None:
    renderer = make_renderer()
    path = tmp_path / "journal.jsonl"

    def play(make: Any, journal: Journal) -> Group:
        return run(
            make_episodes(
                Saying(renderer, ["x", "yy", "z"]),
                renderer,
                make,
                n=2,
                limits=EpisodeLimits(4000, 8, 0.2),
                journal=journal,
            )(ROW, RolloutContext("g"))
        )

    slow = iter([True, False])
    first = play(lambda row: Misbehaving("sleeps" if next(slow) else "", 1), Journal(path))
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert [e["episode"] for e in entries] == ["g#0"] and entries[0]["record"]["failed"][
        "kind"
    ] == "timeout"
    again = play(lambda row: Echo(3), Journal(path))  # would be fast enough now
    assert [s.reward for s in again.samples] == [s.reward for s in first.samples] == [None, 0.0]
    assert all(
        torch.equal(a.tokens, b.tokens) for a, b in zip(first.samples, again.samples, strict=True)
    )
    other = run(
        make_episodes(
            Saying(renderer, ["w"]),
            renderer,
            lambda row: Echo(3),
            n=2,
            limits=EpisodeLimits(4000, 8, 0.2),
            journal=Journal(path),
        )(ROW, RolloutContext("g"))
    )
    assert [s.reward for s in other.samples] == [
        0.0,
        0.0,
    ], "it is bound to the tokens that were sampled"


class Outside(Echo):
    """Answers differently every time it is asked."""

    pure = False
    asked = 0

    async def step(self, action: Action) -> Step:
        Outside.asked += 1
        self.answer = f"answer {Outside.asked}"
        step = await super().step(action)
        return Step(step.observation, float(Outside.asked), step.done, metrics=step.metrics)


def test_answers_from_outside_are_journalled(tmp_path: Path) -> None:
    """A redone step hears what it heard.

    Where the actions differ from the recorded ones, the environment is brought there and asked.
    """
    renderer = make_renderer()
    path = tmp_path / "journal.jsonl"

    def play(lines: list[Any], journal: Journal) -> Group:
        return run(
            make_episodes(
                Saying(renderer, lines), renderer, lambda row: Outside(3), n=2, journal=journal
            )(ROW, RolloutContext("g"))
        )

    Outside.asked = 0
    first = play(["x", "y", "z"], Journal(path))
    assert Outside.asked == 6
    again = play(["x", "y", "z"], Journal(path))
    assert Outside.asked == 6, "nobody was asked again"
    for a, b in zip(first.samples, again.samples, strict=True):
        assert (
            torch.equal(a.tokens, b.tokens)
            and a.reward == b.reward
            and torch.equal(a.token_rewards, b.token_rewards)
        )  # type: ignore[arg-type]
    play(["x", "other", "z"], Journal(path))
    assert Outside.asked == 6 + 2 * 3, "turn 1 was played again to bring the environment to turn 2"


def test_compare_sees_all_episodes_of_a_prompt_and_is_journalled(tmp_path: Path) -> None:
    renderer = make_renderer()
    asked: list[int] = []

    def longest(row: Row, episodes: Any) -> list[float]:
        asked.append(len(episodes))
        most = max(len(e.sampled) for e in episodes)
        return [float(len(e.sampled) == most) for e in episodes]

    journal = Journal(tmp_path / "j.jsonl")
    for _ in range(2):
        texts = iter(["a", "bbb", "cc"])
        episodes = make_episodes(
            Saying(renderer, lambda turn, index, texts=texts: next(texts)),
            renderer,
            lambda row: Echo(1, [0.5]),
            n=3,
            compare=longest,
            scorer=RewardScorer([], weights={"env": 1.0, "compare": 2.0}, journal=journal),
            journal=journal,
        )
        group = run(episodes(ROW, RolloutContext("g")))
        assert [s.reward for s in group.samples] == [0.5, 2.5, 0.5] and group.samples[
            1
        ].rewards == {"env": 0.5, "compare": 1.0}
    assert asked == [3], "the second time the journal answered"


def test_the_greedy_episode_is_the_baseline() -> None:
    renderer = make_renderer()
    engine = Saying(renderer, ["x"])
    group = run(
        make_episodes(engine, renderer, lambda row: Echo(1, [0.75]), n=2, greedy_baseline=True)(
            ROW, RolloutContext("g")
        )
    )
    assert (
        [s.baseline for s in group.samples] == [0.75, 0.75]
        and group.extra_tokens == 2
        and len(group.samples) == 2
    )
    assert sorted(params.temperature for _, params, _, _ in engine.requests) == [0.0, 1.0, 1.0]
