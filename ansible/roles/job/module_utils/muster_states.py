"""On a host: what it is fit for, and Muster's agent on it: started, asked to stop, ended, listed.

Each function takes what is given by name, and the folder of launches; each tells a table. Needs Python 3.9 and nothing
beside it: Ansible sends it to a host as its module muster_agent, and `fab` by SSH (train/launch/ssh.py).
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import pathlib
import select
import shutil
import signal
import time
from typing import TYPE_CHECKING, Any, NoReturn

from ansible.module_utils.muster_launch import Agent, RefusalError, alone, is_running, launches, python_of, run

if TYPE_CHECKING:
    from collections.abc import Callable

KEPT = 20
FILES_S = 10.0
"""In which a file system answers that is not dead."""
STRAY_S = 3600.0
"""Code whose launch nobody knows after that has been forgotten by a launcher that was killed."""


def bounded(path: pathlib.Path, look: Callable[[], Any], timeout_s: float = FILES_S) -> Any:
    """What a look at files below the path tells. Raises RefusalError where it fails, or takes too long.

    A child looks: whoever touches a network file system whose server is gone may never come back.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _look_and_end(writer, look)
    os.close(writer)
    text, deadline = b"", time.monotonic() + timeout_s
    with os.fdopen(reader, "rb", buffering=0) as told:
        while True:
            if not select.select([told], [], [], max(0.0, deadline - time.monotonic()))[0]:
                os.kill(child, signal.SIGKILL)  # nobody waits for it: it may be in state D
                raise RefusalError(
                    f"{path} has not answered for {timeout_s:g} s: is the server of its file system gone? "
                    f"Look with `timeout 5 df {path}`, and mount it anew"
                )
            piece = told.read(1 << 16)
            if not piece:
                break
            text += piece
    os.waitpid(child, 0)
    answer = json.loads(text or b"{}")
    if "told" not in answer:
        raise RefusalError(answer.get("why") or f"{path} could not be looked at")
    return answer["told"]


def _look_and_end(writer: int, look: Callable[[], Any]) -> NoReturn:
    """In a child that holds nothing for whose end somebody else waits."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nowhere, descriptor)
    try:
        answer = {"told": look()}
    except (OSError, RefusalError) as error:
        answer = {"why": str(error)}
    with os.fdopen(writer, "w", encoding="utf-8") as told:
        json.dump(answer, told)
    os._exit(0)


def probe(given: dict[str, Any], base: pathlib.Path) -> dict[str, Any]:
    """What the host is fit for."""
    problems: list[str] = []
    runs, python, image = pathlib.Path(given["runs"]), python_of(given), None

    def look(path: pathlib.Path, at: Callable[[], Any]) -> Any:
        try:
            return bounded(path, at)
        except RefusalError as refusal:
            problems.append(str(refusal))
            return None

    try:
        if given["runtime"] == "docker":
            image = run("docker", "image", "inspect", "--format", "{{.Id}}", given["image"])
        elif look(python, python.exists) is False:
            problems.append(f"no Python environment in {python.parent.parent}: run provision.yml")
    except RefusalError as refusal:
        is_missing = "no such image" in str(refusal).lower()
        problems.append(f"no image {given['image']}: run provision.yml" if is_missing else str(refusal))
    free_mb, why = look(runs, lambda: _look_at_runs(runs, given["uid"])) or (None, "")
    problems += [why] if why else []
    try:
        gpus = run("nvidia-smi", "--list-gpus", check=False).count("GPU ")
    except RefusalError:
        gpus = 0
    return {
        "problems": problems, "image": image, "gpus": gpus, "gpu_files": len(glob.glob("/dev/nvidia[0-9]*")),
        "launches": look(base, lambda: [launch for launch in launches(base) if launch["running"]]) or [],
        "free_mb": free_mb,
    }  # fmt: skip


def _look_at_runs(runs: pathlib.Path, uid: int) -> tuple[int | None, str]:
    """Free space in the folder of runs, in MB, and what is wrong with it."""
    if os.geteuid() == uid:  # nobody else's
        with contextlib.suppress(OSError):
            runs.mkdir(parents=True, exist_ok=True)
    if not runs.is_dir():
        return None, f"no folder {runs} for runs: run provision.yml"
    owner = runs.stat().st_uid
    why = "" if owner == uid else f"{runs} belongs to user {owner}, not to {uid}: run provision.yml"
    return shutil.disk_usage(runs).free >> 20, why


def words_of(launch: dict[str, Any]) -> str:
    """A launch for people."""
    since = time.strftime("%F %H:%M:%S", time.localtime(launch["since"]))
    what = f"run {launch['run_id']}" if launch.get("run_id") else " ".join(launch.get("command") or ["a job"])
    return f"launch {launch['id']} of {launch['by']} since {since} ({what})"


def start(given: dict[str, Any], base: pathlib.Path) -> dict[str, Any]:
    """Start an agent, unless somebody else's runs here."""
    agent = Agent(base, given["launch"])
    try:
        with alone(base):
            if agent.folder.exists():  # the connection broke, and Ansible asks again
                if not is_running(agent.folder):
                    raise RefusalError(f"launch {given['launch']} was started here, and has ended")
                return {"changed": False, "is_up": True}
            _start_alone(given, base, agent)
    except (RefusalError, OSError):
        if not is_running(agent.folder):
            shutil.rmtree(agent.code, ignore_errors=True)
        raise
    return {"changed": True, "is_up": True}


