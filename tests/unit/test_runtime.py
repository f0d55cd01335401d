"""One process's part of meeting: seeds, the choice of device, backend and interface, and who did not come."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.ranks import free_port
from train import meeting
from train import runtime as under_test
from train.config import RuntimeConfig
from train.errors import JoinError, UsageError
from train.identity import Identity
from train.runtime import Runtime
from train.seam import Phase
from train.seeds import mix

UNKNOWN = ".".join(["x" * 60] * 5)  # too long a name: no resolver asks for it
CPU = RuntimeConfig(device="cpu")


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment of no launcher; threads and process group as they were."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
    for name in ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    if dist.is_initialized():
        dist.destroy_process_group()


def alone(me: Identity | None = None) -> Runtime:
    return Runtime(me or Identity(), CPU, group=False)


# Seeds


def splitmix64(*numbers: int) -> int:
    """Steele, Lea and Flood 2014, as in Vigna's splitmix64.c, one output a number."""
    state = np.uint64(0)
    with np.errstate(over="ignore"):
        for number in numbers:
            z = state + np.uint64(number) + np.uint64(0x9E3779B97F4A7C15)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = z ^ (z >> np.uint64(31))
    return int(state)


def test_mixing_one_number_is_the_first_output_of_splitmix64() -> None:
    assert mix(1234567) == 6457827717110365317 >> 1  # the published test vector
    assert mix(0) == 0xE220A8397B1DCDAF >> 1


@pytest.mark.parametrize("numbers", [(0,), (1, 2, 3), (1337, 400, 7), (2**31 - 1, 10**9, 4095)])
def test_mixing_equals_a_second_implementation(numbers: tuple[int, ...]) -> None:
    assert mix(*numbers) == splitmix64(*numbers) >> 1
    assert 0 <= mix(*numbers) < 2**63


def test_near_numbers_give_far_seeds() -> None:
    seeds = {mix(seed, step, rank) for seed in range(8) for step in range(40) for rank in range(8)}
    assert len(seeds) == 8 * 40 * 8
    flips = [(mix(1, step, 0) ^ mix(1, step + 1, 0)).bit_count() for step in range(200)]
    assert 28 < sum(flips) / 200 < 35  # half of 63
    assert mix(1, 2) != mix(2, 1)


def test_reseeding_makes_randomness_a_function_of_seed_step_and_rank() -> None:
    def drawn(rank: int, seed: int, step: int) -> tuple[float, ...]:
        alone(Identity(rank=rank, world_size=1)).reseed(seed, step)
        return tuple(torch.rand(3).tolist())

    first = drawn(0, 7, 3)
    torch.rand(17)
    assert drawn(0, 7, 3) == first
    assert len({first, drawn(0, 7, 4), drawn(0, 8, 3), drawn(1, 7, 3)}) == 4


# Device


def device_of(
    monkeypatch: pytest.MonkeyPatch, gpus: int, me: Identity | None = None, wanted: Any = "auto"
) -> torch.device:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    runtime = Runtime(me or Identity(), RuntimeConfig(device=wanted), group=False)
    assert chosen == ([runtime.device] if runtime.device.type == "cuda" else [])
    return runtime.device


@pytest.mark.parametrize(
    ("gpus", "wanted", "rank", "local_rank", "expected"),
    [
        (0, "auto", 0, None, "cpu"), (0, "cpu", 0, 0, "cpu"), (4, "cpu", 3, 3, "cpu"), (4, "auto", 0, 0, "cuda:0"),
        (4, "auto", 7, 3, "cuda:3"), (4, "cuda", 7, 3, "cuda:3"), (4, "auto", 6, None, "cuda:2"),
        (1, "auto", 7, 3, "cuda:0"), (1, "cuda", 1, None, "cuda:0"),
    ],
)  # fmt: skip
def test_a_rank_takes_the_device_of_its_number_on_the_host(
    monkeypatch: pytest.MonkeyPatch, gpus: int, wanted: str, rank: int, local_rank: int | None, expected: str
) -> None:
    me = Identity(rank=rank, world_size=1, local_rank=local_rank)
    assert device_of(monkeypatch, gpus, me, wanted) == torch.device(expected)


def test_cuda_that_is_not_there_is_refused_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UsageError) as caught:
        device_of(monkeypatch, 0, Identity(rank=5, world_size=8), "cuda")
    words = str(caught.value)
    assert words.startswith("runtime.device is cuda, but rank 5 sees no GPU")
    assert torch.__version__ in words
    assert "CUDA_VISIBLE_DEVICES=''" in words
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES='unset'"):
        device_of(monkeypatch, 0, wanted="cuda")


def test_more_ranks_than_gpus_on_a_host_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UsageError, match=r"rank 9 is number 2 on this host, but the host shows it 2 GPUs: start at most 2"
    ):
        device_of(monkeypatch, 2, Identity(rank=9, world_size=12, local_rank=2))


