"""Small SVG plots without dependencies: lines with confidence bands, and bars with whiskers.

Each file carries its own background and its own colours for light and dark
(`prefers-color-scheme`), so it can be read wherever it is shown. Names stand at the ends of their
lines, not in a box that sends the eye back and forth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from reinforge.watch.report import escape

Point = tuple[float, float, float, float]  # x, mean, low, high
Scale = Callable[[float], float]

WIDTH = 760
HEIGHT = 420
LEFT = 64
RIGHT = 150
TOP = 48
BOTTOM = 52
LIGHT = ("#2456c8", "#d9822b", "#2f8f6b", "#a4479b", "#a68a00", "#2e8fb8", "#b5503c", "#63666d")
DARK = ("#7ba4ff", "#f0a860", "#5fc49c", "#d58ad0", "#dcc54a", "#7cc9e6", "#e38b76", "#b0b3b9")
FONT = 'ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif'


def lines(
    series: Mapping[str, Sequence[Point]],
    title: str,
    x_label: str,
    y_label: str,
    path: Path,
    *,
    percent: bool = False,
) -> None:
    """One line per name through the means, with a band from low to high.

    `percent`: values are shares.
    """
    points = [p for line in series.values() for p in line]
    assert points, "nothing to draw"
    xs = ticks(min(p[0] for p in points), max(p[0] for p in points), 7)
    ys = ticks(min(p[2] for p in points), max(p[3] for p in points), 6)
    x = scale(min(p[0] for p in points), max(p[0] for p in points), LEFT, WIDTH - RIGHT)
    y = scale(
        min(ys[0], *(p[2] for p in points)),
        max(ys[-1], *(p[3] for p in points)),
        HEIGHT - BOTTOM,
        TOP,
    )
    parts = [rule(LEFT, y(mark), WIDTH - RIGHT, y(mark), show(mark, percent)) for mark in ys]
    parts += [text(x(mark), HEIGHT - BOTTOM + 18, show(mark), anchor="middle") for mark in xs]
    for i, line in enumerate(series.values()):
        edge = [(p[0], p[3]) for p in line] + [(p[0], p[2]) for p in reversed(line)]
        parts.append(f'<path class="band b{i % 8}" d="{trace(edge, x, y)}Z"/>')
    for i, (name, line) in enumerate(series.items()):
        drawn = trace([(p[0], p[1]) for p in line], x, y)
        parts.append(
            f'<path class="line l{i % 8}"{dash(i)} d="{drawn}"><title>{escape(name)}</title></path>'
        )
    ends = [(x(line[-1][0]), y(line[-1][1])) for line in series.values()]
    places = spread([end[1] for end in ends], 16, TOP + 4, HEIGHT - BOTTOM)
    for i, (name, end, place) in enumerate(zip(series, ends, places, strict=True)):
        start = WIDTH - RIGHT + 8
        parts.append(
            f'<path class="line thin l{i % 8}"{dash(i)} d="M{end[0]:.1f} {end[1]:.1f}L{start:.1f}'
            f' {place:.1f}h14"/>'
        )
        parts.append(text(start + 19, place + 4, name, name_of_class=f"t{i % 8}"))
    write(path, parts, title, x_label, y_label, HEIGHT, (LEFT + WIDTH - RIGHT) / 2)


def bars(
    values: Mapping[str, tuple[float, float, float]],
    title: str,
    x_label: str,
    path: Path,
    *,
    percent: bool = False,
    kinds: Mapping[str, str] | None = None,
) -> None:
    """One horizontal bar per name: (mean, low, high), with a whisker from low to high and the mean
    in figures. `kinds`: bars of one kind have one colour; without it each has its own.
    """
    assert values, "nothing to draw"
    left = 24 + 8 * max(map(len, values))
    thick = 26
    height = TOP + thick * len(values) + BOTTOM
    marks = ticks(min(0.0, *(v[1] for v in values.values())), max(v[2] for v in values.values()), 6)
    x = scale(
        min(0.0, marks[0]), max(marks[-1], *(v[2] for v in values.values())), left, WIDTH - 90
    )
    parts = [
        f'<line class="rule" x1="{x(m):.1f}" x2="{x(m):.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>'
        for m in marks
    ]
    parts += [
        text(x(mark), height - BOTTOM + 18, show(mark, percent), anchor="middle") for mark in marks
    ]
    seen = list(dict.fromkeys((kinds or {}).get(name, name) for name in values))
    for i, (name, (mean, low, high)) in enumerate(values.items()):
        colour = seen.index((kinds or {}).get(name, name)) % 8
        middle = TOP + thick * (i + 0.5)
        from_ = min(x(0), x(mean))
        to = max(x(0), x(mean))
        parts.append(
            f'<rect class="f{colour}" x="{from_:.1f}" y="{middle - 8:.1f}" width="{to - from_:.1f}"'
            ' height="16" rx="2"/>'
        )
        parts.append(
            f'<path class="whisker" d="M{x(low):.1f} {middle:.1f}H{x(high):.1f}M{x(low):.1f}'
            f' {middle - 4:.1f}v8M{x(high):.1f} {middle - 4:.1f}v8"/>'
        )
        parts.append(text(left - 8, middle + 4, name, anchor="end"))
        parts.append(
            text(max(x(high), x(mean)) + 8, middle + 4, show(mean, percent), name_of_class="strong")
        )
    write(path, parts, title, x_label, "", height, (left + WIDTH - 90) / 2)


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round marks within [low, high], about `count` of them.

    >>> ticks(0.07, 0.43, 4), ticks(0, 60, 6), ticks(3, 3, 4)
    ([0.1, 0.2, 0.3, 0.4], [0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0], [2.8, 3.0, 3.2])
    """
    if low == high:
        low = low - (abs(low) * 0.1 or 1)
        high = high + (abs(high) * 0.1 or 1)
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))
    return [
        float(f"{i * step:.12g}")
        for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]


