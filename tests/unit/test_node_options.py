"""The agent's command line: what is refused, and how it is said."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from train.errors import UsageError
from train.launch.options import NodeOptions, parse
from train.seam import RUN_ID, RUNS_DIR, SECRET_FILE

TWO = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1"]
RUN = ["--", "run", "--config", "ddp"]
LOCAL = ["--standalone", "--nproc-per-node", "2"]


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(b"0123456789abcdef\n")
    path.chmod(0o600)
    return path


def accepted(argv: list[str], **env: str) -> NodeOptions:
    return parse(argv, env)


def refused(argv: list[str], env: Mapping[str, str] | None = None) -> list[str]:
    with pytest.raises(UsageError) as caught:
        parse(argv, env or {})
    return caught.value.problems


SECRET_MISSING = (
    f"agents on several hosts need a secret: put the same file on all of them and name it in {SECRET_FILE} "
    "(head -c 32 /dev/urandom | base64 > secret; chmod 600 secret)"
)

NOTHING = "what to run is missing: -- run --config ddp, or -- python my_script.py"

TABLE: list[tuple[str, list[str], list[str]]] = [
    ("nothing to run", LOCAL, [NOTHING]),
    ("nothing after the --", [*LOCAL, "--"], [NOTHING]),
    ("no hosts", ["--nnodes", "0", *RUN], ["--nnodes 0 must be from 1 to 100000"]),
    ("two ways", ["--standalone", "--nnodes", "2", *RUN],
     ["--standalone and --nnodes 2 contradict each other: give one of them"]),
    ("who and where", ["--nnodes", "3", *RUN], [
        "--node-rank is missing: this host's number, 0 to 2, another one on each host",
        "--master-addr is missing: where the other hosts reach host 0",
    ]),
    ("rank too high", ["--nnodes", "2", "--node-rank", "2", "--master-addr", "a", *RUN],
     ["--node-rank 2 must be from 0 to 1, the number of hosts less 1"]),
    ("rank below", ["--node-rank", "-1", *RUN], ["--node-rank -1 must be from 0 to 0, the number of hosts less 1"]),
    ("run id with a path", [*LOCAL, "--run-id", "../x", *RUN],
     ["--run-id '../x' must be the name of a folder, not a path"]),
    ("run id of dots", [*LOCAL, "--run-id", "..", *RUN], ["--run-id '..' must be the name of a folder, not a path"]),
    ("no ranks", ["--standalone", "--nproc-per-node", "0", *RUN], ["--nproc-per-node 0: from 1 to 4096 ranks a host"]),
    ("ranks in words", ["--standalone", "--nproc-per-node", "two", *RUN],
     ["--nproc-per-node 'two' must be a number, one number for each host (4,2), or gpu"]),
    ("ranks for other hosts", [*TWO, "--nproc-per-node", "4,2,1", *RUN],
     ["--nproc-per-node 4,2,1 has 3 numbers for 2 hosts: one, or one for each"]),
    ("names for other hosts", [*TWO, "--hosts", "a,b,c", *RUN], ["--hosts a,b,c has 3 names for 2 hosts"]),
    ("two problems", ["--standalone", "--nproc-per-node", "0", "--run-id", "a/b", "--grace-s", "-1"], [
        NOTHING,
        "--run-id 'a/b' must be the name of a folder, not a path",
        "--nproc-per-node 0: from 1 to 4096 ranks a host",
        "--grace-s -1 must be a number from 0 to 1e+09",
    ]),
    ("negative times", [*LOCAL, "--join-timeout-s", "-2", "--time-limit-s", "-0.5", "--idle-timeout-s", "-3",
                        "--max-restarts", "-1", *RUN],
     ["--join-timeout-s -2 must be a number from 0 to 1e+09", "--idle-timeout-s -3 must be a number from 0 to 1e+09",
      "--time-limit-s -0.5 must be a number from 0 to 1e+09", "--max-restarts -1 must be a number from 0 to 1e+09"]),
    ("no secret", [*TWO, *RUN], [SECRET_MISSING]),
    ("port", [*LOCAL, "--master-port", "70000", *RUN], ["master port 70000 must be from 1 to 65535"]),
    ("ports", [*LOCAL, "--master-port", "7000", "--control-port", "7000", *RUN],
     ["master port and control port are both 7000: give two"]),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "problems"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_bad_command_lines(argv: list[str], problems: list[str]) -> None:
    assert refused(argv) == problems


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--nnodes", "two", *RUN], "--nnodes"),
        (["--unknown", *RUN], "--unknown"),
        (["--grace-s", "soon", *RUN], "--grace-s"),
        (["--nproc-per-node"], "--nproc-per-node"),
    ],
)
def test_what_argparse_refuses_is_refused_the_same_way(argv: list[str], words: str) -> None:
    (problem,) = refused(argv)
    assert words in problem


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1", "127.0.1.1", "0.0.0.0"])
@pytest.mark.parametrize("node_rank", ["0", "1"])
def test_a_loopback_master_is_refused_for_more_than_one_host(address: str, node_rank: str, secret: Path) -> None:
    """F6: each host would wait for itself."""
    argv = ["--nnodes", "2", "--node-rank", node_rank, "--master-addr", address, *RUN]
    problems = refused(argv, {SECRET_FILE: str(secret)})
    assert len(problems) == 1
    assert f"{address}" in problems[0]
    assert "give an address" in problems[0]


def test_a_loopback_master_is_fine_on_one_host() -> None:
    assert accepted(["--master-addr", "127.0.0.1", *RUN]).terms.plan.master_addr == "127.0.0.1"
    assert accepted([*LOCAL, *RUN]).terms.plan.master_addr == "127.0.0.1"


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}, "srun --ntasks-per-node=1"),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "3"}, "mpirun --map-by ppr:1:node"),
        ({"LOCAL_RANK": "1"}, "the agent in place of torchrun"),
    ],
)
def test_several_agents_on_a_host_are_refused_with_the_fix(env: dict[str, str], words: str) -> None:
    """F3: one agent starts all ranks of its host."""
    (problem,) = refused([*LOCAL, *RUN], env)
    assert words in problem
    assert "more than one agent on this host" in problem
    name, value = next(iter(env.items()))
    assert f"({name}={value})" in problem


@pytest.mark.parametrize(
    "env",
    [
        {"SLURM_LOCALID": "0", "SLURM_STEP_ID": "0"},
        {"SLURM_LOCALID": "1"},  # left over in a batch script or an interactive shell: no step
        {"OMPI_COMM_WORLD_LOCAL_RANK": "0"},
        {"LOCAL_RANK": ""},
    ],
)
def test_one_agent_a_host_under_another_launcher_is_fine(env: dict[str, str]) -> None:
    assert accepted([*LOCAL, *RUN], **env).terms.plan.world_size == 2


# The secret.


def test_the_secret_is_read_from_its_file(secret: Path) -> None:
    assert accepted([*TWO, *RUN], **{SECRET_FILE: str(secret)}).secret == b"0123456789abcdef"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o777])
def test_a_secret_that_others_can_read_is_refused(secret: Path, mode: int) -> None:
    secret.chmod(mode)
    (problem,) = refused([*TWO, *RUN], {SECRET_FILE: str(secret)})
    assert problem == f"{SECRET_FILE}={secret} can be read by others: chmod 600 {secret}"


def test_a_secret_that_is_short_open_or_not_there(secret: Path) -> None:
    secret.write_bytes(b"  hush!  \n")
    secret.chmod(0o644)
    assert refused([*TWO, *RUN], {SECRET_FILE: str(secret)}) == [
        f"{SECRET_FILE}={secret} can be read by others: chmod 600 {secret}",
        f"the secret in {SECRET_FILE}={secret} is 5 bytes long: at least 16 are needed",
    ]
    assert "hush" not in str(refused([*TWO, *RUN], {SECRET_FILE: str(secret)}))
    secret.unlink()
    assert refused([*TWO, *RUN], {SECRET_FILE: str(secret)}) == [
        f"{SECRET_FILE}={secret} cannot be read: No such file or directory"
    ]


def test_on_one_host_no_secret_is_looked_at(secret: Path) -> None:
    secret.chmod(0o777)
    assert accepted([*LOCAL, *RUN], **{SECRET_FILE: str(secret)}).secret == b""


def stdin_of(monkeypatch: pytest.MonkeyPatch, content: bytes) -> int:
    reading, writing = os.pipe()
    os.write(writing, content)
    os.close(writing)
    real = os.read
    monkeypatch.setattr(os, "read", lambda fd, size: real(reading if fd == 0 else fd, size))
    return reading


def test_the_secret_is_the_first_line_of_stdin_and_the_rest_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = stdin_of(monkeypatch, b"a secret that is long enough\nthe rest")
    found = accepted([*TWO, "--secret-stdin", *RUN])
    assert found.secret == b"a secret that is long enough"
    monkeypatch.undo()
    assert os.read(reading, 100) == b"the rest"
    os.close(reading)


@pytest.mark.parametrize("content", [b"", b"\n", b"short\n"])
def test_a_bad_secret_on_stdin(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    reading = stdin_of(monkeypatch, content)
    (problem,) = refused([*TWO, "--secret-stdin", *RUN])
    assert "the first line of standard input is" in problem
    os.close(reading)


# What is run.


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["run", "--config", "ddp"], [sys.executable, "-m", "train", "run", "--config", "ddp"]),
        (["my script.py", "--a", "b c"], [sys.executable, "my script.py", "--a", "b c"]),
        (["-m", "package.module"], [sys.executable, "-m", "package.module"]),
        (["python", "x.py"], ["python", "x.py"]),
        (["./run.sh", "--", "--nnodes", "3"], ["./run.sh", "--", "--nnodes", "3"]),
        (["/bin/sh", "-c", "echo --nproc_per_node"], ["/bin/sh", "-c", "echo --nproc_per_node"]),
    ],
)
def test_commands(words: list[str], command: list[str]) -> None:
    assert list(accepted([*LOCAL, "--", *words]).terms.command) == command
    if not words[0].startswith("-"):  # then it goes without the --
        assert list(accepted([*LOCAL, *words]).terms.command) == command


def test_torchruns_own_spelling_is_taken() -> None:
    found = accepted(
        ["--nnodes=1", "--nproc_per_node=3", "--master_port", "7000", "--max_restarts=2", "--", "x_y.py", "--a_b"]
    )
    assert found.terms.plan.world_size == 3
    assert found.terms.plan.master_ports[0] == 7000
    assert found.terms.max_restarts == 2
    assert found.terms.command[1:] == ("x_y.py", "--a_b")


# What follows from it.


def test_nobody_can_end_a_standard_input_that_is_a_file() -> None:
    """cron, nohup and `ssh -n` give /dev/null, as pytest does."""
    words = "--die-with-stdin: standard input is no pipe, socket or terminal, so nobody can end it"
    assert refused(["--standalone", "--die-with-stdin", *RUN]) == [words]


@pytest.mark.parametrize("value", ["nan", "inf", "1e30"])
def test_a_time_that_never_comes_is_refused(value: str) -> None:
    assert len(refused(["--standalone", "--grace-s", value, *RUN])) == 1


@pytest.mark.parametrize("name", ["..", "a/b", "../x", "a\nb"])
def test_a_run_id_does_not_lead_out_of_the_runs_folder_be_it_given_or_inherited(name: str) -> None:
    assert refused(["--standalone", "--run-id", name, *RUN]) == [
        f"--run-id {name!r} must be the name of a folder, not a path"
    ]
    with pytest.raises(UsageError, match="MUSTER_RUN_ID"):
        parse(["--standalone", *RUN], {"MUSTER_RUN_ID": name})


def test_all_that_can_be_given(secret: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.launch.options._can_end", lambda descriptor: True)  # pytest's own is /dev/null
    found = accepted(
        ["--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "4,2", "--master-addr", "10.0.0.1",
         "--master-port", "7000", "--control-port", "7001", "--hosts", "big,small", "--run-id", "r", "--runs-dir",
         str(tmp_path), "--max-restarts", "3", "--join-timeout-s", "5", "--grace-s", "6", "--time-limit-s", "7",
         "--idle-timeout-s", "8", "--die-with-stdin", *RUN],
        **{SECRET_FILE: str(secret)},
    )  # fmt: skip
    terms, plan = found.terms, found.terms.plan
    assert [(host.name, host.slots) for host in plan.hosts] == [("big", 4), ("small", 2)]
    assert (plan.master_addr, plan.master_ports[0], plan.control_ports[0]) == ("10.0.0.1", 7000, 7001)
    assert [*plan.ranks(1)] == [4, 5]
    assert (terms.join_timeout_s, terms.grace_s, terms.time_limit_s, terms.idle_timeout_s) == (5, 6, 7, 8)
    assert (found.node_rank, found.run_id, found.runs_dir, terms.max_restarts) == (1, "r", tmp_path, 3)
    assert found.die_with_stdin
    assert terms.name_of(1) == "small"


def test_what_is_not_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = accepted(RUN)
    assert (found.node_rank, found.run_id, found.terms.plan.world_size) == (0, None, 1)
    assert found.runs_dir == tmp_path / "runs"
    assert found.terms.name_of(0) is None
    assert not found.die_with_stdin
    assert accepted(RUN, **{RUN_ID: "mine", RUNS_DIR: "/elsewhere"}).runs_dir == Path("/elsewhere")
    assert accepted(RUN, **{RUN_ID: "mine"}).run_id == "mine"
    assert accepted(["--run-id", "given", *RUN], **{RUN_ID: "mine"}).run_id == "given"


def test_jobs_on_one_host_get_ports_of_their_own_unless_given() -> None:
    assert len({accepted([*LOCAL, *RUN]).terms.plan.master_ports[0] for _ in range(5)}) > 1


def test_agents_of_several_hosts_come_to_the_same_ports(secret: Path) -> None:
    plans = [
        accepted(["--nnodes", "2", "--node-rank", str(rank), "--master-addr", "a", *RUN], **{SECRET_FILE: str(secret)})
        for rank in (0, 1)
    ]
    assert plans[0].terms.plan == plans[1].terms.plan
    assert plans[0].terms.plan.master_ports[0] == 29500


@pytest.mark.parametrize(("visible", "count"), [("0,1,2", 3), ("0", 1), ("GPU-1,MIG-2", 2)])
def test_one_rank_a_gpu(visible: str, count: int) -> None:
    argv = ["--standalone", "--nproc-per-node", "gpu", *RUN]
    assert accepted(argv, CUDA_VISIBLE_DEVICES=visible).terms.plan.world_size == count


@pytest.mark.parametrize("visible", ["", "-1"])
def test_no_gpu_is_refused_where_gpus_are_asked_for(visible: str) -> None:
    """F42: no silent training on the CPU."""
    (problem,) = refused(["--standalone", "--nproc-per-node", "gpu", *RUN], {"CUDA_VISIBLE_DEVICES": visible})
    assert "gpu" in problem


def test_help_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--help"], {})
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert "--secret-stdin" in told
    assert "examples:" in told


def test_the_module_reads_no_environment_but_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert accepted([*LOCAL, *RUN]).node_rank == 0
