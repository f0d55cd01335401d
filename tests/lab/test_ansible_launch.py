"""`ansible-playbook launch.yml` on real hosts: to the end, and around every fault; the verdict is its last line."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lab.cluster import need_lab
from tests.lab.launches import SAVES, Site, Spy, alone, make_venvs, shell, site, small
from tests.ranks import ROOT, weights_digest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first waits for its hosts

TRAINING = "--train.steps 8 --train.sample_tokens 8 --train.log_every 1"
TARGET_S = {"rank": 5, "host": 15, "stop": 5}
UP = r"node1 rank 0 \| up"
MORE_S = 5
"""By which what is behind Ansible may be slower than the agents' own targets."""


@pytest.fixture(scope="module")
def two() -> Iterator[Site]:
    need_lab()
    with site(2) as made:
        yield made


@pytest.fixture(autouse=True)
def _nothing_left_for_the_next(two: Site) -> Iterator[None]:
    yield
    two.clear()


def test_four_ranks_on_two_hosts_train_to_the_end_with_the_bits_of_the_local_agent(
    two: Site, tmp_path: Path, record_property: Any
) -> None:
    spy = Spy(two, "node1")
    overrides = json.dumps({"overrides": TRAINING})
    launch = two.start("-vvv", "-e", overrides)
    launch.wait_for("first training step", 240)
    inspected = two.cluster.on("node1", "sh", "-c", "docker inspect $(docker ps -q --filter label=muster.launch)")
    assert launch.wait(120) == 0, launch.output
    spy.stop()

    assert launch.last_line == "muster: finished: step 8 (exit code 0: finished)"
    assert re.search(r"^node1 rank 0 \| step 1/8 ", launch.output, re.MULTILINE), "rank 0 is shown as it goes"
    parts = re.search(r"first training step ([\d.]+) s after Enter: connect ([\d.]+) s, container ([\d.]+) s, "
                      r"join ([\d.]+) s, first step ([\d.]+) s", launch.output)  # fmt: skip
    assert parts is not None
    whole, *rest = map(float, parts.groups())
    assert sum(rest) == pytest.approx(whole, abs=0.3)
    record_property("from Enter to the first step", parts.group())
    print(parts.group())
    (run,) = two.results.iterdir()
    names = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    logs = {f"logs/node{rank // 2}-node{rank // 2 + 1}/rank{rank}.log" for rank in range(4)}
    consoles = {f"logs/node{i}-node{i + 1}/console" for i in range(2)}
    assert {"verdict.json", "config.yaml", "metrics.jsonl", "plan.json", *logs, *consoles} <= names
    assert two.left() == {}

    (found,) = {line for line in spy.seen if line.startswith("secret ")}
    _, mode, owner, secret = found.split()
    assert (mode, owner, len(secret)) == ("0o600", "10001", 43)
    assert any("train" in line and "--secret-stdin" in line for line in spy.seen), "it looks at the right processes"
    elsewhere = [line for line in spy.seen if secret in line and not line.startswith("secret ")]
    assert elsewhere == []
    assert secret not in launch.output
    assert secret not in inspected
    search = (
        f"journalctl --quiet --no-pager | grep {secret}; grep -rl {secret} /var/lib/muster /var/log /tmp /root /home"
    )
    assert [two.cluster.on(host, "sh", "-c", f"{search} 2>/dev/null; true") for host in two.nodes] == ["", ""]

    theirs = json.loads((run / "environment.json").read_text())["torch"]
    assert theirs == torch.__version__, "the image has another torch than this machine: constraints.txt, docker/locks"
    assert weights_digest(run) == weights_digest(alone(tmp_path, TRAINING.split()))


