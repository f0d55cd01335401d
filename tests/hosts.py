"""Hosts on one machine: each has its own network address, host name, processes, /dev/shm and folder.

`with hosts(3) as lab` makes namespaces and a switch between them; nothing of it has a name on the machine or touches
its network, so that any number of labs can be up side by side, and all of it is gone when this process is, however it
ends. A process of one host sees no process of another (as on real hosts: without that, an agent that ends "its" ranks
would end those of all hosts). Needs root, and iproute2, util-linux and the kernel's cgroup v2 interface.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.ranks import ROOT, clean_environment

PYTHON = sys.executable
SECRET = "a secret that all agents share of job {}"
_V2 = next((p for p in (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")) if (p / "cgroup.procs").exists()), None)
_V1_MEMORY = Path("/sys/fs/cgroup/memory")
_JOB_MARK = "LAB_JOB"
_MOST = 120


def _address(index: int) -> str:
    return f"10.77.0.{index + 1}"


def _address6(index: int) -> str:
    return f"fd77::{index + 1:x}"


# Process 1 of a host: names it, brings up its loopback, and takes in orphans as any init does.
_INIT = """
import os, signal, socket, subprocess, sys
socket.sethostname(sys.argv[1])
for command in ("mount -t tmpfs tmpfs /dev/shm", f"mount --bind {sys.argv[2]} /etc/hosts", "ip link set lo up"):
    subprocess.run(command.split(), check=True)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
