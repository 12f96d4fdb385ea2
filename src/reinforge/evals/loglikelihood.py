"""How likely given continuations are, through the packed forward that training uses.

Continuations of one context (the options of a question) share it, so that it is computed once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from reinforge.core.batch import Batch, pack
from reinforge.core.sample import Sample
from reinforge.models.causal import CausalModel
from reinforge.models.head import chunk_rows

BUDGET = {"cuda": 32768, "cpu": 4096}  # tokens of a pack; there is no backward
Scored = tuple[float, bool]  # sum of log-probs, and whether greedy decoding would have written it


def score_continuations(
    model: CausalModel, pairs: Sequence[tuple[list[int], list[int]]], *, longest: int
) -> list[Scored]:
    """Of every (context, continuation), in ids; what is longer than `longest` loses its start."""
    samples = [
        _sample(str(i), context, continuation, longest)
        for i, (context, continuation) in enumerate(pairs)
    ]
    found: dict[str, Scored] = {}
    for batch in pack(samples, BUDGET.get(model.device.type, BUDGET["cpu"]), share=True):
        found |= _score(model, batch)
    return [found[sample.uid] for sample in samples]


def _sample(name: str, context: list[int], continuation: list[int], longest: int) -> Sample:
    """A row whose trained tokens are the continuation."""
    tokens = (context + continuation)[-longest:]
    group = hashlib.blake2b(repr(context).encode(), digest_size=12).hexdigest()
    trained = [t >= len(tokens) - len(continuation) for t in range(len(tokens))]
    return Sample.from_tokens(name, tokens, trained, group=group)


@torch.no_grad()
def _score(model: CausalModel, batch: Batch) -> dict[str, Scored]:
    """Every sample's sum of log-probs (float64) and whether each of its tokens is the likeliest."""
    count = len(batch.samples)
    sums = torch.zeros(count, dtype=torch.float64)
    right = torch.ones(count, dtype=torch.bool)
    if batch.n_trained:
        moved = batch.to(model.device)
        rows = model.states(moved).index_select(0, moved.sources)
        targets = moved.tokens[moved.targets]
        size = chunk_rows(len(rows), model.head.weight.shape[0], rows.device)
        own = []
        best = []
        for hidden, target in zip(rows.split(size), targets.split(size), strict=True):
            logp = model.logits(hidden).log_softmax(-1)
            own.append(logp.gather(-1, target[:, None])[:, 0])
            best.append(logp.argmax(-1) == target)
        sums.index_add_(0, batch.sequence, torch.cat(own).double().cpu())
        right[batch.sequence[~torch.cat(best).cpu()]] = False
    return {
        s.uid: (float(total), bool(all_right))
        for s, total, all_right in zip(batch.samples, sums, right, strict=True)
    }
