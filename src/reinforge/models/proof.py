"""Proves that a module computes in our packed forward what it computes in transformers, whatever
its architecture.

Nobody keeps a list of architectures that work. When a model is loaded, four things are shown on it
with a few tokens:

1. Every decoder layer attends exactly once, through our attention, or keeps its state in our
   `StateFlow`, or treats each token by itself. A layer that does none of it (a recurrence or an
   attention of its own making) has state that neither a pack nor the engine knows of.
2. The mask that transformers would have made is causal, all the way or within a window. Windows
   that only the mask carries are read from it here (`hear_masks`).
3. In float32, the packed forward gives the numbers of transformers' own forward of each sample
   alone: samples of several lengths, two of them with one shared prompt, longer than a window where
   windows are short enough.
4. In the precision that is used, no number passes from one sample to another. Rounding hides a
   small leak, so the input of a sample is made NaN: what depends on it becomes NaN, what does not
   stays finite, and there is nothing between the two.

Legend: N tokens of a pack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from reinforge.config.architectures import FIX
from reinforge.core.batch import Batch
from reinforge.core.errors import InputError
from reinforge.core.sample import Sample
from reinforge.models import attention
from reinforge.models.attention import AttentionLayout, PackedLayout, starts_of
from reinforge.models.attention_rule import AttentionRule
from reinforge.models.state import PackedStates

if TYPE_CHECKING:
    from reinforge.models.packed import PackedModel

# in float32: mean |difference| of log-probs in nats, or relative difference of hidden states
LIMIT = 1e-3
# tokens of the longest sample; on a CPU a model of a billion parameters takes seconds for it
ROW = 12
# a sample longer than such a window is computed; of a wider one the mask alone is looked at
LONGEST_WINDOW = 64


@contextmanager
def refusing(module: Any, where: str = "model.path") -> Iterator[None]:
    """Whatever goes wrong inside is a refusal of this architecture, but for a lack of memory."""
    try:
        yield
    except (InputError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        raise InputError(
            f"{type(module).__name__} cannot run through the packed forward"
            f" ({type(error).__name__}: {first}).",
            where=where,
            fix=FIX,
        ) from error


# ---- 1 and 2: layers and masks ----


@dataclass(slots=True)
class _LayerCounter:
    """A layout that remembers which layers attended."""

    packed: PackedLayout
    calls: list[int] = field(default_factory=list)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        self.calls.append(layer)
        return self.packed.attend(layer, q, k, v, rule)


def prove_layers(model: PackedModel, where: str) -> None:
    """One call of our attention from each decoder layer, under a mask that we know how
    to keep to.
    """
    layout = _LayerCounter(PackedLayout([2], starts_of([2], model.device)))
    states = PackedStates([2], model.device)
    with attention.hear_masks():
        _forward(model, layout, states)
    name = type(model.plain).__name__
    expected = int(model.config.num_hidden_layers)
    keep = {layer for layer, *_ in states.shapes}
    known = keep | set(layout.calls)
    once = len(layout.calls) == len(set(layout.calls))
    if once and known == set(range(expected)):
        return
    silent = [i for i in range(expected) if i not in known]
    if silent and once and known < set(range(expected)):
        silent = _mixing(model, silent)
        if not silent:
            return
    if silent:
        kinds = getattr(model.config, "layer_types", None) or []
        kind = f" ({kinds[silent[0]]})" if silent[0] < len(kinds) else ""
        what = (
            f"{len(silent)} of the {expected} layers of {name}, the first of them layer"
            f" {silent[0]}{kind}, do not use the shared attention"
        )
        raise InputError(
            f"{what}: they keep state of their own, or attend in their own way.",
            where=where,
            fix=FIX,
        )
    raise InputError(
        f"{name} has {expected} layers and attends {len(layout.calls)} times, as layers"
        f" {sorted(set(layout.calls))}.",
        where=where,
        fix=FIX,
    )


def _mixing(model: PackedModel, silent: list[int]) -> list[int]:
    """Which of these layers let one token reach another, though they neither attend nor keep state
    through us. The others are MLPs alone, as some hybrids have them.
    """
    found: list[int] = []

    def look(number: int, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        inputs = args[0] if args else kwargs["hidden_states"]
        spoiled = inputs.clone()
        spoiled[:, 0] = float("nan")
        if args:
            again = module.forward(spoiled, *args[1:], **kwargs)
        else:
            again = module.forward(**{**kwargs, "hidden_states": spoiled})
        again = again[0] if isinstance(again, tuple) else again
        if not bool(again[:, 1:].isfinite().all()):
            found.append(number)

    handles = [
        model.layers[i].register_forward_hook(partial(look, i), with_kwargs=True) for i in silent
    ]
    try:
        layout = PackedLayout([2], starts_of([2], model.device))
        _forward(model, layout, PackedStates([2], model.device))
    finally:
        for handle in handles:
            handle.remove()
    return found


def _forward(model: PackedModel, layout: AttentionLayout, states: PackedStates) -> None:
    tokens = torch.zeros(2, dtype=torch.int64, device=model.device)
    model.hidden(tokens, torch.arange(2, device=model.device), layout, states)


# ---- 3: the right numbers ----


def probe(model: PackedModel) -> Batch:
    """A pack as training makes them: two answers that share a prompt, and a sample of its own."""
    vocabulary = int(model.plain.get_input_embeddings().weight.shape[0])
    most = max([ROW, *(w + 6 for w in attention.windows(model.trunk) if w <= LONGEST_WINDOW)])
    longest = min(most, model.context or most)
    prompt = longest // 2
    own = [longest - longest // 2, max(1, longest // 4)]
    stream = iter(
        (torch.arange(4 * longest + 4) * 7919 % min(vocabulary, 1000) % vocabulary).tolist()
    )
    avoid = getattr(model.config, "pad_token_id", None)  # a classifier would not look at it

    def draw(n: int) -> list[int]:
        return [t if t != avoid else (t + 1) % vocabulary for t in (next(stream) for _ in range(n))]

    shared = draw(prompt)
    rows = [(shared + draw(n), prompt, "pair") for n in own] + [
        (draw(max(2, longest * 2 // 3)), 1, "alone")
    ]
    samples = [
        Sample.from_tokens(str(i), tokens, [at >= start for at in range(len(tokens))], group=group)
        for i, (tokens, start, group) in enumerate(rows)
    ]
    return Batch.pack(samples, share=True).to(model.device)


def spread(batch: Batch, states: Tensor) -> list[Tensor]:
    """[T, E] of each sample, out of the [N, E] of a pack in which prompts are shared."""
    segments = states.split(batch.lengths)
    found: list[Tensor] = []
    for sample, end in zip(batch.samples, batch.ends.tolist(), strict=True):
        at = next(i for i, stop in enumerate(batch.starts.tolist()[1:]) if end < stop)
        before = -1 if batch.prefix is None else batch.prefix[at]
        found.append(torch.cat([*([segments[before]] if before >= 0 else []), segments[at]]))
        assert len(found[-1]) == len(sample.tokens)
    return found


@contextmanager
def by_transformers(module: Any) -> Iterator[None]:
    """Inside, the module attends as transformers does."""
    module.set_attn_implementation("eager")
    try:
        yield
    finally:
        module.set_attn_implementation(attention.NAME)


class Float32Mode(TorchFunctionMode):
    """Inside, a module in a lower precision computes in float32: each tensor is widened when it
    takes part in a calculation, so there is never more than one layer's weight in float32 at a
    time. Two forwards can then be compared to six digits.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _MOVES:
            return func(*args, **kwargs)
        args, kwargs = tree_map(_wide, (tuple(args), kwargs))
        return func(*args, **kwargs)


