"""Preflight by `fab` and Ansible on real hosts: what is wrong is named as it is by the command itself, and left out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.lab.cluster import need_lab
from tests.lab.fabs import done
from tests.lab.launches import SMALL, Launch, Site, site

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first waits for its hosts


@pytest.fixture(scope="module")
def two() -> Iterator[Site]:
    need_lab()
    with site(2, "base,docker,image,code,venv", venv_wanted=True, docker_users=["admin"]) as made:
        yield made


@contextmanager
def closed(two: Site) -> Iterator[None]:
    """node1 takes no new connection from node2."""
    rule = ["INPUT", "-p", "tcp", "--syn", "-s", two.cluster.address("node2"), "-j", "DROP"]
    two.cluster.on("node1", "iptables", "-I", *rule)
    try:
        yield
    finally:
        two.cluster.on("node1", "iptables", "-D", *rule)


def is_fit(launch: Launch) -> bool:
    return re.fullmatch(r"muster: 2 hosts are fit, each and together \(([0-9.]+) s; .*\)", launch.last_line) is not None


@pytest.mark.parametrize("runtime", ["venv", "docker"])
def test_hosts_that_are_well(two: Site, runtime: str) -> None:
    launch = done(two, "preflight", "--runtime", runtime)
    assert launch.process.returncode == 0, launch.output
    assert is_fit(launch), launch.output
    print(runtime, launch.last_line)
    assert "sums are right" in launch.output
    assert "error" not in launch.output
    assert "warning" not in launch.output
    assert two.left() == {}
    for host in ("node1", "node2"):
        assert (
            two.cluster.on(host, "sh", "-c", "find / -xdev -name '.preflight-*' -o -name secret -path '*launches*'")
            == ""
        )


def test_a_closed_port_is_named_and_its_host_left_out(two: Site, tmp_path: Path) -> None:
    file = tmp_path / "bad hosts"
    with closed(two):
        launch = done(two, "preflight", "--quarantine", str(file))
        assert launch.process.returncode == 3, launch.output
        address = two.cluster.address("node1")
        said = " ".join(launch.output.split())  # it breaks lines
        assert re.search(rf"error ports node1: node2 does not reach node1 at {address} port \d+: no answer", said)
        assert launch.last_line.startswith("muster: of 2 hosts not fit: node1 (")
        refused = done(two, "launch", "--preflight", "--config", "ddp", "--overrides", f"{SMALL} --train.steps 3")
        assert refused.process.returncode == 3
        assert not list(two.results.glob("*"))
    assert [line.split()[0] for line in file.read_text().splitlines()[1:]] == ["node1"]
    words = ["--preflight", "--quarantine", str(file), "--run-id", "without", "--config", "ddp"]
    launch = done(two, "launch", *words, "--overrides", f"{SMALL} --train.steps 3")
    assert launch.process.returncode == 0, launch.output
    assert "node1 is left out, in quarantine since" in launch.output
    plan = json.loads((two.results / "without" / "plan.json").read_text())
    assert [host["name"] for host in plan["hosts"]] == ["node2"]


def test_what_a_container_would_find_is_looked_at_in_a_container(two: Site) -> None:
    launch = done(two, "preflight", "--runtime", "docker", "--floors", "--min-shm-mb 1001 --min-memlock-mb 1000000000")
    assert launch.process.returncode == 3, launch.output
    assert re.search(r"error +shared memory +node1, node2: 1,000 MB; 1,001 are needed", launch.output)


def test_a_slow_interface(two: Site) -> None:
    route = two.cluster.on("node2", "ip", "route", "get", two.cluster.address("node1"))
    interface = route.split()[route.split().index("dev") + 1]
    shape = f"dev {interface} root tbf rate 10mbit burst 32kbit latency 400ms"
    two.cluster.on("node2", "sh", "-c", f"tc qdisc add {shape}")
    try:
        launch = done(two, "preflight", "--floors", "--no-all-reduce")
    finally:
        two.cluster.on("node2", "sh", "-c", f"tc qdisc del dev {interface} root")
    assert launch.process.returncode == 3, launch.output
    assert re.search(r"error +speed +node2, node1: from node2 to node1 1\.\d MB/s", launch.output)


def test_a_host_that_cannot_take_part_is_told_with_all_else(two: Site) -> None:
    two.cluster.on("node2", "sh", "-c", "mount -t tmpfs -o size=64k tmpfs /home/admin/muster/runs || true")
    two.cluster.on("node1", "systemctl", "stop", "ssh")
    two.cluster.on("node1", "pkill", "sshd", check=False)
    try:
        launch = done(two, "preflight")
    finally:
        two.cluster.on("node1", "systemctl", "start", "ssh")
        two.cluster.on("node2", "sh", "-c", "umount /home/admin/muster/runs || true")
    assert launch.process.returncode == 3, launch.output
    assert re.search(r"error +answer +node1: ", launch.output)


def test_ansible_says_the_same(two: Site) -> None:
    fit = two.play("preflight.yml", "-e", "runtime=venv")
    assert fit.process.returncode == 0, fit.output
    assert is_fit(fit), fit.output
    print("ansible", fit.last_line)
    with closed(two):
        found = two.play("preflight.yml", "-e", "runtime=docker")
    assert found.process.returncode == 2
    assert re.search(r"error +ports +node1: node2 does not reach node1 at ", found.output)
    assert found.last_line.startswith("muster: of 2 hosts not fit: node1 (")
