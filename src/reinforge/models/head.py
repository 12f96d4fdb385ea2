"""Log-probabilities and entropies of given tokens, from logits of some rows at a time.

The forward walks over chunks of rows and keeps one number per row (the log-sum-exp); the backward
computes each chunk's logits again, or takes those of the forward where a GPU has room for them
(`keeps_logits`): the same bits either way. Softmax statistics are float32 whatever the model's
precision.

Legend: M rows, V vocabulary, E hidden size, z = logits / temperature, p = softmax(z).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from reinforge.core.logit_memory import CHUNK_ELEMENTS, stay
from reinforge.models import exact as rowwise
from reinforge.models.attention import HAS_TRITON
from reinforge.models.device_memory import device_memory

# rows of a matrix product's tiles on a GPU
TILE = 256


@dataclass(frozen=True, slots=True)
class LogitRule:
    """What an architecture does to its logits: z = cap·tanh(x·scale / cap) where it caps, else
    x·scale.
    """

    scale: float = 1.0
    softcap: float | None = None

    def apply(self, x: Tensor) -> Tensor:
        if self.scale != 1.0:
            x = x * self.scale
        return x if self.softcap is None else torch.tanh(x / self.softcap) * self.softcap


FORBIDDEN = -1e30  # finite: a kernel that meets a whole block of it computes 0, not nan


def permitted(x: Tensor, rule: LogitRule, allowed: Tensor) -> Tensor:
    """[R, V] float32: logits under the rule, with `FORBIDDEN` where a token is not allowed.

    `allowed` [R, W] int32 has a bit for every token: models/grammars.py. What is computed of the
    result needs no rule any more.
    """
    bits = torch.arange(32, dtype=torch.int32, device=x.device)
    free = (allowed[:, :, None] >> bits & 1).bool().flatten(1)[:, : x.shape[1]]
    return rule.apply(x.float()).masked_fill(~free, FORBIDDEN)


def chunk_rows(rows: int, vocabulary: int, device: torch.device) -> int:
    """Rows per chunk: see CHUNK_ELEMENTS. On a GPU chunks are about as large as each other and made
    of whole tiles.
    """
    if device.type != "cuda":
        return max(1, min(rows, CHUNK_ELEMENTS["cpu"] // vocabulary))
    most = max(1, CHUNK_ELEMENTS["cuda"] // vocabulary)
    even = math.ceil(rows / math.ceil(rows / most)) if rows else 1
    return max(1, min(rows, math.ceil(even / TILE) * TILE))


def keeps_logits(rows: int, weight: Tensor) -> bool:
    """Whether logits stay from the forward to the backward, which saves one of the head's four
    products: where a GPU has room for all of them at this moment, when every layer's activations
    are there.
    """
    memory = device_memory(weight.device)
    size = rows * weight.shape[0] * weight.dtype.itemsize
    return memory is not None and stay(size, memory.free)


def statistics(
    x: Tensor,
    targets: Tensor,
    temperature: float | Tensor,
    rule: LogitRule,
    entropy: bool,
    allowed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(logp [R], log-sum-exp [R], entropy [R]) of one chunk of raw logits x [R, V].
    `temperature` is one number or [R] of them; `allowed`: see `permitted`.
    """
    if allowed is not None:
        x = permitted(x, rule, allowed)
        rule = LogitRule()
    if x.is_cuda and HAS_TRITON:
        from reinforge.models.kernels import head as kernels

        return kernels.softmax_statistics(
            x, targets, temperature, rule.scale, rule.softcap, entropy
        )
    z = rule.apply(x.float())
    if isinstance(temperature, Tensor):
        z = z / temperature[:, None]
    elif temperature != 1.0:
        z = z / temperature
    top = z.amax(-1, keepdim=True)
    chosen = z.gather(-1, targets[:, None])[:, 0]
    z = z - top
    exp = z.exp()
    total = exp.sum(-1)
    lse = total.log() + top[:, 0]
    return (
        chosen - lse,
        lse,
        total.log() - exp.mul_(z).nan_to_num_(0.0).sum(-1) / total if entropy else None,
    )


