"""What differs from site to site, and befalls a launch from afar: lookers-on, full disks, registries, repositories."""

from __future__ import annotations

import json
import os
import re
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab.cluster import need_lab
from tests.lab.launches import FOLDER, SAVES, Site, Spy, make_venvs, shell, site, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first waits for its hosts

SAYS_SYSTEMD = """#!/bin/sh
[ "$1 $3" != "info {{.CgroupDriver}}" ] || exec echo systemd
exec /usr/bin/docker "$@"
"""
REGISTRY = json.dumps({
    "version": 0.1, "storage": {"filesystem": {"rootdirectory": "/var/lib/docker-registry"}}, "http": {"addr": ":5000"},
})  # fmt: skip
UP = r"node1 rank 0 \| up"


@pytest.fixture(scope="module")
def two() -> Iterator[Site]:
    need_lab()
    with site(2) as made:
        yield made


@pytest.fixture(autouse=True)
def _nothing_left_for_the_next(two: Site) -> Iterator[None]:
    yield
    two.clear()


def beat_s(two: Site, host: str) -> float:
    """When the agent of the newest launch wrote its heartbeat last, by the host's clock."""
    return float(json.loads(two.cluster.on(host, "cat", f"{FOLDER}/{two.newest(host)}/heartbeat"))["time"])


def test_whoever_follows_a_launch_and_loses_a_host_does_not_end_it(two: Site) -> None:
    """Only the way from this machine is cut: the hosts reach each other."""
    launch = two.play("launch.yml", "-e", "detach=true", *shell(SAVES, "followed"))
    assert launch.process.returncode == 0, launch.output
    before = two.left()
    follower = two.start("-e", "follow=true", playbook="status.yml")
    follower.wait_for(UP)
    rule = ["INPUT", "-p", "tcp", "--dport", "22", "-j", "DROP"]
    two.cluster.on("node2", "iptables", "-I", *rule)
    try:
        follower.wait_for("node2 does not answer", 60)
        follower.wait_for(r"Follow it to its end[\s\S]*ok: \[node2\]", 60)
        given_up_s = beat_s(two, "node1")
        # No order may come within what a launcher's watchers would take to give one.
        until(lambda: min(beat_s(two, host) for host in two.nodes) > given_up_s + 8, 60, lambda: follower.output)
        assert two.left() == before
    finally:
        two.cluster.on("node2", "iptables", "-D", *rule)
    stop = two.play("stop.yml", "-e", "run_id=followed")
    assert stop.process.returncode == 0, stop.output
    assert "stopped by stop.yml" in stop.last_line
    assert follower.wait() == 2
    assert follower.last_line == (
        "muster: not seen to its end: node2; the launch may well go on: ansible-playbook status.yml"
    ), follower.output