print("up", flush=True)
while True:
    signal.sigwait({signal.SIGCHLD})
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
"""


def why_not() -> str | None:
    """Why hosts cannot be made here; None where they can."""
    if os.geteuid() != 0:
        return "hosts as namespaces need root"
    if _V2 is None or not os.access(_V2, os.W_OK):
        return "hosts need a writable cgroup v2 interface below /sys/fs/cgroup"
    try:
        tried = subprocess.run(
            ["unshare", "--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "ip", "link", "add", "type", "veth"],
            check=False, capture_output=True, text=True,
        )  # fmt: skip
    except OSError as error:
        return f"hosts need util-linux and iproute2: {error}"
    return None if tried.returncode == 0 else f"namespaces are not permitted here: {tried.stderr.strip()}"


class Host:
    """One machine of the lab."""

    def __init__(self, index: int, folder: Path, switch: int) -> None:
        self.index, self.name = index, f"node{index}"
        self.address, self.address6 = _address(index), _address6(index)
        self.folder = folder / self.name
        self.folder.mkdir(exist_ok=True)
        self.jobs: set[str] = set()
        # Gloo and c10d look names of addresses up, and wait for a name server where there is none in this file.
        # By the plain name hosts meet by IPv4.
        names = "".join(f"{_address(i)} node{i}\n{_address6(i)} node{i}-6\n" for i in range(_MOST))
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {self.name}-itself\n{names}")
        self._switch = switch
        assert _V2 is not None
        self._group = _V2 / f"muster-lab-{os.getpid()}-{secrets.token_hex(4)}"
        self._group.mkdir()
        self._memory: Path | None = None
        # Dies with the thread that runs the tests (--pdeathsig), and then everything on the host does (--kill-child).
        self._unshare = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--uts", "--ipc", "--pid", "--mount", "--fork",
             "--kill-child", "--mount-proc", PYTHON, "-I", "-S", "-c", _INIT, self.name, str(self.folder / "hosts")],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert self._unshare.stdout is not None
        assert self._unshare.stdout.readline() == "up\n", "a host did not start"
        self.init = _child_of(self._unshare.pid)
        self._pids_here = (Path("/proc") / str(self.init) / "ns/pid").readlink()
        _run("nsenter", "-t", str(switch), "-n", "ip", "link", "add", f"port{index}", "type", "veth",
             "peer", "name", "eth0", "netns", str(self.init))  # fmt: skip
        self.heal()
        self.run(f"ip address add {self.address}/24 dev eth0; ip link set eth0 up")
        self.run(f"ip address add {self.address6}/64 dev eth0 nodad")  # nodad: it may be used at once

    def enter(self, *, limited: bool = False) -> list[str]:
        """The words before a command that make it run on this host."""
        groups = [self._group, *([self._memory] if self._memory and limited else [])]
        joined = "; ".join(f"echo 0 > {group}/cgroup.procs" for group in groups)
        enter = ["nsenter", "-t", str(self.init), "-m", "-u", "-i", "-n", "-p", "--"]
        return [*enter, "sh", "-c", f'{joined}; cd "$0" && exec "$@"', str(self.folder)]

    def popen(self, command: Sequence[str], *, limited: bool = False, **options: Any) -> subprocess.Popen[Any]:
        """Start a command in this host's folder."""
        return subprocess.Popen([*self.enter(limited=limited), *command], **options)

    def run(self, script: str) -> str:
        """What a shell script prints there. Raises CalledProcessError."""
        done = subprocess.run([*self.enter(), "sh", "-ec", script], capture_output=True, text=True, check=True)
        return done.stdout

    def processes(self) -> dict[int, str]:
        """Command lines of all that runs there, by process id as seen from outside; process 1 and zombies left out."""
        found = {}
        for path in Path("/proc").iterdir():
            if not path.name.isdigit() or int(path.name) == self.init:
                continue
            with contextlib.suppress(OSError):
                if (path / "ns/pid").readlink() == self._pids_here and _state(path) not in "ZX":
                    found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        return found

    def cut(self) -> None:
        """Pull its cable at the switch: nothing comes or goes, and nobody is told."""
        _run("nsenter", "-t", str(self._switch), "-n", "ip", "link", "set", f"port{self.index}", "nomaster")

    def heal(self) -> None:
        """Plug it in again."""
        port = f"port{self.index}"
        _run("nsenter", "-t", str(self._switch), "-n", "ip", "link", "set", port, "master", "bridge", "up")

    def freeze(self) -> None:
        """Nothing on it runs any more, as with `docker pause` or a virtual machine that is suspended."""
        self._set_frozen(True)

    def thaw(self) -> None:
        """Let it run again."""
        self._set_frozen(False)

    def _set_frozen(self, frozen: bool) -> None:
        (self._group / "cgroup.freeze").write_text(str(int(frozen)))
        until(lambda: f"frozen {int(frozen)}" in (self._group / "cgroup.events").read_text(), 10)

    def limit_memory(self, megabytes: int) -> None:
        """From here on what is started there with `limited` has so much memory together."""
        name = self._group.name
        if (_V1_MEMORY / "memory.limit_in_bytes").exists():
            self._memory = _V1_MEMORY / name
            self._memory.mkdir()
            (self._memory / "memory.limit_in_bytes").write_text(f"{megabytes}M")
        else:
            assert _V2 is not None
            (_V2 / "cgroup.subtree_control").write_text("+memory")
            self._memory = _V2 / f"{name}-memory"
            self._memory.mkdir()
            (self._memory / "memory.max").write_text(f"{megabytes}M")
            (self._memory / "memory.swap.max").write_text("0")

    def power_off(self) -> None:
        """Cut it off, then end everything on it at once."""
        self.cut()
        os.kill(self.init, signal.SIGKILL)

    def remove(self) -> None:
        """End it, and whatever still runs there."""
        self._unshare.kill()
        self._unshare.communicate()
        self.thaw()
        for group in filter(None, (self._group, self._memory)):
            until(partial(_is_removed, group), 10)


