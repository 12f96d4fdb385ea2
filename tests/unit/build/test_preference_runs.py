"""Every preference loss by its name in real runs: step 0 is what the formula says, margins grow,
resumes are exact, the reference is the reference.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.offline_runs import HELD, JUDGED, PAIRS, config, launch, small_model
from helpers.tiny_runs import digest, lines, tensors
from helpers.toys import SilentView
from reinforge.algorithms import catalogue
from reinforge.api import evaluate
from reinforge.backends.local import LocalBackend
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.inputs import read_inputs
from reinforge.build.local import LocalFactories
from reinforge.build.run import train_config
from reinforge.build.trainer import build
from reinforge.build.unit_rows import make_units
from reinforge.config.data import DataConfig
from reinforge.core.errors import InputError
from reinforge.data.chat import Renderer
from reinforge.data.formats import read_row
from reinforge.data.sources import rows_from
from reinforge.models.causal import CausalModel
from reinforge.offline.export import export
from reinforge.rewards.model import ModelReward


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_model(tmp_path_factory.mktemp("small"))


PREFERENCE = [n for n, spec in catalogue.TABLE.items() if spec.kind is catalogue.PAIRED]
UNPAIRED = [n for n, spec in catalogue.TABLE.items() if spec.kind is catalogue.UNPAIRED]
LN2 = math.log(2)
FREE = ("simpo", "orpo", "cpo", "alphapo", "sft_pair")
STEP_0 = {  # where policy is reference, with the default beta 0.1
    **dict.fromkeys(
        (
            "dpo",
            "sigmoid",
            "cdpo",
            "robust",
            "sigmoid_norm",
            "aot",
            "aot_unpaired",
            "tr_dpo",
            "ld_dpo",
            "f_dpo",
        ),
        LN2,
    ),
    "hinge": 1.0,
    "ipo": 25.0,
    "sppo_hard": 50.0,
    "nca_pair": 2 * LN2,
    "bco_pair": 2 * LN2,
    "apo_zero": 1.0,
    "apo_down": 1.0,
    "discopop": 0.5 * LN2 + 0.5,
    "rpo_sq": 2.25,
    "exo_pair": 0.5 * math.log(0.5 / 0.999) + 0.5 * math.log(0.5 / 0.001),
    "rpo_bwd_kl": sum(
        p * math.log(p / 0.5) for p in (1 / (1 + math.exp(-1.5)), 1 / (1 + math.exp(1.5)))
    ),
    "rpo_fwd_kl": sum(0.5 * math.log(0.5 * (1 + math.exp(x))) for x in (-1.5, 1.5)),
    "kto": 0.5,
    "bco": LN2,
    "apo_zero_unpaired": 0.5,
}


def test_every_name_has_a_first_step() -> None:
    assert {*STEP_0, *FREE, "rpo", "mpo", "wpo"} == {*PREFERENCE, *UNPAIRED}


@pytest.mark.parametrize("name", [*PREFERENCE, *UNPAIRED])
def test_first_step_and_learning(model: str, tmp_path: Path, name: str) -> None:
    """Before the first update the policy is the reference: known losses, margin 0.

    Ten steps later chosen answers are preferred.
    """
    cfg = config(
        model,
        tmp_path / "run",
        name,
        "eval.at_start=true",
        steps=10,
        train={"prompts_per_step": 12},
        data={"source": "python", "shuffle": False},
    )
    launch(cfg, PAIRS, HELD)
    metrics = lines(cfg)
    start = metrics[0]
    first = metrics[1]
    final = metrics[-1]
    assert first["train/grad_norm"] > 1e-4 and first["train/skipped"] == 0
    assert (
        first["preference/loss"] == pytest.approx(STEP_0[name], abs=1e-5)
        if name in STEP_0
        else math.isfinite(first["preference/loss"])
    )
    if name not in FREE:
        assert first["rewards/margin"] == pytest.approx(0, abs=1e-5) == start["eval/margin"]
    before = max(0.0, start["eval/margin"]) if name in FREE else 0.0
    assert final["eval/margin"] > before + 1e-3, (start, final)
    if name not in UNPAIRED:
        # which rises just above D = 0 and pushes some pairs back
        assert final["eval/accuracy"] >= (0.5 if name == "discopop" else 1.0)
    assert set(final) >= {"eval/loss", "eval/n"} and final["eval/n"] == (
        8 if name in UNPAIRED else 4
    )


def test_a_mixture_is_the_sum_of_its_losses(model: str, tmp_path: Path) -> None:
    """MPO's row, and the same losses written out: ln 2 · 0.8 + 2 ln 2 · 0.2 + the mean NLL of
    chosen tokens.
    """
    runs = {
        "mpo": {"name": "mpo"},
        "dpo": {"name": "dpo", "losses": {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0}},
    }
    first = {}
    for name, algorithm in runs.items():
        cfg = config(model, tmp_path / name, name, algorithm=algorithm, steps=1)
        launch(cfg, PAIRS)
        first[name] = lines(cfg)[0]
    assert first["mpo"]["preference/loss"] == first["dpo"]["preference/loss"]
    assert first["mpo"]["preference/loss"] == pytest.approx(
        1.2 * LN2 + first["mpo"]["preference/sft"], abs=1e-5
    )
    assert first["mpo"]["preference/sft"] > 3  # a random model: about log of the vocabulary


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dpo", {}),
        pytest.param("bco", {}, marks=pytest.mark.long),
        ("kto", {}),
        ("tr_dpo", {"kl": {"reference": {"kind": "ema", "decay": 0.5}}}),
        pytest.param("wpo", {}, marks=pytest.mark.long),
        ("aot", {}),
    ],
)
def test_resume_is_exact(model: str, tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    whole, cut = (
        config(
            model,
            tmp_path / run,
            name,
            algorithm=options,
            steps=5,
            **{"data": {"source": "python"}},
        )
        for run in ("whole", "cut")
    )
    launch(whole, PAIRS)
    launch(cut.model_copy(update={"train": cut.train.model_copy(update={"steps": 2})}), PAIRS)
    launch(cut, PAIRS)
    assert digest(whole) == digest(cut)
    assert [m["preference/loss"] for m in lines(whole)] == [
        m["preference/loss"] for m in lines(cut)
    ]


@pytest.mark.parametrize("lora", [False, True])
def test_a_precomputed_reference_is_the_reference(
    model: str, tmp_path: Path, lora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same weights as with a copy, no copy made, and a resume reads the file instead of computing
    it from whatever weights are there.
    """
    extra: dict[str, Any] = {"adapter": {"rank": 4}} if lora else {}
    runs = {}
    for kind in ("copy", "before"):
        cfg = config(
            model,
            tmp_path / kind,
            "dpo",
            steps=4,
            train={"precompute_reference": kind == "before", "share_prompts": False},
            **extra,
        )
        if kind == "before":
            trainer = build(cfg, SilentView(), CallerObjects(data=PAIRS))
            assert isinstance(trainer.backend, LocalBackend) and trainer.backend.frozen is None
            file = tmp_path / kind / "reference.safetensors"
            kept = file.read_bytes()
            launch(
                cfg.model_copy(update={"train": cfg.train.model_copy(update={"steps": 2})}), PAIRS
            )
            # a second computation would fail
            monkeypatch.setattr("reinforge.loops.precompute._compute", None)
        launch(cfg, PAIRS)
        runs[kind] = cfg
    assert file.read_bytes() == kept
    theirs = tensors(runs["copy"])
    ours = tensors(runs["before"])
    for name, value in theirs.items():
        if name.startswith("model/"):
            torch.testing.assert_close(ours[name], value, atol=2e-5, rtol=1e-4)
    assert lines(runs["before"])[-1]["rewards/margin"] == pytest.approx(
        lines(runs["copy"])[-1]["rewards/margin"], abs=1e-4
    )


