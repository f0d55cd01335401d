"""`preflight` on several hosts, well, and with one planted fault at a time: who is named, for what, with which fix."""

from __future__ import annotations

import json
import secrets
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import PYTHON, Lab, hosts, why_not
from tests.preflights import looked_at
from tests.ranks import ROOT
from train.launch.preflight.command import plan_from

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]
COUNT = 4
Told = dict[str, Any]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with hosts(COUNT, tmp_path_factory.mktemp("preflight")) as lab:
        yield lab


@pytest.fixture
def runs(lab: Lab) -> Iterator[list[str]]:
    """Each host's run folder: a small disk of its own."""
    name = f"/tmp/runs-{secrets.token_hex(4)}"
    for host in lab.hosts:
        host.run(f"mkdir -p {name} && mount -t tmpfs -o size=4m,mode=1777 tmpfs {name}")
    yield [name] * COUNT
    for host in lab.hosts:
        host.run(f"umount {name}")
    Path(name).rmdir()


def preflight(lab: Lab, runs: Sequence[str], *options: str, reduces: bool = False, **more: Any) -> Told:
    """The verdict on all hosts; nothing is left on them."""
    verdict = looked_at(lab, runs, *options, *(() if reduces else ("--no-all-reduce",)), **more)
    for host in lab.hosts:
        assert not [line for line in host.processes().values() if "preflight" in line]
        assert "preflight" not in host.run(f"ls -A {runs[0]}")
    return verdict


def errors(verdict: Told) -> list[tuple[str, tuple[str, ...]]]:
    return [(one["check"], tuple(one["hosts"])) for one in verdict["findings"] if one["level"] == "error"]


def only(verdict: Told, check: str, level: str = "error") -> Told:
    """The one finding that is not well."""
    bad = [one for one in verdict["findings"] if one["level"] not in ("ok", "could not tell")]
    assert [(one["check"], one["level"]) for one in bad] == [(check, level)], json.dumps(bad, indent=1)
    assert verdict["fit"] == (level != "error")
    found: Told = bad[0]
    return found


def test_healthy_hosts_are_fit_in_time(lab: Lab, runs: list[str]) -> None:
    verdict = preflight(lab, runs, reduces=True)
    assert verdict["fit"], json.dumps(verdict["findings"], indent=1)
    assert [one for one in verdict["findings"] if one["level"] != "ok"] == []
    seen = {one["check"]: one["seen"] for one in verdict["findings"]}
    assert seen["ports"] == f"open both ways, {COUNT * (COUNT - 1)} pairs called"
    assert "sums are right" in seen["all-reduce"]
    assert seen["run folder"].endswith(", each host its own")
    print(f"preflight of {COUNT} hosts: {verdict['took_s']} s")


def test_a_shared_folder_is_told(lab: Lab, runs: list[str], tmp_path: Path) -> None:
    shared = tmp_path / "runs"
    shared.mkdir()
    verdict = preflight(lab, runs, "--runs-dir", str(shared))
    assert next(one["seen"] for one in verdict["findings"] if one["check"] == "run folder").endswith("for all hosts")
    assert [*shared.iterdir()] == []


def test_a_port_closed_one_way(lab: Lab, runs: list[str]) -> None:
    rule = f"INPUT -s {lab.hosts[1].address} -p tcp --syn -j DROP"
    lab.hosts[2].run(f"iptables -A {rule}")
    try:
        found = only(preflight(lab, runs), "ports")
    finally:
        lab.hosts[2].run(f"iptables -D {rule}")
    assert found["hosts"] == ["node2"]
    assert f"node1 does not reach node2 at {lab.hosts[2].address} port" in found["seen"]
    assert "no answer, though node2 reaches node1" in found["seen"]
    assert "iptables -S" in found["fix"]


def test_ports_that_the_system_hands_out_are_called_too(lab: Lab, runs: list[str]) -> None:
    rule = "INPUT -p tcp --syn --dport 32768:65535 -j REJECT --reject-with tcp-reset"
    lab.hosts[0].run(f"iptables -A {rule}")
    try:
        verdict = preflight(lab, runs)
    finally:
        lab.hosts[0].run(f"iptables -D {rule}")
    assert {check for check, _ in errors(verdict)} == {"ports"}
    seen = [one["seen"] for one in verdict["findings"] if one["level"] == "error"]
    assert len(seen) == COUNT - 1
    assert all("does not reach node0" in one and "refused" in one for one in seen)


FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")


@pytest.mark.skipif(not FAKETIME.exists(), reason="libfaketime is not installed")
@pytest.mark.parametrize("shift", ["+3s", "-3s"])
def test_a_clock_that_is_wrong(lab: Lab, runs: list[str], shift: str) -> None:
    env = {3: {"LD_PRELOAD": str(FAKETIME), "FAKETIME": shift, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}}
    found = only(preflight(lab, runs, env=env), "clocks")
    assert found["hosts"] == ["node3"]
    assert found["seen"] == ("3.0 s ahead of the others" if shift == "+3s" else "3.0 s behind the others")
    assert "chronyc" in found["fix"]


def test_a_name_that_leads_to_the_host_itself(lab: Lab, runs: list[str]) -> None:
    names = [host.name for host in lab.hosts]
    before = (lab.hosts[1].folder / "hosts").read_text()
    (lab.hosts[1].folder / "hosts").write_text(
        "127.0.1.1 node1\n" + "".join(line for line in before.splitlines(True) if not line.endswith(" node1\n"))
    )
    try:
        found = only(preflight(lab, runs, addresses=names), "names", "warning")
    finally:
        (lab.hosts[1].folder / "hosts").write_text(before)
    assert found["hosts"] == ["node1"]
    assert "there node1 means 127.0.1.1, which is that host itself" in found["seen"]
    assert "/etc/hosts" in found["fix"]


def test_a_name_that_is_not_known(lab: Lab, runs: list[str]) -> None:
    names = ["node0", "node1", "node2", "node3-elsewhere"]
    before = (lab.hosts[0].folder / "hosts").read_text()
    for host in lab.hosts[:1]:
        (host.folder / "hosts").write_text(f"{lab.hosts[3].address} node3-elsewhere\n{before}")
    try:
        verdict = preflight(lab, runs, addresses=names)
    finally:
        (lab.hosts[0].folder / "hosts").write_text(before)
    lost = [one for one in verdict["findings"] if one["check"] == "names"]
    assert [one["hosts"] for one in lost] == [["node1", "node2", "node3"]], lost
    assert "cannot resolve node3-elsewhere" in lost[0]["seen"]


def test_little_shared_memory(lab: Lab, runs: list[str]) -> None:
    lab.hosts[2].run("mount -o remount,size=2m /dev/shm")
    try:
        found = only(preflight(lab, runs, "--min-shm-mb", "64"), "shared memory")
        assert only(preflight(lab, runs), "shared memory", "warning")["hosts"] == ["node2"]
    finally:
        lab.hosts[2].run("mount -o remount,size=50% /dev/shm")
    assert (found["hosts"], found["seen"]) == (["node2"], "2 MB; 64 are needed")
    assert "--shm-size" in found["fix"]


def test_little_memory_that_may_be_locked(lab: Lab, runs: list[str]) -> None:
    found = only(
        preflight(lab, runs, "--min-memlock-mb", "3", around={1: ["prlimit", "--memlock=2097152"]}), "locked memory"
    )
    assert (found["hosts"], found["seen"]) == (["node1"], "2 MB; 3 are needed")
    assert "ulimit -l" in found["fix"]


def test_another_version_of_torch(lab: Lab, runs: list[str], tmp_path: Path) -> None:
    about = tmp_path / "torch-1.13.0.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.13.0\n")
    found = only(preflight(lab, runs, env={1: {"PYTHONPATH": f"{tmp_path}:{ROOT}"}}), "versions")
    assert found["hosts"] == ["node1"]
    assert found["seen"].startswith("torch 1.13.0, elsewhere 2.")
    assert "pip install 'torch==2." in found["fix"]


def test_a_full_disk(lab: Lab, runs: list[str]) -> None:
    lab.hosts[0].run(f"head -c 3500000 /dev/zero >{runs[0]}/much")
    found = only(preflight(lab, runs), "run folder")
    assert found["hosts"] == ["node0"]
    assert "MB free; 1 are needed" in found["seen"]
    lab.hosts[0].run(f"cat /dev/zero >{runs[0]}/more || true")
    assert "No space left on device" in only(preflight(lab, runs), "run folder")["seen"]


def test_a_folder_that_cannot_be_written(lab: Lab, runs: list[str]) -> None:
    lab.hosts[3].run(f"mount -o remount,ro {runs[3]}")
    found = only(preflight(lab, runs), "run folder")
    assert found["hosts"] == ["node3"]
    assert found["seen"] == f"{runs[3]} cannot be written: Read-only file system"


