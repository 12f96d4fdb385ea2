"""What tests of multi-turn rollouts share: a chat tokenizer that does not read back what it wrote,
engines that say what they are told, and environments that do what they should not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from helpers.fake_engine import FakeEngine
from reinforge.config.data import DataConfig
from reinforge.core.engine import Sampling
from reinforge.core.env import Action, Observation, Step
from reinforge.core.sample import Row
from reinforge.data.chat import Renderer
from reinforge.envs.calls import tool_template_of
from reinforge.models.tiny import tiny_tokenizer
from reinforge.rollout.dialogue.env_player import EnvPlayer
from reinforge.rollout.dialogue.episode import EpisodeLimits
from reinforge.rollout.dialogue.episodes import EpisodeRollout
from reinforge.rollout.journal import Journal
from reinforge.rollout.scoring import RewardScorer

CHATML = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor"
    " %}<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{%"
    " for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor"
    " %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# strips the thinking of every assistant turn but the last message
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] if m.role"
    " == 'assistant' and not loop.last else m.content }}<|im_end|>\n{% endfor %}{% if"
    " add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# writes an empty thought before the last answer only, as Qwen3 does
UNDECIDED = CHATML.replace(
    "{{ m.content }}",
    "{{ '<think></think>' if m.role == 'assistant' and loop.last else '' }}{{ m.content }}",
)
# ends no turn: the next one begins, and ends it (GLM)
ENDLESS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}{% if"
    " add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_renderer(template: str | None = CHATML) -> Renderer:
    """Merges make `encode` prefer long tokens; the tests' engines write single bytes, so encoding
    the text again gives other ids.
    """
    tokenizer = tiny_tokenizer(
        [
            "the number is higher lower guess answer tool_call name arguments calculator expression"
            " result"
        ]
        * 20,
        400,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    return Renderer(tokenizer, DataConfig(source="rows.jsonl"))


def end_of(renderer: Renderer) -> int:
    return int(renderer.tokenizer.convert_tokens_to_ids("<|im_end|>"))


def spelled(renderer: Renderer, text: str, *, end: bool = True) -> list[int]:
    """The text byte by byte, as no encoder would write it, and the end of the turn."""
    ids = [i for ch in text for i in renderer.template.plain(ch)]
    return [*ids, end_of(renderer)] if end else ids


class Saying(FakeEngine):
    """Says its lines in order, one a turn of each episode: which turn it is, is read off the
    prompt.
    """

    def __init__(
        self,
        renderer: Renderer,
        lines: Sequence[str | list[int]] | Callable[[int, int], str],
        **more: Any,
    ):
        self.lines = lines
        self.renderer = renderer
        super().__init__(
            self._line,
            vocabulary=len(renderer.tokenizer),
            stop_tokens=renderer.stop_tokens,
            decode=renderer.decode,
            **more,
        )
        self.said: list[tuple[list[int], list[int]]] = []  # (prompt, completion)

    def _line(self, prompt: Sequence[int], index: int) -> list[int]:
        turn = self.renderer.tokenizer.decode(list(prompt)).count("<|im_start|>assistant") - 1
        line = (
            self.lines(turn, index)
            if callable(self.lines)
            else self.lines[min(turn, len(self.lines) - 1)]
        )
        return line if isinstance(line, list) else spelled(self.renderer, line)

    async def generate(
        self, tokens: Sequence[int], params: Sampling, *, key: int, n: int = 1
    ) -> Any:
        out = await super().generate(tokens, params, key=key, n=n)
        self.said += [(list(tokens), list(c.tokens)) for c in out]
        return out


def make_episodes(
    engine: Any,
    renderer: Renderer,
    make: Callable[[Row], Any],
    *,
    n: int = 1,
    limits: EpisodeLimits | None = None,
    journal: Journal | None = None,
    on_error: str = "unscored",
    scorer: RewardScorer | None = None,
    new_tokens: int = 200,
    seed: int = 0,
    **more: Any,
) -> EpisodeRollout:
    player = EnvPlayer(
        engine,
        renderer,
        tool_template_of("auto", renderer),
        make,
        limits or EpisodeLimits(4000, 8),
        seed,
        journal=journal or Journal(None),
        on_error=on_error,
    )
    return EpisodeRollout(
        player,
        scorer or RewardScorer([], weights={"env": 1.0}, journal=journal),
        Sampling(new_tokens),
        n=n,
        **more,
    )


class Echo:
    """Answers every turn until `turns` are over. `rewards[t]` is the reward of turn t."""

    pure = True

    def __init__(self, turns: int = 3, rewards: Sequence[float | None] = (), answer: str = "go on"):
        self.turns = turns
        self.rewards = rewards
        self.answer = answer
        self.heard: list[Action] = []

    async def reset(self, row: Row, seed: int) -> Observation:
        return Observation([{"role": "user", "content": str(row.prompt)}])

    async def step(self, action: Action) -> Step:
        self.heard.append(action)
        reward = self.rewards[action.turn] if action.turn < len(self.rewards) else None
        if action.turn + 1 >= self.turns:
            return Step(None, reward, done=True, metrics={"heard": float(len(self.heard))})
        return Step(Observation([{"role": "user", "content": self.answer}]), reward)

    async def close(self) -> None: ...


class Misbehaving(Echo):
    """`how`: sleeps, blocks (a plain function in a thread), raises, or lies, in turn `at`; at -1 in
    reset.
    """

    def __init__(self, how: str, at: int = 1, **more: Any):
        super().__init__(**more)
        self.how = how
        self.at = at

    async def reset(self, row: Row, seed: int) -> Observation:
        if self.at == -1:
            await self._misbehave()
        return await super().reset(row, seed)

    async def step(self, action: Action) -> Step:
        if action.turn == self.at:
            await self._misbehave()
            if self.how == "lies":
                return "fine"  # type: ignore[return-value]
        return await super().step(action)

    async def _misbehave(self) -> None:
        if self.how == "sleeps":
            await asyncio.sleep(30)
        if self.how == "raises":
            raise ZeroDivisionError("oh")


class Blocking:
    """Plain functions: they run in threads."""

    pure = True

    def __init__(self, seconds: float = 0.05):
        self.seconds = seconds

    def reset(self, row: Row, seed: int) -> Observation:
        return Observation([{"role": "user", "content": "x"}])

    def step(self, action: Action) -> Step:
        time.sleep(self.seconds)
        return Step(None, 1.0, done=True)

    def close(self) -> None: ...
