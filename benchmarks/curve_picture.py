"""The picture of a learning curve, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

WIDTH, HEIGHT = 640, 340
LEFT, RIGHT, TOP, BOTTOM = 60, 620, 44, 290
COLOURS = ("#2c8a7b", "#b88712", "#4a6fa5", "#a5484a", "#6b4a8a")
SMOOTH = 5
"""Steps in a running mean."""


def draw(results: dict[str, Any]) -> str:
    """Training rewards of each seed over its steps; at the ends, the held-out scores with their standard errors."""
    start, seeds = results["start"], results["seeds"]
    steps = max(len(seed["training_rewards"]) for seed in seeds)
    shapes = [_axes(steps), _constant(start["best_constant"]), _point(-0.02, start["before"], "#1f2933")]
    for place, seed in enumerate(seeds):
        colour = COLOURS[place % len(COLOURS)]
        points = " ".join(
            f"{_x((step + 1) / steps):.1f},{_y(reward):.1f}"
            for step, reward in enumerate(running_mean(seed["training_rewards"], SMOOTH))
        )
        shapes.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        shapes.append(_point(1.01 + 0.015 * place, seed["after"], colour))
        shapes.append(
            f'<text x="{LEFT + 130 + 70 * place}" y="36" fill="{colour}">seed {seed["seed"]}</text>'
        )
    title = f"SmolLM2-135M-Instruct learns {results['settings']['set']} with GRPO"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="title description" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#1f2933">\n'
        f'<title id="title">{title}</title>\n<desc id="description">Mean reward of training over optimizer steps for each seed, '
        "and the reward of held-out rows before and after.</desc>\n"
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#ffffff"/>\n'
        f'<text x="{LEFT}" y="20" font-weight="600">{title}</text>\n<text x="{LEFT}" y="36">mean reward</text>\n'
        + "\n".join(shapes)
        + "\n</svg>\n"
    )


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Return, for each value, the mean of it and up to `width - 1` values before it."""
    return [
        sum(part) / len(part)
        for part in (values[max(0, end - width) : end] for end in range(1, len(values) + 1))
    ]


def _x(share: float) -> float:
    return LEFT + 24 + share * (RIGHT - LEFT - 64)


def _y(reward: float) -> float:
    return BOTTOM - reward * (BOTTOM - TOP)


def _axes(steps: int) -> str:
    lines = "".join(
        f'<path d="M{LEFT} {_y(mark):.1f}H{RIGHT}" stroke="#cbd2d9"/>'
        f'<text x="{LEFT - 8}" y="{_y(mark) + 4:.1f}" text-anchor="end">{mark:g}</text>'
        for mark in (0, 0.25, 0.5, 0.75, 1)
    )
    labels = "".join(
        f'<text x="{_x(share):.1f}" y="{BOTTOM + 18}" text-anchor="middle">{round(share * steps)}</text>'
        for share in (0, 0.5, 1)
    )
    note = f"optimizer step. Lines: training, mean of {SMOOTH} steps; dots: held-out rows, ± 1 standard error"
    return f'{lines}{labels}<text x="{LEFT}" y="{BOTTOM + 38}" fill="#616e7c" font-size="12">{note}</text>'


def _constant(reward: float) -> str:
    y = _y(reward)
    return (
        f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="#9aa5b1" stroke-dasharray="5 4"/>'
        f'<text x="{RIGHT}" y="{y - 5:.1f}" text-anchor="end" fill="#616e7c" font-size="12">best constant answer</text>'
    )


def _point(share: float, measured: dict[str, Any], colour: str) -> str:
    x, error = _x(share), measured["standard_error"] or 0.0
    low, high = _y(measured["mean"] - error), _y(measured["mean"] + error)
    return (
        f'<path d="M{x:.1f} {low:.1f}V{high:.1f}" stroke="{colour}" stroke-width="1.6"/>'
        f'<circle cx="{x:.1f}" cy="{_y(measured["mean"]):.1f}" r="4" fill="{colour}"/>'
    )
