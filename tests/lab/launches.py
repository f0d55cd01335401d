"""Launches on a provisioned lab: started as a user would, looked at from outside, ended whatever a test did."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.container.conftest import IMAGE, build
from tests.lab.cluster import ANSIBLE, Cluster
from tests.ranks import ROOT, clean_environment

SMALL = "--model.name linear --data.name regression --train.eval_every 0 --train.tensorboard false"
"""Nothing to compute: seconds go into starting, stopping and noticing, which is what is tested."""
SAVES = 'trap "echo saved; exit 0" TERM; echo up; while :; do sleep 0.1; done'
"""A script that stops in good order."""
FOLDER = "/var/lib/muster/launches"


def until(condition: Callable[[], Any], timeout_s: float, what: Callable[[], str]) -> float:
    """Wait for it; the seconds it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, f"not within {timeout_s:g} s:\n{what()}"
        time.sleep(0.1)
    return time.monotonic() - started


def small(steps: int) -> list[str]:
    """Arguments of a training of so many steps."""
    overrides = f"{SMALL} --train.log_every 1 --train.steps {steps}"
    return ["-e", json.dumps({"overrides": overrides})]


def shell(script: str, run_id: str = "") -> list[str]:
    """Arguments of a job whose ranks are a shell's script: up in no time."""
    return ["-e", json.dumps({"script": ["sh", "-c", script], **({"run_id": run_id} if run_id else {})})]


def alone(folder: Path, words: Sequence[str]) -> Path:
    """The run folder of the same training by four ranks on this machine, by the agent alone, never interrupted."""
    agent = [sys.executable, "-m", "train", "node", "--standalone", "--nproc-per-node", "4", "--run-id", "alone"]
    command = [*agent, "--runs-dir", str(folder), "--", "run", "--config", "ddp", *words]
    subprocess.run(command, cwd=ROOT, env=clean_environment(), check=True, capture_output=True, timeout=280)
    return folder / "alone"


class Launch:
    """A playbook that runs, and what it prints."""

    def __init__(self, site: Site, command: Sequence[str]) -> None:
        self._site = site
        self._log = Path(tempfile.mkdtemp(dir=site.results.parent)) / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=ANSIBLE, env=site.cluster.environment(), stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def last_line(self) -> str:
        return self.output.rstrip().splitlines()[-1]

    def wait_for(self, words: str, timeout_s: float = 180) -> None:
        """Until it has said that."""

        def is_said() -> bool:
            found = re.search(words, self.output) is not None
            assert found or self.process.poll() is None, f"it ended before it said {words!r}:\n{self.output}"
            return found

        until(is_said, timeout_s, lambda: self.output)

    def wait(self, timeout_s: float = 180) -> int:
        """Its exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there after {timeout_s:g} s:\n{self.output}") from None

    def send(self, number: signal.Signals) -> None:
        """To ansible-playbook itself, as a terminal would."""
        self.process.send_signal(number)

    def end(self) -> None:
        """Whatever it is doing; its workers have sessions of their own and notice by themselves."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Site:
    """A lab whose hosts can run jobs, and a folder for results."""

    def __init__(self, cluster: Cluster, nodes: Sequence[str]) -> None:
        self.cluster = cluster
        self.nodes = list(nodes)
        self.results = Path(tempfile.mkdtemp(prefix="muster-results-")) / "runs"
        self._launches: list[Launch] = []

    def command(self, playbook: str, *args: str, inventory: Path | None = None) -> list[str]:
        """With this site's own folder for results."""
        command = self.cluster.command(playbook, *args, "-e", f"job_results={self.results}")
        if inventory is not None:
            command[command.index("-i") + 1] = str(inventory)
        return command

    def start(self, *args: str, playbook: str = "launch.yml", inventory: Path | None = None) -> Launch:
        """Start it, and return at once."""
        launch = Launch(self, self.command(playbook, *args, inventory=inventory))
        self._launches.append(launch)
        return launch

    def watch_over(self, launch: Launch) -> None:
        """End it with the others."""
        self._launches.append(launch)

    def play(self, playbook: str, *args: str, timeout_s: float = 240) -> Launch:
        """Run it to its end."""
        launch = self.start(*args, playbook=playbook)
        launch.wait(timeout_s)
        return launch

    def left(self) -> dict[str, str]:
        """What runs of any job, host by host; empty where nothing does."""
        look = "pgrep --list-full --full 'train (node|run)'; docker ps --quiet --filter label=muster.launch; true"
        found = {host: self.cluster.on(host, "sh", "-c", f"{look} | grep -v pgrep; true") for host in self.nodes}
        return {host: text for host, text in found.items() if text}

    def wait_until_clean(self, timeout_s: float) -> float:
        """Seconds until nothing is left anywhere."""
        return until(lambda: not self.left(), timeout_s, lambda: json.dumps(self.left(), indent=1))

    def newest(self, host: str) -> str:
        """The newest launch that a host knows, by id."""
        return self.cluster.on(host, "sh", "-c", f"ls -t {FOLDER} | head -n 1")

    def verdict(self, run_id: str) -> dict[str, Any]:
        """Of a run whose results were brought."""
        return dict(json.loads((self.results / run_id / "verdict.json").read_text()))

    def inventory(self, name: str, hosts: dict[str, dict[str, Any]], **variables: Any) -> Path:
        """An inventory of its own, with what the lab's says for all hosts."""
        given = yaml.safe_load(self.cluster.inventory.read_text())
        given["nodes"] = {"vars": {"slots": 2, **variables}, "hosts": hosts}
        path = self.cluster.inventory.with_name(f"{name}.yml")
        path.write_text(yaml.safe_dump(given, sort_keys=False))
        return path

    def clear(self) -> None:
        """End whatever a test left."""
        for launch in self._launches:
            launch.end()
        self._launches = []
        for host in self.nodes:
            self.cluster.on(
                host, "sh", "-c", "docker ps -aq --filter label=muster.launch | xargs -r docker rm -f", check=False
            )
            self.cluster.on(host, "pkill", "-9", "-f", "train (node|run)", check=False)
            self.cluster.on(host, "pkill", "-f", SPIES, check=False)


