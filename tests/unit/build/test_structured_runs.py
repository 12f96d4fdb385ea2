"""Training on answers that must match something. The trainer computes log-probs over what was
allowed, so that ratios are of what was sampled from, and the gradient is that of the policy under
its constraint.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers.tiny_runs import EVAL, launch, lines
from helpers.toys import make_module, relative
from reinforge.build import local
from reinforge.core.batch import Batch
from reinforge.core.constraint import Constraint
from reinforge.core.sample import Sample
from reinforge.models.answer_form import AnswerForm
from reinforge.models.causal import CausalModel
from reinforge.models.tiny import tiny_tokenizer

EOS = 2
TOKENIZER = tiny_tokenizer(vocabulary=259)
WORDS = "[ab][cd]?"
PROMPT = [70, 71, 72]
STRUCTURED = {"max_new_tokens": 8, "kv_gib": 0.01, "structured": {"regex": "[0-9]{2}[a-f]{1,4}"}}


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


ANSWERS = [[*ids(a + b), EOS] for a, b in itertools.product("ab", ["", "c", "d"])]
REWARDS = [1.0, -0.5, 2.0, 0.3, 0.0, -1.0]


def sample_of(i: int, answer: list[int]) -> Sample:
    n = len(PROMPT)
    trained = torch.tensor([False] * n + [True] * len(answer))
    return Sample(
        uid=str(i),
        group="g",
        episode=str(i),
        tokens=torch.tensor([*PROMPT, *answer]),
        trained=trained,
        logprobs=torch.zeros(len(trained)),
        versions=torch.where(trained, 0, -1).int(),
    )


def free_at(text: str) -> list[int]:
    """By hand: what [ab][cd]? allows after a text."""
    return {0: ids("ab"), 1: [*ids("cd"), EOS], 2: [EOS]}[len(text)]


def true_answer_logprob(module: Any, answer: list[int]) -> torch.Tensor:
    """In float64, by transformers and hand-written masks."""
    logits = module(torch.tensor([[*PROMPT, *answer]]), use_cache=False).logits[0].double()
    total = torch.zeros((), dtype=torch.float64)
    for i, token in enumerate(answer):
        z = logits[len(PROMPT) + i - 1]
        free = free_at(TOKENIZER.decode(answer[:i]))
        total = total + z[token] - z[free].logsumexp(-1)
    return total


def grads_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def estimated(module: Any, form: AnswerForm | None, p: torch.Tensor) -> dict[str, torch.Tensor]:
    """E[R grad log p] over all answers, each with its true probability: what a policy gradient
    computes, without its noise.
    """
    model = CausalModel(module, TOKENIZER)
    model.form = form
    batch = Batch.pack([sample_of(i, a) for i, a in enumerate(ANSWERS)], share=True)
    logp = model.logprobs(batch, temperature=1.0)[0]
    weights = (p * torch.tensor(REWARDS)).float()
    (weights[batch.sequence] * logp).sum().backward()
    return grads_of(module)


def test_the_gradient_is_that_of_the_policy_under_its_constraint() -> None:
    """J = sum over all six answers of p(y) R(y), p renormalised at each token. With masks E[R grad
    log p] is grad J; without them it is something else.
    """
    form = AnswerForm(Constraint("regex", WORDS), TOKENIZER, 259, [EOS])
    exact = make_module(vocab_size=259).double()
    logp = torch.stack([true_answer_logprob(exact, answer) for answer in ANSWERS])
    p = logp.exp()
    assert float(p.sum().detach()) == pytest.approx(1.0, abs=1e-12)
    (p * torch.tensor(REWARDS)).sum().backward()
    want = grads_of(exact)
    p = p.detach()
    masked = estimated(make_module(vocab_size=259), form, p)
    ignored = estimated(make_module(vocab_size=259), None, p)
    assert relative(masked, want) < 1e-4
    assert relative(ignored, want) > 0.5


def test_log_probs_of_given_answers() -> None:
    """Each token over what was allowed in its place; prompts and what nobody sampled are free."""
    form = AnswerForm(Constraint("regex", WORDS), TOKENIZER, 259, [EOS])
    module = make_module(vocab_size=259)
    with torch.no_grad():
        want = [float(true_answer_logprob(module.double(), a)) for a in ANSWERS]
    model = CausalModel(make_module(vocab_size=259), TOKENIZER)
    model.form = form
    samples = [sample_of(i, a) for i, a in enumerate(ANSWERS)]
    batch = Batch.pack(samples)
    with torch.no_grad():
        found = model.logprobs(batch, temperature=1.0)[0]
        sums = torch.zeros(len(ANSWERS)).index_add_(0, batch.sequence, found)
        assert sums.tolist() == pytest.approx(want, abs=1e-4)
        given = [s.with_(versions=torch.full_like(s.versions, -1)) for s in samples]
        plain = model.logprobs(Batch.pack(given), temperature=1.0)[0]
        model.form = None
        assert torch.equal(plain, model.logprobs(batch, temperature=1.0)[0])


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_sampling_and_training_agree(make: Callable[..., Any], algorithm: str) -> None:
    """What the engine reported is what the trainer finds, reference and old log-probs included."""
    more: dict[str, Any] = {"critic": {}} if algorithm == "ppo" else {}
    overrides = ["algorithm.epochs=2", "algorithm.kl.coefficient=0.05"]
    cfg = make("run", algorithm, *overrides, rollout=STRUCTURED, **more)
    launch(cfg)
    steps = [line for line in lines(cfg) if "mismatch/max" in line]
    assert len(steps) == 3
    assert all(line["mismatch/max"] < 2e-5 for line in steps)
    assert all(abs(line["policy/kl"]) < 0.05 for line in steps)
    assert steps[0]["policy/entropy"] < 2.31, "at most of ten digits, not of 259 tokens"


def test_without_masks_they_would_not(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "answer_form", lambda *_: None)
    cfg = make("run", "grpo", rollout=STRUCTURED)
    launch(cfg)
    assert all(line["mismatch/max"] > 1 for line in lines(cfg) if "mismatch/max" in line)


def test_exact_log_probs_agree_to_the_bit(make: Callable[..., Any]) -> None:
    cfg = make("run", "grpo", "model.exact=true", rollout=STRUCTURED)
    launch(cfg)
    steps = [line for line in lines(cfg) if "mismatch/max" in line]
    assert steps and all(line["mismatch/max"] == 0.0 for line in steps)


def test_answers_of_training_and_evaluation_match(make: Callable[..., Any]) -> None:
    """In training as rollout.structured says; an evaluation may have a form of its own. Half of the
    letters of `no` are odd characters.
    """
    cfg = make(
        "run",
        "grpo",
        "train.steps=1",
        rollout=STRUCTURED,
        eval={"at_start": True, "structured": {"regex": "no"}},
    )
    launch(cfg, eval_data=EVAL)
    texts = [line["completion"] for line in lines(cfg, "samples.jsonl")]
    assert texts and all(re.fullmatch("[0-9]{2}[a-f]{1,4}", text) for text in texts)
    measured = [line["eval/reward"] for line in lines(cfg) if "eval/reward" in line]
    assert measured and set(measured) == {0.5}
