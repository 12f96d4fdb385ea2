"""Puts the parts of a row of `catalogue.py` together.

A further algorithm is a function and a row; a further kind also a builder. Those of policy
gradients are here, the others in `build_losses.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

from torch import Tensor

from reinforge.algorithms import build_losses, catalogue
from reinforge.algorithms.algorithm import Algorithm, AlgorithmOptions
from reinforge.algorithms.catalogue import TABLE, AlgorithmSpec, has_ratio
from reinforge.algorithms.losses import on_policy
from reinforge.algorithms.losses.distillation import DistillationLoss
from reinforge.algorithms.losses.policy import PolicyLoss, Selected
from reinforge.algorithms.parts.advantages import ADVANTAGES, Advantage, AdvantageOptions, Rollouts
from reinforge.algorithms.parts.corrections import CORRECTIONS
from reinforge.algorithms.parts.kl import ESTIMATORS, NOTES, REWARD_NOTES, SCALED_NOTE
from reinforge.algorithms.parts.reduce import REDUCERS
from reinforge.algorithms.parts.selections import SELECTIONS
from reinforge.algorithms.parts.surrogates import SURROGATES
from reinforge.algorithms.parts.terms import LossTerms
from reinforge.algorithms.settings import AlgorithmSettings, look_up, name_of, settings_of
from reinforge.algorithms.user_functions import UserSurrogate, error_of
from reinforge.core.errors import InputError


def build(name: str, **options: Any) -> Algorithm:
    """The named algorithm with `options` (fields of `AlgorithmOptions`; None = the algorithm's
    own).
    """
    spec = look_up(TABLE, name, "algorithm.name")
    given = {key: value for key, value in options.items() if value is not None}
    known = {f.name for f in fields(AlgorithmOptions)}
    parts = {part: function for part, function in spec.parts.items() if part in known}
    o = AlgorithmOptions(**{**parts, **spec.defaults, **given})
    if o.overlong_buffer is None:
        # the paper: 4096 of 20480
        o = replace(o, overlong_buffer=o.max_new_tokens // 5 if spec.shaped else 0)
    _check(o, given)
    return BUILDERS[spec.kind.name](name, spec, o, given)


def _policy_gradient(
    name: str, spec: AlgorithmSpec, o: AlgorithmOptions, given: Mapping[str, Any]
) -> Algorithm:
    def own(**keys: str) -> dict[str, tuple[Any, str]]:
        """The user's settings under keys of their own: parameter=field of `AlgorithmOptions`."""
        return {name: (given.get(key), f"algorithm.{KEYS[key]}") for name, key in keys.items()}

    settings = AlgorithmSettings(o.settings)
    defaults = dict(spec.options)
    if o.surrogate == spec.parts["surrogate"]:
        for setting, key in (("low", "clip_low"), ("high", "clip_high")):
            if key in spec.defaults:
                defaults[setting] = spec.defaults[key]
    surrogate = settings.bind(
        SURROGATES,
        o.surrogate,
        "algorithm.surrogate",
        own(low="clip_low", high="clip_high", dual="clip_dual", delta="clip_delta"),
        defaults,
    )
    correction = settings.bind(
        CORRECTIONS, o.correction, "algorithm.correction.name", own(cap="cap", floor="floor")
    )
    reduce = settings.bind(REDUCERS, o.reduce, "algorithm.reduce")
    selection = None
    if o.selection is not None:
        selection = settings.bind(
            SELECTIONS,
            o.selection,
            "algorithm.selection",
            _first(o.selection, settings),
            spec.options,
        )
    in_reward = o.kl_placement == "reward"
    estimator = o.kl_estimator or ("k1" if in_reward else "k3")
    kl = settings.bind(ESTIMATORS, estimator, "algorithm.kl.estimator", own(clamp="kl_clamp"))
    advantage = _advantage(o, settings, spec)
    settings.refuse_unused()

    bound = settings_of(surrogate)
    o = replace(o, kl_estimator=estimator, clip_low=bound.get("low"), clip_high=bound.get("high"))
    terms = LossTerms(
        o.kl_coefficient,
        o.entropy,
        o.nll,
        o.kl_target,
        o.kl_horizon,
        o.entropy_target,
        o.entropy_rate,
        o.entropy_max,
    )
    loss = PolicyLoss(
        surrogate if isinstance(o.surrogate, str) else UserSurrogate(surrogate),
        reduce,
        correction=correction,
        kl=kl,
        kl_importance=o.kl_importance,
        kl_in_reward=in_reward,
        terms=terms,
        penalty=o.penalty,
        engine_old=o.old == "engine",
        selected=o.selected or _selected(o.selection),
        off_policy=o.old == "recompute" or (o.old == "auto" and o.updates > 1),
    )
    needs = loss.needs.union(
        _needs(o.advantage, catalogue.ADVANTAGES),
        _needs(o.surrogate, {}),
        _needs(o.selection, catalogue.SELECTIONS),
    )
    used = in_reward and o.kl_coefficient > 0
    return Algorithm(
        name,
        spec.family,
        spec.paper,
        loss,
        o,
        advantage,
        selection,
        kl if used else None,
        terms,
        needs | {"reference"} if used else needs,
        _notes(o, loss.selected),
    )


