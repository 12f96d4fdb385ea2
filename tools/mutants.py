"""Breaks the library on purpose, one change at a time, and counts the changes that a test notices.

    python tools/mutants.py                  every change of tools/mutants.toml
    python tools/mutants.py --only rollout   those whose file, name or tests contain the word
    python tools/mutants.py --since HEAD~9   those that the list of that commit does not have
    python tools/mutants.py --jobs 2 --json out.json

Each change is made in a copy of the tree, so that a stopped run leaves nothing behind. A change
counts as killed when the tests named beside it fail; before that the same tests have passed without
it. Exit code 0: at least 95% are killed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tools" / "mutants.toml"
COPIED = ("src", "tests", "recipes", "docs", "benchmarks", "tools", ".ci", "deploy")
GOAL = 0.95
SECONDS = 420  # for the tests of one change; a change that makes them hang is noticed too


@dataclass(frozen=True)
class Mutant:
    """One wrong change: in `file`, `old` (which stands there exactly once) becomes `new`, and
    `tests` must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: list[str]


@dataclass(frozen=True)
class Result:
    mutant: Mutant
    verdict: str  # killed, survived, or why it could not be tried
    seconds: float


def read_list(path: Path = LIST) -> list[Mutant]:
    """Every change of the list; a name that stands twice or an empty field is an error
    of the list.
    """
    mutants = [
        Mutant(**entry) for entry in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
    ]
    names = [mutant.name for mutant in mutants]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SystemExit(f"{path.name}: these names stand twice: {', '.join(twice)}")
    return mutants


def names_at(commit: str) -> set[str]:
    """The names of the changes that a commit's list had."""
    command = ["git", "show", f"{commit}:{LIST.relative_to(ROOT).as_posix()}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(done.stderr.strip())
    return {entry["name"] for entry in tomllib.loads(done.stdout)["mutant"]}


def problem_of(mutant: Mutant, root: Path = ROOT) -> str | None:
    """Why a change cannot be made, or None. Kept in step with the code by tests/arch."""
    path = root / mutant.file
    if not path.is_file():
        return f"there is no {mutant.file}"
    count = path.read_text(encoding="utf-8").count(mutant.old)
    if count != 1:
        return f"its text stands {count} times in {mutant.file}"
    if mutant.old == mutant.new:
        return "it changes nothing"
    missing = [test for test in mutant.tests if not (root / test.split("::")[0]).exists()]
    return f"there is no {missing[0]}" if missing else None


def copy_of_the_tree(target: Path) -> Path:
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__")
            )
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy2(path, target / path.name)
    return target


def run_tests(tree: Path, tests: list[str]) -> tuple[int, str]:
    """pytest's exit code (0 passed, 1 failed) in a copy of the tree, and the end of what it
    printed.
    """
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(tree / "src"), os.environ.get("PYTHONPATH")])
        ),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return 1, "timed out"
    return done.returncode, done.stdout[-3000:]


def try_one(mutant: Mutant, tree: Path) -> Result:
    began = time.monotonic()
    problem = problem_of(mutant, tree)
    if problem:
        return Result(mutant, problem, 0.0)
    path = tree / mutant.file
    original = path.read_text(encoding="utf-8")
    path.write_text(original.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        code, said = run_tests(tree, mutant.tests)
    finally:
        path.write_text(original, encoding="utf-8")
    if code in (2, 4, 5):  # interrupted, wrong usage, no tests: nothing was shown
        verdict = f"pytest ended with {code}: {said.strip().splitlines()[-1:]}"
    else:
        # a pytest that died was killed by the change too
        verdict = "survived" if code == 0 else "killed"
    return Result(mutant, verdict, time.monotonic() - began)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="a word of the name, the file or the tests")
    parser.add_argument("--since", metavar="COMMIT", help="those that are newer than this commit")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument(
        "--no-baseline", action="store_true", help="do not run the tests without a change first"
    )
    options = parser.parse_args()
    known = names_at(options.since) if options.since else set()
    mutants = [
        m
        for m in read_list()
        if options.only in f"{m.name} {m.file} {' '.join(m.tests)}" and m.name not in known
    ]

    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees: Queue[Path] = Queue()
        for job in range(options.jobs):
            trees.put(copy_of_the_tree(Path(folder) / f"tree-{job}"))

        def in_a_tree(mutant: Mutant) -> Result:
            tree = trees.get()
            try:
                result = try_one(mutant, tree)
            finally:
                trees.put(tree)
            print(
                f"{result.verdict:10} {result.seconds:6.1f} s  {mutant.file}: {mutant.name}",
                flush=True,
            )
            return result

        if not options.no_baseline:
            everything = sorted({test for mutant in mutants for test in mutant.tests})
            tree = trees.get()
            code, said = run_tests(tree, everything)
            trees.put(tree)
            if code != 0:
                print(f"the tests fail without any change:\n{said}")
                return 1
            print(f"{len(everything)} selections of tests pass without a change", flush=True)
        with ThreadPoolExecutor(options.jobs) as pool:
            results = list(pool.map(in_a_tree, mutants))

    tried = [r for r in results if r.verdict in ("killed", "survived")]
    killed = [r for r in tried if r.verdict == "killed"]
    for result in results:
        if result.verdict != "killed":
            print(f"NOT KILLED ({result.verdict}): {result.mutant.file}: {result.mutant.name}")
    share = len(killed) / len(tried) if tried else 0.0
    print(f"{len(results)} changes, {len(tried)} tried, {len(killed)} killed ({share:.1%})")
    if options.json:
        rows = [asdict(r.mutant) | {"verdict": r.verdict, "seconds": r.seconds} for r in results]
        options.json.write_text(json.dumps(rows, indent=2))
    return 0 if share >= GOAL and len(tried) == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
