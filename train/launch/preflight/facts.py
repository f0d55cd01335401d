"""What a host is like, told by itself: facts alone, no judgement. What cannot be told is None."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import queue
import resource
import shutil
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import train
from train.launch.preflight import gpus
from train.launch.preflight.asked import Asked
from train.launch.topology import Host
from train.network import interface_towards

FILE_S, NAME_S = 5.0, 4.0
"""Whether a folder, or a name server, answers: a dead one must not hold up all the rest."""


def facts_of(asked: Asked, hosts: Sequence[Host], node_rank: int, mark: str) -> dict[str, Any]:
    """Everything that a host can tell by itself.

    Args:
        asked: device and run folder.
        hosts: all of the job.
        node_rank: which of them this one is.
        mark: of this preflight; the run folder gets a file named by it and the node rank (`unmark` removes it).
    """
    told: dict[str, Any] = {
        "hostname": socket.gethostname(), "identity": _identity(), "user": f"{os.getuid()}:{os.getgid()}",
        "cores": cores(), "shm_mb": _megabytes("/dev/shm"), "memlock_mb": _memlock_mb(),  # noqa: S108
        "nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[0], "versions": versions(),
    }  # fmt: skip
    told["runs"] = within(FILE_S, lambda: _runs(Path(asked.runs_dir), f"{mark}-{node_rank}")) or {
        "error": f"no answer in {FILE_S:g} s: is its file server there?"
    }
    told["names"] = names([host.address for host in hosts])
    told["links"] = {host.address: link_towards(host.address) for host in hosts if host is not hosts[node_rank]}
    told["gpu_files"] = gpus.files()
    if asked.device == "cuda" or told["gpu_files"]:
        told["gpus"] = gpus.gpus()
    return told


def within(limit_s: float, work: Callable[[], Any]) -> Any:
    """What comes of it in time, else None. The thread that waits on is left behind: nothing can end it."""
    answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((work(), None))
        except Exception as error:
            answers.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        answer, error = answers.get(timeout=limit_s)
    except queue.Empty:
        return None
    if error is not None:
        raise error
    return answer


def _identity() -> str:
    """The same for two that share one network: the kernel's boot, and the network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/net').readlink()}"


def cores() -> int:
    """Processors that may be used: by affinity, and by the control group's quota (cgroup v2, cpu.max)."""
    allowed = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        allowed = min(allowed, max(1, int(quota) // int(period)))
    return allowed


def _megabytes(path: str) -> int | None:
    try:
        return shutil.disk_usage(path).total >> 20
    except OSError:
        return None


def _memlock_mb() -> int | None:
    """None: unlimited."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit >> 20


def versions() -> dict[str, str | None]:
    """Of what must be the same everywhere; None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "muster": _code()}
    for name in ("torch", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _code() -> str:
    """Version, and a digest over the package's files."""
    digest = hashlib.sha256()
    root = Path(train.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return f"{train.__version__}-{digest.hexdigest()[:8]}"


def _runs(folder: Path, mark: str) -> dict[str, Any]:
    """Can the run folder be written, how much room is there, and which device is it on."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _mark(folder, mark).open("wb") as file:
            file.write(b"\0" * (1 << 16))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return {"error": error.strerror or str(error), "free_mb": None}
    return {"error": None, "free_mb": shutil.disk_usage(folder).free >> 20}


def _mark(folder: Path, mark: str) -> Path:
    return folder / f".preflight-{mark}"


def marked(asked: Asked, mark: str) -> list[int] | None:
    """Node ranks whose files of this preflight are seen in this host's run folder."""

    def look() -> list[int]:
        found = Path(asked.runs_dir).glob(f".preflight-{mark}-*")
        return sorted(int(path.name.rpartition("-")[2]) for path in found)

    try:
        seen: list[int] | None = within(FILE_S, look)
    except (OSError, ValueError):
        return None
    return seen


def unmark(asked: Asked, mark: str, node_rank: int) -> None:
    """Remove this host's file."""

    def remove() -> None:
        with contextlib.suppress(OSError):
            _mark(Path(asked.runs_dir), f"{mark}-{node_rank}").unlink(missing_ok=True)

    within(FILE_S, remove)


def names(wanted: Sequence[str]) -> dict[str, list[str] | str]:
    """What each name means here: its addresses, or why there are none."""

    def look_up(name: str) -> list[str] | str:
        try:
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            return str(getattr(error, "strerror", None) or error)
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))

    told: dict[str, list[str] | str] = {}
    threads = []
    for name in dict.fromkeys(wanted):
        told[name] = f"no answer from the name server in {NAME_S:g} s"
        thread = threading.Thread(target=lambda name=name: told.update({name: look_up(name)}), daemon=True)
        threads.append(thread)
        thread.start()
    deadline_s = time.monotonic() + NAME_S
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    return dict(told)


def link_towards(address: str) -> dict[str, Any]:
    """The interface whose route leads there, its MTU in bytes and its speed in Mbit/s, where it has one."""
    name = interface_towards(address, spans_hosts=False)
    folder = Path("/sys/class/net") / (name or "-")
    return {"interface": name, "mtu": _number(folder / "mtu"), "mbit_per_s": _number(folder / "speed")}


def _number(path: Path) -> int | None:
    try:
        value = int(path.read_text())
    except (OSError, ValueError):  # a virtual interface has no speed
        return None
    return value if value > 0 else None
