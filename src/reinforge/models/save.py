"""Writing a transformers model to a directory, without what transformers would print or import on
the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def no_foreign_bars() -> None:
    """The terminal belongs to our own view: transformers draws no bars when it loads or writes
    weights. Those of downloads stay.
    """
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging

    hidden = are_progress_bars_disabled()
    logging.disable_progress_bar()  # also the hub's
    if not hidden:
        enable_progress_bars()


def attend_as_transformers(module: Any) -> None:
    """Gives a module an attention of transformers', the fastest that it has: gpt-oss has one, since
    no other knows sinks.
    """
    try:
        module.set_attn_implementation("sdpa")
    except ValueError:
        module.set_attn_implementation("eager")


@contextmanager
def writing() -> Iterator[None]:
    """Around `save_pretrained` of a model that nothing wraps.

    No bars; and the search for a wrapper is left out, which imports DeepSpeed where that is
    installed: it takes seconds and prints warnings.
    """
    from transformers import modeling_utils

    no_foreign_bars()
    search = modeling_utils.unwrap_model
    modeling_utils.unwrap_model = lambda model, **_: model
    try:
        yield
    finally:
        modeling_utils.unwrap_model = search
