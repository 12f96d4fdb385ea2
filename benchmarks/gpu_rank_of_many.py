"""One rank of 64, without the other 63: the peak of each phase of training, beside what `plan`
predicts.

    python benchmarks/gpu_rank_of_many.py [--shape 8b 32b] [--ranks 64] [--tokens 8192]
                                          [--checkpointing] [--reference] [--compile] [--out FILE]

The rank is a real one (`FsdpWorker`: models cut by FSDP2, packs, backward passes, the optimizer);
its process group is torch's fake one, whose collectives move nothing and return at once. So numbers
are nonsense, and every tensor has the size and the life that it has on 64 GPUs. The weights all
begin in one vector, as long as the largest of them, until a layer is cut: the whole model never
exists. That vector is a part of the peak of `made`, and of none after it.

On a GPU the peaks are measured (`torch.cuda.max_memory_allocated`), with the seconds of every phase
and the most that torch took from the driver (`reserved`). Without one they are tracked:
tensors have shapes and no numbers (torch's FakeTensorMode), every allocation and its end are added
up, and in place of the kernels that only a GPU has are functions that allocate what these allocate.
What tracking does not see: the workspaces of cuBLAS and of attention's backward, and layers that
are compiled.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools import fake_collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3Config, Qwen3ForCausalLM

from reinforge.algorithms.losses.supervised import NLLLoss
from reinforge.backends import memory_model
from reinforge.backends.fsdp.optimizer import ShardedOptimizer
from reinforge.backends.fsdp.worker import FsdpWorker
from reinforge.backends.memory_model import GIB
from reinforge.config.train import TrainConfig
from reinforge.core.batch import Batch, Totals, pack
from reinforge.core.logit_memory import CHUNK_ELEMENTS
from reinforge.core.sample import Sample
from reinforge.models.causal import CausalModel

assert fake_collectives  # collectives of tensors without numbers: torch learns them by the import
SHAPES: dict[str, dict[str, Any]] = {
    "toy": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 8192,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "32b": {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
}
ROW = 1024  # tokens of a sequence
PACKS = 2  # so that gradients of one are there while another is computed
STEPS = 2
NUMBERS = 1 << 20  # that differ, of the vector that weights begin in
BLOCK = 512  # bytes: what the allocator of CUDA rounds to


@dataclass(frozen=True)
class Case:
    """What one rank is asked to do."""

    shape: Mapping[str, Any]
    ranks: int = 64
    tokens: int = 8192  # of a pack
    checkpointing: bool = False
    reference: bool = False
    compiled: bool = False

    def packs(self) -> list[Batch]:
        row = min(ROW, self.tokens)
        samples = [
            Sample.from_tokens(f"s{i}", [5] * row, [False] + [True] * (row - 1))
            for i in range(PACKS * self.tokens // row)
        ]
        return pack(samples, self.tokens)


@dataclass(frozen=True)
class Found:
    """The peaks of a rank, in bytes."""

    phases: dict[str, int]  # of the second step
    predicted: dict[str, int]  # by part, at the peak of training
    reserved: int = 0  # what a GPU's allocator took from the driver, holes and all

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what training took."""
        return memory_model.total(self.predicted) / self.phases["train"] - 1


# ---- the rank ----


class FinishedOptimizer(ShardedOptimizer):
    """Sums over ranks are nonsense here, and an update by a gradient that is not finite would be
    skipped.
    """

    def gradient_norm(self) -> Tensor:
        super().gradient_norm()
        return 1.0  # type: ignore[return-value]


class LonelyWorker(FsdpWorker):
    """A rank that nobody answers."""

    def _optimizer(self) -> ShardedOptimizer:
        with mock.patch("reinforge.backends.fsdp.worker.ShardedOptimizer", FinishedOptimizer):
            return super()._optimizer()

    def _anywhere(self, here: bool) -> bool:
        return here


