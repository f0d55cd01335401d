"""A lease that whoever watches from another machine renews, and the heartbeat that they read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.unit.test_node_options import LOCAL, RUN, accepted, refused
from train.launch.afar import Lease, Request, slowest, write_heartbeat
from train.seam import Phase

GONE = Request("the end of its lease (whoever watched is gone for 30 s)", now=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "lease"
    path.touch()
    return path


def renew(file: Path, time_s: float) -> None:
    os.utime(file, (time_s, time_s))


def test_a_lease_holds_as_long_as_it_is_touched_whatever_the_time_written_there(file: Path) -> None:
    lease = Lease(file, 30)
    for now_s in range(0, 200, 20):
        renew(file, 5000 - 100 * now_s)  # backwards, before 1970 too: the clock of whoever touches is wrong
        assert lease.look(now_s) is None
    assert lease.look(180 + 30) is None
    assert lease.look(180 + 31) == GONE
    assert lease.look(180 + 32) is None  # it was told


def test_a_lease_that_is_removed_ends_too(file: Path) -> None:
    lease = Lease(file, 30)
    assert lease.look(0) is None
    renew(file, 1)
    assert lease.look(10) is None
    file.unlink()
    assert lease.look(40) is None
    assert lease.look(41) == GONE


@pytest.mark.parametrize("name", ["lease", "none"])
def test_the_first_renewal_may_take_longer_since_other_hosts_are_waited_for(file: Path, name: str) -> None:
    lease = Lease(file.with_name(name), 30)
    assert lease.look(7) is None  # time began with its first look
    assert lease.look(127) is None
    assert lease.look(128) == Request("the end of its lease (whoever watched is gone for 120 s)", now=False)
    late = Lease(file, 30)
    assert late.look(0) is None
    renew(file, 1)
    assert late.look(119) is None
    assert late.look(149) is None
    assert late.look(150) == GONE


def test_without_patience_only_words_count(file: Path) -> None:
    lease = Lease(file, None)
    assert lease.look(0) is None
    assert lease.look(1e6) is None
    file.write_text("stop stop.yml, called by ann\n")
    assert lease.look(1e6) == Request("stop.yml, called by ann", now=False)


def test_words_ask_once_and_a_kill_comes_after_a_stop(file: Path) -> None:
    lease = Lease(file, 30)
    file.write_text("stop Ctrl-C\n")
    assert lease.look(0) == Request("Ctrl-C", now=False)
    renew(file, 1)
    assert lease.look(1) is None
    file.write_text("kill a second Ctrl-C\n")
    assert lease.look(2) == Request("a second Ctrl-C", now=True)
    assert lease.look(3) is None


@pytest.mark.parametrize(
    ("written", "who"),
    [
        (b"stop", "whoever holds the lease"),
        (b"stop \x1b[31ma\x00b\nkill c\n", "[31ma b"),
        (b"stop \xff\xfe" + b"x" * 1000, "\ufffd\ufffd" + "x" * 293),
        (b"stopp you", None),
        (b"\n", None),
    ],
)
def test_what_is_written_there_is_not_trusted(file: Path, written: bytes, who: str | None) -> None:
    lease = Lease(file, 30)
    assert lease.look(0) is None
    file.write_bytes(written)
    assert lease.look(1) == (None if who is None else Request(who, now=False))


def test_the_heartbeat_tells_of_the_slowest_rank(tmp_path: Path) -> None:
    file = tmp_path / "heartbeat"
    rows = [[0, True, 7, Phase.STEP, -1, -1.0], [1, True, 6, Phase.FIRST_STEP, -1, -1.0]]
    write_heartbeat(file, tmp_path / "runs" / "mine", "abc", slowest(rows))
    told = json.loads(file.read_text())
    assert told.pop("time") > 0
    assert told == {"run": str(tmp_path / "runs/mine"), "start_id": "abc", "step": 6, "phase": "first step"}
    write_heartbeat(file, None, "", slowest([[0, False, 0, Phase.STARTING, -1, -1.0]]))  # a foreign one's is not known
    told = json.loads(file.read_text())
    assert told.pop("time") > 0
    assert told == {"run": None, "start_id": None}
    assert [path.name for path in tmp_path.iterdir()] == ["heartbeat"]
    write_heartbeat(tmp_path / "none" / "heartbeat", None, "", {})  # a full or missing disk does not end the job


def test_a_lease_among_the_options(tmp_path: Path) -> None:
    found = accepted([*LOCAL, "--lease-file", str(tmp_path / "lease"), "--lease-s", "30", *RUN])
    assert found.lease is not None
    assert found.lease.look(0) is None
    (tmp_path / "lease").touch()
    assert (found.lease.look(1), found.lease.look(31), found.lease.look(32)) == (None, None, GONE)
    assert accepted([*LOCAL, *RUN]).lease is None
    assert refused([*LOCAL, "--lease-s", "30", *RUN]) == [
        "--lease-s needs --lease-file: the file that whoever watches touches"
    ]
    assert refused([*LOCAL, "--lease-file", "x", "--lease-s", "-1", *RUN]) == [
        "--lease-s -1 must be a number from 0 to 1e+09"
    ]
