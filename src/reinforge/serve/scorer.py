"""Scores of a reward model, for whoever asks over HTTP."""

from __future__ import annotations

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from reinforge.data.sources import check_messages
from reinforge.rewards.model import ModelReward, weighted
from reinforge.serve.requests import ApiError, ScoreRequest


class RewardModelScorer:
    """One reward model in a thread of its own: requests are scored one after the other, each by
    itself, so that a text gets the same bits whoever else asks.
    """

    def __init__(self, reward: ModelReward, *, name: str, most: int = 512):
        """`most`: texts of one request."""
        assert reward.model is not None, "load() comes first"
        self.reward = reward
        self.name = name
        self.most = most
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="reward")

    def close(self) -> None:
        self._worker.shutdown(wait=False)

    async def score(self, request: ScoreRequest) -> dict[str, Any]:
        count = max(
            len(given or ()) for given in (request.messages, request.prompts, request.completions)
        )
        if count > self.most:  # before anything is done with them
            raise ApiError(400, f"{count} texts: this server takes at most {self.most} per request")
        prompts, completions = _pairs(request)
        if not prompts:
            raise ApiError(400, "there is no text to score")
        self._check_weights(request.weights)
        said = await asyncio.get_running_loop().run_in_executor(
            self._worker, self.reward.head_scores, prompts, completions
        )
        reply: dict[str, Any] = {"object": "list", "model": self.name}
        if not self._heads:
            return {**reply, "scores": [_finite(score) for (score,) in said]}
        attributes = [dict(zip(self._heads, scores, strict=True)) for scores in said]
        return {
            **reply,
            "scores": [_finite(weighted(one, request.weights)) for one in attributes],
            "attributes": [{k: _finite(v) for k, v in one.items()} for one in attributes],
        }

    @property
    def _heads(self) -> tuple[str, ...]:
        assert self.reward.model is not None
        return self.reward.model.attributes

    def _check_weights(self, weights: dict[str, float] | None) -> None:
        for name, weight in (weights or {}).items():
            if name not in self._heads:
                has = ", ".join(self._heads) or "one without a name"
                raise ApiError(400, f"no head {name!r}: its heads are {has}", param="weights")
            if not math.isfinite(weight):
                raise ApiError(400, f"weights.{name} is not finite", param="weights")


def _finite(score: float | None) -> float | None:
    return score if score is not None and math.isfinite(score) else None


def _pairs(request: ScoreRequest) -> tuple[list[Any], list[str]]:
    if (request.messages is None) == (request.prompts is None) or (request.prompts is None) != (
        request.completions is None
    ):
        raise ApiError(400, "give prompts and completions, or messages")
    if request.messages is not None:
        for i, conversation in enumerate(request.messages):
            check_messages(conversation, f"messages.{i}", "messages")
            if (
                len(conversation) < 2
                or conversation[-1]["role"] != "assistant"
                or not isinstance(conversation[-1].get("content"), str)
            ):
                raise ApiError(
                    400,
                    f"messages.{i}: the last turn must be the assistant's answer to something",
                    param="messages",
                )
        return [c[:-1] for c in request.messages], [c[-1]["content"] for c in request.messages]
    assert request.prompts is not None and request.completions is not None
    if len(request.prompts) != len(request.completions):
        raise ApiError(
            400,
            f"{len(request.prompts)} prompts and {len(request.completions)} completions",
            param="completions",
        )
    return list(request.prompts), request.completions
