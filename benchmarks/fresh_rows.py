"""Rows of a task of reasoning-gym for gpu_learn.py, made anew: {"q", "a", "split"}.

    python benchmarks/fresh_rows.py gcd OUT.jsonl [--train 4000] [--test 512] [--seed 0]

The task's answers are to be whole numbers: that is what gpu_learn.py and TRL's side of it look for.
No question is in both parts. The same seed makes the same rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import reasoning_gym

NUMBER = re.compile(r"-?\d+")
TRIED = 3  # questions that are looked at for one that is wanted, until a task has too few


def questions(task: str, seed: int, wanted: int) -> Iterator[tuple[str, str]]:
    """(question, answer), each question once."""
    seen = set()
    rows = reasoning_gym.create_dataset(task, seed=seed, size=TRIED * wanted)
    for row in itertools.islice(rows, TRIED * wanted):
        question, answer = str(row["question"]), str(row["answer"]).strip()
        if not NUMBER.fullmatch(answer):
            raise SystemExit(f"{task}: an answer is no whole number: {answer!r}")
        if question not in seen:
            seen.add(question)
            yield question, answer


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task")
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", type=int, default=4000)
    parser.add_argument("--test", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    wanted = args.train + args.test
    rows = list(itertools.islice(questions(args.task, args.seed, wanted), wanted))
    if len(rows) < wanted:
        raise SystemExit(f"{args.task} has {len(rows)} questions, and {wanted} are wanted")
    lines = [
        json.dumps({"q": q, "a": a, "split": "train" if i < args.train else "test"})
        for i, (q, a) in enumerate(rows)
    ]
    args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{args.out}: {args.train} rows to train on, {args.test} held out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
