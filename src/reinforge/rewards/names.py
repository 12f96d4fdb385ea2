"""Names of the built-in rewards.

No torch here: a config is checked before anything heavy is imported.
"""

from __future__ import annotations

BUILTIN: tuple[str, ...] = (
    "exact_match",
    "exact_number",
    "number",
    "choice",
    "regex",
    "reasoning_gym",
    "tags",
    "tag_count",
    "cosine_length",
    "repetition",
    "language",
    "math",
    "judge",
    "http",
    "model",
    "process",
    "code",
)
