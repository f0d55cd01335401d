"""The folder of a run: which one, held by one job at a time, and what it says of the run.

Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import yaml

from train.config import Config
from train.errors import UsageError
from train.options import LaunchOptions
from train.progress import log

_MAY_CHANGE = re.compile(
    r"(strategy|runtime|precision)\.|optim\.(?!name)|batch\.(micro_size|accumulation)|data\.(loader|workers|cache_dir)|model\.(compile|checkpoint)"
    r"|train\.(?!seed)"
)
"""Fields that may differ when a run goes on; model, data, seed and global batch may not."""


BITS_DEPEND_ON = ("torch", "instruction_set", "device", "backend", "world_size", "threads")


class RunFolder:
    """`runs/<run_id>/`, locked by the process that writes it for as long as that lives."""

    def __init__(self, path: Path, lock: IO[str]) -> None:
        self.path = path
        self._lock = lock
        self._is_new = not (path / "environment.json").exists()

    def release(self) -> None:
        """Leave it as it was found: nothing has been started. A new one goes, unless somebody has put things there."""
        if self._is_new:
            with contextlib.suppress(OSError):
                (self.path / ".lock").unlink()
                self.path.rmdir()
        self._lock.close()

    @property
    def run_id(self) -> str:
        """The run's name."""
        return self.path.name

    def describe(self, config: Config, environment: Mapping[str, Any]) -> list[str]:
        """Write `config.yaml` and `environment.json`; words on the facts that were others when the run was last on."""
        before = _environment(self.path)
        changed = [
            f"{name} was {before[name]!r} and is {environment[name]!r}"
            for name in BITS_DEPEND_ON
            if name in before and before[name] != environment[name]
        ]
        (self.path / "verdict.json").unlink(missing_ok=True)  # it goes on: not finished any more
        _write(self.path / "config.yaml", yaml.safe_dump(config.as_dict(), sort_keys=False))
        _write(self.path / "environment.json", json.dumps(environment, indent=1) + "\n")
        return changed

    def record(self, event: str, **facts: Any) -> None:
        """Add a line to `events.jsonl`, where the agent of this host adds its own. A full disk costs the line."""
        line = json.dumps({"time": time.time(), "event": event, **facts}) + "\n"
        with contextlib.suppress(OSError), (self.path / "events.jsonl").open("a", encoding="utf-8") as file:
            file.write(line)

    def conclude(self, outcome: str, exit_code: int, step: int, **more: Any) -> None:
        """Write `verdict.json`. Where the disk is full that is said, and hides neither the outcome nor its error."""
        verdict: dict[str, Any] = {
            "outcome": outcome, "exit_code": exit_code, "cause": None, "host": None, "node_rank": None,
            "rank": None, "step": step, "evidence": [], "advice": None,
        }  # fmt: skip
        try:
            _write(self.path / "verdict.json", json.dumps({**verdict, **more}, indent=1) + "\n")
        except OSError as error:
            log.warning(f"cannot write {self.path / 'verdict.json'}: {error.strerror}")


def refuse_other_config(before: Mapping[str, Any], config: Config, name: str, allowed: Sequence[str] = ()) -> None:
    """Raise UsageError naming the fields in which the run to go on with was another one.

    Args:
        before: the config of that run, as a dict.
        config: today's.
        name: what to call that run.
        allowed: fields, or sections of them, that may differ all the same.
    """
    differs = {
        field: f"{field}: it has {old!r}, this config {new!r}"
        for field, old, new in _differences(before, config.as_dict())
        if not _MAY_CHANGE.match(field) and not {field, field.split(".")[0]} & set(allowed)
    }
    if differs:
        words = (
            f"{name} was made with another config; go on with its own, start anew (--resume none), or go on all the "
            f"same, to other numbers (--resume.allow {','.join(differs)})"
        )
        raise UsageError([words, *differs.values()])


def open_run(options: LaunchOptions, config: Config, suggested_id: str | None) -> RunFolder:
    """The run folder to write: the one named, else the newest unfinished one of this config, else a new one.

    Args:
        options: `run_id`, `runs_dir` and `resume` as given.
        config: to find a run of the same.
        suggested_id: a name that survives restarts, from whatever started the job.

    Raises:
        UsageError: the folder cannot be made, or another job holds it.
    """
    runs = Path(options.runs_dir)
    try:
        run_id = options.run_id or _own_part(runs, suggested_id, config)
        if run_id is None and options.resume == "auto":
            for path in _unfinished(runs, config.digest()):
                lock = _try_lock(path)
                if lock is not None:
                    return RunFolder(path, lock)
        path = runs / (run_id or _new_id(config))
        path.mkdir(parents=True, exist_ok=True)
        lock = _try_lock(path)
        if lock is not None:
            return RunFolder(path, lock)
        holder = (path / ".lock").read_text(errors="replace").strip()
    except OSError as error:
        raise UsageError(f"--runs-dir: cannot write a run folder in {runs.absolute()}: {error}") from None
    raise UsageError(f"--run-id: run {path.name} is in use by {holder}: stop that job, or give another --run-id")


def _own_part(runs: Path, suggested_id: str | None, config: Config) -> str | None:
    """The suggested name; with the config's digest where another job of the same allocation has it already."""
    if suggested_id is None:
        return None
    digest = _environment(runs / suggested_id).get("config_digest", config.digest())
    return suggested_id if digest == config.digest() else f"{suggested_id}-{config.digest()[:6]}"


def is_finished(path: Path) -> bool:
    """Whether a run came to its end."""
    try:
        return json.loads((path / "verdict.json").read_text()).get("outcome") == "finished"  # type: ignore[no-any-return]
    except (OSError, ValueError, AttributeError):
        return False


def _environment(path: Path) -> dict[str, Any]:
    """Raises OSError of a disk or network that fails for now: a run that is there is not to begin anew elsewhere."""
    try:
        found = json.loads((path / "environment.json").read_text())
    except (FileNotFoundError, NotADirectoryError, PermissionError, ValueError):  # none, another user's, or nonsense
        return {}
    return found if isinstance(found, dict) else {}


def _unfinished(runs: Path, digest: str) -> list[Path]:
    """Runs of this config that did not come to their end, newest first."""
    found = []
    for path in runs.glob("*/environment.json"):
        if _environment(path.parent).get("config_digest") == digest and not is_finished(path.parent):
            found.append((path.stat().st_mtime, path.parent))
    return [path for _, path in sorted(found, reverse=True)]


def _try_lock(path: Path) -> IO[str] | None:
    lock = (path / ".lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released by the kernel when this process ends, however
    except BlockingIOError:
        lock.close()
        return None
    except OSError as error:
        log.warning(f"{path} cannot be locked ({error.strerror}): make sure that no second job writes there")
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%F %T')}\n")
    lock.flush()
    return lock


def _new_id(config: Config) -> str:
    what = "-".join(re.sub(r"\W+", "_", name) for name in (config.strategy.name, config.model.name, config.data.name))
    return f"{what}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _differences(old: Any, new: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    found: list[tuple[str, Any, Any]] = []
    for key, value in new.items():
        before = old.get(key) if isinstance(old, dict) else None
        if isinstance(value, dict) and prefix == "":
            found += _differences(before, value, f"{key}.")
        elif before != value:
            found.append((f"{prefix}{key}", before, value))
    return found


def _write(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)