class Agent:
    """A node agent that runs on a host."""

    def __init__(self, host: Host, argv: Sequence[str], env: dict[str, str], *, limited: bool) -> None:
        self.host = host
        self._log = host.folder / f"agent-{env[_JOB_MARK]}.log"
        with self._log.open("wb") as log:
            self.process = host.popen(
                [PYTHON, "-m", "train", "node", *argv], limited=limited, env=env,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        until(lambda: self.process.poll() is not None or _child_of(self.process.pid) > 0, 20)
        self.pid = _child_of(self.process.pid)

    def send(self, number: int) -> None:
        """Send the agent, and nobody else, a signal."""
        os.kill(self.pid, number)

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self._log.read_text(errors="replace")

    @property
    def last_line(self) -> str:
        """The last line on its console."""
        return self.output.splitlines()[-1]

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self.process.poll()


class Job:
    """Agents on all hosts of a lab, started together."""

    def __init__(self, hosts: Sequence[Host], mark: str, runs_dirs: Sequence[Path]) -> None:
        self.hosts, self.mark, self.runs_dirs = hosts, mark, runs_dirs
        self.agents: dict[int, Agent] = {}
        self.event_s = 0.0

    def wait_until(self, what: Callable[[], Any], timeout_s: float = 60) -> None:
        """Look until it holds; fails where it does not come to that, or an agent ends first."""
        deadline = time.monotonic() + timeout_s
        while not what():
            ended = [index for index, agent in self.agents.items() if agent.code is not None]
            assert not ended, f"agents {ended} ended early:\n{self.report()}"
            assert time.monotonic() < deadline, f"it never came to that:\n{self.report()}"
            time.sleep(0.02)

    def wait_for_output(self, text: str, times: int = 1, timeout_s: float = 60) -> None:
        """Until the agents together have printed a text so often."""
        self.wait_until(lambda: sum(a.output.count(text) for a in self.agents.values()) >= times, timeout_s)

    def pids(self, host: int, text: str) -> list[int]:
        """Processes of this job on a host that have a text in their command line, the agent left out; as seen from
        outside."""
        agent = self.agents[host].pid
        return sorted(p for p, line in self.hosts[host].processes().items() if text in line and p != agent)

    def left_behind(self, hosts: Sequence[int] | None = None) -> dict[int, str]:
        """What of this job still runs on any host, agents and keepers included."""
        several = len({job for host in self.hosts for job in host.jobs}) > 1
        found = {}
        for host in self.hosts:
            if hosts is None or host.index in hosts:
                for pid, line in host.processes().items():
                    if not several or self._is_marked(pid):
                        found[pid] = f"{host.name}: {line}"
        return found

    def _is_marked(self, pid: int) -> bool:
        try:
            return f"{_JOB_MARK}={self.mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False

    def event(self) -> None:
        """Now it happens: the time is counted from here."""
        self.event_s = time.monotonic()

    def gone_s(self, timeout_s: float = 60, *, hosts: Sequence[int] | None = None) -> float:
        """Wait until no process of the job is left on these hosts (all); seconds since the event."""
        deadline = time.monotonic() + timeout_s
        while self.left_behind(hosts):
            assert time.monotonic() < deadline, f"left behind: {self.left_behind(hosts)}\n{self.report()}"
            time.sleep(0.05)
        return time.monotonic() - self.event_s

    def codes(self, timeout_s: float = 60) -> list[int]:
        """Exit codes of all agents, once they have ended."""
        deadline = time.monotonic() + timeout_s
        try:
            return [agent.process.wait(max(0.1, deadline - time.monotonic())) for agent in self.agents.values()]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"agents still run:\n{self.report()}") from None

    def run_folder(self, host: int = 0) -> Path:
        """The newest run folder on a host."""
        return max(self.runs_dirs[host].iterdir(), key=lambda path: path.stat().st_mtime)

    def verdict(self, host: int = 0) -> dict[str, Any]:
        """verdict.json as that host has it."""
        found: dict[str, Any] = json.loads((self.run_folder(host) / "verdict.json").read_text())
        return found

    def events(self, name: str) -> list[dict[str, Any]]:
        """What agent 0 has recorded under this name."""
        path = self.run_folder() / "events.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [row for row in rows if row["event"] == name]

    def report(self) -> str:
        """What all agents printed, for a failed test."""
        return "\n".join(
            f"--- {agent.host.name}, {'runs' if agent.code is None else f'status {agent.code}'}:\n{agent.output}"
            for agent in self.agents.values()
        )