@pytest.mark.parametrize("name", ["kto", "bco", "apo_zero_unpaired"])
def test_single_answers_with_a_precomputed_reference(model: str, tmp_path: Path, name: str) -> None:
    """With every row in every step KTO's mismatched answers are the same ones, chosen before or in
    the step: the same run. Then with a few rows per step: no copy of the model, and a resume that
    comes out the same.
    """
    settings = {"prompts_per_step": len(JUDGED), "share_prompts": False}
    for kind in ("copy", "before"):
        cfg = config(
            model,
            tmp_path / kind,
            name,
            steps=4,
            data={"source": "python", "shuffle": False},
            train={**settings, "precompute_reference": kind == "before"},
        )
        launch(cfg, JUDGED, [{**row, "prompt": f"9 {row['prompt']}"} for row in JUDGED[:6]])
    copied = lines(
        cfg.model_copy(update={"run": cfg.run.model_copy(update={"dir": str(tmp_path / "copy")})})
    )
    kept = lines(cfg)
    assert len(kept) == len(copied) > 3
    for a, b in zip(copied, kept, strict=True):
        for key in ("preference/loss", "preference/baseline", "eval/loss", "rewards/margin"):
            assert (key in a) == (key in b) and a.get(key, 0.0) == pytest.approx(
                b.get(key, 0.0), abs=2e-4
            )
    whole, cut = (
        config(model, tmp_path / run, name, steps=5, train={"precompute_reference": True})
        for run in ("whole", "cut")
    )
    trainer = build(whole, SilentView(), CallerObjects(data=JUDGED))
    assert isinstance(trainer.backend, LocalBackend) and trainer.backend.frozen is None
    launch(whole, JUDGED)
    launch(cut.model_copy(update={"train": cut.train.model_copy(update={"steps": 2})}), JUDGED)
    launch(cut, JUDGED)
    assert digest(whole) == digest(cut)


