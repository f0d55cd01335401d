"""On a host: what it is fit for, and Muster's agent on it: started, asked to stop, ended, listed.

Each function takes what is given by name, and the folder of launches; each tells a table. Needs Python 3.9 and nothing
beside it: Ansible sends it to a host as its module muster_agent, and `fab` by SSH (train/launch/ssh.py).
"""

from __future__ import annotations

import contextlib
import glob
import os
import pathlib
import shutil
import time
from typing import Any

from ansible.module_utils.muster_launch import Agent, RefusalError, alone, launches, python_of, run

KEPT = 20


def probe(given: dict[str, Any], base: pathlib.Path) -> dict[str, Any]:
    """What the host is fit for."""
    problems, image = [], None
    runs = pathlib.Path(given["runs"])
    if os.geteuid() == given["uid"]:  # nobody else's
        with contextlib.suppress(OSError):
            runs.mkdir(parents=True, exist_ok=True)
    try:
        if given["runtime"] == "docker":
            image = run("docker", "image", "inspect", "--format", "{{.Id}}", given["image"])
        elif not python_of(given).exists():
            problems.append(f"no Python environment in {python_of(given).parent.parent}: run provision.yml")
    except RefusalError as refusal:
        is_missing = "no such image" in str(refusal).lower()
        problems.append(f"no image {given['image']}: run provision.yml" if is_missing else str(refusal))
    if not runs.is_dir():
        problems.append(f"no folder {runs} for runs: run provision.yml")
    elif runs.stat().st_uid != given["uid"]:
        problems.append(f"{runs} belongs to user {runs.stat().st_uid}, not to {given['uid']}: run provision.yml")
    try:
        gpus = run("nvidia-smi", "--list-gpus", check=False).count("GPU ")
    except RefusalError:
        gpus = 0
    return {
        "problems": problems, "image": image, "gpus": gpus, "gpu_files": len(glob.glob("/dev/nvidia[0-9]*")),
        "launches": [launch for launch in launches(base) if launch["running"]],
        "free_mb": shutil.disk_usage(runs).free >> 20 if runs.is_dir() else None,
    }  # fmt: skip


def words_of(launch: dict[str, Any]) -> str:
    """A launch for people."""
    since = time.strftime("%F %H:%M:%S", time.localtime(launch["since"]))
    what = f"run {launch['run_id']}" if launch.get("run_id") else " ".join(launch.get("command") or ["a job"])
    return f"launch {launch['id']} of {launch['by']} since {since} ({what})"


def start(given: dict[str, Any], base: pathlib.Path) -> dict[str, Any]:
    """Start an agent, unless somebody else's runs here."""
    with alone(base):
        known = launches(base)
        held = [launch for launch in known if launch["running"]]
        if held and not given["share"]:
            raise RefusalError("it is in use by " + "; ".join(map(words_of, held)))
        old = [launch for launch in known if not launch["running"]]
        for launch in old:  # what a killed launcher left
            with contextlib.suppress(RefusalError):
                Agent(base, launch["id"]).conclude()
        for launch in old[KEPT:]:
            for folder in (base, base / "code"):
                shutil.rmtree(folder / launch["id"], ignore_errors=True)
        agent = Agent(base, given["launch"])
        try:
            agent.start(given)
            agent.wait_for_a_word(given["wait_s"])
        except RefusalError:
            if agent.folder.exists():
                agent.kill()
                agent.conclude()
            raise
    return {"changed": True, "is_up": True}


def inspect(given: dict[str, Any], base: pathlib.Path) -> dict[str, Any]:
    """What `python -m train preflight` says on this host, run as an agent would be."""
    base.mkdir(mode=0o755, parents=True, exist_ok=True)
    return {"changed": False, "said": Agent(base, given["launch"]).inspect(given, given["wait_s"])}


def matching(given: dict[str, Any], base: pathlib.Path) -> list[dict[str, Any]]:
    """The launches that are meant."""
    return [
        launch
        for launch in launches(base)
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