def _start_alone(given: dict[str, Any], base: pathlib.Path, agent: Agent) -> None:
    known = launches(base)
    tidy_up(base, known, given["launch"])
    held = [launch for launch in known if launch["running"]]
    if held and not given["share"]:
        raise RefusalError("it is in use by " + "; ".join(map(words_of, held)))
    try:
        agent.start(given)
        agent.wait_for_a_word(given["wait_s"])
    except (RefusalError, OSError):
        agent.forget()
        if agent.is_begun:
            agent.kill()
        with contextlib.suppress(OSError):  # such as a full disk
            agent.conclude()
        raise


def tidy_up(base: pathlib.Path, known: list[dict[str, Any]], launch: str) -> None:
    """Before a launch: what those before it left, that were killed. Nobody else starts anything meanwhile."""
    for path in base.glob("*-*-*"):
        Agent(base, path.name).forget()
    old = [one["id"] for one in known if not one["running"]]
    for one in old:
        with contextlib.suppress(RefusalError, OSError):
            Agent(base, one).conclude()
    for one in old[KEPT:]:
        for folder in (base, base / "code"):
            shutil.rmtree(folder / one, ignore_errors=True)
    for code in (base / "code").glob("*"):
        with contextlib.suppress(FileNotFoundError):
            age_s = time.time() - code.stat().st_ctime
            if age_s > STRAY_S and code.name not in [launch, *(one["id"] for one in known)]:
                shutil.rmtree(code, ignore_errors=True)


def inspect(given: dict[str, Any], base: pathlib.Path) -> dict[str, Any]:
    """What `python -m train preflight` says on this host, run as an agent would be."""
    base.mkdir(mode=0o755, parents=True, exist_ok=True)
    return {"changed": False, "said": Agent(base, given["launch"]).inspect(given, given["wait_s"])}


def matching(given: dict[str, Any], base: pathlib.Path) -> list[dict[str, Any]]:
    """The launches that are meant."""
    return [
        launch
        for launch in bounded(base, lambda: launches(base))
        if given["launch"] in (None, "", launch["id"]) and given["run_id"] in (None, "", launch["run_id"])
    ]


def ask(given: dict[str, Any], base: pathlib.Path) -> dict[str, Any]:
    """Ask launches to stop."""
    asked = [launch for launch in matching(given, base) if launch["running"]]
    for launch in asked:
        with (base / launch["id"] / "lease").open("w", encoding="utf-8") as file:
            file.write(f"stop {given['by']}\n")
    return {"changed": bool(asked), "launches": asked}


def end(given: dict[str, Any], base: pathlib.Path) -> dict[str, Any]:
    """Wait for an agent's end, or bring it about; how it was."""
    agent = Agent(base, given["launch"])
    if not (agent.folder / "launch.json").exists():
        return {"known": False}
    killed = not agent.wait(given["wait_s"])
    if killed:
        agent.kill()
    with alone(base):
        was_told = (agent.folder / "end.json").exists()
        return {"changed": killed or not was_told, "known": True, "killed": killed, **agent.conclude()}


def list_all(given: dict[str, Any], base: pathlib.Path) -> dict[str, Any]:
    """What the host knows."""
    return {"launches": matching(given, base)}


STATES = {"probed": probe, "inspected": inspect, "started": start, "asked": ask, "ended": end, "listed": list_all}
