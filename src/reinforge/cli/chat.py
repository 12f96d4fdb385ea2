"""Talking to a model in the terminal."""

from __future__ import annotations

import asyncio
from typing import Any

from reinforge.build.saved_model import open_model
from reinforge.config.data import DataConfig
from reinforge.core.engine import Sampling
from reinforge.core.sample import Row
from reinforge.core.seeds import seed_of
from reinforge.data.chat import Renderer
from reinforge.engines.native import NativeEngine
from reinforge.models.load import stop_tokens
from reinforge.watch.view import visible


def chat(
    model_name: str,
    *,
    temperature: float = 0.7,
    top_p: float = 0.95,
    max_new_tokens: int = 512,
    system: str | None = None,
    seed: int = 0,
) -> None:
    """Reads lines until end of input, /reset forgets the conversation, /quit ends it."""
    model, config = open_model(model_name)
    data = config.data if config else DataConfig(source="chat")
    renderer = Renderer(model.tokenizer, data)
    engine = NativeEngine(
        model,
        stop_tokens={*stop_tokens(model), *renderer.stop_tokens},
        max_batch=1,
        context=model.context,
        longest=model.context,
    )
    context = engine.context or 1 << 20
    start: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    print(f"{model_name}: type a message; /reset starts over, /quit or Ctrl-D ends.")
    turn = 0
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line == "/quit":
            return
        if line == "/reset":
            messages = list(start)
            continue
        if not line:
            continue
        messages.append({"role": "user", "content": line})
        row = Row("chat", messages if renderer.chat else line)
        prompt = renderer.prompt(row)
        room = context - len(prompt)
        if room < 1:
            print(
                f"(the conversation has {len(prompt)} tokens, the model can hold {context}: /reset"
                " starts over)"
            )
            messages.pop()
            continue
        sampling = Sampling(min(max_new_tokens, room), temperature, top_p=top_p)
        completion = asyncio.run(
            engine.generate(prompt, sampling, key=seed_of(seed, "chat", turn))
        )[0]
        answer = renderer.decode(completion.tokens)
        print("\n".join(visible(part) for part in answer.splitlines()))
        messages.append({"role": "assistant", "content": answer})
        turn += 1
