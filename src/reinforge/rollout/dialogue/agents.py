"""Agent programs as players: each talks to an endpoint that answers with the model in training, and
what was sampled is recorded.

The programs know nothing of this. An episode is one run of the program; its rows are the
conversations it had (recording.py).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Protocol

from reinforge.core.engine import Sampling
from reinforge.core.env import RolloutContext
from reinforge.core.errors import InputError
from reinforge.core.sample import Row, Stop
from reinforge.core.seeds import seed_of
from reinforge.data.chat import Renderer
from reinforge.envs.programs import AgentOutcome, AgentProgram, EndpointAddress
from reinforge.rollout.dialogue.agent_session import AgentModel, AgentSession
from reinforge.rollout.dialogue.environment import EpisodeFailure
from reinforge.rollout.dialogue.episode import Episode
from reinforge.rollout.dialogue.recording import Recording
from reinforge.rollout.journal import Journal


class Endpoint(Protocol):
    """Where agents find the model: an HTTP server, or a client in the same process. The build makes
    it; `AgentPlayer` opens a session at it for every episode, in the event loop of the engine.
    """

    def open(self, session: AgentSession) -> EndpointAddress: ...

    def close(self, address: EndpointAddress) -> None: ...


@dataclass
class AgentPlayer:
    """Plays episodes of an agent program.

    What happened is journalled when an episode ends, since a program need not do the same again; a
    step that is done again does not run it again. With lockstep programs are taken at their word
    that they repeat, and only failures are journalled: the engine then has the same batches as
    before.
    """

    model: AgentModel
    program: AgentProgram
    endpoint: Endpoint
    journal: Journal = field(default_factory=lambda: Journal(None))
    on_error: str = "unscored"  # or raise

    @property
    def renderer(self) -> Renderer:
        return self.model.renderer

    async def play(
        self, row: Row, context: RolloutContext, uid: str, sampling: Sampling
    ) -> Episode:
        given = {
            "seed": seed_of(self.model.seed, self.model.purpose, context.group, "agent"),
            **row.columns,
            "id": row.id,
            "prompt": row.prompt,
        }
        bound = f"{seed_of(self.model.seed, self.model.purpose, row.id, row.prompt, sampling):x}"
        record = self.journal.find_episode(uid)
        if record is None or record.get("bound") != bound:
            record = {**await self._live(row, uid, sampling, given), "bound": bound}
            if self.model.lockstep is None or record["failed"] is not None:
                self.journal.write_episode(uid, record)
        return _episode(uid, record)

    async def _live(
        self, row: Row, uid: str, sampling: Sampling, given: dict[str, Any]
    ) -> dict[str, Any]:
        """Runs the program.

        What happened as JSON, so that an episode is the same whether it was just played or
        journalled.
        """
        session = AgentSession(self.model, row, uid, sampling)
        if self.model.lockstep is not None:
            self.model.lockstep.enter(uid)
        address = self.endpoint.open(session)
        outcome = AgentOutcome()
        failed = None
        try:
            async with asyncio.timeout(self.model.limits.episode_seconds) as limit:
                outcome = await self.program.run(address, given)
        except Exception as error:
            if limit.expired():
                failed = EpisodeFailure(
                    "timeout", f"the agent took more than {self.model.limits.episode_seconds:g} s"
                )
            else:
                failed = EpisodeFailure(
                    "length" if session.full else "error", f"{type(error).__name__}: {error}"[:2000]
                )
                failed.__cause__ = error
        finally:
            self.endpoint.close(address)
            await asyncio.shield(session.close())
            if self.model.lockstep is not None:
                self.model.lockstep.leave(uid)
        if session.broken is not None:
            raise session.broken
        if failed is None and not session.recording.turns:
            failed = EpisodeFailure("error", "the agent never asked the model")
        if failed is not None and failed.kind == "error" and self.on_error == "raise":
            raise InputError(
                f"the agent failed: {failed.why}.",
                where=f"row {row.id}",
                fix="Fix it, or set agent.on_error=unscored to go on without such episodes.",
            ) from failed.__cause__
        return _record(session, outcome, failed)


def _record(
    session: AgentSession, outcome: AgentOutcome, failed: EpisodeFailure | None
) -> dict[str, Any]:
    turns = session.recording.turns
    last = session.last
    return {
        "turns": session.recording.record(),
        "messages": turns[-1].messages if turns else [],
        "text": last.content if last is not None else "",
        "reward": outcome.reward,
        "metrics": {"overridden": float(session.counts["overridden"]), **outcome.metrics},
        "calls": session.counts["calls"],
        "malformed": session.counts["malformed"],
        "cut": session.cut,
        "failed": None if failed is None else [failed.kind, failed.why],
    }


def _episode(uid: str, record: dict[str, Any]) -> Episode:
    recording = Recording.restored(record["turns"])
    failed = None if record["failed"] is None else EpisodeFailure(*record["failed"])
    turns = recording.turns
    reward = record["reward"]
    return Episode(
        uid,
        recording.tracks(),
        record["messages"],
        record["text"],
        turns=len(turns),
        calls=record["calls"],
        malformed=record["malformed"],
        reward=reward,
        returns=reward or 0.0,
        rewarded=reward is not None,
        metrics=record["metrics"],
        stop=(
            Stop.ERROR if failed is not None else Stop.LENGTH if record["cut"] else Stop.ENVIRONMENT
        ),
        last_tokens=len(turns[-1].completion.tokens) if turns else 0,
        failed=failed,
    )
