"""Small charts as SVG text. Every label is escaped; nothing is loaded or run."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, LEFT, BOTTOM = 440, 170, 46, 24
_COLOURS = ("#4269d0", "#efb118", "#9c9c9c", "#ff725c", "#6cc5b0", "#a463f2")


def histogram(title: str, values: Sequence[float], *, bins: int = 20) -> str:
    """How often values fall where."""
    if not values:
        return _figure(title, '<text x="10" y="40">no values</text>')
    low, high = min(values), max(values)
    width = (high - low) / bins or 1.0
    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, int((value - low) / width))] += 1
    most = max(counts)
    step = (WIDTH - LEFT) / bins
    bars = []
    for place, count in enumerate(counts):
        tall = (HEIGHT - BOTTOM - 10) * count / most
        edges = f"{_short(low + place * width)} to {_short(low + (place + 1) * width)}: {count}"
        bars.append(
            f'<rect x="{LEFT + place * step:.1f}" y="{HEIGHT - BOTTOM - tall:.1f}" width="{step - 1:.1f}" '
            f'height="{tall:.1f}" fill="{_COLOURS[0]}"><title>{html.escape(edges)}</title></rect>'
        )
    mean = math.fsum(values) / len(values)
    return _figure(
        f"{title} (n={len(values)}, mean {_short(mean)})",
        "".join(bars) + _axes(low, low + bins * width, 0, most),
    )


def curve(title: str, values: Sequence[float], band: Sequence[tuple[float, float]]) -> str:
    """Values from the lowest to the highest, with the range around each."""
    if not values:
        return _figure(title, '<text x="10" y="40">no values</text>')
    order = sorted(range(len(values)), key=lambda place: (values[place], band[place]))
    low = min(0.0, *(pair[0] for pair in band))
    high = max(1.0, *(pair[1] for pair in band))

    def at(place: int, value: float) -> str:
        x = LEFT + (WIDTH - LEFT) * (place + 0.5) / len(values)
        y = HEIGHT - BOTTOM - (HEIGHT - BOTTOM - 10) * (value - low) / (high - low)
        return f"{x:.1f},{y:.1f}"

    upper = [at(place, band[index][1]) for place, index in enumerate(order)]
    lower = [at(place, band[index][0]) for place, index in enumerate(order)]
    line = " ".join(at(place, values[index]) for place, index in enumerate(order))
    shapes = (
        f'<polygon points="{" ".join([*upper, *reversed(lower)])}" fill="{_COLOURS[0]}" opacity="0.18"/>'
        f'<polyline points="{line}" fill="none" stroke="{_COLOURS[0]}" stroke-width="2"/>'
    )
    return _figure(title, shapes + _axes(1, len(values), low, high))


def shares(title: str, parts: Mapping[str, float], unit: str) -> str:
    """One bar, split."""
    total = math.fsum(parts.values())
    if total <= 0:
        return _figure(title, '<text x="10" y="40">no values</text>')
    pieces, x = [], 10.0
    for place, (name, value) in enumerate(parts.items()):
        width = (WIDTH - 20) * value / total
        colour = _COLOURS[place % len(_COLOURS)]
        label = f"{name}: {_short(value)} {unit}, {100 * value / total:.0f} %"
        pieces.append(f'<rect x="{x:.1f}" y="14" width="{width:.1f}" height="34" fill="{colour}"/>')
        pieces.append(f'<rect x="10" y="{62 + 20 * place}" width="11" height="11" fill="{colour}"/>')
        pieces.append(f'<text x="28" y="{72 + 20 * place}">{html.escape(label)}</text>')
        x += width
    return _figure(title, "".join(pieces))


def _axes(left: float, right: float, low: float, high: float) -> str:
    base = HEIGHT - BOTTOM
    return (
        f'<line x1="{LEFT}" y1="{base}" x2="{WIDTH}" y2="{base}" stroke="#888"/>'
        f'<text x="{LEFT}" y="{HEIGHT - 6}">{_short(left)}</text>'
        f'<text x="{WIDTH}" y="{HEIGHT - 6}" text-anchor="end">{_short(right)}</text>'
        f'<text x="{LEFT - 5}" y="{base}" text-anchor="end">{_short(low)}</text>'
        f'<text x="{LEFT - 5}" y="18" text-anchor="end">{_short(high)}</text>'
    )


def _figure(title: str, shapes: str) -> str:
    return (
        f"<figure><figcaption>{html.escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">{shapes}</svg></figure>'
    )


def _short(value: float) -> str:
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.3g}"
