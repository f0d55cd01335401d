"""A small picture of many fields, as PNG within the page: a quarter of a million rectangles would be megabytes."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from itertools import pairwise

Colour = tuple[int, int, int]
NOTHING: Colour = (128, 128, 128)
_STOPS: list[tuple[float, Colour]] = [
    (0.8, (232, 240, 247)), (1.0, (214, 226, 237)), (1.2, (250, 200, 110)), (1.6, (222, 102, 46)), (2.5, (110, 14, 30)),
]  # fmt: skip
"""From light to dark, so that it can be read without colour too."""
LEVELS = [stop for stop, _ in _STOPS]


def colour_of(ratio: float | None) -> Colour:
    """Of a rank that takes so many times the median; grey where it did nothing."""
    if ratio is None:
        return NOTHING
    for (low, dark), (high, light) in pairwise(_STOPS):
        if ratio <= high:
            part = max(0.0, (ratio - low) / (high - low))
            return tuple(round(a + (b - a) * part) for a, b in zip(dark, light, strict=True))  # type: ignore[return-value]
    return _STOPS[-1][1]


def png(rows: Sequence[Sequence[Colour]]) -> bytes:
    """The picture, one pixel a field (PNG specification, 2nd edition: 8-bit truecolour)."""
    width, height = len(rows[0]), len(rows)
    raw = b"".join(b"\0" + bytes(value for pixel in row for value in pixel) for row in rows)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(raw, 9)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def data_uri(image: bytes) -> str:
    """For an `<img>` that needs no other file."""
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"
