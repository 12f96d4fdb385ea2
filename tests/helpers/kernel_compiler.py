"""Compiles Triton kernels for a GPU that is not there: a launch is recorded and compiled instead of
run. `python -m helpers.kernel_compiler` does it for the kernels of decoding, of exact mode and of
training, with the shapes of models that people train.

The interpreter, which runs kernels on a CPU, accepts much that the compiler does not.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from reinforge.core.kv_pool import GPU_BLOCK
from reinforge.models.attention_rule import AttentionRule

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 227 * 1024  # bytes that one program may have there
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.bool: "*i1",
    torch.float8_e4m3fn: "*fp8e4nv",
}
OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl", "enable_fp_fusion")


class KernelCompiler:
    """Instead of launching: compiles each kernel once per kind of arguments and notes how much
    shared memory it needs.
    """

    def __init__(self) -> None:
        self.compiled: dict[Any, int] = {}

    def launch(self, kernel: Any, *args: Any, **kwargs: Any) -> None:
        kwargs = {k: v for k, v in kwargs.items() if k not in ("grid", "warmup")}
        options = {k: kwargs.pop(k) for k in OPTIONS if k in kwargs}
        values = dict(zip((p.name for p in kernel.params), args, strict=False)) | kwargs
        kinds: dict[str, str] = {}
        constants: dict[str, Any] = {}
        known: dict[Any, Any] = {}
        for i, parameter in enumerate(kernel.params):
            value = values[parameter.name]
            if parameter.is_constexpr:
                kinds[parameter.name] = "constexpr"
                constants[parameter.name] = value
            elif isinstance(value, TensorDescriptor):
                shape = ",".join(map(str, value.block_shape))
                kinds[parameter.name] = f"tensordesc<{TYPES[value.base.dtype][1:]}[{shape}]>"
            elif isinstance(value, torch.Tensor):
                kinds[parameter.name] = TYPES[value.dtype]
                known[(i,)] = [["tt.divisibility", 16]]
            elif isinstance(value, int):
                kinds[parameter.name] = "i32"
                if value % 16 == 0 and not parameter.do_not_specialize:
                    known[(i,)] = [["tt.divisibility", 16]]
            else:
                kinds[parameter.name] = "fp32"
        key = (kernel.__name__, *kinds.items(), *constants.items(), *options.items())
        if key not in self.compiled:
            source = ASTSource(kernel, kinds, constants, known)
            made = triton.compile(source, target=HOPPER, options=options)
            self.compiled[key] = made.metadata.shared


def compile_decode_kernels(compiler: KernelCompiler) -> None:
    from reinforge.models.fp8 import Fp8Rows
    from reinforge.models.kernels import common, draw, fp8, layer, paged_attention

    JITFunction.run = lambda self, *args, **kwargs: compiler.launch(self, *args, **kwargs)
    common.EARLY = paged_attention.HAS_TMA = True  # as on a GPU
    half = torch.bfloat16
    for rows, heads, kv_heads, size, width in ((4, 28, 4, 128, 3584), (320, 14, 2, 64, 896)):
        x = torch.zeros(rows, width, dtype=half)
        weight = torch.zeros(2 * width, width, dtype=half)
        layer.add_norm(x, None, x[0], 1e-6)
        layer.add_norm(x, torch.zeros(2, rows, width), x[0], 1e-6)
        layer.silu_mul(torch.zeros(rows, 2 * width, dtype=half))
        for few in (4, 32, 64):
            some = torch.zeros(few, width, dtype=half)
            layer.few_rows(some, weight, weight[:, 0].contiguous())
            layer.few_rows(some, weight, parts=True)
            layer.gated_rows(some, weight)
            rows_fp8, weight_fp8 = (Fp8Rows.empty(*one.shape, one.device) for one in (some, weight))
            layer.few_rows(rows_fp8, weight_fp8, weight[:, 0].contiguous(), dtype=half)
            layer.few_rows(rows_fp8, weight_fp8, parts=True)
            layer.gated_rows(rows_fp8, weight_fp8, half)
        into = Fp8Rows.empty(*x.shape, x.device)
        layer.add_norm(x, None, x[0], 1e-6, into)
        fp8.quantise_rows(x, into.values, into.scale)
        turned = Fp8Rows.empty(weight.shape[1], len(weight), x.device)
        fp8.quantise_columns([weight], turned.values, turned.scale)
        q, k = (torch.zeros(rows, n, size, dtype=half) for n in (heads, kv_heads))
        layer.head_norm(q, x[0, :size], 1e-6)
        cache = torch.zeros(4, GPU_BLOCK, kv_heads, size, dtype=half)
        tables = torch.zeros(rows, 128, dtype=torch.int64)
        cached = torch.zeros(rows, dtype=torch.int64)
        turn = torch.zeros(rows, size, dtype=half)
        for parts in (1, 4):
            paged_attention.paged_decode(
                q,
                k,
                k,
                cache,
                cache,
                tables,
                cached,
                AttentionRule(0.1),
                parts=parts,
                rope=(turn, turn),
            )
            paged_attention.paged_decode(
                q,
                k,
                k,
                cache.to(torch.float8_e4m3fn),
                cache.to(torch.float8_e4m3fn),
                tables,
                cached,
                AttentionRule(0.1),
                parts=parts,
                rope=(turn, turn),
                scales=(torch.zeros(4, kv_heads, GPU_BLOCK),) * 2,
            )
        paged_attention.paged_decode(
            q, k, k, cache, cache, tables, cached, AttentionRule(0.1, window=64, softcap=30.0)
        )
        wide = torch.zeros(rows, heads, 192, dtype=half)
        narrow = torch.zeros(4, GPU_BLOCK, kv_heads, 128, dtype=half)
        paged_attention.paged_decode(
            wide,
            wide[:, :kv_heads],
            wide[:, :kv_heads, :128],
            torch.zeros(4, GPU_BLOCK, kv_heads, 192, dtype=half),
            narrow,
            tables,
            cached,
            AttentionRule(0.1, sinks=torch.zeros(heads, dtype=half)),
        )
        done = torch.zeros(rows, dtype=torch.bool)
        draw.advance(cached, cached, cached, cached, cached, done, tables[:, :3].contiguous())
        for logits in (torch.zeros(rows, 151936, dtype=half), torch.zeros(rows, 151936)):
            draw.draw(logits, torch.zeros(rows), cached, cached, softcap=30.0)


def compile_low_rank_kernels(compiler: KernelCompiler) -> None:
    """For families of three adapters, two and one."""
    from reinforge.models.kernels import low_rank
    from reinforge.models.projections import Adapter

    def family(count: int, width: int, rank: int) -> list[Adapter]:
        return [
            Adapter(torch.zeros(rank, width), torch.zeros(width, rank), 2.0, i * width)
            for i in range(count)
        ]

    for rows, width, rank, count in ((4, 3584, 16, 3), (256, 3584, 16, 1), (320, 896, 64, 1)):
        x = torch.zeros(rows, width, dtype=torch.bfloat16)
        some = family(count, width, rank)
        low_rank.add(torch.zeros(rows, count * width, dtype=x.dtype), x, some)
        low_rank.gated(torch.zeros(rows, 2 * width, dtype=x.dtype), x, family(2, width, rank))
    low_rank.add(torch.zeros(rows, width), x, some)
    low_rank.gated(torch.zeros(rows, 2 * width, dtype=x.dtype), x, some)


def compile_exact_kernels(compiler: KernelCompiler) -> None:
    from reinforge.models import exact_tiles
    from reinforge.models.kernels import exact, exact_layer, exact_product, layer, paged_attention

    half = torch.bfloat16
    for rows, heads, kv_heads, size, width in ((4, 28, 4, 128, 3584), (320, 14, 2, 64, 896)):
        x = torch.zeros(rows, width, dtype=half)
        weight = torch.zeros(width, width, dtype=half)
        for tile in (exact_product.LARGE, *sum(exact_product.SMALLER.values(), ())):
            exact_product._in_tiles(x, weight, x[0], tile)
        exact_layer.add_norm(x, None, x[0], 1e-6)
        layer.silu(x)
        joint = torch.zeros(rows, heads + 2 * kv_heads, size, dtype=half)
        q, k, v = joint.split([heads, kv_heads, kv_heads], 1)
        exact_layer.add_norm(q, None, x[0, :size], 1e-6)
        cache = torch.zeros(4, GPU_BLOCK, kv_heads, size, dtype=half)
        tables = torch.zeros(rows, 128, dtype=torch.int64)
        cached = torch.zeros(rows, dtype=torch.int64)
        turn = torch.zeros(rows, size, dtype=half)
        for where in (tables, cached):
            paged_attention.rotate_and_store(q, k, v, cache, cache, where, cached, (turn, turn))
        plan = exact_tiles.plan_paged(cached)
        keys = cache.view(-1, kv_heads, size)
        exact.attend(q, keys, keys, plan, tables, GPU_BLOCK, AttentionRule(0.1))
        new = exact.NewKeys(k, v, turn, turn)
        exact.attend(q, keys, keys, plan, tables, GPU_BLOCK, AttentionRule(0.1), new)
        exact.attend(q, keys, keys, plan, tables, GPU_BLOCK, AttentionRule(0.1), new, parts=8)
        exact.attend(q, k, v, plan, None, 1, AttentionRule(0.1, window=64, softcap=30.0))


def compile_training_kernels(compiler: KernelCompiler) -> None:
    from reinforge.models.kernels import add_up, gate, norm, rotary
    from reinforge.models.kernels.shared_keys import sum_places

    half = torch.bfloat16
    for tokens, heads, kv_heads, size, width in ((64, 28, 4, 128, 3584), (320, 14, 2, 64, 896)):
        x = torch.zeros(1, tokens, width, dtype=half)
        norm.rms_norm(x, x[0, 0], 1e-6)
        norm.rms_norm_backward(x, x[0, 0], 1e-6, x)
        norm.add_rms_norm(x, x, x[0, 0], 1e-6)
        norm.rms_norm_backward(x, x[0, 0], 1e-6, x, beside=x)
        joint = torch.zeros(tokens, heads + 2 * kv_heads, size, dtype=half)
        q, k, v = joint.split([heads, kv_heads, kv_heads], 1)
        turn = torch.zeros(tokens, size, dtype=half)
        for back in (False, True):
            rotary.turn(q.transpose(0, 1)[None], k.transpose(0, 1)[None], turn, turn, back)
        gate.silu_mul(x[0], x[0])
        gate.silu_mul_backward(x[0], x[0], x[0], x[0], x[0])  # type: ignore[call-arg]
        add_up.add_up([x[0].float()], [x[0]])
        starts = torch.arange(tokens + 1, dtype=torch.int32)
        sum_places(k.contiguous(), v.contiguous(), starts, starts[:-1].contiguous())


def compile_lora_gate_kernels(compiler: KernelCompiler) -> None:
    """For MLPs of 7B, 1.5B and 0.5B, and ranks that leave a tile room or fill it."""
    from reinforge.models.kernels import lora_gate

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    shapes = ((18944, (16, 16, 16)), (8960, (16, 16, 16)), (4864, (8, 32, 8)), (4864, (64, 64, 5)))
    for width, ranks in shapes:
        both, narrow = zeros(64, 2 * width), zeros(64, ranks[0] + ranks[1])
        ups, down = [zeros(width, rank) for rank in ranks[:2]], zeros(ranks[2], width)
        lora_gate.gated(both, narrow, ups, [2.0, 2.0], down)
        dinner, dnarrow = zeros(64, width), zeros(64, ranks[2])
        lora_gate.gated_backward(both, narrow, ups, [2.0, 2.0], down, dinner, dnarrow)


def main() -> None:
    compiler = KernelCompiler()
    compile_decode_kernels(compiler)
    compile_low_rank_kernels(compiler)
    compile_exact_kernels(compiler)
    compile_training_kernels(compiler)
    compile_lora_gate_kernels(compiler)
    largest = max(compiler.compiled.values())
    print(f"{len(compiler.compiled)} kernels compiled, {largest} bytes of shared memory at most")
    assert largest <= SHARED_MEMORY


if __name__ == "__main__":
    main()
