"""Exports a model: a directory that transformers, peft and every serving engine load as it is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reinforge.build.saved_model import checkpoint_of, is_run, load_weights
from reinforge.config.adapter import AdapterConfig
from reinforge.config.load import config_from_dict
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.core.files import readable_as_usual
from reinforge.core.hub_trouble import hub_error, hub_token
from reinforge.data.chat import Renderer
from reinforge.models.adapters import as_it_begins, merged
from reinforge.models.causal import CausalModel
from reinforge.models.load import (
    load_model,
    load_scalar,
    stop_tokens,
    without_quantization,
)
from reinforge.models.save import attend_as_transformers, writing
from reinforge.models.scalar import ScalarModel
from reinforge.offline.card import Form, card
from reinforge.offline.gguf_file import PRECISIONS, gguf_package, write_gguf

PUSH = "--push"


def export(
    run: Path,
    out: Path,
    *,
    checkpoint: str = "latest",
    merge: bool = False,
    gguf: str | None = None,
    push: str | None = None,
    lineage: Sequence[str] = (),
    parent: str | None = None,
) -> Path:
    """Writes model (or adapter, or reward model), tokenizer, chat template, generation config and a
    model card to `out`. `merge` folds the adapter into the weights; where the run kept an average
    of the weights (train.ema), it is exported. `gguf`: a precision (f16, bf16, f32) in which the
    model is also written as a file for llama.cpp. `push` is a hub id to upload the directory to.
    `lineage` and `parent` are for the card: the steps up to this one, and what it was made from
    where the path of that means nothing.
    """
    if not is_run(run):
        raise InputError(
            f"{run} is not a run directory.",
            where="export",
            fix="Give the run.dir of a training run, or of a pipeline's stage.",
        )
    if out.exists() and (out.is_file() or any(out.iterdir())):
        raise InputError(
            f"{out} is not empty.",
            where="export",
            fix="Choose another directory, or empty it first.",
        )
    token = hub_token(PUSH) if push else None  # before anything is written
    config = config_from_dict(
        json.loads((run / "config.json").read_text()), where=str(run / "config.json")
    )
    if gguf is not None:
        check_gguf(config, merge, gguf)
    if config.adapter is not None and config.train.router_bias_rate and not merge:
        raise InputError(
            "the biases of the routers were trained beside the adapter (train.router_bias_rate),"
            " and the file of an adapter has no place for them: on its base it would choose other"
            " experts.",
            where="export",
            fix="Add --merge (Python: merge=True).",
        )
    write = _write_scores if config.algorithm.family == "reward" else _write_model
    form = write(config, run, out, checkpoint, merge)
    if gguf is not None:
        write_gguf(out, gguf)
    text = card(
        run,
        config,
        form,
        checkpoint_of(run, checkpoint).name,
        averaged=config.train.ema is not None,
        lineage=lineage,
        parent=parent,
    )
    (out / "README.md").write_text(text, encoding="utf-8")
    if push is not None and token is not None:
        upload(out, push, token)
    return out


def check_gguf(config: Config, merge: bool, precision: str) -> None:
    """Before anything is loaded: whether there will be a whole model to write."""
    if precision not in PRECISIONS:
        raise InputError(
            f"there is no precision {precision!r}.",
            where="--gguf",
            fix=f"Give one of {', '.join(PRECISIONS)}.",
        )
    if config.algorithm.family == "reward":
        raise InputError(
            "llama.cpp does not load reward models.", where="--gguf", fix="Export without --gguf."
        )
    if config.adapter is not None and not merge:
        raise InputError(
            "a GGUF file has a whole model, and this run trained an adapter.",
            where="--gguf",
            fix="Add --merge.",
        )
    gguf_package()


def _write_model(config: Config, run: Path, out: Path, checkpoint: str, merge: bool) -> Form:
    model = load_model(
        config.model.model_copy(update={"exact": False, "compile": False}), config.adapter
    )
    if config.adapter is not None and not merge:
        _write_adapter(model, config.adapter, config, run, out, checkpoint)
        return "adapter"
    load_weights(model, run, checkpoint)
    module: Any = model.module
    if config.adapter is not None:
        module = merged(module)
    attend_as_transformers(model.causal)
    _end_of_turn(model, config)
    if config.adapter is not None and config.adapter.kind == "qlora":
        module = without_quantization(module, model.dtype)
    with writing():
        module.save_pretrained(out)
    model.tokenizer.save_pretrained(out)
    readable_as_usual(*out.glob("*.safetensors"))
    return "model"


def _write_adapter(
    model: CausalModel,
    adapter: AdapterConfig,
    config: Config,
    run: Path,
    out: Path,
    checkpoint: str,
) -> None:
    """The adapter alone, as peft writes it, for the base that `model.path` names."""
    module: Any = model.module
    with as_it_begins(module, adapter) as begun:
        load_weights(model, run, checkpoint)
        _known_base(module, config.model.path)
        with writing():
            module.save_pretrained(out, **begun)
    _end_of_turn(model, config)
    model.causal.generation_config.save_pretrained(out)
    model.tokenizer.save_pretrained(out)
    readable_as_usual(*out.glob("*.safetensors"))


def _write_scores(config: Config, run: Path, out: Path, checkpoint: str, merge: bool) -> Form:
    """A reward model: a sequence-classification checkpoint with one label, or one for each of its
    attributes; its adapter is always merged.
    """
    model = load_scalar(
        config.model.model_copy(update={"compile": False}),
        config.adapter,
        fresh=True,
        attributes=tuple(config.algorithm.attributes),
    )
    load_weights(model, run, checkpoint)
    if config.adapter is not None:
        model = ScalarModel(merged(model.module), model.tokenizer, attributes=None)
    model.save(out)
    return "reward model"


def _end_of_turn(model: CausalModel, config: Config) -> None:
    """The generation config names every token that ended a completion here (that of the chat
    template too), or servers talk on.
    """
    generation = model.causal.generation_config
    ends = sorted({*stop_tokens(model), *Renderer(model.tokenizer, config.data).stop_tokens})
    if ends:
        generation.eos_token_id = ends if len(ends) > 1 else ends[0]
    if generation.pad_token_id is None:
        generation.pad_token_id = model.tokenizer.pad_token_id


def _known_base(module: Any, path: str) -> None:
    """An adapter names its base by hub id, or by an absolute path: a relative one would mean
    something else elsewhere.
    """
    for adapter in module.peft_config.values():
        adapter.base_model_name_or_path = (
            str(Path(path).expanduser().resolve()) if Path(path).expanduser().exists() else path
        )


def upload(folder: Path, repo: str, token: str) -> None:
    """Puts the directory onto the hub, in a private repository if there is none of this name."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    api = HfApi(token=token)
    try:
        api.create_repo(repo, private=True, exist_ok=True)
        api.upload_folder(
            repo_id=repo, folder_path=str(folder), commit_message="Exported with reinforge"
        )
    except (HFValidationError, OSError, RuntimeError, ValueError) as error:
        complete = f"The export itself is complete in {folder}."
        told = hub_error(error, repo, PUSH)
        raise InputError(
            f"could not upload to {repo}: {told.what}",
            where=PUSH,
            fix=f"{told.fix} {complete}" if told.fix else complete,
        ) from error