def test_an_adapter_switched_off_is_the_reference(model: str, tmp_path: Path) -> None:
    cfg = config(model, tmp_path / "run", "dpo", steps=4, adapter={"rank": 4})
    trainer = build(cfg, SilentView(), CallerObjects(data=PAIRS))
    backend = trainer.backend
    assert (
        isinstance(backend, LocalBackend)
        and backend.frozen is None
        and isinstance(backend.model, CausalModel)
    )
    launch(cfg, PAIRS)
    metrics = lines(cfg)
    assert (
        metrics[0]["preference/loss"] == pytest.approx(LN2, abs=1e-6)
        and metrics[-1]["rewards/margin"] > metrics[0]["rewards/margin"]
    )


@pytest.mark.parametrize("before", [False, True], ids=["", "precomputed"])
def test_a_loaded_adapter_is_its_own_reference(model: str, tmp_path: Path, before: bool) -> None:
    """DPO that continues from an adapter starts at ln 2: its reference is what the run starts from,
    not the base underneath.
    """
    first = config(model, tmp_path / "first", "dpo", steps=8, lr=3e-2, adapter={"rank": 4})
    launch(first, PAIRS)
    # to its own reference, the base, it has moved away
    assert abs(lines(first)[-1]["preference/loss"] - LN2) > 0.01
    export(tmp_path / "first", tmp_path / "adapter")
    adapter = {"path": str(tmp_path / "adapter")}
    second = config(
        model,
        tmp_path / "second",
        "dpo",
        steps=4,
        train={"precompute_reference": before},
        adapter=adapter,
    )
    launch(second, PAIRS)
    found = [m["preference/loss"] for m in lines(second)]
    assert found[0] == pytest.approx(LN2, abs=1e-6) and found[-1] < LN2 - 1e-3


