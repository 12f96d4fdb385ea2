"""exp, tanh, gelu, cos, ... of a CPU tensor with the same bits for a number wherever it stands.

Torch's own functions do not have them: what is left over at the end of a row or of a thread's share
goes through scalar code, and some vector code looks at its neighbours (SLEEF's `erf`, `sin` and
`cos` take a shorter way if all lanes of a vector allow it). So which bits a number gets depends on
the CPU's vector length, on the number of threads and on who stands beside it.

Here a function is built from additions, products, quotients, roots and bit operations in float64.
IEEE 754 says what each of these rounds to, in scalar code as in vectors of any length, so nothing
else can matter. The result is rounded to the input's precision once. Each formula is good to 2
units in the last place of float32 or better.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PIECE = 1 << 17  # numbers at once: their float64 stays near the cache

# of a float64
MANTISSA_BITS = 52
BIAS = 1023
LARGEST = 709.0  # exp of it is a float64, and far beyond float32
TINY = 1e-5  # below, two terms of a series are exact enough


def polynomial(x: Tensor, *coefficients: float) -> Tensor:
    """The first coefficient belongs to the highest power."""
    result = x * coefficients[0]
    for c in coefficients[1:-1]:
        result.add_(c).mul_(x)
    return result.add_(coefficients[-1])


# ---- float64 in, float64 out ----


def exp(x: Tensor) -> Tensor:
    """e^x = 2^n e^r with |r| <= ln 2 / 2."""
    x = x.clamp(-LARGEST + 1, LARGEST)
    n = (x * (1 / math.log(2))).round_()
    r = x.sub_(n * math.log(2))
    power = (
        n.nan_to_num_(0.0)
        .to(torch.int64)
        .add_(BIAS)
        .bitwise_left_shift_(MANTISSA_BITS)
        .view(torch.float64)
    )
    return polynomial(r, *(1 / math.factorial(k) for k in range(8, -1, -1))).mul_(power)


def log(x: Tensor) -> Tensor:
    """log(2^n m) = n log 2 + 2 artanh((m - 1) / (m + 1)) with m between sqrt(1/2) and sqrt(2)."""
    bits = x.contiguous().view(torch.int64)
    n = (bits >> MANTISSA_BITS) - BIAS
    m = ((bits & ((1 << MANTISSA_BITS) - 1)) | (BIAS << MANTISSA_BITS)).view(torch.float64)
    above = m > math.sqrt(2)
    m = torch.where(above, m * 0.5, m)
    f = (m - 1) / (m + 1)
    series = polynomial(f * f, *(2 / k for k in range(17, 0, -2))).mul_(f)
    found = series.add_((n + above.to(torch.int64)).to(torch.float64).mul_(math.log(2)))
    found = torch.where(x == 0, -math.inf, found)
    found = torch.where(x == math.inf, math.inf, found)
    return torch.where(x >= 0, found, math.nan)


def expm1(x: Tensor) -> Tensor:
    return torch.where(x.abs() < TINY, x + x * x * 0.5, exp(x) - 1)


def log1p(x: Tensor) -> Tensor:
    return torch.where(x.abs() < TINY, x - x * x * 0.5, log(1 + x))


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + exp(-x))


def tanh(x: Tensor) -> Tensor:
    e = expm1(2 * x.clamp(-20, 20))
    return e / (e + 2)


def erfc(x: Tensor) -> Tensor:
    """1 - erf(x) to 1.2e-7 of itself: Press et al., Numerical Recipes, section 6.2 (a Chebyshev
    fit).
    """
    z = x.abs()
    t = 1 / (1 + 0.5 * z)
    fit = polynomial(
        t,
        0.17087277,
        -0.82215223,
        1.48851587,
        -1.13520398,
        0.27886807,
        -0.18628806,
        0.09678418,
        0.37409196,
        1.00002368,
        -1.26551223,
    )
    tail = t * exp(fit - z * z)
    return torch.where(x >= 0, tail, 2 - tail)


def erf(x: Tensor) -> Tensor:
    """Near 0, where 1 - erfc(x) would lose digits, the Maclaurin series 2/sqrt(pi) sum (-1)^k
    x^(2k+1) / (k! (2k+1)).
    """
    terms = [(-1) ** k / (math.factorial(k) * (2 * k + 1)) for k in range(13, -1, -1)]
    near = polynomial(x * x, *terms).mul_(x).mul_(2 / math.sqrt(math.pi))
    return torch.where(x.abs() < 1, near, 1 - erfc(x))


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "tanh":  # (1 + tanh u) / 2 = sigmoid(2u)
        return x * sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))
    return 0.5 * x * erfc(x * -math.sqrt(0.5))


def softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    return torch.where(x * beta > threshold, x, log1p(exp(x * beta)) / beta)


def elu(x: Tensor, alpha: float = 1.0, scale: float = 1.0) -> Tensor:
    return scale * torch.where(x > 0, x, alpha * expm1(x))


def celu(x: Tensor, alpha: float = 1.0) -> Tensor:
    return torch.where(x > 0, x, alpha * expm1(x / alpha))


def power(x: Tensor, exponent: float) -> Tensor:
    """x^y = e^(y log|x|); a negative x has powers at whole numbers only."""
    if exponent == 0:
        return torch.ones_like(x)
    size = exp(exponent * log(x.abs()))
    if exponent != int(exponent):
        return torch.where(x < 0, math.nan, size)
    return size if exponent % 2 == 0 else torch.where(x < 0, -size, size)


def cos(x: Tensor, turns: int = 0) -> Tensor:
    """cos(x - turns pi/2) = ± cos r or ± sin r, where x = n pi/2 + r; for |x| up to 1e8."""
    n = (x * (2 / math.pi)).round_()
    # pi/2, the first part with 33 bits so that n times it is exact
    high = 1.57079632673412561417
    low = 6.07710050650619224932e-11
    r = (x - n * high) - n * low
    square = r * r
    even = polynomial(square, *((-1) ** k / math.factorial(2 * k) for k in range(7, -1, -1)))
    odd = polynomial(
        square, *((-1) ** k / math.factorial(2 * k + 1) for k in range(7, -1, -1))
    ).mul_(r)
    quarter = (n.nan_to_num_(0.0).to(torch.int64) - turns) & 3
    found = torch.where(quarter % 2 == 0, even, odd)
    return torch.where((quarter == 1) | (quarter == 2), -found, found)


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "exp": exp,
    "exp2": lambda x: exp(x * math.log(2)),
    "expm1": expm1,
    "log": log,
    "log1p": log1p,
    "log2": lambda x: log(x) / math.log(2),
    "log10": lambda x: log(x) / math.log(10),
    "rsqrt": lambda x: 1 / x.sqrt(),
    "pow": power,
    "rpow": lambda x, base: exp(x * math.log(base)),
    "sigmoid": sigmoid,
    "logsigmoid": lambda x: x.clamp(max=0) - log1p(exp(-x.abs())),
    "silu": lambda x: x * sigmoid(x),
    "softplus": softplus,
    "mish": lambda x: x * tanh(softplus(x)),
    "tanh": tanh,
    "erf": erf,
    "erfc": erfc,
    "gelu": gelu,
    "elu": elu,
    "selu": lambda x: elu(x, 1.6732632423543772, 1.0507009873554805),
    "celu": celu,
    "cos": cos,
    "sin": lambda x: cos(x, 1),
}


def evaluate(name: str, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """FUNCTIONS[name] of every number of x, in x's precision."""
    flat = x.contiguous().view(-1)
    result = torch.empty_like(flat)
    for a in range(0, flat.numel(), PIECE):
        result[a : a + PIECE] = FUNCTIONS[name](
            flat[a : a + PIECE].to(torch.float64), *args, **kwargs
        )
    return result.view(x.shape)
