"""A request to end a run is answered at once."""

from __future__ import annotations

import asyncio
import signal
import time

from reinforge.loops.signals import Signals


def test_whoever_asks_is_told_while_a_step_holds_the_loop() -> None:
    told: list[str] = []
    signals = Signals(told.append, lambda: None)

    async def step() -> None:
        signals.listen()
        try:
            signals.terminate(signal.SIGTERM)
            deadline = time.monotonic() + 10
            while not told and time.monotonic() < deadline:
                time.sleep(0.01)  # as a long update does: the loop has no turn
            assert len(told) == 1 and told[0].startswith("SIGTERM: saving a checkpoint")
        finally:
            signals.close()

    asyncio.run(step())
    assert len(told) == 1
