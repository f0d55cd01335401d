"""Any script: it finds what torchrun would have given it, runs unchanged on hosts, and its crash is told right."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.hosts import Lab
from tests.lab.faults import DDP, NOW, PLAIN, Table, ended, event_in, needs_hosts
from tests.ranks import clean_environment, run_together

pytestmark = pytest.mark.slow

SHOWS = "import json, os; print(json.dumps(dict(os.environ)), flush=True)"
OURS = {"MUSTER_RUNS_DIR", "MUSTER_RUN_ID", "MUSTER_START_ID", "MUSTER_STATUS_PAGE", "PYTHONFAULTHANDLER"}
LEFT_OUT = {
    "TORCHELASTIC_USE_AGENT_STORE",  # makes ranks wait for a store that is not there
    "TORCHELASTIC_SIGNALS_TO_HANDLE",  # torchrun's word to itself
}
OF_EACH_START = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}


def environments(output: str) -> dict[str, dict[str, str]]:
    """By rank."""
    found = [json.loads(line[line.index("{") :]) for line in output.splitlines() if '"RANK"' in line]
    return {environment["RANK"]: environment for environment in found}


def test_a_rank_has_the_environment_that_torchrun_gives_it(tmp_path: Path) -> None:
    (tmp_path / "shows.py").write_text(SHOWS)
    env = clean_environment(PYTHONUNBUFFERED="", MY_OWN="kept", MUSTER_SECRET_FILE="/nowhere")
    del env["OMP_NUM_THREADS"]
    few = ["--standalone", "--nproc-per-node", "2"]
    theirs, ours = run_together(
        [
            [str(Path(sys.executable).parent / "torchrun"), *few, "shows.py"],
            [sys.executable, "-m", "train", "node", *few, "--", "shows.py"],
        ],
        [{**env, "OMP_NUM_THREADS": "3"}, {**env, "OMP_NUM_THREADS": "3"}],
        cwd=tmp_path,
    )
    assert (theirs.returncode, ours.returncode) == (0, 0), theirs.stdout + ours.stdout
    under_torchrun, under_muster = environments(theirs.stdout), environments(ours.stdout)
    assert set(under_torchrun) == set(under_muster) == {"0", "1"}
    for rank, expected in under_torchrun.items():
        found = under_muster[rank]
        assert set(found) - set(expected) == OURS
        assert set(expected) - set(found) == LEFT_OUT | {"MUSTER_SECRET_FILE"}
        same = set(expected) & set(found) - OF_EACH_START
        assert {name: found[name] for name in same} == {name: expected[name] for name in same}
        assert found["MY_OWN"] == "kept"
        assert found["OMP_NUM_THREADS"] == "3"  # the user's own word counts
        assert 1024 <= int(found["MASTER_PORT"]) < 65536


def test_threads_are_shared_out_where_nobody_said_how_many(tmp_path: Path) -> None:
    (tmp_path / "shows.py").write_text(SHOWS)
    env = clean_environment()
    del env["OMP_NUM_THREADS"]
    (ours,) = run_together(
        [[sys.executable, "-m", "train", "node", "--standalone", "--", "shows.py"]], [env], cwd=tmp_path
    )
    assert environments(ours.stdout)["0"]["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0)))


@needs_hosts
def test_a_plain_ddp_script_runs_on_two_hosts(two: Lab) -> None:
    job = two.launch([DDP, "4", "7"])
    assert job.codes(timeout_s=240) == [0, 0], job.report()
    assert job.agents[0].last_line == job.agents[1].last_line == "muster: finished"
    ends = [line.split("ends with ")[1] for line in job.report().splitlines() if "ends with" in line]
    assert sorted(end.split(" on ")[1] for end in ends) == ["node0", "node1"]
    assert len({end.split(" on ")[0] for end in ends}) == 1  # DDP kept the replicas equal
    assert job.verdict() == job.verdict(1) == {**job.verdict(), "outcome": "finished", "exit_code": 0, "cause": None}
    assert not job.left_behind()
    for rank in (0, 1):
        log = job.run_folder(rank) / "logs" / f"node{rank}-node{rank}" / f"rank{rank}.log"
        assert f"on node{rank}" in log.read_text()


@needs_hosts
def test_two_hosts_meet_by_ipv6(two: Lab) -> None:
    """The agents, rank 0's store and Gloo, first beside IPv4, then with no other address."""
    for without in ("true", "ip -4 address flush dev eth0"):
        for host in two.hosts:
            host.run(without)
        job = two.launch([PLAIN, "3", "7"], master=two.hosts[0].address6)
        assert job.codes(timeout_s=120) == [0, 0], job.report()
        ends = [line.split("ends with ")[1].split(" on ") for line in job.report().splitlines() if "ends with" in line]
        assert sorted(end[1] for end in ends) == ["node0", "node1"]
        assert ends[0][0] == ends[1][0]
        assert json.loads((job.run_folder() / "plan.json").read_text())["master_addr"] == "fd77::1"


@needs_hosts
def test_the_crash_of_a_plain_ddp_script_is_told_right(two: Lab, table: Table) -> None:
    job = two.launch([DDP, "1000000", "7", "1", NOW + "model.module.weight.view(3, 3)"])
    event_in(job, 1, timeout_s=240)
    verdict = ended(job, table, "DDP script raises", 5, [5, 5], host="node1", node_rank=1, rank=1, outcome="failed")
    said = "RuntimeError: shape '[3, 3]' is invalid for input of size 8 (plain_ddp.py:23)"
    assert verdict["cause"] == f"rank 1 (node1) failed: {said}"
    assert any("Traceback (most recent call last)" in line for line in verdict["evidence"])
    assert "Connection closed by peer" not in "".join(verdict["evidence"])  # what its victim said
