"""Training through the gated delta rule on one GPU: our kernels, torch's chunks, and
flash-linear-attention where it can, for packs of the hybrid shape (one layer: 16 heads of 128
numbers, bfloat16).

    python benchmarks/gated_delta.py            # time and memory of forward and backward, a GPU
    python benchmarks/gated_delta.py --compile  # what the kernels take on a Hopper, no GPU needed
    TRITON_INTERPRET=1 python benchmarks/gated_delta.py --smoke  # that it runs, on a CPU

First the claim: outputs and gradients beside the plain recurrence in float32 on a small pack, and
two backward passes with the same bits. The packs: rows of 256 + 512 tokens, each with its own
prompt or eight answers to one, and one long row.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reinforge.models import delta_rule, recurrences
from reinforge.models.recurrences import GatedDelta
from reinforge.models.state import PackedStates

KEY = (0, 0, 0)
PROMPT, ANSWER, GROUP = 256, 512, 8
ROUNDS = 10


def pack_of(kind: str, tokens: int) -> tuple[list[int], list[int]]:
    """Lengths of segments, and which one each continues."""
    if kind == "long":
        return [tokens], [-1]
    if kind == "rows":
        count = max(1, tokens // (PROMPT + ANSWER))
        return [PROMPT + ANSWER] * count, [-1] * count
    lengths: list[int] = []
    prefix: list[int] = []
    while not lengths or sum(lengths) + PROMPT + GROUP * ANSWER <= tokens:
        prompt = len(lengths)
        lengths += [PROMPT] + [ANSWER] * GROUP
        prefix += [-1] + [prompt] * GROUP
    return lengths, prefix


def parts_of(tokens: int, heads: int, size: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    torch.manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(tokens, heads, *shape, device=device)

    parts = [normal(size).to(dtype), normal(size).to(dtype), normal(size).to(dtype)]
    parts += [-normal().exp() / 8, normal().sigmoid().to(dtype)]
    return [x.requires_grad_() for x in parts]


def rule_of(way: str) -> GatedDelta:
    """Ours, theirs, or torch's chunks, by what the rule asks for."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as model

    chunks, token = model.torch_chunk_gated_delta_rule, model.torch_recurrent_gated_delta_rule
    recurrences._takes_ours = lambda *_: way == "ours"  # type: ignore[assignment]
    if way == "torch":
        chunks, token = inspect.unwrap(chunks), inspect.unwrap(token)
    return GatedDelta(chunks, token, True)


def once(rule: GatedDelta, states: PackedStates, parts: list[Tensor], grad: Tensor) -> list[Tensor]:
    out = states.scan(KEY, rule, parts)
    return [out, *torch.autograd.grad(out, parts, grad)]


def measured(
    way: str, kind: str, tokens: int, heads: int, size: int, dtype: torch.dtype, device: str
) -> dict[str, Any]:
    lengths, prefix = pack_of(kind, tokens)
    states = PackedStates(lengths, torch.device(device), prefix)
    parts = parts_of(sum(lengths), heads, size, dtype, device)
    grad = torch.randn_like(parts[2])
    rule = rule_of(way)
    row: dict[str, Any] = {"way": way, "pack": kind, "tokens": sum(lengths)}
    first = once(rule, states, parts, grad)
    same = [torch.equal(a, b) for a, b in zip(first, once(rule, states, parts, grad), strict=True)]
    row["same bits again"] = all(same)
    del first
    if device == "cpu":
        return row
    for name, backward in (("forward_ms", False), ("both_ms", True)):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        begin = time.perf_counter()
        for _ in range(ROUNDS):
            if backward:
                once(rule, states, parts, grad)
            else:
                with torch.no_grad():
                    states.scan(KEY, rule, parts)
        torch.cuda.synchronize()
        row[name] = round((time.perf_counter() - begin) / ROUNDS * 1000, 2)
        row["peak_gib"] = round((torch.cuda.max_memory_allocated() - held) / 2**30, 2)
    out = states.scan(KEY, rule, parts)
    row["kept_gib"] = round((torch.cuda.memory_allocated() - held) / 2**30, 2)
    del out
    return row


