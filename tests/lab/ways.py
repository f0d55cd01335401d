"""All launchers on one lab, called alike: a job's name and command go in, its exit code, words and run folder come."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.container.cluster import Cluster as Compose
from tests.container.conftest import IMAGE
from tests.lab.slurms import NODES, Slurm
from tests.ranks import ROOT

LIMIT_S = 6
STILL_THERE = 124
"""Of a torchrun that had not ended a minute later: where one host's rank dies, the other host's torchrun waits on."""


@dataclass
class Outcome:
    """What became of a job."""

    code: int
    """Of what the user called."""
    output: str
    run: Path | None = None
    """Its run folder, brought here."""

    @property
    def verdict(self) -> int:
        """The job's exit code, by its verdict; by the last words where nothing was started."""
        if self.run is not None and (self.run / "verdict.json").exists():
            return int(json.loads((self.run / "verdict.json").read_text())["exit_code"])
        found = re.findall(r"\(exit code (\d+)", self.output)
        return int(found[-1]) if found else self.code


Way = Callable[[str, list[str], bool], Outcome]
"""A launcher: the run's name, the ranks' command (`run …` is Muster's own), whether with a time limit."""


@dataclass
class Ways:
    """The launchers, on one lab."""

    slurm: Slurm
    folder: Path
    compose: Compose
    table: dict[str, dict[str, str]] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    """More of the ranks' environment."""
    runtime: str = "venv"
    """Of fab and Ansible."""

    @property
    def all(self) -> dict[str, Way]:
        return {
            "local agent": self.local, "fab": self.fab, "ansible": self.ansible, "slurm": self.sbatch,
            "torchrun": self.torchrun, "compose": self.docker_up,
        }  # fmt: skip

    def local(self, name: str, command: list[str], limit: bool) -> Outcome:
        words = ["-m", "train", "node", "--standalone", "--nproc-per-node", "4", "--run-id", name]
        words += ["--runs-dir", "/tmp/local", *(["--time-limit-s", str(LIMIT_S)] if limit else []), "--", *command]
        code, output = self._on("node1", ["/opt/muster/venv/bin/python", *words])
        return Outcome(code, output, self._copied({"node1": f"/tmp/local/{name}"}, f"local-{name}"))

    def fab(self, name: str, command: list[str], limit: bool) -> Outcome:
        inventory = ["--inventory", str(self.slurm.cluster.inventory), "--nodes", "2", "--run-id", name]
        more = ["--time-limit", str(LIMIT_S)] if limit else []
        more += ["--runtime", self.runtime, "--image", IMAGE]
        if self.variables:
            more += ["--env", shlex.join(f"{name}={value}" for name, value in self.variables.items())]
        words = [
            f"{Path(sys.executable).parent}/fab",
            "launch",
            *inventory,
            "--results",
            str(self.folder / "fab"),
            *more,
        ]
        code, output = self._here([*words, "--", *command], ROOT)
        return Outcome(code, output, self.folder / "fab" / name)

    def ansible(self, name: str, command: list[str], limit: bool) -> Outcome:
        asked = {
            "run_id": name,
            "nodes": 2,
            "runtime": self.runtime,
            "muster_image": IMAGE,
            "job_results": str(self.folder / "ansible"),
        }
        asked |= {"time_limit": LIMIT_S} if limit else {}
        asked |= {"job_environment": self.variables} if self.variables else {}
        asked |= (
            {"config": command[2], "overrides": shlex.join(command[3:])} if command[0] == "run" else {"script": command}
        )
        done = self.slurm.cluster.playbook("launch.yml", "-e", json.dumps(asked), check=False)
        return Outcome(done.returncode, done.stdout, self.folder / "ansible" / name)

    def sbatch(self, name: str, command: list[str], limit: bool) -> Outcome:
        is_ours = command[0] == "run"
        name = f"{name}-slurm"  # Ansible's runs are in the same folder: it must not go on with one of them
        more: dict[str, Any] = {"MUSTER_RUN_ID": name, **self.variables}
        job = self.slurm.submit("ddp" if is_ours else "script", *(command[3:] if is_ours else command), **more)
        self.slurm.end(job)
        folders = dict.fromkeys(NODES[:2], f"/var/lib/muster/runs/{name}")
        code = int(self.slurm.facts(job)["ExitCode"].split(":")[0])
        return Outcome(code, f"{self.slurm.log(job)}(exit code {code})", self._copied(folders, name))

    def torchrun(self, name: str, command: list[str], limit: bool) -> Outcome:
        is_ours = command[0] == "run"
        words = ["/opt/muster/venv/bin/torchrun", "--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "node1"]
        started = []
        for rank, node in enumerate(NODES[:2]):
            more = ["--master-port", "29631", "--node-rank", str(rank)]
            ours = ["-m", "train", *command, "--run-id", name, "--runs-dir", "/tmp/torchrun"]
            argv = [*words, *more, *(ours if is_ours else ["--no-python", *command])]
            started.append(
                subprocess.Popen(self._exec(node, argv), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
        try:
            deadline_s = time.monotonic() + (180 if is_ours else 60)  # torch takes its time on a busy machine
            for process in started:
                process.wait(deadline_s - time.monotonic())
            code = max(process.returncode for process in started)
        except subprocess.TimeoutExpired:
            code = STILL_THERE
            for node in NODES[:2]:
                self.slurm.cluster.on(node, "pkill", "--signal", "KILL", "--uid", "muster", check=False)
        output = "".join(process.communicate(timeout=30)[0] for process in started)
        return Outcome(code, output, self._copied({"node1": f"/tmp/torchrun/{name}"}, f"torchrun-{name}"))

    def docker_up(self, name: str, command: list[str], limit: bool) -> Outcome:
        self.compose.start(MUSTER_ARGS=shlex.join([*command[3:], "--run-id", name]))
        code = self.compose.wait(240)
        return Outcome(code, f"{self.compose.said()}(exit code {code})", self.compose.runs / name)

    def _exec(self, node: str, argv: list[str]) -> list[str]:
        given = {"PYTHONPATH": "/opt/muster", "PYTHONUNBUFFERED": "1", **self.variables}
        variables = [word for name, value in given.items() for word in ("--env", f"{name}={value}")]
        return [
            "docker",
            "exec",
            "--user",
            "muster",
            "-w",
            "/tmp",
            *variables,
            self.slurm.cluster.container(node),
            *argv,
        ]

    def _on(self, node: str, argv: list[str]) -> tuple[int, str]:
        return self._here(self._exec(node, argv), ROOT)

    def _here(self, argv: list[str], cwd: Path) -> tuple[int, str]:
        done = subprocess.run(
            argv, cwd=cwd, env=self.slurm.cluster.environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", timeout=240, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout

    def _copied(self, folders: dict[str, str], name: str) -> Path:
        """Run folders of hosts as one, the first host's on top."""
        target = self.folder / re.sub(r"\W", "-", name)
        target.mkdir()
        for node, folder in reversed(folders.items()):
            source = f"{self.slurm.cluster.container(node)}:{folder}/."
            subprocess.run(["docker", "cp", source, str(target)], capture_output=True, check=False)
        return target

    def row(self, what: str, **cells: str) -> None:
        self.table[what] = cells
