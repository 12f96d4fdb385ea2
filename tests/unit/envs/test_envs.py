"""Environments by name: games, mixtures, the section `env`, whole runs that resume exactly, and
what a chat template is said to do.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.dialogues import CHATML, FORGETFUL, Saying, make_episodes, make_renderer
from helpers.paths import ROOT
from helpers.tiny_runs import digest, lines
from helpers.toys import SilentView, run
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.run import train_config
from reinforge.check.template import template_facts
from reinforge.config.data import DataConfig
from reinforge.config.env import EnvConfig
from reinforge.config.load import config_from_dict
from reinforge.config.schema import Config
from reinforge.core.env import Action, Observation, RolloutContext, Step
from reinforge.core.errors import InputError
from reinforge.core.sample import Row
from reinforge.data.sources import train_and_eval_rows
from reinforge.envs.build import EnvMixture, entry_of
from reinforge.envs.games import GuessNumber
from reinforge.envs.names import BUILTIN
from reinforge.models.tiny import CHAT, make_tiny_model
from reinforge.plan.preflight import preflight
from reinforge.rollout.dialogue.episode import EpisodeLimits

pytestmark = pytest.mark.timeout(180)


# ---- the game ----


def game(*guesses: str, number: int = 11, **options: Any) -> list[Step]:
    async def play() -> list[Step]:
        env = GuessNumber(**options)
        await env.reset(Row("r", "Guess from {low} to {high}.", {"number": number}), 0)
        return [await env.step(Action(text, [], turn=t)) for t, text in enumerate(guesses)]

    return run(play())


def hint(step: Step) -> str:
    assert step.observation is not None
    return str(step.observation.messages[0]["content"])


def test_guessing_a_number() -> None:
    steps = game("8", "Maybe 12?", "it is 11")
    assert [hint(s) for s in steps[:2]] == ["higher", "lower"] and steps[2] == Step(
        None, 1.0, True, metrics={"found": 1.0, "guesses": 3}
    )
    assert [hint(game(text)[0]) for text in ("what?", "99999999999999999999999", "-3")] == [
        "write a number",
        "lower",
        "higher",
    ]
    lost = game("1", "2", guesses=2)
    assert lost[1].done and lost[1].reward == 0.0 and lost[1].metrics == {"found": 0.0}
    assert game("11", speed=0.1)[0].reward == pytest.approx(1.4) and [
        s.reward for s in game("8", "5", "11", per_turn=0.25)
    ] == [
        0.25,
        None,
        1.0,
    ]
    with pytest.raises(InputError, match="nothing to guess"):
        GuessNumber(5, 5)


def test_the_number_is_a_function_of_the_seed() -> None:
    async def number(seed: int) -> int:
        env = GuessNumber()
        observation = await env.reset(Row("r", "from {low} to {high}"), seed)
        assert observation.messages == [{"role": "user", "content": "from 1 to 16"}]
        return env.number

    found = [run(number(s)) for s in range(400)]
    assert found == [run(number(s)) for s in range(400)] and set(found) == set(range(1, 17))


def test_bisection_wins_through_the_whole_rollout() -> None:
    """A player that reads the hints off its context finds every number in at most 4
    guesses of 15.
    """
    renderer = make_renderer()

    class Bisecting(Saying):
        def _line(self, prompt: Any, index: int) -> list[int]:
            low = 1
            high = 15
            text = self.renderer.tokenizer.decode(list(prompt))
            guess = (low + high) // 2
            for word in [
                part.split("<|im_end|>")[0] for part in text.split("<|im_start|>user\n")[2:]
            ]:
                low, high = (guess + 1, high) if word == "higher" else (low, guess - 1)
                guess = (low + high) // 2
            return self.renderer.template.plain(str(guess)) + [self.renderer.stop_tokens[-1]]

    episodes = make_episodes(
        Bisecting(renderer, ["x"]),
        renderer,
        lambda row: GuessNumber(1, 15, guesses=4),
        limits=EpisodeLimits(4000, 4),
    )
    for number in range(1, 16):
        group = run(
            episodes(Row(str(number), "Guess.", {"number": number}), RolloutContext(f"g{number}"))
        )
        assert group.samples[0].reward == 1.0 and group.metrics["env/found"] == 1.0


def test_games_have_rows_without_data() -> None:
    train, held_out = train_and_eval_rows(
        DataConfig.model_validate(
            {
                "source": "games:guess_number",
                "options": {"size": 20, "seed": 5},
                "eval": {"size": 8},
            }
        )
    )
    assert (
        len(train) == 20
        and len(held_out) == 8
        and train[0].columns["game"] == 5
        and held_out[0].columns["game"] == 25
    )
    assert str(train[0].prompt).startswith("Game 5. I think of a number from {low} to {high}.")
    with pytest.raises(InputError, match="there is no game"):
        train_and_eval_rows(DataConfig(source="games:chess"))
    with pytest.raises(InputError, match="same prompt"):
        train_and_eval_rows(DataConfig(source="games:chess", options={"prompt": "Play."}))


# ---- names and mixtures ----


def test_every_built_in_name_loads() -> None:
    for name in ("single", "guess_number", "tools", "calculator"):
        assert hasattr(entry_of(name, {}).make(), "reset"), name
        assert name in BUILTIN


def test_wrong_names_and_options_are_told() -> None:
    with pytest.raises(InputError, match="Did you mean guess_number"):
        entry_of("guess_numbers", {})
    with pytest.raises(
        InputError, match=r"env.options: guess_number has no option hihg. Did you mean high"
    ):
        entry_of("guess_number", {"hihg": 9})


def test_a_mixture_chooses_by_column_or_by_weight() -> None:
    mixture = EnvMixture(
        [entry_of("guess_number", {"high": 9}, weight=3.0), entry_of("single", {}, weight=1.0)],
        seed=1,
    )
    rows = [Row(str(i), "x") for i in range(2000)]
    chosen = [mixture.choose(row).name for row in rows]
    assert Counter(chosen)["guess_number"] == pytest.approx(1500, abs=70)
    assert chosen[::-1] == [mixture.choose(row).name for row in reversed(rows)], (
        "a row always gets the same"
    )
    asked = Row("5", "x", {"env": "single"})
    assert (
        mixture.choose(asked).name == "single" and type(mixture(asked)).__name__ == "SingleTurnEnv"
    )
    assert next(e for row in rows if isinstance(e := mixture(row), GuessNumber)).high == 9
    with pytest.raises(InputError, match="row 6: asks for the environment 'chess'"):
        mixture(Row("6", "x", {"env": "chess"}))


def test_the_section_may_be_a_name_or_a_list() -> None:
    assert EnvConfig.model_validate("single").entries[0].name == "single"
    many = EnvConfig.model_validate(
        [{"name": "single", "weight": 2}, {"name": "guess_number", "options": {"high": 9}}]
    )
    assert [(e.name, e.weight) for e in many.entries] == [("single", 2.0), ("guess_number", 1.0)]
    for wrong in (
        {},
        {"name": "single", "mix": [{"name": "tools"}]},
        [{"name": "a.py:E"}, {"name": "b.py:E"}],
        {"mix": [{"name": "single"}], "options": {"x": 1}},
    ):
        with pytest.raises(ValueError, match="env"):
            EnvConfig.model_validate(wrong)


def refusals(make: Callable[..., Config], env: Any, rewards: Any = ()) -> str:
    return "\n".join(preflight(make("p", "grpo", env=env, rewards=list(rewards))).errors)


def test_plan_says_what_is_wrong_with_an_environment(
    make: Callable[..., Config], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("class Mine: ...\n")
    assert "env" not in refusals(make, "guess_number")
    assert "Did you mean guess_number" in refusals(make, "gess_number")
    assert "does not define 'Yours'" in refusals(
        make, f"{tmp_path}/mine.py:Yours"
    ) and "mine" not in refusals(make, f"{tmp_path}/mine.py:Mine")
    assert "env.calls" in refusals(make, {"name": "calculator", "calls": "morse"})
    assert "what an answer is worth" in refusals(make, "single") and "worth" not in refusals(
        make, "single", [{"name": "exact_number"}]
    )
    with pytest.raises(InputError, match="needs at least one reward, an environment"):
        make("p", "grpo", rewards=[])


# ---- whole runs ----

GAMES = [{"prompt": f"{i}?", "number": 1 + i % 4} for i in range(12)]
HELD = [{"prompt": f"{i}!", "number": 1 + i % 4} for i in range(4)]
ENV = {
    "name": "guess_number",
    "options": {"low": 1, "high": 4, "guesses": 3, "per_turn": 0.125},
    "max_turns": 3,
    "max_tokens": 100,
}


class Stopping(SilentView):
    def __init__(self, at: int):
        super().__init__()
        self.at = at

    def update(self, step: int, metrics: dict[str, float]) -> None:
        if step > self.at:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def chat_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    text = ["Q:1?\nA:2\n Q:higher\nA:3\n Q:lower\nA:4\n"] * 20
    return str(
        make_tiny_model(
            tmp_path_factory.mktemp("chat") / "model",
            width=32,
            layers=2,
            heads=4,
            kv_heads=2,
            context=128,
            text=text,
            spread=0.3,
            chat=True,
        )
    )


def config(chat_dir: str, folder: Path, name: str, **changes: Any) -> Config:
    raw: dict[str, Any] = {
        "model": {"path": chat_dir},
        "algorithm": {"name": "grpo", "group_size": 4},
        "data": {"source": "python"},
        "env": ENV,
        "rollout": {"max_new_tokens": 6, "kv_gib": 0.01},
        "train": {"steps": 4, "prompts_per_step": 4, "learning_rate": 1e-3},
        "run": {"dir": str(folder / name), "checkpoint": {"every": 2}},
        "eval": {"every": 2},
    }
    return config_from_dict({**raw, **changes})


def drop(line: dict[str, Any]) -> dict[str, Any]:
    return {
        k: v
        for k, v in line.items()
        if not k.startswith(("time", "share", "tokens_per_second", "memory", "efficiency"))
    }


def test_a_multi_turn_run_resumes_exactly(chat_dir: str, tmp_path: Path) -> None:
    """Four steps at once, or cut in the third: weights, metrics and what the environment said are
    the same to the last bit.
    """
    given = CallerObjects(data=GAMES, eval_data=HELD)
    whole, cut = (config(chat_dir, tmp_path, name) for name in ("whole", "cut"))
    train_config(whole, given, SilentView())
    with pytest.raises(KeyboardInterrupt):
        train_config(cut, given, Stopping(2))
    train_config(cut, given, SilentView())
    assert digest(whole) == digest(cut) and [drop(m) for m in lines(whole)] == [
        drop(m) for m in lines(cut)
    ]
    steps = [m for m in lines(whole) if "env/turns" in m]
    assert (
        len(steps) == 4
        and any(m["env/turns"] > 1.5 for m in steps)
        and all(m["env/failed"] == 0 for m in steps)
    )
    assert all(
        "reward/env" in m and m["tokens/sampled"] == m["tokens/trained"] + m["tokens/dropped"]
        for m in steps
    )
    assert steps[0]["policy/ratio/max"] == pytest.approx(1.0, abs=1e-4), (
        "what was sampled over many turns is what is trained"
    )
    assert any("eval/env/turns" in m and "eval/accuracy" in m for m in lines(whole))


class Weather:
    """Outside world: slow every third time, different each time."""

    asked = 0

    def __init__(self) -> None:
        self.turn = 0

    async def reset(self, row: Row, seed: int) -> Observation:
        return Observation([{"role": "user", "content": str(row.prompt)}])

    async def step(self, action: Action) -> Step:
        import asyncio

        Weather.asked += 1
        number = Weather.asked
        if number % 7 == 3:
            await asyncio.sleep(60)
        if number % 11 == 5:
            raise OSError("gone")
        done = action.turn == 1
        return Step(
            None if done else Observation([{"role": "user", "content": str(number % 5)}]),
            float(number % 3),
            done=done,
        )

    async def close(self) -> None: ...


def test_a_cut_step_is_redone_from_the_journal(
    chat_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the world answered, and which episodes timed out, is what the redone step trains on."""
    from reinforge.backends.local import LocalBackend

    monkeypatch.setitem(sys.modules, "weather", sys.modules[__name__])
    env = {"name": "weather:Weather", "max_turns": 2, "turn_seconds": 1.5, "max_tokens": 100}
    cfg = config(
        chat_dir,
        tmp_path,
        "cut",
        env=env,
        eval={},
        train={"steps": 1, "prompts_per_step": 4, "learning_rate": 1e-3},
    )
    seen: list[list[Any]] = []
    original = LocalBackend.forward_backward

    def spy(self: LocalBackend, batches: Any, *more: Any) -> Any:
        seen.append([(s.uid, s.reward, s.tokens.tolist()) for b in batches for s in b.samples])
        if len(seen) == 1:
            raise MemoryError("die")
        return original(self, batches, *more)

    monkeypatch.setattr(LocalBackend, "forward_backward", spy)
    with pytest.raises(MemoryError):
        train_config(cfg, CallerObjects(data=GAMES), SilentView())
    asked = Weather.asked
    entries = [
        json.loads(line) for line in (Path(cfg.run.dir) / "journal.jsonl").read_text().splitlines()
    ]
    kinds = Counter((e["record"]["failed"] or {"kind": "fine"})["kind"] for e in entries)
    assert (
        sum(kinds.values()) == 16
        and kinds["timeout"] >= 2
        and kinds["error"] >= 1
        and kinds["fine"] >= 4
    )
    train_config(cfg, CallerObjects(data=GAMES), SilentView())
    assert Weather.asked == asked and seen[0] == seen[1], (
        "nobody was asked again, and the same samples are trained"
    )
    [line] = [m for m in lines(cfg) if "env/failed" in m]
    assert line["env/failed"] == pytest.approx((kinds["timeout"] + kinds["error"]) / 16) and line[
        "env/timeouts"
    ] == pytest.approx(kinds["timeout"] / 16)
    assert line["reward/unscored"] == line["env/failed"]


