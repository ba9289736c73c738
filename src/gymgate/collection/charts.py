"""Small charts as SVG text. Every label is escaped; the page's style gives the colours `c0` to `c5`."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, LEFT, BOTTOM = 440, 170, 46, 24
COLOURS = 6
_BASE = HEIGHT - BOTTOM
_TALL = _BASE - 10


def histogram(title: str, values: Sequence[float], *, bins: int = 20) -> str:
    """How many values fall into each of `bins` equal ranges."""
    if not values:
        return _empty(title)
    low, high = min(values), max(values)
    width = (high - low) / bins or 1.0
    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, int((value - low) / width))] += 1
    step, most = (WIDTH - LEFT) / bins, max(counts)
    bars = "".join(
        f'<rect class="c0" x="{LEFT + place * step:.1f}" y="{_BASE - _TALL * count / most:.1f}" '
        f'width="{step - 1:.1f}" height="{_TALL * count / most:.1f}">'
        f"<title>{_short(low + place * width)} to {_short(low + (place + 1) * width)}: {count}</title></rect>"
        for place, count in enumerate(counts)
    )
    mean = _short(math.fsum(values) / len(values))
    return _chart(f"{title} (n={len(values)}, mean {mean})", bars + _axes(low, low + bins * width, 0, most))


def curve(title: str, values: Sequence[float], band: Sequence[tuple[float, float]]) -> str:
    """Values from the lowest to the highest, with the range around each."""
    if not values:
        return _empty(title)
    order = sorted(zip(values, band, strict=True))
    low = min(0.0, *(pair[0] for pair in band))
    high = max(1.0, *(pair[1] for pair in band))

    def points(heights: Sequence[float]) -> list[str]:
        step = (WIDTH - LEFT) / len(values)
        return [
            f"{LEFT + step * (place + 0.5):.1f},{_BASE - _TALL * (value - low) / (high - low):.1f}"
            for place, value in enumerate(heights)
        ]

    upper, lower = points([pair[1] for _, pair in order]), points([pair[0] for _, pair in order])
    shapes = (
        f'<polygon class="c0 band" points="{" ".join([*upper, *reversed(lower)])}"/>'
        f'<polyline class="line" points="{" ".join(points([value for value, _ in order]))}"/>'
    )
    return _chart(title, shapes + _axes(1, len(values), low, high))


def shares(title: str, parts: Mapping[str, float], unit: str) -> str:
    """One bar, split."""
    total = math.fsum(parts.values())
    if total <= 0:
        return _empty(title)
    pieces, x = [], 10.0
    for place, (name, value) in enumerate(parts.items()):
        width, colour = (WIDTH - 20) * value / total, f"c{place % COLOURS}"
        label = f"{name}: {_short(value)} {unit}, {100 * value / total:.0f} %"
        pieces.append(
            f'<rect class="{colour}" x="{x:.1f}" y="14" width="{width:.1f}" height="34"/>'
            f'<rect class="{colour}" x="10" y="{62 + 20 * place}" width="11" height="11"/>'
            f'<text x="28" y="{72 + 20 * place}">{html.escape(label)}</text>'
        )
        x += width
    return _chart(title, "".join(pieces))


def _axes(left: float, right: float, low: float, high: float) -> str:
    labels = (
        (LEFT, HEIGHT - 6, "start", left),
        (WIDTH, HEIGHT - 6, "end", right),
        (LEFT - 5, _BASE, "end", low),
        (LEFT - 5, 18, "end", high),
    )
    line = f'<line class="axis" x1="{LEFT}" y1="{_BASE}" x2="{WIDTH}" y2="{_BASE}"/>'
    return line + "".join(
        f'<text x="{x}" y="{y}" text-anchor="{anchor}">{_short(value)}</text>'
        for x, y, anchor, value in labels
    )


def _empty(title: str) -> str:
    return _chart(title, '<text x="10" y="40">no values</text>')


def _chart(title: str, shapes: str) -> str:
    return (
        f"<figure><figcaption>{html.escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{shapes}</svg></figure>'
    )


def _short(value: float) -> str:
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"
