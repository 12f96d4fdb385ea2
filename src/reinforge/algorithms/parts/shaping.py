"""Changes to a reward that depend on the length of the response.

No torch: plain numbers in, a plain number out.
"""

from __future__ import annotations


def overlong_penalty(length: int, max_new_tokens: int, buffer: int) -> float:
    """DAPO's soft overlong punishment (2503.14476, eq. 13), to be added to the reward.

    With L = max_new_tokens, B = buffer:

        0                    if length <= L - B
        (L - B - length)/B   if L - B < length <= L
        -1                   if length > L

    >>> [overlong_penalty(n, 100, 20) for n in (80, 90, 100, 101)]
    [0.0, -0.5, -1.0, -1.0]
    """
    free = max_new_tokens - buffer
    if buffer == 0 or length <= free:
        return 0.0
    return max(-1.0, (free - length) / buffer)
