"""Builders of the families that train on given rows: from a row of `catalogue.py` and the settings
to a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from reinforge.algorithms.algorithm import Algorithm, Options
from reinforge.algorithms.bind import Binder, settings_of
from reinforge.algorithms.catalogue import Row
from reinforge.algorithms.distillation import DIVERGENCES, DistillationLoss
from reinforge.algorithms.loss import NLLLoss
from reinforge.algorithms.online import NashLoss
from reinforge.algorithms.picks import PICKS
from reinforge.algorithms.preference import PairLoss
from reinforge.algorithms.reduce import REDUCERS
from reinforge.algorithms.reward import RewardLoss
from reinforge.algorithms.supervised import DFTLoss
from reinforge.algorithms.unpaired import UnpairedLoss
from reinforge.core.backend import Loss
from reinforge.core.errors import InputError

SUPERVISED: dict[str, Callable[..., Loss]] = {"nll": NLLLoss, "dft": DFTLoss}


def _algorithm(name: str, row: Row, o: Options, loss: Loss) -> Algorithm:
    return Algorithm(name, row.family, row.paper, loss, o, needs=loss.needs)


def supervised(name: str, row: Row, o: Options, given: Mapping[str, Any]) -> Algorithm:
    binder = Binder(o.settings)
    loss = SUPERVISED[row.parts["loss"]](binder.part(REDUCERS, o.reduce, "algorithm.reduce"))
    binder.finish()
    return _algorithm(name, row, o, loss)


def _settings(row: Row, o: Options) -> dict[str, Any]:
    """What goes to a loss by name: the row's, the options, and the keys of their own."""
    own = {"beta": o.beta, "label_smoothing": o.label_smoothing}
    return {
        **row.options,
        **o.settings,
        **{key: value for key, value in own.items() if value is not None},
    }


def preference(name: str, row: Row, o: Options, given: Mapping[str, Any]) -> Algorithm:
    return _algorithm(
        name, row, o, PairLoss(dict(o.losses) or row.parts["loss"], **_settings(row, o))
    )


def unpaired(name: str, row: Row, o: Options, given: Mapping[str, Any]) -> Algorithm:
    if o.losses:
        raise InputError(
            f"{name} judges single answers; several losses are for pairs.",
            where="algorithm.losses",
            fix="Remove it.",
        )
    return _algorithm(name, row, o, UnpairedLoss(row.parts["loss"], **_settings(row, o)))


def online(name: str, row: Row, o: Options, given: Mapping[str, Any]) -> Algorithm:
    """Preferences over what is sampled.

    `mixture` (of rows that have one) says who the opponent is: 0 the policy, 1 the reference.
    """
    settings = _settings(row, o)
    function = PICKS[row.parts["pick"]]
    pick = partial(
        function, **{key: settings.pop(key) for key in settings_of(function) if key in settings}
    )
    mixture = (
        settings.pop("mixture") if "mixture" in row.options else 1.0 if name == "spin" else None
    )
    if mixture is not None and not (isinstance(mixture, int | float) and 0 < mixture <= 1):
        raise InputError(
            f"{mixture!r} is no share of the reference.",
            where="algorithm.options.mixture",
            fix="Give one above 0, up to 1.",
        )
    loss = _online_loss(name, row, o, settings)
    return Algorithm(
        name,
        row.family,
        row.paper,
        loss,
        o,
        needs=loss.needs,
        pick=pick,
        opponent=mixture,
        given=name == "spin",
        notes=_online_notes(name, o),
    )


def _online_loss(name: str, row: Row, o: Options, settings: dict[str, Any]) -> Loss:
    kind = row.parts["loss"]
    if kind in ("nll", "nash_md"):
        odd = sorted(
            {*settings, *(["losses"] if o.losses else [])}
            - ({"beta"} if kind == "nash_md" else set())
        )
        if odd:
            raise InputError(
                f"{name} has no setting {odd[0]!r}.",
                where="algorithm",
                fix=f"It has: {', '.join(row.options)}.",
            )
        return (
            NLLLoss(Binder({}).part(REDUCERS, o.reduce, "algorithm.reduce"))
            if kind == "nll"
            else NashLoss(**settings)
        )
    loss = PairLoss(dict(o.losses) or kind, **settings)
    if loss.ranked or (name == "xpo" and "xpo" not in loss.rows):
        why = (
            "ranks the pairs of a whole data set's batch"
            if loss.ranked
            else "leaves the exploration term of xpo out"
        )
        raise InputError(
            f"{next(iter(loss.rows))} {why}.",
            where="algorithm.losses",
            fix="Use a loss that looks at one pair, e.g. sigmoid.",
        )
    return loss


def _online_notes(name: str, o: Options) -> tuple[str, ...]:
    if name == "nash_md" and o.updates > 1:
        return (
            (
                "algorithm.epochs, algorithm.minibatches: nash_md has no ratio, so the second"
                " update of a batch is off-policy and not corrected."
            ),
        )
    return ()


def distillation(name: str, row: Row, o: Options, given: Mapping[str, Any]) -> Algorithm:
    """`share` (of gkd) is not the loss's: which answers the student samples itself."""
    kind = row.parts["loss"]
    takes = {
        *settings_of(DIVERGENCES[kind]),
        "weight",
        *(["share"] if row.builder == "gkd" else []),
    }
    settings = {**row.options, **o.settings}
    if odd := settings.keys() - takes:
        raise InputError(
            f"{name} has no setting {sorted(odd)[0]!r}.",
            where="algorithm.options",
            fix=f"It has: {', '.join(sorted(takes))}.",
        )
    settings.pop("share", None)
    reduce = Binder({}).part(REDUCERS, o.reduce, "algorithm.reduce")
    return _algorithm(name, row, o, DistillationLoss(kind, reduce=reduce, **settings))


def reward(name: str, row: Row, o: Options, given: Mapping[str, Any]) -> Algorithm:
    settings = {**row.options, **o.settings}
    if odd := settings.keys() - {"centre"}:
        raise InputError(
            f"{name} has no setting {sorted(odd)[0]!r}.",
            where="algorithm.options",
            fix="It has: centre.",
        )
    loss = RewardLoss(row.parts["loss"], **settings)
    if loss.centre and loss.unit == 1:
        raise InputError(
            "only pairs leave the zero of the scores open.",
            where="algorithm.options.centre",
            fix="Remove it.",
        )
    return _algorithm(name, row, o, loss)
