"""Batch generation to JSONL, from the native engine or a server, with labels and preference pairs
where they are wanted.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from reinforge.build.constraints import rollout_constraint
from reinforge.build.saved_model import checkpoint_of, config_of, is_run, open_model
from reinforge.config.adapter import AdapterConfig
from reinforge.config.data import DataConfig
from reinforge.config.schema import Config
from reinforge.core.constraint import Constraint
from reinforge.core.engine import Sampling
from reinforge.core.errors import InputError
from reinforge.core.sample import Row
from reinforge.core.seeds import seed_of
from reinforge.data.chat import Renderer
from reinforge.data.sources import hold_out, load_rows
from reinforge.engines.native import NativeEngine
from reinforge.engines.openai import OpenAIClient, OpenAIServer
from reinforge.models.load import load_model, stop_tokens
from reinforge.offline.journal import LABELS, REQUEST, GenerationJournal, Line, digest, write_whole
from reinforge.offline.labels import Labeller, LabelOptions, make_pairs

AT_ONCE = 2048  # prompts under way


class CompletionSource(Protocol):
    """Where completions come from."""

    identity: Any  # what they depend on, beside prompt, sampling and seed

    async def complete(self, row: Row, sampling: Sampling, *, key: int, n: int) -> list[Line]: ...


class NativeSource:
    """Completions of a model in this process, for `reinforge generate`."""

    def __init__(
        self,
        name: str,
        data: DataConfig,
        config: Config | None,
        adapter: str | None,
        checkpoint: str = "latest",
    ):
        if config is not None and not is_run(Path(name)):
            self.model = load_model(config.model, AdapterConfig(path=adapter) if adapter else None)
        else:
            self.model = open_model(name, adapter=adapter, checkpoint=checkpoint)[0]
        self.renderer = Renderer(self.model.tokenizer, data)
        self.engine = NativeEngine(
            self.model,
            stop_tokens={*stop_tokens(self.model), *self.renderer.stop_tokens},
            context=self.model.context,
            longest=self.model.context,
        )
        self.identity = [name, _weights(name, checkpoint), adapter, data.chat]

    async def complete(self, row: Row, sampling: Sampling, *, key: int, n: int) -> list[Line]:
        made = await self.engine.generate(self.renderer.prompt(row), sampling, key=key, n=n)
        return [
            {
                "completion": self.renderer.decode(c.tokens),
                "tokens": c.tokens,
                "logprobs": c.logprobs,
                "stop": str(c.stop),
            }
            for c in made
        ]

    def room(self, row: Row) -> int | None:
        """How many tokens the model's context leaves for an answer; None: as many as one likes."""
        if self.engine.context is None:
            return None
        return self.engine.context - len(self.renderer.prompt(row))

    def continued(self, row: Row, text: str) -> tuple[list[int], list[int]]:
        """Ids of a text prompt and of what follows it: tokenised together where that leaves the
        prompt's ids alone, otherwise apart.
        """
        prompt = self.renderer.prompt(row)
        joint = self.renderer.prompt(replace(row, prompt=f"{row.prompt}{text}"))
        if joint[: len(prompt)] != prompt:
            return prompt, self.renderer.template.plain(text)
        return prompt, joint[len(prompt) :]


class ServerSource:
    """Completions of an OpenAI-compatible server, for `reinforge generate`."""

    def __init__(
        self, client: OpenAIClient, model: str, *, raw: bool, logprobs: bool, token_ids: bool
    ):
        self.client = client
        self.asked = {"raw": raw, "logprobs": logprobs, "token_ids": token_ids}
        self.identity = [client.server.url, model, self.asked]

    async def complete(self, row: Row, sampling: Sampling, *, key: int, n: int) -> list[Line]:
        made = await self.client.complete(row.prompt, sampling, key=key, n=n, **self.asked)
        return [
            {"completion": a.text, "tokens": a.tokens, "logprobs": a.logprobs, "stop": str(a.stop)}
            for a in made
        ]


DEFAULT_NEW_TOKENS = 256


