"""Hides secrets in what a run writes down about itself: its configuration, its command line, its events.

A secret stands under a key that says so (`api_key`, `hf_token`), inside a URL (`http://user:password@host/?api_key=...`), behind an
option of a command line (`--api-key ...`, `judge.api_key=...`) or after `Bearer`. Everything that records such values asks `redact`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(hidden)"
_NAMES = r"(?:api[_-]?key|access[_-]?key|secret|password|passwd|pwd|credentials?|token|authorization)"
_KEY = re.compile(rf"(?:^|[_.-]){_NAMES}$", re.IGNORECASE)
_USERINFO = re.compile(r"(?<=://)[^/?#\s]*(?=@)")
_QUERY = re.compile(rf"([?&;](?:[\w.-]*[_.-])?(?:{_NAMES}|key|auth|sig|signature)=)[^&;#\s\"'<>]+", re.IGNORECASE)
_ASSIGNED = re.compile(rf"((?:^|[\s\"'{{,_.-]){_NAMES}=[\"']?)[^\"'\s,&;}}\]]+", re.IGNORECASE)
_QUOTED = re.compile(rf"([\"'{{,]\s*(?:[\w.-]*[_.-])?{_NAMES}[\"']?\s*:\s*[\"']?)[^\"'\s,}}\]]+", re.IGNORECASE)  # as in JSON or YAML
_BEARER = re.compile(r"(\b(?:bearer|basic)\s+)[\w.~+/=-]{8,}", re.IGNORECASE)


def redact(value: Any) -> Any:
    """The same value with what looks like a secret hidden.

    >>> redact({"judge": {"url": "http://me:pw@host/v1?api_key=abc&n=3", "api_key": "sk-1"}})
    {'judge': {'url': 'http://(hidden)@host/v1?api_key=(hidden)&n=3', 'api_key': '(hidden)'}}
    >>> redact(["reinforge", "serve", "m", "--api-key", "sk-1", "judge.token=t", "train.max_new_tokens=64"])
    ['reinforge', 'serve', 'm', '--api-key', '(hidden)', 'judge.token=(hidden)', 'train.max_new_tokens=64']
    """
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return {redact(k): _hidden(v) if _KEY.search(str(k)) else redact(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [HIDDEN if isinstance(v, str) and i and _is_option(value[i - 1]) else redact(v) for i, v in enumerate(value)]
    return value


def _is_option(before: Any) -> bool:
    """Whether what follows on the command line is a secret."""
    return isinstance(before, str) and before.startswith("--") and _KEY.search(before) is not None


def _hidden(value: Any) -> Any:
    if isinstance(value, str):
        return HIDDEN
    if isinstance(value, list | tuple):
        return [_hidden(v) for v in value]
    return redact(value)


def _text(text: str) -> str:
    text = _USERINFO.sub(HIDDEN, text)
    for pattern in (_QUERY, _ASSIGNED, _QUOTED, _BEARER):
        text = pattern.sub(rf"\1{HIDDEN}", text)
    return text
