"""`docker compose up` as a user would call it: a fresh clone, a caller, and what became of both hosts."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.ranks import ROOT, clean_environment

SMALL = "--model.name linear --data.name regression --train.log_every 1 --train.eval_every 0"
"""Nothing to compute: seconds go into starting, stopping and noticing, which is what is tested."""


def sh(*command: str, timeout_s: float = 60, check: bool = True) -> str:
    """A command's standard output."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


def compose_command() -> list[str]:
    """`docker compose` where it is there, else `docker-compose`."""
    known = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0
    return ["docker", "compose"] if known else ["docker-compose"]


def until(condition: Callable[[], Any], timeout_s: float, what: Callable[[], str]) -> float:
    """Wait for it; the seconds it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, f"not within {timeout_s:g} s:\n{what()}"
        time.sleep(0.05)
    return time.monotonic() - started


class Cluster:
    """A clone in the caller's home folder, and the two hosts that were started from it."""

    def __init__(self, caller: pwd.struct_passwd, image: str) -> None:
        self.caller = caller
        self.image = image
        self.project = f"muster-test-{os.getpid()}"
        self.folder = Path(caller.pw_dir) / self.project
        self.runs = self.folder / "runs"
        self.log = self.folder / "up.log"
        self._up: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self.clone()

    def clone(self) -> None:
        """What git would give: tracked files, and those that are about to be, owned by the caller."""
        shutil.rmtree(self.folder, ignore_errors=True)
        listed = sh("git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard").splitlines()
        for name in listed:
            if (ROOT / name).is_file():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.folder / name)
        if os.geteuid() == 0:
            sh("chown", "--recursive", f"{self.caller.pw_uid}:{self.caller.pw_gid}", str(self.folder))

    def as_caller(self, *command: str) -> list[str]:
        """The command as the caller runs it, without root's rights."""
        if os.geteuid() != 0:
            return list(command)
        who = ("--reuid", str(self.caller.pw_uid), "--regid", str(self.caller.pw_gid), "--init-groups")
        return ["setpriv", *who, "--", *command]

    def environment(self, **more: str) -> dict[str, str]:
        home = {"HOME": self.caller.pw_dir, "MUSTER_IMAGE": self.image, "COMPOSE_PROJECT_NAME": self.project}
        return {**clean_environment(), **home, **more}

    def start(self, command: Sequence[str] = ("docker/up",), **env: str) -> None:
        """Start it and return at once."""
        self._started_at = time.time()
        with self.log.open("wb") as log:
            self._up = subprocess.Popen(
                self.as_caller(*command), cwd=self.folder, env=self.environment(**env),
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def compose(self, *words: str) -> str:
        """A Compose command beside it."""
        command = self.as_caller(*compose_command(), *words)
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment(), capture_output=True, text=True, timeout=90, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def wait(self, timeout_s: float = 120) -> int:
        """The exit code of what was started."""
        assert self._up is not None
        try:
            return self._up.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there after {timeout_s:g} s:\n{self.said()}") from None

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def container(self, service: str) -> str:
        """A host's container."""
        labels = (f"com.docker.compose.project={self.project}", f"com.docker.compose.service={service}")
        return sh("docker", "ps", "--all", "--quiet", *(f"--filter=label={label}" for label in labels))

    def running(self) -> list[str]:
        """The hosts that are up."""
        return sh("docker", "ps", "--quiet", f"--filter=label=com.docker.compose.project={self.project}").split()

    def left(self) -> list[str]:
        """Containers, networks and volumes of this project."""
        label = f"--filter=label=com.docker.compose.project={self.project}"
        kinds = (["ps", "--all"], ["network", "ls"], ["volume", "ls"])
        return [name for kind in kinds for name in sh("docker", *kind, "--quiet", label).split()]

    def processes(self, service: str) -> list[tuple[int, int, str]]:
        """(process id on this machine, user id, command line) of everything in a host."""
        rows = sh("docker", "top", self.container(service), "-eo", "pid,uid,args").splitlines()[1:]
        return [(int(pid), int(uid), args) for pid, uid, args in (row.split(None, 2) for row in rows)]

    def run(self) -> Path:
        """The newest run folder."""
        found = sorted(self.runs.glob("*/environment.json"), key=lambda path: path.stat().st_mtime)
        assert found, self.said()
        return found[-1].parent

    def rows(self) -> list[dict[str, Any]]:
        """Metrics of the run that was started last, whole rows only."""
        found = [path for path in self.runs.glob("*/metrics.jsonl") if path.stat().st_mtime > self._started_at]
        lines = found[0].read_text().splitlines(keepends=True) if found else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_for_step(self, step: int, timeout_s: float = 180) -> None:
        def is_there() -> bool:
            assert self._up is not None
            assert self._up.poll() is None, f"it ended before step {step}:\n{self.said()}"
            return any(row["step"] >= step for row in self.rows())

        until(is_there, timeout_s, self.said)

    def wait_until_down(self, timeout_s: float = 90) -> float:
        """Seconds until no host is up."""
        return until(lambda: not self.running(), timeout_s, self.said)

    def signal(self, number: int) -> None:
        """Send it to what was started."""
        assert self._up is not None
        self._up.send_signal(number)

    def clear(self) -> None:
        """Take down whatever is left, for the next test."""
        if self._up is not None and self._up.poll() is None:
            self._up.kill()
            self._up.wait()
        if self.left():
            self.compose("--profile", "board", "down", "--volumes", "--timeout", "1")

    def remove(self) -> None:
        """And the clone."""
        self.clear()
        shutil.rmtree(self.folder, ignore_errors=True)
