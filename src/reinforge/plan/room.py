"""What would still fit on the machine of a plan: the longest sequence, the largest micro-batch, the
most sequences at once. Found by asking the prediction again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from reinforge.build.predict import texts_together
from reinforge.config.rules.facts import at_once
from reinforge.plan.prediction import Expectation

MOST_TOKENS = 1 << 20


def room(plan: Expectation, context: int) -> dict[str, int]:
    """0: not even the smallest. No sequence is longer than the model's `context`."""
    prompt = plan.lengths[1]
    found = {"tokens_per_microbatch": _largest(lambda n: _fits(_with_microbatch(plan, n)))}
    if plan.cfg.algorithm.rl:
        found["new_tokens"] = _largest(lambda n: _fits(_with_new_tokens(plan, n)), context - prompt)
        cache = plan.prediction().get("kv_cache")
        if cache is not None:
            found["sequences_at_once"] = int(cache["tokens"]) // int(cache["longest"])
    else:
        together = texts_together(plan.cfg)
        found["row_tokens"] = _largest(
            lambda n: _fits(replace(plan, lengths=(plan.lengths[0], together * n))), context
        )
    return found


def _fits(plan: Expectation) -> bool:
    return plan.fits


def _with_microbatch(plan: Expectation, tokens: int) -> Expectation:
    """With steps that are large enough to fill it."""
    train = plan.cfg.train.model_copy(
        update={"tokens_per_microbatch": tokens, "prompts_per_step": MOST_TOKENS}
    )
    return replace(plan, cfg=plan.cfg.model_copy(update={"train": train}))


def _with_new_tokens(plan: Expectation, tokens: int) -> Expectation:
    rollout = plan.cfg.rollout.model_copy(update={"max_new_tokens": tokens})
    return replace(plan, cfg=plan.cfg.model_copy(update={"rollout": rollout}))


def _largest(fits: Callable[[int], bool], high: int = MOST_TOKENS) -> int:
    """By halving: what is smaller fits too."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def told(found: dict[str, Any], plan: Expectation) -> str:
    """In words, with what is asked for."""
    if not found["tokens_per_microbatch"]:
        return "nothing: weights, optimizer and gradients alone are too much"
    said = [f"micro-batches of up to {found['tokens_per_microbatch']:,} tokens"]
    if "new_tokens" in found:
        asked = plan.cfg.rollout.max_new_tokens
        said.append(f"answers of up to {found['new_tokens']:,} tokens ({asked:,} asked)")
    if "sequences_at_once" in found:
        asked = at_once(plan.cfg)
        said.append(
            f"{min(found['sequences_at_once'], asked):,} of {asked:,} sequences of full length at"
            " once"
        )
    if "row_tokens" in found:
        longest = plan.lengths[1] // texts_together(plan.cfg)
        said.append(f"rows of up to {found['row_tokens']:,} tokens (the longest has {longest:,})")
    return ", ".join(said)
