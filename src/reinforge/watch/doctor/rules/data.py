"""The rows: the same ones again and again."""

from __future__ import annotations

from reinforge.watch.doctor.history import SCORED, RunHistory
from reinforge.watch.doctor.trouble import Knob, Trouble

PASSES = 2.0  # over the rows, before a loss that rises on others says overfitting
MANY = {True: 30.0, False: 10.0}  # passes that are too many by themselves; True: with rewards
OVERFIT = 1.1  # times the best loss of the held-out rows


def repeated_data(history: RunHistory) -> Trouble | None:
    epochs = history.window("epoch")
    if epochs is None or epochs.values[-1] < PASSES:
        return None
    passes = epochs.values[-1]
    prompts = history.setting("train.prompts_per_step", 0)
    rows = round(len(epochs.values) * prompts / passes)
    seen = f"{passes:.3g} passes over about {rows} rows"
    losses = history.scores.get("eval/loss", [])
    best = min(losses, key=lambda score: score.value, default=None)
    if best is not None and losses[-1].value > OVERFIT * best.value and losses[-1].step > best.step:
        return Trouble(
            "repeated_data",
            f"Overfitting: {seen}, and the loss of held-out rows rose from {best.value:.3g} (step"
            f" {best.step}) to {losses[-1].value:.3g}.",
            "Fewer passes or more rows; run.checkpoint.best=min:eval/loss keeps the best weights.",
            since=best.step,
            knob=Knob("train.steps", best.step, history.setting("train.steps")),
            evidence=(
                f"eval/loss {best.value:.3g} (step {best.step}) -> {losses[-1].value:.3g}"
                f" (step {losses[-1].step})",
                f"epoch {passes:.3g}",
            ),
        )
    scored = history.window(SCORED) is not None
    if passes < MANY[scored] or history.improves() or (losses and losses[-1] is best):
        return None
    return Trouble(
        "repeated_data",
        f"The same rows over and over: {seen}"
        + (", and evaluation did not improve." if history.improves() is False else "."),
        "Give it more rows, or fewer steps; hold rows out (data.eval) to see whether it learns more"
        " than these.",
        since=next(
            s for s, v in zip(epochs.steps, epochs.values, strict=True) if v >= min(passes, 10)
        ),
        knob=Knob("train.steps", max(1, round(3 * rows / prompts)), history.setting("train.steps"))
        if prompts
        else None,
        evidence=(f"epoch {passes:.3g} at step {epochs.steps[-1]}",),
    )
