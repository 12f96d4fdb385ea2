"""Where a step's groups come from: the row sampler says which rows, the rollout turns each into a
group, the replay buffer adds old ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from reinforge.core.env import Rollout, RolloutContext
from reinforge.core.faults import fault_metrics
from reinforge.core.sample import Group, Row, Stop
from reinforge.data.cursor import Cursor
from reinforge.rollout.answers import answer_metrics
from reinforge.rollout.first_finished import first_finished
from reinforge.rollout.generation_done import run_rollout
from reinforge.rollout.journal import Journal
from reinforge.rollout.rows.pass_rates import PassRates
from reinforge.rollout.rows.replay import ReplayBuffer, ReplayEntry
from reinforge.rollout.rows.sampler import RowChoice, RowSampler


@dataclass(slots=True)
class RolloutBatch:
    """The groups of one optimizer step, and what it took to get them. `GroupSource.gather` makes
    it, the buffer keeps it until its step, the loop trains its groups.
    """

    groups: list[Group]  # fresh ones that are trained, in the order of submission
    # groups without signal that dynamic sampling replaced
    discarded: list[Group] = field(default_factory=list)
    rounds: int = 1
    # groups of earlier steps that are trained again
    replayed: list[Group] = field(default_factory=list)
    stale: list[Group] = field(default_factory=list)  # sampled too long ago to be trained
    used: list[ReplayEntry] = field(default_factory=list)  # what the replay buffer gave
    # the oldest weights that may have sampled any of it; None: those it was begun with
    oldest: int | None = None
    cancelled: int = 0  # groups that were submitted and not waited for
    # what the pass-rate store, the row sampler and the replay buffer say
    report: dict[str, float] = field(default_factory=dict)

    @property
    def trained(self) -> list[Group]:
        return [*self.groups, *self.replayed]

    @property
    def sampled_tokens(self) -> int:
        return tokens_in([*self.groups, *self.discarded, *self.stale])

    @property
    def replayed_tokens(self) -> int:
        return sum(s.n_trained for g in self.replayed for s in g.samples)

    @property
    def given_tokens(self) -> int:
        """Of the data's answers, each once for every sampled one it is compared with."""
        return sum(g.given.n_trained * len(g.samples) for g in self.groups if g.given is not None)

    @property
    def unscored(self) -> bool:
        """Whether no sample of the step has a reward."""
        fresh = [*self.groups, *self.discarded]
        return all(s.reward is None for g in fresh for s in g.episodes)

    @property
    def faults(self) -> bool:
        """Whether anything beside training went wrong."""
        fresh = [*self.groups, *self.discarded]
        return any(count for g in fresh for count in g.faults.values())


def tokens_in(groups: Sequence[Group]) -> int:
    return sum(g.extra_tokens + sum(s.n_trained for s in g.samples) for g in groups)


def has_signal(group: Group, components: Collection[str] = ()) -> bool:
    """Whether the group's rewards differ, those of single turns included, so that it can teach
    anything.

    `components` are those rewards that the algorithm compares each by itself (gdpo): they can
    differ where their totals tie.
    """
    scored = [s for s in group.samples if s.reward is not None]
    if any(
        len({v for s in scored if (v := s.rewards.get(name)) is not None}) > 1
        for name in components
    ):
        return True
    totals: dict[str, float] = {}
    for s in scored:
        turns = 0.0 if s.token_rewards is None else float(s.token_rewards.double().sum())
        totals[s.episode] = totals.get(s.episode, s.reward or 0.0) + turns
    return len(set(totals.values())) > 1


