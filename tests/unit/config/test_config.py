"""The loader: what a scalar means, what is refused, and what an error says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from reinforge.config.explain import all_keys, section_of
from reinforge.config.load import apply_override, config_from_dict, load_config
from reinforge.config.reference import json_schema, reference_markdown, type_name
from reinforge.config.schema import Config
from reinforge.config.strict import parse, scalar
from reinforge.core.errors import InputError

GOOD = """
model: {path: org/name}
algorithm: {name: grpo}
data: {source: rows.jsonl}
rewards: [{name: exact_number}]
train: {steps: 3, learning_rate: 1e-5}
run: {dir: runs/x}
"""


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "c.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refused(tmp_path: Path, text: str | bytes, *overrides: str) -> str:
    with pytest.raises(InputError) as error:
        load_config(write(tmp_path, text), overrides)
    return str(error.value)


def test_a_missing_section_comes_with_an_example(tmp_path: Path) -> None:
    text = "model: {path: m}\nalgorithm: {name: sft}\ndata: {source: d.jsonl}\ntrain: {steps: 1}\n"
    assert "run: is required but missing: write e.g. `run: {dir: runs/first}`." in refused(
        tmp_path, text
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("-2.", -2.0),
        ("007", 7),
        ("0x1F", 31),
        ("0o17", 15),
        ("+3", 3),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("", None),
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("off", "off"),
        ("1_000", "1_000"),
        ("12:30:45", "12:30:45"),
        ("2024-01-02", "2024-01-02"),
        ("1e", "1e"),
        ("0b11", "0b11"),
        ("=", "="),
        ("<<", "<<"),
        ("1.2.3", "1.2.3"),
        ("tRue", "tRue"),
    ],
)
def test_scalars_follow_the_core_schema(text: str, value: Any) -> None:
    got = scalar(text, where="k")
    assert got == value and type(got) is type(value)
    assert parse(f"k: {text}", "f")[0] == {"k": value}  # and the file reader agrees


def test_quoted_scalars_stay_text() -> None:
    assert parse("a: '1e-5'\nb: \"true\"\nc: |\n  5\n", "f")[0] == {
        "a": "1e-5",
        "b": "true",
        "c": "5\n",
    }


def test_a_good_file_loads(tmp_path: Path) -> None:
    config = load_config(
        write(tmp_path, GOOD),
        ["train.learning_rate=3e-6", "rewards.0.weight=2", "train.optimizer.betas=[0.8, 0.9]"],
    )
    assert config.train.learning_rate == 3e-6
    assert config.rewards[0].weight == 2.0
    assert config.train.optimizer.betas == (0.8, 0.9)
    assert config.rollout.max_new_tokens == 256


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", ["line 3", "`a` is given twice", "lines 1 and 3"]),
        ("m:\n  x: {y: 1, z: 2, y: 3}\n", ["line 2", "`m.x.y` is given twice"]),
        ("a: !!python/object/apply:os.system [ls]\n", ["line 1", "tag", "python/object"]),
        ("a: !!int '3'\n", ["tag"]),
        ("a: !x y\n", ["tag"]),
        (
            "train: {learning_rate: .nan}\n",
            ["train.learning_rate", "line 1", ".nan is not a finite number"],
        ),
        ("rewards:\n  - name: a\n  - weight: -.inf\n", ["rewards.1.weight", "line 3"]),
        ("a: 1e999\n", ["a:", "1e999"]),
        ("a: " + "9" * 5000 + "\n", ["5000 characters"]),
        ("[1, 2]\n", ["top level is a list"]),
        ("", ["top level is empty"]),
        ("just text\n", ["top level is a str"]),
        ("a: [1, 2\nb: 3\n", ["not YAML", "line 2"]),
        ("a:\n\tb: 1\n", ["line 2", "tab"]),
        ("a: 1\n---\nb: 2\n", ["line 2"]),
        ("? [a]\n: 1\n", ["a key must be plain text"]),
        ('a: "\\ud800"\n', ["surrogate"]),
        ('a: "x\\0"\n', ["NUL"]),
        (b"a: \xff\n", ["UTF-8"]),
        ("a: &x [*x]\n", ["alias inside itself"]),
        ("a: " + "[" * 2000 + "\n", ["deeper than 40"]),
        ("a: \x07\n", ["not YAML"]),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str | bytes, words: list[str]) -> None:
    message = refused(tmp_path, text)
    assert "c.yaml" in message
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    ("file", "override", "told"),
    [
        ("recipe:chainsum", "", "Did you mean recipe:chain_sum? `reinforge recipes` lists all."),
        ("recipe:gpro", "", "Did you mean recipe:algorithms/grpo? `reinforge recipes` lists all."),
        ("recipe:grpo", "", "There are: algorithms/dr_grpo, algorithms/grpo"),
        ("nowhere/chain_sum.yaml", "", "file. Did you mean recipe:chain_sum? Check the path."),
        ("recipe:chain_sum", "data.format=shargpt", " Did you mean 'sharegpt'?"),
        ("recipe:chain_sum", "train.backend=fdsp", " Did you mean 'fsdp'?"),
    ],
)
def test_a_name_that_is_nearly_right_is_told(file: str, override: str, told: str) -> None:
    with pytest.raises(InputError) as caught:
        load_config(Path(file), [override] if override else [])
    assert told in str(caught.value)


def test_a_name_that_is_like_none_gets_no_guess() -> None:
    with pytest.raises(InputError) as caught:
        load_config(Path("recipe:chain_sum"), ["data.format=xyz"])
    assert "Did you mean" not in str(caught.value)


def test_alias_bomb_and_size(tmp_path: Path) -> None:
    bomb = "a0: &a0 [x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
    )
    assert "more than 16 aliases" in refused(tmp_path, bomb)
    assert parse("a: &x {b: 1}\nc: *x\n", "f")[0] == {"a": {"b": 1}, "c": {"b": 1}}
    assert "1,000,000 bytes" in refused(tmp_path, GOOD + "#" * 1_000_000)
    assert "no such configuration file" in str(
        pytest.raises(InputError, load_config, tmp_path / "d.yaml").value
    )
    assert "is a directory" in str(pytest.raises(InputError, load_config, tmp_path).value)


def test_every_problem_is_named_with_its_line(tmp_path: Path) -> None:
    text = """\
