"""`reinforge serve`: a model behind the OpenAI API, or a reward model that gives scores."""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reinforge.core.errors import InputError

if TYPE_CHECKING:
    from reinforge.app.serve_reward import Scorer
    from reinforge.app.serve_service import Service

KEY = "REINFORGE_API_KEY"


@dataclass(frozen=True)
class ServeOptions:
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None  # default: from the environment
    name: str | None = None  # the model's name in requests
    max_new_tokens: int = 512  # where a request names no limit
    max_requests: int = 256  # at once
    max_body_mib: int = 8
    max_completions: int = 512  # prompts x n of one request
    max_connections: int = 1024  # open at once
    header_seconds: float = 10.0  # for the headers of a request to arrive
    body_seconds: float = 60.0  # for the rest of it, and for a client to read some more
    max_batch: int = 256  # sequences decoded at once
    kv_gib: float | None = None
    context: int | None = None  # default: the model's own
    checkpoint: str = "latest"
    adapter: str | None = None


def name_of(source: str) -> str:
    """A directory is known by its last part: where it lies is nobody's business."""
    path = Path(source)
    return path.resolve().name if path.exists() else source


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def key_of(options: ServeOptions) -> str | None:
    """The key that clients must show. Refuses to be open to the network without one."""
    key = options.api_key or os.environ.get(KEY) or None
    if key is None and not is_loopback(options.host):
        raise InputError(
            f"{options.host} can be reached from other machines, and there is no API key.",
            where="--host",
            fix=f"Set {KEY} (or --api-key), or stay on 127.0.0.1.",
        )
    return key


def listen(options: ServeOptions) -> socket.socket:
    """The port is taken before the model is loaded: whether it is free shows at once."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        return socket.create_server((options.host, options.port), family=family)
    except OSError as error:
        raise InputError(
            f"cannot listen on {options.host}:{options.port}: {error.strerror}.",
            where="--port",
            fix="Give another port.",
        ) from error


def load_service(source: str, options: ServeOptions) -> Service:
    from reinforge.app.runs import open_model
    from reinforge.app.serve_service import Service
    from reinforge.config.schema import DataConfig
    from reinforge.data.chat import Renderer
    from reinforge.engines.native import NativeEngine
    from reinforge.models.load import stop_tokens

    model, _ = open_model(source, adapter=options.adapter, checkpoint=options.checkpoint)
    longest = model.context
    if options.context is not None and longest is not None and options.context > longest:
        raise InputError(
            f"{source} was made for {longest} tokens.", where="--context", fix="Ask for fewer."
        )
    stops = {
        *stop_tokens(model),
        *Renderer(model.tokenizer, DataConfig(source="serve")).stop_tokens,
    }
    context = options.context or longest
    engine = NativeEngine(
        model,
        stop_tokens=stops,
        max_batch=options.max_batch,
        kv_gib=options.kv_gib,
        context=context,
        longest=context,
        prefix_cache=True,
    )
    name = options.name or name_of(source)
    return Service(
        engine,
        name=name,
        max_new_tokens=options.max_new_tokens,
        max_completions=options.max_completions,
    )


def load_scorer(source: str, options: ServeOptions) -> Scorer:
    """A reward model from a directory or the hub, or out of a run that trained one."""
    from reinforge.app.runs import config_of, is_run, load_weights
    from reinforge.app.serve_reward import Scorer
    from reinforge.config.families import family_of
    from reinforge.models.load import load_scalar
    from reinforge.rewards.model import CHAT, ModelReward

    name = options.name or name_of(source)
    if not is_run(Path(source)):
        return Scorer(
            ModelReward(source, where="MODEL").load("auto"), name=name, most=options.max_completions
        )
    config, _ = config_of(Path(source))
    if family_of(config.algorithm.name) != "reward":
        raise InputError(
            f"{source} trained {config.algorithm.name}, not a reward model.",
            where="MODEL",
            fix="Leave --reward out to serve its model.",
        )
    model = load_scalar(config.model.model_copy(update={"compile": False}), fresh=True)
    load_weights(model, Path(source), options.checkpoint)
    # as its rows were rendered
    template = next(kind for kind, chat in CHAT.items() if chat == config.data.chat)
    return Scorer(
        ModelReward(source, template=template, where="MODEL").use(model),
        name=name,
        most=options.max_completions,
    )


def serve(source: str, options: ServeOptions, *, reward: bool = False) -> None:
    """Runs until Ctrl-C or SIGTERM.

    Everything that can be wrong with the options is said before the model is loaded.
    """
    key = key_of(options)
    try:
        from reinforge.app.serve_http import Limits, make_app, run
    except ModuleNotFoundError as error:
        raise InputError(
            f"serving needs {error.name}, which is not installed.",
            where="serve",
            fix="pip install 'reinforge[serve]'",
        ) from error
    with listen(options) as listener:
        served: Any = load_scorer(source, options) if reward else load_service(source, options)
        limits = Limits(
            requests=options.max_requests,
            body=options.max_body_mib << 20,
            connections=options.max_connections,
            header_seconds=options.header_seconds,
            body_seconds=options.body_seconds,
        )
        app = make_app(
            None if reward else served,
            served if reward else None,
            limits=limits,
            api_key=key,
            local=is_loopback(options.host),
        )
        host = f"[{options.host}]" if ":" in options.host else options.host
        print(
            f"{served.name}: http://{host}:{listener.getsockname()[1]}/v1  (Ctrl-C ends)",
            flush=True,
        )
        try:
            run(app, listener, limits)
        finally:
            served.close()
