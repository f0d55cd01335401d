"""Launches by SSH that are under way, or over: listed, followed, stopped, collected; and whether hosts are fit."""

from __future__ import annotations

import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from train.errors import UsageError
from train.launch import ending, overview
from train.launch.collect import bring
from train.launch.polling import Polling
from train.launch.ssh_code import push_code
from train.launch.ssh_host import SshHost, who
from train.launch.ssh_site import FAB, Site, silent
from train.launch.watch import Notes
from train.seam import Exit


def find(site: Site, launch_id: str, run_id: str, *, running: bool = False) -> dict[str, Any]:
    """The newest launch that is meant, with what its hosts tell of it. Raises UsageError."""
    told = site.ask("listed")
    found = overview.pick(told, launch_id, run_id, running=running)
    if found is None:
        raise UsageError(["no such launch is known on these hosts: fab status --all shows what is", *silent(told)])
    found["paths"] = {name: told[name]["paths"] for name in found["names"]}
    return found


def status(site: Site, *, all_of_them: bool) -> list[str]:
    """A table of what runs."""
    told = site.ask("listed")
    return overview.status(told, all_of_them=all_of_them)


def stop(site: Site, launch_id: str, run_id: str) -> dict[str, Any]:
    """Ask launches to stop, and wait for that: `lines`, and whether all ended in good order, `is_good`."""
    asked = site.ask("asked", launch=launch_id or None, run_id=run_id or None, by=f"fab stop, called by {who()}")

    def ends(name: str, host: SshHost) -> list[dict[str, Any]]:
        found = []
        for each in asked[name].get("launches", []):
            wait_s = float(each.get("grace_s") or 300) + 20
            found.append(host.ask("ended", site.given(launch=each["id"], wait_s=wait_s), wait_s + 60.0))
        return found

    return overview.stopped(asked, site.each(ends))


def collect(site: Site, launch_id: str, run_id: str, results: Path, *, checkpoints: bool) -> tuple[list[str], bool]:
    """Bring a launch's results: what came of it, and whether all came."""
    found = find(site, launch_id, run_id)
    first = found["names"][0]

    def fetch(name: str, host: SshHost) -> dict[str, Any]:
        one = found["hosts"][name]
        if not one.get("run"):
            return {}
        folder, label = f"{found['paths'][name]['folder']}/{found['id']}", f"node{one['node_rank']}-{name}"
        came = bring(host.read, one["run"], folder, results, label, whole=name == first, checkpoints=checkpoints)
        return {"dest": str(came.dest)}

    brought = site.each(fetch, found["names"])
    return ending.brought_words(brought), not any(told.get("msg") for told in brought.values())


def follow(site: Site, launch_id: str, run_id: str, say: Callable[[str], None]) -> int:
    """Show a launch's console until it ends; the job's exit code."""
    found = find(site, launch_id, run_id, running=not (launch_id or run_id))
    with tempfile.TemporaryDirectory(prefix="muster-follow-") as scratch:
        notes = Notes(Path(scratch) / "notes")

        def watch(name: str, host: SshHost) -> tuple[str, str]:
            folder = PurePosixPath(found["paths"][name]["folder"]) / found["id"]
            names = found["names"]
            polling = Polling(folder, name, names, found["grace_s"], notes, say, ours=False, follow=True)
            return polling.run(host.poll, lambda: True)

        watched = site.each(watch, found["names"])
    unseen = [f"{name} ({why})" for name, (how, why) in watched.items() if how != "ended"]
    if unseen:  # asking how it ended would end it there
        say(f"muster: not seen to its end: {', '.join(unseen)}; the launch may well go on: fab status")
        return int(Exit.HOST_LOST)
    ended = site.ask("ended", found["names"], launch=found["id"], wait_s=15)
    hosts = {name: {**ended[name], "failed": False, "lost": False} for name in found["names"]}
    verdict = ending.verdict(found["names"], hosts, FAB)
    say(f"muster: {ending.words_with_code(verdict)}")
    return int(verdict["exit_code"])


def log_of(site: Site, launch_id: str, run_id: str, rank: int | None, lines: int) -> str:
    """The last lines of a launch's console, or of a rank's log. Raises UsageError, OSError, UnreachableError."""
    found = find(site, launch_id, run_id)
    before = 0
    for name in found["names"]:
        one = found["hosts"][name]
        if rank is None or rank < before + int(one["slots"]):
            folder = f"{found['paths'][name]['folder']}/{found['id']}"
            path = (
                f"{folder}/console"
                if rank is None
                else f"{one.get('run')}/logs/node{one['node_rank']}-*/rank{rank}.log"
            )
            quoted = "/".join(part if part.endswith("-*") else shlex.quote(part) for part in path.split("/"))
            return site.hosts[name].read(f"tail -n {int(lines)} {quoted}").decode("utf-8", "replace")
        before += int(one["slots"])
    raise UsageError(f"--rank: {rank} is not among the {before} ranks of launch {found['id']}")


def push(site: Site) -> list[str]:
    """Send this checkout's code to the hosts that do not have it. Raises UsageError."""
    probes = site.ask("listed")
    lost = silent(probes)
    if lost:
        raise UsageError(lost)
    sent = push_code(site, probes)
    return [f"{name}: {'code sent' if name in sent else 'has this code already'}" for name in probes]


def push_image(site: Site, image: str) -> list[str]:
    """Send an image of this machine's Docker to the hosts that do not have it. Raises UsageError."""
    docker = ["docker", "image", "inspect", "--format", "{{.Id}} {{.Size}}", image]
    done = subprocess.run(docker, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise UsageError(f"--image: this machine has no image {image} ({done.stderr.strip()}): make image")
    digest, size = done.stdout.split()
    there = f"docker image inspect --format '{{{{.Id}}}}' {shlex.quote(image)}"

    def send(name: str, host: SshHost) -> str:
        code, output, _ = host.run(there)
        if code == 0 and output.decode().strip() == digest:
            return "has this image already"
        began_s = time.monotonic()
        with subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE) as save:  # noqa: S603, S607
            assert save.stdout is not None
            host.read("docker load", iter(partial(save.stdout.read, 1 << 20), b""))
        return f"{int(size) / 1e6:.0f} MB sent in {time.monotonic() - began_s:.0f} s"

    told = site.each(send, at_once=4)  # each reads the whole image from this machine's disk
    failed = [f"{name}: {each['msg']}" for name, each in told.items() if isinstance(each, dict)]
    if failed:
        raise UsageError(failed)
    return [f"{name}: {words}" for name, words in told.items()]