class GroupSource:
    """Groups for one optimizer step at a time.

    All prompts of a round are submitted at once, in the order they were chosen, so what the engine
    does is a function of the step alone.

    `dynamic`: groups whose rewards are all equal are replaced by fresh prompts, in at most
    `max_refills` further rounds; if even then too few are left, the step trains on those.
    `components`: see `has_signal`. `over_provision`: a round submits that many times what it needs,
    takes the first that are complete and cancels the rest; the choice is journalled before it is
    used. `passrates` and `replay` change once the step's groups are complete, so a batch that was
    cut leaves everything as it was.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        cursor: Cursor,
        rollout: Rollout,
        prompts: int,
        *,
        dynamic: bool = False,
        max_refills: int = 0,
        row_sampler: RowSampler | None = None,
        over_provision: float = 1.0,
        journal: Journal | None = None,
        passrates: PassRates | None = None,
        replay: ReplayBuffer | None = None,
        components: Collection[str] = (),
    ):
        self.rows = rows
        self.cursor = cursor
        self.rollout = rollout
        self.prompts = prompts
        self.dynamic = dynamic
        self.max_refills = max_refills
        self.over_provision = over_provision
        self.row_sampler = row_sampler or RowSampler(cursor, cursor.seed)
        self.journal = journal or Journal(None)
        self.passrates = passrates
        self.replay = replay
        self.components = components

    async def gather(
        self, step: int, version: int, generated: Callable[[], None] = lambda: None
    ) -> RolloutBatch:
        """The groups of step number `step`, sampled with the weights of `version`, without the
        consequences: nothing but the cursor has moved until `commit`.

        Rows are chosen before the first await. `generated` is called as soon as only scores are
        missing; where scores decide what is generated next, at the end.
        """
        used = self.replay.pick(self.prompts, version) if self.replay is not None else []
        result = RolloutBatch([], rounds=0, replayed=[kept.group for kept in used], used=used)
        submitted = walked = 0
        once = not self.dynamic and self.over_provision == 1
        while (missing := self.prompts - len(result.trained)) and result.rounds <= (
            self.max_refills if self.dynamic else 0
        ):
            walked -= self.cursor.taken
            choices = self.row_sampler.take(math.ceil(missing * self.over_provision - 1e-9), step)
            walked += self.cursor.taken  # now: while scores are computed others may walk on
            submitted += len(choices)
            if self.row_sampler.policies:
                result.report |= {
                    "sampling/skipped": 1 - submitted / max(1, walked),
                    **self.row_sampler.report(step),
                }
            for group in await self._round(choices, missing, generated if once else lambda: None):
                (result.groups if self._counts(group) else result.discarded).append(group)
            result.rounds += 1
        generated()
        result.cancelled = submitted - len(result.groups) - len(result.discarded)
        return result

    def commit(self, result: RolloutBatch, step: int, version: int) -> None:
        """The step is about to be trained: what later steps choose by may know of it."""
        if self.passrates is not None:
            self.passrates.observe([*result.groups, *result.discarded], step)
            result.report |= self.passrates.report()
        if self.replay is not None:
            result.report |= self.replay.report(result.used, version)
            self.replay.commit(result.used, result.groups, version)

    def _counts(self, group: Group) -> bool:
        return not self.dynamic or has_signal(group, self.components)

    async def _round(
        self, choices: Sequence[RowChoice], needed: int, generated: Callable[[], None]
    ) -> list[Group]:
        """Submits the chosen rows and returns the groups that were done first, in the order of
        submission: all of them, or until `needed` of them count. Everything is submitted again when
        a step is redone, and nothing is cancelled before the last taken group is there: what the
        engine computes for the taken ones does not depend on which they are.
        """
        rows = [self.rows[c.row] for c in choices]
        names = [f"{c.position}:{row.id}" for c, row in zip(choices, rows, strict=True)]
        spare = len(names) > needed
        recorded = self.journal.find_choice(names) if spare else None
        wanted = set(names if recorded is None else recorded)
        done: dict[int, Group] = {}
        counting = 0
        generating = len(names)

        def generation_done() -> None:
            nonlocal generating
            generating -= 1
            if not generating:
                generated()

        def enough(place: int, group: Group) -> bool:
            nonlocal counting
            if names[place] in wanted:
                done[place] = group
                counting += self._counts(group)
            return len(done) == len(wanted) or (recorded is None and counting == needed)

        await first_finished(
            [
                run_rollout(self.rollout, row, RolloutContext(name, generation_done))
                for row, name in zip(rows, names, strict=True)
            ],
            enough,
        )
        if spare and recorded is None:
            self.journal.write_choice(names, [names[place] for place in sorted(done)])
        return [done[place] for place in sorted(done)]


def rollout_metrics(
    rollout_batch: RolloutBatch, weights: dict[str, float], components: Collection[str] = ()
) -> dict[str, float]:
    """What the rollouts of a step looked like: rewards, lengths, how they ended, which groups can
    teach (see `has_signal`).
    """
    everything = [*rollout_batch.groups, *rollout_batch.discarded]
    samples = [s for g in everything for s in g.episodes]
    rewards = [s.reward for s in samples if s.reward is not None]
    lengths = [n for g in everything for n in _lengths(g)]
    mean = sum(rewards) / len(rewards) if rewards else float("nan")
    out = {
        "reward/mean": mean,
        "reward/std": (sum((r - mean) ** 2 for r in rewards) / max(1, len(rewards) - 1)) ** 0.5,
        "reward/unscored": 1 - len(rewards) / max(1, len(samples)),
        "response/length": sum(lengths) / max(1, len(lengths)),
        "response/max_length": max(lengths, default=0),
        "response/truncated": sum(s.stop is Stop.LENGTH for s in samples) / max(1, len(samples)),
        "groups/zero_variance": (
            sum(not has_signal(g, components) for g in everything) / max(1, len(everything))
        ),
        "groups/trained": len(rollout_batch.trained),
        "groups/rounds": rollout_batch.rounds,
        "tokens/sampled": rollout_batch.sampled_tokens,
        "tokens/discarded": tokens_in(rollout_batch.discarded),
        "tokens/replayed": rollout_batch.replayed_tokens,
    }
    out |= answer_metrics(everything)
    if any(g.given is not None for g in rollout_batch.groups):
        out["tokens/given"] = rollout_batch.given_tokens
    if rollout_batch.stale:
        out["tokens/stale"] = tokens_in(rollout_batch.stale)
    if rollout_batch.cancelled:
        out["groups/cancelled"] = rollout_batch.cancelled
    out |= fault_metrics(everything)
    for name in [
        *weights,
        *(["overlong"] if any("overlong" in s.rewards for s in samples) else []),
    ]:
        scored = [v for s in samples if (v := s.rewards.get(name)) is not None]
        if scored:
            out[f"reward/{name}"] = sum(scored) / len(scored)
    for name in sorted({name for g in everything for name in g.metrics}):
        values = [g.metrics[name] for g in everything if name in g.metrics]
        out[name] = sum(values) / len(values)
    return out | rollout_batch.report


def _lengths(group: Group) -> list[int]:
    """Sampled tokens of each episode, whichever rows they are in."""
    lengths: dict[str, int] = {}
    for s in group.samples:
        lengths[s.episode] = lengths.get(s.episode, 0) + s.n_trained
    return list(lengths.values())
