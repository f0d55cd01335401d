"""Ansible's YAML inventory: hosts in Ansible's own order, with its variables; mistakes named with their lines."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from train.errors import UsageError
from train.launch.inventory import InventoryHost, expand_range, is_ipv6, read_inventory

QUICK = settings(max_examples=80, deadline=None, database=None)
ANSIBLE = os.environ.get("ANSIBLE_INVENTORY") or shutil.which("ansible-inventory")

FULL = """\
all:
  vars: {ansible_user: root, slots: 1, x: all}
  hosts:
    lonely:
  children:
    controller:
      hosts:
        head: {ansible_host: 10.0.0.100}
    gpus:
      vars: {slots: 8, x: gpus}
      children:
        nodes:
zgroup:
  vars: {x: zgroup}
  hosts: {n9: }
nodes:
  hosts:
    n9: {slots: "4"}
    n[01:03:2]:2222: {ansible_host: fd00::1}
    rack[1:2]n[a:b]:
    "fd00::7":
    "[fd00::8]:22":
  children:
    more:
      hosts: extra
more:
  vars: {slots: 3}
  hosts:
    extra: {y: [1, 2]}
"""
ANCHORS = """\
nodes:
  hosts:
    a: &common {slots: 2, ansible_user: me}
    b:
      <<: *common
      slots: 3
    c: &third
      <<: *common
    d: *third
"""
NO_NODES = """\
controller: {hosts: {head: }}
second: {hosts: {b: , a: , head: }}
first: {hosts: {c: , a: }}
"""
GOOD = {"full": FULL, "anchors": ANCHORS, "no-nodes": NO_NODES}


def read(tmp_path: Path, text: str) -> list[InventoryHost]:
    path = tmp_path / "hosts.yml"
    path.write_text(text, encoding="utf-8")
    return read_inventory(path)


def refused(tmp_path: Path, text: str) -> str:
    """What is said of it, with the file's name left out."""
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text)
    return str(caught.value).replace(str(tmp_path / "hosts.yml"), "F")


# What is read


def test_hosts_of_the_group_nodes_in_their_order_then_those_of_groups_below(tmp_path: Path) -> None:
    names = [host.name for host in read(tmp_path, FULL)]
    assert names == ["n9", "n01", "n03", "rack1na", "rack1nb", "rack2na", "rack2nb", "fd00::7", "fd00::8", "extra"]


def test_without_a_group_nodes_all_but_the_controllers(tmp_path: Path) -> None:
    assert [host.name for host in read(tmp_path, NO_NODES)] == ["b", "a", "c"]
    assert [host.name for host in read(tmp_path, "all: {hosts: {z: , y: }}")] == ["z", "y"]


def test_variables_of_nearer_groups_go_before_those_of_farther_ones(tmp_path: Path) -> None:
    hosts = {host.name: host for host in read(tmp_path, FULL)}
    assert dict(hosts["n9"].variables) == {"ansible_user": "root", "slots": "4", "x": "zgroup"}
    assert dict(hosts["extra"].variables) == {"ansible_user": "root", "slots": 3, "x": "gpus", "y": [1, 2]}
    assert {name: host.slots(None) for name, host in hosts.items()} == {
        "n9": 4, "extra": 3, **dict.fromkeys(["n01", "n03", "rack1na", "rack1nb", "rack2na", "rack2nb"], 8),
        "fd00::7": 8, "fd00::8": 8,
    }  # fmt: skip


def test_addresses_and_ports(tmp_path: Path) -> None:
    hosts = {host.name: host for host in read(tmp_path, FULL)}
    assert (hosts["n01"].address, hosts["n01"].variables["ansible_port"]) == ("fd00::1", 2222)
    assert (hosts["fd00::8"].address, hosts["fd00::8"].variables["ansible_port"]) == ("fd00::8", 22)
    assert hosts["extra"].address == "extra"
    assert hosts["rack1na"].where.endswith("hosts.yml:20")


