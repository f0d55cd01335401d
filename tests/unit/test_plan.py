"""Hosts → ranks, master, ports and commands: the same wherever it is computed, and every problem named at once."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.ranks import ROOT, clean_environment
from train.errors import UsageError
from train.launch import options as node_options
from train.launch.plan import main
from train.launch.topology import (
    Host,
    candidates_from,
    is_loopback,
    make_plan,
    port_candidates,
    ports_from,
)

QUICK = settings(max_examples=80, deadline=None, database=None)
PORT = st.integers(1, 65535)
GOLDEN = Path(__file__).parent / "golden" / "plan.txt"
UGLY = ["$(touch x)", "a;b", "a b", "a'b", 'a"b', "-oProxyCommand=x", "a\nb", "a/b", "..", "", "`id`", "a,b"]
GOLDEN_CASES = [
    ["--hosts", "node1,node2", "--nproc-per-node", "2"],
    ["--hosts", "alpha:1,10.0.0.12:4,[fd00::1]:2", "--run-id", "demo", "--master-port", "33000"],
    ["--hosts", "node1:8", "--run-id", "one", "--commands", "--", "python", "my script.py", "--lr", "1e-3"],
    ["--hosts", "b:2,a:4", "--run-id", "two", "--commands"],
    ["--hosts", "localhost:x,,a:2,a:2,n[1,2]:3,$(id)", "--master-port", "0", "--run-id", "a/b"],
]


@pytest.fixture(autouse=True)
def _no_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST", "SLURM_GPUS_ON_NODE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


def said(words: Sequence[str]) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of `plan`."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(words)
    return code, out.getvalue(), err.getvalue()


def plan(*words: str) -> str:
    """What `plan` prints; it must succeed."""
    code, out, err = said(words)
    assert (code, err) == (0, "")
    return out


def planned(*words: str) -> dict[str, object]:
    told = json.loads(plan(*words, "--json"))
    assert isinstance(told, dict)
    return told


def refused(*words: str) -> str:
    """What `plan` says to a bad command line."""
    code, out, err = said(words)
    assert (code, out) == (2, "")
    return err


def ranks(told: dict[str, object]) -> list[list[int]]:
    assert isinstance(told["hosts"], list)
    return [host["ranks"] for host in told["hosts"]]


# Ranks


@QUICK
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_ranks_are_all_there_once_in_the_order_of_hosts(slots: list[int]) -> None:
    made = make_plan(Host(f"h{len(slots) - i}", f"10.0.0.{i}", count) for i, count in enumerate(slots))
    assert [rank for i in range(len(slots)) for rank in made.ranks(i)] == list(range(made.world_size))
    assert [len(made.ranks(i)) for i in range(len(slots))] == slots
    assert made.master_addr == "10.0.0.0"
    assert made.as_dict()["world_size"] == sum(slots)


def test_the_order_given_is_kept_and_never_sorted() -> None:
    told = planned("--hosts", "b10,b9,a1", "--nproc-per-node", "2")
    assert isinstance(told["hosts"], list)
    assert [host["name"] for host in told["hosts"]] == ["b10", "b9", "a1"]
    assert (told["master_addr"], ranks(told)) == ("b10", [[0, 1], [2, 3], [4, 5]])


def test_slots_of_a_host_go_before_the_number_for_all() -> None:
    assert ranks(planned("--hosts", "a:3,b", "--nproc_per_node=1")) == [[0, 1, 2], [3]]
    assert ranks(planned("--hosts", "a,b,c", "--nproc-per-node", "1(x2),2")) == [[0], [1], [2, 3]]


@pytest.mark.parametrize(
    ("hosts", "names"),
    [
        ("[fd00::1]:2,[fe80::1%eth0]:1", ["fd00::1", "fe80::1%eth0"]),
        ("fd00::1,fd00::2", ["fd00::1", "fd00::2"]),
        ("node-1.cluster.example:2, node_2", ["node-1.cluster.example", "node_2"]),
        ("büro1,büro2", ["büro1", "büro2"]),
    ],
)
def test_names_and_addresses(hosts: str, names: list[str]) -> None:
    told = planned("--hosts", hosts, "--nproc-per-node", "1")
    assert isinstance(told["hosts"], list)
    assert [host["name"] for host in told["hosts"]] == names
    assert [host["address"] for host in told["hosts"]] == names


# Ports


@QUICK
@given(st.text(max_size=40), st.integers(1, 200))
def test_ports_of_a_run_are_distinct_and_below_those_of_clients(run_id: str, count: int) -> None:
    ports = port_candidates(run_id, count)
    assert len(set(ports)) == len(ports) == count
    assert all(20000 <= port < 30000 for port in ports)
    assert ports == candidates_from(ports[0], count)


@QUICK
@given(PORT, st.none() | PORT, st.integers(1, 100))
@example(29500, 21074, 8)  # the agents' port is the second one that ranks would try
@example(29500, 29502, 100)  # both even
@example(29501, 21075, 8)
def test_no_port_is_tried_for_both_purposes(master: int, control: int | None, count: int) -> None:
    if master == control:
        return
    masters, controls = ports_from(master, control, count)
    assert set(masters) & set(controls) == set()
    for ports in (masters, controls):
        assert len(ports) == len(set(ports)) == count
        assert all(20000 <= port < 30000 for port in ports[1:])
    assert masters[0] == master
    assert control is None or controls[0] == control


@QUICK
@given(PORT)
def test_an_agent_told_the_first_ports_tries_the_same_ones(master: int) -> None:
    masters, controls = ports_from(master)
    assert ports_from(masters[0], controls[0]) == (masters, controls)


def test_ports_are_the_same_on_every_host_and_version() -> None:
    """Agents compute them apart: these numbers must never change."""
    assert port_candidates("demo", 3) == (29706, 21280, 22854)
    assert ports_from(29500, count=3) == ((29500, 21074, 22648), (22831, 24405, 25979))


def test_ports_of_many_runs_spread() -> None:
    assert len({port_candidates(f"run-{i}", 1)[0] for i in range(100)}) > 90


def test_the_run_decides_the_ports_and_without_one_the_hosts_do() -> None:
    named = planned("--hosts", "a:1", "--run-id", "x")["master_ports"]
    assert named == planned("--hosts", "b:1", "--run_id", "x")["master_ports"]
    assert named != planned("--hosts", "a:1", "--run-id", "y")["master_ports"]
    assert planned("--hosts", "a:1")["master_ports"] != planned("--hosts", "b:1")["master_ports"]


# Refusals


def problems_of(hosts: list[Host], **more: object) -> list[str]:
    with pytest.raises(UsageError) as caught:
        make_plan(hosts, **more)  # type: ignore[arg-type]
    return caught.value.problems


def test_all_problems_come_at_once() -> None:
    hosts = [
        Host("localhost", "127.0.1.1", 0),
        Host("a", "10.0.0.1", -1),
        Host("A", "10.0.0.2", 1),
        Host("b c", "x", 1),
    ]
    words = problems_of(hosts, master_port=70000, control_port=70000, run_id="..")
    assert len(words) == 9
    assert "on each of the 4 hosts that means the host itself" in words[4]


@pytest.mark.parametrize(
    "address", ["localhost", "127.0.0.1", "127.0.1.1", "::1", "0.0.0.0", "LOCALHOST", "127.1", "::", "::ffff:127.0.0.1"]
)
def test_a_loopback_master_is_refused_for_several_hosts_only(address: str) -> None:
    assert is_loopback(address)
    assert make_plan([Host("a", address, 2)]).world_size == 2
    (words,) = problems_of([Host("a", address, 1), Host("b", "10.0.0.2", 1)])
    assert words.endswith("give an address that the others can reach")
    assert make_plan([Host("b", "10.0.0.2", 1), Host("a", address, 1)]).master_addr == "10.0.0.2"


@pytest.mark.parametrize(
    "address", ["10.127.0.1", "localhost.example", "node127.0.0.1", "fd00::1", "1.0.0.0", "fe80::", "n"]
)
def test_other_addresses_are_no_loopback(address: str) -> None:
    assert not is_loopback(address)


def test_the_same_host_twice_is_refused_by_name_and_by_address() -> None:
    (words,) = problems_of([Host("a", "10.0.0.1", 1), Host("a", "10.0.0.2", 1)])
    assert words == "host a is named twice: name it once, with the sum of its slots"
    (words,) = problems_of([Host("a", "10.0.0.1", 1), Host("b", "10.0.0.1", 1)])
    assert words == "hosts a and b have the same address 10.0.0.1"
    (words,) = problems_of([Host("a", "10.0.0.1", 1), Host("b", "a", 1)])
    assert words == "hosts a and b have the same address a"


def test_no_hosts_and_no_slots_are_refused() -> None:
    assert problems_of([]) == ["no hosts were given: name at least one"]
    assert problems_of([Host("a", "a", 0)]) == ["host a has 0 slots: give at least 1, or leave the host out"]


@pytest.mark.parametrize("name", UGLY)
def test_names_that_a_shell_or_ssh_could_misread_are_refused(name: str) -> None:
    assert "is no name or address" in problems_of([Host(name, "10.0.0.1", 1)])[0]
    assert "is no name or address" in problems_of([Host("a", name, 1)])[0]


@pytest.mark.parametrize(
    ("words", "said_of_it"),
    [
        ([], "one of the arguments --hosts --inventory --slurm is required"),
        (["--hosts", "a", "--slurm"], "not allowed with argument"),
        (["--hosts", "a"], "number of ranks a host is not said: name it after each host (a:2,b:4), or give"),
        (["--hosts", "a", "--nproc-per-node", "two"], "--nproc-per-node: 'two' must be a whole number"),
        (["--hosts", "a", "--nproc-per-node", "1,2"], "has numbers for 2 hosts, but there are 1"),
        (["--hosts", "a", "--nproc", "2"], "unrecognized arguments: --nproc 2"),
        (["--hosts", "a:1", "--master-port", "x"], "invalid int value: 'x'"),
        (["--hosts", "a:1", "--master-port", "5000", "--control-port", "5000"], "are both 5000: give two"),
        (["--slurm"], "this is no Slurm job: SLURM_JOB_NODELIST is not set"),
        (["--inventory", "/nowhere.yml"], "cannot read /nowhere.yml: No such file or directory"),
    ],
)
def test_bad_command_lines_are_refused_with_status_2(words: list[str], said_of_it: str) -> None:
    assert said_of_it in refused(*words)


# Slurm and inventories


def test_slurms_hosts_in_its_order_with_a_number_of_ranks_from_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[3,1-2]")
    assert "ask Slurm for --gpus-per-node, or give --nproc-per-node N" in refused("--slurm")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "2")
    told = planned("--slurm")
    assert (told["master_addr"], told["run_id"], ranks(told)) == ("n3", "slurm-77", [[0, 1], [2, 3], [4, 5]])
    assert ranks(planned("--slurm", "--nproc-per-node", "1(x2),4")) == [[0], [1], [2, 3, 4, 5]]
    monkeypatch.setenv("SLURM_STEP_NODELIST", "n[1-2]")
    assert planned("--slurm")["master_addr"] == "n1"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "70")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert planned("--slurm")["run_id"] == "slurm-70_3"
    assert planned("--slurm", "--run-id", "mine")["run_id"] == "mine"


def test_an_inventorys_slots_and_addresses(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yml"
    path.write_text("nodes:\n  hosts:\n    b: {ansible_host: 10.0.0.2, slots: 4}\n    a:\n")
    assert f"{path}:4: host a has no `slots:`" in refused("--inventory", str(path))
    path.write_text(path.read_text() + "  vars: {slots: 1}\n")
    told = planned("--inventory", str(path))
    assert (told["master_addr"], ranks(told)) == ("10.0.0.2", [[0, 1, 2, 3], [4]])
    assert ranks(planned("--inventory", str(path), "--nproc-per-node", "2")) == [[0, 1], [2, 3]]


# What is printed


def test_json_has_what_launchers_need() -> None:
    told = planned("--hosts", "a:1,b:2", "--run-id", "x", "--commands")
    assert set(told) == {"run_id", "hosts", "world_size", "master_addr", "master_ports", "control_ports"}
    assert isinstance(told["hosts"], list)
    assert {k: v for k, v in told["hosts"][1].items() if k != "command"} == {
        "name": "b", "address": "b", "node_rank": 1, "slots": 2, "ranks": [1, 2],
    }  # fmt: skip
    assert told["hosts"][1]["command"][:4] == ["python", "-m", "train", "node"]


@pytest.mark.parametrize("hosts", ["a:2", "a:2,b:2", "a:1,b:3", "[fd00::1]:2,b:1"])
def test_each_hosts_command_means_the_plan_to_its_agent(hosts: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s" * 40)
    secret.chmod(0o600)
    blocks = plan("--hosts", hosts, "--run-id", "x", "--commands", "--", "python", "a b.py").split("\n\n")
    told = planned("--hosts", hosts, "--run-id", "x")
    for i, block in enumerate(blocks):
        words = shlex.split(block.splitlines()[1])
        assert words[:4] == ["python", "-m", "train", "node"]
        found = node_options.parse(words[4:], {"MUSTER_SECRET_FILE": str(secret)})
        assert found.node_rank == i
        assert found.run_id == "x"
        assert found.terms.command == ("python", "a b.py")
        mine = found.terms.plan.as_dict()
        assert [host["ranks"] for host in mine["hosts"]] == ranks(told)
        for key in ("world_size", "master_addr", "master_ports", "control_ports"):
            assert mine[key] == told[key]


def golden() -> str:
    """What the golden file should be."""
    blocks = []
    for words in GOLDEN_CASES:
        code, out, err = said(words)
        blocks.append(f"$ python -m train plan {shlex.join(words)}\n{out}{err}status {code}\n")
    return "\n".join(blocks)


def test_what_is_printed_is_what_the_golden_file_has() -> None:
    now = golden()
    if GOLDEN.read_text(encoding="utf-8") != now:
        fresh = GOLDEN.with_suffix(".new")
        fresh.write_text(now, encoding="utf-8")
        pytest.fail(f"what `plan` prints has changed; if that is meant: mv {fresh} {GOLDEN}")


def test_help_teaches_by_examples() -> None:
    words = plan("--help")
    examples = [line for line in words.splitlines() if line.startswith("  python -m train plan")]
    assert len(examples) == 5
    assert "Exit status: 0, or 2" in words


def test_planning_is_quick_and_needs_neither_torch_nor_yaml() -> None:
    script = (
        "import sys; from train.launch.plan import main; main(['--hosts', 'a:1']); "
        "print([m for m in ('torch', 'yaml', 'jsonargparse', 'rich', 'hostlist') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=clean_environment(), cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
