"""One episode: turns of a model and of an environment, until one of them is done.

The context is the exact ids so far; only what the environment says is tokenised. Trained are the
sampled ids and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from reinforge.core.arrays import floats, ints
from reinforge.core.engine import Completion, Engine, Sampling
from reinforge.core.env import Action, MakeEnv, Message, Observation, Step
from reinforge.core.errors import InputError
from reinforge.core.sample import Row, Sample, Stop
from reinforge.core.seeds import seed_of
from reinforge.data.chat import Renderer
from reinforge.data.dialogue import Added, Dialogue
from reinforge.envs.calls.base import Parsed
from reinforge.envs.calls.talk import Talk
from reinforge.rollout.dialogue.environment import EpisodeEnvironment, EpisodeFailure, deadline
from reinforge.rollout.journal import Journal


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    max_tokens: int  # of a row: everything said so far
    max_turns: int | None = None
    turn_seconds: float | None = None  # of one answer of the environment
    episode_seconds: float | None = None  # of everything, generation included


@dataclass
class TokenTrack:
    """A training row that grows."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # -1 where not sampled
    rewards: dict[int, float] = field(default_factory=dict)  # by position
    prompt: int = 0  # tokens before the first turn

    def give(self, ids: Sequence[int]) -> None:
        self.tokens += ids
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)

    def take(self, completion: Completion) -> None:
        self.prompt = self.prompt or len(self.tokens)
        self.tokens += completion.tokens
        self.logprobs += completion.logprobs
        self.versions += completion.versions

    def sample(self, uid: str, group: str, episode: str, weight: float, **more: Any) -> Sample:
        versions = ints(self.versions).to(torch.int32)
        token_rewards = None
        if self.rewards:
            token_rewards = torch.zeros(len(self.tokens))
            for position, reward in self.rewards.items():
                token_rewards[position] += weight * reward
        return Sample(
            uid=uid,
            group=group,
            episode=episode,
            tokens=ints(self.tokens),
            trained=versions >= 0,
            logprobs=floats(self.logprobs),
            versions=versions,
            token_rewards=token_rewards,
            **more,
        )


@dataclass
class Episode:
    """What happened. Functions that compare the episodes of a prompt see these."""

    uid: str
    # more than one where the chat template rewrote history
    tracks: list[TokenTrack] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)  # the whole conversation
    text: str = ""  # the model's last turn
    turns: int = 0
    calls: int = 0  # tool calls
    malformed: int = 0  # ... that could not be read
    reward: float | None = None  # the environment's last word
    returns: float = 0.0  # all that the environment gave
    rewarded: bool = False  # whether it gave any
    metrics: dict[str, float] = field(default_factory=dict)
    stop: Stop = Stop.ENVIRONMENT
    last_tokens: int = 0  # sampled in the last turn
    failed: EpisodeFailure | None = None

    @property
    def sampled(self) -> list[int]:
        """All ids that the model sampled."""
        return [
            t
            for track in self.tracks
            for t, v in zip(track.tokens, track.versions, strict=True)
            if v >= 0
        ]


async def opening(dialogue: Dialogue, talk: Talk, world: EpisodeEnvironment) -> list[int]:
    """The environment's first words as the ids of the first prompt, with the tools where there are
    some.
    """
    given = await world.reset()
    first = talk.opened(given)
    return list(
        dialogue.begin(first.messages, first.tools) if given.tokens is None else given.tokens
    )


