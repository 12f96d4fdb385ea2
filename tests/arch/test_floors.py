"""The house stands: imports point down, foreign systems stay in their adapters."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from helpers.source_tree import PACKAGE, ROOT, SRC, imports, modules, project_files
from reinforge.config.engine import SERVERS

FLOORS = {
    "cli": 10,
    "api": 9,
    "ui": 9,
    "check": 8,
    "pipelines": 8,
    "sweeps": 8,
    "plan": 7,
    "offline": 7,
    "build": 6,
    "loops": 5,
    "serve": 5,
    "evals": 5,
    "rollout": 4,
    "envs": 3,
    "cluster": 3,
    "rewards": 2,
    "engines": 2,
    "backends": 2,
    "data": 1,
    "models": 1,
    "weights": 1,
    "sandbox": 1,
    "checkpoint": 1,
    "watch": 1,
    "migrate": 1,
    # a mezzanine: docs/decisions/0003-mezzanine.md and 0017-the-house.md
    "config": 0.7,
    "algorithms": 0.5,
    "core": 0,
}
ABOVE_ALL = {"reinforge", "reinforge.__main__"}  # the package's front door
FREE = {"reinforge.version"}  # may be imported from anywhere
# docs/decisions/0008-judges-are-engines.md; (importer, imported) on one floor, one way only; each
# needs a page in docs/decisions
SIDEWAYS: set[tuple[str, str]] = {("rewards", "engines")}
# the package of every inference server, and the file that speaks to it
SERVER_PACKAGES = {
    facts.package: modules()[facts.dialect.partition(":")[0]].relative_to(PACKAGE).as_posix()
    for facts in SERVERS.values()
}
ADAPTERS = {
    **SERVER_PACKAGES,
    "vllm": "engines/served/vllm_plugin.py",  # loaded by vLLM itself, in its own Python
    "ray": "cluster/",
    "deepspeed": "backends/deepspeed/library.py",
    "megatron": "backends/megatron/library.py",
    "mcp": "envs/mcp.py",
    "flash_attn": "models/flash4.py",
}
HOMES = {
    **ADAPTERS,
    "starlette": "serve/http.py",
    "uvicorn": "serve/http.py",
    "httpx2": "engines/",
    "lm_eval": "evals/lm_eval.py",
    "llguidance": "models/constraint_library.py",
    "optuna": "sweeps/study.py",
    "IPython": "watch/notebook.py",
    "fastapi": "ui/",
}  # each in one file; httpx2 in two: theirs, and our own servers


def package_of(module: str) -> str:
    return module.split(".")[1]


def test_every_package_has_a_floor() -> None:
    packages = {package_of(name) for name in modules() if name.count(".") >= 1} - {
        "__main__",
        "version",
    }
    assert packages and packages <= FLOORS.keys(), (
        f"no floor for {sorted(packages - FLOORS.keys())}"
    )


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_point_down(module: str) -> None:
    """At module level and inside functions alike: hiding an import does not turn an
    arrow around.
    """
    if module in ABOVE_ALL | FREE:
        return
    wrong = []
    for found in imports(module):
        if not found.module.startswith("reinforge") or found.module in FREE:
            continue
        own = package_of(module)
        other = package_of(found.module + ".root")
        if (
            own != other
            and (own, other) not in SIDEWAYS
            and (found.module in ABOVE_ALL or FLOORS[other] >= FLOORS[own])
        ):
            wrong.append(
                f"line {found.line}: {own} (floor {FLOORS[own]}) imports {found.module} (floor"
                f" {FLOORS.get(other, 'front door')})"
            )
    assert not wrong, "\n".join(wrong)


def test_the_front_door_imports_nothing_but_the_version() -> None:
    """What it names for type checkers is not imported when it runs."""
    found = {
        i.module
        for i in imports("reinforge")
        if i.module.startswith("reinforge") and i.at_module_level
    }
    assert found == {"reinforge.version"}


def test_foreign_systems_stay_in_their_adapters() -> None:
    wrong = []
    for module, path in modules().items():
        place = path.relative_to(PACKAGE).as_posix()
        for found in imports(module):
            home = HOMES.get(found.module.split(".")[0])
            if home and not (place.startswith(home) if home.endswith("/") else place == home):
                wrong.append(
                    f"{place}:{found.line} imports {found.module}, which belongs in {home}"
                )
    assert not wrong, "\n".join(wrong)


def circles() -> set[frozenset[str]]:
    """The sets of modules that import each other, over whatever way (Tarjan's components). Imports
    inside functions and under TYPE_CHECKING count: whoever reads one file has to read the other.
    """
    graph = {
        module: {i.module for i in imports(module) if i.module in modules()} - {module}
        for module in modules()
    }
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found = set()

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for other in graph[module]:
            if other not in order:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in stack:
                lowest[module] = min(lowest[module], order[other])
        if lowest[module] == order[module]:
            start = stack.index(module)
            together = stack[start:]
            del stack[start:]
            if len(together) > 1:
                found.add(frozenset(name.removeprefix("reinforge.") for name in together))

    for module in graph:
        if module not in order:
            visit(module)
    return found


def test_no_import_cycles() -> None:
    assert not [sorted(circle) for circle in circles()], "these modules import each other"


def test_no_module_waits_for_another_to_be_imported() -> None:
    """At module level a circle does not even run, wherever one begins."""
    graph = {
        m: {
            i.module
            for i in imports(m)
            if i.at_module_level and i.module in modules() and i.module != m
        }
        for m in modules()
    }
    done: set[str] = set()

    def walk(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, "import cycle: " + " -> ".join(
            [*trail[trail.index(module) :], module]
        )
        if module not in done:
            for other in sorted(graph[module]):
                walk(other, (*trail, module))
            done.add(module)

    for module in sorted(graph):
        walk(module, ())


def loaded_after(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter holds after a statement."""
    code = f"import sys; sys.path.insert(0, {str(SRC)!r}); {statement}; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr
    return {name.split(".")[0] for name in result.stdout.split()}


@pytest.mark.parametrize(
    "statement",
    [
        "import reinforge",
        "import reinforge.config",
        "import reinforge.config.load",
        "import reinforge.core.errors",
    ],
)
def test_light_imports_stay_light(statement: str) -> None:
    """What `plan` and `--help` need first must not pay the seconds that torch and transformers
    take.
    """
    assert loaded_after(statement) & {"torch", "transformers", "numpy", "datasets", "peft"} == set()


def test_the_python_door_needs_no_typer() -> None:
    """As README says: the command line alone does."""
    assert "typer" not in loaded_after(
        "import reinforge.api, reinforge.build.trainer, reinforge.watch.report,"
        " reinforge.watch.view"
    )


def test_training_imports_no_foreign_system() -> None:
    everything = "; ".join(
        f"import {m}" for m in sorted(modules()) if m.startswith("reinforge.loops")
    )
    assert loaded_after(everything) & ADAPTERS.keys() == set()


SEVERAL = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "megatron",
    "deepspeed",
    "ray",
    *SERVER_PACKAGES,
)
ON_RANKS = ("fsdp", "deepspeed", "megatron", "distributed.driver", "distributed.worker")


