"""The batch scripts on a real Slurm: to the end, around every signal and fault; nothing left, no node drained."""

from __future__ import annotations

import json
import random
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.container.conftest import IMAGE
from tests.lab.cluster import need_lab
from tests.lab.slurm_faults import FAULTS, RESTARTED, deal
from tests.lab.slurms import NODES, SETTINGS, Slurm, fetch, site
from train.checks.same import compare

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TRAINING = [
    "--model.name", "linear", "--data.name", "regression", "--train.eval_every", "0", "--train.tensorboard", "false",
    "--train.log_every", "1", "--train.save_every", "50", "--train.steps", "300",
]  # fmt: skip
CPUS = ["--gpus-per-node=0", "--nodes=1"]
SAVES = 'trap "echo saved; exit 0" TERM; echo up $SLURM_RESTART_COUNT; while :; do sleep 0.1; done'
"""A rank that stops in good order, and is up in no time."""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    need_lab()
    with site() as made:
        yield made


@pytest.fixture(autouse=True)
def _nothing_is_left(slurm: Slurm) -> Iterator[None]:
    """After each test: no process on any node, no node drained, no job."""
    yield
    deadline = time.monotonic() + 90
    while found := slurm.left():
        if time.monotonic() > deadline:
            slurm.cluster.on("head", "scancel", "--user=muster")
            pytest.fail(found)
        time.sleep(0.5)


