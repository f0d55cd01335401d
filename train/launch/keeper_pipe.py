"""The agent's end of the pipe to its keeper (`keeper.py`)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

from train.launch import keeper

MOST_KEEPERS = 10


class KeeperPipe:
    """The agent's end of the pipe to its keeper."""

    def __init__(self) -> None:
        self.pid = 0
        self._pipe = -1
        self._starts = 0
        self.start()

    def start(self, *lines: str) -> bool:
        """Start a keeper; also anew, when somebody has killed it, but no more than a few times: False then.

        `lines` are in the pipe before it starts: whoever sees it run may rely on what it knows.
        """
        self._starts += 1
        if self._starts > MOST_KEEPERS:
            self.pid = 0
            return False
        if self._pipe >= 0:
            os.close(self._pipe)
        reading, self._pipe = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._pipe, False)  # a keeper that stands still must not make the agent wait
        self.say(*lines)
        me = keeper.look_at(os.getpid())
        began = str(me.began if me else 0)
        command = [sys.executable, "-I", "-S", keeper.__file__, str(reading), str(os.getpid()), began]
        # A session of its own: what ends the agent's process group must not end its keeper.
        started = subprocess.Popen(  # noqa: S603
            command,
            pass_fds=[reading],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        started.returncode = 0  # reaped by the agent
        os.close(reading)
        self.pid = started.pid
        return True

    def say(self, *lines: str) -> None:
        """Tell it."""
        if not lines:
            return
        with contextlib.suppress(OSError):  # it was killed: `children_ended` starts another
            os.write(self._pipe, "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape"))
