"""Who am I: every family of variables, which one wins, and the words for those that make no sense."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.errors import UsageError
from train.identity import Identity, first_host, identify, is_loopback, port_of, stable_run_id
from train.options import LaunchOptions, split_launch_options

Env = dict[str, str]
QUICK = settings(max_examples=40, deadline=None, database=None)
TORCHRUN: Env = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400",
}  # fmt: skip
SLURM_STEP: Env = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "6", "SLURM_NTASKS": "7", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_STEP_NODELIST": "n[1-4]",
}  # fmt: skip
MPIRUN: Env = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
UNKNOWN = ".".join(["x" * 60] * 5)  # too long a name: no resolver asks for it
FLAGS = ["--rank", "1", "--world-size", "2", "--master-addr", "10.0.0.9", "--master-port", "31000"]


@pytest.fixture(autouse=True)
def _no_slurm_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without scontrol, whatever this machine has; and without what may have started the tests."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("MUSTER_RUN_ID", "MUSTER_RUNS_DIR"):
        monkeypatch.delenv(name, raising=False)


def who(env: Env, *flags: str) -> Identity:
    options, rest = split_launch_options(flags)
    assert rest == []
    return identify(options, env)


def refused(env: Env, *flags: str) -> str:
    with pytest.raises(UsageError) as caught:
        who(env, *flags)
    return str(caught.value)


# The families


def test_nothing_set_is_one_process() -> None:
    assert who({"HOME": "/root", "MASTER_ADDR": "left.over"}) == Identity(rank=0, world_size=1, source="alone")


@pytest.mark.parametrize("write", [lambda f: f, lambda f: f.replace("-", "_").replace("__", "--")])
@pytest.mark.parametrize("joined", [False, True])
def test_flags_are_read_in_both_spellings(write: object, joined: bool) -> None:
    assert callable(write)
    words = [write(word) if word.startswith("--") else word for word in [*FLAGS, "--local-rank", "0"]]
    if joined:
        words = [f"{flag}={value}" for flag, value in zip(words[::2], words[1::2], strict=True)]
    me = who({}, *words)
    assert (me.rank, me.world_size, me.local_rank) == (1, 2, 0)
    assert (me.master_addr, me.master_port, me.source) == ("10.0.0.9", 31000, "flags")


def test_launch_options_leave_the_rest_of_the_command_line_alone() -> None:
    options, rest = split_launch_options(["--config", "ddp", "--rank=0", "--optim.lr", "1", "--world_size", "1"])
    assert (options.rank, options.world_size) == (0, 1)
    assert rest == ["--config", "ddp", "--optim.lr", "1"]


def test_a_lone_rank_by_flags_needs_no_master() -> None:
    assert who({}, "--rank", "0", "--world-size", "1").world_size == 1


def test_flags_take_the_address_from_the_environment_and_the_tutorials_port() -> None:
    me = who({"MASTER_ADDR": "head", "LOCAL_RANK": "1"}, "--rank", "1", "--world-size", "2")
    assert (me.master_addr, me.master_port, me.local_rank) == ("head", 29500, 1)
    assert who({"MASTER_ADDR": "h", "MASTER_PORT": "1234"}, "--rank", "0", "--world-size", "2").master_port == 1234


def test_flags_may_repeat_what_the_environment_says() -> None:
    me = who({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "31000"}, *FLAGS)
    assert me.source == "flags"


def test_torchrun() -> None:
    assert who(TORCHRUN) == Identity(3, 4, 1, 2, "10.0.0.1", 29400, "torchrun")


def test_a_node_agent_s_variables_are_torchrun_s_and_its_name_its_own() -> None:
    assert who({**TORCHRUN, "MUSTER_STATUS_PAGE": "/p"}) == Identity(3, 4, 1, 2, "10.0.0.1", 29400, "agent")
    assert who({**TORCHRUN, "MUSTER_STATUS_PAGE": ""}).source == "torchrun"


def test_torchruns_lone_rank_needs_no_master() -> None:
    me = who({"RANK": "0", "WORLD_SIZE": "1"})
    assert (me.rank, me.world_size, me.local_rank, me.local_world_size, me.source) == (0, 1, None, None, "torchrun")


def test_a_slurm_step_on_uneven_nodes() -> None:
    me = who(SLURM_STEP)
    assert (me.rank, me.world_size, me.local_rank, me.local_world_size) == (6, 7, 0, 1)
    assert (me.master_addr, me.source) == ("n1", "slurm")
    assert me.spans_hosts


def test_slurms_batch_script_is_no_rank_though_it_has_a_procid() -> None:
    batch = {k: v for k, v in SLURM_STEP.items() if not k.startswith("SLURM_STEP_")}
    assert who({**batch, "SLURM_PROCID": "0"}) == Identity()


def test_slurms_step_may_be_on_other_hosts_than_its_job() -> None:
    assert who({**SLURM_STEP, "SLURM_STEP_NODELIST": "n[2-4]"}).master_addr == "n2"
    assert who({k: v for k, v in SLURM_STEP.items() if k != "SLURM_STEP_NODELIST"}).master_addr == "n1"


def test_slurms_submit_host_is_never_the_master() -> None:
    env = {**SLURM_STEP, "SLURM_LAUNCH_NODE_IPADDR": "10.9.9.9", "SLURM_SUBMIT_HOST": "login", "SLURMD_NODENAME": "n4"}
    assert who(env).master_addr == "n1"


def test_slurm_ranks_agree_on_a_port_that_a_restart_and_another_step_change() -> None:
    ports = {rank: who({**SLURM_STEP, "SLURM_PROCID": str(rank)}).master_port for rank in range(7)}
    assert len(set(ports.values())) == 1
    other_step = who({**SLURM_STEP, "SLURM_STEP_ID": "1"}).master_port
    requeued = who({**SLURM_STEP, "SLURM_RESTART_COUNT": "1"}).master_port
    assert len({ports[0], other_step, requeued}) == 3


@pytest.mark.parametrize(
    ("tasks", "node", "expected"),
    [
        ("2(x3),1", 0, 2), ("2(x3),1", 2, 2), ("2(x3),1", 3, 1), ("4", 0, 4), ("1,3(x2),2", 1, 3), ("1,3(x2),2", 3, 2),
        ("2(x3),1", 4, None), ("", 0, None),
    ],
)  # fmt: skip
def test_slurms_tasks_per_node(tasks: str, node: int, expected: int | None) -> None:
    env = {**SLURM_STEP, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": str(node)}
    assert who(env).local_world_size == expected


def test_slurms_tasks_per_node_come_from_the_job_where_the_step_says_nothing() -> None:
    env = {k: v for k, v in SLURM_STEP.items() if k != "SLURM_STEP_TASKS_PER_NODE"}
    assert who({**env, "SLURM_TASKS_PER_NODE": "2(x3),1"}).local_world_size == 1
    assert who(env).local_world_size is None


@QUICK
@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.data())
def test_slurms_tasks_per_node_are_read_for_any_layout(counts: list[int], data: st.DataObject) -> None:
    words: list[str] = []  # as slurmctld writes it: runs of equal counts folded
    place = 0
    while place < len(counts):
        times = 1
        while place + times < len(counts) and counts[place + times] == counts[place]:
            times += 1
        words.append(str(counts[place]) + (f"(x{times})" if times > 1 else ""))
        place += times
    node = data.draw(st.integers(0, len(counts) - 1))
    env = {
        **SLURM_STEP, "SLURM_STEP_TASKS_PER_NODE": ",".join(words), "SLURM_NODEID": str(node),
        "SLURM_NTASKS": str(sum(counts)), "SLURM_PROCID": str(sum(counts[:node])),
    }  # fmt: skip
    assert who(env).local_world_size == counts[node]


def test_open_mpi_on_one_host() -> None:
    me = who(MPIRUN)
    assert (me.rank, me.world_size, me.local_rank, me.local_world_size) == (1, 2, 1, 2)
    assert (me.master_addr, me.source) == ("127.0.0.1", "mpirun")
    assert me.master_port == who({**MPIRUN, "OMPI_COMM_WORLD_RANK": "0"}).master_port


def test_open_mpi_on_several_hosts_must_be_told_the_master() -> None:
    several = {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    assert refused(several).endswith("add -x MASTER_ADDR=<host of rank 0>")
    me = who({**several, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"})
    assert (me.master_addr, me.master_port) == ("10.0.0.1", 4000)


def test_two_open_mpi_jobs_on_one_host_get_ports_of_their_own() -> None:
    ports = {who({**MPIRUN, "PMIX_NAMESPACE": f"prterun-head-{i}@1"}).master_port for i in range(2)}
    assert len(ports) == 2


# Which family wins


def test_an_agents_rank_inside_srun_wins_over_slurm() -> None:
    assert who({**SLURM_STEP, **TORCHRUN}) == who(TORCHRUN)
    assert who({**SLURM_STEP, "RANK": "0", "WORLD_SIZE": "1"}).world_size == 1


def test_slurm_wins_over_open_mpi() -> None:
    assert who({**MPIRUN, **SLURM_STEP}).source == "slurm"


def test_flags_win_over_slurm() -> None:
    me = who(SLURM_STEP, *FLAGS)
    assert (me.source, me.rank, me.world_size) == ("flags", 1, 2)


def test_a_complete_family_silences_a_half_set_later_one() -> None:
    half = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "OMPI_COMM_WORLD_RANK": "9"}
    assert who({**half, **TORCHRUN}).source == "torchrun"


# Half-set families


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_half_set_torchrun_environment_names_what_is_there_and_what_is_not(missing: str) -> None:
    words = refused({k: v for k, v in TORCHRUN.items() if k != missing})
    assert f" without {missing}; " in words
    given = [f"{k}={TORCHRUN[k]}" for k in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if k != missing]
    assert all(word in words for word in given)


def test_a_lone_local_rank_is_half_a_torchrun_environment() -> None:
    words = refused({"LOCAL_RANK": "1"})
    assert "LOCAL_RANK=1 without RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT" in words
    assert "unset LOCAL_RANK" in words


@pytest.mark.parametrize("missing", ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"])
def test_a_half_set_slurm_step_names_what_is_missing(missing: str) -> None:
    words = refused({k: v for k, v in SLURM_STEP.items() if k != missing})
    assert "half set (slurm)" in words
    assert f" without {missing};" in words


def test_a_slurm_step_without_hosts_is_half_set() -> None:
    words = refused({k: v for k, v in SLURM_STEP.items() if "NODELIST" not in k})
    assert " without SLURM_JOB_NODELIST;" in words


@pytest.mark.parametrize("missing", ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"])
def test_a_half_set_open_mpi_environment_names_what_is_missing(missing: str) -> None:
    assert f" without {missing};" in refused({k: v for k, v in MPIRUN.items() if k != missing})


def test_a_half_set_family_is_refused_though_a_later_one_is_complete() -> None:
    assert "half set (torchrun)" in refused({**SLURM_STEP, "RANK": "0"})


def test_half_given_flags_name_what_is_missing() -> None:
    assert "--rank 1 was given without --world-size, --master-addr: " in refused({}, "--rank", "1")
    assert "--world-size 2 was given without --rank, --master-addr: " in refused({}, "--world-size", "2")
    assert "without --master-addr: " in refused({}, "--rank", "0", "--world-size", "2")
    assert "without --rank, --world-size: " in refused({}, "--master-addr", "head")


def test_variables_set_to_nothing_count_as_not_set() -> None:
    assert who({"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": "", "OMPI_COMM_WORLD_RANK": ""}) == Identity()


# Contradictions and impossible values


def test_flags_that_contradict_the_environment_are_all_named() -> None:
    words = refused({**TORCHRUN, "RANK": "1"}, *FLAGS).splitlines()
    assert words == [
        "--world-size 2 contradicts WORLD_SIZE=4 in the environment: give one of them",
        "--master-addr 10.0.0.9 contradicts MASTER_ADDR=10.0.0.1 in the environment: give one of them",
        "--master-port 31000 contradicts MASTER_PORT=29400 in the environment: give one of them",
    ]


def test_a_local_rank_flag_that_contradicts_the_environment_is_refused() -> None:
    words = refused({"LOCAL_RANK": "1"}, "--local-rank", "0", "--rank", "0", "--world-size", "1")
    assert "--local-rank 0" in words
    assert "LOCAL_RANK=1" in words


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({**TORCHRUN, "RANK": "4"}, "rank 4 (torchrun) must be from 0 to 3"),
        ({**TORCHRUN, "RANK": "-1"}, "rank -1 (torchrun) must be from 0 to 3"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "world size 0 (torchrun) must be at least 1"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "local rank 4 (torchrun) must be from 0 to "),
        ({**TORCHRUN, "LOCAL_RANK": "-1"}, "local rank -1 (torchrun) must be from 0 to "),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "local rank 2 (torchrun) must be from 0 to 1"),  # two ranks on this host
        ({**TORCHRUN, "MASTER_PORT": "0"}, "master port 0 (torchrun) must be from 1 to 65535"),
        ({**TORCHRUN, "MASTER_PORT": "65536"}, "master port 65536 (torchrun) must be from 1 to 65535"),
        ({**TORCHRUN, "RANK": "three"}, "RANK='three' in the environment must be a whole number"),
        ({**TORCHRUN, "WORLD_SIZE": "4.0"}, "WORLD_SIZE='4.0' in the environment must be a whole number"),
        ({**TORCHRUN, "LOCAL_RANK": "x"}, "LOCAL_RANK='x' in the environment must be a whole number"),
        ({**SLURM_STEP, "SLURM_PROCID": "7"}, "rank 7 (slurm) must be from 0 to 6"),
        ({**MPIRUN, "OMPI_COMM_WORLD_RANK": "2"}, "rank 2 (mpirun) must be from 0 to 1"),
    ],
)  # fmt: skip
def test_impossible_variables_are_refused(env: Env, words: str) -> None:
    assert words in refused(env)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rank", "2", "--world-size", "2", "--master-addr", "h"], "rank 2 (flags) must be from 0 to 1"),
        (["--rank", "0", "--world-size", "0", "--master-addr", "h"], "world size 0 (flags) must be at least 1"),
        ([*FLAGS[:6], "--master-port", "70000"], "master port 70000 (flags) must be from 1 to 65535"),
        ([*FLAGS[:6], "--master-port", "0"], "master port 0 (flags) must be from 1 to 65535"),
        ([*FLAGS, "--local-rank", "2"], "local rank 2 (flags) must be from 0 to 1"),
        (["--rank", "one"], "--rank: must be a whole number, but is 'one'"),
        (["--world_size"], "--world-size: a value must follow --world-size"),
    ],
)
def test_impossible_flags_are_refused(flags: list[str], words: str) -> None:
    assert words in refused({}, *flags)


@pytest.mark.parametrize("name", ["a/b", "../up", "", ".hidden", "x" * 129, "two words", "$(id)", "a\nb"])
def test_run_ids_that_are_no_plain_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="--run-id"):
        split_launch_options([f"--run-id={name}"])


def test_run_id_and_runs_folder_come_from_flags_then_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert split_launch_options([])[0] == LaunchOptions()
    monkeypatch.setenv("MUSTER_RUN_ID", "from-env")
    monkeypatch.setenv("MUSTER_RUNS_DIR", "/srv/runs")
    options, _ = split_launch_options([])
    assert (options.run_id, options.runs_dir) == ("from-env", "/srv/runs")
    options, _ = split_launch_options(["--run_id", "given", "--runs-dir=here"])
    assert (options.run_id, options.runs_dir) == ("given", "here")


# Loopback


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "localhost", "::1"])
def test_a_loopback_master_is_refused_on_another_host_than_rank_0s(address: str) -> None:
    words = refused({**TORCHRUN, "MASTER_ADDR": address})
    assert f"master address {address} (torchrun) is this host itself" in words
    assert "4 ranks are on more than one host" in words


def test_rank_0s_own_host_may_know_itself_as_loopback() -> None:
    me = who({**TORCHRUN, "RANK": "1", "MASTER_ADDR": "127.0.1.1"})  # Debian's line in /etc/hosts
    assert (me.master_addr, me.spans_hosts) == ("127.0.1.1", True)


def test_loopback_is_right_where_all_ranks_are_on_one_host() -> None:
    me = who({**TORCHRUN, "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"})
    assert not me.spans_hosts


def test_is_loopback_tells_this_host_from_others_and_from_unknown_names() -> None:
    assert [is_loopback(a) for a in ("127.0.0.1", "127.8.9.1", "::1")] == [True] * 3
    assert [is_loopback(a) for a in ("10.0.0.1", "1.2.3.4", "2001:db8::1", UNKNOWN)] == [False] * 4


@pytest.mark.parametrize("name", ["node1..cluster", ".cluster", "x" * 64])
def test_a_name_that_cannot_be_one_is_not_this_host(name: str) -> None:
    assert not is_loopback(name)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("linux[1,2]", "linux1"), ("rack[1-2]node[1-4]", "rack1node1"), ("n[1,3-5,08]", "n1"), ("alpha,beta", "alpha"),
        ("n[08-11],x", "n08"), ("n[008-011]", "n008"), ("rack[1-2]node[08,3]", "rack1node08"), ("solo", "solo"),
        ("gpu-[3-4].cluster", "gpu-3.cluster"), ("b10,b9", "b10"),
    ],
)  # fmt: skip
def test_the_first_host_of_a_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first
    assert who({**SLURM_STEP, "SLURM_STEP_NODELIST": hosts}).master_addr == first


# Names that last


def test_a_run_keeps_its_name_over_slurms_requeues() -> None:
    assert stable_run_id({"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "2"}) == "slurm-77"
    array = {"SLURM_JOB_ID": "80", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "3"}
    assert stable_run_id(array) == "slurm-77_3"
    assert stable_run_id({"SLURM_JOB_ID": ""}) is None
    assert stable_run_id({}) is None


@QUICK
@given(st.text())
def test_ports_stay_below_the_range_of_clients(job: str) -> None:
    assert 20000 <= port_of(job) < 32768
    assert port_of(job) == port_of(job)


def test_ports_of_many_jobs_spread() -> None:
    assert len({port_of(f"slurm {i}") for i in range(100)}) > 90
