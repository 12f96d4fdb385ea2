"""What the hub says no to, in words that say what to do: a repository that is private, gated or not
there, a token that is not valid, a revision or a file that does not exist, too many requests.

transformers and datasets wrap the hub's errors in their own; the hub's is found behind them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from reinforge.core.errors import InputError

LOG_IN = "set HF_TOKEN or run `hf auth login`"


def endpoint() -> str:
    """The address of the hub."""
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def hub_token(where: str) -> str:
    """The user's token for the hub, for what is going to write there."""
    from huggingface_hub import get_token

    token = get_token()
    if not token:
        raise InputError(
            "there is no token for the hub.",
            where=where,
            fix="Set HF_TOKEN, or run `hf auth login`, with a token that may write.",
        )
    return token


def hub_error(error: BaseException, repo: str, where: str, *, else_fix: str = "") -> InputError:
    """The error for whoever wanted something of this repository. `else_fix`: what to do where the
    hub is not to blame.
    """
    found = hub_trouble(error, repo)
    if found is not None:
        return InputError(found[0], where=where, fix=found[1])
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return InputError(first[:300], where=where, fix=else_fix)


def hub_trouble(error: BaseException, repo: str) -> tuple[str, str] | None:
    """What the hub answered, and what to do; None where it is not behind this error."""
    from huggingface_hub import errors

    for each in _chain(error):
        if isinstance(each, errors.GatedRepoError):
            return gated(repo)
        if isinstance(each, errors.RepositoryNotFoundError):
            return not_there(repo)
        if isinstance(each, errors.RevisionNotFoundError):
            return f"{repo} has no such revision.", "Give a branch, a tag or a commit that it has."
        if isinstance(each, errors.HfHubHTTPError) and (code := _status(each)) is not None:
            return _by_status(code, repo)
    return None


def gated(repo: str) -> tuple[str, str]:
    return (
        f"{repo} is gated: its owners decide who may have it.",
        f"Ask for access at {endpoint()}/{repo}, and {LOG_IN}.",
    )


def not_there(repo: str) -> tuple[str, str]:
    from huggingface_hub import get_token

    who = "your token may see" if get_token() else "everybody may see"
    return (
        f"the hub has no {repo} that {who}.",
        f"Check the spelling; if it is private, {LOG_IN}.",
    )


def is_temporary(error: BaseException) -> bool:
    """Whether the same may work a little later: the hub is busy, or the network is gone."""
    from huggingface_hub.errors import HfHubHTTPError

    for each in _chain(error):
        # of httpx, which the hub's library brings
        if any(kind.__name__ == "TransportError" for kind in type(each).__mro__):
            return True
        if isinstance(each, HfHubHTTPError) and (code := _status(each)) is not None:
            return code == 429 or code >= 500
    return False


def _by_status(code: int, repo: str) -> tuple[str, str] | None:
    if code == 401:
        return "the hub does not accept your token.", f"To give it a valid one, {LOG_IN}."
    if code == 403:
        return (
            f"your token may not do this with {repo}.",
            f"Use one that may: {LOG_IN}.",
        )
    if code == 429:
        return (
            "the hub has had too many requests from here.",
            "Try again in some minutes; more are allowed with a token (HF_TOKEN).",
        )
    if code >= 500:
        return f"the hub answers with an error of its own ({code}).", "Try again later."
    return None


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    return None if response is None else int(response.status_code)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__
