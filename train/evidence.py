"""Where this rank stands, told from beside its main thread: the line that runs, and the newest collectives.

Free of torch, and imports nothing when it is asked: the main thread may hang inside an import and hold its lock.
"""

from __future__ import annotations

import json
import sys
import sysconfig
import threading
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any

ENTRIES_A_GROUP = 20
MOST_BYTES = 48_000
_MOST_FRAMES = 60
_STANDARD = sysconfig.get_path("stdlib")


def main_stack() -> tuple[list[str], str | None]:
    """Where the main thread is: `file:line function`, innermost last; and the innermost that is the user's or ours."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    lines: list[str] = []
    own: str | None = None
    while frame is not None and len(lines) < _MOST_FRAMES:
        file = frame.f_code.co_filename
        lines.append(f"{file}:{frame.f_lineno} {frame.f_code.co_name}")
        if own is None and not is_foreign(file):
            own = lines[-1]
        frame = frame.f_back
    return lines[::-1], own


def is_foreign(file: str) -> bool:
    """Whether a frame's file is torch's or Python's own, and so tells its user little."""
    if "site-packages" in file or "dist-packages" in file:
        return "/torch/" in file
    return file.startswith((_STANDARD, "<"))


def flight_groups() -> list[dict[str, Any]]:
    """The newest collectives of each process group, from torch's Flight Recorder; none before torch is there.

    `last` is the number of a group's newest collective on this rank: a rank whose is lower than the others' has not
    entered theirs. An entry that is not `retired` is still waited for; torch's own `state` tells nothing with Gloo.
    """
    recorder = sys.modules.get("torch._C._distributed_c10d")
    if recorder is None or not hasattr(recorder, "_dump_fr_trace_json"):
        return []
    now_ns = time.time_ns()
    groups: dict[str, dict[str, Any]] = {}
    for entry in json.loads(recorder._dump_fr_trace_json()).get("entries", ()):
        if entry["is_p2p"]:
            continue
        name, description = entry["process_group"]
        if description == "default_pg":
            description = "step"  # the first group of a rank is that of its steps
        group = groups.setdefault(name, {"name": name, "description": description, "last": 0, "entries": []})
        group["last"] = max(group["last"], entry["collective_seq_id"])
        group["entries"].append(
            {
                "seq": entry["collective_seq_id"],
                "op": entry["profiling_name"],
                "sizes": entry["input_sizes"][:4],
                "retired": entry["retired"],
                "age_s": round((now_ns - entry["time_created_ns"]) / 1e9, 3),
            }
        )
    return list(groups.values())


def fit(stand: Mapping[str, Any], groups: list[dict[str, Any]]) -> str:
    """As JSON that fits in a message: the newest entries of each group, fewer where they are large."""
    keep = ENTRIES_A_GROUP
    while True:
        fewer = [{**group, "entries": group["entries"][-keep:]} for group in groups]
        text = json.dumps({**stand, "groups": fewer}) + "\n"
        if len(text) < MOST_BYTES or not groups:
            return text
        keep, groups = max(1, keep // 2), groups if keep > 1 else groups[:-1]