model: {path: x, dtype: bf16}
learning_rate: 1e-5
algorithm:
  name: grpo
  groupsize: 3
data: {}
rewards: [{name: r, wieght: 2}]
rollout: {temperature: 0, stop: x}
train:
  steps: 1_000
  lr: 3
  tokens_per_microbatch: aut
adapter: {targets: [1]}
run: {dir: runs/x, seed: true}
"""
    message = refused(tmp_path, text, "rollout.max_new_token=5")
    lines = {line.split(" (")[0].removeprefix("  - "): line for line in message.splitlines()[1:]}
    assert "13 problems" in message and len(lines) == 13
    for key, *words in [
        ("model.dtype", "(line 1)", "got 'bf16'", "'auto', 'float32' or 'bfloat16'"),
        ("learning_rate", "(line 2)", "did you mean `train.learning_rate`"),
        ("algorithm.groupsize", "(line 5)", "did you mean `algorithm.group_size`?"),
        ("data.source", "(line 6)", "required but missing", "hub data set id"),
        ("rewards.0.wieght", "(line 7)", "did you mean `rewards.0.weight`?"),
        ("rollout.temperature", "(line 8)", "got 0, expected a number above 0"),
        ("rollout.stop", "(line 8)", "got 'x', expected a list"),
        (
            "rollout.max_new_token",
            "(override `rollout.max_new_token=5`)",
            "did you mean `rollout.max_new_tokens`?",
        ),
        ("train.steps", "(line 10)", "got '1_000', expected a whole number"),
        ("train.lr", "(line 11)", "did you mean `train.learning_rate`?"),
        (
            "train.tokens_per_microbatch",
            "(line 12)",
            "got 'aut', expected 'auto' or a whole number",
        ),
        ("adapter.targets.0", "(line 13)", "got 1, expected text"),
        ("run.seed", "(line 14)", "got true, expected a whole number"),
    ]:
        for word in words:
            assert word in lines[key], (key, message)


def test_a_name_alone_is_no_section_and_it_is_said_how_to_write_one(tmp_path: Path) -> None:
    told = refused(tmp_path, GOOD, "rewards=[exact_number]")
    assert "rewards.0" in told and "Write {name: exact_number}." in told


def test_bool_is_no_number_and_text_is_no_bool(tmp_path: Path) -> None:
    assert "run.seed" in refused(tmp_path, GOOD, "run.seed=true")
    assert "data.shuffle" in refused(tmp_path, GOOD, "data.shuffle=no")
    assert "got 3.5, expected a whole number" in refused(tmp_path, GOOD, "train.steps=3.5")
    for address in ("9464", ":1", "host:99999"):
        told = f"got '{address}', expected host:port, such as 127.0.0.1:9464."
        assert told in refused(tmp_path, GOOD, f"run.log.prometheus='{address}'")
    assert (
        "got 'tail', expected a section with keys of its own (when, drafts, rows, memory)."
        in refused(tmp_path, GOOD, "rollout.speculation=tail")
    )
    nothing = refused(tmp_path, GOOD, "data.eval=null")
    assert "data.eval" in nothing and "Leave it out, or write {} for" in nothing
    assert "model.revision" in refused(tmp_path, GOOD, "model.revision=1234567")
    assert (
        load_config(write(tmp_path, GOOD), ['model.revision="1234567"']).model.revision == "1234567"
    )


def test_a_key_that_is_like_none_is_told_its_neighbours(tmp_path: Path) -> None:
    message = refused(tmp_path, GOOD, "rewards=[{name: exact_number, function: 1}]")
    assert "rewards.0.function" in message and "has name, " in message
    assert "did you mean" not in message


def test_consistency_errors_are_sentences(tmp_path: Path) -> None:
    assert "give exactly one of train.steps and train.epochs" in refused(
        tmp_path, GOOD, "train.epochs=2"
    )
    assert "group of 1" in refused(tmp_path, GOOD, "algorithm.group_size=1")
    assert "needs at least one reward" in refused(tmp_path, GOOD, "rewards=[]")
    message = refused(tmp_path, GOOD, "rollout.top_p=0.9")
    assert (
        "bias the policy gradient" in message
        and "Value error" not in message
        and "pydantic" not in message
    )


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("seed", "run.seed"),
        ("output_dir", "run.dir"),
        ("beta", "algorithm.kl.coefficient"),
        ("model_name_or_path", "model.path"),
        ("modle", "model"),
        ("num_generations", "algorithm.group_size"),
        ("lerning_rate", "train.learning_rate"),
        ("max-new-tokens", "rollout.max_new_tokens"),
    ],
)
def test_hints_across_sections(tmp_path: Path, key: str, hint: str) -> None:
    assert f"did you mean `{hint}`" in refused(tmp_path, GOOD + f"{key}: 1\n")


def test_hints_point_at_real_keys() -> None:
    from reinforge.config.explain import OTHER_NAMES

    keys = {".".join(map(str, path)) for path, _ in all_keys()}
    assert set(OTHER_NAMES.values()) <= keys


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("a.b=1e-3", ("a", "b"), 1e-3),
        ("a.new.deep=x", ("a", "new", "deep"), "x"),
        ("l.1=7", ("l", 1), 7),
        ("l.2=9", ("l", 2), 9),
        ("a.t=Q: {x}", ("a", "t"), "Q: {x}"),
        ("a.s=#5", ("a", "s"), "#5"),
        ("a.s=*x", ("a", "s"), "*x"),
        ("a.e=k=v", ("a", "e"), "k=v"),
        ("a.f={k: [1, no]}", ("a", "f"), {"k": [1, "no"]}),
        ("a.q='5'", ("a", "q"), "5"),
        ("a.n=null", ("a", "n"), None),
        ("none.x=1", ("none", "x"), 1),
        ("z.0.name=r", ("z", 0, "name"), "r"),
    ],
)
def test_overrides(override: str, path: tuple[str | int, ...], value: Any) -> None:
    data: dict[str, Any] = {"a": {"b": 1}, "l": [1, 2], "none": None}
    assert apply_override(data, override) == path
    here: Any = data
    for part in path:
        here = here[part]
    assert here == value and type(here) is type(value)


@pytest.mark.parametrize(
    ("short", "override", "long"),
    [
        ({"agent": "a.py:f"}, "agent.seconds=60", {"agent": {"name": "a.py:f", "seconds": 60}}),
        (
            {"agent": ["sh", "-c"]},
            "agent.concurrent=2",
            {"agent": {"command": ["sh", "-c"], "concurrent": 2}},
        ),
        (
            {"env": [{"name": "x"}]},
            "env.max_turns=3",
            {"env": {"mix": [{"name": "x"}], "max_turns": 3}},
        ),
        ({"env": [{"name": "x"}]}, "env.0.name=y", {"env": [{"name": "y"}]}),
    ],
    ids=str,
)
def test_a_key_of_a_section_in_its_short_form(
    short: dict[str, Any], override: str, long: dict[str, Any]
) -> None:
    apply_override(short, override)
    assert short == long


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("a.b=", "a.b=null for none"),
        ("a.b= ", "given nothing"),
        ("a.b", "key=value"),
        ("=3", "key=value"),
        ("a..b=3", "key=value"),
        ("l.5=1", "list of 2"),
        ("l.x=1", "list of 2"),
        ("a.b.c=1", "`a.b` is 1"),
        ("a.b=.inf", "not a finite number"),
        ("a.b=[1", "not YAML"),
        ("a.b=[*experts*]", "quotes around what begins with *"),
        ("a.b={x: 1, x: 2}", "given twice"),
        ("a.b=[!!python/none x]", "tag"),
    ],
)
def test_bad_overrides(override: str, word: str) -> None:
    with pytest.raises(InputError) as error:
        apply_override({"a": {"b": 1}, "l": [1, 2]}, override)
    assert word in str(error.value) and f"override `{override}`" in str(error.value)


def test_dicts_get_the_same_checks(tmp_path: Path) -> None:
    data = {
        "model": {"path": tmp_path},
        "algorithm": {"name": "sft"},
        "data": {"source": "a.jsonl"},
        "train": {"steps": 1},
        "run": {"dir": "r"},
    }
    config = config_from_dict(data, overrides=["train.steps=5"])
    assert config.model.path == str(tmp_path) and config.train.steps == 5
    assert data["train"] == {"steps": 1}  # the caller's dict is not touched
    with pytest.raises(InputError, match="mine: .*did you mean `train.steps`"):
        config_from_dict({**data, "train": {"step": 1}}, where="mine")
    with pytest.raises(InputError, match="not plain data"):
        config_from_dict({**data, "train": {"steps": float("nan")}})


def test_the_loader_imports_no_torch() -> None:
    code = (
        "import sys, reinforge.config.load, reinforge.config.reference; bad = {'torch',"
        " 'transformers', 'numpy'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_reference_covers_every_key() -> None:
    page = reference_markdown()
    schema = json_schema()
    for path, field in all_keys():
        key = ".".join("N" if part == 0 else str(part) for part in path)
        if section_of(field.annotation) is None:
            assert f"| `{key}` |" in page, key
            assert field.description, f"{key} has no description"
    assert (
        "| `train.steps` | integer ≥ 1 |" in page
        and "| `train.learning_rate` | number ≥ 0 | `1e-05` |" in page
    )
    assert schema["additionalProperties"] is False and set(schema["required"]) == {
        "model",
        "algorithm",
        "data",
        "train",
        "run",
    }
    assert json.loads(json.dumps(schema)) == schema
    assert type_name({"type": "array", "items": {"type": "string"}}) == "list of text"
    assert set(schema["properties"]) == set(Config.model_fields)


def test_a_multitude_of_unknown_keys_is_counted_not_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A suggestion compares a key with every key there is: only those that are shown get one."""
    from reinforge.config import explain

    suggest = explain.did_you_mean
    asked = []

    def listening(loc: Any) -> str:
        asked.append(loc)
        return suggest(loc)

    monkeypatch.setattr(explain, "did_you_mean", listening)
    wrong = {f"key_{i}": 1 for i in range(30_000)}
    with pytest.raises(InputError, match=r"20 problems|and 29\d\d\d more") as caught:
        config_from_dict({"model": {"path": "m"}, **wrong})
    assert len(asked) <= explain.MAX_PROBLEMS and "key_0: unknown key" in str(caught.value)


def test_a_list_of_many_wrong_items_names_the_items_and_not_the_list() -> None:
    with pytest.raises(InputError) as caught:
        config_from_dict({"model": {"path": "m"}, "rollout": {"stop": [1] * 3000}})
    assert "rollout.stop.0: got 1" in str(caught.value) and "more." in str(caught.value)
