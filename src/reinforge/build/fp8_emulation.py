"""Products in FP8 where no GPU does them: rounded alike, in other instructions. `plan` warns of it,
and so does a run when it starts.
"""

from __future__ import annotations

import torch

from reinforge.config.schema import Config
from reinforge.core.errors import InputError


def emulation_warning(cfg: Config, device: str) -> InputError | None:
    """What to know of FP8 on a CPU; None: nothing is asked in FP8, or not on a CPU. `device`: as
    `model.device` has it. Which devices the actors of Ray will have is not known here.
    """
    known = cfg.cluster.kind != "ray" and not torch.cuda.is_available()
    if device != "cpu" and not (device == "auto" and known):
        return None
    asked = {"train": cfg.train.precision, "rollout": cfg.rollout.precision}
    keys = [f"{section}.precision" for section, precision in asked.items() if precision == "fp8"]
    if not keys:
        return None
    return InputError(
        "a CPU does not multiply in FP8: numbers are rounded as on a GPU that does, which shows"
        " what is learned and saves neither time nor memory.",
        where=", ".join(keys),
        fix="Leave it out on a CPU, unless that is to be tried.",
    )
