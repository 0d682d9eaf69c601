"""Charts as SVG text: no library, no script. Pure functions of numbers.

Colors are CSS variables with a light and a dark value, so that a chart follows its page. A
standalone one carries its own, for an image in a README.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]
"""Step and value."""

WIDTH, HEIGHT = 720, 280
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 34, 34
MOST_DOTS = 60
"""More points than that make a line without dots."""
MOST_BARS = 120
"""More steps than that share bars, by their means."""

COLORS = """
:root { --ink: #1f2430; --faint: #6b7280; --grid: #e3e6ec; --paper: #ffffff;
  --c0: #2563c9; --c1: #d9730d; --c2: #2e8b57; --c3: #8b5cc2; --c4: #b8456b; --c5: #5f7a8a; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8ee; --faint: #9aa3b2; --grid: #2c3340; --paper: #14181f;
    --c0: #6ea8ff; --c1: #f2a154; --c2: #6fd09b; --c3: #b99cf0; --c4: #f089ab; --c5: #9fb7c4; }
}
"""
CHART_STYLE = """
svg.chart { width: 100%; height: auto; display: block; }
.chart text { font: 12px system-ui, sans-serif; fill: var(--faint); }
.chart .name { fill: var(--ink); }
.chart .grid { stroke: var(--grid); }
.chart .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.chart .dashed { stroke-dasharray: 5 4; }
"""


@dataclass(frozen=True, slots=True)
class _Frame:
    """The plane of a chart: which values lie where."""

    first: float
    last: float
    low: float
    high: float

    def x(self, step: float) -> float:
        span = (self.last - self.first) or 1.0
        return round(LEFT + (step - self.first) / span * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        share = (value - self.low) / ((self.high - self.low) or 1.0)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)


def reward_curve_svg(
    train: Sequence[Point], held_out: Sequence[Point], *, standalone: bool = False
) -> str:
    """Mean training reward of each step as a line, held-out reward as marked points."""
    train, held_out = _finite(train), _finite(held_out)
    frame = _frame([*train, *held_out])
    dots = "".join(
        f'<circle cx="{frame.x(step)}" cy="{frame.y(value)}" r="5" fill="var(--c1)">'
        f"<title>held-out after step {step:g}: {value:.3f}</title></circle>"
        for step, value in held_out
    )
    body = (
        _axes(frame)
        + _line(frame, train, "var(--c0)", name="train")
        + _line(frame, held_out, "var(--c1)", name="held-out", dashed=True, dots=False)
        + dots
        + _legend([("train, mean of a step", "var(--c0)"), ("held-out", "var(--c1)")])
    )
    return _svg(body, "Reward by optimizer step", standalone=standalone)


def lines_svg(series: Mapping[str, Sequence[Point]], title: str) -> str:
    """One line per series."""
    finite = {name: _finite(points) for name, points in series.items()}
    points = [point for points in finite.values() for point in points]
    frame = _frame(points, at_least=max((value for _, value in points), default=1.0))
    lines = [
        _line(frame, points, f"var(--c{number % 6})", name=name)
        for number, (name, points) in enumerate(finite.items())
    ]
    names = [(name, f"var(--c{number % 6})") for number, name in enumerate(finite)]
    return _svg(_axes(frame) + "".join(lines) + _legend(names), title)


def phase_bars_svg(steps: Sequence[tuple[int, Mapping[str, float]]], title: str) -> str:
    """Seconds per step, stacked by phase."""
    phases = list(dict.fromkeys(phase for _, seconds in steps for phase in seconds))
    bars = _binned(steps, phases)
    highest = max((sum(seconds) for _, seconds in bars), default=1.0)
    first, last = (bars[0][0], bars[-1][0]) if bars else (0, 1)
    half = max(0.5, (last - first) / max(1, len(bars)) / 2)
    frame = _Frame(first - half, last + half, 0.0, _ticks(0.0, highest)[-1])
    width = (WIDTH - LEFT - RIGHT) / max(1, len(bars)) * 0.8
    drawn: list[str] = []
    for step, seconds in bars:
        below = 0.0
        for number, (phase, value) in enumerate(zip(phases, seconds, strict=True)):
            top, bottom = frame.y(below + value), frame.y(below)
            drawn.append(
                f'<rect x="{frame.x(step) - width / 2:.1f}" y="{top}" width="{width:.1f}"'
                f' height="{bottom - top:.1f}" fill="var(--c{number % 6})">'
                f"<title>step {step:g}, {escape(phase)}: {value:.1f} s</title></rect>"
            )
            below += value
    names = [(phase, f"var(--c{number % 6})") for number, phase in enumerate(phases)]
    return _svg(_axes(frame, unit=" s") + "".join(drawn) + _legend(names), title)


def _svg(body: str, title: str, *, standalone: bool = False) -> str:
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {WIDTH} {HEIGHT}"'
        f' role="img" aria-label="{escape(title)}">'
    )
    if standalone:
        opening += f"<style>{COLORS}{CHART_STYLE}</style>"
        opening += f'<rect width="{WIDTH}" height="{HEIGHT}" fill="var(--paper)"/>'
    return f"{opening}{body}</svg>"


def _finite(points: Sequence[Point]) -> list[Point]:
    return [(step, value) for step, value in points if math.isfinite(value)]


def _frame(points: Sequence[Point], *, at_least: float = 1.0) -> _Frame:
    """From 0 to 1 at least, unless told otherwise: what most rewards are."""
    steps = [step for step, _ in points] or [0.0, 1.0]
    values = [value for _, value in points]
    ticks = _ticks(min(0.0, *values, 0.0), max(0.0, at_least, *values))
    return _Frame(min(steps), max(steps), ticks[0], ticks[-1])


def _ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers that enclose `low` to `high`."""
    span = (high - low) or 1.0
    size = 10.0 ** math.floor(math.log10(span / about))
    size *= next(factor for factor in (1, 2, 2.5, 5, 10) if span / (size * factor) <= about + 1e-9)
    first, last = math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9)
    return [round(number * size, 10) for number in range(first, last + 1)]


