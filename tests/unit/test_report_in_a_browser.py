"""The page in a real browser: it is drawn, on a wide screen and on a phone, and nothing sticks out."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest

from tests.synthetic import of_many, with_a_restart
from train.report.command import make_report

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here"),
]
QUIET = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
         "--disable-sync", "--no-first-run", "--hide-scrollbars", "--allow-file-access-from-files"]  # fmt: skip
LOOK = """<!DOCTYPE html><body style="margin:0"><iframe id="f" src="PAGE" style="width:WIDTHpx;height:900px;border:0">
</iframe><pre id="found"></pre><script>
document.getElementById("f").onload = function () {
  const page = this.contentDocument, view = this.contentWindow;
  const charts = [...page.querySelectorAll("svg.chart")].map((chart) => chart.getBoundingClientRect());
  document.getElementById("found").textContent = JSON.stringify({
    wide: page.documentElement.scrollWidth, high: page.documentElement.scrollHeight,
    charts: charts.map((box) => [box.left, box.right, box.height]),
    filled: view.getComputedStyle(page.querySelector("rect.k-waiting")).fill,
    letters: Math.min(...[...page.querySelectorAll("svg.chart text")].map((x) => x.getBoundingClientRect().height)),
    image: page.querySelectorAll("image").length,
  });
};
</script></body>"""


def browse(folder: Path, *argv: str) -> str:
    assert BROWSER is not None
    command = [BROWSER, *QUIET, f"--user-data-dir={folder / 'profile'}", *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def pixels(image: bytes) -> tuple[int, int, bytes]:
    """Width, height and the unpacked rows of a PNG, filters and all: enough to see whether anything was drawn."""
    width, height = struct.unpack(">II", image[16:24])
    at, packed = 8, b""
    while at < len(image):
        (size,) = struct.unpack(">I", image[at : at + 4])
        packed += image[at + 8 : at + 8 + size] if image[at + 4 : at + 8] == b"IDAT" else b""
        at += size + 12
    return width, height, zlib.decompress(packed)


@pytest.mark.parametrize("ranks", [2, 256])
def test_it_is_drawn_and_fits(ranks: int, tmp_path: Path) -> None:
    path = with_a_restart(tmp_path / "run") if ranks == 2 else of_many(tmp_path / "run", ranks, slow=77)
    page = make_report(path)
    for width in (1280, 390):
        look = tmp_path / "look.html"
        look.write_text(LOOK.replace("PAGE", page.as_uri()).replace("WIDTH", str(width)))
        told = browse(tmp_path, "--virtual-time-budget=5000", "--window-size=1400,1000", "--dump-dom", look.as_uri())
        match = re.search(r'<pre id="found">(.+?)</pre>', told)
        assert match is not None, told[-2000:]
        found = json.loads(match[1].replace("&quot;", '"'))
        assert found["wide"] <= width, "it must not be pushed to and fro"
        assert len(found["charts"]) >= 6
        assert all(left >= 0 and right <= width and height > 40 for left, right, height in found["charts"])
        assert found["image"] == 1
        assert "p-waiting" in found["filled"]
        assert found["letters"] >= 9, "too small to read"
    browse(tmp_path, f"--screenshot={tmp_path / 'shot.png'}", "--window-size=1280,1200", page.as_uri())
    width, height, raw = pixels((tmp_path / "shot.png").read_bytes())
    assert (width, height) == (1280, 1200)
    assert len(set(raw)) > 50, "an empty page"
