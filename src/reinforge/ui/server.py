"""`reinforge ui`: the web app on a port."""

from __future__ import annotations

import os
import signal
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

from reinforge.core.errors import EXIT_TERMINATED, InputError
from reinforge.serve.options import ServeOptions, is_loopback, listen
from reinforge.ui.options import KEY, AppOptions

AGAIN = 1.0  # seconds until a signal that was lost comes again


def serve_app(options: AppOptions, *, show: bool) -> None:
    """Serves until Ctrl-C or SIGTERM. `show`: opens the page in a browser."""
    token = token_of(options)
    if not options.root.is_dir():
        raise InputError(
            f"there is no folder {options.root}.",
            where="RUNS",
            fix="Give the folder that holds your runs, e.g. runs.",
        )
    try:
        from reinforge.serve.http import run
        from reinforge.ui.app import make_app
    except ModuleNotFoundError as error:
        raise InputError(
            f"the web app needs {error.name}, which is not installed.",
            where="ui",
            fix="pip install 'reinforge[ui]'",
        ) from error
    with ending_by_signal(), listen(ServeOptions(options.host, options.port)) as listener:
        app = make_app(options, token)
        address = address_of(options.host, listener.getsockname()[1], token)
        print(f"{options.root}: {address}  (Ctrl-C ends)", flush=True)
        if show:
            webbrowser.open(address)
        run(app, listener, options.limits)


@contextmanager
def ending_by_signal() -> Iterator[None]:
    """SIGTERM ends what is inside as Ctrl-C does, so that what the app started is ended too;
    uvicorn, which has a handler of its own, gives the signal back when it is done. What a handler
    raises is lost if it interrupts a finalizer: then the signal comes again.
    """
    again: list[threading.Timer] = []

    def end(number: int, frame: Any) -> None:
        again.append(threading.Timer(AGAIN, os.kill, (os.getpid(), number)))
        again[-1].daemon = True
        again[-1].start()
        raise SystemExit(EXIT_TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        for timer in again:
            timer.cancel()
        signal.signal(signal.SIGTERM, before)


def token_of(options: AppOptions) -> str | None:
    """What browsers must show. Refuses to be open to the network without one."""
    token = options.token or os.environ.get(KEY) or None
    if token is None and not is_loopback(options.host):
        raise InputError(
            f"{options.host} can be reached from other machines, and there is no token.",
            where="--host",
            fix=f"Set {KEY} (or --token), or stay on 127.0.0.1.",
        )
    return token


def address_of(host: str, port: int, token: str | None) -> str:
    """The token is behind a #, which browsers do not send.

    >>> address_of("127.0.0.1", 8420, None), address_of("::1", 1, "a b")
    ('http://127.0.0.1:8420/', 'http://[::1]:1/#/?token=a%20b')
    """
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/" + ("" if token is None else f"#/?token={quote(token)}")
