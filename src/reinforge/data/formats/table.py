"""The formats of rows that are recognised: by which columns, what becomes of them, and what they
serve for. Loading, `reinforge data show`, error messages and docs/data.md read this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from reinforge.data.formats import graded, instructions, pairs, tasks, turns
from reinforge.data.formats.columns import Record, has

Fits = Callable[[Record], bool]
Read = Callable[[Record, str], dict[str, Any]]

RL = "RL"
SFT = "SFT"
PAIRS = "pairs"  # preference losses and reward models
JUDGED = "KTO"
STEPS = "process rewards"
GRADED = "attribute models"
TEXT = "pre-training"


@dataclass(frozen=True, kw_only=True)
class Format:
    """One kind of row. Made here, asked by `recognise.py`.

    A row has it if it has one column of every group in `columns` and `fits` says so. `prompt` and
    `answers` give our columns of it; `prompt` is not asked where data.template makes the prompt.
    """

    columns: tuple[tuple[str, ...], ...]
    more: tuple[str, ...] = ()  # columns that are read where they are there
    # our column -> what it is made of: parts with " + " between them, each a column, the first of
    # several (a|b), or words
    becomes: Mapping[str, str]
    serves: tuple[str, ...]
    known: str = ""  # data sets that look like this
    fits: Fits = field(default=lambda record: True)
    prompt: Read = field(default=lambda record, place: {})
    answers: Read = field(default=lambda record, place: {})

    @property
    def names(self) -> tuple[str, ...]:
        """All columns that are looked at."""
        return (*(name for group in self.columns for name in group), *self.more)

    def missing(self, record: Record) -> list[str]:
        """The groups of columns that a row does not have, as text."""
        return [" or ".join(group) for group in self.columns if not has(record, *group)]


_TALK = (*turns.TALKS, "messages")
_SIDES = (("chosen",), ("rejected",))

# the first that fits a row is its format
FORMATS: dict[str, Format] = {
    "verl": Format(
        columns=(("prompt",), ("reward_model",)),
        more=("data_source", "ability", "extra_info"),
        becomes={"prompt": "prompt", "answer": "reward_model.ground_truth"},
        serves=(RL,),
        known="parquet files of verl",
        fits=tasks.is_verl,
        answers=tasks.verl,
    ),
    "openai_pairs": Format(
        columns=(("input",), ("preferred_output",), ("non_preferred_output",)),
        becomes={
            "prompt": "input.messages",
            "chosen": "preferred_output",
            "rejected": "non_preferred_output",
        },
        serves=(PAIRS, RL),
        known="OpenAI's preference fine-tuning",
        fits=pairs.is_openai_pair,
        prompt=pairs.openai_question,
        answers=pairs.openai_answers,
    ),
    "hh": Format(
        columns=_SIDES,
        becomes={
            "prompt": "the turns that both begin with",
            "chosen": "the rest of chosen",
            "rejected": "the rest of rejected",
        },
        serves=(PAIRS, RL),
        known="Anthropic/hh-rlhf",
        fits=pairs.is_hh,
        answers=pairs.hh,
    ),
    "ultrafeedback": Format(
        columns=_SIDES,
        more=("score_chosen", "score_rejected", "messages"),
        becomes={
            "prompt": "the messages that both begin with",
            "chosen": "the rest of chosen",
            "rejected": "the rest of rejected",
        },
        serves=(PAIRS, RL),
        known="HuggingFaceH4/ultrafeedback_binarized, TRL's implicit prompts",
        fits=pairs.is_conversation_pair,
        answers=pairs.conversation_pair,
    ),
    "sharegpt_pairs": Format(
        columns=(_TALK, *_SIDES),
        more=("system", "tools"),
        becomes={
            "prompt": "system + conversations|conversation|messages",
            "chosen": "chosen",
            "rejected": "rejected",
        },
        serves=(PAIRS, RL),
        known="LLaMA-Factory's ranking files",
        fits=turns.is_sharegpt,
        prompt=turns.sharegpt_question,
        answers=turns.sides,
    ),
    "orca_pairs": Format(
        columns=(("question",), tasks.SYSTEMS, *_SIDES),
        becomes={
            "prompt": "system_prompt|system + question",
            "chosen": "chosen",
            "rejected": "rejected",
        },
        serves=(PAIRS, RL),
        known="Intel/orca_dpo_pairs",
        prompt=tasks.orca_question,
        answers=pairs.answers,
    ),
    "alpaca_pairs": Format(
        columns=(instructions.ASKS, *_SIDES),
        more=("input", "context", "system", "history"),
        becomes={
            "prompt": "system + history + instruction + input|context",
            "chosen": "chosen",
            "rejected": "rejected",
        },
        serves=(PAIRS, RL),
        known="LLaMA-Factory's ranking files",
        fits=instructions.is_alpaca,
        prompt=instructions.question,
        answers=pairs.answers,
    ),
    "text_pairs": Format(
        columns=_SIDES,
        becomes={
            "prompt": "the words that both begin with",
            "chosen": "the rest of chosen",
            "rejected": "the rest of rejected",
        },
        serves=(PAIRS, RL),
        fits=lambda record: pairs.is_text_pair(record) and not has(record, "messages"),
        prompt=pairs.text_pair,
        answers=pairs.answers,
    ),
    "pairs": Format(
        columns=(("prompt", "question", "messages"), *_SIDES),
        more=("score_chosen", "score_rejected", "margin", "tools"),
        becomes={
            "prompt": "prompt|question|messages",
            "chosen": "chosen",
            "rejected": "rejected",
        },
        serves=(PAIRS, RL),
        known="TRL's explicit prompts",
        answers=pairs.answers,
    ),
    "steps": Format(
        columns=(("prompt", "question"), ("steps", "completions"), ("labels",)),
        becomes={
            "prompt": "prompt|question",
            "steps": "steps|completions",
            "labels": "labels",
        },
        serves=(STEPS,),
        known="TRL's stepwise supervision",
    ),
    "kto": Format(
        columns=(("prompt", "question"), ("completion", "response"), ("label",)),
        becomes={
            "prompt": "prompt|question",
            "completion": "completion|response",
            "label": "label",
        },
        serves=(JUDGED, SFT, RL),
        known="TRL's KTO files",
        answers=tasks.response,
    ),
    "alpaca_kto": Format(
        columns=(instructions.ASKS, ("kto_tag",)),
        more=("input", "context", "output", "response", "system", "history"),
        becomes={
            "prompt": "system + history + instruction + input|context",
            "completion": "output|response",
            "label": "kto_tag",
        },
        serves=(JUDGED, SFT, RL),
        known="LLaMA-Factory's KTO files",
        fits=instructions.is_alpaca,
        prompt=instructions.question,
        answers=instructions.output,
    ),
    "sharegpt_kto": Format(
        columns=(_TALK, ("kto_tag",)),
        more=("system", "tools"),
        becomes={
            "prompt": "system + all turns but the last",
            "completion": "the last turn",
            "label": "kto_tag",
        },
        serves=(JUDGED, SFT, RL),
        known="LLaMA-Factory's KTO files",
        fits=turns.is_sharegpt,
        prompt=turns.sharegpt_judged,
    ),
    "reasoning": Format(
        columns=(("problem",),),
        more=("messages", "generations", *tasks.THOUGHTS, "solution", "answer"),
        becomes={
            "prompt": "problem",
            "completion": f"messages|generations|{'|'.join(tasks.THOUGHTS)}|solution",
            "answer": "answer",
        },
        serves=(SFT, RL),
        known="open-r1/OpenR1-Math-220k, NuminaMath, MATH, DeepScaleR",
        fits=tasks.is_problem,
        prompt=tasks.problem,
        answers=tasks.trace,
    ),
    "rlvr": Format(
        columns=(("messages",), ("ground_truth",)),
        becomes={"prompt": "messages up to the answer", "answer": "ground_truth"},
        serves=(RL, SFT),
        known="allenai's RLVR sets",
        fits=lambda record: not turns.is_sharegpt(record),
        answers=tasks.rlvr,
    ),
    "capybara": Format(
        columns=(turns.TALKS,),
        more=("system",),
        becomes={"messages": "system + input and output of every turn"},
        serves=(SFT, RL),
        known="LDJnr/Capybara",
        fits=turns.is_capybara,
        prompt=turns.capybara,
    ),
    "sharegpt": Format(
        columns=(_TALK,),
        more=("system", "tools"),
        becomes={"messages": "system + conversations|conversation|messages"},
        serves=(SFT, RL),
        known="ShareGPT, Vicuna, OpenThoughts, LLaMA-Factory",
        fits=turns.is_sharegpt,
        prompt=turns.sharegpt,
    ),
    "messages": Format(
        columns=(("messages",),),
        more=("prompt", "question", "tools"),
        becomes={"prompt": "prompt|question|messages up to the answer", "messages": "messages"},
        serves=(SFT, RL),
        known="OpenAI's fine-tuning (tools, weight), TRL, UltraChat",
    ),
    "orca": Format(
        columns=(("question",), tasks.SYSTEMS, ("response",)),
        becomes={"prompt": "system_prompt|system + question", "completion": "response"},
        serves=(SFT, RL),
        known="Open-Orca/OpenOrca",
        prompt=tasks.orca_question,
        answers=tasks.response,
    ),
    "helpsteer": Format(
        columns=(("prompt",), ("completion", "response"), ("helpfulness",)),
        more=(*graded.ATTRIBUTES, "tools"),
        becomes={
            "prompt": "prompt",
            "completion": "completion|response",
            **{name: name for name in graded.ATTRIBUTES},
        },
        serves=(GRADED, SFT, RL),
        known="nvidia/HelpSteer, nvidia/HelpSteer2, files of `reinforge score`",
        fits=graded.is_graded,
        prompt=graded.conversation,
        answers=tasks.response,
    ),
    "prompt_completion": Format(
        columns=(("prompt", "question"), ("completion", "response")),
        more=("score", "answer", "tools"),
        becomes={
            "prompt": "prompt|question",
            "completion": "completion|response",
            "answer": "answer",
        },
        serves=(SFT, RL),
        known="TRL",
        answers=tasks.response,
    ),
    "alpaca": Format(
        columns=(instructions.ASKS,),
        more=("input", "context", "output", "response", "system", "history"),
        becomes={
            "prompt": "system + history + instruction + input|context",
            "completion": "output|response",
        },
        serves=(SFT, RL),
        known="tatsu-lab/alpaca, databricks-dolly-15k",
        fits=instructions.is_alpaca,
        prompt=instructions.question,
        answers=instructions.output,
    ),
    "query": Format(
        columns=(("query",), ("response",)),
        becomes={"prompt": "query", "completion": "response"},
        serves=(SFT, RL),
        known="meta-math/MetaMathQA",
        fits=lambda record: not has(record, "prompt", "question", "text"),
        prompt=tasks.query,
        answers=tasks.response,
    ),
    "prompt": Format(
        columns=(("prompt", "question"),),
        more=("answer", "tools"),
        becomes={"prompt": "prompt|question", "answer": "answer"},
        serves=(RL,),
        known="openai/gsm8k, DAPO",
    ),
    "text": Format(
        columns=(("text",),),
        becomes={"text": "text"},
        serves=(TEXT, RL),
        known="FineWeb, any corpus",
    ),
}