def test_one_dead_host_and_nothing_is_started_anywhere(two: Site) -> None:
    """F25: every dead one is named in one go, with what else is wrong."""
    hosts: dict[str, dict[str, Any]] = {
        "node1": {"ansible_host": two.cluster.address("node1")},
        "dead-a": {"ansible_host": "203.0.113.7"},
        "node2": {"ansible_host": two.cluster.address("node2"), "muster_image": "muster:none"},
        "dead-b": {"ansible_host": "203.0.113.8"},
    }
    inventory = two.inventory("dead", hosts, ansible_ssh_timeout=2)
    before = two.newest("node1")
    launch = two.start(*small(5), inventory=inventory)
    assert launch.wait() != 0
    first, *reasons = launch.output[launch.output.rindex("muster: nothing was started") :].rstrip().splitlines()
    assert first == "muster: nothing was started (exit code 3: a host is not fit for the job):"
    assert [reason.split(":")[0] for reason in reasons] == [
        "  dead-a cannot be reached", "  node2", "  dead-b cannot be reached",
    ]  # fmt: skip
    assert "no image muster:none: run provision.yml" in reasons[1]
    assert two.newest("node1") == before
    assert two.left() == {}


def test_gpus_that_are_asked_for_and_missing_stop_it(two: Site) -> None:
    launch = two.play("launch.yml", "-e", "muster_device=cuda", *small(5))
    assert launch.process.returncode != 0
    assert "node1: 2 GPUs are asked for (slots), but nvidia-smi lists 0" in launch.last_line.replace("node2", "node1")
    assert two.left() == {}


def test_a_rank_is_killed(two: Site) -> None:
    launch = two.start(*shell(SAVES, "killed"))
    launch.wait_for(UP)
    event = time.monotonic()
    two.cluster.on("node2", "pkill", "-9", "--newest", "-f", "^sh -c trap")
    two.wait_until_clean(TARGET_S["rank"] + MORE_S)
    print(f"a rank killed: all clean after {time.monotonic() - event:.1f} s")
    assert launch.wait() != 0
    assert re.fullmatch(r"muster: rank [23] \(node2\) was killed by signal 9 .*\(exit code 5: a rank failed\)",
                        launch.last_line), launch.output  # fmt: skip
    assert two.verdict("killed")["exit_code"] == 5


@pytest.mark.parametrize(("host", "other"), [("node2", "node1"), ("node1", "node2")])
def test_a_host_is_cut_off(two: Site, host: str, other: str) -> None:
    """Also the one whose console is shown: then the other one's agent has the last word."""
    launch = two.start(*shell(SAVES, f"cut-{host}"))
    launch.wait_for(UP)
    event = time.monotonic()
    two.cluster.disconnect(host)
    try:
        two.wait_until_clean(TARGET_S["host"] + MORE_S)
        print(f"{host} cut off: all clean after {time.monotonic() - event:.1f} s")
        assert launch.wait() != 0
        print(f"{host} cut off: told after {time.monotonic() - event:.1f} s")
    finally:
        two.cluster.connect(host)
    assert re.fullmatch(rf"muster: host {host} \(node rank .* was lost: .* \(exit code 7: a host was lost\)",
                        launch.last_line), launch.output  # fmt: skip
    assert ("the last lines of node2:" in launch.output) == (other == "node2")
    assert two.verdict(f"cut-{host}")["host"] == host


def test_ctrl_c_saves_and_stops_and_a_second_launch_is_refused_meanwhile_unless_it_shares(two: Site) -> None:
    first = two.start("-T", "5", *shell(SAVES, "first"))  # F27: it is silent for longer than any time-out
    first.wait_for(UP)
    refused = two.play("launch.yml", *shell(SAVES))
    assert "muster: ranks are started " in first.output
    assert refused.process.returncode == 2
    launch_id = two.newest("node1")
    held = rf"  node[12]: it is in use by launch {launch_id} of .+ on .+ since 2\d+-.* \(run first\): wait, or "
    assert len(re.findall(held, refused.output)) == 2, refused.output

    beside = two.play("launch.yml", "-e", "share=true", *shell("echo beside"))
    assert beside.process.returncode == 0, beside.output
    assert beside.last_line == "muster: finished (exit code 0: finished)"
    assert "node1 rank 0 | beside" in beside.output

    assert first.process.poll() is None
    event = time.monotonic()
    first.send(signal.SIGINT)
    two.wait_until_clean(TARGET_S["stop"] + MORE_S)
    print(f"Ctrl-C: all clean after {time.monotonic() - event:.1f} s")
    assert first.wait() == 2
    assert re.fullmatch(r"muster: stopped by Ctrl-C, saved: .* \(exit code 75: .*\)", first.last_line), first.output
    assert two.verdict("first")["exit_code"] == 75
    assert "node1 rank 0 | saved" in first.output
    assert "beside" not in first.output


