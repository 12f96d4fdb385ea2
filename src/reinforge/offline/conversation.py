"""A conversation with a model: `reinforge chat` in a terminal, `reinforge.chat` in a program."""

from __future__ import annotations

from typing import Any

from reinforge.build.saved_model import open_model
from reinforge.config.data import DataConfig
from reinforge.core.aio import run_sync
from reinforge.core.engine import Sampling
from reinforge.core.errors import InputError
from reinforge.core.sample import Row
from reinforge.core.seeds import seed_of
from reinforge.data.chat import Renderer
from reinforge.engines.native import NativeEngine
from reinforge.models.load import stop_tokens


class Conversation:
    """A conversation with a model in this process. `reinforge.chat` makes it, and so does the
    command line, which reads what is said from the terminal.
    """

    def __init__(
        self,
        model: str,
        *,
        system: str | None = None,
        temperature: float = 0.7,
        top_p: float = 0.95,
        max_new_tokens: int = 512,
        seed: int = 0,
    ):
        """`model`: a run directory (its newest checkpoint), a directory, a hub id or a GGUF
        file.
        """
        self.name = model
        opened, config = open_model(model)
        data = config.data if config else DataConfig(source="chat")
        self.renderer = Renderer(opened.tokenizer, data)
        self.engine = NativeEngine(
            opened,
            stop_tokens={*stop_tokens(opened), *self.renderer.stop_tokens},
            max_batch=1,
            context=opened.context,
            longest=opened.context,
        )
        self.context = self.engine.context or 1 << 20
        self.temperature = temperature
        self.top_p = top_p
        self.max_new_tokens = max_new_tokens
        self.seed = seed
        self._start: list[dict[str, Any]] = (
            [{"role": "system", "content": system}] if system else []
        )
        self.messages = list(self._start)  # so far
        self._turns = 0

    def __repr__(self) -> str:
        return f"<conversation with {self.name}, {len(self.messages)} messages>"

    def reset(self) -> None:
        """Forgets what was said."""
        self.messages = list(self._start)

    def say(self, text: str) -> str:
        """The model's answer to what is said now."""
        said = [*self.messages, {"role": "user", "content": text}]
        prompt = self.renderer.prompt(Row("chat", said if self.renderer.chat else text))
        room = self.context - len(prompt)
        if room < 1:
            raise InputError(
                f"the conversation has {len(prompt)} tokens, the model can hold {self.context}.",
                where="chat",
                fix="Start over (reset).",
            )
        sampling = Sampling(min(self.max_new_tokens, room), self.temperature, top_p=self.top_p)
        key = seed_of(self.seed, "chat", self._turns)
        completion = run_sync(self._answer(prompt, sampling, key))
        answer = self.renderer.decode(completion.tokens)
        self.messages = [*said, {"role": "assistant", "content": answer}]
        self._turns += 1
        return answer

    async def _answer(self, prompt: list[int], sampling: Sampling, key: int) -> Any:
        return (await self.engine.generate(prompt, sampling, key=key))[0]
