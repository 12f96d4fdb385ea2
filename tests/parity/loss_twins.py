"""Every loss that is no policy gradient, by its name, beside a twin: the paper's formula in plain
Python floats, written for this page alone.

Ours is what `reinforge train` uses: `build(name)`, on packs of a few rows. The twin is a function
of the same numbers; its gradient is taken by central differences. `TWINS[name]()` gives (loss
difference, gradient difference). Settings are the defaults, unless `build` says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from preference_parity import INPUTS, PAIRED, TRL, over_packs
from torch import Tensor

from reinforge.algorithms.build import build
from reinforge.core.backend import TrainedTokens
from reinforge.core.batch import Batch, Totals
from reinforge.core.sample import Sample

Rows = list[list[float]]
Difference = tuple[float, float]
LENGTHS: list[int] = TRL["lengths"]
P, R, C = (
    [INPUTS[k][i, :n].tolist() for i, n in enumerate(LENGTHS)]
    for k in ("logprobs", "reference", "collision")
)
SCORE = [1.2, 0.3, 0.8, 0.5, 0.2, -0.4, 0.6, 0.1]  # given rewards of the rows
BY_REFERENCE = [1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0]  # xpo: which of a pair the reference wrote
WINS = [0.9, 0.1, 0.6, 0.5, 0.3, 0.8, 0.2, 1.0]
LABELS = [float(x) for x in TRL["labels"]]
STEP = 1e-5


def ls(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def s(x: float) -> float:
    return math.exp(ls(x))


def slopes(twin: Callable[[Rows], float], at: Rows) -> Rows:
    """Central differences."""
    found = []
    for i, row in enumerate(at):
        found.append([])
        for j, x in enumerate(row):
            ends = [
                twin(
                    [
                        [x + h if (a, b) == (i, j) else y for b, y in enumerate(line)]
                        for a, line in enumerate(at)
                    ]
                )
                for h in (STEP, -STEP)
            ]
            found[-1].append((ends[0] - ends[1]) / (2 * STEP))
    return found


def compare(twin: Callable[[Rows], float], at: Rows, loss: Tensor, leaf: Tensor) -> Difference:
    loss.backward()
    assert leaf.grad is not None and float(leaf.grad.abs().max()) > 1e-6
    gradient = [
        abs(float(leaf.grad[i, j]) - want)
        for i, row in enumerate(slopes(twin, at))
        for j, want in enumerate(row)
    ]
    return abs(float(loss.detach()) - twin(at)), max(gradient)


# ---- pairs: rows 0-3 are chosen, 4-7 rejected ----


class Pair:
    """What a formula over pair i reads: sums a, b of log-ratios, w, l of log-probs,
    their lengths.
    """

    def __init__(self, x: Rows, i: int):
        self.i = i
        self.n = LENGTHS[i]
        self.m = LENGTHS[i + 4]
        self.w = sum(x[i])
        self.l = sum(x[i + 4])
        self.a, self.b = self.w - sum(R[i]), self.l - sum(R[i + 4])
        self.gap = SCORE[i] - SCORE[i + 4]
        self.explored = self.w * BY_REFERENCE[i] + self.l * BY_REFERENCE[i + 4]

    @property
    def d(self) -> float:
        return 0.1 * (self.a - self.b)


def bernoulli(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def log_odds(mean: float) -> float:
    return mean - math.log(1 - math.exp(mean))


def js(x: float) -> float:
    return math.log(2) + ls(x)


def chosen_nll(x: Rows) -> float:
    return -sum(sum(x[i]) for i in range(4)) / sum(LENGTHS[:4])


PAIR: dict[str, Callable[[Pair], float]] = {
    **dict.fromkeys(("dpo", "sigmoid", "tr_dpo", "online_dpo", "spin"), lambda p: -ls(p.d)),
    "cdpo": lambda p: -0.9 * ls(p.d) - 0.1 * ls(-p.d),
    "robust": lambda p: (-0.9 * ls(p.d) + 0.1 * ls(-p.d)) / 0.8,
    "hinge": lambda p: max(0.0, 1 - p.d),
    "ipo": lambda p: (p.a / p.n - p.b / p.m - 5) ** 2,
    "exo_pair": lambda p: bernoulli(s(p.d), 0.999),
    "nca_pair": lambda p: -ls(0.1 * p.a) - 0.5 * ls(-0.1 * p.a) - 0.5 * ls(-0.1 * p.b),
    "bco_pair": lambda p: -ls(0.1 * p.a) - ls(-0.1 * p.b),
    "sppo_hard": lambda p: (p.a - 5) ** 2 + (p.b + 5) ** 2,
    "apo_zero": lambda p: 1 - s(0.1 * p.a) + s(0.1 * p.b),
    "apo_down": lambda p: s(0.1 * p.a) + 1 - s(p.d),
    "discopop": lambda p: (1 - s(p.d / 0.05)) * -ls(p.d) + s(p.d / 0.05) * math.exp(-p.d),
    "sigmoid_norm": lambda p: -ls(5 * (p.a / p.n - p.b / p.m)),
    "rpo_sq": lambda p: (p.d - p.gap) ** 2,
    "rpo_bwd_kl": lambda p: bernoulli(s(p.gap), s(p.d)),
    "rpo_fwd_kl": lambda p: bernoulli(s(p.d), s(p.gap)),
    "f_dpo": lambda p: -ls(0.1 * (js(p.a) - js(p.b))),
    "simpo": lambda p: -ls(2 * (p.w / p.n - p.l / p.m) - 1),
    "alphapo": lambda p: (
        -ls(2 * ((1 - math.exp(-0.25 * p.w / p.n)) - (1 - math.exp(-0.25 * p.l / p.m))) / 0.25 - 1)
    ),
    "xpo": lambda p: -ls(p.d) + 1e-5 * p.explored,
    "wpo": lambda p: (
        -ls(p.d)
        * math.exp(
            sum(
                sum(a - c for a, c in zip(P[i], C[i], strict=True)) / LENGTHS[i]
                for i in (p.i, p.i + 4)
            )
        )
    ),
}


def pairs_of(x: Rows, formula: Callable[[Pair], float]) -> float:
    return sum(formula(Pair(x, i)) for i in range(4)) / 4


def ranked(x: Rows, paired: bool) -> float:
    """The k-th smallest against the k-th smallest; which is which was settled before the update."""
    pairs = [Pair(x, i) for i in range(4)]
    left, right = (
        ([p.w - p.l for p in pairs], [p.w - p.a - p.l + p.b for p in pairs])
        if paired
        else ([p.a for p in pairs], [p.b for p in pairs])
    )
    return sum(-ls(0.1 * (a - b)) for a, b in zip(sorted(left), sorted(right), strict=True)) / 4


def shorter(x: Rows) -> float:
    """LD-DPO: tokens beyond the shorter answer of a pair count half."""

    def total(i: int, both: int) -> float:
        return sum(
            (p - r) * (1 if t < both else 0.5)
            for t, (p, r) in enumerate(zip(x[i], R[i], strict=True))
        )

    both = [min(LENGTHS[i], LENGTHS[i + 4]) for i in range(4)]
    return sum(-ls(0.1 * (total(i, both[i]) - total(i + 4, both[i]))) for i in range(4)) / 4


def of_pairs(x: Rows, name: str) -> float:
    whole: dict[str, Callable[[], float]] = {
        "aot": lambda: ranked(x, True),
        "aot_unpaired": lambda: ranked(x, False),
        "ld_dpo": lambda: shorter(x),
        "sft_pair": lambda: chosen_nll(x),
        "rpo": lambda: pairs_of(x, PAIR["dpo"]) + nll_per_answer(x),
        "cpo": lambda: pairs_of(x, lambda p: -ls(0.1 * (p.w - p.l))) + chosen_nll(x),
        "orpo": lambda: (
            chosen_nll(x)
            + pairs_of(x, lambda p: -0.1 * ls(log_odds(p.w / p.n) - log_odds(p.l / p.m)))
        ),
        "mpo": lambda: (
            0.8 * pairs_of(x, PAIR["dpo"]) + 0.2 * pairs_of(x, PAIR["bco_pair"]) + chosen_nll(x)
        ),
    }
    return whole[name]() if name in whole else pairs_of(x, PAIR[name])


def nll_per_answer(x: Rows) -> float:
    return -sum(sum(x[i]) / LENGTHS[i] for i in range(4)) / 4


def pair(name: str) -> Difference:
    leaf = INPUTS["logprobs"].clone().requires_grad_()
    given = {
        "score": torch.tensor(SCORE, dtype=torch.float64),
        "by_reference": torch.tensor(BY_REFERENCE, dtype=torch.float64),
    }
    streams = (
        {k: INPUTS[k] for k in ("reference", "collision")} | {"old": INPUTS["logprobs"]} | given
    )
    return compare(
        partial(of_pairs, name=name),
        P,
        over_packs(build(name).loss, PAIRED, leaf, leaf, 4, **streams),
        leaf,
    )


# ---- single answers ----


def of_answers(x: Rows, name: str) -> float:
    ratios = [sum(x[i]) - sum(R[i]) for i in range(8)]
    # -(P - 1/2 - beta (log pi - log ref)) log pi, the bracket without gradient
    if name == "nash_md":
        return (
            sum(-(WINS[i] - 0.5 - 0.1 * (sum(P[i]) - sum(R[i]))) * sum(x[i]) for i in range(8)) / 8
        )
    sign = [1 if label else -1 for label in LABELS]
    if name == "bco":
        mean = sum(0.1 * (sum(P[i]) - sum(R[i])) for i in range(8)) / 8
        return sum(-ls(sign[i] * (0.1 * ratios[i] - mean)) for i in range(8)) / 8
    z = 0.0
    if name == "kto":
        other = [
            float((INPUTS["kl_logprobs"][i, :n] - INPUTS["kl_reference"][i, :n]).sum())
            for i, n in enumerate(LENGTHS)
        ]
        z = max(0.0, sum(other) / 8)
    return sum(1 - s(sign[i] * 0.1 * (ratios[i] - z)) for i in range(8)) / 8


def answer(name: str) -> Difference:
    from preference_parity import row

    leaf = INPUTS["logprobs"].clone().requires_grad_()
    mismatched = Batch.pack(
        [row(i, old=INPUTS["kl_logprobs"], reference=INPUTS["kl_reference"]) for i in range(8)]
    )
    given = {
        "label": torch.tensor(LABELS, dtype=torch.float64),
        "wins": torch.tensor(WINS, dtype=torch.float64),
    }
    streams = {"reference": INPUTS["reference"], "old": INPUTS["logprobs"], **given}
    return compare(
        partial(of_answers, name=name),
        P,
        over_packs(build(name).loss, list(range(8)), leaf, leaf, 3, [mismatched], **streams),
        leaf,
    )


def text(name: str) -> Difference:
    """The mean over all tokens; dft: weighed by the probability, without gradient. best_of_n and
    its like train so on what they picked.
    """

    def twin(x: Rows) -> float:
        weight = math.exp if name == "dft" else lambda _: 1.0
        return -sum(
            weight(P[i][t]) * x[i][t] for i, n in enumerate(LENGTHS) for t in range(n)
        ) / sum(LENGTHS)

    leaf = INPUTS["logprobs"].clone().requires_grad_()
    return compare(twin, P, over_packs(build(name).loss, list(range(8)), leaf, leaf, 3), leaf)


# ---- reward models ----

REWARD: dict[str, Callable[[float, float, float], float]] = {
    "bradley_terry": lambda w, l, m: -ls(w - l),
    "logexp": lambda w, l, m: math.log(1 + math.exp(l - w)),
    "margin": lambda w, l, m: -ls(w - l - m),
    "scaled": lambda w, l, m: -m * ls(w - l),
    "centred": lambda w, l, m: -ls(w - l) + 0.01 * (w + l) ** 2,
}
MARGIN = INPUTS["margin"].tolist()


def of_scores(x: Rows, name: str) -> float:
    """x[i] are the values at the tokens of row i; the score of an answer is the last one."""
    if name == "process":
        return sum(-ls(v) if LABELS[i] else -ls(-v) for i, row in enumerate(x) for v in row) / sum(
            LENGTHS
        )
    if name == "regression":
        return sum((row[-1] - SCORE[i]) ** 2 for i, row in enumerate(x)) / 8
    return sum(REWARD[name](x[i][-1], x[i + 4][-1], MARGIN[i]) for i in range(4)) / 4


def scores(name: str) -> Difference:
    leaf = INPUTS["logprobs"].clone().requires_grad_()  # any numbers do
    given = {
        "gap": torch.cat((INPUTS["margin"], torch.zeros(4))),
        "target": torch.tensor(SCORE, dtype=torch.float64),
        "label": torch.tensor(LABELS, dtype=torch.float64),
    }
    return compare(
        partial(of_scores, name=name),
        P,
        over_packs(build(name).loss, PAIRED, leaf, leaf, 4, **given),
        leaf,
    )


# ---- distillation: 10 tokens in two answers, logits of student and teacher over 6 tokens (uld: 9)
# ----

STUDENT, TEACHER, WIDE = (INPUTS[k].tolist() for k in ("student", "teacher", "wide_teacher"))
TOKENS = [0, 3, 5, 1, 2, 4, 0, 1, 3, 2]
CUT = [4, 6]
TOP = 3


def softmax(row: list[float]) -> list[float]:
    top = max(row)
    total = sum(math.exp(x - top) for x in row)
    return [math.exp(x - top) / total for x in row]


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def mix(p: list[float], q: list[float], share: float) -> list[float]:
    return [share * a + (1 - share) * b for a, b in zip(p, q, strict=True)]


def best(p: list[float], q: list[float]) -> float:
    order = sorted(range(len(p)), key=lambda v: -p[v])
    few = [[d[v] for v in order[:TOP]] + [sum(d[v] for v in order[TOP:])] for d in (p, q)]
    return kl(few[0], few[1])


def ranks(p: list[float], q: list[float]) -> float:
    p, q = sorted(p, reverse=True), sorted(q, reverse=True) + [0.0] * (len(p) - len(q))
    return sum(abs(a - b) for a, b in zip(p, q, strict=True))


# p is the teacher's, q the student's
DIVERGENCE: dict[str, Callable[[list[float], list[float]], float]] = {
    "forward_kl": kl,
    "reverse_kl": lambda p, q: kl(q, p),
    "skew_forward": lambda p, q: kl(p, mix(p, q, 0.1)),
    "skew_reverse": lambda p, q: kl(q, mix(q, p, 0.1)),
    "topk": best,
    "uld": ranks,
    **dict.fromkeys(
        ("jsd", "gkd"), lambda p, q: 0.5 * kl(p, mix(p, q, 0.5)) + 0.5 * kl(q, mix(p, q, 0.5))
    ),
}


def advantages(name: str) -> list[float]:
    """What the teacher thinks of each sampled token, or of those after it; less the mean."""
    ratio = [
        math.log(softmax(t)[y]) - math.log(softmax(q)[y])
        for q, t, y in zip(STUDENT, TEACHER, TOKENS, strict=True)
    ]
    if name == "minillm":
        ends = [CUT[0]] * CUT[0] + [10] * CUT[1]
        ratio = [sum(ratio[t + 1 : end]) / max(1, end - t - 1) for t, end in enumerate(ends)]
    return [x - sum(ratio) / 10 for x in ratio]


def of_logits(x: Rows, name: str) -> float:
    students = [softmax(row) for row in x]
    if name in DIVERGENCE:
        teachers = [softmax(row) for row in (WIDE if name == "uld" else TEACHER)]
        return sum(DIVERGENCE[name](p, q) for p, q in zip(teachers, students, strict=True)) / 10
    before = [softmax(row) for row in STUDENT]
    total = (
        -sum(
            a * q[y] / old[y]
            for a, q, old, y in zip(advantages(name), students, before, TOKENS, strict=True)
        )
        / 10
    )
    return total if name == "opd" else total + of_logits(x, "reverse_kl")


def logits(name: str) -> Difference:
    leaf = INPUTS["student"].clone().requires_grad_()
    tokens = torch.tensor(TOKENS)
    algorithm = build(name, **({"settings": {"k": TOP}} if name == "topk" else {}))
    logprobs = leaf.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    teacher = INPUTS["teacher"].log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    samples = []
    for i, part in enumerate(torch.arange(10).split(CUT)):
        zero = torch.zeros(1, dtype=torch.float64)
        streams = {
            k: torch.cat((zero, v.detach()[part]))
            for k, v in (("teacher", teacher), ("old", logprobs))
        }
        sample = Sample.from_tokens(
            str(i), [0, *tokens[part].tolist()], [False] + [True] * len(part), streams=streams
        )
        samples.append(
            sample.with_(logprobs=torch.cat((zero, logprobs.detach()[part])), reward=0.0)
        )
    batch = Batch.pack(samples)
    if name in ("opd", "minillm"):
        algorithm.advantages([batch])
    loss: Any = algorithm.loss
    divergence = None
    if loss.divergence is not None:
        divergence = loss.divergence(leaf, INPUTS["wide_teacher" if name == "uld" else "teacher"])
    lengths = batch.trained_lengths()
    given = TrainedTokens(
        logprobs,
        None,
        batch.sequence,
        lengths,
        lengths[batch.sequence],
        batch.streams,
        divergence=divergence,
    )
    return compare(partial(of_logits, name=name), STUDENT, loss(given, Totals.of([batch]))[0], leaf)


TWINS: dict[str, Callable[[], Difference]] = {
    **{
        name: partial(text, name)
        for name in ("sft", "dft", "best_of_n", "raft", "rejection_sampling")
    },
    **{
        name: partial(pair, name)
        for name in (
            *PAIR,
            "rpo",
            "mpo",
            "ld_dpo",
            "aot",
            "aot_unpaired",
            "sft_pair",
            "cpo",
            "orpo",
        )
    },
    **{name: partial(answer, name) for name in ("kto", "bco", "apo_zero_unpaired", "nash_md")},
    **{name: partial(scores, name) for name in (*REWARD, "regression", "process")},
    **{name: partial(logits, name) for name in (*DIVERGENCE, "opd", "minillm")},
}
