# ruff: noqa: E402
"""Writes docs/algorithms/parity.md: every policy-gradient part beside TRL's and veRL's, how far
apart, and where and why they differ.

    python tools/pg_parity_table.py [FILE]

Their numbers are in tests/parity/pg_trl.json and pg_verl.json (neither library is needed). A test
checks that the committed page is this one. Differences are given as bounds, which do not change
with the machine.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "parity")]

from pg_differences import DIFFERENCES, EVERYWHERE, ONLY_HERE, ONLY_THERE
from pg_ours import PEERS
from pg_parity import differences, ours

BOUNDS = {"float64": (1e-12, 1e-9, 1e-7), "float32": (1e-5,)}

SECTIONS = {  # headline: methods by how they begin
    "Advantages": (
        "group_",
        "decoupled",
        "leave_one_out",
        "optimal_",
        "greedy_",
        "pass_at_k",
        "gpg",
        "return_to_go",
        "gae",
    ),
    "Surrogates and reducers": (
        "ppo_clip",
        "truncated",
        "gspo",
        "luspo",
        "gmpo",
        "cispo",
        "sapo",
        "vespo",
        "dppo",
        "sequence_clip",
        "reinforce",
    ),
    "Selections": ("clip_cov", "kl_cov", "top_entropy", "off_policy"),
    "Corrections": ("tis", "mis", "icepop", "seq_tis", "seq_mask"),
    "KL, entropy, critic, shaping": ("kl ", "entropy", "adaptive", "ValueLoss", "overlong"),
}

HEAD = """# The policy gradient beside TRL and veRL

Written by `tools/pg_parity_table.py`. Each row is a part of ours on fixed numbers: twelve \
ragged rows, a group without signal, log-ratios
inside and far outside of the clips, rows that were cut off. Their numbers were made by their \
own code (`tests/parity/pg_reference.py`) and are
compared in CI (`tests/parity/test_pg_parity.py`): losses with their gradients, advantages, weights.

A cell has their name for it, and a bound on the largest difference of any output, as a share of \
the output's largest number. "f64" and
"f32" are the precisions that they compute in. A number in brackets leads to a note: there they \
compute something else on purpose, or
with another default, and the comparison is made after the conversion that the note describes.
"""


def bound(precision: str, value: float) -> str:
    limit = next(b for b in BOUNDS[precision] if value < b)
    return f"{precision.replace('float', 'f')} < {limit:.0e}".replace("e-0", "e-")


def cell(peer: str, method: str, notes: list[str]) -> str:
    case = PEERS[peer]["cases"].get(method)
    if case is None:
        return "not there"
    found = ", ".join(
        bound(precision, value)
        for precision, value in sorted(differences(peer, method).items(), reverse=True)
    )
    text = DIFFERENCES.get((peer, method))
    if text is None:
        return f"`{case['call']}`: {found}"
    if text not in notes:
        notes.append(text)
    return f"`{case['call']}`: {found} [[{notes.index(text) + 1}]](#notes)"


def tables() -> tuple[list[str], list[str]]:
    methods = list(dict.fromkeys(m for peer in PEERS.values() for m in peer["cases"]))
    peers = " | ".join(f"{name} {peer['version']}" for name, peer in PEERS.items())
    lines: list[str] = []
    notes: list[str] = []
    placed: list[str] = []
    for title, starts in SECTIONS.items():
        chosen = sorted(
            (m for m in methods if m.startswith(starts) and m not in placed),
            key=lambda m: next(i for i, s in enumerate(starts) if m.startswith(s)),
        )
        placed += chosen
        lines += ["", f"## {title}", "", f"| what | ours | {peers} |", "|---|---|---|---|"]
        for method in chosen:
            calls = {
                ours(peer, method).call: peer for peer in PEERS if method in PEERS[peer]["cases"]
            }
            call = (
                "".join(f"`{c}`" for c in calls)
                if len(calls) == 1
                else ", ".join(f"`{c}` ({p})" for c, p in calls.items())
            )
            lines.append(
                f"| {method} | {call} | {' | '.join(cell(peer, method, notes) for peer in PEERS)} |"
            )
    assert not set(methods) - set(placed), set(methods) - set(placed)
    return lines, notes


def page() -> str:
    lines, notes = tables()
    lines += ["", "## Notes", ""] + [f"{i}. {text}" for i, text in enumerate(notes, 1)]
    lines += ["", "## In general"]
    for peer, texts in EVERYWHERE.items():
        lines += ["", f"{peer}:", ""] + [f"- {text}" for text in texts]
    lines += ["", "## Only here", ""] + [f"- {name} ({what})" for name, what in ONLY_HERE.items()]
    lines += ["", "## Only there", ""] + [
        f"- {peer}: {'; '.join(names)}." for peer, names in ONLY_THERE.items()
    ]
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "algorithms" / "parity.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(), encoding="utf-8")
    print(f"wrote {path.name}")
