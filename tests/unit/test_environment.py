"""A rank's environment: the user's own, extended by what torchrun would set and by Muster's names."""

from __future__ import annotations

import dataclasses
import os

import pytest

from train import seam
from train.launch.environment import Place, rank_environment

PLACE = Place(
    node_rank=1, nnodes=2, nproc=2, first_rank=4, world_size=6, master_addr="10.0.0.1", master_port=29500,
    start_id="abc", restart_count=1, max_restarts=3, run_id="run-7", runs_dir="/runs", interface="eth0",
)  # fmt: skip


def test_the_whole_of_it() -> None:
    """By hand: host 1 of 2, with 4 ranks before it; its second rank."""
    made = rank_environment({"HOME": "/root"}, PLACE, 1, "/dev/shm/x/rank5.page")
    cores = max(1, len(os.sched_getaffinity(0)) // 2)
    assert made == {
        "HOME": "/root",
        "RANK": "5", "LOCAL_RANK": "1", "GROUP_RANK": "1", "ROLE_RANK": "5", "ROLE_NAME": "default",
        "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "ROLE_WORLD_SIZE": "6",
        "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RUN_ID": "abc",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "OMP_NUM_THREADS": str(cores),
        "GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0",
        "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1",
        "MUSTER_RUN_ID": "run-7", "MUSTER_RUNS_DIR": "/runs", "MUSTER_START_ID": "abc",
        "MUSTER_STATUS_PAGE": "/dev/shm/x/rank5.page", "TORCHELASTIC_ERROR_FILE": "/dev/shm/x/rank5.error.json",
    }  # fmt: skip


def test_names_that_torchrun_sets_are_those_of_torchs_own_agent() -> None:
    """Read from torch's source, so that a new torch that sets more is noticed."""
    import ast
    from pathlib import Path

    import torch.distributed.elastic.agent.server.local_elastic_agent as theirs

    named = {
        key.value
        for node in ast.walk(ast.parse(Path(theirs.__file__).read_text()))
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str) and key.value.isupper()
    }
    assert {"RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"} <= named
    made = set(rank_environment({}, PLACE, 0, "page"))
    assert named - made <= {
        "TORCHELASTIC_USE_AGENT_STORE",  # there is no such store
        "TORCHELASTIC_SIGNALS_TO_HANDLE",
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [("OMP_NUM_THREADS", "7"), ("GLOO_SOCKET_IFNAME", "ib0"), ("NCCL_SOCKET_IFNAME", "^lo"),
     ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"), ("PYTHONUNBUFFERED", ""), ("PATH", "/mine"), ("ODD\udcff", "\udcfe")],
)  # fmt: skip
def test_what_the_user_has_set_stays(name: str, value: str) -> None:
    assert rank_environment({name: value}, PLACE, 0, "page")[name] == value


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MUSTER_START_ID", "LOCAL_RANK"])
def test_who_a_rank_is_is_not_the_users_to_say(name: str) -> None:
    """An agent within another launcher's task."""
    assert rank_environment({name: "theirs"}, PLACE, 0, "page")[name] != "theirs"


def test_the_secret_and_the_agent_store_are_not_passed_on() -> None:
    made = rank_environment({seam.SECRET_FILE: "/secret", "TORCHELASTIC_USE_AGENT_STORE": "True"}, PLACE, 0, "page")
    assert seam.SECRET_FILE not in made
    assert "TORCHELASTIC_USE_AGENT_STORE" not in made


def test_one_host_needs_no_interface_and_a_run_without_name_gets_none() -> None:
    alone = dataclasses.replace(PLACE, interface=None, run_id=None)
    made = rank_environment({}, alone, 0, "page")
    assert not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", seam.RUN_ID} & set(made)


def test_threads_are_shared_among_the_ranks_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the cores this process may use, not of all there are."""
    for cores, nproc, threads in ((8, 2, "4"), (8, 3, "2"), (2, 4, "1"), (1, 1, "1")):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        made = rank_environment({}, dataclasses.replace(PLACE, nproc=nproc), 0, "page")
        assert made["OMP_NUM_THREADS"] == threads
