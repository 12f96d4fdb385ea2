"""Log-probs of sampled tokens as somebody may have computed them: in another precision, at another
temperature, after another prompt, with older weights, through other experts.

`build/mismatch.py` looks for the reading that gives the numbers which an engine told. Every reading
is computed with a model of its own, so nothing of the run is touched.

Legend: M tokens that the policy sampled, sample after sample; V vocabulary.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from reinforge.build.policy import load_policy
from reinforge.config.schema import Config
from reinforge.core import routes
from reinforge.core.batch import Batch
from reinforge.core.sample import Sample
from reinforge.engines.native.sampler import keep_top
from reinforge.models.answer_form import AnswerForm
from reinforge.models.causal import CausalModel
from reinforge.models.fp8_layers import Fp8Layers
from reinforge.models.head import LogitRule, permitted
from reinforge.models.load import pick_device, pick_dtype
from reinforge.models.routing import Replay, Routers, differs

FP8 = "fp8"  # products of the decoder layers; all else in the precision of the trainer
HELD = 4  # readings whose logits are held at once
DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}
VersionWeights = Mapping[str, Tensor]  # of all that is trained, by name, in float32


@dataclass(frozen=True, slots=True)
class LogprobReading:
    """One way to compute the log-probs of tokens. The search in `build/mismatch_causes.py` changes
    one thing of it after the other.
    """

    temperature: float
    precision: str  # of DTYPES, or FP8
    prompt: str = ""  # the name of another prompt; "": that of the sample
    version: int | None = None  # of the weights; None: those that the engine says it had
    part: str = ""  # of the weights, to which `version` is limited; "": all of them
    routed: bool = False  # whether tokens go to the experts that they went to when sampled
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def forward(self) -> LogprobReading:
        """The same up to the logits."""
        return replace(self, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)


class LogprobReader:
    """Computes readings of a few samples. `weights` by version: how many updates they had.
    `prompts` by name: other prompts of the samples, None where a sample has no such.
    """

    def __init__(
        self,
        cfg: Config,
        samples: Sequence[Sample],
        weights: Mapping[int, VersionWeights],
        prompts: Mapping[str, Sequence[list[int] | None]],
        form: AnswerForm | None = None,
    ):
        self.cfg = cfg
        self.samples = list(samples)
        self.weights = weights
        self.prompts = prompts
        self.form = form
        self.device = pick_device(cfg.model.device)
        self.precision = str(pick_dtype(cfg.model.dtype, self.device)).removeprefix("torch.")
        self._models: dict[str, CausalModel] = {}
        self._logits: OrderedDict[LogprobReading, Tensor] = OrderedDict()

    @property
    def trainers(self) -> LogprobReading:
        """As the trainer computes, with the weights that the engine says it had."""
        replayed = self.cfg.train.router_replay in ("on", "differing")
        fp8 = self.cfg.train.precision == "fp8"
        return LogprobReading(
            temperature=self.cfg.rollout.temperature,
            precision=FP8 if fp8 else self.precision,
            routed=replayed and self.has_routes,
        )

    @property
    def has_routes(self) -> bool:
        return any(routes.NAME in sample.extras for sample in self.samples)

    @property
    def recorded(self) -> Tensor:
        """[M] as the engine told them."""
        return torch.cat([sample.logprobs[sample.trained] for sample in self.samples])

    @property
    def claimed(self) -> Tensor:
        """[M] which weights sampled the token, as far as they are at hand."""
        known = torch.tensor(sorted(self.weights))
        told = torch.cat([sample.versions[sample.trained] for sample in self.samples]).long()
        at = torch.searchsorted(known, told, right=True) - 1
        return known[at.clamp(min=0)]

    def add_first(self) -> None:
        """The weights that the run began with, as version 0."""
        if 0 not in self.weights:
            own = dict(self.model(self.precision).module.named_parameters())
            names = next(iter(self.weights.values()))
            first = {n: own[n].detach().float().cpu().clone() for n in names if n in own}
            self.weights = {**self.weights, 0: first}

    def logprobs(self, reading: LogprobReading) -> Tensor:
        """[M]; -inf where the reading could not have sampled the token."""
        logits = self.logits(reading.forward)
        targets = torch.cat([sample.tokens[sample.trained] for sample in self.samples])
        z = logits / reading.temperature
        if reading.top_p < 1 or reading.top_k or reading.min_p:
            z = keep_top(z, *(z.new_tensor([x]).expand(len(z)) for x in _filters(reading)))
        own = z.gather(-1, targets.to(z.device)[:, None])[:, 0]
        return (own - z.logsumexp(-1)).cpu()

    @torch.no_grad()
    def logits(self, reading: LogprobReading) -> Tensor:
        """[M, V] float32."""
        if reading in self._logits:
            self._logits.move_to_end(reading)
            return self._logits[reading]
        found = self._computed(reading)
        self._logits[reading] = found
        if len(self._logits) > HELD:
            self._logits.popitem(last=False)
        return found

    def _computed(self, reading: LogprobReading) -> Tensor:
        if reading.version is not None and not reading.part:
            return self._with(reading, self.weights[reading.version])
        claimed = self.claimed
        found: Tensor | None = None
        for version in sorted(set(claimed.tolist())):
            weights = dict(self.weights[version])
            if reading.version is not None:
                older = self.weights[reading.version]
                weights |= {n: older[n] for n in older if part_of(n) == reading.part}
            logits = self._with(reading, weights)
            own = (claimed == version).to(logits.device)[:, None]
            found = logits if found is None else torch.where(own, logits, found)
        assert found is not None, "there are no tokens"
        return found

    def _with(self, reading: LogprobReading, weights: VersionWeights) -> Tensor:
        model = self.model(reading.precision)
        self._load(model, weights)
        samples = self.samples
        if reading.prompt:
            others = self.prompts[reading.prompt]
            samples = [_after(s, ids) for s, ids in zip(samples, others, strict=True)]
        batch = Batch.pack(samples).to(self.device)
        routers = Routers.of(model)
        if routers is not None and reading.routed and batch.routes is not None:
            routers.give(routes.wide(batch.routes), Replay.ON)
        try:
            with self.computing(model, reading.precision):
                states = model.states(batch).index_select(0, batch.sources)
        finally:
            if routers is not None:
                routers.give(None, Replay.OFF)
        logits = model.logits(states)
        if self.form is None:
            return logits
        return permitted(logits, LogitRule(), self.form.allowed(batch).to(logits.device))

    # ---- models ----

    def model(self, precision: str) -> CausalModel:
        """A model of its own for every precision, loaded as the run loads its policy."""
        if precision not in self._models:
            dtype = self.precision if precision == FP8 else precision
            # the configuration has no other names than those of training
            named = "float32" if dtype in ("float16", "float64") else dtype
            section = self.cfg.model.model_copy(
                update={"dtype": named, "compile": False, "gradient_checkpointing": False}
            )
            with _quietly():
                model = load_policy(self.cfg.model_copy(update={"model": section}), scores=False)
            assert isinstance(model, CausalModel)
            if dtype != named:
                model.module.to(DTYPES[dtype])
            self._models[precision] = model
        return self._models[precision]

    def loaded(self, precision: str, version: int) -> CausalModel:
        """The same with the weights of a version."""
        model = self.model(precision)
        self._load(model, self.weights[version])
        return model

    @torch.no_grad()
    def states(self, model: CausalModel, sample: Sample) -> Tensor:
        """[T, E] last hidden states of one sample, as the trainer computes them."""
        return model.states(Batch.pack([sample]).to(self.device))

    @torch.no_grad()
    def _load(self, model: CausalModel, weights: VersionWeights) -> None:
        own = dict(model.module.named_parameters()) | dict(model.module.named_buffers())
        for name, tensor in weights.items():
            if name in own:
                own[name].copy_(tensor)

    @contextmanager
    def computing(self, model: CausalModel, precision: str) -> Iterator[None]:
        fp8 = Fp8Layers.of(model, "train.precision") if precision == FP8 else None
        with _quietly(), nullcontext() if fp8 is None else fp8.using("fresh"):
            yield

    # ---- experts ----

    @torch.no_grad()
    def chosen(self, reading: LogprobReading) -> list[Tensor]:
        """[T, L, k] of each sample: the experts that its tokens go to by themselves, with the
        newest of the weights that sampled it.
        """
        model = self.loaded(reading.precision, int(self.claimed.max()))
        routers = Routers.of(model)
        assert routers is not None
        with routers.watched(), self.computing(model, reading.precision):
            model.states(Batch.pack(self.samples).to(self.device))
            own = routers.own().cpu()
        return list(own.split([len(sample.tokens) for sample in self.samples]))


@contextmanager
def _quietly() -> Iterator[None]:
    """Without what torch says at length where a CPU has no fast product of some precision."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _filters(reading: LogprobReading) -> tuple[float, float, float]:
    return reading.top_p, float(reading.top_k), reading.min_p