def test_a_moving_reference_moves(model: str, tmp_path: Path) -> None:
    """A reference that is synced after every step leaves no margin at any step; a
    frozen one does.
    """
    runs = {}
    for kind in ("frozen", "sync"):
        cfg = config(
            model, tmp_path / kind, "dpo", steps=4, algorithm={"kl": {"reference": {"kind": kind}}}
        )
        launch(cfg, PAIRS)
        runs[kind] = [m["rewards/margin"] for m in lines(cfg)]
    assert max(map(abs, runs["sync"])) < 1e-5 and runs["frozen"][-1] > 1e-3
    view = launch(config(model, tmp_path / "tr", "tr_dpo", steps=1), PAIRS)
    assert any("it will never move" in message for message in view.messages)


def test_prompts_are_computed_once_and_it_does_not_matter(model: str, tmp_path: Path) -> None:
    runs = {}
    for share in (True, False):
        cfg = config(
            model,
            tmp_path / str(share),
            "dpo",
            steps=2,
            train={"share_prompts": share, "prompts_per_step": 12},
        )
        launch(cfg, PAIRS)
        runs[share] = lines(cfg)
    assert runs[True][0]["tokens/processed"] < runs[False][0]["tokens/processed"]
    assert runs[True][0]["tokens/trained"] == runs[False][0]["tokens/trained"]
    assert runs[True][1]["preference/loss"] == pytest.approx(
        runs[False][1]["preference/loss"], abs=1e-5
    )


@pytest.mark.parametrize("name", ["dpo", "aot_unpaired", "kto", "bco", "orpo", "mpo", "wpo"])
def test_the_gradient_does_not_depend_on_the_cut(model: str, tmp_path: Path, name: str) -> None:
    """Through the whole path: one pack, or a pack per pair."""
    found = {}
    for budget in (4096, 24):
        cfg = config(
            model,
            tmp_path / str(budget),
            name,
            steps=2,
            lr=1e-3,
            train={"tokens_per_microbatch": budget},
        )
        launch(cfg, PAIRS)
        found[budget] = lines(cfg)
    for a, b in zip(found[4096], found[24], strict=True):
        for key in (
            "preference/loss",
            "train/grad_norm",
            "rewards/margin",
            "logps/chosen" if name not in UNPAIRED else "rewards/chosen",
        ):
            assert b[key] == pytest.approx(a[key], rel=1e-4, abs=1e-5), key


def test_a_run_is_evaluated_against_its_reference(model: str, tmp_path: Path) -> None:
    """`reinforge eval RUN` says what the run's own last evaluation said."""
    files = {name: tmp_path / f"{name}.jsonl" for name in ("train", "eval")}
    for name, rows in (("train", PAIRS), ("eval", HELD)):
        files[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"source": str(files["train"]), "eval": {"source": str(files["eval"])}}
    cfg = config(
        model, tmp_path / "run", "dpo", steps=4, data=data, train={"precompute_reference": True}
    )
    train_config(cfg, CallerObjects(), SilentView())
    last = lines(cfg)[-1]
    again = evaluate(tmp_path / "run")
    assert (
        again["eval/margin"] == pytest.approx(last["eval/margin"], abs=1e-5)
        and again["eval/margin"] > 1e-3
    )
    assert again["eval/loss"] == pytest.approx(last["eval/loss"], abs=1e-5)


# rows


def units(model: str, tmp_path: Path, name: str, rows: list[Any], **sections: Any) -> list[Any]:
    inputs = read_inputs(
        config(model, tmp_path / "run", name, **sections),
        CallerObjects(data=rows),
        SilentView(),
        LocalFactories().make_rewards,
    )
    return make_units(inputs, inputs.train_rows, SilentView()).units