def test_ctrl_c_while_agents_are_started_is_not_forgotten(two: Site) -> None:
    launch = two.start(*shell(SAVES))
    launch.wait_for("Start the agents")
    launch.send(signal.SIGINT)
    assert launch.wait() == 2
    assert launch.last_line.startswith("muster: stopped by Ctrl-C"), launch.output
    assert two.left() == {}


def test_a_second_ctrl_c_ends_it_at_once(two: Site) -> None:
    launch = two.start(*shell('trap "" TERM INT; echo up; while :; do sleep 0.1; done'))
    launch.wait_for(UP)
    launch.send(signal.SIGINT)
    launch.wait_for("stopping, asked by Ctrl-C")
    event = time.monotonic()
    launch.send(signal.SIGINT)
    two.wait_until_clean(TARGET_S["stop"] + MORE_S)
    print(f"second Ctrl-C: all clean after {time.monotonic() - event:.1f} s")
    assert launch.wait() == 2
    assert launch.last_line == "muster: stopped at once by a second Ctrl-C (exit code 8: stopped, unsaved)"


def test_a_launcher_that_is_killed_takes_its_job_with_it_and_what_it_leaves_is_in_nobodys_way(two: Site) -> None:
    launch = two.start(*shell(SAVES, "orphan"))
    launch.wait_for(UP)
    launch_id = two.newest("node1")
    event = time.monotonic()
    launch.send(signal.SIGKILL)
    two.wait_until_clean(30 + TARGET_S["stop"] + MORE_S)
    took_s = time.monotonic() - event
    print(f"ansible-playbook killed: all clean after {took_s:.1f} s")
    assert took_s > 20, "it was not the lease that ended it"
    again = two.play("launch.yml", *shell("echo again"))
    assert again.process.returncode == 0, again.output
    ended = two.play("collect.yml", "-e", f"launch={launch_id}")
    assert ended.process.returncode == 0, ended.output
    assert two.verdict("orphan")["cause"].startswith(
        "stopped by the end of its lease (whoever watched is gone for 30 s)"
    )


def test_the_time_limit_is_kept_on_the_hosts(two: Site) -> None:
    """F26: nobody watches, and the limit holds; nothing is left."""
    limits = ["-e", "time_limit=15", "-e", "grace=5"]
    launch = two.play("launch.yml", "-e", "detach=true", *limits, *shell(SAVES, "limited"))
    assert launch.process.returncode == 0, launch.output
    two.wait_until_clean(15 + MORE_S)
    ended = two.play("collect.yml", "-e", "run_id=limited")
    assert ended.process.returncode == 0, ended.output
    verdict = two.verdict("limited")
    assert (verdict["exit_code"], "time limit" in verdict["cause"]) == (75, True), verdict


