"""Bus bandwidth over size as an SVG, both axes logarithmic, written by hand: it needs nothing but this file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from train.checks.collectives.table import in_bytes
from train.checks.collectives.timing import Timing

_WIDE, _HIGH = 900, 520
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 150, 50, 60
_LINE_HEIGHT = 15
_MARKS = ("#1b6ca8", "#c8553d", "#2e7d32", "#7b4fa3", "#8a6d00", "#00838f", "#ad1457", "#455a64", "#6d4c41")
_DASHES = ("", "7 4", "2 3")
"""Beside the colours: lines can be told apart in black and white."""


def svg(timings: Sequence[Timing], title: str) -> str:
    """The picture; operations without a size are left out."""
    shown = [one for one in timings if one.size_bytes and one.bus_gb_s > 0]
    if not shown:
        return _page(title, ['<text x="70" y="80">Nothing was measured.</text>'])
    across = _Axis([one.size_bytes for one in shown], _LEFT, _WIDE - _RIGHT)
    up = _Axis([one.bus_gb_s for one in shown], _HIGH - _BOTTOM, _TOP)
    lines = {
        name: [one for one in shown if one.operation == name] for name in dict.fromkeys(o.operation for o in shown)
    }
    body = [*_size_grid(across, sorted({one.size_bytes for one in shown})), *_speed_grid(up)]
    ends = _apart({name: up.at(theirs[-1].bus_gb_s) for name, theirs in lines.items()})
    for number, (name, theirs) in enumerate(lines.items()):
        colour, dash = _MARKS[number % len(_MARKS)], _DASHES[number % len(_DASHES)]
        points = " ".join(f"{across.at(one.size_bytes):.1f},{up.at(one.bus_gb_s):.1f}" for one in theirs)
        body.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2" '
                    f'stroke-dasharray="{dash}"/>')  # fmt: skip
        body += [f'<circle cx="{across.at(one.size_bytes):.1f}" cy="{up.at(one.bus_gb_s):.1f}" r="3" fill="{colour}"/>'
                 for one in theirs]  # fmt: skip
        last = across.at(theirs[-1].size_bytes), up.at(theirs[-1].bus_gb_s)
        right = _WIDE - _RIGHT + 14
        body.append(f'<line x1="{last[0]:.1f}" y1="{last[1]:.1f}" x2="{right - 3}" y2="{ends[name]:.1f}" '
                    f'stroke="{colour}" stroke-width="0.7"/>')  # fmt: skip
        body.append(f'<text x="{right}" y="{ends[name] + 4:.1f}" fill="{colour}">{escape(name)}</text>')
    return _page(title, body)


class _Axis:
    """From values to places, logarithmically, with a little room at both ends."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        low, high = math.log(min(values)), math.log(max(values))
        room = 0.03 * (high - low) or 0.5
        self.low, self.high = low - room, high + room
        self._start, self._end = start, end

    def at(self, value: float) -> float:
        """The place of a value."""
        return self._start + (math.log(value) - self.low) / (self.high - self.low) * (self._end - self._start)


def _size_grid(across: _Axis, sizes: Sequence[int]) -> Iterator[str]:
    for size in sizes[:: -(-len(sizes) // 12)]:
        x = f"{across.at(size):.1f}"
        yield f'<line x1="{x}" y1="{_TOP}" x2="{x}" y2="{_HIGH - _BOTTOM}" stroke="#ddd"/>'
        yield f'<text x="{x}" y="{_HIGH - _BOTTOM + 20}" text-anchor="middle">{in_bytes(size)}</text>'


def _speed_grid(up: _Axis) -> Iterator[str]:
    low, high = up.low / math.log(10), up.high / math.log(10)
    steps = (1,) if high - low > 3 else (1, 2, 5)
    for power in range(math.floor(low), math.ceil(high) + 1):
        for step in steps:
            value = step * 10.0**power
            if up.low <= math.log(value) <= up.high:
                y = f"{up.at(value):.1f}"
                yield f'<line x1="{_LEFT}" y1="{y}" x2="{_WIDE - _RIGHT}" y2="{y}" stroke="#ddd"/>'
                yield f'<text x="{_LEFT - 8}" y="{up.at(value) + 4:.1f}" text-anchor="end">{value:g}</text>'


def _apart(places: dict[str, float]) -> dict[str, float]:
    """The names' places, moved down where they would lie on each other, and up again where the page ends."""
    found: dict[str, float] = {}
    above = -math.inf
    for name in sorted(places, key=places.__getitem__):
        above = found[name] = max(places[name], above + _LINE_HEIGHT)
    below = float(_HIGH - _BOTTOM + _LINE_HEIGHT)
    for name in reversed(found):
        below = found[name] = min(found[name], below - _LINE_HEIGHT)
    return found


def _page(title: str, body: Sequence[str]) -> str:
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDE} {_HIGH}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDE}" height="{_HIGH}" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="16">{escape(title)}</text>',
        f'<text x="{_LEFT}" y="42" fill="#555">bus bandwidth, GB/s</text>',
        *body,
        f'<text x="{(_LEFT + _WIDE - _RIGHT) / 2}" y="{_HIGH - 12}" text-anchor="middle" fill="#555">size</text>',
        "</svg>", "",
    ])  # fmt: skip
