"""Callbacks that were written for the trainer of transformers, at the events of our runs."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState

from reinforge.config.schema import Config
from reinforge.core.metrics import Metrics
from reinforge.loops.callbacks import Callback
from reinforge.loops.control import RunControl
from reinforge.loops.open_step import RunStep

# our names of what transformers logs under others
LOGGED = {f"train/{name}": name for name in ("loss", "grad_norm", "learning_rate")}


class HuggingFaceCallback(Callback):
    """A `transformers.TrainerCallback` as one of ours; `Callbacks` makes it.

    It gets arguments, state and control as it knows them. Of the control `should_training_stop`,
    `should_save` and `should_evaluate` are honoured, at the end of the step. Metrics have our names
    and, where transformers has others, those too: `loss`, `grad_norm`, `learning_rate`, and
    `eval_reward` for `eval/reward`.
    """

    def __init__(self, callback: TrainerCallback):
        self.callback = callback
        self.state = TrainerState()
        self.control = TrainerControl()
        self.args: Any = None

    def on_begin(self, run: RunControl) -> None:
        self.args = arguments_of(run.config, run)
        self.state.max_steps = run.total
        self.state.logging_steps = self.state.save_steps = self.state.eval_steps = 1
        self._place(run)
        self._tell("on_init_end", run)
        self._tell("on_train_begin", run)
        self._tell("on_epoch_begin", run)
        self._tell("on_step_begin", run)

    def on_advantages(self, run: RunControl, step: RunStep) -> None:
        self._tell("on_pre_optimizer_step", run)

    def on_step(self, run: RunControl, step: RunStep) -> None:
        epoch = int(self.state.epoch or 0)
        self._place(run)
        logs = with_their_names(step.metrics) | {"epoch": self.state.epoch}
        self.state.log_history.append({**logs, "step": run.step})
        self._tell("on_step_end", run)
        self._tell("on_log", run, logs=logs)
        if int(self.state.epoch or 0) > epoch:
            self._tell("on_epoch_end", run)
            self._tell("on_epoch_begin", run)
        if run.step < run.total and run.stopped is None:
            self._tell("on_step_begin", run)

    def on_evaluation(self, run: RunControl, metrics: Metrics) -> None:
        found = with_their_names(metrics)
        self._tell("on_evaluate", run, metrics=found)
        self._note_best(found, run.step)  # afterwards, as their trainer does

    def on_save(self, run: RunControl, path: Path) -> None:
        self._tell("on_save", run)

    def on_end(self, run: RunControl) -> None:
        if run.error is None:
            self._tell("on_epoch_end", run)
            self._tell("on_train_end", run)

    def _place(self, run: RunControl) -> None:
        self.state.global_step = run.step
        self.state.epoch = run.epoch

    def _note_best(self, metrics: dict[str, float], step: int) -> None:
        value = metrics.get(self.args.metric_for_best_model)
        if value is None or math.isnan(value):
            return
        best = self.state.best_metric
        up = self.args.greater_is_better
        if best is None or (value > best if up else value < best):
            self.state.best_metric = value
            self.state.best_global_step = step

    def _tell(self, event: str, run: RunControl, **more: Any) -> None:
        """Calls it, and hands on what its control asks for."""
        control = self.control
        control.should_save = control.should_evaluate = False
        answered = getattr(self.callback, event)(
            self.args, self.state, control, model=run.model, **more
        )
        if answered is not None:
            self.control = control = answered
        if control.should_training_stop:
            run.stop(f"{type(self.callback).__name__} set should_training_stop")
        if control.should_save and run.step:
            run.save()
        if control.should_evaluate and run.can_evaluate:
            run.evaluate()


def with_their_names(metrics: Metrics) -> dict[str, float]:
    """Metrics under our names, and under those of transformers where it has others."""
    theirs = {LOGGED[name]: value for name, value in metrics.items() if name in LOGGED}
    evaluated = {
        name.replace("eval/", "eval_", 1): value
        for name, value in metrics.items()
        if name.startswith("eval/")
    }
    return {**metrics, **theirs, **evaluated}


def arguments_of(config: Config, run: RunControl) -> SimpleNamespace:
    """What callbacks read of the arguments of their trainer, from a configuration of ours."""
    mode, _, best = (config.run.checkpoint.best or "").rpartition(":")
    usual = "eval_reward" if config.algorithm.rl else "eval_loss"
    return SimpleNamespace(
        output_dir=str(run.dir),
        run_name=run.dir.name,
        max_steps=run.total,
        num_train_epochs=config.train.epochs or 1,
        learning_rate=config.train.learning_rate,
        seed=config.run.seed,
        logging_dir=str(run.dir),
        logging_steps=1,
        logging_strategy="steps",
        logging_first_step=True,
        save_steps=config.run.checkpoint.every or run.total,
        save_strategy="steps",
        eval_steps=config.eval.every or run.total,
        eval_strategy="steps" if run.can_evaluate else "no",
        metric_for_best_model=best.replace("eval/", "eval_", 1) or usual,
        greater_is_better=mode != "min" and (best or usual) != "eval_loss",
        load_best_model_at_end=True,
        per_device_train_batch_size=config.train.prompts_per_step,
        gradient_accumulation_steps=1,
        report_to=[],
        disable_tqdm=True,
        world_size=1,
        process_index=0,
        local_rank=-1,
    )
