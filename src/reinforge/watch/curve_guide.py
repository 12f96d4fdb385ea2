"""What the curves of a run are for: which question each answers, in a line, and where its values
are healthy. The limits are those of the doctor's rules.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from reinforge.watch.doctor.history import SCORED
from reinforge.watch.doctor.rules import critic, experts, hacking, lengths, policy, rollouts, signal

LEARNING = "Is it learning?"
STABLE = "Is it stable?"
FAST = "Is it fast?"
OTHER = "Everything else"
QUESTIONS = (LEARNING, STABLE, FAST, OTHER)
Range = tuple[float | None, float | None]


@dataclass(frozen=True, slots=True)
class CurveNote:
    """What is said of the curves whose names fit."""

    names: str  # a pattern for the whole name
    question: str
    title: str
    says: str
    healthy: Range | None = None


NOTES = (
    CurveNote(
        r"eval/accuracy",
        LEARNING,
        "Held-out accuracy",
        "Share of held-out answers that get the whole reward; the bars are its 95% interval.",
    ),
    CurveNote(
        r"eval/loss",
        LEARNING,
        "Held-out loss",
        "Mean -log p of held-out rows. It falls while the model learns; a rise is overfitting.",
    ),
    CurveNote(
        r"reward/mean",
        LEARNING,
        "Mean reward",
        "What training pushes up. Compare it with the held-out curve before you believe it.",
    ),
    CurveNote(
        r"train/loss",
        LEARNING,
        "Loss",
        "What is minimised. Of a policy gradient it is about 0 and says nothing.",
    ),
    CurveNote(
        r"rewards/(accuracy|margin)|reward/(accuracy|margin)",
        LEARNING,
        "Chosen over rejected",
        "How often, and by how much, the better answer of a pair is preferred.",
    ),
    CurveNote(
        r"groups/zero_variance",
        LEARNING,
        "Groups without a signal",
        "Share of groups whose rewards are all equal: they teach nothing.",
        (None, policy.TIED),
    ),
    CurveNote(
        r"batch/signal",
        LEARNING,
        "Answers with a signal",
        "Share of answers with an advantage other than 0: what the step learns from.",
        (1 - policy.TIED, None),
    ),
    CurveNote(
        r"response/length",
        LEARNING,
        "Length of answers",
        "Sampled tokens per answer. A drift without a gain in reward is a habit, not a skill.",
    ),
    CurveNote(
        r"response/truncated",
        LEARNING,
        "Answers cut off",
        "Share of answers that the token limit cut off before they could be right.",
        (None, lengths.MANY_CUT),
    ),
    CurveNote(
        SCORED,
        LEARNING,
        "Answers without a reward",
        "Share of answers that no reward could be computed for.",
        (None, signal.MOST_UNSCORED),
    ),
    CurveNote(
        r"response/repeated",
        LEARNING,
        "One text for everything",
        "Share of all answers that the most frequent text has, whatever was asked.",
        (None, hacking.DOMINATES),
    ),
    CurveNote(
        r"reward/std",
        LEARNING,
        "Spread of the reward",
        "Standard deviation over the answers of a step. At 0 nothing is better than the rest.",
    ),
    CurveNote(
        r"reward/.*",
        LEARNING,
        "",
        "One part of the reward, before its weight.",
    ),
    CurveNote(
        r"eval/.*",
        LEARNING,
        "",
        "Measured on rows that are not trained on.",
    ),
    CurveNote(
        r"policy/entropy",
        STABLE,
        "Entropy",
        "How undecided the policy is, in nats. At 0 all answers are the same and nothing is left"
        " to compare.",
        (policy.DETERMINISTIC, None),
    ),
    CurveNote(
        r"train/grad_norm",
        STABLE,
        "Gradient norm",
        "Before clipping. Spikes come before trouble; exactly 0 means that nothing is learned.",
    ),
    CurveNote(
        r"policy/kl",
        STABLE,
        "Distance from the reference",
        "Mean KL estimate per token to the model that training began with.",
        (-policy.BELOW_ZERO, policy.FAR),
    ),
    CurveNote(
        r"policy/clip_fraction",
        STABLE,
        "Clipped tokens",
        "Share of tokens whose loss was clipped: updates that wanted to go too far.",
        (None, policy.MOST_CLIPPED),
    ),
    CurveNote(
        r"policy/ratio(/max)?",
        STABLE,
        "Ratio to the old policy",
        "How much likelier tokens became since they were sampled; 1 is unchanged.",
    ),
    CurveNote(
        r"mismatch/mean",
        STABLE,
        "Engine against trainer",
        "Mean difference of the log-probs that engine and trainer give the same tokens.",
        (None, rollouts.DISAGREE),
    ),
    CurveNote(
        r"mismatch/ess",
        STABLE,
        "Effective sample size",
        "Share of the samples that count after correction; 1 where engine and trainer agree.",
        (rollouts.LEAST_ESS, None),
    ),
    CurveNote(
        r"mismatch/outside_2x",
        STABLE,
        "Tokens far off",
        "Share of tokens that engine and trainer see more than twice as likely or half.",
        (None, rollouts.OUTSIDE),
    ),
    CurveNote(
        r"critic/explained_variance",
        STABLE,
        "What the critic explains",
        "1 is a perfect critic, 0 is one that knows the mean.",
        (critic.WORSE_THAN_A_CONSTANT, None),
    ),
    CurveNote(
        r"experts/dead",
        STABLE,
        "Experts without tokens",
        "Share of the experts that almost no token is sent to.",
        (None, experts.MANY_DEAD),
    ),
    CurveNote(
        r"experts/load_max",
        STABLE,
        "The busiest expert",
        "Tokens of one, as a multiple of an even share; 1 where all experts get the same.",
    ),
    CurveNote(
        r"experts/entropy",
        STABLE,
        "Evenness of the experts",
        "1 where all experts get the same number of tokens, 0 where one gets all.",
    ),
    CurveNote(
        r"experts/drift",
        STABLE,
        "Moved to other experts",
        "Share of the tokens that went to other experts than in the update before."
        " Other tokens alone make it more than 0.",
    ),
    CurveNote(
        r"experts/disagreement",
        STABLE,
        "The router's changed mind",
        "Share of the choices of sampling that the trainer would make otherwise.",
    ),
    CurveNote(
        r"experts/disagreement_left",
        STABLE,
        "Trained on other experts",
        "Share of the choices of sampling that the trainer did make otherwise; 0 with replay.",
    ),
    CurveNote(
        r"train/router_(aux|z)_loss",
        STABLE,
        "Loss of the routers",
        "Of how unevenly (aux) or how sharply (z) they choose, without its coefficient.",
    ),
    CurveNote(
        r"train/(skipped|empty)",
        STABLE,
        "Steps that changed nothing",
        "1 where a gradient was not finite (skipped) or exactly 0 (empty).",
        (None, 0.0),
    ),
    CurveNote(r"train/learning_rate", STABLE, "Learning rate", "Of the optimizer step."),
    CurveNote(r"faults/.*", STABLE, "", "What went wrong and did not stop the run.", (None, 0.0)),
    CurveNote(
        r"(mismatch|policy|critic|experts|groups|rollout)/.*",
        STABLE,
        "",
        "",
    ),
    CurveNote(
        r"tokens_per_second",
        FAST,
        "Tokens per second",
        "Tokens of the training pass, by the seconds of the whole step.",
    ),
    CurveNote(
        r"efficiency/idle_(trainer|engine)",
        FAST,
        "Waiting",
        "Share of the step in which it has nothing to do.",
    ),
    CurveNote(
        r"efficiency/train_mfu",
        FAST,
        "Training MFU",
        "Share of the device's peak that the training pass reaches.",
    ),
    CurveNote(
        r"memory/.*",
        FAST,
        "Memory",
        "GiB at the worst moment of the step. It should not grow.",
    ),
    CurveNote(r"(efficiency|weights|engine)/.*", FAST, "", ""),
)


def note_of(name: str) -> CurveNote:
    """The first that fits."""
    for note in NOTES:
        if re.fullmatch(note.names, name):
            return note
    return CurveNote("", OTHER, "", "")


def rank_of(name: str) -> int:
    """The place of a curve among those of its question."""
    for place, note in enumerate(NOTES):
        if re.fullmatch(note.names, name):
            return place
    return len(NOTES)
