"""Scores over HTTP are the reward model's."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from helpers.chat_server import TEMPLATE, serving
from helpers.offline_runs import PAIRS, config, launch, small_model
from helpers.toy_scalars import make_classifier
from reinforge.build.serving import load_scorer
from reinforge.core.errors import InputError
from reinforge.offline.export import export
from reinforge.rewards.model import ModelReward, model_reward
from reinforge.serve.http import ConnectionLimits, make_app
from reinforge.serve.options import ServeOptions, listen


def post(url: str, body: dict[str, Any]) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"{url}/score", json.dumps(body).encode()), timeout=30
        ) as reply:
            return reply.status, json.load(reply)
    except HTTPError as error:
        return error.code, json.load(error)


def test_scores(tiny_dir: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = tmp_path / "judge"
    make_classifier(vocab_size=300).save_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    options = ServeOptions(port=0)
    scorer = load_scorer(str(path), options)
    texts = ["4", "five", "no idea", "4 4 4 4"]
    expected = model_reward({"path": str(path)}, "here").load("cpu")(["2+2?"] * 4, texts)
    with serving(
        make_app(None, scorer, limits=ConnectionLimits(), api_key=None, local=True), listen(options)
    ) as url:
        status, found = post(url, {"model": "judge", "prompts": ["2+2?"] * 4, "completions": texts})
        assert (
            status == 200
            and found == {"object": "list", "model": "judge", "scores": expected}
            and len(set(expected)) == 4
        )
        talks = [
            [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": text}]
            for text in texts
        ]
        assert post(url, {"messages": talks})[1]["scores"] == expected
        wrong: list[dict[str, Any]] = [
            {},
            {"prompts": ["a"]},
            {"prompts": ["a"], "completions": []},
            {"prompts": [], "completions": []},
            {"messages": [talks[0][:1]]},
            {"messages": talks, "prompts": ["a"], "completions": ["b"]},
            {"messages": [[{"role": "wizard", "content": "x"}] * 2]},
            {"prompts": ["a"], "completions": ["b" * 500]},
            {"prompts": ["a"], "completions": ["b"], "extra": 1},
        ]
        for body in wrong:
            status, reply = post(url, body)
            assert status == 400 and reply["error"]["type"] == "invalid_request_error", (
                body,
                reply,
            )
        assert post(url, {"model": "other", "prompts": ["a"], "completions": ["b"]})[0] == 404
    scorer.close()


def test_a_run_serves_what_it_exports(tmp_path: Path) -> None:
    model = small_model(tmp_path / "small")
    cfg = config(model, tmp_path / "run", "bradley_terry", steps=5, train={"prompts_per_step": 12})
    launch(cfg, PAIRS)
    exported = ModelReward(str(export(Path(cfg.run.dir), tmp_path / "model"))).load("cpu")
    scorer = load_scorer(cfg.run.dir, ServeOptions())
    prompts = [row["prompt"] for row in PAIRS]
    texts = [row["chosen"] for row in PAIRS]
    assert (
        scorer.reward(prompts, texts) == pytest.approx(exported(prompts, texts), abs=1e-6)
        and max(map(abs, exported(prompts, texts))) > 0.01
    )
    assert scorer.name == "run"
    scorer.close()
    (tmp_path / "run" / "config.json").write_text(
        (tmp_path / "run" / "config.json").read_text().replace("bradley_terry", "sft")
    )
    with pytest.raises(InputError, match="trained sft, not a reward model"):
        load_scorer(cfg.run.dir, ServeOptions())