def exact_statistics(
    x: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    rule: LogitRule,
    entropy: bool = False,
    allowed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`statistics` with the same bits for a row whichever rows are beside it: sampling and training
    both end here in exact mode. On a GPU log-probs are those that the drawing kernel reports; on a
    CPU functions and sums are those of `models.exact`.
    """
    if x.is_cuda:
        return _drawn_statistics(x, targets, temperatures, rule, entropy, allowed)
    with rowwise.RowWiseMode():
        return statistics(x, targets, temperatures, rule, entropy, allowed)


def _drawn_statistics(
    x: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    rule: LogitRule,
    entropy: bool,
    allowed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    from reinforge.models.kernels.draw import exact_logprobs

    if allowed is not None:
        x = permitted(x, rule, allowed)
        rule = LogitRule()
    logp, lse = exact_logprobs(x, targets, temperatures, scale=rule.scale, softcap=rule.softcap)
    spread = statistics(x, targets, temperatures, rule, True)[2] if entropy else None
    return logp, lse, spread


def gradient(
    x: Tensor,
    targets: Tensor,
    lse: Tensor,
    g: Tensor,
    temperature: float,
    rule: LogitRule,
    entropy: Tensor | None,
    e: Tensor | None,
) -> Tensor:
    """∂/∂x of Σ g·logp + e·H for one chunk of raw logits, in their precision; x may be overwritten.

    ∂/∂z_v = g(1[v = y] − p_v) − e·p_v(log p_v + H), then through the logit rule and the
    temperature.
    """
    if x.is_cuda and HAS_TRITON:
        from reinforge.models.kernels import head as kernels

        return kernels.softmax_gradient(
            x, targets, lse, g, temperature, rule.scale, rule.softcap, entropy, e
        )
    z = rule.apply(x.float())
    logp = (z / temperature if temperature != 1.0 else z) - lse[:, None]
    p = logp.exp()
    grad = p * -g[:, None]
    if e is not None and entropy is not None:
        grad -= e[:, None] * p * (logp.nan_to_num(neginf=0.0) + entropy[:, None])
    grad.scatter_add_(1, targets[:, None], g[:, None])
    if rule.softcap is not None:
        grad *= 1 - (z / rule.softcap) ** 2
    grad *= rule.scale / temperature
    return grad.to(x.dtype)


def permitted_gradient(
    x: Tensor,
    allowed: Tensor,
    targets: Tensor,
    lse: Tensor,
    g: Tensor,
    temperature: float,
    rule: LogitRule,
    entropy: Tensor | None,
    e: Tensor | None,
) -> Tensor:
    """`gradient` where logp, lse and entropy are those of what `allowed` permits."""
    z = permitted(x, rule, allowed)
    slope: float | Tensor = rule.scale
    if rule.softcap is not None:
        slope = rule.scale * (1 - (rule.apply(x.float()) / rule.softcap) ** 2)
    grad = gradient(z, targets, lse, g, temperature, LogitRule(), entropy, e)
    return (grad * slope).to(x.dtype)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b. A GPU adds a 16-bit product to float32 before it rounds anything."""
    if total.is_cuda and total.dtype != a.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


class HeadGradients:
    """Gradients of [N, E] states and of the head that reads them, gathered from the logits' chunk
    by chunk. `needs`: which of the three.
    """

    def __init__(
        self,
        h: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needs: tuple[bool, ...],
        dtype: torch.dtype,
    ):
        self._h = h
        self._weight = weight
        self._bias = bias
        self._of_h = torch.empty_like(h) if needs[0] else None
        self._of_weight = torch.zeros_like(weight, dtype=dtype) if needs[1] else None
        self._of_bias = (
            torch.zeros_like(bias, dtype=dtype) if bias is not None and needs[2] else None
        )

    def add(self, part: slice, grad: Tensor) -> None:
        """`grad` [n, V]: of the logits of these rows."""
        if self._of_h is not None:
            torch.mm(grad, self._weight, out=self._of_h[part])
        if self._of_weight is not None:
            add_product(self._of_weight, grad.t(), self._h[part])
        if self._of_bias is not None:
            self._of_bias += grad.sum(0)

    def found(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        weight = None if self._of_weight is None else self._of_weight.to(self._weight.dtype)
        bias = (
            None
            if self._of_bias is None or self._bias is None
            else self._of_bias.to(self._bias.dtype)
        )
        return self._of_h, weight, bias


class _ChunkedLogprobs(torch.autograd.Function):
    """Forward: logp_i = z_i[y_i] − lse_i, H_i = lse_i − Σ_v p_iv z_iv; backward: `gradient`, from
    logits that were kept or are computed again.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        h,
        weight,
        bias,
        targets,
        allowed,
        temperature,
        rule,
        want_entropy,
        entropy_gradient,
        exact,
        keep,
    ):
        rows = h.shape[0]
        logp = torch.empty(rows, dtype=torch.float32, device=h.device)
        lse = torch.empty_like(logp)
        entropy = torch.empty_like(logp) if want_entropy else torch.zeros(0, device=h.device)
        step = chunk_rows(rows, weight.shape[0], h.device) if rows else 1
        ctx.logits = {}
        for a in range(0, rows, step):
            part = slice(a, a + step)
            masks = None if allowed is None else allowed[part]
            if exact:
                x = rowwise.linear(h[part], weight, bias)
                heat = torch.full((len(x),), temperature, dtype=torch.float32, device=x.device)
                logp[part], lse[part], found = exact_statistics(
                    x, targets[part], heat, rule, want_entropy, masks
                )
            else:
                x = F.linear(h[part], weight, bias)
                logp[part], lse[part], found = statistics(
                    x, targets[part], temperature, rule, want_entropy, masks
                )
            if keep:
                ctx.logits[a] = x
            if found is not None:
                entropy[part] = found
        ctx.save_for_backward(h, weight, bias, targets, allowed, lse, entropy)
        ctx.settings = (temperature, rule, step, want_entropy and entropy_gradient)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx, g_logp, g_entropy):  # type: ignore[no-untyped-def]
        h, weight, bias, targets, allowed, lse, entropy = ctx.saved_tensors
        temperature, rule, step, use_entropy = ctx.settings
        grads = HeadGradients(h, weight, bias, ctx.needs_input_grad, torch.float32)
        for a in range(0, h.shape[0], step):
            part = slice(a, a + step)
            x = ctx.logits.pop(a, None)  # which become their gradient
            if x is None:
                x = F.linear(h[part], weight, bias)
            terms = (entropy[part], g_entropy[part]) if use_entropy else (None, None)
            given = (targets[part], lse[part], g_logp[part], temperature, rule, *terms)
            if allowed is None:
                grads.add(part, gradient(x, *given))
            else:
                grads.add(part, permitted_gradient(x, allowed[part], *given))
            del x
        return *grads.found(), *[None] * 8


def token_logprobs(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    rule: LogitRule | None = None,
    entropy: bool = False,
    entropy_gradient: bool = False,
    exact: bool = False,
    allowed: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """[M] float32 log-probs of `targets` under softmax(logits / temperature), and [M] entropies
    when asked. `exact`: see `models.exact`. `allowed` [M, W] int32: the softmax is over the tokens
    whose bits are set, which the targets are among.
    """
    assert h.ndim == 2 and targets.shape == h.shape[:1], (
        f"h {tuple(h.shape)} and targets {tuple(targets.shape)} do not align"
    )
    assert temperature > 0, "greedy decoding has no distribution; score at temperature 1"
    trained = torch.is_grad_enabled() and (h.requires_grad or weight.requires_grad)
    # in exact mode the backward's logits are those of another product
    keep = trained and not exact and allowed is None and keeps_logits(len(h), weight)
    logp, ent = _ChunkedLogprobs.apply(
        h,
        weight,
        bias,
        targets,
        allowed,
        float(temperature),
        rule or LogitRule(),
        entropy,
        entropy_gradient,
        exact,
        keep,
    )
    return logp, ent if entropy else None
