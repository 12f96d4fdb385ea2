"""Small pictures of metrics over steps: SVG in an `img`, for notebooks, and by itself for pages.

An `svg` element in the page itself is thrown away where a notebook is not trusted yet. A picture
does not see the theme of the page, so its colours can be read on white and on black.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence

from reinforge.core.html import escape
from reinforge.watch.report import first_curves

Curve = Sequence[tuple[float, float]]  # (step, value)

MOST = 3  # curves: a row of a usual output
POINTS = 200  # of a curve; longer ones are means over bins
DOTS = 30  # points up to which each has a dot
WIDTH = 236
HEIGHT = 132
LEFT, RIGHT, TOP, BOTTOM = 42, 8, 24, 18  # room around the curve
LINE = "#3b82f6"
TEXT = "#808890"


def curve_images(series: Mapping[str, Curve]) -> str:
    """The curves that are looked at first, each as an `img`."""
    return "".join(curve_image(name, series[name]) for name in first_curves(series)[:MOST])


def curve_image(name: str, curve: Curve) -> str:
    """An `img` with the curve in it; nothing where no value is finite."""
    drawn = curve_svg(name, curve)
    if not drawn:
        return ""
    picture = base64.b64encode(drawn.encode()).decode()
    return (
        f'<img width="{WIDTH}" height="{HEIGHT}" alt="{escape(in_words(name, curve))}"'
        f' style="display:inline-block;margin:0 8px 0 0" src="data:image/svg+xml;base64,{picture}">'
    )


def curve_svg(name: str, curve: Curve) -> str:
    """The picture alone; nothing where no value is finite."""
    points = _shown(curve)
    return _svg(name, points) if points else ""


def in_words(name: str, curve: Curve) -> str:
    """Where the curve begins and ends."""
    (first, began), *_, (last, newest) = [*_shown(curve)[:1], *_shown(curve)]
    return f"{name}: {began:.4g} at step {first:.0f}, {newest:.4g} at step {last:.0f}"


def _shown(curve: Curve) -> Curve:
    return thinned([(x, y) for x, y in curve if math.isfinite(y)])


def thinned(curve: Curve) -> Curve:
    """At most POINTS points: the means of bins of the same size; the newest value stays."""
    size = -(-len(curve) // POINTS)
    if size <= 1:
        return curve
    bins = [curve[i : i + size] for i in range(0, len(curve) - 1, size)]
    means = [(part[-1][0], sum(y for _, y in part) / len(part)) for part in bins]
    return [*means, curve[-1]] if means[-1][0] != curve[-1][0] else [*means[:-1], curve[-1]]


def _svg(name: str, points: Curve) -> str:
    steps = [x for x, _ in points]
    values = [y for _, y in points]
    low, high = min(values), max(values)
    flat = high == low

    def place(x: float, y: float) -> str:
        across = (x - steps[0]) / ((steps[-1] - steps[0]) or 1)
        up = 0.5 if flat else (y - low) / (high - low)
        wide = WIDTH - LEFT - RIGHT
        tall = HEIGHT - TOP - BOTTOM
        return f"{LEFT + across * wide:.1f},{TOP + (1 - up) * tall:.1f}"

    places = [place(*point) for point in points]
    dots = places if len(places) <= DOTS else places[-1:]
    circles = "".join(
        f'<circle cx="{x}" cy="{y}" r="2.2"/>' for x, y in (dot.split(",") for dot in dots)
    )
    marks = [low] if flat else [high, low]
    heights = [HEIGHT / 2] if flat else [TOP + 4, HEIGHT - BOTTOM + 4]
    labels = "".join(
        f'<text x="{LEFT - 6}" y="{height:.0f}" text-anchor="end">{mark:.3g}</text>'
        for mark, height in zip(marks, heights, strict=True)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        f' width="{WIDTH}" height="{HEIGHT}"'
        f' font-family="sans-serif" font-size="11" fill="{TEXT}">'
        f'<text x="{LEFT}" y="12">{escape(name)}</text>'
        f'<text x="{WIDTH - RIGHT}" y="12" text-anchor="end" font-weight="bold">'
        f"{values[-1]:.4g}</text>"
        f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" fill="none" stroke="{TEXT}"'
        ' stroke-opacity="0.5"/>'
        f"{labels}"
        f'<text x="{LEFT}" y="{HEIGHT - 4}">{steps[0]:.0f}</text>'
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">step {steps[-1]:.0f}</text>'
        f'<polyline points="{" ".join(places)}" fill="none" stroke="{LINE}" stroke-width="1.6"/>'
        f'<g fill="{LINE}">{circles}</g></svg>'
    )