def _after(sample: Sample, prompt: list[int] | None) -> Sample:
    """The sample with another prompt before what was sampled first."""
    if prompt is None:
        return sample
    start = int(sample.trained.nonzero()[0])
    added = len(prompt) - start

    def moved(stream: Tensor, filler: float) -> Tensor:
        return torch.cat([stream.new_full((len(prompt),), filler), stream[start:]])

    extras = {}
    if routes.NAME in sample.extras:
        given = sample.extras[routes.NAME]
        extras[routes.NAME] = torch.cat([routes.opened(given, len(prompt)), given[start:]])
        assert len(extras[routes.NAME]) == len(given) + added
    tokens = torch.cat([torch.tensor(prompt, dtype=torch.int64), sample.tokens[start:]])
    return sample.with_(
        tokens=tokens,
        trained=moved(sample.trained, False),
        logprobs=moved(sample.logprobs, 0.0),
        versions=moved(sample.versions, -1),
        streams={},
        extras=extras,
    )


def part_of(name: str) -> str:
    """The part of a model that a parameter belongs to: a layer, or what is before and behind them.

    >>> part_of("model.layers.3.mlp.up_proj.weight"), part_of("model.norm.weight")
    ('model.layers.3', 'model.norm')
    """
    words = name.split(".")
    for i, word in enumerate(words):
        if word.isdigit():
            return ".".join(words[: i + 1])
    return ".".join(words[:-1])


def first_other_choice(ours: Tensor, theirs: Tensor) -> tuple[int, int] | None:
    """(token, block) of the first choice [T, L, k] that is of other experts, in the order in which
    they are computed; None where there is none.
    """
    known = (theirs != routes.OPEN).all(-1)
    other = (differs(ours, theirs) & known).nonzero()
    return (int(other[0, 0]), int(other[0, 1])) if len(other) else None
