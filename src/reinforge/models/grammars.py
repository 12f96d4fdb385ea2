"""Which tokens may come next where an answer must match a regular expression, a JSON schema or a
grammar.

The native engine draws under these masks, and the trainer computes log-probs under the same ones.

Legend: V vocabulary, W = ceil(V / 32) words of 32 bits, bit v % 32 of word v // 32 is token v.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reinforge.core.constraint import Constraint
from reinforge.core.errors import InputError
from reinforge.models.constraint_library import deep, library, written, wrong

KEPT = 64  # compiled grammars


class Matcher:
    """Where one answer stands in its grammar. `Grammars.matcher` makes it; the native engine has
    one for every constrained sequence and tells it each token.
    """

    def __init__(self, state: Any, stops: Iterable[int], words: int):
        self._state = state
        self._stops = sorted(stops)
        self._words = words
        self.allowed = self._allowed()  # [W] bits: what may come next; never changed in place

    def copy(self) -> Matcher:
        """Another answer that stands where this one does; cheaper than to find out again what may
        come next.
        """
        copied = copy.copy(self)
        copied._state = self._state.deep_copy()
        return copied

    @property
    def may_end(self) -> bool:
        """Whether the answer matches as it is."""
        return bool(self._state.is_accepting())

    @property
    def complete(self) -> bool:
        """Whether the answer matches and nothing but a stop token may follow."""
        return bool(self._state.is_stopped() and self._state.is_accepting())

    def take(self, token: int) -> None:
        """The answer goes on with a token that is allowed and is no stop token."""
        if not self._state.consume_token(token):
            raise InputError(
                f"token {token} does not go on with the answer so far: {self._trouble()}",
                where="constraint",
            )
        self.allowed = self._allowed()

    def _allowed(self) -> NDArray[np.int32]:
        """What the grammar allows, and stop tokens where the answer may end."""
        bits = np.frombuffer(self._state.compute_bitmask(), dtype=np.int32)[: self._words].copy()
        if self._state.is_error():
            raise InputError(
                f"the grammar is too much for this answer: {self._trouble()}",
                where="constraint",
                fix="Make it simpler.",
            )
        if self.may_end:
            for token in self._stops:
                bits[token // 32] |= np.array(1 << (token % 32), dtype=np.uint32).view(np.int32)
        if not bits.any():
            raise InputError(
                "no token of this model goes on with the answer so far.",
                where="constraint",
                fix="Allow other text.",
            )
        return bits

    def _trouble(self) -> str:
        return str(self._state.get_error()).partition("\n")[0]


class Grammars:
    """Constraints compiled for one tokenizer. An engine and a trained model have one each; the
    newest are kept.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, stops: Iterable[int]):
        """`vocabulary`: rows of the model's head. `stops`: tokens that end an answer, whichever
        request it belongs to.
        """
        self.words = -(-vocabulary // 32)
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._stops = frozenset(stops)
        self._vocabulary_tree: Any = None
        self._compiled: OrderedDict[Constraint, Any] = OrderedDict()

    def compile(self, constraint: Constraint, where: str = "constraint") -> Any:
        """The state before the first token. Raises `InputError` where it cannot be."""
        found = self._compiled.get(constraint)
        if found is None:
            grammar = written(constraint, where)
            tree = self._tree(where)
            found = deep(lambda: library(where).LLMatcher(tree, grammar, log_level=0))
            if found.is_error():
                raise wrong(constraint, found.get_error(), where)
            self._compiled[constraint] = found
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        return found

    def matcher(
        self, constraint: Constraint, begun: Sequence[int] = (), stops: Iterable[int] = ()
    ) -> Matcher:
        """Of an answer that begins with the tokens `begun`. `stops`: more tokens that end it."""
        state = self.compile(constraint).deep_copy()
        matcher = Matcher(state, self._stops | frozenset(stops), self.words)
        for token in begun:
            matcher.take(token)
        return matcher

    def masks(
        self, constraint: Constraint, answer: Sequence[int], stops: Iterable[int] = ()
    ) -> NDArray[np.int32]:
        """[T, W]: what was allowed in the place of each token of an answer, its stop token
        included.
        """
        matcher = self.matcher(constraint, stops=stops)
        found = np.empty((len(answer), self.words), dtype=np.int32)
        for i, token in enumerate(answer):
            found[i] = matcher.allowed
            if i + 1 < len(answer):
                matcher.take(token)
        return found

    def _tree(self, where: str) -> Any:
        """llguidance's view of the vocabulary: seconds for a large one, so it is made once."""
        if self._vocabulary_tree is None:
            fast = getattr(self._tokenizer, "backend_tokenizer", None)
            if fast is None:
                raise InputError(
                    "answers of a given form need a fast tokenizer, and this model has another.",
                    where=where,
                    fix="Save it with a tokenizer.json.",
                )
            if not self._stops:
                raise InputError(
                    "an answer of a given form ends with a stop token, and this model has none.",
                    where=where,
                    fix="Give the tokenizer an eos_token.",
                )
            copied = type(fast).from_str(fast.to_str())
            copied.no_padding()
            copied.no_truncation()
            self._vocabulary_tree = library(where).LLTokenizer(
                copied.to_str(),
                n_vocab=max(self._vocabulary, copied.get_vocab_size(with_added_tokens=True)),
                eos_token=sorted(self._stops),
            )
        return self._vocabulary_tree
