"""The section `model`: which model is trained, and in which precision."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from reinforge.config.base import Checkpointing, Section

# what a model may lie on; every other name is refused before anything is loaded
DEVICES = re.compile(r"auto|cpu|cuda(:\d+)?")
ELSEWHERE = (
    "reinforge computes on CPUs and on NVIDIA GPUs (cuda), and its kernels are for these; set"
    " model.device to cpu, which runs everywhere, or leave it out"
)


COMPILE: Literal["auto"] | bool = False  # what a config without model.compile means


class ModelConfig(Section):
    path: str = Field(description="Hub id, local directory, or .gguf file.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description=(
            "Precision of the module. auto: bfloat16 on a GPU, float32 on a CPU. bfloat16 always"
            " keeps float32 master weights."
        ),
    )
    device: str = Field(
        "auto",
        description=(
            "auto, cpu, cuda or cuda:N. auto: the first NVIDIA GPU if there is one, or the CPU."
            " Apple's mps, Intel's xpu, hpu and others are refused."
        ),
    )
    revision: str | None = Field(None, description="Hub revision (commit, tag or branch).")
    tokenizer: str | None = Field(
        None, description="Take the tokenizer from here instead of from path."
    )
    trust_remote_code: bool = Field(
        False,
        description=(
            "Run Python code that the directories of path and tokenizer bring along, with all your"
            " rights. Only if you have read it."
        ),
    )
    chat_template: str | None = Field(
        None,
        description=(
            "A name (docs/data.md has them: chatml, llama3, ...) or a jinja file: the chat template"
            " in place of the tokenizer's own, if it has one."
        ),
    )
    compile: Literal["auto"] | bool = Field(
        COMPILE,
        description=(
            "torch.compile the layers on a GPU: faster training after some seconds of compiling."
            " auto: where the steps of the run save more than compiling takes, chosen once and"
            " recorded; see docs/hardware.md."
        ),
    )
    gradient_checkpointing: Checkpointing = Field(
        False,
        description=(
            "Recompute activations in the backward pass: less memory, about a third more time."
            " host: the inputs of layers, which are all that is kept, wait in host memory (pinned;"
            " layers x hidden size x bytes of a number for each token of a micro-batch), for rows"
            " of 100k tokens and more. On a CPU as true."
        ),
    )
    exact: bool = Field(
        False,
        description=(
            "Log-probs of sampling and training are bit-identical: no mismatch, nothing to correct."
            " Slower: see benchmarks/exact_cost.py."
        ),
    )

    @field_validator("device")
    @classmethod
    def _known_device(cls, name: str) -> str:
        if not DEVICES.fullmatch(name):
            raise ValueError(f"{name!r} is no device that models are trained on: {ELSEWHERE}")
        return name

    @model_validator(mode="after")
    def _exact_is_not_compiled(self) -> ModelConfig:
        if self.exact and self.compile is True:
            raise ValueError(
                "model.exact: compiled layers may add up in another order for another number of"
                " tokens; set model.compile to false"
            )
        return self
