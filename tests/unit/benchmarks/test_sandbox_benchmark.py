"""benchmarks/sandbox.py: runs in the environment of somebody who only uses the library, and
measures what is there.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from sandbox_attacks import CHEATS, CONTAINED, Attack

from helpers.paths import ROOT
from helpers.sandboxes import containment

PATH = ROOT / "benchmarks" / "sandbox.py"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """With a few of the attacks: all of them are tried in tests/e2e."""
    spec = importlib.util.spec_from_file_location("sandbox_benchmark", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    named = {attack.name: attack for attack in CONTAINED}
    monkeypatch.setattr(
        module, "CONTAINED", [named["kill process 1"], named["malloc in C"], named["memory file"]]
    )
    monkeypatch.setattr(module, "CHEATS", {name: CHEATS[name] for name in ("constant", "sys.exit")})
    return module


def ended(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> int | str | None:
    monkeypatch.setattr(
        sys, "argv", ["sandbox.py", "--runs", "20", "--timed", "4", "--workers", "2", *words]
    )
    with pytest.raises(SystemExit) as left:
        bench.main()
    return left.value.code


def test_it_needs_neither_pytest_nor_the_tests() -> None:
    """In a process of its own where pytest cannot be imported, as after `make demo`."""
    code = (
        "import runpy, sys; sys.modules['pytest'] = None; sys.argv = ['sandbox.py', '--help'];"
        f" runpy.run_path({str(PATH)!r}, run_name='__main__')"
    )
    paths = [
        p
        for p in sys.path
        if p
        and not Path(p).is_relative_to(ROOT / "tests")
        and not Path(p).is_relative_to(ROOT / "benchmarks")
    ]
    start = f"import sys; sys.path[:] = [{str(PATH.parent)!r}] + {paths!r}; {code}"
    said = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, cwd="/")
    assert said.returncode == 0 and "--backend" in said.stdout, said.stderr


def test_the_way_that_is_missing_is_named_and_the_other_measured(
    bench: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    containment("own")
    monkeypatch.setattr(
        bench, "missing", lambda mode: "bwrap is not installed" if mode == "bwrap" else None
    )
    assert ended(bench, monkeypatch, "--out", str(tmp_path / "out.json")) == 0
    said = capsys.readouterr().out
    assert "bubblewrap: not here, so not measured: bwrap is not installed" in said
    assert "namespaces: 5 attacks tried, 5 held, 0 broke it." in said
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["bubblewrap"] == {"missing": "bwrap is not installed"}
    assert (
        report["namespaces"]["tried"],
        report["namespaces"]["held"],
        report["namespaces"]["broke"],
    ) == (5, 5, [])
    assert report["namespaces"]["mixed"]["rewards_changed"] == 0
    assert ended(bench, monkeypatch, "--backend", "bubblewrap") == 1  # nothing was measured


def test_what_breaks_out_is_named_and_fails(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    containment("own")
    escapes = Attack("says so", "print('ESCAPED')", ("ok",))
    monkeypatch.setattr(
        bench,
        "CONTAINED",
        [*bench.CONTAINED, escapes, Attack("in C", "int main(){}", ("ok",), "c")],
    )
    monkeypatch.setattr(bench, "CHEATS", {"adds": "def add(a, b): return a + b"})
    # no compiler: left out, and said so
    monkeypatch.setattr(bench.shutil, "which", lambda name, path: None)
    monkeypatch.setattr(
        bench,
        "mixed",
        lambda *a: dict.fromkeys(
            ("rewards_changed", "unscored", "orphans", "leaked_descriptors"), 0
        ),
    )
    assert ended(bench, monkeypatch, "--backend", "namespaces") == 1
    said = capsys.readouterr().out
    assert (
        '"broke": ["says so", "adds"]' in said
        and '"left_out": ["malloc in C (no gcc)", "in C (no gcc)"]' in said
    )
    assert "namespaces: 4 attacks tried, 2 held, 2 broke it." in said
