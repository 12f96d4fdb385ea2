"""What generation benchmarks leave in benchmarks/results/gpu_generate.json: gpu_generate.py writes
it, plot_gpu.py draws it.

    {"results": [{...}, ...]}

One entry per engine, shape, variant and workload; a new measurement takes the place of the old one,
so several calls fill one file. An entry:

| field | |
|---|---|
| `engine` | `reinforge` or a peer (`vllm`) |
| `shape` | of the model: `0.5b`, `1.5b`, `7b`, `moe`, `hybrid` |
| `variant` | the precision (`bf16`, `fp8`), and what else is not the default: `bf16 exact` |
| `workload` | a name of `WORKLOADS` in gpu_generate.py |
| `device` | the GPU |
| `rounds` | `key` (which draws), `seconds`, `tokens`, `longest` answer, `floor` (seconds) of each |
| `tokens_per_second`, `ms_per_token_of_the_longest`, `share_of_floor` | medians of the rounds |
| `details` | what one engine alone tells: `preemptions`, `captures`, `peak_gib`, `mismatch_*` |

Numbers of one round follow from its fields; the medians are written for whoever reads the file.
`mismatch_model` and `mismatch_fp8` are mean differences of log-probs from a trainer with products
of that precision. Where `details` has `median_of`, the one round is the median of so many, as the
table printed it, and the others were not kept.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Round:
    """All answers of a workload, sampled once."""

    key: int
    seconds: float
    tokens: int
    longest: int
    floor: float  # seconds that reading weights and cache takes, or the products

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def ms_per_token_of_the_longest(self) -> float:
        return 1000 * self.seconds / self.longest

    @property
    def share_of_floor(self) -> float:
        return self.floor / self.seconds


Measure = Callable[[Round], float]
SUMMARY: dict[str, Measure] = {
    "tokens_per_second": lambda r: r.tokens_per_second,
    "ms_per_token_of_the_longest": lambda r: r.ms_per_token_of_the_longest,
    "share_of_floor": lambda r: r.share_of_floor,
}


@dataclass(frozen=True)
class GenerationResult:
    """One workload on one engine. `measure` and `peers_rounds` of gpu_generate.py make it."""

    engine: str
    shape: str
    variant: str
    workload: str
    device: str
    rounds: list[Round]
    details: dict[str, float] = field(default_factory=dict)

    @property
    def place(self) -> tuple[str, str, str, str]:
        """Of two results with the same place the newer one counts."""
        return self.engine, self.shape, self.variant, self.workload

    def median(self, name: str) -> float:
        return statistics.median(map(SUMMARY[name], self.rounds))

    def spread(self, name: str) -> tuple[float, float, float]:
        """Median, lowest and highest of the rounds."""
        found = [SUMMARY[name](r) for r in self.rounds]
        return statistics.median(found), min(found), max(found)


def read_results(path: Path) -> list[GenerationResult]:
    """Those of a file; none where there is no file."""
    if not path.exists():
        return []
    found = []
    for entry in json.loads(path.read_text())["results"]:
        fields = {name: value for name, value in entry.items() if name not in SUMMARY}
        rounds = [Round(**r) for r in fields.pop("rounds")]
        found.append(GenerationResult(**fields, rounds=rounds))
    return found


def add_results(path: Path, new: Iterable[GenerationResult]) -> list[GenerationResult]:
    """Writes the file with these, each in the place of the older one; returns all that it has."""
    by_place = {r.place: r for r in read_results(path)}
    by_place |= {r.place: r for r in new}
    results = list(by_place.values())
    entries = [{**asdict(r), **{name: r.median(name) for name in SUMMARY}} for r in results]
    path.write_text(json.dumps({"results": entries}, indent=1) + "\n")
    return results


def table(results: Iterable[GenerationResult]) -> str:
    """A page's table: every result of ours, with the peers of the same shape and workload."""
    found = list(results)
    lines = [
        "| shape | variant | workload | ms per token of the longest | tokens/s | of the floor |"
        " peer: ms | tokens/s | times |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for ours in (r for r in found if r.engine == "reinforge"):
        told = "- | - | -"
        for peer in found:
            same = (peer.shape, peer.workload) == (ours.shape, ours.workload)
            if same and peer.engine != ours.engine:
                ms = peer.median("ms_per_token_of_the_longest")
                times = ms / ours.median("ms_per_token_of_the_longest")
                told = f"{ms:.2f} | {peer.median('tokens_per_second'):,.0f} | {times:.2f}"
        lines.append(
            f"| {ours.shape} | {ours.variant} | {ours.workload} |"
            f" {ours.median('ms_per_token_of_the_longest'):.2f} |"
            f" {ours.median('tokens_per_second'):,.0f} | {ours.median('share_of_floor'):.0%} |"
            f" {told} |"
        )
    return "\n".join(lines)


def exact_costs(results: Iterable[GenerationResult]) -> list[str]:
    """For every exact result of ours: how many times as long it took as the one without."""
    found = {result.place: result for result in results}
    lines = []
    for (engine, shape, variant, workload), exact in found.items():
        plain = found.get((engine, shape, variant.removesuffix(" exact"), workload))
        if plain is not None and plain is not exact:
            times = exact.median("ms_per_token_of_the_longest")
            times /= plain.median("ms_per_token_of_the_longest")
            lines.append(f"{shape} {workload}: exact takes {times:.3f} times as long")
    return lines
