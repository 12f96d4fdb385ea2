"""What is read from shell scripts, Python scripts and values, without running any."""

from __future__ import annotations

from pathlib import Path

import pytest

from reinforge.core.errors import InputError
from reinforge.migrate.readers.interpolate import interpolated
from reinforge.migrate.readers.script import Unread, read_script
from reinforge.migrate.readers.shell import Shell
from reinforge.migrate.readers.values import flags, flat, overrides, value_of


def command(text: str) -> list[str]:
    return list(Shell().commands(text))[-1]


def test_variables_are_put_in() -> None:
    script = """
    # veRL scripts are full of these
    project=DAPO
    max_prompt=$((1024 * 2))
    max_response=$((max_prompt * 4))
    home=${RAY_DATA_HOME:-"${HOME}/verl"}
    files="['$home/a.parquet']"
    python -m verl.trainer.main_ppo a=${max_prompt} b=$((max_prompt + max_response)) \\
        # c=1 \\
        d="$files" e="${project}-run" f='$not' "$@"
    """
    assert command(script) == [
        "python", "-m", "verl.trainer.main_ppo", "a=2048", "b=10240",
        "d=['~/verl/a.parquet']", "e=DAPO-run", "f=$not",
    ]  # fmt: skip


def test_arrays_and_here_documents_are_words() -> None:
    array = 'DATA=(\n  data.a=1\n  data.b="x y"\n)\npython main_ppo "${DATA[@]}" c=3'
    assert command(array) == ["python", "main_ppo", "data.a=1", "data.b=x y", "c=3"]
    here = r"""read -r -d '' commands <<EOF
openrlhf.cli.train_dpo \
  --beta 0.1 \
  --x
EOF
deepspeed --module $commands"""
    started = ["deepspeed", "--module", "openrlhf.cli.train_dpo"]
    assert command(here) == [*started, "--beta", "0.1", "--x"]
    inner = 'srun bash -c "pip install x && python -m openrlhf.cli.train_sft --a 1"'
    assert command(inner) == ["python", "-m", "openrlhf.cli.train_sft", "--a", "1"]


def test_what_only_a_shell_could_tell_stays_as_written(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    assert command(f"run a=$(touch {trap}) b=`touch {trap}` c=$UNSET d=$((1 / 0))")[1] == (
        f"a=$(touch {trap})"
    )
    assert command("run c=$UNSET d=$((1 / 0))")[1:] == ["c=$UNSET", "d=$((1 / 0))"]
    assert not trap.exists()


def test_a_quote_that_does_not_end_is_an_error() -> None:
    with pytest.raises(InputError, match="not closed"):
        command("run 'a=1\nb=2")


def test_values() -> None:
    assert overrides(["+a.b=1e-6", "++c=[x,y]", "d=True", "--flag=1", "e=null", "f='x'"]) == {
        "a.b": 1e-6, "c": ["x", "y"], "d": True, "e": None, "f": "'x'",
    }  # fmt: skip
    words = ["--lr", "5e-7", "--flag", "--pair", "0.2", "0.27", "--m=a/b", "--t", "q,", "v"]
    assert flags(words) == {
        "lr": 5e-7, "flag": True, "pair": [0.2, 0.27], "m": "a/b", "t": ["q", "v"],
    }  # fmt: skip
    assert flat({"a": {"b": {"c": 1}, "d": []}, "e": {}}) == {"a.b.c": 1, "a.d": [], "e": {}}
    assert value_of("no") == "no" and value_of("-1") == -1


TOKENS = "${mul:${policy.length}, ${.micro}}"


def test_interpolation() -> None:
    tree = {
        "policy": {
            "length": 512,
            "micro": 4,
            "name": "m/x",
            "tokens": "${mul:${policy.length}, ${.micro}}",
        },
        "dir": "results/${policy.name}",
        "same": "${policy.length}",
        "select": "${oc.select:policy.none,7}",
        "gone": "${not.there}",
    }
    found = interpolated(tree)
    assert found["policy"]["tokens"] == 2048
    assert found["dir"] == "results/m/x" and found["same"] == 512 and found["select"] == 7
    assert found["gone"] is None


SCRIPT = """
import os
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward
from peft import LoraConfig
from datasets import load_dataset

MODEL = "org/model"
parser.add_argument("--lr", type=float, default=2e-6)
raise SystemExit("never run")

def shaped(completions, **_):
    return [0.0] * len(completions)

settings = dict(num_generations=4, **{})
args = GRPOConfig(output_dir=f"{MODEL}-grpo", learning_rate=args.lr, max_steps=2 * 50,
                  seed=int(os.environ["SEED"]), **settings)
args.beta = 0.04
data = load_dataset("org/rows", "main", split="train").map(shaped)
trainer = GRPOTrainer(MODEL, args=args, reward_funcs=[shaped, accuracy_reward], train_dataset=data,
                      peft_config=LoraConfig(r=32, target_modules=["q_proj"]))
trainer.train()
"""


def test_a_script_is_read_and_not_run() -> None:
    script = read_script(SCRIPT, "train.py")
    found = script.settings
    assert script.trainer == "GRPOTrainer" and script.trains_on_import and script.maps_rows
    assert found["output_dir"] == "org/model-grpo" and found["learning_rate"] == 2e-6
    assert found["max_steps"] == 100 and found["num_generations"] == 4 and found["beta"] == 0.04
    assert found["seed"] == Unread("int(os.environ['SEED'])")
    assert found["reward_funcs"] == ["shaped", "accuracy_reward"]
    assert found["LoraConfig.r"] == 32 and found["LoraConfig.target_modules"] == ["q_proj"]
    assert (found["dataset_name"], found["dataset_config"]) == ("org/rows", "main")
    assert found["model"] == "org/model"


def test_a_script_that_is_no_python_is_an_error() -> None:
    with pytest.raises(InputError, match="train.py: this is not Python"):
        read_script("def (", "train.py")


def test_variables_that_double_one_another_are_refused() -> None:
    doubling = "".join(f"a{i + 1}=$a{i}$a{i}\n" for i in range(40))
    with pytest.raises(InputError, match="words without end"):
        command(f"a0=xxxxxxxx\n{doubling}run $a40")
    with pytest.raises(InputError, match="not closed"):
        command("run a='x\n" + "some words\n" * 50_000)
    tree = {f"a{i}": f"${{a{i + 1}}}${{a{i + 1}}}" for i in range(40)} | {"a40": "xxxxxxxx"}
    assert len(str(interpolated(tree)["a0"])) < 50_000


def test_values_of_a_script_do_not_grow_without_end() -> None:
    texts = "".join(f"t{i + 1} = t{i} + t{i}\n" for i in range(40))
    lists = "".join(f"l{i + 1} = [l{i}, l{i}]\n" for i in range(40))
    code = f"t0 = 'xxxx'\n{texts}l0 = [1]\n{lists}"
    calls = "SFTTrainer(model=t40, a=l40, b='x' * 10**12, c=[0] * 10**11, d=2 * 3, e='a' + 'b')"
    found = read_script(code + calls, "train.py").settings
    assert all(isinstance(found[name], Unread) for name in ("model", "a", "b", "c"))
    assert (found["d"], found["e"]) == (6, "ab")
    with pytest.raises(InputError, match="this is not Python"):
        read_script("x = " + "-" * 9000 + "1", "train.py")
