"""What a preflight makes of reports: who is to blame, worked out by hand; GPUs' tables, the quarantine, words."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import ROOT
from train.errors import UsageError
from train.launch.preflight import gpus, quarantine
from train.launch.preflight.asked import Asked
from train.launch.preflight.between import between
from train.launch.preflight.calls import MOST_CALLED, partners, rated
from train.launch.preflight.conclusion import MARK, as_lines, conclude, reports_in
from train.launch.preflight.findings import ERROR, OK, UNKNOWN, WARNING, Finding, exit_code, table
from train.launch.preflight.judge import judge
from train.launch.topology import Host, Plan, make_plan

Report = dict[str, Any]


def plan_of(count: int) -> Plan:
    return make_plan([Host(f"n{i}", f"10.0.0.{i + 1}", 2) for i in range(count)])


def reports_of(count: int, mb_per_s: float = 1000.0) -> list[Report]:
    """Of hosts that are well."""
    facts = {
        "hostname": "", "identity": "", "user": "1000:1000", "cores": 8, "shm_mb": 8192, "memlock_mb": None,
        "nofile": 65536, "versions": {"python": "3.11.7", "muster": "0.1.0-abc", "torch": "2.13.0"},
        "runs": {"error": None, "free_mb": 50_000}, "gpu_files": 0,
    }  # fmt: skip
    reports = []
    for rank in range(count):
        calls = [
            {"node_rank": other, "reached": True, "why": "", "port": 29500, "answered_by": other, "called_us": True,
             "identity": f"id{other}", "round_trip_ms": 0.2, "ahead_s": 0.0, "credential": None,
             "mb_per_s": mb_per_s if other in rated(rank, count) else None}
            for other in partners(rank, count)
        ]  # fmt: skip
        mine = {
            **copy.deepcopy(facts), "identity": f"id{rank}",
            "names": {f"10.0.0.{i + 1}": [f"10.0.0.{i + 1}"] for i in range(count)},
            "links": {f"10.0.0.{i + 1}": {"interface": "eth0", "mtu": 1500, "mbit_per_s": 10000}
                      for i in range(count) if i != rank},
        }  # fmt: skip
        reports.append(
            {"node_rank": rank, "name": f"n{rank}", "facts": mine, "ports": [29500, 40000], "taken": [], "calls": calls,
             "seen": [rank], "reduction": {"wrong": 0, "mb_per_s": 500.0, "torch": "2.13.0", "cuda": "None"},
             "munge": False, "took_s": 2.0, "asked": Asked().as_dict()}
        )  # fmt: skip
    return reports


def call(reports: list[Report], caller: int, called: int) -> Report:
    return next(one for one in reports[caller]["calls"] if one["node_rank"] == called)


def bad(reports: list[Report], asked: Asked = Asked(), silent: dict[str, str] | None = None) -> list[Finding]:  # noqa: B008
    found = judge(plan_of(len(reports)), reports, asked, silent or {})
    return [finding for finding in found if finding.level != OK]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 100])
def test_hosts_that_are_well_give_no_finding(count: int) -> None:
    assert bad(reports_of(count)) == []


@pytest.mark.parametrize("wrong", range(4))
@pytest.mark.parametrize("ahead_s", [3.0, -3.0])
def test_the_one_clock_that_is_wrong_is_named(wrong: int, ahead_s: float) -> None:
    reports = reports_of(4)
    for other in range(4):
        if other != wrong:
            call(reports, other, wrong)["ahead_s"] = ahead_s
            call(reports, wrong, other)["ahead_s"] = -ahead_s
    (found,) = bad(reports)
    assert (found.check, found.level, found.hosts) == ("clocks", ERROR, (f"n{wrong}",))
    assert found.seen == f"3.0 s {'ahead of' if ahead_s > 0 else 'behind'} the others"


def test_of_two_clocks_nobody_can_tell_which_is_wrong() -> None:
    reports = reports_of(2)
    call(reports, 0, 1)["ahead_s"], call(reports, 1, 0)["ahead_s"] = -1.6, 1.4
    (found,) = bad(reports)
    assert (found.hosts, found.seen) == (("n0", "n1"), "n0 is 1.5 s ahead of n1")
    assert bad(reports, Asked(max_skew_s=1.6)) == []


def test_a_host_that_sends_slowly_a_host_that_receives_slowly_and_a_slow_pair() -> None:
    reports = reports_of(5)
    for other in rated(2, 5):
        call(reports, 2, other)["mb_per_s"] = 100.0  # a tenth
    (found,) = bad(reports)
    assert (found.hosts, found.seen) == (("n2",), "it sends 100.0 MB/s against 1,000 for half of all pairs")
    reports = reports_of(5)
    for sender in range(5):
        if 2 in rated(sender, 5):
            call(reports, sender, 2)["mb_per_s"] = 100.0
    (found,) = bad(reports)
    assert (found.hosts, found.seen) == (("n2",), "it receives 100.0 MB/s against 1,000 for half of all pairs")
    reports = reports_of(5)
    call(reports, 2, 3)["mb_per_s"] = 100.0
    (found,) = bad(reports)
    assert found.hosts == ("n2", "n3")
    reports = reports_of(5, mb_per_s=130.0)
    call(reports, 2, 3)["mb_per_s"] = 20.0  # more than an eighth
    assert bad(reports) == []
    assert {one.hosts for one in bad(reports_of(3), Asked(min_mb_per_s=1001))} == {("n0",), ("n1",), ("n2",)}


def test_a_way_that_is_closed_blames_the_host_that_does_not_answer_and_no_all_reduce_is_promised() -> None:
    reports = reports_of(4)
    call(reports, 1, 2).update(reached=False, why="no answer", answered_by=None, mb_per_s=None)
    for report in reports:
        report["reduction"] = None
    found = bad(reports)
    assert [(one.check, one.level, one.hosts) for one in found] == [
        ("ports", ERROR, ("n2",)), ("all-reduce", UNKNOWN, ()),
    ]  # fmt: skip
    call(reports, 2, 1).update(reached=False, why="no answer", answered_by=None)
    assert {one.hosts for one in bad(reports) if one.level == ERROR} == {("n2", "n1"), ("n1", "n2")}


def test_calls_to_a_host_that_told_nothing_are_not_told_again() -> None:
    reports = reports_of(3)
    for caller in (0, 1):
        call(reports, caller, 2).update(reached=False, why="refused", answered_by=None, mb_per_s=None)
    found = [
        one for one in judge(plan_of(3), reports[:2], Asked(reduces=False), {"n2": "killed"}) if one.level == ERROR
    ]
    assert [(one.check, one.hosts, one.seen) for one in found] == [("answer", ("n2",), "killed")]


def test_mungekeys_name_the_host_that_has_another_one() -> None:
    reports = reports_of(4)
    for rank, report in enumerate(reports):
        report["munge"] = True
        is_refused = 2 in (rank, (rank + 1) % 4)
        call(reports, rank, (rank + 1) % 4)["credential"] = "Invalid credential" if is_refused else "Success"
    (found,) = bad(reports)
    assert (found.check, found.hosts, found.seen) == ("munge", ("n2",), "Invalid credential")


def test_the_minority_has_the_wrong_version() -> None:
    reports = reports_of(3)
    reports[1]["facts"]["versions"]["torch"] = "2.12.0"
    (found,) = bad(reports)
    assert (found.hosts, found.seen, found.level) == (("n1",), "torch 2.12.0, elsewhere 2.13.0", ERROR)
    assert found.fix.startswith("pip install 'torch==2.13.0'")
    reports[1]["facts"]["versions"] |= {"torch": None, "muster": "0.1.0-def"}
    assert [one.seen for one in bad(reports)] == [
        "muster 0.1.0-def, elsewhere 0.1.0-abc", "torch none, elsewhere 2.13.0",
    ]  # fmt: skip


def test_sums_that_are_wrong_name_who_saw_them() -> None:
    reports = reports_of(2)
    reports[0]["reduction"]["wrong"] = reports[1]["reduction"]["wrong"] = 17
    (found,) = bad(reports)
    assert (found.check, found.level, found.hosts) == ("all-reduce", ERROR, ("n0", "n1"))
    assert found.seen == "17 sums are not what they must be"


def test_interfaces_that_differ() -> None:
    reports = reports_of(3)
    for link in reports[2]["facts"]["links"].values():
        link.update(mtu=9000, mbit_per_s=1000)
    found = bad(reports)
    assert [(one.check, one.level, one.hosts, one.seen) for one in found] == [
        ("MTU", WARNING, ("n2",), "eth0: 9000 bytes, elsewhere 1500"),
        ("link speed", WARNING, ("n2",), "eth0: 1000 Mbit/s, elsewhere 10000"),
    ]


def test_floors_that_are_given_are_errors_and_usual_ones_warnings() -> None:
    reports = reports_of(2)
    reports[0]["facts"]["memlock_mb"] = 64
    assert bad(reports) == []
    assert [one.level for one in bad(reports, Asked(min_memlock_mb=65))] == [ERROR]
    assert bad(reports, Asked(min_memlock_mb=64)) == []
    reports[0]["facts"]["shm_mb"] = 64
    assert [(one.check, one.level) for one in bad(reports)] == [("shared memory", WARNING)]


def test_one_machine_in_the_place_of_two() -> None:
    reports = reports_of(3)
    reports[1]["facts"]["identity"] = reports[0]["facts"]["identity"]
    assert [(one.check, one.hosts) for one in bad(reports) if one.level == ERROR] == [("addresses", ("n0", "n1"))]


def test_with_very_many_hosts_each_is_called_by_as_many_as_it_calls() -> None:
    assert partners(1, 4) == [2, 3, 0]
    assert len(partners(0, 129)) == 128
    count = 300
    called = [other for rank in range(count) for other in partners(rank, count)]
    assert {called.count(rank) for rank in range(count)} == {MOST_CALLED}
    assert all(rank not in partners(rank, count) for rank in range(count))


SMI = """0, NVIDIA H100 80GB HBM3, 550.54.15, 81559, 4, 0, Not Active, Not Active
1, NVIDIA H100 80GB HBM3, 550.54.15, 81559, 4, [N/A], Active, Not Active
"""
P2P = """ \tGPU0\tGPU1\tGPU2
 GPU0\tX\tOK\tNS
 GPU1\tOK\tX\tCNS
 GPU2\tNS\tCNS\tX

