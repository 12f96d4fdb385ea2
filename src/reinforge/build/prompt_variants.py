"""Other prompts that an engine may have seen for the same row: with a BOS too many, without the
chat template, with another one, tokenised again from its text.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from reinforge.config.chat_templates import CHAT_TEMPLATES, fitting
from reinforge.config.data import DataConfig
from reinforge.core.errors import InputError
from reinforge.core.sample import Row
from reinforge.core.token_text import token_text
from reinforge.data.chat import Renderer

Render = Callable[[Row, list[int]], list[int] | None]


def prompt_variants(
    tokenizer: Any, cfg: DataConfig, rows: Sequence[Row], prompts: Sequence[list[int]]
) -> dict[str, list[list[int] | None]]:
    """By what was done differently: the ids of each prompt, None where that is not possible or
    gives the same ids. What is the same for all prompts is left out.
    """
    found = {}
    for name, render in _renderings(tokenizer, cfg).items():
        ids = [_other(render, row, own) for row, own in zip(rows, prompts, strict=True)]
        if any(one is not None for one in ids):
            found[name] = ids
    return found


def _other(render: Render, row: Row, own: list[int]) -> list[int] | None:
    try:
        ids = render(row, own)
    except InputError:  # this row cannot be rendered so
        return None
    return None if not ids or ids == own else ids


def _renderings(tokenizer: Any, cfg: DataConfig) -> Mapping[str, Render]:
    bos = tokenizer.bos_token_id

    def plain(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def again(row: Row, ids: list[int]) -> list[int]:
        return plain(token_text(tokenizer, ids))

    def stripped(row: Row, ids: list[int]) -> list[int]:
        return plain(token_text(tokenizer, ids).rstrip())

    found: dict[str, Render] = {
        "as the row is rendered now": lambda row, ids: Renderer(tokenizer, cfg).prompt(row),
        "tokenised again from its text": again,
        "without the white space at its end": stripped,
    }
    if bos is not None:
        found["with another BOS before it"] = lambda row, ids: [bos, *ids]
        found["without its BOS"] = lambda row, ids: ids[1:] if ids[:1] == [bos] else None
    if tokenizer.chat_template:
        found["without the chat template"] = _rendered(tokenizer, cfg, chat="never")
        found["with the chat template"] = _rendered(tokenizer, cfg, chat="always")
        found["without the header of the answer"] = _headless(tokenizer, cfg)
        found["without its system message"] = _without_system(tokenizer, cfg)
    for name in fitting(tokenizer.get_vocab()):
        other = copy.deepcopy(tokenizer)
        other.chat_template = CHAT_TEMPLATES[name].source
        found[f"with the chat template {name}"] = _rendered(other, cfg, chat="always")
    return found


def _rendered(tokenizer: Any, cfg: DataConfig, *, chat: str) -> Render:
    renderer = Renderer(tokenizer, cfg.model_copy(update={"chat": chat}))
    return lambda row, ids: renderer.prompt(row)


def _headless(tokenizer: Any, cfg: DataConfig) -> Render:
    renderer = Renderer(tokenizer, cfg.model_copy(update={"chat": "always"}))
    return lambda row, ids: renderer.prompt(row, header=False)


def _without_system(tokenizer: Any, cfg: DataConfig) -> Render:
    renderer = Renderer(tokenizer, cfg.model_copy(update={"chat": "always"}))

    def render(row: Row, ids: list[int]) -> list[int] | None:
        if isinstance(row.prompt, str):
            return None
        left = [message for message in row.prompt if message.get("role") != "system"]
        return None if len(left) == len(row.prompt) else renderer.prompt(replace(row, prompt=left))

    return render
