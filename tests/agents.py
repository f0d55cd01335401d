"""A stand-in for the node agent, at the process boundary: it makes the status pages, sets the environment that an
agent would, starts ranks with pipes and reads what they leave. Nothing of the agent's own code is used here, so that
the ranks' side of the seam is tested by itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.ranks import ROOT, clean_environment, free_port, rank_environment
from train.seam import RUN_ID, RUNS_DIR, START_ID, STATUS_PAGE, StatusPage

COMMAND = (sys.executable, "-m", "train")


class FakeAgent:
    """Ranks of one host with a status page each. Ends them all on the way out."""

    def __init__(self, folder: Path, world_size: int = 2, run_id: str = "fake") -> None:
        self.folder = folder
        self.world_size = world_size
        self.run = folder / "runs" / run_id
        (folder / "pages").mkdir()
        self.pages = [StatusPage.make(folder / "pages" / f"rank{rank}.page") for rank in range(world_size)]
        self.environment = {RUN_ID: run_id, RUNS_DIR: str(folder / "runs"), START_ID: "start-1"}
        self.ranks: list[subprocess.Popen[str]] = []

    def __enter__(self) -> FakeAgent:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()
            assert rank.stdout is not None
            rank.stdout.close()

    def start(self, *argv: str, command: Sequence[str] = COMMAND, ranks: Sequence[int] | None = None) -> None:
        """Start `COMMAND ARGV…` as these ranks, all of them by default."""
        port = free_port()
        for rank in range(self.world_size) if ranks is None else ranks:
            env = clean_environment(
                **rank_environment(rank, self.world_size, port),
                **self.environment,
                PYTHONPATH=f"{self.folder}:{ROOT}",
                PYTHONFAULTHANDLER="1",
                **{STATUS_PAGE: str(self.pages[rank].path)},
            )
            self.ranks.append(
                subprocess.Popen(
                    [*command, *argv], cwd=self.folder, env=env, text=True, errors="replace",
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                )
            )  # fmt: skip

    def wait_until(self, what: Callable[[], bool], timeout_s: float = 60) -> None:
        """Look until it holds; fails where it does not come to that, or a rank ends first."""
        deadline = time.monotonic() + timeout_s
        while not what():
            assert time.monotonic() < deadline, "it never came to that"
            said = [rank.communicate()[0] for rank in self.ranks if rank.poll() is not None]
            assert not said, said
            time.sleep(0.01)

    def end(self, timeout_s: float = 60) -> tuple[list[int], list[str]]:
        """Exit codes and output of the ranks, once all have ended."""
        deadline = time.monotonic() + timeout_s
        outputs = [rank.communicate(timeout=max(0.1, deadline - time.monotonic()))[0] for rank in self.ranks]
        return [rank.returncode for rank in self.ranks], outputs

    def beside(self, rank: int, ending: str) -> Path:
        """The file that a rank leaves beside its page."""
        path = self.pages[rank].beside(ending)
        assert path is not None
        return path

    def told(self, rank: int, ending: str) -> Any:
        """What a rank left in one of its JSON files."""
        return json.loads(self.beside(rank, ending).read_text(encoding="utf-8"))
