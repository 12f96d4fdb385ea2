"""`reinforge serve`: a model behind the OpenAI API, or a reward model that gives scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reinforge.core.errors import InputError
from reinforge.serve.options import ServeOptions, is_loopback, key_of, listen


def serve(load: Callable[[], Any], options: ServeOptions, *, reward: bool = False) -> None:
    """Serves what `load` gives, a Service or (`reward`) a Scorer, until Ctrl-C or SIGTERM.

    Everything that can be wrong with the options is said before the model is loaded.
    """
    key = key_of(options)
    try:
        from reinforge.serve.http import ConnectionLimits, make_app, run
    except ModuleNotFoundError as error:
        raise InputError(
            f"serving needs {error.name}, which is not installed.",
            where="serve",
            fix="pip install 'reinforge[serve]'",
        ) from error
    limits = ConnectionLimits(
        requests=options.max_requests,
        body=options.max_body_mib << 20,
        connections=options.max_connections,
        header_seconds=options.header_seconds,
        body_seconds=options.body_seconds,
    )
    with listen(options) as listener:
        served = load()
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
