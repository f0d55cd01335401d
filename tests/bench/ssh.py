"""`make bench-ssh`: `fab launch` on 10 and on 100 hosts with real sshd, beside plain loops over OpenSSH.

From Enter to all agents, and to all ranks (each is a `sleep`); processor time and memory of the launcher; and what
becomes of hosts that are dead, refuse or are slow. All on this machine's cores: a hundred agents start on them, too.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.endpoints import SLOW_S, Endpoints, endpoints, until, why_not
from tests.ranks import ROOT, clean_environment
from tests.swarm import cpu_s
from train.launch.ssh_host import CONNECT_S
from train.launch.topology import Host, make_plan

FAB = Path(sys.executable).parent / "fab"
AT_ONCE = 64
PATIENCE_S = 900
RANK = ["/bin/sleep", "3600"]


class Fab:
    """A task of fab that runs, inside the endpoints' network."""

    def __init__(self, hosts: Endpoints, task: str, *words: str, command: Sequence[str] = ()) -> None:
        self._log = Path(tempfile.mkdtemp(dir=hosts.folder)) / "log"
        listed = ["--hosts", ",".join(hosts.addresses), "--ssh-config", str(hosts.config)]
        results = ["--results", str(hosts.folder / "results")] if task == "launch" else []
        more = ["--", *command] if command else []
        self.began_s = time.monotonic()
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                hosts.inside(str(FAB), task, *listed, *results, *words, *more), cwd=ROOT, env=clean_environment(),
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @property
    def output(self) -> str:
        """What it has printed."""
        return self._log.read_text(errors="replace")

    def said(self, words: str) -> re.Match[str]:
        """Wait until it has said that."""
        found: list[re.Match[str]] = []

        def look() -> bool:
            has_ended = self.process.poll() is not None
            match = re.search(words, self.output, re.MULTILINE)
            assert match or not has_ended, f"it ended before it said {words!r}:\n{self.output}"
            found.extend([match] if match else [])
            return bool(found)

        until(look, PATIENCE_S)
        return found[0]

    def wait(self) -> tuple[int, float]:
        """Its exit code, and seconds since its start."""
        code = self.process.wait(PATIENCE_S)
        return code, time.monotonic() - self.began_s


def launch(hosts: Endpoints, what: str) -> float:
    """Print what a launch took; the seconds until all ranks had started."""
    fab = Fab(hosts, "launch", "--python", sys.executable, "--join-timeout", "300", command=RANK)
    try:
        parts = fab.said(r"ranks are started ([\d.]+) s after Enter: connect ([\d.]+) s, container ([\d.]+) s, join")
        whole_s, connect_s, start_s = map(float, parts.groups())
        status = Path(f"/proc/{fab.process.pid}/status").read_text()
        peak_mb = int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 1e3
        spent_s = cpu_s(fab.process.pid)
        began_s = time.monotonic()
        fab.process.send_signal(signal.SIGINT)
        code, _ = fab.wait()
        ended_s = time.monotonic() - began_s
        until(lambda: not hosts.left(), 30)
    finally:
        fab.process.kill()
    _row(len(hosts.addresses), what, whole_s, f"all looked at {connect_s:.1f} s, all agents up "
         f"{connect_s + start_s:.1f} s; {spent_s:.1f} s of processor, {peak_mb:.0f} MB; Ctrl-C: all gone after "
         f"{ended_s:.1f} s, exit code {code}")  # fmt: skip
    assert code in (8, 75), fab.output
    return whole_s


def loop(hosts: Endpoints, at_once: int) -> float:
    """The same by `ssh HOST COMMAND &`, one after the other or several at once; the code is there already."""
    plan = make_plan([Host(address, address, 1) for address in hosts.addresses], run_id=f"loop-{at_once}")
    secret = hosts.folder / f"secret-{at_once}"
    secret.touch(0o600)
    secret.write_text("a secret that all agents share")
    variables = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "MUSTER_SECRET_FILE": str(secret)}

    def start(number: int) -> None:
        words = ["env", *(f"{k}={v}" for k, v in variables.items()), sys.executable, "-m", "train", "node"]
        words += [*plan.node_arguments(number), "--join-timeout-s", "300", "--runs-dir", f"{hosts.home(number)}/runs"]
        there = f"nohup setsid {shlex.join([*words, '--', *RANK])} >console 2>&1 </dev/null &"
        ssh = [
            "ssh",
            "-F",
            str(hosts.config),
            hosts.addresses[number],
            f"cd {shlex.quote(str(hosts.home(number)))}; {there}",
        ]
        subprocess.run(hosts.inside(*ssh), check=True, stdin=subprocess.DEVNULL, timeout=PATIENCE_S)

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began_s = time.monotonic()
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(start, range(len(hosts.addresses))))
    left_s = time.monotonic() - began_s
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    events = hosts.home(0) / "runs" / f"loop-{at_once}" / "events.jsonl"
    until(lambda: events.exists() and '"start"' in events.read_text(), PATIENCE_S)
    whole_s = time.monotonic() - began_s
    spent_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    os.kill(hosts.agent(0), signal.SIGTERM)
    until(lambda: not hosts.left(), 60)
    name = "ssh, one after the other" if at_once == 1 else f"ssh, {at_once} at once"
    _row(len(hosts.addresses), name, whole_s, f"ssh has left the last host {left_s:.1f} s, unheard; {spent_s:.1f} s of "
         f"processor, {_ssh_mb(hosts):.0f} MB each, nobody watches or ends it")  # fmt: skip
    return whole_s