def make_venvs(made: Site) -> None:
    """An environment for jobs without containers, and without torch, where provision.yml has not made one."""
    make = (
        "test -e /opt/muster/venv && exit; apt-get -qq install -y --no-install-recommends python3-venv python3-psutil; "
        "mkdir -p /opt/muster; python3 -m venv --system-site-packages --without-pip /opt/muster/venv"
    )
    for host in made.nodes:
        made.cluster.on(host, "sh", "-c", make, timeout_s=120)
        if made.cluster.on(host, "sh", "-c", "test -e /opt/muster/train || echo none"):
            copy = ["docker", "cp", f"{ROOT}/train", f"{made.cluster.container(host)}:/opt/muster/"]
            subprocess.run(copy, check=True, capture_output=True)


SPIES = "^python3 -c .import glob"
SPY = """
import glob, os, time
turn = 0
while True:
    for name in ("secret", "environment"):
        for path in glob.glob("{folder}/*/" + name):
            try:
                found = os.stat(path)
                print(name, oct(found.st_mode & 0o777), found.st_uid, open(path).read().strip(), flush=True)
            except OSError:
                pass
    turn += 1
    for kind in ("cmdline", "environ") if turn % 5 == 0 else ():
        for name in glob.glob("/proc/[0-9]*/" + kind):
            try:
                print(kind, repr(open(name, "rb").read()), flush=True)
            except OSError:
                pass
    time.sleep(0.02)
"""


class Spy:
    """Sees a launch's secret while it lies on a host, and the words and variables of all that runs there meanwhile."""

    def __init__(self, site: Site, host: str) -> None:
        self._cluster, self._host = site.cluster, host
        command = ["docker", "exec", site.cluster.container(host), "python3", "-c", SPY.format(folder=FOLDER)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace")
        self.seen: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.seen.extend(self.process.stdout)

    def stop(self) -> None:
        # The end of `docker exec` would leave it running.
        self._cluster.on(self._host, "pkill", "-f", SPIES)
        self.process.wait(10)


def built_image(wheels: bool = False) -> None:
    """The image of this tree, and its wheels, are there; another worker of xdist may be building the same."""
    with (Path(tempfile.gettempdir()) / "muster-test-image.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if wheels:
            build(WHEELS_ONLY="1")
        build()


@contextmanager
def site(count: int, tags: str = "base,docker,image", **variables: Any) -> Iterator[Site]:
    """A lab of its own, with an engine and the image on each host; or the one that MUSTER_TEST_LAB names.

    MUSTER_TEST_LAB=NAME:FOLDER is for whoever writes tests: a lab that stays, its inventory in FOLDER/hosts.yml.
    """
    nodes = [f"node{number}" for number in range(1, count + 1)]
    given = os.environ.get("MUSTER_TEST_LAB")
    if given:
        name, _, folder = given.partition(":")
        yield Site(Cluster(name, Path(folder)), nodes)
        return
    built_image(wheels="venv" in tags)
    cluster = Cluster.up(count)
    try:
        inventory = yaml.safe_load(cluster.inventory.read_text())
        inventory["all"]["vars"]["muster_image"] = IMAGE
        cluster.inventory.write_text(yaml.safe_dump(inventory, sort_keys=False))
        started = time.monotonic()
        cluster.playbook("provision.yml", "--tags", tags, "-e", json.dumps(variables), timeout_s=900)
        print(f"a lab of {count} hosts in {cluster.seconds:.0f} s, provisioned in {time.monotonic() - started:.0f} s")
        yield Site(cluster, nodes)
    finally:
        cluster.down()
