"""Charts as SVG: lines, stacked bars. Readable without colour: dashes, patterns, and words beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from train.report.words import text

WIDTH, HEIGHT = 440, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 10, 34
_MOST_POINTS = 300
Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One curve."""

    name: str
    points: Sequence[Point]
    has_dots: bool = False
    """Few points, far from each other: mark each."""


def line_chart(lines: Sequence[Line], marks: Sequence[tuple[float, str]] = (), x_name: str = "step") -> str:
    """Curves over one axis; `marks` are upright lines with a word."""
    points = [point for line in lines for point in line.points]
    if not points:
        return '<p class="none">nothing to draw</p>'
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x0, x1 = min(xs), max(xs)
    x_ticks, y_ticks = ticks(x0, x1, 5), ticks(min(ys), max(ys), 5)
    y0, y1 = y_ticks[0], y_ticks[-1]

    def at(x: float, y: float) -> Point:
        across = (x - x0) / (x1 - x0) if x1 > x0 else 0.5
        return (
            _LEFT + across * (WIDTH - _LEFT - _RIGHT),
            HEIGHT - _BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - _TOP - _BOTTOM),
        )

    parts = [_axes(x_ticks, y_ticks, at, (x0, x1), x_name)]
    for number, (x, words) in enumerate(marks):
        if x0 <= x <= x1:
            left = at(x, y0)[0]
            anchor = "end" if left > WIDTH - 70 else "start"
            shift = -3 if anchor == "end" else 3
            y = _TOP + 10 + 12 * (number % 4)
            parts.append(
                f'<path class="mark" d="M{left:.1f} {_TOP}V{HEIGHT - _BOTTOM}"/><text class="marked" '
                f'text-anchor="{anchor}" x="{left + shift:.1f}" y="{y}">{text(words)}</text>'
            )
    for number, line in enumerate(lines):
        placed = [at(x, y) for x, y in thinned(line.points)]
        path = "".join(f"{'ML'[i > 0]}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(placed))
        parts.append(f'<path class="line s{number % 6}" d="{path}"/>')
        if line.has_dots or len(placed) == 1:
            parts += [f'<circle class="dot s{number % 6}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in placed[:200]]
    words = "; ".join(f"{line.name}: {shown(line.points[0][1])} to {shown(line.points[-1][1])}"
                      for line in lines if line.points)  # fmt: skip
    return _svg(HEIGHT, "".join(parts), words) + legend([line.name for line in lines])


def _axes(x_ticks: Sequence[float], y_ticks: Sequence[float], at: object, x_range: Point, x_name: str) -> str:
    place = at
    assert callable(place)
    parts = []
    for y in y_ticks:
        level = place(x_range[0], y)[1]
        parts.append(
            f'<path class="rule" d="M{_LEFT} {level:.1f}H{WIDTH - _RIGHT}"/>'
            f'<text text-anchor="end" x="{_LEFT - 5}" y="{level + 4:.1f}">{shown(y)}</text>'
        )
    for x in x_ticks:
        if x_range[0] <= x <= x_range[1]:
            left = place(x, y_ticks[0])[0]
            anchor = "end" if left > WIDTH - _RIGHT - 12 else "middle"
            parts.append(f'<text text-anchor="{anchor}" x="{left:.1f}" y="{HEIGHT - 18}">{shown(x)}</text>')
    parts.append(f'<text class="name" text-anchor="end" x="{WIDTH - _RIGHT}" y="{HEIGHT - 3}">{text(x_name)}</text>')
    return "".join(parts)


def legend(names: Sequence[str]) -> str:
    """Which line is which; nothing where there is one alone."""
    if len(names) < 2:
        return ""
    keys = "".join(
        '<span><svg width="28" height="8" viewBox="0 0 28 8" aria-hidden="true">'
        f'<path class="line s{i % 6}" d="M0 4H28"/></svg> {text(name)}</span>'
        for i, name in enumerate(names)
    )
    return f'<p class="legend">{keys}</p>'


@dataclass(frozen=True)
class Bar:
    """A stacked bar: a label, where it begins, and pieces of it."""

    label: str
    pieces: Sequence[tuple[str, float]]
    """Class of the fill, and length."""
    begin: float = 0.0


def bar_chart(bars: Sequence[Bar], unit: str, words: str) -> str:
    """Bars below each other, thin where there are many; each has a label as far as there is room."""
    most = max((bar.begin + sum(size for _, size in bar.pieces) for bar in bars), default=0.0)
    if most <= 0:
        return '<p class="none">nothing to draw</p>'
    pitch = 20.0 if len(bars) <= 16 else max(3.0, min(20.0, 640 / len(bars)))
    thick = pitch - 4 if pitch > 12 else pitch - (0.6 if pitch > 4 else 0)
    longest = max(len(bar.label) for bar in bars)
    left = min(160.0, 12 + 6.2 * longest)
    scale = (WIDTH - left - _RIGHT) / most
    height = round(pitch * len(bars) + 40)
    every = max(1, math.ceil(13 / pitch))
    parts = []
    for tick in ticks(0, most, 4):
        if tick <= most:
            x = left + tick * scale
            anchor = "end" if x > WIDTH - _RIGHT - 12 else "middle"
            parts.append(
                f'<path class="rule" d="M{x:.1f} 4V{height - 34}"/>'
                f'<text text-anchor="{anchor}" x="{x:.1f}" y="{height - 18}">{shown(tick)}</text>'
            )
    parts.append(f'<text class="name" text-anchor="end" x="{WIDTH - _RIGHT}" y="{height - 3}">{text(unit)}</text>')
    for index, bar in enumerate(bars):
        top, x = 4 + pitch * index, left + bar.begin * scale
        if index % every == 0:
            label = bar.label if len(bar.label) <= 24 else bar.label[:23] + "…"
            parts.append(
                f'<text text-anchor="end" x="{left - 5:.0f}" y="{top + thick / 2 + 4:.1f}">{text(label)}</text>'
            )
        for kind, size in bar.pieces:
            wide = size * scale
            if wide >= 0.15:
                parts.append(
                    f'<rect class="{kind}" x="{x:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{thick:.1f}"/>'
                )
            x += wide
    return _svg(height, "".join(parts), words, "" if pitch > 6 else " thin")


def bar_legend(kinds: Sequence[tuple[str, str]]) -> str:
    """(class, words) of the pieces."""
    keys = "".join(f"<span>{swatch(kind)} {text(words)}</span>" for kind, words in kinds)
    return f'<p class="legend">{keys}</p>'


def swatch(kind: str, style: str = "") -> str:
    """A small field of a fill, given by its class or its style."""
    return (
        '<svg width="16" height="12" viewBox="0 0 16 12" aria-hidden="true">'
        f'<rect class="{kind}" style="{style}" width="16" height="12"/></svg>'
    )


def _svg(height: float, inside: str, words: str, more: str = "") -> str:
    return (
        f'<svg class="chart{more}" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{text(words)}">'
        f"<title>{text(words)}</title>{inside}</svg>"
    )


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers from below `low` to above `high`, about so many."""
    if not high > low:
        low, high = (low - abs(low) / 10 - 1e-9, high + abs(high) / 10 + 1e-9)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def shown(value: float) -> str:
    """A number in few letters: 1.5k, 0.02, 3e-05."""
    size = abs(value)
    if size >= 1e15 or (0 < size < 1e-3):
        return f"{value:.3g}"
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):.4g}{letter}"
    return f"{value:.4g}"


def thinned(points: Sequence[Point]) -> Sequence[Point]:
    """So many points that a screen can show: of each piece the lowest and the highest, so that no spike is lost."""
    if len(points) <= 2 * _MOST_POINTS:
        return points
    size = len(points) / _MOST_POINTS
    kept: list[Point] = [points[0]]
    for index in range(_MOST_POINTS):
        piece = points[round(index * size) : round((index + 1) * size)]
        if piece:
            kept += sorted({min(piece, key=lambda p: p[1]), max(piece, key=lambda p: p[1])})
    return [*kept, points[-1]]