def test_other_hosts_may_reach_it_at_another_address_than_ssh_does(tmp_path: Path) -> None:
    (host,) = read(tmp_path, "nodes: {hosts: {a: {ansible_host: 192.0.2.7, address: 10.0.0.7}}}")
    assert host.address == "10.0.0.7"


def test_anchors_and_merges(tmp_path: Path) -> None:
    first, second, third, fourth = read(tmp_path, ANCHORS)
    assert (first.slots(None), second.slots(None)) == (2, 3)
    assert second.variables["ansible_user"] == "me"
    assert third.variables == fourth.variables == first.variables


def test_what_a_vault_or_template_hides_hurts_only_where_it_is_needed(tmp_path: Path) -> None:
    text = (
        "nodes:\n  hosts:\n    a:\n      ansible_password: !vault |\n        $ANSIBLE_VAULT;1.1\n      x: '{{ y }}'\n"
    )
    (host,) = read(tmp_path, text)
    assert host.variables == {"ansible_password": None, "x": "{{ y }}"}
    assert "F:3: host a: templates are not evaluated here: give slots a plain value" in refused(
        tmp_path, "nodes:\n  hosts:\n    a: {slots: '{{ gpus }}'}\n"
    )


@pytest.mark.skipif(ANSIBLE is None, reason="needs ansible-inventory on the PATH, or in ANSIBLE_INVENTORY")
@pytest.mark.parametrize("text", GOOD.values(), ids=GOOD)
def test_ansible_reads_the_same(tmp_path: Path, text: str) -> None:
    mine = read(tmp_path, text)
    assert ANSIBLE is not None
    done = subprocess.run(
        [ANSIBLE, "-i", tmp_path / "hosts.yml", "--list"], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    theirs: dict[str, Any] = json.loads(done.stdout)

    def members(name: str) -> list[str]:
        group = theirs.get(name, {})
        below = [host for child in group.get("children", []) for host in members(child)]
        return list(dict.fromkeys([*group.get("hosts", []), *below]))

    controllers = members("controller")
    names = members("nodes") or [host for host in members("all") if host not in controllers]
    assert [host.name for host in mine] == names
    for host in mine:
        assert dict(host.variables) == theirs["_meta"]["hostvars"].get(host.name, {})


# Ranges


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("node[0:2]", ["node0", "node1", "node2"]),
        ("node[01:12]", [f"node{i:02}" for i in range(1, 13)]),
        ("node[8:10]", ["node8", "node9", "node10"]),
        ("n[a:c]", ["na", "nb", "nc"]),
        ("n[y:B]", ["ny", "nz", "nA", "nB"]),
        ("n[:2]x", ["n0x", "n1x", "n2x"]),
        ("n[0:9:4]", ["n0", "n4", "n8"]),
        ("r[1:2]n[1:2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("plain", ["plain"]),
    ],
)
def test_ranges(pattern: str, names: list[str]) -> None:
    assert expand_range(pattern) == names


@pytest.mark.parametrize(
    "pattern", ["n[1,2]", "n[1:", "n[1:]", "n[01:100]", "n[a:3]", "n[ab:c]", "n[5:3]", "n[1:3:0]", "n]1["]
)
def test_ranges_that_are_none_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"range|ends"):
        expand_range(pattern)


@QUICK
@example(first=0, more=10, step=1, width=1)
@given(st.integers(0, 200), st.integers(0, 50), st.integers(1, 5), st.integers(1, 4))
def test_ranges_of_numbers(first: int, more: int, step: int, width: int) -> None:
    low, high = str(first).zfill(width), str(first + more).zfill(width)
    if low.startswith("0") and len(low) > 1 and len(low) != len(high):
        return
    names = expand_range(f"n[{low}:{high}:{step}].x")
    assert [int(name[1:-2]) for name in names] == list(range(first, first + more + 1, step))
    is_padded = low.startswith("0") and len(low) > 1  # a single 0 is a number like any other, to Ansible too
    assert not is_padded or {len(name) for name in names} == {len(names[0])}