def test_rows_of_all_kinds_are_the_same_pairs(model: str, tmp_path: Path) -> None:
    """A prompt and two answers; the same as whole texts; prompt ids are a prefix of both, and
    trained is the answer with its end.
    """
    explicit = units(
        model, tmp_path, "dpo", [{"prompt": "Is 3 odd?", "chosen": " Yes it is", "rejected": " No"}]
    )
    implicit = units(
        model, tmp_path, "dpo", [{"chosen": "Is 3 odd? Yes it is", "rejected": "Is 3 odd? No"}]
    )
    for chosen, rejected in (explicit[0], implicit[0]):
        text = "Is 3 odd?"
        assert chosen.tokens[: len(text)].tolist() == rejected.tokens[: len(text)].tolist()
        # bytes, and the end
        assert chosen.n_trained == len(" Yes it is") + 1 and rejected.n_trained == len(" No") + 1
        assert chosen.group == rejected.group and chosen.uid != rejected.uid
    assert torch.equal(explicit[0][0].tokens, implicit[0][0].tokens) and torch.equal(
        explicit[0][1].trained, implicit[0][1].trained
    )


TEMPLATE = (
    "{% for m in messages %}<|bos|>{{ m.role }}\n{{ m.content }}<|eos|>\n{% endfor %}{% if"
    " add_generation_prompt %}<|bos|>assistant\n{% endif %}"
)


def test_chat_pairs_and_the_reward_model_that_reads_them(model: str, tmp_path: Path) -> None:
    """The prompt's ids are those of a rollout and a prefix of both answers; one system prompt; what
    follows the end of the turn is not trained by a preference, but is where a reward model is read,
    in training and as a reward alike.
    """
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    ask = {"role": "user", "content": "odd?"}
    good = {"role": "assistant", "content": "yes"}
    bad = {"role": "assistant", "content": "no, 4"}
    row = {"chosen": [ask, good], "rejected": [ask, bad]}
    template = f"model.chat_template={tmp_path}/chat.jinja"
    sections = {"data": {"source": "python", "system": "S"}}
    made = {}
    for name in ("dpo", "bradley_terry"):
        inputs = read_inputs(
            config(model, tmp_path / "run", name, template, **sections),
            CallerObjects(data=[row]),
            SilentView(),
            LocalFactories().make_rewards,
        )
        made[name] = make_units(inputs, inputs.train_rows, SilentView()).units[0]
        prompt = inputs.renderer.prompt(inputs.train_rows[0])
        tokenizer = inputs.tokenizer
    assert (
        tokenizer.decode(prompt)
        == "<|bos|>system\nS<|eos|>\n<|bos|>user\nodd?<|eos|>\n<|bos|>assistant\n"
    )
    for sample, text in zip(made["dpo"], ("yes", "no, 4"), strict=True):
        assert (
            sample.tokens[: len(prompt)].tolist() == prompt
            and not sample.trained[: len(prompt)].any()
        )
        assert (
            tokenizer.decode(sample.tokens[sample.trained]) == f"{text}<|eos|>"
            and tokenizer.decode(sample.tokens[-1:]) == "\n"
        )
    judge = ModelReward("judge")
    judge.renderer = Renderer(tokenizer, DataConfig(source="reward", loss_on="all"))
    asked = [{"role": "system", "content": "S"}, ask]
    for sample, text in zip(made["bradley_terry"], ("yes", "no, 4"), strict=True):
        assert sample.tokens.tolist() == judge.ids(asked, text) and bool(sample.trained[-1])


def test_flipped_pairs_teach_the_opposite(model: str, tmp_path: Path) -> None:
    flipped = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in PAIRS]
    cfg = config(model, tmp_path / "run", "dpo", steps=10, train={"prompts_per_step": 12})
    launch(cfg, flipped, HELD)
    assert lines(cfg)[-1]["eval/margin"] < -1e-2 and lines(cfg)[-1]["eval/accuracy"] == 0


