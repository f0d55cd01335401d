#!/usr/bin/python
"""An Ansible module: what a host is fit for, and Muster's agent on it: started, asked to stop, ended, listed.

Its options are documented in muster_agent.yml; what a launch is on a host, in module_utils/muster_launch.py.
"""

from __future__ import annotations

import contextlib
import glob
import pathlib
import shutil
import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.muster_launch import Agent, RefusalError, alone, launches, run

KEPT = 20


def probe(given: dict[str, Any], base: pathlib.Path) -> dict[str, Any]:
    """What the host is fit for."""
    problems, image = [], None
    try:
        if given["runtime"] == "docker":
            image = run("docker", "image", "inspect", "--format", "{{.Id}}", given["image"])
        elif not pathlib.Path(given["home"], "venv/bin/python").exists():
            problems.append(f"no Python environment in {given['home']}/venv: run provision.yml")
    except RefusalError as refusal:
        is_missing = "no such image" in str(refusal).lower()
        problems.append(f"no image {given['image']}: run provision.yml" if is_missing else str(refusal))
    runs = pathlib.Path(given["runs"])
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


STATES = {"probed": probe, "started": start, "asked": ask, "ended": end, "listed": list_all}


def main() -> None:
    """The module."""
    text, path, strings = {"type": "str"}, {"type": "path"}, {"type": "list", "elements": "str", "default": []}
    table: dict[str, Any] = {"type": "dict", "default": {}}
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "required": True, "choices": [*STATES]},
            "folder": {"type": "path", "required": True},
            "launch": text, "run_id": text, "by": {"type": "str", "default": "somebody"},
            "wait_s": {"type": "float", "default": 60},
            "runtime": {"type": "str", "choices": ["docker", "venv"], "default": "docker"},
            "image": text, "home": path, "runs": path, "uid": {"type": "int"},
            "watcher": {"type": "list", "elements": "int", "default": [0, 0]},
            "arguments": strings, "command": strings, "about": table, "files": table,
            "secret": {"type": "str", "no_log": True}, "gpus": {"type": "int", "default": 0},
            "share": {"type": "bool", "default": False}, "environment": table, "mounts": strings, "options": strings,
            "code": path,
        },
        required_if=[
            ("state", "probed", ("runs", "uid")),
            ("state", "started", ("launch", "runs", "uid", "arguments", "command")),
            ("state", "ended", ("launch",)),
        ],
        supports_check_mode=True,
    )  # fmt: skip
    given = module.params
    if module.check_mode and given["state"] in ("started", "asked", "ended"):
        module.exit_json(changed=True)
    try:
        told = STATES[given["state"]](given, pathlib.Path(given["folder"]))
    except (RefusalError, OSError) as error:
        module.fail_json(msg=str(error), is_up=False)
    module.exit_json(**{"changed": False, **told})


if __name__ == "__main__":
    main()
