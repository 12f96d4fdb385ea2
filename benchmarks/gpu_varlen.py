"""Attention of a pack on a GPU: the operator that `models.attention.varlen_attention` calls against
torch's public function around it.

Both end in the same kernel. Printed: whether outputs and gradients have the same bits, and the time
of forward and backward. `python benchmarks/gpu_varlen.py`, a minute on a GPU. Grouped heads need
torch 2.12 (`enable_gqa`); where the function lacks them, their rows are left out and said to be.
"""

from __future__ import annotations

import inspect
import random
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from reinforge.models.attention import starts_of, varlen_attention
from reinforge.models.attention_rule import AttentionRule

SHAPES = [(14, 2, 64), (16, 16, 128), (32, 8, 128)]  # heads, key heads, head size
TOKENS = [(512, 64), (8192, 512), (32768, 2048)]  # in the pack, in its longest segment
ROUNDS = 30


def public(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: int,
    longest_key: int,
    rule: AttentionRule,
) -> Tensor:
    grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    window = (-1 if rule.window is None else rule.window - 1, 0)
    return varlen_attn(
        q,
        k,
        v,
        starts,
        key_starts,
        longest,
        longest_key,
        scale=rule.scale,
        window_size=window,
        **grouped,
    )


def segments(total: int, longest: int) -> list[int]:
    chance = random.Random(0)
    lengths = [longest]
    while sum(lengths) < total:
        lengths.append(min(chance.randint(1, longest), total - sum(lengths)))
    return lengths


def measure(
    f: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor, rest: tuple
) -> tuple[list[Tensor], float, float]:
    """Output and gradients; milliseconds of a forward with its backward, and those in which Python
    and the launches are done.
    """

    def once() -> list[Tensor]:
        out = f(*inputs, *rest)
        return [out, *torch.autograd.grad(out, inputs, grad)]

    for _ in range(5):
        found = once()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(ROUNDS):
        once()
    launched = time.perf_counter() - begin
    torch.cuda.synchronize()
    return found, 1e3 * (time.perf_counter() - begin) / ROUNDS, 1e3 * launched / ROUNDS


def main() -> None:
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    print(
        "heads/key heads/size  tokens  window | out equal, largest difference of gradients | ms"
        " operator, public | ms launching operator, public"
    )
    device = torch.device("cuda")
    knows_groups = "enable_gqa" in inspect.signature(varlen_attn).parameters
    for heads, kv_heads, size in SHAPES:
        if heads != kv_heads and not knows_groups:
            print(
                f"{heads}/{kv_heads}/{size}  left out: the public function of this torch has no"
                " grouped heads"
            )
            continue
        for total, longest in TOKENS:
            for window in (None, longest // 4):
                torch.manual_seed(0)
                lengths = segments(total, longest)
                starts = starts_of(lengths, device)
                q, k, v = (
                    torch.randn(
                        total, n, size, device=device, dtype=torch.bfloat16
                    ).requires_grad_()
                    for n in (heads, kv_heads, kv_heads)
                )
                grad = torch.randn_like(q)
                rule = AttentionRule(size**-0.5, window=window)
                rest = (starts, starts, max(lengths), max(lengths), rule)
                a, ms_a, launch_a = measure(varlen_attention, [q, k, v], grad, rest)
                b, ms_b, launch_b = measure(public, [q, k, v], grad, rest)
                apart = max(float((x - y).abs().max()) for x, y in zip(a[1:], b[1:], strict=True))
                print(
                    f"{heads}/{kv_heads}/{size}  {total}  {window} | {torch.equal(a[0], b[0])},"
                    f" {apart:.2e} | {ms_a:.3f}, {ms_b:.3f} | {launch_a:.3f}, {launch_b:.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
