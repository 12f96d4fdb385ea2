"""The rules in causal order: what explains others stands before them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from reinforge.watch.doctor.history import RunHistory
from reinforge.watch.doctor.rules import (
    critic,
    data,
    experts,
    hacking,
    lengths,
    machine,
    policy,
    rates,
    rollouts,
    signal,
)
from reinforge.watch.doctor.trouble import Trouble

SHARE = 5  # steps before a share says something while the run goes on
TREND = 20  # ... and a change from the start


@dataclass(frozen=True)
class DoctorRule:
    """One illness: what looks for it, from which step on while the run goes, and which others come
    from it, so that they are told below it.
    """

    check: Callable[[RunHistory], Trouble | None]
    enough: int = TREND
    explains: frozenset[str] = field(default_factory=frozenset)

    @property
    def kind(self) -> str:
        return self.check.__name__


POLICY_MOVED = frozenset(
    {"entropy_explosion", "entropy_collapse", "kl_runaway", "clip_share", "length_drift"}
)
POLICY_SETTLED = POLICY_MOVED - {"entropy_explosion"}
NOT_LEARNED = frozenset({"no_gradient", "learning_rate_low", "collapse", "repeated_data"})

RULES: tuple[DoctorRule, ...] = (
    DoctorRule(
        signal.nonfinite, SHARE, POLICY_MOVED | NOT_LEARNED | {"learning_rate_high", "critic"}
    ),
    DoctorRule(signal.unscored, SHARE, NOT_LEARNED | {"constant_reward"}),
    DoctorRule(
        lengths.truncation, SHARE, NOT_LEARNED | {"constant_reward", "length_drift", "critic"}
    ),
    DoctorRule(
        signal.constant_reward,
        SHARE,
        NOT_LEARNED | POLICY_MOVED | {"critic", "learning_rate_high"},
    ),
    DoctorRule(
        rollouts.stale,
        TREND,
        POLICY_MOVED | NOT_LEARNED | {"mismatch", "kl_negative", "learning_rate_high"},
    ),
    DoctorRule(
        rollouts.mismatch,
        SHARE,
        POLICY_MOVED | NOT_LEARNED | {"kl_negative", "learning_rate_high"},
    ),
    DoctorRule(experts.dead_experts, SHARE),
    DoctorRule(
        policy.kl_negative,
        SHARE,
        POLICY_MOVED | NOT_LEARNED | {"learning_rate_high"},
    ),
    DoctorRule(critic.critic, TREND, POLICY_MOVED | NOT_LEARNED | {"learning_rate_high"}),
    DoctorRule(
        policy.entropy_explosion,
        TREND,
        NOT_LEARNED | {"learning_rate_high", "kl_runaway", "clip_share", "length_drift"},
    ),
    DoctorRule(rates.learning_rate_high, TREND, POLICY_SETTLED | NOT_LEARNED),
    DoctorRule(hacking.overoptimised, TREND, NOT_LEARNED | POLICY_SETTLED | {"reward_hacking"}),
    DoctorRule(hacking.reward_hacking, TREND, NOT_LEARNED | POLICY_SETTLED),
    DoctorRule(
        policy.clip_share, SHARE, frozenset({"learning_rate_low", "kl_runaway", "collapse"})
    ),
    DoctorRule(
        policy.kl_runaway, TREND, frozenset({"collapse", "length_drift", "entropy_collapse"})
    ),
    DoctorRule(lengths.length_drift, TREND, NOT_LEARNED | {"entropy_collapse"}),
    DoctorRule(policy.entropy_collapse, TREND, NOT_LEARNED),
    DoctorRule(data.repeated_data, TREND, frozenset({"collapse", "no_gradient"})),
    DoctorRule(signal.no_gradient, SHARE, frozenset({"learning_rate_low"})),
    DoctorRule(rates.learning_rate_low, rates.LONG),
    DoctorRule(hacking.collapse, 1),
    DoctorRule(machine.memory_growth, TREND),
    DoctorRule(machine.slow_phase, TREND),
    DoctorRule(signal.solved, SHARE),
)