def _axes(frame: _Frame, *, unit: str = "") -> str:
    parts: list[str] = []
    for value in _ticks(frame.low, frame.high):
        y = frame.y(value)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>'
            f'<text x="{LEFT - 7}" y="{y + 4}" text-anchor="end">{value:g}{unit}</text>'
        )
    parts += [
        f'<text x="{frame.x(step)}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{step:g}</text>'
        for step in _ticks(frame.first, frame.last, about=10)
        if step == int(step) and frame.first <= step <= frame.last
    ]
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 3}" text-anchor="middle">step</text>')
    return "".join(parts)


def _line(
    frame: _Frame,
    points: Sequence[Point],
    color: str,
    *,
    name: str,
    dashed: bool = False,
    dots: bool = True,
) -> str:
    path = " ".join(f"{frame.x(step)},{frame.y(value)}" for step, value in points)
    kind = "line dashed" if dashed else "line"
    drawn = f'<polyline class="{kind}" stroke="{color}" points="{path}"/>'
    if not dots or len(points) > MOST_DOTS:
        return drawn
    return drawn + "".join(
        f'<circle cx="{frame.x(step)}" cy="{frame.y(value)}" r="3" fill="{color}">'
        f"<title>{escape(name)}, step {step:g}: {value:.3f}</title></circle>"
        for step, value in points
    )


def _legend(names: Sequence[tuple[str, str]]) -> str:
    parts: list[str] = []
    x = LEFT
    for name, color in names:
        parts.append(
            f'<rect x="{x}" y="9" width="11" height="11" rx="2" fill="{color}"/>'
            f'<text class="name" x="{x + 16}" y="19">{escape(name)}</text>'
        )
        x += 34 + 7 * len(name)
    return "".join(parts)


def _binned(
    steps: Sequence[tuple[int, Mapping[str, float]]], phases: Sequence[str]
) -> list[tuple[float, list[float]]]:
    size = max(1, math.ceil(len(steps) / MOST_BARS))
    bins = [steps[start : start + size] for start in range(0, len(steps), size)]
    return [
        (
            sum(step for step, _ in members) / len(members),
            [sum(seconds.get(p, 0.0) for _, seconds in members) / len(members) for p in phases],
        )
        for members in bins
    ]
