"""What the answers of a batch were allowed to be, token by token: the trainer's side of sampling
under a constraint (docs/decisions/0019-structured.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reinforge.core.batch import Batch
from reinforge.core.constraint import Constraint
from reinforge.models.grammars import Grammars


class AnswerForm:
    """The constraint that all answers of a run were sampled under. `build/local.py` gives it to the
    policy, `CausalModel.logprobs` asks it.
    """

    def __init__(
        self, constraint: Constraint, tokenizer: Any, vocabulary: int, stops: Iterable[int]
    ):
        self._constraint = constraint
        self._grammars = Grammars(tokenizer, vocabulary, stops)
        self._grammars.compile(constraint, "rollout.structured")

    def allowed(self, batch: Batch) -> Tensor:
        """[M, W] int32: what could have come in the place of each trained token. Found again from
        the tokens, because the masks of a step would take gigabytes. An answer is what was sampled
        of a sample; what nobody sampled could have been anything.
        """
        found = np.full((batch.n_trained, self._grammars.words), -1, dtype=np.int32)
        start = 0
        for sample in batch.samples:
            trained = sample.trained.numpy()
            sampled = sample.versions.numpy() >= 0
            rows = found[start : start + np.count_nonzero(trained)]
            if (trained & sampled).any():
                answer = sample.tokens.numpy()[sampled].tolist()
                masks = self._grammars.masks(self._constraint, answer)
                rows[sampled[trained]] = masks[trained[sampled]]
            start += len(rows)
        return torch.from_numpy(found)
