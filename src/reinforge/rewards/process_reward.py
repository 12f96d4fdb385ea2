"""The reward `process`: a process reward model judges every step of a completion, and each verdict
is a reward at the token that ends the step.

options: {path: org/prm}, and if wanted `spread`, `join`, revision, dtype and batch_tokens. A step
is a line. It is read exactly as the steps that such a model was trained on (`data.units.steps`):
the prompt, then every line with its newline; the score r is the head's at the newline, the verdict
sigma(r).

In a single-turn rollout the verdicts are token rewards: methods with a value per token (GAE,
return-to-go) see which step was wrong, methods that compare whole answers see their sum. `spread:
mean` divides by the number of steps, so that more steps are not worth more; `sum` does not.
Elsewhere (evaluation, environments, `generate`) one number stands for the answer: `join` min,
product or last of its verdicts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from reinforge.core.batch import pack
from reinforge.core.errors import InputError
from reinforge.core.sample import Row, Sample
from reinforge.rewards.model import ModelReward

Step = tuple[int, float]  # where in the text it ends, its verdict
JOINS: dict[str, Callable[[list[float]], float]] = {
    "min": min,
    "product": math.prod,
    "last": lambda verdicts: verdicts[-1],
}
SPREADS = ("mean", "sum")
OPTIONS = ("path", "spread", "join", "revision", "dtype", "template", "batch_tokens")


@dataclass
class ProcessReward(ModelReward):
    """A reward model that judges the steps of an answer one by one; the reward `process`."""

    spread: str = "mean"
    join: str = "min"
    heads: ClassVar[Sequence[str] | None] = ()  # one, whatever its name
    # what was asked, and what was said
    _last: tuple[Any, list[list[Step]]] | None = field(default=None, repr=False)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[str]) -> list[float]:
        """One number per completion; 0 for one without a step."""
        return [
            float(JOINS[self.join]([v for _, v in steps])) if steps else 0.0
            for steps in self.verdicts(prompts, completions)
        ]

    def steps(self, prompts: Sequence[Any], completions: Sequence[str]) -> list[list[Step]]:
        """The rewards of single steps."""
        share = self.spread == "mean"
        return [
            [(end, verdict / (len(steps) if share else 1)) for end, verdict in steps]
            for steps in self.verdicts(prompts, completions)
        ]

    def verdicts(self, prompts: Sequence[Any], completions: Sequence[str]) -> list[list[Step]]:
        asked = (list(prompts), list(completions))
        if self._last is None or self._last[0] != asked:
            self._last = (asked, self._verdicts(prompts, completions))
        return self._last[1]

    @torch.no_grad()
    def _verdicts(self, prompts: Sequence[Any], completions: Sequence[str]) -> list[list[Step]]:
        assert self.model is not None and self.renderer is not None, "load() comes first"
        lines = [lines_of(completion) for completion in completions]
        samples = []
        for i, (prompt, found) in enumerate(zip(prompts, lines, strict=True)):
            tokens = self.renderer.prompt(Row("reward", prompt))
            trained = [False] * len(tokens)
            for _, line in found:
                ids = self.renderer.template.plain(line + "\n")
                tokens = tokens + ids
                trained = [*trained, *[False] * (len(ids) - 1), True]
            samples.append(Sample.from_tokens(str(i), tokens, trained))
        limit = self.model.context or 1 << 20
        longest = max((len(s.tokens) for s in samples), default=0)
        if longest > limit:
            raise InputError(
                f"a completion with its prompt has {longest} tokens, more than the {limit} that"
                f" {self.path} was made for.",
                where=self.where,
                fix="Lower rollout.max_new_tokens or data.max_length, or use another reward model.",
            )
        scores: dict[str, list[float]] = {}
        for batch in pack(samples, self.batch_tokens):
            values = torch.sigmoid(self.model.values(batch.to(self.model.device), after=True)).cpu()
            parts = values.split(batch.trained_lengths().tolist())
            scores |= {s.uid: part.tolist() for s, part in zip(batch.samples, parts, strict=True)}
        return [
            list(zip([end for end, _ in found], scores[str(i)], strict=True))
            for i, found in enumerate(lines)
        ]


def lines_of(text: str) -> list[tuple[int, str]]:
    """The steps of a completion: (where each ends, its newline included; the line). Blank lines
    belong to the step before them.

    >>> lines_of("a\\n\\nb")
    [(2, 'a'), (4, 'b')]
    """
    found = []
    at = 0
    for line in text.split("\n"):
        at = min(at + len(line) + 1, len(text))
        if line.strip():
            found.append((at, line))
    return found


def process_reward(options: dict[str, Any], where: str) -> ProcessReward:
    """The reward that `rewards.N.options` describes, not yet loaded."""
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise InputError(
            f"process has no option {', '.join(unknown)}.",
            where=where,
            fix=f"It has: {', '.join(OPTIONS)}.",
        )
    if not isinstance(options.get("path"), str):
        raise InputError(
            "which process reward model?",
            where=where,
            fix="Write options: {path: org/name}, or the path of a directory.",
        )
    for name, known in (("spread", SPREADS), ("join", tuple(JOINS))):
        if options.get(name, known[0]) not in known:
            raise InputError(
                f"{options[name]!r} is no {name}.",
                where=f"{where}.{name}",
                fix=f"There are: {', '.join(known)}.",
            )
    return ProcessReward(**options, where=where)
