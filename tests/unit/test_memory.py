"""Out of memory by the kernel's own count, in both versions of control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from train.launch import memory

V1_CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"
V2_EVENTS = "low 0\nhigh 12\nmax 400\noom 5\noom_kill 2\noom_group_kill 1\n"
V1_GROUPS = "12:pids:/a\n9:memory:/job/step\n8:cpu,cpuacct:/job\n0::/other\n"
V2_GROUPS = "0::/job/step\n"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up /proc and /sys/fs/cgroup."""
    roots = tuple(tmp_path / "cgroup" / name for name in ("", "memory", "unified"))
    monkeypatch.setattr(memory, "_ROOTS", roots)
    real = Path

    def path(*parts: str) -> Path:
        text = str(real(*parts))
        return real(tmp_path / text.lstrip("/")) if text.startswith("/proc/") else real(text)

    monkeypatch.setattr(memory, "Path", path)
    (tmp_path / "proc" / "7").mkdir(parents=True)
    return tmp_path


def put(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_version_1(machine: Path) -> None:
    put(machine / "proc/7/cgroup", V1_GROUPS)
    inner = put(machine / "cgroup/memory/job/step/memory.oom_control", V1_CONTROL)
    root = put(machine / "cgroup/memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    found = memory.counters(7)
    assert found == [inner, root]
    assert memory.kills(found) == 4


def test_version_2(machine: Path) -> None:
    put(machine / "proc/7/cgroup", V2_GROUPS)
    inner = put(machine / "cgroup/job/step/memory.events", V2_EVENTS)
    found = memory.counters(7)
    assert found == [inner]
    assert memory.kills(found) == 2  # not `oom`, not `oom_group_kill`


def test_in_a_container_the_path_is_the_hosts_but_its_own_group_is_mounted(machine: Path) -> None:
    put(machine / "proc/7/cgroup", "0::/system.slice/docker-abc.scope\n")
    own = put(machine / "cgroup/memory.events", V2_EVENTS)
    assert memory.counters(7) == [own]


def test_both_versions_side_by_side(machine: Path) -> None:
    put(machine / "proc/7/cgroup", V1_GROUPS)
    v1 = put(machine / "cgroup/memory/job/step/memory.oom_control", V1_CONTROL)
    v2 = put(machine / "cgroup/unified/other/memory.events", V2_EVENTS)
    assert set(memory.counters(7)) == {v1, v2}


def test_a_name_with_colons(machine: Path) -> None:
    put(machine / "proc/7/cgroup", "0::/job:1/a:b\n")
    inner = put(machine / "cgroup/job:1/a:b/memory.events", V2_EVENTS)
    assert memory.counters(7) == [inner]


def test_what_cannot_be_read_counts_nothing(machine: Path) -> None:
    assert memory.counters(8) == []
    put(machine / "proc/7/cgroup", V2_GROUPS)
    assert memory.counters(7) == []
    assert memory.kills([machine / "not there"]) == 0
    assert memory.kills([put(machine / "old", "oom_kill_disable 0\nunder_oom 0\n")]) == 0  # before Linux 4.13
    assert memory.kills([]) == 0


def test_this_machine() -> None:
    """The kernel's own files, read another way: the tests' control groups may have seen kills, or none."""
    files = memory.counters(os.getpid())
    lines = [line.split() for file in files for line in file.read_text().splitlines()]
    assert memory.kills(files) == sum(int(words[1]) for words in lines if words[0] == "oom_kill")
    assert files or not Path("/sys/fs/cgroup").exists()
