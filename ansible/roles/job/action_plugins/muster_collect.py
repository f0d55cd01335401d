"""Brings what is new in a run's folder on a host to this machine, by whatever connection Ansible has to it.

Needs tar and find on the host, and no rsync. Small files come many at a time, large ones piece by piece; each is put in
its place whole. What has the same size and time here already stays.
"""

from __future__ import annotations

import base64
import io
import os
import re
import shlex
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from ansible.errors import AnsibleActionFail, AnsibleConnectionFailure
from ansible.plugins.action import ActionBase

BATCH_BYTES, PIECE_BYTES = 8 << 20, 8 << 20
OTHERS = re.compile(r"(logs|evidence)/")
"""What hosts have beside the one whose folder is taken as a whole."""


class File(NamedTuple):
    """A file of the run on the host."""

    name: str
    size: int
    time_s: float


class ActionModule(ActionBase):  # type: ignore[misc]
    """Options: run (a folder on the host), results (here), whole, checkpoints; folder, launch, label: the console's."""

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Changed where something was new; `dest` says where it is."""
        super().run(tmp, task_vars)
        given = self._task.args
        run = PurePosixPath(given["run"])
        if not re.fullmatch(r"[^/\0]+", run.name) or run.name in (".", ".."):
            raise AnsibleActionFail(f"{given['run']!r} is no run folder")
        dest = Path(given["results"]) / run.name
        brought = self._bring(str(run), dest, self._wanted)
        console = dest / "logs" / str(given["label"])
        launch = str(PurePosixPath(given["folder"]) / given["launch"])
        brought += self._bring(launch, console, lambda file: file.name == "console")
        return {
            "changed": bool(brought),
            "dest": str(dest),
            "brought": len(brought),
            "bytes": sum(f.size for f in brought),
        }

    def _wanted(self, file: File) -> bool:
        if not self._task.args.get("whole"):
            return OTHERS.match(file.name) is not None
        return bool(self._task.args.get("checkpoints", True)) or not file.name.startswith("checkpoints/")

    def _bring(self, source: str, dest: Path, wanted: Any) -> list[File]:
        files = [file for file in self._files(source) if wanted(file) and not _is_here(file, dest)]
        batch: list[File] = []
        for file in sorted(files, key=lambda file: file.size):
            if file.size > BATCH_BYTES:
                self._bring_large(source, file, dest)
                continue
            if sum(one.size for one in batch) + file.size > BATCH_BYTES:
                self._bring_batch(source, batch, dest)
                batch = []
            batch.append(file)
        self._bring_batch(source, batch, dest)
        return files

    def _files(self, source: str) -> list[File]:
        find = f"cd {shlex.quote(source)} && find . -type f ! -name '.*' -printf '%s %T@ %P\\0'"
        rows = self._bytes(find).decode("utf-8", "surrogateescape").split("\0")
        found = []
        for row in rows[:-1]:
            size, time_s, name = row.split(" ", 2)
            if ".." not in PurePosixPath(name).parts and not name.startswith("/"):
                found.append(File(name, int(size), float(time_s)))
        return found

    def _bring_batch(self, source: str, batch: list[File], dest: Path) -> None:
        if not batch:
            return
        names = "".join(f"{file.name}\0" for file in batch).encode("utf-8", "surrogateescape")
        # 1: a file changed meanwhile, or went; what came of it is looked at again next time.
        command = f"cd {shlex.quote(source)} && {{ tar -cf - --null --no-recursion -T - 2>/dev/null || [ $? -le 2 ]; }}"
        by_name = {file.name: file for file in batch}
        with tarfile.open(fileobj=io.BytesIO(self._bytes(command, names))) as archive:
            for member in archive:
                file, content = by_name.get(member.name.removeprefix("./")), archive.extractfile(member)
                if file is not None and content is not None:
                    with _Place(file, dest) as place:
                        place.write(content.read())

    def _bring_large(self, source: str, file: File, dest: Path) -> None:
        path = shlex.quote(f"{source}/{file.name}")
        with _Place(file, dest) as place:
            for at in range(0, file.size, PIECE_BYTES):
                piece = self._bytes(f"dd if={path} bs={PIECE_BYTES} skip={at // PIECE_BYTES} count=1 2>/dev/null")
                place.write(piece)

    def _bytes(self, command: str, stdin: bytes = b"\n") -> bytes:
        """What a command on the host writes. With something on its stdin it gets no terminal, which would change it."""
        for patience in (1, 0):
            try:
                answer = self._low_level_execute_command(f"{{ {command}; }} | base64 -w 0", in_data=stdin)
                break
            except AnsibleConnectionFailure:
                if not patience:
                    raise
        try:
            return base64.b64decode(answer["stdout"].strip(), validate=True)
        except ValueError:
            raise AnsibleActionFail(f"{command}: {answer['stdout'][-300:]}") from None


class _Place:
    """Where a file comes to be: under another name until it is whole, then with the host's time."""

    def __init__(self, file: File, dest: Path) -> None:
        self._file, self._path = file, dest / file.name
        self._aside = self._path.with_name(f".{self._path.name}.{os.getpid()}.part")

    def __enter__(self) -> io.BufferedWriter:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._writer = self._aside.open("wb")
        return self._writer

    def __exit__(self, kind: object, *more: object) -> None:
        self._writer.close()
        if kind is not None:
            self._aside.unlink()
            return
        os.utime(self._aside, (self._file.time_s, self._file.time_s))
        self._aside.replace(self._path)


def _is_here(file: File, dest: Path) -> bool:
    try:
        found = (dest / file.name).stat()
    except OSError:
        return False
    return found.st_size == file.size and abs(found.st_mtime - file.time_s) < 0.01
