"""Divergence between two models' next-token distributions without ever holding [M, V] of either.

As in `head.py`: the forward walks over chunks of rows and keeps one number per row, the backward
computes each chunk's logits again and asks autograd for the chunk alone. Any divergence of logits
[R, V] will do. Statistics are float32 whatever the models' precision.

Legend: M rows, V vocabulary, E hidden size (the two models' may differ).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import linear

from reinforge.models import head
from reinforge.models.head import LogitRule

Divergence = Callable[[Tensor, Tensor], Tensor]  # logits of student and teacher [R, V] -> [R]
COPIES = 8  # chunks of float32 logits alive at once: two models, log-softmaxes, what autograd keeps


@dataclass(frozen=True, slots=True)
class LogitHead:
    """How a model makes logits of hidden states.

    Slice `weight` and `bias` where a model pads its vocabulary more than the other.
    """

    weight: Tensor  # [V, E]
    bias: Tensor | None = None  # [V]
    rule: LogitRule = field(default_factory=LogitRule)

    def logits(self, h: Tensor) -> Tensor:
        return self.rule.apply(_wide(linear(h, self.weight, self.bias)))

    def first(self, size: int) -> LogitHead:
        """For the first `size` tokens of the vocabulary alone."""
        return (
            self
            if size >= len(self.weight)
            else LogitHead(
                self.weight[:size], None if self.bias is None else self.bias[:size], self.rule
            )
        )


class GivenLogits:
    """In place of a teacher's head where the teacher's rows are what the divergence compares with,
    whatever that is.
    """

    def logits(self, h: Tensor) -> Tensor:
        return h


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class _ChunkedDivergence(torch.autograd.Function):
    """Forward: D_i of row i; backward: the gradient of g·D with respect to the student's hidden
    states and head, chunk by chunk.
    """

    @staticmethod
    def forward(ctx, h, weight, bias, rule, teacher_h, teacher, divergence):  # type: ignore[no-untyped-def]
        rows = h.shape[0]
        step = max(1, head.chunk_rows(rows, weight.shape[0], h.device) // COPIES) if rows else 1
        out = torch.empty(
            rows,
            dtype=torch.float64 if h.dtype == torch.float64 else torch.float32,
            device=h.device,
        )
        student = LogitHead(weight, bias, rule)
        for a in range(0, rows, step):
            part = slice(a, a + step)
            out[part] = divergence(student.logits(h[part]), teacher.logits(teacher_h[part]))
        ctx.save_for_backward(h, weight, bias, teacher_h)
        ctx.settings = (rule, teacher, divergence, step)
        return out

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        h, weight, bias, teacher_h = ctx.saved_tensors
        rule, teacher, divergence, step = ctx.settings
        grads = head.HeadGradients(h, weight, bias, ctx.needs_input_grad, g.dtype)
        for a in range(0, h.shape[0], step):
            part = slice(a, a + step)
            x = linear(h[part], weight, bias).detach().requires_grad_()
            goal = teacher.logits(teacher_h[part])
            with torch.enable_grad():
                value = divergence(rule.apply(_wide(x)), goal)
            grads.add(part, torch.autograd.grad(value, x, g[part])[0])
        return *grads.found(), None, None, None, None


def chunked_divergence(
    student_hidden: Tensor,
    student_head: LogitHead,
    teacher_hidden: Tensor,
    teacher_head: LogitHead | GivenLogits,
    divergence: Divergence,
) -> Tensor:
    """[M] `divergence` of every row, differentiable by the student's hidden states and head.

    The teacher gets no gradient.

    >>> between = partial(jsd, beta=0.5, temperature=2.0)
    >>> chunked_divergence(h, Head(w), teacher_h, Head(teacher_w), between)
    """
    assert student_hidden.ndim == teacher_hidden.ndim == 2 and len(student_hidden) == len(
        teacher_hidden
    ), "rows do not align"
    frozen: LogitHead | GivenLogits = teacher_head
    if isinstance(teacher_head, LogitHead):
        frozen = LogitHead(
            teacher_head.weight.detach(),
            None if teacher_head.bias is None else teacher_head.bias.detach(),
            teacher_head.rule,
        )
    return _ChunkedDivergence.apply(
        student_hidden,
        student_head.weight,
        student_head.bias,
        student_head.rule,
        teacher_hidden.detach(),
        frozen,
        divergence,
    )


@torch.no_grad()
def log_collision(h: Tensor, source: LogitHead, *, temperature: float = 1.0) -> Tensor:
    """[M] log sum_v p(v)^2, p = softmax(logits / temperature): how likely two draws agree.

    The stream `collision` of WPO (2406.11827).
    """
    rows = h.shape[0]
    step = head.chunk_rows(rows, source.weight.shape[0], h.device) if rows else 1
    parts = [
        torch.logsumexp(2 * (source.logits(h[a : a + step]) / temperature).log_softmax(-1), -1)
        for a in range(0, rows, step)
    ]
    return torch.cat(parts) if parts else torch.zeros(0, device=h.device)