def test_a_launch_that_nobody_watches_is_seen_followed_collected_and_stopped(two: Site) -> None:
    large = 'head -c 20000000 /dev/urandom >"$MUSTER_RUNS_DIR/$MUSTER_RUN_ID/a large one.$RANK"; '
    launch = two.play("launch.yml", "-e", "detach=true", *shell(large + SAVES, "alone"))
    assert launch.process.returncode == 0, launch.output
    launch_id = two.newest("node1")
    assert f"muster: launch {launch_id} goes on by itself on node1, node2." in launch.last_line
    follower = two.start("-e", "follow=true", playbook="status.yml")
    follower.wait_for(UP)
    listed = two.play("status.yml")
    row = re.compile(rf"^node[12]  {launch_id}  alone .* 2 of 4 .* up$", re.MULTILINE)
    assert len(row.findall(listed.output)) == 2, listed.output

    other = two.play("stop.yml", "-e", "run_id=another")
    assert other.last_line == "muster: nothing runs that is meant"
    assert len(two.left()) == 2
    stop = two.play("stop.yml", "-e", "run_id=alone")
    assert stop.process.returncode == 0, stop.output
    assert re.fullmatch(r"muster: launch \S+: stopped by stop\.yml, called by .* \(exit code 75: .*\)", stop.last_line)
    assert two.left() == {}
    assert follower.wait() == 2
    assert re.fullmatch(r"muster: stopped by stop\.yml, .* \(exit code 75: .*\)", follower.last_line)

    run = two.results / "alone"
    assert two.verdict("alone")["exit_code"] == 75
    assert (run / "logs" / "node1-node2" / "rank3.log").exists()
    theirs = two.cluster.on("node1", "sh", "-c", "cd /var/lib/muster/runs/alone; sha256sum a*0 a*1")
    ours = [hashlib.sha256((run / f"a large one.{rank}").read_bytes()).hexdigest() for rank in range(2)]
    assert ours == [line.split()[0] for line in theirs.splitlines()]
    quiet = two.play("collect.yml", "-e", f"launch={launch_id}")
    assert re.findall(r"changed=(\d+)", quiet.output) == ["0", "0"], quiet.output


def test_any_script_from_a_folder_of_this_machine(two: Site, tmp_path: Path) -> None:
    (tmp_path / "my code").mkdir()
    (tmp_path / "my code" / "plain reduce.py").write_text((ROOT / "tests" / "lab" / "plain_reduce.py").read_text())
    script = json.dumps({"script": "python 'plain reduce.py' 3 5", "code": str(tmp_path / "my code")})
    launch = two.play("launch.yml", "-e", script)
    assert launch.process.returncode == 0, launch.output
    assert "node1 rank 0 | seed 5 ends with [" in launch.output


def test_an_inventory_that_is_ugly_on_purpose(two: Site) -> None:
    """Aliases that are no host names, another order, --limit, IPv6 by interfaces that are named differently."""
    hosts: dict[str, dict[str, Any]] = {
        "outside": {"ansible_host": "203.0.113.9"},
        "zeta": {
            "ansible_host": two.cluster.address("node2"),
            "address": two.cluster.address("node2", "6"),
            "slots": 1,
        },
        "alpha": {"ansible_host": two.cluster.address("node1"), "address": two.cluster.address("node1", "6")},
    }
    inventory = two.inventory("ugly", hosts)
    launch = two.start("--limit", "alpha,zeta", "-e", "run_id=ugly", *small(3), inventory=inventory)
    assert launch.wait() == 0, launch.output
    plan = json.loads((two.results / "ugly" / "plan.json").read_text())
    assert [(host["name"], host["ranks"]) for host in plan["hosts"]] == [("zeta", [0]), ("alpha", [1, 2])]
    assert plan["master_addr"] == two.cluster.address("node2", "6")
    assert sorted(path.name for path in (two.results / "ugly" / "logs").iterdir()) == ["node0-zeta", "node1-alpha"]


def test_a_host_that_takes_its_own_name_for_itself(two: Site) -> None:
    """Debian's 127.0.1.1 line, on agent 0's host, whose name has dots; and docker0 has one address everywhere."""
    assert {two.cluster.on(host, "ip", "-4", "-br", "addr", "show", "docker0").split()[2] for host in two.nodes} == {
        "172.17.0.1/16"
    }
    name = two.cluster.on("node1", "hostname")
    assert "." in name
    addresses = {host: two.cluster.address(host) for host in two.nodes}
    hosts: dict[str, dict[str, Any]] = {
        "node1": {"ansible_host": addresses["node1"], "address": name}, "node2": {"ansible_host": addresses["node2"]},
    }  # fmt: skip
    kept = {host: two.cluster.on(host, "cat", "/etc/hosts") for host in two.nodes}
    lines = {"node1": f"127.0.1.1 {name}", "node2": f"{addresses['node1']} {name}"}
    try:
        for host, line in lines.items():
            two.cluster.on(host, "sh", "-c", f"echo '{line}\n127.0.0.1 localhost' >/etc/hosts")
        launch = two.start("-e", "run_id=own-name", *small(3), inventory=two.inventory("own-name", hosts))
        assert launch.wait() == 0, launch.output
    finally:
        for host, text in kept.items():
            two.cluster.on(host, "sh", "-c", f"cat >/etc/hosts <<'EOF'\n{text}\nEOF")
    plan = json.loads((two.results / "own-name" / "plan.json").read_text())
    assert plan["master_addr"] == name


