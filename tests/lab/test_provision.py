"""Bare hosts become a cluster, and stay one: provision.yml on a lab of its own, in the order of these tests."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.lab.cluster import Cluster, need_lab
from tests.ranks import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

NODES = ["node1", "node2", "node3"]
HOSTS = ["head", *NODES]
PROVISION_S, AGAIN_S = 180, 60
DAEMONS = ("docker", "containerd", "slurmd", "munge")


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    """A small image that stands for Muster's: what is tested is how hosts get one."""
    need_lab()
    name = f"muster-test:{uuid.uuid4().hex[:8]}"
    make_image(name, "first")
    yield name
    sh("docker", "image", "rm", "--force", name)


@pytest.fixture(scope="module")
def cluster(image: str) -> Iterator[Cluster]:
    """Three bare hosts and a controller, with every part switched on that can be."""
    made = Cluster.up()
    print(f"lab of {len(HOSTS)} hosts: {made.seconds:.1f} s")
    try:
        (made.folder / "vars.json").write_text(
            json.dumps({
                "muster_image": image, "slurm_accounting": True, "base_firewall": True,
                "muster_cluster_network": networks(made),
            })
        )  # fmt: skip
        yield made
    finally:
        made.down()


def networks(cluster: Cluster) -> list[str]:
    """Of the cluster: IPv4, and IPv6 where there is one."""
    said = sh("docker", "network", "inspect", "--format", "{{json .IPAM.Config}}", cluster.name)
    return [str(entry["Subnet"]) for entry in json.loads(said)]


def provision(cluster: Cluster, *args: str, check: bool = True, **more: object) -> subprocess.CompletedProcess[str]:
    """provision.yml with this module's variables and more of them."""
    extra = ["-e", f"@{cluster.folder}/vars.json", "-e", json.dumps(more)]
    return cluster.playbook("provision.yml", *extra, *args, timeout_s=900, check=check)


def make_image(name: str, word: str) -> None:
    """An image that differs from others by a word."""
    base = subprocess.run(
        [ROOT / "docker/lab/lab", "image"], capture_output=True, text=True, check=True
    ).stdout.split()[-1]
    suite = base.split(":")[1].split("-")[0]
    dockerfile = f'FROM muster-base:{suite}\nENV WORD={word}\nCMD ["sleep", "infinity"]\n'
    done = subprocess.run(["docker", "build", "--quiet", "--tag", name, "-"], input=dockerfile, text=True, check=False)
    assert done.returncode == 0