def _on_policy(
    name: str, spec: AlgorithmSpec, o: AlgorithmOptions, given: Mapping[str, Any]
) -> Algorithm:
    """Distillation as a policy gradient. A row with a loss beside its surrogate adds that."""
    if isinstance(o.advantage, str):
        o = replace(o, advantage=on_policy.ADVANTAGES.get(o.advantage, o.advantage))
    made = _policy_gradient(name, spec, o, given)
    if "loss" not in spec.parts:
        return made
    both = on_policy.PolicyAndDistillationLoss(made.loss, DistillationLoss(spec.parts["loss"]))
    return replace(made, loss=both)


# by the kind of the algorithm
BUILDERS: dict[
    str, Callable[[str, AlgorithmSpec, AlgorithmOptions, Mapping[str, Any]], Algorithm]
] = {
    "policy_gradient": _policy_gradient,
    "supervised": build_losses.supervised,
    "paired": build_losses.paired,
    "unpaired": build_losses.unpaired,
    "online": build_losses.online,
    "opposed": build_losses.online,
    "self_play": build_losses.online,
    "best_of": build_losses.online,
    "reward_model": build_losses.reward_model,
    "regression": build_losses.regression,
    "distillation": build_losses.distillation,
    "mixed_distillation": build_losses.distillation,
    "on_policy_distillation": _on_policy,
}

# The keys of the config behind fields of `AlgorithmOptions` that parts take as settings.
KEYS = {
    "clip_low": "clip.low",
    "clip_high": "clip.high",
    "clip_dual": "clip.dual",
    "clip_delta": "clip.delta",
    "cap": "correction.cap",
    "floor": "correction.floor",
    "kl_clamp": "kl.clamp",
}


def _first(
    selection: str | Callable[..., Tensor], settings: AlgorithmSettings
) -> dict[str, tuple[Any, str]]:
    """`options: {top_entropy: 0.2}`: under its own name, a selection's first setting."""
    if not isinstance(selection, str) or selection not in settings.take([selection]):
        return {}
    function = look_up(SELECTIONS, selection, "algorithm.selection")
    return {
        next(iter(settings_of(function))): (
            settings.options[selection],
            f"algorithm.options.{selection}",
        )
    }


def _needs(part: Any, known: Mapping[str, Any]) -> frozenset[str]:
    """The streams that a part reads. A function of a user's says so in an attribute `needs`."""
    if isinstance(part, str):
        return known[part].needs if part in known else frozenset()
    return frozenset(getattr(part, "needs", ()))


def _selected(selection: str | Callable[..., Tensor] | None) -> Selected:
    """What becomes of selected tokens: the selection's own way, or keep for a user's function."""
    if isinstance(selection, str):
        return catalogue.SELECTIONS[selection].selected
    return "keep"


def _advantage(
    o: AlgorithmOptions, settings: AlgorithmSettings, spec: AlgorithmSpec
) -> Callable[[Rollouts], dict[str, Tensor]]:
    """The advantage with its `AdvantageOptions`: settings that it reads, and keyword-only
    parameters of a function of the user's.
    """
    function = settings.bind(ADVANTAGES, o.advantage, "algorithm.advantage")
    elsewhere = {"scale", "std", "eps", "clip", "weights"}  # keys of their own
    names = [f.name for f in fields(AdvantageOptions) if f.name not in elsewhere]
    if isinstance(o.advantage, str):
        names = [name for name in names if name in catalogue.ADVANTAGES[o.advantage].reads]
    chosen = {key: value for key, value in spec.options.items() if key in names}
    chosen |= settings.take(names)
    options = AdvantageOptions(
        scale=o.scale, std=o.std, eps=o.eps, clip=o.advantage_clip, weights=o.weights, **chosen
    )
    return partial(_call, function, options)


