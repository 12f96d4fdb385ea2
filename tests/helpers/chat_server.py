"""A tiny model that chats, and a server around it in threads of this process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from reinforge.build.serving import load_service
from reinforge.serve.http import ConnectionLimits, make_app, server_of
from reinforge.serve.options import ServeOptions, is_loopback, listen

TEMPLATE = (
    "{% if tools %}Tools: {{ tools | tojson }}\n{% endif %}{% for m in messages %}<|bos|>{{ m.role"
    ' }}: {{ m.content or \'\' }}{% for c in m.tool_calls or [] %}\n<tool_call>\n{"name": "{{'
    ' c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor'
    " %}<|eos|>{% endfor %}{% if add_generation_prompt %}<|bos|>assistant: {% endif %}"
)


def make_chat_model(path: Path, *, context: int = 512) -> str:
    """Random weights, wide enough that answers depend on everything before them."""
    from transformers import AutoTokenizer

    from reinforge.models.tiny import make_tiny_model

    make_tiny_model(path, width=32, layers=2, heads=4, kv_heads=2, context=context, spread=0.3)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return str(path)


@contextmanager
def serving(
    app: Any, listener: socket.socket, limits: ConnectionLimits | None = None
) -> Iterator[str]:
    """The address of a server that runs in a thread until the block ends."""
    server = server_of(app, limits)
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        listener.close()


@contextmanager
def served_model(
    path: str, *, limits: ConnectionLimits | None = None, api_key: str | None = None, **options: Any
) -> Iterator[tuple[str, Any]]:
    """(address, service) of a model."""
    chosen = ServeOptions(
        port=0, **{"max_new_tokens": 16, "kv_gib": 0.01, "name": "tiny", **options}
    )
    service = load_service(path, chosen)
    app = make_app(
        service,
        None,
        limits=limits or ConnectionLimits(),
        api_key=api_key,
        local=is_loopback(chosen.host),
    )
    with serving(app, listen(chosen), limits) as url:
        try:
            yield url, service
        finally:
            service.close()


def until(true: Any, seconds: float = 10.0) -> None:
    """Waits until a condition holds, or fails."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)
