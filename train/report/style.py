"""How the page looks: on a screen or a phone, light or dark, in colour or printed in black."""

from __future__ import annotations

_PATTERNS = {  # name: (background, stroke, path of a tile, 8 by 8)
    "waiting": ("#f6c9bd", "#a3231d", "M0 8L8 0M-2 2L2 -2M6 10L10 6"),
    "data": ("#f0b061", "#8a4f00", "M0 0L8 8M-2 6L2 10M6 -2L10 2"),
    "preparing": ("#eee6cf", "#8a7a3c", "M3 3h2v2h-2z"),
    "evaluation": ("#cfe8d5", "#1f6b3a", "M2 2h1.5v1.5h-1.5zM6 6h1.5v1.5h-1.5z"),
    "saving": ("#e0d3f0", "#5b3a92", "M0 2H8M0 6H8"),
    "lost": ("#555555", "#ffffff", "M0 0L8 8M0 8L8 0"),
    "joining": ("#e8e3d2", "#8a7a3c", "M2 0V8M6 0V8"),
    "restarting": ("#222222", "#bbbbbb", "M0 4H8"),
    "hosts": ("#efefef", "#7a7a7a", "M4 0V8"),
}
_FILLS = {
    "computing": "#1f5f99",
    "optimizer": "#79b2dd",
    "other": "#b9c2cb",
    "loading": "#8d8d8d",
    "first-step": "#2b8a8a",
    "ending": "#d9d9d9",
    "gone": "#f1f1f1",
    "untold": "#ffffff",
    "connect": "#6b7f94",
}


def kind_of(category: str) -> str:
    """The class of a category's fill."""
    return f"k-{category.replace(' ', '-')}"


def patterns() -> str:
    """Of fills that must differ without colour; for the whole page."""
    tiles = "".join(
        f'<pattern id="p-{name}" width="8" height="8" patternUnits="userSpaceOnUse"><rect width="8" height="8" '
        f'fill="{back}"/><path d="{path}" stroke="{front}" stroke-width="1.4" fill="none"/></pattern>'
        for name, (back, front, path) in _PATTERNS.items()
    )
    return f'<svg class="defs" width="0" height="0" aria-hidden="true"><defs>{tiles}</defs></svg>'


def css() -> str:
    """The whole style sheet."""
    fills = "".join(f".k-{name}{{fill:url(#p-{name})}}" for name in _PATTERNS)
    fills += "".join(f".k-{name}{{fill:{colour}}}" for name, colour in _FILLS.items())
    return _CSS + fills


_CSS = """
:root{color-scheme:light dark;--fg:#1b1f24;--bg:#fff;--card:#f6f7f9;--soft:#59636e;--rule:#d5dae0;
--s0:#1f5f99;--s1:#b3541e;--s2:#2c7a48;--s3:#7a4bb0;--s4:#a8326b;--s5:#59636e;--bad:#a3231d;--good:#1f6b3a}
@media (prefers-color-scheme:dark){:root{--fg:#e6e9ed;--bg:#14181d;--card:#1d232a;--soft:#a3adb8;--rule:#3a434d;
--s0:#6fb3ea;--s1:#f0965a;--s2:#6fcf97;--s3:#c39cf0;--s4:#f08ab8;--s5:#a3adb8;--bad:#ff8f86;--good:#7fd8a0}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1240px;padding:16px;font:16px/1.45 system-ui,sans-serif;color:var(--fg);
background:var(--bg)}
h1{font-size:1.5rem;margin:.2em 0;overflow-wrap:anywhere}h2{font-size:1.15rem;margin:1.6em 0 .5em}
h3{font-size:.95rem;margin:0 0 .4em}p{margin:.4em 0}
.soft,.none,figcaption{color:var(--soft);font-size:.875rem}
.verdict{border:2px solid var(--rule);border-left-width:10px;border-radius:6px;padding:10px 14px;overflow-wrap:anywhere}
.verdict.finished{border-left-color:var(--good)}.verdict.failed{border-left-color:var(--bad)}
.verdict strong{font-size:1.15rem}
.problems{border:1px dashed var(--bad);border-radius:6px;padding:8px 14px 8px 30px;margin:.8em 0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(128px,1fr));gap:8px;margin:12px 0}
.tile{background:var(--card);border-radius:6px;padding:8px 10px}.tile b{display:block;font-size:1.2rem}
.tile span{color:var(--soft);font-size:.8rem}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,400px),1fr));gap:16px;align-items:start}
figure{margin:0;background:var(--card);border-radius:6px;padding:10px;min-width:0}
svg.chart{display:block;width:100%;height:auto}svg.defs{position:absolute}
svg text{fill:var(--fg);font-size:12px;font-family:system-ui,sans-serif}svg text.name{fill:var(--soft)}
svg .rule{stroke:var(--rule);stroke-width:1;fill:none}
svg .line{fill:none;stroke-width:1.8;stroke-linejoin:round}svg .dot{stroke:none}
.line.s0{stroke:var(--s0)}.line.s1{stroke:var(--s1);stroke-dasharray:7 3}
.line.s2{stroke:var(--s2);stroke-dasharray:2 3}
.line.s3{stroke:var(--s3);stroke-dasharray:9 3 2 3}.line.s4{stroke:var(--s4);stroke-dasharray:4 4}
.line.s5{stroke:var(--s5);stroke-width:3}
.dot.s0{fill:var(--s0)}.dot.s1{fill:var(--s1)}.dot.s2{fill:var(--s2)}.dot.s3{fill:var(--s3)}.dot.s4{fill:var(--s4)}
.dot.s5{fill:var(--s5)}
svg .mark{stroke:var(--fg);stroke-width:1.2;stroke-dasharray:4 3;fill:none}
svg text.marked{font-size:11px;font-weight:600}
svg rect{stroke:none}rect.k-untold,rect.k-gone{stroke:#777;stroke-width:.5;stroke-dasharray:3 2}
.thin rect{stroke:none}
image{image-rendering:pixelated}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:.82rem;margin:.5em 0 0}.legend svg{vertical-align:middle}
.legend span{white-space:nowrap}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.875rem;width:100%}
th,td{text-align:left;padding:4px 10px 4px 0;border-bottom:1px solid var(--rule);vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}td.w{overflow-wrap:anywhere}
.events td.w:last-child{min-width:15em}
tr.sum td{font-weight:600;border-top:2px solid var(--fg)}
pre{overflow-x:auto;background:var(--card);padding:10px;border-radius:6px;font-size:.8rem}
summary{cursor:pointer;margin:.6em 0}footer{margin:2em 0 1em}
@media (max-width:480px){body{padding:10px}figure{padding:8px}table{font-size:.8rem}th,td{padding-right:7px}}
@media print{body{max-width:none}figure,.tile,pre{background:none;border:1px solid #999}details{display:block}}
"""
