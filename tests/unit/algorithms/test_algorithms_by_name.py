"""Every algorithm by name: its parts and defaults written out once more, settings that reach the
functions, functions of a user's, refusals.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import reinforge
from reinforge.algorithms import catalogue
from reinforge.algorithms.build import BUILDERS, build
from reinforge.algorithms.catalogue import TABLE, describe, printed
from reinforge.algorithms.parts.advantages import ADVANTAGES
from reinforge.algorithms.parts.corrections import CORRECTIONS
from reinforge.algorithms.parts.kl import ESTIMATORS
from reinforge.algorithms.parts.reduce import REDUCERS
from reinforge.algorithms.parts.selections import SELECTIONS
from reinforge.algorithms.parts.surrogates import SURROGATES
from reinforge.cli.main import main
from reinforge.config.algorithm import AlgorithmConfig
from reinforge.config.schema import Config
from reinforge.core.backend import Loss
from reinforge.core.batch import Batch
from reinforge.core.errors import InputError
from reinforge.core.sample import Sample

PARTS = {  # advantage, surrogate, reduce, paper
    "grpo": ("group_relative", "ppo_clip", "sequence_mean", "2402.03300"),
    "dr_grpo": ("group_relative", "ppo_clip", "fixed_length", "2503.20783"),
    "dapo": ("group_relative", "ppo_clip", "token_mean", "2503.14476"),
    "gspo": ("group_relative", "gspo", "sequence_mean", "2507.18071"),
    "gspo_token": ("group_relative", "gspo_token", "sequence_mean", "2507.18071"),
    "luspo": ("group_relative", "gspo", "sequence_sum", "2602.05261"),
    "gmpo": ("group_relative", "gmpo", "sequence_mean", "2507.20673"),
    "vespo": ("group_relative", "vespo", "sequence_mean", "2602.10693"),
    "cispo": ("group_relative", "cispo", "token_mean", "2506.13585"),
    "sapo": ("group_relative", "sapo", "token_mean", "2511.20347"),
    "dppo_tv": ("group_relative", "dppo_tv", "token_mean", "2602.04879"),
    "dppo_kl": ("group_relative", "dppo_kl", "token_mean", "2602.04879"),
    "clip_cov": ("group_relative", "ppo_clip", "token_mean", "2505.22617"),
    "kl_cov": ("group_relative", "ppo_clip", "token_mean", "2505.22617"),
    "reinforce": ("batch_baseline", "reinforce", "token_mean", "Williams 1992"),
    "gpg": ("gpg", "reinforce", "token_mean", "2504.02546"),
    "rloo": ("leave_one_out", "reinforce", "sequence_sum", "2402.14740"),
    "remax": ("greedy_baseline", "reinforce", "token_mean", "2310.10505"),
    "opo": ("optimal_baseline", "reinforce", "token_mean", "2505.23585"),
    "reinforce_pp": ("return_to_go", "ppo_clip", "token_mean", "2501.03262"),
    "reinforce_pp_baseline": ("group_whitened", "ppo_clip", "token_mean", "2501.03262"),
    "maxrl": ("maxrl", "ppo_clip", "token_mean", "2602.02710"),
    "passk": ("pass_at_k", "ppo_clip", "token_mean", "2503.19595"),
    "gdpo": ("decoupled", "ppo_clip", "sequence_mean", "2601.05242"),
    "ppo": ("gae", "ppo_clip", "token_mean", "1707.06347, 2403.17031"),
    "vapo": ("gae", "ppo_clip", "token_mean", "2504.05118"),
}

DEFAULTS: dict[str, dict[str, Any]] = {  # where they are not everybody's
    "dr_grpo": {"scale": "none"},
    "dapo": {"clip_low": 0.2, "clip_high": 0.28, "dynamic_sampling": True, "overlong_buffer": 20},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "gspo_token": {"clip_low": 3e-4, "clip_high": 4e-4},
    "luspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "gmpo": {"clip_low": 0.4, "clip_high": 0.4},
    "vespo": {"old": "engine"},
    "dppo_tv": {"old": "engine"},
    "dppo_kl": {"old": "engine"},
    "clip_cov": {"selection": "clip_cov"},
    "kl_cov": {"selection": "kl_cov", "clip_low": 1.0, "clip_high": 1e9},
    "reinforce_pp": {"kl_placement": "reward", "kl_coefficient": 0.01, "kl_estimator": "k1"},
    "vapo": {"clip_high": 0.28, "nll": 0.1},
}
NEEDS = {
    "ppo": {"values"},
    "vapo": {"values"},
    "remax": {"baseline"},
    "reinforce_pp": {"reference"},
}
CLIPLESS = ("vespo", "cispo", "sapo", "dppo_tv", "dppo_kl", "reinforce")
SHARED = {
    "scale": "group",
    "std": "sample",
    "eps": 1e-4,
    "clip_low": 0.2,
    "clip_high": 0.2,
    "correction": "none",
    "selection": None,
    "old": "auto",
    "kl_coefficient": 0.0,
    "kl_placement": "loss",
    "kl_estimator": "k3",
    "entropy": 0.0,
    "nll": 0.0,
    "dynamic_sampling": False,
    "overlong": "keep",
    "overlong_buffer": 0,
    "advantage_clip": None,
}


KINDS = {  # of what is no policy gradient; later ones need no entry
    "supervised": "sft dft",
    "paired": (
        "dpo sigmoid cdpo robust hinge ipo exo_pair nca_pair bco_pair sppo_hard aot aot_unpaired"
        " apo_zero apo_down discopop sigmoid_norm rpo rpo_sq rpo_bwd_kl rpo_fwd_kl tr_dpo wpo"
        " ld_dpo f_dpo mpo simpo orpo cpo alphapo sft_pair"
    ),
    "unpaired": "kto bco apo_zero_unpaired",
    "online": "online_dpo",
    "opposed": "xpo nash_md",
    "self_play": "spin",
    "best_of": "best_of_n raft rejection_sampling",
    "reward_model": "bradley_terry margin scaled logexp centred process",
    "regression": "regression",
    "distillation": "forward_kl reverse_kl jsd skew_forward skew_reverse topk uld",
    "mixed_distillation": "gkd",
    "on_policy_distillation": "opd minillm",
}


def test_the_table_is_complete() -> None:
    assert [name for name, spec in TABLE.items() if spec.family == "policy_gradient"] == list(PARTS)
    assert {e["name"]: e["paper"] for e in describe() if e["name"] in PARTS} == {
        name: paper for name, (*_, paper) in PARTS.items()
    }
    for kind, names in KINDS.items():
        assert {name: TABLE[name].kind.name for name in names.split()} == dict.fromkeys(
            names.split(), kind
        )
    assert BUILDERS.keys() == {spec.kind.name for spec in TABLE.values()}


def test_the_parts_of_the_catalogue_are_the_functions_there_are() -> None:
    for named, functions in (
        (catalogue.ADVANTAGES, ADVANTAGES),
        (catalogue.SURROGATES, SURROGATES),
        (catalogue.CORRECTIONS, CORRECTIONS),
        (catalogue.SELECTIONS, SELECTIONS),
        (catalogue.REDUCERS, REDUCERS),
        (catalogue.ESTIMATORS, ESTIMATORS),
    ):
        assert list(named) == list(functions)


def test_every_key_of_the_section_has_a_reader() -> None:
    """And what kinds say they read exists."""
    kinds = {spec.kind for spec in TABLE.values()}
    read = {key.split(".")[0] for kind in kinds for key in kind.reads}
    assert read | {"name", "group_size", "options"} == set(AlgorithmConfig.model_fields)


@pytest.mark.parametrize(
    ("name", "keys", "foreign"),
    [
        ("grpo", {"beta": 0.1, "scale": "none", "kl": {"coefficient": 0.1}}, ["beta"]),
        ("opd", {"losses": {"sigmoid": 1.0}, "clip": {"high": 0.3}}, ["losses"]),
        (
            "dpo",
            {"beta": 0.1, "kl": {"reference": {"kind": "ema"}}, "reduce": "token_mean"},
            ["reduce"],
        ),
        ("kto", {"kl": {"coefficient": 0.1}}, ["kl"]),
        ("online_dpo", {"beta": 0.1, "epochs": 2, "entropy": 0.1}, ["entropy"]),
        (
            "raft",
            {"reduce": "token_mean", "beta": 0.1, "kl": {"reference": {"kind": "ema"}}},
            ["beta", "kl"],
        ),
        ("sft", {"reduce": "token_mean", "epochs": 2}, ["epochs"]),
        ("margin", {"reduce": "token_mean"}, ["reduce"]),
    ],
)
def test_keys_that_a_kind_does_not_read(
    name: str, keys: dict[str, Any], foreign: list[str]
) -> None:
    shared = {"group_size": 4, "options": {"x": 1}}
    assert AlgorithmConfig(name=name, **shared, **keys).foreign_keys() == foreign


def test_what_a_name_is_made_of_tells_the_rest() -> None:
    """Facts that follow from the parts, and a name that nobody knows."""
    assert {name for name in TABLE if AlgorithmConfig(name=name).needs_critic} == {"ppo", "vapo"}
    assert {name for name in TABLE if not AlgorithmConfig(name=name).has_ratio} == {
        "reinforce",
        "gpg",
        "rloo",
        "remax",
        "opo",
    }
    assert {name for name, spec in TABLE.items() if spec.dynamic_sampling} == {"dapo"}
    assert {name for name, spec in TABLE.items() if spec.reference} == {"tr_dpo", "spin"}
    unknown = AlgorithmConfig(name="grpoo")
    assert unknown.family == "policy_gradient" and unknown.rl and unknown.compares_samples


@pytest.mark.parametrize("name", PARTS)
def test_parts_and_defaults(name: str) -> None:
    algorithm = build(name, max_new_tokens=100)
    o = algorithm.options
    assert (o.advantage, o.surrogate, o.reduce, algorithm.paper) == PARTS[name]
    clips = {"clip_low": None, "clip_high": None} if o.surrogate in CLIPLESS else {}
    assert {key: getattr(o, key) for key in SHARED} == {
        **SHARED,
        **clips,
        **{k: v for k, v in DEFAULTS.get(name, {}).items() if k in SHARED},
    }
    assert {key: getattr(o, key) for key in DEFAULTS.get(name, {})} == DEFAULTS.get(name, {})
    assert (
        algorithm.needs == NEEDS.get(name, set())
        and isinstance(algorithm.loss, Loss)
        and algorithm.family == "policy_gradient"
    )
    entry = next(e for e in describe() if e["name"] == name)
    assert (
        entry["parts"]["advantage"],
        entry["parts"]["surrogate"],
        entry["parts"]["reduce"],
    ) == PARTS[name][:3]
    assert entry["parts"].get("selection") == o.selection


def test_settings_of_rows_reach_the_advantage() -> None:
    vapo, ppo = (build(name).advantage.args[1] for name in ("vapo", "ppo"))  # type: ignore[union-attr]
    assert (vapo.lam_critic, vapo.length_alpha, vapo.lam) == (1.0, 0.05, 0.95) and (
        ppo.lam_critic,
        ppo.length_alpha,
    ) == (None, None)
    assert build("vapo", settings={"length_alpha": 0.1}).advantage.args[1].length_alpha == 0.1  # type: ignore[union-attr]
    other = build("vapo", advantage="leave_one_out", settings={"whiten": True}).advantage.args[1]  # type: ignore[union-attr]
    assert other.length_alpha is None and other.whiten is True


# refusals and notes


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("grpoo", {}, r"algorithm\.name.*Did you mean grpo\?"),
        ("grpo", {"surrogate": "ppo"}, r"algorithm\.surrogate.*ppo_clip"),
        ("grpo", {"selection": "entropy"}, r"algorithm\.selection.*top_entropy"),
        ("grpo", {"correction": "icepopp"}, r"algorithm\.correction\.name.*Did you mean icepop\?"),
        ("grpo", {"reduce": "mean"}, r"algorithm\.reduce.*token_mean"),
        ("grpo", {"kl_estimator": "k4"}, r"algorithm\.kl\.estimator.*k3"),
        ("grpo", {"clip_dual": 0.5}, "dual clip must be above 1"),
        ("dapo", {"max_new_tokens": 10, "overlong_buffer": 11}, "more than max_new_tokens"),
        (
            "ppo",
            {"settings": {"gama": 0.9}},
            r"algorithm\.options\.gama: no part .* Did you mean gamma\?",
        ),
        # group_relative would ignore it
        ("grpo", {"settings": {"gamma": 0.9}}, r"algorithm\.options\.gamma"),
        ("sft", {"settings": {"gamma": 0.9}}, r"algorithm\.options\.gamma"),
        ("rloo", {"clip_high": 0.3}, r"algorithm\.clip\.high: reinforce has no setting 'high'"),
        ("cispo", {"clip_dual": 3.0}, r"algorithm\.clip\.dual: cispo .* It takes: cap"),
        ("grpo", {"cap": 2.0}, r"algorithm\.correction\.cap: none has no setting"),
        (
            "rloo",
            {"scale": "batch"},
            r"algorithm\.scale: the advantage leave_one_out is not scaled",
        ),
        (
            "grpo",
            {"old": "engine", "correction": "tis"},
            r"algorithm\.correction\.name: .* no mismatch to correct",
        ),
        ("grpo", {"kl_target": 0.1}, r"algorithm\.kl\.target: a coefficient of 0 cannot adapt"),
        ("grpo", {"selected": "drop"}, r"algorithm\.selected: there is no selection"),
        ("grpo", {"advantage": lambda r, o, *, must: r}, r"algorithm\.options: .* needs must"),
    ],
)
def test_refusals(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        build(name, **options)


def test_notes() -> None:
    assert "zero expected gradient" in build("grpo", kl_coefficient=0.1, kl_estimator="k1").notes[0]
    assert "forward KL" in build("grpo", kl_coefficient=0.1).notes[0]
    assert (
        build("grpo", kl_coefficient=0.1, kl_estimator="k2").notes
        == ()
        == build("grpo", kl_estimator="k1").notes
    )
    in_reward = {"kl_coefficient": 0.1, "kl_placement": "reward"}
    assert build("reinforce_pp").notes == () == build("dr_grpo", **in_reward).notes
    assert "Use k1 there" in build("dr_grpo", kl_estimator="k3", **in_reward).notes[0]
    assert "scale none" in build("grpo", **in_reward).notes[0]
    assert (
        "is 0 in the only update" in build("kl_cov").notes[0]
        and build("kl_cov", updates=2).notes == ()
    )
    assert "has no ratio" in build("rloo", updates=2).notes[0] and build("rloo").notes == ()
    assert (
        "meant against the policy that sampled" in build("grpo", surrogate="dppo_tv").notes[0]
        and build("dppo_tv").notes == ()
    )


# groups of one


def test_one_sample_per_prompt() -> None:
    """Refused where the advantage compares samples of a prompt, and only there."""
    single = {"reinforce", "ppo", "reinforce_pp", "remax", "vapo"}
    raw: dict[str, Any] = {
        "model": {"path": "m"},
        "data": {"source": "d.jsonl"},
        "rewards": [{"name": "exact_number"}],
        "train": {"steps": 1},
        "run": {"dir": "r"},
    }
    for name in PARTS:
        critic = (
            {"critic": {}} if name in ("ppo", "vapo") and "critic" in Config.model_fields else {}
        )
        alone = {**raw, "algorithm": {"name": name, "group_size": 1}, **critic}
        if name in single:
            Config.model_validate(alone)
        else:
            with pytest.raises(ValueError, match="group of 1"):
                Config.model_validate(alone)
    assert (
        not AlgorithmConfig(name="grpo", advantage="mine.py:f").compares_samples
        and not AlgorithmConfig(name="grpo", advantage="return_to_go").compares_samples
    )
    assert AlgorithmConfig(name="reinforce", advantage="group_relative").compares_samples


def test_advantages_that_work_with_one_sample_do() -> None:
    """Four prompts, one sample each: an advantage on the list gives a signal, another
    gives none.
    """
    samples = [
        Sample.from_tokens(f"s{i}", [1, 1, 1], [False, True, True], reward=float(i)).with_(
            baseline=0.5, rewards={"r": float(i)}, streams={"values": torch.zeros(3)}
        )
        for i in range(4)
    ]
    for name in ADVANTAGES:
        batch = Batch.pack(samples)
        build("grpo", advantage=name).advantages([batch])
        assert bool(batch.streams["advantages"].abs().max() > 1e-3) == (
            catalogue.ADVANTAGES[name].alone
        ), name


# the command


def test_the_command_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == describe() and {"name", "family", "parts", "paper", "defaults"} == set(found[0])
    gspo = next(e for e in found if e["name"] == "gspo")
    assert gspo["parts"] == {
        "advantage": "group_relative",
        "surrogate": "gspo",
        "correction": "none",
        "reduce": "sequence_mean",
    }
    assert (
        gspo["defaults"] == {"clip_low": 3e-4, "clip_high": 4e-4} and gspo["paper"] == "2507.18071"
    )
    assert main(["algorithms"]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == len(TABLE) + 1 and list(printed()[0]) == lines[0]
    dapo = dict(zip(lines[0], next(line for line in lines if line[0] == "dapo"), strict=True))
    assert (dapo["advantage"], dapo["defaults"]) == (
        "group_relative",
        "clip_high=0.28, dynamic_sampling=True, overlong_buffer=max_new_tokens/5",
    )


def test_the_names_need_no_torch() -> None:
    source = str(Path(reinforge.__file__).parents[1])
    code = (
        f"import sys; sys.path.insert(0, {source!r}); import reinforge.algorithms.catalogue;"
        " sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_whether_the_kl_term_is_weighted_reaches_the_loss() -> None:
    weighted, plain = (
        build("grpo", kl_coefficient=0.1, kl_importance=flag).loss for flag in (True, False)
    )
    assert weighted.kl_importance is True and plain.kl_importance is False  # type: ignore[attr-defined]


def test_an_error_in_a_users_advantage_is_theirs_and_says_which_line(tmp_path: Path) -> None:
    def wrong(rollouts: Any, options: Any) -> Any:
        return rollouts.reward  # line of the error

    class Empty:
        pass

    line = wrong.__code__.co_firstlineno + 1
    with pytest.raises(
        InputError,
        match=(
            r"algorithm.advantage: wrong raised AttributeError: .*'reward'"
            rf" \({Path(__file__).name}:{line}\)"
        ),
    ):
        build("grpo", advantage=wrong).advantage(Empty())  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"raised TypeError: .*called with \(rollouts, options\)"):
        build("grpo", advantage=lambda rollouts: rollouts).advantage(Empty())  # type: ignore[arg-type]
    with pytest.raises(AttributeError):  # one of ours stays a bug
        build("grpo").advantage(Empty())  # type: ignore[arg-type]
