"""The section `run.doctor`: what happens when the doctor finds an illness of a run.

One key for each rule of `watch/doctor`; docs/doctor.md says what each looks for.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from reinforge.config.base import Section

Action = Literal["off", "note", "warn", "pause", "stop"]


def _rule(default: Action, what: str) -> Action:
    action: Action = Field(default, description=what)
    return action


class DoctorConfig(Section):
    """off: not looked for. note: in events.jsonl, the report and `reinforge runs diagnose`. warn:
    on the screen too. pause: also saves a checkpoint and ends with exit code 3; the same command
    goes on. stop: the same, and the run is over.
    """

    nonfinite: Action = _rule("warn", "Gradients that are NaN or infinite.")
    learning_rate_high: Action = _rule(
        "warn", "Loss rose, or reward fell, until the model was worse than at the start."
    )
    unscored: Action = _rule("warn", "Answers without a reward.")
    truncation: Action = _rule("warn", "Answers cut off by the token limit that cost reward.")
    stale: Action = _rule("warn", "Samples too old for the weights that learn from them.")
    mismatch: Action = _rule("warn", "Engine and trainer disagree on the probability of tokens.")
    dead_experts: Action = _rule("warn", "Experts of a mixture that no token is sent to.")
    constant_reward: Action = _rule("warn", "The same reward for every answer.")
    overoptimised: Action = _rule("warn", "Evaluation falls while the reward rises.")
    reward_hacking: Action = _rule(
        "warn", "One answer to every prompt, or sheer length, is what the reward pays for."
    )
    entropy_explosion: Action = _rule("warn", "Entropy rises and the reward does not.")
    entropy_collapse: Action = _rule("warn", "Entropy is gone before the task is learned.")
    kl_negative: Action = _rule("warn", "A KL estimate below 0.")
    kl_runaway: Action = _rule("warn", "The policy leaves its reference behind.")
    clip_share: Action = _rule("warn", "More than 0.4 of the tokens are clipped.")
    critic: Action = _rule("warn", "The critic is worse than a constant.")
    length_drift: Action = _rule(
        "warn", "Answers become much longer or shorter, and the reward does not follow."
    )
    repeated_data: Action = _rule("warn", "The same rows over and over, and evaluation suffers.")
    no_gradient: Action = _rule("warn", "Most steps have a gradient of exactly 0.")
    learning_rate_low: Action = _rule("warn", "Gradients are there, and nothing moves.")
    collapse: Action = _rule("warn", "Evaluation fell from its best.")
    slow_phase: Action = _rule("note", "One phase beside the work takes most of the time.")
    memory_growth: Action = _rule("warn", "Memory grows from step to step.")
    solved: Action = _rule("note", "Nothing is left to learn, as far as rewards tell.")
    tracker: Action = _rule("warn", "A tracker takes no metrics any more.")

    def action(self, kind: str) -> Action:
        """Of the rule of this name."""
        action: Action = getattr(self, kind)
        return action
