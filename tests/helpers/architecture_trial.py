"""One architecture at toy size, tried as a run would use it and compared with transformers alone.

`benchmarks/architectures.py` tries all of them, tests a few.
"""

from __future__ import annotations

import copy
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from helpers.toys import run, tokens_of
from reinforge.backends.microbatch import facts_of
from reinforge.build.served import save_model
from reinforge.config import architectures, model_table
from reinforge.config.adapter import AdapterConfig
from reinforge.config.model import ModelConfig
from reinforge.core.batch import Batch
from reinforge.core.engine import Sampling
from reinforge.core.errors import InputError
from reinforge.core.model_facts import ModelFacts
from reinforge.core.sample import Sample
from reinforge.engines.native import NativeEngine
from reinforge.models.causal import CausalModel
from reinforge.models.load import load_model
from reinforge.models.proof import Float32Mode
from reinforge.models.save import writing
from reinforge.models.tiny import tiny_tokenizer

Verdict = Literal["right", "trains", "refused", "wrong", "crash"]
Precision = Literal["float32", "bfloat16"]

VOCABULARY = 259
PROMPT = 9  # tokens; with an answer more than a window or a chunk of a toy
ANSWERS = (9, 4)
NEW = 10
# |difference| of log-probs in nats, and relative one of gradients, in float32
CLOSE = 1e-4
GRADIENT = 1e-4
# in bfloat16: how many times as far from float32 as transformers' own bfloat16, and what is free;
# where two experts are nearly tied the other one may be taken, and a token is far off
TIMES = 2.0
FREE = 0.006
TIPPED = 0.08
# toys whose numbers grow so much that bfloat16 would hide everything, and what their weights are
# multiplied by in place of 4
CALM = {
    **dict.fromkeys(("mamba", "falcon_mamba", "youtu", "dbrx"), 2.0),
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified_text"), 2.0),
}


@dataclass(slots=True)
class TrialResult:
    """What became of one architecture in one precision.

    trains: right in everything but the native engine, which says why it cannot generate.
    """

    name: str
    precision: Precision
    model_type: str = ""
    verdict: Verdict = "right"
    said: str = ""  # of a refusal or a crash
    known: bool = False  # refused by its configuration alone, before weights are read
    # exact, fp8, qlora: None where it works, or what it says
    features: dict[str, str | None] = field(default_factory=dict)
    gaps: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)  # of the gaps
    wrong: list[str] = field(default_factory=list)


def try_architecture(name: str, config: Any, precision: Precision) -> TrialResult:
    """Everything that is compared, for one toy; nothing is raised."""
    result = TrialResult(name, precision, config.model_type)
    result.known = architectures.refusal(config.to_dict()) is not None
    with tempfile.TemporaryDirectory() as folder:
        try:
            _try(config, precision, Path(folder), result)
        except InputError as error:
            result.verdict = "refused"
            result.said = str(error)
        except Exception as error:
            result.verdict = "crash"
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(frame.filename).name}:{frame.lineno}"
            result.said = f"{type(error).__name__} at {place}: {error}"
    if result.wrong and result.verdict in ("right", "trains"):
        result.verdict = "wrong"
    return result


def differences(result: TrialResult) -> list[str]:
    """Where the table of `reinforge models` says something else than was found."""
    told = model_table.support({"model_type": result.model_type})
    if result.verdict in ("wrong", "crash"):
        return []  # is bad enough
    if told.verdict != result.verdict:
        return [f"{result.name} is {result.verdict}, and the table says {told.verdict}"]
    return [
        f"{result.name}: {feature} {'works' if said is None else 'is refused'}, and the table says"
        f" {told.cells[feature].mark}"
        for feature, said in result.features.items()
        if (said is None) != (told.cells[feature].mark == "yes")
    ]