def test_the_demo_of_tool_use_runs() -> None:
    """The benchmark's quick size: SFT on transcripts, then GRPO with the calculator. (Its full size
    learns: 32% to 91%.)
    """
    import importlib.util
    import tempfile

    path = ROOT / "benchmarks" / "multi_turn.py"
    spec = importlib.util.spec_from_file_location("multi_turn", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with tempfile.TemporaryDirectory() as folder:
        found = module.run(
            Path(folder), {**module.SIZES["quick"], "sft_steps": 10, "transcripts": 100}
        )["env"]
    assert (
        found["n"] == 8
        and 0 <= found["after"] <= 1
        and found["turns"] >= 1
        and [p[0] for p in found["curve"]] == [0, 2]
    )


# ---- check template ----


def test_check_template_tells_what_a_template_does() -> None:
    rows = ("rows of a conversation of 3 turns", "... whose turns think", "... with tool calls")
    found = {
        name: template_facts(make_renderer(template).tokenizer)
        for name, template in (("chatml", CHATML), ("forgetful", FORGETFUL), ("tiny", CHAT))
    }
    assert [found["chatml"][r] for r in rows] == ["1", "1", "1"] and found["chatml"][
        "tool calls"
    ] == "hermes"
    assert (
        found["forgetful"]["... whose turns think"].startswith("3: the template REWRITES")
        and "in words" in found["forgetful"]["tool calls"]
    )
    assert (
        found["chatml"]["written by the template"] == "<|im_end|>"
        and found["tiny"]["written by the template"] == "<|eos|>"
    )
    assert (
        "<|im_end|>" in found["chatml"]["end of turn"]
        and found["chatml"]["prefix property"] == "yes"
    )
    assert template_facts(make_renderer(None).tokenizer)["chat template"].startswith("none")


def test_check_template_is_a_command(chat_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    from reinforge.cli.main import main

    assert main(["check", "template", chat_dir]) == 0
    assert "prefix property" in capsys.readouterr().out