def alone(slurm: Slurm, name: str, words: list[str]) -> str:
    """Hash of the weights of the same four ranks on one host, by the agent alone, never interrupted."""
    run = f"cd /opt/muster && rm -rf /tmp/{name} && venv/bin/python -m train node --standalone --nproc-per-node 4"
    command = f"{run} --runs-dir /tmp --run-id {name} -- run --config ddp {' '.join(words)}"
    done = subprocess.run(
        ["docker", "exec", "--user", "muster", slurm.cluster.container("node1"), "sh", "-c", command],
        capture_output=True, text=True, check=False, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return slurm.weights_in(f"/tmp/{name}")


@pytest.fixture(scope="module")
def same(slurm: Slurm) -> str:
    """Hash of the weights that all of these jobs must end with."""
    return alone(slurm, "same", TRAINING)


def test_ddp_as_it_stands_trains_to_the_end_with_the_bits_of_other_launchers(slurm: Slurm, same: str) -> None:
    job = slurm.submit("ddp", *TRAINING)
    assert slurm.end(job) == "COMPLETED"
    log = slurm.log(job)
    assert log.splitlines()[0].startswith(
        f"muster: job {job} (muster-ddp) on node[1-2], restart 0 · log /home/muster/muster-ddp-"
    )
    assert f"run folder /var/lib/muster/runs/slurm-{job} " in log.splitlines()[0]
    assert "4 ranks on 2 hosts (2 on each), 2 cores a host, on CPUs; venv " in log
    assert "on each host's own disk: the one of node1, rank 0's, counts" in log
    assert log.splitlines()[-1] == "muster: exit code 0"
    assert slurm.weights(job) == same
    slurm.until(job, lambda: slurm.accounted(job) == "COMPLETED", 30)


def test_ddp_in_containers_has_the_same_bits(slurm: Slurm, same: str) -> None:
    job = slurm.submit("ddp", *TRAINING, MUSTER_RUNTIME="docker", MUSTER_IMAGE=IMAGE)
    assert slurm.end(job) == "COMPLETED"
    assert f"on CPUs; docker {IMAGE}; ranks meet" in slurm.log(job)
    assert slurm.weights(job) == same
    for node in NODES:
        assert slurm.cluster.on(node, "docker", "ps", "--all", "--quiet") == ""


def test_a_job_that_takes_longer_than_its_limit_goes_on_after_it(slurm: Slurm, same: str) -> None:
    """A minute, of which Slurm's signal leaves between ten seconds and fifty."""
    log = slurm.sh("node1", "cat", "/tmp/same/logs/node0-gpu-a.lab.test/rank0.log")
    (took_s,) = map(float, re.findall(r"training took +│ ([\d.]+) s", log))
    words = [*TRAINING[:-3], "1000", "--train.steps", str(round(300 / took_s * 50)), "--train.log_every", "100"]
    job = slurm.submit("ddp", *words, options=["--time=1", "--signal=B:USR2@20"], MUSTER_GRACE_S="10")
    assert slurm.end(job, 480) == "COMPLETED", slurm.log(job)
    assert int(slurm.facts(job)["Restarts"]) >= 1
    assert "the time is nearly up, and all is saved: back into the queue" in slurm.log(job)
    assert slurm.weights(job) == alone(slurm, "longer", words)


@pytest.mark.timeout(1500)
def test_a_drill_of_random_faults_ends_with_the_bits_of_an_untouched_run(slurm: Slurm, tmp_path: Path) -> None:
    """All of them, three while it starts; where Slurm does not start a job again, a new one goes on with its run."""
    steps = 8000
    words = [
        *TRAINING[:-3],
        "300",
        "--train.steps",
        str(steps),
        "--train.log_every",
        "100",
        "--train.log_samples",
        "true",
    ]
    alone(slurm, "untouched", words)
    dice, dealt = random.Random(8), []
    order = dice.sample(list(FAULTS), len(FAULTS))
    early = dice.sample(range(1, len(order)), 3)

    def submit() -> str:
        return slurm.submit("ddp", *words, MUSTER_RUN_ID="drill")

    def step() -> int:
        return max(map(int, re.findall(r"step (\d+)/", slurm.log(job))), default=0)

    # On the same two nodes: each has the samples' log of its own ranks.
    slurm.cluster.on("head", "scontrol", "update", "NodeName=node3", "State=DRAIN", "Reason=drill")
    try:
        job = submit()
        for number, fault in enumerate(order):
            slurm.until(job, lambda: slurm.facts(job)["JobState"] == "RUNNING")  # noqa: B023 - called at once
            at_step = steps * 0.8 * (number + dice.random()) / len(order)
            if number in early:
                time.sleep(dice.uniform(0, 4))
            else:
                slurm.until(job, lambda: step() >= at_step)  # noqa: B023 - called at once
            dealt.append(f"{fault} at step {step()}: {deal(slurm, job, fault, dice)}")
            print(dealt[-1])
            job = job if dealt[-1].endswith(RESTARTED) else submit()
        assert slurm.end(job, 400) == "COMPLETED", f"{dealt}\n{slurm.log(job)}"
    finally:
        slurm.cluster.on("head", "scontrol", "update", "NodeName=node3", "State=RESUME")
    assert len(dealt) == len(FAULTS)
    compare(
        fetch(slurm, "/tmp/untouched", tmp_path / "untouched"),
        fetch(slurm, "/var/lib/muster/runs/drill", tmp_path / "drill"), 4,
    )  # fmt: skip


def test_preempted_it_saves_and_slurm_starts_it_again_and_scancel_is_the_end(slurm: Slurm) -> None:
    job = slurm.submit("script", "sh", "-c", SAVES)
    slurm.said(job, r"\| up", times=4)
    other = slurm.sh(
        "head", "sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--gpus-per-node=2", "--output=/dev/null",
        "--wrap=sleep 1",
    )  # fmt: skip
    slurm.said(job, r"\| up 1", times=4)
    assert slurm.facts(other)["JobState"] == "COMPLETED"
    assert "cancelled or preempted, all is saved" in slurm.log(job)
    slurm.sh("head", "scancel", job)
    assert slurm.end(job) == "CANCELLED"
    assert len(re.findall(r"\| saved", slurm.log(job))) == 8
    assert slurm.facts(job)["Restarts"] == "1"


def test_asked_by_usr1_it_saves_and_is_not_started_again(slurm: Slurm) -> None:
    job = slurm.submit("script", "sh", "-c", SAVES)
    slurm.said(job, r"\| up", times=4)
    slurm.sh("head", "scancel", "--batch", "--signal=USR1", job)
    assert slurm.end(job) == "FAILED"
    assert slurm.facts(job)["ExitCode"] == "75:0"
    assert slurm.facts(job)["Restarts"] == "0"


def test_a_dead_rank_ends_the_job_with_its_verdict_and_without_a_loop(slurm: Slurm) -> None:
    job = slurm.submit("script", "sh", "-c", SAVES)
    slurm.said(job, r"\| up", times=4)
    slurm.cluster.on("node2", "sh", "-c", "kill -9 $(pgrep -f '^sh -c trap' | head -n 1)")
    assert slurm.end(job, 60) == "FAILED"
    assert slurm.facts(job)["ExitCode"] == "5:0"
    assert slurm.facts(job)["Restarts"] == "0"
    assert re.search(r"rank [23] \(node2, .*was killed by signal 9", slurm.log(job))


def test_a_lost_agent_sends_the_job_elsewhere_as_often_as_was_said(slurm: Slurm) -> None:
    job = slurm.submit(
        "script", "sh", "-c", SAVES, options=[*CPUS, "--nodes=2", "--nodelist=node1"], MUSTER_MAX_RESTARTS="1"
    )
    for restart, lost in enumerate(("node2", "node3")):
        slurm.said(job, rf"restart {restart}[\s\S]*\| up[\s\S]*\| up")
        assert slurm.facts(job)["NodeList"].endswith(("2]", "3]") if restart == 0 else ",3]")
        slurm.cluster.on(lost, "sh", "-c", "kill -9 $(pgrep -f '^/opt/muster/venv/bin/python -m train node')")
    assert slurm.end(job, 90) == "FAILED"
    assert slurm.facts(job)["ExitCode"] == "7:0"
    assert slurm.facts(job)["ExcNodeList"] == "node2"
    assert "started again 1 times already (MUSTER_MAX_RESTARTS=1)" in slurm.log(job)


def test_an_agent_that_is_killed_again_without_a_newer_checkpoint_is_the_end(slurm: Slurm) -> None:
    job = slurm.submit("script", "sh", "-c", SAVES, options=[*CPUS, "--nodelist=node1"])
    for restart in ("0", "1"):
        slurm.said(job, rf"restart {restart}[\s\S]*: up")
        slurm.cluster.on("node1", "sh", "-c", "kill -9 $(pgrep -f '^/[^ ]*/bin/python -m train node')")
    assert slurm.end(job, 90) == "FAILED"
    assert slurm.facts(job)["ExitCode"] == "7:0"
    assert slurm.facts(job)["Restarts"] == "1"
    assert "as the last time, and no newer checkpoint since: not started again" in slurm.log(job)


def test_an_element_of_an_array_is_started_again_and_the_others_are_left_alone(slurm: Slurm) -> None:
    """The last one has the array's own number."""
    options = [*CPUS, "--nodelist=node3", "--ntasks-per-node=2", "--cpus-per-task=1", "--array=1-3"]
    array = slurm.submit("script", "sh", "-c", SAVES, options=options)
    elements = [f"{array}_{task}" for task in (1, 2, 3)]
    for element in elements:
        slurm.until(element, lambda: slurm.facts(element)["JobState"] == "RUNNING")  # noqa: B023 - called at once
    numbers = [slurm.facts(element)["JobId"] for element in elements]
    assert numbers[2] == array
    for number in numbers:
        slurm.said(number, r"\| up", times=2)
    for element in elements[1:]:
        slurm.sh("head", "scancel", "--batch", "--signal=USR2", element)
    for number in numbers[1:]:
        slurm.said(number, r"\| up 1", times=2)
    found = [slurm.facts(element) for element in elements]
    assert [facts["Restarts"] for facts in found] == ["0", "1", "1"]
    assert [facts["JobState"] for facts in found] == ["RUNNING"] * 3
    assert "saved" not in slurm.log(numbers[0])
    slurm.sh("head", "scancel", array)
    for element in elements:
        assert slurm.end(element) == "CANCELLED"


def test_a_log_folder_that_is_not_there_is_the_end_at_once_and_nothing_has_run(slurm: Slurm) -> None:
    """Slurm itself fails, and has no place to say so: that it is seen by its state and code is all that can be had."""
    job = slurm.submit("ddp", *TRAINING, options=["--output=nowhere/%j.out"])
    assert slurm.end(job, 60) == "FAILED"
    facts = slurm.facts(job)
    assert (facts["ExitCode"], facts["Restarts"]) == ("0:53", "0")
    slurm.until(job, lambda: slurm.accounted(job) == "FAILED", 30)
    for node in NODES:
        assert "No such file" in slurm.cluster.on(node, "ls", f"/var/lib/muster/runs/slurm-{job}", check=False)


def test_an_array_and_two_jobs_on_one_node_do_not_meet(slurm: Slurm) -> None:
    show = 'echo "port $MASTER_PORT of $WORLD_SIZE, cores $SLURM_CPUS_PER_TASK"; sleep 1'
    options = [*CPUS, "--nodelist=node3", "--ntasks-per-node=2", "--cpus-per-task=1"]
    array = slurm.submit("script", "sh", "-c", show, options=[*options, "--array=1-3"])
    others = [slurm.submit("script", "sh", "-c", show, options=options) for _ in range(2)]
    for job in (*(f"{array}_{task}" for task in (1, 2, 3)), *others):
        assert slurm.end(job) == "COMPLETED"
    numbers = [slurm.facts(f"{array}_{task}")["JobId"] for task in (1, 2, 3)] + others
    logs = [slurm.log(number) for number in numbers]
    assert all(len(re.findall(r"port \d+ of 2, cores 2$", log, re.MULTILINE)) == 2 for log in logs)  # F11, F12
    assert len({re.findall(r"port (\d+) of 2", log)[0] for log in logs}) == 5
    assert [re.findall(r"runs/(\S+) ", log)[0] for log in logs[:3]] == [f"slurm-{array}_{task}" for task in (1, 2, 3)]


def test_nodes_with_different_numbers_of_tasks_have_as_many_ranks(slurm: Slurm) -> None:
    """F12: `SLURM_TASKS_PER_NODE` is "2,1" then."""
    show = 'echo "rank $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE on $SLURMD_NODENAME"'
    options = ["--gpus-per-node=0", "--nodes=2", "--ntasks=3", "--ntasks-per-node=2", "--cpus-per-task=1"]
    job = slurm.submit("script", "sh", "-c", show, options=[*options, "--nodelist=node[1-2]"])
    assert slurm.end(job) == "COMPLETED"
    assert sorted(re.findall(r"\| (rank \d of .*)", slurm.log(job))) == [
        "rank 0 of 3, 0 of 2 on node1", "rank 1 of 3, 1 of 2 on node1", "rank 2 of 3, 0 of 1 on node2",
    ]  # fmt: skip


def test_names_arguments_and_folders_with_spaces_and_quotes(slurm: Slurm) -> None:
    words = ["it's", 'a "b"', "$(touch /tmp/x)", "", "c  d"]
    job = slurm.submit(
        "script", "sh", "-c", 'pwd; printf "<%s>" "$@"; echo', "sh", *words, cwd="/srv/a b",
        options=[*CPUS, "--nodelist=node3", "--job-name=it's \"mine\""],
    )  # fmt: skip
    assert slurm.end(job) == "COMPLETED"
    log = slurm.log(job)
    assert "0: /srv/a b\n" in log
    assert "".join(f"<{word}>" for word in words) in log
    assert f'log /srv/a b/it\'s "mine"-{job}.out' in log.splitlines()[0]


def test_what_cannot_be_is_said(slurm: Slurm) -> None:
    refused = slurm.cluster.on("head", "sbatch", "-N9", "/opt/muster/slurm/ddp.sbatch", check=False)
    assert "Node count specification invalid" in refused
    job = slurm.submit("ddp", "--optim.lrr", "1", options=CPUS)
    assert slurm.end(job) == "FAILED"
    assert slurm.facts(job)["ExitCode"] == "2:0"
    assert "optim.lrr" in slurm.log(job)
    job = slurm.submit("ddp", options=CPUS, MUSTER_RUNTIME="rkt")
    assert slurm.end(job) == "FAILED"
    assert "MUSTER_RUNTIME='rkt' must be one of pyxis, apptainer, docker, podman, venv" in slurm.log(job)


def test_preflight_passes_and_names_a_host_that_is_not_fit(slurm: Slurm) -> None:
    job = slurm.submit("preflight")
    assert slurm.end(job) == "COMPLETED", slurm.log(job)
    assert re.search(r"node2: \d+ cores, 2 GPUs, clock [+-]0\.\d s", slurm.log(job))
    assert "muster: 2 hosts are fit, each and together" in slurm.log(job)
    assert re.search(r"ok +munge +each host's credentials are good on another", slurm.log(job))
    assert "sums are right" in slurm.log(job)
    slurm.cluster.on("node2", "sh", "-c", "chmod 700 /var/lib/muster/runs; chown root /var/lib/muster/runs")
    try:
        job = slurm.submit("preflight")
        assert slurm.end(job) == "FAILED"
        assert slurm.facts(job)["ExitCode"] == "3:0"
        assert "node2: the run folder: " in slurm.log(job)
    finally:
        slurm.cluster.on("node2", "sh", "-c", "chmod 755 /var/lib/muster/runs; chown muster /var/lib/muster/runs")


def test_preflight_names_a_host_with_another_munge_key_or_clock(slurm: Slurm) -> None:
    """F21. (The clock is that of the check's Python alone: all hosts of a lab have the machine's.)"""
    skew = "import time; real = time.time; time.time = lambda: real() + 90"
    python = '#!/bin/sh\nPYTHONPATH=/srv/skew:$PYTHONPATH exec python3 "$@"\n'
    for node in NODES:
        words = skew if node == "node2" else ""
        write = (
            'mkdir -p /srv/skew; echo "$1" >/srv/skew/sitecustomize.py; echo "$2" >/srv/python; chmod 755 /srv/python'
        )
        slurm.cluster.on(node, "sh", "-c", write, "sh", words, python)
    job = slurm.submit("preflight", MUSTER_PYTHON="/srv/python")
    assert slurm.end(job) == "FAILED"
    assert "node2: its clock is 90 s ahead: run chrony" in slurm.log(job)

    renew = (
        "cp -a /etc/munge/munge.key /root/; head -c 1024 /dev/urandom >/etc/munge/munge.key; systemctl restart munge"
    )
    slurm.cluster.on("node2", "sh", "-c", renew)
    try:
        job = slurm.submit("preflight")
        assert slurm.end(job) == "FAILED"
        assert slurm.facts(job)["ExitCode"] == "3:0"
        _, not_fit = slurm.log(job).split("not fit:")
        assert re.search(r"node2: Slurm could not start the check there.* munge's key", not_fit)
        assert "node1" not in not_fit
    finally:
        slurm.cluster.on("node2", "sh", "-c", "mv /root/munge.key /etc/munge/; systemctl restart munge slurmd")


def test_a_dead_node_sends_the_job_elsewhere_and_it_goes_on(slurm: Slurm) -> None:
    """The last one: a host starts again."""
    job = slurm.submit(
        "ddp", *TRAINING[:-1], "1000000", options=[*CPUS, "--nodes=2", "--nodelist=node1", "--exclude=node2"]
    )
    slurm.said(job, r"step \d{3,}/1000000")
    doomed = slurm.sh(
        "head", "sbatch", "--parsable", "--no-requeue", "--nodelist=node3", "--output=/dev/null",
        "--wrap=srun sleep 600",
    )  # fmt: skip
    slurm.until(doomed, lambda: slurm.facts(doomed)["JobState"] == "RUNNING")
    slurm.cluster.kill("node3")
    try:
        slurm.until(doomed, lambda: slurm.facts(doomed)["JobState"] == "NODE_FAIL", 90)
        slurm.until(doomed, lambda: slurm.accounted(doomed) == "NODE_FAIL", 30)
        ask = "from train.launch import slurm_after; print(slurm_after.known_to_accounting('{}'))"
        known = slurm.sh("node1", "python3", "-c", ask.format(doomed), cwd="/opt/muster")
        assert f"NODE_FAIL of {doomed} on node3" in known
        slurm.until(job, lambda: slurm.facts(job)["JobState"] == "PENDING", 90)
        slurm.sh("head", "scontrol", "update", f"JobId={job}", "ExcNodeList=")
        slurm.said(job, "going on from step", 120)
        assert slurm.facts(job)["NodeList"] == "node[1-2]"
        slurm.sh("head", "scancel", job)
        assert slurm.end(job) == "CANCELLED"
        slurm.until(job, lambda: not slurm.facts(job)["JobState"].startswith("COMPL"))
    finally:
        slurm.cluster.start("node3")


def test_a_step_gets_the_cores_that_the_job_has_where_slurm_binds_tasks_to_them(slurm: Slurm) -> None:
    """F11, with the cores that there really are: after all others, for the cluster is another one then."""
    settings = {**SETTINGS, "SlurmdParameters": "", "TaskPlugin": "task/affinity"}
    given = json.dumps({"slurm_settings": settings, "slurm_node_settings": {}})
    slurm.cluster.playbook("provision.yml", "--tags", "slurm", "-e", given, timeout_s=300)
    for cores in (1, 2):
        options = [*CPUS, "--nodelist=node3", f"--cpus-per-task={cores}"]
        job = slurm.submit(
            "script", "sh", "-c", "echo cores $(env -u OMP_NUM_THREADS nproc)", options=options, MUSTER_NPROC="2"
        )
        assert slurm.end(job) == "COMPLETED", slurm.log(job)
        assert len(re.findall(rf"cores {cores}$", slurm.log(job), re.MULTILINE)) == 2
