"""Talking to a model in the terminal."""

from __future__ import annotations

from reinforge.core.errors import InputError
from reinforge.core.visible import visible
from reinforge.offline.conversation import Conversation


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
    conversation = Conversation(
        model_name,
        system=system,
        temperature=temperature,
        top_p=top_p,
        max_new_tokens=max_new_tokens,
        seed=seed,
    )
    print(
        f"{model_name}, temperature {temperature:g}: type a message; /reset starts over, /quit or"
        " Ctrl-D ends."
    )
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line == "/quit":
            return
        if line == "/reset":
            conversation.reset()
        elif line:
            _answer(conversation, line)


def _answer(conversation: Conversation, line: str) -> None:
    try:
        answer = conversation.say(line)
    except InputError as full:
        print(f"({full} /reset starts over)")
        return
    print("\n".join(visible(part) for part in answer.splitlines()))
