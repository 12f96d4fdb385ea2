"""`rollout.engine` becomes an engine: the trainer's own module, or servers that get its weights."""

from __future__ import annotations

from functools import partial

import torch

from reinforge.backends.distributed.ranks import Ranks
from reinforge.backends.memory_model import moment_bytes, passing_bytes
from reinforge.backends.microbatch import facts_of
from reinforge.build.constraints import rollout_constraint
from reinforge.build.inputs import ModelInputs
from reinforge.build.policy import load_policy, move_to_device
from reinforge.build.served import setup_of, trainer_score
from reinforge.build.shared_gpus import SharedGpus
from reinforge.cluster.data_parallel import DataParallelEngine
from reinforge.config.rollout import SpeculationConfig
from reinforge.config.rules.facts import at_once, opposed, trained_models
from reinforge.core.engine import Engine
from reinforge.core.kv_pool import DeviceShare
from reinforge.engines.beside import EngineBeside, WeightCopy
from reinforge.engines.native import NativeEngine
from reinforge.engines.native.drafts import Speculation
from reinforge.engines.served.dialect import ServerSetup
from reinforge.engines.served.make import make_served
from reinforge.models.answer_form import AnswerForm
from reinforge.models.attention import MaskExtents, mask_extents
from reinforge.models.causal import CausalModel
from reinforge.models.load import stop_tokens


def native_engine(
    inputs: ModelInputs,
    model: CausalModel,
    stops: frozenset[int],
    *,
    ranks: int = 1,
    stream: torch.cuda.Stream | None = None,
) -> NativeEngine:
    """Our own engine, which generates with the trainer's module. `ranks`: how many train.
    `stream`: what it computes on while something else trains.
    """
    rollout = inputs.cfg.rollout
    return NativeEngine(
        model,
        stop_tokens=stops,
        max_batch=rollout.max_batch,
        kv_gib=rollout.kv_gib,
        context=inputs.context,
        longest=inputs.longest,
        at_once=at_once(inputs.cfg),
        share=device_share(inputs, model, ranks),
        prefix_cache=rollout.prefix_cache,
        speculation=_speculation(rollout.speculation),
        precision=rollout.precision,
        cache_precision=rollout.cache_precision,
        routes=inputs.cfg.train.router_replay != "off",
        stream=stream,
    )


def engine_beside(inputs: ModelInputs, model: CausalModel, stops: frozenset[int]) -> EngineBeside:
    """Our own engine with a copy of what is trained, so that it can generate meanwhile."""
    cfg = inputs.cfg
    proved = mask_extents(model.trunk)
    copy = load_policy(cfg, scores=False, in_host_memory=True, proved=proved)
    assert isinstance(copy, CausalModel)
    weights = WeightCopy(copy, model)
    move_to_device(copy, cfg.model)
    stream = None
    if model.device.type == "cuda":
        stream = torch.cuda.Stream(model.device, priority=-1)  # its kernels are short
    return EngineBeside(native_engine(inputs, copy, stops, stream=stream), weights)


def device_share(inputs: ModelInputs, model: CausalModel, ranks: int = 1) -> DeviceShare:
    """What the engines of a run leave of a GPU to training: the moments of its optimizers, which
    are made in their first step, and where it trains meanwhile the rest. All else that stays is
    there when an engine is made.
    """
    cfg = inputs.cfg
    engines = 2 if opposed(cfg) else 1
    if not inputs.trains:
        return DeviceShare(engines=engines)
    facts = facts_of(model, optimizer=cfg.train.optimizer)
    models = trained_models(cfg)
    to_come = models * moment_bytes(facts) // ranks
    if cfg.rollout.overlap:
        packed = min(inputs.budget or 0, at_once(cfg) * inputs.longest)  # no step has more
        to_come += passing_bytes(facts, max(packed, inputs.longest), models)
    return DeviceShare(to_come, engines)


def _speculation(cfg: SpeculationConfig) -> Speculation | None:
    if cfg.when == "never":
        return None
    return Speculation(cfg.drafts, cfg.rows if cfg.when == "tail" else None, cfg.memory)


def engine_of(
    inputs: ModelInputs, model: CausalModel, *, saved: str | None, ranks: Ranks | None
) -> Engine:
    """The engine of a run. What is started here ends with the process, or with the engine.

    `saved`: where the model was loaded from, if it was. `ranks`: that train; with
    `inputs.all_ranks` each of them generates a share.
    """
    cfg = inputs.cfg
    stops = _stops(inputs, model)
    if cfg.rollout.engine != "native":
        gpus = SharedGpus(cfg, ranks)
        setup = server_setup(inputs, model, saved, gpus)
        return make_served(setup, trainer_score(model), gpus.release)
    if ranks is not None:
        move_to_device(model, cfg.model)
    if cfg.rollout.overlap and inputs.trains:
        return engine_beside(inputs, model, stops)
    size = 1 if ranks is None else ranks.size
    engine = native_engine(inputs, model, stops, ranks=size)
    if ranks is None or not inputs.all_ranks:
        return engine
    copy = partial(_engine_of_rank, inputs, stops, size, mask_extents(model.trunk))
    return DataParallelEngine(ranks, engine, copy)


def server_setup(
    inputs: ModelInputs, model: CausalModel, saved: str | None, gpus: SharedGpus | None = None
) -> ServerSetup:
    """What the servers of a run are told. `saved`: where the model was loaded from, if it was.
    `gpus`: of those who train; None: nobody does where the servers are.
    """
    return setup_of(
        inputs.cfg,
        model,
        _stops(inputs, model),
        context=inputs.context,
        longest=inputs.longest,
        saved=saved,
        gpus=gpus,
    )


def answer_form(inputs: ModelInputs, model: CausalModel) -> AnswerForm | None:
    """What the engine's answers are held to, for the log-probs of the trainer; None: nothing."""
    constraint = rollout_constraint(inputs.cfg)
    if constraint is None:
        return None
    vocabulary = model.head.weight.shape[0]
    return AnswerForm(constraint, model.tokenizer, vocabulary, _stops(inputs, model))


def _stops(inputs: ModelInputs, model: CausalModel) -> frozenset[int]:
    """Tokens that end an answer."""
    return frozenset({*stop_tokens(model), *inputs.stop_tokens})


def _engine_of_rank(
    inputs: ModelInputs, stops: frozenset[int], ranks: int, proved: MaskExtents
) -> NativeEngine:
    """A whole copy of the policy on one of the other ranks. `proved`: what rank 0's proof found."""
    model = load_policy(inputs.cfg, scores=inputs.scores, in_host_memory=True, proved=proved)
    assert isinstance(model, CausalModel)
    move_to_device(model, inputs.cfg.model)
    return native_engine(inputs, model, stops, ranks=ranks)
