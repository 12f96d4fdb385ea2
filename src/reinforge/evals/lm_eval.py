"""lm-evaluation-harness (`pip install 'reinforge[lm-eval]'`) on our own forward and engine: its
tasks, prompts and metrics, our numbers.

Log-likelihoods are those of `loglikelihood.py`, `generate_until` is the native engine. The only
file that imports lm_eval.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from reinforge.core.engine import Completion, Sampling
from reinforge.core.errors import InputError
from reinforge.core.seeds import seed_of
from reinforge.core.token_text import token_text
from reinforge.data.templates import Template
from reinforge.engines.native import NativeEngine
from reinforge.evals.loglikelihood import Scored, score_continuations
from reinforge.models.causal import CausalModel
from reinforge.models.load import stop_tokens

NEW_TOKENS = 256  # where a task does not say: the harness's own default
KNOWN = {"do_sample", "temperature", "until", "max_gen_toks", "top_p", "top_k", "min_p"}


class NativeLM(TemplateLM):
    """A model of ours as the harness sees one.

    Tokens are made as its own HuggingFace class makes them.
    """

    def __init__(self, model: CausalModel, *, max_batch: int = 512, seed: int = 0):
        super().__init__()
        self.model = model
        self.seed = seed
        self.tokenizer = model.tokenizer
        self.max_length = model.context or 1 << 20
        self.engine = NativeEngine(
            model,
            stop_tokens=stop_tokens(model),
            max_batch=max_batch,
            context=self.max_length,
            longest=model.context,
        )
        self._device = model.device

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        template = Template(self.tokenizer)
        messages = list(chat_history)
        if add_generation_prompt:
            return template.render(
                messages, None, generation_prompt=True, where="chat template"
            ).text
        return template.continued(messages, "chat template")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """With the tokenizer's own special tokens, and never with a second BOS."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(
                token_text(self.tokenizer, [self.prefix_token_id])
            )
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[Scored]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        return score_continuations(self.model, pairs, longest=self.max_length)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Whole texts, in windows that do not overlap."""
        windows: list[tuple[Any, list[int], list[int]]] = []
        counts = []
        for request in requests:
            (text,) = request.args
            cut = get_rolling_token_windows(
                self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,
                context_len=1,
            )
            parts = [make_disjoint_window(window) for window in cut]
            windows += [
                (None, list(context), list(continuation)) for context, continuation in parts
            ]
            counts.append(len(parts))
        scores = iter(self._loglikelihood_tokens(windows))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return asyncio.run(self._generate([request.args for request in requests]))

    async def _generate(self, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
        """All at once: the engine decides how many run together.

        Draw i depends on the seed and on i alone.
        """
        params = [self._sampling(settings) for _, settings in requests]
        prompts = [
            self.tok_encode(text)[-(self.max_length - p.max_new_tokens) :] or [self.prefix_token_id]
            for (text, _), p in zip(requests, params, strict=True)
        ]
        work = [
            self.engine.generate(ids, p, key=seed_of(self.seed, "lm_eval", i))
            for i, (ids, p) in enumerate(zip(prompts, params, strict=True))
        ]
        return [
            self._text(found[0], p)
            for found, p in zip(await asyncio.gather(*work), params, strict=True)
        ]

    def _sampling(self, settings: dict[str, Any]) -> Sampling:
        given: dict[str, Any] = dict(normalize_gen_kwargs(settings, NEW_TOKENS))
        if odd := sorted(given.keys() - KNOWN):
            raise InputError(
                f"a task sets {odd[0]}={given[odd[0]]!r}, which the native engine does not have.",
                where="--tasks",
                fix=f"It has: {', '.join(sorted(KNOWN))}.",
            )
        until = [stop for stop in given.get("until") or [] if stop]
        new = min(int(given["max_gen_toks"]), self.max_length - 1)
        return Sampling(
            new,
            float(given["temperature"]) if given.get("do_sample") else 0.0,
            top_p=float(given.get("top_p") or 1.0),
            top_k=int(given.get("top_k") or 0),
            min_p=float(given.get("min_p") or 0.0),
            stop_strings=tuple(until),
        )

    def _text(self, completion: Completion, params: Sampling) -> str:
        """Without special tokens, up to the first stop string."""
        text = token_text(self.tokenizer, completion.tokens, special=False)
        for stop in params.stop_strings:
            text = text.split(stop)[0]
        return text


def run_tasks(
    model: CausalModel,
    tasks: Sequence[str],
    *,
    include: Path | None = None,
    limit: int | None = None,
    fewshot: int | None = None,
    chat: bool = False,
    max_batch: int = 512,
    seed: int = 0,
) -> dict[str, Any]:
    """The harness's results of `tasks`, its own or those of YAML files in the directory `include`:
    {task: {metric: value}}.
    """
    manager = _manager(tasks, include)
    found = simple_evaluate(
        model=NativeLM(model, max_batch=max_batch, seed=seed),
        tasks=list(tasks),
        task_manager=manager,
        limit=limit,
        num_fewshot=fewshot,
        apply_chat_template=chat,
        log_samples=False,
        random_seed=seed,
        numpy_random_seed=seed,
        torch_random_seed=seed,
        fewshot_random_seed=seed,
    )
    return {name: dict(values) for name, values in found["results"].items()}


def _manager(tasks: Sequence[str], include: Path | None) -> TaskManager:
    """The tasks of `include` alone where they are all there: to read the thousands that the harness
    brings takes a minute.
    """
    own = TaskManager(
        include_path=None if include is None else str(include), include_defaults=False
    )
    if include is not None and all(task in own.all_tasks for task in tasks):
        return own
    manager = TaskManager(include_path=None if include is None else str(include))
    for task in tasks:
        if task not in manager.all_tasks:
            raise InputError(
                f"lm_eval has no task {task!r}.",
                where="--tasks",
                fix="`lm-eval ls tasks` lists them; --include names a directory of your own.",
            )
    return manager