_NARROW = (torch.bfloat16, torch.float16)
# what only moves values about: a whole embedding or a stack of experts is not widened to take a
# piece of it
_MOVES = frozenset(
    {
        "__get__",
        "__set__",
        "embedding",
        "__getitem__",
        "index_select",
        "view",
        "reshape",
        "transpose",
        "permute",
        "t",
        "chunk",
        "split",
        "unbind",
        "size",
        "numel",
        "dim",
        "data_ptr",
        "is_floating_point",
    }
)


def _wide(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.float() if x.dtype in _NARROW else x
    return torch.float32 if isinstance(x, torch.dtype) and x in _NARROW else x


def widened(model: PackedModel) -> Any:
    return nullcontext() if model.dtype == torch.float32 else Float32Mode()


# ---- 4: nothing leaks ----


def prove_isolation(model: PackedModel, batch: Batch, where: str) -> None:
    """Each segment of the pack in turn is made NaN.

    It must reach the segments that continue it and no others.
    """
    name = type(model.plain).__name__
    prefix = batch.prefix or [-1] * len(batch.lengths)
    for poisoned in range(len(batch.lengths)):
        with _poison(model, int(batch.starts[poisoned]), int(batch.starts[poisoned + 1])):
            finite = [part.isfinite().all(-1) for part in model.states(batch).split(batch.lengths)]
        for i, rows in enumerate(finite):
            sees = poisoned in (i, prefix[i])
            # its first row surely sees it; a later one may be past a window
            if sees and bool(rows[0]):
                what = "a sample does not see the prompt that it shares"
            elif not sees and not bool(rows.all()):
                what = "one sample reaches another"
            else:
                continue
            raise InputError(
                f"in a pack of {name} {what}: it would be trained on wrong numbers.",
                where=where,
                fix=FIX,
            )


@contextmanager
def _poison(model: PackedModel, start: int, stop: int) -> Iterator[None]:
    def spoil(module: Any, inputs: Any, output: Tensor) -> Tensor:
        output = output.clone()
        output.view(-1, output.shape[-1])[start:stop] = float("nan")
        return output

    handle = model.plain.get_input_embeddings().register_forward_hook(spoil)
    try:
        yield
    finally:
        handle.remove()


def prove(model: PackedModel, compare: Callable[[Batch], float], where: str, what: str) -> float:
    """The whole proof.

    `compare` gives the difference between our forward of a pack and transformers' own of its
    samples.
    """
    with refusing(model.plain, where):
        prove_layers(model, where)
        batch = probe(model)
        with widened(model):
            error = compare(batch)
        if not error < LIMIT:
            raise InputError(
                f"{type(model.plain).__name__} computes other {what} through the packed forward"
                f" than through transformers (difference {error:.3g}).",
                where=where,
                fix="This architecture keeps state or treats its outputs in its own way. " + FIX,
            )
        prove_isolation(model, batch, where)
        return error