@dataclass
class EnvPlayer:
    """Plays episodes. Draws depend on (seed, purpose, sample uid, turn) and nothing else."""

    engine: Engine
    renderer: Renderer
    talk: Talk  # how tool calls are written
    make: MakeEnv
    limits: EpisodeLimits
    seed: int
    purpose: str = "sample"
    journal: Journal = field(default_factory=lambda: Journal(None))
    on_error: str = "unscored"  # or raise

    async def play(self, row: Row, group: str, uid: str, sampling: Sampling) -> Episode:
        episode = Episode(uid)
        world = EpisodeEnvironment(
            self.make,
            row,
            seed_of(self.seed, self.purpose, group, "env"),
            turn_seconds=self.limits.turn_seconds,
            record=self.journal.find_episode(uid),
        )
        phase = ["reset"]
        try:
            async with asyncio.timeout(self.limits.episode_seconds) as limit:
                await self._turns(row, episode, world, sampling, phase)
        except TimeoutError:
            if not limit.expired():
                raise
            episode.failed = EpisodeFailure(
                "timeout",
                f"turn {episode.turns}: the episode took more than"
                f" {self.limits.episode_seconds:g} s",
            )
        except EpisodeFailure as failed:
            if failed.kind in ("error", "sandbox") and self.on_error == "raise":
                raise InputError(
                    f"the environment failed: {failed.why}.",
                    where=f"row {row.id}",
                    fix="Fix it, or set env.on_error=unscored to go on without such episodes.",
                ) from failed.__cause__
            episode.failed = failed
        finally:
            await asyncio.shield(self._close(world))
        if episode.failed is not None:
            episode.stop = Stop.ERROR
        record = world.record(episode.failed, phase[0])
        if record is not None and record != self.journal.find_episode(uid):
            self.journal.write_episode(uid, record)
        return episode

    async def _close(self, world: EpisodeEnvironment) -> None:
        """What goes wrong while an episode is put away changes nothing about it."""
        try:
            async with asyncio.timeout(self.limits.turn_seconds or 60):
                await world.close()
        except Exception:
            return

    async def _turns(
        self,
        row: Row,
        episode: Episode,
        world: EpisodeEnvironment,
        sampling: Sampling,
        phase: list[str],
    ) -> None:
        dialogue = Dialogue(self.renderer, f"row {row.id}")
        track = TokenTrack()
        track.give(await opening(dialogue, self.talk, world))
        episode.tracks.append(track)
        while True:
            phase[0] = "generate"
            world.before_turn()
            room = self.limits.max_tokens - len(track.tokens)
            if room < 1:
                break  # the conversation is full
            params = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))
            [completion] = await self.engine.generate(
                track.tokens,
                params,
                key=seed_of(self.seed, self.purpose, episode.uid, episode.turns),
            )
            track.take(completion)
            phase[0] = "step"
            action, answer = self._action(completion, episode)
            step = await world.step(action)
            episode.messages = [*dialogue.messages, answer]
            self._count(episode, track, action, step)
            if step.done or action.last:
                episode.stop = (
                    Stop.LENGTH
                    if completion.stop is Stop.LENGTH or step.truncated or not step.done
                    else Stop.ENVIRONMENT
                )
                return
            assert step.observation is not None
            added = self._added(dialogue, track, completion, answer, step.observation)
            episode.messages = dialogue.messages
            if added.fresh:
                track = TokenTrack()
                episode.tracks.append(track)
            track.give(added.ids)
        episode.stop = Stop.LENGTH
        if not episode.turns:
            raise EpisodeFailure(
                "length",
                f"the first prompt has {len(track.tokens)} tokens and leaves no room below"
                f" {self.limits.max_tokens}",
            )
        if not any(v >= 0 for v in track.versions):
            episode.tracks.pop()  # it was begun again and nothing was said

    def _added(
        self,
        dialogue: Dialogue,
        track: TokenTrack,
        completion: Completion,
        answer: Message,
        heard: Observation,
    ) -> Added:
        """What the context gets before the next turn."""
        if heard.tokens is None:
            return dialogue.go_on(completion.tokens, answer, self.talk.heard(heard.messages))
        known = len(track.tokens)
        goes_on = heard.tokens[:known] == track.tokens
        new = heard.tokens[known:] if goes_on else heard.tokens
        dialogue.messages = [
            *dialogue.messages,
            answer,
            {"role": "user", "content": self.renderer.decode(new)},
        ]
        return Added(new, fresh=not goes_on)

    def _action(self, completion: Completion, episode: Episode) -> tuple[Action, Message]:
        """The model's turn as the environment sees it, and as a message for the chat template."""
        text = self.renderer.decode(completion.tokens)
        parsed = self.talk.read(self._spelled(completion)) if self.talk.reads else Parsed(text)
        if parsed.thinking is not None:
            text = parsed.content  # the answer alone
        calls = [
            replace(call, id=call.id or _id(episode.uid, episode.turns, k))
            for k, call in enumerate(parsed.calls)
        ]
        turn = episode.turns
        most = self.limits.max_turns
        action = Action(
            text,
            list(completion.tokens),
            parsed.content if calls or parsed.errors else text,
            calls,
            parsed.errors,
            turn=turn,
            last=most is not None and turn + 1 >= most,
            stop=completion.stop,
            seed=seed_of(self.seed, self.purpose, episode.uid, turn, "env"),
            deadline=deadline(self.limits.turn_seconds),
            thinking=parsed.thinking or "",
        )
        episode.text = text
        episode.turns = turn + 1
        episode.last_tokens = len(completion.tokens)
        episode.calls += len(calls)
        episode.malformed += len(parsed.errors)
        return action, self.talk.said(text, action)

    def _spelled(self, completion: Completion) -> str:
        """The text with control tokens, which some formats write calls with, but without the one
        that ended it.
        """
        tokens = completion.tokens
        ended = (
            completion.stop is Stop.EOS
            and tokens
            and tokens[-1] in self.renderer.template.special_ids
        )
        return str(
            self.renderer.tokenizer.decode(
                tokens[:-1] if ended else tokens,
                skip_special_tokens=False,
                clean_up_tokenization_spaces=False,
            )
        )

    @staticmethod
    def _count(episode: Episode, track: TokenTrack, action: Action, step: Step) -> None:
        final = step.done or action.last
        if step.reward is not None:
            episode.rewarded = True
            episode.returns += step.reward
            if not final:
                at = len(track.tokens) - 1
                track.rewards[at] = track.rewards.get(at, 0.0) + step.reward
        if final:
            episode.reward = step.reward
        episode.metrics |= step.metrics


def _id(uid: str, turn: int, k: int) -> str:
    """Nine letters and digits, as the strictest template wants them."""
    number = seed_of(uid, turn, k, "call")
    out = ""
    for _ in range(9):
        number, digit = divmod(number, 36)
        out += "0123456789abcdefghijklmnopqrstuvwxyz"[digit]
    return out
