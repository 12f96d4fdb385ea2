"""Batch generation to JSONL."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from reinforge.app.runs import open_model
from reinforge.config.schema import DataConfig
from reinforge.core.engine import Sampling
from reinforge.core.sample import Row
from reinforge.core.seeds import seed_of
from reinforge.data.chat import Renderer
from reinforge.data.sources import load_rows
from reinforge.engines.native import NativeEngine
from reinforge.models.load import stop_tokens


async def generate_file(model_name: str, prompts: Path, out: Path, *, n: int, temperature: float, top_p: float, max_new_tokens: int, seed: int,
                        adapter: str | None) -> int:  # fmt: skip
    """One JSON line per completion, in the order of the rows. The file appears whole or not at all."""
    model, config = open_model(model_name, adapter=adapter)
    data = (
        config.data if config else DataConfig(source=str(prompts))
    )  # a run's prompts are rendered as it was trained; what chose its rows is left out
    data = data.model_copy(update={"source": str(prompts), "options": {}, "where": {}, "limit": None})
    rows = load_rows(data)
    renderer = Renderer(model.tokenizer, data)
    engine = NativeEngine(
        model, stop_tokens={*stop_tokens(model), *renderer.stop_tokens}, context=getattr(model.config, "max_position_embeddings", None)
    )
    sampling = Sampling(max_new_tokens, temperature, top_p=top_p)

    async def one(row: Row) -> list[str]:
        completions = await engine.generate(renderer.prompt(row), sampling, key=seed_of(seed, "generate", row.id), n=n)
        return [json.dumps({"id": row.id, "prompt": row.prompt, **_plain(dict(row.columns)), "completion": renderer.decode(c.tokens), "tokens": c.tokens,
                            "logprobs": c.logprobs, "stop": str(c.stop)}, ensure_ascii=False) for c in completions]  # fmt: skip

    lines = [line for part in await asyncio.gather(*(one(row) for row in rows)) for line in part]
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.part")
    temporary.write_text("\n".join(lines) + "\n")
    temporary.replace(out)
    return len(lines)


def _plain(columns: dict[str, object]) -> dict[str, object]:
    return json.loads(json.dumps(columns, default=str))
