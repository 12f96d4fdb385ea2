"""Writes docs/gallery.md and its pictures, from results that benchmarks kept. Nothing is run.

`python benchmarks/gallery.py` makes the results anew. A test checks that page and pictures are
those of the results.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from gallery import ENTRIES, EPISODES, RESULTS, GalleryEntry  # noqa: E402

from reinforge.watch.curves import Curve, curve_svg, in_words  # noqa: E402

PAGE = ROOT / "docs" / "gallery.md"
PICTURES = ROOT / "docs" / "plots" / "gallery"
BEGIN = "<!-- made by tools/gen_gallery.py -->"
END = "<!-- end -->"
LARGER = "Larger models, on a GPU"


@dataclass(frozen=True, slots=True)
class GalleryPicture:
    """One section of the page: an entry with what came out of it."""

    name: str  # of the file
    family: str
    title: str
    use: str
    commands: Sequence[str]
    metric: str
    curve: Curve
    measure: str
    rows: str  # on how many it was measured
    ends: Sequence[tuple[float, float]]  # first and last of each seed
    seeds: Sequence[int]
    cost: str

    @property
    def change(self) -> str:
        first, last = (mean(values) for values in zip(*self.ends, strict=True))
        return f"{_number(first)}\u00a0→\u00a0{_number(last)}"  # on one line

    @property
    def anchor(self) -> str:
        return self.title.lower().replace(".", "").replace("+ ", "").replace(" ", "-")


def _number(value: float) -> str:
    return f"{value:.3g}"


def pictures() -> list[GalleryPicture]:
    kept = json.loads(RESULTS.read_text(encoding="utf-8"))
    found = [_of_run(name, entry, kept["entries"][name]) for name, entry in ENTRIES.items()]
    return [*found, *_tools(), *_on_gpu()]


def _of_run(name: str, entry: GalleryEntry, runs: list[dict[str, Any]]) -> GalleryPicture:
    """The curve is the mean of the seeds."""
    seconds = round(mean(run["cpu_seconds"] for run in runs))
    curve = [
        (points[0][0], mean(value for _, value in points))
        for points in zip(*(run["curve"] for run in runs), strict=True)
    ]
    return GalleryPicture(
        name,
        entry.family,
        entry.title,
        entry.use,
        entry.commands,
        entry.curve,
        curve,
        entry.held_out.removeprefix("eval/"),
        f"{runs[0]['n']} rows",
        [(run["held_out"][0][1], run["held_out"][-1][1]) for run in runs],
        [run["seed"] for run in runs],
        f"{seconds} s of one core",
    )


def _result(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))


def _tools() -> list[GalleryPicture]:
    """Both arms of benchmarks/multi_turn.py."""
    kept = _result("multi_turn.json")
    said = {
        "env": ("An environment with a tool", "The model learns to call a calculator."),
        "agent": (
            "An agent program",
            "The same through an unmodified program that speaks to the OpenAI API.",
        ),
    }
    return [
        GalleryPicture(
            f"tool_{arm}",
            EPISODES,
            title,
            use,
            [f"python benchmarks/multi_turn.py --arms {arm}"],
            "reward/mean",
            list(enumerate(kept[arm]["reward"], 1)),
            "accuracy",
            f"{kept[arm]['n']:.0f} problems",
            [(kept[arm]["before"], kept[arm]["after"])],
            [kept["seed"]],
            f"{kept['seconds_sft'] + kept[arm]['seconds_rl']:.0f} s on two cores of an Intel Xeon,"
            " the teaching of a model of 0.2 M parameters included",
        )
        for arm, (title, use) in said.items()
    ]


def _on_gpu() -> list[GalleryPicture]:
    code = _result("gpu_code_reward.json")
    sums = _result("gpu_learn_best.json")
    found = []
    for name, title, use, command, run, rows in (
        (
            "code",
            "Code that passes its tests",
            "Programs are run in a [sandbox](sandbox.md) and judged from outside.",
            "python benchmarks/gpu_code_reward.py MODEL --seconds 70 --staleness 3",
            code["runs"][0],
            240,
        ),
        (
            "chain_sum",
            "Sums in words",
            "GRPO on rows of chain_sum, with a second reward for coming near.",
            "python benchmarks/gpu_learn.py MODEL ROWS.jsonl --recipe best --seconds 185",
            sums,
            512,
        ),
    ):
        curve = [(point["step"], point["accuracy"]) for point in run["curve"]]
        seconds = run["curve"][-1]["seconds"]
        found.append(
            GalleryPicture(
                name,
                LARGER,
                title,
                use,
                [command],
                "held-out accuracy",
                curve,
                "accuracy",
                f"{rows} rows",
                [(curve[0][1], curve[-1][1])],
                [0],
                f"{seconds:.0f} s of training of SmolLM2-135M-Instruct on an NVIDIA H200",
            )
        )
    return found


def section(picture: GalleryPicture) -> str:
    seeds = ", ".join(map(str, picture.seeds))
    held_out = f"On {picture.rows} held out, {picture.measure}: **{picture.change}**"
    if len(picture.ends) > 1:
        ends = ", ".join(_number(last) for _, last in picture.ends)
        held_out += f", the mean of seeds {seeds} (at the end {ends})"
    else:
        held_out += f", seed {seeds}"
    words = in_words(picture.metric, picture.curve)
    return "\n".join(
        [
            f"### {picture.title}",
            "",
            picture.use,
            "",
            f"![{words}](plots/gallery/{picture.name}.svg)",
            "",
            f"{held_out}. {picture.cost[0].upper()}{picture.cost[1:]}.",
            "",
            "```sh",
            *picture.commands,
            "```",
        ]
    )


def overview(found: Sequence[GalleryPicture]) -> str:
    lines = ["| | what for | held out |", "|---|---|---|"]
    lines += [f"| [{p.title}](#{p.anchor}) | {p.use} | {p.measure}<br>{p.change} |" for p in found]
    return "\n".join(lines)


def contents() -> str:
    found = pictures()
    parts = [overview(found)]
    for family in dict.fromkeys(p.family for p in found):
        parts.append(f"## {family}")
        parts += [section(p) for p in found if p.family == family]
    return "\n\n".join(parts)


def with_contents(text: str) -> str:
    """The page with fresh contents between its two marks."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{contents()}\n\n{END}{after}"


def drawn() -> dict[Path, str]:
    """Every picture by its file."""
    return {PICTURES / f"{p.name}.svg": curve_svg(p.metric, p.curve) + "\n" for p in pictures()}


def main() -> None:
    PAGE.write_text(with_contents(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    PICTURES.mkdir(parents=True, exist_ok=True)
    for path, picture in drawn().items():
        path.write_text(picture, encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)} and {len(drawn())} pictures")


if __name__ == "__main__":
    main()