def _call(function: Advantage, options: AdvantageOptions, rollouts: Rollouts) -> dict[str, Tensor]:
    """Calls an advantage, checks what it gave, and clips."""
    try:
        values = function(rollouts, options)
    except Exception as error:
        call = "(rollouts, options)"
        told = error_of(function, error, "algorithm.advantage", call, __file__)
        if told is None:
            raise
        raise told from error
    found = dict(values) if isinstance(values, Mapping) else {"advantages": values}
    for name, tensor in found.items():
        _check_values(name_of(function), name, tensor, tuple(rollouts.sequence.shape))
    if options.clip is not None:
        found["advantages"] = found["advantages"].clamp(-options.clip, options.clip)
    return found


def _check_values(function: str, name: str, values: Any, want: tuple[int, ...]) -> None:
    if not isinstance(values, Tensor) or tuple(values.shape) != want:
        got = (
            f"shape {tuple(values.shape)}"
            if isinstance(values, Tensor)
            else f"a {type(values).__name__}"
        )
        raise InputError(
            f"{function} returned {got}, not a tensor of one value per trained token, {want}.",
            where="algorithm.advantage",
            fix="Compute one value per row and index it with rollouts.sequence.",
        )
    if not bool(values.isfinite().all()):
        raise InputError(
            f"{function} returned {name} that are not finite.",
            where="algorithm.advantage",
            fix="Rewards of unscored rows are nan: leave them out, and give their tokens 0.",
        )


def _notes(o: AlgorithmOptions, selected: Selected) -> tuple[str, ...]:
    """What a user should know about a choice that is allowed but biased, or does nothing."""
    notes = []
    if o.kl_coefficient > 0 and isinstance(o.kl_estimator, str):
        notes.append((REWARD_NOTES if o.kl_placement == "reward" else NOTES).get(o.kl_estimator))
        scaled = isinstance(o.advantage, str) and "scale" in catalogue.ADVANTAGES[o.advantage].reads
        if o.kl_placement == "reward" and o.scale != "none" and scaled:
            notes.append(SCALED_NOTE.format(scale=o.scale))
    if o.updates == 1 and o.selection is not None and selected == "penalise":
        notes.append(
            "algorithm.selection: the penalty |log p - old| is 0 in the only update of a batch. "
            "Set algorithm.epochs or algorithm.minibatches above 1."
        )
    against_sampler = (
        isinstance(o.surrogate, str) and catalogue.SURROGATES[o.surrogate].against_sampler
    )
    if against_sampler and o.old != "engine":
        notes.append(
            f"algorithm.surrogate {o.surrogate} is meant against the policy that sampled. Set"
            " algorithm.old engine."
        )
    if o.updates > 1 and not has_ratio(o.surrogate):
        notes.append(
            f"algorithm.surrogate {o.surrogate} has no ratio: the second update of a batch is"
            " off-policy and not corrected. Use one update, or ppo_clip."
        )
    return tuple(note for note in notes if note)


def _check(o: AlgorithmOptions, given: Mapping[str, Any]) -> None:
    buffer = o.overlong_buffer or 0
    if o.clip_dual is not None and o.clip_dual <= 1:
        raise InputError(
            f"dual clip must be above 1, not {o.clip_dual}",
            where="algorithm.clip.dual",
            fix="3.0 is usual.",
        )
    if o.max_new_tokens and buffer > o.max_new_tokens:
        raise InputError(
            f"{buffer} is more than max_new_tokens ({o.max_new_tokens})",
            where="algorithm.overlong_buffer",
            fix="Give the number of last tokens that cost reward, e.g. a fifth of max_new_tokens.",
        )
    if o.old == "engine" and o.correction != "none":
        raise InputError(
            "old log-probs of the engine leave no mismatch to correct.",
            where="algorithm.correction.name",
            fix="Use algorithm.old recompute or auto with a correction, or correction none.",
        )
    if o.kl_target is not None and o.kl_coefficient == 0:
        raise InputError(
            "a coefficient of 0 cannot adapt.",
            where="algorithm.kl.target",
            fix="Start with e.g. algorithm.kl.coefficient 0.05.",
        )
    if (
        "scale" in given
        and isinstance(o.advantage, str)
        and o.advantage in catalogue.ADVANTAGES
        and "scale" not in catalogue.ADVANTAGES[o.advantage].reads
    ):
        raise InputError(
            f"the advantage {o.advantage} is not scaled.",
            where="algorithm.scale",
            fix="Remove this key.",
        )
    if o.selected is not None and o.selection is None:
        raise InputError(
            "there is no selection.", where="algorithm.selected", fix="Set algorithm.selection too."
        )