def sh(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def changes(said: str) -> dict[str, int]:
    """Changed tasks a host, from the recap; every host must have been reached, without failures."""
    rows = re.findall(r"^(\S+) +: ok=\d+ +changed=(\d+) +unreachable=(\d+) +failed=(\d+)", said, re.MULTILINE)
    assert all(unreachable == failed == "0" for _, _, unreachable, failed in rows), said
    return {host: int(changed) for host, changed, _, _ in rows}


def states(cluster: Cluster) -> dict[str, str]:
    """Each node's state, as Slurm sees it."""
    return dict(line.split() for line in cluster.on("head", "sinfo", "-hN", "-o", "%N %T").splitlines())


def wait_for(cluster: Cluster, wanted: dict[str, str], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while states(cluster) != wanted:
        why = cluster.on("head", "sinfo", "-hN", "-o", "%N %T %E")
        assert time.monotonic() < deadline, f"not {wanted}:\n{why}"
        time.sleep(0.2)


def daemons(cluster: Cluster, host: str) -> str:
    """Process ids of a host's daemons, and since when: another one means that it was restarted."""
    properties = "--property=Id,MainPID,ActiveEnterTimestampMonotonic"
    return cluster.on(host, "systemctl", "show", properties, *DAEMONS)


def test_the_lab_is_up_in_time(cluster: Cluster) -> None:
    assert cluster.seconds <= 20


def test_check_mode_passes_on_bare_hosts_and_changes_nothing(cluster: Cluster) -> None:
    look = ("sh", "-c", "dpkg-query -W; cat /etc/hosts /etc/passwd; ls /etc /opt /var/lib")
    before = {host: cluster.on(host, *look) for host in HOSTS}
    done = provision(cluster, "--check", "--diff")
    assert "would install" in done.stdout
    assert min(changes(done.stdout).values()) > 0
    assert {host: cluster.on(host, *look) for host in HOSTS} == before


def test_bare_hosts_become_a_cluster(cluster: Cluster, image: str) -> None:
    started = time.monotonic()
    done = provision(cluster, "--skip-tags", "image")
    seconds = time.monotonic() - started
    print(f"provisioned {len(HOSTS)} hosts, without the image: {seconds:.0f} s")
    assert set(changes(done.stdout)) == set(HOSTS)
    assert states(cluster) == dict.fromkeys(NODES, "idle")
    started = time.monotonic()
    provision(cluster, "--tags", "image")
    print(f"image of {int(sh('docker', 'image', 'inspect', '--format', '{{.Size}}', image)) / 1e6:.0f} MB to "
          f"{len(NODES)} hosts: {time.monotonic() - started:.0f} s")  # fmt: skip
    assert seconds <= PROVISION_S


def test_slurm_runs_jobs_on_all_nodes_with_their_devices(cluster: Cluster) -> None:
    said = cluster.on("head", "srun", "-N3", "hostname")
    assert sorted(said.splitlines()) == ["cpu-3", "gpu-a.lab.test", "gpu-b"]
    said = cluster.on("head", "srun", "-N2", "--gpus-per-node=2", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    assert said.splitlines() == ["0,1", "0,1"]
    assert "gpu" not in cluster.on("head", "scontrol", "show", "node", "node3")
    refused = cluster.on("head", "srun", "-N3", "--gpus-per-node=1", "true", check=False)
    assert "Requested node configuration is not available" in refused


def test_munge_works_between_any_two_hosts(cluster: Cluster) -> None:
    for host in HOSTS:
        credential = cluster.on(host, "munge", "--no-input")
        for other in HOSTS:
            said = cluster.on(other, "sh", "-c", f"echo '{credential}' | unmunge")
            assert "Success" in said
            assert cluster.address(host) in said


def test_accounting_knows_the_jobs(cluster: Cluster) -> None:
    job = cluster.on("head", "sbatch", "--parsable", "--output=/dev/null", "--wrap=true")
    deadline = time.monotonic() + 30
    while "COMPLETED" not in cluster.on("head", "sacct", "-nXj", job, "-o", "state"):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_each_node_has_a_docker_engine_and_the_image(cluster: Cluster, image: str) -> None:
    here = sh("docker", "image", "inspect", "--format", "{{json .RootFS.Layers}}", image)
    for node in NODES:
        assert cluster.on(node, "docker", "run", "--rm", image, "printenv", "WORD") == "first"
        assert cluster.on(node, "docker", "image", "inspect", "--format", "{{json .RootFS.Layers}}", image) == here
        assert cluster.on(node, "docker", "info", "--format", "{{.LiveRestoreEnabled}}") == "true"


def test_every_host_knows_the_others_and_is_not_its_own_loopback(cluster: Cluster) -> None:
    """Debian's 127.0.1.1 line, real names that differ from the inventory's, one of them fully qualified."""
    for host in HOSTS:
        own = cluster.on(host, "hostname", "--fqdn")
        assert own == cluster.on(host, "hostname")
        for name in (own, own.partition(".")[0]):
            assert {line.split()[0] for line in cluster.on(host, "getent", "ahostsv4", name).splitlines()} == {
                cluster.address(host)
            }
        for other in HOSTS:
            assert cluster.on(host, "getent", "hosts", other).split()[0] == cluster.address(other)


def test_the_user_is_the_same_on_all_hosts_and_may_lock_memory(cluster: Cluster) -> None:
    for host in HOSTS:
        assert cluster.on(host, "stat", "-c", "%u:%g", "/var/lib/muster/runs") == "10001:10001"
        assert cluster.on(host, "id", "-u", "muster") == "10001"
    shown = cluster.on("node1", "systemctl", "show", "docker", "slurmd", "--property=LimitMEMLOCK,LimitNOFILE")
    assert sorted(shown.split()) == [*["LimitMEMLOCK=infinity"] * 2, *["LimitNOFILE=1048576"] * 2]


def test_the_firewall_lets_in_ssh_and_the_cluster_alone(cluster: Cluster) -> None:
    """From this machine, at node2's address on its other network: that is not the cluster's."""
    container = json.loads(sh("docker", "inspect", cluster.container("node2")))[0]
    outside = next(
        network["IPAddress"]
        for name, network in container["NetworkSettings"]["Networks"].items()
        if name != cluster.name
    )
    knock = "timeout 2 bash -c '</dev/tcp/{}/{}'"
    assert subprocess.run(["sh", "-c", knock.format(outside, 22)], check=False).returncode == 0
    assert subprocess.run(["sh", "-c", knock.format(cluster.address("node2"), 6818)], check=False).returncode == 0
    assert subprocess.run(["sh", "-c", knock.format(outside, 6818)], check=False, stderr=subprocess.DEVNULL).returncode


def test_the_firewall_lets_in_ansible_by_whatever_port_and_either_family(cluster: Cluster) -> None:
    known = cluster.folder / "hosts" / "known_hosts"
    address = cluster.address("node3")
    ports = "/etc/ssh/sshd_config.d/lab.conf"
    cluster.on("node3", "sh", "-c", f"printf 'Port 2222\\nPort 22\\n' >{ports}; systemctl restart ssh")
    before = known.read_text()
    mine = [line for line in before.splitlines() if line.startswith(address)]
    known.write_text(before + "".join(f"[{address}]:2222 {line.partition(' ')[2]}\n" for line in mine))
    provision(cluster, "--tags", "base", "--limit", "node3", ansible_port=2222)
    rules = cluster.on("node3", "nft", "list", "table", "inet", "muster")
    assert re.search(r"tcp dport \{ 22, 2222 \} accept", rules), rules
    if cluster.address("head", "6"):
        assert "ip6 saddr" in rules
        cluster.on("node3", "systemd-run", "--unit", "door", "python3", "-m", "http.server", "--bind", "::", "7777")
        knock = f"until </dev/tcp/{cluster.address('node3', '6')}/7777; do sleep 0.1; done"
        cluster.on("head", "timeout", "10", "bash", "-c", knock)
        cluster.on("node3", "systemctl", "stop", "door")
    cluster.on("node3", "sh", "-c", f"rm {ports}; systemctl restart ssh")
    known.write_text(before)
    provision(cluster, "--tags", "base", "--limit", "node3")
    assert "2222" not in cluster.on("node3", "nft", "list", "table", "inet", "muster")


def test_provisioning_again_changes_nothing_and_a_running_job_does_not_notice(cluster: Cluster, image: str) -> None:
    """With the most talkative output, in which, as in the process table, the munge key must not be."""
    containers = {node: cluster.on(node, "docker", "run", "--detach", image) for node in NODES}
    job = cluster.on("head", "sbatch", "--parsable", "-N3", "--output=/dev/null", "--wrap=srun sleep 600")
    wait_for(cluster, dict.fromkeys(NODES, "mixed"))
    before = {node: daemons(cluster, node) for node in NODES}
    started = time.monotonic()
    with ProcessTable() as table:
        done = provision(cluster, "-vvv")
    seconds = time.monotonic() - started
    print(f"provisioned again: {seconds:.0f} s")
    assert changes(done.stdout) == dict.fromkeys(HOSTS, 0)
    assert {node: cluster.on(node, "docker", "ps", "--quiet", "--no-trunc") for node in NODES} == containers
    assert {node: daemons(cluster, node) for node in NODES} == before
    assert cluster.on("head", "squeue", "-hj", job, "-o", "%T") == "RUNNING"
    for form in forms_of_the_key(cluster):
        assert form not in done.stdout
        assert form not in table.seen
    assert "ansible-playbook" in table.seen  # it looked
    assert seconds <= AGAIN_S


def test_check_mode_passes_on_provisioned_hosts(cluster: Cluster) -> None:
    assert changes(provision(cluster, "--check").stdout) == dict.fromkeys(HOSTS, 0)


def test_new_settings_do_not_restart_docker_under_a_container(cluster: Cluster) -> None:
    before = daemons(cluster, "node1")
    more = {"max-concurrent-downloads": 5}
    done = provision(cluster, "--tags", "docker", "--limit", "node1", docker_extra_settings=more)
    assert "1 containers run, so Docker is not restarted" in done.stdout.replace("\n", " ").replace("        ", "")
    assert daemons(cluster, "node1") == before
    assert '"max-concurrent-downloads": 5' in cluster.on("node1", "cat", "/etc/docker/daemon.json")


def test_a_fourth_host_comes_without_touching_the_others(cluster: Cluster) -> None:
    before = {node: (daemons(cluster, node), files(cluster, node)) for node in NODES}
    containers = {node: cluster.on(node, "docker", "ps", "--quiet") for node in NODES}
    cluster.add()
    started = time.monotonic()
    done = provision(cluster, "--limit", "node4")
    print(f"a fourth host: {time.monotonic() - started:.0f} s")
    assert set(changes(done.stdout)) == {"node4"}
    assert {node: (daemons(cluster, node), files(cluster, node)) for node in NODES} == before
    assert {node: cluster.on(node, "docker", "ps", "--quiet") for node in NODES} == containers
    assert states(cluster) == {**dict.fromkeys(NODES, "mixed"), "node4": "idle"}
    assert cluster.on("head", "srun", "-w", "node4", "hostname") == "cpu-4"
    cluster.on("head", "scancel", "--user=root")
    wait_for(cluster, dict.fromkeys([*NODES, "node4"], "idle"))
    assert len(cluster.on("head", "srun", "-N4", "hostname").split()) == 4


def test_a_new_munge_key_is_in_force_everywhere_at_once(cluster: Cluster) -> None:
    (old,) = {cluster.on(host, "sha256sum", "/etc/munge/munge.key") for host in [*HOSTS, "node4"]}
    provision(cluster, "--tags", "slurm", slurm_renew_munge_key=True)
    (new,) = {cluster.on(host, "sha256sum", "/etc/munge/munge.key") for host in [*HOSTS, "node4"]}
    assert new != old
    for host in HOSTS:
        assert cluster.on(host, "stat", "-c", "%a %U:%G", "/etc/munge/munge.key") == "400 munge:munge"
    assert len(cluster.on("head", "srun", "-N4", "hostname").split()) == 4


def test_a_changed_image_is_sent_and_is_the_same_everywhere(cluster: Cluster, image: str) -> None:
    make_image(image, "second")
    provision(cluster, "--tags", "image")
    assert {cluster.on(node, "docker", "run", "--rm", image, "printenv", "WORD") for node in NODES} == {"second"}


def test_a_sick_node_gets_no_jobs_until_it_is_well_again(cluster: Cluster) -> None:
    health = "/usr/local/sbin/muster-node-health"
    cluster.on("node1", "mv", "/var/lib/muster/runs", "/var/lib/muster/gone")
    cluster.on("node1", health)
    assert "drain" in states(cluster)["node1"]
    assert "muster-node-health: /var/lib/muster/runs is missing" in cluster.on("head", "sinfo", "-R", "-o", "%E")
    cluster.on("node1", "mv", "/var/lib/muster/gone", "/var/lib/muster/runs")
    cluster.on("node1", health)
    wait_for(cluster, dict.fromkeys([*NODES, "node4"], "idle"))
    cluster.on("head", "scontrol", "update", "NodeName=node1", "State=DRAIN", "Reason=by hand")
    cluster.on("node1", health)
    assert "drain" in states(cluster)["node1"]  # by hand: it stays
    cluster.on("head", "scontrol", "update", "NodeName=node1", "State=RESUME")


def test_a_host_that_starts_again_is_back_by_itself(cluster: Cluster) -> None:
    cluster.kill("node1")
    cluster.start("node1")
    wait_for(cluster, dict.fromkeys([*NODES, "node4"], "idle"), timeout_s=60)
    assert cluster.on("node1", "docker", "info", "--format", "{{.LiveRestoreEnabled}}") == "true"
    assert cluster.on("node1", "nft", "list", "tables").split() >= ["table", "inet", "muster"]


def test_what_a_host_lacks_is_said_in_words(cluster: Cluster) -> None:
    for more, limit, words in (
        ({"base_supported": {"Debian": "99"}}, "node1", "supported are, with systemd and from this release on"),
        ({"muster_device": "cuda"}, "node3", "node3: muster_device is cuda, but there is no NVIDIA GPU on its bus"),
        ({"shared_fs_kind": "mounted", "shared_fs_path": "/srv"}, "node1,node2", "is not the same file system"),
    ):
        done = provision(cluster, "--tags", "base,nvidia,shared_fs", "--limit", limit, check=False, **more)
        assert done.returncode != 0
        assert words in re.sub(r"\s+", " ", done.stdout)


def test_a_dead_host_is_named_and_the_others_are_provisioned(cluster: Cluster) -> None:
    cluster.kill("node4")
    done = provision(cluster, "--tags", "base", check=False)
    assert done.returncode != 0
    assert re.search(r"^node4 .*unreachable=1", done.stdout, re.MULTILINE)
    assert len(re.findall(r"unreachable=0 +failed=0", done.stdout)) == len(HOSTS)


def files(cluster: Cluster, host: str) -> str:
    """Every file below /etc with its time of change."""
    return cluster.on(host, "sh", "-c", "find /etc -type f -printf '%p %T@\\n' | sort")


def forms_of_the_key(cluster: Cluster) -> list[str]:
    """The munge key, as it might be printed."""
    text = cluster.on("head", "base64", "--wrap=0", "/etc/munge/munge.key")
    raw = base64.b64decode(text)
    assert len(raw) >= 32
    return [text, text[:40], raw.hex(), repr(raw)[2:60], raw.decode("latin-1")]


class ProcessTable:
    """Command lines of all processes on this machine, the lab's hosts among them, while a block runs."""

    def __init__(self) -> None:
        self.seen = ""
        self._lines: set[str] = set()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> ProcessTable:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.seen = "\n".join(self._lines)

    def _watch(self) -> None:
        while not self._done.wait(0.1):
            for process in psutil.process_iter():
                try:
                    self._lines.add(" ".join(process.cmdline()))
                except psutil.Error:
                    continue


def test_no_secret_is_in_the_repository() -> None:
    found = sh("git", "-C", str(ROOT), "ls-files", "ansible", "docker/lab").splitlines()
    assert found
    for name in found:
        text = Path(ROOT / name).read_text(encoding="utf-8")
        assert "PRIVATE KEY" not in text
        assert not re.search(r"[A-Za-z0-9+]{44,}", text), f"{name}: a key?"
