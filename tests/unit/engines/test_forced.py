"""Tokens that are given, through the engine's own path."""

from __future__ import annotations

import pytest

from helpers.toys import make_model, run
from reinforge.core.engine import Sampling
from reinforge.engines.native import NativeEngine


@pytest.mark.parametrize("cache", ["model", "fp8"])
@pytest.mark.parametrize("arch", ["llama", "qwen2_moe"])
def test_what_was_sampled_is_told_again(arch: str, cache: str) -> None:
    """The same log-probs as when it was sampled, whatever the engine computes with; and the engine
    goes on as before.
    """
    engine = NativeEngine(make_model(arch), kv_gib=0.01, cache_precision=cache)  # type: ignore[arg-type]
    prompt = list(range(5, 45))

    async def both() -> None:
        params = Sampling(20, temperature=0.8, ignore_eos=True)
        done = (await engine.generate(prompt, params, key=3))[0]
        free = engine.pool.free
        again = await engine.forced([*prompt, *done.tokens], len(prompt), 0.8)
        assert again == pytest.approx(done.logprobs, abs=2e-5)
        assert engine.pool.free == free
        assert (await engine.generate(prompt, params, key=3))[0].tokens == done.tokens

    run(both())
