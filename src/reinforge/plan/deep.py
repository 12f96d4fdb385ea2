"""Phase 3 of `plan`, with `--deep`: proofs on the rows' own text, one step at toy size, what fits,
and the changes that would help most.

No weights are read: the model is its configuration, its tokenizer, and a toy of its architecture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reinforge.config.schema import Config
from reinforge.core.row import Row
from reinforge.data.chat import Renderer
from reinforge.models.load import context_length, load_config, load_tokenizer
from reinforge.plan import changes, room
from reinforge.plan.dry_step import dry_step
from reinforge.plan.prediction import CACHE_FIX, Expectation, no_cache, peak
from reinforge.plan.preflight import PlanReport, tell_stage
from reinforge.plan.proofs import Proof
from reinforge.plan.template_proofs import template_proofs


def check_deep(
    config: Config, rows: Sequence[Row], plan: Expectation | None, report: PlanReport
) -> None:
    """Everything of the third phase. `plan` is None where rows could not be rendered."""
    found: dict[str, Any] = {}
    report.summary["deep"] = found
    tell_stage("proving the chat template and the tokenizer")
    proofs = template_proofs(config, Renderer(load_tokenizer(config.model), config.data), rows)
    proofs += _lengths(report)
    proofs += _rewards(report)
    tell_stage("doing one step with a toy of the model")
    step, metrics = dry_step(config, rows)
    proofs.append(step)
    if plan is not None:
        tell_stage("looking for what fits and what would help")
        fits = room.room(plan, context_length(config.model))
        best = changes.best_changes(plan, load_config(config.model))
        found["fits"] = {**fits, "said": room.told(fits, plan)}
        found["changes"] = changes.as_dicts(best)
        proofs.append(_memory(plan, found["changes"]))
    found["proofs"] = [proof.as_dict() for proof in proofs]
    found["dry_step"] = metrics
    told = tuple(report.errors)
    for proof in proofs:
        if not proof.ok and not any(error.startswith(f"{proof.where}:") for error in told):
            report.errors.append(proof.error)


def _lengths(report: PlanReport) -> list[Proof]:
    """From what phase 2 measured."""
    counted = report.summary.get("prompt_tokens") or report.summary.get("row_tokens")
    if counted is None:
        return []
    kind = "prompts" if "prompt_tokens" in report.summary else "rows"
    longest = f"the longest of {counted['checked']:,} {kind} has {counted['max']:,} of"
    limit = f"{longest} {counted['limit']:,} tokens"
    late = report.summary.get("too_long")
    if not late:
        return [Proof("lengths", True, f"{limit}; no row is dropped or cut")]
    places = ", ".join(f"{row['where']} ({row['tokens']:,})" for row in late["rows"])
    more = "" if len(late["rows"]) == late["count"] else ", ..."
    said = f"{limit}; {late['count']:,} are {late['done']}: {places}{more}"
    if late["done"] == "refused":
        return [Proof("lengths", False, f"{said}.", "data.length", late["fix"])]
    return [Proof("lengths", True, said)]


def _rewards(report: PlanReport) -> list[Proof]:
    """From what phase 2 tried: a reward must be able to score an answer that is right."""
    proofs = []
    for name, scores in report.summary.get("rewards", {}).items():
        title = f"reward {name}"
        kinds = [kind for kind in ("gold", "empty") if kind in scores]
        if not kinds:
            wrong = [e for e in (*report.errors, *report.warnings) if f"({name}): " in e]
            key, _, said = (wrong or ["rewards: it was not tried"])[0].partition(": ")
            proofs.append(Proof(title, not wrong, said, key))
        elif scores[kinds[0]] is None:
            answers = "gold answers" if kinds[0] == "gold" else "empty completions"
            what = f"returned None for all {answers}: no sample would be scored."
            fix = "Return 0.0 for a wrong answer, None only for one that cannot be scored."
            proofs.append(Proof(title, kinds[0] != "gold", what, f"rewards ({name})", fix))
        else:
            told = ", ".join(
                f"{kind} {'unscored' if scores[kind] is None else format(scores[kind], '.3g')}"
                for kind in kinds
            )
            proofs.append(Proof(title, True, told))
    return proofs


def _memory(plan: Expectation, best: list[dict[str, Any]]) -> Proof:
    prediction = plan.prediction()
    phase, most = peak(prediction)
    parts = {k: v for k, v in prediction["memory_gib"][phase].items() if k != "peak"}
    largest = ", ".join(
        f"{name} {value:.3g}"
        for name, value in sorted(parts.items(), key=lambda item: -item[1])[:4]
    )
    said = (
        f"{phase} takes {most:.1f} of {plan.usable_gib:.1f} GiB that {plan.machine.name} can give"
        f" ({largest})"
    )
    if plan.fits:
        return Proof("memory", True, said)
    if most <= plan.usable_gib:
        return Proof("memory", False, no_cache(prediction), "rollout.kv_gib", CACHE_FIX)
    fix = "Use a smaller model, or name a larger GPU with --gpu."
    if best and best[0]["fits"]:
        fix = f"With {best[0]['change']} it would take {best[0]['memory_gib'][1]:.1f} GiB."
    return Proof("memory", False, f"{said}.", "memory", fix)
