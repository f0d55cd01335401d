"""Sends an archive of an image to a host and loads it there, and says how far it is: a large one takes minutes."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

EVERY_S = 5


class ActionModule(ActionBase):  # type: ignore[misc]
    """`send_image: {archive: PATH}`: the file on the control machine, as `docker save` wrote it."""

    TRANSFERS_FILES = True
    _VALID_ARGS = frozenset(("archive",))
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send, load, remove; the seconds that each took are in the result."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        if self._task.check_mode:
            return {**result, "changed": True}
        archive = Path(self._task.args["archive"])
        host = (task_vars or {})["inventory_hostname"]
        folder = self._make_tmp_path()
        remote = self._connection._shell.join_path(folder, "image.tar")
        try:
            started = time.monotonic()
            with _Progress(self._connection, host, remote, archive.stat().st_size):
                self._connection.put_file(str(archive), remote)
            sent = time.monotonic()
            loaded = self._low_level_execute_command(f"docker load --quiet --input {remote}", sudoable=True)
        finally:
            self._remove_tmp_path(folder)
        if loaded["rc"] != 0:
            raise AnsibleActionFail(f"docker load on {host}: {loaded['stderr'] or loaded['stdout']}")
        return {
            **result, "changed": True, "sent_s": round(sent - started, 1),
            "loaded_s": round(time.monotonic() - sent, 1),
        }  # fmt: skip


class _Progress:
    """Looks every few seconds, over the connection that is there, how much of the file has arrived."""

    def __init__(self, connection: Any, host: str, remote: str, size: int) -> None:
        self._connection, self._host, self._remote, self._size = connection, host, remote, size
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        started = time.monotonic()
        while not self._done.wait(EVERY_S):
            code, said, _ = self._connection.exec_command(f"stat --format %s {self._remote}", sudoable=False)
            if code != 0:
                continue
            arrived, seconds = int(said), time.monotonic() - started
            Display().display(
                f"image: {self._host} has {arrived / 1e6:.0f} of {self._size / 1e6:.0f} MB"
                f" ({arrived / seconds / 1e6:.0f} MB/s)"
            )