@pytest.mark.parametrize("index", [1, 3])
def test_a_slow_interface(lab: Lab, runs: list[str], index: int) -> None:
    lab.hosts[index].run("tc qdisc add dev eth0 root tbf rate 10mbit burst 32kbit latency 400ms")
    try:
        found = only(preflight(lab, runs), "speed")
    finally:
        lab.hosts[index].run("tc qdisc del dev eth0 root")
    assert found["hosts"] == [f"node{index}"]
    assert found["seen"].startswith("it sends 1.")  # 10 Mbit/s are 1.25 MB/s
    assert "tc qdisc show" in found["fix"]


SMI = """#!/bin/sh
case "$*" in
    topo*) exit 1 ;;
    *) i=0; while [ $i -lt {count} ]; do
        echo "$i, NVIDIA Fake, 999.1, 81920, 3, {ecc}, Not Active, Not Active"; i=$((i + 1)); done ;;
esac
"""


def _smi(folder: Path, count: int, ecc: str = "0") -> dict[str, str]:
    """A stand-in for NVIDIA's tool, on the PATH: what it prints is its own format."""
    folder.mkdir()
    (folder / "nvidia-smi").write_text(SMI.format(count=count, ecc=ecc))
    (folder / "nvidia-smi").chmod(0o755)
    return {"PATH": f"{folder}:/usr/sbin:/usr/bin:/sbin:/bin"}


def test_a_gpu_that_is_missing_or_sick(lab: Lab, runs: list[str], tmp_path: Path) -> None:
    env = {rank: _smi(tmp_path / f"good{rank}", 2) for rank in range(COUNT)}
    well = preflight(lab, runs, "--device", "cuda", "--min-shm-mb", "1", slots=2, env=env)
    assert errors(well) == []
    env[1] = _smi(tmp_path / "few", 1)
    env[2] = _smi(tmp_path / "sick", 2, "7")
    verdict = preflight(lab, runs, "--device", "cuda", "--min-shm-mb", "1", slots=2, env=env)
    assert errors(verdict) == [("GPUs", ("node1",)), *[("GPU memory", ("node2",))] * 2]
    seen = next(one["seen"] for one in verdict["findings"] if one["check"] == "GPUs")
    assert "2 are asked for, but nvidia-smi lists 1" in seen


def test_two_hosts_with_one_address(lab: Lab, runs: list[str]) -> None:
    addresses = [host.address for host in lab.hosts]
    addresses[2] = addresses[1]  # so whoever logs in to node2 gets to node1
    verdict = preflight(lab, runs, addresses=addresses, on={2: lab.hosts[1]})
    assert ("addresses", ("node1", "node2")) in errors(verdict)
    assert {check for check, _ in errors(verdict)} == {"addresses"}


def test_another_user(lab: Lab, runs: list[str]) -> None:
    verdict = preflight(lab, runs, around={2: ["setpriv", "--reuid", "12345", "--clear-groups"]})
    assert errors(verdict) == [("user", ("node2",))]
    assert (
        next(one["seen"] for one in verdict["findings"] if one["check"] == "user")
        == "the job's user has the id 12345 there, elsewhere 0"
    )


def test_a_host_that_does_not_come(lab: Lab, runs: list[str]) -> None:
    verdict = preflight(lab, runs, "--patience-s", "3", around={1: ["true"]})
    assert ("answer", ("node1",)) in errors(verdict)
    assert {check for check, _ in errors(verdict)} == {"answer"}


def test_a_port_of_the_plan_that_is_taken_is_no_trouble(lab: Lab, runs: list[str]) -> None:
    script = "import socket, sys; s = socket.create_server(('', 29500)); print('up', flush=True); sys.stdin.read()"
    squatter = lab.hosts[0].popen([PYTHON, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert squatter.stdout is not None
        assert squatter.stdout.readline() == "up\n"
        assert errors(preflight(lab, runs)) == []
    finally:
        squatter.communicate()


def test_the_plan_is_read_as_it_is_printed() -> None:
    words = [PYTHON, "-m", "train", "plan", "--hosts", "a:2,b:3", "--json"]
    told = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [(host.name, host.slots) for host in plan_from(told).hosts] == [("a", 2), ("b", 3)]