def test_a_full_disk_while_code_is_sent_and_nothing_is_started_anywhere(two: Site, tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text("print('never')")
    (tmp_path / "large").write_bytes(os.urandom(3 << 20))
    code = f"{FOLDER}/code"
    for host in two.nodes:
        two.cluster.on(host, "mkdir", "-p", code)
    before = {host: two.cluster.on(host, "ls", FOLDER, code) for host in two.nodes}
    two.cluster.on("node2", "mount", "-t", "tmpfs", "-o", "size=1m", "small", code)
    try:
        launch = two.play("launch.yml", "-e", json.dumps({"script": "python my.py", "code": str(tmp_path)}))
        assert two.cluster.on("node2", "ls", code) == ""
    finally:
        two.cluster.on("node2", "umount", code)
    assert launch.process.returncode == 2
    first, reason = launch.output.rstrip().splitlines()[-2:]
    assert first == "muster: nothing was started (exit code 3: a host is not fit for the job):", launch.output
    assert re.fullmatch(rf"  node2: the code cannot be sent: no space left on device: make room .*{code}.*", reason)
    assert {host: two.cluster.on(host, "ls", FOLDER, code) for host in two.nodes} == before
    assert two.left() == {}


@pytest.mark.parametrize("runtime", ["docker", "venv"])
def test_a_sites_variables_reach_the_ranks_and_are_shown_nowhere(two: Site, runtime: str) -> None:
    """With the most talkative output; one of them with a blank at its end, one of two lines."""
    if runtime == "venv":
        make_venvs(two)
    hidden = uuid.uuid4().hex
    values: dict[str, Any] = {"TOKEN": f"{hidden} $HOME \"x' ", "TWO_LINES": f"{hidden}-1\n{hidden}-2", "NUMBER": 1}
    hosts: dict[str, dict[str, Any]] = {
        host: {"ansible_host": two.cluster.address(host), "job_environment": values} for host in two.nodes
    }
    inventory = two.inventory("variables", hosts)
    show = 'printf "%s|%s|%s" "$TOKEN" "$TWO_LINES" "$NUMBER" | sha256sum'
    spy = Spy(two, "node1")
    launch = two.start("-vvv", "-e", f"runtime={runtime}", *shell(show), inventory=inventory)
    assert launch.wait() == 0, launch.output
    spy.stop()
    text = "|".join(map(str, values.values()))
    expected = subprocess.run(["sha256sum"], input=text.encode(), capture_output=True, check=True).stdout.decode()
    assert f"node1 rank 0 | {expected.strip()}" in launch.output
    assert hidden not in launch.output
    assert [line for line in spy.seen if line.startswith("cmdline") and hidden in line] == []
    assert any(line.startswith("cmdline") and "MUSTER_HEARTBEAT_FILE" in line for line in spy.seen), "it looks at ps"
    files = {tuple(line.split()[:3]) for line in spy.seen if line.startswith("environment ")}
    assert files == {("environment", "0o600", "0")}
    for host in two.nodes:
        assert two.cluster.on(host, "sh", "-c", f"ls {FOLDER}/*/environment {FOLDER}/*/secret 2>/dev/null; true") == ""
        journal = f"journalctl --quiet --no-pager | grep -c {hidden}; grep -rl {hidden} /var/lib/muster /var/log /tmp"
        assert two.cluster.on(host, "sh", "-c", f"{journal}; true") == "0"


def provision(two: Site, *args: str, **more: object) -> str:
    done = two.cluster.playbook("provision.yml", *args, "-e", json.dumps(more), timeout_s=600, check=False)
    assert done.returncode == 0 or more.get("fails"), done.stdout
    return re.sub(r"\s+", " ", done.stdout)


def test_an_image_from_a_registry_by_its_digest(two: Site) -> None:
    """Debian's docker-registry on the controller; the engines are told to trust it without TLS."""
    on, registry = two.cluster.on, f"{two.cluster.address('head')}:5000"
    on("head", "sh", "-c", "apt-get -qq update; apt-get -qq install -y docker-registry", timeout_s=180)
    on("head", "sh", "-c", f"echo '{REGISTRY}' >/etc/docker/registry/config.yml; systemctl restart docker-registry")
    up = f"until </dev/tcp/{two.cluster.address('head')}/5000; do sleep 0.1; done 2>/dev/null"
    on("node1", "timeout", "30", "bash", "-c", up)
    trust = {"docker_extra_settings": {"insecure-registries": [registry]}}
    provision(two, "--tags", "docker", "--limit", "nodes", **trust)
    name = f"{registry}/small"
    on("node1", "sh", "-c", f"tar -C /etc -c hostname | docker import - {name}:1; docker push -q {name}:1")
    inspect = ("docker", "image", "inspect", "--format")
    digest = on("node1", *inspect, "{{index .RepoDigests 0}}", f"{name}:1").split("@")[1]
    given = {**trust, "muster_image": "small:site", "image_source": "registry", "image_registry_name": name}
    args = ("--tags", "image", "--limit", "nodes")
    provision(two, *args, **given, image_registry_digest=digest)
    ids = {on(host, *inspect, "{{.Id}}", "small:site") for host in two.nodes}
    assert ids == {on("node1", *inspect, "{{.Id}}", f"{name}:1")}
    again = provision(two, *args, **given, image_registry_digest=digest)
    assert re.findall(r"changed=(\d+)", again) == ["0", "0"]
    wrong = provision(two, *args, **given, image_registry_digest=f"sha256:{'0' * 64}", fails=True)
    assert re.findall(r"failed=(\d+)", wrong) == ["1", "1"], wrong
    none = provision(two, *args, **given, fails=True)
    assert "image_source=registry needs image_registry_name" in none


def test_nothing_reloads_systemd_under_containers_that_would_lose_their_gpus(two: Site) -> None:
    """By what Docker tells of them; that its control groups are systemd's is all that a stand-in says here."""
    on = two.cluster.on
    more = {"docker_extra_settings": {"runtimes": {"nvidia": {"path": "runc"}}}}
    provision(two, "--tags", "docker", "--limit", "node1", **more)
    image = on("node1", "sh", "-c", "docker image ls --quiet muster | head -n 1")
    run = ["docker", "run", "--detach", "--rm", "--entrypoint", "sleep"]
    on("node1", *run, "--name", "with-gpus", "--runtime", "nvidia", image, "600")
    on("node1", *run, "--name", "without", image, "600")
    on("node1", "sh", "-c", f"cat >/usr/local/bin/docker <<'END'\n{SAYS_SYSTEMD}END\nchmod 755 /usr/local/bin/docker")
    args, wanted = ("--tags", "base", "--limit", "node1"), {"base_packages": ["iproute2", "python3-apt", "tree"]}
    try:
        refused = provision(two, *args, **wanted, fails=True)
        assert "tree must be installed" in refused
        assert "would take the GPUs away from with-gpus. Wait" in refused
        assert on("node1", "sh", "-c", "command -v tree; true") == ""
        provision(two, *args)  # what has nothing to install goes on
        on("node1", "docker", "rm", "--force", "with-gpus")
        provision(two, *args, **wanted)
        assert on("node1", "sh", "-c", "command -v tree") == "/usr/bin/tree"
    finally:
        on("node1", "sh", "-c", "rm /usr/local/bin/docker; docker rm -f with-gpus without; apt-get -qq purge -y tree")
    provision(two, "--tags", "docker", "--limit", "node1")


def test_an_engine_from_a_repository_of_its_own(two: Site) -> None:
    """`docker_source: docker`, with Debian's mirror in place of Docker's. Last: it leaves one host more."""
    two.cluster.add()
    host = "node3"
    mirror = two.cluster.on(host, "sh", "-c", "grep -hoE 'https?://[^ ]+' -r /etc/apt/sources.list* | head -n 1")
    suite = two.cluster.on(host, "sh", "-c", ". /etc/os-release; echo $VERSION_CODENAME")
    key = f"file:///etc/apt/trusted.gpg.d/debian-archive-{suite}-stable.asc"
    repository = {"name": "docker", "url": mirror, "suite": suite, "components": "main", "key": key}
    packages = {"docker": ["docker.io", "iptables", "python3-requests"]}
    more = {"docker_source": "docker", "docker_repository": repository, "docker_packages_of": packages}
    args = ("--tags", "base,docker", "--limit", host)
    provision(two, *args, **more)
    assert two.cluster.on(host, "docker", "info", "--format", "{{.LiveRestoreEnabled}}") == "true"
    assert f"URIs: {mirror}" in two.cluster.on(host, "cat", "/etc/apt/sources.list.d/docker.sources")
    assert "changed=0" in provision(two, *args, **more)
