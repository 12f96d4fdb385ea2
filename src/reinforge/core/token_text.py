"""The text of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def token_text(tokenizer: Any, tokens: Sequence[int], *, special: bool = True) -> str:
    """What the tokens stand for, to the character: a tokenizer that tidies up spaces, as its files
    may tell it to, would hide what a model wrote. `special`: with the tokens that are no text.
    """
    return str(
        tokenizer.decode(
            list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
    )
