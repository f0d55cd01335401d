"""`fab launch` on real hosts with sshd: to the end, and around every fault; nothing left, the verdict its last line."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from tests.lab.cluster import ANSIBLE, need_lab
from tests.lab.fabs import FAB, READERS, RELAY, done, fab, refused, ssh_config
from tests.lab.launches import SAVES, SMALL, Launch, Site, alone, site, until
from tests.ranks import weights_digest
from train.checks import same

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first waits for its hosts

TRAINING = "--train.steps 8 --train.sample_tokens 8 --train.log_every 1"
UP = r"node1 rank 0 \| up"
WORDS_S, CLEAN_S = 15, 20
JOB = ["--", "sh", "-c", SAVES]


@pytest.fixture(scope="module")
def two() -> Iterator[Site]:
    need_lab()
    with site(2, "base,docker,image,code,venv", venv_wanted=True, docker_users=["admin"]) as made:
        yield made


@pytest.fixture(autouse=True)
def _nothing_left_for_the_next(two: Site) -> Iterator[None]:
    yield
    two.clear()


def test_four_ranks_on_two_hosts_train_to_the_end_with_the_bits_of_the_local_agent(two: Site, tmp_path: Path) -> None:
    launch = done(two, "launch", "--config", "ddp", "--overrides", TRAINING, "--run-id", "here")
    assert launch.process.returncode == 0, launch.output
    assert launch.last_line == "muster: finished: step 8 (exit code 0: finished)"
    assert re.search(r"^node1 rank 0 \| step 1/8 ", launch.output, re.MULTILINE), "rank 0 is shown as it goes"
    parts = re.search(r"first training step ([\d.]+) s after Enter: connect ([\d.]+) s, .*", launch.output)
    assert parts is not None
    print(parts.group())
    run = two.results / "here"
    names = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    logs = {f"logs/node{rank // 2}-node{rank // 2 + 1}/rank{rank}.log" for rank in range(4)}
    assert {"verdict.json", "config.yaml", "metrics.jsonl", "plan.json", *logs, "logs/node1-node2/console"} <= names
    assert two.left() == {}
    if json.loads((run / "environment.json").read_text())["torch"] == torch.__version__:
        assert weights_digest(run) == weights_digest(alone(tmp_path, TRAINING.split()))


def test_in_containers(two: Site) -> None:
    overrides = f"{SMALL} --train.steps 3"
    launch = done(two, "launch", "--runtime", "docker", "--run-id", "boxed", "--overrides", overrides)
    assert launch.process.returncode == 0, launch.output
    assert launch.last_line == "muster: finished: step 3 (exit code 0: finished)"
    assert (two.results / "boxed" / "verdict.json").exists()
    assert two.left() == {}


def test_hosts_that_cannot_be_asked_are_all_named_and_nothing_is_started(two: Site, tmp_path: Path) -> None:
    known = (two.cluster.folder / "hosts" / "known_hosts").read_text().splitlines()
    address = two.cluster.address("node2")
    other = next(line.split()[2] for line in known if address not in line.split()[0].split(","))
    changed = [f"{address} ssh-ed25519 {other}" if address in line.split()[0] else line for line in known]
    with ssh_config(two, tmp_path, known_hosts="\n".join(changed) + "\n") as config:
        (reason,) = refused(fab(two, "launch", *JOB, config=config))
    assert reason.startswith("node2 cannot be reached: its host key is not the one that known_hosts has")
    forgotten = [line for line in known if address not in line.split()[0]]
    with ssh_config(two, tmp_path, known_hosts="\n".join(forgotten) + "\n") as config:
        (reason,) = refused(fab(two, "launch", *JOB, config=config))
    assert reason.startswith("node2 cannot be reached: its host key is not known: ssh-keyscan")
    with ssh_config(two, tmp_path, "HostName 127.0.0.1", "Port 9") as config:
        started = time.monotonic()
        (reason,) = refused(fab(two, "launch", *JOB, config=config))
        assert time.monotonic() - started < WORDS_S
    assert reason.startswith("node2 cannot be reached: ")
    with ssh_config(two, tmp_path, "User nobody") as config:
        (reason,) = refused(fab(two, "launch", *JOB, config=config))
    assert reason.startswith("node2 cannot be reached: it lets nobody in with the keys that were offered")
    assert two.left() == {}


def test_a_host_that_is_frozen_is_named_in_time(two: Site) -> None:
    two.cluster.pause("node2")
    try:
        started = time.monotonic()
        (reason,) = refused(fab(two, "launch", *JOB))
        print(f"node2 frozen: said after {time.monotonic() - started:.1f} s")
        assert time.monotonic() - started < WORDS_S
    finally:
        two.cluster.unpause("node2")
    assert re.match(r"node2 cannot be reached: .* takes connections, but has not talked SSH", reason)
    assert two.left() == {}


def test_a_host_without_python_and_one_with_a_full_disk(two: Site) -> None:
    two.cluster.on("node2", "sh", "-c", "mv $(readlink -f /usr/bin/python3) /root/python; rm -f /usr/bin/python3")
    try:
        (reason,) = refused(fab(two, "launch", *JOB))
    finally:
        two.cluster.on("node2", "sh", "-c", "mv /root/python /usr/bin/python3.11; ln -s python3.11 /usr/bin/python3")
    assert reason == "node2: there is no python3 on it (3.9 or later): apt-get install python3"
    folder = "/home/admin/muster"
    mount = f"mkdir -p {folder}; mount -t tmpfs -o size=64k,uid=$(id -u admin),gid=$(id -g admin) none {folder}"
    two.cluster.on("node2", "sh", "-c", mount)
    try:
        (reason,) = refused(fab(two, "launch", *JOB))
    finally:
        two.cluster.on("node2", "umount", folder)
    assert re.match(r"node2: the code could not be sent: .*No space left on device", reason)
    assert two.left() == {}


def test_a_host_that_is_slow_to_answer_still_works(two: Site, tmp_path: Path) -> None:
    """Five seconds until the first byte of its sshd."""
    relay = ["docker", "exec", two.cluster.container("node2"), "python3", "-c", RELAY]
    address = two.cluster.address("node2")
    known = (two.cluster.folder / "hosts" / "known_hosts").read_text()
    key = next(line.split(" ", 1)[1] for line in known.splitlines() if address in line.split()[0])
    with (
        subprocess.Popen(relay, stdout=subprocess.PIPE, text=True) as running,
        ssh_config(two, tmp_path, "Port 2222", known_hosts=f"{known}[{address}]:2222 {key}\n") as config,
    ):
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        try:
            launch = done(two, "launch", "--", "echo", "it works", config=config)
        finally:
            two.cluster.on("node2", "pkill", "-f", "^python3 -c .import socket")
    assert launch.process.returncode == 0, launch.output
    assert "node1 rank 0 | it works" in launch.output


def test_a_rank_is_killed(two: Site) -> None:
    launch = fab(two, "launch", "--run-id", "killed", *JOB)
    launch.wait_for(UP)
    two.cluster.on("node2", "pkill", "-9", "--newest", "-f", "^sh -c trap")
    took_s = two.wait_until_clean(10)
    assert launch.wait() == 5
    print(f"a rank killed: all clean after {took_s:.1f} s")
    assert re.fullmatch(r"muster: rank [23] \(node2.*\) was killed by signal 9 .*\(exit code 5: a rank failed\)",
                        launch.last_line), launch.output  # fmt: skip
    assert two.verdict("killed")["exit_code"] == 5


def test_sshd_is_killed_in_mid_run(two: Site) -> None:
    launch = fab(two, "launch", "--run-id", "deaf", *JOB)
    launch.wait_for(UP)
    two.cluster.on("node2", "sh", "-c", "systemctl stop ssh ssh.socket 2>/dev/null; pkill -9 sshd")
    event = time.monotonic()
    try:
        launch.wait_for("node2 does not answer", WORDS_S)
        print(f"sshd killed: said after {time.monotonic() - event:.1f} s")
        two.wait_until_clean(CLEAN_S)
        print(f"sshd killed: all clean after {time.monotonic() - event:.1f} s")
        assert launch.wait() == 75
    finally:
        two.cluster.on("node2", "systemctl", "start", "ssh")
    assert re.fullmatch(r"muster: stopped by the launcher, which cannot reach node2, saved: .*", launch.last_line)
    assert "muster: node2: not all could be brought: it cannot be reached" in launch.output


def test_a_host_is_cut_off(two: Site) -> None:
    launch = fab(two, "launch", "--run-id", "cut", *JOB)
    launch.wait_for(UP)
    event = time.monotonic()
    two.cluster.disconnect("node2")
    try:
        two.wait_until_clean(CLEAN_S)
        print(f"node2 cut off: all clean after {time.monotonic() - event:.1f} s")
        assert launch.wait() == 7
    finally:
        two.cluster.connect("node2")
    assert re.fullmatch(r"muster: host node2 \(node rank .* was lost: .* \(exit code 7: a host was lost\)",
                        launch.last_line), launch.output  # fmt: skip
    assert re.search(r"^  node2  cannot be reached: ", launch.output, re.MULTILINE)


@pytest.mark.parametrize(("number", "who"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGHUP, "SIGHUP at the launcher")])
def test_ctrl_c_or_a_closed_terminal_saves_and_stops_everywhere(two: Site, number: signal.Signals, who: str) -> None:
    launch = fab(two, "launch", "--run-id", f"stopped-{number.name}", *JOB)
    launch.wait_for(UP)
    event = time.monotonic()
    launch.send(number)
    two.wait_until_clean(10)
    print(f"{who}: all clean after {time.monotonic() - event:.1f} s")
    assert launch.wait() == 75
    verdict = two.verdict(f"stopped-{number.name}")
    assert verdict["exit_code"] == 75
    assert who in verdict["cause"]


@pytest.mark.parametrize("how", READERS)
def test_when_nobody_reads_any_more_it_saves_and_stops_everywhere(two: Site, how: str) -> None:
    words = [str(FAB), "launch", "--inventory", str(two.cluster.inventory), "--results", str(two.results)]
    words += ["--run-id", f"nobody-reads-{how.split()[1]}", "--", "sh", "-c", SAVES.replace("sleep", "echo; sleep")]
    done = subprocess.run([*READERS[how], *words], cwd=ANSIBLE, env=two.cluster.environment(), check=False, timeout=120)
    assert done.returncode == (75 if how == "a terminal" else 0)
    assert two.left() == {}
    assert "SIGHUP at the launcher" in two.verdict(words[7])["cause"]


def test_ctrl_c_while_hosts_are_looked_at_and_while_agents_are_started(two: Site, tmp_path: Path) -> None:
    launch = fab(two, "launch", *JOB)
    fabs = psutil.Process(launch.process.pid)
    until(
        lambda: any(each.raddr and each.raddr.port == 22 for each in fabs.net_connections()), 30, lambda: launch.output
    )
    launch.send(signal.SIGINT)
    assert launch.wait(30) in (8, 75)
    assert two.left() == {}
    launch = fab(two, "launch", *JOB)
    launch.wait_for("MASTER_PORT")
    launch.send(signal.SIGINT)
    assert launch.wait(30) in (8, 75)
    two.wait_until_clean(5)


CONTAINERS = "docker ps --all --quiet --filter label=muster.launch"


@pytest.mark.parametrize("seen", [CONTAINERS, "pgrep -f '^docker run'"], ids=["made", "asked for"])
def test_ctrl_c_while_containers_are_started(two: Site, seen: str) -> None:
    launch = fab(two, "launch", "--runtime", "docker", *JOB)
    launch.wait_for("MASTER_PORT")
    until(lambda: two.cluster.on("node1", "sh", "-c", f"{seen}; true"), 30, lambda: launch.output)
    event = time.monotonic()
    launch.send(signal.SIGINT)
    launch.wait_for("stopping the job", WORDS_S)
    assert launch.wait(30) in (8, 75), launch.output  # an engine that has begun to start one is waited for
    print(f"Ctrl-C while containers are started: left after {time.monotonic() - event:.1f} s")
    assert "by Ctrl-C" in launch.last_line
    assert two.left() == {}
    assert [two.cluster.on(host, "sh", "-c", CONTAINERS) for host in two.nodes] == ["", ""]
    again = done(two, "launch", "--runtime", "docker", "--", "true")
    assert again.process.returncode == 0, again.output


def test_ctrl_c_while_code_is_sent(two: Site, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(random.Random(0).randbytes(60 << 20))
    launch = fab(two, "launch", "--code", str(tmp_path), *JOB)
    folder = "/home/admin/muster/launches/code"
    half_made = f"ls -d {folder}/*.???????? 2>/dev/null; true"

    def is_clean(host: str) -> bool:
        return not two.cluster.on(host, "sh", "-c", half_made)

    until(lambda: two.cluster.on("node1", "sh", "-c", half_made), 60, lambda: launch.output)
    event = time.monotonic()
    launch.send(signal.SIGINT)
    assert launch.wait(WORDS_S) == 8, launch.output
    print(f"Ctrl-C while code is sent: left after {time.monotonic() - event:.1f} s")
    assert launch.last_line == "muster: left by Ctrl-C"
    for host in two.nodes:
        until(partial(is_clean, host), 15, lambda: "half made code is left")
    assert two.left() == {}
    (tmp_path / "large").unlink()
    again = done(two, "launch", "--code", str(tmp_path), "--", "true")
    assert again.process.returncode == 0, again.output


def test_ctrl_c_while_results_are_brought(two: Site) -> None:
    big = "truncate -s 4G /home/admin/muster/runs/large/big"
    launch = fab(two, "launch", "--run-id", "large", "--", "sh", "-c", f"[ $RANK != 0 ] || {big}")
    until(lambda: [*two.results.rglob(".big.*.part")], 60, lambda: launch.output)
    event = time.monotonic()
    launch.send(signal.SIGINT)
    assert launch.wait(WORDS_S) == 0, launch.output
    print(f"Ctrl-C while results are brought: left after {time.monotonic() - event:.1f} s")
    assert launch.last_line == "muster: finished (exit code 0: finished)"
    assert re.search(r"^muster: the rest is still there: fab collect --launch \S+$", launch.output, re.MULTILINE)
    assert [*two.results.rglob("*.part")] == []
    assert two.left() == {}
    two.cluster.on("node1", "truncate", "-s", "1M", "/home/admin/muster/runs/large/big")
    again = done(two, "collect", "--run-id", "large")
    assert again.process.returncode == 0, again.output
    assert (two.results / "large" / "big").stat().st_size == 1 << 20


def test_a_second_ctrl_c_ends_it_at_once(two: Site) -> None:
    launch = fab(two, "launch", "--", "sh", "-c", 'trap "" TERM INT; echo up; while :; do sleep 0.1; done')
    launch.wait_for(UP)
    launch.send(signal.SIGINT)
    launch.wait_for("stopping, asked by Ctrl-C")
    launch.send(signal.SIGINT)
    two.wait_until_clean(10)
    assert launch.wait() == 8
    assert launch.last_line == "muster: stopped at once by a second Ctrl-C (exit code 8: stopped, unsaved)"


def test_a_launcher_that_is_killed_takes_its_job_with_it(two: Site) -> None:
    launch = fab(two, "launch", *JOB)
    launch.wait_for(UP)
    event = time.monotonic()
    launch.send(signal.SIGKILL)
    two.wait_until_clean(15 + 10)
    took_s = time.monotonic() - event
    print(f"fab killed: all clean after {took_s:.1f} s")
    assert took_s > 8, "it was not the lease that ended it"


def test_a_launch_that_nobody_watches_is_seen_followed_collected_and_stopped(two: Site) -> None:
    launch = done(two, "launch", "--detach", "--run-id", "alone", *JOB)
    assert launch.process.returncode == 0, launch.output
    launch_id = re.findall(r"muster: launch (\S+) goes on by itself on node1, node2\.", launch.last_line)[0]
    follower = fab(two, "logs", "--follow")
    follower.wait_for(UP)
    table = done(two, "status").output
    assert len(re.findall(rf"^node[12]  {launch_id}  .* 2 of 4 .* up$", table, re.MULTILINE)) == 2, table
    assert "up" in done(two, "logs", "--rank", "3").output
    again = fab(two, "launch", *JOB)
    assert all(f"it is in use by launch {launch_id}" in reason for reason in refused(again))
    stopped = done(two, "stop", "--run-id", "alone")
    assert stopped.process.returncode == 0, stopped.output
    assert re.fullmatch(rf"muster: launch {launch_id}: stopped by fab stop, .* \(exit code 75: .*\)", stopped.last_line)
    assert follower.wait() == 75
    assert two.left() == {}
    brought = done(two, "collect", "--launch", launch_id)
    assert brought.process.returncode == 0, brought.output
    assert two.verdict("alone")["exit_code"] == 75
    assert (two.results / "alone/logs/node1-node2/rank3.log").exists()


AGENT, RANK = "^/opt/muster/venv/bin/python.* -m train node", "^/opt/muster/venv/bin/python.* -m train run"
FAULTS: dict[str, str | signal.Signals] = {
    "kill -9 of a rank": RANK, "kill -9 of an agent": AGENT, "kill -9 of all on a host": f"{AGENT}|{RANK}",
    "Ctrl-C": signal.SIGINT, "SIGTERM": signal.SIGTERM, "kill -9 of fab": signal.SIGKILL,
}  # fmt: skip


ANSWERS: dict[str, tuple[int, ...]] = {
    "kill -9 of a rank": (5,), "kill -9 of an agent": (4, 7), "kill -9 of all on a host": (4, 7),
    "Ctrl-C": (75, 8), "SIGTERM": (75, 8), "kill -9 of fab": (-9,),
}  # fmt: skip
"""With which exit code `fab` may end that a fault has hit; 4: the agent had not joined yet."""


def test_a_drill_of_random_faults_ends_with_the_bits_of_an_untouched_run(two: Site, tmp_path: Path) -> None:
    """At random times, also while it starts; each time the same command goes on.

    A fault that comes when a run is through has hit nothing: the next run gets it.
    """
    words = f"{SMALL} --train.steps 6000 --train.save_every 300 --train.log_every 100 --train.log_samples true"
    untouched = alone(tmp_path, words.split())
    dice, runs = random.Random(11), ["drill-1"]
    dealt: list[str] = []

    def start() -> Launch:
        return fab(two, "launch", "--run-id", runs[-1], "--config", "ddp", "--overrides", words)

    faults = dice.sample(list(FAULTS), len(FAULTS))
    while faults:
        launch = start()
        launch.wait_for("MASTER_PORT")
        time.sleep(dice.uniform(0, 12))
        step = (re.findall(r"step (\d+)/", launch.output) or ["none"])[-1]
        how = FAULTS[faults[0]]
        if isinstance(how, signal.Signals):
            launch.send(how)
        else:
            flags = "" if faults[0].endswith("host") else "--newest"
            kill = f'for _ in $(seq 300); do pkill --signal KILL {flags} --full "$1" && exit; sleep 0.1; done'
            two.cluster.on(dice.choice(two.nodes), "sh", "-c", kill, "kill", how, check=False)
        code = launch.wait(60)
        two.wait_until_clean(40)
        if code == 0:
            assert len(runs) < 4, dealt
            runs.append(f"drill-{len(runs) + 1}")
            continue
        dealt.append(f"{faults[0]} at step {step}: {code}")
        print(dealt[-1])
        assert code in ANSWERS[faults.pop(0)], f"{dealt}\n{launch.output}"
    launch = start()
    assert launch.wait() == 0, f"{dealt}\n{launch.output}"
    assert "going on from step" in launch.output
    assert len(dealt) == len(FAULTS)
    for run in runs:
        same.compare(untouched, two.results / run, 4)


def test_words_with_quotes_and_dollars_are_words(two: Site, tmp_path: Path) -> None:
    words = [
        "it's",
        'a "b"',
        "$(touch /tmp/injected)",
        "; touch /tmp/injected",
        "`touch /tmp/injected`",
        "",
        "-x",
        "ä\nö",
    ]
    script = 'printf "<%s>" "$@"; echo; printf "{%s}\\n" "$ODD"'
    code = tmp_path / "my 'code'; touch x"
    code.mkdir()
    (code / "here").touch()
    env = "ODD='$(touch /tmp/injected) \"q\"'"
    launch = done(two, "launch", "--env", env, "--code", str(code), "--", "sh", "-c", f"ls; {script}", "sh", *words)
    assert launch.process.returncode == 0, launch.output
    said = "\n".join(line.partition("node1 rank 0 | ")[2] for line in launch.output.splitlines() if "rank 0 |" in line)
    assert "".join(f"<{word}>" for word in words) in said
    assert '{$(touch /tmp/injected) "q"}' in said
    assert "here" in said.splitlines()
    for host in two.nodes:
        assert two.cluster.on(host, "sh", "-c", "ls /tmp/injected 2>/dev/null; true") == ""
    assert not os.path.lexists("/tmp/injected")
