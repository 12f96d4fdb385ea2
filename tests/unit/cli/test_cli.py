"""The command line: what it hands on, what it prints, what it exits with."""

from __future__ import annotations

import functools
import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers.paths import SRC
from reinforge.cli.main import ReinforgeCommands, greet, main
from reinforge.cli.model import weights_in_words
from reinforge.core.errors import InputError, StoppedByPolicy, Terminated

CONFIG = """
model: {path: org/name}
algorithm: {name: grpo}
data: {source: "arithmetic:chain"}
rewards: [{name: exact_number}]
train: {steps: 3}
run: {dir: RUN}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its model is on a hub, which nobody asks here: what loads it is faked."""
    monkeypatch.setattr("reinforge.core.hub.cached", lambda name: True)
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG.replace("RUN", str(tmp_path / "run")))
    return path


def fake(monkeypatch: pytest.MonkeyPatch, module: str, **functions: Callable[..., Any]) -> None:
    stand_in = ModuleType(module)
    for name, function in functions.items():
        setattr(stand_in, name, function)
    monkeypatch.setitem(sys.modules, module, stand_in)


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    from reinforge.version import __version__

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"reinforge {__version__}\n"
    assert main(["-h"]) == 0
    page = capsys.readouterr().out
    names = [
        "train",
        "plan",
        "generate",
        "check",
        "eval",
        "chat",
        "serve",
        "export",
        "tiny",
        "runs",
        "schema",
        "algorithms",
        "demo",
    ]
    for name in names:
        assert name in page
        assert main([name, "-h"]) == 0
        shown = capsys.readouterr().out
        assert ("Example" in shown and f"reinforge {name}" in shown) or name == "runs", name
    for name in ("list", "show", "report", "compare", "digest"):
        assert main(["runs", name, "--help"]) == 0
        assert f"reinforge runs {name}" in capsys.readouterr().out


def test_the_list_of_commands_imports_none_of_them() -> None:
    code = """
import sys
from reinforge.cli.main import main
assert main(["--help"]) == 0 and main(["no-such-command"]) == 2
print(sorted(name for name in sys.modules if name.startswith("reinforge.")))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    loaded = {"cli", "cli.lazy", "cli.main", "core", "core.errors", "version"}
    assert done.stdout.splitlines()[-1] == str(sorted(f"reinforge.{name}" for name in loaded))


def test_train_hands_on_the_config(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("reinforge.cli.train.train_config", seen.append)
    assert main(["train", str(config), "train.steps=7", "train.learning_rate=1e-3"]) == 0
    assert (seen[0].train.steps, seen[0].train.learning_rate) == (7, 1e-3)
    assert capsys.readouterr().out == "", "the run tells its end itself"


def test_who_waits_sees_a_line_before_anything_is_imported() -> None:
    """In a log too. Not measured by the clock: when it is written, not even the configuration's
    library is loaded.
    """
    code = """
import sys
from reinforge.cli.main import main
class Written:
    said = []
    terminal = True
    def isatty(self): return self.terminal
    def write(self, text):
        heavy = {"torch", "transformers", "pydantic", "rich.live"}
        self.said.append((text, sorted(heavy & set(sys.modules))))
    def flush(self): pass