class Lab:
    """Hosts and the switch between them."""

    def __init__(self, count: int, folder: Path) -> None:
        self.folder = folder
        _sweep()
        self._switch = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sh", "-c",
             "ip link add bridge type bridge && ip link set bridge up && echo up && exec sleep infinity"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._switch.stdout is not None
        assert self._switch.stdout.readline() == "up\n", "the switch did not start"
        self.hosts: list[Host] = []
        try:
            for index in range(count):
                self.hosts.append(Host(index, folder, self._switch.pid))
        except BaseException:
            self.remove()
            raise

    def launch(
        self,
        command: Sequence[str],
        *,
        nproc: int | str = 1,
        options: Sequence[str] = (),
        only: Sequence[int] | None = None,
        secrets_of: dict[int, str] | None = None,
        runs_dir: Path | None = None,
        port: int = 29500,
        master: str | None = None,
        limited: Sequence[int] = (),
        env: dict[str, str] | None = None,
    ) -> Job:
        """Start an agent on each host.

        Args:
            command: what follows the agents' `--`.
            nproc: their --nproc-per-node.
            options: more of their options.
            only: start agents on these hosts only.
            secrets_of: hosts that have another secret than all the rest.
            runs_dir: one folder for all hosts; by default each has its own.
            port: --master-port.
            master: --master-addr, where it is not the first host's IPv4 address.
            limited: hosts whose agent and ranks have little memory (`Host.limit_memory`).
            env: more environment.
        """
        mark = secrets.token_hex(4)
        runs_dirs = [runs_dir or host.folder / f"runs-{mark}" for host in self.hosts]
        job = Job(self.hosts, mark, runs_dirs)
        count = len(self.hosts)
        for host in self.hosts:
            host.jobs.add(mark)
            if only is not None and host.index not in only:
                continue
            secret = host.folder / f"secret-{mark}"
            secret.touch(0o600)
            secret.write_text((secrets_of or {}).get(host.index, SECRET.format(mark)))
            argv = ["--nnodes", str(count), "--node-rank", str(host.index), "--nproc-per-node", str(nproc),
                    "--master-addr", master or self.hosts[0].address, "--master-port", str(port),
                    "--runs-dir", str(runs_dirs[host.index]), *options, "--", *command]  # fmt: skip
            given = clean_environment(
                MUSTER_SECRET_FILE=str(secret), PYTHONPATH=f"{self.folder}:{ROOT}", **{_JOB_MARK: mark}, **(env or {})
            )
            job.agents[host.index] = Agent(host, argv, given, limited=host.index in limited)
        return job

    def remove(self) -> None:
        """End and remove everything."""
        for host in self.hosts:
            host.remove()
        self._switch.kill()
        self._switch.communicate()


@contextlib.contextmanager
def hosts(count: int, folder: Path | None = None) -> Iterator[Lab]:
    """That many hosts; all is removed at the end. `folder` holds a folder for each."""
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lab-")))
        lab = Lab(count, folder)
        stack.callback(lab.remove)
        yield lab


def until(condition: Callable[[], Any], timeout_s: float) -> None:
    """Look until it holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.01)


def _sweep() -> None:
    """Remove the control groups of labs whose tests were killed: all else of them went with the tests."""
    for parent in filter(None, (_V2, _V1_MEMORY)):
        for group in parent.glob("muster-lab-*"):
            owner = group.name.split("-")[2]
            if not Path(f"/proc/{owner}").exists():
                _is_removed(group)


def _is_removed(group: Path) -> bool:
    """Remove a control group; busy as long as one of its processes is not quite gone."""
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _child_of(pid: int) -> int:
    """The first child of a process; 0 where it has none."""
    try:
        return int((Path(f"/proc/{pid}/task/{pid}/children").read_text().split() or ["0"])[0])
    except OSError:
        return 0


def _state(path: Path) -> str:
    return (path / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