def measure(smoke: bool, packs: list[int]) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not (smoke and os.environ.get("TRITON_INTERPRET") == "1"):
        sys.exit("no GPU here: --compile, or --smoke with TRITON_INTERPRET=1")
    heads, size = (1, 16) if smoke else (16, 128)
    # the interpreter has no bfloat16
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    near = delta_rule.distance(size, size, dtype, True, torch.device(device))
    print(f"outputs and gradients are {near:.2g} away from the plain recurrence", flush=True)
    theirs = importlib.util.find_spec("fla") is not None and recurrences.kernels_train()
    ways = ["ours", "torch"] + (["fla"] if theirs else [])
    if device == "cuda" and not theirs:
        print("flash-linear-attention is not installed, or has no backward here")
    for tokens in [60] if smoke else packs:
        for kind in ("long",) if smoke else ("rows", "group", "long"):
            for way in ways:
                try:
                    row = measured(way, kind, tokens, heads, size, dtype, device)
                except torch.OutOfMemoryError:
                    row = {"way": way, "pack": kind, "tokens": tokens, "out of memory": True}
                print(json.dumps(row), flush=True)


# ---- what a compiler says ----

SINGLE = {"GROWN", "LEFT", "HELD", "ENDS", "FAR_GRAD", "NEAR_GRAD", "G", "G_GRAD"}  # float32
WHOLE = {"CHUNKS", "TABLE"}  # int32


def compiled(kernel: Any, stages: int, constants: dict[str, Any]) -> dict[str, Any]:
    """One kernel for sm_90, in bfloat16: shared memory, registers, spills, and its products."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {}
    attributes = {}
    for at, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name] = "constexpr"
            continue
        if name in WHOLE:
            signature[name] = "*i32"
        elif name in SINGLE:
            signature[name] = "*fp32"
        elif name.isupper() and name != "H":
            signature[name] = "*bf16"
        else:
            signature[name] = "fp32" if name == "scale" else "i32"
        if name not in ("scale", "wave"):
            attributes[(at,)] = [["tt.divisibility", 16]]
    made = triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 4, "num_stages": stages},
    )
    ptx = made.asm["ptx"]
    found = {
        "kernel": kernel.__name__,
        "shared": made.metadata.shared,
        "wgmma": ptx.count("wgmma.mma"),
        "mma": ptx.count("mma.sync"),
    }
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    if not ptxas.exists():
        return found
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "k.ptx").write_text(ptx)
        command = [str(ptxas), "-v", "--gpu-name=sm_90a", "k.ptx", "-o", "k.cubin"]
        said = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    for name, pattern in (("registers", r"Used (\d+) reg"), ("spilled", r"(\d+) bytes spill st")):
        match = re.search(pattern, said.stderr)
        found[name] = int(match.group(1)) if match else None
    return found


def compile_all(size: int) -> None:
    from reinforge.models.kernels import delta

    one = torch.empty(0, 1, size, dtype=torch.bfloat16)
    tiles = delta.tiles_of(one, one)
    constants = {name: value for name, value in tiles.items() if name != "num_warps"}
    normed = {"NORMED": True}
    ends = {"HAS_ENDS": True}
    for kernel, stages, more in (
        (delta._prepare, 2, normed),
        (delta._advance, 2, {"OUTPUTS": True, **ends}),
        (delta._advance, 2, {"OUTPUTS": False, **ends}),
        (delta._retreat, 2, {}),
        (delta._inputs, 1, normed),
    ):
        print(json.dumps(compiled(kernel, stages, {**constants, **more})), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="for sm_90, without a GPU")
    parser.add_argument("--size", type=int, default=128, help="of a head, with --compile")
    parser.add_argument("--smoke", action="store_true", help="a tiny pack")
    parser.add_argument("--packs", type=int, nargs="+", default=[16384, 65536], help="tokens")
    options = parser.parse_args()
    if options.compile:
        compile_all(options.size)
    else:
        measure(options.smoke, options.packs)
