"""What an episode is: turns of a model and of an environment, and what came of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from reinforge.core.env import Message
from reinforge.core.sample import Stop
from reinforge.rollout.dialogue.environment import EpisodeFailure
from reinforge.rollout.track import TokenTrack


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """How long an episode may be. Players end or fail the episodes that are longer."""

    max_tokens: int  # of a row: everything said so far
    max_turns: int | None = None
    turn_seconds: float | None = None  # of one answer of the environment
    episode_seconds: float | None = None  # of everything, generation included


@dataclass
class Episode:
    """What happened in one episode. A player makes it, `EpisodeRollout` scores it, and functions
    that compare the episodes of a prompt see it.
    """

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
        return [token for track in self.tracks for token in track.sampled]
