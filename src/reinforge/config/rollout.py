"""The section `rollout`: how completions are sampled."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from reinforge.config.base import Count, Fraction, Natural, Positive, Precision, Section
from reinforge.config.engine import SERVERS, EngineName
from reinforge.config.structured import StructuredConfig


class SpeculationConfig(Section):
    """The section `rollout.speculation`: drafts that one forward verifies together."""

    when: Literal["never", "tail", "always"] = Field(
        "never",
        description=(
            "Whether the native engine guesses the next tokens from what is at hand (the text"
            " itself, finished siblings, earlier answers to the same prompt) and verifies several"
            " in one forward; tokens are those that it would draw without. tail: while at most"
            " `rows` sequences are decoded."
        ),
    )
    drafts: Count = Field(3, le=16, description="Tokens that are guessed at once.")
    rows: Count = Field(32, description="Sequences alive up to which `tail` guesses.")
    memory: Count = Field(4_194_304, description="Tokens of finished answers that are remembered.")


class RolloutConfig(Section):
    staleness: Natural = Field(
        0,
        description=(
            "Steps that rollouts may be ahead of training. 0: on-policy. With 1, rewards of a step"
            " are computed while others generate and train."
        ),
    )
    overlap: bool = Field(
        False,
        description=(
            "With staleness and the native engine in one process: it has a copy of what is trained,"
            " and generates while a step trains. Tokens and weights are those of the same run"
            " without, as seen on a CPU and on an H200."
        ),
    )
    partial: bool = Field(
        False,
        description=(
            "Groups that are not generated when a step has enough go on in the next one, at most"
            " `staleness` steps later. Needs sampling.over_provision above 1: that many prompts are"
            " under way for each one that is trained."
        ),
    )
    kept: str | None = Field(
        None,
        description=(
            "The directory of a run with run.keep_rollouts: its rollouts are trained on, step by"
            " step, and nothing is generated. Other rewards than that run's are asked about its"
            " answers."
        ),
    )
    engine: EngineName = Field(
        "native",
        description=(
            "native: the trainer's own module generates; nothing is copied."
            f" {', '.join(SERVERS)}: servers, see the section engine."
        ),
    )
    temperature: Positive = Field(
        1.0, description="Of sampling, and of the log-probs that are trained."
    )
    max_new_tokens: Count = Field(
        256, description="Longest completion; longer ones are cut and count as truncated."
    )
    top_p: Fraction = Field(1.0, description="Refused in RL unless 1; see eval.top_p.")
    top_k: Natural = Field(0, description="Refused in RL unless 0 (off).")
    min_p: Fraction = Field(0.0, description="Refused in RL unless 0 (off).")
    stop: list[str] = Field([], description="Strings that end a completion.")
    structured: StructuredConfig | None = Field(
        None,
        description=(
            "The form that every answer must have. Training computes log-probs under the same"
            " constraint; see docs/structured.md."
        ),
    )
    max_batch: Count = Field(512, description="Sequences decoded at once.")
    all_ranks: Literal["auto"] | bool = Field(
        "auto",
        description=(
            "fsdp, deepspeed, megatron, with the native engine: every rank has a whole copy of the"
            " model and generates a share. auto: on GPUs, for answers of one turn; see"
            " docs/distributed.md."
        ),
    )
    kv_gib: Positive | None = Field(
        None,
        description=(
            "Memory of the KV cache; default: what training does not need while the engine"
            " generates, computed once, then recorded; see docs/engines.md."
        ),
    )
    precision: Precision = Field(
        "model",
        description=(
            "Of the matrix products of the decoder layers in generation. model: as model.dtype."
            " fp8: weights and activations in FP8, the weights from a copy that is made again"
            " after every update; half the bytes to read, and log-probs that differ more from the"
            " trainer's (train.precision: fp8 trains with the same product). See docs/engines.md."
        ),
    )
    cache_precision: Precision = Field(
        "model",
        description=(
            "Of keys and values in the KV cache. fp8: half the bytes, so that nearly twice as many"
            " tokens fit and attention over long answers reads half as much."
        ),
    )
    prefix_cache: bool = Field(
        False,
        description=(
            "Keep what was computed under the same weights: a conversation that goes on computes"
            " only what is new."
        ),
    )
    speculation: SpeculationConfig = Field(
        SpeculationConfig(),
        description="Lossless speculative decoding of the native engine; see docs/engines.md.",
    )
    on_reward_error: Literal["unscored", "raise"] = Field(
        "raise",
        description=(
            "A reward that raises or returns nonsense: stop, or leave the sample unscored and"
            " count it."
        ),
    )
