"""What a host's GPUs are like, by nvidia-smi and the kernel's log: facts alone."""

from __future__ import annotations

import csv
import glob
import io
import re
import subprocess
from typing import Any

ASK_S = 8.0
"""nvidia-smi hangs on a GPU that has fallen off the bus."""
_FIELDS = {
    "index": "index", "name": "name", "driver": "driver_version", "mb": "memory.total", "used_mb": "memory.used",
    "ecc_errors": "ecc.errors.uncorrected.volatile.total", "slowed": "clocks_throttle_reasons.hw_slowdown",
    "hot": "clocks_throttle_reasons.hw_thermal_slowdown",
}  # fmt: skip
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")


def files() -> int:
    """Device files of GPUs."""
    return len(glob.glob("/dev/nvidia[0-9]*"))


def gpus() -> dict[str, Any]:
    """`rows`, one a GPU; `problem`, where they cannot be told; `xids`, by bus number; `apart`, pairs without P2P."""
    query = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS.values())}", "--format=csv,noheader,nounits"]
    text, problem = _said(query)
    if problem:
        return {"rows": [], "problem": problem, "xids": None, "apart": None}
    return {"rows": rows_of(text), "problem": None, "xids": xids(), "apart": apart()}


def rows_of(text: str) -> list[dict[str, Any]]:
    """nvidia-smi's table; what a GPU does not have ("[N/A]") is None."""
    rows = []
    for cells in csv.reader(io.StringIO(text), skipinitialspace=True):
        if len(cells) == len(_FIELDS):
            rows.append({name: _value(cell) for name, cell in zip(_FIELDS, cells, strict=True)})
    return rows


def _value(cell: str) -> str | int | bool | None:
    cell = cell.strip()
    if cell.startswith("[") or cell in ("N/A", ""):
        return None
    if cell in ("Active", "Not Active"):
        return cell == "Active"
    return int(cell) if cell.isdecimal() else cell


def xids() -> list[str] | None:
    """Errors that the driver has logged since it came up, as `bus: number`; None where the log is closed to us."""
    text, problem = _said(["dmesg"])
    return None if problem else list(dict.fromkeys(f"{bus}: {number}" for bus, number in _XID.findall(text)))


def apart() -> list[str] | None:
    """Pairs of GPUs that cannot read each other's memory."""
    text, problem = _said(["nvidia-smi", "topo", "-p2p", "r"])
    return None if problem else apart_in(text)


def apart_in(text: str) -> list[str]:
    """Of the matrix that `nvidia-smi topo -p2p r` prints: `GPU0-GPU1`, each pair once."""
    rows = [line.split() for line in text.splitlines() if re.match(r"\s*GPU\d+\s+\S", line)]
    head, *body = rows if rows else [[]]
    pairs = []
    for row in body:
        for other, state in zip(head, row[1:], strict=False):
            if state not in ("OK", "X") and int(row[0][3:]) < int(other[3:]):
                pairs.append(f"{row[0]}-{other} ({state})")
    return pairs


def _said(words: list[str]) -> tuple[str, str | None]:
    """What it printed, and why it is not to be relied on."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=ASK_S, check=False)  # noqa: S603
    except FileNotFoundError:
        return "", f"there is no {words[0]}"
    except OSError as error:
        return "", f"{words[0]}: {error.strerror}"
    except subprocess.TimeoutExpired:
        return "", f"{words[0]} has not answered for {ASK_S:g} s"
    why = (done.stdout + done.stderr).strip().splitlines()
    return done.stdout, None if done.returncode == 0 else (why[-1] if why else f"{words[0]} failed")