async def generate_file(
    model_name: str,
    prompts: Path | str | None,
    out: Path,
    *,
    n: int,
    temperature: float,
    top_p: float,
    max_new_tokens: int | None,
    seed: int,
    adapter: str | None,
    config: Config | None = None,
    server: OpenAIServer | None = None,
    labelling: LabelOptions | None = None,
    raw: bool = False,
    logprobs: bool = True,
    token_ids: bool = False,
    constraint: Constraint | None = None,
) -> int:
    """One JSON line per completion, in the order of the rows.

    `constraint`: what every answer must match; default: the configuration's or run's
    rollout.structured. The file appears whole or not at all; what was answered before a kill is
    kept beside it and not asked again.
    """
    how = labelling or LabelOptions()
    if config is None and is_run(Path(model_name)):
        config = config_of(Path(model_name))[0]
    data = data_of(prompts, config)
    rows = load_rows(data)
    if prompts is None:
        rows = hold_out(data, rows)[0]  # what comes out may be trained on
    longest = max_new_tokens or (
        config.rollout.max_new_tokens if config is not None else DEFAULT_NEW_TOKENS
    )
    if constraint is None and config is not None:
        constraint = rollout_constraint(config)
    sampling = Sampling(longest, temperature, top_p=top_p, constraint=constraint)
    store = GenerationJournal(out, n)
    async with AsyncExitStack() as stack:
        source: CompletionSource
        if server is not None:
            client = await stack.enter_async_context(OpenAIClient(server))
            source = ServerSource(
                client,
                await client.model(),
                raw=raw or data.chat == "never",
                logprobs=logprobs,
                token_ids=token_ids,
            )
        else:
            source = NativeSource(model_name, data, config, adapter)
        judge = (
            None
            if how.judge is None
            else await stack.enter_async_context(OpenAIClient(how.judge, where="--judge"))
        )
        labeller = Labeller(how, judge) if how.wanted else None
        requests = [
            digest(
                source.identity,
                asdict(sampling),
                seed,
                n,
                row.id,
                row.prompt,
                row.columns.get("tools"),
            )
            for row in rows
        ]
        room = asyncio.Semaphore(AT_ONCE)

        async def one(row: Row, request: str) -> None:
            async with room:
                lines = store.known.get(request)
                if lines is None:
                    made = await source.complete(
                        row, sampling, key=seed_of(seed, "generate", row.id), n=n
                    )
                    lines = [
                        {
                            "id": row.id,
                            "prompt": row.prompt,
                            **_plain(dict(row.columns)),
                            **m,
                            REQUEST: request,
                        }
                        for m in made
                    ]
                    store.add(lines)
                if labeller is not None and any(line.get(LABELS) != how.identity for line in lines):
                    store.add(await labeller(row, lines))

        try:
            async with asyncio.TaskGroup() as tasks:  # the first failure cancels the others
                for row, request in zip(rows, requests, strict=True):
                    tasks.create_task(one(row, request))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
    lines = store.finish(requests)
    if how.pairs is not None:
        write_whole(pairs_path(out), make_pairs(lines, how.pairs, how.margin))
    return len(lines)


def pairs_path(out: Path) -> Path:
    """`answers.jsonl` -> `answers.pairs.jsonl`."""
    return out.with_name(f"{out.stem}.pairs{out.suffix or '.jsonl'}")


def data_of(prompts: Path | str | None, config: Config | None) -> DataConfig:
    """The prompts of a file (or source) are rendered as the config's own; what chose its rows is
    left out. None: those of the config.
    """
    if prompts is None:
        if config is None:
            raise InputError(
                "which prompts?",
                where="--data",
                fix=(
                    "Give a .jsonl file with a `prompt` per line, or a configuration that has data."
                ),
            )
        return config.data
    data = config.data if config is not None else DataConfig(source=str(prompts))
    return data.model_copy(
        update={"source": str(prompts), "options": {}, "where": {}, "limit": None}
    )


def _weights(name: str, checkpoint: str) -> Any:
    """What tells one version of the weights from another: of a run its checkpoint, of a path when
    its files changed.
    """
    path = Path(name)
    if is_run(path):
        return checkpoint_of(path, checkpoint).name
    files: Sequence[Path] = (
        sorted(path.glob("*.safetensors")) if path.is_dir() else [path] if path.is_file() else []
    )
    return [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]


def _plain(columns: dict[str, object]) -> dict[str, object]:
    return json.loads(json.dumps(columns, default=str))
