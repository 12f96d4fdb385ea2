"""Options of commands that can ask an OpenAI-compatible server in place of a model, and a judge."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from reinforge.engines.openai import OpenAIServer

KEY = "REINFORGE_API_KEY"
# groups of options on the help page: each is laid out by itself, so that a long name in one does
# not take the room of the others
A_SERVER = "Ask a server instead"
SCORES = "Scores"
ServerUrl = Annotated[
    str | None,
    typer.Option(
        "--server",
        rich_help_panel=A_SERVER,
        help="Ask this OpenAI-compatible server instead, e.g. http://127.0.0.1:8000/v1.",
    ),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model-name",
        rich_help_panel=A_SERVER,
        help="The server's name for the model; default: its only one.",
    ),
]
ApiKeyEnv = Annotated[
    str,
    typer.Option(
        "--api-key-env",
        rich_help_panel=A_SERVER,
        help="The environment variable with the key of servers.",
    ),
]
Parallel = Annotated[
    int,
    typer.Option(
        "--parallel",
        metavar="N",
        rich_help_panel=A_SERVER,
        help="Requests to a server at once.",
        min=1,
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(
        "--rate",
        metavar="N",
        rich_help_panel=A_SERVER,
        help="Requests to a server per minute, at most.",
        min=0.001,
    ),
]
JudgeAddress = Annotated[
    str | None,
    typer.Option(rich_help_panel=SCORES, help="Have the model of this server judge completions."),
]
JudgeModel = Annotated[
    str | None,
    typer.Option(rich_help_panel=SCORES, help="The judge's name there; default: its only model."),
]
JudgeMode = Annotated[
    Literal["score", "pairwise"],
    typer.Option(
        rich_help_panel=SCORES, help="A score from 0 to 10, or the share of comparisons won."
    ),
]
JudgePrompt = Annotated[
    Path | None,
    typer.Option(
        rich_help_panel=SCORES,
        help="A file with the judge's prompt: {prompt} and {completion}, or {a} and {b}.",
    ),
]


def server_of(
    url: str, model_name: str | None, api_key_env: str, parallel: int, rate: float | None
) -> OpenAIServer:
    from reinforge.engines.openai import OpenAIServer

    return OpenAIServer(url, model_name, os.environ.get(api_key_env) or None, parallel, rate)