def test_whole_conversations_are_split_where_they_part() -> None:
    """TRL's implicit format, and ultrafeedback's, which has the prompt as text beside it; explicit
    rows stay as they are.
    """

    def understood(record: dict[str, Any]) -> dict[str, Any]:
        return read_row(record, "row 0")[0]

    ask = {"role": "user", "content": "q"}
    follow = {"role": "user", "content": "go on"}
    good, bad, same = ({"role": "assistant", "content": text} for text in ("yes", "no", "well"))
    record = {"chosen": [ask, same, follow, good], "rejected": [ask, same, follow, bad]}
    want = {"prompt": [ask, same, follow], "chosen": [good], "rejected": [bad]}
    assert understood(record) == want == understood({**record, "prompt": "q"})
    explicit = {"prompt": [ask], "chosen": [good], "rejected": [bad]}
    assert understood(explicit) == explicit
    assert understood({"prompt": "q", "chosen": "a b", "rejected": "a c"})["chosen"] == "a b"
    assert understood({"prompt": "q", "answer": "1"}) == {"prompt": "q", "answer": "1"}
    (row,) = rows_from([record], system="Be short.")
    assert row.prompt == [{"role": "system", "content": "Be short."}, ask, same, follow]
    with pytest.raises(InputError, match="row 7: chosen and rejected are the same"):
        read_row({"chosen": [ask, good], "rejected": [ask, good]}, "row 7")


def test_kto_takes_judged_answers_and_pairs(model: str, tmp_path: Path) -> None:
    single = units(model, tmp_path, "kto", JUDGED)
    paired = units(model, tmp_path, "kto", PAIRS)
    assert len(single) == len(paired) == 24
    for (a,), (b,) in zip(single, paired, strict=True):
        assert torch.equal(a.tokens, b.tokens) and torch.equal(
            a.streams["label"], b.streams["label"]
        )
    assert [float(u[0].streams["label"][0]) for u in single[:4]] == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("name", "row", "said"),
    [
        ("dpo", {"prompt": "a", "chosen": "x"}, "has no column 'rejected'"),
        (
            "dpo",
            {"prompt": "a", "chosen": "x", "rejected": "x"},
            "chosen and rejected are the same",
        ),
        ("dpo", {"chosen": "a b", "rejected": "c d"}, "no beginning in common"),
        (
            "dpo",
            {"prompt": "a", "chosen": "x", "rejected": [{"role": "assistant", "content": "y"}]},
            "one of chosen and rejected",
        ),
        ("kto", {"prompt": "a", "completion": "x", "label": "maybe"}, "neither true nor false"),
        ("rpo_sq", {"prompt": "a", "chosen": "x", "rejected": "y"}, "needs a number score_chosen"),
    ],
)
def test_rows_that_are_refused(
    model: str, tmp_path: Path, name: str, row: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        units(model, tmp_path, name, [row])


def test_a_pair_is_dropped_or_cut_as_a_whole(model: str, tmp_path: Path) -> None:
    data = [
        {"prompt": "ab", "chosen": "c" * 20, "rejected": "d"},
        {"prompt": "ab", "chosen": "c", "rejected": "d"},
    ]
    kept = units(model, tmp_path, "dpo", data, data={"source": "python", "max_length": 10})
    assert len(kept) == 1 and len(kept[0]) == 2 and kept[0][0].n_trained == 2
    cut = units(
        model,
        tmp_path,
        "dpo",
        data,
        data={"source": "python", "max_length": 10, "length": "truncate"},
    )
    assert [len(s.tokens) for s in cut[0]] == [10, 4] and len(cut) == 2


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"algorithm": {"name": "dpo", "clip": {"low": 0.1}}},
            r"algorithm\.clip: dpo \(preference\) does not read it",
        ),
        ({"algorithm": {"name": "dpo", "kl": {"coefficient": 0.1}}}, r"algorithm\.kl"),
        (
            {"algorithm": {"name": "grpo", "beta": 0.1}, "rewards": [{"name": "exact_number"}]},
            r"algorithm\.kl\.coefficient",
        ),
        (
            {"algorithm": {"name": "dpo"}, "data": {"source": "python", "loss_on": "all"}},
            "which tokens are the answer",
        ),
    ],
)
def test_settings_that_are_refused(tmp_path: Path, sections: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        config("some/model", tmp_path / "run", sections["algorithm"].pop("name"), **sections)