sys.stderr = Written()
main(["train", "nowhere.yaml"]); main(["runs", "list", "nowhere"]); main(["train", "--help"])
Written.terminal = False
main(["plan", "nowhere.yaml"]); main(["train", "nowhere.yaml"])
lines = [said for said in Written.said if said[0].startswith("reinforge")]
print([text for text, _ in lines], lines[0][1])
"""
    from reinforge.version import __version__

    src = str(SRC)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": src},
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = [f"reinforge {__version__}: {command} nowhere.yaml" for command in ("train", "plan")]
    assert done.stdout.splitlines()[-1] == f"{said} []", done.stderr


def test_train_refuses_before_anything_heavy(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "reinforge.cli.train.train_config", lambda c: pytest.fail("must not be reached")
    )
    assert main(["train", str(config), "train.lerning_rate=1"]) == 2
    assert "did you mean `train.learning_rate`?" in capsys.readouterr().err
    assert main(["train", str(config), "algorithm.name=gpro", "model.path=./nowhere"]) == 2
    err = capsys.readouterr().err
    assert (
        "2 problems" in err
        and "Did you mean grpo?" in err
        and "./nowhere" in err
        and "Traceback" not in err
    )


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (
            InputError("bad row.", where="a.jsonl line 3", fix="Remove it."),
            2,
            "error: a.jsonl line 3: bad row. Remove it.",
        ),
        (StoppedByPolicy("three bad steps"), 3, "three bad steps"),
        (Terminated("saved step 5"), 143, "\nsaved step 5"),
        (
            ZeroDivisionError("oops\nmore"),
            1,
            "unexpected ZeroDivisionError: oops (run again with --debug",
        ),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_become_exit_codes(
    error: BaseException,
    code: int,
    words: str,
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def raises(*_: Any) -> None:
        raise error

    monkeypatch.setattr("reinforge.cli.train.train_config", raises)
    assert main(["train", str(config)]) == code
    err = capsys.readouterr().err
    assert words in f"\n{err}" and "Traceback" not in err
    if code in (1, 2):
        assert main(["train", str(config), "--debug"]) == code
        assert "Traceback" in capsys.readouterr().err


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian", "x"]) == 2
    assert "Did you mean 'train'" in capsys.readouterr().err
    assert main(["train"]) == 2
    assert main(["train", "nowhere.yaml"]) == 2
    assert "nowhere.yaml: no such configuration file" in capsys.readouterr().err


def test_generate(
    tmp_path: Path,
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: list[Any] = []

    async def generate(*args: Any, **kw: Any) -> int:
        calls.append((args, kw))
        out.write_text('{"prompt": "1+1=", "completion": "2"}\n')
        return 12

    monkeypatch.setattr("reinforge.offline.generate.generate_file", generate)
    prompts = tmp_path / "p.jsonl"
    out = tmp_path / "o.jsonl"
    prompts.write_text("{}\n")
    line = [
        "generate",
        "m",
        "--prompts",
        str(prompts),
        "--out",
        str(out),
        "-n",
        "4",
        "--temperature",
        "0",
        "--max-new-tokens",
        "9",
        "--seed",
        "3",
    ]
    assert main(line) == 0
    assert calls[-1] == (
        ("m", prompts, out),
        dict(n=4, temperature=0.0, top_p=1.0, max_new_tokens=9, seed=3, adapter=None),
    )
    assert capsys.readouterr().out == f"  1+1= -> 2\n12 rows in {out}\n"
    line[1] = str(config)
    assert main(line) == 0 and calls[-1][0][0] == "org/name"
    assert main(["generate", "m", "--prompts", str(prompts), "--out", str(prompts)]) == 2
    assert main(["generate", "m", "--prompts", "none.jsonl", "--out", str(out)]) == 2
    assert main(["generate", "m", "--prompts", str(prompts), "--out", str(out), "-n", "0"]) == 2
    assert len(calls) == 2


def test_generate_tells_of_answers_that_were_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def generate(model: str, prompts: Path, out: Path, **_: Any) -> int:
        stops = ("length", "eos", "length")
        out.write_text(
            "".join(
                json.dumps({"prompt": "p", "completion": "a\nb", "stop": stop}) + "\n"
                for stop in stops
            )
        )
        return 3

    monkeypatch.setattr("reinforge.offline.generate.generate_file", generate)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("{}\n")
    line = ["generate", "m", "--prompts", str(prompts), "--out", str(tmp_path / "o.jsonl")]
    assert main(line) == 0
    said = capsys.readouterr().out
    assert "cut" not in said and said.count("  p -> a⏎b\n") == 3
    assert main([*line, "--regex", "[0-9]+"]) == 0
    assert "2 of 3 answers were cut before their form was complete" in capsys.readouterr().out


def test_eval_says_that_nothing_could_be_scored(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"eval/accuracy": math.nan, "eval/n": 0}
    monkeypatch.setattr("reinforge.cli.model.evaluate_model", lambda *_: found)
    assert main(["eval", str(config)]) == 0
    told = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert told == [["eval/accuracy", "nothing could be scored"], ["eval/n", "0"]]


def test_eval_chat_export_demo_check(
    tmp_path: Path,
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: list[Any] = []

    def record(result: Any) -> Callable[..., Any]:
        return lambda *args, **kw: calls.append((args, kw)) or result

    monkeypatch.setattr("reinforge.cli.model.evaluate_model", record({"eval/accuracy": 0.5}))
    fake(monkeypatch, "reinforge.cli.chat", chat=record(None))
    fake(monkeypatch, "reinforge.offline.export", export=record(Path("exported")))
    fake(monkeypatch, "reinforge.cli.demo", run_demo=record({"before": 0.1, "after": 0.9}))
    monkeypatch.setattr("reinforge.cli.check.check_learning", record({"ok": True}))
    assert main(["eval", str(config), "eval.samples=8"]) == 0
    assert calls[-1] == ((config, ["eval.samples=8"]), {})
    assert main(["chat", "m", "--temperature", "0.5", "--system", "be brief"]) == 0
    assert calls[-1] == (
        ("m",),
        dict(temperature=0.5, top_p=0.95, max_new_tokens=512, system="be brief"),
    )
    assert (
        main(["export", str(tmp_path), str(tmp_path / "out"), "--merge", "--checkpoint", "best"])
        == 0
    )
    assert calls[-1] == (
        (tmp_path, tmp_path / "out"),
        dict(checkpoint="best", merge=True, gguf=None, push=None),
    )
    assert main(["export", str(tmp_path), str(tmp_path / "out"), "--checkpoint", "bets"]) == 2
    assert main(["export", str(tmp_path / "none"), str(tmp_path / "out")]) == 2
    assert main(["export", str(tmp_path), str(tmp_path)]) == 2  # not empty: it holds the config
    assert main(["demo", "--dir", "d", "--quick"]) == 0
    assert calls[-1] == ((Path("d"), 0, True, "llama"), {})
    for quick, folder in (([], "runs/demo"), (["--quick"], "runs/demo-quick")):
        assert main(["demo", *quick]) == 0 and calls[-1][0][0] == Path(folder)
    assert main(["check"]) == 0 and calls[-1] == ((None,), {})
    assert main(["check", str(config)]) == 0 and calls[-1][0][0].model.path == "org/name"
    assert len(calls) == 8


def test_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from reinforge.watch.recorder import Recorder

    for name, seed in (("a", 0), ("b", 1)):
        recorder = Recorder(
            tmp_path / name, {"algorithm": {"name": "grpo"}, "run": {"seed": seed}}, steps=5
        )
        recorder.log(3 + seed, {"reward/mean": 0.25})
        recorder.log(3 + seed, {"eval/accuracy": 0.5625})
        recorder.event("finished")
        recorder.close()
    fake(monkeypatch, "reinforge.checkpoint.store", digest_run=lambda d: "abc123")
    assert main(["runs", "list", str(tmp_path)]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split("\t") == ["run", "status", "step", "algorithm", "best", "updated"]
    assert (
        any(
            row.startswith(f"{tmp_path / 'a'}\tfinished\t3/5\tgrpo\taccuracy 0.5625\t20")
            for row in rows
        )
        and len(rows) == 2
    )
    assert main(["runs", "list", str(tmp_path), "--json"]) == 0
    assert {run["dir"]: run["reward"] for run in json.loads(capsys.readouterr().out)} == {
        str(tmp_path / name): 0.25 for name in "ab"
    }
    assert main(["runs", "show", str(tmp_path / "a")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("finished  3 of 5 steps\n") and ["reward", "mean", "0.25"] in [
        line.split() for line in out.splitlines()
    ]
    assert main(["runs", "compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    out = capsys.readouterr().out
    assert "\nstep\t3\t4\n" in out and "\nrun.seed\t0\t1\n" in out
    assert main(["runs", "digest", "runs/a"]) == 0
    assert capsys.readouterr().out == "abc123\n"


def test_schema_and_algorithms(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "reinforge configuration"
    assert main(["schema", "--markdown"]) == 0
    assert "| `train.learning_rate` |" in capsys.readouterr().out
    assert main(["algorithms"]) == 0
    assert any(line.startswith("grpo\t") for line in capsys.readouterr().out.splitlines())


def test_module_entry_point_is_light(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run(
        [sys.executable, "-m", "reinforge", "train", "none.yaml"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
        env=env,
    )
    assert (
        done.returncode == 2
        and done.stdout == ""
        and done.stderr.startswith("error: none.yaml: no such configuration file.")
    )
    code = (
        "import sys; from reinforge.cli.main import main; assert main(['schema']) == 0; heavy ="
        " {'torch', 'transformers', 'numpy', 'datasets', 'pandas'} & set(sys.modules);"
        " sys.exit(str(heavy) if heavy else 0)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, cwd=tmp_path, timeout=60, env=env
        ).returncode
        == 0
    )
    piped = subprocess.run(
        f"{sys.executable} -m reinforge schema | head -c 10",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
        env=env,
    )
    assert "Traceback" not in piped.stderr and "unexpected" not in piped.stderr


def test_tiny_says_in_three_lines_what_it_made_and_what_to_do_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from reinforge.config.load import load_config
    from reinforge.offline import starter_model
    from reinforge.plan.preflight import preflight

    quickly = functools.partial(starter_model.make_taught_model, steps=50)
    monkeypatch.setattr(starter_model, "make_taught_model", quickly)
    monkeypatch.chdir(tmp_path)
    assert main(["tiny", "runs/tiny"]) == 0
    said = capfd.readouterr()
    assert "step 50/50" in said.err.splitlines()
    made, following, more = said.out.splitlines()
    assert made.startswith("made  runs/tiny, ") and (tmp_path / "runs/tiny/config.json").exists()
    assert following == "next  reinforge train recipe:algorithms/grpo"
    assert more == "more  reinforge recipes lists what else starts from it"
    assert preflight(load_config("recipe:algorithms/grpo")).ok
    assert main(["tiny", "other place"]) == 0
    *_, command = shlex.split(capfd.readouterr().out.splitlines()[1])
    assert preflight(load_config("recipe:algorithms/grpo", [command])).ok


def test_digests_of_several_runs_are_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    digests = {"a": "abc", "b": "abc", "c": "def"}
    fake(monkeypatch, "reinforge.checkpoint.store", digest_run=lambda d: digests[d.name])
    assert main(["runs", "digest", "runs/a"]) == 0
    assert capsys.readouterr().out == "abc\n"
    assert main(["runs", "digest", "runs/a", "runs/b"]) == 0
    assert capsys.readouterr().out == "abc  runs/a\nabc  runs/b\nequal: bit-identical\n"
    assert main(["runs", "digest", "runs/a", "runs/b", "runs/c"]) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == ["def  runs/c", "different"]


def test_the_first_line_tells_no_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["serve", "M", "--api-key", "sk-1", "--hub-token=sk-2", "tracker.api_key=sk-3"]
    greet([*asked, "--max-new-tokens", "5", "--tokens=7"])
    assert capsys.readouterr().err.split(": ", 1)[1] == (
        "serve M --api-key *** --hub-token=*** tracker.api_key=*** --max-new-tokens 5 --tokens=7\n"
    )


def test_eval_takes_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    """One that is not there is named as a recipe; one that is, is read."""
    assert main(["eval", "recipe:chain_summ"]) == 2
    assert "there is no recipe 'chain_summ'" in capsys.readouterr().err
    assert main(["eval", "recipe:chain_sum", "model.path=none-there", "train.stepz=1"]) == 2
    assert "train.stepz" in capsys.readouterr().err
    assert main(["eval", "nowhere.yaml"]) == 2
    assert "recipe:NAME" in capsys.readouterr().err


@pytest.mark.parametrize(("word", "meant"), ReinforgeCommands.called.items())
def test_a_command_by_another_name_is_told(
    word: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word, "runs/x"]) == 2
    assert f"No such command '{word}'. Did you mean '{meant}'?" in capsys.readouterr().err
    assert main([*meant.split(), "--help"]) == 0


def test_weights_below_a_megabyte_are_not_told_as_none(tmp_path: Path) -> None:
    """Those of a small adapter were `0 MB`."""
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes(14_100))
    assert weights_in_words(tmp_path) == "14 KB"
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes(2_600_000))
    assert weights_in_words(tmp_path) == "3 MB"