@pytest.mark.parametrize(
    ("text", "is_one"), [("fd00::1", 1), ("[fd00::1]", 1), ("fe80::1%eth0", 1), ("n[1:2]", 0), ("cafe", 0)]
)
def test_addresses_of_version_6_are_told_from_ranges(text: str, is_one: int) -> None:
    assert is_ipv6(text) == bool(is_one)


# What is refused


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "F: empty; expected groups, such as `nodes:` with `hosts:`"),
        ("nodes:\n  host:\n    a:\n", "F:2: group nodes has no key 'host': expected one of hosts, children, vars"),
        (
            "nodes:\n  hosts:\n    - a\n    - b\n",
            "F:3: expected hosts of group nodes, each a key with a colon; found a list",
        ),
        ("nodes:\n  hosts: 3\n", "F:2: expected hosts of group nodes, each a key with a colon; found '3'"),
        ("- a\n", "F:1: expected groups, each a key with a colon; found a list: write `name:`, not `- name`"),
        ("nodes:\n  hosts:\n    a: 4\n", "F:3: expected variables of host a, each a key with a colon; found '4'"),
        ("nodes:\n  hosts:\n    a:\n    a: {slots: 3}\n", "F:4: a is there twice: hosts of group nodes must differ"),
        ("nodes:\n  hosts:\n    n[1,2]:\n", "F:3: host 'n[1,2]': a range is written [first:last]"),
        ("nodes:\n  hosts:\n    [a]: {}\n", "F:3: expected hosts of group nodes: a name, not a structure"),
        ("nodes:\n  hosts:\n  a:\n   slots: 2\n", "F:3: group nodes has no key 'a'"),
        ("nodes:\n  hosts:\n    a: {slots: 2\n", "F:4: no YAML: "),
        ("nodes:\n\thosts:\n", "F:2: no YAML: found character '\\t' that cannot start any token"),
        ("[nodes]\na slots=2\n", "becomes YAML by `ansible-inventory -i F --list --yaml`"),
        ("a: &x {children: {b: *x}}\n", "F: an alias (`*name`) stands within what it stands for"),
        ("nodes: {hosts: {}}\n", "F: no hosts in the group `nodes`"),
        ("controller: {hosts: {a: }}\n", "F: no hosts in the group `nodes`, nor any else"),
        ("a: {children: {b: }}\nb: {children: {a: }}\n", "F: group a is below itself: a > b > a"),
    ],
)
def test_mistakes_are_named_with_line_and_what_was_expected(tmp_path: Path, text: str, said: str) -> None:
    assert said in refused(tmp_path, text)


def test_all_mistakes_are_named_at_once(tmp_path: Path) -> None:
    said = refused(tmp_path, "nodes:\n  host: {a: }\n  hosts:\n    n[3:1]:\n    b: 2\n")
    assert [line.split(": ")[0] for line in said.splitlines()] == ["F:2", "F:4", "F:5"]


@pytest.mark.parametrize("value", ["four", "1.5", "-1", "true", "[1]"])
def test_slots_that_are_no_number_are_refused_where_used(tmp_path: Path, value: str) -> None:
    (host,) = read(tmp_path, f"nodes:\n  hosts:\n    a: {{slots: {value}}}\n")
    with pytest.raises(UsageError, match=r"hosts\.yml:3: host a: slots must be a whole number, but is"):
        host.slots(None)


def test_yaml_makes_no_objects(tmp_path: Path) -> None:
    (host,) = read(tmp_path, f"nodes:\n  hosts:\n    a: {{x: !!python/object/apply:os.mkdir ['{tmp_path}/made']}}\n")
    assert host.variables == {"x": None}
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("content", [b"\xff\xfe\x00nodes", b"\x00\x01\x02"])
def test_what_is_no_text_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.yml").write_bytes(content)
    with pytest.raises(UsageError):
        read_inventory(tmp_path / "x.yml")


@QUICK
@given(st.text(alphabet="nodeshtclirva: -{}[],'\"\n\t&*!|#1", max_size=120))
def test_any_text_is_read_or_refused_with_words(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "hosts.yml"
    path.write_text(text)
    try:
        read_inventory(path)
    except UsageError as error:
        assert str(path) in str(error)