def test_one_process_imports_nothing_that_is_for_several() -> None:
    """Building a run on one device, and all that `plan` is made of.

    Backends on ranks cost a second of imports.
    """
    parts = (
        "reinforge.build.trainer, reinforge.build.units, reinforge.build.algorithm,"
        " reinforge.plan.data_checks, reinforge.plan.gold_answers"
    )
    code = f"import sys, {parts}; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, env=with_source()
    )
    assert result.returncode == 0, result.stderr
    loaded = result.stdout.split()
    wrong = [m for m in loaded if any(m == name or m.startswith(f"{name}.") for name in SEVERAL)]
    assert wrong == []
    assert on_ranks(loaded) == []


def test_plan_of_a_local_run_imports_no_backend_of_several_processes(tmp_path: Path) -> None:
    """The checks themselves, to their end.

    (transformers' own tokenizers bring parts of torch.distributed.)
    """
    code = f"""
import sys
from pathlib import Path
from reinforge.models.tiny import make_tiny_model
folder = Path({str(tmp_path)!r}) / "model"
model = make_tiny_model(folder, width=32, layers=1, heads=2, kv_heads=1, context=128)
from reinforge.plan.checks import run_checks
from reinforge.config.load import config_from_dict
report = run_checks(config_from_dict({{
    "model": {{"path": str(model)}}, "algorithm": {{"name": "grpo"}},
    "data": {{"source": "arithmetic:chain"}},
    "rewards": [{{"name": "exact_number"}}], "rollout": {{"max_new_tokens": 8}},
    "train": {{"steps": 1}}, "run": {{"dir": {str(tmp_path / "run")!r}}},
}}))
assert report.ok and "prediction" in report.summary, report.errors
print(*sys.modules)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, env=with_source()
    )
    assert result.returncode == 0, result.stderr
    loaded = result.stdout.split()
    assert on_ranks(loaded) == []
    assert {m.split(".")[0] for m in loaded} & {
        "megatron",
        "deepspeed",
        "ray",
        *SERVER_PACKAGES,
    } == set()


def on_ranks(loaded: list[str]) -> list[str]:
    """The modules of backends on several processes among those that were loaded."""
    return [m for m in loaded if m.startswith(tuple(f"reinforge.backends.{n}" for n in ON_RANKS))]


def with_source() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")]),
    }


def test_no_unfinished_business() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX)\b|NotImplementedError")
    found = [
        f"{p.relative_to(ROOT)}:{n}"
        for p in modules().values()
        for n, line in enumerate(p.read_text().splitlines(), 1)
        if marks.search(line)
    ]
    assert found == []


def test_no_machine_paths_and_no_registry_hosts() -> None:
    """Nothing in the project may work, or mean something, on one machine only."""
    places = [
        rf"(?<![\w.~-])/{top}/[\w.-]"
        for top in ("work", "root", "home", "Users", "mnt", "opt/" + "pypi")
    ]
    hosts = [
        r"\b" + ".".join(host)
        for host in (
            ("pypi", "org"),
            ("files", "pythonhosted", "org"),
            ("download", "pytorch", "org"),
        )
    ]
    pattern = re.compile("|".join(places + hosts))
    found = []
    for path in project_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(ROOT)}:{n}: {m.group()}"
            for n, line in enumerate(text.splitlines(), 1)
            if (m := pattern.search(line))
        ]
    assert found == []


def declared(*extras: str) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = project["dependencies"] + [
        d for extra in extras for d in project["optional-dependencies"][extra]
    ]
    names = {re.split(r"[<>=\[ ]", d)[0].lower().replace("-", "_") for d in listed}
    return {{"pyyaml": "yaml", "mlflow_skinny": "mlflow"}.get(n, n) for n in names}


def test_dependencies_are_honest() -> None:
    """Everything imported is declared (runtime or an extra), and everything declared is used."""
    used = (
        {i.module.split(".")[0] for m in modules() for i in imports(m)}
        - sys.stdlib_module_names
        - {"reinforge", "pydantic_core"}  # a part of pydantic
        - ADAPTERS.keys()
    )
    allowed = declared(
        "tensorboard",
        "wandb",
        "mlflow",
        "trackio",
        "plots",
        "gguf",
        "qlora",
        "tasks",
        "serve",
        "structured",
        "math",
        "lm-eval",
        "kernels",
        "sweep",
        "ui",
    )
    assert used <= allowed, f"imported but not declared: {sorted(used - allowed)}"
    indirect = {"numpy"}  # Tensor.numpy() needs it, and torch does not bring it
    unused = declared() - used - indirect
    assert not unused, f"declared but never imported: {sorted(unused)}"