def test_preflight_finds_a_closed_port_and_collects_the_host(two: Site, tmp_path: Path) -> None:
    fit = two.play("preflight.yml")
    assert fit.process.returncode == 0, fit.output
    assert re.fullmatch(r"muster: 2 hosts are fit, each and together \([0-9.]+ s; .*\)", fit.last_line)
    assert "sums are right" in fit.output
    rule = ["INPUT", "-p", "tcp", "--syn", "-s", two.cluster.address("node2"), "-j", "DROP"]
    file = tmp_path / "bad"
    two.cluster.on("node1", "iptables", "-I", *rule)
    try:
        found = two.play("preflight.yml", "-e", f"quarantine={file}")
    finally:
        two.cluster.on("node1", "iptables", "-D", *rule)
    assert found.process.returncode == 2
    assert re.search(
        rf"error +ports +node1: node2 does not reach node1 at {two.cluster.address('node1')}", found.output
    )
    assert found.last_line.startswith("muster: of 2 hosts not fit: node1 (")
    assert [line.split()[0] for line in file.read_text().splitlines()[1:]] == ["node1"]
    launch = two.start("-e", f"quarantine={file}", *shell("true", "left-out"))
    assert launch.wait() == 0, launch.output
    assert two.verdict("left-out")["exit_code"] == 0
    assert [host["name"] for host in json.loads((two.results / "left-out" / "plan.json").read_text())["hosts"]] == [
        "node2"
    ]


def test_a_dry_run_shows_the_plan_and_starts_nothing(two: Site) -> None:
    before = two.newest("node1")
    dry = two.play("launch.yml", "--check", *small(3))
    assert dry.process.returncode == 0, dry.output
    assert "MASTER_ADDR" in dry.output
    assert two.newest("node1") == before


def test_without_containers_it_is_a_unit_of_systemd(two: Site) -> None:
    make_venvs(two)
    launch = two.start("-e", "runtime=venv", *shell(f'echo "<$$ ${{RANK}} $LOCAL_RANK>"; {SAVES}', "unit"))
    launch.wait_for(UP)
    assert re.search(r"<\d+ 0 0>", launch.output), "systemd has words of its own for dollars"
    unit = f"muster-{two.newest('node2')}.service"
    shown = two.cluster.on("node2", "systemctl", "show", "-p", "KillMode,User,ActiveState,NoNewPrivileges", unit)
    assert set(shown.split()) == {"KillMode=control-group", "User=10001", "ActiveState=active", "NoNewPrivileges=yes"}
    launch.send(signal.SIGTERM)
    two.wait_until_clean(TARGET_S["stop"] + MORE_S)
    assert launch.wait() == 2
    assert launch.last_line.startswith("muster: stopped by SIGTERM at the launcher, saved: ")
    assert two.verdict("unit")["exit_code"] == 75
    assert two.cluster.on("node2", "systemctl", "is-active", unit, check=False) == "inactive"


def test_the_commands_of_readme(two: Site, tmp_path: Path) -> None:
    """But for provision.yml, which made these hosts."""
    text = (ROOT / "README.md").read_text()
    commands = [shlex.split(words) for words in re.findall(r"^ansible-playbook (.*?)(?:  #.*)?$", text, re.MULTILINE)]
    assert [words[2] for words in commands] == ["provision.yml", "launch.yml", "launch.yml", "status.yml"]
    (tmp_path / "my.py").write_text("print('this is mine')")
    for _, _, playbook, *args in commands[1:]:
        words = [word.replace("~/project", str(tmp_path)) for word in args]
        played = two.play(playbook, *words, *(small(2) if "config=amp" in words else []))
        assert played.process.returncode == 0, played.output
        assert ("this is mine" in played.output) == any("my.py" in word for word in words)
