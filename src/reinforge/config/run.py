"""The section `run`: where everything is written, checkpoints and logs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from reinforge.config.base import Count, Natural, Positive, Section
from reinforge.config.doctor import DoctorConfig


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"got {text!r}, expected host:port, such as 127.0.0.1:9464.")
    return text


Address = Annotated[str, AfterValidator(_address)]


class CheckpointConfig(Section):
    sharded: Literal["auto"] | bool = Field(
        "auto",
        description=(
            "fsdp: every rank writes its own part, and nothing is gathered. auto: above 16 GiB, and"
            " always with cluster.kind=ray. All ranks must see run.dir."
        ),
    )
    background: bool = Field(
        False,
        description=(
            "A step pays for a copy in host memory only, and a thread writes it while the run goes"
            " on. The next checkpoint and the end of the run wait for it."
        ),
    )
    every: Natural = Field(50, description="Steps between checkpoints; 0 = only at the end.")
    keep: Count = Field(2, description="How many of the newest stay on disk.")
    best: str | None = Field(
        None,
        description=(
            "Also keep the checkpoint that is best by this evaluation metric, e.g. eval/accuracy"
            " (max:) or min:eval/loss."
        ),
    )


class LogConfig(Section):
    samples_every: Natural = Field(
        10,
        description=(
            "Steps between tables of prompts, completions and rewards, which the last step has"
            " too; 0 = never."
        ),
    )
    samples: Count = Field(4, description="Rows in such a table.")
    groups: Natural = Field(
        8,
        description=(
            "Groups whose numbers, from rewards to advantages to loss, are recorded in these steps"
            " for `reinforge runs why`; 0 = none."
        ),
    )
    tokens: Literal["summary", "all"] = Field(
        "summary",
        description=(
            "Of the tokens of these groups: means and extremes per answer, or all of them, each"
            " with its advantage, log-probs and ratio."
        ),
    )
    sinks: list[Literal["tensorboard", "wandb", "mlflow", "trackio", "prometheus"]] = Field(
        [],
        description=(
            "Trackers that get metrics, tables of samples and files, besides metrics.jsonl, which"
            " is always written."
        ),
    )
    project: str = Field("reinforge", description="Project name for wandb, mlflow and trackio.")
    artifacts: Literal["none", "record", "checkpoints"] = Field(
        "record",
        description=(
            "Files that wandb, mlflow and trackio keep. record: configuration, versions, summary"
            " and report, at the end of the run. checkpoints: also every checkpoint, whole, once it"
            " is saved."
        ),
    )
    prometheus: Address = Field(
        "127.0.0.1:9464",
        description="Where the sink prometheus answers GET /metrics, host:port.",
    )


class HubConfig(Section):
    """A repository on the hub that holds the newest checkpoint of the run and its record."""

    repo: str = Field(
        description=(
            "Hub id (org/name). Every checkpoint is pushed there; a run whose dir has none, or an"
            " older one, goes on with it. Needs a token that may write (HF_TOKEN, or a login)."
        )
    )
    private: bool = Field(True, description="Whether the repository is private, if it is new.")


class RunConfig(Section):
    dir: str = Field(description="Everything the run writes goes here.")
    seed: int = Field(0, description="Every random draw of the run is a function of it.")
    resume: Literal["auto", "never", "must"] = Field(
        "auto",
        description=(
            "auto: continue from the newest checkpoint in dir if there is one. never: refuse a"
            " directory that has one."
        ),
    )
    max_seconds: Positive | None = Field(
        None,
        description=(
            "End the run after this many seconds of training, evaluations and checkpoints not"
            " counted."
        ),
    )
    keep_rollouts: bool = Field(
        False,
        description=(
            "Keep the rollouts of every step on disk (the folder rollouts), so that another run can"
            " train on them: rollout.kept."
        ),
    )
    checkpoint: CheckpointConfig = CheckpointConfig()
    hub: HubConfig | None = Field(None, description="Keep the run on the hub too.")
    log: LogConfig = LogConfig()
    doctor: DoctorConfig = Field(
        DoctorConfig(), description="What is done about each illness that the doctor finds."
    )
