"""An engine without a model: scripted or hash-drawn tokens.

For tests of loops, and for dry runs of rewards and environments.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from reinforge.core.engine import Completion, Sampling
from reinforge.core.errors import InputError
from reinforge.core.sample import Stop
from reinforge.core.seeds import seed_of
from reinforge.core.weights import Weights

# (prompt, sample index) -> the ids it "samples"
Script = Callable[[Sequence[int], int], Sequence[int]]


class FakeEngine:
    """Without a script every token is drawn uniformly from `vocabulary` by a hash of (key, sample,
    position, newest token); temperature 0 leaves the key out. A script that runs out before a stop
    token repeats its last id.
    """

    stats = None
    streaming = None
    measured: Mapping[str, float] = {}

    def __init__(
        self,
        script: Script | None = None,
        *,
        vocabulary: int = 64,
        stop_tokens: Iterable[int] = (),
        decode: Callable[[Sequence[int]], str] | None = None,
    ):
        self.script = script
        self.vocabulary = vocabulary
        self.stop_tokens = frozenset(stop_tokens)
        self.decode = decode or (lambda tokens: "".join(map(chr, tokens)))
        self.version = 0
        self.running = 0  # completions being written
        self.awake = True
        # (prompt, params, key, n) of every call
        self.requests: list[tuple[list[int], Sampling, int, int]] = []

    async def generate(
        self, tokens: Sequence[int], params: Sampling, *, key: int, n: int = 1
    ) -> list[Completion]:
        if not tokens:
            raise InputError(
                "an empty prompt has nothing to continue.",
                fix="Give at least one token, e.g. the BOS token.",
            )
        self.requests.append((list(tokens), params, key, n))
        self.awake = True
        return list(
            await asyncio.gather(*(self._write(list(tokens), params, key, i) for i in range(n)))
        )

    async def _write(self, prompt: list[int], params: Sampling, key: int, index: int) -> Completion:
        """One token at a time with a breath between, so that updates and cancellations arrive in
        the middle.
        """
        stops = (
            frozenset() if params.ignore_eos else self.stop_tokens | frozenset(params.stop_tokens)
        )
        done = Completion([], [], [], Stop.LENGTH)
        self.running += 1
        try:
            written = None if self.script is None else list(self.script(prompt, index))
            for t in range(params.max_new_tokens):
                await asyncio.sleep(0)
                stream = ("greedy", *prompt) if params.temperature == 0 else (key, index)
                drawn = seed_of(*stream, t, (done.tokens or prompt)[-1]) % self.vocabulary
                done.tokens.append(drawn if written is None else written[min(t, len(written) - 1)])
                done.logprobs.append(-math.log(self.vocabulary))
                done.versions.append(self.version)
                if done.tokens[-1] in stops or any(
                    s in self.decode(done.tokens) for s in params.stop_strings
                ):
                    return Completion(done.tokens, done.logprobs, done.versions, Stop.EOS)
            return done
        finally:
            self.running -= 1

    async def update(self, weights: Weights, version: int) -> None:
        self.version = version

    async def sleep(self) -> None:
        assert not self.running, "cannot sleep while completions are being written"
        self.awake = False

    def state(self) -> dict[str, int]:
        return {}

    def load(self, state: dict[str, int]) -> None:
        assert not state, f"a fake engine has no state, got {state}"

    def close(self) -> None:
        """Nothing was started."""
