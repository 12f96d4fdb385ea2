"""`reinforge demo --quick`: stopped between its stages it goes on; finished it is not run again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reinforge.cli import demo
from reinforge.core.errors import InputError
from reinforge.core.this_command import this_command


def test_an_architecture_that_is_not_made_small_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no tiny 'mamba'.*llama, qwen3_5, gpt_oss, qwen3_moe"):
        demo.run_demo(tmp_path / "demo", quick=True, architecture="mamba")


def test_a_demo_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = demo.train_config
    asked = list[str]()

    def cut(config: object) -> object:
        asked.append(Path(config.run.dir).name)  # type: ignore[attr-defined]
        if len(asked) == 2:
            raise KeyboardInterrupt
        return real(config)  # type: ignore[arg-type]

    monkeypatch.setattr(demo, "train_config", cut)
    with pytest.raises(KeyboardInterrupt):
        demo.run_demo(tmp_path / "demo", quick=True)
    assert asked == ["sft", "grpo"] and not (tmp_path / "demo" / "summary.json").exists()
    summary = demo.run_demo(tmp_path / "demo", quick=True)
    assert (
        json.loads((tmp_path / "demo" / "summary.json").read_text()) == summary
        and 0 <= summary["sft_accuracy"] <= 1
    )
    with pytest.raises(InputError, match="already holds a demo"):
        demo.run_demo(tmp_path / "demo", quick=True)


def test_the_command_that_it_names_is_one_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make demo` puts nothing on the PATH."""
    script = tmp_path / ".venv" / "bin" / "reinforge"
    script.parent.mkdir(parents=True)
    script.touch(mode=0o755)
    monkeypatch.setattr("sys.executable", str(script.with_name("python")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    assert this_command() == ".venv/bin/reinforge"
    monkeypatch.setenv("PATH", str(script.parent))
    assert this_command() == "reinforge"
    script.unlink()
    assert this_command() == ".venv/bin/python -m reinforge"
