"""docs/plots/data_show.png: `reinforge data show` of an Alpaca file, as a terminal of 120 columns
shows it.

`python tools/data_picture.py [FOLDER]`: with a folder, pictures of an Alpaca, a ShareGPT, a
preference and a verl source there.
"""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from chromium import Chromium
from rich.console import Console
from transformers import LlamaConfig

from reinforge.cli import show
from reinforge.cli.main import main as reinforge
from reinforge.models.tiny import tiny_tokenizer

COLUMNS = 120
WIDTH = 1020  # pixels: 120 characters and a margin
TARGET = Path(__file__).resolve().parents[1] / "docs" / "plots" / "data_show.png"
PAGE = """<!DOCTYPE html><meta charset="utf-8"><style>
html {{ background: #1b1f24; }}
body {{ margin: 16px 20px; color: #d7dce2; }}
pre {{ font: 13px/1.35 "DejaVu Sans Mono", "Liberation Mono", monospace; margin: 0; }}
</style><body><pre>PROMPT
{code}</pre></body>"""
CAPITALS = ["Paris", "Lima", "Oslo", "Rome", "Cairo", "Quito", "Delhi", "Hanoi", "Accra", "Dakar"]
LAND = [
    "France",
    "Peru",
    "Norway",
    "Italy",
    "Egypt",
    "Ecuador",
    "India",
    "Vietnam",
    "Ghana",
    "Senegal",
]


def alpaca() -> list[dict[str, Any]]:
    rows = [
        {
            "instruction": "Name the capital of the country.",
            "input": land,
            "output": f"The capital of {land} is {city}." + f" {city} has many quarters." * i,
        }
        for i, (land, city) in enumerate(zip(LAND, CAPITALS, strict=True))
    ]
    rows.insert(0, {"instruction": "Write a haiku about rain.", "input": "", "output": HAIKU})
    rows.append({"instruction": "Count to a thousand.", "input": "", "output": "1, 2, 3, " * 400})
    rows.append({"instruction": "Say nothing.", "input": "", "output": ""})
    return rows


HAIKU = "Soft drops on the roof,\nthe garden drinks in silence;\na snail lifts its head."


def sharegpt() -> list[dict[str, Any]]:
    call = json.dumps({"name": "population", "arguments": {"city": "Lima"}})
    tool = {
        "name": "population",
        "description": "How many people live in a city.",
        "parameters": {},
    }
    asked = {
        "system": "You are a geographer.",
        "tools": json.dumps([tool]),
        "conversations": [
            {"from": "human", "value": "How many people live in Lima?"},
            {"from": "function_call", "value": call},
            {"from": "observation", "value": "10,092,000"},
            {"from": "gpt", "value": "About ten million people live in Lima."},
            {"from": "human", "value": "And is it at the sea?"},
            {"from": "gpt", "value": "Yes, it lies at the Pacific coast."},
        ],
    }
    others = [
        {
            "conversations": [
                {"from": "human", "value": f"Where is {city}?"},
                {"from": "gpt", "value": f"It is in {land}."},
            ]
        }
        for land, city in zip(LAND, CAPITALS, strict=True)
    ]
    return [asked, *others]


def pairs() -> list[dict[str, Any]]:
    return [
        {
            "prompt": f"Where is {city}?",
            "chosen": [
                {"role": "user", "content": f"Where is {city}?"},
                {"role": "assistant", "content": f"It is in {land}, where many people live."},
            ],
            "rejected": [
                {"role": "user", "content": f"Where is {city}?"},
                {"role": "assistant", "content": "I do not know."},
            ],
            "score_chosen": 8.5,
            "score_rejected": 2.0,
        }
        for land, city in zip(LAND, CAPITALS, strict=True)
    ]


def verl() -> list[dict[str, Any]]:
    return [
        {
            "data_source": "openai/gsm8k",
            "prompt": [
                {"role": "user", "content": f"Tom has {n} apples and buys {n + 3}. How many?"}
            ],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * n + 3)},
            "extra_info": {"split": "train", "index": n},
        }
        for n in range(40)
    ]


def write_sources(folder: Path) -> dict[str, list[str]]:
    """Files and a tokenizer in a folder; the arguments of `data show` for each picture."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name, rows in (("alpaca", alpaca()), ("sharegpt", sharegpt()), ("pairs", pairs())):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    pq.write_table(pa.Table.from_pylist(verl()), folder / "verl.parquet")
    tokenizer = tiny_tokenizer([json.dumps(alpaca()), json.dumps(sharegpt())], 900)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "eos_token": "<|im_end|>"}
    )
    tokenizer.save_pretrained(folder / "model")
    LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder / "model")
    files = {name: f"{name}.jsonl" for name in ("alpaca", "sharegpt", "pairs")}
    more = {"alpaca": ["--rows", "2"], "sharegpt": ["--rows", "1"], "pairs": ["--rows", "2"]}
    return {
        name: [file, "--model", "model", "model.chat_template=chatml", *more.get(name, [])]
        for name, file in {**files, "verl": "verl.parquet"}.items()
    }


def drawn(arguments: list[str], folder: Path) -> bytes:
    """A picture of what the command prints."""
    recorded = Console(
        file=io.StringIO(),
        record=True,
        force_terminal=True,
        color_system="truecolor",
        width=COLUMNS,
        highlight=False,
    )
    recorded._encoding = "utf-8"  # type: ignore[attr-defined]
    show.console = lambda: recorded
    assert reinforge(["data", "show", *arguments]) == 0
    said = f"<b>$ reinforge data show {' '.join(arguments)}</b>"
    page = folder / "page.html"
    page.write_text(
        recorded.export_html(code_format=PAGE, inline_styles=True).replace("PROMPT", said)
    )
    with Chromium(WIDTH) as browser:
        browser.open(page)
        return browser.picture()


def main(target: Path | None = None) -> None:
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        sources = write_sources(Path(name))
        if target is None:
            TARGET.write_bytes(drawn(sources["alpaca"], Path(name)))
            return
        for kind, arguments in sources.items():
            (target / f"{kind}.png").write_bytes(drawn(arguments, Path(name)))


if __name__ == "__main__":
    main(*(Path(each).resolve() for each in sys.argv[1:]))
