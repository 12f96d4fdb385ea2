"""verifiers 0.4 (`verifiers.v1`): `verifiers:my-taskset`. A taskset's tasks, played by one of its
harnesses, scored by the task.

The harness runs as verifiers runs it, in a runtime of its own, and asks for completions over HTTP;
here these are the turns of the episode (`endpoint.py`), so that the tokens that are trained are
those that were sampled. verifiers pins much: give it an interpreter of its own with `env.python`.
It needs `uv` on the PATH of that interpreter.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from pathlib import Path
from typing import Any

from reinforge.core.env import Action, Observation, Step
from reinforge.core.row import Row
from reinforge.envs.adapters.common import library, number, numbers
from reinforge.envs.adapters.endpoint import AgentGate, run

MOST_TASKS = 10_000  # of a taskset that has no end
_LOADED: dict[str, tuple[Any, list[Any]]] = {}


class VerifiersEnv:
    """`taskset`: its settings.

    `harness`: null (a chat, with the task's tools), or another by name. `runtime`: where it runs.
    `max_turns`: turns of the model, for the harness to know. `path`: a directory to import tasksets
    from. A row's column `task` is the index of its task; otherwise the seed chooses.
    """

    def __init__(
        self,
        id: str,
        *,
        taskset: dict[str, Any] | None = None,
        harness: str = "null",
        runtime: dict[str, Any] | None = None,
        max_turns: int | None = None,
        path: str | None = None,
    ):
        self.env, self.tasks = self.prepare(
            id, taskset=taskset, harness=harness, runtime=runtime, max_turns=max_turns, path=path
        )
        self.turnstile = AgentGate()
        self.agent: asyncio.Task[Any] | None = None

    @staticmethod
    def prepare(
        id: str,
        *,
        taskset: dict[str, Any] | None = None,
        harness: str = "null",
        runtime: dict[str, Any] | None = None,
        max_turns: int | None = None,
        path: str | None = None,
    ) -> tuple[Any, list[Any]]:
        """The environment and its tasks, loaded once."""
        settings = {
            "taskset": {"id": id, **(taskset or {})},
            "agent": {
                "harness": {"id": harness},
                "runtime": runtime or {"type": "subprocess"},
                "max_turns": max_turns,
            },
        }
        key = repr((settings, path))
        if key not in _LOADED:
            if path is not None and path not in sys.path:
                sys.path.insert(0, str(Path(path).resolve()))
            # uv stands beside the interpreter that it was installed with
            own = str(Path(sys.executable).parent)
            if own not in os.environ.get("PATH", "").split(os.pathsep):
                os.environ["PATH"] = os.pathsep.join([own, os.environ.get("PATH", "")])
            vf = library("verifiers.v1", "verifiers")
            env = vf.load_environment(vf.resolve_env_config(settings))
            _LOADED[key] = env, list(itertools.islice(env.taskset, MOST_TASKS))
        return _LOADED[key]

    async def reset(self, row: Row, seed: int) -> Observation:
        clients = library("verifiers.v1.clients", "verifiers")
        index = row.columns.get("task")
        task = self.tasks[int(index) if index is not None else seed % len(self.tasks)]
        client = clients.EvalClientConfig(
            base_url=await self.turnstile.open(), api_key_var="REINFORGE_NO_KEY"
        )
        self.agent = run(self._episode(task, clients.ModelContext(model="policy", client=client)))
        opening = await self.turnstile.turn(self.agent)
        if opening is None:
            raise RuntimeError(
                f"the harness ended without asking for a completion: {_why(self.agent.result())}"
            )
        return opening

    async def step(self, action: Action) -> Step:
        assert self.agent is not None
        self.turnstile.over = action.last
        self.turnstile.answer(action)
        heard = await self.turnstile.turn(self.agent)
        if heard is not None:
            return Step(heard)
        episode = self.agent.result()
        if not episode.ok:
            raise RuntimeError(f"verifiers could not score the episode: {_why(episode)}")
        [trace] = episode.traces
        metrics = {
            **numbers(trace.metrics),
            **{name: r.value for name, r in trace.rewards.items() if r is not None},
        }
        return Step(
            None,
            number(trace.reward, "the task's reward"),
            done=True,
            truncated=bool(trace.is_truncated),
            metrics=metrics,
        )

    async def close(self) -> None:
        if self.agent is not None and not self.agent.done():
            self.agent.cancel()
            await asyncio.wait({self.agent})
        await self.turnstile.close()

    async def _episode(self, task: Any, context: Any) -> Any:
        async with self.env.serving():
            return await self.env.run_episode(task, context)


def _why(episode: Any) -> str:
    errors = [*episode.errors, *(t.last_error for t in episode.traces if t.last_error is not None)]
    return "; ".join(f"{e.type}: {e.message}" for e in errors)[:1000] or "no reason given"
