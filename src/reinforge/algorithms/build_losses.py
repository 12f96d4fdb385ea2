"""Builders of the algorithms that are a loss: from a row of `catalogue.py` and the settings to an
`Algorithm`.

One function for each `AlgorithmKind` of the catalogue that is no policy gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from reinforge.algorithms.algorithm import Algorithm, AlgorithmOptions
from reinforge.algorithms.catalogue import AlgorithmSpec
from reinforge.algorithms.losses.attributes import AttributeLoss
from reinforge.algorithms.losses.distillation import DIVERGENCES, DistillationLoss
from reinforge.algorithms.losses.nash import NashLoss
from reinforge.algorithms.losses.preference import PREFERENCE, PairLoss
from reinforge.algorithms.losses.reward_model import RewardLoss
from reinforge.algorithms.losses.supervised import DFTLoss, NLLLoss
from reinforge.algorithms.losses.unpaired import UnpairedLoss
from reinforge.algorithms.pairing import PICKS
from reinforge.algorithms.parts.reduce import REDUCERS
from reinforge.algorithms.settings import AlgorithmSettings, settings_of
from reinforge.core.backend import Loss
from reinforge.core.errors import InputError

SUPERVISED: dict[str, Callable[..., Loss]] = {"nll": NLLLoss, "dft": DFTLoss}
# of sampled answers one by one, where others compare two
ANSWER_LOSSES: dict[str, Callable[..., Loss]] = {"nll": NLLLoss, "nash_md": NashLoss}


def _algorithm(name: str, spec: AlgorithmSpec, o: AlgorithmOptions, loss: Loss) -> Algorithm:
    return Algorithm(name, spec.family, spec.paper, loss, o, needs=loss.needs)


def supervised(
    name: str, spec: AlgorithmSpec, o: AlgorithmOptions, given: Mapping[str, Any]
) -> Algorithm:
    settings = AlgorithmSettings(o.settings)
    loss = SUPERVISED[spec.parts["loss"]](settings.bind(REDUCERS, o.reduce, "algorithm.reduce"))
    settings.refuse_unused()
    return _algorithm(name, spec, o, loss)


def _settings(spec: AlgorithmSpec, o: AlgorithmOptions) -> dict[str, Any]:
    """What goes to a loss by name: the row's, the options, and the keys of their own."""
    settings = {**spec.options, **o.settings}
    if o.beta is not None:
        settings["beta"] = o.beta
    if o.label_smoothing is not None:
        settings["label_smoothing"] = o.label_smoothing
    return settings


def paired(
    name: str, spec: AlgorithmSpec, o: AlgorithmOptions, given: Mapping[str, Any]
) -> Algorithm:
    return _algorithm(
        name, spec, o, PairLoss(dict(o.losses) or spec.parts["loss"], **_settings(spec, o))
    )


def unpaired(
    name: str, spec: AlgorithmSpec, o: AlgorithmOptions, given: Mapping[str, Any]
) -> Algorithm:
    if o.losses:
        raise InputError(
            f"{name} judges single answers; several losses are for pairs.",
            where="algorithm.losses",
            fix="Remove it.",
        )
    return _algorithm(name, spec, o, UnpairedLoss(spec.parts["loss"], **_settings(spec, o)))


def online(
    name: str, spec: AlgorithmSpec, o: AlgorithmOptions, given: Mapping[str, Any]
) -> Algorithm:
    """A loss over what is sampled: pairs of it, matches against an opponent, or the best of it."""
    settings = _settings(spec, o)
    function = PICKS[spec.parts["pick"]]
    chosen = {key: settings.pop(key) for key in settings_of(function) if key in settings}
    opponent = _opponent(spec, settings)
    loss = _online_loss(name, spec, o, settings)
    return Algorithm(
        name,
        spec.family,
        spec.paper,
        loss,
        o,
        needs=loss.needs,
        pick=partial(function, **chosen),
        opponent=opponent,
        given=spec.kind.wants_answers,
        notes=_online_notes(name, loss, o),
    )


def _opponent(spec: AlgorithmSpec, settings: dict[str, Any]) -> float | None:
    """Who the opponent is, if there is one: 1 the reference, less a mixture of it and the policy.

    Rows that have a setting `mixture` let the user say; it is taken out of `settings`.
    """
    if spec.kind.opponent == "none":
        return None
    mixture = settings.pop("mixture") if "mixture" in spec.options else 1.0
    if not isinstance(mixture, int | float) or not 0 < mixture <= 1:
        raise InputError(
            f"{mixture!r} is no share of the reference.",
            where="algorithm.options.mixture",
            fix="Give one above 0, up to 1.",
        )
    return mixture