def scale(low: float, high: float, start: float, stop: float) -> Scale:
    return lambda value: start + (value - low) / ((high - low) or 1) * (stop - start)


def spread(wanted: Sequence[float], gap: float, top: float, bottom: float) -> list[float]:
    """Places as near as can be to the wanted ones, at least `gap` apart, in the same order.

    >>> spread([50, 10, 52], 16, 0, 100)
    [50, 10, 66]
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    places = [float("nan")] * len(wanted)
    at = top - gap
    for i in order:
        at = places[i] = max(wanted[i], at + gap)
    at = bottom + gap
    for i in reversed(order):  # what ran out at the bottom moves up again
        at = places[i] = min(places[i], at - gap)
    return places


def show(value: float, percent: bool = False) -> str:
    """
    >>> show(0.125), show(0.4, percent=True), show(12000), show(2.5e7)
    ('0.125', '40%', '12,000', '2.5e+07')
    """
    if percent:
        return f"{100 * value:.3g}%"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def trace(points: Sequence[tuple[float, float]], x: Scale, y: Scale) -> str:
    return "".join(f"{'L' if i else 'M'}{x(a):.1f} {y(b):.1f}" for i, (a, b) in enumerate(points))


def dash(index: int) -> str:
    """Every second line is dashed: neighbours can be told apart without colours."""
    return ' stroke-dasharray="6 3"' if index % 2 else ""


def rule(x1: float, y1: float, x2: float, y2: float, label: str) -> str:
    return f'<line class="rule" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>' + text(
        x1 - 8, y1 + 4, label, anchor="end"
    )


def text(
    x: float,
    y: float,
    value: str,
    *,
    anchor: str = "start",
    name_of_class: str = "",
    turn: str = "",
) -> str:
    name = f' class="{name_of_class}"' if name_of_class else ""
    return (
        f'<text{name} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turn}>{escape(value)}</text>'
    )


def style() -> str:
    def colours(names: Sequence[str], page: str, ink: str, soft: str, grid: str) -> str:
        each = "".join(
            f".l{i}{{stroke:{c}}}.b{i},.f{i},.t{i}{{fill:{c}}}" for i, c in enumerate(names)
        )
        return (
            f".page{{fill:{page}}}text{{fill:{soft}}}.title,.strong{{fill:{ink}}}"
            f".whisker{{stroke:{ink}}}.rule{{stroke:{grid}}}{each}"
        )

    shapes = (
        f"text{{font:12px {FONT};font-variant-numeric:tabular-nums}}"
        ".title{font-size:15px;font-weight:600}"
        ".line{fill:none;stroke-width:2;stroke-linejoin:round}"
    )
    rest = ".band{opacity:.14}.thin{stroke-width:1;opacity:.7}.whisker{fill:none;stroke-width:1.3}"
    light = colours(LIGHT, "#ffffff", "#1c1d20", "#5a5d64", "#e6e6e2")
    dark = colours(DARK, "#1c1e21", "#e8e8e6", "#a9acb3", "#303338")
    return f"<style>{shapes}{rest}{light}@media(prefers-color-scheme:dark){{{dark}}}</style>"


def write(
    path: Path,
    parts: Sequence[str],
    title: str,
    x_label: str,
    y_label: str,
    height: float,
    middle: float,
) -> None:
    """The whole file: background, title, axis labels, and the parts."""
    turned = text(
        18,
        (TOP + height - BOTTOM) / 2,
        y_label,
        anchor="middle",
        turn=f' transform="rotate(-90 18 {(TOP + height - BOTTOM) / 2:.1f})"',
    )
    frame = [
        text(LEFT if y_label else 24, 26, title, name_of_class="title"),
        text(middle, height - 12, x_label, anchor="middle"),
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
        f' height="{height}" role="img" aria-label="{escape(title)}">'
    )
    page = f'<rect class="page" width="{WIDTH}" height="{height}" rx="8"/>'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "\n".join([head, style(), page, *frame, *([turned] if y_label else []), *parts, "</svg>"])
        + "\n",
        encoding="utf-8",
    )
