"""Hides secrets in what a run writes down about itself: its configuration, its command line, its
events.

A secret stands under a key that says so (`api_key`, `hf_token`), inside a URL
(`http://user:password@host/?api_key=...`), behind an option of a command line (`--api-key ...`,
`judge.api_key=...`) or in a header (`Authorization: Bearer ...`).

`redact` is for what people read: events, command lines, texts of errors. It looks for secrets
inside of text too. `redact_settings` is for a configuration, which later commands read back and
compare.
It hides what a key or a URL says is secret, and leaves prose, such as a system prompt, as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

HIDDEN = "(hidden)"
_NAMES = (
    r"(?:api[_-]?key|access[_-]?key|secret|password|passwd|pwd|credentials?|token|authorization)"
)
_KEY = re.compile(rf"(?:^|[_.-]){_NAMES}$", re.IGNORECASE)
_USERINFO = re.compile(r"(?<=://)[^/?#\s]*(?=@)")
_QUERY = re.compile(
    rf"([?&;](?:[\w.-]*[_.-])?(?:{_NAMES}|key|auth|sig|signature)=)[^&;#\s\"'<>]+", re.IGNORECASE
)
_ASSIGNED = re.compile(rf"((?:^|[\s\"'{{,_.-]){_NAMES}=[\"']?)[^\"'\s,&;}}\]]+", re.IGNORECASE)
# as in JSON or YAML
_QUOTED = re.compile(
    rf"([\"'{{,]\s*(?:[\w.-]*[_.-])?{_NAMES}[\"']?\s*:\s*[\"']?)[^\"'\s,}}\]]+", re.IGNORECASE
)
# of a header, by its name or as a quoted value; "basic arithmetic" is neither
_SCHEME = re.compile(
    r"(authorization[\"']?\s*[:=]\s*b?[\"']?(?:bearer|basic)\s+|[\"']bearer\s+)[\w.~+/=-]+",
    re.IGNORECASE,
)
_URL = re.compile(r"[a-z][a-z0-9+.-]*://\S+", re.IGNORECASE)
_OPTION = re.compile(rf"(--(?:[\w.-]*[_.-])?{_NAMES}=).+", re.IGNORECASE | re.DOTALL)


def redact(value: Any) -> Any:
    """The same value with what looks like a secret hidden.

    >>> redact({"judge": {"url": "http://me:pw@host/v1?api_key=abc&n=3", "api_key": "sk-1"}})
    {'judge': {'url': 'http://(hidden)@host/v1?api_key=(hidden)&n=3', 'api_key': '(hidden)'}}
    >>> redact(["serve", "m", "--api-key", "sk-1", "judge.token=t", "train.max_new_tokens=64"])
    ['serve', 'm', '--api-key', '(hidden)', 'judge.token=(hidden)', 'train.max_new_tokens=64']
    """
    return _walk(value, _text)


def redact_settings(value: Any) -> Any:
    """The same configuration without secrets: those under keys, in strings that are URLs, and
    behind options.

    >>> redact_settings({"system": "Basic arithmetic. password=?", "url": "http://me:pw@host"})
    {'system': 'Basic arithmetic. password=?', 'url': 'http://(hidden)@host'}
    """
    return _walk(value, _setting)


def _walk(value: Any, of_text: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return of_text(value)
    if isinstance(value, Mapping):
        return {
            _walk(key, of_text): (
                _hidden(part, of_text) if _KEY.search(str(key)) else _walk(part, of_text)
            )
            for key, part in value.items()
        }
    if isinstance(value, list | tuple):
        return [
            (
                HIDDEN
                if isinstance(part, str) and i and _is_option(value[i - 1])
                else _walk(part, of_text)
            )
            for i, part in enumerate(value)
        ]
    return value


def _is_option(before: Any) -> bool:
    """Whether what follows on the command line is a secret."""
    return isinstance(before, str) and before.startswith("--") and _KEY.search(before) is not None


def _hidden(value: Any, of_text: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return HIDDEN
    if isinstance(value, list | tuple):
        return [_hidden(part, of_text) for part in value]
    return _walk(value, of_text)


def _text(text: str) -> str:
    text = _USERINFO.sub(HIDDEN, text)
    # a scheme before its key: that would hide the word Bearer alone
    for pattern in (_QUERY, _SCHEME, _ASSIGNED, _QUOTED):
        text = pattern.sub(rf"\1{HIDDEN}", text)
    return text


def _setting(text: str) -> str:
    if option := _OPTION.fullmatch(text):
        return f"{option[1]}{HIDDEN}"
    if not _URL.fullmatch(text):
        return text
    return _QUERY.sub(rf"\1{HIDDEN}", _USERINFO.sub(HIDDEN, text))
