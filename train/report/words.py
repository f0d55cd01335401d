"""Numbers and tables as people read them; all text of a run is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

_LONGEST = 2000


def plain(value: Any, longest: int = _LONGEST) -> str:
    """Anything as text without control characters, and not too long."""
    words = "".join(char if char.isprintable() or char == "\n" else " " for char in str(value).expandtabs())
    return words if len(words) <= longest else words[:longest] + " …"


def text(value: Any) -> str:
    """Anything as HTML text."""
    return escape(plain(value))


def duration(seconds: float) -> str:
    """`950 ms`, `12.4 s`, `3 min 20 s`, `2 h 05 min`, `3 d 4 h`."""
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    minutes = round(seconds / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"


def ago(seconds: float) -> str:
    """A moment in a run: seconds from its beginning."""
    return f"+{seconds:,.1f} s"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = (), last: str = "") -> str:
    """Cells are HTML already; columns in `numbers` stand at the right."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(f'<{tag} class="{"n" if i in numbers else "w"}">{cell}</{tag}>' for i, cell in enumerate(row))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        f'<div class="wide"><table><thead><tr>{cells("th", head)}</tr></thead><tbody>{body}{last}</tbody></table></div>'
    )


def figure(title: str, inside: str, caption: str = "") -> str:
    """A chart with its title; `caption` is HTML."""
    below = f"<figcaption>{caption}</figcaption>" if caption else ""
    return f"<figure><h3>{text(title)}</h3>{inside}{below}</figure>"


def section(title: str, *parts: str) -> str:
    """A part of the page."""
    return f"<section><h2>{text(title)}</h2>{''.join(parts)}</section>"


def details(title: str, inside: str) -> str:
    """What is shown when asked for."""
    return f"<details><summary>{text(title)}</summary>{inside}</details>"
