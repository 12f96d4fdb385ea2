"""Plays one episode: turns of a model and of an environment, until one of them is done.

The context is the exact ids so far; only what the environment says is tokenised. Trained are the
sampled ids and nothing else.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from reinforge.core.engine import Completion, Engine, Sampling
from reinforge.core.env import Action, MakeEnv, Message, Observation, RolloutContext, Step
from reinforge.core.errors import InputError
from reinforge.core.sample import Row, Stop
from reinforge.core.seeds import seed_of
from reinforge.data.chat import Renderer
from reinforge.data.dialogue import AddedTokens, DialogueTokens
from reinforge.envs.calls.reader import AnswerReader
from reinforge.envs.calls.tool_template import ToolTemplate
from reinforge.rollout.dialogue.environment import EpisodeEnvironment, EpisodeFailure, deadline
from reinforge.rollout.dialogue.episode import Episode, EpisodeLimits
from reinforge.rollout.journal import Journal
from reinforge.rollout.track import TokenTrack


async def first_prompt(
    dialogue: DialogueTokens, tool_template: ToolTemplate, environment: EpisodeEnvironment
) -> list[int]:
    """The environment's first words as the ids of the first prompt, with the tools where there are
    some.
    """
    given = await environment.reset()
    first = tool_template.first_observation(given)
    return list(
        dialogue.begin(first.messages, first.tools) if given.tokens is None else given.tokens
    )


@dataclass
class EnvPlayer:
    """Plays episodes with an environment. `EpisodeRollout` asks for each.

    Draws depend on (seed, purpose, sample uid, turn) and nothing else.
    """

    engine: Engine
    renderer: Renderer
    tool_template: ToolTemplate  # how tool calls are written
    make: MakeEnv
    limits: EpisodeLimits
    seed: int
    purpose: str = "sample"
    journal: Journal = field(default_factory=lambda: Journal(None))
    on_error: str = "unscored"  # or raise

    async def play(
        self, row: Row, context: RolloutContext, uid: str, sampling: Sampling
    ) -> Episode:
        episode = Episode(uid)
        engine = context.engine or self.engine
        environment = EpisodeEnvironment(
            self.make,
            row,
            seed_of(self.seed, self.purpose, context.group, "env"),
            turn_seconds=self.limits.turn_seconds,
            record=self.journal.find_episode(uid),
        )
        phase = ["reset"]
        try:
            async with asyncio.timeout(self.limits.episode_seconds) as limit:
                await self._turns(engine, row, episode, environment, sampling, phase)
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
            await asyncio.shield(self._close(environment))
        if episode.failed is not None:
            episode.stop = Stop.ERROR
        record = environment.record(episode.failed, phase[0])
        if record is not None and record != self.journal.find_episode(uid):
            self.journal.write_episode(uid, record)
        return episode

    async def _close(self, environment: EpisodeEnvironment) -> None:
        """What goes wrong while an episode is put away changes nothing about it."""
        try:
            async with asyncio.timeout(self.limits.turn_seconds or 60):
                await environment.close()
        except Exception:
            return

    async def _turns(
        self,
        engine: Engine,
        row: Row,
        episode: Episode,
        environment: EpisodeEnvironment,
        sampling: Sampling,
        phase: list[str],
    ) -> None:
        dialogue = DialogueTokens(self.renderer, f"row {row.id}")
        track = TokenTrack()
        track.give(await first_prompt(dialogue, self.tool_template, environment))
        episode.tracks.append(track)
        while True:
            phase[0] = "generate"
            environment.before_turn()
            room = self.limits.max_tokens - len(track.tokens)
            if room < 1:
                break  # the conversation is full
            params = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))
            [completion] = await engine.generate(
                track.tokens,
                params,
                key=seed_of(self.seed, self.purpose, episode.uid, episode.turns),
            )
            track.take(completion)
            phase[0] = "step"
            action, answer = self._action(completion, episode)
            step = await environment.step(action)
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
        if not track.sampled:
            episode.tracks.pop()  # it was begun again and nothing was said

    def _added(
        self,
        dialogue: DialogueTokens,
        track: TokenTrack,
        completion: Completion,
        answer: Message,
        observation: Observation,
    ) -> AddedTokens:
        """What the context gets before the next turn."""
        if observation.tokens is None:
            return dialogue.go_on(
                completion.tokens, answer, self.tool_template.reply_messages(observation.messages)
            )
        known = len(track.tokens)
        goes_on = observation.tokens[:known] == track.tokens
        new = observation.tokens[known:] if goes_on else observation.tokens
        dialogue.messages = [
            *dialogue.messages,
            answer,
            {"role": "user", "content": self.renderer.decode(new)},
        ]
        return AddedTokens(new, fresh=not goes_on)

    def _action(self, completion: Completion, episode: Episode) -> tuple[Action, Message]:
        """The model's turn as the environment sees it, and as a message for the chat template."""
        turn = episode.turns
        most = self.limits.max_turns
        answer = AnswerReader(self.renderer, self.tool_template).read(
            completion, call_id=lambda k: _call_id(episode.uid, turn, k)
        )
        action = Action(
            answer.text,
            list(completion.tokens),
            answer.content,
            answer.calls,
            answer.errors,
            turn=turn,
            last=most is not None and turn + 1 >= most,
            stop=completion.stop,
            seed=seed_of(self.seed, self.purpose, episode.uid, turn, "env"),
            deadline=deadline(self.limits.turn_seconds),
            thinking=answer.thinking,
        )
        episode.text = answer.text
        episode.turns = turn + 1
        episode.last_tokens = len(completion.tokens)
        episode.calls += len(answer.calls)
        episode.malformed += len(answer.errors)
        return action, self.tool_template.assistant_message(answer.text, action)

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


def _call_id(uid: str, turn: int, k: int) -> str:
    """Nine letters and digits, as the strictest template wants them."""
    number = seed_of(uid, turn, k, "call")
    out = ""
    for _ in range(9):
        number, digit = divmod(number, 36)
        out += "0123456789abcdefghijklmnopqrstuvwxyz"[digit]
    return out