def make_model(case: Case, device: torch.device, numbers: bool) -> CausalModel:
    """Where the shards will be, so that nothing is copied there; it takes what its largest matrix
    takes.
    """
    config = Qwen3Config(**{"tie_word_embeddings": False, **case.shape})
    with torch.device("meta"):
        module: Any = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)
    module.model.rotary_emb = type(module.model.rotary_emb)(config)
    largest = max(p.numel() for p in module.parameters())
    few = (torch.randn(NUMBERS, device=device) * 0.02).bfloat16()
    base = few.repeat(-(-largest // NUMBERS)) if numbers else few
    for name, p in list(module.named_parameters()):
        owner, _, own = name.rpartition(".")
        made = base[: p.numel()].view(p.shape) if numbers else torch.empty(p.shape, dtype=p.dtype)
        setattr(module.get_submodule(owner), own, nn.Parameter(made))
    module.tie_weights()
    if case.checkpointing:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return CausalModel(module)


def make_worker(case: Case, device: torch.device, numbers: bool) -> LonelyWorker:
    member: Any = SimpleNamespace(rank=0, size=case.ranks, device=device, copy=None)
    cfg = TrainConfig(steps=STEPS, tokens_per_microbatch=case.tokens)
    settings = {"total_steps": STEPS, "reference": case.reference}
    make = partial(make_model, case, device, numbers)
    return LonelyWorker(member, make, cfg, settings, case.compiled)


@contextmanager
def fake_group(ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def peaks(worker: LonelyWorker, packs: list[Batch], totals: Totals, meter: Any) -> dict[str, int]:
    """Of the phases of a step that is not the first; `meter` has `reset` and `peak`."""
    dealt = [(batch, True) for batch in packs]
    work = {
        "reference": lambda: worker.annotate_packs(dealt, frozenset({"reference"})),
        "old": lambda: worker.annotate_packs(dealt, frozenset({"old"})),
        "train": lambda: worker.train_packs(dealt, NLLLoss(), totals),
        "step": worker.step,
    }
    worker.train_packs(dealt[:1], NLLLoss(), totals)
    worker.step()  # moments are there from now on
    found = {}
    for phase, do in work.items():
        if phase != "reference" or worker.has_reference:
            began = time.perf_counter()
            meter.reset()
            do()
            found[phase] = meter.peak()
            tell(phase, found[phase], time.perf_counter() - began)
    return found


def tell(phase: str, size: int, seconds: float) -> None:
    """At once: who runs this may run out of time."""
    print(f"  {phase}: {size / GIB:.2f} GiB, {seconds:.1f} s", file=sys.stderr, flush=True)


def predicted(worker: LonelyWorker, case: Case) -> dict[str, int]:
    return memory_model.training(worker.facts(), case.tokens, reference=case.reference)


# ---- measured ----


class CudaMeter:
    """The peak of torch's allocator."""

    def reset(self) -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()


def measure(case: Case, device: torch.device, meter: Any) -> Found:
    """On tensors that have numbers."""
    packs = case.packs()
    with fake_group(case.ranks):
        began = time.perf_counter()
        meter.reset()
        worker = make_worker(case, device, numbers=True)
        found = {"made": meter.peak()}
        tell("made", found["made"], time.perf_counter() - began)
        found |= peaks(worker, packs, Totals.of(packs), meter)
        return Found(found, predicted(worker, case))


def measure_gpu(case: Case) -> Found:
    """What a case before this one left behind counts as ours, so it is told."""
    gc.collect()
    torch.cuda.empty_cache()
    tell("before", torch.cuda.memory_allocated(), 0.0)
    found = measure(case, torch.device("cuda", 0), CudaMeter())
    return replace(found, reserved=torch.cuda.max_memory_reserved())


# ---- tracked ----


class TrackedMemory(TorchDispatchMode):
    """What all tensors take that operations make while it is active, and those that it was shown,
    each storage once, until it is freed or becomes larger or smaller.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}  # of storages
        self.now = 0
        self.most = 0

    def reset(self) -> None:
        self.most = self.now

    def peak(self) -> int:
        return self.most

    def show(self, tensor: Tensor) -> None:
        held = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        storage = held.untyped_storage()
        if storage._cdata not in self.sizes:
            weakref.finalize(storage, self._freed, storage._cdata)
        self._holds(storage, storage.nbytes())

    def _holds(self, storage: Any, size: int) -> None:
        rounded = -(-size // BLOCK) * BLOCK
        self.now += rounded - self.sizes.get(storage._cdata, 0)
        self.sizes[storage._cdata] = rounded
        self.most = max(self.most, self.now)

    def _freed(self, key: int) -> None:
        self.now -= self.sizes.pop(key)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.show(leaf)
        return out

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """FSDP2 frees a gathered layer by resizing its storages to nothing, which is no
        operation.
        """
        plain = torch.UntypedStorage.resize_

        def resize(storage: Any, size: int) -> None:
            plain(storage, size)
            if storage._cdata in self.sizes:
                self._holds(storage, size)

        with mock.patch.object(torch.UntypedStorage, "resize_", resize):
            yield


def _statistics(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    logp, lse, entropy = (torch.empty(len(x)) for _ in range(3))
    return logp, lse, entropy if rest[3] else None


STAND_INS = {
    # kernels of a GPU, by what they allocate: models/kernels/head.py is in place
    "reinforge.models.head.chunk_rows": lambda rows, vocabulary, device: max(
        1, min(rows, CHUNK_ELEMENTS["cuda"] // vocabulary)
    ),
    "reinforge.models.head.statistics": _statistics,
    "reinforge.models.head.gradient": lambda x, *rest: x,
    "reinforge.models.head.add_product": lambda total, a, b: None,  # inside of the product
    "reinforge.models.attention.Segments._varlen": lambda *rest: True,
    # what would read a number
    "reinforge.backends.distributed.worker.combine": lambda parts: {},
    "torch.bincount": lambda x, minlength: x.new_empty(minlength),
}


def track(case: Case) -> Found:
    """As on a GPU, on tensors without numbers. They say that they are on the CPU: a torch that was
    built without CUDA has no gradients of others.
    """
    meter = TrackedMemory()
    packs = case.packs()
    totals = Totals.of(packs)
    with ExitStack() as stack:
        stack.enter_context(fake_group(case.ranks))
        mesh = init_device_mesh("cpu", (case.ranks,))  # has numbers
        for name, stand_in in STAND_INS.items():
            stack.enter_context(mock.patch(name, stand_in))
        meshes = mock.patch("reinforge.backends.fsdp.worker._meshes", lambda *_: (mesh, None))
        stack.enter_context(meshes)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        worker = make_worker(case, torch.device("cpu"), numbers=False)
        gc.collect()
        for root in (worker.root, worker._frozen_root):
            if root is not None:
                for tensor in (*root.parameters(), *root.buffers()):
                    meter.show(tensor)
        stack.enter_context(meter.resizing())
        with meter:
            phases = {"made": meter.now, **peaks(worker, packs, totals, meter)}
        return Found(phases, predicted(worker, case))


# ---- the page ----


def told(name: str, case: Case, how: str, found: Found) -> list[str]:
    def listed(sizes: Mapping[str, int]) -> str:
        return ", ".join(f"{key} {size / GIB:.3g}" for key, size in sizes.items() if size)

    settings = [
        word
        for word, on in (
            ("checkpointing", case.checkpointing),
            ("reference", case.reference),
            ("compiled", case.compiled),
        )
        if on
    ]
    reserved = f"; reserved {found.reserved / GIB:.3g}" if found.reserved else ""
    return [
        f"{name}, one rank of {case.ranks}, packs of {case.tokens} tokens"
        f"{''.join(f', {word}' for word in settings)}; GiB",
        f"  {how}: {listed(found.phases)}{reserved}",
        f"  predicted: {memory_model.total(found.predicted) / GIB:.3g} to train"
        f" ({found.error:+.1%}): {listed(found.predicted)}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["8b", "32b"])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--reference", action="store_true")
    parser.add_argument("--compile", action="store_true", help="only on a GPU")
    parser.add_argument("--tracked", action="store_true", help="also where there is a GPU")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available() and not args.tracked
    if args.compile and not on_gpu:
        parser.error("layers without numbers are not compiled")
    how = "measured" if on_gpu else "tracked"
    rows = []
    for name in args.shape:
        case = Case(
            SHAPES[name], args.ranks, args.tokens, args.checkpointing, args.reference, args.compile
        )
        print(f"{name}: {how}", file=sys.stderr, flush=True)
        found = (measure_gpu if on_gpu else track)(case)
        print("\n".join(told(name, case, how, found)), flush=True)
        sizes = {how: found.phases, "predicted": found.predicted, "error": found.error}
        sizes |= {"reserved": found.reserved} if on_gpu else {}
        rows.append({"shape": name, **vars(case), **sizes, "torch": torch.__version__})
        if args.out:
            args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
