"""The command `serve`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from reinforge.serve.options import KEY, ServeOptions
from reinforge.serve.server import serve as serve_model


def serve(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_RUN", help="Hub id, directory, .gguf file, or the directory of a run."
        ),
    ],
    reward: Annotated[
        bool, typer.Option("--reward", help="MODEL is a reward model: serve scores at /v1/score.")
    ] = False,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Anything but loopback needs a key.")
    ] = ServeOptions.host,
    port: Annotated[
        int, typer.Option(metavar="N", help="Port; 0 takes a free one.", min=0, max=65535)
    ] = ServeOptions.port,
    name: Annotated[
        str | None,
        typer.Option(
            help="The model's name in requests; default: its hub id, or the last part of its path."
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            help=f"Clients must show this key. Better in {KEY}: others can see a command line."
        ),
    ] = None,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            metavar="N", help="Longest completion of a request that names no limit.", min=1
        ),
    ] = ServeOptions.max_new_tokens,
    context: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Tokens of a prompt with its completion; default: the model's own.",
            min=2,
        ),
    ] = None,
    max_batch: Annotated[
        int, typer.Option(metavar="N", help="Sequences decoded at once.", min=1)
    ] = ServeOptions.max_batch,
    max_requests: Annotated[
        int, typer.Option(metavar="N", help="Requests at once; more are answered 429.", min=1)
    ] = ServeOptions.max_requests,
    max_body_mib: Annotated[
        int, typer.Option(metavar="N", help="Largest request; a larger one is answered 413.", min=1)
    ] = ServeOptions.max_body_mib,
    max_completions: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Prompts x n of one request (with --reward: texts); more are answered 400.",
            min=1,
        ),
    ] = ServeOptions.max_completions,
    max_logprobs: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Likeliest tokens that prompt_logprobs may ask for; more are answered 400.",
            min=0,
        ),
    ] = ServeOptions.max_logprobs,
    max_connections: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Open at once; a newcomer takes the place of one that has asked for nothing.",
            min=1,
        ),
    ] = ServeOptions.max_connections,
    header_seconds: Annotated[
        float,
        typer.Option(
            metavar="N",
            help="For the headers of a request to arrive; later it is answered 408.",
            min=0.1,
        ),
    ] = ServeOptions.header_seconds,
    body_seconds: Annotated[
        float,
        typer.Option(
            metavar="N",
            help="For the body of a request to arrive, and for a client to read on.",
            min=0.1,
        ),
    ] = ServeOptions.body_seconds,
    kv_gib: Annotated[
        float | None,
        typer.Option(
            metavar="N", help="Memory of the KV cache; default: from what is free.", min=0.001
        ),
    ] = None,
    checkpoint: Annotated[
        str, typer.Option(help="Of a run: best, latest, or a step.")
    ] = ServeOptions.checkpoint,
    adapter: Annotated[
        str | None, typer.Option(help="A saved adapter to put on the model.")
    ] = None,
) -> None:
    """Serve a model over HTTP with the OpenAI API, or the scores of a reward model.

    [bold]Examples[/bold]

      reinforge serve HuggingFaceTB/SmolLM2-135M-Instruct

      reinforge serve runs/chain-sum --port 8001 --checkpoint best

      reinforge serve --reward my-org/reward-model
    """
    from reinforge.build.serving import load_scorer, load_service

    options = ServeOptions(
        host=host,
        port=port,
        api_key=api_key,
        name=name,
        max_new_tokens=max_new_tokens,
        max_requests=max_requests,
        max_body_mib=max_body_mib,
        max_completions=max_completions,
        max_logprobs=max_logprobs,
        max_connections=max_connections,
        header_seconds=header_seconds,
        body_seconds=body_seconds,
        max_batch=max_batch,
        kv_gib=kv_gib,
        context=context,
        checkpoint=checkpoint,
        adapter=adapter,
    )
    load = load_scorer if reward else load_service
    serve_model(partial(load, model, options), options, reward=reward)