def _ssh_mb(hosts: Endpoints) -> float:
    """What an ssh holds at most."""
    ssh = ["ssh", "-F", str(hosts.config), hosts.addresses[0], "true"]
    watch = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True); "
    watch += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    done = subprocess.run(hosts.inside(sys.executable, "-c", watch, *ssh), capture_output=True, text=True, check=True)
    return int(done.stdout) / 1e3


def an_agent_dies(hosts: Endpoints) -> None:
    """In mid-run: the verdict names it, a table tells of all hosts, nobody is left."""
    fab = Fab(hosts, "launch", "--python", sys.executable, "--join-timeout", "300", command=RANK)
    try:
        fab.said("ranks are started")
        victim = len(hosts.addresses) // 2
        began_s = time.monotonic()
        os.kill(hosts.agent(victim), signal.SIGKILL)
        until(lambda: not hosts.left(), 60)
        gone_s = time.monotonic() - began_s
        code, _ = fab.wait()
    finally:
        fab.process.kill()
    rows = re.findall(r"^  (10\.78\.\S+)  (.*)$", fab.output.partition("how it ended on each host:")[2], re.MULTILINE)
    told_s = time.monotonic() - began_s
    last = fab.output.rstrip().splitlines()[-1]
    print(f"{len(hosts.addresses):4} hosts, an agent killed: nobody left after {gone_s:.1f} s, "
          f"told after {told_s:.1f} s with a row for {len({name for name, _ in rows})} hosts: {last}")  # fmt: skip
    assert code == 7, fab.output
    assert [name for name, _ in rows][: len(hosts.addresses)] == hosts.addresses, fab.output


def faults(count: int, folder: Path) -> None:
    """One host is dead, one refuses, one is slow: the first two are named in time, the third is none of them."""
    dead, refusing, slow = 1, count // 2, count - 1
    with endpoints(count, folder, dead=[dead], refusing=[refusing], slow=[slow]) as hosts:
        fab = Fab(hosts, "launch", "--python", sys.executable, command=RANK)
        code, seconds = fab.wait()
        reasons = [line.strip() for line in fab.output.partition("nothing was started")[2].splitlines()[1:]]
        print(
            f"{count:4} hosts, one dead, one refuses, one {SLOW_S:g} s slow: refused after {seconds:.1f} s: {reasons}"
        )
        assert code == 3, fab.output
        assert [reason.split()[0] for reason in reasons] == [hosts.addresses[dead], hosts.addresses[refusing]]
        assert not hosts.left()
        status = Fab(hosts, "status")
        code, seconds = status.wait()
        rows = [line.split("  ", 1) for line in status.output.splitlines()[1:]]
        unreachable = [row[0] for row in rows if "cannot be reached" in row[1]]
        print(f"{count:4} hosts: fab status tells of {len(rows)} after {seconds:.1f} s, {len(unreachable)} not reached")
        assert [row[0].strip() for row in rows] == hosts.addresses, status.output
        assert len(unreachable) == 2, status.output
        assert seconds < CONNECT_S + 60, "on a machine with cores to spare it takes as long as the dead host"


def _row(count: int, what: str, whole_s: float, more: str) -> None:
    print(f"{count:4} hosts, {what:<26} all ranks started after {whole_s:5.1f} s ({more})", flush=True)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, nargs="+", default=[10, 100])
    counts = parser.parse_args().hosts
    if reason := why_not():
        print(f"no hosts with sshd: {reason}", file=sys.stderr)
        return 1
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before it begins")
    took: dict[str, list[float]] = {}
    for count in counts:
        with tempfile.TemporaryDirectory(prefix="muster-ssh-") as folder:
            (Path(folder) / "all").mkdir()
            with endpoints(count, Path(folder) / "all") as hosts:
                took.setdefault("fab", []).append(launch(hosts, "fab, code is sent"))
                took.setdefault("fab again", []).append(launch(hosts, "fab, code is there"))
                took.setdefault("ssh in turn", []).append(loop(hosts, 1))
                took.setdefault("ssh at once", []).append(loop(hosts, AT_ONCE))
                an_agent_dies(hosts)
            (Path(folder) / "faults").mkdir()
            faults(count, Path(folder) / "faults")
    for name, seconds in took.items():
        print(f"{name:<12} {' → '.join(f'{s:.1f} s' for s in seconds)} for {' → '.join(map(str, counts))} hosts: "
              f"×{seconds[-1] / seconds[0]:.1f}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