def _online_loss(
    name: str, spec: AlgorithmSpec, o: AlgorithmOptions, settings: dict[str, Any]
) -> Loss:
    term = spec.parts["loss"]
    if term in ANSWER_LOSSES:
        return _answer_loss(name, spec, o, settings)
    loss = PairLoss(dict(o.losses) or term, **settings)
    if loss.ranked:
        why = "ranks the pairs of a whole data set's batch"
    elif PREFERENCE[term].takes == "explore" and term not in loss.rows:
        why = f"leaves the exploration term of {name} out"
    else:
        return loss
    raise InputError(
        f"{next(iter(loss.rows))} {why}.",
        where="algorithm.losses",
        fix="Use a loss that looks at one pair, e.g. sigmoid.",
    )


def _answer_loss(
    name: str, spec: AlgorithmSpec, o: AlgorithmOptions, settings: dict[str, Any]
) -> Loss:
    make = ANSWER_LOSSES[spec.parts["loss"]]
    takes = settings_of(make)
    odd = sorted(settings.keys() - takes.keys())
    if o.losses:
        odd = sorted([*odd, "losses"])
    if odd:
        raise InputError(
            f"{name} has no setting {odd[0]!r}.",
            where="algorithm",
            fix=f"It has: {', '.join(spec.options)}.",
        )
    if takes:
        return make(**settings)
    return make(AlgorithmSettings({}).bind(REDUCERS, o.reduce, "algorithm.reduce"))


def _online_notes(name: str, loss: Loss, o: AlgorithmOptions) -> tuple[str, ...]:
    if isinstance(loss, NashLoss) and o.updates > 1:
        return (
            (
                f"algorithm.epochs, algorithm.minibatches: {name} has no ratio, so the second"
                " update of a batch is off-policy and not corrected."
            ),
        )
    return ()


def distillation(
    name: str, spec: AlgorithmSpec, o: AlgorithmOptions, given: Mapping[str, Any]
) -> Algorithm:
    """`share`, of rows that have one, is not the loss's: how many answers the student samples."""
    divergence = spec.parts["loss"]
    takes = {*settings_of(DIVERGENCES[divergence]), "weight"}
    if "share" in spec.options:
        takes.add("share")
    settings = {**spec.options, **o.settings}
    if odd := settings.keys() - takes:
        raise InputError(
            f"{name} has no setting {sorted(odd)[0]!r}.",
            where="algorithm.options",
            fix=f"It has: {', '.join(sorted(takes))}.",
        )
    k = settings.get("k")
    if k is not None and (not isinstance(k, int) or k < 1):
        raise InputError(
            f"{k!r} is no number of tokens.", where="algorithm.options.k", fix="32 is usual."
        )
    share = settings.pop("share", None)
    reduce = AlgorithmSettings({}).bind(REDUCERS, o.reduce, "algorithm.reduce")
    made = _algorithm(name, spec, o, DistillationLoss(divergence, reduce=reduce, **settings))
    return replace(made, share=None if share is None else float(share))


def reward_model(
    name: str, spec: AlgorithmSpec, o: AlgorithmOptions, given: Mapping[str, Any]
) -> Algorithm:
    settings = {**spec.options, **o.settings}
    if odd := settings.keys() - {"centre"}:
        raise InputError(
            f"{name} has no setting {sorted(odd)[0]!r}.",
            where="algorithm.options",
            fix="It has: centre.",
        )
    loss = RewardLoss(spec.parts["loss"], **settings)
    if loss.centre and loss.unit == 1:
        raise InputError(
            "only pairs leave the zero of the scores open.",
            where="algorithm.options.centre",
            fix="Remove it.",
        )
    return _algorithm(name, spec, o, loss)


def regression(
    name: str, spec: AlgorithmSpec, o: AlgorithmOptions, given: Mapping[str, Any]
) -> Algorithm:
    """One score per answer, or with `attributes` a number for each of them."""
    if not o.attributes:
        return reward_model(name, spec, o, given)
    if o.settings:
        raise InputError(
            f"{name} has no setting {sorted(o.settings)[0]!r}.",
            where="algorithm.options",
            fix="Remove it: attributes have none.",
        )
    return _algorithm(name, spec, o, AttributeLoss(o.attributes))
