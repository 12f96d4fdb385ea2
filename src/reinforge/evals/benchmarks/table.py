"""The presets by name."""

from __future__ import annotations

from reinforge.core.errors import InputError
from reinforge.data.readers import did_you_mean
from reinforge.evals.benchmarks.gsm8k import Gsm8k
from reinforge.evals.benchmarks.humaneval import HumanEval
from reinforge.evals.benchmarks.ifeval import IfEval
from reinforge.evals.benchmarks.math import Math
from reinforge.evals.benchmarks.mmlu import Mmlu
from reinforge.evals.benchmarks.preset import Preset

PRESETS: dict[str, Preset] = {
    preset.name: preset for preset in (Gsm8k(), Math(), Mmlu(), IfEval(), HumanEval())
}


def preset_of(name: str, where: str = "--tasks") -> Preset:
    if name not in PRESETS:
        raise InputError(
            f"there is no benchmark {name!r}.", where=where, fix=did_you_mean(name, PRESETS)
        )
    return PRESETS[name]
