# ruff: noqa: E402
"""Writes docs/algorithms/parity-losses.md: every supervised, preference, reward and distillation
name, how far it is from TRL and from its formula.

    PYTHONPATH=src python tools/parity_table.py [FILE]

TRL's numbers are in tests/parity/trl_preference.json (TRL is not needed); the formulas are in
tests/parity/loss_twins.py, in plain Python floats.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "parity")]

import preference_parity as parity
from loss_twins import TWINS

from reinforge.algorithms.catalogue import TABLE, AlgorithmSpec

FAMILIES = {
    "supervised": "Supervised",
    "preference": "Preference",
    "reward": "Reward models",
    "distillation": "Distillation",
}
# far above the noise of float64 and of float32, which differs between machines
BOUNDS = (1e-7, 1e-5)
SIGMOID = ("pairs: sigmoid",)
NLL = ("sft: nll",)
# where TRL has it: the cases of preference_parity; an end with * stands for all that begin so
IN_TRL: dict[str, tuple[str, ...]] = {
    "sft": NLL,
    "dft": ("sft: dft",),
    "dpo": SIGMOID,
    "sigmoid": SIGMOID,
    "tr_dpo": SIGMOID,
    "online_dpo": SIGMOID,
    "best_of_n": NLL,
    "raft": NLL,
    "rejection_sampling": NLL,
    **{
        n: (f"pairs: {n}",)
        for n in (
            "robust",
            "hinge",
            "ipo",
            "exo_pair",
            "nca_pair",
            "bco_pair",
            "sppo_hard",
            "aot",
            "aot_unpaired",
            "apo_zero",
            "apo_down",
            "sigmoid_norm",
        )
    },
    "discopop": ("pairs: discopop*",),
    "wpo": ("pairs: sigmoid (wpo*", "pairs: ipo (wpo*"),
    "ld_dpo": ("pairs: sigmoid (ld_alpha*",),
    "f_dpo": ("pairs: sigmoid (divergence*",),
    "mpo": ("pairs: sigmoid+bco_pair+sft*",),
    "sft_pair": ("pairs: sft",),
    **{n: (f"logits: {n}*",) for n in ("simpo", "orpo", "cpo", "alphapo")},
    "kto": ("unpaired: kto*",),
    "apo_zero_unpaired": ("unpaired: apo*",),
    "bradley_terry": ("reward: bradley_terry",),
    "centred": ("reward: bradley_terry (centre*",),
    "margin": ("reward: margin",),
    "forward_kl": ("divergences: jsd (beta=0.0*", "divergences: chunked jsd (beta=0.0*"),
    "uld": ("divergences: uld*",),
    "reverse_kl": ("divergences: jsd (beta=1.0*", "divergences: chunked jsd (beta=1.0*"),
    "topk": ("divergences: student top-k*",),
    **dict.fromkeys(("jsd", "gkd"), ("divergences: jsd*", "divergences: chunked jsd*")),
}
NOTES = {
    "best_of_n": "the loss on what was picked",
    "raft": "the loss on what was picked",
    "rejection_sampling": "the loss on what was picked",
    "tr_dpo": "the reference moves beside the loss",
    "online_dpo": "the loss on the pairs that were picked",
    "spin": "the loss on the pairs that were picked",
    "topk": "k = 3; TRL's support is the student's best tokens, ours the teacher's",
    "gkd": "which answers the student samples is not the loss's",
    "orpo": "TRL's likelihood takes in the prompt, ours is the answer's",
    "opd": "with the policy gradient of its advantages",
    "minillm": "with the policy gradient of its advantages",
    "bco": "the first batch; TRL's mean runs otherwise",
}
HEAD = """# Losses beside TRL and beside their papers

Written by `tools/parity_table.py`; `tests/parity/test_loss_table.py` fails where a name that \
`reinforge algorithms` lists has no row, and where a number
is larger than this page says. "TRL {version}": the largest difference of loss and gradient to \
TRL's own code on the same numbers
(`tests/parity/trl_preference.json`; some settings of TRL's are computed in float32). "Formula": \
the largest difference of the loss as a run builds it by
that name, with its default settings and cut into packs, to the paper's formula in plain Python \
floats, and of the gradient to central differences
of that formula (which are themselves good to about 1e-10).
The policy gradient has [a page of its own](parity.md).
"""


def names() -> list[str]:
    """Every name of the families on this page."""
    return [name for name, row in TABLE.items() if row.family in FAMILIES]


def bound(value: float) -> str:
    return f"< {next((b for b in BOUNDS if value < b), float('inf')):.0e}".replace("e-0", "e-")


def cases(name: str) -> list[str]:
    """The labels of the comparisons with TRL."""
    wanted = IN_TRL.get(name, ())
    found = [
        label
        for label in parity.CASES
        for want in wanted
        if label == want or (want.endswith("*") and label.startswith(want[:-1]))
    ]
    assert found or not wanted, f"{name}: {wanted} is not in trl_preference.json"
    return found


def line(name: str, row: AlgorithmSpec) -> str:
    labels = cases(name)
    theirs = bound(max(max(parity.CASES[label]()) for label in labels)) if labels else "not there"
    said = ", ".join(f"`{label.split(': ')[1]}`" for label in labels if "chunked" not in label)
    loss, gradient = TWINS[name]()
    papers = ", ".join(
        f"[{p}](https://arxiv.org/abs/{p})" if p[:1].isdigit() else p
        for p in row.paper.split(", ")
        if p
    )
    return (
        f"| `{name}` | {papers} | {theirs}{f': {said}' if said else ''} | {bound(loss)},"
        f" {bound(gradient)} | {NOTES.get(name, '')} |"
    )


def page() -> str:
    parts = [HEAD.format(version=parity.TRL["trl"])]
    for family, title in FAMILIES.items():
        rows = [line(name, TABLE[name]) for name in names() if TABLE[name].family == family]
        head = (
            f"| name | paper | TRL {parity.TRL['trl']} | formula: loss, gradient |"
            " |\n|---|---|---|---|---|"
        )
        parts.append("\n".join([f"## {title}\n", head, *rows, ""]))
    return "\n".join(parts)


def main() -> None:
    path = (
        Path(sys.argv[1])
        if len(sys.argv) > 1
        else ROOT / "docs" / "algorithms" / "parity-losses.md"
    )
    path.write_text(page())
    print(
        f"{path}: {len(names())} names, {sum(name in IN_TRL for name in names())} of them"
        " beside TRL"
    )


if __name__ == "__main__":
    main()
