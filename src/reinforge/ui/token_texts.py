"""The texts of single tokens, from the tokenizer of a run's model where it is on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from tokenizers import Tokenizer

FILE = "tokenizer.json"


def token_texts(model: str | None, ids: Sequence[int]) -> list[str | None]:
    """One text for each id, None where it is not known.

    Bytes of a character that several tokens share are shown by the character �.
    """
    found = None if model is None else _tokenizer(model)
    if found is None:
        return [None] * len(ids)
    size = found.get_vocab_size()
    return [found.decode([i], skip_special_tokens=False) if 0 <= i < size else None for i in ids]


@lru_cache(maxsize=8)
def _tokenizer(model: str) -> Tokenizer | None:
    path = Path(model).expanduser() / FILE
    if not path.is_file():
        try:
            cached = try_to_load_from_cache(model, FILE)
        except ValueError:  # no name of a repository
            return None
        if not isinstance(cached, str):
            return None
        path = Path(cached)
    try:
        return Tokenizer.from_file(str(path))
    except Exception:  # the library raises nothing more precise
        return None
