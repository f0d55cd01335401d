"""A lab of docker/lab for tests: bare hosts under a name of their own, playbooks on them, what can happen to hosts.

cluster = Cluster.up()
done = cluster.playbook("provision.yml", "--limit", "node1", timeout_s=300)
cluster.on("node1", "docker", "ps", "--quiet")
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest

from tests.ranks import ROOT, clean_environment

LAB = ROOT / "docker" / "lab" / "lab"
ANSIBLE = ROOT / "ansible"


def why_not() -> str:
    """Why there can be no lab on this machine; nothing where there can."""
    if os.geteuid() != 0:
        return "the lab's tests need root"
    if not shutil.which("ssh"):
        return "no ssh: apt-get install openssh-client"
    if not shutil.which("docker"):
        return "no docker client: install Docker"
    answer = subprocess.run(["docker", "version"], capture_output=True, text=True, check=False)
    return f"no Docker engine: {answer.stderr.strip()}" if answer.returncode else ""


def need_lab() -> None:
    """Skip where there can be no lab; in CI that is a failure."""
    reason = why_not()
    if reason and "CI" in os.environ:
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


class Cluster:
    """A lab that is up. `seconds` is how long it took."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.inventory = folder / "hosts.yml"
        self.seconds = 0.0

    @classmethod
    def up(cls, hosts: int = 3) -> Cluster:
        """A controller and so many bare hosts: node1, node2, …"""
        cluster = cls(f"muster-test-{uuid.uuid4().hex[:8]}", Path(tempfile.mkdtemp(prefix="muster-lab-")))
        _lab("image")  # once on a machine, and not part of the seconds
        started = time.monotonic()
        _lab("up", "--name", cluster.name, "--hosts", str(hosts), "--inventory", str(cluster.inventory))
        cluster.seconds = time.monotonic() - started
        return cluster

    def down(self) -> None:
        """Remove it, and what it left on this machine."""
        _lab("down", "--name", self.name)
        shutil.rmtree(self.folder, ignore_errors=True)

    def add(self) -> None:
        """One more bare host: node4 after node3."""
        _lab("add", "--name", self.name)

    def command(self, playbook: str, *args: str) -> list[str]:
        """The command line of a playbook, for `cwd=ANSIBLE` and `environment()`."""
        return [str(Path(sys.executable).parent / "ansible-playbook"), "-i", str(self.inventory), playbook, *args]

    def environment(self, **more: str) -> dict[str, str]:
        """As on a user's machine, without colours, and with this virtual environment's commands first."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {**clean_environment(), "PATH": path, "ANSIBLE_NOCOLOR": "1", **more}

    def playbook(
        self, playbook: str, *args: str, timeout_s: float = 300, check: bool = True, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run it to its end; what it printed, both streams together, is in `stdout`."""
        done = subprocess.run(
            self.command(playbook, *args), cwd=ANSIBLE, env=self.environment(**env), text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s, check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{playbook} {' '.join(args)}: {done.returncode}\n{done.stdout}"
        return done

    def on(self, host: str, *argv: str, check: bool = True, timeout_s: float = 60) -> str:
        """What a command prints on a host, as root and without SSH; both streams where it need not succeed."""
        done = subprocess.run(
            ["docker", "exec", self.container(host), *argv],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{host}: {' '.join(argv)}: {done.stdout}{done.stderr}"
        return done.stdout.strip() if check else (done.stdout + done.stderr).strip()

    def container(self, host: str) -> str:
        """The container that is this host."""
        return f"{self.name}-{host}"

    def address(self, host: str, family: str = "") -> str:
        """Its address on the cluster's network; family "6" for IPv6."""
        label = f'{{{{index .Config.Labels "muster.lab.address{family}"}}}}'
        return _docker("inspect", "--format", label, self.container(host))

    def kill(self, host: str) -> None:
        """As if its power were cut."""
        _docker("kill", self.container(host))

    def start(self, host: str) -> None:
        """Power on again; returns when it has booted."""
        _docker("start", self.container(host))
        deadline = time.monotonic() + 60
        while self.on(host, "systemctl", "is-system-running", check=False) not in ("running", "degraded"):
            assert time.monotonic() < deadline, f"{host} does not boot"
            time.sleep(0.1)

    def pause(self, host: str) -> None:
        """It freezes."""
        _docker("pause", self.container(host))

    def unpause(self, host: str) -> None:
        """It thaws."""
        _docker("unpause", self.container(host))

    def disconnect(self, host: str) -> None:
        """Its cable is pulled, without a word to anybody."""
        _docker("network", "disconnect", self.name, self.container(host))

    def connect(self, host: str) -> None:
        """Its cable is back, with the same addresses."""
        pairs = (("--ip", self.address(host)), ("--ip6", self.address(host, "6")))
        words = [word for option, address in pairs if address for word in (option, address)]
        _docker("network", "connect", *words, self.name, self.container(host))


def _lab(*words: str) -> str:
    done = subprocess.run([LAB, *words], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"lab {' '.join(words)}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


def _docker(*words: str) -> str:
    done = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"docker {' '.join(words)}: {done.stderr}"
    return done.stdout.strip()
