"""Multi-turn rollouts: n episodes of an environment for one prompt, played at once and scored as a
group.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from reinforge.core.engine import Sampling
from reinforge.core.env import RolloutContext
from reinforge.core.errors import InputError
from reinforge.core.faults import EPISODE, Fault
from reinforge.core.sample import Group, Row, Sample
from reinforge.core.seeds import tokens_hash
from reinforge.core.threads import in_thread
from reinforge.rollout.baseline import greedy_name, greedy_sampling, with_baseline
from reinforge.rollout.dialogue.agents import AgentPlayer
from reinforge.rollout.dialogue.env_player import EnvPlayer
from reinforge.rollout.dialogue.episode import Episode
from reinforge.rollout.first_finished import all_finished
from reinforge.rollout.journal import Scores
from reinforge.rollout.scoring import Components, RewardScorer
from reinforge.rollout.track import TokenTrack

# names of reward components
ENV = "env"
COMPARE = "compare"
TOLD = 3  # failures that are told; the rest is counted
Compare = Callable[[Row, Sequence[Episode]], Any]  # -> one number or None per episode


class EpisodeRollout:
    """A `Rollout`: the player plays n episodes of a row. Group sources and evaluations call it.

    Every episode is one sample, or several rows of one episode where the chat template rewrites
    history. `concurrent` bounds the episodes that run at the same time.

    The reward of an episode is the environment's last reward (component `env`, weight
    `scorer.weights["env"]`) plus the rewards of the config on the final text; they may ask for the
    column `transcript`, the whole conversation. What the environment gave in earlier turns are
    token rewards at the last token of the turn. `compare` sees all episodes of a prompt and adds a
    component of its own. An episode that failed is unscored.
    """

    def __init__(
        self,
        player: EnvPlayer | AgentPlayer,
        scorer: RewardScorer,
        sampling: Sampling,
        *,
        n: int,
        concurrent: int = 256,
        compare: Compare | None = None,
        greedy_baseline: bool = False,
        tell: Callable[[str], None] | None = None,
        component: str = ENV,
    ):
        self.player = player
        self.scorer = scorer
        self.sampling = sampling
        self.n = n
        self.concurrent = concurrent
        self.compare = compare
        self.greedy_baseline = greedy_baseline
        self.component = component  # the name of the player's own reward, and of its metrics
        self.tell = tell  # hears why the first episodes failed
        # since the beginning: episodes, failures by kind, rows that rewriting added
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []  # why episodes failed, for the log
        self._gate: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    async def __call__(self, row: Row, context: RolloutContext) -> Group:
        group = context.group
        works = [self._play(row, context, f"{group}#{i}", self.sampling) for i in range(self.n)]
        if self.greedy_baseline:
            sampling = greedy_sampling(self.sampling)
            works.append(self._play(row, context, greedy_name(group), sampling))
        played = await all_finished(works)
        context.generated()
        episodes = played[: self.n]
        samples, texts = await self._group(row, group, episodes)
        extra = 0
        for greedy in played[self.n :]:
            [baseline, *_], _ = await self._group(row, greedy_name(group), [greedy])
            extra = len(greedy.sampled)
            samples = with_baseline(samples, baseline.reward)
        faults, why = self._faults(group, played)
        return Group(
            row,
            samples,
            texts,
            extra_tokens=extra,
            faults=faults,
            metrics=self._metrics(episodes),
            transcripts={e.uid: e.messages for e in episodes},
            why=why,
        )

    async def _play(
        self, row: Row, context: RolloutContext, uid: str, sampling: Sampling
    ) -> Episode:
        async with self._room():
            episode = await self.player.play(row, context, uid, sampling)
        self.counts["episodes"] += 1
        self.counts["rewritten"] += max(0, len(episode.tracks) - 1)
        if episode.failed is not None:
            self.counts[f"failed_{episode.failed.kind}"] += 1
            self.errors.append(f"episode {uid}: {episode.failed.why}")
            if self.tell is not None and len(self.errors) <= TOLD:
                self.tell(f"failed and left unscored: {self.errors[-1]}")
        return episode

    def _room(self) -> asyncio.Semaphore:
        """A semaphore belongs to one event loop."""
        loop = asyncio.get_running_loop()
        if self._gate is None or self._gate[0] is not loop:
            self._gate = (loop, asyncio.Semaphore(self.concurrent))
        return self._gate[1]

    # ---- rewards ----

    async def _group(
        self, row: Row, group: str, episodes: Sequence[Episode]
    ) -> tuple[list[Sample], list[str]]:
        """The samples of all episodes, scored, and a text for each."""
        scored = [e for e in episodes if e.failed is None]
        rows = [Row(row.id, row.prompt, {**row.columns, "transcript": e.messages}) for e in scored]
        tokens = [e.sampled for e in scored]
        scores = (
            await self.scorer.score(rows, group, tokens, [e.text for e in scored]) if scored else {}
        )
        if self.compare is not None and scored:
            scores = {**scores, COMPARE: await self._compared(row, group, scored, tokens)}
        samples: list[Sample] = []
        texts: list[str] = []
        for episode in episodes:
            components, reward = self._total(episode, scored, scores)
            for k, track in enumerate(episode.tracks or [self._empty()]):
                uid = episode.uid if k == 0 else f"{episode.uid}.{k}"
                weight = self.scorer.weights.get(self.component, 1.0)
                samples.append(
                    track.sample(
                        uid,
                        group=group,
                        episode=episode.uid,
                        reward_weight=weight,
                        rewards=components,
                        reward=reward,
                        stop=episode.stop,
                    )
                )
                texts.append(self.player.renderer.decode(track.tokens[track.prompt :]))
        return samples, texts

    def _empty(self) -> TokenTrack:
        """The row of an episode that never began: one token, nothing to train."""
        track = TokenTrack()
        tokenizer = self.player.renderer.tokenizer
        track.give(
            [
                next(
                    (i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id) if i is not None),
                    0,
                )
            ]
        )
        return track

    def _total(
        self, episode: Episode, scored: Sequence[Episode], scores: Scores
    ) -> tuple[Components, float | None]:
        if episode.failed is not None:
            return {name: None for name in (self.component, *scores)}, None
        i = next(k for k, e in enumerate(scored) if e is episode)
        components: Components = {name: values[i] for name, values in scores.items()}
        if self.component in self.scorer.weights:
            # an agent that gives no reward was not scored by it
            alone = self.component == ENV and not components
            # it had nothing to add, or alone decides: that is 0
            silent = 0.0 if episode.rewarded or alone else None
            components = {
                self.component: silent if episode.reward is None else episode.reward,
                **components,
            }
        return self.scorer.total(components, episode.last_tokens)

    async def _compared(
        self, row: Row, group: str, episodes: Sequence[Episode], tokens: list[list[int]]
    ) -> list[float | None]:
        """Journalled: the function is the user's, and may not answer the same again."""
        assert self.compare is not None
        name = f"{group}#{COMPARE}"
        bound = tokens_hash(tokens)
        known = self.scorer.journal.find(name, bound)
        if known is not None:
            return known[COMPARE]
        given = (
            self.compare(row, episodes)
            if inspect.iscoroutinefunction(self.compare)
            else in_thread(self.compare, row, episodes)
        )
        found = await given
        if not isinstance(found, list | tuple) or len(found) != len(episodes):
            raise InputError(
                f"compare returned {type(found).__name__} for {len(episodes)} episodes.",
                where="env.compare",
                fix="Return a list with one number or None per episode.",
            )
        values = [None if v is None else float(v) for v in found]
        self.scorer.journal.write(name, bound, {COMPARE: values})
        return values

    def _faults(
        self, group: str, episodes: Sequence[Episode]
    ) -> tuple[dict[str, int], dict[str, str]]:
        """What went wrong with the scores and with the episodes.

        Rows beyond the first are an agent's own doing.
        """
        found, why = self.scorer.faults(group)
        counts = Counter(found)
        for e in episodes:
            if e.failed is not None:
                kind = EPISODE[e.failed.kind]
                counts[kind] += 1
                why.setdefault(kind, f"episode {e.uid}: {e.failed.why}"[:500])
            if self.component == ENV and len(e.tracks) > 1:
                counts[Fault.TEMPLATE_FORKED] += len(e.tracks) - 1
        return dict(counts), why

    def _metrics(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Means over the episodes; what an environment reports over those that report it."""

        def mean(values: Sequence[float]) -> float:
            return sum(values) / len(values) if values else 0.0

        fine = [e for e in episodes if e.failed is None]
        out = {
            f"{self.component}/turns": mean([e.turns for e in episodes]),
            f"{self.component}/failed": mean([e.failed is not None for e in episodes]),
            f"{self.component}/timeouts": mean(
                [e.failed is not None and e.failed.kind == "timeout" for e in episodes]
            ),
            f"{self.component}/rewritten": mean([max(0, len(e.tracks) - 1) for e in episodes]),
        }
        if fine:
            out[f"{self.component}/return"] = mean([e.returns for e in fine])
        if any(e.calls or e.malformed for e in episodes):
            out |= {
                f"{self.component}/calls": mean([e.calls for e in episodes]),
                f"{self.component}/malformed_calls": mean([e.malformed for e in episodes]),
            }
        for name in sorted({name for e in fine for name in e.metrics}):
            out[f"{self.component}/{name}"] = mean(
                [e.metrics[name] for e in fine if name in e.metrics]
            )
        return out
