"""Where completions come from: a model in this process, or a server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from reinforge.build.saved_model import checkpoint_of, is_run, open_model
from reinforge.config.adapter import AdapterConfig
from reinforge.config.data import DataConfig
from reinforge.config.schema import Config
from reinforge.core.engine import Sampling
from reinforge.core.sample import Row
from reinforge.data.chat import Renderer
from reinforge.engines.native import NativeEngine
from reinforge.engines.openai import OpenAIClient, OpenAIServer
from reinforge.models.load import load_model, stop_tokens
from reinforge.offline.journal import Line


class CompletionSource(Protocol):
    """Where completions come from."""

    identity: Any  # what they depend on, beside prompt, sampling and seed
    described: dict[str, Any]  # the model, for people
    chat: bool  # prompts are turns of a conversation; otherwise text that is continued

    async def complete(self, row: Row, sampling: Sampling, *, key: int, n: int) -> list[Line]: ...


class NativeSource:
    """Completions of a model in this process, for `reinforge generate` and `data make`."""

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
        weights = _weights(name, checkpoint)
        self.identity = [name, weights, adapter, data.chat]
        self.described = {"model": name, "adapter": adapter, "weights": weights}
        self.chat = self.renderer.chat

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
    """Completions of an OpenAI-compatible server, for `reinforge generate` and `data make`."""

    def __init__(
        self, client: OpenAIClient, model: str, *, raw: bool, logprobs: bool, token_ids: bool
    ):
        self.client = client
        self.asked = {"raw": raw, "logprobs": logprobs, "token_ids": token_ids}
        self.identity = [client.server.url, model, self.asked]
        self.described = {"model": model, "server": client.server.url}
        self.chat = not raw

    async def complete(self, row: Row, sampling: Sampling, *, key: int, n: int) -> list[Line]:
        made = await self.client.complete(row.prompt, sampling, key=key, n=n, **self.asked)
        return [
            {"completion": a.text, "tokens": a.tokens, "logprobs": a.logprobs, "stop": str(a.stop)}
            for a in made
        ]


@asynccontextmanager
async def open_source(
    model_name: str,
    data: DataConfig,
    *,
    config: Config | None = None,
    adapter: str | None = None,
    server: OpenAIServer | None = None,
    raw: bool = False,
    logprobs: bool = True,
    token_ids: bool = False,
) -> AsyncIterator[CompletionSource]:
    """The server, where one is given; otherwise the model, whose prompts are rendered as `data`
    says. `raw`, `logprobs` and `token_ids` are of a server.
    """
    if server is None:
        yield NativeSource(model_name, data, config, adapter)
        return
    async with OpenAIClient(server) as client:
        yield ServerSource(
            client,
            await client.model(),
            raw=raw or data.chat == "never",
            logprobs=logprobs,
            token_ids=token_ids,
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
