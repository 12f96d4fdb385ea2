"""`plan --deep`: a good configuration passes every proof; broken ones fail with the cause named;
what fits and what would help is what the plan says when it is asked.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reinforge.backends.memory_model import GIB
from reinforge.build.predict import predict, texts_together
from reinforge.config.load import config_from_dict
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.models.load import load_config
from reinforge.models.tiny import CHAT, make_tiny_model
from reinforge.plan.changes import best_changes
from reinforge.plan.checks import run_checks
from reinforge.plan.options import PlanOptions, stated_gpu
from reinforge.plan.plan import describe
from reinforge.plan.prediction import Expectation, expected, less_memory, peak
from reinforge.plan.preflight import PlanReport
from reinforge.plan.room import room

DEEP = PlanOptions(deep=True)
EIGHT_B = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
SYSTEM = "You add numbers."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and a template; of the weights nobody asks."""
    path = make_tiny_model(
        tmp_path_factory.mktemp("model"), width=32, layers=1, heads=2, context=256, chat=True
    )
    (path / "model.safetensors").unlink()
    return path


@pytest.fixture(autouse=True)  # what they write belongs to none of ours
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, rows: list[dict[str, Any]]) -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def sums(count: int = 12) -> str:
    return write(
        "sums.jsonl",
        [{"prompt": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(10, 10 + count)],
    )


def talks(turns: int = 2) -> str:
    def talk(i: int) -> list[dict[str, str]]:
        said = [
            {"role": "user", "content": f"What is {i} + 1?"},
            {"role": "assistant", "content": f"It is {i + 1}."},
        ]
        return [{"role": "system", "content": SYSTEM}, *said * turns]

    return write("talks.jsonl", [{"messages": talk(i)} for i in range(10, 22)])


def grpo(path: Path, /, **sections: Any) -> Config:
    return make(
        {
            "model": {"path": str(path)},
            "algorithm": {"name": "grpo"},
            "data": {"source": sums()},
            "rewards": [{"name": "exact_number"}],
            "rollout": {"max_new_tokens": 32},
        },
        sections,
    )


def sft(path: Path, /, **sections: Any) -> Config:
    base = {
        "model": {"path": str(path)},
        "algorithm": {"name": "sft"},
        "data": {"source": talks()},
    }
    return make(base, sections)


def make(base: dict[str, Any], sections: dict[str, Any]) -> Config:
    raw = {**base, "train": {"steps": 3}, "run": {"dir": "runs/first"}}
    for name, section in sections.items():
        raw[name] = {**raw.get(name, {}), **section} if isinstance(section, dict) else section
    return config_from_dict(raw, where="test")


def proofs(report: PlanReport) -> dict[str, dict[str, Any]]:
    return {proof["name"]: proof for proof in report.summary["deep"]["proofs"]}


# ---- good ones ----


@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_a_good_config_passes_and_leaves_nothing_behind(
    model: Path, folder: Path, kind: str
) -> None:
    config = grpo(model) if kind == "grpo" else sft(model)
    before = sorted(str(path) for path in folder.rglob("*"))
    report = run_checks(config, DEEP)
    assert report.ok, report.errors
    found = proofs(report)
    assert all(proof["ok"] for proof in found.values())
    assert sorted(str(path) for path in folder.rglob("*")) == before
    assert report.summary["deep"]["dry_step"]["train/grad_norm"] > 0
    ended = "12 of 12 rows end with a stop token: <|eos|> (2)"
    assert found["end of turn"]["said"] == ended
    if kind == "sft":
        # each answer is "It is NN." and an end, twice, of which no token is left out or added
        ids = len(_plain(model, "It is 11.")) + 1
        assert found["loss mask"]["said"].startswith(f"{12 * 2 * ids:,} of ")
        assert found["every turn is rendered"]["said"] == (
            "60 messages in 12 rows, each in its place"
        )
    else:
        assert found["reward exact_number"]["said"] == "gold 1, empty 0"


def _plain(model: Path, text: str) -> list[int]:
    from transformers import AutoTokenizer

    return list(AutoTokenizer.from_pretrained(model)(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(
    "sections",
    [
        {"algorithm": {"name": "ppo"}, "critic": {}},
        {"algorithm": {"name": "grpo", "kl": {"coefficient": 0.1}}, "adapter": {"rank": 4}},
        {"algorithm": {"name": "grpo", "minibatches": 2}, "train": {"steps": 3, "backend": "fsdp"}},
        {"rollout": {"max_new_tokens": 32, "staleness": 1, "overlap": True}},
    ],
    ids=["ppo", "adapter", "ranks", "beside training"],
)
def test_a_dry_step_of_other_runs(model: Path, folder: Path, sections: dict[str, Any]) -> None:
    from reinforge.data.sources import train_and_eval_rows
    from reinforge.plan.dry_step import dry_step

    config = grpo(model, **sections)
    proof, metrics = dry_step(config, train_and_eval_rows(config.data)[0])
    assert proof.ok, proof.said
    assert metrics["train/grad_norm"] > 0 and metrics["batch/samples"] == 8


# ---- broken ones ----

NO_SYSTEM = CHAT.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
FORGETFUL = (
    "{% for m in messages %}{% if m.role != 'assistant' %}Q:{{ m.content }}\n{% elif loop.last %}"
    "A:{{ m.content }}{{ eos_token }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)
ENDLESS = CHAT.replace("{{ eos_token }}", "")


def test_a_template_that_drops_the_system_turn(model: Path, folder: Path) -> None:
    Path("bad.jinja").write_text(NO_SYSTEM)
    config = grpo(
        model,
        model={"chat_template": "bad.jinja"},
        data={"source": sums(), "system": SYSTEM},
    )
    assert run_checks(config).ok  # nobody else sees it
    (error,) = run_checks(config, DEEP).errors
    assert error.startswith("row ") and "(sums.jsonl:1): " in error
    assert f"leaves out message 0, which the system says: {SYSTEM!r}" in error
    assert "data.system" in error and "model.chat_template" in error


def test_a_template_that_changes_history(model: Path, folder: Path) -> None:
    Path("bad.jinja").write_text(FORGETFUL)
    report = run_checks(sft(model, model={"chat_template": "bad.jinja"}), DEEP)
    assert not report.ok
    said = " ".join(report.errors)
    assert "the chat template renders messages 0 to" in said and "talks.jsonl:1" in said
    assert not proofs(report)["template"]["ok"]


def test_an_eos_that_the_template_never_writes(model: Path, folder: Path) -> None:
    Path("bad.jinja").write_text(ENDLESS)
    config = sft(model, model={"chat_template": "bad.jinja"})
    assert run_checks(config).ok
    (error,) = run_checks(config, DEEP).errors
    assert error.startswith("model.chat_template: end of turn: rollouts stop at <|eos|> (2), which")
    assert "{{ eos_token }}" in error


REWARDS = """
def raises(completions, answer, **_): return [1 / (len(c) > 4) for c in completions]
def silent(completions, **_): return [None for _ in completions]
"""


def test_a_reward_that_raises_on_what_a_model_writes(model: Path, folder: Path) -> None:
    """Not on gold answers of five digits, which is all that the second phase tries."""
    Path("mine.py").write_text(REWARDS)
    rows = [{"prompt": f"{i}?", "answer": f"{i:05d}"} for i in range(8)]
    config = grpo(
        model,
        data={"source": write("rows.jsonl", rows)},
        rewards=[{"name": "mine.py:raises"}],
        rollout={"max_new_tokens": 3, "on_reward_error": "raise"},
    )
    report = run_checks(config, DEEP)
    assert any("ZeroDivisionError" in error and "raises" in error for error in report.errors)
    assert not proofs(report)["one dry step"]["ok"]


def test_a_reward_that_returns_none(model: Path, folder: Path) -> None:
    Path("mine.py").write_text(REWARDS)
    config = grpo(model, rewards=[{"name": "mine.py:silent"}])
    assert run_checks(config).ok  # warnings
    report = run_checks(config, DEEP)
    found = proofs(report)
    assert not found["reward silent"]["ok"] and not found["one dry step"]["ok"]
    assert any(
        "returned None for all gold answers: no sample would be scored" in error
        for error in report.errors
    )
    assert any("no answer got a score" in error for error in report.errors)


@pytest.mark.parametrize("policy", ["error", "drop"])
def test_rows_that_are_too_long_are_numbered(model: Path, folder: Path, policy: str) -> None:
    rows = [
        {"prompt": f"What is {i}?" * (24 if i in (3, 7) else 1), "answer": "1"} for i in range(9)
    ]
    source = write("rows.jsonl", rows)
    report = run_checks(grpo(model, data={"source": source, "length": policy}), DEEP)
    proof = proofs(report)["lengths"]
    assert proof["ok"] is (policy == "drop") is report.ok
    done = {"error": "refused", "drop": "dropped"}[policy]
    assert f"of 224 tokens; 2 are {done}: " in proof["said"]
    assert "rows.jsonl:4" in proof["said"] and "rows.jsonl:8" in proof["said"]
    assert all("data.length" in error for error in report.errors)


def test_a_model_that_is_too_large_for_the_stated_gpu(model: Path, folder: Path) -> None:
    large = Path("large")
    large.mkdir()
    for path in model.iterdir():
        if path.name != "config.json":
            (large / path.name).write_bytes(path.read_bytes())
    (large / "config.json").write_text(json.dumps(EIGHT_B))
    report = run_checks(sft(large), PlanOptions(deep=True, gpu="L4"))
    (error,) = report.errors
    assert error.startswith("memory: train takes") and "L4 can give" in error
    found = report.summary["deep"]
    assert sum(report.summary["weights"].values()) == 8_190_735_360  # the published Qwen3-8B
    assert found["fits"]["tokens_per_microbatch"] == 0
    first = found["changes"][0]
    assert first["fits"] and first["memory_gib"][1] < 24 < first["memory_gib"][0]
    assert f"With {first['change']} it would take" in error
    assert proofs(report)["one dry step"]["ok"]


def test_what_is_done_already_is_not_advised(folder: Path) -> None:
    """Of a policy whose rank 0 holds a whole copy for its engine, the copy is what is told."""
    cfg = grpo(Path("m"))
    every = less_memory(cfg, {"peak": 10.0, "copy": 0.0})
    assert "adapter.rank=16" in every and "train.backend=fsdp" in every
    assert "rollout.engine=vllm" not in every and "engine.memory" not in every
    settled = grpo(
        Path("m"),
        adapter={"rank": 8},
        model={"gradient_checkpointing": True},
        train={"backend": "fsdp", "ranks": 2, "optimizer": {"offload": True}},
    )
    left = less_memory(settled, {"peak": 10.0, "copy": 9.0, "server": 1.0})
    assert "adapter.rank" not in left and "checkpointing" not in left and "offload" not in left
    assert "rollout.engine=vllm" in left and "lower engine.memory" in left
    one = {"adapter": {"rank": 8}, "model": {"gradient_checkpointing": True}}
    full = {"peak": 10.0, "activations": 6.0}
    assert "gradient_checkpointing=host" in less_memory(grpo(Path("m"), **one), full)
    assert "gradient_checkpointing=host" not in less_memory(grpo(Path("m"), **one), {"peak": 10.0})
    assert "gradient_checkpointing=host" in less_memory(settled, full)
    assert "gradient_checkpointing=host" not in every, "first the plain one"


# ---- what fits, and what would help ----


def plan_of(cfg: Config, gpu: str) -> Expectation:
    return expected(cfg, stated_gpu(gpu), (256, 512), shape())


NAMES = ("model_type", "architectures")


def shape() -> Any:
    """Of 2 billion weights."""
    from transformers import Qwen3Config

    named = {k: v for k, v in EIGHT_B.items() if k not in NAMES}
    return Qwen3Config(**{**named, "num_hidden_layers": 4})


@pytest.mark.parametrize(("steps", "on"), [(3, False), (10**9, True)])
def test_what_compiling_depends_on_is_told_of_a_gpu(
    model: Path, folder: Path, steps: int, on: bool
) -> None:
    """And the prediction is that of what will be done. Of a CPU nothing is said."""
    auto, fixed = (
        grpo(model, model={"compile": asked, "dtype": "float32"}, train={"steps": steps})
        for asked in ("auto", on)
    )
    report = run_checks(auto, PlanOptions(gpu="H200"))
    (said,) = [text for label, text in describe(report) if label == "compile"]
    assert said.startswith(f"layers are {'' if on else 'not '}compiled, because {steps:,} steps")
    same = run_checks(fixed, PlanOptions(gpu="H200")).summary
    assert report.summary["prediction"] == same["prediction"]
    assert "compile" not in same
    assert "compile" not in run_checks(auto, PlanOptions()).summary


@pytest.mark.parametrize("gpu", ["H200", "A100:40"])
def test_what_fits_is_the_last_that_does(model: Path, folder: Path, gpu: str) -> None:
    cfg = grpo(model, adapter={"rank": 16}, rollout={"max_new_tokens": 512})
    plan = plan_of(cfg, gpu)
    found = room(plan, 40960)
    assert found["tokens_per_microbatch"] > 1000

    def takes(**changes: dict[str, Any]) -> float:
        sections = {
            name: getattr(cfg, name).model_copy(update=update) for name, update in changes.items()
        }
        changed = cfg.model_copy(update=sections)
        return peak(predict(changed, plan.facts, plan.machine, plan.lengths))[1]

    most = found["new_tokens"]
    assert takes(rollout={"max_new_tokens": most}) <= plan.usable_gib
    if most < 40960 - 512:
        assert takes(rollout={"max_new_tokens": most + 1}) > plan.usable_gib
    tokens = found["tokens_per_microbatch"]
    wide = {"prompts_per_step": 10**6}
    assert takes(train={"tokens_per_microbatch": tokens, **wide}) <= plan.usable_gib
    assert takes(train={"tokens_per_microbatch": tokens + 1, **wide}) > plan.usable_gib


def pairs() -> str:
    rows = [
        {"prompt": f"What is {i} + 1?", "chosen": f"It is {i + 1}.", "rejected": "No."}
        for i in range(10, 22)
    ]
    return write("pairs.jsonl", rows)


@pytest.mark.parametrize("name", ["dpo", "bradley_terry"])
def test_both_answers_of_a_pair_are_counted(model: Path, folder: Path, name: str) -> None:
    """No micro-batch separates them. What a row may have is told for one of them."""
    base = {"model": {"path": str(model)}, "algorithm": {"name": name}, "data": {"source": pairs()}}
    cfg = make(base, {})
    report = run_checks(cfg, PlanOptions(gpu="24"))
    assert report.ok, report.errors
    of_one = report.summary["row_tokens"]["median"]
    assert report.summary["prediction"]["assumed"]["prompt_tokens"] == 2 * of_one
    plan = expected(cfg, stated_gpu("24"), (512, 1024), shape())
    one = replace(plan, cfg=sft(model))
    assert room(plan, 40960)["row_tokens"] * 2 <= room(one, 40960)["row_tokens"]


def test_judged_answers_are_no_pairs(model: Path, folder: Path) -> None:
    base = {"model": {"path": str(model)}, "data": {"source": pairs()}}
    assert texts_together(make({**base, "algorithm": {"name": "kto"}}, {})) == 1
    assert texts_together(make({**base, "algorithm": {"name": "ipo"}}, {})) == 2


def test_a_cache_that_holds_no_sequence_does_not_fit(model: Path, folder: Path) -> None:
    """The engine would refuse the first prompt, though memory is not full."""
    long = make_tiny_model(folder / "long", width=32, layers=1, heads=2, context=2048, chat=True)
    small = grpo(long, rollout={"max_new_tokens": 1900, "kv_gib": 1e-4})
    found = run_checks(small, PlanOptions(gpu="24"))
    cache = found.summary["prediction"]["kv_cache"]
    assert 8 * 64 <= cache["tokens"] < cache["longest"]
    said = f"the cache holds {cache['tokens']:,} tokens, and a sequence has {cache['longest']:,}"
    assert [error.startswith(f"rollout.kv_gib: {said}") for error in found.errors] == [True]
    deep = run_checks(small, PlanOptions(deep=True, gpu="24"))
    assert not proofs(deep)["memory"]["ok"]
    assert said in proofs(deep)["memory"]["said"]
    assert deep.summary["deep"]["fits"]["new_tokens"] + 21 <= cache["tokens"] + 64
    larger = grpo(long, rollout={"max_new_tokens": 1900, "kv_gib": 0.1})
    assert run_checks(larger, PlanOptions(gpu="24")).ok


@pytest.mark.parametrize("gpu", ["L4", "H200"])
def test_changes_gain_what_the_plan_says(model: Path, folder: Path, gpu: str) -> None:
    roomy = {"adapter": {"rank": 16}, "model": {"dtype": "float32"}}
    cfg = sft(model, **(roomy if gpu == "H200" else {}))
    plan = plan_of(cfg, gpu)
    found = best_changes(plan, shape())
    assert len(found) == 3
    before = peak(plan.prediction())[1], plan.prediction()["seconds"]["train"]
    for change in found:
        raw = cfg.model_dump(mode="json")
        for setting in change.settings.split():
            key, _, value = setting.partition("=")
            section, *rest = key.split(".")
            place = raw[section] = raw[section] or {}
            for part in rest[:-1]:
                place = place[part]
            place[rest[-1]] = json.loads(value) if value[0] in "tf0123456789" else value
        again = plan_of(config_from_dict(raw, where="test"), gpu).prediction()
        assert (change.memory_gib, change.seconds) == (peak(again)[1], again["seconds"]["train"])
        assert change.before == before
        assert change.fits is (change.memory_gib <= plan.usable_gib)
    fits = before[0] <= plan.usable_gib
    assert fits is (gpu == "H200")
    if fits:  # the fastest first
        assert found[0].seconds == min(change.seconds for change in found) < before[1]
        assert not any(change.settings.startswith("adapter") for change in found)
    else:  # what fits first, and of these the fastest
        assert [change.fits for change in found] == sorted(
            (change.fits for change in found), reverse=True
        )
        good = [change.seconds for change in found if change.fits]
        assert good == sorted(good) and good


def test_what_a_long_row_leaves_may_wait_in_host_memory(model: Path) -> None:
    """A row of 200,000 tokens and 8 billion weights with an adapter: all is computed again already,
    and what that keeps is half of the GPU.
    """
    config = type(shape())(**{k: v for k, v in EIGHT_B.items() if k not in NAMES})
    cfg = sft(model, adapter={"rank": 16}, model={"gradient_checkpointing": True})
    plan = expected(cfg, stated_gpu("A100:80"), (200_000, 200_000), config)
    assert not plan.fits
    moved = best_changes(plan, config)[0]
    assert (moved.settings, moved.fits) == ("model.gradient_checkpointing=host", True)
    kept = 200_000 * (36 - 3) * 4096 * 2 / 2**30
    assert moved.before[0] - moved.memory_gib == pytest.approx(kept, rel=0.01)
    assert moved.seconds == moved.before[1]


def test_a_gpu_by_its_name_or_size() -> None:
    assert stated_gpu("A100:40").memory == 40 * GIB and stated_gpu("A100").memory == 80 * GIB
    assert stated_gpu("RTX 4090").memory == 24 * GIB and stated_gpu("16").memory == 16 * GIB
    for bad in ("Voodoo", "Voodoo:24", "", ":40", "H2000", "RTX A4000", "A1000"):
        with pytest.raises(InputError, match="--gpu"):
            stated_gpu(bad)


def test_half_of_the_memory_is_less_room(model: Path, folder: Path) -> None:
    plan = plan_of(sft(model, adapter={"rank": 16}), "H200")
    less = replace(plan, machine=replace(plan.machine, memory=plan.machine.memory // 2))
    whole = room(plan, 40960)
    half = room(less, 40960)
    assert half["tokens_per_microbatch"] < whole["tokens_per_microbatch"] / 2


def test_options_reach_the_process_of_the_checks() -> None:
    options = PlanOptions(deep=True, gpu="RTX 4090:24")
    assert PlanOptions.of(["config.yaml", "a=b", *options.arguments(), "--json"]) == options
    assert PlanOptions.of(["config.yaml", "--json"]) == PlanOptions()


def test_the_shape_is_read_from_the_configuration(model: Path, folder: Path) -> None:
    cfg = grpo(model)
    plan = expected(cfg, stated_gpu("L4"), (16, 32))
    assert plan.counts.base == plan.facts.parameters()
    assert plan.facts.hidden == load_config(cfg.model).hidden_size == 32