@pytest.mark.parametrize(
    ("wanted", "gpus", "nccl", "expected"),
    [("auto", 0, True, "gloo"), ("auto", 2, True, "nccl"), ("auto", 2, False, "gloo"), ("gloo", 2, True, "gloo")],
)
def test_the_backend_follows_from_the_device(
    monkeypatch: pytest.MonkeyPatch, wanted: Any, gpus: int, nccl: bool, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    assert Runtime(Identity(), RuntimeConfig(backend=wanted), group=False).backend == expected


def test_threads_are_those_asked_for() -> None:
    Runtime(Identity(), CPU, threads=3, group=False)
    assert torch.get_num_threads() == 3
    Runtime(Identity(), CPU, group=False)
    assert torch.get_num_threads() == 1


# Interface

TWO = Identity(rank=0, world_size=2, master_addr="10.0.0.1", master_port=1, local_world_size=1)


def interfaces(
    monkeypatch: pytest.MonkeyPatch, me: Identity, routed: str | None, given: str | None = None
) -> list[str]:
    asked: list[Any] = []

    def towards(address: str, *, spans_hosts: bool) -> str | None:
        asked.append((address, spans_hosts))
        return routed

    monkeypatch.setattr(under_test, "interface_towards", towards)
    under_test._set_interface(me, RuntimeConfig(interface=given), spans_hosts=True)
    assert asked in ([], [(me.master_addr, True)])
    return [os.environ[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")]


def test_both_libraries_get_the_interface_that_routes_to_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interfaces(monkeypatch, TWO, "eth0") == ["eth0", "eth0"]


def test_a_users_own_variable_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert interfaces(monkeypatch, TWO, "eth0") == ["eth0", "ib0"]


def test_the_configs_interface_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert interfaces(monkeypatch, TWO, "eth0", given="lo") == ["lo", "lo"]


def test_an_interface_that_this_host_has_not_is_refused_before_it_waits_for_anybody() -> None:
    with pytest.raises(UsageError, match=r"runtime\.interface: this host has no 'bond77'; it has .*lo"):
        Runtime(TWO, RuntimeConfig(interface="bond77", join_timeout_s=1000))


def test_nothing_is_set_where_no_route_is_known_or_nobody_else_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interfaces(monkeypatch, TWO, None) == ["", ""]
    assert interfaces(monkeypatch, Identity(master_addr="10.0.0.1"), "eth0") == ["", ""]
    assert interfaces(monkeypatch, Identity(world_size=2), "eth0") == ["", ""]


# Two ranks with one GPU between them


@pytest.mark.parametrize(("cards", "backend"), [
    (["a gpu-1", "a gpu-2", "b gpu-1"], "nccl"), (["a gpu-1", "b gpu-1"], "nccl"), (["a gpu-1", "a gpu-1"], "gloo"),
])  # fmt: skip
def test_ranks_that_share_a_gpu_take_gloo_and_others_nccl(cards: list[str], backend: str) -> None:
    runtime = alone()
    runtime.backend = "nccl"
    runtime._share_gpus(cards, RuntimeConfig())
    assert runtime.backend == backend


def test_nccl_asked_for_with_a_shared_gpu_is_refused() -> None:
    runtime = alone()
    runtime.backend = "nccl"
    with pytest.raises(UsageError, match="nccl needs a GPU for each rank, but ranks 1, 2 share one"):
        runtime._share_gpus(["a gpu-1", "a gpu-2", "a gpu-2"], RuntimeConfig(backend="nccl"))


# Alone


def test_a_lone_process_needs_no_group() -> None:
    runtime = alone()
    assert not runtime.joined
    assert not dist.is_initialized()
    assert runtime.group(Phase.STEP) is None
    assert runtime.gather({"a": 1}) == [{"a": 1}]
    assert runtime.broadcast("word") == "word"
    numbers = torch.tensor([1.0, 2.0], requires_grad=True)
    assert runtime.sum(numbers, Phase.EVALUATION).tolist() == [1.0, 2.0]
    assert not runtime.sum(numbers, Phase.EVALUATION).requires_grad
    runtime.broadcast_tensor(torch.ones(1))
    runtime.agree({"config": "x"}, {"config": "y"})
    runtime.close()


def test_a_group_of_one_works_like_any_and_is_gone_afterwards() -> None:
    runtime = Runtime(Identity(), CPU, group=True)
    assert runtime.joined
    groups = [runtime.group(phase) for phase in (Phase.STEP, Phase.EVALUATION, Phase.SAVING)]
    assert len({id(group) for group in groups}) == 3
    assert runtime.gather(7) == [7]
    assert runtime.broadcast([1, 2]) == [1, 2]
    assert runtime.sum(torch.ones(2), Phase.EVALUATION).tolist() == [1.0, 1.0]
    runtime.close()
    assert not dist.is_initialized()
    assert not runtime.joined


def waits(runtime: Runtime) -> list[float]:
    """Seconds that steps, evaluation and saving wait for other ranks, as torch has them."""
    groups: list[Any] = [runtime.group(phase) for phase in (Phase.STEP, Phase.EVALUATION, Phase.SAVING)]
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def test_each_phase_has_its_own_time_out() -> None:
    config = RuntimeConfig(
        device="cpu", first_step_timeout_s=44, step_timeout_s=11, eval_timeout_s=22, save_timeout_s=33
    )
    runtime = Runtime(Identity(), config, group=True)
    assert waits(runtime) == [44, 22, 33]
    runtime.end_first_step()
    assert waits(runtime) == [11, 22, 33]
    runtime.close()


def test_a_first_step_may_take_at_least_as_long_as_the_others() -> None:
    config = RuntimeConfig(device="cpu", first_step_timeout_s=44, step_timeout_s=55)
    runtime = Runtime(Identity(), config, group=True)
    assert waits(runtime)[0] == 55
    runtime.close()


def test_under_an_agent_torch_s_time_outs_come_after_its_own() -> None:
    config = RuntimeConfig(
        device="cpu", first_step_timeout_s=44, step_timeout_s=11, eval_timeout_s=22, save_timeout_s=33
    )
    runtime = Runtime(Identity(), config, group=True, has_agent=True)
    assert waits(runtime) == [2 * 44 + 60, 2 * 22 + 60, 2 * 33 + 60]
    runtime.end_first_step()
    assert waits(runtime)[0] == 2 * 11 + 60
    runtime.close()


# Facts that must agree


def test_facts_that_differ_name_values_ranks_hosts_and_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [
        ("a", {"config": "1", "torch": "2.1", "data": "x"}),
        ("a", {"config": "1", "torch": "2.1", "data": "y"}),
        ("b", {"config": "1", "torch": "2.0", "data": "x"}),
    ]
    monkeypatch.setattr(Runtime, "gather", lambda self, value: told)
    with pytest.raises(UsageError) as caught:
        alone().agree(told[0][1], {"config": "C", "torch": "T", "data": "D"})
    assert caught.value.problems == [
        "torch differs between ranks: 2.1 on rank 0 (a), 1 (a); 2.0 on rank 2 (b): T",
        "data differs between ranks: x on rank 0 (a), 2 (b); y on rank 1 (a): D",
    ]


# Who did not come


def place(rank: int, world_size: int, port: int, host: str = "127.0.0.1") -> Identity:
    return Identity(rank=rank, world_size=world_size, master_addr=host, master_port=port)


def test_ranks_that_never_come_are_named_with_those_that_did() -> None:
    with pytest.raises(JoinError) as caught:
        meeting.meet(place(0, 4, free_port()), "node-a", 0.2)
    words = str(caught.value)
    assert words.startswith("rank 1, 2, 3 of 4 did not join within 0.2 s; rank 0 (node-a) did: ")
    assert "--runtime.join_timeout_s" in words


def test_a_first_rank_that_never_comes_is_named_where_the_launcher_keeps_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_port()
    agents = TCPStore("127.0.0.1", port, None, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    started, real = time.monotonic(), time.sleep

    def sleep(seconds: float) -> None:
        assert time.monotonic() - started < 6.0, "still waiting long after the time-out of 0.2 s"
        real(seconds)

    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(JoinError, match=r"rank 0 of 2 did not join within 0\.2 s; rank 1 \(node-b\) did"):
        meeting.meet(place(1, 2, port), "node-b", 0.2)
    del agents


def test_many_missing_ranks_are_counted_rather_than_listed() -> None:
    with pytest.raises(JoinError) as caught:
        meeting.meet(place(0, 100, free_port()), "node-a", 0.05)
    words = str(caught.value)
    assert words.startswith("rank 1, 2, 3, ")
    assert " more of 100 did not join within 0.05 s" in words
    assert ", 99" not in words


def test_a_port_in_use_is_told_as_such() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            UsageError, match=rf"port {port} is already in use on .*give all ranks another --master-port"
        ):
            meeting.meet(place(0, 2, port), "node-a", 0.5)


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("127.0.0.1", "nobody listens there"),
        (UNKNOWN, f"the name {UNKNOWN} is unknown"),
        ("node1..cluster", "the name node1..cluster is unknown"),
    ],
)
def test_a_master_that_cannot_be_reached_is_told_why(host: str, words: str) -> None:
    port = free_port()
    with pytest.raises(JoinError) as caught:
        meeting.meet(place(1, 2, port, host), "node-b", 0.3)
    assert str(caught.value).startswith(f"rank 1 could not reach rank 0 at {host}:{port} within 0.3 s ({words}")


def test_a_lone_rank_meets_nobody() -> None:
    assert meeting.meet(Identity(), "node-a", 0.1) is not None