def save_toy(config: Any, folder: Path, *, seed: int = 0, spread: float = 4.0) -> Path:
    """A model directory with weights wide enough that every token of the context matters."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation="eager"
        )
    with torch.no_grad():
        for p in module.parameters():
            if p.ndim > 1:
                p.mul_(spread)
    with writing():
        module.save_pretrained(folder)
    tiny_tokenizer(None, 300).save_pretrained(folder)
    return folder


def _try(config: Any, precision: Precision, folder: Path, result: TrialResult) -> None:
    path = save_toy(config, folder / "model", spread=CALM.get(config.model_type, 4.0))
    cfg = ModelConfig(path=str(path), device="cpu", dtype=precision)
    model = load_model(cfg)
    theirs = _Reference(path, precision)
    longest = min(PROMPT + max(*ANSWERS, NEW), model.context or 1 << 20)
    prompt = min(PROMPT, longest // 2)
    samples = _samples(prompt, [min(n, longest - prompt) for n in ANSWERS])
    compare = _Comparison(theirs, result)

    assert facts_of(model).parameters() == sum(p.numel() for p in model.module.parameters())
    forwards = dict(_forwards(model, samples))
    for what, logprobs in forwards.items():
        compare.logprobs(what, samples, logprobs)
    compare.gradients(model, samples)
    _generation(model, prompt, longest - prompt, compare, "")
    _saved(model, cfg, folder / "again", samples, forwards["shared prompts"], result)
    _adapted(cfg, samples, folder / "merged", forwards["shared prompts"], result)
    if precision == "float32" and result.verdict == "right":
        for feature, work in FEATURES.items():
            result.features[feature] = _feature(work, cfg, samples)


def _samples(prompt: int, answers: Sequence[int]) -> list[Sample]:
    """Answers to one prompt, and a row of its own."""
    shared = tokens_of(prompt, 1, VOCABULARY)
    rows = [shared + tokens_of(n, 2 + i, VOCABULARY) for i, n in enumerate(answers)]
    rows.append(tokens_of(prompt + min(answers), 9, VOCABULARY))
    return [
        Sample.from_tokens(
            str(i),
            row,
            [at >= prompt for at in range(len(row))],
            group="pair" if i < len(answers) else "alone",
        )
        for i, row in enumerate(rows)
    ]


def _forwards(model: CausalModel, samples: Sequence[Sample]) -> Iterator[tuple[str, Tensor]]:
    """Log-probs of all trained tokens: of each sample alone, packed, with the prompt shared."""

    @torch.no_grad()
    def logprobs(batch: Batch) -> Tensor:
        return model.logprobs(batch, temperature=1.0)[0].double()

    yield "separate", torch.cat([logprobs(Batch.pack([s])) for s in samples])
    yield "packed", logprobs(Batch.pack(samples))
    yield "shared prompts", logprobs(Batch.pack(samples, share=True))


class _Reference:
    """transformers alone, with its eager attention, in the precision of the trial and in float32
    (with the same weights).
    """

    def __init__(self, path: Path, precision: Precision):
        from transformers import AutoModelForCausalLM

        self.narrow = precision == "bfloat16"
        self.module = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, precision), attn_implementation="eager"
        ).eval()
        mixture = ModelFacts.of(self.module.config.get_text_config()).experts > 1
        self.free = TIPPED if mixture else FREE

    def logits(self, tokens: Sequence[int], *, wide: bool) -> Tensor:
        """[T, V] float64."""
        row = torch.tensor([list(tokens)])
        with torch.no_grad():
            if wide and self.narrow:
                with Float32Mode():
                    found = self.module(row, use_cache=False).logits
            else:
                found = self.module(row, use_cache=False).logits
        return found[0].double()

    def logprobs(self, tokens: Sequence[int], *, wide: bool) -> Tensor:
        """[T−1] of tokens[1:]."""
        table = self.logits(tokens, wide=wide)[:-1].log_softmax(-1)
        return table.gather(-1, torch.tensor(list(tokens[1:]))[:, None])[:, 0]

    def gradient(self, samples: Sequence[Sample], *, wide: bool) -> dict[str, Tensor]:
        """Of the sum of log-probs of trained tokens."""
        self.module.zero_grad(set_to_none=True)
        for sample in samples:
            row = sample.tokens[None]
            if wide and self.narrow:
                with Float32Mode():
                    logits = self.module(row, use_cache=False).logits[0].float()
            else:
                logits = self.module(row, use_cache=False).logits[0].float()
            found = logits[:-1].log_softmax(-1).gather(-1, sample.tokens[1:, None])[:, 0]
            found[sample.trained[1:]].sum().backward()
        return _gradients(self.module)


def _gradients(module: Any) -> dict[str, Tensor]:
    return {
        name: p.grad.detach().double().clone()
        for name, p in module.named_parameters()
        if p.grad is not None
    }


def _apart(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """|found − wanted| / |wanted| over all weights together."""
    zero = torch.zeros(())
    names = found.keys() | wanted.keys()
    gap = sum(
        float((found.get(n, zero) - wanted.get(n, zero)).square().sum()) for n in sorted(names)
    )
    size = sum(float(g.square().sum()) for g in wanted.values())
    return float((gap / max(size, 1e-30)) ** 0.5)


@dataclass(slots=True)
class _Comparison:
    """Writes into a result how far ours is from transformers, and what is too far.

    In float32 the largest difference counts. In bfloat16 the mean one does, against float32: it may
    be a few times that of transformers' own bfloat16 forward.
    """

    theirs: _Reference
    result: TrialResult

    def note(self, what: str, gap: float, limit: float) -> None:
        self.result.gaps[what] = gap
        self.result.limits[what] = limit
        if not gap <= limit:
            self.result.wrong.append(f"{what}: {gap:.3g} where {limit:.3g} is allowed")

    def rows(self, what: str, rows: Sequence[tuple[Sequence[int], Tensor, Tensor]]) -> None:
        """Of (tokens, which of tokens[1:] count, our log-probs of those)."""
        ours = torch.cat([found for _, _, found in rows])
        wide = torch.cat([self.theirs.logprobs(t, wide=True)[mask] for t, mask, _ in rows])
        if not self.theirs.narrow:
            self.note(what, float((ours - wide).abs().max()), CLOSE)
            return
        narrow = torch.cat([self.theirs.logprobs(t, wide=False)[mask] for t, mask, _ in rows])
        noise = float((narrow - wide).abs().mean())
        self.note(what, float((ours - wide).abs().mean()), TIMES * noise + self.theirs.free)

    def logprobs(self, what: str, samples: Sequence[Sample], ours: Tensor) -> None:
        counts = [int(s.trained.sum()) for s in samples]
        self.rows(
            what,
            [
                (s.tokens.tolist(), s.trained[1:], part)
                for s, part in zip(samples, ours.split(counts), strict=True)
            ],
        )

    def gradients(self, model: CausalModel, samples: Sequence[Sample]) -> None:
        wide = self.theirs.gradient(samples, wide=True)
        limit = GRADIENT
        if self.theirs.narrow:
            noise = _apart(self.theirs.gradient(samples, wide=False), wide)
            limit = TIMES * noise + self.theirs.free
        for what, batch in (
            ("gradient packed", Batch.pack(samples)),
            ("gradient shared", Batch.pack(samples, share=True)),
        ):
            model.module.zero_grad(set_to_none=True)
            model.logprobs(batch, temperature=1.0)[0].sum().backward()
            self.note(what, _apart(_gradients(model.module), wide), limit)
        model.module.zero_grad(set_to_none=True)


def _generation(
    model: CausalModel, prompt: int, new: int, compare: _Comparison, after: str
) -> None:
    """The native engine: greedy against `generate`, and the log-probs of what it samples."""
    result = compare.result
    try:
        engine = NativeEngine(model, kv_gib=0.001)
    except InputError as error:
        result.verdict = "trains"
        result.said = str(error)
        return
    tokens = tokens_of(prompt, 1, VOCABULARY)
    new = min(new, NEW)
    sampled = run(engine.generate(tokens, Sampling(max_new_tokens=new), key=1, n=2))
    mask = torch.arange(prompt + new - 1) >= prompt - 1
    compare.rows(
        f"engine{after}",
        [([*tokens, *done.tokens], mask, torch.tensor(done.logprobs).double()) for done in sampled],
    )
    greedy = run(engine.generate(tokens, Sampling(max_new_tokens=new, temperature=0.0), key=1))[0]
    theirs = compare.theirs.module.generate(
        torch.tensor([tokens]),
        attention_mask=torch.ones(1, prompt, dtype=torch.int64),
        do_sample=False,
        max_new_tokens=new,
        min_new_tokens=new,
        suppress_tokens=None,
        eos_token_id=None,
        pad_token_id=0,
    )[0, prompt:].tolist()
    _same_tokens(f"greedy{after}", tokens, greedy.tokens, theirs, compare)


def _same_tokens(
    what: str,
    prompt: Sequence[int],
    ours: Sequence[int],
    theirs: Sequence[int],
    compare: _Comparison,
) -> None:
    """Token by token. Where two tokens are as good as equal either may be taken, and what follows
    is another answer.
    """
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
    compare.result.gaps[what] = float(at is not None)
    if at is None:
        return
    row = [*prompt, *theirs[:at]]
    wide = compare.theirs.logits(row, wide=True)[-1]
    gap = float((wide[theirs[at]] - wide[ours[at]]).abs())
    limit = CLOSE
    if compare.theirs.narrow:
        noise = (compare.theirs.logits(row, wide=False)[-1] - wide).abs().max()
        limit = TIMES * float(noise) + compare.theirs.free
    if not gap <= limit:
        compare.result.wrong.append(
            f"{what}: token {at} is {ours[at]} here and {theirs[at]} there, {gap:.3g} apart"
        )


def _saved(
    model: CausalModel,
    cfg: ModelConfig,
    folder: Path,
    samples: list[Sample],
    before: Tensor,
    result: TrialResult,
) -> None:
    """Saved after it generated and loaded again it has the log-probs that it had, to the bit."""
    save_model(model, folder)
    again = load_model(cfg.model_copy(update={"path": str(folder)}))
    with torch.no_grad():
        after = again.logprobs(Batch.pack(samples, share=True), temperature=1.0)[0].double()
    gap = float((before - after).abs().max())
    result.gaps["saved and loaded"] = gap
    if gap > 0:
        result.wrong.append(f"saved and loaded: {gap:.3g} apart")


def _adapted(
    cfg: ModelConfig,
    samples: list[Sample],
    folder: Path,
    start: Tensor,
    result: TrialResult,
) -> None:
    """LoRA: begins as the model, every factor gets a gradient, and moved by some steps it is in all
    forwards and in the engine what peft's merged model is in transformers.
    """
    precision = result.precision
    batch = Batch.pack(samples, share=True)
    model = load_model(cfg, AdapterConfig(rank=2))
    found = model.logprobs(batch, temperature=1.0)[0]
    gap = float((found.double() - start).detach().abs().max())
    result.gaps["LoRA begins"] = gap
    if gap > 0:
        result.wrong.append(f"LoRA begins {gap:.3g} away from its base")
    found.sum().backward()
    learning = {n: p for n, p in model.module.named_parameters() if p.requires_grad}
    silent = [n for n, p in learning.items() if p.grad is None]
    if silent:
        result.wrong.append(f"LoRA: {silent[0]} gets no gradient")
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in learning.items():
            if "lora_B" in name:
                p.add_(0.05 * torch.randn(p.shape, generator=generator))
    model.module.zero_grad(set_to_none=True)
    forwards = dict(_forwards(model, samples))
    compare = _Comparison(_merged(model, folder, precision), result)
    for what, ours in forwards.items():
        compare.logprobs(f"LoRA {what}", samples, ours)
    moved = float((forwards["shared prompts"] - start).abs().max())
    if moved < 10 * CLOSE:
        result.wrong.append("LoRA: a moved adapter changes nothing")
    if result.verdict != "trains":
        prompt = int((~samples[0].trained).sum())
        _generation(model, prompt, len(samples[0].tokens) - prompt, compare, " with LoRA")


def _merged(model: CausalModel, folder: Path, precision: Precision) -> _Reference:
    """transformers alone with the adapter merged into a copy of the weights."""
    merged = copy.deepcopy(model.module).float().merge_and_unload()  # type: ignore[operator]
    with writing():
        merged.save_pretrained(folder)
    return _Reference(folder, precision)


# ---- what some architectures cannot ----


def _feature(
    work: Callable[[ModelConfig, list[Sample]], None], cfg: ModelConfig, samples: list[Sample]
) -> str | None:
    """None where it works, what it says where it is refused. A crash is one of the trial."""
    try:
        work(cfg, samples)
    except InputError as error:
        return str(error)
    return None


def _exact(cfg: ModelConfig, samples: list[Sample]) -> None:
    """What the engine sampled has the very bits of the packed forward."""
    model = load_model(cfg.model_copy(update={"exact": True}))
    prompt = int((~samples[0].trained).sum())
    tokens = samples[0].tokens[:prompt].tolist()
    new = len(samples[0].tokens) - prompt
    engine = NativeEngine(model, kv_gib=0.001)
    done = run(engine.generate(tokens, Sampling(max_new_tokens=new), key=1))[0]
    row = [*tokens, *done.tokens]
    sample = Sample.from_tokens("0", row, [at >= prompt for at in range(len(row))])
    with torch.no_grad():
        found = model.logprobs(Batch.pack([samples[1], sample]), temperature=1.0)[0]
    assert torch.equal(found[-new:], torch.tensor(done.logprobs)), "exact log-probs differ"


def _fp8(cfg: ModelConfig, samples: list[Sample]) -> None:
    """An engine with products in FP8 samples; what it says of its tokens is near the module's."""
    model = load_model(cfg)
    engine = NativeEngine(model, kv_gib=0.001, precision="fp8")
    prompt = samples[0].tokens[:4].tolist()
    done = run(engine.generate(prompt, Sampling(max_new_tokens=6), key=1))[0]
    row = [*prompt, *done.tokens]
    sample = Sample.from_tokens("0", row, [at >= 4 for at in range(len(row))])
    with torch.no_grad():
        found = model.logprobs(Batch.pack([sample]), temperature=1.0)[0]
    gap = float((found - torch.tensor(done.logprobs)).abs().mean())
    assert gap < 1.0, f"log-probs of FP8 are {gap:.3g} away"


def _qlora(cfg: ModelConfig, samples: list[Sample]) -> None:
    """On a base in 4 bits a pack is what its samples are alone, and the adapter learns."""
    model = load_model(cfg, AdapterConfig(kind="qlora", rank=2))
    found = dict(_forwards(model, samples))
    gap = float((found["shared prompts"] - found["separate"]).abs().max())
    assert gap < CLOSE, f"a pack on a base in 4 bits is {gap:.3g} away"
    model.logprobs(Batch.pack(samples), temperature=1.0)[0].sum().backward()
    learning = [p for p in model.module.parameters() if p.requires_grad]
    assert learning and all(p.grad is not None for p in learning), "QLoRA: no gradient"


FEATURES: dict[str, Callable[[ModelConfig, list[Sample]], None]] = {
    "exact": _exact,
    "fp8": _fp8,
    "qlora": _qlora,
}
