"""This checkout's code on the hosts of a launch by SSH: a folder named by what is in it, sent where it lacks."""

from __future__ import annotations

import functools
import hashlib
import io
import secrets
import shlex
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.errors import UsageError

if TYPE_CHECKING:
    from train.launch.ssh_host import SshHost
    from train.launch.ssh_site import Site

_ROOT = Path(__file__).resolve().parents[2]


def folder_name() -> str:
    """Of the code on hosts."""
    return _packed()[0]


@functools.cache
def _packed() -> tuple[str, bytes]:
    """This checkout's code, as the name of its folder on hosts, and an archive."""
    text = io.BytesIO()
    with tarfile.open(fileobj=text, mode="w:gz", compresslevel=1) as archive:
        for path in _files_of_packed():
            member = archive.gettarinfo(path, str(path.relative_to(_ROOT)))
            member.uid, member.gid, member.uname, member.gname = 0, 0, "", ""
            with path.open("rb") as file:
                archive.addfile(member, file)
    digest = hashlib.sha256()
    for path in _files_of_packed():
        digest.update(f"{path.relative_to(_ROOT)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return f"code-{digest.hexdigest()[:16]}", text.getvalue()


def _files_of_packed() -> list[Path]:
    return [path for path in sorted((_ROOT / "train").rglob("*")) if path.is_file() and "__pycache__" not in path.parts]


def push_code(site: Site, probes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Send this checkout's code to hosts that do not have it; their names. Raises UsageError."""
    lacking = {
        name: str(probe["paths"]["home"])
        for name, probe in probes.items()
        if probe.get("paths") and not probe.get("has_home")
    }
    push_archive(site, _packed()[1], lacking)
    return [*lacking]


def push_archive(site: Site, archive: bytes, folders: Mapping[str, str]) -> None:
    """An archive becomes a folder on each of these hosts, all of it or nothing. Raises UsageError: where not."""

    def unpack(name: str, host: SshHost) -> None:
        folder, aside = shlex.quote(folders[name]), shlex.quote(f"{folders[name]}.{secrets.token_hex(4)}")
        made = f"mkdir -p {aside} && tar -xzf - -C {aside} && {{ [ -e {folder} ] || mv -T {aside} {folder}; }}"
        host.read(f"{made}; code=$?; rm -rf {aside}; exit $code", archive)

    sent = site.each(unpack, [*folders])
    problems = [f"{name}: the code could not be sent: {told['msg']}" for name, told in sent.items() if told]
    if problems:
        raise UsageError(problems)
