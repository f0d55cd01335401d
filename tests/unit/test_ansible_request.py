"""What a launch was asked for, before any host is touched: the plan, each agent's words, every mistake."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from train.launch.options import parse
from train.launch.plan import make_parser, plan_of
from train.launch.request import LEASE_S, device_of, launch, plan_from
from train.launch.spelling import misspelt, misspelt_by_hosts

HOSTS: dict[str, dict[str, Any]] = {
    "b": {"slots": 2, "ansible_host": "10.0.0.2"},
    "a": {"slots": "4", "ansible_host": "192.0.2.1", "address": "fd00::1"},
    "c": {"slots": 2},
}
PLAIN = {"runtime": "docker", "device": "cpu", "nodes": 0, "grace": 300, "share": False, "detach": "no"}


def asked(names: str = "bac", **more: Any) -> dict[str, Any]:
    return launch({**PLAIN, **more}, [*names], HOSTS, "ann on laptop", lambda words, world_size: [])


def problems(**more: Any) -> list[str]:
    told = asked(**more)["problems"]
    assert isinstance(told, list)
    return told


def test_the_plan_is_that_of_the_command_plan(tmp_path: Path) -> None:
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(
        "nodes:\n  hosts:\n"
        "    b: {slots: 2, ansible_host: 10.0.0.2}\n"
        "    a: {slots: '4', ansible_host: 192.0.2.1, address: 'fd00::1'}\n"
        "    c: {slots: 2}\n"
    )
    expected = plan_of(make_parser().parse_args(["--inventory", str(inventory)]), {})
    assert plan_from(["b", "a", "c"], HOSTS) == expected
    assert [(host.name, host.address, host.slots) for host in expected.hosts] == [
        ("b", "10.0.0.2", 2), ("a", "fd00::1", 4), ("c", "c", 2),
    ]  # fmt: skip
    assert expected.ranks(1) == range(2, 6)


def test_each_agent_understands_its_words_and_all_come_to_the_same_job(tmp_path: Path) -> None:
    told = asked(
        time_limit=3600, join_timeout="60", idle_timeout=5, max_restarts=2, run_id="mine",
        config="amp", overrides="--optim.lr 1e-3 --model.args '{\"a b\": 1}'",
    )  # fmt: skip
    assert told["problems"] == []
    assert told["command"] == ["run", "--config", "amp", "--optim.lr", "1e-3", "--model.args", '{"a b": 1}']
    assert (told["ours"], told["names"], told["lease_s"]) == (True, ["b", "a", "c"], LEASE_S)
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    for rank, name in enumerate("bac"):
        words = [*told["hosts"][name]["arguments"], "--lease-file", "/x/lease", "--", *told["command"]]
        found = parse(words, {"MUSTER_SECRET_FILE": str(secret)})
        terms = found.terms
        assert (found.node_rank, terms.plan.world_size, terms.plan.master_addr) == (rank, 8, "10.0.0.2")
        assert (terms.time_limit_s, terms.grace_s, terms.join_timeout_s) == (3600, 300, 60)
        assert (terms.idle_timeout_s, terms.max_restarts, found.run_id) == (5, 2, "mine")
        assert terms.name_of(1) == "a"
        assert found.lease is not None


def test_only_the_first_so_many_hosts() -> None:
    told = asked(nodes="2")
    assert (told["names"], told["world_size"], list(told["hosts"])) == (["b", "a"], 6, ["b", "a"])
    assert asked(nodes=0)["names"] == ["b", "a", "c"]


def test_beside_others_it_has_ports_of_its_own_else_those_of_the_plan() -> None:
    assert asked()["ports"] == asked()["ports"] == [*plan_from("bac", HOSTS).control_ports]
    assert len({asked(share="true")["ports"][0] for _ in range(5)}) > 1


def test_a_launch_that_nobody_watches_has_no_lease_to_end() -> None:
    told = asked(detach="true")
    assert told["lease_s"] is None
    assert "--lease-s" not in told["hosts"]["a"]["arguments"]
    assert "--lease-s" in asked()["hosts"]["a"]["arguments"]


def test_a_script_of_any_kind_and_a_config_of_this_machine(tmp_path: Path) -> None:
    told = asked(script="python 'my script.py' --x {files}")
    assert (told["command"], told["ours"]) == (["python", "my script.py", "--x", "{files}"], False)
    assert asked(script=["python", "a b.py"])["command"] == ["python", "a b.py"]
    config = tmp_path / "mine.yaml"
    config.write_text("optim: {lr: 0.1}\n")
    told = asked(config=str(config))
    assert told["command"] == ["run", "--config", "{files}/config.yaml"]
    assert told["files"] == {"config.yaml": "optim: {lr: 0.1}\n"}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"nodes": 4}, "nodes: 4 are asked for, but there are 3: b, a, c"),
        ({"nodes": "two"}, "nodes: 'two' must be a whole number from 1 to 1e+09"),
        ({"nodes": -1}, "nodes: '-1' must be a whole number from 1 to 1e+09"),
        ({"time_limit": "1h"}, "time_limit: '1h' must be a number of seconds from 1 to 1e+09"),
        ({"grace": "nan"}, "grace: 'nan' must be a number of seconds from 0 to 1e+09"),
        ({"share": "maybe"}, "share: 'maybe' must be true or false"),
        ({"runtime": "dockr"}, "runtime: 'dockr' must be one of docker, venv; did you mean docker?"),
        ({"device": "gpu"}, "device: 'gpu' must be one of auto, cpu, cuda; did you mean cpu?"),
        ({"script": "python 'x"}, "script: \"python 'x\" has no end: No closing quotation"),
        ({"script": "python x", "config": "amp", "overrides": "--a 1"},
         "script and config and overrides: a script has no recipe; put its options behind it"),
        ({"overrides": "--run_id x"}, "overrides: give run_id in place of --run_id"),
        ({"run_id": "a/b"}, "run_id: 'a/b' must be letters, digits, '.', '_' or '-' (at most 128)"),
        ({"forks": 2}, "forks: 2 hosts are watched at a time, but there are 3: add -f 3"),
    ],
)  # fmt: skip
def test_what_cannot_be(more: dict[str, Any], words: str) -> None:
    assert problems(**more) == [words]


def test_all_that_is_wrong_is_told_at_once_config_and_hosts_included() -> None:
    def check(words: list[str], world_size: int) -> list[str]:
        return [f"{words} for {world_size}"]

    told = launch({**PLAIN, "nodes": 1, "share": "x", "overrides": "--a 1"}, ["b"], HOSTS, "ann", check)
    assert told["problems"] == ["share: 'x' must be true or false", "['--config', 'ddp', '--a', '1'] for 2"]
    hosts: Mapping[str, Mapping[str, Any]] = {"x": {}, "y": {"slots": "many"}}
    told = launch(PLAIN, ["x", "y"], hosts, "ann", check)
    assert told["problems"] == [
        "inventory: host x has no `slots:` (its number of ranks)",
        "inventory: host y: slots must be a whole number, but is 'many'",
    ]


def test_misspelt_variables_with_the_nearest_one() -> None:
    known = ["nodes", "time_limit", "muster_image"]
    assert misspelt(["nodes", "ansible_user", "muster_image"], known) == []
    assert misspelt(["node", "timelimit", "zzz"], known) == [
        "node: no such variable; did you mean nodes?",
        "timelimit: no such variable; did you mean time_limit?",
        "zzz: no such variable",
    ]


def test_the_device_follows_from_what_all_hosts_have() -> None:
    assert device_of("auto", {"a": 0, "b": 0}) == ("cpu", [])
    assert device_of("auto", {"a": 8, "b": 8}) == ("cuda", [])
    assert device_of("cpu", {"a": 8}) == ("cpu", [])
    device, wrong = device_of("auto", {"a": 8, "b": 0})
    assert (device, len(wrong)) == ("cuda", 1)
    assert "a has GPUs and b has none" in wrong[0]


def test_misspelt_variables_of_an_inventory_ours_refused_and_others_told() -> None:
    known = ["muster_image", "docker_packages", "slurm_partition"]
    given = {
        "a": ["muster_imgae", "slot", "docker_package", "inventory_hostname", "address", "muster_cluster_network"],
        "b": ["muster_imgae", "addresses", "slurm_partitoin", "my_docker_packages", "muster_zzzzzzzz"],
    }
    certain, likely = misspelt_by_hosts(given, known)
    assert certain == [
        "muster_imgae: no such variable (inventory, a, b); did you mean muster_image?",
        "muster_zzzzzzzz: no such variable (inventory, b)",
    ]
    assert likely == [
        "docker_package: no such variable (inventory, a); did you mean docker_packages?",
        "slot: no such variable (inventory, a); did you mean slots?",
        "slurm_partitoin: no such variable (inventory, b); did you mean slurm_partition?",
    ]


def test_variables_of_a_site_that_cannot_be_and_no_value_is_shown() -> None:
    good = {"A": "x", "B_1": 2, "C": 1.5, "D": True, "E": "two\nlines"}
    bad = {"1A": "hidden", "A B": "hidden", "L": ["hidden"], "N": None, "Z": "hidden\0"}
    assert problems(job_environment=good) == []
    told = problems(job_environment={**good, **bad})
    assert told == [
        "job_environment: '1A' is no name of a variable: letters, digits and _",
        "job_environment: 'A B' is no name of a variable: letters, digits and _",
        "job_environment: L must be a text or a number, and is list",
        "job_environment: N must be a text or a number, and is NoneType",
        "job_environment: Z has a zero byte in it, which no variable can have",
    ]
    assert problems(job_environment="A=1") == ["job_environment: it must be a table: NAME: value"]