Legend:
  X    = Self
"""


def test_nvidias_tables() -> None:
    first, second = gpus.rows_of(SMI)
    assert first == {
        "index": 0, "name": "NVIDIA H100 80GB HBM3", "driver": "550.54.15", "mb": 81559, "used_mb": 4,
        "ecc_errors": 0, "slowed": False, "hot": False,
    }  # fmt: skip
    assert (second["ecc_errors"], second["slowed"]) == (None, True)
    assert gpus.rows_of("No devices were found\n") == []
    assert gpus.apart_in(P2P) == ["GPU0-GPU2 (NS)", "GPU1-GPU2 (CNS)"]
    assert gpus.apart_in("") == []


def test_the_quarantine_keeps_each_host_once_and_why(tmp_path: Path) -> None:
    file = tmp_path / "new" / "bad"
    assert quarantine.add(file, {"a": "disk: full", "b": "ports:\nclosed"}) == ["a", "b"]
    assert quarantine.add(file, {"b": "again", "c": "clock"}) == ["c"]
    assert list(quarantine.quarantined(file)) == ["a", "b", "c"]
    assert quarantine.quarantined(file)["b"].endswith("ports: closed")
    rest, words = quarantine.left(["d", "b", "e"], str(file))
    assert rest == ["d", "e"]
    assert words[0].startswith("b is left out, in quarantine since 20")
    with pytest.raises(UsageError, match="all of a, b are in"):
        quarantine.left(["a", "b"], str(file))
    with pytest.raises(UsageError, match="there is no file"):
        quarantine.left(["a"], str(tmp_path / "none"))
    assert quarantine.left(["a"], "") == (["a"], [])


def test_a_table_fits_a_terminal_and_its_last_line_says_it() -> None:
    reports = reports_of(3)
    reports[1]["facts"]["versions"]["torch"] = "2.12.0"
    text = table(judge(plan_of(3), reports, Asked(), {}), 3, 2.04)
    assert max(map(len, text.splitlines()[:-1])) <= 100
    assert text.splitlines()[-1] == "muster: of 3 hosts not fit: n1 (2.0 s; exit code 3: a host is not fit for the job)"
    assert exit_code([]) == 0
    assert table([], 1, 0.5) == "muster: 1 host is fit (0.5 s; exit code 0: finished)"


def test_reports_are_found_among_other_lines_and_what_is_cut_short_is_not_one() -> None:
    reports = reports_of(3)
    lines = [[f"{rank}: {line}" for line in as_lines(report)] for rank, report in enumerate(reports)]
    assert min(map(len, lines)) > 1
    assert max(len(line) for line in lines[0]) < 1024, "srun cuts what is longer"
    mixed = [line for two in zip(lines[1], lines[0], strict=False) for line in two]  # as tasks' lines come
    rest = lines[1][len(lines[0]) :] + lines[0][len(lines[1]) :]
    text = "\n".join(["hello", *mixed, *rest, "0: noise", f"{MARK}1 0", f"{MARK}x 0 1 e30=", *lines[2][:-1]])
    assert [report["name"] for report in reports_in(text)] == ["n0", "n1"]
    assert reports_in(text) == reports[:2]
    told = conclude(plan_of(2), reports_in("\n".join(lines[0])), {}, {"n9": "cannot be reached"})
    assert told.exit_code == 3
    assert "n1: it told nothing" in told.words
    assert "n9: cannot be reached" in told.words


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--min-shm", "1"], "unrecognized arguments: --min-shm 1"),
        (["--plan", "{}", "--node-rank", "0"], "--plan is not what"),
        (["--judge", "/no/such/file"], "--judge: /no/such/file: No such file"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
    ],
)
def test_what_it_does_not_understand_it_refuses(words: list[str], reason: str) -> None:
    command = [sys.executable, "-m", "train", "preflight", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert reason in done.stderr
    assert "Traceback" not in done.stderr


def test_alone_it_looks_at_this_host(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "train", "preflight", "--json", "--device", "cpu", "--runs-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    told = json.loads(done.stdout)
    assert (done.returncode == 0) == told["fit"]
    assert {"names", "versions", "run folder", "open files"} <= {one["check"] for one in told["findings"]}
    assert list(tmp_path.iterdir()) == []


def test_between_says_nothing_of_one_host() -> None:
    assert between(plan_of(1), reports_of(1), Asked()) == []
