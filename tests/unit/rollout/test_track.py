"""The token track: what becomes of turns."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from reinforge.core.engine import Completion
from reinforge.core.sample import Stop
from reinforge.rollout.track import TokenTrack


@pytest.mark.parametrize("arrays", [False, True])  # whether the engine had any
def test_turns_keep_their_log_probs_and_versions(arrays: bool) -> None:
    def completion(tokens: list[int], logprobs: list[float], versions: list[int]) -> Completion:
        found = Completion(tokens, logprobs, versions, Stop.EOS)
        return replace(found, sampled=found.as_arrays()) if arrays else found

    track = TokenTrack()
    track.give([5, 6])
    track.take(completion([7, 8], [-0.1, -0.2], [3, 3]))
    track.give([9])
    track.take(completion([10, 11, 12], [-0.3, -0.4, -0.5], [3, 4, 4]))
    track.take(Completion([], [], [], Stop.LENGTH))
    track.rewards[6] = 2.0
    made = track.sample("a#0", group="a", episode="a#0", reward_weight=0.5)
    assert made.tokens.tolist() == [5, 6, 7, 8, 9, 10, 11, 12]
    assert made.trained.tolist() == [False, False, True, True, False, True, True, True]
    expected = torch.tensor([0, 0, -0.1, -0.2, 0, -0.3, -0.4, -0.5], dtype=torch.float32)
    assert torch.equal(made.logprobs, expected)
    assert made.versions.tolist() == [-1, -1, 3, 3, -1, 3, 4, 4]
    assert made.token_rewards is not None
    assert made.token_rewards.tolist() == [0, 0, 0, 0, 0, 0, 1.0, 0]
    kinds = [t.dtype for t in (made.tokens, made.trained, made.logprobs, made.versions)]
    assert kinds == [torch.int64, torch.bool, torch.float32, torch.int32]
    assert (track.prompt, track.sampled) == (2, [7, 8, 10, 11, 12])


def test_a_completion_has_a_log_prob_for_every_token() -> None:
    """One number for several tokens would be spread over them."""
    with pytest.raises(AssertionError):
        TokenTrack().take(Completion([7, 8], [-0.1], [3, 3], Stop.EOS))
