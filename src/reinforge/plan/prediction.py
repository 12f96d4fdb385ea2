"""What a run is expected to take, as a part of the report of `plan`."""

from __future__ import annotations

from reinforge.backends.memory_model import GIB
from reinforge.build.predict import USABLE, machine_at, predict
from reinforge.config.schema import Config
from reinforge.core.model_facts import ModelFacts
from reinforge.models.freezing import count_trained
from reinforge.models.load import load_config
from reinforge.plan.preflight import PlanReport


def predict_plan(cfg: Config, report: PlanReport) -> None:
    """Adds the prediction to the report of `plan`, from the model's configuration alone, and warns
    where it will not fit.
    """
    counted = report.summary.get("prompt_tokens") or report.summary.get("row_tokens")
    if counted is None:
        return
    machine = machine_at(cfg.model.device)
    adapter = cfg.adapter
    if cfg.model.device.startswith("cuda") and machine.kind != "cuda":
        report.warn(
            "model.device",
            "there is no GPU here that torch can use; memory and time are predicted for this CPU.",
            "Set model.device=auto or cpu if the run is to be on this machine.",
        )
    shape = load_config(cfg.model)
    facts = ModelFacts.of(
        shape.get_text_config(),
        trained=count_trained(shape, cfg.train) if cfg.train.freeze or cfg.train.only else None,
        itemsize=4 if "float32" in (cfg.model.dtype, {"cpu": "float32"}.get(machine.kind)) else 2,
        rank=adapter.rank if adapter else None,
        targets=(
            tuple(adapter.targets) if adapter and not isinstance(adapter.targets, str) else None
        ),
        checkpointing=cfg.model.gradient_checkpointing,
        compiled=cfg.model.compile and machine.kind == "cuda",
        offload=cfg.train.optimizer.offload,
    )
    found = predict(cfg, facts, machine, (counted["median"], min(counted["max"], counted["limit"])))
    report.summary["prediction"] = found
    phase, most = max(
        ((phase, parts["peak"]) for phase, parts in found["memory_gib"].items()),
        key=lambda pair: pair[1],
    )
    if most > USABLE * machine.memory / GIB:
        report.warn(
            "memory",
            f"{phase} is expected to take {most:.1f} GiB, and {machine.name} has"
            f" {machine.memory / GIB:.1f}.",
            "Train an adapter (adapter.rank=16), set model.gradient_checkpointing=true or"
            " train.optimizer.offload=true, or use a smaller model.",
        )
