"""A long text cut into chunks that overlap, for a model that reads them one by one."""

from __future__ import annotations

from collections.abc import Iterator

# where a chunk ends best: after a paragraph, a line, a sentence, a word
ENDS = ("\n\n", "\n", ". ", " ")


def chunks(text: str, size: int, overlap: int) -> Iterator[tuple[int, str]]:
    """(where it begins, the chunk) of every chunk: at most `size` characters, the last `overlap` of
    them again at the beginning of the next one, or a few more, so that it begins with a word. Every
    character but white space around chunks is in one.

    A chunk ends after a paragraph where one ends in its second half, else after a line, a sentence
    or a word.

    >>> list(chunks("One two. Three four. Five six.", 16, 5))
    [(0, 'One two. Three'), (9, 'Three four.'), (15, 'four. Five six.')]
    """
    assert 0 <= overlap <= size // 2, "a chunk must go on where the one before it ended"
    start = 0
    while start < len(text):
        if text[start].isspace():
            start += 1
            continue
        end = start + size
        if end < len(text):
            end = _end(text, start + size // 2 + 1, end)
        yield start, text[start:end].rstrip()
        if end >= len(text):
            return
        start = _begin(text, end - overlap, max(start + 1, end - 2 * overlap))


def _end(text: str, earliest: int, latest: int) -> int:
    """The end of a chunk, within these places."""
    for mark in ENDS:
        at = text.rfind(mark, earliest, latest)
        if at >= 0:
            return at + len(mark)
    return latest


def _begin(text: str, wanted: int, earliest: int) -> int:
    """The beginning of the word at this place, if it is not before another."""
    for at in range(wanted, earliest, -1):
        if text[at - 1].isspace():
            return at
    return wanted
